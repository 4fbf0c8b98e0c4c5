"""Who takes part in a benchmark, what memory that takes, and what can keep it from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from embedrock.machine.sizes import format_bytes

LEARNING_RATE = 1e-3


class Unavailable(Exception):
    """A contender cannot run here; the text says why, and what to install."""


class Footprint(NamedTuple):
    """Bytes of RAM and of a GPU's memory."""

    host: int = 0
    device: int = 0

    def plus(self, other: Footprint) -> Footprint:
        """Return both together."""
        return Footprint(self.host + other.host, self.device + other.device)

    def fits(self, room: Footprint) -> bool:
        """Return whether there is room for it."""
        return self.host <= room.host and self.device <= room.device

    def too_large_for(self, room: Footprint) -> str:
        """Return for people why it does not fit."""
        need, have, device, room_device = map(format_bytes, (self.host, room.host, self.device, room.device))
        if not (self.device or room.device):
            return f"needs {need} of RAM, {have} may be used"
        return f"needs {need} of RAM and {device} of GPU memory; {have} and {room_device} may be used"


@dataclass(frozen=True)
class Contender:
    """One way to do a job: a row in a benchmark's table of contenders.

    Args:
        name: as on the command line and in the tables.
        label: what it is, for people.
    """

    name: str
    label: str

    @property
    def ways(self) -> Mapping[str, Any]:
        """How it is driven: what follows its name in the tables, and what its session's `use` is given."""
        return {"": None}

    def need(self, workload: Any) -> Footprint:
        """Return the memory that its process may come to hold."""
        return Footprint()


def import_torch() -> Any:
    """Return the module, with as many threads as a contender may use."""
    try:
        import torch
    except ImportError as error:
        raise Unavailable(f"PyTorch does not import: {error}. pip install 'embedrock[torch]'") from error
    torch.set_num_threads(int(os.environ["EMBEDROCK_THREADS"]))
    return torch


def import_fbgemm() -> tuple[Any, Any, Any]:
    """Return FBGEMM's modules of table-batched embeddings: training, common and configurations."""
    try:
        training = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        return training, common, import_module("fbgemm_gpu.split_embedding_configs")
    except (ImportError, OSError, RuntimeError) as error:  # the last two: built for another torch
        raise Unavailable(f"fbgemm_gpu does not import: {error}. pip install 'embedrock[bench]'") from error
