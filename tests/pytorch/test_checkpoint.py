"""`ert.save` and `ert.load`: rows on disk and dense weights are always of the same step."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_disk import ROWS, Batches, Model, check_same, optimizers_of, step, wanted
from torch import nn

import embedrock as er
import embedrock.torch as ert
from disks import check_full, memory_disk
from embedrock.frontend import checkpoints
from embedrock.io.vfs import System
from embedrock.torch.saving import checkpoint
from slow import slow


def train(model: Model, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for batch in ert.prefetch([Batches()[k] for k in steps], wanted(model), 2):
        step(model, optimizers, batch)


def files(folder: Path) -> list[str]:
    return sorted(name.rsplit("-", 1)[0] + Path(name).suffix for name in os.listdir(folder))


def names(table: er.Table) -> list[str]:
    return [commit["name"].rsplit("-", 1)[0] for commit in table.commits() if commit["name"]]


@pytest.mark.parametrize("kind", [{}, {"dense": True}])
def test_training_goes_on_to_the_same_bits(kind: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture):
    straight, first = Model(), Model(tmp_path, "150KB")
    optimizers = optimizers_of(first, **kind)
    train(first, optimizers, range(10))
    file = ert.save(first, tmp_path / "checkpoints", 10, optimizers)
    assert file.parent == tmp_path / "checkpoints"
    train(first, optimizers, range(10, 13))  # lost
    first.close()
    caplog.set_level("INFO", "embedrock")

    again = Model(tmp_path, "150KB")
    its_optimizers = optimizers_of(again, **kind)
    assert ert.load(again, tmp_path / "checkpoints", its_optimizers) == 10
    assert caplog.messages[-1] == f"{tmp_path}/checkpoints resumed at step 10"
    train(again, its_optimizers, range(10, 20))
    train(straight, optimizers_of(straight, **kind), range(20))
    its = optimizers_of(straight, **kind)
    assert len(its) == 2
    check_same(straight, again)
    again.close()


def test_loading_in_the_same_process_goes_back(tmp_path: Path):
    model = Model(tmp_path)
    optimizers = optimizers_of(model)
    train(model, optimizers, range(5))
    ert.save(model, tmp_path / "c", step=5, optimizer=dict(zip(("rows", "dense"), optimizers, strict=True)))
    train(model, optimizers, range(5, 9))
    after = model.user.table.lookup(np.arange(ROWS))
    assert ert.load(model, tmp_path / "c", {"rows": optimizers[0], "dense": optimizers[1]}) == 5
    train(model, optimizers, range(5, 9))
    assert np.array_equal(model.user.table.lookup(np.arange(ROWS)), after)
    assert ert.load(model, tmp_path / "c", {"rows": optimizers[0], "dense": optimizers[1]}) == 5  # once more
    train(model, optimizers, range(5, 9))
    assert np.array_equal(model.user.table.lookup(np.arange(ROWS)), after)
    model.close()


@pytest.mark.parametrize("old", [False, True], ids=["new", "0.1"])
def test_a_checkpoint_does_not_know_of_compilers(old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    models: list[Any] = [nn.Sequential(ert.Embedding(ROWS, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    compiled: list[Any] = [torch.compile(each, backend="eager") for each in models]
    (model, other), (its, others) = models, compiled
    model[0].table.assign([3], np.ones((1, 4), np.float32))
    with monkeypatch.context() as patch:
        if old:
            patch.setattr(checkpoint, "uncompiled", lambda model: model)
        ert.save(its, tmp_path, 1)
    for into, source in ((other, its), (others, its), (others, model)):
        other[0].table.assign([3], np.zeros((1, 4), np.float32))
        assert ert.load(into, tmp_path) == 1
        assert other[0].table.lookup([3]).sum() == 4
        ert.save(source, tmp_path, 1)


def test_tables_in_ram_go_to_the_file(tmp_path: Path):
    model, other = Model(), Model()
    optimizers = optimizers_of(model)
    train(model, optimizers, range(3))
    ert.save(model, tmp_path, 3, optimizers[0])
    optimizers_of(other)
    assert ert.load(other, tmp_path) == 3
    check_same(model, other)


def test_keep_drops_old_checkpoints_and_lets_their_commits_go(tmp_path: Path):
    model = Model(tmp_path)
    optimizers = optimizers_of(model)
    for k in range(6):
        train(model, optimizers, range(k, k + 1))
        ert.save(model, tmp_path / "c", k, keep=3)
        model.user.table.commit()  # others, which retention may drop
    assert files(tmp_path / "c") == ["step-3.pt", "step-4.pt", "step-5.pt"]
    assert names(model.user.table) == names(model.item.table) == ["c-3", "c-4", "c-5"]
    ert.save(model, tmp_path / "c", 5, keep=3)  # in the place of the one of the same step
    assert files(tmp_path / "c") == ["step-3.pt", "step-4.pt", "step-5.pt"]
    ert.save(model, tmp_path / "d", 1, keep=None)  # another folder
    ert.save(model, tmp_path / "c", 6, keep=1)
    assert files(tmp_path / "c") == ["step-6.pt"]
    assert sorted(names(model.user.table)) == ["c-6", "d-1"]
    train(model, optimizers, range(6, 9))
    assert ert.load(model, tmp_path / "d") == 1
    assert ert.load(model, tmp_path / "c") == 6
    model.close()


def test_steps_do_not_go_backwards_within_a_folder(tmp_path: Path):
    model = Model()
    ert.save(model, tmp_path, 10)
    with pytest.raises(
        er.ArgumentError, match=r"that of the last checkpoint, 10: got 9\. Go on from .* another folder than '"
    ):
        ert.save(model, tmp_path, 9)
    assert files(tmp_path) == ["step-10.pt"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"step": -1}, "`step` of ert.save must be a whole number from 0: got -1"),
        ({"step": 1.5}, "got 1.5"),
        ({"step": None}, "got None"),
        ({"step": 1, "keep": 0}, "`keep` of ert.save must be a whole number from 1, or None for all: got 0"),
        ({"step": 1, "optimizer": "adam"}, r"with state_dict\(\) and load_state_dict\(\).*got 'adam'"),
        ({"step": 1, "optimizer": [3]}, "got 3"),
    ],
)
def test_arguments_of_save(arguments: dict[str, Any], text: str, tmp_path: Path):
    model = Model(tmp_path)
    with pytest.raises(er.ArgumentError, match=text):
        ert.save(model, tmp_path / "c", **arguments)
    assert not (tmp_path / "c").exists()
    model.close()


def test_there_is_no_checkpoint(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="holds no checkpoint") as caught:
        ert.load(Model(), tmp_path / "none")
    assert isinstance(caught.value, ert.NoCheckpointError)
    (tmp_path / "step-x.pt").touch()
    with pytest.raises(ert.NoCheckpointError):
        ert.load(Model(), tmp_path)


def test_loading_an_optimizer_that_was_not_saved(tmp_path: Path):
    model = Model()
    ert.save(model, tmp_path, 1, {"rows": ert.Adam(model)})
    with pytest.raises(er.ArgumentError, match=r"\['rows'\]: got also \['dense'\]"):
        ert.load(model, tmp_path, {"dense": torch.optim.Adam(ert.dense_parameters(model))})


# ---------------------------------------------------------------- things go wrong


class Unreadable:
    """Something whose state is code, not data."""

    def state_dict(self) -> dict[str, Any]:
        return {"model": nn.Linear(1, 1)}

    def load_state_dict(self, state: Any) -> None: ...


def failing(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "no space left on device")


@pytest.mark.parametrize("where", ["torch.save", "fsync", "rename", "second commit", "unreadable"])
def test_a_save_that_fails_leaves_the_last_checkpoint(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = Model(tmp_path)
    optimizers = optimizers_of(model)
    train(model, optimizers, range(3))
    ert.save(model, tmp_path / "c", 3, optimizers)
    before = model.user.table.lookup(np.arange(ROWS))
    train(model, optimizers, range(3, 6))
    with monkeypatch.context() as patch:
        targets = {"torch.save": (torch, "save"), "fsync": (checkpoints, "platform"), "rename": (Path, "rename")}
        if where in targets:
            owner, name = targets[where]
            patch.setattr(owner, name, SimpleNamespace(sync=failing) if where == "fsync" else failing)
        elif where == "second commit":
            patch.setattr(model.item.table, "commit", failing)
        parts = [*optimizers, Unreadable()] if where == "unreadable" else optimizers
        with pytest.raises((OSError, er.ArgumentError), match=r"[Nn]o space|containers of these"):
            ert.save(model, tmp_path / "c", 6, parts)
    after = model.user.table.lookup(np.arange(ROWS))
    ert.save(model, tmp_path / "d", 6, optimizers)
    assert ert.load(model, tmp_path / "c", optimizers) == 3
    assert np.array_equal(model.user.table.lookup(np.arange(ROWS)), before)
    assert ert.load(model, tmp_path / "d", optimizers) == 6
    assert np.array_equal(model.user.table.lookup(np.arange(ROWS)), after)
    ert.save(model, tmp_path / "c", 7, optimizers)
    assert files(tmp_path / "c") == ["step-3.pt", "step-7.pt"]
    assert sorted(names(model.user.table)) == sorted(names(model.item.table)) == ["c-3", "c-7", "d-6"]
    model.close()


def test_a_full_disk_leaves_the_last_checkpoint_and_says_what_is_missing(tmp_path: Path):
    table = er.Table(20_000, 16, rule=er.SGD(lr=1.0))
    model = nn.Sequential(ert.Embedding(table))
    with memory_disk(tmp_path / "disk", 1 << 20) as disk:
        table.assign([1], np.full((1, 16), 3.0))
        first = ert.save(model, disk / "c", step=1)
        table.assign(np.arange(20_000), np.zeros((20_000, 16)))
        with pytest.raises(OSError, match=r"checkpoint of step 2, with the rows of .*Embedding.* could not") as caught:
            ert.save(model, disk / "c", step=2)
        check_full(caught.value, disk / "c" / "step-2-", 20_000 * (16 * 4 + 8))
        assert os.listdir(disk / "c") == [first.name]
        assert ert.load(model, disk / "c") == 1
        assert table.lookup([1]).tolist() == [[3.0] * 16]
        assert table.stats()["rows_touched"] == 1


def test_every_flipped_bit_of_the_file_is_seen(tmp_path: Path):
    layer, dense = ert.Embedding(9, 2, path=tmp_path / "t.rock"), nn.Linear(2, 3)
    model = nn.Sequential(layer, dense)
    file = ert.save(model, tmp_path / "c", 1)
    whole, weights = file.read_bytes(), dense.weight.detach().clone()
    refused = 0
    for position in range(0, len(whole), 3):
        spoilt = bytearray(whole)
        spoilt[position] ^= 1 << position % 8
        file.write_bytes(spoilt)
        try:
            ert.load(model, tmp_path / "c")
        except er.CorruptTableError:
            refused += 1
        assert torch.equal(dense.weight, weights)
    assert refused > len(whole) // 6  # all that is not padding
    for part in (whole[:-1], whole[: len(whole) // 2], b""):
        file.write_bytes(part)
        with pytest.raises(er.CorruptTableError, match=r"cannot be read.*move it to another folder"):
            ert.load(model, tmp_path / "c")
    torch.save({"model": {}}, file)
    with pytest.raises(er.CorruptTableError, match=r"must be a checkpoint of ert\.save"):
        ert.load(model, tmp_path / "c")
    layer.table.close()


def test_nothing_is_loaded_of_a_checkpoint_of_other_tables(tmp_path: Path):
    model = Model(tmp_path / "one")
    ert.save(model, tmp_path / "c", 1)
    other = Model(tmp_path / "two")
    with torch.no_grad():
        other.dense.weight.fill_(7)
    with pytest.raises(er.ArgumentError, match=f"{other.user.table.uuid}.*{model.user.table.uuid}.*relocate="):
        ert.load(other, tmp_path / "c")
    assert (other.dense.weight == 7).all()
    assert other.user.table.last_commit == 0
    model.close()
    other.close()


# ---------------------------------------------------------------- tables that were moved


@pytest.mark.parametrize("how", ["dict", "function", "by path"])
def test_tables_that_were_moved(how: str, tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    straight, first = Model(), Model(old, "150KB")
    optimizers = optimizers_of(first)
    train(first, optimizers, range(5))
    ert.save(first, tmp_path / "c", 5, optimizers)
    first.close()
    old.rename(new)
    again = Model(new if how == "by path" else old, "150KB")
    its_optimizers = optimizers_of(again)
    moves = {str(old / name): str(new / name) for name in ("users.rock", "items.rock")}
    relocate: Any = {"dict": moves, "function": moves.__getitem__}.get(how)
    handle = again.user.handle
    assert ert.load(again, tmp_path / "c", its_optimizers, relocate=relocate) == 5
    assert again.user.handle is handle
    assert again.user.table.path == str(new / "users.rock")
    train(again, its_optimizers, range(5, 9))
    train(straight, optimizers_of(straight), range(9))
    check_same(straight, again)
    again.close()


def test_moves_that_cannot_be(tmp_path: Path):
    model = Model(tmp_path / "one")
    ert.save(model, tmp_path / "c", 1)
    other = Model(tmp_path / "two")
    with pytest.raises(er.ArgumentError, match=r"must have old paths as its keys, here .*users.rock.*got .*nowhere"):
        ert.load(other, tmp_path / "c", relocate={"nowhere": "x"})
    train(other, optimizers_of(other), range(1))
    moves = {str(tmp_path / "one" / "users.rock"): "x"}
    with pytest.raises(er.ArgumentError, match="trained for 1 steps"):
        ert.load(other, tmp_path / "c", relocate=moves)
    model.close()
    other.close()


# ---------------------------------------------------------------- kills


def killed_at(event: int) -> Iterator[Callable[..., Any]]:
    """Make this process die before its `event`-th act of a save."""
    count = 0

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == event:
                os._exit(9)
            return function(*args, **kwargs)

        return act

    for owner, names_ in (
        (er.Table, ("commit", "release")),
        (Path, ("touch", "rename", "unlink")),
        (System, ("fsync_folder",)),
        (checkpoint, ("_check_readable",)),
        (torch, ("save",)),
    ):
        for name in names_:
            setattr(owner, name, dying(getattr(owner, name)))
    yield dying


def test_a_kill_between_the_commits_and_the_dense_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)
            model = Model(tmp_path)
            optimizers = optimizers_of(model)
            train(model, optimizers, range(1))
            ert.save(model, tmp_path / "c", 1, optimizers)
            train(model, optimizers, range(1, 2))
            monkeypatch.setattr(torch, "save", lambda *args: os._exit(9))
            ert.save(model, tmp_path / "c", 2, optimizers)
        finally:
            os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    expected, model = Model(), Model(tmp_path)
    assert model.user.table.last_step == model.item.table.last_step == 2
    optimizers = optimizers_of(model)
    assert ert.load(model, tmp_path / "c", optimizers) == 1
    train(expected, optimizers_of(expected), range(1))
    check_same(expected, model)
    model.close()


def work(folder: Path, event: int) -> None:
    """Train and save twice, and die at an event."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    model = Model(folder)
    optimizers = optimizers_of(model)
    next(killed_at(event))
    for k in (1, 2):
        train(model, optimizers, range(k, k + 1))
        ert.save(model, folder / "c", k, optimizers, keep=1)
    os._exit(0)


@pytest.mark.parametrize("stride", [3, *slow(1)])
def test_a_kill_at_every_moment_of_a_save(tmp_path: Path, stride: int):
    expected = {0: Model(), 1: Model(), 2: Model()}
    for k, model in expected.items():
        train(model, optimizers_of(model), range(1, k + 1))
    found, event, code = set(), 0, 9
    while code == 9:
        event += stride
        folder = tmp_path / str(event)
        child = os.fork()
        if child == 0:
            try:
                work(folder, event)
            finally:
                os._exit(5)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        model = Model(folder)
        optimizers = optimizers_of(model)
        try:
            step_found = ert.load(model, folder / "c", optimizers)
        except ert.NoCheckpointError:
            step_found = 0
        found.add(step_found)
        check_same(expected[step_found], model)
        train(model, optimizers, range(step_found + 1, 3))
        check_same(expected[2], model)
        ert.save(model, folder / "c", 3, optimizers, keep=1)
        assert files(folder / "c") == ["step-3.pt"]
        assert names(model.user.table) == names(model.item.table) == ["c-3"]
        model.close()
        shutil.rmtree(folder)
    assert found == {0, 1, 2}
    assert event > 15


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("Too many open files (24)")]
)
def test_a_process_that_may_open_no_more_files_is_no_damage(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = Model(tmp_path, "150KB")

    def refused(*args: Any, **how: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", refused)
        with pytest.raises(
            OSError, match=r"Too many open files: this process, of .*Raise the limit .`ulimit -n 65536`"
        ):
            ert.save(model, tmp_path / "checkpoints", 1)
    ert.save(model, tmp_path / "checkpoints", 1)
    assert ert.load(model, tmp_path / "checkpoints") == 1
    model.close()


@pytest.mark.parametrize("saved", [0, 1])
def test_a_full_disk_names_the_checkpoint_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int
) -> None:
    layer = ert.Embedding(100, 4)
    files = [str(ert.save(layer, tmp_path, step=step)) for step in range(saved)]

    def no_room(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", no_room)
    with pytest.raises(OSError, match=r"No room was found for: '.*/step-9-\w+\.pt'$") as caught:
        ert.save(layer, tmp_path, step=9)
    said = [f"The last checkpoint, {file!r}, is whole." for file in files] or ["There is no checkpoint before it."]
    assert said[-1] in str(caught.value)
    assert sorted(map(str, tmp_path.iterdir())) == files
