"""`torch.distributed.checkpoint` for models with shared tables: state dicts, and a planner that loads rows.

A load fills the tensors of a state dict, but the checkpoint may hold other rows: see `LoadPlanner`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata

from embedrock.frontend.references import kept_by, warn_of_many
from embedrock.table.table import Table
from embedrock.torch.layers.row_state import META, ROWS, apart
from embedrock.torch.saving.dense_parts import SavingRanks
from embedrock.torch.training.parameters import handles

HOLDER = "dcp"  # prefix of commit names
LAYER = re.compile(rf"(|.*\.){re.escape(ROWS)}(?:part-\d+-of-\d+\.)?{re.escape(META.removeprefix(ROWS))}")


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return ``model.state_dict()``, also for a model with shared rows. Each process returns its shard of rows in RAM.

    All processes save and load the returned dict. The number of processes may differ at loading. Shared tables on disk
    are committed by all processes under one name, ``dcp-<8 digits>``. The dict refers to that commit. The commit stays
    until each process calls ``layer.table.release(name)``.

    Args:
        model: this process's model.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> from embedrock.torch.dcp import state_dict
        >>> sorted(state_dict(ert.Embedding(10, 4)))
        ['rows.meta']
    """
    name = _committed(model)
    with contextlib.nullcontext() if name is None else kept_by(name), apart():
        return model.state_dict()


def _committed(model: nn.Module) -> str | None:
    """Commit the shared tables on disk. Return the name of the commit; None without such tables."""
    shared = [handle for handle in handles(model) if handle.shard is not None and handle.terms.path is not None]
    if not shared:
        return None
    all_ranks = SavingRanks(model)
    name = f"{HOLDER}-{all_ranks.token('the name of a commit')}"
    all_ranks.do("a state dict, commits", lambda: _commit([handle.table for handle in shared], name))
    return name


def _commit(tables: Iterable[Table], name: str) -> None:
    for table in tables:
        if table.is_on_disk:  # on this process
            table.commit(name=name)
            warn_of_many(table, HOLDER, sum((one["name"] or "").startswith(HOLDER) for one in table.commits()))


class LoadPlanner(DefaultLoadPlanner):
    """Planner that loads the rows of a checkpoint into a model with other rows, or with none.

    `torch.distributed.checkpoint.load` copies into the tensors of a state dict, so all need the saved sizes. A new
    model has no rows, and a trained model has others. This planner adds tensors for the rows of the checkpoint to the
    state dict. All else is as in PyTorch's `DefaultLoadPlanner`. The model's state dict must be inside another dict, as
    ``{"model": model.state_dict()}``. PyTorch returns no new keys of the outermost dict.

    Example:
        >>> import embedrock.torch as ert, torch.distributed.checkpoint as dcp
        >>> from embedrock.torch.dcp import LoadPlanner
        >>> model = torch.nn.Sequential(ert.Embedding(10**9, 4), torch.nn.Linear(4, 1))
        >>> _ = dcp.save({"model": model.state_dict()}, checkpoint_id="checkpoint")
        >>> state = {"model": model.state_dict()}
        >>> dcp.load(state, checkpoint_id="checkpoint", planner=LoadPlanner())
        >>> model.load_state_dict(state["model"])
        <All keys matched successfully>
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Add the row tensors of the checkpoint that `metadata` describes to `state_dict`, and begin."""
        if metadata is not None:
            for container, layer in _layers(state_dict):
                _make_room(container, layer, metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _layers(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Return the layers with rows in nested state dicts: each dict, and the path before ``rows.``."""
    prefixes = {match[1]: None for key in state if isinstance(key, str) and (match := LAYER.fullmatch(key))}
    found = [(state, (*path, prefix)) for prefix in prefixes]
    for key, value in state.items():
        found += _layers(value, (*path, key)) if isinstance(value, dict) else []
    return found


def _make_room(container: dict[str, Any], layer: tuple[Any, ...], metadata: Metadata) -> None:
    """Replace the row tensors of a layer by empty tensors of the saved sizes, if the checkpoint has any."""
    *above, prefix = layer
    start = prefix + ROWS
    paths = {key: (metadata.planner_data or {}).get(key, (key,)) for key in metadata.state_dict_metadata}
    saved = {path[-1]: key for key, path in paths.items() if list(path[:-1]) == above and path[-1].startswith(start)}
    if not saved:
        return  # PyTorch's planner reports missing tensors
    for key in [key for key in container if key.startswith(start)]:
        del container[key]
    for name, key in saved.items():
        about: Any = metadata.state_dict_metadata[key]
        container[name] = torch.empty(about.size, dtype=about.properties.dtype, device="cpu")
