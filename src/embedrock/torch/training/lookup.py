"""Rows out of a table as a tensor, and their gradient back to the table's handle."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.plan import Plan
from embedrock.batch.wrong_ids import AS_BITS, OF_LISTS, in_array, rounded, told
from embedrock.errors import IdTypeError, UnsupportedError
from embedrock.process.spans import spanned
from embedrock.table.table import Table
from embedrock.torch.training.backward import as_it_is
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.side import Executor

ID_DTYPES = (torch.int32, torch.int64)


class LookupOptions(NamedTuple):
    """What a layer asks of a lookup.

    Attributes:
        dtype: of the output.
        padding_idx: the id that gets no gradient.
        scale_grad_by_freq: divide the gradient of a row by how often its id occurs in the call.
    """

    dtype: torch.dtype
    padding_idx: int | None
    scale_grad_by_freq: bool


def host_ids(ids: Tensor, label: str) -> np.ndarray:
    """Return a tensor of ids, on any device, as an array. Raises what `check_ids` raises."""
    checked = check_ids(ids, label)
    return checked.numpy() if checked.is_cpu else checked.cpu().numpy()


def check_ids(ids: Tensor, label: str) -> Tensor:
    """Return a tensor of ids if it is one.

    Raises:
        IdTypeError: it is not a dense tensor of int32 or int64.
    """
    is_dense = isinstance(ids, Tensor) and ids.layout is torch.strided and not ids.is_nested
    if not is_dense or ids.dtype not in ID_DTYPES:
        got, remedy = _tensor_told(ids) if isinstance(ids, Tensor) else _other_told(ids)
        raise IdTypeError(
            f"`input` of {label} must be a dense tensor of torch.int32 or torch.int64: got {got}. {remedy}"
        )
    return ids.resolve_neg() if ids.is_neg() else ids  # or a view that negates would be read without its sign


def _tensor_told(ids: Tensor) -> tuple[str, str]:
    """Return what is wrong with a tensor of ids, in words, and what to do about it."""
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


def _other_told(ids: Any) -> tuple[str, str]:
    """Return what ids are that are no tensor, in words, and what to do about it."""
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
    if array.size and int(array.max()) >= 2**63:  # of which PyTorch makes no tensor
        return name, f"{AS_BITS} Make a tensor of that: {made}."
    return name, f"Make a tensor of it: {made}."


def refuse_second_derivative() -> None:
    """Raise `UnsupportedError` in a backward whose own graph is recorded."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "gradients of embedding rows cannot be differentiated again (create_graph=True). Ask for the graph "
            "of the other parameters only: "
            "torch.autograd.grad(loss, ert.dense_parameters(model), create_graph=True)."
        )


def renormalize(table: Table, plan: Plan, max_norm: float, norm_type: float) -> None:
    """Shrink rows whose norm exceeds `max_norm`, in the table, as `torch.embedding_renorm_` does."""
    rows = torch.from_numpy(table.read_rows(plan))
    norms = torch.linalg.vector_norm(rows, norm_type, dim=1)
    over = norms > max_norm
    if over.any():
        factors = max_norm / (norms[over].double() + 1e-7)
        table.assign(plan.ids[over.numpy()], (rows[over] * factors.float()[:, None]).numpy())


class LookupState(NamedTuple):
    """A lookup of rows that train: what it reads, and what becomes of the gradients that come back to it.

    Attributes:
        handle: of the rows.
        side: where they are used.
        plan: of the batch.
        options: of the layer.
    """

    handle: Handle
    executor: Executor
    plan: Any
    options: LookupOptions

    @spanned("read")
    def read(self) -> Tensor:
        """Return the rows: ``plan.shape + (dim,)``. Nothing waits for a GPU."""
        rows, device, dtype = self.executor.read(self.plan), self.handle.device, self.options.dtype
        return rows if rows.dtype is dtype and rows.device == device else rows.to(device, dtype)

    def receive(self, grads: Tensor, node: Any) -> Tensor:
        """Sum the gradients of the rows that were read by row, for the handle: see `Handle.receive`."""
        options = self.options
        of_rows = self.executor.sum(self.plan, grads.resolve_neg(), options.padding_idx, options.scale_grad_by_freq)
        return self.handle.receive(of_rows, node)


class Lookup(torch.autograd.Function):
    """Rows of a plan; the gradient goes to the table's handle."""

    @classmethod
    def of(cls, handle: Handle, reading: LookupState) -> Tensor:
        """Do what `apply` does, where no transform of `torch.func` runs: that, it looks at for longer than it works."""
        below: Any = super(torch.autograd.Function, cls)
        return below.apply(handle, reading)

    @staticmethod
    def forward(ctx: Any, handle: Handle, reading: LookupState) -> Tensor:
        """Return the rows: ``plan.shape + (dim,)``."""
        ctx.reading = reading
        return reading.read()

    @staticmethod
    @as_it_is
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """Sum the gradient by row, for the handle."""
        refuse_second_derivative()
        ctx.saved_tensors  # noqa: B018  # none, but PyTorch's error in a second backward without retain_graph
        return ctx.reading.receive(grad_outputs[0], ctx.next_functions[0][0]), None
