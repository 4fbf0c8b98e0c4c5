"""`Embedding`: `keras.layers.Embedding` with its rows in a table."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from embedrock.errors import UnsupportedError
from embedrock.keras.layers.row_layer import KerasRowLayer, ragged_rank
from embedrock.keras.training.lookup import checked_ids, look_up
from embedrock.keras.training.requests import LookupRequest


@keras.saving.register_keras_serializable("embedrock")
class Embedding(KerasRowLayer, keras.layers.Embedding):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`keras.layers.Embedding` with its rows in a table of any size, stepped exactly by the model's optimizer.

    It works like `keras.layers.Embedding`, except that its rows are not a variable. Instead of ``embeddings`` it has a
    small proxy variable, ``rows``, which ``erk.optimizer`` knows.

    Args:
        input_dim: number of rows; None for open ids (any int64); or a ready-made `er.Table`.
        output_dim: weights in a row.
        embeddings_initializer: initial values: a name or an instance of Keras' that draws each row by itself, or one of
            Embedrock's. None: "uniform", as in Keras.
        embeddings_regularizer: one of Keras', or a function of weights (rows, output_dim). The loss covers the rows
            looked up by the model's last call, each once. It is among the `losses` of layer and model.
        embeddings_constraint: one of Keras', or a function of weights (rows, output_dim), that maps each row by itself.
            It is applied after a step to the rows that the step has gradients for.
        mask_zero: id 0 is padding, masked out for the layers that follow.
        rule: update rule of rows; None: the rule of the model's optimizer. The learning rate is the optimizer's, unless
            the rule was given one.
        path: folder of a table on disk, created if it is missing. An existing table is resumed, and the logger
            "embedrock" says so. None: rows in RAM.
        memory: the most RAM that the rows may take, in bytes or as "2GiB"; None: the machine's.
        seed: seed of the initial values, which is kept with the rows. None: the initializer's, or else one that Keras
            draws, so `keras.utils.set_random_seed` decides it. An existing table at `path` keeps its own.
        policy, keep, directory, on_nonfinite, admission, eviction, frozen: as in `er.Table`.
        commit_every: as in `er.Table`: it commits rows, and no dense weights. `erk.TableCheckpoint` saves both.
        device_memory: GPU memory of rows that TensorFlow's GPU uses, in bytes, as "2GiB" or as "25%". It has not met a
            GPU yet (docs/keras.md). None: the CPU uses the rows. 0: the same, without a warning if there is a GPU.
        group: an `er.Group` that has, or gets, the table as a member, by the layer's name. Layers that are looked up
            together are then read and summed in one pass, in an `EmbeddingCollection` or a `fuse`d model.
        sharded: under a `tf.distribute.MultiWorkerMirroredStrategy`, each worker keeps its shard of the rows, in RAM or
            in ``shard-<rank>-of-<workers>`` inside `path`. In one process it changes nothing.
        wire: dtype of float32 rows of shards, and of gradients, between workers: "float32", or inexact "bfloat16".
        missing: values of rows that are not there, where the layer is frozen or not training: "first", their initial
            values; "zeros"; "shared", the default row of the admission; "raise", an `IdError`; or a row (output_dim,).
            None: that of the table. With `mask_zero`, row 0 is always there. It can be set at any time.
        options: name, dtype, trainable, autocast and activity_regularizer, as for all layers of Keras. Rows are kept in
            the dtype of variables: float32, or half of it with "bfloat16" or "float16".

    Input: int32 or int64 of any shape S, dense, ragged or sparse. A list or dict of such is looked up at once. A sparse
    tensor's missing elements are id 0.
    `time` is times of the batch's events, a column of any shape: integers, seconds since 1970. They count in the step
    of its gradients, for ``er.Eviction(idle="30d")``: see `er.Table.update`.

    Output: S + (output_dim,) for each input, in the layer's compute dtype.

    Raises:
        ArgumentError: an argument has a value that cannot work.
        UnsupportedError, UnknownArgumentError: an argument that this layer does not have.

    Example:
        >>> import keras, numpy as np, embedrock.keras as erk
        >>> model = keras.Sequential([erk.Embedding(10**9, 4), keras.layers.Flatten(), keras.layers.Dense(1)])
        >>> model.compile(optimizer=erk.optimizer("adam"), loss="mse")
        >>> history = model.fit(np.array([[3, 14], [159, 265_358_979]]), np.zeros((2, 1)), verbose=0)
        >>> int(model.layers[0].table.stats()["rows_touched"])
        4
    """

    def call(self, inputs: Any, training: bool | None = None, time: Any = None) -> Any:
        """Return the rows of ids."""
        requests = self.ask_all(inputs)
        return self.answer_all(inputs, requests, look_up(requests, training, time))

    def mask_of(self, ids: Any) -> Any:
        if isinstance(ids, tf.SparseTensor) or getattr(ids, "sparse", False):
            raise UnsupportedError(
                f"mask_zero=True of {self.label} goes with dense and ragged ids: got sparse ones, of which Keras can "
                "make no mask. Make them dense, tf.sparse.to_dense(ids), or leave mask_zero out."
            )
        return None if ragged_rank(ids) != 0 else keras.ops.not_equal(ids, 0)

    def ask(self, ids: Any, weights: Any) -> LookupRequest:
        flat = ids.flat_values if isinstance(ids, tf.RaggedTensor) else ids
        if isinstance(flat, tf.SparseTensor):  # as in Keras: missing elements are id 0
            flat = tf.sparse.to_dense(flat)
        return LookupRequest(self.handle, checked_ids(flat, self.label))

    def answer(self, ids: Any, request: LookupRequest, found: tf.Tensor) -> Any:
        rows = tf.cast(found, self.compute_dtype)
        return ids.with_flat_values(rows) if isinstance(ids, tf.RaggedTensor) else rows

    def answer_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return (*shape, self.output_dim)
