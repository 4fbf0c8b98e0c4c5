"""CUDA graphs on the fake GPU: what is launched while one is captured is not done, and done at each replay.

Every kernel and every call of PyTorch is recorded with the arguments that it has then: numbers are as they were, and
memory is the same memory. So a replay shows which numbers were baked in. What the graph allocates is overwritten before
each replay, and a read of the GPU's memory by the host is an error in a capture, as it is on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fake_cuda
import numpy as np
import pytest
import torch
from fake_cuda import FakeGPU
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

READS = "aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero", "aten.item"
POISON = 0x7B  # in each byte: no number that anybody expects


class FakeGraph:
    """`torch.cuda.CUDAGraph`.

    Attributes:
        calls: what a replay does, in order, with the name of each.
        memory: that the graph allocated.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Callable[[], Any]]] = []
        self.memory: list[torch.Tensor] = []

    def replay(self) -> None:
        for tensor in self.memory:
            tensor.reshape(-1).view(torch.uint8).fill_(POISON)
        with np.errstate(all="ignore"), torch.no_grad(), torch._C.DisableTorchFunction():  # as kernels are launched
            for _, call in self.calls:
                call()


class Recorder(TorchDispatchMode):
    """Records calls of PyTorch in a graph."""

    def __init__(self, gpu: FakeGPU, graph: FakeGraph) -> None:
        super().__init__()
        self._gpu, self._graph = gpu, graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(function).rpartition(".")[0]
        given = fake_cuda._tensors((args, kwargs))
        if name.startswith("profiler.") or (given and all(map(self._is_of_host, given))):
            return function(*args, **kwargs)
        if name in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        returns = function._schema.returns
        if any(argument.alias_info and argument.alias_info.is_write for argument in function._schema.arguments):
            self._graph.calls.append((name, lambda: function(*args, **kwargs)))
            return kwargs["out"] if "out" in kwargs else args[0] if returns else None
        made = function(*args, **kwargs)
        if any(one.alias_info for one in returns):  # a view
            return made
        outputs = fake_cuda._tensors([made])
        for tensor in outputs:
            tensor.zero_()  # what a later call takes for places is inside of anything
        self._graph.memory += outputs
        if not name.startswith("aten.empty"):
            self._graph.calls.append((name, lambda: _again(function, args, kwargs, outputs)))
        return made

    def _is_of_host(self, tensor: torch.Tensor) -> bool:
        memory = self._gpu.memory_of(tensor)
        known = any(tensor.untyped_storage()._cdata == own.untyped_storage()._cdata for own in self._graph.memory)
        return not known and (memory is None or not memory.is_on_gpu)


def _again(function: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
    for tensor, made in zip(outputs, fake_cuda._tensors([function(*args, **kwargs)]), strict=True):
        tensor.copy_(made)


class FakeGraphs:
    """What of `torch.cuda` makes graphs.

    Attributes:
        graph: that is captured now.
        made: all of them.
    """

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu, self.graph, self.made = gpu, None, list[FakeGraph]()

    @contextmanager
    def capture(self, graph: FakeGraph, stream: Any = None, **options: Any) -> Iterator[None]:
        """Capture what is done: `torch.cuda.graph`."""
        self.graph = graph
        try:
            with self._gpu.on(stream), Recorder(self._gpu, graph):
                yield
            self.made.append(graph)
        finally:
            self.graph = None


def install(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    """Let there be graphs on a fake GPU."""
    graphs, launch, note = FakeGraphs(gpu), interpreter.GridExecutor.__call__, gpu._note

    def launched(*args: Any, **options: Any) -> Any:
        if graphs.graph is None:
            return launch(*args, **options)
        graphs.graph.calls.append((args[0].fn.__name__, lambda: launch(*args, **options)))
        return None

    def noted(name: str, taken: Any, waits: bool, is_there: bool) -> None:
        if graphs.graph is not None and waits and is_there:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if graphs.graph is None:
            note(name, taken, waits, is_there)

    monkeypatch.setattr(gpu, "_note", noted)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", graphs.capture)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: graphs.graph is not None)
    return graphs
