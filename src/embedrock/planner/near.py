"""A split of ``device_memory=`` over tables in RAM: the rows that each should keep in GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from embedrock.planner.demand import Demand, curve_of, lasting
from embedrock.planner.split import SplitOption, split
from embedrock.tiers.device_placing import DeviceLayout, choose, memory_for

HALVES = 10  # sizes of a cache in GPU memory that are compared, each half of the one before it
WAYS = 2  # a missed row comes over the bus, and the changed row whose place it takes goes back


class DeviceShare(NamedTuple):
    """The part of a table that is in GPU memory.

    Attributes:
        device_memory: the value of ``device_memory=``.
        placement: of the table's rows, with that.
        misses: rows of a step that are not there, so that they come over the bus.
        bus_bytes: of a step, both ways.
    """

    device_memory: int
    placement: DeviceLayout
    misses: float
    bus_bytes: float


def split_near(demands: Sequence[Demand], rows: Sequence[float], budget: int, steps: int | None) -> list[DeviceShare]:
    """Return a part of a budget of GPU memory for each of some tables in RAM, which saves most of the bus.

    Args:
        demands: of the tables.
        rows: different rows of a batch, of each.
        budget: bytes of GPU memory.
        steps: see `embedrock.planner.proposal.plan`.
    """
    ways = [_ways(one, used, budget, steps) for one, used in zip(demands, rows, strict=True)]
    options = [[SplitOption(way.placement.bytes, way.bus_bytes, way) for way in some] for some in ways]
    found = split(options, budget)
    return [one.how for one in found or [some[0] for some in options]]


def _ways(demand: Demand, used: float, budget: int, steps: int | None) -> list[DeviceShare]:
    spec, ways = demand.spec, [_near(demand, 0, DeviceLayout("host", 0, 0), used)]
    if spec.rows is None or demand.members:  # nobody knows how many rows there will be; a group has no such budget
        return ways
    sizes = sorted({min(budget, memory_for(spec, spec.rows)) >> k for k in range(HALVES)})
    placed = {size: choose(spec, size) for size in sizes if size}
    caches = [placement.near_rows for placement in placed.values() if placement.mode == "cached"]
    curve = curve_of(demand, caches, steps) if caches else None
    for size, placement in placed.items():
        if placement.mode == "device":
            ways.append(_near(demand, size, placement, 0.0))
        elif placement.mode == "cached" and curve is not None:
            room = placement.near_rows
            misses = lasting(demand, curve, room) if steps is None else curve.missed(room)
            ways.append(_near(demand, size, placement, misses))
    return ways


def _near(demand: Demand, size: int, placement: DeviceLayout, misses: float) -> DeviceShare:
    return DeviceShare(size, placement, misses, WAYS * misses * demand.spec.record_bytes)
