"""The command ``embedrock``, also ``python -m embedrock``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import embedrock
from embedrock.errors import EmbedrockError

FAILED = 1
INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status.

    0: done. 1: an error, told in one line. 2: a command line that argparse refused. 3: `verify` found damage.
    130: Ctrl-C.

    Args:
        argv: the words after ``embedrock``; None: those of this process.
    """
    try:
        arguments = _parser().parse_args(argv)
        return arguments.run(arguments)
    except EmbedrockError as error:
        print(f"embedrock: error: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # The reader of our output left (`| head`). Python would complain when it flushes the rest on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # a full disk, a missing file: what it names says enough
        print(f"embedrock: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not break into the leaving
        print("\nembedrock: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    # The programs are imported here, so that Ctrl-C while they load is caught as well.
    import embedrock.bench.cli as bench
    from embedrock.cli import tables
    from embedrock.demo import command as demo

    parser = argparse.ArgumentParser("embedrock", description=(embedrock.__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"embedrock {embedrock.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo.add_parser(subparsers)
    bench.add_parser(subparsers)
    tables.add_parsers(subparsers)
    return parser
