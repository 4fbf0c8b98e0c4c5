"""`ServingTable`: the rows of a table as TensorFlow variables, looked up by TensorFlow's own operations.

A SavedModel with these needs no Embedrock, and no Python. While `serving` is active, layers read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf

from embedrock.errors import ArgumentError, IdTypeError, MemoryBudgetError, UnsupportedError
from embedrock.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform, Zeros
from embedrock.kernels import constants
from embedrock.spec.frozen import MOST_RANGES
from embedrock.spec.spec import Spec
from embedrock.system.ram import memory_limit
from embedrock.system.sizes import format_bytes, parse_bytes
from embedrock.table.missing import Missing
from embedrock.table.reading import EXPORT_BATCH_ROWS
from embedrock.table.table import Table, rows_of

STORAGES = {"float32": tf.float32, "bfloat16": tf.bfloat16, "float16": tf.float16}

_LOW_HALF = np.uint64(0xFFFFFFFF)


def first_values(spec: Spec, ids: tf.Tensor) -> tf.Tensor:
    """Return the initial values of rows ``ids`` int64 (n,) of a table: float32 (n, dim)."""
    values = _DRAWS[type(spec.init)](spec.init, spec, ids)
    return tf.cast(tf.cast(values, STORAGES[spec.value_dtype]), tf.float32)


def philox(counter: list[Any], seed: int) -> list[Any]:
    """Return Philox4x32-10 of four words (uint64, below 2**32, of shapes that broadcast) under a seed of 64 bits."""
    c0, c1, c2, c3 = counter
    for number in range(10):
        k0 = np.uint64((seed + number * 0x9E3779B9) % 2**32)
        k1 = np.uint64(((seed >> 32) + number * 0xBB67AE85) % 2**32)
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = _high(second) ^ c1 ^ k0, second & _LOW_HALF
        c2, c3 = _high(first) ^ c3 ^ k1, first & _LOW_HALF
    return [c0, c1, c2, c3]


def standard_normal(words: tf.Tensor, beyond: float = 0.0) -> tf.Tensor:
    """Return the standard normal values of `words`, uint64 below 2**32 of any shape, without the tails `beyond`."""
    inside = np.float32(1) - np.float32(2) * np.float32(beyond)
    k = tf.cast(_high(words, 1), tf.int32)
    p = np.float32(beyond) + inside * ((tf.cast(k, tf.float32) + 0.5) * 2.0**-32)
    x = inside * ((tf.cast(0x7FFFFFFF - k, tf.float32) + 0.5) * 2.0**-31)
    w = _minus_log((4.0 * p) * (1.0 - p))
    z = (x * _polynomial(w, constants.NUMERATOR)) / _polynomial(w, constants.DENOMINATOR)
    sign = 1 - 2 * tf.cast(words & np.uint64(1), tf.int32)  # z is never 0
    return z * tf.cast(sign, tf.float32)


def _words(spec: Spec, ids: tf.Tensor) -> tf.Tensor:
    """Return the word of each column of rows `ids` (n,): uint64 (n, dim), below 2**32."""
    blocks = -(-spec.dim // 4)
    bits = tf.bitcast(ids, tf.uint64)[:, tf.newaxis]
    columns: Any = tf.constant(np.arange(blocks, dtype=np.uint64)[np.newaxis])
    purpose = np.uint64(constants.FIRST_VALUES << 30)
    words = philox([bits & _LOW_HALF, _high(bits), columns ^ purpose, tf.zeros_like(bits)], int(spec.key))
    shape = tf.stack([tf.size(ids), blocks])
    blocked = tf.stack([tf.broadcast_to(word, shape) for word in words], axis=-1)
    return tf.reshape(blocked, [-1, 4 * blocks])[:, : spec.dim]


def _uniform(init: Uniform, spec: Spec, ids: tf.Tensor) -> tf.Tensor:
    start = np.float32(init.low)
    unit = tf.cast(tf.cast(_high(_words(spec, ids), 8), tf.int32), tf.float32) * 2.0**-24
    return start + (np.float32(init.high) - start) * unit


def _normal(init: Normal | TruncatedNormal, spec: Spec, ids: tf.Tensor) -> tf.Tensor:
    beyond = init.beyond if isinstance(init, TruncatedNormal) else 0.0
    return np.float32(init.mean) + np.float32(init.std) * standard_normal(_words(spec, ids), beyond)


def _constant(init: Constant, spec: Spec, ids: tf.Tensor) -> tf.Tensor:
    return tf.fill([tf.size(ids), spec.dim], np.float32(init.value))


_DRAWS: dict[type[Initializer], Callable[..., tf.Tensor]] = {
    Normal: _normal,
    TruncatedNormal: _normal,
    Uniform: _uniform,
    Constant: _constant,
    Zeros: _constant,
}


def _minus_log(t: tf.Tensor) -> tf.Tensor:
    bits = tf.bitcast(t, tf.int32)
    exponent = tf.bitwise.right_shift(bits - 0x3F3504F3, 23)
    f = tf.bitcast(bits - exponent * 2**23, tf.float32) - 1.0
    return tf.cast(-exponent, tf.float32) * constants.LN_2 - (f + (f * f) * _polynomial(f, constants.LOG_SERIES))


def _polynomial(x: tf.Tensor, coefficients: tuple[np.float32, ...]) -> tf.Tensor:
    value = coefficients[0] * x + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * x + coefficient
    return value


def _high(words: tf.Tensor, places: int = 32) -> Any:
    return tf.bitwise.right_shift(words, np.uint64(places))


WHOLE_BYTES = 256 * 2**20
ID_BYTES = 16  # index bytes of a row: its id and its position
MAX_FOUND_ROWS = 2**31 - 2  # the limit of TensorFlow's LowerBound

# The tables that layers read while models are traced for an export; None: their own.
serving: ContextVar[Mapping[tuple[Table, Missing | None], ServingTable] | None] = ContextVar("serving", default=None)


class ServingTable(tf.Module):
    """The current rows of a table as variables of TensorFlow on the CPU, looked up to the same bits.

    Rows are saved in the table's dtype. All rows are saved if they take at most `whole_bytes`, or at most the size of
    the rows with records. All rows must be saved if they start as those of an array. Otherwise only the rows with
    records are saved, with their ids. The initial value of any other row is computed by the lookup, to the same bits.
    Only results below 1.2e-38 differ: TensorFlow flushes them to zero.

    Args:
        table: the table, which must not change meanwhile. Rows are read in batches.
        whole_bytes: in bytes, or as "512MiB".
        missing: values of rows that are not there; None: those of the table. With "raise" they are an
            `InvalidArgumentError`, and only rows with records are saved.

    Raises:
        ArgumentError: the table has no such row.
        MemoryBudgetError: the variables would not fit this process's memory.
        UnsupportedError: not all rows are saved, and 2**31 or more have records, or the initializer is the user's own.

    Example:
        >>> import embedrock as er, tensorflow as tf
        >>> served = ServingTable(er.Table(rows=None, dim=4, init=er.Zeros()))
        >>> served(tf.constant([7, -7])).shape
        TensorShape([2, 4])
    """

    def __init__(self, table: Table, whole_bytes: int | str = WHOLE_BYTES, missing: Missing | None = None) -> None:
        super().__init__()
        rows = rows_of(table)
        missing = None if rows.are_all_there else rows.missing if missing is None else missing
        self._spec, self._first_scale = table.spec, np.float32(table.first_scale)
        self._subject = f"table {table.name or table.path!r}" if table.name or table.path else "the table"
        there = _without_records(table, missing) if missing else np.empty(0, np.int64)
        self._count = int(table.stats()["rows_touched"]) + len(there)
        row = rows.row_instead(missing) if missing else rows.default_row()
        self._default_row = None if row is None else tf.constant(row)  # of all rows without a record
        self._raises = missing is not None and missing.choice == "raise"
        self._is_whole, size = extent(table, whole_bytes, missing)
        if not self._is_whole:
            self._check_found_rows(table)
        if size > memory_limit():
            raise MemoryBudgetError(
                f"variables for {self._subject} must fit this process's memory, {format_bytes(memory_limit())}: they "
                f"take {format_bytes(size)}. Export with dependency='embedrock', which serves rows from disk."
            )
        with tf.device("CPU:0"):  # functions name no device: where a SavedModel is loaded, its variables may lie on any
            if self._is_whole:
                self._rows = _whole_rows(table, missing)
            else:
                self._ids, self._positions, self._rows = _found_rows(table, self._count, there, missing)

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the weights of rows: float32 of shape ``ids.shape + (dim,)``.

        Ids outside the table raise `InvalidArgumentError`.
        """
        if not ids.dtype.is_integer:
            raise IdTypeError(f"`ids` of {self._subject} must be integers: got {ids.dtype.name}. Cast them to int64.")
        flat = self._checked(tf.cast(tf.reshape(ids, [-1]), tf.int64), unsigned=ids.dtype == tf.uint64)
        rows = tf.cast(tf.gather(self._rows, flat), tf.float32) if self._is_whole else self._found(flat)
        out = tf.reshape(rows, tf.concat([tf.shape(ids), [self._spec.dim]], 0))
        out.set_shape([*ids.shape, self._spec.dim] if ids.shape.rank is not None else None)
        return out

    def _checked(self, flat: tf.Tensor, unsigned: bool) -> tf.Tensor:
        """Return ids int64 (n,), after checking that they lie in the table."""
        rows = self._spec.rows
        if rows is None and not unsigned:
            return flat
        high = 2**63 if rows is None else rows
        outside = flat < 0 if rows is None else (flat < 0) | (flat >= rows)
        return self._none_of(flat, outside, f"lie in [0, {high}): got")

    def _none_of(self, flat: tf.Tensor, wrong: tf.Tensor, demand: str) -> tf.Tensor:
        """Return ids (n,), after checking that none is `wrong`, bool (n,)."""
        first = tf.where(wrong)[:1, 0]
        told = [f"`ids` of {self._subject} must {demand}", tf.gather(flat, first), "at position", first]
        assertion = tf.debugging.Assert(tf.equal(tf.size(first), 0), told)
        with tf.control_dependencies([] if assertion is None else [assertion]):
            return tf.identity(flat)

    def _found(self, flat: tf.Tensor) -> tf.Tensor:
        """Return the weights float32 (n, dim) of rows. Some may have no record."""
        if not self._count:
            return self._first_values(self._there(flat, tf.ones_like(flat, tf.bool)))
        sorted_ids = tf.expand_dims(self._ids, 0)
        at = tf.raw_ops.LowerBound(sorted_inputs=sorted_ids, values=tf.expand_dims(flat, 0), out_type=tf.int64)[0]
        at = tf.minimum(at, self._count - 1)
        rows = tf.cast(tf.gather(self._rows, tf.gather(self._positions, at)), tf.float32)
        is_absent = tf.not_equal(tf.gather(self._ids, at), flat)
        flat, fresh = self._there(flat, is_absent), tf.where(is_absent)
        return tf.tensor_scatter_nd_update(rows, fresh, self._first_values(tf.gather(flat, fresh[:, 0])))

    def _first_values(self, ids: tf.Tensor) -> tf.Tensor:
        if self._default_row is not None:
            return tf.repeat(self._default_row[tf.newaxis], tf.size(ids), axis=0)
        values = first_values(self._spec, ids)
        return values if self._first_scale == 1.0 else values * self._first_scale

    def _there(self, flat: tf.Tensor, is_absent: tf.Tensor) -> tf.Tensor:
        demand = "have rows, as missing='raise' demands: got"
        return self._none_of(flat, is_absent, demand) if self._raises else flat

    def _check_found_rows(self, table: Table) -> None:
        if self._default_row is None and type(table.spec.init) not in _DRAWS:
            raise UnsupportedError(
                f"{self._subject} cannot be served: its ids are open, and its rows start as {table.spec.init!r}, which "
                "only Python computes. Use one of Embedrock's initializers, or a table with a number of rows."
            )
        if self._count > MAX_FOUND_ROWS:
            raise UnsupportedError(
                f"{self._subject} can be served without all of its rows if up to {MAX_FOUND_ROWS} have records: got "
                f"{self._count}. Give `whole_bytes` a value that holds all of its rows."
            )


def serving_table(table: Table, missing: Missing | None) -> ServingTable:
    """Return the serving table of a table, for layers with a choice of rows that are not there."""
    found = (serving.get() or {}).get((table, missing))
    if found is None:
        raise ArgumentError(
            f"{table!r} is looked up by the model that is exported, but by none of its layers. Assign the layer to an "
            "attribute of the model or of one of its layers, so that Keras finds it."
        )
    return found


def pooled(rows: tf.Tensor, offsets: tf.Tensor, weights: tf.Tensor | None = None, is_max: bool = False) -> tf.Tensor:
    """Return the sums or the largest values of bags of rows, float32 (bags, dim): the bits of the pooling kernels.

    Args:
        rows: float32 (n, dim).
        offsets: int64 (bags + 1,): bag b holds the rows ``offsets[b]`` to ``offsets[b + 1]``. An empty one gives zeros.
        weights: float32 (n,), factors of the rows; None for ones.
        is_max: take the largest value of each column, without weights.
    """
    bags, count = tf.ragged.row_splits_to_segment_ids(offsets), tf.size(offsets, tf.int64) - 1
    if is_max:
        largest = tf.math.unsorted_segment_max(rows, bags, count)
        return tf.where(tf.equal(offsets[1:], offsets[:-1])[:, tf.newaxis], 0.0, largest)
    if weights is not None:
        rows *= tf.reshape(weights, [tf.shape(rows)[0], 1])  # it fails unless there is one for each id
    return tf.math.unsorted_segment_sum(rows, bags, count)


def _without_records(table: Table, missing: Missing) -> np.ndarray:
    """Return the ids that are there without a record: of frozen rows, and of padding."""
    ranges = [] if table.spec.frozen is None else table.spec.frozen.ranges
    if (count := sum(stop - start for start, stop in ranges)) > MOST_RANGES:
        raise UnsupportedError(
            f"{count:,} frozen rows of {table.subject} cannot be served with missing={missing}, which has room for "
            f"{MOST_RANGES:,}. Leave missing= out: all rows that are not there then have their initial values."
        )
    padding = [] if missing.padding is None else [missing.padding]
    ids = np.unique(np.array([*padding, *(row for own in ranges for row in range(*own))], np.int64))
    return ids[~rows_of(table).tier.holds(ids)]


def extent(table: Table, whole_bytes: int | str, missing: Missing | None = None) -> tuple[bool, int]:
    """Return whether a `ServingTable` has all rows, and the bytes of its variables."""
    limit, row_bytes = parse_bytes(whole_bytes, "whole_bytes"), table.dim * table.spec.words.itemsize
    found = int(table.stats()["rows_touched"]) * (row_bytes + ID_BYTES)
    is_partial = missing is not None and missing.choice == "raise" and not rows_of(table).are_all_there
    if table.rows is None or is_partial:
        return False, found
    whole = table.rows * row_bytes
    is_whole = type(table.spec.init) not in _DRAWS or whole <= max(limit, found)
    return is_whole, whole if is_whole else found


def _filled(table: Table, count: int, batches: Iterable[np.ndarray]) -> tf.Variable:
    """Return a variable of rows, in the order of batches of float32 (n, dim). They are written in place."""
    # From an array, TensorFlow would make a second copy.
    variable = tf.Variable(tf.zeros([count, table.dim], STORAGES[table.spec.value_dtype]), trainable=False, name="rows")
    start = 0
    for values in batches:
        # Not variable[a:b].assign(), which shares the buffer first and so copies all of it. Not scatter_update()
        # either: after it, every read of the variable is a copy.
        tf.raw_ops.ResourceStridedSliceAssign(
            ref=variable.handle,
            begin=tf.constant([start], tf.int64),
            end=tf.constant([start + len(values)], tf.int64),
            strides=tf.constant([1], tf.int64),
            value=tf.cast(values, variable.dtype),
        )
        start += len(values)
    return variable


def _whole_rows(table: Table, missing: Missing | None) -> tf.Variable:
    count = table.rows or 0  # open ids are not whole
    parts = (np.arange(k, min(k + EXPORT_BATCH_ROWS, count)) for k in range(0, count, EXPORT_BATCH_ROWS))
    return _filled(table, count, (table.lookup(part, missing=missing) for part in parts))


def _found_rows(table: Table, count: int, others: np.ndarray, missing: Missing | None) -> tuple[tf.Variable, ...]:
    """Return variables of `count` rows: ascending ids with records, or in `others`, their positions, and the rows."""
    ids, done = np.empty(count, np.int64), 0

    def batches() -> Iterator[np.ndarray]:
        nonlocal done
        for part, values in itertools.chain(table.export_batches(), [(others, table.lookup(others, missing=missing))]):
            ids[done : done + len(part)] = part
            done += len(part)
            yield values

    variable = _filled(table, count, batches())
    order = np.argsort(ids)
    return (
        tf.Variable(tf.constant(ids[order]), trainable=False, name="ids"),
        tf.Variable(tf.constant(order), trainable=False, name="positions"),
        variable,
    )
