"""The emulated GPU says what it lacks. What else it does needs PyTorch for CUDA: ``make gpu-emulated``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import emulate
import pytest
import torch


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(emulate, "headers", lambda: [Path("nvidia"), Path("triton")])


@pytest.mark.usefixtures("everything")
def test_nothing_is_missing_where_all_is_there():
    assert emulate.missing() == ""


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(("cuda", "what"), [(None, "without CUDA"), ("12.8", "for CUDA 12.8")])
def test_pytorch_must_be_for_the_right_cuda(cuda: str | None, what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was run"))
    with pytest.raises(SystemExit, match=rf"PyTorch .* is {what}\. .*needs PyTorch for CUDA 13 \(`pip install torch`"):
        emulate.main([])


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("program", ["g++", "nm"])
def test_a_compiler_must_be_there(program: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == program else name)
    assert emulate.missing() == f"There is no {program} on PATH. {emulate.NEED}"


@pytest.mark.usefixtures("everything")
def test_headers_must_be_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(emulate, "headers", lambda: [Path("triton")])
    assert emulate.missing().startswith("CUDA's headers are not beside PyTorch (nvidia/cu13/include, triton/")


def test_an_unknown_step_is_refused():
    with pytest.raises(SystemExit, match=r"no steps: warmth\. There are facts, modes,"):
        emulate.run_steps(["warmth"], {})
