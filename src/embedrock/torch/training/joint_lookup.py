"""Rows and bags of many features, out of tables that are used together, as tensors; and their gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from embedrock.process.spans import span
from embedrock.table.batches import may_be_side_by_side
from embedrock.table.group import Group
from embedrock.torch.training.backward import BackwardPass, as_it_is
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.host_side import HostGradients, host_floats
from embedrock.torch.training.lookup import refuse_second_derivative


class FeatureRequest(NamedTuple):
    """What a layer asks of a lookup for one feature.

    Attributes:
        handle: of the rows.
        feature: ids of the table, and what becomes of their rows, for the side that uses these.
        weights: of the positions of bags, (n,), to which gradients may come back; `feature` has their values.
        dtype: of the output.
        trains: whether gradients of the rows come back.
    """

    handle: Handle
    feature: Any
    weights: Tensor | None
    dtype: torch.dtype
    trains: bool


class JointLookupState(Protocol):
    """A lookup of many features that gradients come back to.

    Attributes:
        asked: of it.
    """

    asked: Sequence[FeatureRequest]

    def read(self, for_weights: bool) -> list[Tensor]:
        """Return the output of each feature, or one of all; `for_weights`: `weight_grads` will be asked for."""
        ...

    def trains(self) -> list[bool]:
        """Return for each output whether gradients come back to it."""
        ...

    def gradients(self, grads: Sequence[Any]) -> dict[Handle, Any]:
        """Return the gradients of the rows of each table that some came back to."""
        ...

    def weight_grads(self, grads: Sequence[Any]) -> list[Tensor]:
        """Return the gradients of the positions' weights: (n,), of each feature that has some."""
        ...

    def taken(self, grads: Tensor) -> Any:
        """Return the gradient of an output as `gradients` and `weight_grads` take it."""
        ...


def look_up(joins: Any, asked: Sequence[FeatureRequest]) -> list[Tensor]:
    """Return what layers on tables that are used together ask for, read in one call.

    Args:
        joins: what their sides have in common, see `Executor.joins`.
        asked: see above.
    """
    if isinstance(joins, Group):
        return _looked_up(GroupLookupState(joins, asked, side_by_side=False))
    found: dict[int, Tensor] = {}
    for share in joins.shares([one.feature for one in asked]):
        found |= zip(share, _looked_up(DeviceLookupState([asked[number] for number in share])), strict=True)
    return [found[number] for number in range(len(asked))]


def look_up_side_by_side(joins: Any, asked: Sequence[FeatureRequest]) -> Tensor:
    """Return the bags of `look_up`, all of one batch, as one tensor: (batch, sum of dims)."""
    if not isinstance(joins, Group):
        return torch.cat(look_up(joins, asked), dim=1)
    reading = GroupLookupState(joins, asked, side_by_side=True)
    found = _looked_up(reading)
    return found[0] if reading.side_by_side else torch.cat(found, dim=1)


def _looked_up(reading: JointLookupState) -> list[Tensor]:
    handles = list(dict.fromkeys(one.handle for one in reading.asked if one.trains))
    weights = [one.weights for one in reading.asked if one.weights is not None]
    if handles or (torch.is_grad_enabled() and any(map(_weights_train, reading.asked))):
        return list(JointLookup.apply(reading, handles, *handles, *weights))
    return reading.read(for_weights=False)


class GroupLookupState:
    """A lookup in the tables of a group: a `JointLookupState`.

    Args:
        group: of all tables.
        asked: of it.
        side_by_side: return one tensor of all bags, if they can be read so.

    Attributes:
        side_by_side: whether they can.
    """

    taken = staticmethod(host_floats)

    def __init__(self, group: Group, asked: Sequence[FeatureRequest], side_by_side: bool) -> None:
        self._group, self.asked = group, asked
        self._batch = group.plan([one.feature for one in asked])
        self.side_by_side = side_by_side and _are_alike(asked) and may_be_side_by_side(self._batch)
        self._found: Any = None

    def read(self, for_weights: bool) -> list[Tensor]:
        """Return the output of each feature, or one of all; `for_weights`: `weight_grads` will be asked for."""
        with span("read"):
            self._found = found = self._group.read(self._batch, for_weights, self.side_by_side)
        if self.side_by_side:
            width = len(self.asked) * found.arrays[0].shape[1]
            return [self._delivered(self.asked[0], found.arrays[0].reshape(-1, width))]
        return [self._delivered(one, out) for one, out in zip(self.asked, found.outputs, strict=True)]

    @staticmethod
    def _delivered(asked: FeatureRequest, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).to(asked.handle.device, asked.dtype)

    def trains(self) -> list[bool]:
        """Return for each output whether gradients come back to it."""
        each = [one.trains or _weights_train(one) for one in self.asked]
        return [any(each)] if self.side_by_side else each

    def gradients(self, grads: Sequence[Any]) -> dict[Handle, HostGradients]:
        """Return the gradients of the rows of each table that some came back to, in float32 arrays by output."""
        if self.side_by_side:
            found = self._group.sum_arrays(self._found, [grads[0].reshape(self._found.arrays[0].shape)])
            handles = {one.handle for one in self.asked if one.trains}
        else:
            found = self._group.sum(self._found, grads)
            parts = zip(self.asked, grads, strict=True)
            handles = {one.handle for one, own in parts if one.trains and own is not None}
        summed = dict(found)
        return {handle: HostGradients.of(summed[handle.table]) for handle in handles}

    def weight_grads(self, grads: Sequence[Any]) -> list[Tensor]:
        """Return the gradients of the positions' weights: (n,), of each feature that has some."""
        found = zip(self.asked, self._group.weight_gradients(self._found, grads), strict=True)
        return [
            torch.from_numpy(own).to(one.weights.device, one.weights.dtype)
            for one, own in found
            if one.weights is not None
        ]


class DeviceLookupState:
    """A lookup in tables of one kind on a GPU: a `JointLookupState`.

    Args:
        asked: of it.
    """

    def __init__(self, asked: Sequence[FeatureRequest]) -> None:
        from embedrock.device.joint import DeviceLookup as Reading  # which needs Triton: that of their sides

        self.asked = asked
        self._reading = Reading([one.feature for one in asked], any(one.trains for one in asked))

    def read(self, for_weights: bool) -> list[Tensor]:
        """Return the output of each feature; `for_weights`: `weight_grads` will be asked for."""
        with span("read"):
            found = self._reading.read(for_weights)
        return [
            out if out.dtype is one.dtype and out.device == one.handle.device else out.to(one.handle.device, one.dtype)
            for one, out in zip(self.asked, found, strict=True)
        ]

    def trains(self) -> list[bool]:
        """Return for each output whether gradients come back to it."""
        return [one.trains or _weights_train(one) for one in self.asked]

    @staticmethod
    def taken(grads: Tensor) -> Tensor:
        """Return the gradient of an output as it is."""
        return grads

    def gradients(self, grads: Sequence[Any]) -> dict[Handle, Any]:
        """Return the gradients of the rows of each table that some came back to."""
        own = [part if one.trains else None for one, part in zip(self.asked, grads, strict=True)]
        found = self._reading.sum(own)
        return {one.handle: found[one.feature.executor] for one in self.asked if one.feature.executor in found}

    def weight_grads(self, grads: Sequence[Any]) -> list[Tensor]:
        """Return the gradients of the positions' weights: (n,), of each feature that has some."""
        found = self._reading.weight_grads(grads)
        return [
            found[number].to(one.weights.device, one.weights.dtype)
            for number, one in enumerate(self.asked)
            if one.weights is not None
        ]


class JointLookup(torch.autograd.Function):
    """Rows and bags of features; the gradients go to the tables' handles and to the weights of the positions."""

    @staticmethod
    def forward(ctx: Any, reading: JointLookupState, handles: Sequence[Handle], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each feature, or one of all.

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
        ctx.mark_non_differentiable(*(out for out, trains in zip(outputs, reading.trains(), strict=True) if not trains))
        return tuple(outputs)

    @staticmethod
    @as_it_is
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Sum the gradients by row, for the handles, and by position, for the weights."""
        refuse_second_derivative()
        ctx.saved_tensors  # noqa: B018  # for PyTorch's errors
        reading, count, needs = ctx.reading, len(ctx.handles), ctx.needs_input_grad[2:]
        given = [None if grads is None else reading.taken(grads.resolve_neg()) for grads in grad_outputs]
        found = reading.gradients(given) if any(needs[:count]) else {}
        nodes, run = ctx.next_functions, BackwardPass.current()  # nodes: which makes a list of all, each time
        of_handles = [
            handle.receive(found[handle], node[0], run) if needed and handle in found else None
            for handle, node, needed in zip(ctx.handles, nodes, needs[:count], strict=False)
        ]
        of_weights = reading.weight_grads(given) if any(needs[count:]) else [None] * (len(needs) - count)
        return None, None, *of_handles, *of_weights


def _are_alike(asked: Sequence[FeatureRequest]) -> bool:
    """Return whether the outputs can be parts of one tensor to which one gradient comes back."""
    device, dtype = asked[0].handle.device, asked[0].dtype
    is_alike = all(one.handle.device == device and one.dtype is dtype for one in asked)
    return is_alike and not any(map(_weights_train, asked))


def _weights_train(asked: FeatureRequest) -> bool:
    return asked.weights is not None and asked.weights.requires_grad
