"""`Hashing` and `hash_ids`: ids of strings by TensorFlow's own operator, the same as those of `er.hash_ids`."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from embedrock.batch import strings
from embedrock.errors import IdTypeError
from embedrock.keras.layers.row_layer import UndeclaredIdsError, ragged_rank


def hash_ids(values: Any, *, salt: int | tuple[int, int] = 0, buckets: int | None = None) -> Any:
    """Return the ids that `er.hash_ids` gives strings, as a tensor: in models, in `tf.data`, in exported models.

    In a graph it is one operator of TensorFlow's, `tf.strings.to_hash_bucket_strong`. So it calls no Python, and a
    served model needs no Embedrock.

    Args:
        values: a `tf.string` tensor of any shape, dense, ragged or sparse; or any value that `er.hash_ids` takes. Bytes
            count as they are, the empty string is a string, and `tf.string` has no missing strings.
        salt, buckets: as for `er.hash_ids`.

    Returns:
        int64 ids of the shape of `values`, ragged or sparse as they are.

    Raises:
        IdTypeError: `values` are no strings.
        ArgumentError: an invalid salt or number of buckets.

    Example:
        >>> import embedrock.keras as erk, tensorflow as tf
        >>> words = tf.data.Dataset.from_tensor_slices(["red", "green"])
        >>> [int(id) for id in words.map(erk.hash_ids)]
        [1467964221407166206, 3943855403825246549]
    """
    return _hashed(values, strings.key_of(salt).view("int64").tolist(), strings.checked_buckets(buckets), "hash_ids")


@keras.saving.register_keras_serializable("embedrock")
class Hashing(keras.layers.Layer):
    """A layer that turns strings into the ids of `er.hash_ids`: ``erk.Hashing()`` before ``erk.Embedding(None, dim)``.

    It has no weights and no vocabulary. Models with it are saved and exported as all others, and serve without
    Embedrock (see `hash_ids`).

    Args:
        buckets: number of ids; None: 2**63 - 1, for a layer of open ids. For ``erk.Embedding(n, dim)`` pass n.
        salt: a number below 2**64, used twice, or a pair of such.
        options: name, dtype and trainable, as for all layers of Keras; ids are int64 whatever `dtype` is.

    Input: strings of any shape, dense, ragged or sparse.
    Output: int64 of that shape.

    Raises:
        ArgumentError: an invalid salt or number of buckets.
        IdTypeError: the input is no strings.

    Example:
        >>> import embedrock.keras as erk, keras, numpy as np
        >>> words = keras.Input((), dtype="string")
        >>> model = keras.Model(words, erk.Embedding(None, 4)(erk.Hashing()(words)))
        >>> model(np.array(["red", "green", "red"])).shape
        TensorShape([3, 4])
    """

    def __init__(self, buckets: int | None = None, salt: int | tuple[int, int] = 0, **options: Any) -> None:
        super().__init__(**options)
        self._label = f"layer {self.name!r}, erk.Hashing"
        key = strings.key_of(salt, self._label)
        self._key, self._buckets = key.view("int64").tolist(), strings.checked_buckets(buckets, self._label)
        self.buckets, self.salt = None if buckets is None else self._buckets, key.tolist()
        self.supports_jit = False
        # As in Keras' own layers for strings: Keras makes tensors of numbers only.
        self._convert_input_args, self._allow_non_tensor_positional_args = False, True

    def call(self, inputs: Any) -> Any:
        """Return the ids of strings."""
        return _hashed(inputs, self._key, self._buckets, self._label)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return tuple(input_shape)

    def compute_output_spec(self, inputs: Any) -> keras.KerasTensor:
        if inputs.dtype != "string":
            raise UndeclaredIdsError(_no_strings(self._label, inputs.dtype))
        rank = ragged_rank(inputs)
        more = {} if rank == 0 else {"ragged": True, "ragged_rank": rank}
        return keras.KerasTensor(tuple(inputs.shape), dtype="int64", sparse=inputs.sparse, **more)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "buckets": self.buckets, "salt": self.salt}


def _hashed(values: Any, key: list[int], buckets: int, subject: str) -> Any:
    if isinstance(values, tf.RaggedTensor):
        return values.with_flat_values(_hashed(values.flat_values, key, buckets, subject))
    if isinstance(values, tf.SparseTensor):
        return values.with_values(_hashed(values.values, key, buckets, subject))
    if not tf.is_tensor(values):
        salt = tuple(word % 2**64 for word in key)
        return tf.constant(strings.hash_ids(values, salt=(salt[0], salt[1]), buckets=buckets))
    if values.dtype != tf.string:
        raise IdTypeError(_no_strings(subject, values.dtype.name))
    with tf.device("CPU:0"):  # where strings are
        return tf.strings.to_hash_bucket_strong(values, buckets, key)


def _no_strings(subject: str, got: str) -> str:
    return (
        f"`values` of {subject} must be strings (dtype string): got dtype {got}. Integers are ids as they are; "
        "tf.strings.as_string(values) makes strings of how they are written. In a model, declare them: "
        'keras.Input(shape, dtype="string").'
    )
