"""Checks of the ids that callers pass, before any row is read."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from embedrock.batch import wrong_ids
from embedrock.batch.wrong_ids import Place
from embedrock.errors import IdTypeError

_INT64 = np.dtype(np.int64)
HASH_BITS = 32
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def check_ids(ids: npt.ArrayLike, rows: int | None, subject: str) -> np.ndarray:
    """Return ids as a C-contiguous int64 array of their own shape.

    Args:
        ids: integers of any kind and shape.
        rows: the table has ids in ``[0, rows)``; None: any int64.
        subject: the table, for error messages.

    Raises:
        IdError: an id lies outside the table.
        IdTypeError: ids are not integers.
    """
    is_ready = are_ids(ids)
    array = ids if is_ready else _array(ids, subject)
    check_range(array, rows, subject)
    return array if is_ready else np.array(array, np.int64, order="C")


def are_ids(ids: npt.ArrayLike) -> TypeGuard[np.ndarray]:
    """Return whether ids need no conversion by `check_ids`, except for their range."""
    return type(ids) is np.ndarray and ids.dtype is _INT64 and ids.flags.c_contiguous and ids.flags.aligned


def _array(ids: npt.ArrayLike, subject: str) -> np.ndarray:
    try:
        array = np.asarray(ids)
    except ValueError as error:  # lists of several lengths
        raise IdTypeError(
            f"`ids` of {subject} must be integers in one shape: got lists of several lengths ({error}). "
            f"{wrong_ids.OF_LISTS}"
        ) from error
    except Exception as error:  # polars reads hashes in CSV as Int128, of which NumPy has none
        if "Int128" not in str(getattr(ids, "dtype", "")):
            raise
        raise IdTypeError(  # may be hashes of 64 bits, or longer ones
            f"`ids` of {subject} must be integers of 64 bits: got dtype Int128. Hashes go by their bits into a table "
            "with rows=None: np.array([id % 2**64 for id in ids.drop_nulls()], np.uint64).view(np.int64)."
        ) from error
    if isinstance(ids, np.ma.MaskedArray) and np.ma.is_masked(ids):
        raise wrong_ids.masked(ids, subject)
    if array.size == 0 and not isinstance(ids, np.ndarray):
        array = array.astype(np.int64)  # an empty list has no integers to infer a type from
    if array.dtype.kind not in "iu":
        got, remedy = wrong_ids.told(array, ids)
        raise IdTypeError(f"`ids` of {subject} must be integers: got {got}. {remedy}")
    return array


def check_range(ids: np.ndarray, rows: int | None, subject: str, place: Place | None = None) -> None:
    """Raise `IdError` unless all ids lie in the table.

    Args:
        ids: integers of any kind and shape.
        rows, subject: as for `check_ids`.
        place: describes the place of a position of the flat ids; None: in an array of their shape.
    """
    if not ids.size:
        return
    low, high = wrong_ids.bounds(rows)
    is_signed = rows is None or ids.dtype is not _INT64  # as unsigned numbers, negative ids lie beyond all others
    # `ids.min()` calls these in C, by way of Python.
    least, ordered = (np.minimum.reduce(ids, axis=None), ids) if is_signed else (low, ids.view(np.uint64))
    if int(least) < low or int(np.maximum.reduce(ordered, axis=None)) >= high:
        raise wrong_ids.outside(ids, rows, subject, place)


def owners(ids: np.ndarray, ranks: int, bits: int = HASH_BITS) -> np.ndarray:
    """Return the ranks that own the rows of ids, int64 (n,).

    Args:
        ids: of the rows.
        ranks: number of ranks.
        bits: number of bits of the hash that decide. Ids with equal bits are of one rank.

    Example:
        >>> owners(np.arange(8), 2).tolist()
        [0, 1, 0, 1, 0, 0, 1, 0]
    """
    mixed = np.asarray(ids, np.int64).view(np.uint64) * _MULTIPLIER
    return (((mixed >> np.uint64(64 - bits)) * np.uint64(ranks)) >> np.uint64(bits)).astype(np.int64)
