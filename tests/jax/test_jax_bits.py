"""JAX: the same row gradients give the bits of PyTorch's front end, and training is repeatable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import embedrock as er
import embedrock.jax as ej
import embedrock.torch as ert
from same_tables import check_same
from slow import slow

ROWS = {"item": 600, "shop": 300, "user": 400}
DIMS = {"item": 8, "shop": 8, "user": 4}
BATCH = 32
SLOTS = 3 * BATCH  # rows that a cache holds: of three batches, a third or less of a table
RULES: dict[str, tuple[er.Rule, type[Any], dict[str, Any]]] = {
    "adam": (er.Adam(lr=0.05), ert.Adam, {}),
    "sgd": (er.SGD(lr=0.05), ert.SGD, {}),
    "adagrad": (er.Adagrad(lr=0.05), ert.Adagrad, {}),
    "adamw": (er.AdamW(lr=0.05, weight_decay=0.1, dense=True), ert.AdamW, {"weight_decay": 0.1, "dense": True}),
    "ftrl": (er.Ftrl(lr=0.05), ert.Ftrl, {}),  # the last two move rows that no batch has, too
}


def made(rule: er.Rule | None, folder: Path | None = None, grouped: bool = False) -> tuple[Any, dict[str, er.Table]]:
    """Return what `ej.Tables` gets, and the tables by name, on disk with less RAM than their rows need."""
    alike = {name: {"rows": ROWS[name], "dim": DIMS[name], "rule": rule, "init": er.Normal(std=0.1)} for name in ROWS}
    alike = {name: {**own, "seed": k} for k, (name, own) in enumerate(alike.items())}
    room = {name: er.Table(**own).memory_for(SLOTS) for name, own in alike.items()}
    if grouped:
        group = er.Group() if folder is None else er.Group(path=folder, memory=sum(room.values()))
        return group, {name: group.table(name, **own) for name, own in alike.items()}
    places = {name: {} if folder is None else {"path": folder / name, "memory": room[name]} for name in alike}
    tables = {name: er.Table(**own, **places[name]) for name, own in alike.items()}
    return tables, tables


def close(given: Any, tables: dict[str, er.Table]) -> None:
    for each in [given] if isinstance(given, er.Group) else tables.values():
        each.commit()
        each.close()


class Shadow:
    """PyTorch's layers on tables of the same seeds, stepped by the gradients that JAX returned."""

    def __init__(self, rule: str) -> None:
        kind, options = RULES[rule][1:]
        self.tables = made(None)[1]
        self.model = torch.nn.ModuleDict({name: ert.Embedding(table) for name, table in self.tables.items()})
        self.optimizer = kind(self.model, lr=0.05, **options)

    def step(self, ids: Mapping[str, np.ndarray], grads: Mapping[str, np.ndarray]) -> None:
        vectors = [self.model[name](torch.from_numpy(np.array(own))) for name, own in ids.items()]
        torch.autograd.backward(vectors, [torch.from_numpy(np.array(grads[name])) for name in ids])
        self.optimizer.step()
        self.optimizer.zero_grad()


def batches(count: int, seed: int = 0, features: bool = False) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Draw ids with repeats, and targets."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        ids: dict[str, Any] = {name: (rng.zipf(1.3, BATCH) * 7) % rows for name, rows in ROWS.items()}
        if features:
            ids["item"] = {"shown": ids["item"][: BATCH // 2], "history": ids["item"][BATCH // 2 :].reshape(-1, 4)}
        yield ids, rng.standard_normal((BATCH, 1)).astype(np.float32)


def loss_of(vectors: Any, target: Any) -> Any:
    each = [
        jnp.tanh(own).sum(-1).reshape(-1) * jnp.resize(target, own.shape[:-1]).reshape(-1)
        for own in jax.tree.leaves(vectors)
    ]
    return sum((own**2).mean() for own in each)


@jax.jit
def by_rows(batch: ej.Batch, target: Any) -> Any:
    return jax.value_and_grad(lambda rows: loss_of(batch.with_rows(rows).lookup(), target))(batch.rows)


@jax.jit
def by_position(batch: ej.Batch, target: Any) -> Any:
    return jax.value_and_grad(loss_of)(batch.lookup(), target)


def flat(own: Any, *last: int) -> np.ndarray:
    """Return several arrays of a table as one: PyTorch sums equal ids of one lookup in order of occurrence."""
    return np.concatenate([np.asarray(each).reshape(-1, *last) for each in jax.tree.leaves(own)])


PLACES = [("adam", "disk", False), ("sgd", "disk", True), ("adagrad", "RAM", True), ("adamw", "disk", True)]
OTHERS = [(rule, place, grouped) for rule in RULES for place in ("RAM", "disk") for grouped in (False, True)]
EACH = [*PLACES, ("ftrl", "RAM", False), *slow(*(each for each in OTHERS if each not in PLACES[:4]))]


@pytest.mark.parametrize("features", [False, True], ids=["ids", "features"])
@pytest.mark.parametrize("of", ["rows", "positions"])
@pytest.mark.parametrize(("rule", "place", "grouped"), EACH)
def test_rows_are_those_of_pytorch(rule: str, place: str, grouped: bool, of: str, features: bool, tmp_path: Path):
    given, kept = made(RULES[rule][0], tmp_path if place == "disk" else None, grouped)
    tables, shadow = ej.Tables(given), Shadow(rule)
    for ids, target in batches(12, features=features):
        batch = tables.fetch(ids)
        _, grads = (by_rows if of == "rows" else by_position)(batch, target)
        tables.apply(batch, grads, ej.all_finite(grads), by_position=of == "positions")
        assert batch.fetched is not None
        unique = dict(zip(tables.by_name, batch.fetched.unique, strict=True))
        if of == "rows":
            shadow.step(unique, {name: np.asarray(grads[name])[: len(own)] for name, own in unique.items()})
        else:
            shadow.step({n: flat(own) for n, own in ids.items()}, {n: flat(grads[n], DIMS[n]) for n in ids})
    for name, table in kept.items():
        check_same(table, shadow.tables[name])
        every = np.arange(ROWS[name])
        assert table.lookup(every).tobytes() == shadow.tables[name].lookup(every).tobytes()
    if place == "disk":
        assert all(table.stats()["misses"] for table in kept.values())
        close(given, kept)


OPTIMIZER = optax.adam(0.01)


@jax.jit
def step(dense: Any, state: Any, batch: ej.Batch, target: Any) -> Any:
    """Step dense weights, and return the gradients of rows."""

    def loss(dense: Any, rows: Any) -> Any:
        vectors = batch.with_rows(rows).lookup()
        return loss_of({name: own @ dense[name] for name, own in vectors.items()}, target)

    value, (grads, row_grads) = jax.value_and_grad(loss, (0, 1))(dense, batch.rows)
    updates, state = OPTIMIZER.update(grads, state, dense)
    return optax.apply_updates(dense, updates), state, row_grads, ej.all_finite(value, grads, row_grads), value


def trained(depth: int, folder: Path | None, grouped: bool = False) -> tuple[bytes, ...]:
    """Return the losses, the dense weights and the rows of a training."""
    given, kept = made(er.Adam(lr=0.05), folder, grouped)
    tables, losses = ej.Tables(given), list[Any]()
    dense: Any = {name: jnp.ones((dim, 6), jnp.float32) * 0.1 for name, dim in DIMS.items()}
    state = OPTIMIZER.init(dense)
    for batch, (_, target) in ej.prefetch(batches(20), tables, depth):
        dense, state, grads, finite, loss = step(dense, state, batch, target)
        tables.apply(batch, grads, finite)
        losses.append(loss)
    rows = [table.lookup(np.arange(ROWS[name])).tobytes() for name, table in kept.items()]
    if folder is not None:
        close(given, kept)
    return np.array(losses).tobytes(), *(np.asarray(own).tobytes() for own in jax.tree.leaves(dense)), *rows


def test_training_twice_gives_the_same_bits(tmp_path: Path):
    assert trained(2, None) == trained(2, None) == trained(0, None) == trained(2, tmp_path, grouped=True)


def test_other_gradients_give_other_bits():
    given, kept = made(er.Adam(lr=0.05))
    tables, shadow = ej.Tables(given), Shadow("adam")
    ((ids, target),) = batches(1)
    batch = tables.fetch(ids)
    _, grads = by_rows(batch, target)
    tables.apply(batch, grads, True)
    assert batch.fetched is not None
    unique = dict(zip(tables.by_name, batch.fetched.unique, strict=True))
    less = np.float32(1 - 2**-23)  # a bit less
    shadow.step(unique, {name: np.asarray(grads[name])[: len(own)] * less for name, own in unique.items()})
    assert kept["item"].lookup(unique["item"]).tobytes() != shadow.tables["item"].lookup(unique["item"]).tobytes()
