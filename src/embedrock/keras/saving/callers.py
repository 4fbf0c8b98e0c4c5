"""What the functions of Keras and TensorFlow know that are being called.

Keras does not tell a layer where it is being saved to, nor whether there will be assets. `local` looks it up in the
functions of Keras' that are being called. Where a later Keras has other ones, rows in RAM are refused, and commits get
no name; the tests say so.
"""

from __future__ import annotations

import sys
from typing import Any

KERAS_SAVING = "keras.src.saving.saving_lib"
KERAS_LEGACY = "keras.src.legacy.saving.legacy_h5_format"
TF_CHECKPOINT = "tensorflow.python.checkpoint.checkpoint"
MISSING = object()


def local(module: str, function: str, variable: str) -> Any:
    """Return what a local variable is in a function that is being called; `MISSING` where it is not."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return frame.f_locals.get(variable, MISSING)
        frame = frame.f_back
    return MISSING
