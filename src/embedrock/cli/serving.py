"""``embedrock publish | follow``: publish rows of a table, and look at what arrives elsewhere."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from typing import Any

from embedrock.cli.places import check_there, place_of
from embedrock.cli.terminal.arguments import add_command, number, place, print_result
from embedrock.serving.publisher import KEEP_HOURS, PublishOptions, publish_last
from embedrock.serving.subscriber import PATIENCE, Subscriber
from embedrock.spec.codecs import CODECS
from embedrock.spec.spec import STORAGES


def add_parsers(subparsers: Any) -> None:
    """Add the commands to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    text = "write the rows of the last commit, without optimizer state, to a folder to be served elsewhere"
    parser = add_command(subparsers, "publish", _publish, text)
    parser.add_argument("table", metavar="TABLE", help="its folder, or FOLDER#NAME of a group's")
    parser.add_argument("folder", type=place, metavar="DEST", help="a folder for published rows only")
    text = "of the published weights (default: the table's own)"
    parser.add_argument("--dtype", choices=(*STORAGES, *CODECS), help=text)
    hours = f"hours that files stay after the last step that needs them (default: {KEEP_HOURS:g})"
    parser.add_argument("--keep-hours", type=number, default=KEEP_HOURS, metavar="H", help=hours)
    parser.add_argument("--every", type=number, metavar="S", help="seconds between two steps (default: publish once)")
    parser = add_command(subparsers, "follow", _follow, "show which published step a folder has, and what is missing")
    parser.add_argument("folder", type=place, metavar="FOLDER", help="of published rows, or a copy of one")
    parser.add_argument("--every", type=number, metavar="S", help="seconds between two looks (default: look once)")
    text = f"how long a step may wait for its files (default: {PATIENCE})"
    parser.add_argument("--patience", default=PATIENCE, metavar="TIME", help=text)


def _publish(arguments: Namespace) -> int:
    check_there(arguments.table)
    source, folder = place_of(arguments.table), os.path.abspath(arguments.folder)
    options = PublishOptions(arguments.dtype, arguments.keep_hours)
    names = None if source.member is None else {source.member: source.member}
    while True:
        made = publish_last(os.path.abspath(source.folder), folder, options, names)
        if made.is_new or not arguments.every:
            kind = "all rows" if made.is_base else "changes"
            text = f"{folder}: step {made.number}, {kind}: {made.rows} written, {made.gone} deleted"
            text = text if made.is_new else f"{folder}: nothing new since step {made.number}"
            print_result(arguments, made._asdict(), text)
        if not arguments.every:
            return 0
        time.sleep(arguments.every)


def _follow(arguments: Namespace) -> int:
    with Subscriber(arguments.folder, patience=arguments.patience) as served:
        while True:
            waiting = served.waiting
            told = {"number": served.number, "step": served.step_number, "age": served.age}
            told["waiting"] = None if waiting is None else waiting._asdict()
            shown = "nothing yet" if served.number is None else f"step {served.number}, {served.age:.0f} s old"
            missing = f"; waits for step {waiting.number}: {waiting.reason}" if waiting else ""
            print_result(arguments, told, f"{arguments.folder}: {shown}{missing}")
            if not arguments.every:
                return 0
            time.sleep(arguments.every)
            served.refresh()
