"""``python -m embedrock.device.probe``: what GPUs and the network between processes do, for `embedrock machine`.

A program of its own, as whoever measures a machine need not import PyTorch. It prints JSON: ``gpus``, and ``network``
between two processes on this machine by gloo, None where PyTorch has no gloo.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NBYTES, ROWS, ROW_NUMBERS = 256 << 20, 1 << 20, 64  # of memory that is copied; rows of 256 bytes that are gathered
TIMES = 5  # the best of them counts
MESSAGE, SMALL, ROUNDS = 8 << 20, 8, 50  # bytes
LIMIT = timedelta(seconds=30)


def gpu_facts(device: torch.device, synchronize: Callable[[], Any], nbytes: int = NBYTES) -> dict[str, float]:
    """Return what a device can do: bytes/s copied there, rows/s gathered, bytes/s from pinned RAM and to it."""
    source = torch.ones(nbytes // 4, device=device)
    target, pinned = torch.empty_like(source), torch.empty(nbytes // 4, pin_memory=device.type == "cuda")
    table = torch.ones(max(1, nbytes // (4 * ROW_NUMBERS)), ROW_NUMBERS, device=device)
    ids = torch.randint(len(table), (min(ROWS, len(table)),), device=device)

    def best(work: Callable[[], Any]) -> float:
        taken = []
        for _ in range(TIMES):
            synchronize()
            start = time.perf_counter()
            work()
            synchronize()
            taken.append(time.perf_counter() - start)
        return min(taken)

    return {
        "copy": nbytes / best(lambda: target.copy_(source)),
        "rows": len(ids) / best(lambda: table.index_select(0, ids)),
        "to_device": nbytes / best(lambda: target.copy_(pinned, non_blocking=True)),
        "to_host": nbytes / best(lambda: pinned.copy_(target, non_blocking=True)),
    }


def gpus() -> list[dict[str, Any]]:
    """Return what each GPU can do."""
    found = []
    for number in range(torch.cuda.device_count()):
        with torch.cuda.device(number):
            about = torch.cuda.get_device_properties(number)
            own = gpu_facts(torch.device("cuda", number), torch.cuda.synchronize)
        found.append({"name": about.name, "memory_bytes": about.total_memory, **own})
    return found


def network() -> dict[str, Any] | None:
    """Return what messages between two processes take."""
    if not dist.is_available() or not dist.is_gloo_available():
        return None
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "embedrock.device.probe", str(Path(folder, "met"))]
        other = subprocess.Popen([*words, "1"])
        try:
            return meet(words[-1], 0)
        finally:
            other.wait()


def meet(path: str, rank: int) -> dict[str, Any]:
    """Exchange messages with the other process that has the same file, and return what that took."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=LIMIT)
    try:
        small, large = (_seconds(nbytes, rounds) for nbytes, rounds in ((SMALL, ROUNDS), (MESSAGE, TIMES)))
    finally:
        dist.destroy_process_group()
    return {"latency": small, "rate": MESSAGE / max(large - small, 1e-9), "how": "gloo"}


def _seconds(nbytes: int, rounds: int) -> float:
    """Return the median seconds in which both have sent the other one so many bytes."""
    out = torch.ones(2 * nbytes, dtype=torch.uint8)
    into, taken = torch.empty_like(out), []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(into, out)
        taken.append(time.perf_counter() - start)
    return sorted(taken)[rounds // 2]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        meet(sys.argv[1], int(sys.argv[2]))
    else:
        sys.stdout.write(json.dumps({"gpus": gpus(), "network": network()}))
