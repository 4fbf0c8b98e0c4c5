"""`graphed`: a training step captured in CUDA graphs, rows and all."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from embedrock.errors import ArgumentError, EmbedrockError, UnsupportedError
from embedrock.optimizers import Rule
from embedrock.table.table import rows_of
from embedrock.torch.optim import OptimizedRows, RowOptimizer
from embedrock.torch.training.backward import as_it_is
from embedrock.torch.training.handle import Handle
from embedrock.torch.whole import ModelOptimizer

MOST_GRAPHS = 16  # that one step has: each keeps memory of its own


def graphed(step: Callable[..., Any], *optimizers: RowOptimizer | ModelOptimizer, warmup: int = 2) -> GraphedStep:
    """Capture a training step in CUDA graphs: lookups, model, backward and steps are then one launch for the host.

    Each call makes exactly one step. For each form of its arguments (shapes and dtypes of tensors, and all else by
    value), the first calls launch kernel by kernel, the next ones replay a graph. Arguments are copied into the graph's
    memory, and what `step` returns is copied out of it.

    Everything that Python decides in `step` stays as it was captured, but for the rows' numbers: learning rates and
    other hyperparameters, counts of steps, and errors of earlier steps are those of an ordinary step. Gradients of rows
    are dropped once a call returns.

    Args:
        step: makes one training step of its arguments: forward, backward, and ``step()`` of all optimizers, once. It
            must not read values of tensors on the host. Optimizers of PyTorch's in it need ``capturable=True``.
        optimizers: of all rows that `step` uses: Embedrock's, or those of `ert.optimizer`.
        warmup: calls of each form that are made before it is captured, at least 1.

    Returns:
        A function to call in the place of `step`. What it takes and returns are nests of tensors and of other values.

    Raises:
        ArgumentError: no optimizer of rows, or `warmup` is none.
        UnsupportedError: a layer is not on a GPU.

    It has not met a GPU yet: see docs/gpu.md.

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
    """A training step in CUDA graphs, one for each form of its arguments: `graphed` makes it.

    Args:
        step, warmup: see `graphed`.
        optimizers: of rows.
    """

    def __init__(self, step: Callable[..., Any], optimizers: Sequence[RowOptimizer], warmup: int) -> None:
        self._step, self._optimizers, self._warmup = step, optimizers, warmup
        self._graphs: dict[Any, _Graph] = {}
        self._has_warned = False

    @property
    def graphs(self) -> int:
        """How many forms of arguments are replayed by now."""
        return sum(graph.is_recorded for graph in self._graphs.values())

    @as_it_is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step; return what the function returns, in memory that no later step writes to.

        Raises:
            UnsupportedError: rows are not where a graph can use them, or the step cannot be captured. It is not made.
            ArgumentError: arguments or results that are no nests of tensors; gradients of rows wait for another step.
            NonFiniteGradientError, IdError, ...: what an ordinary step raises.
        """
        bound = [part for optimizer in self._optimizers for part in optimizer.bound()]
        executors = [_executor(part) for part in bound]
        values, form = pytree.tree_flatten((args, kwargs))
        rows = tuple((id(part.handle), part.handle.requires_grad, part.clip_value) for part in bound)
        key = form, tuple(map(_form_of, values)), rows, _modes(executors[0].device.type)
        rules = {executor: part.rule for executor, part in zip(executors, bound, strict=True) if part.rule is not None}
        graph = self._graphs.get(key)
        if graph is not None and not graph.suits(executors, rules):
            graph = None  # it knows memory that is not the rows' any more
        if graph is None:
            if key not in self._graphs and len(self._graphs) >= MOST_GRAPHS:
                return self._as_usual(args, kwargs)
            graph = self._graphs[key] = _Graph(self._step, executors, values, form, self._warmup)
        try:
            return graph.run(values, rules)
        finally:
            for part in bound:
                part.handle.forget()  # their memory may be the graph's

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "what ert.graphed returns can neither be copied nor pickled: its graphs know the memory of these rows. "
            "Copy the model, and make another one for it by ert.graphed(step, optimizer)."
        )

    def _as_usual(self, args: Any, kwargs: Any) -> Any:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"ert.graphed has {MOST_GRAPHS} graphs of this step, for as many forms of its arguments: others are "
                "launched kernel by kernel. Give it batches of few shapes (drop_last=True, padding).",
                stacklevel=3,
            )
        return self._step(*args, **kwargs)


class _Graph:
    """The graph of one form of arguments.

    Args:
        step: see `graphed`.
        sides: of the rows.
        values: arguments of this form.
        form: how they are nested.
        warmup: calls before it is recorded.
    """

    def __init__(
        self, step: Callable[..., Any], executors: Sequence[Any], values: Sequence[Any], form: Any, warmup: int
    ) -> None:
        from embedrock.device.graph_capture import GraphCapture  # which needs Triton: that of the sides

        device = executors[0].device
        self._captured = GraphCapture(executors, torch.cuda.Stream(device))
        self._inputs = [
            torch.empty_like(value, device=device) if isinstance(value, Tensor) else value for value in values
        ]
        args, kwargs = pytree.tree_unflatten(self._inputs, form)
        self._step, self._left = functools.partial(step, *args, **kwargs), warmup
        self._output: Any = None

    @property
    def is_recorded(self) -> bool:
        """Whether it is replayed."""
        return self._captured.is_recorded

    def suits(self, executors: Sequence[Any], rules: Mapping[Any, Rule]) -> bool:
        """Return whether it can go on with these rows."""
        return tuple(executors) == self._captured.executors and self._captured.suits(rules)

    def run(self, values: Sequence[Any], rules: Mapping[Any, Rule]) -> Any:
        """Make one step of arguments, by the rules as they are now."""
        from embedrock.device.executor import pinned_copy

        for own, value in zip(self._inputs, values, strict=True):
            if isinstance(own, Tensor):
                own.copy_(pinned_copy(value, own.device), non_blocking=True)
        if self._left:
            self._left -= 1
            return _copied(self._captured.rehearse(self._step))
        if not self.is_recorded:
            self._output = self._recorded()
        self._captured.replay(rules)
        return _copied(self._output)

    def _recorded(self) -> Any:
        try:
            return self._captured.record(self._step)
        except EmbedrockError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"the step that ert.graphed was given cannot be captured in a CUDA graph: {error} No step of this "
                "batch was made. Within it, read no value of a tensor on the host (item(), if, print, GradScaler), "
                "make no tensor of host data, and give PyTorch's optimizers capturable=True; or call it itself."
            ) from error


def _executor(part: OptimizedRows) -> Any:
    """Return where the GPU uses rows that a graph can use.

    Raises:
        UnsupportedError, ArgumentError: it cannot.
    """
    handle = part.handle
    executor: Any = handle.executor()
    why = getattr(executor, "not_captured", "the CPU reads and steps its rows")
    if why is None and executor.device.type != "cuda":
        why = "its rows are not on a GPU"
    if why is None and rows_of(handle.table).on_nonfinite != "raise":
        why = 'of on_nonfinite="skip", for which the host must know whether a step is made'
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
        f"steps of {handle.label} cannot be captured in a CUDA graph: {why}. Those of tables can be that the GPU plans "
        "(rows=, no directory=), near, cached or in place. Call the step itself, without ert.graphed."
    )


def _modes(device: str) -> tuple[Any, ...]:
    """Return what PyTorch's operators do otherwise by: a graph stays with it."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


PLAIN = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device


def _form_of(value: Any) -> Any:
    """Return what of an argument a graph is captured for: the shape and dtype of a tensor, or a value."""
    if type(value) is Tensor and value.layout is torch.strided and not value.is_nested and not value.requires_grad:
        return value.shape, value.dtype
    if not isinstance(value, PLAIN):
        raise ArgumentError(
            "a step of ert.graphed takes nests (tuples, lists, dicts) of dense tensors that need no gradient, and of "
            f"plain values: got {_told(value)}, which would stay as it is in all replays. Pass its tensors."
        )
    return type(value), value


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "a tensor with requires_grad=True" if value.requires_grad else f"a {type(value).__name__}, {value.layout}"


def _copied(output: Any) -> Any:
    """Return copies of a step's results, which the next replay writes to."""
    return pytree.tree_map(_copy, output)


def _copy(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise ArgumentError(
            f"a step of ert.graphed returns nests of tensors, or None: got {type(value).__name__}, which no replay "
            "would change. The step was made."
        )
    value.record_stream(torch.cuda.current_stream(value.device))  # it may have been made on another one
    return value.detach().clone()
