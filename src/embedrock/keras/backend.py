"""The backend that Keras has, or will have: it must be TensorFlow, and is known before that is imported."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from embedrock.errors import RequirementError


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
