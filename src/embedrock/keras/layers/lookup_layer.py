"""`LookupLayer`: a layer's request for rows, and the output that it makes of them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import keras
import tensorflow as tf

from embedrock.errors import ArgumentError, IdTypeError, counted
from embedrock.keras.layers.pretrained import pretrained_options
from embedrock.keras.layers.row_layer import KerasRowLayer, shows_but
from embedrock.keras.training.lookup import check_id_dtype, checked_column
from embedrock.keras.training.requests import LookupRequest

ARRAYS = ("numpy", "pandas", "polars", "pyarrow")  # packages whose ids are not tensors yet


class UndeclaredIdsError(IdTypeError, NotImplementedError):
    """An input of a model that is declared to be floats or strings.

    A `keras.Sequential` without an Input declares a float input, and rounds ids to floats. It does not if the layer
    raises `NotImplementedError` on shape inference: then ids arrive unchanged.
    """


class LookupLayer(KerasRowLayer):
    """A layer that makes one request per input. Inputs are one tensor, or a list, tuple or dict of several.

    A call has two halves, `ask_all` and `answer_all`, so that layers can be looked up together.
    """

    @classmethod
    @shows_but("seed")  # the rows start as the weights
    def from_pretrained(cls, weights: Any, trainable: bool = True, *, dtype: Any = None, **options: Any) -> Any:
        """Make a layer whose rows start as those of `weights`. Rows are read when needed, without a copy.

        (A bfloat16 tensor is copied, because NumPy has no such dtype.)

        Args:
            weights: (rows, dim) float32, bfloat16 or float16: an array, a tensor, or a `np.memmap` of any size, which
                stays on disk. It must not change while the layer is used.
            trainable: whether rows are trained, as in any layer of Keras (PyTorch's layers freeze them). The table
                keeps trained rows; `weights` never change.
            dtype: dtype of the layer, as in Keras, and so of its table; None: that of `weights`.
            options: rule, path, memory, directory, on_nonfinite, policy, keep, commit_every, device_memory: as for the
                layer. The layer's other arguments work too (mask_zero, mode, name).

        Raises:
            ArgumentError: `weights` have another shape, dtype or type.

        Example:
            >>> import numpy as np, embedrock.keras as erk
            >>> erk.Embedding.from_pretrained(np.eye(3, dtype="float32"))(np.array([[2]])).numpy()
            array([[[0., 0., 1.]]], dtype=float32)
        """
        rule = options.pop("rule", None)  # the layer's own
        table, more = pretrained_options(f"erk.{cls.__name__}", weights, dtype, options)
        make: Any = cls  # the class of a concrete layer
        return make(table, trainable=trainable, rule=rule, **more)

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the layer on ids as they are. Keras would convert ids beside missing ones to float32.

        Raises:
            IdTypeError: an array, or a column of pandas, polars or Arrow, does not hold integers.
        """
        if type(inputs).__module__.partition(".")[0] in ARRAYS:
            inputs = checked_column(inputs, self.label)
        return super().__call__(inputs, *args, **kwargs)

    # ------------------------------------------------------------ one input

    @abstractmethod
    def ask(self, ids: Any, weights: Any) -> LookupRequest:
        """Return the request for one input."""

    @abstractmethod
    def answer(self, ids: Any, request: LookupRequest, found: tf.Tensor) -> Any:
        """Return the output for one input, from the values that the lookup found."""

    @abstractmethod
    def answer_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Return the shape of the output for an input of a shape."""

    @abstractmethod
    def answer_ragged_rank(self, ids: keras.KerasTensor) -> int | None:
        """Return the number of ragged dimensions of the output: 0 for a dense one, None if it is unknown."""

    # ------------------------------------------------------------ any inputs

    def ask_all(self, inputs: Any, weights: Any = None) -> list[LookupRequest]:
        """Return the requests for all inputs."""
        parts = keras.tree.flatten(inputs)
        if not parts:
            raise ArgumentError(f"inputs of {self.label} must be a tensor of ids, or several: got {inputs!r}.")
        factors = [None] * len(parts) if weights is None else keras.tree.flatten(weights)
        if len(factors) != len(parts):
            raise ArgumentError(
                f"`weights` of {self.label} must have the structure of the ids, {counted(len(parts), 'tensor')}: got "
                f"{len(factors)}."
            )
        requests = [self.ask(part, factor) for part, factor in zip(parts, factors, strict=True)]
        if self.handle.variable.regularizer is not None:
            self.looked_up.ids += [request.ids for request in requests]
        return requests

    def answer_all(self, inputs: Any, requests: list[LookupRequest], found: list[tf.Tensor]) -> Any:
        """Return the outputs in the structure of the inputs."""
        parts = zip(keras.tree.flatten(inputs), requests, found, strict=True)
        return keras.tree.pack_sequence_as(inputs, [self.answer(*part) for part in parts])

    def compute_output_shape(self, input_shape: Any) -> Any:
        return keras.tree.map_shape_structure(self.answer_shape, input_shape)

    def compute_output_spec(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return keras.tree.map_structure(self._output_spec, inputs)

    def _output_spec(self, ids: Any) -> keras.KerasTensor:
        try:
            check_id_dtype(ids.dtype, self.label)
        except IdTypeError as error:
            raise UndeclaredIdsError(str(error)) from None
        rank = self.answer_ragged_rank(ids)
        # Keras' tensors of an unknown ragged rank are ragged, with none.
        more = {} if rank == 0 else {"ragged": True, "ragged_rank": rank}
        return keras.KerasTensor(self.answer_shape(tuple(ids.shape)), dtype=self.compute_dtype, **more)


def ragged_rank(ids: Any) -> int | None:
    """Return the number of ragged dimensions of a tensor or `keras.KerasTensor`; None if it is unknown."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.ragged_rank
    return ids.ragged_rank if getattr(ids, "ragged", False) else 0
