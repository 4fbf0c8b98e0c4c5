"""The command ``embedrock``, also ``python -m embedrock``."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import embedrock
from embedrock.cli.terminal.arguments import Parser
from embedrock.errors import EmbedrockError

DONE = 0
FAILED = 1
INTERRUPTED = 130  # exit status of a program that Ctrl-C ended, by convention of shells
EXAMPLES = """
examples:
  embedrock import vectors.csv vectors.rock      make a table of a file of vectors
  embedrock info vectors.rock                    what it is: rows, rule, size, last commit
  embedrock verify vectors.rock                  read every file, check every checksum

`embedrock help COMMAND` says more about each.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status.

    0: done. 1: an error, reported in one line. 2: a command line that argparse refused. 3: `verify` found damage, or
    nothing fits the limits of `plan`. 130: Ctrl-C.

    Args:
        argv: the words after ``embedrock``; None: those of this process.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that lack letters of a path or a name
    try:
        try:
            arguments = _parser().parse_args(argv)
            return arguments.run(arguments)
        finally:
            sys.stdout.flush()  # detects a closed pipe here, and not when Python ends
    except BrokenPipeError:
        # The reader of our output left (`| head`). Python would complain when it flushes the rest on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (EmbedrockError, OSError) as error:  # of a full disk, or a missing file, the error's name is enough
        print(f"embedrock: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the exit
        print("\nembedrock: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    # Commands are imported here, so that Ctrl-C during the import is caught as well.
    from embedrock.cli import curves, plans, serving, tables, vocabularies, watching

    description = (embedrock.__doc__ or "").partition("\n")[0]
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("embedrock", description=description, epilog=EXAMPLES, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"embedrock {embedrock.__version__}")
    subparsers: Any = parser.add_subparsers(title="commands", metavar="COMMAND")
    tables.add_parsers(subparsers)
    serving.add_parsers(subparsers)
    vocabularies.add_parsers(subparsers)
    curves.add_parser(subparsers)
    plans.add_parser(subparsers)
    watching.add_parsers(subparsers)
    helper = subparsers.add_parser("help", help="print this, or what a command does", add_help=False)
    helper.add_argument("of", metavar="COMMAND", nargs="?", choices=list(subparsers.choices))
    helper.set_defaults(run=lambda arguments: _help(subparsers.choices.get(arguments.of, parser)))
    parser.set_defaults(run=lambda arguments: _help(parser))  # as pip does: no request, and no failure
    return parser


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return DONE
