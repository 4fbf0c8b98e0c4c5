"""Lookups: rows of a table as a tensor, and their gradient for the table's handle."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from embedrock.batch.plan import Plan
from embedrock.batch.wrong_ids import AS_BITS, OF_LISTS, in_array, rounded, told
from embedrock.errors import IdTypeError, UnsupportedError
from embedrock.system.spans import span, spanned
from embedrock.table import batches
from embedrock.table.group import Group
from embedrock.table.table import Table
from embedrock.torch.training.backward import BackwardPass, as_it_is
from embedrock.torch.training.cpu_executor import HostGradients, host_floats
from embedrock.torch.training.executor import Executor
from embedrock.torch.training.handle import Handle

ID_DTYPES = (torch.int32, torch.int64)


def host_ids(ids: Tensor, label: str) -> np.ndarray:
    """Return a tensor of ids, on any device, as an array. Raises the errors of `check_ids`."""
    checked = check_ids(ids, label)
    return checked.numpy() if checked.is_cpu else checked.cpu().numpy()


def check_ids(ids: Tensor, label: str) -> Tensor:
    """Return a tensor of ids after a check.

    Raises:
        IdTypeError: it is not a dense tensor of int32 or int64.
    """
    is_dense = isinstance(ids, Tensor) and ids.layout is torch.strided and not ids.is_nested
    if not is_dense or ids.dtype not in ID_DTYPES:
        got, remedy = _tensor_fault(ids) if isinstance(ids, Tensor) else _other_fault(ids)
        raise IdTypeError(
            f"`input` of {label} must be a dense tensor of torch.int32 or torch.int64: got {got}. {remedy}"
        )
    return ids.resolve_neg() if ids.is_neg() else ids  # otherwise a negating view would be read without its sign


def _tensor_fault(ids: Tensor) -> tuple[str, str]:
    """Return the fault of a tensor of ids, in words, and the remedy."""
    got = f"{ids.dtype}, {ids.layout}"
    if ids.is_nested:
        return f"{got}, nested", "Of nested tensors, layers take those of layout=torch.jagged, (n, j)."
    if ids.layout is not torch.strided:
        return got, "Convert it, for example with .to_dense(); the ids of bags go with offsets."
    if ids.dtype == torch.uint64:
        return got, "Hashes of 64 bits go by their bits into a layer with num_embeddings=None: ids.view(torch.int64)."
    if ids.is_floating_point() and ids.device.type != "meta":
        values = ids.detach().cpu().double().numpy()
        whole = np.isfinite(values) & (values == np.trunc(values))
        lost = rounded(values, round(1 - np.log2(torch.finfo(ids.dtype).eps)), str(ids.dtype))
        if not whole.all():
            first = int(np.argmin(whole))
            filled = (
                "Leave out what is missing, ids[~ids.isnan()].long(), or give it an id that no other has, 0 for "
                "example: torch.where(ids.isnan(), 0, ids).long()."
            )
            remedy = filled if np.isnan(values.flat[first]) else "That is no whole number: pass ids, not weights."
            return f"{got}, {values.flat[first]} {in_array(values.shape)(first)}", lost or remedy
        if lost:
            return got, lost
    return got, "Convert it, for example ids.long()."


def _other_fault(ids: Any) -> tuple[str, str]:
    name = type(ids).__name__
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of several lengths
        return name, f"{OF_LISTS} Make tensors of both, torch.from_numpy(ids), for ert.EmbeddingBag(...)(ids, offsets)."
    made = "torch.from_numpy(np.asarray(ids).astype('int64'))"
    if array.size and array.dtype.kind not in "iu":
        got, remedy = told(array, ids)
        return f"{name} of {got}", f"{remedy} Make a tensor of that: {made}." if re.search(
            r"\(ids|ids\.\w", remedy
        ) else remedy
    if array.size and int(array.max()) >= 2**63:  # PyTorch makes no tensor of these
        return name, f"{AS_BITS} Make a tensor of that: {made}."
    return name, f"Make a tensor of it: {made}."


def refuse_second_derivative() -> None:
    """Raise `UnsupportedError` in a backward that records its own graph."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "gradients of embedding rows cannot be differentiated again (create_graph=True). Ask for the graph "
            "of the other parameters only: "
            "torch.autograd.grad(loss, ert.dense_parameters(model), create_graph=True)."
        )


def renormalize(table: Table, plan: Plan, max_norm: float, norm_type: float) -> None:
    """Shrink rows with a norm above `max_norm` in the table, as `torch.embedding_renorm_` does."""
    rows = torch.from_numpy(table.read_rows(plan))
    norms = torch.linalg.vector_norm(rows, norm_type, dim=1)
    over = norms > max_norm
    if over.any():
        factors = max_norm / (norms[over].double() + 1e-7)
        table.assign(plan.ids[over.numpy()], (rows[over] * factors.float()[:, None]).numpy())


@dataclass(eq=False, slots=True)
class LookupState:
    """Lookup of rows that train, or of bags of them: it reads rows, and receives their gradients.

    Attributes:
        handle: handle of the rows.
        executor: executor of the rows.
        plan: plan of the batch.
        dtype: dtype of the output.
        padding: id that gets no gradient.
        by_frequency: divide the gradient of a row by the number of times its id occurs in the call.
        bags: bags of the batch; None: the rows themselves.
    """

    handle: Handle
    executor: Executor
    plan: Any
    dtype: torch.dtype
    padding: int | None
    by_frequency: bool
    bags: Any = None
    _trace: Any = None
    _rows: Any = None

    @spanned("read")
    def read(self, weights: Tensor | None = None, keeps_rows: bool = False) -> Tensor:
        """Return the rows, ``plan.shape + (dim,)``, or the bags, (bags, dim). The host does not wait for a GPU.

        Args:
            weights: weights (n,) of the positions of bags; None for ones.
            keeps_rows: a call of `weight_grads` follows.
        """
        if self.bags is None:
            out = self.executor.read(self.plan)
        else:
            rows = self.executor.read_rows(self.plan)
            out, self._trace = self.executor.pool(rows, weights, self.bags)
            self._rows = rows if keeps_rows else None
        device, dtype = self.handle.device, self.dtype
        return out if out.dtype is dtype and out.device == device else out.to(device, dtype)

    def receive(self, grads: Tensor, weights: Tensor | None, node: Any) -> Tensor:
        """Sum the gradients of the rows or bags by row, for the handle: see `Handle.receive`."""
        grads = grads.resolve_neg()
        if self.bags is None:
            of_rows = self.executor.sum(self.plan, grads, self.padding, self.by_frequency)
        else:
            of_rows = self.executor.unpool(grads, weights, self.bags, self._trace, self.by_frequency)
        return self.handle.receive(of_rows, node)

    def weight_grads(self, grads: Tensor, weights: Tensor) -> Tensor:
        """Return the gradients of the positions' weights: (n,), like `weights`."""
        grads = self.executor.weight_grads(grads.resolve_neg(), self._rows, self.bags)
        return grads.to(weights.device, weights.dtype)


class Lookup(torch.autograd.Function):
    """Autograd function that reads rows or bags. Gradients go to the table's handle and to the positions' weights."""

    @classmethod
    def of(cls, handle: Handle, weights: Tensor | None, reading: LookupState) -> Tensor:
        """Call `apply`, or skip its slow checks if no transform of `torch.func` runs."""
        below: Any = super(torch.autograd.Function, cls)
        return below.apply(handle, weights, reading)

    @staticmethod
    def forward(ctx: Any, handle: Handle, weights: Tensor | None, reading: LookupState) -> Tensor:
        ctx.reading = reading
        ctx.save_for_backward(weights)  # so that autograd detects writes to them before the backward
        return reading.read(weights, ctx.needs_input_grad[1])

    @staticmethod
    @as_it_is
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        refuse_second_derivative()
        (grads,), (weights,), reading = grad_outputs, ctx.saved_tensors, ctx.reading
        of_handle = of_weights = None
        if ctx.needs_input_grad[0]:
            of_handle = reading.receive(grads, weights, ctx.next_functions[0][0])
        if ctx.needs_input_grad[1]:
            of_weights = reading.weight_grads(grads, weights)
        return of_handle, of_weights, None


class FeatureRequest(NamedTuple):
    """Request of a layer to a lookup, for one feature.

    Attributes:
        handle: handle of the rows.
        feature: ids of the table, in the form that the executor takes.
        weights: weights (n,) of the positions of bags, which may get gradients. `feature` has their values.
        dtype: dtype of the output.
        trains: gradients of the rows come back.
    """

    handle: Handle
    feature: Any
    weights: Tensor | None
    dtype: torch.dtype
    trains: bool


class JointLookupState:
    """Lookup of many features that train, of tables of one family on a GPU. `GroupLookupState` has that of a group."""

    def __init__(self, requests: Sequence[FeatureRequest]) -> None:
        from embedrock.device.joint import DeviceLookup  # needs Triton, like the executors

        self.requests = requests
        self._found: Any = DeviceLookup([one.feature for one in requests], any(one.trains for one in requests))

    def read(self, for_weights: bool) -> list[Tensor]:
        """Return the output of each feature, or one output of all. With `for_weights`, a call of `weight_grads`
        follows.
        """
        with span("read"):
            found = self._found.read(for_weights)
        return [_delivered(one, out) for one, out in zip(self.requests, found, strict=True)]

    def trains(self) -> list[bool]:
        """Return for each output whether its gradients come back."""
        return [one.trains or _weights_train(one) for one in self.requests]

    @staticmethod
    def taken(grads: Tensor) -> Any:
        """Return the gradient of an output in the form that `gradients` and `weight_grads` take."""
        return grads

    def gradients(self, grads: Sequence[Any]) -> dict[Handle, Any]:
        """Return the row gradients of each table that has some."""
        own = [part if one.trains else None for one, part in zip(self.requests, grads, strict=True)]
        found = self._found.sum(own)
        return {one.handle: found[one.feature.executor] for one in self.requests if one.feature.executor in found}

    def weight_grads(self, grads: Sequence[Any]) -> list[Tensor]:
        """Return the gradients (n,) of the positions' weights, for each feature with weights."""
        found = self._weight_grads(grads)
        weights = ((number, one.weights) for number, one in enumerate(self.requests) if one.weights is not None)
        return [torch.as_tensor(found[number], dtype=own.dtype, device=own.device) for number, own in weights]

    def _weight_grads(self, grads: Sequence[Any]) -> Any:
        return self._found.weight_grads(grads)


class GroupLookupState(JointLookupState):
    """Lookup of many features of tables in a group.

    Attributes:
        side_by_side: the output is one tensor of all bags, if possible.
    """

    taken = staticmethod(host_floats)

    def __init__(self, group: Group, requests: Sequence[FeatureRequest], side_by_side: bool) -> None:
        self._group, self.requests = group, requests
        self._batch = group.plan([one.feature for one in requests])
        self.side_by_side = side_by_side and _are_alike(requests) and batches.may_be_side_by_side(self._batch)

    def read(self, for_weights: bool) -> list[Tensor]:
        with span("read"):
            self._found = found = self._group.read(self._batch, for_weights, self.side_by_side)
        if self.side_by_side:
            return [_delivered(self.requests[0], found.arrays[0])]
        return [_delivered(one, out) for one, out in zip(self.requests, found.outputs, strict=True)]

    def trains(self) -> list[bool]:
        each = super().trains()
        return [any(each)] if self.side_by_side else each

    def gradients(self, grads: Sequence[Any]) -> dict[Handle, HostGradients]:
        if self.side_by_side:
            found = batches.sum_array(self._found, grads[0])
            handles = {one.handle for one in self.requests if one.trains}
        else:
            found = batches.sum_gradients(self._found, grads)
            parts = zip(self.requests, grads, strict=True)
            handles = {one.handle for one, own in parts if one.trains and own is not None}
        summed = dict(found)
        return {handle: HostGradients.of(summed[handle.table]) for handle in handles}

    def _weight_grads(self, grads: Sequence[Any]) -> Any:
        return batches.weight_gradients(self._found, grads)


def _delivered(request: FeatureRequest, rows: Any) -> Tensor:
    return torch.as_tensor(rows, dtype=request.dtype, device=request.handle.device)


def look_up(joins: Any, requests: Sequence[FeatureRequest]) -> list[Tensor]:
    """Return the outputs of requests to tables with one joint lookup, read in one call: see `Executor.joins`."""
    if isinstance(joins, Group):
        return _looked_up(GroupLookupState(joins, requests, side_by_side=False))
    found: dict[int, Tensor] = {}
    for share in joins.shares([one.feature for one in requests]):
        found |= zip(share, _looked_up(JointLookupState([requests[number] for number in share])), strict=True)
    return [found[number] for number in range(len(requests))]


def look_up_side_by_side(joins: Any, requests: Sequence[FeatureRequest]) -> Tensor:
    """Return the bags of `look_up`, all of one batch, as one tensor: (batch, sum of dims)."""
    if not isinstance(joins, Group):
        return torch.cat(look_up(joins, requests), dim=1)
    reading = GroupLookupState(joins, requests, side_by_side=True)
    found = _looked_up(reading)
    return found[0] if reading.side_by_side else torch.cat(found, dim=1)


def _looked_up(reading: JointLookupState) -> list[Tensor]:
    handles = list(dict.fromkeys(one.handle for one in reading.requests if one.trains))
    weights = [one.weights for one in reading.requests if one.weights is not None]
    if handles or any(needs_gradient(one.weights) for one in reading.requests):
        return list(JointLookup.apply(reading, handles, *handles, *weights))
    return reading.read(for_weights=False)


class JointLookup(torch.autograd.Function):
    """Autograd function that reads many features. Gradients go to the tables' handles and to the positions' weights."""

    @staticmethod
    def forward(ctx: Any, reading: JointLookupState, handles: Sequence[Handle], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each feature, or one output of all. `tensors` are the handles, then the weights."""
        ctx.reading, ctx.handles = reading, handles
        ctx.set_materialize_grads(False)
        weights = tensors[len(handles) :]
        ctx.save_for_backward(*weights)  # so that autograd detects writes to them before the backward
        outputs = reading.read(for_weights=any(ctx.needs_input_grad[2 + len(handles) :]))
        ctx.mark_non_differentiable(*(out for out, trains in zip(outputs, reading.trains(), strict=True) if not trains))
        return tuple(outputs)

    @staticmethod
    @as_it_is
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        ctx.saved_tensors  # noqa: B018  # for PyTorch's errors
        reading, count, needs = ctx.reading, len(ctx.handles), ctx.needs_input_grad[2:]
        given = [None if grads is None else reading.taken(grads.resolve_neg()) for grads in grad_outputs]
        found = reading.gradients(given) if any(needs[:count]) else {}
        nodes, run = ctx.next_functions, BackwardPass.current()  # `next_functions` makes a list of all nodes each time
        of_handles = [
            handle.receive(found[handle], node[0], run) if needed and handle in found else None
            for handle, node, needed in zip(ctx.handles, nodes, needs[:count], strict=False)
        ]
        of_weights = reading.weight_grads(given) if any(needs[count:]) else [None] * (len(needs) - count)
        return None, None, *of_handles, *of_weights


def _are_alike(requests: Sequence[FeatureRequest]) -> bool:
    """Return whether the outputs can be parts of one tensor with one gradient."""
    device, dtype = requests[0].handle.device, requests[0].dtype
    is_alike = all(one.handle.device == device and one.dtype is dtype for one in requests)
    return is_alike and not any(map(_weights_train, requests))


def _weights_train(request: FeatureRequest) -> bool:
    return request.weights is not None and (request.weights.requires_grad or has_tangent(request.weights))


def has_tangent(tensor: Tensor) -> bool:
    """Return whether a tensor has a derivative of forward mode."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def needs_gradient(weights: Tensor | None) -> bool:
    """Return whether autograd follows the weights of positions, in backward or in forward mode."""
    return weights is not None and ((weights.requires_grad and torch.is_grad_enabled()) or has_tangent(weights))
