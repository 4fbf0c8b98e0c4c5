"""Every example runs: small in each run of the tests, as it is in the slow ones. Each prints a number that is good."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import programs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MOST_LINES = 120
SERVERS = {"torch": programs.TORCH, "keras": programs.KERAS}


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
    "matrix_factorization.py": Example(
        ("torch",), "--users 5000 --steps 56 --memory 64MiB", r"AUC (0\.\d+)   .*ms a step", (0.8, 0.78)
    ),
}


AS_SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def skip_without_its_packages(name: str) -> None:
    for package in TESTED[name].needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{name} needs {package}")


def check(name: str, least: float, ran: subprocess.CompletedProcess[str]) -> None:
    """Check the number that an example printed."""
    example = TESTED[name]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.findall(example.number, ran.stdout)
    assert found, ran.stdout
    assert float(found[-1]) >= least, ran.stdout


@pytest.mark.parametrize("name", TESTED)
def test_a_small_run(name: str):
    skip_without_its_packages(name)
    imports = next((there for package, there in SERVERS.items() if package in TESTED[name].needs), programs.CORE)
    ran = programs.run(AS_SCRIPT, imports, str(EXAMPLES / name), *TESTED[name].small.split())
    check(name, TESTED[name].least[0], ran)


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTED)
def test_it_runs_as_it_is(name: str):
    skip_without_its_packages(name)
    ran = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=600)
    check(name, TESTED[name].least[1], ran)


def test_every_example_is_short_and_tested():
    files = {path.name: path for path in EXAMPLES.glob("*.py")}
    assert set(TESTED) == set(files)
    long = [name for name, path in files.items() if len(path.read_text().splitlines()) > MOST_LINES]
    assert long == []
