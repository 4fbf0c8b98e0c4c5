"""Lookups as PyTorch operators, opaque to `torch.compile`.

An operator takes tensors and numbers, so a tensor with a number names a layer. A graph of one layer then serves all
layers of the same form. A graph that another process left on disk serves this process, too. A tensor also names the
work that a lookup leaves for its backward: its *ticket*. The memory of the ticket keeps that work alive. A graph drops
the ticket when no backward can come any more.

Compilers take an operator for a pure function, and merge two calls with equal arguments. Their outputs would be right,
but their gradients would not: two equal gradients must be summed twice. So each call has an argument of its own, see
`new_call`. A compiler removes a lookup with an unused result.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.errors import UnsupportedError
from embedrock.torch.training.backward import BackwardPass, accumulator
from embedrock.torch.training.lookup import LookupState, refuse_second_derivative

_count = itertools.count()
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def number_of(layer: Any) -> Tensor:
    """Assign a number to a layer. Return it: int64 (), on the CPU."""
    number = next(_count)
    _layers[number] = layer
    return torch.from_numpy(np.array(number))


def _layer(number: Tensor) -> Any:
    """Return the layer with a number. A running graph may use it."""
    layer = _layers.get(int(number))
    if layer is None:
        raise UnsupportedError(
            "this graph names an embedding layer that is gone. Compile the model that is there: torch.compile(model)."
        )
    return layer


def new_call() -> Tensor:
    """Return an empty tensor, which makes a lookup unique in its graph: no compiler takes two of them for one."""
    return torch.empty(0, device="cpu")


class _TicketTensor(np.ndarray):
    """Memory of a ticket: int64 (1,), the number of the ticket."""

    lookup: LookupState


_tickets: weakref.WeakValueDictionary[int, _TicketTensor] = weakref.WeakValueDictionary()


def _ticket_for(found: LookupState | None) -> Tensor:
    """Return the ticket of a lookup; an empty one for None."""
    if found is None:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    number = next(_count)
    ticket = np.array([number]).view(_TicketTensor)
    ticket.lookup = found
    _tickets[number] = ticket
    return torch.from_numpy(ticket)


def _found(ticket: Tensor) -> LookupState:
    found = _tickets.get(int(ticket))
    if found is None:
        raise UnsupportedError(
            "a gradient came back to a lookup in a compiled graph of which nothing is left: what autograd saves was "
            "copied (torch.autograd.graph.save_on_cpu, saved_tensors_hooks). Leave that out, or look the rows up "
            "outside of what is compiled."
        )
    return found.lookup


@torch.library.custom_op("embedrock::lookup", mutates_args=())
def lookup(
    handle: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    last_is_end: bool | None,
    number: Tensor,
    call: Tensor,
    dim: int,
    dtype: torch.dtype,
    trains: bool,
    weights_train: bool,
    times: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return rows, ``ids.shape + (dim,)``, or bags of them, (bags, dim), and a ticket if rows or weights train.

    Args:
        handle: handle of the rows.
        ids, offsets, weights: as for the layer.
        last_is_end: offsets end with the end of the last bag; None: the layer has no bags.
        number: number of the layer.
        call: see `new_call`.
        dim, dtype: of the output.
        trains, weights_train: the rows or the weights train.
        times: of the batch's events: `time` of the layer.
    """
    layer = _layer(number)
    layout = layer.enter_graph(handle, trains)
    (own,) = layout.handles
    if weights is not None and (trains or weights_train):
        weights = weights.clone()  # a graph may overwrite its inputs
    ids = ids if own.rows_on is None else ids.clone()  # the CPU's plans keep none
    trained = [own] if trains else []
    out, found = layer.looked_up(layout, trained, ids, times, offsets, weights, weights_train)
    return out, _ticket_for(found if trains or weights_train else None)


@lookup.register_fake
def _(
    handle: Tensor, ids: Tensor, offsets: Tensor | None, _: Any, last_is_end: bool | None, *of_layer: Any
) -> tuple[Tensor, Tensor]:
    _, _, dim, dtype, trains, weights_train, *_ = of_layer
    counts = ids.shape if last_is_end is None else ids.shape[:1]
    if offsets is not None:
        counts = (offsets.shape[0] - bool(last_is_end),)  # in a graph, len() is a constant
    ticket = torch.empty(int(trains or weights_train), dtype=torch.int64, device="cpu")
    return torch.empty((*counts, dim), dtype=dtype, device=handle.device), ticket


@torch.library.custom_op("embedrock::lookup_backward", mutates_args=())
def lookup_backward(grads: Tensor, weights: Tensor | None, ticket: Tensor) -> Tensor:
    """Return the handle's gradient, float32 ()."""
    found = _found(ticket)
    (handle,) = found.trained
    ((sums, _),) = found.blocks(found.taken([grads]))
    run = BackwardPass.current()
    if found.time is not None:
        run.pass_at(found.time, [handle])
    number = handle.receive(sums.of(0), accumulator(handle), run)
    return number.clone()  # a graph may overwrite its inputs


@lookup_backward.register_fake
def _(grads: Tensor, weights: Tensor | None, ticket: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=grads.device)


@torch.library.custom_op("embedrock::weights_backward", mutates_args=())
def weights_backward(grads: Tensor, weights: Tensor, ticket: Tensor) -> Tensor:
    """Return the gradient of the positions' weights, of the same shape."""
    found, out = _found(ticket), torch.zeros_like(weights, memory_format=torch.contiguous_format)
    (own,) = found.weight_grads(found.taken([grads]))
    out.view(-1)[: len(own)] = own  # ids after the last bag have no weight
    return out


@weights_backward.register_fake
def _(grads: Tensor, weights: Tensor, ticket: Tensor) -> Tensor:
    return torch.empty_like(weights, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[3], output[1])


def _backward(ctx: Any, grads: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        refuse_second_derivative()
    saved, needs = ctx.saved_tensors, ctx.needs_input_grad
    of_handle = lookup_backward(grads, *saved) if needs[0] else None
    of_weights = weights_backward(grads, *saved) if needs[3] else None
    return of_handle, None, None, of_weights, *[None] * 8


lookup.register_autograd(_backward, setup_context=_keep)
