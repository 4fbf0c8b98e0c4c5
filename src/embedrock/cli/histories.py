"""Views of the statistics files of tables: now, over time, and as one page of HTML with plots."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from embedrock.cli.terminal.tables import Field, format_count, format_number, format_whole
from embedrock.planner.split import SplitOption, split
from embedrock.system.sizes import format_bytes
from embedrock.table.numbers import COUNTS, PHASES, RARE, TIMED, StatsFile

STALE_S = 10.0  # since the last sample: then no process seems to train
RECENT = 5  # samples that the current rates cover
FIELDS = (
    Field("table", "table"),
    Field("steps", "steps", format_whole),
    Field("steps/s", "steps_per_s", format_number),
    Field("hits", "hit_rate", lambda rate: f"{rate:.1%}"),
    Field("reads/s", "reads_per_s", format_whole),
    Field("missed a step", "missed", format_number),
    Field("RAM", "ram_bytes", format_bytes),
    Field("budget", "budget_bytes", format_bytes),
    Field("disk", "disk_bytes", format_bytes),
    Field("commit", "commit", format_whole),
    Field("age s", "commit_age_s", format_whole),
)
POINTS = 120  # of a plot, each the mean of the samples between two of them
WIDTH, HEIGHT = 640, 200  # of a plot, in its own units
LEFT, RIGHT, TOP, BOTTOM = 76, 626, 22, 172  # of the area of its lines
DASH = 3.0  # half the length of a line that represents one point
LEAST_SHARE = 0.002  # least share of the total time for a phase to be drawn
# Of phases, visible on light and on dark.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#8a8a8a", "#56b4e9", "#e69f00", "#cc79a7", "#8c6d31", "#6a51a3")
HEAD = (
    "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    "<title>Embedrock</title>"
)
STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #666; --back: #fff; --line: #d5d5d5; --plot: #0b63b5 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --soft: #9a9a9a; --back: #16181b; --line: #3a3d42; --plot: #6db3f2 }
}
body { font: 15px/1.4 system-ui, sans-serif; color: var(--ink); background: var(--back) }
body { max-width: 76em; margin: 2em auto; padding: 0 1em } h1 { font-size: 1.5em; overflow-wrap: anywhere }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(29em, 100%), 1fr)); gap: 1.5em 2em }
figure { margin: 0; min-width: 0 } figcaption { margin-bottom: .3em; overflow-wrap: anywhere }
figcaption span, p { color: var(--soft); font-size: 13px } figcaption span { display: block }
svg { width: 100%; display: block }
svg text { fill: var(--soft); font-size: 13px } svg .frame { stroke: var(--line) } svg .here { fill: var(--ink) }
polyline { fill: none; stroke: var(--plot); stroke-width: 1.7 } circle { fill: var(--plot) }
dl { display: flex; flex-wrap: wrap; gap: 1em 2em } dt { color: var(--soft); font-size: 13px }
dd { margin: 0; font-size: 1.25em } .wide { overflow-x: auto; margin: 1.5em 0 }
td, th { padding: 0 1em 0 0; text-align: right } th:first-child, td:first-child { text-align: left }
.key { display: inline-block; margin-right: 1em; white-space: nowrap }
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


def now(history: StatsFile) -> dict[str, Any] | None:
    """Return the statistics of a table's last samples; None if there are none."""
    samples, info = history.samples, history.told
    if not len(samples["time"]):
        return None
    last = {name: float(values[-1]) for name, values in samples.items()}
    change = changes({name: values[-1 - RECENT :] for name, values in samples.items()}, 1)
    line: dict[str, Any] = {name: last[name] for name in (*COUNTS, "rows", "cache_rows", "cache_slots")}
    line |= {name: last[name] for name in ("ram_bytes", "budget_bytes", "disk_bytes")}
    age = max(0.0, time.time() - last["time"])
    line |= {name: info.get(name, []) for name in ("pools", "members")}
    known = [pool["missed"] for pool in line["pools"] if pool.get("curve")]
    line |= {"kind": info.get("kind"), "missed": sum(known) if known else None, "split": best_split(line)}
    line |= {"table": Path(info["table"]).name, "pid": info["pid"], "age_s": age, "is_live": age < STALE_S}
    line["commit_age_s"] = max(0.0, time.time() - last["committed"])
    for name in ("steps_per_s", "hit_rate", "reads_per_s"):
        values = change[name]
        line[name] = float(values[-1]) if len(values) and np.isfinite(values[-1]) else None
    line["shares"] = {name: float(change[name][-1]) for name in PHASES if len(change[name])}
    return line


def best_split(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return the best split of a group's memory over its pools, by their curves; None if it is unknown."""
    pools = line["pools"]
    if len(pools) < 2 or not all(pool.get("curve") for pool in pools):
        return None
    options = [[SplitOption(point[0], point[1]) for point in pool["curve"]] for pool in pools]
    found = split(options, sum(pool["budget_bytes"] for pool in pools))
    if found is None:
        return None
    return {"memory": [one.nbytes for one in found], "missed": sum(one.cost for one in found)}


def changes(samples: dict[str, np.ndarray], most: int | None = None) -> dict[str, np.ndarray]:
    """Return the changes between samples; NaN if a process ended in between, or nothing happened.

    Args:
        samples: of a `StatsFile`.
        most: maximum number of intervals, each between two samples further apart; None: from each sample to the next.
    """
    count = len(samples["time"])
    chosen = np.unique(np.linspace(0, max(0, count - 1), min(count, (most or count) + 1)).astype(int))
    step = {name: np.diff(values[chosen]) for name, values in samples.items()}
    ends = np.cumsum(np.diff(samples["steps"], prepend=samples["steps"][:1]) < 0)  # another process counts from 0
    ends += np.cumsum(np.diff(samples["hits"], prepend=samples["hits"][:1]) < 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "time": samples["time"][chosen][1:],
            "steps_per_s": step["steps"] / step["time"],
            "reads_per_s": step["reads"] / step["time"],
            "hit_rate": step["hits"] / (step["hits"] + step["misses"]),
            **{name: step[f"{name}_s"] / step["time" if name in RARE else TIMED] for name in PHASES},
        }
    is_new = (np.diff(ends[chosen]) > 0) | (step[TIMED] <= 0)
    return {name: values if name == "time" else np.where(is_new, np.nan, values) for name, values in found.items()}


def here(pool: dict[str, Any]) -> int:
    """Return the index of the current size of a pool in its curve."""
    return min(range(len(pool["curve"])), key=lambda at: abs(pool["curve"][at][0] - pool["budget_bytes"]))


def which_pool(line: dict[str, Any], number: int) -> str:
    """Return the number of a pool for people, if there are several."""
    return f", pool {number + 1} of {len(line['pools'])}" if len(line["pools"]) > 1 else ""


def member_tables(members: Sequence[dict[str, Any]]) -> list[tuple[list[str], list[list[str]]]]:
    """Return the members of a group, those of a pool together: a heading, and a row of cells for each.

    Cells are rows with records, steps, and the misses per step by ``memory=`` of the pool.
    """
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for one in members:
        curve = one.get("curve") or []
        cells = [one["name"], format_whole(one["rows"]), format_whole(one["steps"])]
        sizes = tuple(f"{'' if at else 'missed: '}{format_bytes(nbytes)}" for at, (nbytes, _) in enumerate(curve))
        tables.setdefault(sizes, []).append([*cells, *(format_number(missed) for _, missed in curve)])
    return [(["member", "rows", "steps", *sizes], rows) for sizes, rows in tables.items()]


def of_split(line: dict[str, Any]) -> list[str]:
    """Return a line about the best split of a group's memory over its pools, if it is known."""
    found = line["split"]
    if found is None:
        return []
    sizes = ", ".join(map(format_bytes, found["memory"]))
    missed = f"{format_number(found['missed'])} instead of {format_number(line['missed'])}"
    return [f"  best split of the memory over pools: {sizes}; rows missed a step: {missed}"]


def page(histories: Sequence[StatsFile]) -> str:
    """Return one self-contained HTML page about tables."""
    parts = [part for history in histories for part in _of(history)]
    return "\n".join([f"{HEAD}<style>{STYLE}</style><body>", *parts, "</body></html>"])


def _of(history: StatsFile) -> Iterator[str]:
    line = now(history)
    yield f"<h1>{html.escape(str(history.told['table']))}</h1>"
    if line is None:
        yield "<p>No samples yet.</p>"
        return
    tiles = "".join(
        f"<div><dt>{html.escape(field.head)}</dt><dd>{html.escape(field.cell(line))}</dd></div>" for field in FIELDS[1:]
    )
    yield f"<dl>{tiles}</dl>"
    change, samples = changes(history.samples, POINTS), history.samples
    plots = [(field, change["time"], change[str(field.value)]) for field in RATES]
    plots += [(field, samples["time"], samples[str(field.value)]) for field in SIZES]
    drawn = [_plot(*one) for one in plots if np.nanmax(np.append(one[2], 0.0)) > 0]
    drawn.insert(len(RATES), _shares(change))
    drawn += [_curve(line, number, pool) for number, pool in enumerate(line["pools"]) if pool.get("curve")]
    yield f"<div class=plots>{''.join(drawn)}</div>"
    yield from (f"<p>{html.escape(text.strip())}</p>" for text in of_split(line))
    yield from (_table(head, rows) for head, rows in member_tables(line["members"]))


class _Box(NamedTuple):
    """The coordinates of a plot.

    Attributes:
        low, high: ends of the horizontal axis.
        most: top of the vertical axis; 0 is at the bottom.
    """

    low: float
    high: float
    most: float

    def point(self, x: float, y: float) -> tuple[float, float]:
        """Return the coordinates of a point, to a tenth of a unit."""
        across = LEFT + (RIGHT - LEFT) * (x - self.low) / max(self.high - self.low, 1e-9)
        up = BOTTOM - (BOTTOM - TOP) * y / self.most
        return round(float(across), 1), round(float(up), 1)

    def points(self, xs: np.ndarray, ys: np.ndarray) -> str:
        """Return the coordinates of points, as text."""
        return " ".join("{},{}".format(*self.point(x, y)) for x, y in zip(xs, ys, strict=True))

    def line(self, xs: np.ndarray, ys: np.ndarray) -> str:
        """Return the coordinates of a line. One of a single point is short, because a point is invisible."""
        if len(xs) > 1:
            return self.points(xs, ys)
        x, y = self.point(xs[0], ys[0])
        return f"{max(x - DASH, LEFT):.1f},{y} {min(x + DASH, RIGHT):.1f},{y}"

    def frame(self, form: Callable[[float], str], ticks: Sequence[tuple[float, str]]) -> str:
        """Return lines at 0, the middle and the top with their numbers, and labels below."""
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


def _figure(title: str, caption: str, drawn: str, legend: str = "") -> str:
    label = html.escape(f"{title}: {caption}")
    return (
        f"<figure><figcaption>{html.escape(title)} <span>{html.escape(caption)}</span></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{drawn}</svg>{legend}</figure>'
    )


def _over_time(times: np.ndarray, most: float, form: Callable[[float], str]) -> tuple[_Box, str]:
    box = _Box(float(times[0]), float(times[-1]), most)
    ticks = [(at, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))) for at in (box.low, box.high)]
    return box, box.frame(form, ticks if box.high > box.low else ticks[:1])


def _plot(field: Field, times: np.ndarray, values: np.ndarray) -> str:
    """Return a plot of numbers over time, with gaps at NaN."""
    most = float(np.nanmax(values))
    box, frame = _over_time(times, most, field.form)
    there = np.isfinite(values)
    cuts = np.flatnonzero(np.diff(there)) + 1
    runs = [part for part in np.split(np.arange(len(times)), cuts) if there[part[0]]]
    lines = "".join(f'<polyline points="{box.line(times[run], values[run])}"/>' for run in runs)
    end = field.form(float(values[there][-1]))
    return _figure(field.head, f"{end} at the end, {field.form(most)} at most", frame + lines)


def _shares(change: dict[str, np.ndarray]) -> str:
    """Return a stacked plot of each phase's share of the time."""
    times, parts = change["time"], {name: np.nan_to_num(change[name]) for name in PHASES}
    means = {name: float(values.mean()) if len(values) else 0.0 for name, values in parts.items()}
    shown = [name for name in PHASES if means[name] > LEAST_SHARE]
    if not shown:
        return ""
    below = np.cumsum([np.zeros(len(times)), *(parts[name] for name in shown)], axis=0)
    box, frame = _over_time(times, max(1.0, float(below[-1].max())), "{:.0%}".format)
    drawn, keys = "", ""
    for at, name in enumerate(shown):
        color = COLORS[PHASES.index(name)]
        around = np.concatenate([times, times[::-1]]), np.concatenate([below[at + 1], below[at][::-1]])
        drawn += f'<polygon points="{box.points(*around)}" fill="{color}"/>'
        keys += f'<span class=key><b style="background:{color}"></b>{name} {means[name]:.1%}</span>'
    text = "by phase, one on the other; rule, commit and compaction run beside the others"
    return _figure("Share of the time", text, drawn + frame, f"<p>{keys}</p>")


def _curve(line: dict[str, Any], number: int, pool: dict[str, Any]) -> str:
    """Return a plot of the misses of caches by size, which doubles from one line to the next."""
    points, at = pool["curve"], here(pool)
    xs = np.log2([max(1, nbytes) for nbytes, _, _ in points])
    ys = np.array([missed for _, missed, _ in points])
    box = _Box(xs[0], xs[-1], float(ys.max()) or 1.0)
    frame = box.frame(format_number, [(x, format_bytes(one[0])) for x, one in zip(xs, points, strict=True)])
    x, y = box.point(xs[at], ys[at])
    anchor, beside = ("end", -10) if x > (LEFT + RIGHT) / 2 else ("start", 10)
    spot = f'<circle cx="{x}" cy="{y}" r="5"/>'
    spot += f'<text class="here" x="{x + beside}" y="{y - 9:.1f}" text-anchor="{anchor}">you are here</text>'
    rows, new = format_count(round(pool["rows"]), "row"), format_number(pool["new"])
    caption = f"you are here: {format_bytes(points[at][0])}, {format_number(points[at][1])} of {rows}; {new} are new"
    title = f"Rows missed a step, by memory={which_pool(line, number)}"
    return _figure(title, caption, f"{frame}<polyline points='{box.points(xs, ys)}'/>{spot}")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[f"<th>{html.escape(cell)}</th>" for cell in head]]
    cells += [[f"<td>{html.escape(cell)}</td>" for cell in row] for row in rows]
    return "<div class=wide><table>" + "".join(f"<tr>{''.join(row)}</tr>" for row in cells) + "</table></div>"
