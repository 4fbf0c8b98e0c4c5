"""What an import brings along. Each check runs in a fresh interpreter; none looks at the time."""

from __future__ import annotations

import subprocess
import sys

import pytest

import embedrock

FRAMEWORKS = {"torch", "tensorflow", "keras", "triton", "jax"}


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules in `sys.modules` after `statement` in a new interpreter."""
    program = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_the_check_sees_an_import():
    assert "wave" in loaded_by("import wave")
    assert "wave" not in loaded_by("pass")


def test_import_is_light():
    assert not loaded_by("import embedrock") & (FRAMEWORKS | {"numba", "llvmlite"})


def test_core_never_loads_a_framework():
    work = "import embedrock as er; er.Table(8, 2, rule=er.SGD(lr=0.1)).update([1], [[1.0, 1.0]])"
    assert not loaded_by(work) & FRAMEWORKS


def test_torch_front_end_loads_no_other_framework():
    pytest.importorskip("torch")
    assert not loaded_by("import embedrock.torch") & {"tensorflow", "keras", "jax"}


def test_jax_front_end_loads_no_other_framework():
    pytest.importorskip("jax")
    others = {"flax", "equinox", "optax", "orbax", "numba"}
    loaded = loaded_by("import embedrock.jax")
    assert "jax" in loaded
    assert not loaded & (FRAMEWORKS - {"jax"} | others)


# That of Keras: tests/keras/test_multi_worker_fit.py, whose workers have imported it once.


@pytest.mark.parametrize("name", embedrock.__all__)
def test_every_public_name_resolves(name):
    assert getattr(embedrock, name) is not None
    assert name in dir(embedrock)
