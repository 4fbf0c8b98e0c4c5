"""`BackwardPass`: row gradients that one run of autograd has produced so far."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._dynamo import decorators
from torch.autograd import Variable, profiler

from embedrock.system.spans import PREFIX, trace_by
from embedrock.torch.training.executor import Gradients, JointGradients
from embedrock.torch.training.handle_gradient import Pending, number_of

Block = tuple[JointGradients, list[Any]]  # gradients of tables, and their handles
Function = TypeVar("Function", bound=Callable[..., Any])

# Returns the compiler of frames that are run now, None without one.
_compiler: Any = getattr(eval_frame, "get_eval_frame_callback", None)


def as_it_is(function: Function) -> Function:
    """Return a function that compiled code and compiled autograd call without tracing: a graph cannot contain its
    effects.

    `torch.compiler.disable` adds several microseconds to each call. So the disabled function is called only where
    frames are compiled.
    """
    disabled: Any = torch.compiler.disable(function)
    if _compiler is None:
        return disabled

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (function if _compiler() is None else disabled)(*args, **kwargs)

    return decorators.skip(called)  # pyright: ignore[reportReturnType]


class BackwardPass:
    """Row gradients of one backward, before they are pending.

    Threads may run backwards on one model at once. A backward may run inside another (checkpointing), and one may fail.
    So each backward has its own object, which only autograd keeps alive, while that backward runs.

    Attributes:
        gradients: row gradients that autograd will accumulate, by the id of their handle.
        brought: row gradients of tables that were summed together, with their handles. They become pending when the
            backward ends. None: these gradients are dropped, or in `gradients`.
        times: of the newest event of the lookups, by the id of their handle, if known.
        has_eager: autograd has accumulated row gradients in this process.
    """

    has_eager: ClassVar[bool] = False

    def __init__(self) -> None:
        self.gradients: dict[int, Gradients] = {}
        self.brought: list[Block] = []
        self.times: dict[int, float] = {}

    @staticmethod
    def running() -> BackwardPass | None:
        """Return the backward of this thread; None if it has no row gradients yet."""
        known = _running.get(torch._C._current_graph_task_id()) if _running else None
        return None if known is None else known()

    @staticmethod
    def current() -> BackwardPass:
        """Return the backward of this thread, made if missing."""
        task = torch._C._current_graph_task_id()
        run = _running[task]() if task in _running else None
        if run is None:
            run = BackwardPass()
            _running[task] = weakref.ref(run, functools.partial(_running.pop, task))
            Variable._execution_engine.queue_callback(run._end)
        return run

    def pass_at(self, time: float, handles: Sequence[Any]) -> None:
        """Record the time of the newest event of a lookup. None among the handles: its gradients are dropped."""
        for handle in handles:
            self.times[id(handle)] = max(time, self.times.get(id(handle), time))

    def take(self, handle: Any) -> Gradients | None:
        """Take what was brought for a handle out of `brought`; None without any."""
        parts: list[Any] = []
        for grads, handles in self.brought:
            for number, each in enumerate(handles):
                if each is handle:
                    handles[number] = None
                    parts.append(grads.of(number))
        self.brought = [block for block in self.brought if any(each is not None for each in block[1])]
        return parts[0].sum_of(parts) if parts else None

    def arrive(self) -> None:
        """Make what was brought pending."""
        brought = self.brought if len(self.brought) < 2 else each_once(self.brought)
        self.brought = []
        for grads, handles in brought:
            for handle, number in _taken(grads, handles, self.times):
                handle.add_rows(grads.of(number), self.times.get(id(handle)))

    def _end(self) -> None:
        if self.brought:
            self.arrive()
        self.gradients, self.times = {}, {}


_running: dict[int, weakref.ref[BackwardPass]] = {}  # a `WeakValueDictionary` takes five times as long


def each_once(blocks: list[Block]) -> list[Block]:
    """Return blocks that have each handle in one. Gradients of a handle in several are summed in their order."""
    handles = [handle for _, several in blocks for handle in several if handle is not None]
    if len(set(map(id, handles))) == len(handles):
        return blocks
    parts: dict[int, tuple[Any, list[Any]]] = {}
    for grads, several in blocks:
        for number, handle in enumerate(several):
            if handle is not None:
                parts.setdefault(id(handle), (handle, []))[1].append(grads.of(number))
    return [(own[0].sum_of(own), [handle]) for handle, own in parts.values()]


def _taken(grads: JointGradients, handles: Sequence[Any], times: Mapping[int, float]) -> list[tuple[Any, int]]:
    """Make gradients pending that no code looks at. Return the other handles, whose gradients must be added."""
    others: list[tuple[Any, int]] = []
    with Pending.arriving:
        for number, handle in enumerate(handles):
            if handle is None or not handle.requires_grad:
                continue
            pending, check = handle.pending, handle.unapplied
            if pending.joint is not None or number_of(handle) is not None:
                others.append((handle, number))
                continue
            pending.joint, pending.number, pending.seen = grads, number, None
            pending.time = times.get(id(handle)) if times else None
            handle.is_applied = False
            if check.is_settled and check.holder is not None and check.holder() is not None:
                continue
            shown = pending.shown  # a GPU's number is unknown yet
            if not isinstance(shown, float) or math.isfinite(shown):
                check.received()
    return others


_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU).remove(torch._C.DispatchKey.CPU)


def accumulator(leaf: Tensor) -> Any:
    """Return autograd's node that accumulates the gradient of a leaf; None without a gradient.

    An operator runs below autograd, where tensors have no nodes. So this function enables autograd for a moment.
    """
    with torch._C._ForceDispatchKeyGuard(_NO_KEYS, _NO_KEYS), torch.enable_grad():
        view = leaf.view_as(leaf).grad_fn
    return None if view is None else view.next_functions[0][0]


# An input of each lookup that no code knows. In a plain backward autograd would accumulate its gradient, which is None.
with torch.inference_mode(False):
    ANCHOR = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
NODE_OF_ANCHOR = accumulator(ANCHOR)


def accumulates(node: Any) -> bool:
    """Return whether the running backward adds to the ``.grad`` of the leaf of an autograd node.

    `torch.autograd.grad` returns the gradient instead, and does not add. For a leaf among its inputs, PyTorch raises an
    error.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def record(name: str) -> AbstractContextManager[Any] | None:
    """Return a phase for the running profiler; None without a profiler."""
    return profiler.record_function(PREFIX + name) if profiler._is_profiler_enabled else None


trace_by(record, functools.partial(getattr, profiler, "_is_profiler_enabled"))
