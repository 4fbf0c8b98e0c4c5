"""How directory.py is called, and what open ids need of others, for compile_all.py."""

from __future__ import annotations

import torch

from embedrock.kernels.gpu import directory, plan

N, SLOTS = 100, 1000


def example_directory() -> None:
    keys, count = torch.arange(N), torch.full((1,), N, dtype=torch.int32)
    counts, verdict = torch.zeros(directory.blocks(N), dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    used, ids = torch.zeros(2, dtype=torch.int64), torch.zeros(SLOTS, dtype=torch.int64)
    for slots, seed in ((SLOTS, 1), (SLOTS + 1, 2**63 - 1), (1, 16)):  # what Triton compiles kernels anew for
        entries = directory.HashIndexTensors(torch.zeros(2 * slots, dtype=torch.int64), ids, seed)
        for known in (None, keys):
            directory.search(keys, count, known, entries, keys, counts)
        for current in range(2):
            directory.enter(keys, count, keys, counts, verdict, used, current, entries)
            directory.file(used, current, N, entries)


def example_open_rows() -> None:
    keys, counts = torch.arange(N), torch.zeros(plan.blocks(N), dtype=torch.int32)
    plan.mark(keys, None, counts, None, counts, 7)
    for limit in (1, 16, 1000):
        plan.mark(keys, limit, counts, torch.zeros(4, dtype=torch.int64), counts, 7)
