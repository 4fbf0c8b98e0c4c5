"""The command ``embedrock reshard``: the rows of a table in parts shared out over another number of processes."""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentParser, Namespace

from embedrock.machine.sizes import parse_bytes
from embedrock.shards.resharding import MEMORY, reshard
from embedrock.terminal.arguments import count, place
from embedrock.terminal.tables import format_count


def add_parser(subparsers: argparse._SubParsersAction[ArgumentParser]) -> None:
    """Add the command to `subparsers`."""
    text = "share the rows of a table in parts out over another number of processes"
    more = (
        "They go over in batches, with their optimizer state. The parts that there were stay until all new ones are "
        "durable. What was cut off is continued by the same command."
    )
    parser = subparsers.add_parser("reshard", help=text, description=f"{text[0].upper()}{text[1:]}. {more}")
    parser.add_argument("table", type=place, metavar="TABLE", help="folder that the parts are in")
    parser.add_argument("--shards", type=count, required=True, metavar="N", help="how many parts there are to be")
    parser.add_argument("--memory", default=MEMORY, metavar="SIZE", help=f"RAM of what is written (default: {MEMORY})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_reshard)


def _reshard(arguments: Namespace) -> int:
    done = reshard(arguments.table, arguments.shards, parse_bytes(arguments.memory, "--memory"))
    parts = f"{format_count(done.before, 'part')} before, {done.after} now"
    at = "" if done.step is None else f", as of step {done.step}"
    text = f"{arguments.table}: {parts}; {format_count(done.rows, 'row')} with records{at}"
    print(json.dumps(done._asdict(), indent=1) if arguments.json else text)
    return 0
