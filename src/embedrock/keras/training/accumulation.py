"""`RowAccumulator`: row gradients accumulated over Keras' ``gradient_accumulation_steps``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from embedrock.errors import ArgumentError
from embedrock.keras.training.handle import TableHandle
from embedrock.keras.training.slices import TYPES, RowSlices, shaped


class RowAccumulator:
    """A replacement of Keras' accumulator variable: the sum of row gradients over micro-batches, on their executor.

    Args:
        handle: handle of the table.
        variable: Keras' variable. It holds ones while a sum exists; files of models lack the sum.
    """

    def __init__(self, handle: TableHandle, variable: Any) -> None:
        self._handle, self._variable = handle, variable
        self.shape, self.dtype = variable.shape, variable.dtype
        self._sum: Any = None

    def add(self, gradient: RowSlices) -> None:
        """Add a gradient, in a program."""
        with tf.control_dependencies(self._call(self._added, gradient, [tf.int64])):
            self._variable.assign(tf.ones(self.shape, self.dtype))

    def assign(self, zeros: Any) -> None:
        """Begin a new sum, in a program, as Keras does after a step."""
        self._variable.assign(zeros)

    def __radd__(self, gradient: RowSlices) -> RowSlices:
        """Return, in a program, a gradient plus the accumulated sum."""
        made = self._call(self._total, gradient, TYPES)
        return RowSlices(*shaped(made, self._handle.table.dim), gradient.table_shape)

    def _call(self, function: Any, gradient: RowSlices, dtypes: Any) -> list[tf.Tensor]:
        inputs = [tf.convert_to_tensor(self._variable.value), *gradient.sent()]
        return self._handle.executor.call(function, inputs, dtypes, functions=self._handle.functions)

    def _added(self, marks: Any, *arrays: Any) -> np.int64:
        self._sum = self._with(marks, arrays)
        self._handle.pending.end_step()
        return np.int64(0)

    def _total(self, marks: Any, *arrays: Any) -> list[Any]:
        return self._handle.executor.shown(self._with(marks, arrays), is_last=False)

    def _with(self, marks: Any, arrays: tuple[Any, ...]) -> Any:
        before, grads = (self._sum if marks.any() else None), self._handle.gradients(arrays)
        if before is None and marks.any():
            raise ArgumentError(
                "the file of the model was saved between two steps of gradient_accumulation_steps, without the "
                f"gradients of rows of {self._handle.label} that waited: training cannot go on from it. Load one that "
                "was saved after a step, by erk.TableCheckpoint for example."
            )
        return grads if before is None else self._handle.executor.sum_of([before, grads])
