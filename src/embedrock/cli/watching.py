"""``embedrock top | report``: activity of tables in training, from the statistics files of their processes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import textwrap
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embedrock.cli.histories import FIELDS, LEAST, here, member_tables, now, of_split, state, which_pool
from embedrock.cli.pages import page
from embedrock.cli.terminal.arguments import add_command, number, place, print_result, writable_file
from embedrock.cli.terminal.tables import Field, format_count, format_lines, format_number, format_table
from embedrock.errors import ArgumentError
from embedrock.system.platform import keys
from embedrock.system.sizes import format_bytes
from embedrock.table.numbers import StatsFile, files_in, runtime_folder

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the other screen of a terminal, without a cursor
HOME, CLEAR, PLAIN, BOLD, DIM, GREEN = "\x1b[H", "\x1b[J", "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[1;32m"
RESIZED_S = 0.25  # until another size of the terminal is seen
PLACES = "of a table or group, or one that has some (default: those in RAM of this user's processes)"
BAR = 30  # length of the longest bar, in characters


def add_parsers(subparsers: Any) -> None:
    """Add the commands to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    text = "what tables in training do now, as er.keep_stats writes it"
    parser = add_command(subparsers, "top", _top, text, json_text="print JSON, once")
    parser.add_argument("folder", type=place, nargs="?", default=str(runtime_folder()), metavar="FOLDER", help=PLACES)
    parser.add_argument("--once", action="store_true", help="print it once (default: again and again)")
    parser.add_argument("--every", type=number, default=2.0, metavar="S", help="seconds (default: 2)")
    text = "write them for Prometheus again and again, or --once, as node_exporter reads them"
    parser.add_argument("--prometheus", type=writable_file, metavar="FILE", help=text)
    text = "one HTML file, which needs no network, with plots of what tables did, in one run or several"
    parser = add_command(subparsers, "report", _report, text, json_text="")
    text = f"of a run: {PLACES}. Several runs lie over each other"
    parser.add_argument("folders", type=place, nargs="*", metavar="FOLDER", help=text)
    parser.add_argument("--out", type=writable_file, default=Path("report.html"), metavar="FILE", help="to write")


def _histories(folder: str) -> list[StatsFile]:
    found = []
    for path in files_in(folder):
        try:
            found.append(StatsFile.read(path))
        except FileNotFoundError:  # it has ended meanwhile
            continue
        except ValueError as error:
            raise ArgumentError(str(error)) from None
    if not found:
        what = f"in or beside {folder!r} are no numbers of tables"
        if not Path(folder).exists() and folder != str(runtime_folder()):
            what = f"there is no folder {folder!r}"
        raise ArgumentError(f"{what}. Call er.keep_stats() in the program that trains them, and name their folder.")
    return found


# ---------------------------------------------------------------- now


def _top(arguments: Namespace) -> int:
    if arguments.prometheus is not None:
        return _publish(arguments)
    lines = _lines(arguments.folder)
    if arguments.json or arguments.once or not sys.stdout.isatty():
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        return print_result(arguments, {"tables": lines}, _text(lines, width))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which leaves the terminal as it was, like Ctrl-C
    watch(lambda: _lines(arguments.folder), max(arguments.every, 0.1))
    return 0


def watch(lines: Callable[[], Sequence[dict[str, Any]]], every: float) -> None:
    """Show the activity of tables on the whole terminal again and again, as wide as it is, until `q` or Ctrl-C."""
    print(ENTER, end="")
    try:
        with keys() as key:
            while True:
                found, end, size = lines(), time.monotonic() + every, None
                while (left := end - time.monotonic()) > 0:
                    if size != (size := shutil.get_terminal_size()):
                        print(HOME + screen(found, *size) + CLEAR, end="", flush=True)
                    if key(min(left, RESIZED_S)) in ("q", "Q"):
                        return
    finally:
        print(LEAVE, end="", flush=True)


def screen(lines: Sequence[dict[str, Any]], columns: int, rows: int) -> str:
    """Return what `watch` shows: as many lines as there is room for, in colors."""
    rows, shown = max(rows, 4), _text(lines, columns).split("\n")
    if len(shown) > rows - 1:
        shown[rows - 2 :] = [f"... {format_count(len(shown) - rows + 2, 'line')} more in a higher window, or by --once"]
    dim = {2 + at for at, one in enumerate(lines) if not one["is_live"]}
    styles = [
        BOLD if not at else DIM if at in dim else GREEN if line.startswith("  >") else ""
        for at, line in enumerate(shown)
    ]
    cut = [f"{style}{line[:columns]}{PLAIN}\x1b[K" for style, line in zip(styles, shown, strict=True)]
    return "\n".join([*cut, f"{DIM}{'q leaves'[:columns]}{PLAIN}\x1b[K"])


def _publish(arguments: Namespace) -> int:
    while True:
        write_metrics(_lines(arguments.folder), arguments.prometheus)
        if arguments.once:
            return 0
        time.sleep(max(arguments.every, 0.1))


def write_metrics(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Replace a file atomically by one with a gauge for each number of `now`, labelled by table and process."""
    gauges: defaultdict[str, list[str]] = defaultdict(list)
    for line in lines:
        name = line["table"].translate({ord("\\"): r"\\", ord('"'): r"\"", ord("\n"): r"\n"})
        own = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "pid"}
        for key, value in (own | {f"share_{key}": share for key, share in line["shares"].items()}).items():
            gauges[key].append(f'embedrock_{key}{{pid="{line["pid"]}",table="{name}"}} {float(value)}\n')
    head = "# HELP embedrock_{0} {0} of a table, as `embedrock top` shows it\n# TYPE embedrock_{0} gauge\n"
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text("".join(head.format(key) + "".join(rows) for key, rows in gauges.items()), encoding="utf-8")
    written.replace(path)


def _lines(folder: str) -> list[dict[str, Any]]:
    lines = [one for one in map(now, _histories(folder)) if one is not None]
    return sorted(lines, key=lambda one: 0.0 if one["is_live"] else one["age_s"])  # those in training first


def _text(lines: Sequence[dict[str, Any]], width: int | None = None) -> str:
    """Return the activity of tables for people; with a `width`, tables and sentences are no wider."""
    fields = list(FIELDS)
    for head in LEAST if width else ():
        if len(format_lines(fields, lines).split("\n")[1]) > (width or 0):
            fields.remove(next(field for field in fields if field.head == head))
    return "\n".join(
        [format_lines(fields, lines), "", *_details(lines, [one for one in FIELDS if one not in fields], width)]
    )


def _details(lines: Sequence[dict[str, Any]], folded: Sequence[Field], width: int | None) -> list[str]:
    """Return the lines below the table: columns without room there, times of phases, curves and members."""
    parts = []
    for one in lines:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in one["shares"].items() if share >= 0.005)
        told = state(one)
        parts += _wrapped(f"{one['table']}, of the time: {shares or 'nothing'}{told and f' ({told})'}", width)
        cells = [f"{field.head} {cell}" for field in folded if (cell := field.cell(one))]
        parts += _wrapped(f"  {', '.join(cells)}", width) if cells else []
        parts += [line for number, pool in enumerate(one["pools"]) for line in _bars(one, number, pool, width)]
        parts += [row for line in of_split(one) for row in _wrapped(line, width)]
        for head, rows in member_tables(one["members"]):
            parts += ["", *(f"  {line}" for line in format_table(head, rows).splitlines())]
    return [*parts, *_wrapped("Phases are those of all tables of the process; some run beside others.", width)]


def _wrapped(line: str, width: int | None) -> list[str]:
    return textwrap.wrap(line, max(width, 20), subsequent_indent="    ") if width else [line]


def _bars(line: dict[str, Any], number: int, pool: dict[str, Any], width: int | None) -> list[str]:
    """Return the curve of a pool, a bar for each size."""
    if not pool.get("curve"):
        return []
    of, new = f"{pool['rows']:,.0f}", f"{format_number(pool['new'])} of them are new"
    head = f"  rows missed a step, of {of}, by memory={which_pool(line, number)}; {new}"
    most = max(missed for _, missed, _ in pool["curve"]) or 1.0
    place, bar = here(pool), max(1, min(BAR, (width or 99) - 34))
    return _wrapped(head, width) + [
        f"  {'>' if at == place else ' '} {format_bytes(nbytes):>10} {'#' * round(bar * missed / most):{bar}} "
        f"{format_number(missed)}{' you are here' if at == place else ''}"
        for at, (nbytes, missed, _) in enumerate(pool["curve"])
    ]


def _report(arguments: Namespace) -> int:
    folders = arguments.folders or [str(runtime_folder())]
    names = [Path(folder).resolve().name for folder in folders]
    labels = names if len(set(names)) == len(names) else folders
    runs = {label: _histories(folder) for label, folder in zip(labels, folders, strict=True)}
    arguments.out.write_text(page(runs), encoding="utf-8")
    of = f" of {format_count(len(runs), 'run')}" if len(runs) > 1 else ""
    print(f"{arguments.out}: {format_count(sum(map(len, runs.values())), 'table')}{of}")
    return 0
