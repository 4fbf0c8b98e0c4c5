"""Implementations of ``gpu``: ways to look rows up and to step them, in one and the same loop.

Nothing heavier than NumPy is imported before an implementation is made in its own process.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from benchmarks.implementations import (
    LEARNING_RATE,
    Footprint,
    Implementation,
    Timing,
    Unavailable,
    import_fbgemm,
    import_torch,
)
from benchmarks.workload import ManyTables
from embedrock.errors import UnsupportedError
from embedrock.system.ram import available_bytes, memory_limit

INTERPRETER = "TRITON_INTERPRET"  # the variable that Triton reads when it is imported
LOOK_AHEAD = 2  # batches
PREFETCH = "-prefetch"  # after an implementation's name
HIDDEN = (128, 64)  # units of the model that follows the rows
SHARES = (1.0, 0.8, 0.2, 0.1)  # of the working set, on the device in mode c
ADAM_COLUMNS = 3  # float32 numbers of a record for each weight: the weight, and Adam's two states
FLOAT_BYTES = 4
# Of an implementation's process, beside its tables: libraries and CUDA's own memory; and rows, gradients and their
# sums on the device, this many float32 numbers for each one looked up.
HOST_PROCESS_BYTES, DEVICE_PROCESS_BYTES, ACTIVATIONS = 3 << 30, 1 << 30, 12
# The cache workload's tables take this share of the host's RAM, so several implementations fit at once, and of the
# GPU's memory, so mode a fits, which is the base of its ratios.
HOST_SHARE, DEVICE_SHARE = 0.2, 0.25
MAX_CACHE_ROWS = 10_000_000  # of one table: more would take longer to make than to measure
CACHE_TABLES, CACHE_DIM, CACHE_BATCH, CACHE_BATCHES = 10, 128, 104_857, 40
COUNTED = tuple(f"device_{name}" for name in ("hits", "misses", "fetched", "evictions", "written_back", "bypassed"))
MEMORY = ("device_bytes", "device_slots")
WARM_UP_PASSES = 4  # over all batches: rows get records, a cache fills, and counts frequent rows
SETTLE_STEPS = 4  # untimed, at the start of a turn

# ---------------------------------------------------------------- the device


class Device(NamedTuple):
    """A device of torch, "cuda" or "cpu"."""

    name: str

    @property
    def is_gpu(self) -> bool:
        """Whether it is one; otherwise kernels are interpreted, and times mean nothing."""
        return self.name == "cuda"

    def synchronize(self) -> None:
        if self.is_gpu:
            import_torch().cuda.synchronize()

    def pinned(self, tensor: Any) -> Any:
        return tensor.pin_memory() if self.is_gpu else tensor

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """Return the mean seconds of some work, done `times` times one after another."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            work()
        self.synchronize()
        return (time.perf_counter() - start) / times

    def facts(self) -> dict[str, Any]:
        torch = import_torch()
        gpu, (free, whole) = "no GPU", (available_bytes(), memory_limit())
        if self.is_gpu:
            gpu, (free, whole) = torch.cuda.get_device_name(), torch.cuda.mem_get_info()
        versions = {"torch": torch.__version__, "triton": _triton_version(), "cuda": torch.version.cuda}
        return {"device": self.name, "gpu": gpu, "memory_bytes": whole, "free_bytes": free, **versions}


class Probe:
    """In a process of its own, so that the caller needs no torch: finds the device."""

    def find(self, toy: bool) -> tuple[Device, dict[str, Any]]:
        """Return the device, and facts of it; with `toy`, the CPU.

        Raises:
            UnsupportedError: there is no Triton; or no CUDA device, and the user did not choose the interpreter.
        """
        if _triton_version() is None:
            raise UnsupportedError(
                '`python -m benchmarks gpu` needs Triton, which does not import here: pip install "embedrock[gpu]".'
            )
        device = Device("cpu" if toy or os.environ.get(INTERPRETER) == "1" else "cuda")
        if device.is_gpu and not import_torch().cuda.is_available():
            raise UnsupportedError(
                "`python -m benchmarks gpu` needs a CUDA device, and torch finds none. Run it where there is a GPU and "
                "a CUDA build of torch; or, to see whether it works, at toy size and without times that mean something:"
                " `python -m benchmarks gpu --toy`."
            )
        return device, device.facts()


def _triton_version() -> str | None:
    try:
        return import_module("triton").__version__
    except ImportError:
        return None


# ---------------------------------------------------------------- workloads


@dataclass(frozen=True)
class GpuWorkload(ManyTables):
    """Tables that are trained together; `name` is "forum" or "cache"."""

    name: str = ""

    @property
    def record_bytes(self) -> int:
        """Bytes of a row's weights and Adam's state."""
        return ADAM_COLUMNS * FLOAT_BYTES * self.dim

    @cached_property
    def touched(self) -> tuple[int, ...]:
        """Rows of each table that the batches touch: its working set."""
        return tuple(np.unique(np.concatenate(ids)).size for ids in zip(*self.ids(), strict=True))

    def describe(self) -> str:
        return f"{self.name} workload, Adam: {super().describe()}, {sum(self.touched):,} in all batches"


def forum(toy: bool) -> GpuWorkload:
    """Return the workload of a forum thread: users and items, and a model that ranks pairs of them."""
    if toy:
        return _workload("forum", (400, 60), dim=8, batch=8, batches=2)
    return _workload("forum", (10_000_000, 1_000_000), dim=64, batch=8192, batches=60)


def cache(toy: bool, host_bytes: int, device_bytes: int) -> GpuWorkload:
    """Return the published cache workload, at toy size or with as many rows as the machine's free memory allows."""
    if toy:
        return _workload("cache", (300, 300), dim=16, batch=12, batches=2)
    budget = min(HOST_SHARE * host_bytes, DEVICE_SHARE * device_bytes)
    rows = int(budget / (CACHE_TABLES * CACHE_DIM * FLOAT_BYTES * ADAM_COLUMNS))
    rows = max(CACHE_BATCH, min(rows, MAX_CACHE_ROWS))
    return _workload("cache", (rows,) * CACHE_TABLES, dim=CACHE_DIM, batch=CACHE_BATCH, batches=CACHE_BATCHES)


def _workload(name: str, rows: tuple[int, ...], **sizes: int) -> GpuWorkload:
    return GpuWorkload(name=name, cardinalities=rows, bag_sizes=(1,) * len(rows), **sizes)


# ---------------------------------------------------------------- the loop, the same for all


class Batch(NamedTuple):
    """One batch: ids of each table, int64 (batch,), and labels float32 (batch,)."""

    ids: list[Any]
    labels: Any


class Parts(NamedTuple):
    """The parts in which implementations differ.

    Attributes:
        look_up: returns the rows of a batch, (batch, dim) for each table, on the device.
        optimizers: of the rows.
        layers: ours, which count moved records and can look ahead.
        takes_host_ids: `look_up` gets ids in host memory.
    """

    look_up: Callable[[Batch], list[Any]]
    optimizers: tuple[Any, ...]
    layers: tuple[Any, ...] = ()
    takes_host_ids: bool = False


Backward = Callable[[list[Any], Any], None]  # gets rows and labels


class Trainer:
    """Trains on the batches round and round: the code that users write, with any parts."""

    def __init__(self, workload: GpuWorkload, parts: Parts, device: Device) -> None:
        torch = import_torch()
        self._parts, self._device, self._count = parts, device, 0
        self._ids = device.pinned(torch.from_numpy(np.array(workload.ids())[..., 0]))  # (batches, tables, batch)
        labels = np.random.default_rng(0).integers(0, 2, (workload.batches, workload.batch))
        self._labels = device.pinned(torch.from_numpy(labels.astype(np.float32)))
        self._backward = (_model if workload.name == "forum" else _given_gradient)(workload, device)

    def run(self, steps: int, ahead: bool) -> Iterator[None]:
        """Make steps, one each time that the iterator is advanced; with `ahead`, by `ert.prefetch`."""
        batches = islice(self._batches(), steps)
        for batch in self._look_ahead(batches) if ahead else batches:
            self._step(batch)
            yield

    def stats(self, names: tuple[str, ...] = COUNTED) -> dict[str, float]:
        """Return numbers of `stats()` of all our tables together. Waits for the device."""
        stats = [layer.table.stats() for layer in self._parts.layers]
        return {name: sum(float(one[name]) for one in stats) for name in names if stats}

    def _batches(self) -> Iterator[Batch]:
        while True:
            index = self._count % len(self._ids)
            self._count += 1
            ids, labels = self._ids[index], self._labels[index].to(self._device.name, non_blocking=True)
            if not self._parts.takes_host_ids:
                ids = ids.to(self._device.name, non_blocking=True)
            yield Batch(list(ids.unbind()), labels)

    def _look_ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        import embedrock.torch as ert

        ids_of = {layer: lambda batch, k=k: batch.ids[k] for k, layer in enumerate(self._parts.layers)}
        return ert.prefetch(batches, ids_of, depth=LOOK_AHEAD)

    def _step(self, batch: Batch) -> None:
        rows = self._parts.look_up(batch)
        for optimizer in self._parts.optimizers:
            optimizer.zero_grad()
        self._backward(rows, batch.labels)
        for optimizer in self._parts.optimizers:
            optimizer.step()


def _model(workload: GpuWorkload, device: Device) -> Backward:
    """Return the forum's model: rows side by side into an MLP, binary cross-entropy, dense Adam."""
    torch = import_torch()
    widths = (len(workload.rows) * workload.dim, *HIDDEN)
    layers: list[Any] = []
    for before, after in zip(widths, HIDDEN, strict=False):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    mlp = torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN[-1], 1)).to(device.name)
    optimizer = torch.optim.Adam(mlp.parameters(), lr=LEARNING_RATE, fused=True, capturable=device.is_gpu)

    def backward(rows: list[Any], labels: Any) -> None:
        logits = mlp(torch.cat(rows, dim=-1)).squeeze(-1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return backward


def _given_gradient(workload: GpuWorkload, device: Device) -> Backward:
    """Return the same gradient for the rows of every table, so that only tables are measured."""
    torch = import_torch()
    numbers = np.random.default_rng(0).standard_normal((workload.batch, workload.dim), np.float32)
    gradient = torch.from_numpy(numbers).to(device.name)
    return lambda rows, labels: torch.autograd.backward(rows, [gradient] * len(rows))


class GpuSession:
    """In an implementation's own process: makes it, steps it, times it, with prefetching or without."""

    def __init__(self, make: Callable[[GpuWorkload, Device], Parts], workload: GpuWorkload, device: Device) -> None:
        self._device, self._batches, self._ahead = device, workload.batches, False
        self._trainer = Trainer(workload, make(workload, device), device)

    def use(self, way: str) -> None:
        """Look ahead by `ert.prefetch` from now on, or do not."""
        self._ahead = way == PREFETCH

    def warm_up(self, seconds: float) -> list[float]:
        """Work through all batches some times, or for `seconds`, once at least; return the seconds of each step."""
        times: list[float] = []
        while len(times) < WARM_UP_PASSES and sum(times) * self._batches < seconds:
            steps = self._trainer.run(self._batches, self._ahead)
            times.append(self._device.seconds(lambda steps=steps: list(steps), 1) / self._batches)
        return times

    def turn(self, steps: int, seconds: float) -> Timing:
        """Make steps, at most one for each batch, whatever their time; return their mean.

        ``host_ms``: of a step on the host, until all work is launched: close to the whole, the host is the limit.
        """
        timed, untimed = min(steps, self._batches), min(SETTLE_STEPS, self._batches)
        run = self._trainer.run(untimed + timed + LOOK_AHEAD, self._ahead)  # batches are ahead all the while
        for _ in islice(run, untimed):
            pass
        before = self._trainer.stats()
        self._device.synchronize()
        start = time.perf_counter()
        for _ in islice(run, timed):
            pass
        host_s = time.perf_counter() - start
        self._device.synchronize()
        taken_s = time.perf_counter() - start
        after = self._trainer.stats()
        for _ in run:
            pass
        counts = {name: (after[name] - before[name]) / timed for name in after}
        peak = import_torch().cuda.max_memory_allocated() if self._device.is_gpu else 0
        more = {"host_ms": host_s / timed * 1e3, "peak_device_bytes": peak, **counts, **self._trainer.stats(MEMORY)}
        return Timing.now([taken_s / timed], **more)


# ---------------------------------------------------------------- ours


def our_parts(workload: GpuWorkload, device: Device, near: float | None) -> Parts:
    """Train an `embedrock.torch.EmbeddingCollection`.

    Args:
        workload: tables and batches.
        device: to train on.
        near: share of the working set whose records the device may keep; None: those of all rows.
    """
    import embedrock as er
    import embedrock.torch as ert
    from embedrock.device.pinned import PinningWarning

    for warning in (ert.PlacementWarning, PinningWarning):  # rows that the CPU steps are not to be measured
        warnings.simplefilter("error", warning)
    layers = []
    for rows, touched in zip(workload.rows, workload.touched, strict=True):
        memory = _device_memory(rows, workload.dim, rows if near is None else round(near * touched))
        layers.append(ert.Embedding(rows, workload.dim, rule=er.Adam(), seed=len(layers), device_memory=memory))
    collection = ert.EmbeddingCollection({str(k): layer for k, layer in enumerate(layers)})
    if device.is_gpu:
        collection.to(device.name)
    else:
        ert.place(collection, device.name)
    optimizer = ert.Adam(collection, lr=LEARNING_RATE)
    for layer in layers:
        _check_placement(layer)
    names = list(map(str, range(len(layers))))
    return Parts(
        lambda batch: list(collection(dict(zip(names, batch.ids, strict=True))).values()), (optimizer,), tuple(layers)
    )


def _check_placement(layer: Any) -> None:
    """Raise `Unavailable` unless rows are where they should be: the host may have too little RAM for that."""
    from embedrock.device.dense import DenseGpuExecutor
    from embedrock.storage import device_layout as device_placing

    executor, wanted = layer.handle.executor(), device_placing.choose(layer.table.spec, layer.table.device_memory)
    if not (isinstance(executor, DenseGpuExecutor) and executor.placement == wanted):
        raise Unavailable(f"rows were to be so: {wanted}. But they are {executor!r}: is too little RAM free?")


def _device_memory(rows: int, dim: int, near_rows: int) -> int:
    if near_rows == 0:
        return 0
    import embedrock as er
    from embedrock.device import memory_for

    with er.Table(rows, dim, rule=er.Adam()) as table:  # allocates nothing yet
        return memory_for(table.spec, near_rows)


def nn_parts(workload: GpuWorkload, device: Device, on_host: bool, sparse: bool) -> Parts:
    """Train `torch.nn.Embedding`, on the device, or on the host with the rows moved."""
    torch = import_torch()
    where = "cpu" if on_host else device.name
    layers = torch.nn.ModuleList(
        torch.nn.Embedding(rows, workload.dim, sparse=sparse, device=where) for rows in workload.rows
    )
    make = torch.optim.SparseAdam if sparse else partial(torch.optim.Adam, fused=True)
    optimizer = make(list(layers.parameters()), lr=LEARNING_RATE)
    return Parts(partial(_each, layers, device.name), (optimizer,), takes_host_ids=on_host)


def _each(layers: Any, device: str, batch: Batch) -> list[Any]:
    # Each is moved by itself, before they are joined: 1.5 times as fast as moving the joined rows.
    pairs = zip(layers, batch.ids, strict=True)
    return [layer(ids).to(device, non_blocking=True) for layer, ids in pairs]


def fbgemm_parts(workload: GpuWorkload, device: Device, near: float | None) -> Parts:
    """Train FBGEMM's table-batched embedding in unified memory; its optimizer runs inside backward. One id per bag.

    Args:
        workload: tables and batches.
        device: to train on.
        near: share of the working set that its cache holds; None: no cache.
    """
    if not device.is_gpu:
        raise Unavailable("FBGEMM's tables in unified memory need a CUDA device")
    torch = import_torch()
    training, common, configs = import_fbgemm()
    places = common.EmbeddingLocation
    location = places.MANAGED if near is None else places.MANAGED_CACHING
    share = {} if near is None else {"cache_load_factor": near * sum(workload.touched) / sum(workload.rows)}
    module = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, workload.dim, location, training.ComputeDevice.CUDA) for rows in workload.rows],
        optimizer=configs.EmbOptimType.ADAM,
        learning_rate=LEARNING_RATE,
        pooling_mode=common.PoolingMode.SUM,
        device=torch.device(device.name, torch.cuda.current_device()),
        uvm_host_mapped=True,
        uvm_non_rowwise_momentum=True,
        **share,
    )
    offsets = torch.arange(workload.lookups + 1, device=device.name)
    return Parts(lambda batch: list(module(torch.cat(batch.ids), offsets).split(workload.dim, dim=1)), ())


@dataclass(frozen=True)
class GpuImplementation(Implementation):
    """One way to train; `tables` counts RAM.

    Args:
        device_tables: memory of the device at the peak, in float32 tables of rows x dim.
        near: share of the working set whose records are also on the device.
        workloads: names of those that it takes part in.
    """

    device_tables: float = 0.0
    near: float = 0.0
    workloads: tuple[str, ...] = ("forum", "cache")

    def need(self, workload: GpuWorkload) -> Footprint:
        near = self.near * sum(workload.touched) * workload.record_bytes if self.near else 0.0
        busy = ACTIVATIONS * workload.lookups * workload.dim * FLOAT_BYTES
        device = DEVICE_PROCESS_BYTES + int(self.device_tables * workload.table_bytes + near) + busy
        return Footprint(HOST_PROCESS_BYTES + int(self.tables * workload.table_bytes), device)


def _ours(name: str, label: str, near: float | None, **options: Any) -> GpuImplementation:
    make = partial(our_parts, near=near)
    return GpuImplementation(name, f"ert.Embedding, {label}", make, near=near or 0.0, **options)


def _cached(share: float) -> GpuImplementation:
    label = f"mode c: {share:.0%} of the working set in GPU memory, over pinned host memory"
    return _ours(f"ours-c{share * 100:.0f}", label, share, tables=ADAM_COLUMNS, ways=("", PREFETCH))


def _torch(name: str, label: str, on_host: bool, sparse: bool, **options: Any) -> GpuImplementation:
    make = partial(nn_parts, on_host=on_host, sparse=sparse)
    return GpuImplementation(name, f"nn.Embedding on the {label}", make, **options)


def _fbgemm(name: str, label: str, near: float | None, **options: Any) -> GpuImplementation:
    make = partial(fbgemm_parts, near=near)
    own: dict[str, Any] = {"tables": ADAM_COLUMNS, "near": near or 0.0}
    return GpuImplementation(name, f"FBGEMM, Adam, unified memory{label}", make, **own, **options)


FORUM_ONLY, CACHE_ONLY = {"workloads": ("forum",)}, {"workloads": ("cache",)}
DENSE_COLUMNS = ADAM_COLUMNS + 2  # the gradient, and a temporary
IMPLEMENTATIONS = (
    _torch("torch-sparse-gpu", "GPU, SparseAdam", False, True, device_tables=ADAM_COLUMNS),
    _ours("ours-a", "mode a: all records in GPU memory", None, device_tables=ADAM_COLUMNS),
    _ours("ours-b", "mode b: in pinned host memory, stepped in place", 0.0, tables=ADAM_COLUMNS),
    *(_cached(share) for share in SHARES),
    _torch("torch-sparse-cpu", "CPU, SparseAdam, rows moved", True, True, tables=ADAM_COLUMNS, **FORUM_ONLY),
    _torch("torch-dense-gpu", "GPU, Adam(fused=True)", False, False, device_tables=DENSE_COLUMNS, **FORUM_ONLY),
    _fbgemm("fbgemm-uvm", "", None),
    _fbgemm("fbgemm-uvm-caching100", ", 100% of the working set cached", 1.0, **CACHE_ONLY),
    _fbgemm("fbgemm-uvm-caching10", ", 10% of the working set cached", 0.1),
)
