"""Tables on disk that lie elsewhere than when a checkpoint was saved."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

import embedrock
from embedrock.errors import ArgumentError
from embedrock.fronts.references import Relocate, is_reference, keep_rule, relocation
from embedrock.table.storage import UncommittedWarning
from embedrock.table.table import Table
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.layers.row_state import row_meta


def references(model: nn.Module, states: Mapping[str, Any]) -> Iterator[tuple[str, RowLayer, Mapping[str, Any]]]:
    """Go through the embedding layers whose rows ``model.state_dict()`` has: (label, layer, what it says of them)."""
    for name, layer in model.named_modules():
        if isinstance(layer, RowLayer):
            state = row_meta(states, f"{name}." if name else "", layer.handle.label)
            if state is not None:
                yield layer.handle.label, layer, state


def open_moved(model: nn.Module, states: Mapping[str, Any], relocate: Relocate) -> None:
    """Open the tables that were moved, and have them take the place of those that layers made at the old paths.

    Args:
        model: whose layers are looked at.
        states: of the model, with references.
        relocate: {old path: new path}, or a function of the old path.

    Raises:
        ArgumentError: no reference has the old path, or the table that would be replaced has been trained.
    """
    meant = [(layer, state) for _, layer, state in references(model, states) if is_reference(state)]
    where = relocation("ert.load", relocate, [state["path"] for _, state in meant])
    for layer, state in meant:
        if layer.table.uuid == state["uuid"]:
            continue  # the layer was made with the new path, or shares a table that was opened before
        new_path = where(state["path"])
        if new_path != state["path"]:
            _replace(model, layer.table, new_path)


def _replace(model: nn.Module, old: Table, path: str) -> None:
    if old.group is not None:
        raise ArgumentError(
            f"`relocate` of ert.load cannot move {old.subject}, of the group at {str(old.path)!r}, alone. Make the "
            f"group with path={path!r}."
        )
    if old.steps:
        raise ArgumentError(
            f"`relocate` of ert.load would replace the table at {str(old.path)!r} by that at {path!r}, but it has been "
            f"trained for {old.steps} steps. Make the layer with path={path!r}."
        )
    new = embedrock.open(path, memory=old.options["memory"], init=old.spec.init)
    if (new.rows, new.dim, new.spec.dtype) != (old.rows, old.dim, old.spec.dtype):
        new.close()
        raise ArgumentError(f"the table at {path!r} must be one like {old!r}: it is {new!r}.")
    keep_rule(new, old.rule)
    for layer in model.modules():
        if isinstance(layer, RowLayer) and layer.table is old:
            layer.take_over(new)
    with warnings.catch_warnings():
        if old.last_commit == 0:  # made just now by the layer: nothing of it is missed
            warnings.simplefilter("ignore", UncommittedWarning)
        old.close()
