"""Command line of ``embedrock demo``. Nothing here imports a framework, so that ``--help`` works without it."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Collection
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import embedrock as er
from embedrock.bench.harness.workload import MAX_ROWS
from embedrock.demo.options import (
    DIM_MULTIPLES,
    FULL,
    ClickOptions,
    DemoOptions,
    DlrmOptions,
    LogOptions,
    SourceOptions,
    StreamOptions,
)
from embedrock.errors import RequirementError
from embedrock.terminal.arguments import count, place, size, writable_file

DESCRIPTION = """
Train a recommender whose embeddings are Embedrock tables.

Without --data, on clicks drawn from planted factors: 20 million users and 2 million items, and a known best AUC. Its
tables lie on disk, behind RAM for a tenth of the rows that it trains. Killed and started again, it goes on.
With --data FILE, on a log of your own, one interaction per line: user item [rating] [timestamp], separated by tabs,
commas or whitespace, with or without a header line. The last item of each user is held out and ranked among 100
items that the user never touched (HR@10, NDCG@10); the same model on nn.Embedding + SparseAdam runs beside.

With --ranks N, the demo without --data trains in N processes under torch.distributed and DistributedDataParallel. Each
has its part of the rows, and of every batch; the AUC is that of one process.

With --keras, the demo without --data trains by Keras' fit, on TensorFlow, and compares nothing.

With --stream, on items that are born and die, as strings, by a table of open ids with and without admission and
eviction: AUC, rows, RAM and disk of each day (--png FILE draws them). It needs no framework. With --data FILE the
items of a log as above, in the order of their times, cut into --days, beside as many that were not taken.

With --dlrm, a DLRM of 26 tables with the sizes of MLPerf's, cut to --max-rows and --max-bag; --full: not cut, 204
million rows of 128, 314 GB with Adam's state, behind 4 GiB of RAM. On impressions drawn from planted effects; or with
--data FILE on a log in Criteo's format: label, 13 numbers and 26 hexadecimal strings, separated by tabs.
"""
KINDS: dict[type[DemoOptions], str] = {ClickOptions: "", LogOptions: "with --data", DlrmOptions: "with --dlrm"}
KINDS |= {StreamOptions: "with --stream"}
# Where options apply, by the demos that have them.
LIMITS = {
    frozenset(KINDS): None,
    frozenset({ClickOptions}): "only without --data FILE",
    frozenset({LogOptions}): "only with --data FILE",
    frozenset({DlrmOptions}): "only with --dlrm",
    frozenset({StreamOptions}): "only with --stream",
    frozenset({ClickOptions, LogOptions}): "not with --dlrm",
    frozenset({ClickOptions, DlrmOptions}): "only without --data FILE, or with --dlrm",
    frozenset({LogOptions, DlrmOptions}): None,
}
REQUIRED = {"torch": ("torch", "tqdm"), "keras": ("tensorflow", "keras", "tqdm")}


def add_parser(subparsers: argparse._SubParsersAction[ArgumentParser]) -> None:
    """Add the ``demo`` command to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    parser = subparsers.add_parser(
        "demo",
        help="train a recommender, on planted clicks or on your own log",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # an option not given is absent, and the dataclass's value holds
    )
    parser.add_argument("--data", type=_readable_file, metavar="FILE", help="a log of interactions")
    parser.add_argument("--dlrm", action="store_true", help="train a DLRM on 26 tables")
    parser.add_argument("--stream", action="store_true", help="a stream whose items are born and die")
    parser.add_argument("--full", action="store_true", help="MLPerf's sizes, only with --dlrm")
    parser.add_argument("--keras", action="store_true", help="train with Keras, on TensorFlow, only without --data")
    _add_option(parser, "model", choices=DIM_MULTIPLES, text="the model")
    _add_option(parser, "dim", type=count, metavar="N", text="columns of the rows")
    _add_option(parser, "batch_size", type=count, metavar="N", text="interactions in a batch")
    _add_option(parser, "lr", type=_positive, metavar="X", text="learning rate of Adam")
    _add_option(parser, "epochs", type=count, metavar="N", text="passes over the log")
    _add_option(parser, "steps", type=count, metavar="N", text="batches")
    _add_option(parser, "users", type=_rows, metavar="N", text="users, such as 20M")
    _add_option(parser, "items", type=_rows, metavar="N", text="items")
    _add_option(parser, "max_rows", type=_rows, metavar="N", text="the most rows of a table")
    _add_option(parser, "max_bag", type=count, metavar="N", text="the most ids of a feature")
    _add_option(parser, "ranks", type=count, metavar="N", text="processes that share the rows out, and train together")
    _add_option(parser, "steps_a_day", type=count, metavar="N", text="batches of each day")
    _add_option(parser, "days", type=count, metavar="N", text="days of the stream")
    _add_option(parser, "alive", type=count, metavar="N", text="items that are there at a time")
    text = "draw the days, only with --stream; it needs matplotlib"
    parser.add_argument("--png", type=writable_file, metavar="FILE", help=text)
    text = "take the ids of a log modulo N (default: as they are), only with --dlrm --data"
    parser.add_argument("--ids-below", type=count, metavar="N", help=text)
    text = "folder of the tables, which is kept (default: one in the user's cache, removed at the end)"
    parser.add_argument(
        "--path", type=lambda text: Path(place(text)), metavar="FOLDER", help=f"{text}, only without --data"
    )
    text = "RAM of the tables, such as 512MiB (default: a tenth of what the rows trained take)"
    parser.add_argument("--memory", type=size, metavar="SIZE", help=f"{text}, only without --data")
    parser.add_argument("--in-ram", action="store_true", help="no disk: tables in RAM, only without --data")
    _add_option(parser, "seed", type=_seed, metavar="N", text="of data, first values and negatives")
    parser.add_argument("--threads", type=count, metavar="N", help="threads of the framework and of Embedrock each")
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="leave PyTorch's own embeddings out")
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="write all numbers to FILE")
    parser.set_defaults(run=_run, parser=parser)


def _add_option(parser: ArgumentParser, name: str, text: str, **how: Any) -> None:
    """Add an option whose help says its default in each demo, and where it applies."""
    defaults = {
        kind: field.default
        for kind in KINDS
        for field in fields(kind)
        if field.name == name and field.default is not MISSING and field.default is not None
    }
    if (limit := _limit(name)) is not None:
        text += f", {limit}"
    shown: dict[str, str] = {}
    for kind, value in defaults.items():
        shown.setdefault(f"{value:,}" if isinstance(value, int) else str(value), KINDS[kind])
    (first, _), *others = shown.items()
    values = ", ".join([first, *(f"{when} {value}" for value, when in others)])
    parser.add_argument("--" + name.replace("_", "-"), help=f"{text} (default: {values})", **how)


def _limit(name: str) -> str | None:
    """Return where an option applies; None: everywhere."""
    having = {kind for kind in KINDS if name in {field.name for field in fields(kind)}}
    return LIMITS[frozenset(having)]


def _run(arguments: Namespace) -> int:
    options = _options(arguments)
    # For all contenders alike, and before torch starts its threads: where they wait by spinning, few cores and other
    # load make a step take 60 ms instead of 6.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    is_keras = isinstance(options, ClickOptions) and options.keras
    if is_keras:
        os.environ["KERAS_BACKEND"] = "tensorflow"
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not isinstance(options, StreamOptions):
        _check_packages("keras" if is_keras else "torch")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that lines arrive as they come through a pipe too
    results = _demo(options)
    if "json" in arguments:
        circumstances = {"embedrock": er.__version__, "command": sys.argv[1:], "options": vars(options)}
        text = json.dumps(circumstances | results, indent=1, default=str)
        arguments.json.write_text(text + "\n")
    return 0


def _demo(options: DemoOptions) -> dict[str, Any]:
    # Only the one that is asked for is imported.
    if isinstance(options, LogOptions):
        from embedrock.demo import log

        return log.run(options)
    if isinstance(options, DlrmOptions):
        from embedrock.demo import dlrm

        return dlrm.run(options)
    if isinstance(options, StreamOptions):
        from embedrock.demo import stream

        return stream.run(options)
    assert isinstance(options, ClickOptions)
    from embedrock.demo import clicks

    return clicks.run(options)


def _check_packages(extra: str) -> None:
    for package in REQUIRED[extra]:
        try:
            import_module(package)
        except ImportError as error:
            raise RequirementError(
                f'the demo needs {package}, which does not import: {error}. pip install "embedrock[{extra},cli]"'
            ) from error


def _options(arguments: Namespace) -> DemoOptions:
    """Return the options of the demo that was asked for, or exit as argparse does where they do not fit it."""
    kind = _kind(arguments)
    names = {field.name for field in fields(kind)}
    given: dict[str, Any] = {
        name: value for name, value in vars(arguments).items() if name not in ("run", "parser", "json")
    }
    for name in given.keys() - names:
        arguments.parser.error(f"argument --{name.replace('_', '-')}: {_misfit(name, kind)}")
    if "full" in given:
        given = FULL | given
    options = kind(**given)
    if isinstance(options, SourceOptions) and options.in_ram and (options.path or options.memory):
        arguments.parser.error("argument --in-ram: does not go with --path or --memory, which are of tables on disk")
    if isinstance(options, ClickOptions) and options.keras and not options.compare:
        arguments.parser.error("argument --no-compare: does not go with --keras, which compares nothing")
    if isinstance(options, ClickOptions) and options.keras and options.ranks > 1:
        arguments.parser.error("argument --ranks: does not go with --keras: processes of PyTorch train together")
    if isinstance(options, ClickOptions | LogOptions):
        _check_dim(options, arguments.parser)
    if isinstance(options, DlrmOptions):
        _check_dlrm(options, given.keys(), arguments.parser)
    if isinstance(options, StreamOptions) and options.data:
        _refuse_sizes(("steps_a_day", "alive"), given.keys(), arguments.parser)
    return options


def _kind(arguments: Namespace) -> type[DemoOptions]:
    for name, kind in (("stream", StreamOptions), ("dlrm", DlrmOptions), ("data", LogOptions)):
        if name in arguments:
            return kind
    return ClickOptions


def _misfit(name: str, kind: type[DemoOptions]) -> str:
    """Return why a demo does not have an option."""
    if kind in (DlrmOptions, StreamOptions):
        return f"does not go with --{'dlrm' if kind is DlrmOptions else 'stream'}"
    if (limit := _limit(name)) == LIMITS[frozenset({ClickOptions, DlrmOptions})]:
        limit = "only without --data FILE"
    return f"only goes {str(limit).removeprefix('only ')}"


def _check_dim(options: ClickOptions | LogOptions, parser: ArgumentParser) -> None:
    multiple = DIM_MULTIPLES[options.model]
    if options.dim % multiple:
        parser.error(f"argument --dim: must be a multiple of {multiple} for {options.model}: got {options.dim}")


def _check_dlrm(options: DlrmOptions, given: Collection[str], parser: ArgumentParser) -> None:
    if options.data is None and options.ids_below:
        parser.error("argument --ids-below: only goes with --data FILE, whose ids it is about")
    if options.data and not options.full:
        _refuse_sizes(("max_rows", "max_bag"), given, parser)


def _refuse_sizes(names: Collection[str], given: Collection[str], parser: ArgumentParser) -> None:
    for name in names:
        if name in given:
            parser.error(f"argument --{name.replace('_', '-')}: only goes without --data FILE, which says how many")


def _rows(text: str) -> int:
    rows = count(text)
    if rows > MAX_ROWS:
        raise ArgumentTypeError(f"must be at most {MAX_ROWS:,}: got {text!r}")
    return rows


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be a whole number of at least 0: got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"must be a number above 0: got {text!r}")
    return value


def _readable_file(text: str) -> Path:
    path = Path(text)
    if not path.exists() or path.is_dir():
        raise ArgumentTypeError(f"must be a file that exists: got {text!r}")
    return path
