"""The plan's split of memory over tables, beside random ones: by the reads of caches that see other ids."""

from __future__ import annotations

import numpy as np

import embedrock as er
from embedrock.planner.demand import Demand, slots_of
from embedrock.planner.machine import EXAMPLE
from embedrock.tiers.curve import CurveSampler
from embedrock.tiers.placing import memory_for, most_for

TABLES, SPLITS = 26, 200
DIM, BATCH = 16, 1024
STEPS, COUNTED = 120, 40
POINTS = 12  # of the curve of a table, between which others are told along a line


def split_over_best(seed: int) -> float:
    """Return the reads of a step by the plan's split, over those of the best of `SPLITS` random ones."""
    random = np.random.default_rng((seed, 1))
    tables = {
        f"t{number}": {
            "rows": int(10 ** random.uniform(5, 6.5)),
            "dim": DIM,
            "zipf": round(float(random.uniform(0.8, 1.3)), 3),
            "ids": 2.0 ** float(random.integers(-1, 3)),
        }
        for number in range(TABLES)
    }
    found = er.plan(tables, BATCH, memory=_limit(tables), steps=STEPS, alone=True, machine=EXAMPLE)
    planned = [one.memory or most_for(one.demand.spec) for one in found.tables]  # in RAM: whole
    demands, total = [one.demand for one in found.tables], sum(one.ram_bytes for one in found.tables)
    least = [memory_for(one.spec, 2 * one.positions) for one in demands]
    splits = np.array([least + random.dirichlet(np.ones(TABLES)) * (total - sum(least)) for _ in range(SPLITS)])
    curves = [
        _missed(one, _sizes(splits[:, k], planned[k]), np.random.default_rng((seed, 2, k)))
        for k, one in enumerate(demands)
    ]
    reads = [sum(np.interp(own[k], *curves[k]) for k in range(TABLES)) for own in (planned, *splits)]
    return float(reads[0] / min(reads[1:]))


def _limit(tables: dict[str, dict[str, float]]) -> int:
    """Return a limit of RAM in which no table is whole."""
    return EXAMPLE.base_bytes + sum(int(one["rows"]) * 12 * DIM for one in tables.values()) // 4


def _sizes(memories: np.ndarray, planned: int) -> list[int]:
    return sorted({planned, *np.geomspace(memories.min(), memories.max(), POINTS).astype(int).tolist()})


def _missed(demand: Demand, memories: list[int], random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes of memory, and the rows that a table misses with them."""
    slots = [slots_of(demand.spec, memory) for memory in memories]
    sampler = CurveSampler(slots)
    for step, ids in zip(range(STEPS + COUNTED), demand.drawn(random), strict=False):
        if step == STEPS:
            sampler.forget_counts()
        sampler.see(np.unique(ids))
    curve = sampler.curve()
    return np.array(memories), np.array([curve.missed(each) for each in slots])
