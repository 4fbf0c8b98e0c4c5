"""`fuse`: moves the tables of a model's layers into one group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.storage.ram_backend import RamBackend
from embedrock.table.group import GIVEN, Group
from embedrock.table.table import Table, rows_of
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.training.handle import Handle


def fuse(model: nn.Module, group: Group | None = None) -> Group:
    """Move the tables of a model's layers into one group, so that one call steps all tables. The model stays.

    A collection of these layers then looks up all tables, and sums all gradients, in one call. Layers called one by one
    are still looked up one by one. All results stay the same. `fuse` moves tables in RAM that are in no group and have
    no ``memory=`` or ``device_memory=``. Tables on disk, on a GPU, of another group, or of averages do not move.

    Rows, optimizer state and steps move with a table, and optimizers go on. The layer's former table is closed. The new
    table is ``layer.table``. The name of a member is the layer's path in the model.

    Args:
        model: with embedding layers.
        group: receives the tables; None: a new group, with all of the machine's RAM.

    Returns:
        The group. If the model was fused before, nothing moves, and this is its group.

    Raises:
        ArgumentError: `group` is no group, or already has a table of one of the names.
        UnsupportedError: row gradients wait for a step, or averages follow the rows. Or no table can move, and the
            tables are in no group.
        MemoryBudgetError: the rows do not fit the group's memory. Tables that moved before the error stay moved.

    Example:
        >>> import embedrock.torch as ert
        >>> model = nn.ModuleDict({"user": ert.Embedding(10**9, 8), "genre": ert.EmbeddingBag(100, 8)})
        >>> group = ert.fuse(model)
        >>> list(group), group["user"] is model["user"].table
        (['user', 'genre'], True)
    """
    if not isinstance(group, Group | None):
        raise ArgumentError(f"`group` of ert.fuse must be an er.Group or None: got {group!r}.")
    found: dict[Handle, tuple[str, list[RowLayer]]] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, RowLayer) and _may_move(layer):
            found.setdefault(layer.handle, (path or layer.table.name or "rows", []))[1].append(layer)
    into = group
    if into is None and not found:
        groups = {layer.table.group for layer in model.modules() if isinstance(layer, RowLayer)} - {None}
        into = groups.pop() if len(groups) == 1 else None
        if into is None:
            raise UnsupportedError(_nothing_moves(model))
    into = Group() if into is None else into
    for handle, (name, _) in found.items():
        _check(handle, name, into)
    for handle, (name, layers) in found.items():
        _move(handle.table, into, name, layers)
    return into


def _nothing_moves(model: nn.Module) -> str:
    stay = ", ".join(sorted({layer.handle.label for layer in model.modules() if isinstance(layer, RowLayer)}))
    if not stay:
        return f"ert.fuse found no layer of Embedrock's in {type(model).__name__}. Pass a model that has some."
    return (
        f"ert.fuse can move none of {stay}: tables stay where they are that are on disk or a GPU, or were given "
        "memory= or device_memory=. Make their layers of one group from the beginning: ert.Embedding(..., "
        'group=er.Group(path=..., memory=...), name="user").'
    )


def _may_move(layer: RowLayer) -> bool:
    table, handle = layer.table, layer.handle
    if table.is_on_disk or table.group is not None or handle.average is not None or handle.rows_on is not None:
        return False
    tier = rows_of(table).tier
    return isinstance(tier, RamBackend) and not tier.placement.is_told and not table.device_memory


def _check(handle: Handle, name: str, group: Group) -> None:
    if name in group:
        raise ArgumentError(
            f"the group that ert.fuse was given has a table {name!r} already, as {handle.label} would be called. "
            "Rename that one, group.rename, or fuse into another group."
        )
    if handle.waits():
        raise UnsupportedError(
            f"ert.fuse cannot move the rows of {handle.label}: gradients of them wait for a step. Call it before "
            "backward(), or after the optimizer's step() and zero_grad()."
        )
    if handle.followers:
        raise UnsupportedError(
            f"ert.fuse cannot move the rows of {handle.label}: averages follow them. Call it before ert.average."
        )


def _move(table: Table, group: Group, name: str, layers: Iterable[RowLayer]) -> None:
    spec, old = table.spec, rows_of(table)
    values = spec.dtype, spec.init, spec.seed, spec.rule, table.on_nonfinite, table.device_memory
    given: dict[str, Any] = dict(zip(GIVEN, (*values, *spec.policies.values()), strict=True))
    made = group.made(name, table.rows, table.dim, given)
    made.load_state(table)
    rows_of(made).given_rule, rows_of(made).is_rule_bound = old.given_rule, old.is_rule_bound
    for layer in layers:
        layer.take_over(made)
    table.close()
