"""Errors of invalid ids for `embedrock.batch.ids` and for layers: the value, its place, and the remedy.

`tests/batch/test_wrong_ids.py` runs the code that the messages recommend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from embedrock.errors import IdError, IdTypeError

Place = Callable[[int], str]  # describes the place of a position of flat ids

AS_INTEGERS = "Pass np.asarray(ids).astype('int64')."
AS_BITS = "Hashes of 64 bits go by their bits into a table with rows=None: np.asarray(ids, np.uint64).view(np.int64)."
OF_STRINGS = (
    "Make integers of words by a hash that is the same everywhere, er.hash_ids(ids) (er = embedrock), into a table "
    "with rows=None, or er.hash_ids(ids, buckets=N) into one of N rows; or by a vocabulary, which is kept with the "
    "model: er.Vocabulary(path).add(ids). In a Keras model erk.Hashing() does the same as er.hash_ids. Not by Python's "
    "hash(), which differs in every process."
)
OF_LISTS = (
    "Lists of ids are bags: `ids, offsets = er.jagged(ids)` gives those of all lists, end to end, and where each list "
    "begins (er = embedrock)."
)
# Lists, as objects: NumPy makes floats of whole numbers beside NaN, and of hashes beside small numbers.
_EACH = "for id in np.asarray(ids, object).ravel()]"
_MIXED = (
    "First make bytes of all of them, `ids = np.array([b'' if id is None or str(id != id) != 'False' else id if "
    f"isinstance(id, bytes) else str(id).encode() {_EACH}, object).reshape(np.shape(ids))`. "
)
_LACKING = "Some are missing. Give these an id of their own by missing=, as er.hash_ids(ids, missing=-1) does. "
_AS_LISTED = f"Pass np.array([int(id) {_EACH}, np.int64).reshape(np.shape(ids))."
_MISSING = "Leave out what is missing{left_out}, or give it an id that no other has, 0 for example: {filled}."
_FILLED = f"np.array([0 if str(id) in ('None', 'nan', '<NA>') else int(id) {_EACH}, np.int64).reshape(np.shape(ids))"
_LONG = (
    "Ids have 64 bits. Keep as many of a longer hash, for a table with rows=None: "
    f"np.array([int(id) % 2**64 {_EACH}, np.uint64).view(np.int64).reshape(np.shape(ids))."
)
# Columns with missing ids beside whole numbers: code that leaves them out, and code that fills them.
_OF_COLUMNS = {
    "pandas": ("ids.dropna()", "ids.fillna(0)"),
    "polars": ("ids.drop_nulls()", "ids.fill_null(0)"),
    "pyarrow": ("ids.drop_null()", "ids.fill_null(0)"),
}
MOST_GROWN = 1 << 40  # larger ids are hashes, or numbers of another system, rather than rows
OPEN_IDS = "For any int64, make it with rows=None; a layer, with num_embeddings=None or input_dim=None."
_CAST = " (That is what a cast makes of NaN: ids that are missing.)"
_ROUNDED = (
    "Above 2**{bits} not every whole number is a {dtype}: ids were rounded, to those of others, before they came here. "
    "Read them as integers where they become floats: pandas.read_csv(..., dtype={{'id': 'Int64'}}), or polars or "
    "Arrow, whose columns of integers may have missing ones."
)


def bounds(rows: int | None) -> tuple[int, int]:
    """Return the lowest id of a table, and one more than the highest."""
    return (-(2**63), 2**63) if rows is None else (0, rows)


def in_array(shape: Sequence[int], what: str = "ids") -> Place:
    """Return a function that describes the place of a position in a flattened array.

    Example:
        >>> in_array((2, 3))(4)
        'at [1, 1] of ids of shape (2, 3)'
    """
    return lambda position: (
        f"at {[int(k) for k in np.unravel_index(position, shape)]} of {what} of shape {tuple(shape)}"
    )


def in_bags(ends: np.ndarray, shape: Sequence[int]) -> Place:
    """Return a function that describes the place of an id in bags, by the end of each bag.

    Example:
        >>> in_bags(np.array([2, 2, 5]), (5,))(3)
        'at [3] of ids of shape (5,), in bag 2'
    """
    return lambda position: f"{in_array(shape)(position)}, in bag {np.searchsorted(ends, position, side='right')}"


def in_jagged(offsets: np.ndarray) -> Place:
    """Return a function that describes the place of a value in a jagged tensor, by its offsets.

    Example:
        >>> in_jagged(np.array([0, 2, 2, 5]))(3)
        'at [2, 1] of jagged ids (3, j)'
    """

    def place(position: int) -> str:
        part = int(np.searchsorted(offsets, position, side="right")) - 1
        return f"at [{part}, {position - int(offsets[part])}] of jagged ids ({len(offsets) - 1}, j)"

    return place


def outside(ids: np.ndarray, rows: int | None, subject: str, place: Place | None) -> IdError:
    """Return the error for ids outside a table: see `embedrock.batch.ids.check_range`."""
    flat, (low, high) = ids.reshape(-1), bounds(rows)
    # Compared as the ids' own type, in which `high` may not fit.
    bad = (flat < low) if int(flat.min()) < low else (flat > high - 1)
    position = int(np.argmax(bad))
    where = place(position) if place is not None else in_array(ids.shape)(position)
    remedy = AS_BITS if int(flat.max()) >= 2**63 or rows is None else f"{_more_rows(flat, low, high)}{OPEN_IDS}"
    cast = _CAST if flat[position] == -(2**63) else ""
    return IdError(f"`ids` of {subject} must lie in [{low}, {high}): got {flat[position]} {where}.{cast} {remedy}")


def _more_rows(flat: np.ndarray, low: int, high: int) -> str:
    lowest, highest = int(flat.min()), int(flat.max())
    if lowest < low or highest < high:
        return ""
    if highest < MOST_GROWN:
        return f"For more rows, grow({highest + 1}). "
    return f"Hashes go into as many buckets as there are rows: er.hash_ids(strings, buckets={high}). "


def masked(ids: Any, subject: str) -> IdTypeError:
    """Return the error for a masked array with masked values."""
    where = in_array(ids.shape)(int(np.argmax(np.ma.getmaskarray(ids))))
    return IdTypeError(
        f"`ids` of {subject} must be integers: got a masked array, with a missing one {where}. Leave out what is "
        "missing, ids.compressed(), or give it an id of its own, 0 for example: ids.filled(0)."
    )


def told(array: np.ndarray, given: Any) -> tuple[str, str]:
    """Describe the contents of an array without integers, and the remedy.

    Args:
        array: NumPy's conversion of the ids.
        given: the original argument, of which NumPy may have made floats.
    """
    kind = array.dtype.kind
    if kind == "f":
        return _floats(array, given)
    if kind == "b":
        return "dtype bool", "Pass np.flatnonzero(mask) for where a mask is True, or np.asarray(ids).astype('int64')."
    if kind in "USTO" and array.size:
        return _objects(array, given)
    return f"dtype {array.dtype}", AS_INTEGERS if not array.size else "Pass an array of integers."


def _floats(array: np.ndarray, given: Any) -> tuple[str, str]:
    got, flat, exact = f"dtype {array.dtype}", array.reshape(-1), _has_integers(given)
    lost = "" if exact else rounded(flat, np.finfo(array.dtype).nmant + 1, str(array.dtype))
    absent = np.isnan(flat)
    bad = ~absent & (~(flat == np.trunc(flat)) | np.isinf(flat))
    if bad.any() or absent.any():
        position = int(np.argmax(bad if bad.any() else absent))
        where = in_array(array.shape)(position)
        if absent[position]:
            if exact:
                return f"a missing one {where}", missing(given)
            # A NaN is no null of polars and Arrow: code that drops nulls keeps it.
            remedy = lost or missing(given if _library(given) == "pandas" else None)
            return f"{got}, nan {where}", f"NumPy and pandas make floats of ids beside NaN. {remedy}"
        return f"{got}, {flat[position]} {where}", "That is no whole number: pass ids, not weights."
    if not lost and flat.size and float(flat.max()) >= 2.0**63:  # lists of small and of large hashes
        return got, _LONG if float(flat.min()) < 0 else AS_BITS
    return got, lost or (_AS_LISTED if isinstance(given, list | tuple) else AS_INTEGERS)


def rounded(values: np.ndarray, bits: int, dtype: str) -> str:
    """Return the remedy for floats above 2**bits, which were rounded; "" if there are none."""
    finite = values[np.isfinite(values)]
    is_lost = finite.size and float(np.abs(finite).max()) > 2.0**bits
    return _ROUNDED.format(bits=bits, dtype=dtype) if is_lost else ""


def missing(given: Any) -> str:
    """Return the remedy for ids with missing values."""
    left_out, filled = _OF_COLUMNS.get(_library(given), ("", _FILLED))
    if hasattr(getattr(given, "type", None), "index_type"):  # nulls may be among the values of a dictionary
        left_out, filled = (f"ids.cast(ids.type.value_type){code.removeprefix('ids')}" for code in (left_out, filled))
    if _library(given) == "pandas":
        if str(getattr(given, "dtype", "")) == "category":  # takes no value that it does not have
            filled = "ids.astype(object).fillna(0)"
        if not _has_hashes(given):  # hashes keep their bits
            left_out, filled = f'{left_out}.to_numpy("int64")', f'{filled}.to_numpy("int64")'
    return _MISSING.format(left_out=left_out and f", {left_out}", filled=filled)


def _has_hashes(given: Any) -> bool:
    """Return whether a column of pandas has, or may have, ids that are no int64."""
    kind = getattr(getattr(given, "dtype", None), "kind", "O")
    values = np.asarray(given, object).flat if kind == "O" else ()
    return kind == "u" or any(_is_integer(value) and value >= 2**63 for value in values)


def _library(given: Any) -> str:
    return type(given).__module__.partition(".")[0]


def _has_integers(given: Any) -> bool:
    """Return whether ids that NumPy makes floats of are integers, except for missing ones."""
    library = _library(given)
    if library == "polars":
        kinds = given.dtypes if hasattr(given, "dtypes") else [given.dtype]
        return all(kind.is_integer() for kind in kinds)
    if library == "pyarrow":
        kind = getattr(given, "type", None)  # tables have none
        return str(getattr(kind, "value_type", kind)).lstrip("u").startswith("int")
    is_listed = library == "pandas" or isinstance(given, list | tuple)
    return is_listed and all(_is_exact(value) or _is_missing(value) for value in np.asarray(given, object).ravel())


def _objects(array: np.ndarray, given: Any) -> tuple[str, str]:
    flat = array.reshape(-1)
    words = [k for k, value in enumerate(flat) if isinstance(value, str | bytes)]
    absent = [k for k, value in enumerate(flat) if _is_missing(value)]
    others = [k for k, value in enumerate(flat) if not _is_exact(value) and not _is_missing(value)]
    position = next(iter(words or others or absent), 0)
    got = f"dtype {array.dtype}, {_shown(flat[position])} {in_array(array.shape)(position)}"
    if words:
        kinds = {type(value) for value in flat if isinstance(value, str | bytes) or not _is_missing(value)}
        return got, (_MIXED if len(kinds) > 1 else _LACKING if len({*map(type, flat)}) > 1 else "") + OF_STRINGS
    if absent and not others:
        return got, missing(given)
    if others:
        value = flat[position]
        if isinstance(value, list | tuple | np.ndarray):
            return got, OF_LISTS
        is_set = not array.shape and isinstance(value, Iterable)
        return got, "Pass list(ids), if it has integers." if is_set else "Pass integers."
    beyond = [k for k, value in enumerate(flat) if not -(2**63) <= value < 2**63]
    if not beyond:
        return f"dtype {array.dtype}", AS_INTEGERS if all(map(_is_integer, flat)) else _AS_LISTED
    return f"{flat[beyond[0]]} {in_array(array.shape)(beyond[0])}", _LONG


def _is_exact(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and value.is_integer() and abs(value) <= 2**53)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_missing(value: Any) -> bool:
    return str(value) in ("None", "nan", "<NA>")  # the last is pandas', which cannot be compared


def _shown(value: Any) -> str:
    if isinstance(value, str):  # np.str_ and np.bytes_ would show their types
        value = str(value)
    text = repr(bytes(value) if isinstance(value, bytes) else value)
    return text if len(text) <= 40 else f"{text[:37]}..."
