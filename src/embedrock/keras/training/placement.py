"""Placement of the rows of Keras' layers: on the CPU, or on TensorFlow's GPU. Warnings name a surprising place."""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from embedrock.errors import UnsupportedError
from embedrock.keras.workers.cluster import has_several_workers
from embedrock.storage.listeners import PlacementWarning
from embedrock.table.group import device_memory_of
from embedrock.table.table import Table

if TYPE_CHECKING:  # PyTorch is imported with it
    from embedrock.keras.training.crossing import DlpackTransfer

GPU, CPU = "/GPU:0", "/CPU:0"


_HOW = "TensorFlow's programs look rows up, and step them, by calls of the host, in RAM or on disk"
_SEE = "docs/keras.md, On a GPU"


def crossing_for(table: Table, label: str) -> DlpackTransfer | None:
    """Return the path to the GPU that uses the rows of a table. Warn and return None if the CPU does.

    The GPU uses them if `device_memory=` of a layer, a table or a group gives them memory there. Tables of a group that
    no GPU can use stay on the CPU. Under Triton's interpreter (``TRITON_INTERPRET=1``), the CPU acts as the GPU if
    TensorFlow has none.

    Raises:
        UnsupportedError: the GPU cannot use them.
    """
    given, gpus = device_memory_of(table), tf.config.get_visible_devices("GPU")  # this starts no GPU
    if not given:
        if given is None and gpus:
            warnings.warn(
                f"TensorFlow has {_names(gpus)}, and rows of Embedrock's layers are not used there: {_HOW}, and what "
                'they return is copied to the GPU. Pass device_memory="2GiB" to the layers to have rows used there, or '
                f"device_memory=0 to say that this is meant ({_SEE}).",
                PlacementWarning,
                stacklevel=2,
            )
        return None
    if not gpus and os.environ.get("TRITON_INTERPRET") != "1":
        warnings.warn(
            f"device_memory={given!r} of {label} is not used, as TensorFlow has no GPU here: the CPU uses the rows, to "
            "the same result.",
            PlacementWarning,
            stacklevel=2,
        )
        return None
    if lack := _lack(gpus):
        raise UnsupportedError(
            f"rows of {label} cannot be used by TensorFlow's GPU (device_memory={given!r}): {lack}. {_SEE}. Without "
            "device_memory the CPU uses them, to the same result."
        )
    import torch

    from embedrock.device.attach import is_for_cpu, warn_of_member
    from embedrock.keras.training.crossing import DlpackTransfer

    if is_for_cpu(table):
        warn_of_member(table, stacklevel=3)
        return None
    return DlpackTransfer(GPU, torch.device("cuda", 0)) if gpus else DlpackTransfer(CPU, torch.device("cpu"))


def _lack(gpus: list[Any]) -> str | None:
    """Return what is missing for GPUs to use rows, with a remedy; None if nothing is."""
    strategy = tf.distribute.get_strategy()
    has_servers = isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
    if strategy.num_replicas_in_sync != 1 or has_several_workers(strategy) or has_servers:
        return (
            f"{type(strategy).__name__} has replicas on several GPUs, workers or servers, and rows are used by one GPU "
            "of one process. Train on one of them, without a strategy"
        )
    if importlib.util.find_spec("torch") is None:
        return 'PyTorch, whose kernels use them, is not installed. pip install "embedrock[gpu]"'
    from embedrock.device.requirements import lack_for_kernels

    lack = lack_for_kernels("cuda" if gpus else "cpu")
    if lack is not None:
        return f"{lack.what}. Install it: {lack.remedy}"
    return _lack_of_gpu(gpus) if gpus else None


def _lack_of_gpu(gpus: list[Any]) -> str | None:
    """Return the reason why TensorFlow and PyTorch cannot share a GPU; None if they can."""
    import torch

    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU. Install one that is built for CUDA"
    if len(gpus) > 1 or not gpus[0].name.endswith(":0") or len(tf.config.list_logical_devices("GPU")) > 1:
        return (
            f"TensorFlow has {_names(gpus)}, parts of one, or one that PyTorch counts otherwise, and rows are used by "
            'one. Choose it before TensorFlow is imported: os.environ["CUDA_VISIBLE_DEVICES"] = "0"'
        )
    if not _leaves_memory(gpus[0]):
        return (
            "TensorFlow takes all of its memory when it starts. Before that, have it take what it needs: "
            'tf.config.experimental.set_memory_growth(tf.config.list_physical_devices("GPU")[0], True)'
        )
    return None


def _leaves_memory(gpu: Any) -> bool:
    by_environment = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "true"
    parts = tf.config.get_logical_device_configuration(gpu) or []
    is_limited = any(part.memory_limit is not None for part in parts)
    return by_environment or is_limited or bool(tf.config.experimental.get_memory_growth(gpu))


def _names(gpus: list[Any]) -> str:
    return ", ".join(gpu.name for gpu in gpus)


def warn_of_rows_elsewhere(table: Table, label: str) -> None:
    """Warn if rows are copied to RAM from a GPU that PyTorch's layers use."""
    if table.executor is not None:
        warnings.warn(
            f"rows of {label} are {table.executor!r}, where layers of PyTorch use them: {_HOW}. So each lookup "
            "waits for the GPU and brings back the rows that changed there, and all of them go back when PyTorch goes "
            "on. No row is lost. Use the table in one framework at a time, and put PyTorch's layers on the CPU, "
            'model.to("cpu"), before Keras goes on with it.',
            PlacementWarning,
            stacklevel=2,
        )
