"""Local variables of the functions of Keras and TensorFlow that are on the call stack.

Keras gives a layer neither the destination of a save, nor the list of callbacks, nor whether assets exist. A variable
cannot see that it is being counted, nor a callback the source of its batches. `local` reads all this from Keras'
functions on the call stack. A later Keras may have other functions; the tests report that. Then rows in RAM are
refused, commits get no name, and summaries count the small variables. Epochs are repeated from their beginning, and
callbacks that would lose rows are refused after the first of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from embedrock.errors import RequirementError

KERAS_SAVING = "keras.src.saving.saving_lib"
KERAS_LEGACY = "keras.src.legacy.saving.legacy_h5_format"
KERAS_LAYER = "keras.src.layers.layer"
KERAS_STOPPING = "keras.src.callbacks.early_stopping"
KERAS_CLONING = "keras.src.models.cloning"
KERAS_FUNCTIONAL = "keras.src.models.functional"
KERAS_SUMMARY = "keras.src.utils.summary_utils"
KERAS_SPARSE = "keras.src.backend.tensorflow.sparse"
KERAS_TENSORBOARD = "keras.src.callbacks.tensorboard"
KERAS_TRAINER = "keras.src.backend.tensorflow.trainer"
TF_VECTORIZED = "tensorflow.python.ops.parallel_for.control_flow_ops"
TF_TAPE = "tensorflow.python.eager.backprop"
TF_CHECKPOINT = "tensorflow.python.checkpoint.checkpoint"
MISSING = object()


def local(module: str, function: str, variable: str) -> Any:
    """Return the value of a local variable of a function on the call stack; `MISSING` without one."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            variables = frame.f_locals
            found = variables.get(variable, MISSING)
            if type(variables) is dict:  # up to Python 3.12 a copy: the function would keep its deleted variables alive
                variables.clear()
            return found
        frame = frame.f_back
    return MISSING


def check_backend() -> None:
    """Raise `RequirementError` unless Keras works, or will work, on TensorFlow. Nothing is imported."""
    backend, said_by = _backend()
    if backend != "tensorflow":
        torch = " With PyTorch, use embedrock.torch and a model of PyTorch's." * (backend == "torch")
        raise RequirementError(
            f"embedrock.keras needs Keras' TensorFlow backend: got {backend!r}, by {said_by}. Rows are looked up and "
            "stepped by calls of the host in TensorFlow's programs, which the other backends do not have. Before "
            f'anything imports Keras: os.environ["KERAS_BACKEND"] = "tensorflow".{torch}'
        )


def _backend() -> tuple[str, str]:
    if (config := getattr(sys.modules.get("keras"), "config", None)) is not None:
        return config.backend(), "keras.config.backend(), as Keras was imported before"
    if backend := os.environ.get("KERAS_BACKEND"):
        return backend, "the environment's KERAS_BACKEND"
    file = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "keras.json"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # Keras continues without the file, too
        return str(json.loads(file.read_text()).get("backend", "tensorflow")), str(file)
    return "tensorflow", "Keras' default"
