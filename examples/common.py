"""What the examples share and embeddings have no part in: the command line, the folder of a training, the AUC."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er

REPORTS = 4  # times that a training measures its AUC
NOTE = "options.json"  # the options that a folder was made with
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class DataError(er.EmbedrockError, ValueError):
    """A file or folder that an example cannot use."""


def make_parser(program: str | None) -> ArgumentParser:
    """Return a parser that shows the docstring of a program, and the default of each option."""
    form = type("Form", (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter), {})
    parser = ArgumentParser(description=program, formatter_class=form)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of data and first values")
    parser.add_argument("--threads", type=count, metavar="N", help="of the framework and of Embedrock each")
    return parser


def count(text: str) -> int:
    """Read a positive whole number or a size: 4000000, 20M, 360MiB.

    Example:
        >>> count("20M"), count("2KiB")
        (20000000, 2048)
    """
    parts = re.fullmatch(r"([\d_.]+(?:e\d+)?)\s*([a-z]*)", text.lower())
    if not parts or parts[2] not in FACTORS or (value := float(parts[1]) * FACTORS[parts[2]]) < 1 or value % 1:
        raise ArgumentTypeError(f"must be a positive whole number, such as 8192, 20M or 360MiB: got {text!r}")
    return int(value)


def run(main: Callable[[list[str]], object], words: list[str]) -> int:
    """Run a program; return its exit status. Print an error of data or disk in one line, without a traceback."""
    try:
        main(words)
    except (er.EmbedrockError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def facts(lines: Mapping[str, str]) -> str:
    """Return a line for each fact, its name in front."""
    return "\n".join(f"{name:8} {text}" for name, text in lines.items())


def mib(nbytes: float) -> str:
    """Return a number of bytes in MiB."""
    return f"{nbytes / 2**20:,.1f} MiB"


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the chance that a positive scores above a negative; a tie counts one half.

    Example:
        >>> auc(np.array([1, 0, 1, 0]), np.array([3.0, 1.0, 2.0, 2.0]))
        0.875
    """
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite: got NaN or Inf, which have no order. A lower --lr may help.")
    values, inverse = np.unique(scores, return_inverse=True)
    positives = np.bincount(inverse, weights=labels > 0, minlength=len(values))
    negatives = np.bincount(inverse, minlength=len(values)) - positives
    below = np.cumsum(negatives) - negatives
    return float(positives @ (below + negatives / 2) / (positives.sum() * negatives.sum()))


def reports(first: int, last: int, times: int = REPORTS) -> list[int]:
    """Return the steps after `first` at which a training of `last` steps is measured, `times` in all."""
    return [step for step in (last * part // times for part in range(1, times + 1)) if step > first]


# ---------------------------------------------------------------- a training on disk


def add_training_options(parser: ArgumentParser) -> None:
    """Add the options of a training on planted clicks."""
    for name, default, text in (
        ("users", 20_000_000, "rows of the table of users"),
        ("items", 2_000_000, "rows of the table of items"),
        ("dim", 64, "columns of the rows"),
        ("steps", 3000, "batches"),
        ("batch-size", 8192, "clicks in a batch"),
        ("memory", "360MiB", "RAM of the tables; the default is a tenth of the rows that train"),
    ):
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=text)
    parser.add_argument("--lr", type=float, default=0.005, metavar="X", help="learning rate of Adam")
    parser.add_argument("--path", type=Path, metavar="FOLDER", help="folder of the tables, which stays")
    parser.add_argument("--in-ram", action="store_true", help="no disk")


def describe(options: Namespace) -> None:
    """Print what a training on planted clicks will do."""
    clicks = f"{options.users:,} users x {options.items:,} items, seed {options.seed}"
    model = f"matrix factorization, dim {options.dim}, Adam(lr={options.lr:g}), {options.steps:,} batches of "
    print(facts({"clicks": clicks, "model": f"{model}{options.batch_size:,}"}))


def cache_folder() -> Path:
    """Return the folder for files on disk that nobody gave a place, which is there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embedrock"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def training_folder(options: Namespace, *same: str) -> Iterator[Path | None]:
    """Hold the folder of a training: a new one, or that of a training with the same options, which goes on.

    Args:
        options: `path`: the folder, which stays; None: one in the user's cache, which is removed after the last step.
        same: names of the options that must be the same for a training to go on.

    Yields:
        The folder; None: the tables are in RAM.

    Raises:
        DataError: the folder is of a training with other options.
    """
    if options.in_ram:
        yield None
        return
    folder: Path = options.path or cache_folder() / "demo"
    _claim(folder, {name: getattr(options, name) for name in same})
    print(f"on disk  in {folder}, with {mib(options.memory)} of RAM for the tables")
    yield folder
    size = mib(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    if options.path is None:
        shutil.rmtree(folder)
    print(facts({"files": f"{size}, " + (f"in {folder}" if options.path else "removed now; --path FOLDER keeps them")}))


def _claim(folder: Path, wanted: dict[str, Any]) -> None:
    note = folder / NOTE
    found = json.loads(note.read_text()) if note.exists() else wanted
    others = ", ".join(f"{name}={value}" for name, value in found.items() if wanted.get(name) != value)
    if others:
        raise DataError(
            f"{str(folder)!r} has the files of a training with other options ({others}). Choose those again to go on "
            "with it, pass another --path, or remove that folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(wanted))


def summary(stats: Mapping[str, float], options: Namespace, steps: int, seconds: float) -> str:
    """Return what a training on planted clicks cost.

    Args:
        stats: of its tables, together.
        options: of the training.
        steps: of this process.
        seconds: of them.
    """
    rows, touched = options.users + options.items, int(stats["rows_touched"])
    lines = {"trained": f"{steps:,} steps in {seconds:.1f} s, {steps / max(seconds, 1e-9):.1f} it/s"}
    if not options.in_ram:
        asked = max(1, stats["hits"] + stats["misses"])
        reads = stats["reads"] / max(1, steps)
        lines["disk"] = f"{stats['hits'] / asked:.1%} of the rows were in RAM, {reads:,.0f} reads a step"
    lines["rows"] = f"{touched:,} of {rows:,} touched ({touched / rows:.0%})"
    lines["RAM"] = f"{mib(stats['bytes_used'])} for the tables"
    return facts(lines)
