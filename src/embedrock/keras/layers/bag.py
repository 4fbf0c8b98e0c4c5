"""`EmbeddingBag`: the rows of several ids, pooled into one."""

from __future__ import annotations

from typing import Any, Unpack

import keras
import tensorflow as tf

from embedrock.errors import ArgumentError, UnsupportedError, not_one_of
from embedrock.keras.layers.arguments import RowLayerOptions, RowOptions
from embedrock.keras.layers.row_layer import KerasRowLayer, LayerArgument, ragged_rank
from embedrock.keras.training.lookup import checked_ids, look_up
from embedrock.keras.training.requests import LookupRequest
from embedrock.table.options import shows
from embedrock.table.table import Table

MODES = ("sum", "mean", "sqrtn", "max")

_RAGGED: Any = tf.RaggedTensor  # TensorFlow's stubs know few of its methods


def _checked_mode(layer: Any, mode: Any) -> str:
    if mode not in MODES:
        raise not_one_of(f"`mode` of {layer.kind}", mode, MODES)
    return mode


@keras.saving.register_keras_serializable("embedrock")
class EmbeddingBag(KerasRowLayer):
    """A layer of rows pooled over the last dimension of their ids. The rows themselves are never tensors.

    It does the work of `tf.nn.embedding_lookup_sparse`, for dense, padded and ragged ids.

    Args:
        input_dim, output_dim, embeddings_initializer, embeddings_regularizer, embeddings_constraint: as in `Embedding`.
        mask_zero: id 0 is padding, which counts in no bag.
        mode: "sum" adds a bag's rows, multiplied by the weights if given. "mean" is that sum over the sum of the
            weights. "sqrtn" is that sum over the square root of the sum of their squares. "max" is the largest value of
            each column; the first of equal values gets the gradient.
        rule, path, group, options: these and all other options are as in `Embedding`.

    Input: int32 or int64 of shape S + (n,), dense or ragged, or a list or dict of such. `weights` are floats of the
    same shape, for all inputs or for none. Gradients reach them.
    `time` is as in `Embedding`.
    Output: S + (output_dim,) for each input, in the layer's compute dtype; zeros for empty bags. With
    ``mask_zero=True``, bags of padding only are masked out if the input has three or more dimensions.

    Raises:
        ArgumentError: an argument has a value that cannot work.
        UnsupportedError, UnknownArgumentError: an argument that this layer does not have.

    Example:
        >>> import numpy as np, embedrock as er, embedrock.keras as erk
        >>> bag = erk.EmbeddingBag(100, 2, er.Constant(0.5), mask_zero=True)
        >>> bag(np.array([[1, 2, 3], [4, 0, 0], [0, 0, 0]])).numpy()
        array([[1.5, 1.5],
               [0.5, 0.5],
               [0. , 0. ]], dtype=float32)
    """

    @shows(RowOptions)
    def __init__(
        self,
        input_dim: int | Table | None,
        output_dim: int | None = None,
        embeddings_initializer: Any = None,
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        mode: str = "sum",
        **options: Unpack[RowLayerOptions],
    ) -> None:
        mode = _checked_mode(self, mode)
        super().__init__(
            *(input_dim, output_dim, embeddings_initializer, embeddings_regularizer, embeddings_constraint, mask_zero),
            **options,
        )
        self._config["mode"] = mode

    mode = LayerArgument(_checked_mode)

    def call(self, inputs: Any, weights: Any = None, training: bool | None = None, time: Any = None) -> Any:
        """Return the pooled rows of bags of ids."""
        requests = self.ask_all(inputs, weights)
        return self.answer_all(inputs, requests, look_up(requests, training, time))

    def mask_of(self, ids: Any) -> Any:
        is_masked = len(ids.shape) > 2 and ragged_rank(ids) == 0
        return keras.ops.any(keras.ops.not_equal(ids, 0), axis=-1) if is_masked else None

    def ask(self, ids: Any, weights: Any) -> LookupRequest:
        if weights is not None and self.mode == "max":
            raise UnsupportedError(f"`weights` of {self.label} go with sum, mean and sqrtn: got them with mode='max'.")
        flat, splits = self._flat(ids)
        factors = None if weights is None else self._flat_weights(ids, weights)
        flat = checked_ids(flat, self.label)
        if self.mask_zero:
            is_kept = tf.not_equal(flat, 0)
            before = tf.concat([[0], tf.cumsum(tf.cast(is_kept, tf.int64))], 0)
            flat, splits = tf.boolean_mask(flat, is_kept), tf.gather(before, splits)
            factors = None if factors is None else tf.boolean_mask(factors, is_kept)
        return LookupRequest(self.handle, flat, splits, factors, self.mode == "max", self.mask_zero)

    def answer(self, ids: Any, request: LookupRequest, found: tf.Tensor) -> Any:
        if self.mode in ("mean", "sqrtn"):
            found = tf.math.divide_no_nan(found, self._size(request)[:, tf.newaxis])
        found = tf.cast(found, self.compute_dtype)
        if not isinstance(ids, tf.RaggedTensor):
            return _restored(ids, found, self.output_dim)
        if ids.flat_values.shape.rank != 1:
            return ids.with_flat_values(_restored(ids.flat_values, found, self.output_dim))
        return _RAGGED.from_nested_row_splits(found, ids.nested_row_splits[:-1], validate=False)

    def answer_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        if len(shape) < 2:
            raise ArgumentError(_rank_needed(self.label, shape))
        return (*shape[:-1], self.output_dim)

    def answer_ragged_rank(self, ids: keras.KerasTensor) -> int | None:
        """Return the ragged rank of bags, which lack the last dimension of the ids."""
        rank, left = ragged_rank(ids), len(ids.shape) - 2
        return left if left == 0 or (rank is None and left == 1) else rank if rank is None else min(rank, left)

    def _flat(self, ids: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the ids of all bags (n,), and the bounds of bags: int64 (bags + 1,)."""
        if isinstance(ids, tf.RaggedTensor):
            if ids.flat_values.shape.rank == 1:
                return ids.flat_values, tf.cast(ids.nested_row_splits[-1], tf.int64)
            ids = ids.flat_values
        if isinstance(ids, tf.SparseTensor):
            raise UnsupportedError(
                f"ids for {self.label} must be dense or ragged: got a SparseTensor, whose missing ids would be in bags "
                "as id 0. Pass tf.RaggedTensor.from_sparse(ids)."
            )
        if not isinstance(ids, tf.Tensor):
            ids = tf.convert_to_tensor(ids)
        if ids.shape.rank is None or ids.shape.rank < 2:
            raise ArgumentError(_rank_needed(self.label, ids.shape))
        shape = tf.shape(ids, tf.int64)
        splits = tf.range(tf.reduce_prod(shape[:-1]) + 1) * shape[-1]
        if None not in ids.shape[:-1]:
            splits.set_shape([ids.shape[:-1].num_elements() + 1])
        return tf.reshape(ids, [-1]), splits

    def _flat_weights(self, ids: Any, weights: Any) -> tf.Tensor:
        is_ragged = isinstance(ids, tf.RaggedTensor)
        if isinstance(weights, tf.RaggedTensor) != is_ragged or not weights.shape.is_compatible_with(ids.shape):
            raise ArgumentError(
                f"`weights` of {self.label} must have the ids' shape: got {_told(weights)} for ids {_told(ids)}."
            )
        if not is_ragged:
            return tf.reshape(tf.cast(weights, tf.float32), [-1])
        pairs = zip(ids.nested_row_splits, weights.nested_row_splits, strict=True)
        message = f"`weights` of {self.label} must have the ids' row splits."
        checks = [tf.debugging.assert_equal(ours, theirs, message) for ours, theirs in pairs if ours is not theirs]
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.reshape(tf.cast(weights.flat_values, tf.float32), [-1])

    def _size(self, request: LookupRequest) -> tf.Tensor:
        """Return the divisor of each bag's sum, float32 (bags,)."""
        if request.weights is None:
            counts = tf.cast(request.offsets[1:] - request.offsets[:-1], tf.float32)
            return counts if self.mode == "mean" else tf.sqrt(counts)
        weights = _RAGGED.from_row_splits(request.weights, request.offsets, validate=False)
        if self.mode == "mean":
            return tf.reduce_sum(weights, axis=1)
        squares = tf.reduce_sum(tf.square(weights), axis=1)
        is_zero = tf.equal(squares, 0.0)  # a square root has no gradient there
        return tf.where(is_zero, 0.0, tf.sqrt(tf.where(is_zero, 1.0, squares)))


def _restored(ids: Any, bags: tf.Tensor, dim: int) -> tf.Tensor:
    """Return bags (n, dim) in the shape of their ids without the last dimension."""
    if len(ids.shape) == 2:
        return bags
    out = tf.reshape(bags, tf.concat([tf.shape(ids)[:-1], [dim]], 0))
    out.set_shape([*ids.shape[:-1], dim])
    return out


def _rank_needed(label: str, shape: Any) -> str:
    return (
        f"ids for {label} must have at least two dimensions, the last of which is pooled: got shape {tuple(shape)}. "
        "For one id in each bag add a dimension, keras.ops.expand_dims(ids, -1), or use erk.Embedding."
    )


def _told(tensor: Any) -> str:
    return f"{'ragged ' * isinstance(tensor, tf.RaggedTensor)}{tuple(tensor.shape)}"
