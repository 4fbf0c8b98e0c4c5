"""What commands say of files that PyTorch wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import embedrock.torch as ert
from embedrock.cli.main import main
from embedrock.store.reading import CHECKPOINT


def test_the_name_of_checkpoints_is_theirs(tmp_path: Path):
    """What `ert.save` writes is taken for a checkpoint."""
    ert.save(torch.nn.Linear(1, 1), tmp_path / "ckpt", step=3)
    names = [one.name for one in (tmp_path / "ckpt").iterdir()]
    assert any(CHECKPOINT.fullmatch(name) for name in names), names


def test_commits_tell_who_holds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A commit that a state dict refers to has a name that says so; whoever cleans up can see it."""
    layer = ert.Embedding(9, 2, path=tmp_path / "t.rock")
    state = torch.nn.Sequential(layer).state_dict()
    assert state
    layer.table.close()
    assert main(["commits", str(tmp_path / "t.rock")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "state" in last
