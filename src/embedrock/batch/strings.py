"""`hash_ids`: ids of strings, the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.batch.plan import bounds_of
from embedrock.batch.wrong_ids import in_array, missing
from embedrock.errors import ArgumentError, IdTypeError, with_article

MOST_BUCKETS = 2**63 - 1
# Missing values become None, to which `missing` applies. Comparing one gives neither True nor False.
_AS_BYTES = (
    "Make bytes of all of them: np.array([None if value is None or str(value != value) != 'False' else bytes(value) if "
    "isinstance(value, bytes | bytearray | memoryview) else str(value).encode() for value in np.asarray(values, "
    "object).ravel()], object).reshape(np.shape(values))."
)
_NESTED = {list, tuple, np.ndarray}


class Strings(NamedTuple):
    """Concatenated strings, as UTF-8.

    Attributes:
        data: uint8, the bytes.
        starts: int64 (n,), where each string begins.
        ends: int64 (n,), where each string ends.
    """

    data: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def hash_ids(
    values: Any, *, salt: int | tuple[int, int] = 0, buckets: int | None = None, missing: int | None = None
) -> np.ndarray:
    """Return ids of strings, int64 of the same shape. Equal strings have equal ids in all processes, on all machines.

    The id of a string is SipHash-2-4 of its UTF-8 bytes (Aumasson and Bernstein, 2012), keyed by `salt`, modulo
    `buckets`. TensorFlow has the same function: ``tf.strings.to_hash_bucket_strong(values, buckets, salt)`` and
    ``keras.layers.Hashing(buckets, salt=salt)``.

    Two strings may get one id. Of n strings, about n^2 / (2 buckets) pairs do. With the default buckets, that is one
    pair among 4 * 10^9 strings. Among 10^8 strings the chance of any pair is 1 in 1,800.

    Args:
        values: strings or bytes: an array, a list, nested lists, a Series, an Arrow array, a tensor of TensorFlow.
        salt: a number below 2**64, used twice, or a pair of them. Another salt gives other ids. Give each table its own
            salt if users could choose strings that collide.
        buckets: number of ids; None: 2**63 - 1, for a table with ``rows=None``. For ``rows=N`` pass N.
        missing: id of missing values (None, NaN, pandas' NA, nulls of polars and Arrow, masked ones). No string has the
            id -1, or `buckets` and above. None: they are an error.

    Raises:
        IdTypeError: a value is missing, without `missing`; or is no string or bytes, or no Unicode text.
        ArgumentError: a salt, a number of buckets or `missing` is invalid.

    Example:
        >>> import embedrock as er
        >>> er.hash_ids(["red", "green", "red"])
        array([1467964221407166206, 3943855403825246549, 1467964221407166206])
        >>> er.hash_ids(["red", "green", "red"], buckets=1000)
        array([ 13, 356,  13])
        >>> er.hash_ids(["red", None], buckets=1000, missing=1000)
        array([  13, 1000])
    """
    key, count = key_of(salt), checked_buckets(buckets)
    check_missing(missing, "hash_ids")
    strings, shape, absent = strings_of(values, fills=missing is not None)
    ids = np.empty(len(strings.starts), np.int64)
    kernels.cpu.launch(kernels.cpu.strings.hash_strings, *strings, key, count, ids)
    ids[absent] = missing or 0
    return ids.reshape(shape)


def key_of(salt: Any, subject: str = "hash_ids") -> np.ndarray:
    """Return the hash key of a salt, uint64 (2,).

    Raises:
        ArgumentError: the salt is invalid for `subject`.
    """
    pair = tuple(salt) if isinstance(salt, tuple | list) else (salt, salt)
    if len(pair) != 2 or not all(_is_whole(word) and 0 <= word < 2**64 for word in pair):
        raise ArgumentError(f"`salt` of {subject} must be a number in [0, 2**64), or two of them: got {salt!r}.")
    return np.array(pair, np.uint64)


def checked_buckets(buckets: Any, subject: str = "hash_ids") -> int:
    """Return a checked number of buckets; None means the maximum.

    Raises:
        ArgumentError: the number is invalid for `subject`.
    """
    if buckets is None:
        return MOST_BUCKETS
    if not _is_whole(buckets) or not 1 <= buckets <= MOST_BUCKETS:
        raise ArgumentError(
            f"`buckets` of {subject} must be a number in [1, 2**63), the table's rows, or None: got {buckets!r}."
        )
    return int(buckets)


def check_missing(missing: Any, subject: str, other: str = "None") -> None:
    """Raise `ArgumentError` unless the id of missing values is an int64 or None. `other` is another choice."""
    if missing is not None and not (_is_whole(missing) and -(2**63) <= missing < 2**63):
        raise ArgumentError(f"`missing` of {subject} must be an id or {other}: got {missing!r}.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


# ---------------------------------------------------------------- sources of strings


def strings_of(
    values: Any, subject: str = "hash_ids", fills: bool = False
) -> tuple[Strings, tuple[int, ...], np.ndarray]:
    """Return strings, the shape of their source, and the positions of missing ones.

    Args:
        fills: give missing values as empty strings. Otherwise they are an error.

    Raises:
        IdTypeError: the values are invalid for `subject`.
    """
    try:
        return *_strings_of(values, subject), np.empty(0, np.int64)
    except IdTypeError:
        if not fills:
            raise
        filled, absent = _filled(values, subject)
        return *_strings_of(filled, subject), absent


def _filled(values: Any, subject: str) -> tuple[Any, np.ndarray]:
    """Return values with empty strings in place of missing ones, and the positions of these."""
    library = type(values).__module__.partition(".")[0]
    if library == "pyarrow":
        array = _as_binary(values, subject)
        return array.fill_null(b""), np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
    given = values.to_numpy() if library == "polars" else values
    array = np.array(given, None if hasattr(given, "__array__") else object)  # a masked one without its mask
    flat = array.astype(object).reshape(-1)
    lacks = np.fromiter(map(_is_missing, flat), bool, flat.size)
    if isinstance(values, np.ma.MaskedArray):
        lacks |= np.ma.getmaskarray(values).reshape(-1)
    absent = np.flatnonzero(lacks)
    flat[absent] = b"" if any(isinstance(value, bytes) for value in flat) else ""
    return flat.reshape(array.shape) if len(absent) else values, absent


def _is_missing(value: Any) -> bool:
    is_null = type(value).__module__.startswith("pandas.") and type(value).__name__ in ("NAType", "NaTType")
    return is_null or value is None or (isinstance(value, float | np.floating) and value != value)


def _strings_of(values: Any, subject: str) -> tuple[Strings, tuple[int, ...]]:
    library = type(values).__module__.partition(".")[0]
    if library == "pyarrow":
        found = _of_arrow(values, subject)
        return found, (len(found.starts),)
    if isinstance(values, list | tuple):
        shape, joined = (len(values),), _joined(values)  # checks no type: a nested list fails to join
        if joined is not None or _NESTED.isdisjoint(map(type, values)):
            return joined or _of_objects(values, shape, subject), shape
    if "Int128" in str(getattr(values, "dtype", "")):  # as polars reads hashes in CSV; NumPy has no such integers
        raise IdTypeError(
            f"`values` of {subject} must be strings or bytes: got dtype Int128. Pass values.cast(str) to hash how they "
            "are written."
        )
    if library == "polars" and (objects := getattr(values, "to_numpy", None)):
        values = objects()  # NumPy's own strings would end before their last NULs
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        position = int(np.argmax(np.ma.getmaskarray(values)))
        raise _missing("a masked value", position, values.shape, subject)
    # Lists become an array of objects: one of strings would have room for the longest in each.
    given, array = values, np.asarray(values, None if hasattr(values, "__array__") else object)
    flat = array.reshape(-1)
    if array.dtype.kind == "S":
        return _of_bytes(np.ascontiguousarray(flat)), array.shape
    if array.dtype.kind == "U":
        return _of_points(np.ascontiguousarray(flat, flat.dtype.newbyteorder("=")), array.shape, subject), array.shape
    if array.dtype.kind in "OT" or not array.size:
        listed = flat.tolist()
        return _joined(listed) or _of_objects(listed, array.shape, subject), array.shape
    remedy = "pass np.asarray(values).astype(str) to hash how they are written."
    if array.dtype.kind == "f" and np.isnan(flat).any():  # NumPy and pandas make floats of them
        remedy = missing(given).replace("ids", "values")
    raise IdTypeError(
        f"`values` of {subject} must be strings or bytes: got dtype {array.dtype}. Integers are ids as they are; "
        f"{remedy}"
    )


def _of_bytes(flat: np.ndarray) -> Strings:
    width = flat.dtype.itemsize
    data, ends = flat.view(np.uint8), np.empty(len(flat), np.int64)
    kernels.cpu.launch(kernels.cpu.strings.trim, data, width, ends)
    return Strings(data, np.arange(len(flat), dtype=np.int64) * width, ends)


def _of_points(flat: np.ndarray, shape: tuple[int, ...], subject: str) -> Strings:
    width, launch, strings = flat.dtype.itemsize // 4, kernels.cpu.launch, kernels.cpu.strings
    points, ends, sizes = flat.view(np.uint32), np.empty(len(flat), np.int64), np.empty(len(flat), np.int64)
    launch(strings.trim, points, width, ends)
    launch(strings.utf8_sizes, points, width, ends, sizes)
    if len(sizes) and sizes[position := int(np.argmin(sizes))] < 0:
        raise _no_text(str(flat[position]), position, shape, subject)
    offsets = bounds_of(sizes)
    data = np.empty(int(offsets[-1]), np.uint8)
    launch(strings.write_utf8, points, width, ends, offsets[:-1], data)
    return Strings(data, offsets[:-1], offsets[1:])


def _joined(values: Sequence[Any]) -> Strings | None:
    """Join a list of ``str``, or of ``bytes``, that has no NUL; return None for any other list."""
    try:
        data = b"\0".join(values) if isinstance(values[0], bytes) else "\0".join(values).encode()
    except (IndexError, TypeError, UnicodeEncodeError):
        return None
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 0)
    if len(ends) != len(values) - 1:
        return None
    return Strings(np.frombuffer(data, np.uint8), np.append(0, ends + 1), np.append(ends, len(data)))


def _of_objects(values: Sequence[Any], shape: tuple[int, ...], subject: str) -> Strings:
    """Return the strings of a list of ``str``, or of ``bytes``."""
    try:
        each = values if values and isinstance(values[0], bytes) else [str.encode(value) for value in values]
        data, sizes = b"".join(each), map(len, each)
    except TypeError:
        raise _among_others(values, shape, subject) from None
    except UnicodeEncodeError:
        position = next(k for k, value in enumerate(values) if any("\ud800" <= each <= "\udfff" for each in value))
        raise _no_text(values[position], position, shape, subject) from None
    offsets = bounds_of(np.fromiter(sizes, np.int64, len(values)))
    return Strings(np.frombuffer(data, np.uint8), offsets[:-1], offsets[1:])


def _as_binary(values: Any, subject: str) -> Any:
    """Return strings of Arrow as one array of its type for large binaries."""
    import pyarrow

    if not isinstance(values, pyarrow.Array | pyarrow.ChunkedArray):
        raise IdTypeError(
            f"`values` of {subject} must be strings or bytes: got {with_article(f'Arrow {type(values).__name__}')}. "
            'Pass one column of a table, values["name"], or an array.'
        )
    array = values.combine_chunks() if isinstance(values, pyarrow.ChunkedArray) else values
    if isinstance(array, pyarrow.ChunkedArray):  # has no chunks, or is too long for one
        array = pyarrow.concat_arrays(array.chunks) if array.num_chunks else pyarrow.array([], pyarrow.large_string())
    try:
        return array.cast(pyarrow.large_binary())
    except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid):
        remedy = (
            _in_lists(subject) if "list" in str(array.type) else 'Pass values.cast("string"), if it has ids as text.'
        )
        raise IdTypeError(
            f"`values` of {subject} must be strings or bytes: got an Arrow array of {array.type}. {remedy}"
        ) from None


def _of_arrow(values: Any, subject: str) -> Strings:
    array = _as_binary(values, subject)
    if array.null_count:  # of the cast array: a dictionary's own nulls are not counted in its indices
        where = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise _missing("None", where, (len(array),), subject)
    _, offsets, data = array.buffers()
    where = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8)
    return Strings(np.frombuffer(data or b"", np.uint8), where[:-1], where[1:])


# ---------------------------------------------------------------- errors of values


def _no_text(value: str, position: int, shape: Sequence[int], subject: str) -> IdTypeError:
    return IdTypeError(
        f"`values` of {subject} must be Unicode text: got {value!r} {in_array(shape, 'values')(position)}, which has "
        "half of a surrogate pair. Decode it anew with errors='replace', or pass its bytes."
    )


def _among_others(values: Sequence[Any], shape: Sequence[int], subject: str) -> IdTypeError:
    kind = bytes if isinstance(values[0], bytes) else str
    position = next(k for k, value in enumerate(values) if not isinstance(value, kind))
    value = values[position]
    if isinstance(value, list | tuple | np.ndarray) or type(value).__module__.startswith("polars.series"):
        return IdTypeError(
            f"`values` of {subject} must be strings in one shape: got {type(value).__name__} "
            f"{in_array(shape, 'values')(position)}, lists of several lengths. {_in_lists(subject)}"
        )
    if _is_missing(value):
        return _missing(repr(value), position, shape, subject)
    if not shape:
        return IdTypeError(
            f"`values` of {subject} must be strings in an array or a list: got {with_article(type(value).__name__)}. "
            f"Pass {'list(values)' if isinstance(value, Iterable) else '[str(values)]'}."
        )
    among = f" among {kind.__name__}" if position else ""
    return IdTypeError(
        f"`values` of {subject} must be all strings or all bytes: got {value!r} {in_array(shape, 'values')(position)}, "
        f"of type {type(value).__name__}{among}. {_AS_BYTES}"  # str() of bytes is their repr
    )


def _in_lists(subject: str) -> str:
    call = "er.hash_ids" if subject == "hash_ids" else "vocabulary.lookup"
    return f"Lists are bags: `ids, offsets = er.jagged(values, {call})`, ids end to end and where each list begins."


def _missing(value: str, position: int, shape: Sequence[int], subject: str) -> IdTypeError:
    remedy = "er.hash_ids(values, missing=-1)" if subject == "hash_ids" else "pass missing=-1"
    return IdTypeError(
        f"`values` of {subject} must be strings or bytes: got {value} {in_array(shape, 'values')(position)}. Leave out "
        f"what is missing, or give it an id of its own: {remedy}."
    )
