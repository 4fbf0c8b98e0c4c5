"""Placement of the rows of Keras' layers: on the CPU, or on TensorFlow's GPU. Warnings name a surprising place."""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import Any

import tensorflow as tf

from embedrock.errors import UnsupportedError
from embedrock.keras.training.executors import BY_HOST, ProgramExecutor
from embedrock.keras.workers.cluster import has_several_workers
from embedrock.storage.listeners import PlacementWarning
from embedrock.table.group import device_memory_of
from embedrock.table.table import Table, rows_of

GPU, CPU = "/GPU:0", "/CPU:0"
_SEE = "docs/keras.md, On a GPU"


def executor_of(table: Table, label: str) -> ProgramExecutor:
    """Return the executor of a table's rows, on the CPU or the GPU. Warn of a surprising one.

    The GPU uses them if `device_memory=` of a layer, a table or a group gives them memory there. Tables of a group that
    no GPU can use stay on the CPU. Under Triton's interpreter (``TRITON_INTERPRET=1``), the CPU acts as the GPU if
    TensorFlow has none.

    Raises:
        UnsupportedError: the GPU cannot use them.
    """
    given, gpus = device_memory_of(table), tf.config.get_visible_devices("GPU")  # this starts no GPU
    if not given and (given is not None or not gpus):
        return ProgramExecutor(table, label)
    if given is None:
        surprise = (
            f"TensorFlow has {_names(gpus)}, and rows of Embedrock's layers are not used there: {BY_HOST}, and "
            'what they return is copied to the GPU. Pass device_memory="2GiB" to the layers to have rows used '
            f"there, or device_memory=0 to say that this is meant ({_SEE})."
        )
    elif not gpus and os.environ.get("TRITON_INTERPRET") != "1":
        surprise = (
            f"device_memory={given!r} of {label} is not used, as TensorFlow has no GPU here: the CPU uses the rows, to "
            "the same result."
        )
    elif lack := _lack(gpus):
        raise UnsupportedError(
            f"rows of {label} cannot be used by TensorFlow's GPU (device_memory={given!r}): {lack}. {_SEE}. Without "
            "device_memory the CPU uses them, to the same result."
        )
    elif table.group is not None and rows_of(table).lifecycle is not None:
        surprise = (
            f"{table.subject} is in a group, and its rows come and go: it is read and stepped by the CPU, and its rows "
            "are copied to the GPU. For GPU speed, make it outside of the group."
        )
    else:
        import torch

        from embedrock.keras.training.gpu_executor import DlpackTransfer, TensorFlowGpuExecutor

        place, device = (GPU, torch.device("cuda", 0)) if gpus else (CPU, torch.device("cpu"))
        return TensorFlowGpuExecutor(table, label, DlpackTransfer(place, device))
    warnings.warn(surprise, PlacementWarning, stacklevel=2)
    return ProgramExecutor(table, label)


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
