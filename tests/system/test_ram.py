"""RAM: of the machine, of this process's cgroups, and of this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embedrock.system.ram import available_bytes, memory_limit, peak_rss_bytes, rss_bytes

GIB = 1 << 30


def fake_root(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 8388608 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
CGROUPS = {
    "no cgroup": ({}, 8),
    "v2, no limit": (
        {"proc/self/cgroup": "0::/a", f"{V2}/a/memory.max": "max", f"{V2}/a/memory.current": "1"},
        8,
    ),
    "v2, limit of a parent": (
        {
            "proc/self/cgroup": "0::/a/b",
            f"{V2}/a/memory.max": str(3 * GIB),
            f"{V2}/a/memory.current": str(GIB),
        },
        2,
    ),
    "v2, page cache can go": (
        {
            "proc/self/cgroup": "0::/",
            f"{V2}/memory.max": str(5 * GIB),
            f"{V2}/memory.current": str(4 * GIB),
            f"{V2}/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
        },
        3,
    ),
    "v1": (
        {
            "proc/self/cgroup": "9:name=systemd:/x\n4:cpu,memory:/x/y\n0::/",
            f"{V1}/x/y/memory.limit_in_bytes": str(2**63 - 4096),
            f"{V1}/x/y/memory.usage_in_bytes": "5",
            f"{V1}/memory.limit_in_bytes": str(6 * GIB),
            f"{V1}/memory.usage_in_bytes": str(2 * GIB),
        },
        4,
    ),
    "over its limit": (
        {"proc/self/cgroup": "0::/", f"{V2}/memory.max": "5", f"{V2}/memory.current": "9"},
        0,
    ),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_available_ram_respects_every_cgroup(tmp_path, name):
    files, gigabytes = CGROUPS[name]
    assert available_bytes(fake_root(tmp_path, files)) == gigabytes * GIB


LIMITS = {"v2, limit of a parent": 3, "v2, page cache can go": 5, "v1": 6}  # GiB


@pytest.mark.parametrize("name", LIMITS)
def test_the_ram_of_a_process_is_no_more_than_any_of_its_cgroups_allows(tmp_path, monkeypatch, name):
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 8 * GIB // 4096}.__getitem__)
    assert memory_limit(tmp_path) == 8 * GIB
    assert memory_limit(fake_root(tmp_path, CGROUPS[name][0])) == LIMITS[name] * GIB


def test_available_ram_without_proc(tmp_path):
    assert available_bytes(tmp_path) > 0


def test_ram_of_this_process():
    before_bytes = rss_bytes()
    block = np.ones(50_000_000 // 8)
    assert 40_000_000 < rss_bytes() - before_bytes < 100_000_000
    assert peak_rss_bytes() >= block.nbytes
