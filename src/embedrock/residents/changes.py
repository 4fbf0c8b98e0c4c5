"""What has changed of who has a record since it was saved last, so that a commit need not write all of it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.kernels.constants import SKETCH_LINE_BYTES
from embedrock.machine.arena import taken
from embedrock.store.history import Written

Arrays = Mapping[str, np.ndarray]
Columns = Mapping[str, Written]  # arrays, some of them to be written while they change
LINE_WORDS = SKETCH_LINE_BYTES // 8
CHANGED = "changed_"  # names of arrays that say what has changed begin so


def merged(saved: Sequence[Arrays], parts: Sequence[str]) -> dict[str, np.ndarray]:
    """Return as a whole what was saved: whole first, and then as changes of what is before.

    Args:
        saved: arrays by name, in the order in which they were saved.
        parts: prefixes of the names of arrays that may be changes; of others the last one counts.

    Raises:
        ArgumentError: the changes are not those of what is before.
    """
    whole = dict(saved[0])
    for later in saved[1:]:
        for prefix in parts:
            own = own_arrays(later, prefix)
            if own:
                before = own_arrays(whole, prefix)
                now = _changed(before, own) if any(name.startswith(CHANGED) for name in own) else own
                whole = {name: array for name, array in whole.items() if not name.startswith(prefix)}
                whole |= {f"{prefix}{name}": array for name, array in now.items()}
        whole |= {name: array for name, array in later.items() if not name.startswith(tuple(parts))}
    return whole


def copied(array: np.ndarray, at: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Return items of an array, as one of its own, for as long as a commit takes."""
    return taken(array, at, "a copy for a commit")


def own_arrays(arrays: Arrays, prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _changed(before: Arrays, changes: Arrays) -> dict[str, np.ndarray]:
    for name, change in _KINDS.items():
        if f"{CHANGED}{name}" in changes:
            return change(before, changes)
    raise damaged(f"changes of {', '.join(_KINDS)}")


def _lines(before: Arrays, changes: Arrays) -> dict[str, np.ndarray]:
    """Return a sketch some of whose lines are others."""
    words, at = int64(before, "sketch").copy(), int64(changes, "changed_lines")
    lines, rest = divmod(len(words), LINE_WORDS)
    new = int64(changes, "changed_sketch")
    if rest or not _ascend(at, lines) or len(new) != len(at) * LINE_WORDS:
        raise damaged("lines of the sketch that ascend, each with its bytes")
    words.reshape(lines, LINE_WORDS)[at] = new.reshape(-1, LINE_WORDS)
    return {"sketch": words}


def _places(before: Arrays, changes: Arrays) -> dict[str, np.ndarray]:
    """Return arrays of rows in some of whose places there are others, or none any more."""
    had, at, numbers = int64(before, "ids"), int64(changes, "changed_at"), int64(changes, "count")
    count = int(numbers[0]) if len(numbers) == 1 else -1
    made = {name: array for name, array in changes.items() if not name.startswith(CHANGED) and name != "count"}
    if not _ascend(at, count) or count - len(had) > np.count_nonzero(at >= len(had)):
        raise damaged(f"places of rows that ascend, below {count}, with all that are new")
    for name in ("ids", "last", "marks"):
        old, new = int64(before, name), int64(changes, f"{CHANGED}{name}")
        if len(new) != len(at) or len(old) != len(had):
            raise damaged("what is known of rows for each place")
        made[name] = np.concatenate([old, np.zeros(max(0, count - len(old)), np.int64)])[:count]
        made[name][at] = new
    return made


def _counts(before: Arrays, changes: Arrays) -> dict[str, np.ndarray]:
    """Return counts of ids some of which are others; 0: it is no more."""
    ids, counts = int64(changes, "changed_ids"), int64(changes, "changed_counts")
    old, old_counts = int64(before, "ids"), int64(before, "counts")
    if len(ids) != len(counts) or len(old) != len(old_counts) or (ids[1:] <= ids[:-1]).any():
        raise damaged("ids that ascend, each with a count")
    stays, is_there = ~np.isin(old, ids), counts != 0
    all_ids = np.concatenate([old[stays], ids[is_there]])
    order = np.argsort(all_ids)
    return {"ids": all_ids[order], "counts": np.concatenate([old_counts[stays], counts[is_there]])[order]}


_KINDS: dict[str, Callable[[Arrays, Arrays], dict[str, np.ndarray]]] = {
    "lines": _lines,
    "at": _places,
    "counts": _counts,
}


def _ascend(places: np.ndarray, end: int) -> bool:
    if not len(places):
        return end >= 0
    return bool((places[1:] > places[:-1]).all()) and places[0] >= 0 and places[-1] < end


def int64(arrays: Arrays, name: str) -> np.ndarray:
    """Return an array of int64 (n,); an empty one where there is none.

    Raises:
        ArgumentError: it is another.
    """
    array = np.asarray(arrays.get(name, np.empty(0, np.int64)))
    if array.dtype != np.int64 or array.ndim != 1:
        raise damaged(f"`{name}` as int64 (n,)")
    return np.ascontiguousarray(array)


def damaged(expected: str) -> ArgumentError:
    """Return the error of a saved state that says something else of who has a record."""
    return ArgumentError(f"what is saved of a table's admission and eviction must be {expected}: it is damaged.")
