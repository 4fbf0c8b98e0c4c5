"""Views of the statistics files of tables, now and over time, and the words of them for people."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedrock.cli.terminal.tables import Field, format_number, format_whole
from embedrock.planner.split import SplitOption, split
from embedrock.system.platform import is_running
from embedrock.system.sizes import format_bytes
from embedrock.table.numbers import COUNTS, PHASES, RARE, TIMED, StatsFile

STALE_S = 10.0  # since the last sample: then no process seems to train ...
MISSED = 3  # ... or so many samples are missing
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
LEAST = ("reads/s", "missed a step", "budget", "disk", "age s", "commit", "hits")  # left out first, where it is narrow


def now(history: StatsFile) -> dict[str, Any] | None:
    """Return the statistics of a table's last samples; None if there are none."""
    samples, info = history.samples, history.told
    if not len(samples["time"]):
        return None
    last = {name: float(values[-1]) for name, values in samples.items()}
    change = changes({name: values[-1 - RECENT :] for name, values in samples.items()}, 1)
    sizes = "rows", "cache_rows", "cache_slots", "ram_bytes", "budget_bytes", "disk_bytes"
    line: dict[str, Any] = {name: last[name] for name in (*COUNTS, *sizes)}
    age, ended = max(0.0, time.time() - last["time"]), info.get("ended")
    line |= {name: info.get(name, []) for name in ("pools", "members")}
    known = [pool["missed"] for pool in line["pools"] if pool.get("curve")]
    line |= {"kind": info.get("kind"), "missed": sum(known) if known else None, "split": best_split(line)}
    line |= {"table": Path(info["table"]).name, "age_s": age, "ended": ended}
    line |= {name: info.get(name) for name in ("pid", "host", "spec")}
    line["is_live"] = ended is None and age < max(STALE_S, MISSED * info.get("every", 0.0))
    line["steps"] = max(last["steps"], info.get("steps", 0.0))
    at = ended or time.time()
    line["commit_age_s"] = max(0.0, at - last["committed"]) if last["committed"] else None  # None: in RAM
    for name in ("steps_per_s", "hit_rate", "reads_per_s"):
        values = change[name]
        line[name] = float(values[-1]) if len(values) and np.isfinite(values[-1]) else None
    line["shares"] = {name: float(change[name][-1]) for name in PHASES if len(change[name])}
    return line


def state(line: dict[str, Any]) -> str:
    """Return whether and when the run of a line of `now` ended, for people; "" while it trains."""
    if line["ended"] is not None:
        return f"ended at {moment(line['ended'])}, after step {format_whole(line['steps'])}"
    if line["is_live"]:
        return ""
    is_here, of = line["host"] == socket.gethostname(), f"process {line['pid']}"
    runs = is_running(line["pid"]) if is_here else None
    if runs is False:
        at = f"killed after {moment(time.time() - line['age_s'])}, step {format_whole(line['steps'])}"
        return f"{of} is gone: {at}"
    told = f"no sample for {line['age_s']:.0f} s"
    if runs:
        return f"{told}, though {of} is there"
    return f"{told}: does {of} run{'' if is_here else ' on ' + str(line['host'])}?"


def moment(at: float) -> str:
    """Return a time since 1970 for people, with the date unless that is today's."""
    there, today = (time.strftime("%Y-%m-%d", time.localtime(one)) for one in (at, time.time()))
    return time.strftime("%H:%M:%S" if there == today else "%Y-%m-%d %H:%M:%S", time.localtime(at))


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
