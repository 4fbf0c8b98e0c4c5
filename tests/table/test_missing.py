"""Which ids have a row, and what those without one read as: beside a set of ids, wherever rows live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import ArgumentError, IdError, IdTypeError
from embedrock.storage.disk_backend import DiskBackend
from embedrock.table.missing import SHOWN_IDS, Missing
from slow import slow

ROWS, DIM, BATCH = 600, 4, 30
ROW = [0.5, -1.0, 2.0, 3.0]
EVERY = np.arange(ROWS)
ARRAY = np.random.default_rng(5).normal(size=(ROWS, DIM)).astype(np.float32)


class Life(NamedTuple):
    """A kind of table, and whether the ids with records are known without asking it."""

    name: str
    options: dict[str, Any]
    is_on_disk: bool = False
    in_group: bool = False
    is_predicted: bool = True


SGD, COMES_AND_GOES = er.SGD(lr=0.1), {"eviction": er.Eviction(max_rows=100)}
LIVES = (
    Life("direct", {"directory": "direct"}),
    Life("hashed", {"directory": "hashed"}),
    Life("dense rule", {"rule": er.AdamW(lr=0.1, weight_decay=0.5, dense=True)}),
    Life("16 bits", {"dtype": "bfloat16"}),
    Life("member in RAM", {}, in_group=True),
    Life("on disk, whole", {}, True),
    Life("on disk, cached", {"memory": "60KiB"}, True),
    Life("on disk, dense rule", {"memory": "80KiB", "rule": er.AdamW(lr=0.1, weight_decay=0.5, dense=True)}, True),
    Life("member on disk", {}, True, True),
    Life("evicted", COMES_AND_GOES, is_predicted=False),
    Life("not admitted, zeros", {"admission": er.Admission(min_count=2, default="zeros")}, is_predicted=False),
    Life("not admitted, shared", {"admission": er.Admission(min_count=2, default="shared")}, is_predicted=False),
    Life("not admitted, on disk", {"admission": er.Admission(min_count=2)} | COMES_AND_GOES, True, is_predicted=False),
)


@contextmanager
def made(life: Life, folder: Path, again: bool = False) -> Iterator[er.Table]:
    options: dict[str, Any] = {"rule": SGD, "seed": 3, **life.options}
    memory, path = options.pop("memory", None), str(folder / "table") if life.is_on_disk else None
    if not life.in_group:
        with er.Table(ROWS, DIM, path=path, memory=memory, **options) as table:
            yield table
        return
    group = er.Group(memory, path=path)
    beside = group.table("beside", ROWS, DIM, **options)  # whose keys are others
    if not again:
        beside.assign(EVERY, np.ones((ROWS, DIM)))
    yield group.table("users", ROWS, DIM, **options)
    group.close()


def expected(table: er.Table, there: np.ndarray, value: Any) -> np.ndarray:
    first = table.lookup(EVERY, missing="first")
    return np.where(there[:, None], first, np.asarray(value, np.float32))


def check(table: er.Table, known: set[int] | None) -> None:
    """Compare all answers with the ids that have records."""
    there = np.isin(EVERY, list(known) if known is not None else table.export()[0])
    np.testing.assert_array_equal(table.contains(EVERY), there)
    assert len(table) == there.sum()
    assert (7 in table) == there[7]
    for missing, value in (("zeros", 0.0), (ROW, ROW), (np.array(ROW, np.float16), ROW)):
        want = expected(table, there, value)
        np.testing.assert_array_equal(table.lookup(EVERY, missing=missing), want)
        np.testing.assert_array_equal(table.lookup(EVERY.reshape(20, 30), missing=missing), want.reshape(20, 30, DIM))
    np.testing.assert_array_equal(table.lookup(EVERY, missing="first"), table.lookup(EVERY))
    np.testing.assert_array_equal(table.lookup(EVERY[there], missing="raise"), table.lookup(EVERY[there]))
    if not there.all():
        with pytest.raises(IdError, match="as missing='raise' demands"):
            table.lookup(EVERY, missing="raise")


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
@pytest.mark.parametrize("seed", [0, *slow(*range(1, 12))])
def test_beside_a_set_of_ids(life: Life, seed: int, tmp_path: Path):
    rng, known = np.random.default_rng(seed), set[int]()
    told = known if life.is_predicted else None
    with made(life, tmp_path) as table:
        check(table, told)
        for _ in range(6):
            ids = rng.integers(0, ROWS, BATCH)
            table.update(ids, rng.normal(size=(BATCH, DIM)).astype(np.float32))
            known |= set(ids.tolist())
            if "rule" not in life.options:  # under a dense rule, rows cannot be assigned
                ids = np.unique(rng.integers(0, ROWS, 5))
                table.assign(ids, rng.normal(size=(len(ids), DIM)))
                known |= set(ids.tolist())
            check(table, told)
            ids = rng.integers(0, ROWS, 15)
            table.forget(ids)
            known -= set(ids.tolist())
            check(table, told)
            if life.is_on_disk and rng.random() < 0.5:
                table.commit()
                check(table, told)
        if life.is_on_disk:
            table.commit()
    if life.is_on_disk:
        with made(life, tmp_path, again=True) as table:
            check(table, told)


def test_a_lookup_stores_nothing_and_repeats_may_be():
    table = er.Table(ROWS, DIM, rule=SGD)
    table.assign([3], [ROW])
    np.testing.assert_array_equal(table.lookup([[3, 4], [4, 3]], missing="zeros")[:, :, 0], [[0.5, 0.0], [0.0, 0.5]])
    assert table.contains([[3, 4], [4, 3]]).tolist() == [[True, False], [False, True]]
    assert table.contains([]).shape == (0,)
    assert table.contains(3).shape == ()
    assert len(table) == 1


def test_open_ids_and_the_id_of_unknown_words():
    table, words = er.Table(None, DIM, rule=SGD), er.Vocabulary()
    table.assign(words.add(["a", "b"]), [ROW, ROW])
    ids = words.lookup(["b", "unseen"])
    assert (ids.tolist(), table.contains(ids).tolist()) == ([1, -1], [True, False])
    np.testing.assert_array_equal(table.lookup(ids, missing="zeros"), [ROW, np.zeros(DIM)])
    assert -(2**63) not in table


def test_rows_of_an_array_are_there(tmp_path: Path):
    table = er.Table(ROWS, DIM, rule=SGD, init=er.FromArray(ARRAY), path=tmp_path / "table")
    table.assign([3], [ROW])
    table.forget([3, 4])  # they read as the array again
    assert (table.contains(EVERY).all(), len(table)) == (True, ROWS)
    np.testing.assert_array_equal(table.lookup(EVERY, missing="raise"), ARRAY)
    table.commit()
    table.close()


def test_rows_of_an_array_that_are_not_admitted_are_not_there():
    table = er.Table(
        ROWS, DIM, rule=SGD, init=er.FromArray(ARRAY), admission=er.Admission(min_count=2, default="zeros")
    )
    table.assign([3], [ROW])
    assert (len(table), table.contains([3, 4]).tolist()) == (1, [True, False])
    np.testing.assert_array_equal(table.lookup([3, 4], missing=ROW), [ROW, ROW])


def test_the_shared_row():
    table = er.Table(ROWS, DIM, rule=SGD, admission=er.Admission(min_count=2, default="shared"))
    table.update([5, 6], np.ones((2, DIM), np.float32))
    shared = table.lookup([99])
    np.testing.assert_array_equal(table.lookup([7], missing="shared"), shared)
    np.testing.assert_array_equal(table.lookup([7], missing="zeros"), np.zeros((1, DIM)))
    first = er.Table(ROWS, DIM, seed=table.spec.seed).lookup([7])
    assert not np.array_equal(shared, first)  # "first" is what the admission gives
    np.testing.assert_array_equal(table.lookup([7], missing="first"), shared)


WRONG = [
    ("none", "must be one of first, zeros, shared, raise, or a row of finite floats: got 'none'"),
    ("shared", "is 'shared', and it has no default row, which only admission=er.Admission"),
    ([1.0], r"must be a row of shape \(4,\): got one of shape \(1,\)"),
    ([[1.0] * 4], "or a row of finite floats: got"),
    ([np.nan] * 4, "or a row of finite floats: got"),
    ([1e300] * 4, "or a row of finite floats: got"),
    (["a"] * 4, "or a row of finite floats: got"),
    (True, "or a row of finite floats: got True"),
]


@pytest.mark.parametrize(("missing", "text"), WRONG)
def test_what_is_no_choice(missing: Any, text: str, tmp_path: Path):
    table = er.Table(ROWS, DIM, path=tmp_path / "table", name="users")
    table.assign([3], [ROW])
    table.commit()
    with pytest.raises(ArgumentError, match=f"`missing` of table 'users' .*{text}"):
        table.lookup([3], missing=missing)  # though there is a row
    table.close()
    with pytest.raises(ArgumentError, match=text):
        er.open(tmp_path / "table", mode="r", missing=missing)
    er.open(tmp_path / "table").close()  # the refusal has left nothing open


def test_an_error_names_table_and_ids_and_leaves_the_output():
    table = er.Table(ROWS, DIM, name="items")
    table.assign([3], [ROW])
    out = np.full((3, DIM), 7.0, np.float32)
    text = r"`ids` of table 'items' must have rows, as missing='raise' demands: 2 ids without one, \[4, 5\]\. Leave out"
    with pytest.raises(IdError, match=text):
        table.lookup([3, 4, 5], out=out, missing="raise")
    assert (out == 7.0).all()
    assert table.lookup([3, 3, 3], out=out, missing="raise") is out
    np.testing.assert_array_equal(out, [ROW] * 3)
    with pytest.raises(IdError, match=rf"1 and more|and {20 - SHOWN_IDS} more"):
        table.lookup(np.arange(10, 30), missing="raise")


def test_ids_outside_and_no_ids_are_errors_as_in_lookups():
    table = er.Table(ROWS, DIM)
    asks: list[Callable[[Any], Any]] = [table.lookup, table.contains, table.__contains__]
    for ask in asks:
        with pytest.raises(IdError, match="600"):
            ask([ROWS] if ask is not table.__contains__ else ROWS)
        with pytest.raises(IdTypeError):
            ask("word")
    with pytest.raises(IdError):
        table.lookup([-1], missing="zeros")


def test_a_closed_table_says_so_and_every_table_is_true():
    table = er.Table(ROWS, DIM)
    assert table
    assert len(table) == 0
    table.close()
    assert table
    for ask in (lambda: table.contains([1]), lambda: 1 in table, lambda: len(table)):
        with pytest.raises(er.ClosedTableError, match="is closed"):
            ask()


# ---------------------------------------------------------------- readers and groups


@pytest.mark.parametrize("memory", [None, "60KiB"])
def test_readers(memory: str | None, tmp_path: Path):
    path = tmp_path / "table"
    with er.Table(ROWS, DIM, rule=SGD, path=path) as table:
        table.assign(EVERY[:200], np.ones((200, DIM)))
        table.commit()
        readers = {key: er.open(path, mode="r", memory=memory, missing=key) for key in ("first", "zeros", "raise")}
        readers["row"] = er.open(path, mode="r", memory=memory, missing=np.array(ROW))
        table.forget([0])
        table.assign([300], [ROW])
        table.commit()
    assert all(300 not in reader and 0 in reader and len(reader) == 200 for reader in readers.values())
    for reader in readers.values():
        reader.refresh()
        assert (300 in reader, 0 in reader, len(reader)) == (True, False, 200)
        np.testing.assert_array_equal(reader.lookup([300, 5]), [ROW, np.ones(DIM)])
        np.testing.assert_array_equal(reader.read(reader.plan([300, 5])), [ROW, np.ones(DIM)])
    np.testing.assert_array_equal(readers["zeros"].lookup([0, 300]), [np.zeros(DIM), ROW])
    np.testing.assert_array_equal(readers["row"].read(readers["row"].plan([0, 300])), [ROW, ROW])
    np.testing.assert_array_equal(readers["zeros"].lookup([0], missing="first"), readers["first"].lookup([0]))
    assert readers["zeros"].options["missing"] == "zeros"
    assert readers["row"].options["missing"] == ROW
    out = np.full((1, DIM), 7.0, np.float32)
    with pytest.raises(IdError, match="1 id without one, \\[0\\]"):
        readers["raise"].lookup([0], out=out)
    assert (out == 7.0).all()
    with pytest.raises(IdError):
        readers["raise"].read(readers["raise"].plan([0, 300]))
    for reader in readers.values():
        reader.close()


def test_a_writer_has_no_default(tmp_path: Path):
    with er.Table(ROWS, DIM, path=tmp_path / "table") as table:
        table.commit()
    with pytest.raises(ArgumentError, match=r"`missing` \('zeros'\) goes with mode=\"r\": what a writer reads is"):
        er.open(tmp_path / "table", missing="zeros")
    with pytest.raises(ArgumentError, match=r"lives in RAM without the options of tables on disk: got missing=\[1\.0"):
        er.Table(ROWS, 1, missing=np.ones(1))


@pytest.mark.parametrize("on_disk", [False, True])
def test_members(on_disk: bool, tmp_path: Path):
    path = tmp_path / "group" if on_disk else None
    group = er.Group(path=path)
    for name, dim in (("users", DIM), ("items", DIM), ("tags", 2)):
        group.table(name, ROWS, dim, rule=SGD).assign([3], [[1.0] * dim])
    group["users"].assign([4], [ROW])
    assert [len(group[name]) for name in group] == [2, 1, 1]
    ids = {name: [3, 4] for name in group}
    zeros = group.lookup(ids, missing="zeros")
    assert {name: rows[:, 0].tolist() for name, rows in zeros.items()} == {
        "users": [1.0, 0.5], "items": [1.0, 0.0], "tags": [1.0, 0.0],
    }  # fmt: skip
    first = group.lookup(ids)
    assert first["items"][1, 0] == group["items"].lookup([4])[0, 0] != 0
    with pytest.raises(IdError, match=r"`ids` of table 'items' must have rows.*: 1 id without one, \[4\]"):
        group.lookup(ids, missing="raise")
    with pytest.raises(ArgumentError, match=r"`missing` of table 'tags' must be a row of shape \(2,\)"):
        group.lookup(ids, missing=ROW)
    if on_disk:
        group.commit()
        with er.open(str(path), mode="r", missing=ROW, kind=er.Group) as reader:
            np.testing.assert_array_equal(reader.lookup({"items": [3, 4]})["items"], [np.ones(DIM), ROW])
            with pytest.raises(ArgumentError, match=r"`missing` of table 'tags' must be a row of shape \(2,\)"):
                reader["tags"]
            assert reader["users"].contains([3, 4, 5]).tolist() == [True, True, False]
    group.close()


def test_a_choice_reads_as_it_was_given():
    assert [repr(Missing.of(given)) for given in ("zeros", [1, 2])] == ["'zeros'", "[1.0, 2.0]"]
    assert Missing.of(np.array([1.5], np.float32)) == Missing.of([1.5])
    assert [bool(Missing.of(given)) for given in ("first", "zeros", [0.0])] == [False, True, True]


def test_lookups_that_meet_keep_their_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Loading rows may let the table's lock go: another thread may then look up by another choice."""
    table, bring, found = er.Table(ROWS, DIM, path=tmp_path / "table"), DiskBackend.bring, []
    table.commit()

    def bring_after_another(self: DiskBackend, *args: Any) -> Any:
        if not found:
            found.append(None)
            found[0] = table.lookup([5], missing=ROW)
        return bring(self, *args)

    monkeypatch.setattr(DiskBackend, "bring", bring_after_another)
    np.testing.assert_array_equal(table.lookup([5], missing="zeros"), np.zeros((1, DIM)))
    np.testing.assert_array_equal(found[0], [ROW])
    table.close()
