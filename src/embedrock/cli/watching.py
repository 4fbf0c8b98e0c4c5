"""``embedrock top | report``: activity of tables in training, from the statistics files of their processes."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from embedrock.cli.histories import FIELDS, here, member_tables, now, of_split, page, which_pool
from embedrock.cli.terminal.arguments import add_command, import_extra, number, place, print_result, writable_file
from embedrock.cli.terminal.tables import format_count, format_lines, format_number, format_table
from embedrock.errors import ArgumentError
from embedrock.system.sizes import format_bytes
from embedrock.table.numbers import StatsFile, files_in, runtime_folder

CLEAR = "\x1b[H\x1b[J"
LABELS = ("table", "pid")  # labels of Prometheus
BAR = 30  # length of the longest bar, in characters


def add_parsers(subparsers: Any) -> None:
    """Add the commands to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    parser = _add(
        subparsers, "top", _top, "what tables in training do now, as er.keep_stats writes it", "print JSON, once"
    )
    parser.add_argument("--once", action="store_true", help="print it once (default: again and again)")
    parser.add_argument("--every", type=number, default=2.0, metavar="S", help="seconds (default: 2)")
    text = "write them for Prometheus again and again, or --once, as node_exporter reads them (needs prometheus_client)"
    parser.add_argument("--prometheus", type=writable_file, metavar="FILE", help=text)
    text = "one HTML file, which needs no network, with plots of what tables did"
    parser = _add(subparsers, "report", _report, text, "")
    parser.add_argument("--out", type=writable_file, default=Path("report.html"), metavar="FILE", help="to write")


def _add(subparsers: Any, name: str, run: Any, text: str, json_text: str) -> ArgumentParser:
    parser = add_command(subparsers, name, run, text, json_text=json_text)
    text = "of a table or group, or one that has some (default: those in RAM of this user's processes)"
    parser.add_argument("folder", type=place, nargs="?", default=str(runtime_folder()), metavar="FOLDER", help=text)
    return parser


def _histories(folder: str) -> list[StatsFile]:
    found = []
    for path in files_in(folder):
        try:
            found.append(StatsFile.read(path))
        except FileNotFoundError:  # it has ended meanwhile
            continue
        except ValueError as error:
            raise ArgumentError(str(error)) from None
    if not found and not Path(folder).exists() and folder != str(runtime_folder()):
        raise ArgumentError(
            f"there is no folder {folder!r}. Name that of a table or group which is trained with er.keep_stats(), or "
            "one that has some of them."
        )
    if not found:
        raise ArgumentError(
            f"in or beside {folder!r} are no numbers of tables. Call er.keep_stats() in the program that trains them."
        )
    return found


# ---------------------------------------------------------------- now


def _top(arguments: Namespace) -> int:
    if arguments.prometheus is not None:
        return _publish(arguments)
    lines = _lines(arguments.folder)
    if arguments.json or arguments.once or not sys.stdout.isatty():
        return print_result(arguments, {"tables": lines}, _text(lines))
    watch(lambda: _lines(arguments.folder), max(arguments.every, 0.1))
    return 0


def watch(lines: Callable[[], Sequence[dict[str, Any]]], every: float) -> None:
    """Show the activity of tables on a terminal repeatedly until Ctrl-C: with rich, if it is installed."""
    try:
        from rich.live import Live
    except ImportError:
        while True:
            print(CLEAR + _text(lines()), flush=True)
            time.sleep(every)
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(_pretty(lines()), refresh=True)
            time.sleep(every)


def _pretty(lines: Sequence[dict[str, Any]]) -> Any:
    """Return the content of `_text` for rich: with colors, and a table as wide as the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for field in FIELDS:
        table.add_column(Text(field.head), justify="left" if field is FIELDS[0] else "right")
    for one in lines:
        style = "" if one["is_live"] else "dim"
        table.add_row(*(Text(field.cell(one), style) for field in FIELDS))
    details = Text("\n".join(["", *_details(lines)]), no_wrap=True)
    details.highlight_regex(r"(?m)^  >.*$", "bold green")
    details.highlight_regex(r"(?m)^\S.*, of the time:", "bold")
    details.highlight_regex(r"no sample for .*\?", "yellow")
    return Group(table, details)


def _publish(arguments: Namespace) -> int:
    prometheus_client = import_extra("prometheus_client", "metrics", "--prometheus")
    while True:
        write_metrics(prometheus_client, _lines(arguments.folder), arguments.prometheus)
        if arguments.once:
            return 0
        time.sleep(max(arguments.every, 0.1))


def write_metrics(client: Any, lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Replace a file atomically by one with a gauge for each number, labelled by table and process.

    Args:
        client: the package prometheus_client.
        lines: of tables, as ``embedrock top --json`` prints them.
        path: file.
    """
    registry = client.CollectorRegistry()
    gauges: dict[str, Any] = {}
    for line in lines:
        own = {name: value for name, value in line.items() if isinstance(value, int | float) and name not in LABELS}
        for name, value in (own | {f"share_{name}": share for name, share in line["shares"].items()}).items():
            if name not in gauges:
                text = f"{name} of a table, as `embedrock top` shows it"
                gauges[name] = client.Gauge(f"embedrock_{name}", text, LABELS, registry=registry)
            gauges[name].labels(line["table"], line["pid"]).set(value)
    client.write_to_textfile(str(path), registry)


def _lines(folder: str) -> list[dict[str, Any]]:
    return [one for one in map(now, _histories(folder)) if one is not None]


def _text(lines: Sequence[dict[str, Any]]) -> str:
    return "\n".join([format_lines(FIELDS, lines), "", *_details(lines)])


def _details(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines below the table: times of phases, curves and members."""
    parts = []
    for one in lines:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in one["shares"].items() if share >= 0.005)
        state = "" if one["is_live"] else f" (no sample for {one['age_s']:.0f} s: does process {one['pid']} run?)"
        parts.append(f"{one['table']}, of the time: {shares or 'nothing'}{state}")
        parts += [line for number, pool in enumerate(one["pools"]) for line in _bars(one, number, pool)]
        parts += of_split(one)
        for head, rows in member_tables(one["members"]):
            parts += ["", *(f"  {line}" for line in format_table(head, rows).splitlines())]
    return [*parts, "Phases are those of all tables of the process; some run beside others."]


def _bars(line: dict[str, Any], number: int, pool: dict[str, Any]) -> list[str]:
    """Return the curve of a pool, a bar for each size."""
    if not pool.get("curve"):
        return []
    of, new = f"{pool['rows']:,.0f}", f"{format_number(pool['new'])} of them are new"
    head = f"  rows missed a step, of {of}, by memory={which_pool(line, number)}; {new}"
    most = max(missed for _, missed, _ in pool["curve"]) or 1.0
    place = here(pool)
    return [head] + [
        f"  {'>' if at == place else ' '} {format_bytes(nbytes):>10} {'#' * round(BAR * missed / most):{BAR}} "
        f"{format_number(missed)}{' you are here' if at == place else ''}"
        for at, (nbytes, missed, _) in enumerate(pool["curve"])
    ]


def _report(arguments: Namespace) -> int:
    histories = _histories(arguments.folder)
    arguments.out.write_text(page(histories), encoding="utf-8")
    print(f"{arguments.out}: {format_count(len(histories), 'table')}")
    return 0
