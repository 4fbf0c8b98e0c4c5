"""JAX may use host memory as it is: memory of a batch is used again only once JAX refers to it no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import embedrock as er
import embedrock.jax as ej
from embedrock.batch import plan as planning
from embedrock.frontend import row_fetcher
from embedrock.system.buffers import LEAST_BYTES, Buffers
from same_tables import check_same

ROWS, DIM, BATCH = 20_000, 16, 4096


class Pool(Buffers):
    """The pool of `system.buffers`, which notes what it hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        made = self.own(shape, dtype)
        if made.nbytes >= LEAST_BYTES:
            self.addresses.append(made.ctypes.data)
        return made

    def own(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return super().empty(shape, dtype)


class BrokenPool(Pool):
    """A pool that hands out the same memory in turn, whether it is in use or not."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self._turns, self._count, self._rings = turns, 0, dict[Any, list[np.ndarray]]()

    def own(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        ring = self._rings.setdefault((shape, np.dtype(dtype)), [])
        if len(ring) < self._turns:
            ring.append(Buffers.empty(self, shape, dtype))
            return ring[-1].view()
        self._count += 1
        return ring[self._count % self._turns].view()


def use(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> Pool:
    """Use a pool for the rows and the plans of batches."""
    monkeypatch.setattr(row_fetcher, "buffers", pool)
    monkeypatch.setattr(planning, "buffers", pool)
    return pool


def made() -> tuple[er.Table, ej.Tables]:
    table = er.Table(ROWS, DIM, rule=er.Adagrad(lr=0.1), seed=0)
    return table, ej.Tables(table)


def loader(count: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.integers(0, ROWS, BATCH)


def check_kept(tables: ej.Tables, table: er.Table, batches: Any) -> None:
    """Fail unless batches that are kept have the rows and the plan that they were fetched with, whatever follows."""
    kept = []
    for batch, ids in batches:
        assert batch.fetched is not None
        kept.append((batch, ids, table.lookup(ids)))
        tables.apply(batch, jnp.ones_like(batch.rows), True)
    for batch, ids, vectors in kept:
        assert np.array_equal(batch.lookup(), vectors)
        (unique,) = batch.fetched.unique
        assert np.array_equal(unique[np.asarray(batch.positions)], ids)


def fetched_one_by_one(tables: ej.Tables) -> Iterator[tuple[ej.Batch, np.ndarray]]:
    for ids in loader(8):
        yield tables.fetch(ids), ids


WAYS: dict[str, Callable[[ej.Tables], Any]] = {
    "fetch": fetched_one_by_one,
    "prefetch": lambda tables: ej.prefetch(loader(8), tables, 3),
}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_batch_that_is_kept_keeps_its_values(way: str, monkeypatch: pytest.MonkeyPatch):
    pool, (table, tables) = use(monkeypatch, Pool()), made()
    check_kept(tables, table, WAYS[way](tables))
    assert len(pool.addresses) >= 16


@pytest.mark.parametrize("turns", [1, 2, 4])
@pytest.mark.parametrize("way", sorted(WAYS))
def test_the_check_of_kept_batches_finds_memory_that_is_used_too_soon(
    way: str, turns: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(row_fetcher, "buffers", BrokenPool(turns))
    table, tables = made()
    with pytest.raises(AssertionError):
        check_kept(tables, table, WAYS[way](tables))


# ---------------------------------------------------------------- steps that still run


@jax.jit
def late(batch: ej.Batch, turns: Any) -> Any:
    """Return the vectors of a batch, which are read after much other work."""
    worked = jax.lax.fori_loop(0, turns, lambda _, number: jnp.sin(number) + 1.0, 0.5)
    return batch.rows[batch.positions + jnp.isnan(worked).astype(jnp.int32)]


def check_running(tables: ej.Tables, table: er.Table) -> None:
    """Fail unless a step reads the rows of its batch, which nothing else refers to, after others were fetched."""
    ids, was_running, turns = list(loader(4)), False, 1 << 16
    expected = table.lookup(ids[0])
    while not was_running:
        batch = tables.fetch(ids[0])
        found = late(batch, turns)
        del batch
        for own in ids[1:]:
            tables.fetch(own)
        was_running, turns = not found.is_ready(), 2 * turns
        assert np.array_equal(found, expected)


def test_a_running_step_reads_the_rows_of_its_own_batch(monkeypatch: pytest.MonkeyPatch):
    pool, (table, tables) = use(monkeypatch, Pool()), made()
    check_running(tables, table)
    assert len(set(pool.addresses)) < len(pool.addresses)  # memory was used again: that of batches without a step


def test_the_check_of_running_steps_finds_memory_that_is_used_too_soon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_fetcher, "buffers", BrokenPool(1))
    table, tables = made()
    with pytest.raises(AssertionError):
        check_running(tables, table)


# ---------------------------------------------------------------- donated batches


def stepped(vectors_of: Any, is_kept: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """Return all outputs of a training, which has them until its end, and its rows."""
    (table, tables), outputs = made(), list[Any]()
    for batch, _ in ej.prefetch(loader(12), tables, 2):
        fetched = batch if is_kept else ej.Batch(batch.rows, batch.positions)
        rows, positions = vectors_of(fetched)
        outputs.append((rows, positions))
        tables.apply(batch, rows, True)
    return [np.asarray(each) for own in outputs for each in own], table.lookup(np.arange(ROWS))


def other(batch: ej.Batch) -> tuple[Any, Any]:
    """Return arrays of the shapes of the batch's, for which its memory would do."""
    return jnp.tanh(batch.rows) * 3.0, batch.positions + 1


def test_donated_batches_change_no_bit(monkeypatch: pytest.MonkeyPatch):
    expected, rows = stepped(jax.jit(other), True)
    pool = use(monkeypatch, Pool())
    found, found_rows = stepped(jax.jit(other, donate_argnums=0), True)
    assert all(map(np.array_equal, found, expected))
    assert found_rows.tobytes() == rows.tobytes()
    assert len(set(pool.addresses)) < len(pool.addresses)  # memory was used again


def test_the_memory_of_a_donated_batch_is_left_as_it_is():
    (table, tables), twin, ids = made(), made()[0], next(loader(1))
    batch = tables.fetch(ids)
    assert batch.fetched is not None
    (unique,) = batch.fetched.unique
    rows, positions = np.array(batch.rows), np.array(batch.positions)
    out = jax.jit(other, donate_argnums=0)(batch)
    assert np.array_equal(batch.rows, rows)
    assert np.array_equal(batch.positions, positions)
    assert np.array_equal(unique[np.asarray(out[1]) - 1], ids)
    tables.apply(batch, out[0], True)
    twin.update(unique, np.asarray(out[0])[: len(unique)])
    check_same(table, twin)


# ---------------------------------------------------------------- memory of the caller


@pytest.mark.parametrize("by_position", [False, True], ids=["rows", "positions"])
def test_ids_and_gradients_may_be_overwritten_after_the_call(by_position: bool):
    (table, tables), twin, given = made(), made()[0], np.empty((4, BATCH // 4), np.int64)
    for ids in loader(4):
        given.reshape(-1)[:] = ids
        batch = tables.fetch(given)
        given[:] = -1
        grads = np.ones((*given.shape, DIM) if by_position else batch.rows.shape, np.float32)
        tables.apply(batch, grads, True, by_position=by_position)
        grads[:] = np.nan
        once = ids if by_position else np.unique(ids)
        twin.update(once, np.ones((len(once), DIM), np.float32))
    check_same(table, twin)


@pytest.mark.parametrize("by_position", [False, True], ids=["rows", "positions"])
def test_ids_may_be_overwritten_before_rows_are_read_again(by_position: bool):
    """`load_state` is a change by others, of which each row has the value that was read."""
    (table, tables), twin = made(), made()[0]
    given = np.arange(BATCH) % 3
    once = given.copy() if by_position else np.arange(3)
    batch = tables.fetch(given)
    given[:] = np.arange(BATCH) + 500  # many rows, for which the batch has no memory
    table.load_state(table.state())
    grads = np.ones((BATCH, DIM) if by_position else batch.rows.shape, np.float32)
    tables.apply(batch, grads, True, by_position=by_position)
    twin.update(once, np.ones((len(once), DIM), np.float32))
    check_same(table, twin)
