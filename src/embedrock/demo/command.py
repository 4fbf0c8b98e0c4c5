"""Command line of ``embedrock demo``. Nothing here imports a framework, so that ``--help`` works without it."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import embedrock as er
from embedrock.bench.harness.workload import MAX_ROWS
from embedrock.demo.options import DIM_MULTIPLES, ClickOptions, DemoOptions, LogOptions
from embedrock.errors import RequirementError
from embedrock.terminal.arguments import count, place, size, writable_file

DESCRIPTION = """
Train a recommender whose embeddings are Embedrock tables.

Without --data, on clicks drawn from planted factors: 20 million users and 2 million items, and a known best AUC. Its
tables lie on disk, behind RAM for a tenth of the rows that it trains. Killed and started again, it goes on.
With --data FILE, on a log of your own, one interaction per line: user item [rating] [timestamp], separated by tabs,
commas or whitespace, with or without a header line. The last item of each user is held out and ranked among 100
items that the user never touched (HR@10, NDCG@10); the same model on nn.Embedding + SparseAdam runs beside.

With --keras, the demo without --data trains by Keras' fit, on TensorFlow, and compares nothing.
"""
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
    parser.add_argument("--keras", action="store_true", help="train with Keras, on TensorFlow, only without --data")
    _add_option(parser, "model", choices=DIM_MULTIPLES, text="the model")
    _add_option(parser, "dim", type=count, metavar="N", text="columns of the rows")
    _add_option(parser, "batch_size", type=count, metavar="N", text="interactions in a batch")
    _add_option(parser, "lr", type=_positive, metavar="X", text="learning rate of Adam")
    _add_option(parser, "epochs", type=count, metavar="N", text="passes over the log")
    _add_option(parser, "steps", type=count, metavar="N", text="batches")
    _add_option(parser, "users", type=_rows, metavar="N", text="users, such as 20M")
    _add_option(parser, "items", type=_rows, metavar="N", text="items")
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
    """Add an option whose help says its default in either demo, and where it applies."""
    defaults = {
        kind: field.default
        for kind in (ClickOptions, LogOptions)
        for field in fields(kind)
        if field.name == name and field.default is not MISSING
    }
    if ClickOptions not in defaults:
        text += ", only with --data"
    if LogOptions not in defaults:
        text += ", only without --data"
    values = dict.fromkeys(f"{value:,}" if isinstance(value, int) else str(value) for value in defaults.values())
    parser.add_argument("--" + name.replace("_", "-"), help=f"{text} (default: {', with --data '.join(values)})", **how)


def _run(arguments: Namespace) -> int:
    options = _options(arguments)
    # For all contenders alike, and before torch starts its threads: where they wait by spinning, few cores and other
    # load make a step take 60 ms instead of 6.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    is_keras = isinstance(options, ClickOptions) and options.keras
    if is_keras:
        os.environ["KERAS_BACKEND"] = "tensorflow"
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _check_packages("keras" if is_keras else "torch")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that lines arrive as they come through a pipe too
    if isinstance(options, LogOptions):
        from embedrock.demo import log

        results = log.run(options)
    else:
        from embedrock.demo import clicks

        results = clicks.run(options)
    if "json" in arguments:
        circumstances = {"embedrock": er.__version__, "command": sys.argv[1:], "options": vars(options)}
        text = json.dumps(circumstances | results, indent=1, default=str)
        arguments.json.write_text(text + "\n")
    return 0


def _check_packages(extra: str) -> None:
    for package in REQUIRED[extra]:
        try:
            import_module(package)
        except ImportError as error:
            raise RequirementError(
                f'the demo needs {package}, which does not import: {error}. pip install "embedrock[{extra},cli]"'
            ) from error


def _options(arguments: Namespace) -> ClickOptions | LogOptions:
    """Return the options of the demo that was asked for, or exit as argparse does where they do not fit it."""
    kind = LogOptions if "data" in arguments else ClickOptions
    names = {field.name for field in fields(kind)}
    given = {name: value for name, value in vars(arguments).items() if name not in ("run", "parser", "json")}
    for name in given.keys() - names:
        when = "without" if kind is LogOptions else "with"
        arguments.parser.error(f"argument --{name.replace('_', '-')}: only goes {when} --data FILE")
    options = kind(**given)
    if isinstance(options, ClickOptions) and options.in_ram and (options.path or options.memory):
        arguments.parser.error("argument --in-ram: does not go with --path or --memory, which are of tables on disk")
    if isinstance(options, ClickOptions) and options.keras and not options.compare:
        arguments.parser.error("argument --no-compare: does not go with --keras, which compares nothing")
    _check_dim(options, arguments.parser)
    return options


def _check_dim(options: DemoOptions, parser: ArgumentParser) -> None:
    multiple = DIM_MULTIPLES[options.model]
    if options.dim % multiple:
        parser.error(f"argument --dim: must be a multiple of {multiple} for {options.model}: got {options.dim}")


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
