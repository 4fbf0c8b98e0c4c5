"""The steps of ``on_gpu.py`` that are no programs of their own; an argument names the step."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from gpu_device import DEVICE, INTERPRETED, IS_SLOW
from gpu_models import ALL_NEAR, NONE_NEAR, OPEN, SOME_NEAR, WAYS, batches, loss_of, make, on_device, train

import embedrock as er
import embedrock.torch as ert
from benchmarks import gpu
from benchmarks.gpu import Device
from embedrock.device import memory_for
from embedrock.device.pinned import PinnedRecords
from embedrock.device.stream_order import StreamOrder
from embedrock.errors import EmbedrockError
from embedrock.system import platform as platform_libraries
from embedrock.system.arena import Arena
from embedrock.system.ram import available_bytes

FACT_BYTES = 1 << 30
CACHED_STEPS = 2 if IS_SLOW else 20
EQUAL_STEPS = 3 if IS_SLOW else 40
MODE_STEPS = 2 if IS_SLOW else 8
DELAY = 20_000_000  # cycles that copies ahead wait: some ms
PROFILED_STEPS = 3 if IS_SLOW else 30
GRAPHED_STEPS = 3 if IS_SLOW else 300
WARM_UP_STEPS = 2 if IS_SLOW else 100
MODES = {"mode a": None, "mode b": 0.0, "mode c": 0.2}  # of the benchmark: the share of the rows in use that are near


def found(**numbers: Any) -> None:
    """Tell the report."""
    print(f"FOUND {json.dumps(numbers)}", flush=True)


def facts() -> None:
    """Tell what there is."""
    import triton

    gpu: dict[str, Any] = {}
    if torch.cuda.is_available():
        free, whole = torch.cuda.mem_get_info()
        gpu = {
            "gpu": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "gpu_bytes": whole,
            "gpu_free_bytes": free,
        }
    gpu["host_bytes_free"] = available_bytes()
    if torch.cuda.is_available():
        gpu["pinning"] = _pinning()
    tools = {name: shutil.which(name) for name in ("gcc", "nvidia-smi", "compute-sanitizer", "ncu", "nsys")}
    if tools["nvidia-smi"]:
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__}
    there = {name: importlib.util.find_spec(name) is not None for name in ("fbgemm_gpu", "hypothesis", "numba")}
    found(**gpu, **versions, python=platform.python_version(), cores=os.cpu_count(), tools=tools, there=there)


def _pinning() -> dict[str, Any]:
    """Tell whether RAM can be pinned as tables have it, and how long that takes."""
    arena, start = Arena(FACT_BYTES, "facts"), time.perf_counter()
    pinned = PinnedRecords(arena.memory, torch.device("cuda:0"), torch.cuda.synchronize)
    try:
        pinned.cover(FACT_BYTES)
        taken = time.perf_counter() - start
        pinned.close()
    except EmbedrockError as error:
        return {"refused": str(error)}
    return {"GB/s": round(FACT_BYTES / taken / 1e9, 2), "library": platform_libraries.loaded_libraries("libcudart.so")}


def modes() -> None:
    """Train in each mode: are the bits those of the CPU? In processes of their own, which compile beside each other."""
    names = [SOME_NEAR[1].name] if INTERPRETED else [way.name for way in WAYS]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        statuses = list(pool.map(lambda name: subprocess.call([sys.executable, __file__, "mode", name]), names))
    wrong = [name for name, status in zip(names, statuses, strict=True) if status]
    assert not wrong, f"not as the CPU's: {', '.join(wrong)}"


def mode(name: str) -> None:
    """Train in one mode, and tell whether the bits are those of the CPU."""
    (way,) = (way for way in WAYS if way.name == name)
    start = time.perf_counter()
    model = train(make(way), batches(MODE_STEPS))
    mine, theirs = model.weights(), train(make(None), batches(MODE_STEPS)).weights()
    different, where = int((mine != theirs).any(axis=1).sum()), repr(model.table.executor)
    taken = round(time.perf_counter() - start, 2)
    found(**{f"mode {name}": {"rows that differ": different, "most": float(abs(mine - theirs).max()), "s": taken}})
    assert different == 0, f"{different} rows of {where} are not those of the CPU"


def late() -> None:
    """Train while the copies ahead are late: the bits must be those of rows that never move."""
    streams = [None] if INTERPRETED else [None, torch.cuda.Stream()]
    for stream in streams:
        aside = StreamOrder.aside
        StreamOrder.aside = _delayed(aside)
        try:
            with torch.cuda.stream(stream):  # of None: nothing changes
                models = [make(way) for way in (SOME_NEAR[1], ALL_NEAR)]
                for model in models:
                    ids = ert.prefetch(batches(EQUAL_STEPS), {model.rows: lambda ids: ids})
                    train(model, ids)
        finally:
            StreamOrder.aside = aside
        mine, theirs = (model.weights() for model in models)
        assert (mine == theirs).all(), "rows differ where copies are late"
    found(late_steps=len(streams) * EQUAL_STEPS)


def graphs() -> None:
    """Train in CUDA graphs and by launches: the bits must be the same. Tell what both take."""
    if INTERPRETED:
        found(graphs="need a GPU")
        return
    for way in (ALL_NEAR, NONE_NEAR, SOME_NEAR[1]):
        models = make(way), make(way)
        by_launches = [_stepper(model) for model in models]
        step = ert.graphed(by_launches[0], models[0].step_rows)
        for k, ids in enumerate(batches(EQUAL_STEPS)):
            for model in models:
                model.step_rows.param_groups[0]["lr"] = 0.05 / (1 + k)
            step(ids)
            by_launches[1](ids.to(DEVICE))
        mine, theirs = (model.weights() for model in models)
        assert (mine == theirs).all(), "rows differ where steps are replayed"
        some = [ids.to(DEVICE) for ids in batches(GRAPHED_STEPS)]
        for name, made in {"graph": step, "launches": by_launches[1]}.items():
            times = _timed(made, some, Device(DEVICE))
            found(**{f"{way.name}, {name}, {what}, us": round(s * 1e6, 1) for what, s in times.items()})


def _stepper(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(ids: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        model.step()
        return loss

    return step


def _delayed(aside: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def delayed(self: StreamOrder, *tensors: torch.Tensor) -> Iterator[None]:
        with aside(self, *tensors):
            if not INTERPRETED:
                torch.cuda._sleep(DELAY)
            yield

    return delayed


def cached() -> None:
    """Make some steps of a cached table, for a tool that watches."""
    model = make(SOME_NEAR[1])
    train(model, ert.prefetch(batches(CACHED_STEPS), {model.rows: lambda ids: ids}))
    model.weights()


def open_ids() -> None:
    """Train open ids: the bits must be those of the CPU. And time them beside a table whose rows are all near."""
    mine, theirs = (train(make(way), batches(EQUAL_STEPS)).weights() for way in (OPEN, None))
    assert (mine == theirs).all(), "rows of open ids differ from those that the CPU trains"
    batch, device = 8 if IS_SLOW else 8192, Device(DEVICE)
    count = 2 * PROFILED_STEPS * batch
    ids = torch.randperm(count).to(DEVICE).split(batch)
    for name, rows in {"near": count, "open ids": None}.items():  # with room, so that nobody waits to see if it is full
        memory = memory_for(er.Table(rows, 64, rule=er.Adam()).spec, 4 * count if rows is None else count)
        layer = ert.Embedding(rows, 64, rule=er.Adam(), seed=0, device_memory=memory)
        optimizer = ert.Adam(on_device(layer), lr=1e-3)
        step = functools.partial(_step, layer, optimizer)
        _timed(step, ids[:PROFILED_STEPS], device)  # kernels are compiled
        for kind, some in {"new": ids[PROFILED_STEPS:], "known": ids}.items():
            times = _timed(step, some, device)
            found(**{f"{name}, {kind} rows, {what}, us": round(s * 1e6, 1) for what, s in times.items()})
        assert layer.table.stats().get("device_host_waits", 0) == 0, "the host planned, or waited"


def _step(layer: ert.Embedding, optimizer: ert.RowOptimizer, ids: torch.Tensor) -> None:
    layer(ids).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _timed(step: Callable[[torch.Tensor], Any], some: Sequence[torch.Tensor], device: Device) -> dict[str, float]:
    """Return what a step takes, in seconds: of the host, and until the device is done."""
    device.synchronize()
    start = time.perf_counter()
    for ids in some:
        step(ids)
    host = time.perf_counter() - start
    device.synchronize()
    return {"host": host / len(some), "whole": (time.perf_counter() - start) / len(some)}


def rates() -> None:
    """Compare what kernels get from RAM that was registered, as tables have it, and from CUDA's own; and copies."""
    from touch import touch

    device, width, n = Device(DEVICE), 192, 8 if IS_SLOW else 262_144
    nbytes = 1 << (16 if IS_SLOW else 32)
    arena, where = Arena(nbytes, "rates"), torch.device("cpu" if INTERPRETED else "cuda:0")
    registered = PinnedRecords(arena.memory, where, device.synchronize)
    registered.cover(nbytes)
    memories = {
        "registered": torch.from_numpy(arena.memory).view(torch.float32),
        "allocated": device.pinned(torch.zeros(nbytes // 4)),
    }
    for (name, memory), writes in itertools.product(memories.items(), (False, True)):
        records = memory[: len(memory) // width * width].view(-1, width)
        rows = torch.randperm(len(records))[:n].sort().values.int().to(DEVICE)
        seconds = device.seconds(lambda records=records, rows=rows, writes=writes: touch(records, rows, writes), 5)
        best = device.seconds(lambda records=records, rows=rows, writes=writes: touch(records, rows, writes), 10)
        rate = round(n * width * 4 / min(seconds, best) / 1e9, 2)
        found(**{f"{name}, {'both ways' if writes else 'read'}, GB/s": rate})
    registered.close()
    near, host = torch.zeros(nbytes // 8, device=DEVICE), device.pinned(torch.zeros(nbytes // 8))
    for way, copy in {"in": lambda: near.copy_(host, non_blocking=True), "out": lambda: host.copy_(near)}.items():
        found(**{f"copies {way}, GB/s": round(nbytes / 2 / device.seconds(copy, 10) / 1e9, 2)})


def profile() -> None:
    """Tell what a step of the forum's model takes on the host and in kernels, without rows, and with them."""
    device, workload = Device(DEVICE), gpu.forum(toy=IS_SLOW)
    for name, near in {"model alone": -1.0, **MODES}.items():
        parts = _no_rows(workload, device) if near == -1.0 else gpu.our_parts(workload, device, near)
        trainer = gpu.Trainer(workload, parts, device)
        _run(trainer, WARM_UP_STEPS, device)
        found(**{name: _profiled(trainer, device)})


def forum() -> None:
    """Train the forum's model by launches, and all of its step in a CUDA graph. Tell what a step takes."""
    device, workload = Device(DEVICE), gpu.forum(toy=IS_SLOW)
    is_emulated = IS_SLOW and not INTERPRETED  # which has no sums of sparse gradients
    for name in (*["torch"] * (not is_emulated), *MODES):
        is_ours = name in MODES
        parts = gpu.our_parts(workload, device, MODES[name]) if is_ours else gpu.nn_parts(workload, device, False, True)
        trainer: Any = gpu.Trainer(workload, parts, device)
        for way in ("launches", *["graph"] * (is_ours and not INTERPRETED)):
            if way == "graph":
                trainer._step = ert.graphed(trainer._step, *parts.optimizers)
            _run(trainer, WARM_UP_STEPS, device)
            host, whole = min((_run(trainer, GRAPHED_STEPS, device) for _ in range(3)), key=lambda times: times[1])
            us = {"host_us": host, "step_us": whole}
            found(**{f"{name}, {way}": {kind: round(s / GRAPHED_STEPS * 1e6, 1) for kind, s in us.items()}})
        del parts, trainer


def _run(trainer: gpu.Trainer, steps: int, device: Device) -> tuple[float, float]:
    """Make steps; return their seconds on the host, and until the device is done."""
    device.synchronize()
    start = time.perf_counter()
    for _ in trainer.run(steps, False):
        pass
    host = time.perf_counter() - start
    device.synchronize()
    return host, time.perf_counter() - start


def _no_rows(workload: Any, device: Device) -> gpu.Parts:
    rows = [torch.zeros(workload.batch, workload.dim, device=device.name, requires_grad=True) for _ in workload.rows]
    return gpu.Parts(lambda batch: rows, ())


def _profiled(trainer: gpu.Trainer, device: Device) -> dict[str, float]:
    host, whole = _run(trainer, PROFILED_STEPS, device)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.is_gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        _run(trainer, PROFILED_STEPS, device)
    events = kernels_of(profiler.events() or [])
    by = "self_cuda_time_total" if device.is_gpu else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=by, row_limit=25))
    per_step = {"host_us": host, "step_us": whole, "kernel_us": sum(event.device_time for event in events) / 1e6}
    return {name: round(s / PROFILED_STEPS * 1e6, 1) for name, s in per_step.items()} | {
        "launches": len(events) / PROFILED_STEPS
    }


def kernels_of(events: Iterable[Any]) -> list[Any]:
    """Return what ran on the GPU: not what the host calls by a name, which PyTorch shows there as well."""
    on_gpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event for event in on_gpu if not event.is_user_annotation]


STEPS: dict[str, Callable[..., None]] = {
    step.__name__: step for step in (facts, modes, mode, late, open_ids, graphs, forum, cached, rates, profile)
}

if __name__ == "__main__":
    STEPS[sys.argv[1]](*sys.argv[2:])
