"""Tables with caches in GPU memory that are looked up together: the bits, and the caches, of each alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import late_copies
import numpy as np
import pytest
import race_detector
import torch
from gpu_device import INTERPRETED
from gpu_models import on_device
from tensors import use_blocks_of
from test_gpu_joint import JOINT, launches
from test_gpu_limits import until_it_fits
from torch import Tensor

import embedrock as er
import embedrock.torch as ert
from embedrock.device import memory_for
from slow import slow

DIM, BATCH = 6, 10
ROWS, NEAR = (30, 45, 20), (4, 13, 1)  # of tables, and of their caches, one of which has room for hardly any row
NAMES = "a", "b", "c"
SIZES = (BATCH, BATCH, BATCH), (BATCH, 0, 3), (1, 2 * BATCH, 0)  # ids of the tables, batch by batch
ARRIVING = dict.fromkeys(("_insert", "_exchange"), 1)
CACHED = JOINT | ARRIVING
OF_PLAN = dict.fromkeys(("_join", "_collect"), 1) | ARRIVING

Batch = dict[str, Tensor]


def batches(count: int, names: Iterable[str] = NAMES, seed: int = 0) -> list[Batch]:
    """Return ids of features, some of them hot, others in turns."""
    rng = np.random.default_rng(seed)
    made = list[Batch]()
    for k in range(count):
        sizes = dict[str, tuple[int, int]](zip(NAMES, zip(SIZES[k % 3], ROWS, strict=True), strict=True))
        ids = {name: (rng.zipf(1.3, n) + 7 * k) % rows for name, (n, rows) in ((f, sizes[f[0]]) for f in names)}
        made.append({name: torch.from_numpy(own) for name, own in ids.items()})
    return made


class Model:
    """Layers with caches.

    Args:
        how: "together", looked up by a collection; "alone", one by one; None: as a group, which the CPU uses.
        rule: of the optimizer.
        names: of features: the first letter is the table's name.
        options: of layers.
    """

    kind: Any = ert.Embedding
    collection: Any = ert.EmbeddingCollection

    def __init__(self, how: str | None, rule: str = "Adam", names: Iterable[str] = NAMES, **options: Any) -> None:
        made, group, self.layers = getattr(er, rule)(lr=0.1), er.Group(), dict[str, Any]()
        for seed, (name, rows, slots) in enumerate(zip(NAMES, ROWS, NEAR, strict=True)):
            spec = er.Table(rows, DIM, rule=made, dtype=options.get("dtype", "float32")).spec
            own: dict[str, Any] = {"dim": DIM, "init": er.Normal(std=0.5), "seed": seed, "rule": made, **options}
            near = {"device_memory": memory_for(spec, slots)}
            table = er.Table(rows, **near, **own) if how else group.table(name, rows=rows, **own)
            self.layers[name] = self.kind(table, padding_idx=3 if name == "b" else None, **self.of_layer(name))
        self.features = {name: self.layers[name[0]] for name in names}
        self.whole, self._how = self.collection(self.features), how
        self.optimizer = getattr(ert, rule)(self.whole, lr=0.1)
        if how:
            on_device(self.whole)

    @staticmethod
    def of_layer(name: str) -> dict[str, Any]:
        return {}

    def rows(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        if self._how != "alone":
            return self.whole(batch)
        return {name: self.features[name](ids) for name, ids in batch.items()}

    def step(self, batch: dict[str, Any]) -> None:
        found = self.rows(batch)
        torch.stack([rows.float().square().sum().cpu() for rows in found.values()]).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, given: Iterable[Any]) -> Model:
        for batch in given:
            self.step(batch)
        return self

    def expecting(self, given: list[Any]) -> Iterator[Any]:
        """Go through batches with ids of each feature, which are expected."""
        names: dict[Any, list[str]] = {}
        for name in self.features:
            names.setdefault(self.layers[name[0]], []).append(name)
        return ert.prefetch(
            given, {layer: lambda batch, own=own: self._ids(batch, own) for layer, own in names.items()}, depth=1
        )

    @staticmethod
    def _ids(batch: dict[str, Any], names: list[str]) -> Any:
        parts = [batch[name][0] if isinstance(batch[name], tuple) else batch[name] for name in names]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def caches(self) -> list[Any]:
        return [tensor for layer in self.layers.values() for tensor in layer.table.executor.cache.slots]

    def stats(self) -> list[dict[str, float]]:
        return [layer.table.stats() for layer in self.layers.values()]

    def assert_same(self, other: Model) -> None:
        for mine, theirs in zip(self.layers.values(), other.layers.values(), strict=True):
            every = np.arange(mine.table.rows or 0)
            np.testing.assert_array_equal(mine.table.lookup(every), theirs.table.lookup(every))
            for got, expected in zip(mine.table.export(), theirs.table.export(), strict=True):
                np.testing.assert_array_equal(got, expected)
            assert mine.table.steps == theirs.table.steps

    def assert_same_caches(self, other: Model) -> None:
        assert self.stats() == other.stats()
        for mine, theirs in zip(self.caches(), other.caches(), strict=True):
            assert torch.equal(mine, theirs)


class BagModel(Model):
    """The same with bags, sums of table "b" and means of others."""

    kind, collection = ert.EmbeddingBag, ert.EmbeddingBagCollection

    @staticmethod
    def of_layer(name: str) -> dict[str, Any]:
        return {"mode": "sum" if name == "b" else "mean"}

    def rows(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        if self._how != "alone":
            return self.whole(batch)
        return {name: self.features[name](*given) for name, given in batch.items()}


def bags(given: list[Batch]) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Return the ids in bags: one is empty, and the second one has two."""
    return [
        {name: (ids, torch.tensor([0, 0, 2]).clamp(max=len(ids))) for name, ids in batch.items()} for batch in given
    ]


# ---------------------------------------------------------------- the same as alone


@pytest.mark.skipif(not INTERPRETED, reason="compute-sanitizer looks for races on a GPU: see on_gpu.py")
@pytest.mark.parametrize(
    ("rule", "options", "lanes"),
    [
        ("Adam", {}, 8),  # so that tables begin within blocks, and have several
        *slow(
            ("Adam", {}, 4), ("Adam", {}, 1024), ("SGD", {"dtype": "bfloat16"}, 8), ("Ftrl", {"dtype": "float16"}, 4)
        ),
        *slow(("RMSprop", {}, 16), ("Momentum", {}, 1024), ("AdamW", {}, 2)),
    ],
    ids=str,
)
def test_rows_come_and_leave_as_they_do_alone(rule: str, options: Any, lanes: int, monkeypatch: pytest.MonkeyPatch):
    given = batches(4)
    use_blocks_of(lanes, monkeypatch)
    alone, other = Model("alone", rule, **options).train(given), Model(None, rule, **options).train(given)
    mine = Model("together", rule, **options).train(given[:3])
    detector = race_detector.install(monkeypatch)
    with launches() as seen:
        mine.train(given[3:])
    assert seen == CACHED
    assert detector.found == set()
    fetched, evicted = (sum(own[f"device_{name}"] for own in mine.stats()) for name in ("fetched", "evictions"))
    assert fetched > evicted > 0
    assert mine.stats() == alone.stats()
    mine.assert_same(other)


@pytest.mark.slow
def test_tables_are_used_together_and_alone_in_turns():
    given = batches(6)
    mine, alone = Model("together"), Model("alone")
    for k, batch in enumerate(given):
        mine._how = ("together", "alone")[k % 2]
        mine.step(batch)
        alone.step(batch)
    mine.assert_same_caches(alone)
    mine.assert_same(alone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Model, BagModel])
def test_features_of_one_table_are_one_batch_of_it(kind: Any):
    given = [*map(dict, batches(3, names=("a", "b", "a2", "c")))]
    given = bags(given) if kind is BagModel else given
    mine, other = (kind(how, names=given[0]).train(given) for how in ("together", None))
    mine.assert_same(other)


# ---------------------------------------------------------------- ahead


@pytest.mark.parametrize("kind", [Model, *slow(BagModel)])
def test_batches_that_are_expected_are_planned_together(kind: Any):
    given = bags(batches(3)) if kind is BagModel else batches(3)
    mine, alone, other = (kind(how) for how in ("together", "alone", None))
    with launches() as seen:
        mine.train(mine.expecting(given))
    assert {name: seen[name] for name in OF_PLAN} == dict.fromkeys(OF_PLAN, 3)  # each is planned once
    alone.train(alone.expecting(given))
    mine.assert_same_caches(alone)
    mine.assert_same(other.train(given))


@pytest.mark.slow
def test_batches_that_were_expected_but_are_not_looked_up_are_counted_once():
    given = batches(4, names=("a", "a2", "b", "c"))
    mine, other = Model("together", names=given[0]), Model(None, names=given[0])

    def mark_dirty() -> Iterator[Batch]:
        for batch in mine.expecting([{name: ids.clone() for name, ids in each.items()} for each in given]):
            yield batch | {"b": batch["b"].clone()}  # the same ids

    mine.train(mark_dirty())
    tables = {"a": ("a", "a2"), "b": ("b",), "c": ("c",)}
    for (table, names), stats in zip(tables.items(), mine.stats(), strict=True):
        used = sum(len(np.unique(np.concatenate([batch[name] for name in names]))) for batch in given)
        told = sum(stats[f"device_{what}"] for what in ("hits", "misses", "first_uses"))
        assert told == used, table
    mine.assert_same(other.train(given))


@pytest.mark.slow
def test_ids_outside_of_a_table_that_were_expected_are_an_error_of_their_batch():
    mine, given = Model("together"), batches(2)
    bad = given[0] | {"b": torch.tensor([1, ROWS[1], 2])}

    def train() -> None:
        mine.train(mine.expecting([*given, bad]))
        mine.layers["b"].table.lookup([0])

    with pytest.raises(er.IdError, match=rf"in \[0, {ROWS[1]}\): got {ROWS[1]} in an earlier batch"):
        train()
    mine.optimizer.zero_grad()
    mine.assert_same(Model(None).train(given))


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="on_gpu.py delays the copies of a GPU")
@pytest.mark.parametrize("seed", [None, *range(4)])
def test_copies_of_several_tables_that_are_late_change_nothing(seed: int | None, monkeypatch: pytest.MonkeyPatch):
    given = batches(4)
    copies = late_copies.install(monkeypatch, seed)
    mine = Model("together")
    mine.train(mine.expecting(given))
    mine.assert_same(Model(None).train(given))
    assert copies.late > 0


# ---------------------------------------------------------------- memory


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
def test_what_nobody_wrote_of_several_tables_is_not_read():
    given = batches(5)
    mine = Model("together")
    mine.train(mine.expecting(given)).assert_same(Model(None).train(given))


@pytest.mark.slow
def test_no_allocation_that_fails_steps_some_of_the_tables():
    *before, last, after = batches(5)
    mine, other = Model("together").train(before), Model(None).train(before)

    def ahead() -> None:  # the batch after it is brought, too
        for name, layer in mine.layers.items():
            layer.table.executor.expect(after[name])
        mine.step(last)

    def is_as_before() -> None:
        mine.optimizer.zero_grad()
        mine.assert_same(other)

    assert until_it_fits(ahead, is_as_before) > 20
    mine.step(after)
    mine.assert_same(other.train([last, after]))
