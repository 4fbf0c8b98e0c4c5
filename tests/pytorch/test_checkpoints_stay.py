"""A checkpoint that was told to be whole stays loadable, whatever happens, and however many ranks there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

import embedrock as er
import embedrock.torch as ert
from embedrock.distributed.commits import kept_of, layout_of
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.saving import checkpoint
from embedrock.torch.saving.checkpoint import references
from slow import slow

IDS, DIM = 60, 4
FOLDERS = ("one/checkpoints", "two/checkpoints")  # of the same name

_of_rank: dict[str, Any] = {}  # what a rank has between two acts


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    ranks = Ranks(3, timeout=60)
    yield ranks
    ranks.close()


def act(rank: int, what: str, count: int, folder: str, *more: Any) -> Any:
    """Let the first `count` ranks do something; the others are not there."""
    if "groups" not in _of_rank:
        _of_rank["groups"] = [dist.new_group(list(range(size))) for size in (1, 2, 3)]
    return ACTS[what](rank, count, folder, *more) if rank < count else None


def opens(rank: int, count: int, folder: str) -> None:
    group = _of_rank["groups"][count - 1]
    torch.manual_seed(0)
    options: dict[str, Any] = {"path": f"{folder}/users.rock", "memory": "1MiB", "reshard": "auto"}
    users = ert.Embedding(None, DIM, seed=1, sharded=group, **options)
    model = nn.ModuleDict({"users": users, "dense": nn.Linear(DIM, 1)})
    _of_rank.update(model=model, rows=ert.Adam(users, lr=0.1))


def trains(rank: int, count: int, folder: str, step: int) -> None:
    draw = np.random.default_rng(step)
    ids = torch.from_numpy(draw.integers(0, IDS, 30))
    _of_rank["model"]["users"](ids).square().sum().backward()
    _of_rank["rows"].step()
    _of_rank["rows"].zero_grad()
    with torch.no_grad():
        _of_rank["model"]["dense"].weight.fill_(step)


def saves(rank: int, count: int, folder: str, step: int, keep: int | None) -> tuple[str, torch.Tensor]:
    file = ert.save(_of_rank["model"], folder, step=step, keep=keep)
    return str(file), _of_rank["model"]["users"](torch.arange(IDS)).detach()


def is_cut_short(rank: int, count: int, folder: str, step: int) -> None:
    """Save, and be killed before the file is written."""
    write, collect = checkpoint._write, checkpoint.collect
    checkpoint._write = checkpoint.collect = _killed
    checkpoint.collect = collect if count > 1 else (lambda *args: None)
    try:
        with contextlib.suppress(er.EmbedrockError, RuntimeError):
            ert.save(_of_rank["model"], folder, step=step)
    finally:
        checkpoint._write, checkpoint.collect = write, collect
    _of_rank["model"]["users"].table.close()


def _killed(*args: Any) -> None:
    raise RuntimeError("killed")


def commits(rank: int, count: int, folder: str, step: int) -> None:
    _of_rank["model"]["users"].table.commit(step=step)


def compacts(rank: int, count: int, folder: str) -> None:
    _of_rank["model"]["users"].table.compact()


def closes(rank: int, count: int, folder: str) -> None:
    _of_rank["model"]["users"].table.close()


def loads(rank: int, count: int, folder: str) -> tuple[int, torch.Tensor, float]:
    model = _of_rank["model"]
    step = ert.load(model, folder)
    return step, model["users"](torch.arange(IDS)).detach(), model["dense"].weight[0, 0].item()


ACTS = {each.__name__: each for each in (opens, trains, saves, is_cut_short, commits, compacts, closes, loads)}


def rows_of_file(file: str, path: str, like: nn.Module) -> np.ndarray:
    """Return the rows that a checkpoint's file refers to, without going back to them."""
    states = torch.load(file, weights_only=True)["model"]
    ((_, _, meant),) = references(like, states)
    layout = layout_of(path)
    assert layout is not None
    (number,) = [each.numbers[0] for each in kept_of(layout) if each.name == meant["commit"]]
    with er.open(path, mode="r", at=number) as table:
        return table.lookup(np.arange(IDS))


@pytest.mark.filterwarnings("ignore::embedrock.UncommittedWarning")
@pytest.mark.parametrize("seed", [0, *slow(*range(1, 14))])
def test_every_checkpoint_loads_with_its_bits_after_whatever(three: Ranks, tmp_path: Path, seed: int) -> None:
    draw, path, step, count, saved = np.random.default_rng(seed), str(tmp_path / "users.rock"), 0, 2, {}
    like = nn.ModuleDict({"users": ert.Embedding(None, DIM), "dense": nn.Linear(DIM, 1)})
    assert isinstance(like["users"], RowLayer)

    def do(what: str, folder: str = "", *more: Any) -> Any:
        return three.run(act, what, count, str(tmp_path / folder), *more)[:count]

    kinds = ["train"] * 3 + ["save"] * 2 + ["commit", "compact", "cut", "begin again", "begin again", "load"]
    do("opens")
    for kind in ["train", "save", *draw.choice(kinds, 18), "begin again"]:
        folder = FOLDERS[int(draw.integers(2))]
        if kind in ("train", "save"):
            step += 1
            do("trains", "", step)
        if kind == "save":
            file, rows = do("saves", folder, step, [1, 2, 3, None][int(draw.integers(4))])[0]
            saved[file] = rows, step
        elif kind == "commit":
            do("commits", "", step)
        elif kind == "compact":
            do("compacts")
        elif kind in ("cut", "begin again"):
            do("is_cut_short", folder, step) if kind == "cut" else do("closes")
            count = int(draw.integers(1, 4))
            do("opens")
        elif kind == "load" and (
            files := sorted(file for file in saved if f"/{folder}/" in file and Path(file).exists())
        ):
            newest = max(files, key=lambda file: saved[file][1])
            for at, rows, dense in do("loads", folder):
                assert (at, dense) == (saved[newest][1], saved[newest][1])
                torch.testing.assert_close(rows, saved[newest][0], rtol=0, atol=0)
        there = [str(file) for name in FOLDERS for file in (tmp_path / name).glob("*.pt")]
        assert set(there) <= saved.keys()
        for file in there:
            np.testing.assert_array_equal(rows_of_file(file, path, like), saved[file][0], f"{kind}: {file}")
    do("closes")
