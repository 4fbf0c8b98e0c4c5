"""Ids as callers pass them, checked before anything looks at a row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embedrock.errors import IdError, IdTypeError


def check_ids(ids: npt.ArrayLike, rows: int | None, subject: str) -> np.ndarray:
    """Return ids as a C-contiguous int64 array of their own shape.

    Args:
        ids: integers of any kind and shape.
        rows: they must lie in ``[0, rows)``; None: in int64.
        subject: the table, for error messages.

    Raises:
        IdError: an id lies outside the table.
        IdTypeError: ids are not integers.
    """
    array = np.asarray(ids)
    if array.size == 0 and not isinstance(ids, np.ndarray):
        array = array.astype(np.int64)  # an empty list has no integers to tell its type by
    if array.dtype.kind not in "iu":
        raise IdTypeError(f"`ids` of {subject} must be integers: got dtype {array.dtype}. Pass ids.astype('int64').")
    check_range(array, rows, subject)
    return np.ascontiguousarray(array, np.int64).reshape(array.shape)


def check_range(ids: np.ndarray, rows: int | None, subject: str) -> None:
    """Raise `IdError` unless all ids lie in the table."""
    if not ids.size:
        return
    low, high = (-(2**63), 2**63) if rows is None else (0, rows)
    if int(ids.min()) >= low and int(ids.max()) < high:
        return
    flat = ids.reshape(-1)
    # Compared as the ids' own type, in which `high` may not fit.
    outside = (flat < low) if int(flat.min()) < low else (flat > high - 1)
    position = int(np.argmax(outside))
    remedy = "Pass rows=None for open ids." if rows is not None else "Open ids are int64."
    raise IdError(
        f"`ids` of {subject} must lie in [{low}, {high}): got {flat[position]} at position {position}. {remedy}"
    )
