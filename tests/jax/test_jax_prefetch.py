"""`ej.prefetch`: the same bits for any depth, and errors in the place of their item."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
import embedrock.jax as ej
from embedrock.errors import ArgumentError, CacheTooSmallError, IdError
from same_tables import check_same

ROWS, DIM = 500, 4


def made(folder: Path | None, slots: int) -> dict[str, er.Table]:
    room, found = er.Table(ROWS, DIM, rule=er.Adam()).memory_for(slots), dict[str, er.Table]()
    for seed, name in enumerate(("item", "user")):
        place: dict[str, Any] = {} if folder is None else {"path": folder / name, "memory": room}
        found[name] = er.Table(ROWS, DIM, rule=er.Adam(lr=0.1), seed=seed, **place)
    return found


def close(tables: dict[str, er.Table]) -> None:
    for table in tables.values():
        if table.path is not None:
            table.commit()
        table.close()


def loader(count: int, size: int = 10) -> Iterator[tuple[dict[str, np.ndarray], float]]:
    rng = np.random.default_rng(0)
    for k in range(count):
        yield {name: (rng.zipf(1.3, size) * 3) % ROWS for name in ("item", "user")}, float(k)


def train(tables: ej.Tables, batch: ej.Batch) -> None:
    """Step by gradients that depend on every bit of the rows."""
    tables.apply(batch, {name: np.asarray(rows) * np.float32(0.3) for name, rows in batch.rows.items()}, True)


def loop(items: Any, tables: ej.Tables, depth: int, seen: list[float]) -> None:
    for batch, (_, number) in ej.prefetch(items, tables, depth):
        train(tables, batch)
        seen.append(number)


@pytest.fixture(scope="module")
def plain() -> dict[str, er.Table]:
    """Tables that were trained without looking ahead."""
    kept = made(None, 0)
    tables = ej.Tables(kept)
    for ids, _ in loader(60):
        train(tables, tables.fetch(ids))
    return kept


@pytest.mark.parametrize("place", ["RAM", "disk"])
@pytest.mark.parametrize("depth", [0, 1, 2, 5, 24])
def test_any_depth_gives_the_same_bits(depth: int, place: str, plain: dict[str, er.Table], tmp_path: Path):
    kept = made(tmp_path if place == "disk" else None, 10 * (depth + 1))
    tables, seen = ej.Tables(kept), list[float]()
    for batch, (ids, number) in ej.prefetch(loader(60), tables, depth):
        for name, table in kept.items():
            assert np.array_equal(batch.lookup(name), table.lookup(ids[name]))
        train(tables, batch)
        seen.append(number)
    assert seen == list(range(60))
    for name, table in kept.items():
        check_same(table, plain[name])
    close(kept)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_loop_that_is_left_early_leaves_the_rest_unused(depth: int, tmp_path: Path):
    kept = made(tmp_path, 40)
    tables, before = ej.Tables(kept), threading.active_count()
    items = ej.prefetch(loader(60), tables, depth)
    for batch, (_, number) in items:
        train(tables, batch)
        if number == 3:
            break
    items.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    again, twin = made(None, 0), list(loader(60))
    alone = ej.Tables(again)
    for ids, _ in [*twin[:4], *twin[10:14]]:
        train(alone, alone.fetch(ids))
    for batch, _ in ej.prefetch(twin[10:14], tables, depth):  # they can be used as before
        train(tables, batch)
    for name, table in kept.items():
        check_same(table, again[name])
    close(kept)


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_an_error_of_the_loader_comes_in_its_place(depth: int):
    kept, seen = made(None, 0), list[float]()
    tables = ej.Tables(kept)

    def failing() -> Iterator[tuple[dict[str, np.ndarray], float]]:
        yield from loader(4)
        raise OSError("no such shard")

    with pytest.raises(OSError, match="no such shard"):
        loop(failing(), tables, depth, seen)
    assert seen == [0, 1, 2, 3]
    assert [table.steps for table in kept.values()] == [4, 4]


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_wrong_ids_are_refused_in_their_place(depth: int):
    kept, seen = made(None, 0), list[float]()
    tables, items = ej.Tables(kept), list(loader(6))
    items[3][0]["user"][2] = ROWS
    with pytest.raises(IdError, match=rf"must lie in \[0, {ROWS}\): got {ROWS} at \[2\]"):
        loop(items, tables, depth, seen)
    assert seen == [0, 1, 2]
    assert [table.steps for table in kept.values()] == [3, 3]


@pytest.mark.parametrize("grouped", [False, True], ids=["tables", "group"])
def test_a_cache_that_is_too_small_names_the_memory_that_works(grouped: bool, tmp_path: Path):
    items = [
        ({"item": np.arange(k, k + 40), "user": np.arange(2 * k, 2 * k + 40)}, float(k)) for k in range(0, 200, 40)
    ]

    def opened(memory: int) -> tuple[Any, dict[str, er.Table]]:
        if not grouped:
            alone = {
                name: er.Table(ROWS, DIM, rule=er.Adam(), seed=0, path=tmp_path / name, memory=memory)
                for name in ("item", "user")
            }
            return alone, alone
        group = er.Group(path=tmp_path / "group", memory=memory)
        return group, {name: group.table(name, rows=ROWS, dim=DIM, rule=er.Adam(), seed=0) for name in ("item", "user")}

    def play(memory: int) -> None:
        given, kept = opened(memory)
        try:
            loop(items, ej.Tables(given), 3, [])
        finally:
            for each in [given] if grouped else kept.values():
                each.commit()
                each.close()

    one = er.Table(ROWS, DIM, rule=er.Adam()).memory_for(50)
    play(one * 20)  # the records are on disk now
    expected = (
        r"Looking ahead by depth=3 keeps the rows of 4 items in the cache at once, here 320 rows: memory=(\d+) "
        r"\(.*\) is enough for them, and a lower `depth` needs less\."
    )
    with pytest.raises(CacheTooSmallError, match=expected) as error:
        play(one * (1 + grouped))
    found = re.search(expected, str(error.value))
    assert found is not None
    play(int(found[1]))


def test_ids_of_an_item_are_found_by_a_function():
    kept = made(None, 0)
    tables = ej.Tables(kept)
    items = [{"ids": ids, "target": number} for ids, number in loader(3)]
    found = [item["target"] for _, item in ej.prefetch(items, tables, ids_of=lambda item: item["ids"])]
    assert found == [0, 1, 2]


@pytest.mark.parametrize("depth", [0, 2])
def test_items_that_are_lists(depth: int):
    """A DataLoader of torch makes lists of ids and labels. Such a list could pass for ids of shape (2, n)."""
    tables, items = ej.Tables(er.Table(rows=9, dim=2)), [[np.array([3, 1]), np.array([0, 1])]]
    with pytest.raises(ArgumentError) as error:
        next(ej.prefetch(items, tables, depth))
    assert str(error.value) == (
        "an item of ej.prefetch must be ids, or a tuple that begins with them: got a list. Pass ids_of=lambda item: "
        "item[0], or another function that returns its ids."
    )
    ((batch, item),) = ej.prefetch(items, tables, depth, ids_of=lambda item: item[0])  # the remedy
    assert batch.positions.shape == (2,)
    assert item is items[0]
