"""`graphed`: captures a training step, with its rows, in CUDA graphs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.table.table import rows_of
from embedrock.torch.optim import RowOptimizer
from embedrock.torch.training.backward import as_it_is
from embedrock.torch.training.generation import generation
from embedrock.torch.training.handle import Handle, drop_gradients
from embedrock.torch.training.ranks import are_there_groups
from embedrock.torch.training.sharing import OptimizedRows
from embedrock.torch.whole import ModelOptimizer

MOST_GRAPHS = 16  # of one step: each graph keeps memory of its own


def graphed(step: Callable[..., Any], *optimizers: RowOptimizer | ModelOptimizer, warmup: int = 2) -> GraphedStep:
    """Capture a training step in CUDA graphs: the host then launches lookups, model, backward and steps at once.

    Each call makes exactly one step. A graph belongs to one form of the arguments: shapes and dtypes of tensors, values
    of all else. The first calls of a form launch kernel by kernel, later calls replay a graph. Arguments are copied
    into the graph's memory, and results of `step` are copied out of it.

    Every decision of Python code in `step` stays as captured. The rows' step constants are current: learning rates and
    other hyperparameters, step counts, and errors of earlier steps. Gradients of rows are dropped when a call returns.

    Args:
        step: makes one training step: forward, backward, and ``step()`` of all optimizers, once. It must not read
            tensor values on the host. PyTorch's optimizers in it need ``capturable=True``, and ``fused=True`` with a
            `GradScaler`, which belongs in it as a whole.
        optimizers: optimizers of all rows that `step` uses: Embedrock's, or results of `ert.optimizer`.
        warmup: number of ordinary calls of each form before its capture, at least 1.

    Returns:
        A function to call in place of `step`. Arguments and results are nests of tensors and other values.

    Raises:
        ArgumentError: no optimizer of rows, or `warmup` is less than 1.
        UnsupportedError: a layer is not on a GPU.

    Example:
        >>> import embedrock.torch as ert
        >>> layer = ert.Embedding(1000, 4)
        >>> rows = ert.Adam(layer, lr=1e-3)
        >>> def train(ids):
        ...     loss = layer(ids).square().mean()
        ...     loss.backward()
        ...     rows.step()
        ...     return loss.detach()
        >>> if torch.cuda.is_available():
        ...     layer.to("cuda")
        ...     train = ert.graphed(train, rows)
        >>> loss = train(torch.tensor([3, 14]))
    """
    found = [one.rows if isinstance(one, ModelOptimizer) else one for one in optimizers]
    wrong = [one for one in found if not isinstance(one, RowOptimizer)]
    if wrong or not found:
        got = repr(wrong[0]) if wrong else "none"
        raise ArgumentError(
            f"ert.graphed takes a function and the optimizers of its rows, of ert.Adam or ert.optimizer: got {got}. "
            "Those of PyTorch's need not be told of."
        )
    if not isinstance(warmup, int) or warmup < 1:
        raise ArgumentError(f"`warmup` of ert.graphed must be a number of calls >= 1: got {warmup!r}.")
    for part in (part for one in found for part in one.bound()):
        if part.handle.rows_on is None:
            raise _not_captured(part.handle, 'the CPU reads and steps its rows. Move the model first, model.to("cuda")')
    return GraphedStep(step, found, warmup)


class GraphedStep:
    """Training step in CUDA graphs, one graph for each form of its arguments. `graphed` makes it.

    Args:
        step, warmup: see `graphed`.
        optimizers: optimizers of rows.

    Example:
        >>> import embedrock.torch as ert
        >>> layer = ert.Embedding(1000, 4)
        >>> rows = ert.Adam(layer)
        >>> if torch.cuda.is_available():
        ...     layer.to("cuda")
        ...     step = ert.graphed(lambda ids: layer(ids).sum().backward() or rows.step(), rows)
        ...     assert isinstance(step, ert.GraphedStep)
    """

    def __init__(self, step: Callable[..., Any], optimizers: Sequence[RowOptimizer], warmup: int) -> None:
        self._step, self._optimizers, self._warmup = step, optimizers, warmup
        self._graphs: dict[Any, Any] = {}  # each a `GraphCapture`
        self._has_warned = False
        self._known: list[Any] = []  # executors, as of the generations and handles that `_rests` has
        self._rests: Any = None

    @property
    def graphs(self) -> int:
        """Number of graphs that replay by now."""
        return sum(graph.is_recorded for graph in self._graphs.values())

    @as_it_is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step. Return the function's results, in memory that no later step writes to.

        Raises:
            UnsupportedError: a graph cannot use the rows, or the step cannot be captured. No step was made.
            ArgumentError: arguments or results are no nests of tensors, or gradients of rows wait for another step.
            NonFiniteGradientError, IdError, ...: as in an ordinary step.
        """
        bound = [part for optimizer in self._optimizers for part in optimizer.bound()]
        handles = [part.handle for part in bound]
        executors = self._executors(bound, handles)
        values, form = pytree.tree_flatten((args, kwargs))
        clips = [part.clip_value for part in bound]
        rows = *map(id, handles), *map(_TRAINS, handles), *clips
        device = executors[0].device.type  # a graph is valid under the modes of its capture
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        key = form, tuple(map(_form_of, values)), rows, modes
        rules = {executor: part.rule for executor, part in zip(executors, bound, strict=True) if part.rule is not None}
        graph = self._graphs.get(key)
        if graph is not None and not (graph.executors == tuple(executors) and graph.suits(rules)):
            graph = None  # the graph holds addresses that the rows have left
        if graph is None:
            if key not in self._graphs and len(self._graphs) >= MOST_GRAPHS:
                self._warn_of_many()
                return self._step(*args, **kwargs)
            graph = self._graphs[key] = self._graph(executors, values, form)
        if not graph.is_recorded:
            drop_gradients(handles, set_to_none=True)  # of an earlier step, to which this one would add
        try:
            made = graph.run([value for value in values if isinstance(value, Tensor)], rules)
            return pytree.tree_map(_copy, made)
        finally:
            drop_gradients(handles, set_to_none=True)  # their memory may belong to the graph

    def _graph(self, executors: Sequence[Any], values: Sequence[Any], form: Any) -> Any:
        """Return a new graph, whose tensors have a memory of their own."""
        from embedrock.device.graph_capture import GraphCapture  # needs Triton, like the executors

        device = executors[0].device
        own = [torch.empty_like(value, device=device) if isinstance(value, Tensor) else value for value in values]
        args, kwargs = pytree.tree_unflatten(own, form)
        inputs = [value for value in own if isinstance(value, Tensor)]
        return GraphCapture(functools.partial(self._step, *args, **kwargs), inputs, executors, self._warmup)

    def _executors(self, bound: Sequence[OptimizedRows], handles: Sequence[Handle]) -> list[Any]:
        """Return the GPU executors of the rows, checked again where anything has changed: see `_executor`."""
        rests = generation.now, list(map(id, handles)), [part.rows.table_lock.generation for part in bound]
        is_quiet = rests == self._rests and not are_there_groups() and not any(map(_JOINT, handles))
        is_quiet = is_quiet and not any(map(_SEEN, handles)) and not any(map(_FOLLOWERS, handles))
        if not (is_quiet and {("raise", None)}.issuperset(map(_STATE, bound))):
            self._known = [_executor(part) for part in bound]
            self._rests = generation.now, *rests[1:]
        return self._known

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "what ert.graphed returns can neither be copied nor pickled: its graphs know the memory of these rows. "
            "Copy the model, and make another one for it by ert.graphed(step, optimizer)."
        )

    def _warn_of_many(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"ert.graphed has {MOST_GRAPHS} graphs of this step, for as many forms of its arguments: others are "
                "launched kernel by kernel. Give it batches of few shapes (drop_last=True, padding).",
                stacklevel=3,
            )


def _executor(part: OptimizedRows) -> Any:
    """Return the GPU executor of an optimizer's rows, for a graph.

    Raises:
        UnsupportedError, ArgumentError: a graph cannot use the rows.
    """
    handle = part.handle
    executor: Any = handle.executor()
    why = getattr(executor, "not_captured", "the CPU reads and steps its rows")
    if handle.max_norm is not None:
        why = "the CPU reads and steps its rows, which max_norm shrinks"
    if why is None and executor.device.type != "cuda":
        why = "its rows are not on a GPU"
    if why is None and rows_of(handle.table).on_nonfinite != "raise":
        why = 'of on_nonfinite="skip", with which the host waits for each step: a GradScaler in the step skips it, too'
    if why is None and handle.followers:
        why = "its rows are averaged (ert.average), which the host does at each step"
    if why is not None:
        raise _not_captured(handle, why)
    if handle.waits():
        raise ArgumentError(
            f"gradients of {handle.label} wait for a step outside of the one that ert.graphed was given, which would "
            "not see them. Call the optimizer's step() or zero_grad() before."
        )
    return executor


def _not_captured(handle: Handle, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"steps of {handle.label} cannot be captured in a CUDA graph: {why}. A graph takes tables in RAM with rows= "
        "and Embedrock's initializers, near, cached or in place. It takes none with directory=, admission=, eviction=, "
        "frozen=, sharded=, max_norm, dense=True or ert.average. Leave that out, or call the step itself, without "
        "ert.graphed."
    )


# Many handles and tables are read by one call of `map`.
_TRAINS, _JOINT, _SEEN = attrgetter("requires_grad"), attrgetter("pending.joint"), attrgetter("pending.seen")
_FOLLOWERS, _STATE = attrgetter("followers"), attrgetter("rows.on_nonfinite", "rows.history")
PLAIN = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device


def _form_of(value: Any) -> Any:
    """Return the form of an argument: shape and dtype of a tensor, or a value."""
    if type(value) is Tensor and value.layout is torch.strided and not value.is_nested and not value.requires_grad:
        return value.shape, value.dtype
    if not isinstance(value, PLAIN):
        told, remedy = type(value).__name__, "tensors of its data"
        if isinstance(value, Tensor):
            told = f"a {told}, {value.layout}"
            if value.requires_grad:
                told, remedy = "a tensor with requires_grad=True", "its detach()"
        raise ArgumentError(
            "a step of ert.graphed takes nests (tuples, lists, dicts) of dense tensors that need no gradient, and of "
            f"plain values: got {told}, which would stay as it is in all replays. Pass {remedy}."
        )
    return type(value), value


def _copy(value: Any) -> Any:
    """Return a copy of a step's result. The next replay overwrites the original."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise ArgumentError(
            f"a step of ert.graphed returns nests of tensors, or None: got {type(value).__name__}, which no replay "
            "would change. The step was made. Return tensors, and read their values after the call."
        )
    value.record_stream(torch.cuda.current_stream(value.device))  # the tensor may be on another device
    return value.detach().clone()
