"""Every example runs: small in each run of the tests, as it is in the slow ones. Each prints a number that is good."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MOST_LINES = 120


class Example(NamedTuple):
    """An example under test.

    Attributes:
        needs: packages that it imports; the test is skipped without one.
        small: its options that make it small.
        number: a regular expression with one group, the number by which its result is judged. The last match counts.
        least: the least good number: of the small run, and of the example as it is.
    """

    needs: tuple[str, ...]
    small: str
    number: str
    least: tuple[float, float]


TESTED: dict[str, Example] = {
    "dlrm.py": Example(("torch",), "--lines 20000", r"AUC ([\d.]+) of DLRM", (0.6, 0.8)),
    "torchrun.py": Example(("torch",), "--steps 8", r"equal bits: (\d)", (1, 1)),
    "two_tower.py": Example(
        ("torch", "lightning", "faiss"), "--rows 1000", r"recall@20 ([\d.]+)  two towers", (0.1, 0.2)
    ),
}


def check(name: str, options: str, least: float, folder: Path) -> None:
    """Run an example in an empty folder, and check the number that it prints."""
    example = TESTED[name]
    for package in example.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{name} needs {package}")
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "PYTHONWARNINGS": "default"}
    command = [sys.executable, str(EXAMPLES / name), *options.split()]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.findall(example.number, ran.stdout)
    assert found, ran.stdout
    assert float(found[-1]) >= least, ran.stdout


@pytest.mark.parametrize("name", TESTED)
def test_a_small_run(name: str, tmp_path: Path):
    check(name, TESTED[name].small, TESTED[name].least[0], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTED)
def test_it_runs_as_it_is(name: str, tmp_path: Path):
    check(name, "", TESTED[name].least[1], tmp_path)


def test_every_example_is_short_and_tested():
    files = {path.name: path for path in EXAMPLES.glob("*.py")}
    assert set(TESTED) == set(files)
    long = [name for name, path in files.items() if len(path.read_text().splitlines()) > MOST_LINES]
    assert long == []
