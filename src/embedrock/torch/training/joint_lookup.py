"""Rows and bags of many features out of the tables of a group as tensors, and their gradients back to the handles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedrock.table.batches import Feature
from embedrock.table.group import Group
from embedrock.torch.training.backward import as_it_is
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.host_side import HostGradients, host_floats
from embedrock.torch.training.lookup import refuse_second_derivative
from embedrock.torch.training.side import RowSide
from embedrock.torch.training.spans import span, waited


class Asked(NamedTuple):
    """What a layer asks of a lookup for one feature.

    Attributes:
        handle: of the rows.
        side: where they are used: on the CPU.
        feature: ids of the table, and what becomes of their rows.
        weights: of the positions of bags, (n,), to which gradients may come back; `feature` has their values.
        dtype: of the output.
        trains: whether gradients of the rows come back.
    """

    handle: Handle
    side: RowSide
    feature: Feature
    weights: Tensor | None
    dtype: torch.dtype
    trains: bool


def look_up(group: Group, asked: Sequence[Asked]) -> list[Tensor]:
    """Return what layers on tables of one group ask for, read in one call of the host."""
    reading = JointReading(group, asked)
    handles = list(dict.fromkeys(one.handle for one in asked if one.trains))
    weights = [one.weights for one in asked if one.weights is not None]
    if handles or (torch.is_grad_enabled() and any(map(_weights_train, asked))):
        return list(JointLookup.apply(reading, handles, *handles, *weights))
    return reading.read(for_weights=False)


class JointReading:
    """A lookup of many features that gradients come back to.

    Args:
        group: of all tables.
        asked: of it.
    """

    def __init__(self, group: Group, asked: Sequence[Asked]) -> None:
        self._group, self.asked = group, asked
        with span("plan"):
            self._batch = group.plan([one.feature for one in asked])
        self._found: Any = None

    def read(self, for_weights: bool) -> list[Tensor]:
        """Return the output of each feature; `for_weights`: `weight_grads` will be asked for."""
        waited(self.asked[0].side)
        with span("read"):
            self._found = self._group.read(self._batch, for_weights)
        outputs = zip(self.asked, self._found.outputs, strict=True)
        return [torch.from_numpy(out).to(one.handle.device, one.dtype) for one, out in outputs]

    def gradients(self, grads: Sequence[Any]) -> dict[Handle, HostGradients]:
        """Return the gradients of the rows of each table that some came back to, in float32 arrays by feature."""
        with span("sum"):
            summed = {part.table: part.grads for part in self._group.sum(self._found, grads)}
        parts = zip(self.asked, grads, strict=True)
        handles = dict.fromkeys(one.handle for one, own in parts if one.trains and own is not None)
        return {handle: HostGradients.of(summed[handle.table]) for handle in handles}

    def weight_grads(self, grads: Sequence[Any]) -> list[Tensor]:
        """Return the gradients of the positions' weights: (n,), of each feature that has some."""
        found = zip(self.asked, self._group.weight_gradients(self._found, grads), strict=True)
        return [
            torch.from_numpy(own).to(one.weights.device, one.weights.dtype)
            for one, own in found
            if one.weights is not None
        ]


class JointLookup(torch.autograd.Function):
    """Rows and bags of features; the gradients go to the tables' handles and to the weights of the positions."""

    @staticmethod
    def forward(ctx: Any, reading: JointReading, handles: Sequence[Handle], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each feature.

        Args:
            ctx: autograd's.
            reading: of the features.
            handles: of the rows that train.
            tensors: the handles, then the weights of positions.
        """
        ctx.reading, ctx.handles = reading, handles
        ctx.set_materialize_grads(False)
        weights = tensors[len(handles) :]
        ctx.save_for_backward(*weights)  # so that autograd notices when they are written to before the backward
        outputs = reading.read(for_weights=any(ctx.needs_input_grad[2 + len(handles) :]))
        pairs = zip(reading.asked, outputs, strict=True)
        ctx.mark_non_differentiable(*(out for one, out in pairs if not (one.trains or _weights_train(one))))
        return tuple(outputs)

    @staticmethod
    @as_it_is
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Sum the gradients by row, for the handles, and by position, for the weights."""
        refuse_second_derivative()
        ctx.saved_tensors  # noqa: B018  # for PyTorch's errors
        reading, count, needs = ctx.reading, len(ctx.handles), ctx.needs_input_grad[2:]
        given = [None if grads is None else host_floats(grads.resolve_neg()) for grads in grad_outputs]
        found = reading.gradients(given) if any(needs[:count]) else {}
        of_handles = [
            handle.receive(found[handle], ctx.next_functions[place][0]) if needs[place] and handle in found else None
            for place, handle in enumerate(ctx.handles)
        ]
        of_weights = reading.weight_grads(given) if any(needs[count:]) else [None] * (len(needs) - count)
        return None, None, *of_handles, *of_weights


def _weights_train(asked: Asked) -> bool:
    return asked.weights is not None and asked.weights.requires_grad
