"""TorchRec's managed collisions, beside admission and eviction: so many slots with a row each, which ids get."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

EVERY = 10  # steps between two evictions
# By the name that is shown.
POLICIES = {"TorchRec LFU": "LFU_EvictionPolicy", "TorchRec dLFU": "DistanceLFU_EvictionPolicy"}


def are_installed() -> bool:
    """Return whether TorchRec is there."""
    return find_spec("torchrec") is not None


class ManagedCollisions:
    """TorchRec's `MCHManagedCollisionModule` on the CPU: a slot for each id, and other ids for those that are evicted.

    Args:
        name: in `POLICIES`.
        rows: slots.
    """

    def __init__(self, name: str, rows: int) -> None:
        self._torch, jagged = import_module("torch"), import_module("torchrec.sparse.jagged_tensor")
        modules, self._jagged = import_module("torchrec.modules.mc_modules"), jagged.JaggedTensor
        policy = getattr(modules, POLICIES[name])()
        self._module: Any = modules.MCHManagedCollisionModule(rows, self._torch.device("cpu"), policy, EVERY)

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of the ids of a batch, and those whose rows begin anew before it."""
        torch = self._torch
        features = {"item": self._jagged(torch.from_numpy(ids), lengths=torch.ones(len(ids), dtype=torch.int64))}
        slots = self._module(features)["item"].values().numpy()
        evicted = self._module.evict()
        return slots, np.empty(0, np.int64) if evicted is None else evicted.numpy()

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that it takes to know which id has which slot."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._module.buffers())
