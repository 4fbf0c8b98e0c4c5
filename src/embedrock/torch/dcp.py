"""For `torch.distributed.checkpoint`: state dicts of models that processes share, and a planner that loads rows.

It fills the tensors of a state dict when it loads, and rows may be others: `LoadPlanner`.
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
from embedrock.torch.layers.row_layer import apart
from embedrock.torch.layers.row_state import META, ROWS
from embedrock.torch.saving.dense_parts import SavingRanks
from embedrock.torch.training.parameters import handles

HOLDER = "dcp"  # what names of commits begin with
LAYER = re.compile(rf"(|.*\.){re.escape(ROWS)}(?:part-\d+-of-\d+\.)?{re.escape(META.removeprefix(ROWS))}")


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return ``model.state_dict()``, also of one whose rows several processes share: each has its part of those in RAM.

    All of them save, and load, what this returns; there may be more of them when it is loaded, or fewer. Tables on disk
    that they share are committed by all under one name, ``dcp-<8 digits>``, to which it refers: that commit stays until
    ``layer.table.release(name)`` on each of them.

    Args:
        model: of this process.

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
    """Commit the tables on disk that processes share, and return the name of that; None where there are none."""
    shared = [handle for handle in handles(model) if handle.shard is not None and handle.terms.path is not None]
    if not shared:
        return None
    all_ranks = SavingRanks(model)
    name = f"{HOLDER}-{all_ranks.token('the name of a commit')}"
    all_ranks.do("a state dict, commits", lambda: _commit([handle.table for handle in shared], name))
    return name


def _commit(tables: Iterable[Table], name: str) -> None:
    for table in tables:
        if table.is_on_disk:  # here
            table.commit(name=name)
            warn_of_many(table, HOLDER, sum((one["name"] or "").startswith(HOLDER) for one in table.commits()))


class LoadPlanner(DefaultLoadPlanner):
    """Loads the rows that a checkpoint has into the state dicts of models that have others, or none yet.

    `torch.distributed.checkpoint.load` copies into the tensors of a state dict, so all must have the sizes that were
    saved. A new model has no rows, and a trained one has others. This planner gives a state dict the tensors of rows
    that the checkpoint has; all else is as in PyTorch's `DefaultLoadPlanner`. The model's state dict must be inside of
    another, as ``{"model": model.state_dict()}``: PyTorch gives back no new keys of the outermost.

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
        """Give `state_dict` the rows' tensors of the checkpoint that `metadata` describes, and begin."""
        if metadata is not None:
            for container, layer in _layers(state_dict):
                _make_room(container, layer, metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _layers(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Return the layers with rows in nested state dicts: the dict, and the path of what comes before ``rows.``."""
    prefixes = {match[1]: None for key in state if isinstance(key, str) and (match := LAYER.fullmatch(key))}
    found = [(state, (*path, prefix)) for prefix in prefixes]
    for key, value in state.items():
        found += _layers(value, (*path, key)) if isinstance(value, dict) else []
    return found


def _make_room(container: dict[str, Any], layer: tuple[Any, ...], metadata: Metadata) -> None:
    """Put empty tensors of the saved sizes in the place of a layer's, if the checkpoint has any."""
    *above, prefix = layer
    start = prefix + ROWS
    paths = {key: (metadata.planner_data or {}).get(key, (key,)) for key in metadata.state_dict_metadata}
    saved = {path[-1]: key for key, path in paths.items() if list(path[:-1]) == above and path[-1].startswith(start)}
    if not saved:
        return  # PyTorch's planner says what is missing
    for key in [key for key in container if key.startswith(start)]:
        del container[key]
    for name, key in saved.items():
        about: Any = metadata.state_dict_metadata[key]
        container[name] = torch.empty(about.size, dtype=about.properties.dtype, device="cpu")
