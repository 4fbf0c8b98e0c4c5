"""Advice: a line, once, when a table on disk would read much less with more memory, or as little with much less.

It goes to the logger ``embedrock.advice``, which prints it where nobody has set up logging. It is no warning, as
nothing is wrong: who makes errors of warnings is not to lose a run by it. ``EMBEDROCK_ADVICE=0`` keeps it quiet.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

from embedrock.spec.spec import Spec
from embedrock.storage.budget import MemoryBudget
from embedrock.storage.online_curve import AT_ONCE, RECENT, OnlineMissCurve
from embedrock.storage.ram_layout import memory_for
from embedrock.store.folder import Folder
from embedrock.store.manifest import GroupManifest
from embedrock.store.record_store import RecordStore
from embedrock.store.table_folder import TableFolder
from embedrock.system.ram import available_bytes
from embedrock.system.sizes import format_bytes

QUIET = "EMBEDROCK_ADVICE"  # a variable of the environment; 0: no advice
LOGGER = logging.getLogger("embedrock.advice")
MATTERS = 0.05  # of the rows of a step that are read from disk
PAYS = 0.25  # of the reads saved
SPARED = 0.005  # of the rows of a step, that may be read in addition with less memory
LARGE_BYTES = 1 << 30  # of memory=, which is worth to be given back
LEFT = 2  # of the RAM that is left, one part in so many may be asked for
MOSTLY = 0.5  # of the rows that a group misses, of one table
MOST_LINES = 3  # of one process
LOOKS = RECENT // AT_ONCE  # it is thought about so seldom ...
FIRST = 4 * LOOKS  # ... and then for the first time
SETTLED = 0.2  # of the rows that are missed, that may be new ones: before, a table is not as it will be

_told: weakref.WeakSet[Folder[Any]] = weakref.WeakSet()
_lines = 0


class Cached(NamedTuple):
    """A tier on disk, as advice sees it: its cache has so many slots, and RAM of a budget."""

    subject: str
    spec: Spec
    store: RecordStore
    watch: OnlineMissCurve
    slots: int
    budget: MemoryBudget


def consider(tier: Cached) -> None:
    """Say it if another size would clearly pay for a table on disk, or a group, that trains.

    Nobody is kept waiting: a thread says it, as whoever listens may ask the table.
    """
    global _lines
    table_folder, looks = tier.store.table_folder, tier.watch.looks
    if looks % LOOKS or looks < FIRST or table_folder in _told or _lines >= MOST_LINES:
        return
    if os.environ.get(QUIET) == "0":
        return
    text = of_more(tier) or of_less(tier)
    if text is None:
        return
    _told.add(table_folder)
    _lines += 1
    if _lines == MOST_LINES:
        text += " (Of other tables nothing is said: see `embedrock top`.)"
    with suppress(RuntimeError):  # the system allows no more threads
        threading.Thread(target=LOGGER.warning, args=("%s", text), name="embedrock-advice", daemon=True).start()


def of_more(tier: Cached) -> str | None:
    """Return what more memory would save, where that is much; None where it is not, or nobody knows."""
    watch, slots = tier.watch, tier.slots
    curve, told = watch.curve(), watch.told(slots)
    here, new = told.get("missed_x1"), told.get("missed_new", 0.0)
    if curve is None or here is None or new > SETTLED * here or here - new < MATTERS * curve.rows:
        return None
    for factor in (2, 4, 8):
        missed = told.get(f"missed_x{factor}")
        saved = 0.0 if missed is None else (here - missed) / (here - new)
        if missed is None or saved < PAYS:
            continue
        setting = tier.budget.setting(memory_for(tier.spec, factor * slots))
        if setting is None or setting.more * LEFT > available_bytes():
            return None
        return (
            f"{tier.subject}: {setting.share:.0%} more memory= would save {saved:.0%} of its reads from disk, "
            f"{here - new:,.0f} rows a step now, {missed - new:,.0f} then{_mostly(tier)}. {setting.remedy} {_MORE}"
        )
    return None


def _mostly(tier: Cached) -> str:
    """Return which member of a group misses most, where one does so for half of it or more."""
    missed = {number: sum(each) for number, each in tier.watch.curves_of_parts().items()}
    table_folder, total = tier.store.table_folder, sum(missed.values())
    if (
        len(missed) < 2
        or not isinstance(table_folder, TableFolder)
        or not isinstance(table_folder.manifest, GroupManifest)
    ):
        return ""
    first = max(missed, key=lambda number: missed[number])
    names = [
        one.name
        for one in table_folder.manifest.members
        if one.part == first and table_folder.stores[one.pool] is tier.store
    ]
    share = missed[first] / max(total, 1e-9)
    return f"; {share:.0%} of what it misses is of its table {names[0]!r}" if names and share >= MOSTLY else ""


def of_less(tier: Cached) -> str | None:
    """Return what half of the memory would do as well as all of it; None where it would not, or nobody knows."""
    told, curve = tier.watch.told(tier.slots), tier.watch.curve()
    here, less = told.get("missed_x1"), told.get("missed_x0.5")
    if curve is None or here is None or less is None or less - here > SPARED * curve.rows:
        return None
    setting = tier.budget.setting(memory_for(tier.spec, tier.slots // 2))
    if setting is None or -setting.more < LARGE_BYTES / 2:
        return None
    return (
        f"{tier.subject}: {format_bytes(-setting.more)} less memory= would read as little from disk, "
        f"{max(0.0, less - here):,.1f} rows a step more. {setting.remedy} {_MORE}"
    )


_MORE = f"`embedrock top` shows more, {QUIET}=0 keeps this quiet."
