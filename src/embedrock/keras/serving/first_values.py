"""First values in TensorFlow's operations: the same bits as the kernels', where Python is not at hand.

``docs/first-values.md`` is the definition, and ``tests/reference/generator.py`` the twin to read first. Each of
its operations is one of TensorFlow's, rounded once, on the CPU. Only subnormal numbers may differ: TensorFlow takes
results below 1.2e-38 for zero.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from embedrock.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform, Zeros
from embedrock.kernels import constants
from embedrock.spec import Spec

STORAGES = {"float32": tf.float32, "bfloat16": tf.bfloat16, "float16": tf.float16}

_LOW_HALF = np.uint64(0xFFFFFFFF)


def first_values(spec: Spec, ids: tf.Tensor) -> tf.Tensor:
    """Return the first values of rows ``ids`` int64 (n,) of a table: float32 (n, dim)."""
    values = _DRAWS[type(spec.init)](spec.init, spec, ids)
    return tf.cast(tf.cast(values, STORAGES[spec.dtype]), tf.float32)


def is_drawable(init: Initializer) -> bool:
    """Return whether `first_values` draws those of an initializer."""
    return type(init) in _DRAWS


def philox(counter: list[tf.Tensor], seed: int) -> list[tf.Tensor]:
    """Return Philox4x32-10 of four words (uint64, below 2**32, of shapes that broadcast) under a seed of 64 bits."""
    c0, c1, c2, c3 = counter
    for table_lock in range(10):
        k0 = np.uint64((seed + table_lock * 0x9E3779B9) % 2**32)
        k1 = np.uint64(((seed >> 32) + table_lock * 0xBB67AE85) % 2**32)
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = _xor(_high(second), _xor(c1, k0)), _low(second)
        c2, c3 = _xor(_high(first), _xor(c3, k1)), _low(first)
    return [c0, c1, c2, c3]


def standard_normal(words: tf.Tensor) -> tf.Tensor:
    """Return the standard normal values that belong to `words`, uint64 below 2**32 of any shape."""
    return _quantile(words, *_tail(words))


def _tail(words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    k = tf.cast(_high(words, 1), tf.int32)
    p = (tf.cast(k, tf.float32) + 0.5) * 2.0**-32
    return p, (tf.cast(0x7FFFFFFF - k, tf.float32) + 0.5) * 2.0**-31


def _quantile(words: tf.Tensor, p: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    w = _minus_log((4.0 * p) * (1.0 - p))
    z = (x * _polynomial(w, constants.NUMERATOR)) / _polynomial(w, constants.DENOMINATOR)
    sign = 1 - 2 * tf.cast(tf.bitwise.bitwise_and(words, np.uint64(1)), tf.int32)  # z is never 0
    return z * tf.cast(sign, tf.float32)


def _words(spec: Spec, ids: tf.Tensor) -> tf.Tensor:
    """Return the word of each column of rows `ids` (n,): uint64 (n, dim), below 2**32."""
    blocks = -(-spec.dim // 4)
    bits = tf.bitcast(ids, tf.uint64)[:, tf.newaxis]
    columns = tf.constant(np.arange(blocks, dtype=np.uint64)[np.newaxis])
    purpose = np.uint64(constants.FIRST_VALUES << 30)
    words = philox([_low(bits), _high(bits), _xor(columns, purpose), tf.zeros_like(bits)], int(spec.key))
    shape = tf.stack([tf.size(ids), blocks])
    blocked = tf.stack([tf.broadcast_to(word, shape) for word in words], axis=-1)
    return tf.reshape(blocked, [-1, 4 * blocks])[:, : spec.dim]


def _uniform(init: Uniform, spec: Spec, ids: tf.Tensor) -> tf.Tensor:
    start = np.float32(init.low)
    unit = tf.cast(tf.cast(_high(_words(spec, ids), 8), tf.int32), tf.float32) * 2.0**-24
    return start + (np.float32(init.high) - start) * unit


def _normal(init: Normal, spec: Spec, ids: tf.Tensor) -> tf.Tensor:
    return np.float32(init.mean) + np.float32(init.std) * standard_normal(_words(spec, ids))


def _truncated_normal(init: TruncatedNormal, spec: Spec, ids: tf.Tensor) -> tf.Tensor:
    words, beyond = _words(spec, ids), np.float32(init.beyond)
    inside = np.float32(1) - np.float32(2) * beyond
    p, x = _tail(words)
    return np.float32(init.mean) + np.float32(init.std) * _quantile(words, beyond + inside * p, inside * x)


def _constant(init: Constant, spec: Spec, ids: tf.Tensor) -> tf.Tensor:
    return tf.fill([tf.size(ids), spec.dim], np.float32(init.value))


_DRAWS: dict[type[Initializer], Callable[..., tf.Tensor]] = {
    Normal: _normal,
    TruncatedNormal: _truncated_normal,
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


def _xor(a: tf.Tensor, b: tf.Tensor | np.uint64) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(a, b)


def _low(words: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_and(words, _LOW_HALF)


def _high(words: tf.Tensor, places: int = 32) -> tf.Tensor:
    return tf.bitwise.right_shift(words, np.uint64(places))
