"""``embedrock top | report``: what tables that processes train do, from the numbers that these keep in files."""

from __future__ import annotations

import html
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedrock.cli.metrics import Metrics
from embedrock.errors import ArgumentError
from embedrock.machine.sizes import format_bytes
from embedrock.planner.split import Option, split
from embedrock.table.numbers import COUNTS, PHASES, TIMED, History, files_in, runtime_folder
from embedrock.terminal.arguments import number, place, writable_file
from embedrock.terminal.tables import Field, format_count, format_lines, format_number, format_table, format_whole

STALE_S = 10.0  # since the last sample, after which no process seems to train
CLEAR = "\x1b[H\x1b[J"
POINTS = 400  # of a plot
BAR = 30  # letters of the longest bar
FIELDS = (
    Field("table", "table"),
    Field("steps", "steps", format_whole),
    Field("steps/s", "steps_per_s", format_number),
    Field("hits", "hit_rate", lambda rate: f"{rate:.1%}"),
    Field("reads/s", "reads_per_s", format_whole),
    Field("missed a step", "missed", format_number),
    Field("RAM", "ram_bytes", format_bytes),
    Field("of", "budget_bytes", format_bytes),
    Field("disk", "disk_bytes", format_bytes),
    Field("commit", "commit", format_whole),
    Field("age s", "commit_age_s", format_whole),
)


def add_parsers(subparsers: Any) -> None:
    """Add the commands to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    parser = _add(subparsers, "top", _top, "what tables in training do now, as er.keep_stats writes it")
    parser.add_argument("--once", action="store_true", help="print it once (default: again and again)")
    parser.add_argument("--json", action="store_true", help="print JSON, once")
    parser.add_argument("--every", type=number, default=2.0, metavar="S", help="seconds (default: 2)")
    text = "write them for Prometheus again and again, or --once, as node_exporter reads them (needs prometheus_client)"
    parser.add_argument("--prometheus", type=writable_file, metavar="FILE", help=text)
    parser = _add(subparsers, "report", _report, "one HTML file, which needs no network, with plots of what tables did")
    parser.add_argument("--out", type=writable_file, default=Path("report.html"), metavar="FILE", help="to write")


def _add(subparsers: Any, name: str, run: Any, text: str) -> ArgumentParser:
    parser = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    text = "of a table or group, or one that has some (default: those in RAM of this user's processes)"
    parser.add_argument("folder", type=place, nargs="?", default=str(runtime_folder()), metavar="FOLDER", help=text)
    parser.set_defaults(run=run)
    return parser


def _histories(folder: str) -> list[History]:
    found = []
    for path in files_in(folder):
        try:
            found.append(History.read(path))
        except FileNotFoundError:  # it has ended meanwhile
            continue
        except ValueError as error:
            raise ArgumentError(str(error)) from None
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
        print(json.dumps({"tables": lines}, indent=1) if arguments.json else _text(lines))
        return 0
    watch(lambda: _lines(arguments.folder), max(arguments.every, 0.1))
    return 0


def watch(lines: Callable[[], Sequence[dict[str, Any]]], every: float) -> None:
    """Show what tables do on a terminal again and again until somebody ends it: by rich, where it is installed."""
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
    """Return what `_text` tells as rich shows it: with colors, and a table as wide as the terminal."""
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
    """Write a text file for Prometheus, until somebody ends it."""
    metrics = Metrics()
    while True:
        metrics.write(_lines(arguments.folder), arguments.prometheus)
        if arguments.once:
            return 0
        time.sleep(max(arguments.every, 0.1))


def _lines(folder: str) -> list[dict[str, Any]]:
    return [one for one in map(now, _histories(folder)) if one is not None]


def now(history: History) -> dict[str, Any] | None:
    """Return what a table did between its last two samples; None where there are none."""
    samples, told = history.samples, history.told
    if not len(samples["time"]):
        return None
    last = {name: float(values[-1]) for name, values in samples.items()}
    change = changes(samples)
    line: dict[str, Any] = {name: last[name] for name in (*COUNTS, "rows", "cache_rows", "cache_slots")}
    line |= {name: last[name] for name in ("ram_bytes", "budget_bytes", "disk_bytes")}
    age = max(0.0, time.time() - last["time"])
    line |= {name: told.get(name, []) for name in ("pools", "members")}
    known = [pool["missed"] for pool in line["pools"] if pool.get("curve")]
    line |= {"kind": told.get("kind"), "missed": sum(known) if known else None, "split": best_split(line)}
    line |= {"table": Path(told["table"]).name, "pid": told["pid"], "age_s": age, "is_live": age < STALE_S}
    line["commit_age_s"] = max(0.0, time.time() - last["committed"])
    for name in ("steps_per_s", "hit_rate", "reads_per_s"):
        values = change[name]
        line[name] = float(values[-1]) if len(values) and np.isfinite(values[-1]) else None
    line["shares"] = {name: float(change[name][-1]) for name in PHASES if len(change[name])}
    return line


def best_split(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return how the memory of a group's pools would be split best, by their curves; None where nobody knows."""
    pools = line["pools"]
    if len(pools) < 2 or not all(pool.get("curve") for pool in pools):
        return None
    options = [[Option(point[0], point[1]) for point in pool["curve"]] for pool in pools]
    found = split(options, sum(pool["budget_bytes"] for pool in pools))
    if found is None:
        return None
    return {"memory": [one.nbytes for one in found], "missed": sum(one.cost for one in found)}


def changes(samples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what happened from each sample to the next; NaN where a process ended in between, or nothing happened."""
    step = {name: np.diff(values) for name, values in samples.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "time": samples["time"][1:],
            "steps_per_s": step["steps"] / step["time"],
            "reads_per_s": step["reads"] / step["time"],
            "hit_rate": step["hits"] / (step["hits"] + step["misses"]),
            **{name: step[f"{name}_s"] / step[TIMED] for name in PHASES},
        }
    is_new = (step["hits"] < 0) | (step[TIMED] <= 0)  # counts of another process, which begin at 0
    return {name: values if name == "time" else np.where(is_new, np.nan, values) for name, values in found.items()}


def _text(lines: Sequence[dict[str, Any]]) -> str:
    return "\n".join([format_lines(FIELDS, lines), "", *_details(lines)])


def _details(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines below the table: where the time goes, curves and members."""
    parts = []
    for one in lines:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in one["shares"].items() if share >= 0.005)
        state = "" if one["is_live"] else f" (no sample for {one['age_s']:.0f} s: does process {one['pid']} run?)"
        parts.append(f"{one['table']}, of the time: {shares or 'nothing'}{state}")
        parts += [line for number, pool in enumerate(one["pools"]) for line in _bars(one, number, pool)]
        parts += _of_split(one)
        parts += _of_members(one["members"])
    return [*parts, "Phases are those of all tables of the process; some run beside others."]


def _bars(line: dict[str, Any], number: int, pool: dict[str, Any]) -> list[str]:
    """Return the curve of a pool, a bar for each size."""
    if not pool.get("curve"):
        return []
    which = f", pool {number + 1} of {len(line['pools'])}" if len(line["pools"]) > 1 else ""
    head = (
        f"  rows missed a step, of {pool['rows']:,.0f}, by memory={which}; {format_number(pool['new'])} of them are new"
    )
    most = max(missed for _, missed, _ in pool["curve"]) or 1.0
    here = _here(pool)
    return [head] + [
        f"  {'>' if at == here else ' '} {format_bytes(nbytes):>10} {'#' * round(BAR * missed / most):{BAR}} "
        f"{format_number(missed)}{' you are here' if at == here else ''}"
        for at, (nbytes, missed, _) in enumerate(pool["curve"])
    ]


def _here(pool: dict[str, Any]) -> int:
    """Return which point of a curve is the size that a pool has."""
    return min(range(len(pool["curve"])), key=lambda at: abs(pool["curve"][at][0] - pool["budget_bytes"]))


def _of_members(members: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the members of a group for each pool, by the ``memory=`` that its caches have."""
    lines = []
    for head, rows in member_tables(members):
        lines += ["", *(f"  {line}" for line in format_table(head, rows).splitlines())]
    return lines


def member_tables(members: Sequence[dict[str, Any]]) -> list[tuple[list[str], list[list[str]]]]:
    """Return the members of a group, those of a pool together: what stands above, and a row of cells for each.

    After its rows with records and its steps come the rows a step that are missed of it, by ``memory=`` of its pool.
    """
    tables: dict[tuple[float, ...], list[list[str]]] = {}
    for one in members:
        curve = one.get("curve") or []
        cells = [one["name"], format_whole(one["rows"]), format_whole(one["steps"])]
        sizes = tuple(nbytes for nbytes, _ in curve)
        tables.setdefault(sizes, []).append([*cells, *(format_number(missed) for _, missed in curve)])
    return [(["member", "rows", "steps", *_missed_heads(sizes)], rows) for sizes, rows in tables.items()]


def _missed_heads(sizes: Sequence[float]) -> list[str]:
    return [f"{'missed: ' if at == 0 else ''}{format_bytes(nbytes)}" for at, nbytes in enumerate(sizes)]


def _of_split(line: dict[str, Any]) -> list[str]:
    found = line["split"]
    if found is None:
        return []
    sizes = ", ".join(map(format_bytes, found["memory"]))
    missed = f"{format_number(found['missed'])} instead of {format_number(line['missed'])}"
    return [f"  best split of the memory over pools: {sizes}; rows missed a step: {missed}"]


# ---------------------------------------------------------------- a page


def _report(arguments: Namespace) -> int:
    histories = _histories(arguments.folder)
    arguments.out.write_text(page(histories), encoding="utf-8")
    print(f"{arguments.out}: {format_count(len(histories), 'table')}")
    return 0


HEAD = (
    "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    "<title>Embedrock</title>"
)
STYLE = """
:root { color-scheme: light dark; --ink: #222; --back: #fff; --line: #ccc; --plot: #0b63b5 }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --back: #16181b; --line: #444; --plot: #6db3f2 } }
body { font: 15px/1.4 system-ui, sans-serif; color: var(--ink); background: var(--back) }
body { max-width: 70em; margin: 2em auto; padding: 0 1em } h1 { overflow-wrap: anywhere }
figure { display: inline-block; margin: 0 1em 1em 0 } figcaption { font-size: 13px }
svg { border: 1px solid var(--line); width: 32em; max-width: 100%; height: 9em }
polyline { fill: none; stroke: var(--plot) }
circle { fill: var(--plot) } .wide { overflow-x: auto; margin-bottom: 1em }
figure { max-width: min(32em, 100%); overflow-wrap: anywhere }
td, th { padding: 0 1em 0 0; text-align: right } th:first-child, td:first-child { text-align: left }
"""
PLOTS = (
    Field("steps a second", "steps_per_s", format_number),
    Field("hits in the cache, of all rows asked for", "hit_rate", "{:.1%}".format),
    Field("rows read from disk, a second", "reads_per_s", format_number),
    *(Field(f"share of the time: {name}", name, "{:.1%}".format) for name in PHASES),
)
SIZES = (
    Field("RAM", "ram_bytes", format_bytes),
    Field("files", "disk_bytes", format_bytes),
    Field("commits", "commit", format_whole),
    Field("rows with records", "rows", format_whole),
)


def page(histories: Sequence[History]) -> str:
    """Return one HTML page, which needs nothing else, of what tables did."""
    parts = [f"{HEAD}<style>{STYLE}</style><body>"]
    for history in histories:
        line, change, samples = now(history), changes(history.samples), history.samples
        name = html.escape(str(history.told["table"]))
        parts.append(f"<h1>{name}</h1>")
        if line is None:
            parts.append("<p>No samples yet.</p>")
            continue
        parts.append(_table([field.head for field in FIELDS[1:]], [[field.cell(line) for field in FIELDS[1:]]]))
        plots = [(field, change["time"], change[str(field.value)]) for field in PLOTS]
        plots += [(field, samples["time"], samples[str(field.value)]) for field in SIZES]
        parts += [_plot(*one) for one in plots if np.nanmax(np.append(one[2], 0.0)) > 0]
        parts += [_curve(line, number, pool) for number, pool in enumerate(line["pools"]) if pool.get("curve")]
        parts += [f"<p>{html.escape(text.strip())}</p>" for text in _of_split(line)]
        parts.append(_members(line["members"]))
    return "\n".join([*parts, "</body></html>"])


def _plot(field: Field, times: np.ndarray, values: np.ndarray) -> str:
    there = np.isfinite(values)
    times, values = times[there], values[there]
    chosen = np.unique(np.linspace(0, len(times) - 1, POINTS).astype(int))
    span, most = max(times[-1] - times[0], 1e-9), values.max()
    points = " ".join(f"{500 * (times[k] - times[0]) / span:.1f},{118 - 116 * values[k] / most:.1f}" for k in chosen)
    end, top = (field.form(float(value)) for value in (values[-1], most))
    label = f"{field.head}: {end} at the end, {top} at most, {span:.0f} s"
    shown = html.escape(label)
    return (
        f'<figure><svg viewBox="0 0 500 120" preserveAspectRatio="none" role="img" aria-label="{shown}">'
        f'<polyline points="{points}"/></svg><figcaption>{shown}</figcaption></figure>'
    )


def _curve(line: dict[str, Any], number: int, pool: dict[str, Any]) -> str:
    """Return a plot of what caches would miss by their size, which doubles from one line to the next."""
    points, at = pool["curve"], _here(pool)
    xs = np.log2([max(1, nbytes) for nbytes, _, _ in points])
    xs = 20 + 460 * (xs - xs[0]) / max(xs[-1] - xs[0], 1e-9)
    most = max(missed for _, missed, _ in points) or 1.0
    ys = [104 - 94 * missed / most for _, missed, _ in points]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    which = f", pool {number + 1} of {len(line['pools'])}" if len(line["pools"]) > 1 else ""
    told = "; ".join(f"{format_bytes(nbytes)}: {format_number(missed)}" for nbytes, missed, _ in points)
    rows = format_count(round(pool["rows"]), "row")
    here = f"you are here: {format_bytes(points[at][0])}, {format_number(points[at][1])} of {rows}"
    shown = html.escape(f"rows missed a step, by memory={which}: {told}; {here}")
    return (
        f'<figure><svg viewBox="0 0 500 120" role="img" aria-label="{shown}"><polyline points="{drawn}"/>'
        f'<circle cx="{xs[at]:.1f}" cy="{ys[at]:.1f}" r="5"/></svg><figcaption>{shown}</figcaption></figure>'
    )


def _members(members: Sequence[dict[str, Any]]) -> str:
    if not members:
        return ""
    return "\n".join(_table(head, rows) for head, rows in member_tables(members))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[f"<th>{html.escape(cell)}</th>" for cell in head]]
    cells += [[f"<td>{html.escape(cell)}</td>" for cell in row] for row in rows]
    return "<div class=wide><table>" + "".join(f"<tr>{''.join(row)}</tr>" for row in cells) + "</table></div>"
