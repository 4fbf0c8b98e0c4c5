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


AUC = r"^AUC (\S+),"
TESTED: dict[str, Example] = {
    "jax_training.py": Example(("jax", "optax", "orbax"), "--steps 200", AUC, (0.61, 0.74)),
    "keras_ranking.py": Example(("keras", "tensorflow"), "--clicks 60000 --epochs 1", AUC, (0.63, 0.73)),
    "language_model.py": Example(("torch",), "--steps 20", r"with the memory: (\S+) less", (0.05, 0.5)),
    "stream.py": Example(
        ("torch",), "--days 3 --steps-a-day 20 --batch-size 1024 --alive 1000", r"come and go +(0\.\d+)", (0.66, 0.69)
    ),
    "matrix_factorization.py": Example(
        ("torch",), "--users 5000 --steps 56 --memory 64MiB", r"AUC (0\.\d+)   .*ms a step", (0.8, 0.78)
    ),
    "word_vectors.py": Example(("torch",), "--sentences 100 --epochs 30", r"tuned (\d\.\d+)", (0.45, 0.6)),
    "dlrm.py": Example(("torch",), "--lines 20000", r"AUC ([\d.]+) of DLRM", (0.6, 0.8)),
    "torchrun.py": Example(("torch",), "--steps 8", r"equal bits: (\d)", (1, 1)),
    "two_tower.py": Example(
        ("torch", "lightning", "faiss"), "--rows 1000", r"recall@20 ([\d.]+)  two towers", (0.1, 0.2)
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
    found = re.findall(example.number, ran.stdout, re.MULTILINE)
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


@pytest.mark.slow
def test_the_notebook_runs_and_its_cells_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs for cell in cells)
    _, opening, training, _, nearest, _ = cells
    fails = nbformat.v4.new_code_cell("def fails(layer):\n    raise ValueError(layer)\n\nfails(items)")
    fails.metadata.tags = ["raises-exception"]  # its traceback keeps the layer
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
    with client.setup_kernel():
        for cell in (*cells[:3], training, fails, opening, training, *cells[3:]):
            notebook.cells.append(cell)
            client.execute_cell(cell, len(notebook.cells) - 1)
    shown = {"".join(each.get("text", "") for each in cell.outputs) for cell in cells}
    assert any("step 600  loss" in text for text in shown)
    assert "<caption>Table items</caption>" in opening.outputs[-1]["data"]["text/html"]
    found = re.findall(r"(\d+)% of the 10 nearest items", nearest.outputs[0]["text"])
    assert int(found[0]) >= 95
