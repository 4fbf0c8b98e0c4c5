"""What the functions of Keras and TensorFlow know that are being called.

Keras does not tell a layer where it is being saved to, nor whether there will be assets, nor a variable that it is
being counted, nor a callback where batches come from, nor a layer which callbacks there are. `local` looks it up in
the functions of Keras' that are being called. Where a later Keras has other ones, rows in RAM are refused, commits get
no name, summaries count the small variables, epochs are repeated from their beginning, and callbacks that would lose
rows are refused after the first of them; the tests say so.
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
    """Return what a local variable is in a function that is being called; `MISSING` where it is not."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            variables = frame.f_locals
            found = variables.get(variable, MISSING)
            if type(variables) is dict:  # up to Python 3.12, a copy: the function would keep what it lets go
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
    """Return the backend, and what says so."""
    if (config := getattr(sys.modules.get("keras"), "config", None)) is not None:
        return config.backend(), "keras.config.backend(), as Keras was imported before"
    if backend := os.environ.get("KERAS_BACKEND"):
        return backend, "the environment's KERAS_BACKEND"
    file = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "keras.json"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # Keras goes on without it, too
        return str(json.loads(file.read_text()).get("backend", "tensorflow")), str(file)
    return "tensorflow", "Keras' default"
