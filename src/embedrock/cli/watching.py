"""``embedrock top | report``: what tables that a process trains do, from the numbers that it keeps beside them."""

from __future__ import annotations

import html
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.machine.sizes import format_bytes
from embedrock.table.numbers import COUNTS, PHASES, TIMED, History, files_in
from embedrock.terminal.arguments import number, place, writable_file
from embedrock.terminal.tables import Field, format_count, format_lines, format_number, format_whole

STALE_S = 10.0  # since the last sample, after which no process seems to train
CLEAR = "\x1b[H\x1b[J"
POINTS = 400  # of a plot
FIELDS = (
    Field("table", "table"),
    Field("steps", "steps", format_whole),
    Field("steps/s", "steps_per_s", format_number),
    Field("hits", "hit_rate", lambda rate: f"{rate:.1%}"),
    Field("reads/s", "reads_per_s", format_whole),
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
    parser = _add(subparsers, "report", _report, "one HTML file, which needs no network, with plots of what tables did")
    parser.add_argument("--out", type=writable_file, default=Path("report.html"), metavar="FILE", help="to write")


def _add(subparsers: Any, name: str, run: Any, text: str) -> ArgumentParser:
    parser = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("folder", type=place, metavar="FOLDER", help="of a table, or one that has tables")
    parser.set_defaults(run=run)
    return parser


def _histories(folder: str) -> list[History]:
    found = []
    for path in files_in(folder):
        try:
            found.append(History.read(path))
        except ValueError as error:
            raise ArgumentError(str(error)) from None
    if not found:
        raise ArgumentError(
            f"beside the tables in {folder!r} are no numbers. Call er.keep_stats() in the program that trains them."
        )
    return found


# ---------------------------------------------------------------- now


def _top(arguments: Namespace) -> int:
    lines = _lines(arguments.folder)
    if arguments.json or arguments.once or not sys.stdout.isatty():
        print(json.dumps({"tables": lines}, indent=1) if arguments.json else _text(lines))
        return 0
    while True:
        print(CLEAR + _text(_lines(arguments.folder)), flush=True)
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
    line |= {"table": Path(told["table"]).name, "pid": told["pid"], "age_s": age, "is_live": age < STALE_S}
    line["commit_age_s"] = max(0.0, time.time() - last["committed"])
    for name in ("steps_per_s", "hit_rate", "reads_per_s"):
        values = change[name]
        line[name] = float(values[-1]) if len(values) and np.isfinite(values[-1]) else None
    line["shares"] = {name: float(change[name][-1]) for name in PHASES if len(change[name])}
    return line


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
    parts = [format_lines(FIELDS, lines), ""]
    for one in lines:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in one["shares"].items() if share >= 0.005)
        state = "" if one["is_live"] else f" (no sample for {one['age_s']:.0f} s: does process {one['pid']} run?)"
        parts.append(f"{one['table']}, of the time: {shares or 'nothing'}{state}")
    parts.append("Phases are those of all tables of the process; some run beside others.")
    return "\n".join(parts)


# ---------------------------------------------------------------- a page


def _report(arguments: Namespace) -> int:
    histories = _histories(arguments.folder)
    arguments.out.write_text(page(histories), encoding="utf-8")
    print(f"{arguments.out}: {format_count(len(histories), 'table')}")
    return 0


STYLE = """
:root { color-scheme: light dark; --ink: #222; --back: #fff; --line: #ccc; --plot: #0b63b5 }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --back: #16181b; --line: #444; --plot: #6db3f2 } }
body { font: 15px/1.4 system-ui, sans-serif; color: var(--ink); background: var(--back) }
body { max-width: 70em; margin: 2em auto }
figure { display: inline-block; margin: 0 1em 1em 0 } figcaption { font-size: 13px }
svg { border: 1px solid var(--line); width: 32em; height: 9em } polyline { fill: none; stroke: var(--plot) }
td, th { padding: 0 1em 0 0; text-align: right } th:first-child, td:first-child { text-align: left }
"""
PLOTS = (
    ("steps_per_s", "steps a second"),
    ("hit_rate", "hits in the cache, of all rows asked for"),
    ("reads_per_s", "rows read from disk, a second"),
    *((name, f"share of the time: {name}") for name in PHASES),
)
SIZES = (("ram_bytes", "RAM"), ("disk_bytes", "files"), ("commit", "commits"), ("rows", "rows with records"))


def page(histories: Sequence[History]) -> str:
    """Return one HTML page, which needs nothing else, of what tables did."""
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>Embedrock</title><style>{STYLE}</style><body>"]
    for history in histories:
        line, change, samples = now(history), changes(history.samples), history.samples
        name = html.escape(str(history.told["table"]))
        parts.append(f"<h1>{name}</h1>")
        if line is None:
            parts.append("<p>No samples yet.</p>")
            continue
        cells = [(field.head, field.cell(line)) for field in FIELDS[1:]]
        heads = "".join(f"<th>{html.escape(head)}</th>" for head, _ in cells)
        values = "".join(f"<td>{html.escape(value)}</td>" for _, value in cells)
        parts.append(f"<table><tr>{heads}</tr><tr>{values}</tr></table>")
        plots = [(text, change["time"], change[key]) for key, text in PLOTS]
        plots += [(text, samples["time"], samples[key]) for key, text in SIZES]
        parts += [_plot(*one) for one in plots if np.nanmax(np.append(one[2], 0.0)) > 0]
    return "\n".join([*parts, "</body></html>"])


def _plot(text: str, times: np.ndarray, values: np.ndarray) -> str:
    there = np.isfinite(values)
    times, values = times[there], values[there]
    chosen = np.unique(np.linspace(0, len(times) - 1, POINTS).astype(int))
    span, most = max(times[-1] - times[0], 1e-9), values.max()
    points = " ".join(f"{500 * (times[k] - times[0]) / span:.1f},{118 - 116 * values[k] / most:.1f}" for k in chosen)
    label = f"{text}: {format_number(float(values[-1]))} at the end, {format_number(float(most))} at most, {span:.0f} s"
    shown = html.escape(label)
    return (
        f'<figure><svg viewBox="0 0 500 120" preserveAspectRatio="none" role="img" aria-label="{shown}">'
        f'<polyline points="{points}"/></svg><figcaption>{shown}</figcaption></figure>'
    )
