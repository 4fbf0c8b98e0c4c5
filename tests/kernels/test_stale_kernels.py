"""The purge of stale kernels, on a made-up folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stale_kernels import purge_stale_kernels


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A folder with two kernel files of time 100 and one cached function of time 200."""
    (tmp_path / "cpu" / "__pycache__").mkdir(parents=True)
    times = {
        "cpu/a.py": 100,
        "cpu/b.py": 100,
        "cpu/__pycache__/a.f-1.nbi": 200,
        "cpu/__pycache__/a.f-1.nbc": 200,
    }
    for name, time in times.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time, time))
    return tmp_path


def test_fresh_cache_stays(kernels: Path):
    assert purge_stale_kernels(kernels) == []
    assert len(list(kernels.rglob("*.nb*"))) == 2


def test_an_edit_of_any_kernel_file_empties_the_cache(kernels: Path):
    os.utime(kernels / "cpu" / "b.py", (201, 201))
    assert len(purge_stale_kernels(kernels)) == 2
    assert sorted(path.name for path in kernels.rglob("*") if path.is_file()) == ["a.py", "b.py"]


def test_no_cache_is_fine(tmp_path: Path):
    assert purge_stale_kernels(tmp_path) == []
