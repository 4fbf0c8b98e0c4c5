"""`moved`: the row lifecycle of a part of a table, made of those of other parts when ranks are more or fewer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embedrock.admission.copy_on_write import Arrays, own_arrays
from embedrock.admission.lifecycle import COUNTS, NOBODY, PARTS, PREFIX, UNTOLD, RowLifecycle
from embedrock.batch.ids import owners
from embedrock.spec.spec import Spec

OF_SEGMENTS = ("segments", "count", "hand")  # arrays of a tracker with an item for each segment
OF_TABLE = ("ticks", "events", "lines", "room")  # arrays that are the same in all parts


def moved(spec: Spec, subject: str, sources: Sequence[tuple[int, RowLifecycle]], owned: np.ndarray) -> RowLifecycle:
    """Return the lifecycle of a part of a table. Statistics of a source go to the part with its first segment.

    Args:
        spec: of the table, with segments.
        subject: the part, for error messages.
        sources: lifecycles of other parts as of one step, each with its first segment.
        owned: bool (segments,), the segments of the part.
    """
    for _, source in sources:
        source.begin_period(source.steps + 1)
    states = [source.state(is_copy=False) for _, source in sources]
    numbers = states[0][f"{PREFIX}numbers"].copy()
    numbers[-len(COUNTS) :] = 0
    for (first, _), state in zip(sources, states, strict=True):
        numbers[-len(COUNTS) :] += owned[first] * state[f"{PREFIX}numbers"][-len(COUNTS) :]
    ticks = [state.get(f"{PREFIX}uses_ticks", NOBODY) for state in states]
    newest = states[max(range(len(states)), key=lambda k: ticks[k][-1:].tolist())]  # machines' clocks differ
    arrays = {**newest, f"{PREFIX}numbers": numbers}
    for name in (f"{PREFIX}{name}" for name in UNTOLD):
        ids = np.concatenate([NOBODY, *(state[name] for state in states if name in state)])
        arrays |= {name: ids[owned[owners(ids, len(owned))]]} if any(name in state for state in states) else {}
    for prefix in PARTS:
        own = _joined([own_arrays(state, prefix) for state in states], owned)
        arrays |= {f"{prefix}{name}": array for name, array in own.items()}
    made = RowLifecycle(spec, subject)
    made.resume([arrays])
    made.unsaved()
    return made


def _joined(parts: Sequence[Arrays], owned: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays of one counter or tracker, of the owned segments of all parts."""
    found: dict[str, list[np.ndarray]] = {}
    for part in parts:
        segments = part["segments"] if "segments" in part else owners(part.get("ids", NOBODY), len(owned))
        stays = owned[segments]
        for name, array in part.items():
            if name in OF_TABLE:
                continue
            chosen = stays if name in OF_SEGMENTS or "segments" not in part else np.repeat(stays, _sizes(part, array))
            found.setdefault(name, []).append(array[chosen])
    made = {name: np.concatenate(arrays) for name, arrays in found.items()}
    if "counts" in made:
        order = np.argsort(made["ids"])
        made = {name: array[order] for name, array in made.items()}
    return made


def _sizes(part: Arrays, array: np.ndarray) -> np.ndarray | int:
    """Return the number of items that each segment of a part has in an array."""
    return part["count"] if "count" in part else len(array) // max(1, len(part["segments"]))
