"""Which rows to keep in GPU memory: a split of ``device_memory=`` over tables in RAM, and what a step takes then.

A step of tables on a GPU takes what the host needs to ask for it, or what the GPU needs, whichever is more:

    host      FIRST_S, and NEXT_S for each further table: `tests/gpu/host_cost.py`, with a driver that launches nothing
    moving    bytes written and read in order, by the rate of copies there: rows as they are read and their gradients,
              twice each, and ids as they are sorted
    random    records read and written, and rows gathered, by the rate of random rows there
    bus       ids, and records that come and go, by the rates from pinned RAM and to it

**No GPU has confirmed it yet.**
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from embedrock.planner.demand import Demand, curve_of, lasting
from embedrock.planner.split import Option, split
from embedrock.tiers.device_placing import DevicePlacement, choose, memory_for

FIRST_S, NEXT_S = 467e-6, 85e-6  # of the host: 467 microseconds for a table, 1234 for ten together (docs/gpu.md)
SORTED_BYTES = 2 * 12 * 8  # of each id, which is sorted with its position in eight passes
PASSES = 4  # of the rows of a batch: written as they are read, read by the model; its gradients likewise
ID_BYTES, RANDOM_BYTES = 8, 256  # of an id; of the rows whose rate was measured
HALVES = 10  # sizes of a cache in GPU memory that are looked at, each half of the one before it
WAYS = 2  # a row that comes near, and the one that it takes the place of, which has changed


class Near(NamedTuple):
    """What a table has in GPU memory.

    Attributes:
        device_memory: what to pass as ``device_memory=``.
        placement: what is done with that.
        misses: rows of a step that are not there, so that they come over the bus.
        bus_bytes: of a step, both ways.
    """

    device_memory: int
    placement: DevicePlacement
    misses: float
    bus_bytes: float


class Gpu(NamedTuple):
    """What a GPU can do.

    Attributes:
        name: as its maker calls it.
        memory_bytes: that it has.
        copy: bytes/s, from its memory to its memory.
        rows: rows/s of 256 bytes gathered at random there.
        to_device, to_host: bytes/s from pinned RAM and to it.
    """

    name: str
    memory_bytes: int
    copy: float
    rows: float
    to_device: float
    to_host: float


class GpuStep(NamedTuple):
    """Seconds of a step of tables on a GPU.

    Attributes:
        host: in which the host asks for it.
        moving, random: of the GPU.
        bus: in which what is needed crosses the bus.
    """

    host: float
    moving: float
    random: float
    bus: float

    @property
    def total(self) -> float:
        """What a step takes."""
        return max(self.host, self.moving + self.random + self.bus)


def gpu_step(tables: Sequence[tuple[Demand, float, Near]], gpu: Gpu) -> GpuStep:
    """Return what a step of tables takes.

    Args:
        tables: each with the different rows of a batch, and what it has in GPU memory.
        gpu: that has them.

    Example:
        >>> gpu_step([], Gpu("G", 1 << 34, 1e12, 1e9, 1e10, 1e10)).total
        0.0
    """
    host = FIRST_S + NEXT_S * (len(tables) - 1) if tables else 0.0
    moved = random = to_device = to_host = 0.0
    for demand, rows, near in tables:
        values = demand.positions * demand.spec.dim * 4
        moved += PASSES * values + demand.positions * SORTED_BYTES
        random += values + 2 * rows * demand.spec.record_bytes
        to_device += demand.positions * ID_BYTES + near.bus_bytes / WAYS
        to_host += near.bus_bytes / WAYS
    bus = to_device / gpu.to_device + to_host / gpu.to_host
    return GpuStep(host, moved / (2 * gpu.copy), random / (RANDOM_BYTES * gpu.rows), bus)


def split_near(demands: Sequence[Demand], rows: Sequence[float], budget: int, steps: int | None) -> list[Near]:
    """Return what each of some tables in RAM should have of so much GPU memory: what saves most of the bus.

    Args:
        demands: of the tables.
        rows: different ones of a batch, of each.
        budget: bytes of GPU memory.
        steps: see `embedrock.planner.proposal.plan`.
    """
    ways = [_ways(one, used, budget, steps) for one, used in zip(demands, rows, strict=True)]
    options = [[Option(way.placement.bytes, way.bus_bytes, way) for way in some] for some in ways]
    found = split(options, budget)
    return [one.how for one in found or [some[0] for some in options]]


def _ways(demand: Demand, used: float, budget: int, steps: int | None) -> list[Near]:
    spec = demand.spec
    none = _near(demand, 0, DevicePlacement("host", 0, 0), used)
    if spec.rows is None or demand.members:  # nobody knows how many there will be; a group has no such budget
        return [none]
    sizes = sorted({min(budget, memory_for(spec, spec.rows)) >> k for k in range(HALVES)})
    placed = [(size, choose(spec, size)) for size in sizes if size]
    caches = [placement.near_rows for _, placement in placed if placement.mode == "cached"]
    curve = curve_of(demand, caches, steps) if caches else None
    ways = [none]
    for size, placement in placed:
        if placement.mode == "device":
            ways.append(_near(demand, size, placement, 0.0))
        elif placement.mode == "cached" and curve is not None:
            room = placement.near_rows
            ways.append(
                _near(demand, size, placement, lasting(demand, curve, room) if steps is None else curve.missed(room))
            )
    return ways


def _near(demand: Demand, size: int, placement: DevicePlacement, misses: float) -> Near:
    return Near(size, placement, misses, WAYS * misses * demand.spec.record_bytes)
