"""`Parser`: argparse's, which asks whether something else was meant where a name is mistyped."""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from typing import Any

from embedrock.wording import did_you_mean


class Parser(argparse.ArgumentParser):
    """Reads a command line. Where it does not know a name, it asks about the one that is most like it."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the arguments, and no others: what a command does not know is an error of that command."""
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
    """Add a command, which `run` runs, and its option --json unless `json_text` is ""; return its parser."""
    parser = subparsers.add_parser(name, help=text, description=description or f"{text[0].upper()}{text[1:]}.")
    if json_text:
        parser.add_argument("--json", action="store_true", help=json_text)
    parser.set_defaults(run=run, parser=parser)
    return parser


def print_result(arguments: Namespace, result: dict[str, Any], text: str) -> int:
    """Print what a command did, as JSON or as text; return the exit status 0."""
    print(json.dumps(result, indent=1) if arguments.json else text)
    return 0
