"""Tables of one form that are planned, read, summed and stepped together: the bits of each alone."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import race_detector
import torch
from gpu_device import INTERPRETED
from gpu_models import EVERYTHING, on_device
from tensors import Poisoned, one, same, tensor
from torch import Tensor

import embedrock as er
import embedrock.torch as ert
from embedrock.device import features
from embedrock.kernels.gpu import joint, plan, runtime
from embedrock.kernels.gpu.addresses import DeviceTables, TableEntryWords
from embedrock.kernels.gpu.runtime import RecordForm
from embedrock.storage.device_layout import need_of, share
from reference import device
from same_tables import check_same
from slow import slow

DIM, BATCH = 6, 9
ROWS = 20, 30, 40


class Model:
    """A collection of features, two of them of one table; the same on the CPU is of a group."""

    def __init__(self, memory: int | None, rule: str = "Adam", padding: int | None = None, **options: Any) -> None:
        group = er.Group()
        inits = er.Normal(std=0.5), er.Normal(std=0.1), er.Normal(mean=1.0)
        self.layers: dict[str, ert.Embedding] = {}
        for k, (rows, init) in enumerate(zip(ROWS, inits, strict=True)):
            arguments: dict[str, Any] = {"rows": rows, "dim": DIM, "init": init, "seed": k, **options}
            alone = memory is not None
            table = er.Table(device_memory=memory, **arguments) if alone else group.table(f"t{k}", **arguments)
            self.layers[f"f{k}"] = ert.Embedding(table, padding_idx=padding if k == 1 else None)
        self.layers["again"] = self.layers["f1"]
        self.rows = ert.EmbeddingCollection(self.layers)
        self.step = getattr(ert, rule)(self.rows, lr=0.1)
        if memory is not None:
            on_device(self.rows)

    @property
    def tables(self) -> list[er.Table]:
        return [self.layers[f"f{k}"].table for k in range(len(ROWS))]

    def loss(self, seed: int, leave_out: str = "") -> Tensor:
        rng = np.random.default_rng(seed)
        ids = {
            feature: torch.from_numpy(np.minimum(rng.zipf(1.3, BATCH) - 1, (layer.num_embeddings or 0) - 1))
            for feature, layer in self.layers.items()
        }
        found = self.rows(ids)
        parts = [found[name].square().sum().cpu() * (k + 1) for k, name in enumerate(found) if name not in leave_out]
        return torch.stack(parts).sum()

    def train(self, steps: int = 2, seed: int = 0) -> Model:
        for k in range(steps):
            self.loss(seed + k).backward()
            self.step.step()
            self.step.zero_grad()
        return self


def assert_same(mine: Model, theirs: Model) -> None:
    for a, b in zip(mine.tables, theirs.tables, strict=True):
        np.testing.assert_array_equal(a.lookup(np.arange(a.rows or 0)), b.lookup(np.arange(b.rows or 0)))
        for got, expected in zip(a.export(), b.export(), strict=True):
            np.testing.assert_array_equal(got, expected)
        assert a.steps == b.steps


@contextmanager
def launches() -> Iterator[collections.Counter[str]]:
    seen: collections.Counter[str] = collections.Counter()
    before, runtime.on_launch = runtime.on_launch, lambda kernel, *_: seen.update([kernel.fn.__name__])
    try:
        yield seen
    finally:
        runtime.on_launch = before


JOINT = dict.fromkeys(("_join", "_collect", "_read", "_sum", "_step"), 1)


@pytest.mark.parametrize(
    ("memory", "rule", "options"),
    [
        (0, "Adam", {"padding": 0}),
        *slow(
            (EVERYTHING, "Adam", {"padding": 0}),
            (0, "SGD", {"dtype": "bfloat16"}),
            (0, "Adam", {"padding": 2}),
            (EVERYTHING, "SGD", {}),
            (EVERYTHING, "Ftrl", {"dtype": "float16"}),
        ),
    ],
    ids=str,
)
def test_tables_of_one_form_are_trained_by_the_same_kernels(memory: int, rule: str, options: dict[str, Any]):
    mine, theirs = (Model(where, rule, **options).train(1) for where in (memory, None))
    with launches() as seen:
        mine.train(1, seed=1)
    assert seen == JOINT
    assert_same(mine, theirs.train(1, seed=1))


def test_tables_of_other_forms_are_looked_up_by_others():
    wide = {"w": ert.Embedding(9, 3, device_memory=EVERYTHING, seed=1)}
    model = Model(EVERYTHING)
    rows = ert.EmbeddingCollection({**model.layers, **wide})
    on_device(rows)
    with torch.no_grad(), launches() as seen:
        found = rows({name: torch.arange(3) for name in rows.features})
    assert seen["_read"] == 2
    for name, layer in {**model.layers, **wide}.items():
        np.testing.assert_array_equal(found[name].cpu(), layer.table.lookup(np.arange(3)))


def test_what_accumulates_or_is_scaled_is_of_each_table_alone():
    models = [Model(where, padding=1) for where in (EVERYTHING, None)]
    for model in models:
        model.train(1)
        for seed in (1, 2):
            model.loss(seed).backward()
        for handle in ert.handles(model.rows):
            assert handle.grad is not None
            handle.grad.mul_(0.5)
        torch.nn.utils.clip_grad_value_(ert.handles(model.rows), 0.4)
        model.step.step()
    for a, b in zip(models[0].tables, models[1].tables, strict=True):
        np.testing.assert_allclose(a.lookup(np.arange(a.rows or 0)), b.lookup(np.arange(b.rows or 0)), rtol=1e-5)
    norms = [[handle.grad.item() for handle in ert.handles(model.rows)] for model in models]  # type: ignore[union-attr]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-6)


@pytest.mark.parametrize("left_out", ["f0", *slow("f1", "again", "f1 again")])
def test_a_feature_without_a_gradient_touches_no_row(left_out: str):
    models = [Model(where).train(1) for where in (0, None)]
    for model in models:
        model.loss(1, leave_out=left_out).backward()
        model.step.step()
    assert_same(*models)


@pytest.mark.parametrize("bad", [-7, ROWS[1], *slow(2**40)])
def test_ids_outside_of_one_table_are_an_error_of_it_and_stop_all(bad: int):
    model = Model(EVERYTHING).train(1)
    before = [table.lookup(np.arange(5)) for table in model.tables]
    ids = {name: torch.tensor([1, 2]) for name in model.layers} | {"f1": torch.tensor([0, bad])}
    found = model.rows(ids)
    torch.stack([rows.sum().cpu() for rows in found.values()]).sum().backward()

    def go_on() -> None:
        model.step.step()
        model.rows(dict.fromkeys(ids, torch.tensor([1])))

    with pytest.raises(er.IdError, match=rf"`ids` of .* must lie in \[0, {ROWS[1]}\): got {bad} in an earlier batch"):
        go_on()
    model.step.zero_grad()
    for table, rows in zip(model.tables, before, strict=True):
        np.testing.assert_array_equal(table.lookup(np.arange(5)), rows)
        assert table.steps == 1


def test_tables_of_other_step_constants_all_step_or_none():
    mine, theirs = Model(EVERYTHING), Model(None)
    for model in (mine, theirs):
        model.layers["f1"](torch.tensor([1, 2])).sum().backward()
        model.step.step()  # so the tables differ in their number of steps
        model.step.zero_grad()
        model.loss(1).backward()
        for handle in ert.handles(model.rows):
            assert handle.grad is not None
            handle.grad = handle.grad * 0.5  # no number follows the one of another table
    with launches() as seen:
        mine.step.step()
    assert seen["_step"] > 1
    assert "_judge" not in seen
    theirs.step.step()
    assert_same(mine, theirs)

    mine.step.zero_grad()
    (mine.loss(2) * float("nan")).backward()
    mine.step.step()
    with pytest.raises(er.NonFiniteGradientError):
        mine.loss(2)
    mine.step.zero_grad()
    assert_same(mine, theirs)


def test_bags_of_one_id_are_rows():
    layers = {name: ert.EmbeddingBag(8, DIM, device_memory=0, mode="sum", seed=k) for k, name in enumerate("ab")}
    bags = ert.EmbeddingBagCollection(layers)
    on_device(bags)
    with torch.no_grad(), launches() as seen:
        found = bags({"a": torch.tensor([1, 7]), "b": torch.tensor([[2], [2]])}, concatenate=True)
    assert (seen["_read"], seen["_pool"]) == (1, 0)
    expected = np.concatenate([layers["a"].table.lookup([1, 7]), layers["b"].table.lookup([2, 2])], axis=1)
    np.testing.assert_array_equal(found.cpu(), expected)


class BagModel:
    """A collection of bags: sums with weights that train, means with padding, two features of one table. Or maxima."""

    def __init__(self, memory: int | None, modes: tuple[str, ...] = ("sum", "mean", "sum"), **options: Any) -> None:
        group = er.Group()
        layers: dict[str, ert.EmbeddingBag] = {}
        for k, (rows, mode, padding) in enumerate(zip(ROWS, modes, (None, 0, 3), strict=True)):
            arguments: dict[str, Any] = {"rows": rows, "dim": DIM, "init": er.Normal(std=0.5), "seed": k, **options}
            alone = memory is not None
            table = er.Table(device_memory=memory, **arguments) if alone else group.table(f"t{k}", **arguments)
            layers[f"f{k}"] = ert.EmbeddingBag(table, mode=mode, padding_idx=padding)
        self.tables = [layer.table for layer in layers.values()]
        self.bags = ert.EmbeddingBagCollection({**layers, "again": layers["f1"]})
        self.step = ert.Adam(self.bags, lr=0.1)
        if memory is not None:
            on_device(self.bags)

    def train(self, seed: int, left_out: str = "") -> list[Tensor]:
        """Make a step; return the bags, and the gradient of the weights."""
        rng = np.random.default_rng(seed)
        sizes = [rng.integers(0, 4, BATCH) for _ in range(2)]  # some are empty
        dtype = self.bags.layer_of("f0").dtype
        weights = torch.from_numpy(rng.random(sizes[0].sum())).to(dtype).requires_grad_()
        starts = [torch.from_numpy(np.append(0, np.cumsum(own)[:-1])) for own in sizes]
        first, second, third = (
            torch.from_numpy(np.minimum(rng.zipf(1.3, n) - 1, rows - 1))
            for n, rows in zip((sizes[0].sum(), 3 * BATCH, sizes[1].sum()), ROWS, strict=True)
        )
        is_weighted = self.bags.layer_of("f0").mode == "sum"
        features = {
            "f0": (first, starts[0], weights if is_weighted else None),
            "f1": second.view(BATCH, 3),
            "f2": (third, starts[1]),
        }
        found = self.bags(features | {"again": second[:BATCH]})
        kept = [rows.square().sum().cpu() * (k + 1) for k, (name, rows) in enumerate(found.items()) if name != left_out]
        torch.stack(kept).sum().backward()
        self.step.step()
        self.step.zero_grad()
        return [rows.detach().cpu() for rows in found.values()] + ([weights.grad] if weights.grad is not None else [])

    def assert_same(self, other: BagModel) -> None:
        for mine, theirs in zip(self.tables, other.tables, strict=True):
            for got, expected in zip(mine.export(), theirs.export(), strict=True):
                np.testing.assert_array_equal(got, expected)


BAGS = JOINT | dict.fromkeys(("_bags", "_pool", "_weight_grads"), 1)
MAXIMA = JOINT | dict.fromkeys(("_bags", "_pool"), 1)
OF_MAX = {"modes": ("max",) * 3}


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        (EVERYTHING, OF_MAX),
        *slow(
            (0, {}),
            (EVERYTHING, {}),
            (EVERYTHING, {"dtype": "bfloat16"}),
            (0, OF_MAX),
            (0, OF_MAX | {"dtype": "float16"}),
        ),
    ],
    ids=str,
)
def test_bags_of_several_ids_are_trained_by_the_same_kernels(memory: int, options: dict[str, Any]):
    mine, theirs = BagModel(memory, **options), BagModel(None, **options)
    for seed in range(2):
        with launches() as seen:
            found = mine.train(seed)
        assert seen == (MAXIMA if "modes" in options else BAGS)
        for got, expected in zip(found, theirs.train(seed), strict=True):
            assert torch.equal(got, expected)
    mine.assert_same(theirs)


def test_bags_of_which_the_largest_are_taken_are_apart_from_sums():
    modes = "max", "mean", "max"  # of which one table has two features
    mine, theirs = BagModel(0, modes), BagModel(None, modes)
    with launches() as seen:
        mine.train(0)
    assert (seen["_pool"], seen["_bags"]) == (2, 2)
    theirs.train(0)
    mine.assert_same(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("modes", [("sum", "mean", "sum"), ("max",) * 3])
@pytest.mark.parametrize("left_out", ["f1", "again"])
def test_bags_to_which_no_gradient_comes_back_touch_no_row(left_out: str, modes: tuple[str, ...]):
    models = [BagModel(0, modes), BagModel(None, modes)]
    for model in models:
        model.train(0, left_out)
    models[0].assert_same(models[1])


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="compute-sanitizer looks for races on a GPU: see on_gpu.py")
def test_no_program_of_bags_depends_on_another(monkeypatch: pytest.MonkeyPatch):
    detector = race_detector.install(monkeypatch)
    monkeypatch.setattr(joint, "LANES", 4)
    for modes, kernels in ((("sum", "mean", "sum"), BAGS), (("max",) * 3, MAXIMA)):
        BagModel(EVERYTHING, modes).train(0)
        assert detector.found == set()
        assert detector.launched >= kernels.keys()


def configured(where: str, memory: int | None) -> tuple[ert.EmbeddingBagCollection, Any]:
    """Return a collection that makes its tables, in a group of its own."""
    torch.manual_seed(0)
    options: dict[str, Any] = {} if memory is None else {"device_memory": memory}
    configs = [ert.EmbeddingBagConfig(rows, DIM, f"t{k}", options=options) for k, rows in enumerate(ROWS)]
    bags = ert.EmbeddingBagCollection(configs)
    if where == "gpu":
        on_device(bags)
    return bags, ert.Adam(bags, lr=0.1)


@pytest.mark.parametrize("memory", [EVERYTHING, *slow(0)])
def test_tables_of_a_group_are_used_together_on_a_gpu_and_come_back(memory: int):
    models = [configured("gpu", memory), configured("cpu", None)]

    def train(seed: int) -> None:
        for bags, step in models:
            rng = np.random.default_rng(seed)
            found = bags({f"t{k}": torch.from_numpy(rng.integers(0, rows, BATCH)) for k, rows in enumerate(ROWS)})
            torch.stack([rows.square().sum().cpu() for rows in found.values()]).sum().backward()
            step.step()
            step.zero_grad()

    def tables(number: int) -> list[er.Table]:
        return [models[number][0].layer_of(f"t{k}").table for k in range(len(ROWS))]

    train(0)
    with launches() as seen:
        train(1)
    assert seen == JOINT
    group = tables(0)[0].group
    assert group is not None
    for mine, other in zip(tables(0), tables(1), strict=True):
        ids = np.arange(mine.rows or 0)
        np.testing.assert_array_equal(mine.lookup(ids), other.lookup(ids))
        np.testing.assert_array_equal(mine.export()[0], other.export()[0])
        assert mine.stats()["rows_touched"] == other.stats()["rows_touched"]
    together = group.lookup({f"t{k}": [1, 2] for k in range(len(ROWS))})
    train(2)  # from where they are
    for handle in ert.handles(models[0][0]):  # which under the interpreter are on the CPU in any case
        handle.move(torch.device("cpu"))
    models[0][0].cpu()
    train(3)
    assert together["t0"].shape == (2, DIM)
    for mine, other in zip(tables(0), tables(1), strict=True):
        assert mine.executor is None
        np.testing.assert_array_equal(mine.export()[1], other.export()[1])
    group.drop("t1")
    assert sorted(group) == ["t0", "t2"]


@pytest.mark.parametrize(("tables", "are_open"), [(7, True), *slow((26, True), (26, False))])
def test_many_tables_end_as_those_that_are_looked_up_one_by_one(tables: int, are_open: bool) -> None:
    """As in a model for Criteo's 26 features, with all that is a default; some may be of open ids."""
    rows = {f"c{k}": None if are_open and k % 3 == 1 else 5 + 3 * k for k in range(tables)}
    torch.manual_seed(0)
    joint = ert.EmbeddingCollection([ert.EmbeddingConfig(count, DIM, name) for name, count in rows.items()])
    torch.manual_seed(0)
    alone = {name: ert.Embedding(count, DIM) for name, count in rows.items()}
    models, rng = [joint, torch.nn.ModuleDict(alone)], np.random.default_rng(0)
    steps = [ert.Adam(on_device(model), lr=0.1) for model in models]
    for _ in range(2):
        ids = {name: torch.from_numpy(rng.integers(0, count or 99, BATCH)) for name, count in rows.items()}
        for found in (joint(ids), {name: alone[name](own) for name, own in ids.items()}):
            torch.stack([k * found[name].square().sum().cpu() for k, name in enumerate(rows, 1)]).sum().backward()
        for step in steps:
            step.step()
            step.zero_grad()
    for name in rows:
        check_same(joint.layer_of(name).table, alone[name].table)


def test_nested_ids_give_nested_rows() -> None:
    model = Model(10**6)
    ids = torch.nested.nested_tensor_from_jagged(torch.tensor([3, 1, 3]), torch.tensor([0, 1, 3]))
    found = model.rows(dict.fromkeys(model.layers, ids))
    for name, layer in model.layers.items():
        assert found[name].is_nested
        assert torch.equal(found[name].values(), layer(ids.values()))


def test_tables_of_a_group_share_its_gpu_memory() -> None:
    sizes = [er.Table(rows, DIM, rule=er.SGD()).spec for rows in ROWS]
    most = sum(each.table_bytes or 0 for each in sizes)  # and none for what tells where rows are

    def trained(group: er.Group) -> dict[str, ert.Embedding]:
        layers = {f"t{k}": ert.Embedding(rows, DIM, seed=k, group=group, name=f"t{k}") for k, rows in enumerate(ROWS)}
        collection = ert.EmbeddingCollection(layers)
        if group.device_memory is not None:
            on_device(collection)
        step = ert.SGD(collection, lr=0.1)
        found = collection({name: torch.arange(BATCH) * 2 for name in layers})
        torch.stack([rows.square().sum().cpu() for rows in found.values()]).sum().backward()
        step.step()
        return layers

    mine, theirs = trained(er.Group(device_memory=most)), trained(er.Group())
    executors: list[Any] = [layer.table.executor for layer in mine.values()]
    assert [executor.placement.mode for executor in executors] == [
        "device",
        "cached",
        "cached",
    ]  # the smallest one whole
    taken = sum(executor.placement.bytes for executor in executors)
    assert most - 3 * DIM * 8 < taken <= most
    for name, layer in mine.items():
        np.testing.assert_array_equal(layer.table.export()[1], theirs[name].table.export()[1])
    late = ert.Embedding(1000, DIM, group=mine["t0"].table.group, name="late")
    on_device(late)
    with pytest.warns(
        ert.PlacementWarning, match=rf"'late'\) gets none of device_memory={most} of its group, as other"
    ):
        late(torch.arange(3))


@pytest.mark.parametrize(
    ("budget", "expected"), [(10**6, [84, 168, 1008]), (700, [84, 168, 448]), (300, [84, 88, 128]), (0, [4, 8, 48])]
)
def test_a_share_of_gpu_memory_is_what_a_table_needs_or_as_much_as_others_get(budget: int, expected: list[int]) -> None:
    specs = [er.Table(rows, 20, rule=er.SGD()).spec for rows in (1, 2, 12)]
    needs = [need_of(spec) for spec in specs]
    assert [each.table_bytes for each in specs] == [80, 160, 960]
    shares = [share(one, [each for each in needs if each is not one], budget) for one in needs]
    assert shares == expected


def test_tables_with_more_rows_than_there_are_keys_are_looked_up_in_shares(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(features, "MOST_KEYS", ROWS[0] + ROWS[1] + 4)
    mine, theirs = Model(0), Model(None)
    with launches() as seen:
        mine.train(1)
    assert seen["_read"] == 3  # the last feature is of a table of the first share
    theirs.train(1)
    for a, b in zip(mine.tables, theirs.tables, strict=True):  # one table was summed twice
        np.testing.assert_allclose(a.lookup(np.arange(a.rows or 0)), b.lookup(np.arange(b.rows or 0)), rtol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="compute-sanitizer looks for races on a GPU: see on_gpu.py")
def test_no_program_depends_on_another(monkeypatch: pytest.MonkeyPatch):
    detector = race_detector.install(monkeypatch)
    mine = Model(EVERYTHING).train(2)
    (mine.loss(2) * float("nan")).backward()
    mine.step.step()
    with pytest.raises(er.NonFiniteGradientError):
        mine.loss(2)
    assert detector.found == set()
    assert {"_collect", "_sum", "_step"} <= detector.launched
    assert_same(mine, Model(None).train(2))


# ---------------------------------------------------------------- kernels


def made_tables(rows: list[int], paddings: list[int]) -> tuple[DeviceTables, np.ndarray, torch.Tensor]:
    """Return tables that have nothing but rows and a fault, the keys of their first rows, and the faults."""
    firsts = np.cumsum([1, *(count + 2 for count in rows)])
    faults = torch.zeros(len(rows), 4, dtype=torch.int64, device=one(0).device)
    words = [
        TableEntryWords(int(first), count, 0, 0, 0, 0, 0, fault.data_ptr(), (0, 0, 0), padding).words
        for first, count, fault, padding in zip(firsts, rows, faults, paddings, strict=False)
    ]
    return (
        DeviceTables(tensor(np.array(words)), "device", "constant", RecordForm(4, "float32", 16, 4, 0)),
        firsts,
        faults,
    )


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_join_and_bounds(dtype: type) -> None:
    rows, paddings, rng = [5, 1000, 1, 40], [-2, 3, 0, -2], np.random.default_rng(0)
    tables, firsts, faults = made_tables(rows, paddings)
    sizes, of = [7, 0, 2000, 3, 90], [0, 0, 1, 2, 3]
    ids = np.concatenate([rng.integers(0, rows[t], n) for n, t in zip(sizes, of, strict=True)]).astype(dtype)
    ids[[3, 4, 2008]] = -9, 77, 6
    n, cuts = len(ids), np.cumsum([0, *sizes])
    keys, expected = Poisoned((n,), torch.int32), np.empty(n, np.int32)
    device.join(ids, cuts, of, firsts, rows, expected)
    joint.join(tensor(ids), tensor(np.array([*cuts, *of])), len(of), tables, keys.inside)
    same(keys.check(n), expected)

    order = np.argsort(expected, kind="stable")
    unique, starts = np.unique(expected[order].astype(np.int64), return_index=True)
    bounds, wanted = Poisoned((9,), torch.int32), np.empty(9, np.int32)
    found = np.zeros((4, 4), np.int64)
    device.bounds(firsts, rows, unique, ids[order[starts]], paddings, wanted, found)
    padded = tensor(np.append(unique, [firsts[-1]] * 3))
    of_plan = tensor(ids), tensor(order), tensor(starts.astype(np.int32))
    plan.bounds(tables, padded, one(len(unique)), *of_plan, bounds.inside)
    same(bounds.check(9), wanted)
    same(faults, found)
    faults.zero_()  # the plan of the same keys writes the same
    scan, tickets, sizes = one(0).repeat(plan.scan_words(n)), one(7).repeat(5), ((n, torch.int64), (n + 1, torch.int32))
    again, sorted_keys = Poisoned((9,), torch.int32), tensor(expected[order])
    made = [Poisoned((size,), dtype).inside for size, dtype in (*sizes, (n, torch.int32), (1, torch.int32))]
    keys_of_plan = sorted_keys, int(firsts[-1]) - 1, tensor(order), scan
    plan.collect(*keys_of_plan, [*made, tickets], tables, found=(tensor(ids), again.inside))
    same(again.check(9), wanted)
    same(faults, found)
    assert not tickets.any()
    assert not scan.any()
    assert found[:, 2].tolist() == [-9, 0, 6, 0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("lanes", [8, *slow(1024)])
def test_bags(dtype: torch.dtype, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "LANES", lanes)
    tables, _, faults = made_tables([5, 9, 7], [-2, -2, -2])
    every = [
        device.BagsOf(0, 9, [0, 0, 4, 4, 9, 9], is_mean=True),
        device.BagsOf(1, 12, range(0, 12, 3), is_mean=False),
        device.BagsOf(1, 0, [0, 0], is_mean=False),
        device.BagsOf(1, 3, [0], is_mean=True),
        device.BagsOf(2, 30, [*range(0, 20, 2)], is_mean=False),
    ]
    of_starts = [feature for number, feature in enumerate(every) if number != 1]
    bags = [
        features.FeatureBags(
            "mean" if feature.is_mean else "sum", 3 if number == 1 else 0, torch.tensor(list(feature.starts)), None
        )
        for number, feature in enumerate(every)
    ]
    bags[1] = bags[1]._replace(starts=None)
    sizes = [feature.n for feature in every]
    cuts = np.array([*np.cumsum([0, *sizes]), *(f.table for f in every), *features.bag_words(bags, sizes)])
    n, count = sum(sizes), sum(len(feature.starts) for feature in every)
    skips = np.array([3, -1, 0], np.int32)
    paddings = tensor(skips)

    lines = count + 1, n, count

    def found(starts: list[int]) -> list[np.ndarray]:
        out, tickets = [Poisoned((each,), torch.int32) for each in lines], tensor(np.zeros(4, np.int32))
        given = torch.tensor(starts, dtype=dtype, device=paddings.device), tensor(cuts), len(every), tables, paddings
        joint.bags(*given, tickets, *(each.inside for each in out))
        return [each.check(size) for each, size in zip(out, lines, strict=True)]

    expected, wanted = [np.full(size, -1, np.int32) for size in lines], np.zeros((3, 4), np.int64)
    offsets, of_positions, words = expected
    device.bags(every, skips, offsets, of_positions, words, wanted)
    starts = [start for feature in of_starts for start in feature.starts]
    for got, own in zip(found(starts), expected, strict=True):
        same(got, own)
    same(faults, wanted)
    for place, start in [(3, 3), (4, 77), (0, 1), (2, -1)]:  # one that decreases; too large; not from 0; less than 0
        bad = [*starts[:place], start, *starts[place + 1 :]]
        offsets, of_positions, _ = found(bad)  # which hurt nobody
        assert offsets.min() >= 0
        assert offsets.max() <= n
        assert of_positions.min() >= 0
        assert of_positions.max() < count
        assert faults[:, 0].tolist() == [4, 0, 0]
        faults.zero_()


@pytest.mark.parametrize("groups", [["f2", "f0", "f1"], *slow(["f1", "f2", "f0"])], ids=str)
def test_param_groups_may_have_tables_in_any_order(groups: list[str]) -> None:
    models = [Model(where) for where in (EVERYTHING, None)]
    for model in models:
        handles = [[model.layers[name].handle] for name in groups]
        others = [layer.handle for name, layer in model.layers.items() if name not in [*groups, "again"]]
        params = [*handles, others] if others else handles
        model.step = ert.Adam([{"params": own, "lr": 0.1 * (k + 1)} for k, own in enumerate(params)])
        model.train(2)
    assert_same(*models)
