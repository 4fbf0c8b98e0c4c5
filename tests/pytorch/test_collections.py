"""`ert.EmbeddingBagCollection` and `ert.EmbeddingCollection` against the same layers called one by one, to the bit."""

from __future__ import annotations

import copy
import enum
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from keyed import Keyed, keyed
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert
from embedrock.errors import ArgumentError, IdError, IdTypeError, NonFiniteGradientError, UnsupportedError
from embedrock.table import batches
from slow import slow

BATCH = 6
# What layers are made with, by table; dims and modes differ, so that there are several pools and kinds of bags.
TABLES: dict[str, dict[str, Any]] = {
    "user": {"num_embeddings": 40, "embedding_dim": 4, "mode": "sum"},
    "items": {"num_embeddings": None, "embedding_dim": 4, "mode": "mean", "padding_idx": 0},
    "type": {"num_embeddings": 9, "embedding_dim": 3, "mode": "max"},
    "hour": {"num_embeddings": 24, "embedding_dim": 4, "mode": "sum", "padding_idx": 3},
}


def layers(group: er.Group | None = None, **more: Any) -> dict[str, ert.EmbeddingBag]:
    """Return layers by feature; those of `group`, or each alone. Both have the same rows."""
    made = {}
    for seed, (name, arguments) in enumerate(TABLES.items()):
        made[name] = ert.EmbeddingBag(**arguments, **more, seed=seed, group=group, name=None if group is None else name)
    return made


def collection(**more: Any) -> ert.EmbeddingBagCollection:
    return ert.EmbeddingBagCollection(layers(er.Group(), **more))


def batch(seed: int) -> dict[str, Any]:
    """Return a batch in each of the forms that features may have; bags may be empty, and ids repeat."""
    rng = np.random.default_rng(seed)
    cuts = torch.from_numpy(np.sort(rng.integers(0, 12, BATCH)))
    cuts[0] = 0
    parts = [torch.from_numpy(rng.integers(0, 9, size)) for size in (0, 3, 1, 0, 7, 2)]
    return {
        "user": torch.from_numpy(rng.integers(0, 40, (BATCH, 3))),
        "items": (torch.from_numpy(rng.integers(0, 2, 12)) * torch.from_numpy(rng.integers(0, 2**40, 12)), cuts),
        "type": torch.nested.nested_tensor(parts, layout=torch.jagged),
        "hour": torch.from_numpy(rng.integers(0, 24, BATCH)),
    }


def one_by_one(made: Mapping[str, nn.Module], given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what layers return that are called by themselves."""
    out = {}
    for name, layer in made.items():
        ids = given[name]
        args = ids if isinstance(ids, tuple) else (ids if ids.is_nested or ids.dim() == 2 else ids[:, None],)
        out[name] = layer(*args)
    return out


def loss_of(out: Mapping[str, Tensor]) -> Tensor:
    """Return a loss whose gradient differs for each output, and each of its elements."""
    factors = (torch.linspace(-1, k + 2, each.numel()).reshape(each.shape) for k, each in enumerate(out.values()))
    return sum((each * factor).square().sum() for each, factor in zip(out.values(), factors, strict=True))  # type: ignore


def both(optimizer: str = "Adam", **more: Any) -> tuple[Any, Any, Any, Any]:
    """Return a collection and layers alone, and an optimizer of each."""
    joint, alone = collection(), layers()
    made = getattr(ert, optimizer)
    return joint, alone, made(joint, lr=0.1, **more), made(nn.ModuleList(alone.values()), lr=0.1, **more)


def shown(layer: ert.EmbeddingBag) -> float:
    """Return the norm that a layer's handle shows."""
    assert layer.handle.grad is not None
    return layer.handle.grad.item()


def ids_of(table: er.Table) -> np.ndarray:
    return table.export()[0] if table.rows is None else np.arange(table.rows)


def check_same(joint: Any, alone: Mapping[str, Any]) -> None:
    """Compare all rows, optimizer state and counts of steps."""
    for name, layer in alone.items():
        mine, theirs = joint.layer_of(name).table, layer.table
        for count in ("steps", "skipped_steps", "rows_touched"):
            assert mine.stats()[count] == theirs.stats()[count], (name, count)
        np.testing.assert_array_equal(mine.export()[0], theirs.export()[0])
        np.testing.assert_array_equal(mine.lookup(ids_of(mine)), theirs.lookup(ids_of(theirs)), err_msg=name)
        states = mine.state(), theirs.state()
        order = [np.argsort(state["ids"]) for state in states]
        np.testing.assert_array_equal(*(state["records"][by] for state, by in zip(states, order, strict=True)))


def same(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert list(mine) == list(theirs)
    for name, each in mine.items():
        assert torch.equal(each, theirs[name]), name
        assert each.requires_grad == theirs[name].requires_grad, name


OPTIMIZERS = {
    "sgd": ("SGD", {}),
    "adam": ("Adam", {}),
    "dense adam": ("Adam", {"dense": True}),
    "rowwise adagrad": ("RowwiseAdagrad", {}),
    "ftrl": ("Ftrl", {}),
}


def train_alike(joint: Any, alone: Any, *optimizers: Any) -> None:
    """Make some steps, and check that outputs and rows are the same."""
    for seed in range(3):
        out, expected = joint(batch(seed)), one_by_one(alone, batch(seed))
        same(out, expected)
        loss_of(out).backward()
        loss_of(expected).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    check_same(joint, alone)


@pytest.mark.parametrize(("optimizer", "more"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_is_that_of_the_layers_one_by_one(optimizer: str, more: dict[str, Any]):
    joint, alone, ours, theirs = both(optimizer, **more)
    for seed in range(5):
        out, expected = joint(batch(seed)), one_by_one(alone, batch(seed))
        same(out, expected)
        loss_of(out).backward()
        loss_of(expected).backward()
        for name, layer in alone.items():
            assert shown(joint.layer_of(name)) == shown(layer), name
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
        check_same(joint, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float16)], ids=str)
def test_rows_of_16_bits(dtype: torch.dtype):
    joint, alone = collection(dtype=dtype), layers(dtype=dtype)
    ours, theirs = ert.SGD(joint, lr=0.1), ert.SGD(nn.ModuleList(alone.values()), lr=0.1)
    train_alike(joint, alone, ours, theirs)


def test_rows_are_those_of_dense_layers_and_their_optimizer():
    group, plain = er.Group(), {}
    made = {name: ert.EmbeddingBag(20, 4, mode=mode, group=group, name=name) for name, mode in MODES.items()}
    for name, layer in made.items():
        plain[name] = nn.EmbeddingBag.from_pretrained(
            layer(torch.arange(20)[:, None]).detach(), False, mode=MODES[name]
        )
    joint, dense = (
        ert.EmbeddingBagCollection(made),
        torch.optim.Adagrad(nn.ModuleList(plain.values()).parameters(), 0.1),
    )
    rows = ert.Adagrad(joint, lr=0.1, eps=1e-10)
    for seed in range(4):
        given = {
            name: torch.from_numpy(np.random.default_rng((seed, len(name))).integers(0, 20, (5, 3))) for name in MODES
        }
        for optimizer, loss in ((rows, loss_of(joint(given))), (dense, loss_of(one_by_one(plain, given)))):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for name, layer in made.items():
        torch.testing.assert_close(torch.from_numpy(layer.table.lookup(np.arange(20))), plain[name].weight.detach())


MODES = {"one": "sum", "three": "mean", "seven": "max"}


def test_each_part_of_a_step_is_one_call_for_all_tables(monkeypatch: pytest.MonkeyPatch):
    joint, _, optimizer, _ = both()
    calls: dict[str, int] = dict.fromkeys(["read", "sum_blocks"], 0)
    for name in calls:
        counted(monkeypatch, batches, name, calls)
    loss_of(joint(batch(0))).backward()
    optimizer.step()
    assert calls == {"read": 1, "sum_blocks": 1}


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, calls: dict[str, int]) -> None:
    function = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, call)


def test_features_that_share_a_table_are_one_batch_of_it():
    config = ert.EmbeddingBagConfig(12, 4, "page", feature_names=["seen", "bought"], seed=0)
    joint, alone = ert.EmbeddingBagCollection([config]), ert.EmbeddingBag(12, 4, mode="sum", seed=0)
    ours, theirs = ert.Adam(joint, lr=0.1), ert.Adam(alone, lr=0.1)
    for seed in range(3):
        seen, bought = torch.from_numpy(np.random.default_rng(seed).integers(0, 12, (2, 5, 3)))
        out, expected = joint({"seen": seen, "bought": bought}), alone(torch.cat([seen, bought]))
        assert torch.equal(torch.cat([out["seen"], out["bought"]]), expected)
        (torch.cat([out["seen"], out["bought"]]).square() * FACTORS).sum().backward()
        (expected.square() * FACTORS).sum().backward()
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    np.testing.assert_array_equal(joint.layer_of("seen").table.lookup(np.arange(12)), alone.table.lookup(np.arange(12)))


FACTORS = torch.linspace(-1, 2, 40).reshape(10, 4)


def test_a_feature_that_the_loss_does_not_see_touches_no_row():
    joint, alone, ours, theirs = both()
    for seed, seen in enumerate(("user", "hour", "items")):
        for out in (joint(batch(seed)), one_by_one(alone, batch(seed))):
            loss_of({seen: out[seen]}).backward()
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    check_same(joint, alone)
    shared = ert.EmbeddingBagCollection([ert.EmbeddingBagConfig(12, 4, "page", feature_names=["seen", "bought"])])
    optimizer = ert.Adam(shared, lr=0.1)
    shared({"seen": torch.tensor([1, 2]), "bought": torch.tensor([2, 3])})["seen"].sum().backward()
    optimizer.step()
    assert sorted(shared.layer_of("seen").table.export()[0]) == [1, 2]


# ---------------------------------------------------------------- what is done to gradients


def trained(change: Any, optimizer: str = "Adam", steps: int = 3, micro: int = 1) -> None:
    """Train a collection and layers alone, doing `change(handles)` after each backward, and compare."""
    joint, alone, ours, theirs = both(optimizer)
    for step in range(steps):
        for part in range(micro):
            loss_of(joint(batch(9 * step + part))).backward()
            loss_of(one_by_one(alone, batch(9 * step + part))).backward()
        for made in (joint, nn.ModuleList(alone.values())):
            change(ert.handles(made))
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
        check_same(joint, alone)


def test_clipping_by_the_norm_of_all():
    norms: list[Tensor] = []
    trained(lambda handles: norms.append(nn.utils.clip_grad_norm_(handles, 0.5)), "SGD")
    assert all(mine.item() == theirs.item() > 0.5 for mine, theirs in zip(norms[::2], norms[1::2], strict=True))


def test_clipping_by_the_norm_of_each_and_by_value():
    trained(lambda handles: [nn.utils.clip_grad_norm_([handle], 0.3) for handle in handles])
    trained(lambda handles: nn.utils.clip_grad_value_(handles, 0.1))


def test_micro_batches_accumulate():
    trained(lambda handles: None, micro=3)
    trained(lambda handles: [handle.grad.div_(3) for handle in handles], "SGD", micro=3)


def test_some_gradients_may_be_dropped():
    trained(lambda handles: handles[1].grad.zero_())
    trained(lambda handles: setattr(handles[2], "grad", None))


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing(to_none: bool):
    joint, alone, ours, theirs = both()
    for seed in range(3):
        for out in (joint(batch(seed)), one_by_one(alone, batch(seed))):
            loss_of(out).backward()
        for each in (ours, theirs):
            each.zero_grad(set_to_none=to_none)
            each.step()  # where gradients are zeros and not None, a step is made
        loss_of(joint(batch(seed + 5))).backward()
        loss_of(one_by_one(alone, batch(seed + 5))).backward()
        for each in (ours, theirs):
            each.step()
    check_same(joint, alone)


def test_a_frozen_table():
    joint, alone, ours, theirs = both()
    for made in (joint.layer_of("items"), alone["items"]):
        made.requires_grad_(False)
    train_alike(joint, alone, ours, theirs)
    assert joint.layer_of("items").table.steps == 0 < joint.layer_of("user").table.steps


def test_a_step_with_inf_is_skipped_by_the_scaler():
    joint, alone, ours, theirs = both()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for seed in range(4):
        pairs = (scalers[0], joint(batch(seed)), ours), (scalers[1], one_by_one(alone, batch(seed)), theirs)
        for scaler, out, optimizer in pairs:
            factor = float("inf") if seed == 1 else 1.0
            scaler.scale(loss_of(out) + factor * out["user"].sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([h for g in optimizer.param_groups for h in g["params"]], 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    check_same(joint, alone)
    assert joint.layer_of("user").table.steps == 3


def test_nothing_is_stepped_where_one_table_refuses():
    joint, _, optimizer, _ = both()
    out = joint(batch(0))
    (loss_of(out) + float("nan") * out["hour"].sum()).backward()
    with pytest.raises(NonFiniteGradientError, match="hour"):
        optimizer.step()
    assert [joint.layer_of(name).table.steps for name in TABLES] == [0, 0, 0, 0]
    assert [len(joint.layer_of(name).table.export()[0]) for name in TABLES] == [0, 1, 0, 1]  # the padding rows


def test_weights_of_positions_get_gradients():
    group = er.Group()
    arguments: dict[str, dict[str, Any]] = {
        "a": {"num_embeddings": 9, "embedding_dim": 4, "padding_idx": 2},
        "b": {"num_embeddings": 7, "embedding_dim": 4},
    }
    made = [
        {
            name: ert.EmbeddingBag(**more, mode="sum", seed=1, group=one, name=None if one is None else name)
            for name, more in arguments.items()
        }
        for one in (group, None)
    ]
    joint = ert.EmbeddingBagCollection(made[0])
    ids, offsets = torch.tensor([1, 2, 2, 5, 1]), torch.tensor([0, 3])
    weights = [torch.linspace(-1, 2, 5).requires_grad_() for _ in range(4)]
    out = joint({"a": (ids, offsets, weights[0]), "b": (ids.reshape(5, 1), None, weights[1].reshape(5, 1))})
    expected = {
        "a": made[1]["a"](ids, offsets, weights[2]),
        "b": made[1]["b"](ids.reshape(5, 1), None, weights[3].reshape(5, 1)),
    }
    same(out, expected)
    loss_of(out).backward()
    loss_of(expected).backward()
    for mine, theirs in zip(weights[:2], weights[2:], strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    for name, layer in made[1].items():
        assert shown(made[0][name]) == shown(layer)
    made[0]["a"].requires_grad_(False)
    out = joint({"a": (ids, offsets, weights[0]), "b": ids})
    assert out["a"].requires_grad  # those of its weights come back all the same


def test_weights_written_to_before_the_backward_are_noticed():
    joint = ert.EmbeddingBagCollection({"a": ert.EmbeddingBag(9, 4, mode="sum", group=er.Group(), name="a")})
    weights = torch.ones(2)
    out = joint({"a": (torch.tensor([1, 2]), torch.tensor([0, 1]), weights)})
    weights.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out["a"].sum().backward()


def test_gradients_that_are_asked_for_leave_nothing_behind():
    joint, *_ = both()
    out = joint(batch(0))
    user = joint.layer_of("user").handle
    (norm,) = torch.autograd.grad(loss_of(out), [user], retain_graph=True)
    assert norm > 0
    assert user.grad is None
    loss_of(out).backward()
    assert shown(joint.layer_of("user")) == pytest.approx(norm.item())


# ---------------------------------------------------------------- calls


def test_lookups_without_gradients():
    joint, alone, *_ = both()
    with torch.no_grad():
        same(joint(batch(0)), one_by_one(alone, batch(0)))
    joint.eval()
    out = joint(batch(1))
    same(out, one_by_one(alone, batch(1)))
    with torch.inference_mode():
        same(joint(batch(1)), {name: each.detach() for name, each in out.items()})


def test_features_side_by_side():
    joint, alone, ours, theirs = both()
    for seed in range(2):
        out, expected = joint(batch(seed), concatenate=True), torch.cat([*one_by_one(alone, batch(seed)).values()], 1)
        assert torch.equal(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    check_same(joint, alone)


# Two tables, one of them of two features with another one's between, and one whose bags are means.
ALIKE: list[dict[str, Any]] = [
    {"name": "page", "feature_names": ["seen", "bought"], "padding_idx": 2},
    {"name": "hour", "feature_names": ["hour"], "pooling": "mean"},
]


@pytest.mark.parametrize("frozen", [False, True])
def test_features_of_one_pool_are_read_side_by_side(frozen: bool):
    joint, apart = [
        ert.EmbeddingBagCollection([ert.EmbeddingBagConfig(9, 4, **more, seed=1) for more in ALIKE]) for _ in range(2)
    ]
    order = {
        "seen": (joint.layer_of("seen"), apart.layer_of("seen")),
        "hour": (joint.layer_of("hour"), apart.layer_of("hour")),
    }
    order["bought"] = order["seen"]
    joint, apart = (ert.EmbeddingBagCollection({name: pair[k] for name, pair in order.items()}) for k in range(2))
    for each in (joint, apart):
        each.layer_of("hour").requires_grad_(not frozen)
    optimizers = ert.Adam(joint, lr=0.1), ert.Adam(apart, lr=0.1)
    ids = np.random.default_rng(0).integers(0, 9, (3, 2, 5, 3))
    for step in range(3):
        bought, seen = torch.from_numpy(ids[step])
        given = {"seen": seen, "bought": (bought.reshape(-1), torch.tensor([0, 0, 3, 9, 14])), "hour": seen[:, 0]}
        out, expected = joint(given, concatenate=True), torch.cat(list(apart(given).values()), dim=1)
        assert list(apart(given)) == ["seen", "hour", "bought"]
        assert type(out.grad_fn).__name__ == "LookupBackward"  # and not that of torch.cat
        assert torch.equal(out, expected)
        for each, optimizer in ((out, optimizers[0]), (expected, optimizers[1])):
            (each.square() * torch.linspace(-1, 2, 60).reshape(5, 12)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name in ("seen", "hour"):
        mine, theirs = joint.layer_of(name).table, apart.layer_of(name).table
        assert mine.steps == theirs.steps == (0 if frozen and name == "hour" else 3)
        np.testing.assert_array_equal(mine.lookup(np.arange(9)), theirs.lookup(np.arange(9)))


def test_weights_that_train_of_features_side_by_side():
    joint = ert.EmbeddingBagCollection([ert.EmbeddingBagConfig(9, 4, name, seed=1) for name in "ab"])
    weights, ids = torch.ones(2, requires_grad=True), torch.tensor([1, 2])
    out = joint({"a": (ids, torch.tensor([0, 1]), weights), "b": ids}, concatenate=True)
    assert torch.equal(out[:, :4], joint.layer_of("a")(ids[:, None]))
    out[:, :4].sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, out[:, :4].detach().sum(1))


def test_no_samples_and_no_ids():
    joint = collection()
    none = torch.empty(0, dtype=torch.int64)
    optimizer = ert.Adam(joint)
    for ids, size in ((none, 0), ((none, torch.zeros(3, dtype=torch.int64)), 3), (none.reshape(2, 0), 2)):
        out = joint(dict.fromkeys(TABLES, ids))
        assert {name: tuple(each.shape) for name, each in out.items()} == {
            name: (size, more["embedding_dim"]) for name, more in TABLES.items()
        }
        assert not any(each.any() for each in out.values())
        loss_of(out).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("weighted", [False, True])
def test_a_keyed_jagged_tensor(weighted: bool):
    names = ["hour", "user"]
    group = er.Group()
    made = {name: ert.EmbeddingBag(30, 4, mode="sum", group=group, name=name) for name in names[::-1]}
    joint = ert.EmbeddingBagCollection(made)
    lengths, values = torch.tensor([1, 0, 3, 2, 2, 0]), torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    weights = torch.linspace(-1, 1, 8) if weighted else None
    out = joint(keyed(names, values, lengths, weights))
    cut = {"hour": (0, 4, torch.tensor([0, 1, 1])), "user": (4, 8, torch.tensor([0, 2, 4]))}
    for name, (start, stop, offsets) in cut.items():
        more = None if weights is None else weights[start:stop]
        assert torch.equal(out[name], made[name](values[start:stop], offsets, more))
    assert list(out) == ["user", "hour"]
    assert joint(keyed(names, values[:0], lengths[:0], None))["user"].shape == (0, 4)


def test_a_keyed_jagged_tensor_of_torchrec():
    torchrec = pytest.importorskip("torchrec")
    names, lengths, ids = ["hour", "user"], torch.tensor([1, 0, 2, 1]), torch.tensor([3, 1, 4, 1])
    joint = ert.EmbeddingBagCollection([ert.EmbeddingBagConfig(9, 4, name) for name in names])
    theirs = torchrec.KeyedJaggedTensor(keys=names, values=ids, lengths=lengths, weights=torch.ones(4))
    same(joint(theirs), joint(keyed(names, ids, lengths, torch.ones(4))))


def test_what_a_keyed_jagged_tensor_must_have():
    joint = ert.EmbeddingBagCollection({"user": ert.EmbeddingBag(9, 2), "hour": ert.EmbeddingBag(9, 2)})
    ids, lengths = torch.tensor([1, 2, 3]), torch.ones(3, dtype=torch.int64)
    with pytest.raises(
        ArgumentError,
        match=r"Collection has no feature 'x'\. It takes the keys 'user', 'hour': got 'x', 'hour', 'user'\.",
    ) as told:
        joint(keyed(["x", "hour", "user"], ids, lengths))
    assert "features.permute([1, 2])" in str(told.value)
    with pytest.raises(ArgumentError, match=r"Collection was given nothing for 'hour'\. .* got 'user'\."):
        joint(keyed(["user"], ids, lengths))
    with pytest.raises(ArgumentError, match="each key once: got 'user', 'hour', 'user'"):
        joint(keyed(["user", "hour", "user"], ids, lengths))
    with pytest.raises(UnsupportedError, match=r"one number of bags: got 2 keys, stride\(\) 2 and 4 offsets"):
        joint(Keyed(["user", "hour"], ids, torch.tensor([0, 1, 2, 3]), None, 2))
    with pytest.raises(
        ArgumentError, match=r"must start at 0, not decrease, and not exceed the 3 ids: got \[0, 2, 4\]"
    ):
        joint(Keyed(["user", "hour"], ids, torch.tensor([0, 2, 4]), None, 1))
    with pytest.raises(IdError, match=r"feature 'hour': .* got 9 at \[0\] of ids of shape \(1,\), in bag 0"):
        joint(keyed(["user", "hour"], torch.tensor([1, 9]), lengths[:2]))


@pytest.mark.parametrize("group", [True, False])
def test_what_a_collection_refuses(group: bool):
    joint = ert.EmbeddingBagCollection(layers(er.Group() if group else None))
    told = r"^ert.EmbeddingBagCollection has no feature 'x', and was given nothing for .*\. It takes 'user', .*: got 'u"
    with pytest.raises(ArgumentError, match=told):
        joint({"user": torch.tensor([1]), "x": torch.tensor([1])})
    with pytest.raises(ArgumentError, match=r"a dict by feature, or with a KeyedJaggedTensor: got Tensor\."):
        joint(torch.tensor([1]))
    uneven = {**dict.fromkeys(joint.features, torch.tensor([1])), "hour": torch.tensor([1, 2])}
    with pytest.raises(ArgumentError, match=r"only where each has as many bags: got 1 bag of 'user', 2 bags of 'hour'"):
        joint(uneven, concatenate=True)
    for wrong, kind, text in (
        (torch.tensor([40]), IdError, r"feature 'user': .* must lie in \[0, 40\): got 40 at \[0, 0\]"),
        (torch.tensor([1.0]), IdTypeError, r"feature 'user': .* got torch.float32"),
        ([1, 2], IdTypeError, r"feature 'user': .* got list.*torch.from_numpy"),
        ((torch.tensor([1]),), ArgumentError, r"feature 'user': a tuple must be \(ids, offsets\) or .*: got 1 parts"),
        ((torch.tensor([1]), torch.tensor([1])), ArgumentError, r"feature 'user': `offsets` must start at 0"),
    ):
        with pytest.raises(kind, match=text):
            joint({**batch(0), "user": wrong})
    weights = torch.ones(12)
    with pytest.raises(UnsupportedError, match="go with mode='sum' only"):
        joint({**batch(0), "items": (*batch(0)["items"], weights)})


def test_what_a_collection_cannot_be_made_of():
    layer = ert.EmbeddingBag(9, 2)
    wrong: list[Any] = [
        {},
        [],
        {"a": nn.EmbeddingBag(3, 2)},
        {"a": ert.Embedding(3, 2)},
        {3: layer},
        [layer],
        "user",
        [ert.EmbeddingConfig(3, 2, "a")],
    ]
    for tables in wrong:
        with pytest.raises(
            ArgumentError, match=r"must be a dict from features to ert.EmbeddingBag layers, or a list of"
        ):
            ert.EmbeddingBagCollection(tables)
    config = ert.EmbeddingBagConfig(9, 2, "a", feature_names=["x", "y"])
    with pytest.raises(
        ArgumentError, match=r"each table of ert.EmbeddingBagCollection must be named once: got 'a' twice"
    ):
        ert.EmbeddingBagCollection([config, config])
    with pytest.raises(ArgumentError, match=r"each feature of table 'b' of .* named once: got 'y' twice"):
        ert.EmbeddingBagCollection([config, ert.EmbeddingBagConfig(9, 2, "b", feature_names=["y", "y"])])
    with pytest.raises(ArgumentError, match=r"two layers .* would be called 'a_b'"):
        ert.EmbeddingBagCollection({"a.b": layer, "a_b": ert.EmbeddingBag(9, 2)})
    with pytest.raises(ValueError, match="sum, mean, max"):
        ert.EmbeddingBagConfig(9, 2, "a", pooling="min")
    for name in ("", "a.b", None):
        with pytest.raises(ArgumentError, match="must be a name without dots"):
            ert.EmbeddingBagConfig(9, 2, name)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"must be a list of names: got 'x'"):
        ert.EmbeddingBagConfig(9, 2, "a", feature_names="x")


def test_layers_with_hooks_or_a_forward_of_their_own_are_called():
    class Doubled(ert.EmbeddingBag):
        def forward(self, *args: Any) -> Tensor:  # type: ignore[override]
            return 2 * super().forward(*args)

    group = er.Group()
    made = {"a": Doubled(9, 2, group=group, name="a"), "b": ert.EmbeddingBag(9, 2, group=group, name="b")}
    made["b"].register_forward_hook(lambda module, args, out: out + 1)
    joint, ids = ert.EmbeddingBagCollection(made), torch.tensor([1, 2])
    out = joint({"a": ids, "b": ids})
    for name, layer in made.items():
        assert torch.equal(out[name], layer(ids[:, None]))


@pytest.mark.parametrize("more", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_layers_that_need_a_lookup_of_their_own(more: dict[str, Any]):
    group = er.Group()
    mine = {name: ert.EmbeddingBag(9, 2, mode="sum", seed=3, group=group, name=name, **more) for name in "ab"}
    alone = {name: ert.EmbeddingBag(9, 2, mode="sum", seed=3, **more) for name in "ab"}
    joint, ids = ert.EmbeddingBagCollection(mine), {"a": torch.tensor([[1, 1]]), "b": torch.tensor([[3, 4]])}
    ours, theirs = ert.SGD(joint, lr=0.1), ert.SGD(nn.ModuleList(alone.values()), lr=0.1)
    for out, optimizer in ((joint(ids), ours), (one_by_one(alone, ids), theirs)):
        loss_of(out).backward()
        optimizer.step()
    check_same(joint, alone)


def test_a_graph_of_torch_compile():
    joint, alone = collection(), layers()
    ours, theirs = ert.SGD(joint, lr=0.1), ert.SGD(nn.ModuleList(alone.values()), lr=0.1)
    compiled = torch.compile(lambda given: loss_of(joint(given)), fullgraph=True, backend="eager")
    for seed in range(2):
        given = {**batch(seed), "type": torch.tensor([[1, 2]] * BATCH)}
        loss, expected = compiled(given), loss_of(one_by_one(alone, given))
        torch.testing.assert_close(loss, expected)
        for each, optimizer in ((loss, ours), (expected, theirs)):
            each.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, layer in alone.items():
        mine = joint.layer_of(name).table
        np.testing.assert_allclose(mine.lookup(ids_of(mine)), layer.table.lookup(ids_of(mine)), rtol=1e-6, atol=1e-7)


def test_threads_that_look_up_while_one_trains():
    joint, alone, ours, theirs = both()
    errors: list[BaseException] = []

    def look(seed: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    joint(batch(seed))
        except BaseException as error:  # for the main thread to raise
            errors.append(error)

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for seed in range(4):
        for out, optimizer in ((joint(batch(seed)), ours), (one_by_one(alone, batch(seed)), theirs)):
            loss_of(out).backward()
            optimizer.step()
            optimizer.zero_grad()
    for thread in threads:
        thread.join()
    assert not errors
    check_same(joint, alone)


# ---------------------------------------------------------------- copies and files


def one_step(joint: ert.EmbeddingBagCollection, optimizer: Any, seed: int) -> None:
    loss_of(joint(batch(seed))).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_state_dict():
    joint, other = collection(), collection()
    optimizer, theirs = ert.Adam(joint, lr=0.1), ert.Adam(other, lr=0.1)
    one_step(joint, optimizer, 0)
    state = joint.state_dict()
    assert {key.split(".rows")[0] for key in state} == {f"embedding_bags.{name}" for name in TABLES}
    other.load_state_dict(state)
    one_step(joint, optimizer, 1)
    one_step(other, theirs, 1)
    check_same(joint, {name: other.layer_of(name) for name in TABLES})


def test_weights_of_torchrec_are_loaded():
    joint = ert.EmbeddingBagCollection([ert.EmbeddingBagConfig(5, 3, "page", feature_names=["seen"])])
    weight = torch.randn(5, 3)
    joint.load_state_dict({"embedding_bags.page.weight": weight})
    assert torch.equal(joint({"seen": torch.arange(5)})["seen"], weight)


def test_saved_and_loaded(tmp_path: Any):
    joint, other = collection(), collection()
    optimizer, theirs = ert.Adam(joint, lr=0.1), ert.Adam(other, lr=0.1)
    one_step(joint, optimizer, 0)
    ert.save(joint, tmp_path / "model", 1, optimizer)
    assert ert.load(other, tmp_path / "model", theirs) == 1
    one_step(joint, optimizer, 1)
    one_step(other, theirs, 1)
    check_same(joint, {name: other.layer_of(name) for name in TABLES})


def test_copies_and_averages():
    joint = collection()
    optimizer = ert.Adam(joint, lr=0.1)
    averaged = ert.average(joint, decay=0.5)
    one_step(joint, optimizer, 0)
    averaged.update_parameters(joint)
    made = copy.deepcopy(joint)
    one_step(joint, optimizer, 1)
    averaged.update_parameters(joint)
    with torch.no_grad():
        rows, before, now = averaged(batch(0)), made(batch(0)), joint(batch(0))
    for name in ("user", "hour"):
        torch.testing.assert_close(rows[name], 0.5 * before[name] + 0.5 * now[name])
    one_step(made, ert.Adam(made, lr=0.1), 1)
    check_same(joint, {name: made.layer_of(name) for name in TABLES})


def test_frozen_models_have_plain_layers():
    joint = collection(**{})
    joint.layer_of("user")  # all but open ids can be frozen whole
    frozen = ert.freeze(joint, {"embedding_bags.items": np.unique(batch(0)["items"][0])})
    with torch.no_grad():
        same(frozen(batch(0)), joint(batch(0)))


# ---------------------------------------------------------------- rows one by one


def test_rows_of_many_features():
    tables = [
        ert.EmbeddingConfig(30, 4, "item", feature_names=["clicked", "bought"], seed=1, padding_idx=0),
        ert.EmbeddingConfig(None, 3, "user", seed=2),
    ]
    joint = ert.EmbeddingCollection(tables)
    item, user = ert.Embedding(30, 4, 0, seed=1), ert.Embedding(None, 3, seed=2)
    ours, theirs = ert.Adam(joint, lr=0.1), ert.Adam(nn.ModuleList([item, user]), lr=0.1)
    nested = torch.nested.nested_tensor([torch.tensor([1, 0]), torch.tensor([5, 7, 1])], layout=torch.jagged)
    ids = {"clicked": nested, "bought": torch.tensor([[1, 2], [0, 5]]), "user": torch.tensor([2**50, 7])}
    for _ in range(3):
        rows = joint(ids)
        flat = item(torch.cat([nested.values(), ids["bought"].reshape(-1)]))
        expected = [flat[:5], flat[5:].reshape(2, 2, 4), user(ids["user"])]
        assert torch.equal(rows["clicked"].values(), expected[0])
        assert torch.equal(rows["bought"], expected[1])
        assert torch.equal(rows["user"], expected[2])
        sum(
            factor * each.square().sum()
            for factor, each in zip((1, 2, 3), (rows["clicked"].values(), rows["bought"], rows["user"]), strict=True)
        ).backward()  # type: ignore
        sum(factor * each.square().sum() for factor, each in zip((1, 2, 3), expected, strict=True)).backward()  # type: ignore
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    np.testing.assert_array_equal(
        joint.layer_of("bought").table.lookup(np.arange(30)), item.table.lookup(np.arange(30))
    )
    found = joint(keyed(["user", "bought", "clicked"], torch.tensor([1, 2, 3, 4]), torch.tensor([1, 0, 2, 0, 0, 1])))
    assert [len(part) for part in found["bought"].unbind()] == [2, 0]
    with pytest.raises(IdTypeError, match=r"feature 'user': ids with offsets are for bags.*nested_tensor_from_jagged"):
        joint({**ids, "user": (torch.tensor([1]), torch.tensor([0]))})
    with pytest.raises(IdError, match=r"feature 'clicked': .* got 30 at \[1, 0\] of jagged ids \(2, j\)"):
        joint(
            {**ids, "clicked": torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([30])], layout=torch.jagged)}
        )


def test_many_tables_end_as_those_that_are_looked_up_one_by_one():
    """As in a model for Criteo's 26 features; every fifth one is of open ids."""
    rows = {f"c{k}": None if k % 5 == 4 else 5 + 7 * k for k in range(26)}
    torch.manual_seed(0)
    joint = ert.EmbeddingCollection([ert.EmbeddingConfig(count, 4, name) for name, count in rows.items()])
    torch.manual_seed(0)
    alone = {name: ert.Embedding(count, 4) for name, count in rows.items()}
    optimizers, rng = [ert.Adam(joint, lr=0.1), ert.Adam(alone.values(), lr=0.1)], np.random.default_rng(0)
    for _ in range(5):
        ids = {name: torch.from_numpy(rng.integers(0, count or 99, 12)) for name, count in rows.items()}
        for found in (joint(ids), {name: alone[name](own) for name, own in ids.items()}):
            torch.stack([k * found[name].square().sum() for k, name in enumerate(rows, 1)]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_same(joint, alone)


# ---------------------------------------------------------------- layers of a group


def test_layers_join_a_group_by_name():
    group = er.Group(memory="1MiB")
    layer = ert.Embedding(10**9, 4, group=group, name="users", rule=er.Adam())
    assert group["users"] is layer.table
    with pytest.raises(
        ArgumentError,
        match=r"'users', and a layer has that table of the group already.*ert\.Embedding\(group\['users'\]\)",
    ):
        ert.Embedding(10**9, 4, group=group, name="users")
    assert ert.Embedding(group["users"]).handle is layer.handle
    group.drop("users")
    layer = ert.Embedding(10**9, 4, group=group, name="users", rule=er.Adam())
    with pytest.raises(ArgumentError, match="dim"):
        ert.Embedding(10**9, 8, group=group, name="users")
    with pytest.raises(ArgumentError, match=r"`name` of ert.Embedding is missing: tables of a group"):
        ert.Embedding(5, 4, group=group)
    with pytest.raises(ArgumentError, match=r"`group` of ert.EmbeddingBag must be an er.Group: got 'mine'"):
        ert.EmbeddingBag(5, 4, group="mine", name="a")  # type: ignore[arg-type]
    options: list[dict[str, Any]] = [{"path": "x"}, {"memory": "1GiB"}, {"directory": "direct"}, {"keep": 3}]
    for option in options:
        with pytest.raises(ArgumentError, match=f"`{next(iter(option))}` of ert.EmbeddingBag does not go with `group`"):
            ert.EmbeddingBag(5, 4, group=group, name="a", **option)
    with pytest.raises(ArgumentError, match=r"`group` of ert.Embedding belongs to the table"):
        ert.Embedding(layer.table, group=group)
    assert list(group) == ["users"]


def test_layers_of_a_group_draw_as_many_numbers_as_others():
    numbers = []
    for group in (None, er.Group()):
        torch.manual_seed(0)
        layer = ert.Embedding(5, 4, group=group, name="a")
        numbers.append((layer.table.spec.seed, torch.rand(())))
    assert numbers[0] == numbers[1]


def test_two_collections_of_one_group():
    group = er.Group()
    first, second = (ert.EmbeddingBagCollection([ert.EmbeddingBagConfig(9, 2, name)], group=group) for name in "ab")
    optimizer = ert.Adam(nn.ModuleList([first, second]))
    (first({"a": torch.tensor([1])})["a"] + second({"b": torch.tensor([2])})["b"]).sum().backward()
    optimizer.step()
    assert [group[name].steps for name in "ab"] == [1, 1]


class PoolingType(enum.Enum):
    """TorchRec's."""

    SUM, MEAN = "SUM", "MEAN"


@pytest.mark.parametrize("how", ["dict", "keyed", "side by side"])
def test_a_feature_of_two_tables_has_an_output_of_each(how: str):
    configs = [
        ert.EmbeddingBagConfig(100, 1, "wide", feature_names=["f", "g"], pooling=PoolingType.SUM),
        ert.EmbeddingBagConfig(100, 3, "deep", feature_names=["f"], pooling=PoolingType.MEAN, seed=1),
    ]
    joint = ert.EmbeddingBagCollection(configs, device="cpu")
    assert joint.features == ("f@wide", "g", "f@deep")  # as of TorchRec's KeyedTensor
    ids, lengths = torch.tensor([1, 2, 2, 7]), torch.tensor([2, 1, 0, 1])
    given = keyed(["g", "f"], ids, lengths)
    f, g = (torch.tensor([7]), torch.tensor([0, 0])), (ids[:3], torch.tensor([0, 2]))
    found = joint(given) if how == "keyed" else joint({"f": f, "g": g}, concatenate=how == "side by side")
    alone = {
        "f@wide": joint.layer_of("f@wide")(*f), "g": joint.layer_of("g")(*g), "f@deep": joint.layer_of("f@deep")(*f)
    }  # fmt: skip
    assert joint.layer_of("f@wide") is joint.layer_of("g") is not joint.layer_of("f@deep")
    assert (joint.layer_of("g").mode, joint.layer_of("f@deep").mode) == ("sum", "mean")
    if how == "side by side":
        assert torch.equal(found, torch.cat(list(alone.values()), 1))
    else:
        assert list(found) == list(alone)
        assert all(torch.equal(found[name], alone[name]) for name in alone)


def test_rows_of_a_feature_of_two_tables_train_in_both():
    configs = [ert.EmbeddingConfig(100, 2, name, feature_names=["f"], rule=er.SGD(lr=1.0)) for name in "ab"]
    joint = ert.EmbeddingCollection(configs)
    before = joint({"f": torch.tensor([3, 4])})
    optimizer = ert.optimizer(joint, rows=ert.SGD, lr=1.0)
    found = joint({"f": torch.tensor([3, 4])})
    (found["f@a"].sum() + 2 * found["f@b"].sum()).backward()
    optimizer.step()
    after = joint({"f": torch.tensor([3, 4])})
    assert torch.equal(after["f@a"], before["f@a"] - 1)
    assert torch.equal(after["f@b"], before["f@b"] - 2)


def test_gradients_reach_a_handle_that_moved_to_another_table_before_the_backward():
    layers = {name: ert.Embedding(er.Table(rows=50, dim=4, seed=seed)) for seed, name in enumerate("pqr")}
    model, twin = ert.EmbeddingCollection(layers), [er.Table(rows=50, dim=4, seed=seed) for seed in range(3)]
    optimizer, ids = ert.SGD(model, lr=0.1), torch.arange(3)
    outputs = model(dict.fromkeys(layers, ids))
    ert.fuse(model)
    torch.cat(list(outputs.values())).sum().backward()
    optimizer.step()
    for layer, table in zip(layers.values(), twin, strict=True):
        table.set_rule(er.SGD(lr=0.1))
        table.update(ids.numpy(), np.ones((3, 4), np.float32))
        np.testing.assert_array_equal(layer.table.lookup(np.arange(50)), table.lookup(np.arange(50)))


def test_a_table_that_moves_before_the_backward_takes_no_gradient_from_its_neighbours():
    group = er.Group()
    a, b = (ert.Embedding(group.table(name, rows=50, dim=4)) for name in "ab")
    model = ert.EmbeddingCollection({"a": a, "b": b})
    optimizer = ert.SGD(model, lr=0.1)
    outputs = model({"a": torch.arange(3), "b": torch.arange(3)})
    a.take_over(er.Table(rows=50, dim=4, rule=er.SGD(0.1)))
    outputs["b"].sum().backward()
    optimizer.step()
    assert (a.table.steps, b.table.steps) == (0, 1)


@pytest.mark.parametrize("frozen", [False, True])
def test_rows_of_a_table_that_a_finished_step_left_out_can_be_forgotten(frozen: bool):
    group = er.Group()
    a, b = (ert.Embedding(group.table(name, rows=50, dim=4)) for name in "ab")
    model = ert.EmbeddingCollection({"a": a, "b": b})
    optimizer, ids = ert.SGD(model, lr=0.1), {"a": torch.arange(3), "b": torch.arange(3)}
    torch.cat(list(model(ids).values())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    a.handle.requires_grad_(not frozen)
    outputs = model(ids)
    (torch.cat(list(outputs.values())) if frozen else outputs["b"]).sum().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(er.ArgumentError, match="was read and is not stepped yet"):
        a.forget([1])  # another backward may follow
    del outputs
    assert a.forget([1]) == 1
    assert b.forget([1]) == 1


@pytest.mark.parametrize("in_group", [False, True])
def test_a_layer_that_shrinks_rows_does_so_before_later_features_of_the_table(in_group: bool):
    options: Any = {"rows": 50, "dim": 4, "init": er.Uniform(-2, 2), "seed": 1}
    table = er.Group().table("t", **options) if in_group else er.Table(**options)
    model = ert.EmbeddingCollection({"a": ert.Embedding(table, max_norm=0.5), "b": ert.Embedding(table)})
    with torch.no_grad():
        norms = [float(out.norm()) for out in model({"a": torch.tensor([1]), "b": torch.tensor([1])}).values()]
    assert norms == pytest.approx([0.5, 0.5])


def test_pooling_types_are_their_strings():
    assert [ert.EmbeddingBagConfig(9, 4, "a", pooling=each).pooling for each in ert.PoolingType] == [
        "sum",
        "mean",
        "max",
    ]
    with pytest.raises(ArgumentError, match=r"must be one of sum, mean, max: got 'maen'\. Did you mean 'mean'\?"):
        ert.EmbeddingBagConfig(9, 4, "a", pooling="maen")


def test_errors_of_many_features_are_short():
    names = [f"c{k}" for k in range(26)]
    joint = ert.EmbeddingCollection([ert.EmbeddingConfig(9, 4, name) for name in names])
    given = {name.replace("c25", "c52"): torch.tensor([1]) for name in names}
    told = (
        "ert.EmbeddingCollection has no feature 'c52', and was given nothing for 'c25'. It takes 'c0', 'c1', 'c2', "
        "'c3', 'c4', 'c5' and 20 others: got 'c0', 'c1', 'c2', 'c3', 'c4', 'c5' and 20 others. Did you mean 'c25'?"
    )
    with pytest.raises(ArgumentError) as error:
        joint(given)
    assert str(error.value) == told
    told = r"^ert.EmbeddingCollection has no feature 'c52': it has 'c0', .* and 20 others\. Did you mean 'c5'\?$"
    with pytest.raises(ArgumentError, match=told):
        joint.layer_of("c52")
    with pytest.raises(ArgumentError) as error:
        ert.EmbeddingBagCollection([ert.EmbeddingConfig(9, 4, name) for name in names])
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "meta"])
def test_the_device_of_a_collection(device: Any):
    joint = ert.EmbeddingBagCollection([ert.EmbeddingBagConfig(9, 4, "a")], device=device)
    assert joint({"a": torch.tensor([1])})["a"].device.type == "cpu"


@pytest.mark.parametrize("device", [3.5, "nope"])
def test_what_is_no_device(device: Any):
    with pytest.raises(ArgumentError, match=r"`device` of ert.EmbeddingCollection must be one of PyTorch's, such as"):
        ert.EmbeddingCollection([ert.EmbeddingConfig(9, 4, "a")], device=device)
