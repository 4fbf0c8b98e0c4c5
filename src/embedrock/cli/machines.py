"""``embedrock machine``: what this machine and a folder's disk can do, measured once and kept."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from embedrock.planner import machine as machines
from embedrock.planner.machine import Machine
from embedrock.terminal.arguments import folder
from embedrock.terminal.progress import say
from embedrock.terminal.tables import format_facts


def add_parser(subparsers: Any) -> None:
    """Add the command to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    text = "what this machine can do: memory, cores, a folder's disk, steps of tables"
    parser: ArgumentParser = subparsers.add_parser(
        "machine", help=text, description=f"{text[0].upper()}{text[1:]}. Measured in a minute or less, and kept."
    )
    where = "on whose disk tables shall be (default: that of the last time, or the current one)"
    parser.add_argument("folder", nargs="?", type=folder, metavar="FOLDER", help=where)
    parser.add_argument("--again", action="store_true", help="measure anew")
    text = "measure once more, and keep what was faster: for machines whose own pace changes"
    parser.add_argument("--more", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> int:
    found = measured(arguments.folder, arguments.again, arguments.more)
    facts = {**machines.told(found), "kept in": str(machines.cache_file())}
    print(json.dumps(found.to_json(), indent=1) if arguments.json else format_facts(facts))
    return 0


def measured(where: Path | None, again: bool = False, more: bool = False) -> Machine:
    """Return what was measured before, if it was of the same disk, or measure it now; `more` does both."""
    known = None if again else machines.load()
    is_same = known is not None and (where is None or _same_disk(where, known.folder))
    if known is not None and is_same and not more:
        return known
    start = time.perf_counter()
    found = machines.measure(where or Path(), lambda text: say(f"measuring: {text}", transient=True))
    found = found.joined(known) if known is not None and is_same else found
    machines.save(found)
    say(f"measured in {time.perf_counter() - start:.0f} s")
    return found


def _same_disk(where: Path, other: str) -> bool:
    try:
        return where.stat().st_dev == Path(other).stat().st_dev
    except OSError:
        return False
