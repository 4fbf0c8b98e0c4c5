"""Rows in state dicts: flat tensors that any saver takes, and a snapshot whatever happens later."""

from __future__ import annotations

import copy
import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from twins import DIM, ROWS, weight_of

import embedrock as er
import embedrock.torch as ert
from suites.rules import RULE_CASES

IDS = torch.tensor([3, 1, 3, 7])
OPTIMIZERS = [
    ert.SGD,
    ert.Momentum,
    ert.Adagrad,
    ert.RowwiseAdagrad,
    ert.RMSprop,
    ert.Adam,
    ert.AdamW,
    ert.Ftrl,
    ert.RowwiseRMSprop,
]


def made(kind: type[ert.RowOptimizer] = ert.Adam, rows: int | None = ROWS, **arguments: Any) -> tuple[Any, Any]:
    """Return a model of two layers, an `nn.ModuleDict`, and its optimizers."""
    options = {name: arguments.pop(name) for name in ("dtype", "directory") if name in arguments}
    user, item = ert.Embedding(rows, DIM, seed=1, **options), ert.EmbeddingBag(rows, DIM, seed=2, **options)
    model = nn.ModuleDict({"user": user, "item": item, "dense": nn.Linear(DIM, 1)})
    optimizers = [kind(model, lr=0.05, **arguments), torch.optim.Adam(ert.dense_parameters(model), lr=0.05)]
    return model, optimizers


def train(model: Any, optimizers: Any, steps: range) -> None:
    for k in steps:
        ids = (IDS * (k + 1)) % ROWS
        hidden = model["user"](ids).float() + model["item"](ids[:, None]).float()
        model["dense"](hidden).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def rows(model: Any) -> list[Tensor]:
    return [weight_of(model[name]).clone() for name in ("user", "item")]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# ---------------------------------------------------------------- form


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_has_tensors_of_plain_dtypes_only(dtype: torch.dtype):
    model, optimizers = made(dense=True, dtype=dtype)
    train(model, optimizers, range(3))
    state = model["user"].state_dict()
    count = int(model["user"].table.stats()["rows_touched"])
    kinds = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in state.items() if key != "rows.meta"}
    assert kinds == {
        "rows.ids": (torch.int64, (count,)),
        "rows.weight": (dtype, (count, DIM)),
        "rows.exp_avg": (torch.float32, (count, DIM)),
        "rows.exp_avg_sq": (torch.float32, (count, DIM)),
        "rows.last_step": (torch.float32, (count, 1)),
        "rows.history_table": (torch.float32, kinds["rows.history_table"][1]),
        "rows.history_log_fade": (torch.float64, kinds["rows.history_log_fade"][1]),
    }
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)
    meta = json.loads(bytes(state["rows.meta"].numpy()))
    assert (meta["rows"], meta["dim"], meta["steps"], meta["count"]) == (ROWS, DIM, 3, count)
    assert meta["rule"]["name"] == "Adam"


def test_the_weights_of_a_state_are_those_of_its_ids():
    model, optimizers = made()
    train(model, optimizers, range(3))
    state = model["user"].state_dict()
    assert torch.equal(state["rows.weight"], weight_of(model["user"])[state["rows.ids"]])


def test_arrays_without_elements_are_left_out():
    """Savers take them all for one tensor, as they share an address: none."""
    assert list(ert.Embedding(ROWS, DIM).state_dict()) == ["rows.meta"]


# ---------------------------------------------------------------- savers


def through_torch(state: dict[str, Any], path: Path) -> dict[str, Any]:
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def through_safetensors(state: dict[str, Any], path: Path) -> dict[str, Any]:
    save_file(state, path)
    return load_file(path)


def through_numpy(state: dict[str, Any], path: Path) -> dict[str, Any]:
    np.savez(path.with_suffix(".npz"), **{key: tensor.numpy() for key, tensor in state.items()})
    with np.load(path.with_suffix(".npz")) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("through", [through_torch, through_safetensors, through_numpy])
def test_training_goes_on_to_the_same_bits(kind: Any, through: Any, tmp_path: Path):
    assert len(OPTIMIZERS) == len({type(case.rule) for case in RULE_CASES})
    model, optimizers = made(kind)
    train(model, optimizers, range(3))
    states = [optimizer.state_dict() for optimizer in optimizers]
    loaded = through(model.state_dict(), tmp_path / "state")
    again, its_optimizers = made(kind)
    again.load_state_dict(loaded)
    for optimizer, state in zip(its_optimizers, copy.deepcopy(states), strict=True):
        optimizer.load_state_dict(state)
    for each, group in ((model, optimizers), (again, its_optimizers)):
        train(each, group, range(3, 6))
    assert same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("steps", [0, 3])
def test_safetensors_saves_and_loads_a_model(steps: int, tmp_path: Path):
    model, optimizers = made()
    train(model, optimizers, range(steps))
    save_model(model, str(tmp_path / "model.safetensors"))
    again, _ = made()
    load_model(again, tmp_path / "model.safetensors")
    assert same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", ["in RAM", "on disk", "tied"])
def test_whatever_a_table_is(kind: str, tmp_path: Path):
    path: Any = {"path": tmp_path / "t.rock"} if kind == "on disk" else {}
    layer = ert.Embedding(ROWS, DIM, **path)
    model = nn.ModuleList([layer, ert.EmbeddingBag(layer.table)] if kind == "tied" else [layer])
    optimizer = ert.Adam(model)
    layer(IDS).sum().backward()
    optimizer.step()
    before = weight_of(layer)
    save_file(model.state_dict(), tmp_path / "one")
    layer(IDS).sum().backward()
    optimizer.step()
    assert not torch.equal(weight_of(layer), before)
    load_model(model, tmp_path / "one")
    assert torch.equal(weight_of(layer), before)
    layer.table.close()


# ---------------------------------------------------------------- a snapshot


@pytest.mark.parametrize("directory", ["direct", "hashed"])
@pytest.mark.parametrize("dense", [False, True])
def test_a_state_stays_as_it_was(directory: str, dense: bool):
    model, optimizers = made(dense=dense, directory=directory)
    train(model, optimizers, range(3))
    state, before = model.state_dict(), rows(model)
    kept = copy.deepcopy(state)
    train(model, optimizers, range(3, 13))
    assert same({k: v for k, v in state.items() if ".rows." in k}, {k: v for k, v in kept.items() if ".rows." in k})
    assert not torch.equal(rows(model)[0], before[0])
    model.load_state_dict(kept)
    optimizers[0].load_state_dict(optimizers[0].state_dict())
    assert all(map(torch.equal, rows(model), before))
    assert model["user"].table.steps == 3


def test_the_state_of_a_table_stays_as_it_was():
    with er.Table(None, DIM, rule=er.SGD()) as table:
        table.update([1, 2], np.ones((2, DIM), np.float32))
        state, before = table.state(), table.lookup([1, 2, 3])
        table.update([2, 3], np.ones((2, DIM), np.float32))
        table.load_state(state)
        assert np.array_equal(table.lookup([1, 2, 3]), before)


def test_a_state_is_not_a_way_to_write_rows():
    model, optimizers = made()
    train(model, optimizers, range(1))
    before = rows(model)
    for tensor in model.state_dict().values():
        if tensor.dtype == torch.float32:
            tensor.zero_()
    assert all(map(torch.equal, rows(model), before))


# ---------------------------------------------------------------- older states, and wrong ones


def test_states_that_were_saved_before_there_were_tensors():
    """`state-1.pt` was written by Embedrock 0.1: see `made_by_embedrock_0_1`."""
    saved = torch.load(Path(__file__).with_name("state-1.pt"), weights_only=True)
    assert isinstance(saved["model"]["adam._extra_state"], dict)
    model: Any = nn.ModuleDict(made_by_embedrock_0_1())
    model.load_state_dict(saved["model"])
    ids = torch.arange(50)
    assert torch.equal(model["adam"](ids), saved["adam"])
    assert torch.equal(model["open"](ids[:, None] * 10**12), saved["open"])
    again = nn.ModuleDict(made_by_embedrock_0_1())
    again.load_state_dict(model.state_dict())
    assert same(again.state_dict(), model.state_dict())


def made_by_embedrock_0_1() -> dict[str, nn.Module]:
    """Return layers, of which Embedrock 0.1 trained two: Adam(dense=True) and RowwiseAdagrad, four steps."""
    bag = ert.EmbeddingBag(None, 3, dtype=torch.bfloat16, seed=5)
    return {"adam": ert.Embedding(50, 3, seed=4), "open": bag, "dense": nn.Linear(3, 1)}


def changed(**changes: Any) -> dict[str, Any]:
    """Return the state of a trained layer with other tensors; None: without them."""
    model, optimizers = made()
    train(model, optimizers, range(3))
    state = {key: tensor for key, tensor in model["user"].state_dict().items() if changes.get(key, 0) is not None}
    return state | {key: tensor for key, tensor in changes.items() if tensor is not None}


WRONG = {
    "ids that are missing": (
        {"rows.ids": None},
        r"`rows\.ids`.* must be torch\.int64 \(8,\), .*: got none\. ",
    ),
    "no weights": ({"rows.weight": None}, r"`rows\.weight`.*got none"),
    "half": (
        {"rows.weight": torch.zeros(8, DIM).half()},
        r"be torch\.float32 \(8, 5\).*got torch\.float16 \(8, 5\)\. The",
    ),
    "fewer": ({"rows.exp_avg": torch.zeros(5, DIM)}, r"`rows\.exp_avg`.*got torch\.float32 \(5, 5\)"),
    "no JSON": ({"rows.meta": torch.zeros(3, dtype=torch.uint8)}, r"`rows\.meta`.*'user'.*JSON object"),
    "no object": ({"rows.meta": torch.tensor(list(b"[1]"), dtype=torch.uint8)}, "JSON object"),
    "no tensor": ({"rows.meta": "text"}, "JSON object"),
    "nothing": ({"rows.meta": torch.tensor(list(b"{}"), dtype=torch.uint8)}, "must describe a table"),
}


@pytest.mark.parametrize("what", WRONG)
def test_tensors_that_do_not_belong_together(what: str):
    changes, text = WRONG[what]
    model, optimizers = made()
    train(model, optimizers, range(1))
    before = model["user"].state_dict()
    with pytest.raises(er.ArgumentError, match=text):
        model["user"].load_state_dict(changed(**changes))
    assert same(model["user"].state_dict(), before)


def test_code_that_keeps_tensors_of_equal_shapes_loses_no_rows_in_silence():
    model, optimizers = made()
    train(model, optimizers, range(3))
    state = model.state_dict()
    for steps in (0, 1, 3):
        other, others = made()
        train(other, others, range(steps))
        own, ours = other.state_dict(), other["user"].table.steps
        kept = {key: tensor for key, tensor in state.items() if key in own and own[key].shape == tensor.shape}
        if steps == 3:
            other.load_state_dict(kept, strict=False)
            assert same(other.state_dict(), state)
            continue
        with pytest.raises(er.ArgumentError, match=r"`rows\.\w+` .*belong together"):
            other.load_state_dict(kept, strict=False)
        del kept["user.rows.meta"]
        if any(key.startswith("user.rows.") for key in kept):
            with pytest.raises(er.ArgumentError, match=r"must have `rows\.meta` beside .*belong together"):
                other["user"].load_state_dict({key[5:]: kept[key] for key in kept if key[:5] == "user."}, strict=False)
        assert other["user"].table.steps == ours


def test_a_mean_of_all_tensors_names_what_averages_rows():
    one, other = made()[0]["user"], made()[0]["user"]
    states = [layer.state_dict() for layer in (one, other)]
    mean = {key: (states[0][key].float() + states[1][key].float()) / 2 for key in states[0]}
    with pytest.raises(
        er.ArgumentError, match=r"layer\.table\.assign\(ids, \(layer\(ids\) \+ other\(ids\)\)\.detach\(\) / 2"
    ):
        one.load_state_dict(mean)
    ids = torch.arange(8)
    wanted = (one(ids) + other(ids)) / 2
    one.table.assign(ids, (one(ids) + other(ids)).detach() / 2)
    assert torch.equal(one(ids), wanted)


def test_keys_that_no_table_has():
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"rows\.other"'):
        made()[0]["user"].load_state_dict(changed(**{"rows.other": torch.zeros(1)}))


def test_ids_that_repeat():
    with pytest.raises(er.ArgumentError, match="not repeat"):
        made()[0]["user"].load_state_dict(changed(**{"rows.ids": torch.zeros(8, dtype=torch.int64)}))


# ---------------------------------------------------------------- pretrained rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pretrained_rows_are_known_again(dtype: torch.dtype):
    weights = torch.randn(ROWS, DIM).to(dtype)
    state = ert.Embedding.from_pretrained(weights).state_dict()
    ert.Embedding.from_pretrained(weights.clone()).load_state_dict(state)
    weights[ROWS - 1, 0] += 1
    other = ert.Embedding.from_pretrained(weights)
    with pytest.raises(er.ArgumentError, match=r"must have first values .* of digest [0-9a-f]{16}, other rows\. Make"):
        other.load_state_dict(state)


def test_large_pretrained_rows_are_not_read_whole(tmp_path: Path):
    array = np.memmap(tmp_path / "w", np.float32, "w+", shape=(3_000_000, 8))  # 96 MB
    state = ert.Embedding.from_pretrained(array).state_dict()
    assert torch.from_numpy(array).numel()
    array[0] = 1  # the first row is looked at, whatever others are
    with pytest.raises(er.ArgumentError, match="first values"):
        ert.Embedding.from_pretrained(array).load_state_dict(state)


def test_a_state_saved_to_memory():
    model, optimizers = made(rows=None)
    train(model, optimizers, range(2))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again, _ = made(rows=None)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again["user"](IDS), model["user"](IDS))


def test_a_state_is_of_one_moment_whatever_other_threads_do():
    """Each step adds 1 to every row, so that all weights of a state are equal."""
    layer, stop = ert.Embedding(None, 64, init=er.Zeros()), threading.Event()
    layer.table.set_rule(er.SGD(lr=1.0))
    ids, down = np.arange(4000), -np.ones((4000, 64), np.float32)
    layer.table.update(ids, down)

    def step() -> None:
        while not stop.is_set():
            layer.table.update(ids, down)

    thread = threading.Thread(target=step)
    thread.start()
    try:
        states = [layer.state_dict() for _ in range(12)]
    finally:
        stop.set()
        thread.join()
    for state in states:
        steps = json.loads(bytes(state["rows.meta"].numpy()))["steps"]
        assert (state["rows.weight"] == steps).all()


@pytest.mark.parametrize("kind", [ert.RMSprop, ert.Adam, ert.Momentum, ert.Ftrl])
def test_rows_of_dense_rules_that_have_made_no_step_are_loaded(kind: type[ert.RowOptimizer]) -> None:
    model, _ = made(kind, dense=True)
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    again, _ = made(kind, dense=True)
    again.load_state_dict(state)
    assert again["user"].table.steps == 0
