"""What the machine gives: copies over the bus, the GPU's own copies, and our kernels beside them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple

from embedrock.bench.gpu.device import Device
from embedrock.bench.gpu.workloads import FLOAT_BYTES
from embedrock.bench.harness.contenders import LEARNING_RATE, import_torch

RATE = 1e9  # rates are in GB/s
RECORD_BYTES = (768, 1536)  # of Adam's rows of 64 and of 128
KERNEL_DIM = 64  # whose records have 768 bytes
GOES = 4  # with different rows
KINDS = 2  # copies of one kind, and of the other


class Sizes(NamedTuple):
    """How much is moved.

    Args:
        copied_bytes: of each copy.
        table_bytes: of the records, of which some are touched.
        bus_rows, kernel_rows: different rows that are touched in host memory, and in the GPU's.
        times: goes in a round.
        rounds: of which the median counts.
    """

    copied_bytes: int
    table_bytes: int
    bus_rows: int
    kernel_rows: int
    times: int
    rounds: int


REAL = Sizes(1 << 29, 1 << 32, 262_144, 262_144, 10, 7)
TOY = Sizes(1 << 12, 1 << 16, 8, 8, 1, 1)


class Limits:
    """In a process of its own: measures. All rates are in GB/s."""

    def __init__(self, device: Device) -> None:
        self._device, self._sizes = device, REAL if device.is_gpu else TOY
        self._torch = import_torch()

    def bus(self) -> dict[str, float]:
        """Return what the bus gives to copies: into the device, out of it, and each way when both go at once."""
        torch, device, count = self._torch, self._device, self._sizes.copied_bytes // FLOAT_BYTES
        host = [device.pinned_floats(count) for _ in range(KINDS)]
        near = [torch.zeros(count, device=device.name) for _ in range(KINDS)]
        streams = [device.new_stream() for _ in range(KINDS)]

        def into() -> None:
            with streams[0]():
                near[0].copy_(host[0], non_blocking=True)

        def out() -> None:
            with streams[1]():
                host[1].copy_(near[1], non_blocking=True)

        def both() -> None:
            into()
            out()

        moved = self._sizes.copied_bytes
        ways = {"copies_in": into, "copies_out": out, "copies_both_ways": both}
        return {name: self._rate(moved, work) for name, work in ways.items()}

    def in_place(self) -> dict[str, float]:
        """Return what the bus gives to a kernel on sorted records in host memory: read; read and written, each way."""
        return {name: rate for record_bytes in RECORD_BYTES for name, rate in self._touched(record_bytes).items()}

    def _touched(self, record_bytes: int) -> dict[str, float]:
        from embedrock.bench.gpu.kernels import touch

        records = self._device.pinned_floats(self._sizes.table_bytes // record_bytes, record_bytes // FLOAT_BYTES)
        rows = cycle(self._rows_of_several_goes(len(records), self._sizes.bus_rows))
        moved = self._sizes.bus_rows * record_bytes
        return {
            f"kernel_reads_{record_bytes}": self._kernel_rate(moved, lambda: touch(records, next(rows), writes=False)),
            f"kernel_both_ways_{record_bytes}": self._kernel_rate(
                moved, lambda: touch(records, next(rows), writes=True)
            ),
        }

    def near(self) -> dict[str, float]:
        """Return the rates of the GPU's own copies and of our kernels there, what is read and what is written added."""
        torch, count = self._torch, self._sizes.copied_bytes // FLOAT_BYTES
        source, target = (torch.zeros(count, device=self._device.name) for _ in range(KINDS))
        copies = self._rate(2 * self._sizes.copied_bytes, lambda: target.copy_(source))
        return {"copies": copies, **self._kernels()}

    def _kernels(self) -> dict[str, float]:
        import embedrock as er
        from embedrock.kernels.gpu import rows as kernels
        from embedrock.kernels.gpu.homes import Homes, RecordMemory
        from embedrock.kernels.gpu.runtime import Form

        torch, where, n = self._torch, self._device.name, self._sizes.kernel_rows
        with er.Table(n, KERNEL_DIM, rule=er.Adam(lr=LEARNING_RATE)) as table:
            layout, numbers = table.spec.layout, er.Adam(lr=LEARNING_RATE).numbers(1)
        form = Form(KERNEL_DIM, "float32", layout.record_bytes, layout.state_start, layout.state_width)
        record_floats = layout.record_bytes // FLOAT_BYTES
        records = torch.zeros(self._sizes.table_bytes // layout.record_bytes, record_floats, device=where)
        ids = [rows.long() for rows in self._rows_of_several_goes(len(records), n)]
        homes = Homes(None, None, False, len(records), RecordMemory(0, records.data_ptr(), layout.record_bytes))
        goes = cycle(ids)
        values, out = (torch.ones(n, KERNEL_DIM, device=where) for _ in range(2))
        live, count = (
            torch.ones(1, dtype=torch.int32, device=where),
            torch.full((1,), n, dtype=torch.int32, device=where),
        )
        verdict = torch.cat([live, torch.ones(1, device=where).view(torch.int32), live, live])
        weight_bytes = KERNEL_DIM * FLOAT_BYTES

        def gather() -> None:
            kernels.gather(next(goes), values, count, homes, form, out)  # no key is negative: nothing is fresh

        def step() -> None:
            keys = next(goes)
            kernels.step(keys, keys, values, verdict, None, count, homes, None, 0, 1, numbers, form)

        # A lookup reads weights and writes them elsewhere; a step reads gradients, and reads and writes records.
        moved = {"gather": n * 2 * weight_bytes, "step": n * (weight_bytes + 2 * layout.record_bytes)}
        return {name: self._kernel_rate(moved[name], work) for name, work in (("gather", gather), ("step", step))}

    def _rows_of_several_goes(self, rows: int, count: int) -> list[Any]:
        """Return different rows in order, for one go after another, so that none finds its rows in the GPU's cache."""
        generator = self._torch.Generator().manual_seed(0)
        drawn = (self._torch.randperm(rows, generator=generator)[:count].sort().values for _ in range(GOES))
        return [chosen.int().to(self._device.name) for chosen in drawn]

    def _kernel_rate(self, moved_bytes: int, work: Callable[[], object]) -> float:
        work()  # compiles
        times = self._sizes.times
        return self._rate(moved_bytes * times, self._device.repeated(work, times))

    def _rate(self, moved_bytes: int, work: Callable[[], object]) -> float:
        self._device.seconds(work, 2)  # wakes what sleeps
        seconds = median(self._device.seconds(work, self._sizes.times) for _ in range(self._sizes.rounds))
        return moved_bytes / seconds / RATE
