"""A GPU whose streams, events and memory behave as CUDA's, on CPU tensors under Triton's interpreter.

Work is done at once, and it is remembered what had to be done before what. So a use of memory that nothing orders after
another stream's, or after the host's, is found whether it went wrong or not; also where memory goes back to the stream
that it was allocated for, while another one may still use it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import fake_runtime
import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter

GPU = fake_runtime.GPU
WAITS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero"}
BESIDE = {"data_ptr", "untyped_storage", "is_pinned", "requires_grad_", "register_post_accumulate_grad_hook"}

Clock = dict[str, int]


class Actor:
    """A stream, or the host: what it has done, and what it knows to be done by others."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, {name: 0}

    def learn(self, clock: Clock) -> None:
        for name, time in clock.items():
            self.clock[name] = max(time, self.clock.get(name, 0))

    def knows(self, name: str, time: int) -> bool:
        return time <= self.clock.get(name, 0)


class Stream(Actor):
    """`torch.cuda.Stream`."""

    def __init__(self, gpu: FakeGPU, name: str) -> None:
        super().__init__(name)
        self._gpu = gpu

    def wait_event(self, event: Event) -> None:
        self.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.clock)

    def synchronize(self) -> None:
        self._gpu.host.learn(self.clock)


class Event:
    """`torch.cuda.Event`: it has happened as late as it may, once somebody has waited for it."""

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu, self.clock = gpu, Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self._gpu.current).clock)

    def synchronize(self) -> None:
        self._gpu.host.learn(self.clock)

    def query(self) -> bool:
        return all(self._gpu.host.knows(name, time) for name, time in self.clock.items())


class Memory:
    """Of one storage: who used it last, and where it goes back to."""

    def __init__(self, location: Actor, start: int, nbytes: int, is_on_gpu: bool) -> None:
        self.location, self.start, self.end, self.is_on_gpu = location, start, start + nbytes, is_on_gpu
        self.written: tuple[str, int] | None = None
        self.read: Clock = {}
        self.recorded: list[Actor] = []

    def users(self) -> Iterator[tuple[str, int]]:
        yield from self.read.items()
        if self.written is not None:
            yield self.written


class FakeGPU(TorchFunctionMode):
    """The GPU; within it, tensors may be on "cuda".

    Attributes:
        races: what nothing orders, in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host, self.current = Actor("host"), Stream(self, "default")
        self.races: list[str] = []
        self._known: dict[int, Memory] = {}  # by storage
        self._streams = 0

    # ------------------------------------------------------------ streams

    def new_stream(self, device: Any = None) -> Stream:
        self._streams += 1
        return Stream(self, f"stream {self._streams}")

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Work on a stream, as `torch.cuda.stream` does."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # ------------------------------------------------------------ memory

    def uses(self, memory: Memory, actor: Actor, writes: bool, what: str) -> None:
        """Note that an actor uses memory, which others may be using."""
        if actor is not self.host:
            actor.learn(self.host.clock)
        before = [memory.written] if memory.written is not None else []
        if writes:
            before += memory.read.items()
        for name, time in before:
            if not actor.knows(name, time):
                self.races.append(f"{what} on {actor.name} does not wait for {name}")
        actor.clock[actor.name] += 1
        now = actor.clock[actor.name]
        if writes:
            memory.written, memory.read = (actor.name, now), {}
        else:
            memory.read[actor.name] = now

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        return self._known.get(tensor.untyped_storage()._cdata)

    def keep(self, tensor: torch.Tensor, is_on_gpu: bool) -> None:
        """Take memory that was just allocated as the GPU's own, or as pinned."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            memory = Memory(self.current, storage.data_ptr(), storage.nbytes(), is_on_gpu)
            self._known[storage._cdata] = memory
            weakref.finalize(storage, self._freed, storage._cdata).atexit = False
            self.uses(memory, self.current if is_on_gpu else self.host, True, "allocation")

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep memory, once it is free, until a stream is done with it: `Tensor.record_stream`."""
        memory = self.memory_of(tensor)
        if memory is not None:
            memory.recorded.append(stream)

    def _freed(self, key: int) -> None:
        memory = self._known.pop(key)
        for name, time in memory.users() if memory.is_on_gpu else ():
            safe = [memory.location, *memory.recorded]
            if name != "host" and not any(actor.knows(name, time) for actor in safe):
                self.races.append(f"memory of {memory.location.name} is freed while {name} may use it")

    # ------------------------------------------------------------ PyTorch

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.__name__
        if name == "__get__":
            return self._attribute(function, args[0])
        if name in BESIDE or name == "__set__":
            return name == "is_pinned" or function(*args, **kwargs)
        if name == "pin_memory":
            return torch.empty_like(args[0], pin_memory=True).copy_(args[0])
        return self._called(name, function, args, kwargs)

    def _attribute(self, function: Any, tensor: Any) -> Any:
        memory, attribute = self.memory_of(tensor), function.__self__.__name__
        if memory is not None and memory.is_on_gpu and attribute in ("device", "is_cuda", "is_cpu"):
            return GPU if attribute == "device" else attribute == "is_cuda"
        return function(tensor)

    def _called(self, name: str, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        place = _device(kwargs.get("device"), *(args[1:2] if name == "to" else ()))
        if place is not None:
            kwargs.pop("device", None)
            args = (args[0], torch.device("cpu"), *args[2:]) if name == "to" else args
            kwargs |= {} if name in ("to", "as_tensor") else {"device": "cpu"}
        is_pinned = kwargs.pop("pin_memory", False)
        taken = [tensor for tensor in _tensors((args, kwargs)) if self.memory_of(tensor) is not None]
        is_there = any(self._is_there(tensor) for tensor in taken) if place is None else place.type == "cuda"
        moves = name == "to" and place is not None and is_there != self._is_there(args[0])
        waits = name in WAITS or (moves and not kwargs.get("non_blocking", False))
        with torch._C.DisableTorchFunction():
            made = function(*args, **kwargs)
            made = made.clone() if moves or (name == "cpu" and taken) else made
        self._note(name, taken, waits, is_there or moves)
        for tensor in _tensors(made):
            if is_pinned or (is_there and self.memory_of(tensor) is None and name not in WAITS - {"nonzero"}):
                self.keep(tensor, is_on_gpu=not is_pinned)
        return made

    def _is_there(self, tensor: torch.Tensor) -> bool:
        memory = self.memory_of(tensor)
        return memory is not None and memory.is_on_gpu

    def _note(self, name: str, taken: list[torch.Tensor], waits: bool, is_there: bool) -> None:
        actor: Actor = self.current if is_there else self.host
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        for k, tensor in enumerate(taken):
            memory = self.memory_of(tensor)
            assert memory is not None
            self.uses(memory, actor, writes and k == 0, name)
        if waits and is_there:
            self.host.learn(self.current.clock)

    # ------------------------------------------------------------ kernels

    def kernel(self, launch: Any, executor: Any, *args: Any, **options: Any) -> Any:
        """Launch a kernel, and note what memory it reads and writes."""
        self._touched: dict[int, bool] = {}
        memories = sorted(self._known.values(), key=lambda memory: memory.start)
        self._ranges = memories, np.array([memory.start for memory in memories], np.int64)
        with torch._C.DisableTorchFunction():
            done = launch(executor, *args, **options)
        for index, writes in self._touched.items():
            self.uses(memories[index], self.current, writes, executor.fn.__name__)
        return done

    def touched(self, pointers: Any, mask: Any, writes: bool) -> None:
        """Note where a running kernel reads or writes."""
        shape = np.broadcast_shapes(pointers.shape, mask.shape)
        at = np.broadcast_to(pointers, shape)[np.broadcast_to(mask, shape).astype(bool)].astype(np.int64)
        memories, starts = self._ranges
        for index in np.unique(np.searchsorted(starts, at, side="right") - 1).tolist():
            if index >= 0 and bool(((at >= starts[index]) & (at < memories[index].end)).any()):
                self._touched[index] = self._touched.get(index, False) or writes


def _device(*places: Any) -> torch.device | None:
    return next((torch.device(place) for place in places if isinstance(place, torch.device | str)), None)


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [tensor for value in values for tensor in _tensors(value)] if isinstance(values, tuple | list) else []


def install(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    """Have `torch.cuda`, CUDA's runtime library and the interpreter be those of a fake GPU; enter it to use them."""
    from embedrock.device import attach, requirements

    gpu, builder = FakeGPU(), interpreter.InterpreterBuilder
    fake_runtime.use(monkeypatch, fake_runtime.FakeLibrary())
    cuda: dict[str, Any] = {
        "Stream": gpu.new_stream,
        "Event": lambda: Event(gpu),
        "current_stream": lambda device=None: gpu.current,
        "stream": gpu.on,
        "device": lambda device: nullcontext(),
        "current_device": lambda: GPU.index,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device: attach.LEAST_CAPABILITY,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: gpu.record(tensor, stream))
    monkeypatch.setattr(requirements, "lack_for_kernels", lambda device_type: None)
    launch, load, store = interpreter.GridExecutor.__call__, builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def touching(name: str, function: Any, writes: bool, pointers: int, mask: int | None) -> None:
        def called(self: Any, *args: Any) -> Any:
            gpu.touched(args[pointers].data, np.array(True) if mask is None else args[mask].data, writes)
            return function(self, *args)

        monkeypatch.setattr(builder, name, called)

    touching("create_masked_load", load, False, 0, 1)
    touching("create_masked_store", store, True, 0, 2)
    touching("create_atomic_rmw", rmw, True, 1, 3)
    touching("create_atomic_cas", cas, True, 0, None)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **named: gpu.kernel(launch, *args, **named))
    return gpu
