"""Values on a command line: counts, numbers, sizes, files. Each reader is a ``type=`` of argparse."""

from __future__ import annotations

import argparse
import json
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from embedrock.errors import ArgumentError, did_you_mean
from embedrock.system.paths import local_path
from embedrock.system.sizes import parse_bytes

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9}


def count(text: str) -> int:
    """Read a positive whole number: 4000000, 4_000_000, 4M, 1e9.

    Example:
        >>> count("4M")
        4000000
    """
    digits = text.replace("_", "").lower()
    factor = SUFFIXES.get(digits[-1:], 1)
    try:
        value = float(digits[:-1] if factor > 1 else digits) * factor
    except ValueError:
        value = math.nan
    if not value.is_integer() or value < 1:
        raise ArgumentTypeError(f"must be a positive whole number, such as 8192, 4M or 1e9: got {text!r}")
    return int(value)


def number(text: str, least: float = 0.0) -> float:
    """Read a finite number of at least `least`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise ArgumentTypeError(f"must be a number of at least {least:g}: got {text!r}")
    return value


def size(text: str) -> int:
    """Read a number of bytes: 512MiB, 1GB, 2G, 25% of the RAM."""
    try:
        return parse_bytes(text)
    except ArgumentError:
        raise ArgumentTypeError(f'must be a size such as "512MiB": got {text!r}') from None


def place(text: str, kind: str = "folder") -> str:
    """Read the name of a file or folder on this machine, which may not exist."""
    try:
        return local_path(text, "it", kind)
    except ArgumentError as error:
        raise ArgumentTypeError(str(error)) from None


file = partial(place, kind="file")


def folder(text: str) -> Path:
    """Read the name of a folder that exists."""
    path = Path(text)
    if not path.is_dir():
        raise ArgumentTypeError(f"must be a folder that exists: got {text!r}")
    return path


def writable_file(text: str) -> Path:
    """Read the name of a file for results, and check at once that it can be written."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ArgumentTypeError(f"must be a file in a folder that exists: got {text!r}")
    return path


class Parser(argparse.ArgumentParser):
    """A parser of command lines. For an unknown name it suggests the most similar one."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the arguments, and no unknown ones: an unknown argument is an error of its command."""
        found, unknown = super().parse_known_args(None if args is None else list(args), namespace)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            hint = did_you_mean(options[0], self._option_string_actions) if options else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}.{hint}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += "." + did_you_mean(str(value), map(str, action.choices or ()))
            raise


def add_command(
    subparsers: Any,
    name: str,
    run: Callable[[Namespace], int],
    text: str,
    description: str = "",
    json_text: str = "print JSON",
) -> ArgumentParser:
    """Add a command that `run` executes, with an option --json unless `json_text` is ""; return its parser."""
    parser = subparsers.add_parser(name, help=text, description=description or f"{text[0].upper()}{text[1:]}.")
    if json_text:
        parser.add_argument("--json", action="store_true", help=json_text)
    parser.set_defaults(run=run, parser=parser)
    return parser


def print_result(arguments: Namespace, result: dict[str, Any], text: str) -> int:
    """Print the result of a command, as JSON or as text; return the exit status 0."""
    print(json.dumps(result, indent=1) if arguments.json else text)
    return 0
