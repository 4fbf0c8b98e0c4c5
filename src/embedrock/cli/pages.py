"""One page of HTML with plots of what tables did, of one run or of several that lie over each other."""

from __future__ import annotations

import html
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from embedrock.cli.histories import FIELDS, changes, here, member_tables, moment, now, of_split, state, which_pool
from embedrock.cli.terminal.tables import Field, format_count, format_number, format_whole
from embedrock.system.sizes import format_bytes
from embedrock.table.numbers import PHASES, StatsFile

POINTS = 120  # of a plot, each the mean of the samples between two of them
WIDTH, HEIGHT = 640, 200  # of a plot, in its own units
LEFT, RIGHT, TOP, BOTTOM = 76, 626, 22, 172  # of the area of its lines
DASH = 3.0  # half the length of a line that represents one point
LONG_S = 1e9  # more seconds than that are a time since 1970, not since the start of a run
LEAST_SHARE = 0.002  # least share of the total time for a phase to be drawn
# Of phases and runs, visible on light and on dark.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#8a8a8a", "#56b4e9", "#e69f00", "#cc79a7", "#8c6d31", "#6a51a3")
HEAD = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #666; --back: #fff; --line: #d5d5d5; --plot: #0b63b5 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --soft: #9a9a9a; --back: #16181b; --line: #3a3d42; --plot: #6db3f2 }
}
body { font: 15px/1.4 system-ui, sans-serif; color: var(--ink); background: var(--back) }
body { max-width: 76em; margin: 2em auto; padding: 0 1em } h1 { font-size: 1.5em } h1, p { overflow-wrap: anywhere }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(29em, 100%), 1fr)); gap: 1.5em 2em }
figure { margin: 0; min-width: 0 } figcaption { margin-bottom: .3em; overflow-wrap: anywhere }
figcaption span, p { color: var(--soft); font-size: 13px } figcaption span { display: block }
svg { width: 100%; display: block }
svg text { fill: var(--soft); font-size: 13px } svg .frame { stroke: var(--line) } svg .here { fill: var(--ink) }
polyline { fill: none; stroke-width: 1.7 }
svg g { fill: none; pointer-events: all } svg g > :not(rect) { display: none } svg g:hover > * { display: inline }
svg g rect { y: 22px; height: 150px } svg g path { stroke: var(--soft) } svg g circle { r: 3.5px }
svg g text { fill: var(--ink); stroke: var(--back); stroke-width: 4px; paint-order: stroke }
.wide { overflow-x: auto; margin: 1.5em 0 }
td, th { padding: 0 1em 0 0; text-align: right; white-space: nowrap }
th { color: var(--soft); font-size: 13px; font-weight: normal } th:first-child, td:first-child { text-align: left }
td:empty, th:empty { padding: 0 }
.key { display: inline-block; margin-right: 1em }
.key b { display: inline-block; width: .8em; height: .8em; margin-right: .35em }
"""
RATES = (
    Field("Steps a second", "steps_per_s", format_number),
    Field("Hits in the cache, of all rows asked for", "hit_rate", "{:.1%}".format),
    Field("Rows read from disk, a second", "reads_per_s", format_number),
)
SIZES = (
    Field("RAM", "ram_bytes", format_bytes),
    Field("Files", "disk_bytes", format_bytes),
    Field("Rows with records", "rows", format_whole),
    Field("Commits", "commit", format_whole),
)


class Run(NamedTuple):
    """One run of a table: its label and color among several, its state now, and its numbers over time by name."""

    label: str
    color: str
    line: dict[str, Any]
    numbers: dict[str, tuple[np.ndarray, np.ndarray]]


class Line(NamedTuple):
    """A line of a plot. Its points are NaN at gaps."""

    label: str
    color: str
    xs: np.ndarray
    ys: np.ndarray


def page(runs: Mapping[str, Sequence[StatsFile]]) -> str:
    """Return one self-contained HTML page about the tables of some runs, by the names of these.

    Tables with equal names lie over each other. If each run has only one table, these do.
    """
    are_one, tables = all(len(found) == 1 for found in runs.values()), defaultdict(list)
    for run, found in runs.items():
        for one in found:
            name = Path(one.told["table"]).name
            name = re.sub(r", \d+-", ", ", name) if len(runs) > 1 else name  # of a table in RAM, without the process
            tables[name].append((run if len(runs) > 1 else "", one))
    title = ", ".join(tables)
    if are_one:
        tables = {title: [one for found in tables.values() for one in found]}
    parts = [part for name, found in tables.items() for part in _of(name, found)]
    head = html.escape(title + ("" if len(runs) == 1 else f": {', '.join(runs)}"))
    return "\n".join([f"{HEAD}<title>{head}</title><style>{STYLE}</style><body>", *parts, "</body></html>"])


def _of(table: str, histories: Sequence[tuple[str, StatsFile]]) -> Iterator[str]:
    yield f"<h1>{html.escape(table)}</h1>"
    runs = []
    for at, (label, history) in enumerate(histories):
        color, line = COLORS[at % len(COLORS)] if label else "var(--plot)", now(history)
        yield f"<p>{_key(color, label) if label else ''}{html.escape(_facts(history, line))}</p>"
        if line is not None:
            change, samples = changes(history.samples, POINTS), history.samples
            start = samples["time"][0] if label else 0.0
            drawn = [(samples, {field.head: str(field.value) for field in SIZES})]
            drawn += [(change, {field.head: str(field.value) for field in RATES} | {name: name for name in PHASES})]
            numbers = {key: (of["time"] - start, of[name]) for of, names in drawn for key, name in names.items()}
            runs.append(Run(label, color, line, numbers))
    if runs:
        head = ["run" if runs[0].label else "", *(field.head for field in FIELDS[1:])]
        yield _table(head, [[one.label, *(field.cell(one.line) for field in FIELDS[1:])] for one in runs])
        plots = [_plot(field, runs) for field in RATES] + list(map(_shares, runs))
        plots += [_plot(field, runs) for field in SIZES]
        plots += [_curve(runs, number) for number in range(max(len(one.line["pools"]) for one in runs))]
        yield f"<div class=plots>{''.join(plots)}</div>"
    for one in runs:
        yield from (f"<p>{html.escape(f'{one.label} {text}'.strip())}</p>" for text in of_split(one.line))
        yield from (_table(head, rows) for head, rows in member_tables(one.line["members"]))


def _facts(history: StatsFile, line: dict[str, Any] | None) -> str:
    """Return what a table is, and where and when the run was."""
    told, facts = history.told, [history.told["table"]]
    if spec := told.get("spec"):
        rows = "any int64 as id" if spec["rows"] is None else format_count(spec["rows"], "row")
        facts += [rows, f"dim {spec['dim']}", spec["dtype"], spec["rule"]]
    facts += [f"process {told['pid']} on {told.get('host')}"]
    if line is None:
        return " · ".join([*facts, "No samples yet."])
    first, last = (moment(at) for at in history.samples["time"][[0, -1]])
    return " · ".join([*facts, f"from {first} to {last}", state(line) or "in training"])


def _key(color: str, text: str) -> str:
    return f'<span class=key><b style="background:{color}"></b>{html.escape(text)}</span>'


def _when(at: float) -> str:
    """Return a time of a plot: since 1970, or since the start of a run."""
    return moment(at) if at > LONG_S else f"{at // 3600:.0f}:{at % 3600 // 60:02.0f}:{at % 60 // 1:02.0f} h"


class _Box(NamedTuple):
    """The coordinates of a plot."""

    low: float  # left end of the horizontal axis
    high: float
    most: float  # top of the vertical axis; 0 is at the bottom

    def point(self, x: float, y: float) -> tuple[float, float]:
        """Return the coordinates of a point, to a tenth of a unit."""
        across = LEFT + (RIGHT - LEFT) * (x - self.low) / max(self.high - self.low, 1e-9)
        up = BOTTOM - (BOTTOM - TOP) * y / self.most
        return round(float(across), 1), round(float(up), 1)

    def points(self, xs: np.ndarray, ys: np.ndarray) -> str:
        """Return the coordinates of points, as text."""
        return " ".join("{},{}".format(*self.point(x, y)) for x, y in zip(xs, ys, strict=True))

    def line(self, line: Line) -> str:
        """Return the parts of a line between gaps. One of a single point is short, because a point is invisible."""
        there, drawn = np.isfinite(line.ys), ""
        for part in np.split(np.arange(len(there)), np.flatnonzero(np.diff(there)) + 1):
            points = self.points(line.xs[part], line.ys[part]) if there[part[0]] else ""
            if points and len(part) == 1:
                x, y = map(float, points.split(","))
                points = f"{max(x - DASH, LEFT):.1f},{y} {min(x + DASH, RIGHT):.1f},{y}"
            drawn += f'<polyline stroke="{line.color}" points="{points}"/>' if points else ""
        return drawn

    def frame(self, form: Callable[[float], str], ticks: Sequence[tuple[float, str]] = ()) -> str:
        """Return lines at 0, the middle and the top with their numbers, and labels below: `ticks`, or the ends."""
        ticks = ticks or [(x, _when(x)) for x in sorted({self.low, self.high})]
        parts = []
        for share in (0.0, 0.5, 1.0):
            y = BOTTOM - (BOTTOM - TOP) * share
            parts.append(f'<line class="frame" x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>')
            text = html.escape(form(self.most * share))
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{text}</text>')
        for at, (x, text) in enumerate(ticks):
            anchor = "start" if at == 0 else "end" if at == len(ticks) - 1 else "middle"
            across, _ = self.point(x, 0.0)
            parts.append(f'<text x="{across}" y="{BOTTOM + 18}" text-anchor="{anchor}">{html.escape(text)}</text>')
        return "".join(parts)

    def spots(self, places: np.ndarray, look: Callable[[float], tuple[str, list[str]]]) -> str:
        """Return what appears while the pointer is near each of some places, from left to right.

        `look` returns it for a place: drawn points, and lines of text.
        """
        parts, across = [], np.array([self.point(x, 0.0)[0] for x in places])
        edges = np.concatenate([[LEFT], (across[1:] + across[:-1]) / 2, [RIGHT]])
        for place, x, low, high in zip(places, across, edges[:-1], edges[1:], strict=True):
            points, texts = look(place)
            below = "".join(f'<tspan x="{LEFT}" dy="15">{html.escape(text)}</tspan>' for text in texts[1:])
            text = f'<text x="{LEFT}" y="{TOP - 8}">{html.escape(texts[0])}{below}</text>'
            area = f'<rect x="{low:.1f}" width="{high - low:.1f}"/>'
            parts.append(f'<g>{area}<path d="M{x} {TOP}V{BOTTOM}"/>{points}{text}</g>')
        return "".join(parts)

    def dot(self, x: float, y: float, color: str) -> str:
        """Return a dot at a point."""
        return '<circle cx="{}" cy="{}" r="5" fill="{}"/>'.format(*self.point(x, y), color)


def _chart(
    head: tuple[str, str],
    lines: Sequence[Line],
    form: Callable[[float], str],
    at: Callable[[float], str] = _when,
    ticks: Sequence[tuple[float, str]] = (),
    more: Callable[[_Box], str] = lambda box: "",
) -> str:
    """Return a plot of the lines of runs from 0 on, with a title and a caption; "" without a number above 0.

    `form` formats values, and `at` places across. `more` draws into it.
    """
    xs, ys = (np.concatenate([np.zeros(0), *(getattr(line, name) for line in lines)]) for name in ("xs", "ys"))
    if not (np.nan_to_num(ys) > 0).any():
        return ""
    box = _Box(float(xs.min()), float(xs.max()), float(np.nanmax(ys)))

    def look(x: float) -> tuple[str, list[str]]:
        drawn, texts = "", [at(x)]
        for line in lines:
            near = int(np.abs(line.xs - x).argmin())
            if np.isfinite(line.ys[near]) and line.xs[0] <= x <= line.xs[-1]:
                drawn += box.dot(line.xs[near], line.ys[near], line.color)
                texts.append(f"{line.label} {form(line.ys[near])}".strip())
        return drawn, texts if lines[0].label else [": ".join(texts)]

    places = np.linspace(box.low, box.high, POINTS)
    if len(lines) == 1:  # where there are points
        places = lines[0].xs[:: -(-len(lines[0].xs) // POINTS)]
    return _figure(*head, box.frame(form, ticks) + "".join(map(box.line, lines)) + more(box) + box.spots(places, look))


def _figure(title: str, caption: str, drawn: str, legend: str = "") -> str:
    label = html.escape(f"{title}: {caption}")
    return (
        f"<figure><figcaption>{html.escape(title)} <span>{html.escape(caption)}</span></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{drawn}</svg>{legend}</figure>'
    )


def _plot(field: Field, runs: Sequence[Run]) -> str:
    """Return a plot of a number over time."""
    lines, ends = [], []
    for run in runs:
        xs, ys = run.numbers[field.head]
        if len(there := ys[np.isfinite(ys)]):
            lines.append(Line(run.label, run.color, xs, ys))
            end, most = field.form(there[-1]), field.form(there.max())
            ends.append(f"{run.label} {end} at the end, {most} at most".strip())
    return _chart((field.head, "; ".join(ends)), lines, field.form)


def _shares(run: Run) -> str:
    """Return a stacked plot of each phase's share of the time."""
    times, parts = run.numbers[PHASES[0]][0], {name: np.nan_to_num(run.numbers[name][1]) for name in PHASES}
    shown = [name for name in PHASES if len(times) and parts[name].mean() > LEAST_SHARE]
    if not shown:
        return ""
    below = np.cumsum([np.zeros(len(times)), *(parts[name] for name in shown)], axis=0)
    box = _Box(float(times[0]), float(times[-1]), max(1.0, float(below[-1].max())))
    drawn, keys = "", ""
    for at, name in enumerate(shown):
        color = COLORS[PHASES.index(name)]
        around = np.concatenate([times, times[::-1]]), np.concatenate([below[at + 1], below[at][::-1]])
        drawn += f'<polygon points="{box.points(*around)}" fill="{color}"/>'
        keys += _key(color, f"{name} {parts[name].mean():.1%}")

    def look(x: float) -> tuple[str, list[str]]:
        near = int(np.abs(times - x).argmin())
        told = ", ".join(f"{name} {parts[name][near]:.0%}" for name in shown if parts[name][near] >= LEAST_SHARE)
        return "", [_when(x), *textwrap.wrap(told, 80)]

    drawn += box.frame("{:.0%}".format) + box.spots(times, look)
    text = "by phase, one on the other; rule, commit and compaction run beside the others"
    return _figure(", ".join(filter(None, ["Share of the time", run.label])), text, drawn, f"<p>{keys}</p>")


def _curve(runs: Sequence[Run], number: int) -> str:
    """Return a plot of the misses of caches by size, which doubles from one line to the next; "" if unknown."""
    lines, marks, captions, title = [], [], [], ""
    for run in runs:
        pool = (run.line["pools"][number:] or [{}])[0]
        if points := pool.get("curve"):
            xs, at = np.log2([max(1, nbytes) for nbytes, _, _ in points]), here(pool)
            lines.append(Line(run.label, run.color, xs, np.array([missed for _, missed, _ in points])))
            marks.append((xs[at], points[at][1], run.color))
            rows, new = format_count(round(pool["rows"]), "row"), format_number(pool["new"])
            place = f"{format_bytes(points[at][0])}, {format_number(points[at][1])} of {rows}; {new} are new"
            captions.append(f"{run.label or 'you are here'}: {place}")
            title = f"Rows missed a step, by memory={which_pool(run.line, number)}"

    def more(box: _Box) -> str:
        (x, y), dots = box.point(*marks[0][:2]), "".join(box.dot(*mark) for mark in marks)
        anchor, beside = ("end", -10) if x > (LEFT + RIGHT) / 2 else ("start", 10)
        text = f'<text class="here" x="{x + beside}" y="{y - 9:.1f}" text-anchor="{anchor}">you are here</text>'
        return dots + ("" if lines[0].label else text)

    every, ticks = np.unique([x for line in lines for x in line.xs]), []
    for x in every:  # those with room for a label
        if not ticks or x - ticks[-1][0] > (every[-1] - every[0]) / 7:
            ticks.append((x, _size(x)))
    return _chart((title, ". ".join(captions)), lines, format_number, _size, ticks, more)


def _size(x: float) -> str:
    return format_bytes(round(2**x))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[f"<th>{html.escape(cell)}</th>" for cell in head]]
    cells += [[f"<td>{html.escape(cell)}</td>" for cell in row] for row in rows]
    return "<div class=wide><table>" + "".join(f"<tr>{''.join(row)}</tr>" for row in cells) + "</table></div>"
