"""Where the rows of Keras' layers are used: by the CPU, whatever GPUs there are. Who would expect another is told."""

from __future__ import annotations

import warnings

import tensorflow as tf

from embedrock.errors import UnsupportedError
from embedrock.machine.sizes import Size, parse_device_memory
from embedrock.table.group import device_memory_of
from embedrock.table.table import Table
from embedrock.tiers.side import PlacementWarning

_HOW = "TensorFlow's programs look rows up, and step them, by calls of the host, in RAM or on disk"
_ELSE = "For rows in GPU memory, use embedrock.torch and a model of PyTorch's (docs/gpu.md)"


def refuse_device_memory(subject: str, size: Size | None) -> None:
    """Raise `UnsupportedError` where GPU memory is given to a layer of Keras."""
    if parse_device_memory(size):
        raise UnsupportedError(
            f"`device_memory` of {subject} must be None or 0: got {size!r}. {_HOW}; only what they return is copied to "
            f"TensorFlow's GPU. Leave it out. {_ELSE}."
        )


def warn_of_gpus(table: Table) -> None:
    """Warn, where TensorFlow has GPUs, that they do not use rows, unless the table says that this is meant."""
    if device_memory_of(table) == 0:
        return
    if gpus := [each.name for each in tf.config.get_visible_devices("GPU")]:  # which starts none of them
        warnings.warn(
            f"TensorFlow has {', '.join(gpus)}, and rows of Embedrock's layers are not used there: {_HOW}, and what "
            "they return is copied to the GPU. Pass device_memory=0 to the layers to say that this is meant. "
            f"{_ELSE}.",
            PlacementWarning,
            stacklevel=2,
        )


def warn_of_rows_elsewhere(table: Table, label: str) -> None:
    """Warn that rows come to RAM, which layers of PyTorch use on a GPU."""
    if table.side is not None:
        warnings.warn(
            f"rows of {label} are {table.side!r}, where layers of PyTorch use them: {_HOW}. So each lookup waits for "
            "the GPU and brings back the rows that changed there, and all of them go back when PyTorch goes on. No row "
            "is lost. Use the table in one framework at a time, and put PyTorch's layers on the CPU, "
            'model.to("cpu"), before Keras goes on with it.',
            PlacementWarning,
            stacklevel=2,
        )
