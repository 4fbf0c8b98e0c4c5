"""What the numbers of tables tell that processes keep in files: now, and from each sample to the next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embedrock.machine.sizes import format_bytes
from embedrock.planner.split import SplitOption, split
from embedrock.table.numbers import COUNTS, PHASES, RARE, TIMED, History
from embedrock.terminal.tables import Field, format_number, format_whole

STALE_S = 10.0  # since the last sample, after which no process seems to train
RECENT = 5  # samples back, since which the rates of now are told
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


def now(history: History) -> dict[str, Any] | None:
    """Return what a table did in its last samples; None where there are none."""
    samples, told = history.samples, history.told
    if not len(samples["time"]):
        return None
    last = {name: float(values[-1]) for name, values in samples.items()}
    change = changes({name: values[-1 - RECENT :] for name, values in samples.items()}, 1)
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
    options = [[SplitOption(point[0], point[1]) for point in pool["curve"]] for pool in pools]
    found = split(options, sum(pool["budget_bytes"] for pool in pools))
    if found is None:
        return None
    return {"memory": [one.nbytes for one in found], "missed": sum(one.cost for one in found)}


def changes(samples: dict[str, np.ndarray], most: int | None = None) -> dict[str, np.ndarray]:
    """Return what happened between samples; NaN where a process ended in between, or nothing happened.

    Args:
        samples: of a `History`.
        most: times that are told, each between two samples further apart; None: from each sample to the next.
    """
    count = len(samples["time"])
    chosen = np.unique(np.linspace(0, max(0, count - 1), min(count, (most or count) + 1)).astype(int))
    step = {name: np.diff(values[chosen]) for name, values in samples.items()}
    ends = np.cumsum(np.diff(samples["steps"], prepend=samples["steps"][:1]) < 0)  # counts of another process are anew
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
    """Return which point of a curve is the size that a pool has."""
    return min(range(len(pool["curve"])), key=lambda at: abs(pool["curve"][at][0] - pool["budget_bytes"]))


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


def of_split(line: dict[str, Any]) -> list[str]:
    """Return a line about the best split of a group's memory over its pools, where it is known."""
    found = line["split"]
    if found is None:
        return []
    sizes = ", ".join(map(format_bytes, found["memory"]))
    missed = f"{format_number(found['missed'])} instead of {format_number(line['missed'])}"
    return [f"  best split of the memory over pools: {sizes}; rows missed a step: {missed}"]
