"""`RowState`: a layer's part of a `tf.train.Checkpoint`."""

from __future__ import annotations

import json
import weakref
from typing import Any

import tensorflow as tf

from embedrock.errors import UnsupportedError
from embedrock.keras import callers
from embedrock.keras.saving import destination
from embedrock.keras.saving.references import go_to_reference, reference_of, warn_between_steps


class RowState(tf.train.experimental.PythonState):
    """A layer's entry in a `tf.train.Checkpoint`: the reference to its table on disk."""

    def __init__(self, layer: Any) -> None:
        self._reference = weakref.ref(layer)

    @property
    def _layer(self) -> Any:
        return self._reference()

    def serialize(self) -> bytes:
        layer = self._layer
        if callers.local(callers.TF_CHECKPOINT, "restore", "self") is not callers.MISSING:
            return b""  # a restore reads only the names of the parts
        if not layer.table.is_on_disk:
            raise UnsupportedError(
                f"the rows of {layer.label} are in RAM, where tf.train.Checkpoint cannot reach them: they would be "
                'lost. Save the whole model, model.save("x.keras"), or keep the rows on disk: path=....'
            )
        warn_between_steps(layer)
        there = destination.of_tf_checkpoint()
        destination.check_outside(there, layer.table)
        return json.dumps(reference_of(layer, there)).encode()

    def deserialize(self, string_value: bytes) -> None:
        layer = self._layer
        go_to_reference(layer, json.loads(string_value))
        if layer.built:
            layer.handle.pending.drop()
