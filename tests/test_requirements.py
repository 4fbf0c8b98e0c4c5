"""What an import says where a package that it needs is missing, too old or set to something else, and what it loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slow import slow

# Nothing of a framework is imported: the error comes before.
PROGRAM = """
import sys
{before}
try:
    import embedrock.{front}
except ImportError as error:
    loaded = sys.modules.keys() & {{"torch", "keras", "tensorflow", "jax", "numba"}}
    print(type(error).__name__, "|", error, "|", *loaded)
"""


def refused(front: str, before: str = "", **environment: Any) -> str:
    """Return what the import of a front end in a new interpreter says: its error, text, and what was loaded."""
    environment = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    program = PROGRAM.format(front=front, before=before)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fake(folder: Path, name: str, version: str, content: str = "raise RuntimeError('imported')") -> str:
    """Make a package of a version in a folder; return the path on which Python finds it first."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(content)
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize(
    ("front", "package", "least"),
    [("torch", "torch", "2.5"), ("keras", "keras", "3.5"), ("keras", "tensorflow", "2.17"), ("jax", "jax", "0.6")],
)
def test_a_package_is_missing(front: str, package: str, least: str):
    """Hidden as Python hides modules."""
    told = refused(front, f"sys.modules[{package!r}] = None")
    remedy = f'pip install --upgrade "embedrock[{front}]"'
    expected = f"embedrock.{front} needs {package} {least} or newer, which is not installed: {remedy}"
    assert told == f"RequirementError | {expected} | {package}"


@pytest.mark.parametrize(
    ("front", "package", "version"),
    [
        ("torch", "torch", "2.4.1"),
        ("keras", "keras", "3.4.1"),
        ("keras", "tensorflow", "2.16.2"),
        ("jax", "jax", "0.5.3"),
    ],
)
def test_a_package_is_too_old(tmp_path: Path, front: str, package: str, version: str):
    told = refused(front, PYTHONPATH=fake(tmp_path, package, version))
    start, _, loaded = told.partition(f': found {version}. pip install --upgrade "embedrock[{front}]" |')
    assert start.startswith(f"RequirementError | embedrock.{front} needs {package} ")
    assert loaded == ""


def test_the_version_of_a_package_that_was_imported_is_its_own(tmp_path: Path):
    path = fake(tmp_path, "torch", "9.9", "__version__ = '2.4.0+cpu'")
    assert ": found 2.4.0+cpu. " in refused("torch", "import torch", PYTHONPATH=path)


@pytest.mark.parametrize("backend", ["torch", *slow("jax", "numpy")])
def test_another_backend_of_keras(backend: str, tmp_path: Path):
    (tmp_path / "keras.json").write_text(f'{{"backend": "{backend}"}}')
    for said_by, environment in (
        ("the environment's KERAS_BACKEND", {"KERAS_BACKEND": backend}),
        (str(tmp_path / "keras.json"), {"KERAS_BACKEND": None, "KERAS_HOME": str(tmp_path)}),
    ):
        told = refused("keras", **environment)
        assert told.startswith(
            f"RequirementError | embedrock.keras needs Keras' TensorFlow backend: got {backend!r}, by {said_by}. "
        )
        assert 'os.environ["KERAS_BACKEND"] = "tensorflow".' in told
        assert ("embedrock.torch" in told) == (backend == "torch")
        assert told.endswith("|")  # nothing was loaded


def test_keras_that_was_imported_with_another_backend():
    before = "import types; sys.modules['keras'] = keras = types.ModuleType('keras'); keras.__spec__ = __spec__ or 1\n"
    before += "keras.__version__ = '3.15.1'; keras.config = types.SimpleNamespace(backend=lambda: 'jax')"
    told = refused("keras", before, KERAS_BACKEND="tensorflow")
    assert "got 'jax', by keras.config.backend(), as Keras was imported before. " in told
