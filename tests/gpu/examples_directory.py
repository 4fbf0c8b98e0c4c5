"""How directory.py is called, and what open ids need of others, for compile_all.py."""

from __future__ import annotations

import torch

from embedrock.kernels.gpu import directory, gate, plan
from embedrock.kernels.gpu.addresses import WORDS

N, SLOTS = 100, 1000


def example_directory() -> None:
    keys, count = torch.arange(N), torch.full((1,), N, dtype=torch.int32)
    counts, verdict = torch.zeros(directory.blocks(N), dtype=torch.int32), torch.ones(1, 4, dtype=torch.int32)
    used, ids = torch.zeros((), dtype=torch.int64), torch.zeros(SLOTS, dtype=torch.int64)
    for slots, seed in ((SLOTS, 1), (SLOTS + 1, 2**63 - 1), (1, 16)):  # what Triton compiles kernels anew for
        directory.file(used, N, directory.HashIndexTensors(torch.zeros(2 * slots, dtype=torch.int64), ids, seed))
    starts, entries = torch.arange(N + 1, dtype=torch.int32), torch.zeros(1, WORDS, dtype=torch.int64)
    rows, bounds = (keys, starts, None, count, keys), torch.zeros(3, dtype=torch.int32)
    for start in range(2):  # wherever counters begin
        directory.search(rows, entries, keys, counts, counts[start:], bounds)
        for numbers, shown in ((verdict, None), (torch.ones(()), torch.ones(()))):
            case = gate.VerdictCase(numbers, shown, 0, 1, counts, 3)
            directory.enter(rows, entries, keys, counts, counts[start:], counts, case)


def example_open_rows() -> None:
    keys, words = torch.arange(N), torch.zeros(N + 1, dtype=torch.int32)
    for fault in (None, torch.zeros(4, dtype=torch.int64)):
        plan.collect(keys, 0, keys, words, (keys, words, words, words, words), checked=(1000, fault))
