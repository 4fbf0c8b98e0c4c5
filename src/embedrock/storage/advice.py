"""Advice on `memory=`: one log line when a table on disk would gain from more, or lose nothing by less.

The logger is ``embedrock.advice``. The line is not a Python warning, because nothing is wrong: programs that turn
warnings into errors go on. ``EMBEDROCK_ADVICE=0`` disables it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from contextlib import suppress
from typing import Any

from embedrock.storage.online_curve import AT_ONCE, RECENT
from embedrock.storage.ram_layout import memory_for
from embedrock.store.folder import Folder
from embedrock.store.table_folder import TableFolder
from embedrock.system.log import tell
from embedrock.system.ram import available_bytes
from embedrock.system.sizes import format_bytes

QUIET = "EMBEDROCK_ADVICE"  # environment variable; 0 disables advice
NAME = "embedrock.advice"  # of the logger, and of the thread that logs
MATTERS = 0.05  # least share of a step's rows that is read from disk
PAYS = 0.25  # least share of the reads that more memory saves
SPARED = 0.005  # share of a step's rows that less memory may read in addition
LARGE_BYTES = 1 << 30  # least part of memory= that is worth giving back
LEFT = 2  # advice requests at most 1/LEFT of the free RAM
MOSTLY = 0.5  # share of a group's misses from which one table is named
MOST_LINES = 3  # per process
LOOKS = RECENT // AT_ONCE  # looks between two decisions ...
FIRST = 4 * LOOKS  # ... and before the first one
SETTLED = 0.2  # largest share of new rows among the misses; above it, a table still grows

_advised: weakref.WeakSet[Folder[Any]] = weakref.WeakSet()
_lines = 0


def consider(tier: Any) -> None:
    """Log advice if another size would clearly pay for a `DiskBackend`, of a table or a group, that trains.

    A thread of its own logs it, because a log handler may call the table.
    """
    global _lines
    table_folder, looks = tier.store.table_folder, tier.watch.looks
    if looks % LOOKS or looks < FIRST or table_folder in _advised or _lines >= MOST_LINES:
        return
    if os.environ.get(QUIET) == "0":
        return
    text = of_more(tier) or of_less(tier)
    if text is None:
        return
    _advised.add(table_folder)
    _lines += 1
    if _lines == MOST_LINES:
        text += " (Of other tables nothing is said: see `embedrock top`.)"
    with suppress(RuntimeError):  # the system allows no more threads
        threading.Thread(target=tell, args=(text, logging.WARNING, NAME), name=NAME, daemon=True).start()


def of_more(tier: Any) -> str | None:
    """Return how much more memory would save; None if that is little or unknown."""
    watch, slots = tier.watch, tier.placement.slots
    curve, told = watch.curve(), watch.told(slots)
    here, new = told.get("missed_x1"), told.get("missed_new", 0.0)
    if curve is None or here is None or new > SETTLED * here or here - new < MATTERS * curve.rows:
        return None
    for factor in (2, 4, 8):
        missed = told.get(f"missed_x{factor}")
        saved = 0.0 if missed is None else (here - missed) / (here - new)
        if missed is None or saved < PAYS:
            continue
        setting = tier.budget.pool.setting(tier.budget.nbytes, memory_for(tier.spec, factor * slots))
        if setting is None or setting.more * LEFT > available_bytes():
            return None
        return (
            f"{tier.subject}: {setting.share:.0%} more memory= would save {saved:.0%} of its reads from disk, "
            f"{here - new:,.0f} rows a step now, {missed - new:,.0f} then{_mostly(tier)}. {setting.remedy} {_MORE}"
        )
    return None


def _mostly(tier: Any) -> str:
    """Return a clause that names the member with at least `MOSTLY` of a group's misses; "" without one."""
    missed = {number: sum(each) for number, each in tier.watch.curves_of_parts().items()}
    table_folder, total = tier.store.table_folder, sum(missed.values())
    if len(missed) < 2 or not isinstance(table_folder, TableFolder):
        return ""
    first = max(missed, key=lambda number: missed[number])
    names = [
        one.name
        for one in table_folder.manifest.members
        if one.part == first and table_folder.stores[one.pool] is tier.store
    ]
    share = missed[first] / max(total, 1e-9)
    return f"; {share:.0%} of what it misses is of its table {names[0]!r}" if names and share >= MOSTLY else ""


def of_less(tier: Any) -> str | None:
    """Return advice to halve the memory if that costs almost no reads; None otherwise, or if it is unknown."""
    told, curve = tier.watch.told(tier.placement.slots), tier.watch.curve()
    here, less = told.get("missed_x1"), told.get("missed_x0.5")
    if curve is None or here is None or less is None or less - here > SPARED * curve.rows:
        return None
    setting = tier.budget.pool.setting(tier.budget.nbytes, memory_for(tier.spec, tier.placement.slots // 2))
    if setting is None or -setting.more < LARGE_BYTES / 2:
        return None
    return (
        f"{tier.subject}: {format_bytes(-setting.more)} less memory= would read as little from disk, "
        f"{max(0.0, less - here):,.1f} rows a step more. {setting.remedy} {_MORE}"
    )


_MORE = f"`embedrock top` shows more, {QUIET}=0 keeps this quiet."
