"""`BackwardPass`: row gradients that one run of autograd has produced so far."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._dynamo import decorators
from torch.autograd import Variable, profiler

from embedrock.system.spans import PREFIX, trace_by
from embedrock.torch.training.executor import Gradients

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
    """Row gradients of one backward, before autograd accumulates them.

    Threads may run backwards on one model at once. A backward may run inside another (checkpointing), and one may fail.
    So each backward has its own object, which only autograd keeps alive, while that backward runs.

    Attributes:
        gradients: the row gradients, by the id of their handle.
    """

    def __init__(self) -> None:
        self.gradients: dict[int, Gradients] = {}

    @staticmethod
    def running() -> BackwardPass | None:
        """Return the backward of this thread; None if it has no row gradients yet."""
        return _run_of(torch._C._current_graph_task_id())

    @staticmethod
    def current() -> BackwardPass:
        """Return the backward of this thread, made if missing."""
        task = torch._C._current_graph_task_id()
        run = _run_of(task)
        if run is None:
            run = BackwardPass()
            _running[task] = weakref.ref(run, functools.partial(_running.pop, task))
            Variable._execution_engine.queue_callback(run._end)
        return run

    def _end(self) -> None:
        self.gradients.clear()


_running: dict[int, weakref.ref[BackwardPass]] = {}  # a `WeakValueDictionary` takes five times as long


def _run_of(task: int) -> BackwardPass | None:
    known = _running.get(task)
    return None if known is None else known()


_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU).remove(torch._C.DispatchKey.CPU)


def accumulator(leaf: Tensor) -> Any:
    """Return autograd's node that accumulates the gradient of a leaf; None without a gradient.

    An operator runs below autograd, where tensors have no nodes. So this function enables autograd for a moment.
    """
    with torch._C._ForceDispatchKeyGuard(_NO_KEYS, _NO_KEYS), torch.enable_grad():
        view = leaf.view_as(leaf).grad_fn
    return None if view is None else view.next_functions[0][0]


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
