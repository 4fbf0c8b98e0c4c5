"""Rows in RAM that several processes share, in state dicts: each process has its part, and takes its rows of all parts.

For `torch.distributed.checkpoint`, which saves what any process has, each part has keys of its own, ``rows.part-<rank>-
of-<ranks>.ids`` and so on: tensors of one key would pass for the same on all.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.errors import ArgumentError
from embedrock.shards.owners import Shard
from embedrock.torch.layers.row_state import HISTORY, IDS, META, ROWS, steps_in, with_part

OF_PART = re.compile(r"part-(\d+)-of-(\d+)\.(.+)")

_are_apart: ContextVar[bool] = ContextVar("parts of rows have keys of their own", default=False)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Let state dicts have this process's part of rows that are shared out."""
    token = _are_apart.set(True)
    try:
        yield
    finally:
        _are_apart.reset(token)


def are_apart() -> bool:
    """Return whether state dicts may have parts of rows."""
    return _are_apart.get()


def keyed_by_part(tensors: Mapping[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    """Return the tensors of a part by keys that no other part has."""
    part = f"{ROWS}part-{shard.rank}-of-{shard.ranks}."
    return {part + key.removeprefix(ROWS): tensor for key, tensor in tensors.items()}


def own_part(states: Mapping[str, Any], prefix: str, shard: Shard | None, label: str) -> dict[str, Any]:
    """Return a state dict with the rows of this process in place of parts of those under a prefix.

    Args:
        states: of a model.
        prefix: of the layer.
        shard: the rows that are here; None: all of them.
        label: of the layer, for error messages.

    Raises:
        ArgumentError: some parts are missing.
    """
    start, rest, parts = prefix + ROWS, dict(states), dict[tuple[int, int], dict[str, Tensor]]()
    for key in states:
        match = OF_PART.fullmatch(key.removeprefix(start)) if key.startswith(start) else None
        if match:
            parts.setdefault((int(match[2]), int(match[1])), {})[ROWS + match[3]] = rest.pop(key)
    if not parts:
        return rest
    ranks = min(parts)[0]
    if set(parts) != {(ranks, rank) for rank in range(ranks)}:
        got = ", ".join(f"{rank} of {of}" for of, rank in sorted(parts))
        raise ArgumentError(
            f"the state of {label} must have the rows of all {ranks} ranks that saved it: got those of {got}. Load "
            "it by torch.distributed.checkpoint with planner=embedrock.torch.dcp.LoadPlanner(), which brings all."
        )
    found = joined([parts[ranks, rank] for rank in range(ranks)], shard)
    return rest | {prefix + name: tensor for name, tensor in found.items()}


def joined(parts: Sequence[dict[str, Tensor]], shard: Shard | None) -> dict[str, Tensor]:
    """Return the tensors of those rows of all parts that are here; None: of all of them."""
    counts = [len(one[IDS]) if IDS in one else 0 for one in parts]
    masks = [_owned(one[IDS].numpy(), shard) if IDS in one else np.empty(0, bool) for one in parts]
    own = [torch.from_numpy(mask) for mask in masks]
    leading = max(parts, key=lambda one: steps_in(one[META]))  # who has no rows at all makes no steps
    part = None if shard is None else (shard.rank, shard.ranks)
    found = {META: with_part(leading[META], int(sum(mask.sum() for mask in masks)), part)}
    for name in {name for one in parts for name in one} - {META}:
        of_rows = [(one[name], mask) for one, mask, n in zip(parts, own, counts, strict=True) if n and name in one]
        if name.startswith(HISTORY):  # of the rule, the same in all
            found[name] = leading[name]
        else:
            found[name] = torch.cat([tensor[mask] for tensor, mask in of_rows])
    return {name: tensor for name, tensor in found.items() if tensor.numel()}


def _owned(ids: np.ndarray, shard: Shard | None) -> np.ndarray:
    return np.ones(len(ids), bool) if shard is None else shard.owns(ids)
