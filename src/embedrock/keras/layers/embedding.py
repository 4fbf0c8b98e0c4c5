"""`Embedding`: `keras.layers.Embedding` with its rows in a table."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from embedrock.errors import UnsupportedError
from embedrock.keras.layers.lookup_layer import LookupLayer, ragged_rank
from embedrock.keras.training.lookup import checked_ids, look_up
from embedrock.keras.training.requests import LookupRequest


@keras.saving.register_keras_serializable("embedrock")
class Embedding(LookupLayer, keras.layers.Embedding):
    """`keras.layers.Embedding` with its rows in a table of any size, stepped exactly by the model's optimizer.

    It does what `keras.layers.Embedding` does, except that its rows are not a variable: instead of ``embeddings`` it
    has a small variable that stands for them (see `Handle`), which ``erk.optimizer`` knows.

    Args:
        input_dim: number of rows; None for open ids (any int64); or a ready-made `er.Table`.
        output_dim: weights in a row.
        embeddings_initializer: first values: a name or an instance of Keras' that draws each row by itself, or one of
            Embedrock's. None: "uniform", as in Keras.
        embeddings_regularizer: one of Keras', or a function of weights (rows, output_dim): its loss is that of the rows
            which the last call of the model looked up, each once. It is among the `losses` of layer and model.
        embeddings_constraint: one of Keras', or a function of weights (rows, output_dim), that does to each row what
            depends on that row only. It is applied to the rows that a step has gradients for, after the step.
        mask_zero: id 0 is padding, masked out for the layers that follow.
        rule: how rows are stepped; None: as the model's optimizer does. Its learning rate, unless one was given to
            it, is the optimizer's.
        path: folder of a table on disk, made where there is none; one that is there is resumed, which a line of the
            logger "embedrock" says. None: rows in RAM.
        memory: the most RAM that the rows may take, in bytes or as "2GiB"; None: the machine's.
        seed: of the first values. (An initializer that was given a seed brings its own.) None: Keras draws one, as for
            any initializer, so that `keras.utils.set_random_seed` decides it. It is kept with the rows, in a ``.keras``
            too; a table that is there at `path` keeps its own.
        policy, keep, directory, on_nonfinite: as in `er.Table`.
        commit_every: as in `er.Table`: commits rows by itself, and no dense weights, which `erk.TableCheckpoint` has as
            well.
        device_memory: bytes of the GPU's memory, or "2GiB", or "25%" of it, for rows that TensorFlow's GPU uses; it
            needs PyTorch and Triton, and has not met a GPU yet (docs/keras.md). None: the CPU uses the rows. 0: so it
            does, and this is meant where TensorFlow has a GPU.
        group: an `er.Group`, whose member the table is, by the layer's name: one that is there, or a new one. Layers of
            a group that are looked up together, by an `EmbeddingCollection` or in a model that was `fuse`d, are read,
            and their gradients summed, in one go. A file of the model has the group; a copy of the layer is alone.
        sharded: under a `tf.distribute.MultiWorkerMirroredStrategy`, have each worker keep its part of the rows, in
            RAM or in a folder of its own inside of `path`, ``shard-<rank>-of-<workers>``. Rows are looked up by all
            workers at once; `layer.table` is the worker's part. In one process it changes nothing.
        wire: what float32 rows that are shared out, and their gradients, are sent to other workers as: "float32",
            exactly, or "bfloat16", rounded to 16 bits, which is no longer exact.
        name, dtype, trainable: as for all layers of Keras. Rows are kept in the dtype of variables: float32,
            or half of it with "bfloat16" or "float16".

    Input: int32 or int64 of any shape S, dense, ragged or sparse (what is missing is id 0), or a list or dict of such,
    which are looked up at once.
    Output: S + (output_dim,) each, in the layer's compute dtype.

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

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the rows of ids."""
        requests = self.ask_all(inputs)
        return self.answer_all(inputs, requests, look_up(requests, training))

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return which ids are not 0, with ``mask_zero=True``; None otherwise, and for ragged ids."""
        return keras.tree.map_structure(self._mask, inputs) if self.mask_zero else None

    def _mask(self, ids: Any) -> Any:
        if isinstance(ids, tf.SparseTensor) or getattr(ids, "sparse", False):
            raise UnsupportedError(
                f"mask_zero=True of {self.label} goes with dense and ragged ids: got sparse ones, of which Keras can "
                "make no mask. Make them dense, tf.sparse.to_dense(ids), or leave mask_zero out."
            )
        return None if ragged_rank(ids) != 0 else keras.ops.not_equal(ids, 0)

    def ask(self, ids: Any, weights: Any) -> LookupRequest:
        """Ask for the rows of ids."""
        flat = ids.flat_values if isinstance(ids, tf.RaggedTensor) else ids
        if isinstance(flat, tf.SparseTensor):  # as in Keras: what it does not have is id 0
            flat = tf.sparse.to_dense(flat)
        return LookupRequest(self.handle, checked_ids(flat, self.label))

    def answer(self, ids: Any, request: LookupRequest, found: tf.Tensor) -> Any:
        """Return rows in the layer's compute dtype."""
        rows = tf.cast(found, self.compute_dtype)
        return ids.with_flat_values(rows) if isinstance(ids, tf.RaggedTensor) else rows

    def answer_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Return the shape of the rows of ids of a shape."""
        return (*shape, self.output_dim)

    def answer_ragged_rank(self, ids: keras.KerasTensor) -> int | None:
        """Return the ragged rank of rows: that of the ids."""
        return ragged_rank(ids)
