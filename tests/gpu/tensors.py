"""Tensors where GPU kernels take them, and poisoned ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from embedrock.kernels.gpu import cache, gate, plan, runtime
from embedrock.kernels.gpu.addresses import TIME_WORDS, BatchTime, DeviceTables, TableEntryWords
from embedrock.kernels.gpu.rows import InitialRecord

DEVICE = "cuda" if torch.cuda.is_available() and not runtime.is_interpreted() else "cpu"
GUARD = 64  # bytes of poison before and after what a kernel may write to


def tensor(array: np.ndarray) -> torch.Tensor:
    """Return a copy on the device."""
    return torch.from_numpy(array.copy()).to(DEVICE)


def one(value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype, device=DEVICE)


def verdicts(live: Sequence[int], factor: float = 1.0, begin: int = 0) -> gate.VerdictCase:
    """Return the verdicts of tables from `begin` on, as `gate.judge` writes them."""
    made = torch.zeros(len(live), gate.LINE, dtype=torch.int32, device=DEVICE)
    made[:, gate.LIVE], made[:, gate.FACTOR] = tensor(np.array(live)), int(np.float32(factor).view(np.int32))
    return gate.VerdictCase(made, None, begin, begin + len(live), None, 0)


def table(
    form: runtime.RecordForm,
    memory: tuple[int, int],
    where: torch.Tensor | None = None,
    cache: Sequence[torch.Tensor] = (),
    is_identity: bool = False,
    first: InitialRecord | None = None,
    seed: int = 0,
) -> DeviceTables:
    """Return a table alone, with slots as keys.

    Args:
        form: of its records.
        memory: addresses of slot 0 on the device and on the host.
        where: see `addresses.CacheSlots`; None: each row has a record on the host.
        cache: the other tensors of `addresses.CacheSlots`; empty: without a cache.
        is_identity: all records are on the device.
        first: initial record; None: the host creates records.
        seed: of the initial values.
    """
    places = 0 if where is None else where.data_ptr(), *memory, int(seed) % 2**64
    state, numbers = (0, ()) if first is None else (first.state.data_ptr(), first.drawn[1:])
    a, b, c = np.array([*numbers, 0, 0, 0][:3], np.float32).view(np.int32).tolist()
    slots = (*(part.data_ptr() for part in cache), len(cache[0])) if cache else (0,) * 6
    entry = TableEntryWords(0, 2**62 if where is None else len(where), *places, state, 0, (a, b, c), -2, slots)
    entries = torch.tensor([entry.words], dtype=torch.int64, device=DEVICE)
    kind = "recorded" if where is None else "device" if is_identity else "cached" if cache else "host"
    return DeviceTables(entries, kind, None if first is None else first.drawn[0], form)


def search_of(moves: torch.Tensor, time: BatchTime) -> cache.VictimSearch:
    """Return the search for victims of a table alone, for positions (n,), with moves (n, 3)."""
    fading, size = int(np.float32(time.fading).view(np.int32)), len(moves)
    shares = torch.tensor([fading, size, 0, 0], dtype=torch.int64, device=DEVICE)
    times = torch.zeros(TIME_WORDS, dtype=torch.int32, device=DEVICE)
    times[::4] = torch.tensor([time.stamp, time.span, time.hand], dtype=torch.int32)
    return cache.VictimSearch(moves, cache.blocks(size), shares, times)


class Poisoned:
    """Memory of a recognizable pattern with guards on both sides; `inside` is what a kernel may write to."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = int(np.prod(shape)) * dtype.itemsize
        self._whole = torch.full((size + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.inside = self._whole[GUARD : GUARD + size].view(dtype).view(shape)

    def check(self, written: int) -> np.ndarray:
        """Fail where anything was written to but the first rows; return these."""
        row = self.inside[:1].numel() * self.inside.element_size()
        left, right = self._whole[:GUARD], self._whole[GUARD + written * row :]
        assert bool((left == 0xFF).all() and (right == 0xFF).all()), "a kernel wrote outside its output"
        return self.inside[:written].cpu().numpy()


def same(got: Any, expected: np.ndarray, message: str = "") -> None:
    """Compare bits."""
    got = got.cpu().numpy() if isinstance(got, torch.Tensor) else got
    assert got.dtype == expected.dtype, message
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8), message
    )


def use_blocks_of(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels of plans and caches take blocks of so many positions."""
    monkeypatch.setattr(cache, "GROUP", min(cache.GROUP, max(1, lanes // 4)))
    for module in (plan, cache):
        monkeypatch.setattr(module, "BLOCK", lanes)
        monkeypatch.setattr(module, "blocks", lambda n: -(-n // lanes))
    monkeypatch.setattr(plan, "_to_collect", plan._to_collect.__wrapped__)
