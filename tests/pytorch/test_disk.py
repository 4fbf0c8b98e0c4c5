"""Layers whose rows lie on disk: the same bits, resuming, references in states, and looking ahead."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import embedrock as er
import embedrock.torch as ert
from slow import slow

ROWS, DIM = 3000, 4


class Model(nn.Module):
    """A layer of each kind, on disk if a folder is given, and dense parameters."""

    def __init__(self, folder: Path | None = None, memory: str | None = None, **arguments: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        paths = [None, None] if folder is None else [folder / "users.rock", folder / "items.rock"]
        self.user = ert.Embedding(ROWS, DIM, path=paths[0], memory=memory, padding_idx=0, **arguments)
        self.item = ert.EmbeddingBag(ROWS, DIM, path=paths[1], memory=memory, seed=1, mode="sum", **arguments)
        self.dense = nn.Linear(DIM, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.dense(self.user(batch["user"]) + self.item(batch["item"])).square().mean()

    def close(self) -> None:
        for layer in (self.user, self.item):
            if layer.table.uncommitted:
                layer.table.commit()
            layer.table.close()


class Batches(Dataset[dict[str, Tensor]]):
    """Batches that share rows with their neighbours; one may be spoilt."""

    def __init__(self, count: int = 30, spoilt: int = -1) -> None:
        self.count, self.spoilt = count, spoilt

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.spoilt:
            raise ValueError("this one is spoilt")
        rng = np.random.default_rng(index)
        ids = [torch.from_numpy(rng.zipf(1.3, 32) * factor % ROWS) for factor in (1, 7919)]
        return {"user": ids[0], "item": ids[1][:, None]}


def wanted(model: Model) -> dict[Any, Callable[[Any], Any]]:
    return {model.user: lambda batch: batch["user"], model.item: lambda batch: (batch["item"], [])}


def optimizers_of(model: nn.Module, **arguments: Any) -> list[torch.optim.Optimizer]:
    return [ert.Adam(model, lr=0.05, **arguments), torch.optim.Adam(ert.dense_parameters(model), lr=0.05)]


def step(model: Model, optimizers: list[torch.optim.Optimizer], batch: dict[str, Tensor]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(batch).backward()
    for optimizer in optimizers:
        optimizer.step()


def check_same(one: Model, other: Model) -> None:
    """All bits of rows and dense parameters."""
    for mine, its in ((one.user.table, other.user.table), (one.item.table, other.item.table)):
        assert (mine.steps, mine.rule) == (its.steps, its.rule)
        assert all(map(np.array_equal, mine.export(), its.export()))
        assert np.array_equal(mine.lookup(np.arange(ROWS)), its.lookup(np.arange(ROWS)))
    assert all(torch.equal(a, b) for a, b in zip(one.dense.parameters(), other.dense.parameters(), strict=True))


def saved(value: Any) -> Any:
    """Return what `torch.load` makes of what `torch.save` wrote."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("depth", "workers"),
    [(None, 0), (1, 0), (4, 2), *slow((0, 0), (100, 0), (None, 2), (0, 2), (1, 2), (4, 0), (100, 2))],
)
def test_training_gives_the_bits_of_tables_in_ram(depth: int | None, workers: int, tmp_path: Path):
    in_ram, on_disk = Model(), Model(tmp_path, "120KB" if depth != 100 else "1MB")
    for model in (in_ram, on_disk):
        optimizers = optimizers_of(model)
        for _ in range(2):
            loader = DataLoader(Batches(), batch_size=None, num_workers=workers)
            batches = loader if depth is None or model is in_ram else ert.prefetch(loader, wanted(model), depth)
            for batch in batches:
                step(model, optimizers, batch)
            if model is on_disk:
                model.user.table.commit()
    check_same(in_ram, on_disk)
    on_disk.close()


@pytest.mark.parametrize("dense", [False, True])
def test_opening_a_path_again_resumes(dense: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "embedrock")
    straight, first = Model(), Model(tmp_path, "200KB")
    optimizers = optimizers_of(first, dense=dense)
    batches = [Batches()[k] for k in range(20)]
    for batch in batches[:10]:
        step(first, optimizers, batch)
    assert caplog.messages == []
    first.user.table.commit(step=1000)
    first.item.table.commit()
    first.close()

    again = Model(tmp_path, "200KB")
    assert caplog.messages == [
        f"{tmp_path}/users.rock resumed at step 1000 (commit 1)",
        f"{tmp_path}/items.rock resumed at a commit without a step (commit 1)",
    ]
    again.dense.load_state_dict(first.dense.state_dict())
    its_optimizers = optimizers_of(again, dense=dense)
    its_optimizers[1].load_state_dict(optimizers[1].state_dict())
    for batch in batches[10:]:
        step(again, its_optimizers, batch)
    optimizers = optimizers_of(straight, dense=dense)
    for batch in batches:
        step(straight, optimizers, batch)
    check_same(straight, again)
    again.close()


def test_a_padding_row_starts_as_zeros_once(tmp_path: Path):
    def layer(**arguments: Any) -> ert.Embedding:
        return ert.Embedding(9, 2, padding_idx=3, path=tmp_path / "t.rock", **arguments)

    with pytest.warns(er.UncommittedWarning):
        layer().table.close()  # before the first commit
    first = layer(rule=er.Adam(dense=True))
    assert first(torch.tensor([3])).tolist() == [[0.0, 0.0]]
    assert first.table.rule == er.Adam(dense=True)
    first.table.set_rule(None)
    first.table.assign([3], np.ones((1, 2), np.float32))
    first.table.commit()
    first.table.close()
    again = layer()
    assert again(torch.tensor([3])).tolist() == [[1.0, 1.0]]
    again.table.close()


def test_arguments_reach_the_table(tmp_path: Path):
    layer = ert.Embedding(99, 2, path=str(tmp_path / "t.rock"), memory="1MiB", policy="lru", keep=1)
    assert layer.table.stats()["budget_bytes"] == 2**20
    layer.table.commit()
    layer.table.commit()
    assert [commit["commit"] for commit in layer.table.commits()] == [2]
    layer.table.close()
    with pytest.raises(er.ArgumentError, match="policy"):
        ert.EmbeddingBag(99, 2, path=tmp_path / "u.rock", policy="best")
    with pytest.raises((er.ArgumentError, er.TableFileError), match="dim"):
        ert.Embedding(99, 3, path=tmp_path / "t.rock")
    table = er.Table(9, 2)
    with pytest.raises(er.ArgumentError, match=r"`path`.*belongs to the table"):
        ert.Embedding(table, path=tmp_path / "u.rock")


def test_two_layers_cannot_write_to_one_folder(tmp_path: Path):
    layer = ert.Embedding(99, 2, path=tmp_path / "t.rock")
    with pytest.raises(er.TableLockedError):
        ert.Embedding(99, 2, path=tmp_path / "t.rock")
    other = ert.EmbeddingBag(layer.table)
    assert other.handle is layer.handle
    layer.table.close()


def test_pretrained_rows_on_disk(tmp_path: Path):
    weights, path = torch.randn(50, 3), tmp_path / "t.rock"
    layer = ert.Embedding.from_pretrained(weights, freeze=False, path=path, memory="1MB")
    assert torch.equal(layer(torch.arange(50)), weights)
    optimizer = ert.SGD(layer, lr=1.0)
    layer(torch.tensor([7])).sum().backward()
    optimizer.step()
    layer.table.commit(step=1)
    layer.table.close()
    again = ert.Embedding.from_pretrained(weights, path=path)
    expected = weights.clone()
    expected[7] -= 1
    assert torch.equal(again(torch.arange(50)), expected)
    again.table.close()
    with er.open(path, init=er.FromArray(weights.numpy())) as table:
        assert np.array_equal(table.lookup([7]), expected[7:8].numpy())


@pytest.mark.parametrize("kind", [ert.Embedding, ert.EmbeddingBag])
def test_pretrained_bfloat16_rows_on_disk(kind: type, tmp_path: Path):
    weights = (torch.randint(-99, 99, (3, 50)) / 8).bfloat16().t()  # steps of which are exact
    ids = torch.arange(50)[:, None]
    for stepped in range(2):
        layer = kind.from_pretrained(weights, freeze=False, path=tmp_path / "t.rock", memory="1MB")
        rows = weights.clone()
        rows[7] -= stepped
        assert torch.equal(layer(ids).reshape(50, 3), rows)
        optimizer = ert.SGD(layer, lr=1.0)
        layer(torch.tensor([[7]])).sum().backward()
        optimizer.step()
        layer.table.commit()
        layer.table.close()
    with pytest.raises(er.TableFileError, match=r"Pass it again: init=er\.FromBfloat16\(bits\)"):
        er.open(tmp_path / "t.rock")
    bits = weights.view(torch.int16).numpy()
    with er.open(tmp_path / "t.rock", init=er.FromBfloat16(bits)) as table:
        assert np.array_equal(table.lookup([3]), weights[3:4].float().numpy())


# ---------------------------------------------------------------- states


def meta_of(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return what a state dict says of a table: of one on disk, the reference."""
    return json.loads(bytes(state[prefix + "rows.meta"].numpy()))


def trained(tmp_path: Path, steps: int = 3) -> tuple[Model, list[torch.optim.Optimizer]]:
    model = Model(tmp_path)
    optimizers = optimizers_of(model)
    for k in range(steps):
        step(model, optimizers, Batches()[k])
    return model, optimizers


def test_a_state_has_only_the_reference(tmp_path: Path):
    model, optimizers = trained(tmp_path)
    model.user.table.commit(step=3)
    state = model.state_dict()
    user, item = meta_of(state, "user."), meta_of(state, "item.")
    table = model.user.table
    assert user == {"path": str(tmp_path / "users.rock"), "uuid": table.uuid, "commit": 2, "step": 3}
    assert (item["commit"], item["step"]) == (1, None)  # committed, because it had changed
    assert not model.item.table.uncommitted
    assert meta_of(model.state_dict(), "item.") == item
    at_three = {name: model.user.table.lookup(np.arange(ROWS)) for name in ("user",)}
    dense = copy.deepcopy(model.dense.state_dict())
    state = saved(state)

    step(model, optimizers, Batches()[5])
    model.load_state_dict(state)
    assert np.array_equal(model.user.table.lookup(np.arange(ROWS)), at_three["user"])
    assert all(torch.equal(dense[name], value) for name, value in model.dense.state_dict().items())
    assert (table.steps, table.last_step) == (3, 3)
    last = table.last_commit
    step(model, optimizers, Batches()[5])
    assert table.steps == 4
    model.load_state_dict(saved(model.state_dict()))  # as it is: nothing to do
    assert table.steps == 4
    assert table.last_commit == last + 1
    model.close()


def names_of(table: er.Table) -> list[str | None]:
    return [commit["name"] for commit in table.commits()]


def test_a_state_can_be_loaded_however_many_commits_came_since(tmp_path: Path):
    model, optimizers = trained(tmp_path)
    table, states, rows = model.user.table, [], []
    for k in range(4):
        states.append(saved(model.state_dict()))
        rows.append(table.lookup(np.arange(ROWS)))
        for _ in range(3):
            step(model, optimizers, Batches()[k])
            table.commit()
    assert [name for name in names_of(table) if name] == [f"state_dict-{k}" for k in (1, 5, 9, 13)]
    for state, expected in zip(states, rows, strict=True):
        model.load_state_dict(state)
        assert np.array_equal(table.lookup(np.arange(ROWS)), expected)
    model.close()


def test_a_state_of_what_a_state_refers_to_makes_no_commit(tmp_path: Path):
    model, _ = trained(tmp_path)
    table = model.user.table
    first = meta_of(model.user.state_dict())
    assert meta_of(model.user.state_dict()) == first
    table.commit(name="best", step=7)  # somebody else may let go of that one
    second = meta_of(model.user.state_dict())
    assert (second["commit"], second["step"]) == (first["commit"] + 2, 7)
    table.release("best")
    assert [name for name in names_of(table) if name] == ["state_dict-1", "state_dict-3"]
    model.close()


def test_a_commit_that_was_let_go_of(tmp_path: Path):
    model, _ = trained(tmp_path)
    state = model.state_dict()
    ert.release(model, state)
    assert names_of(model.user.table)[-1] is None
    for _ in range(4):
        model.user.table.commit()
    with pytest.raises(er.ArgumentError, match=r"commit 1 of .*no longer kept: .*commits 4, 5\..*ert\.save"):
        model.load_state_dict(state)
    model.close()


def test_letting_go_of_states_that_hold_nothing(tmp_path: Path):
    model, _ = trained(tmp_path)
    model.user.table.commit(name="mine")
    kept = model.state_dict()
    other = Model(tmp_path / "other")
    for state in (other.state_dict(), Model().state_dict(), {}):
        ert.release(model, state)
    ert.release(model, {"user.rows.meta": kept["user.rows.meta"]})
    assert names_of(model.user.table)[-2:] == ["mine", None]
    assert names_of(model.item.table)[-1] == "state_dict-1"
    other.close()
    model.close()


def test_it_is_told_when_states_keep_many_commits(tmp_path: Path):
    layer = ert.Embedding(9, 2, path=tmp_path / "t.rock")
    told = []
    for _ in range(33):
        layer.table.assign([1], np.ones((1, 2)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer.state_dict()
        told += [str(each.message) for each in caught]
    assert [text.split()[2] for text in told] == ["16", "32"]
    assert "t.rock' keeps 16 commits because states refer to them" in told[0]
    assert "state_dict-<number>. Let go of those whose files are gone, by table.release(name)." in told[0]
    layer.table.close()


def test_it_is_told_that_nothing_keeps_the_commit_of_a_snapshot(tmp_path: Path):
    layer = ert.Embedding(9, 2, path=tmp_path / "t.rock")
    with er.open(tmp_path / "t.rock", mode="r") as snapshot:
        frozen = ert.Embedding(snapshot)
        with pytest.warns(ert.HeldCommitsWarning, match=r"refers to commit 0 of .*its writer drops .*with a name"):
            frozen.state_dict()
    layer.state_dict()
    with er.open(tmp_path / "t.rock", mode="r") as snapshot:
        ert.Embedding(snapshot).state_dict()  # a commit that is held
    layer.table.close()


def test_states_of_other_tables(tmp_path: Path):
    model, _ = trained(tmp_path)
    reference = model.user.state_dict()
    other = ert.Embedding(ROWS, DIM, path=tmp_path / "other.rock")
    with pytest.raises(er.ArgumentError, match=f"{other.table.uuid}.*{model.user.table.uuid}.*path="):
        other.load_state_dict(reference)
    in_ram = ert.Embedding(ROWS, DIM)
    with pytest.raises(er.ArgumentError, match=r"must have rows.*commit 1 .*users\.rock.*Make the layer with"):
        in_ram.load_state_dict(reference)
    before = model.user.table.lookup(np.arange(ROWS))
    with pytest.raises(er.ArgumentError, match="commit, step missing"):
        model.user.load_state_dict({"_extra_state": {"uuid": model.user.table.uuid, "path": "x"}})
    assert np.array_equal(model.user.table.lookup(np.arange(ROWS)), before)
    other.table.close()
    model.close()


def test_a_table_that_was_moved_is_known_by_its_uuid(tmp_path: Path):
    model, _ = trained(tmp_path)
    state, before = saved(model.state_dict()), model.user.table.lookup(np.arange(ROWS))
    model.close()
    (tmp_path / "users.rock").rename(tmp_path / "elsewhere.rock")
    layer = ert.Embedding(ROWS, DIM, path=tmp_path / "elsewhere.rock")
    layer.load_state_dict({"rows.meta": state["user.rows.meta"]})
    assert np.array_equal(layer.table.lookup(np.arange(ROWS)), before)
    layer.table.close()


def test_weights_of_nn_embedding_are_written_to_disk(tmp_path: Path):
    theirs = nn.Embedding(ROWS, DIM)
    layer = ert.Embedding(ROWS, DIM, path=tmp_path / "t.rock", memory="80KB")
    layer.load_state_dict(theirs.state_dict())
    layer.table.commit()
    assert torch.equal(layer(torch.arange(ROWS)), theirs(torch.arange(ROWS)))
    layer.table.close()


def test_copies_are_refused_and_pickles_go_by_name(tmp_path: Path):
    layer = ert.Embedding(9, 2, path=tmp_path / "t.rock", name="on disk")
    with pytest.raises(er.UnsupportedError, match=r"deepcopy.*on disk"):
        copy.deepcopy(nn.Sequential(layer))
    assert pickle.loads(pickle.dumps(layer)).table is layer.table
    assert meta_of(copy.deepcopy(layer.state_dict()))["uuid"] == layer.table.uuid
    layer.table.close()


def test_a_snapshot_in_a_layer(tmp_path: Path):
    model, _ = trained(tmp_path)
    state = model.user.state_dict()
    with er.open(tmp_path / "users.rock", mode="r") as snapshot:
        layer = ert.Embedding(snapshot).requires_grad_(False)
        assert torch.equal(layer(torch.arange(9)), model.user(torch.arange(9)))
        assert meta_of(layer.state_dict()) == meta_of(state)
        layer.load_state_dict(state)
    model.close()


def test_a_frozen_snapshot_beside_a_layer_that_trains(tmp_path: Path):
    with er.Table(50, DIM, path=tmp_path / "t.rock", rule=er.SGD()) as table:
        table.assign(np.arange(50), np.random.default_rng(1).normal(size=(50, DIM)))
        table.commit()
    with er.open(tmp_path / "t.rock", mode="r") as snapshot:
        frozen, trains = ert.Embedding(snapshot).requires_grad_(False), ert.Embedding(ROWS, DIM)
        model, ids = nn.ModuleDict({"frozen": frozen, "trains": trains}), torch.arange(9)
        optimizer, before = ert.Adam(model, lr=0.05), frozen(ids)
        assert snapshot.rule == er.SGD()
        for _ in range(2):
            optimizer.zero_grad()
            (frozen(ids) * trains(ids)).sum().backward()
            optimizer.step()
        assert trains.table.steps == 2
        assert torch.equal(frozen(ids), before)

        trained = trains(ids)
        frozen.requires_grad_(True)
        optimizer.zero_grad()
        (frozen(ids) * trains(ids)).sum().backward()
        with pytest.raises(er.ReadOnlyTableError):
            optimizer.step()
        assert torch.equal(trains(ids), trained)  # no table was stepped
        assert torch.equal(frozen(ids), before)
    optimizer.zero_grad()


# ---------------------------------------------------------------- looking ahead


def test_what_ids_of_may_return(tmp_path: Path):
    seen: list[list[int]] = []

    class Spy(er.Table):
        def bring(self, ids: Any) -> Any:
            seen.append(np.sort(ids).tolist())
            return super().bring(ids)

    table = Spy(99, 2)
    layer, bag = ert.Embedding(table), ert.EmbeddingBag(table)
    returned = [
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor([5, 6], dtype=torch.int32),
        np.array([7, 8]),
        [9, 10],
        (torch.tensor([11]), np.array([[12]]), torch.tensor(13)),
        [],
        [torch.tensor([], dtype=torch.int64)],
    ]
    assert [k for k, _ in ert.prefetch(enumerate(returned), {layer: lambda item: item[1]})] == list(range(7))
    assert seen == [[1, 2, 3, 4], [5, 6], [7, 8], [9, 10], [11, 12, 13], [], []]
    seen.clear()
    list(
        ert.prefetch([1, 2], {layer: lambda k: [k], bag: lambda k: torch.tensor([k + 50]), er.Table(9, 2): lambda k: k})
    )
    assert seen == [[1, 51], [2, 52]]  # layers of one table are one


@pytest.mark.parametrize(
    ("ids_of", "text"),
    [
        ({}, "must be a dict"),
        (None, "must be a dict from layers to functions: got None"),
        ({"user": len}, "must have layers of Embedrock's as its keys: got 'user'"),
        ({nn.Linear(1, 1): len}, "got Linear"),
        ({ert.Embedding(9, 2): "user"}, "must have functions of a batch as its values: got 'user'"),
    ],
)
def test_arguments_are_checked_at_once(ids_of: Any, text: str):
    with pytest.raises(er.ArgumentError, match=text):
        ert.prefetch([1], ids_of)


def test_ids_that_are_none(tmp_path: Path):
    layer = ert.Embedding(9, 2, path=tmp_path / "t.rock")
    batches = ert.prefetch([torch.tensor([1]), torch.tensor([0.5]), torch.tensor([9])], {layer: lambda ids: ids}, 1)
    next(batches)
    with pytest.raises(er.IdTypeError, match=r"Embedding\(9, 2\).*torch.float32"):
        next(batches)
    with pytest.raises(er.IdError, match="got 9"):
        list(ert.prefetch([torch.tensor([9])], {layer: lambda ids: ids}, 1))
    layer.table.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_loader_comes_in_its_place(workers: int, tmp_path: Path):
    model, count = Model(tmp_path, "300KB"), 0
    optimizers = optimizers_of(model)

    def loop() -> None:
        nonlocal count
        loader = DataLoader(Batches(spoilt=7), batch_size=None, num_workers=workers)
        for batch in ert.prefetch(loader, wanted(model), 3):
            step(model, optimizers, batch)
            count += 1

    with pytest.raises(ValueError, match="this one is spoilt"):
        loop()
    assert count == 7
    model.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_random_batches_are_those_of_the_loader(workers: int):
    def batches(depth: int) -> list[Tensor]:
        torch.manual_seed(4)
        loader = DataLoader(torch.arange(40), batch_size=4, shuffle=True, num_workers=workers)  # pyright: ignore[reportArgumentType]
        layer = ert.Embedding(99, 2)
        return list(ert.prefetch(loader, {layer: lambda ids: ids}, depth))

    assert all(map(torch.equal, batches(0), batches(3)))


def test_leaving_a_loop_over_workers(tmp_path: Path):
    model = Model(tmp_path, "300KB")
    for _ in range(3):
        for k, _ in enumerate(ert.prefetch(DataLoader(Batches(), None, num_workers=2), wanted(model), 4)):
            if k == 2:
                break
    model.close()


@pytest.mark.slow  # tests/table/test_prefetch.py has a table that ends so
def test_a_script_that_ends_in_the_loop(tmp_path: Path):
    # Python would end the thread inside of a kernel, and sometimes abort: it has ended before.
    program = f"""
import atexit, threading
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name == "embedrock-prefetch"]))
import torch, embedrock.torch as ert
layer = ert.Embedding(300_000, 4, path={str(tmp_path / "t.rock")!r})
batches = ert.prefetch([torch.arange(300_000)] * 20, {{layer: lambda ids: ids}}, 19)
print(next(batches).shape)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (result.stdout, result.returncode) == ("torch.Size([300000])\n[]\n", 0), result.stderr


@pytest.mark.parametrize("kind", [ert.Embedding, ert.EmbeddingBag])
def test_pretrained_layers_take_no_other_first_values_and_say_what_they_are_called(kind: Any):
    with pytest.raises(er.UnsupportedError, match=rf"`init` of ert\.{kind.__name__}: the weights are the first values"):
        kind.from_pretrained(torch.ones(3, 2), init=er.Zeros())
    with pytest.raises(er.UnknownArgumentError, match=rf"ert\.{kind.__name__} has no argument `memroy`"):
        kind.from_pretrained(torch.ones(3, 2), memroy="1MiB")
