"""Tables of open ids that are looked up together: the bits, and the slots, of each alone."""

from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import race_detector
import torch
from gpu_device import INTERPRETED
from gpu_models import on_device
from tensors import Poisoned, one, same, tensor, verdicts
from test_gpu_joint import JOINT, launches
from test_gpu_open_ids import EXTREMES
from torch import Tensor

import embedrock as er
import embedrock.torch as ert
from embedrock.device import hashed_batch, memory_for
from embedrock.device.features import FeatureLayout
from embedrock.device.lookup import DeviceLookup
from embedrock.kernels.gpu import directory, plan
from embedrock.kernels.gpu.addresses import TableEntryWords
from embedrock.table.table import rows_of
from reference import device
from slow import slow

DIM, BATCH = 6, 10
TABLES = 3
NEW = {"_search", "_enter", "_tables"}
OPEN = dict.fromkeys({*JOINT} - {"_join"} | NEW, 1)
PADDING = 5  # of the second table

Batch = dict[str, Tensor]


class Model:
    """Layers of open ids, of which the second has padding, and two features.

    Args:
        how: "together", looked up by a collection; "alone", one by one; None: on the CPU.
        near: rows that GPU memory has room for, of each table.
        rule: of the optimizer.
        options: of layers.
    """

    kind: Any = ert.Embedding
    collection: Any = ert.EmbeddingCollection

    def __init__(self, how: str | None, near: int = 500, rule: str = "Adam", **options: Any) -> None:
        spec = er.Table(None, DIM, rule=getattr(er, rule)()).spec
        memory = {} if how is None else {"device_memory": near and memory_for(spec, near)}
        inits = er.Normal(std=0.5), er.Normal(std=0.1), er.Normal(mean=1.0)
        layers = [
            self.kind(None, DIM, init=init, seed=k, padding_idx=PADDING if k == 1 else None, **memory, **options)
            for k, init in enumerate(inits)
        ]
        self.how, self.whole = how, torch.nn.ModuleList(layers)
        self.layers = dict(zip("abc", layers, strict=True)) | {"again": layers[1]}
        self.step = getattr(ert, rule)(self.whole, lr=0.1)
        if how is not None:
            on_device(self.whole)

    @property
    def tables(self) -> list[er.Table]:
        return [self.layers[name].table for name in "abc"]

    def look_up(self, batch: Batch) -> Batch:
        if self.how == "together":
            return self.collection({name: self.layers[name] for name in batch})(batch)
        given = dict(batch)
        again = given.pop("again", None)
        if again is not None and "b" in given:  # gradients of one lookup are added in one order
            given["b"] = torch.cat([given["b"], again])
        elif again is not None:
            given["again"] = again
        found = {name: self.layers[name](ids) for name, ids in given.items()}
        if again is not None and "b" in given:
            found["b"], found["again"] = found["b"].split([len(batch["b"]), len(again)])
        return {name: found[name] for name in batch}

    def backward(self, batch: Batch, left_out: str = "", scale: float = 1.0) -> Batch:
        found = self.look_up(batch)
        parts = [scale * k * rows.float().square().sum().cpu() for k, (name, rows) in enumerate(found.items(), 1)
                 if name != left_out]  # fmt: skip
        torch.stack(parts).sum().backward()
        return {name: rows.detach().cpu() for name, rows in found.items()}

    def advance(self) -> None:
        self.step.step()
        self.step.zero_grad()

    def train(self, batch: Batch) -> Batch:
        found = self.backward(batch)
        self.advance()
        return found


def features(rng: np.random.Generator, names: str = "a b c") -> Batch:
    """Return ids of features: the same ones in all tables, some of them new, extreme or none at all."""
    made = {}
    for name in names.split():
        size = int(rng.choice([0, 1, BATCH, 3 * BATCH]))
        ids = rng.choice(EXTREMES, size) if rng.integers(3) == 0 else rng.integers(-size, 9 + size, size)
        made[name] = torch.from_numpy(ids.astype(np.int64))
    return made


def assert_same(mine: Model, other: Model) -> None:
    """Compare all bits; on a device, also in which slots they are."""
    for a, b in zip(mine.tables, other.tables, strict=True):
        states = a.state(), b.state()
        assert states[0]["steps"] == states[1]["steps"]
        orders = [slice(None) if other.how else np.argsort(state["ids"]) for state in states]
        for part in ("ids", "records"):
            got, expected = (state[part][order] for state, order in zip(states, orders, strict=True))
            np.testing.assert_array_equal(got, expected)


def are_same(batches: list[Batch]) -> None:
    for other in batches[1:]:
        assert batches[0].keys() == other.keys()
        assert all(torch.equal(rows, other[name]) for name, rows in batches[0].items())


@pytest.mark.parametrize("near", [500, *slow(0)])
def test_tables_of_open_ids_are_trained_by_the_same_kernels(near: int) -> None:
    models = [Model(how, near) for how in ("together", "alone", None)]
    rng = np.random.default_rng(0)
    for _ in range(4):
        batch = features(rng)
        with launches() as seen:
            found = [models[0].train(batch)]
        del seen["_file"]  # as the directory was begun
        assert seen == OPEN
        are_same([*found, *(model.train(batch) for model in models[1:])])
    for model in models[1:]:
        assert_same(models[0], model)


@pytest.mark.parametrize("seed", [1, *slow(0, *range(2, 40))])
def test_a_trace_of_tables_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rule = str(rng.choice(["SGD", "Adam", "Adagrad"]))
    options = {"dtype": (torch.float32, torch.bfloat16)[rng.integers(2)]}
    near = int(rng.choice([0, 25, 60, 500]))
    models = [Model(how, near, rule, **options) for how in ("together", "alone", None)]
    for _ in range(8):
        act, names = rng.integers(8), str(rng.choice(["a b c", "c a", "a b c again", "b again"]))
        batch = features(rng, names)
        if act < 4:
            are_same([model.train(batch) for model in models])
        elif act == 4:
            left_out = str(rng.choice(names.split()))
            if len(batch) > 1 and "again" not in batch:
                are_same([model.backward(batch, left_out) for model in models])
                [model.advance() for model in models]
        elif act == 5:  # one by one, and then together
            [model.layers["a"](batch.get("a", torch.arange(3))).float().square().sum().backward() for model in models]
            [model.advance() for model in models]
        elif act == 6:
            ids = np.unique(rng.integers(-20, 20, 6))
            rows = rng.standard_normal((len(ids), DIM)).astype(np.float32)
            [model.tables[0].assign(ids, rows) for model in models]
        else:
            with torch.no_grad():
                are_same([{k: v.cpu() for k, v in model.look_up(batch).items()} for model in models])
    for model in models[1:]:
        assert_same(models[0], model)


class BagModel(Model):
    """The same of bags: two of each feature's ids, the last one shorter."""

    kind = ert.EmbeddingBag
    collection = ert.EmbeddingBagCollection

    def look_up(self, batch: Batch) -> Batch:
        given = {name: (ids, torch.arange(0, len(ids), 2)) for name, ids in batch.items()}
        if self.how == "together":
            return self.collection(self.layers)({**given, "again": given["b"]})
        own = {name: self.layers[name](*one) for name, one in given.items()}
        return own | {"again": own["b"]}


@pytest.mark.parametrize(("mode", "near"), [("mean", 500), *slow(("max", 500), ("sum", 0))])
def test_bags_of_open_ids_are_pooled_together(mode: str, near: int) -> None:
    models = [BagModel(how, near, mode=mode) for how in ("together", "alone", None)]
    rng = np.random.default_rng(3)
    for _ in range(3):
        batch = {name: torch.from_numpy(rng.integers(0, 12, 7)) for name in "abc"}
        with launches() as seen:
            found = [model.look_up(batch) for model in models[:1]]
        assert seen["_bags"] == seen["_search"] == 1
        found += [model.look_up(batch) for model in models[1:]]
        are_same([{name: rows.detach().cpu() for name, rows in each.items()} for each in found])
        for model, own in zip(models, found, strict=True):
            torch.stack([own[name].square().sum().cpu() for name in "abc"]).sum().backward()
            model.advance()
    for model in models[1:]:
        assert_same(models[0], model)


def test_a_step_that_is_refused_makes_rows_of_no_table() -> None:
    mine, other = Model("together"), Model(None)
    batch = {name: torch.arange(4) for name in "abc"}
    for model in (mine, other):
        model.train(batch)
    found = mine.look_up({name: torch.arange(8) for name in "abc"})
    (found["a"].sum() + found["b"].sum() * float("nan") + found["c"].sum()).backward()
    mine.advance()
    with pytest.raises(er.NonFiniteGradientError):
        mine.look_up(batch)
    assert [table.stats()["rows_touched"] for table in mine.tables] == [4, 5, 4]  # and the row of padding
    for model in (mine, other):
        model.train({name: torch.arange(6, 9) for name in "abc"})
    assert_same(mine, other)


def test_batches_are_planned_ahead_together() -> None:
    models = [Model("together"), Model("alone")]
    rng = np.random.default_rng(1)
    batches = [features(rng) for _ in range(4)]
    layers = {models[0].layers[name]: lambda batch, name=name: batch[name] for name in "abc"}
    with launches() as seen:
        for batch in ert.prefetch(batches, layers, depth=1):
            models[0].train(batch)
    assert seen["_tables"] == seen["_search"] == len(batches)
    for batch in batches:
        models[1].train(batch)
    assert_same(*models)


@pytest.mark.parametrize("near", [500, *slow(0)])
def test_two_features_of_a_table_are_planned_ahead_together(near: int) -> None:
    models = [Model(how, near) for how in ("together", "alone", None)]
    rng = np.random.default_rng(2)
    batches = [features(rng, "a b c again") for _ in range(4)]
    layers = {models[0].layers[name]: lambda batch, name=name: batch[name] for name in "ac"}
    layers |= {models[0].layers["b"]: lambda batch: (batch["b"], batch["again"])}
    for batch in ert.prefetch(batches, layers, depth=1):
        are_same([model.train(batch) for model in models])
    for model in models[1:]:
        assert_same(models[0], model)


@pytest.mark.parametrize("when", ["before the read", *slow("before the step", "in the lookup")])
def test_tables_that_outgrow_the_memory_go_on_alone(when: str) -> None:
    models = [Model("together", 20), Model("alone", 20)]
    few, many = ({name: torch.arange(count) for name in "abc"} for count in (9, 18))
    for model in models:
        model.train(few)
    executors: list[Any] = [table.executor for table in models[0].tables]
    rows = np.zeros((30, DIM), np.float32)
    if when == "before the read":
        reading = DeviceLookup(FeatureLayout(executors, [None] * TABLES), [many[name] for name in "abc"], trains=True)
        reading.plan()
        models[0].tables[0].assign(np.arange(100, 130), rows)
        models[0].layers["a"](torch.arange(3))  # which takes it over
        assert executors[0].joins is None
        found = reading.read()
        for table, own in zip(models[0].tables, found, strict=True):
            np.testing.assert_array_equal(own.cpu(), table.lookup(np.arange(18)))
        summed = reading.sums([torch.ones(18, DIM, device=own.device) for own in found])
        assert len(summed) == TABLES
        models[1].tables[0].assign(np.arange(100, 130), rows)
    elif when == "in the lookup":
        for model in models:
            model.tables[0].assign(np.arange(100, 130), rows)
            model.train(many)
    else:
        found = [model.backward(many) for model in models]
        for model in models:
            model.tables[0].assign(np.arange(100, 130), rows)
            model.advance()
        are_same(found)
    for model in models:
        model.train(many)
    assert executors[0].joins is None
    for a, b in zip(models[0].tables, models[1].tables, strict=True):
        for got, expected in zip(a.export(), b.export(), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_the_others_stay_together_when_a_table_outgrows_the_memory() -> None:
    model, batch = Model("together", 20), {name: torch.arange(9) for name in "abc"}
    whole = ert.EmbeddingCollection({name: model.layers[name] for name in "abc"})
    model.look_up = whole.__call__
    for reads in 1, 2:
        for _ in range(2):
            model.train(batch)
        with launches() as counted:
            model.train(batch)
        assert counted["_read"] == reads
        model.tables[0].assign(np.arange(100, 130), np.zeros((30, DIM), np.float32))


@pytest.mark.parametrize("is_first", [True, *slow(False)])
def test_one_of_the_tables_outgrows_the_memory_in_a_step_with_known_ids(is_first: bool) -> None:
    exports = []
    for how in "together", "alone":
        model, known = Model(how, 20), ert.Embedding(30, DIM, seed=9, device_memory="1MiB")
        on_device(known)
        layers = [known, *model.whole] if is_first else [*model.whole, known]
        model.step = ert.Adam(torch.nn.ModuleList(layers), lr=0.1)
        for count in 9, 18:
            known(torch.arange(count)).square().sum().backward()
            model.backward({name: torch.arange(count) for name in "abc"})
            if count == 18:
                model.tables[1].assign(np.arange(100, 130), np.zeros((30, DIM), np.float32))
            model.advance()
        exports.append([table.export() for table in (*model.tables, known.table)])
    for a, b in zip(*exports, strict=True):
        for got, expected in zip(a, b, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("near", [20, *slow(0)])
def test_tables_that_leave_the_device_keep_none_of_its_memory(near: int) -> None:
    model = Model("together", near)
    model.train({name: torch.arange(9) for name in "abc"})
    executors: list[Any] = [table.executor for table in model.tables]
    memory = [weakref.ref(executor.cache.slots.where) for executor in executors]
    for table in model.tables:
        rows_of(table).leave_side()
    gc.collect()
    assert [where() for where in memory] == [None] * TABLES


def test_more_tables_than_a_byte_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_batch, "NARROW", 2)
    models = [Model("together"), Model("alone")]
    batch = {name: torch.arange(k, k + 9) for k, name in enumerate("abc")}
    for model in models:
        model.train(batch)
    assert_same(*models)


@pytest.mark.skipif(not INTERPRETED, reason="compute-sanitizer looks for races on a GPU: see on_gpu.py")
def test_no_program_depends_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    detector = race_detector.install(monkeypatch)
    monkeypatch.setattr(directory, "LANES", 4)
    models = [Model("together"), Model("alone")]
    rng = np.random.default_rng(5)
    for _ in range(2):
        batch = {name: torch.from_numpy(rng.integers(0, 12, 11)) for name in "abc"}
        for model in models:
            model.train(batch)
    assert detector.found == set()
    assert detector.launched >= NEW
    assert_same(*models)


# ---------------------------------------------------------------- kernels


class Directories:
    """Tables of open ids that have nothing but directories, on the device and as the reference knows them."""

    SLOTS, SEED = 4000, 2**62 + 5
    paddings = None, PADDING, None, -7, None

    def __init__(self) -> None:
        k = len(self.paddings)
        self.places = tensor(np.zeros((k, 2 * self.SLOTS), np.int64))
        self.ids, self.used = tensor(np.zeros((k, self.SLOTS), np.int64)), tensor(np.zeros(k, np.int64))
        firsts = 1 + np.arange(k) * (self.SLOTS + 2)
        self.tables = [
            device.OpenTable(int(first), np.zeros(self.SLOTS, np.int64), 0, padding)
            for first, padding in zip(firsts, self.paddings, strict=True)
        ]
        words = [self._words(number, table) for number, table in enumerate(self.tables)]
        self.entries = tensor(np.array(words, np.int64))

    def _words(self, number: int, table: device.OpenTable) -> tuple[int, ...]:
        own = [each[number].data_ptr() for each in (self.places, self.ids, self.used)]
        known = *own[:2], 2 * self.SLOTS, self.SEED, own[2], int(table.padding is not None)
        padding = -2 if table.padding is None else table.padding
        return TableEntryWords(table.first, self.SLOTS, 0, 0, 0, 0, 0, 0, (0, 0, 0), padding, directory=known).words

    def step(self, parts: list[np.ndarray], begin: int, live: list[bool]) -> None:
        """Plan the ids of each table, look them up, and enter those of some tables."""
        cuts, ids = np.cumsum([0, *map(len, parts)]), np.concatenate(parts)
        rows, arrays = self._planned(ids, cuts)
        keys, expected = Poisoned((len(ids),), torch.int64), np.empty(len(rows.ids), np.int64)
        news, wanted = tensor(np.zeros(len(parts), np.int32)), np.empty(len(parts), np.int32)
        bounds, of_tables = Poisoned((2 * len(parts) + 1,), torch.int32), np.empty(2 * len(parts) + 1, np.int32)
        counts = Poisoned((directory.blocks(len(ids) + 1),), torch.int32).inside
        device.search_tables(rows.ids, rows.of, self.tables, expected, wanted, of_tables)
        directory.search(arrays, self.entries, keys.inside, counts, news, bounds.inside)
        same(keys.check(len(rows.ids)), expected)
        same(news, wanted)
        same(bounds.check(len(of_tables)), of_tables)
        assert int(counts.sum()) == wanted.sum()

        ticket = one(0)
        given = device.enter_tables(rows.ids, expected, self.tables, of_tables, begin, live)
        directory.enter(arrays, self.entries, keys.inside, counts, news, ticket, verdicts(live, begin=begin))
        for number, used in enumerate(given, begin):
            self.tables[number] = self.tables[number]._replace(used=used)
        same(keys.check(len(rows.ids)), expected)
        same(self.used, np.array([table.used for table in self.tables]))
        same(self.ids, np.stack([table.ids for table in self.tables]))
        assert not int(ticket)

    def _planned(self, ids: np.ndarray, cuts: np.ndarray) -> tuple[Rows, tuple[Any, ...]]:
        """Plan ids of tables; return the rows that they have, and what kernels know of them."""
        n, first = len(ids), np.argsort(ids, kind="stable")
        of, found = np.empty(n, np.uint8), Poisoned((n,), torch.uint8)
        device.tables(first, cuts, of)
        directory.tables(tensor(first), tensor(cuts), len(self.tables), found.inside)
        same(found.check(n), of)

        second = np.argsort(of, kind="stable")
        ordered, order = ids[first][second], first[second]
        got, tickets = Poisoned((n,), torch.int64), Poisoned((1,), torch.int32)
        scan, of_positions = tensor(np.zeros(plan.scan_words(n), np.int32)), tensor(of[second])
        unique, starts, inverse = np.empty(n, np.int64), np.empty(n + 1, np.int32), np.empty(n, np.int32)
        count = np.empty(1, np.int32)
        device.collect(ordered, 0, order, unique, starts, inverse, count, of[second])
        sizes = (n, torch.int64), (n + 1, torch.int32), (n, torch.int32), (1, torch.int32)
        made = [Poisoned((size,), dtype) for size, dtype in sizes]
        args = tensor(ids[first]), 0, got.inside, scan, [*(each.inside for each in made), tickets.inside]
        plan.collect(*args, of=(of_positions, tensor(second), tensor(first)))
        same(got.check(n), order)
        assert int(tickets.check(1)[0]) == 0
        assert not scan.any()
        rows = int(count[0])
        for each, expected in zip(made, (unique, starts[: rows + 1], inverse, count), strict=True):
            same(each.check(len(expected)), expected)
        begins = starts[:rows]
        arrays = made[0].inside, made[1].inside, of_positions, made[3].inside, tensor(cuts)
        return Rows(unique[:rows], of[second][begins]), arrays


class Rows(NamedTuple):
    """Rows of tables: their ids, and the table of each."""

    ids: np.ndarray
    of: np.ndarray


@pytest.mark.parametrize("lanes", [directory.LANES, *slow(4)])
@pytest.mark.parametrize("seed", [0, *slow(*range(1, 10))])
def test_ids_of_tables_get_the_slots_of_the_reference(seed: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "LANES", lanes)
    rng, tables = np.random.default_rng(seed), Directories()
    k, most = len(tables.tables), 700 if lanes > 4 else 40
    for number in range(5):
        sizes = rng.integers(0, most, k) * (rng.random(k) < 0.8)
        parts = [np.r_[EXTREMES, rng.integers(-20, 20 + 9 * size, size)][: 3 + size] for size in sizes]
        parts = [part if size else part[:0] for part, size in zip(parts, sizes, strict=True)]
        parts[1] = np.r_[parts[1], PADDING, -9 - number]  # the one never gets a slot, the other one is new
        begin = int(rng.integers(2))
        live = [bool(rng.random() < 0.8) for _ in range(k - begin - int(rng.integers(2)))]
        tables.step([rng.permutation(part).astype(np.int64) for part in parts], begin, live)
    assert sum(table.used for table in tables.tables) > 20
    assert PADDING not in tables.tables[1].ids[: tables.tables[1].used]
