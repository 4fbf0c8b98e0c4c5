"""Rows in RAM that several processes share, in checkpoints: each process writes its part to a file beside the others'.

The first one's part is in the checkpoint's file itself. That of rank r of W is ``step-<step>-<token>.part-<r>-of-<W>``,
whole before the checkpoint exists. Other processes than those that saved take their rows of all parts.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embedrock.errors import CorruptTableError
from embedrock.fronts.checkpoints import Checkpoint
from embedrock.machine.vfs import OS_SYSTEM
from embedrock.process import platform
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.layers.row_parts import joined
from embedrock.torch.layers.row_state import META, ROWS, part_of

PART_NAME = re.compile(r"(step-\d{1,18}-[0-9a-f]{8})\.part-(\d+)-of-(\d+)(?:\.tmp)?")

Read = Callable[[Path], dict[str, Any]]
States = Mapping[str, Any]


def part_file(file: Path, rank: int, ranks: int) -> Path:
    """Return the file of a rank's part of a checkpoint."""
    return file.with_name(f"{file.name.partition('.')[0]}.part-{rank}-of-{ranks}")


def shared_tensors(states: States) -> dict[str, Tensor]:
    """Return those of a model's tensors that are of a part of rows."""
    prefixes = [key.removesuffix(META) for key in states if key.endswith(META) and part_of(states[key]) is not None]
    starts = tuple(prefix + ROWS for prefix in prefixes)
    return {key: tensor for key, tensor in states.items() if starts and key.startswith(starts)}


def write_part(file: Path, states: States, rank: int, ranks: int) -> None:
    """Write a rank's part of a checkpoint, durably; nothing where no rows in RAM are shared."""
    tensors, path = shared_tensors(states), part_file(file, rank, ranks)
    if not tensors:
        return
    draft = path.with_name(f"{path.name}.tmp")
    try:
        with draft.open("wb") as opened:
            torch.save(tensors, opened)
            opened.flush()
            platform.sync(opened.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    os.replace(draft, path)
    OS_SYSTEM.fsync_folder(str(path.parent))


def remove_parts(folder: Path, kept: Iterable[Checkpoint]) -> None:
    """Remove the parts of checkpoints that are not kept. Several processes may do so at once."""
    names = {each.file.name.partition(".")[0] for each in kept}
    for name in os.listdir(folder):
        match = PART_NAME.fullmatch(name)
        if match and match[1] not in names:
            with contextlib.suppress(FileNotFoundError):
                (folder / name).unlink()


def own_rows(model: nn.Module, states: dict[str, Any], file: Path, read: Read) -> dict[str, Any]:
    """Return a model's state with the rows that are this process's, of the parts that there are.

    Args:
        model: of this process.
        states: of the checkpoint's file, with the first part.
        file: of the checkpoint.
        read: reads a part's file.

    Raises:
        CorruptTableError: a part is missing.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, RowLayer)}
    others: dict[int, States] = {}
    found = copy.copy(states)  # with the versions of modules that PyTorch keeps beside
    for key in [key for key in states if key.endswith(META) and part_of(states[key]) is not None]:
        prefix = key.removesuffix(META)
        _, ranks = part_of(states[key]) or (0, 1)
        layer = layers.get(prefix.removesuffix("."))
        shard = None if layer is None else layer.handle.shard
        for rank in set(range(1, ranks)) - others.keys():
            others[rank] = _read_part(part_file(file, rank, ranks), read)
        parts = [_rows_of(part, prefix) for part in (states, *(others[rank] for rank in range(1, ranks)))]
        for old in _rows_of(found, prefix):
            del found[prefix + old]
        found |= {prefix + name: tensor for name, tensor in joined(parts, shard).items()}
    return found


def _rows_of(states: States, prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in states.items() if key.startswith(prefix + ROWS)}


def _read_part(path: Path, read: Read) -> States:
    if not path.exists():
        raise CorruptTableError(
            f"{str(path)!r} is missing: the rows in RAM that a process had are in it. All ranks must save to, and load "
            "from, one folder that all see."
        )
    return read(path)
