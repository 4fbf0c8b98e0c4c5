"""Who takes part in ``bench gpu``: ways to look rows up and to step them, below one and the same loop.

Nothing heavier than NumPy is imported before a contender is made in its own process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from embedrock.bench.gpu.device import Device
from embedrock.bench.gpu.workloads import ADAM_COLUMNS, GpuWorkload
from embedrock.bench.harness.contenders import (
    LEARNING_RATE,
    Contender,
    Footprint,
    Unavailable,
    import_fbgemm,
    import_torch,
)

LOOK_AHEAD = 2  # batches
PREFETCH = "-prefetch"  # after a contender's name
HIDDEN = (128, 64)  # units of the model that follows the rows
SHARES = (1.0, 0.8, 0.2, 0.1)  # of the working set that mode c keeps near
# Of a contender's process, beside its tables: libraries and CUDA's own memory; and rows, gradients and their sums on
# the device, so many float32 numbers for each one looked up.
HOST_PROCESS_BYTES, DEVICE_PROCESS_BYTES, ACTIVATIONS = 3 << 30, 1 << 30, 12
COUNTED = ("hits", "misses", "fetched", "evictions", "written_back", "bypassed")


class Batch(NamedTuple):
    """One batch: ids of each table, int64 (batch,), and labels float32 (batch,)."""

    ids: list[Any]
    labels: Any


class Parts(NamedTuple):
    """What differs between contenders.

    Attributes:
        look_up: returns the rows of a batch, (batch, dim) for each table, on the device.
        optimizers: of the rows.
        layers: ours, which count what moves and can look ahead.
        takes_host_ids: ids are given to `look_up` in host memory.
    """

    look_up: Callable[[Batch], list[Any]]
    optimizers: tuple[Any, ...]
    layers: tuple[Any, ...] = ()
    takes_host_ids: bool = False


class Traffic(NamedTuple):
    """Bytes of rows that a step moves over the bus: to the device, and from it."""

    inward: float
    outward: float


Counts = Mapping[str, float]  # of `COUNTED`, in a step


@dataclass(frozen=True)
class GpuContender(Contender):
    """One way to train.

    Args:
        make: called in the contender's own process; must be importable by name.
        host_tables, device_tables: memory at the peak, in float32 tables of rows x dim.
        near: share of the working set whose records are kept on the device besides.
        looks_ahead: it is measured with `prefetch` too.
        traffic: what a step moves over the bus; None: nobody knows.
        workloads: names of those that it takes part in.
        package: that it needs, besides torch and triton.
    """

    make: Callable[[GpuWorkload, Device], Parts]
    host_tables: float = 0.0
    device_tables: float = 0.0
    near: float = 0.0
    looks_ahead: bool = False
    traffic: Callable[[GpuWorkload, Counts], Traffic] | None = None
    workloads: tuple[str, ...] = ("forum", "cache")
    package: str | None = None

    @property
    def ways(self) -> Mapping[str, bool]:
        """Without prefetching, and with it."""
        return {"": False, PREFETCH: True} if self.looks_ahead else {"": False}

    def need(self, workload: GpuWorkload) -> Footprint:
        """Return the RAM and the memory of the device that its process may come to hold."""
        host = HOST_PROCESS_BYTES + int(self.host_tables * workload.table_bytes)
        near = self.near * sum(workload.touched) * workload.record_bytes if self.near else 0.0
        busy = ACTIVATIONS * workload.lookups * workload.weight_bytes
        return Footprint(host, DEVICE_PROCESS_BYTES + int(self.device_tables * workload.table_bytes + near) + busy)


# ---------------------------------------------------------------- the loop, the same for all


class Trainer:
    """Trains on the batches round and round: what users write, with whatever parts it is given."""

    def __init__(self, workload: GpuWorkload, parts: Parts, device: Device) -> None:
        torch = import_torch()
        self._parts, self._device, self._count = parts, device, 0
        self._ids = device.pinned(torch.from_numpy(workload.ids()))
        labels = np.random.default_rng(len(workload.tables)).integers(0, 2, (workload.batches, workload.batch))
        self._labels = device.pinned(torch.from_numpy(labels.astype(np.float32)))
        self._ending = _Model(workload, device) if workload.has_model else _GivenGradient(workload, device)

    def run(self, steps: int, ahead: bool) -> Iterator[None]:
        """Make steps, one each time that the iterator is advanced; with `ahead`, by `ert.prefetch`."""
        batches = islice(self._batches(), steps)
        for batch in self._look_ahead(batches) if ahead else batches:
            self._step(batch)
            yield

    def counts(self) -> dict[str, float]:
        """Return what our tables have counted so far, all together. Waits for the device."""
        stats = [layer.table.stats() for layer in self._parts.layers]
        return {name: sum(float(one[f"device_{name}"]) for one in stats) for name in COUNTED if stats}

    def near(self) -> dict[str, float]:
        """Return the device's memory that our tables take, and how many records it has room for."""
        stats = [layer.table.stats() for layer in self._parts.layers]
        return {f"near_{name}": sum(float(one[f"device_{name}"]) for one in stats) for name in ("bytes", "slots")}

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

        ids_of = {layer: partial(_ids_of_table, k) for k, layer in enumerate(self._parts.layers)}
        return ert.prefetch(batches, ids_of, depth=LOOK_AHEAD)

    def _step(self, batch: Batch) -> None:
        rows = self._parts.look_up(batch)
        for optimizer in self._parts.optimizers:
            optimizer.zero_grad()
        self._ending.backward(rows, batch.labels)
        for optimizer in self._parts.optimizers:
            optimizer.step()


def _ids_of_table(index: int, batch: Batch) -> Any:
    return batch.ids[index]


class _Model:
    """The forum's model: rows side by side into an MLP, binary cross-entropy, dense Adam."""

    def __init__(self, workload: GpuWorkload, device: Device) -> None:
        torch = import_torch()
        widths = (len(workload.tables) * workload.dim, *HIDDEN)
        layers: list[Any] = []
        for before, after in zip(widths, HIDDEN, strict=False):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        self._mlp = torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN[-1], 1)).to(device.name)
        self._optimizer = torch.optim.Adam(self._mlp.parameters(), lr=LEARNING_RATE, fused=True)
        self._torch = torch

    def backward(self, rows: list[Any], labels: Any) -> None:
        logits = self._mlp(self._torch.cat(rows, dim=-1)).squeeze(-1)
        loss = self._torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


class _GivenGradient:
    """No model: the same gradient for the rows of every table, as where tables alone are measured."""

    def __init__(self, workload: GpuWorkload, device: Device) -> None:
        self._torch = import_torch()
        gradient = np.random.default_rng(0).standard_normal((workload.batch, workload.dim), np.float32)
        self._gradient = self._torch.from_numpy(gradient).to(device.name)

    def backward(self, rows: list[Any], labels: Any) -> None:
        self._torch.autograd.backward(rows, [self._gradient] * len(rows))


# ---------------------------------------------------------------- ours


def our_parts(workload: GpuWorkload, device: Device, near: float | None) -> Parts:
    """Train an `embedrock.torch.EmbeddingCollection`.

    Args:
        workload: what it works on.
        device: what it works with.
        near: share of the working set whose records the device may keep; None: those of all rows.
    """
    import embedrock as er
    import embedrock.torch as ert
    from embedrock.device.pinned import PinningWarning

    for warning in (ert.PlacementWarning, PinningWarning):  # rows that the CPU would step are not what is measured
        warnings.simplefilter("error", warning)
    layers = []
    for table, touched in zip(workload.tables, workload.touched, strict=True):
        rows = table.rows if near is None else round(near * touched)
        memory = _device_memory(table.rows, table.dim, rows)
        layers.append(ert.Embedding(table.rows, table.dim, rule=er.Adam(), seed=table.seed, device_memory=memory))
    collection = ert.EmbeddingCollection({str(k): layer for k, layer in enumerate(layers)})
    if device.is_gpu:
        collection.to(device.name)
    else:
        ert.place(collection, device.name)
    optimizer = ert.Adam(collection, lr=LEARNING_RATE)
    for layer in layers:
        _check_placement(layer)
    return Parts(partial(_together, collection), (optimizer,), tuple(layers))


def _check_placement(layer: Any) -> None:
    """Raise `Unavailable` unless rows are where they are to be measured: the host may have too little RAM for that."""
    from embedrock.device.direct import DirectSide
    from embedrock.tiers import device_placing

    side, wanted = layer.handle.side(), device_placing.choose(layer.table.spec, layer.table.device_memory)
    if not (isinstance(side, DirectSide) and side.placement == wanted):
        raise Unavailable(f"rows were to be so: {wanted}. But they are {side!r}: is too little RAM free?")


def _device_memory(rows: int, dim: int, near_rows: int) -> int:
    if near_rows == 0:
        return 0
    import embedrock as er
    from embedrock.device import memory_for

    with er.Table(rows, dim, rule=er.Adam()) as table:  # allocates nothing yet
        return memory_for(table.spec, near_rows)


def _together(collection: Any, batch: Batch) -> list[Any]:
    return list(collection({str(k): ids for k, ids in enumerate(batch.ids)}).values())


def _each(layers: Any, batch: Batch) -> list[Any]:
    return [layer(ids) for layer, ids in zip(layers, batch.ids, strict=True)]


# ---------------------------------------------------------------- others


def nn_parts(workload: GpuWorkload, device: Device, on_host: bool, sparse: bool) -> Parts:
    """Train `torch.nn.Embedding`, on the device, or on the host with the rows moved."""
    torch = import_torch()
    where = "cpu" if on_host else device.name
    layers = torch.nn.ModuleList(
        torch.nn.Embedding(table.rows, table.dim, sparse=sparse, device=where) for table in workload.tables
    )
    parameters = list(layers.parameters())
    make = torch.optim.SparseAdam if sparse else partial(torch.optim.Adam, fused=True)
    look_up = partial(_each_moved, layers, device.name) if on_host else partial(_each, layers)
    return Parts(look_up, (make(parameters, lr=LEARNING_RATE),), takes_host_ids=on_host)


def _each_moved(layers: Any, device: str, batch: Batch) -> list[Any]:
    # Each by itself, before they are joined: 1.5 times as fast as moving what was joined (shared/evidence.md).
    return [rows.to(device, non_blocking=True) for rows in _each(layers, batch)]


def fbgemm_parts(workload: GpuWorkload, device: Device, near: float | None) -> Parts:
    """Train FBGEMM's table-batched embedding in unified memory; its optimizer runs inside backward. One id per bag.

    Args:
        workload: what it works on.
        device: what it works with.
        near: share of the working set that its cache holds; None: no cache.
    """
    if not device.is_gpu:
        raise Unavailable("FBGEMM's tables in unified memory need a CUDA device")
    torch = import_torch()
    training, common, configs = import_fbgemm()
    places = common.EmbeddingLocation
    location = places.MANAGED if near is None else places.MANAGED_CACHING
    share = {} if near is None else {"cache_load_factor": near * sum(workload.touched) / workload.rows}
    module = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(table.rows, table.dim, location, training.ComputeDevice.CUDA) for table in workload.tables],
        optimizer=configs.EmbOptimType.ADAM,
        learning_rate=LEARNING_RATE,
        pooling_mode=common.PoolingMode.SUM,
        device=torch.device(device.name, torch.cuda.current_device()),
        uvm_host_mapped=True,
        uvm_non_rowwise_momentum=True,
        **share,
    )
    offsets = torch.arange(workload.lookups + 1, device=device.name)
    return Parts(partial(_bags, module, offsets, workload.dim), ())


def _bags(module: Any, offsets: Any, dim: int, batch: Batch) -> list[Any]:
    return list(module(import_torch().cat(batch.ids), offsets).split(dim, dim=1))


# ---------------------------------------------------------------- what moves over the bus


def nothing_moves(workload: GpuWorkload, counts: Counts) -> Traffic:
    """All is on the device."""
    return Traffic(0.0, 0.0)


def rows_move(workload: GpuWorkload, counts: Counts) -> Traffic:
    """Each row looked up goes to the device, repeats included, and its gradient comes back."""
    moved = workload.lookups * workload.weight_bytes
    return Traffic(moved, moved)


def records_move(workload: GpuWorkload, counts: Counts) -> Traffic:
    """Each unique row's weights are read for the lookup, and its record is read and written by the step."""
    return _in_place(workload, workload.unique)


def misses_move(workload: GpuWorkload, counts: Counts) -> Traffic:
    """Records are fetched and written back; those of rows that found no slot are worked on in place."""
    inward, outward = _in_place(workload, counts["bypassed"])
    fetched, written_back = (counts[name] * workload.record_bytes for name in ("fetched", "written_back"))
    return Traffic(inward + fetched, outward + written_back)


def _in_place(workload: GpuWorkload, rows: float) -> Traffic:
    return Traffic(rows * (workload.weight_bytes + workload.record_bytes), rows * workload.record_bytes)


# ---------------------------------------------------------------- the table


def _cached(share: float) -> GpuContender:
    return GpuContender(
        f"ours-c{share:.0%}".removesuffix("%"),
        f"ert.Embedding, mode c: {share:.0%} of the working set in GPU memory, over pinned host memory",
        partial(our_parts, near=share),
        host_tables=ADAM_COLUMNS,
        near=share,
        looks_ahead=True,
        traffic=misses_move,
    )


def _fbgemm(name: str, label: str, near: float | None, workloads: tuple[str, ...]) -> GpuContender:
    make = partial(fbgemm_parts, near=near)
    return GpuContender(
        name,
        f"FBGEMM, Adam, {label}",
        make,
        host_tables=ADAM_COLUMNS,
        near=near or 0.0,
        workloads=workloads,
        package="fbgemm_gpu",
    )


SPARSE = GpuContender(
    "torch-sparse-gpu",
    "nn.Embedding on the GPU, SparseAdam",
    partial(nn_parts, on_host=False, sparse=True),
    device_tables=ADAM_COLUMNS,
    traffic=nothing_moves,
)
OURS_A = GpuContender(
    "ours-a",
    "ert.Embedding, mode a: all records in GPU memory",
    partial(our_parts, near=None),
    device_tables=ADAM_COLUMNS,
    traffic=nothing_moves,
)
CONTENDERS = (
    SPARSE,
    OURS_A,
    GpuContender(
        "ours-b",
        "ert.Embedding, mode b: records in pinned host memory, stepped in place",
        partial(our_parts, near=0.0),
        host_tables=ADAM_COLUMNS,
        traffic=records_move,
    ),
    *(_cached(share) for share in SHARES),
    GpuContender(
        "torch-sparse-cpu",
        "nn.Embedding on the CPU, SparseAdam, rows moved",
        partial(nn_parts, on_host=True, sparse=True),
        host_tables=ADAM_COLUMNS,
        traffic=rows_move,
        workloads=("forum",),
    ),
    GpuContender(
        "torch-dense-gpu",
        "nn.Embedding on the GPU, Adam(fused=True)",
        partial(nn_parts, on_host=False, sparse=False),
        device_tables=ADAM_COLUMNS + 2,  # the gradient, and a temporary
        traffic=nothing_moves,
        workloads=("forum",),
    ),
    _fbgemm("fbgemm-uvm", "unified memory", None, ("forum", "cache")),
    _fbgemm("fbgemm-uvm-caching100", "unified memory, 100% of the working set cached", 1.0, ("cache",)),
    _fbgemm("fbgemm-uvm-caching10", "unified memory, 10% of the working set cached", 0.1, ("forum", "cache")),
)
# Of the forum workload with rows so many times as wide: what the thread found twice as slow.
WIDER = 4
WIDE = "ours-c10"
