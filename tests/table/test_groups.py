"""Groups: their tables are, to the bit, the same tables alone; what is refused changes nothing anywhere."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import embedrock as er
from embedrock.kernels.cpu import runtime
from embedrock.storage.ram_backend import RamBackend
from embedrock.table import batches
from embedrock.table.group import device_memory_of
from embedrock.table.stepping import StepRequest, judge, step_all, step_judged
from embedrock.table.table import rows_of
from forked import in_child
from group_pair import play
from same_tables import check_same
from slow import slow
from suites import records_of
from support import features as features_of
from support.features import BatchFeature

ADAM = er.Adam(lr=0.1)


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 5))])
def test_members_are_the_same_as_tables_alone(seed: int) -> None:
    play(seed, 40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 65))
def test_members_are_the_same_as_tables_alone_for_long(seed: int) -> None:
    er.set_threads(1 + seed % 4)
    play(seed, 100)


def group_of(**tables: Any) -> er.Group:
    """Return a group of tables with 100 rows of 4, but for what is said."""
    group = er.Group()
    for seed, (name, more) in enumerate(tables.items()):
        group.table(name, **{"rows": 100, "dim": 4, "rule": ADAM, "seed": seed} | more)
    return group


def bytes_of(group: er.Group) -> dict[str, Any]:
    """Return all that a change would change."""
    found = {}
    for name in group:
        ids, records = records_of(group[name])
        stats = group[name].stats()
        found[name] = (ids.tobytes(), records.tobytes(), stats["steps"], stats["skipped_steps"])
    return found


def ones(ids: dict[str, Any], dim: int = 4) -> dict[str, np.ndarray]:
    return {name: np.ones((len(each), dim), np.float32) for name, each in ids.items()}


# -------------------------------------------------------------------- members


def test_a_table_is_asked_for_again() -> None:
    group = group_of(users={})
    users = group["users"]
    assert group.table("users", 100, 4) is users  # what was left out is whatever it has
    assert group.table("users", 100, 4, rule=er.Adam(lr=0.1), seed=0) is users
    assert (list(group), len(group), "users" in group, "items" in group) == (["users"], 1, True, False)
    assert users.group is group
    assert er.Table(3, 2).group is None
    assert repr(users).startswith("Table(name='users', rows=100, dim=4")
    assert repr(group).startswith("Group('users': 0 bytes of") or repr(group).startswith("Group('users': ")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"dim": 8}, r"asked for dim=8, and it has dim=4"),
        ({"rows": None}, r"asked for rows=None, and it has rows=100"),
        ({"rule": er.SGD(lr=0.1)}, r"asked for rule=.*SGD.*, and it has rule=.*Adam"),
        ({"rule": er.Adam(lr=0.2)}, r"asked for rule=.*0\.2.*, and it has rule=.*0\.1"),
        ({"seed": 7}, r"asked for seed=7, and it has seed=0"),
        ({"dtype": "float16"}, r"asked for dtype='float16', and it has dtype='float32'"),
        ({"init": er.Zeros()}, r"asked for init="),
        ({"on_nonfinite": "skip"}, r"asked for on_nonfinite='skip', and it has on_nonfinite='raise'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_table_of_the_same_name_is_refused(other: dict[str, Any], said: str) -> None:
    group, asked = group_of(users={}), {"rows": 100, "dim": 4, **other}
    with pytest.raises(er.ArgumentError, match=rf"^table 'users' of the group is another one: {said}.*or another name"):
        group.table("users", **asked)
    assert len(group) == 1


def test_first_values_from_another_array_are_another_table() -> None:
    group, array = er.Group(), np.ones((5, 2), np.float32)
    made = group.table("items", 5, 2, init=er.FromArray(array))
    assert group.table("items", 5, 2, init=er.FromArray(array.copy())) is made
    with pytest.raises(er.ArgumentError, match="asked for init="):
        group.table("items", 5, 2, init=er.FromArray(2 * array))


def test_names() -> None:
    group = group_of(users={}, items={})
    for name in ("", 3, None):
        with pytest.raises(er.ArgumentError, match="must be a string that is not empty: got"):
            group.table(name, 3, 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        er.UnknownTableError, match=r"^the group has no table 'user': it has 'users', 'items'\. Did you"
    ):
        group["user"]
    with pytest.raises(KeyError, match="it is empty"):
        er.Group()["users"]
    with pytest.raises(er.ArgumentError, match="no other has: the group has a table 'items'"):
        group.rename("users", "items")
    with pytest.raises(er.ArgumentError, match="no other has: got ''"):
        group.rename("users", "")
    users = group["users"]
    group.rename("users", "people")
    assert (list(group), users.name, users.subject) == (["people", "items"], "people", "table 'people'")
    assert pickle.loads(pickle.dumps(users)) is users
    with pytest.raises(er.IdError, match="table 'people'"):
        group.lookup({"people": [100]})


def test_a_group_that_is_closed() -> None:
    with group_of(users={}) as group:
        users = group["users"]
        group.update({"users": [1]}, {"users": np.ones((1, 4))})
    assert len(group) == 0
    assert group.stats()["bytes_used"] == 0
    group.close()
    with pytest.raises(er.ClosedTableError, match=r"^the group is closed, since .*test_groups\.py:\d+\. Make a new"):
        group.table("users", 3, 2)
    with pytest.raises(er.ClosedTableError, match="table 'users' is closed, since"):
        users.lookup([1])


def test_a_group_is_not_copied() -> None:
    group = group_of(users={})
    group.update({"users": [1]}, {"users": np.ones((1, 4))})
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(er.UnsupportedError, match="a group cannot be pickled or copied"):
            copied(group)
    alone = copy.deepcopy(group["users"])
    check_same(alone, group["users"])
    alone.update([1], np.ones((1, 4)))
    assert (alone.steps, group["users"].steps) == (2, 1)


# -------------------------------------------------------------------- RAM


def test_a_table_that_is_dropped_gives_its_memory_back() -> None:
    group = group_of(**{name: {"rows": 10**6, "dim": 64} for name in "abc"})
    ids = np.arange(3000)
    for name in "abcab":
        group[name].update(ids, np.ones((3000, 64)))
    kept = {name: bytes_of(group)[name] for name in "ac"}
    arena = rows_of(group["a"]).tier.arena
    before, used = arena.resident_bytes, group.stats()["bytes_used"]
    dropped = group["b"]
    group.drop("b")
    assert arena.resident_bytes <= before - 2 * 10**6  # of 2.3 MB
    assert group.stats()["bytes_used"] <= used - 2 * 10**6
    assert (bytes_of(group), group.stats()["rows_touched"]) == (kept, 6000)
    with pytest.raises(
        er.ClosedTableError,
        match=r"^table 'b' is closed, since .*\. Make it anew by group\.table\('b', \.\.\.\), and load what",
    ):
        dropped.lookup([1])
    assert group.table("b", 5, 64).stats()["rows_touched"] == 0
    group["c"].update(ids, np.ones((3000, 64)))  # the rest goes on


def test_a_batch_that_is_too_large_says_what_each_table_needs() -> None:
    group = er.Group(memory=60_000)
    for name, dim in (("users", 8), ("items", 8), ("ads", 2)):
        group.table(name, 10**6, dim, rule=er.SGD(lr=0.1))
    ids = {"users": np.arange(100), "items": np.arange(50), "ads": np.arange(10)}
    grads = {name: np.ones((len(ids[name]), group[name].dim), np.float32) for name in ids}
    group.update(ids, grads)
    before = bytes_of(group)
    more = {"users": np.arange(1000), "items": np.arange(100), "ads": np.arange(10)}
    with pytest.raises(
        er.MemoryBudgetError,
        match=r"^the group has 160 rows in RAM and this batch touches new ones, 900 of table 'users' \(28\.1 KiB\), "
        r"50 of table 'items' \(1\.6 KiB\): .* \(\d+ bytes\) needed, budget 58\.6 KiB for all tables of the group\. "
        r"Raise memory= of er\.Group, touch fewer rows, drop a table",
    ):
        group.update(more, {name: np.ones((len(more[name]), group[name].dim), np.float32) for name in more})
    with pytest.raises(er.MemoryBudgetError, match="of table 'users'"):
        group["users"].update(np.arange(10_000), np.ones((10_000, 8), np.float32))
    assert bytes_of(group) == before
    group.update(ids, grads)
    with pytest.raises(er.MemoryBudgetError, match="a row of table 'wide' takes"):
        group.table("wide", 10, 10**5)
    assert "wide" not in group


def test_members_leave_each_other_the_budget() -> None:
    group = er.Group(memory=100_000)
    for name in "ab":
        group.table(name, None, 16 if name == "a" else 8, rule=er.SGD(lr=0.1))
    group["a"].update(np.arange(500), np.ones((500, 16)))
    with pytest.raises(er.MemoryBudgetError, match="the group has 500 rows in RAM"):
        group["b"].update(np.arange(1000), np.ones((1000, 8)))
    group.drop("a")
    group["b"].update(np.arange(1000), np.ones((1000, 8)))
    assert group.stats()["budget_bytes"] == 100_000


def test_rows_are_removed_from_a_tier() -> None:
    rng = np.random.default_rng(0)
    for trial in range(30):
        group = group_of(one={"rows": 5000, "rule": None}, other={"rows": 5000, "rule": None})
        expected = {}
        for name in ("one", "other", "one", "other"):
            ids = rng.choice(5000, rng.integers(0, 1500), replace=False)
            values = rng.standard_normal((len(ids), 4)).astype(np.float32)
            group[name].assign(ids, values)
            expected[name] = expected.get(name, {}) | dict(zip(ids.tolist(), values, strict=True))
        gone, kept = ("one", "other") if trial % 2 else ("other", "one")
        group.drop(gone)
        ids, weights = group[kept].export()
        assert ids.tolist() == sorted(expected[kept])
        np.testing.assert_array_equal(weights, [expected[kept][i] for i in ids.tolist()])
        assert rows_of(group[kept]).tier.count == len(ids)


def test_a_small_member_of_a_large_pool_looks_through_it_in_large_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    group, sizes = group_of(large={"rows": 10**6}, small={}), list[int]()
    large, small = group["large"], group["small"]
    small.update([3, 1], np.ones((2, 4)))
    large.update(np.arange(70_000), np.ones((70_000, 4)))
    small.update([2], np.ones((1, 4)))
    batches = RamBackend.id_batches

    def counted(self: RamBackend, size: int) -> Any:
        sizes.extend(len(ids) for ids in batches(self, size))
        return batches(self, size)

    monkeypatch.setattr(RamBackend, "id_batches", counted)
    assert small.export()[0].tolist() == sorted(small.state()["ids"]) == [1, 2, 3]
    assert [ids.tolist() for ids, _ in small.export_batches(1)] == [[3], [1], [2]]
    small.close()
    assert (len(sizes), sum(sizes)) == (2 * 4, 70_003 * 4)


def test_an_interrupt_comes_after_a_table_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(a={}, b={})
    for name in group:
        group[name].update(np.arange(50), np.ones((50, 4)))
    before, remove = bytes_of(group)["b"], RamBackend.remove

    def interrupted(self: RamBackend, ids: np.ndarray) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(self, ids)

    monkeypatch.setattr(RamBackend, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.drop("a")
    assert bytes_of(group) == {"b": before}


# -------------------------------------------------------------------- refused, and in the middle of things


def test_what_is_refused_changes_nothing_in_any_member() -> None:
    group = group_of(a={}, b={"dim": 6}, c={"on_nonfinite": "skip"}, d={"rule": None})
    ids = {name: np.array([1, 2, 1]) for name in "abc"}
    grads = {name: np.ones((3, group[name].dim), np.float32) for name in ids}
    group.update(ids, grads)
    before = bytes_of(group)
    bad: Any = np.full((3, 4), np.nan, np.float32)
    refused: tuple[tuple[Any, Any, type[Exception], str], ...] = (
        (ids, grads | {"a": bad}, er.NonFiniteGradientError, "gradients of table 'a' must be finite.* first is nan at"),
        (ids | {"b": [1, 2, 100]}, grads, er.IdError, "table 'b'"),
        (ids | {"b": [1.5, 2, 3]}, grads, er.IdTypeError, "table 'b'"),
        (ids, grads | {"b": np.ones((3, 4))}, er.GradientError, r"`grads` of table 'b' must have shape \(3, 6\)"),
        (
            cast("Any", [1]),
            grads,
            er.ArgumentError,
            "`ids` of the group must be a dict, by the names of its tables: got a list",
        ),
        (
            ids,
            cast("Any", [bad]),
            er.ArgumentError,
            "`grads` of the group must be a dict, by the names of its tables: got a list",
        ),
        (ids, {"a": grads["a"]}, er.ArgumentError, r"must be for the tables in `ids`, 'a', 'b', 'c': got 'a'\."),
        (ids | {"e": [1]}, grads | {"e": bad}, er.UnknownTableError, "no table 'e'"),
        (ids | {"d": [1, 2, 3]}, grads | {"d": np.ones((3, 4))}, er.ArgumentError, "table 'd' has no rule to step by"),
    )
    for some_ids, some_grads, error, said in refused:
        with pytest.raises(error, match=said):
            group.update(some_ids, some_grads)
        assert bytes_of(group) == before
    with pytest.raises(er.ArgumentError, match=r"`lr` of Adam.* The step of table 'a' was refused, and nothing has"):
        group.update(ids, grads, lr=-1.0)
    group["b"].close()
    with pytest.raises(er.UnknownTableError):
        group.update(ids, grads)
    assert {name: before[name] for name in "acd"} == bytes_of(group)
    group.update({"c": ids["c"], "a": ids["a"]}, {"c": bad, "a": grads["a"]})
    assert (group["a"].steps, group["c"].steps, group["c"].stats()["skipped_steps"]) == (2, 1, 1)


def test_records_that_cannot_be_made_are_made_for_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(a={}, b={"dim": 6})
    ids = {"a": np.arange(5), "b": np.arange(5)}
    grads = {name: np.ones((5, group[name].dim), np.float32) for name in ids}
    group.update({"a": ids["a"][:2], "b": ids["b"][:2]}, {name: each[:2] for name, each in grads.items()})
    before, admit = bytes_of(group), RamBackend.admit

    def failing(self: RamBackend, *args: Any) -> np.ndarray:
        if self.spec.dim == 6:
            raise MemoryError("no address space")
        return admit(self, *args)

    monkeypatch.setattr(RamBackend, "admit", failing)
    with pytest.raises(MemoryError):
        group.update(ids, grads)
    assert bytes_of(group) == before
    monkeypatch.undo()
    group.update(ids, grads)
    assert (group["a"].steps, group.stats()["rows_touched"]) == (2, 10)


def test_an_interrupt_comes_after_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    group, alone = group_of(a={}, b={"dim": 6}), [er.Table(100, dim, rule=ADAM, seed=k) for k, dim in enumerate((4, 6))]
    ids = {"a": np.arange(5), "b": np.arange(5)}
    grads = {name: np.ones((5, group[name].dim), np.float32) for name in ids}
    admit = RamBackend.admit

    def interrupted(self: RamBackend, *args: Any) -> np.ndarray:
        signal.raise_signal(signal.SIGINT)
        return admit(self, *args)

    monkeypatch.setattr(RamBackend, "admit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.update(ids, grads)
    monkeypatch.undo()
    for table, name in zip(alone, ids, strict=True):
        table.update(ids[name], grads[name])
        check_same(group[name], table)


def test_a_step_that_was_judged_meets_another_one() -> None:
    group, alone = group_of(a={}, b={}), [er.Table(100, 4, rule=ADAM, seed=k) for k in range(2)]
    ids, grads = np.arange(5), np.ones((5, 4), np.float32)

    def due(tables: list[er.Table]) -> list[StepRequest]:
        return [StepRequest((rows_of(table),), ADAM, table.sum(table.plan(ids), grads)) for table in tables]

    members = [group[name] for name in group]
    judged = judge(due(members))
    group["b"].update([7, 3], np.ones((2, 4)))
    alone[1].update([7, 3], np.ones((2, 4)))
    step_judged(judged)
    step_all(due([*members, members[0]]))  # one of them twice
    for tables in (alone, alone, alone[:1]):
        step_all(due(tables))
    for member, table in zip(members, alone, strict=True):
        check_same(member, table)


def test_threads_and_a_fork() -> None:
    group = group_of(**{name: {"rows": None} for name in "abcd"})
    alone = {name: er.Table(None, 4, rule=ADAM, seed=seed) for seed, name in enumerate("abcd")}

    def train(tables: str, step: Any) -> None:
        rng = np.random.default_rng(ord(tables[0]))
        for _ in range(30):
            ids = {name: rng.integers(0, 200, 40) for name in tables}
            step(ids, {name: rng.standard_normal((40, 4)).astype(np.float32) for name in tables})

    def one_by_one(ids: dict[str, np.ndarray], grads: dict[str, np.ndarray]) -> None:
        for name, own in ids.items():
            alone[name].update(own, grads[name])

    threads = [threading.Thread(target=train, args=(tables, group.update)) for tables in ("ab", "cd")]
    for thread in threads:
        thread.start()
    for _ in range(5):
        group.lookup({name: np.arange(50) for name in group})
        in_child(lambda: group.update(ids := {"a": [1], "c": [2]}, ones(ids)))
    for thread in threads:
        thread.join()
    for tables in ("ab", "cd"):
        train(tables, one_by_one)
    for name, table in alone.items():
        check_same(group[name], table)


# -------------------------------------------------------------------- in one go


def test_all_members_are_one_call_of_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    group, calls, launch = group_of(**{f"t{k}": {} for k in range(9)}), list[str](), runtime.launch

    def counted(kernel: Any, *args: Any) -> Any:
        calls.append(kernel.py_func.__name__)
        return launch(kernel, *args)

    for cpu in (runtime, __import__("embedrock.kernels.cpu", fromlist=["launch"])):
        monkeypatch.setattr(cpu, "launch", counted)
    rng = np.random.default_rng(0)
    offsets = np.arange(0, 31, 3)

    def train() -> None:
        ids = [rng.integers(0, 100, 30) for _ in group]
        features = [BatchFeature(group[name], own, offsets, mode="sum") for name, own in zip(group, ids, strict=True)]
        reading = features_of.read(features)
        step_all(
            [
                StepRequest((rows_of(table),), ADAM, own)
                for table, own in features_of.sum_gradients(reading, reading.outputs)
            ]
        )

    for _ in range(30):  # until all rows have records
        train()
    group.table_lock.wait_for_step()
    calls.clear()
    train()
    group.table_lock.wait_for_step()
    assert calls == ["plan_tables", "pool_sum", "pool_sum_backward", "step"]
    for lr, steps in ((0.1, 1), (0.2, 2)):  # of neighbours whose numbers differ, each
        calls.clear()
        summed = [table.sum(table.plan(np.arange(9)), np.ones((9, 4))) for table in map(group.__getitem__, group)]
        rules = [er.Adam(lr=0.1)] * 4 + [er.Adam(lr=lr)] * 5
        step_all(
            [
                StepRequest((rows_of(group[name]),), rule, own)
                for name, rule, own in zip(group, rules, summed, strict=True)
            ]
        )
        group.table_lock.wait_for_step()
        assert calls.count("step") == steps


def test_other_tables_are_stepped_with_members_or_none_is() -> None:
    group, other = group_of(a={}, b={}), er.Table(100, 4, rule=ADAM, on_nonfinite="raise")
    tables = [group["a"], other, group["b"]]
    due = [StepRequest((rows_of(table),), ADAM, table.sum(table.plan([1]), np.ones((1, 4)))) for table in tables]
    step_all(due)
    assert [table.steps for table in tables] == [1, 1, 1]
    bad = StepRequest((rows_of(other),), ADAM, other.sum(other.plan([1]), np.full((1, 4), np.inf)))
    with pytest.raises(er.NonFiniteGradientError):
        step_all([due[0], bad, due[2]])
    assert [table.steps for table in tables] == [1, 1, 1]


GOING: dict[str, dict[str, Any]] = {
    "both": {"admission": er.Admission(2, within=20), "eviction": er.Eviction(max_rows=60, idle=15)},
    "shared": {"admission": er.Admission(3, default="shared")},
    "sketch": {"admission": er.Admission(2, sketch=256, default="zeros"), "eviction": er.Eviction(max_bytes=4000)},
    "plain": {},
}


def going(name: str, seed: int) -> dict[str, Any]:
    return {"rows": None, "dim": 4, "rule": ADAM, "seed": seed, "dtype": "bfloat16", **GOING[name]}


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_rows_of_members_come_and_go_as_those_of_tables_alone(is_on_disk: bool, tmp_path: Path) -> None:
    def made() -> er.Group:
        group = er.Group(path=tmp_path / "g", memory=60_000) if is_on_disk else er.Group()
        for seed, name in enumerate(GOING):
            group.table(name, **going(name, seed))
        return group

    group, rng = made(), np.random.default_rng(0)
    alone = {name: er.Table(**going(name, seed)) for seed, name in enumerate(GOING)}
    for step in range(30):
        ids = {name: rng.zipf(1.3, 30) % 400 for name in GOING if step % 7 or name != "both"}
        grads = {name: rng.standard_normal((30, 4)) for name in ids}
        for name, rows in group.lookup(ids).items():
            np.testing.assert_array_equal(rows, alone[name].lookup(ids[name]))
        group.update(ids, grads)
        for name in ids:
            alone[name].update(ids[name], grads[name])
        if step == 20:
            group["both"].update([5, 6], np.ones((2, 4)))
            alone["both"].update([5, 6], np.ones((2, 4)))
            assert group["sketch"].forget([1, 2]) == alone["sketch"].forget([1, 2])
            group["shared"].close() if is_on_disk else None  # a member that rests keeps its counts
        if is_on_disk and step in (10, 20):
            group.commit()
            group.close()
            group = made()
    for name in GOING:
        check_same(group[name], alone[name])
        own, expected = group[name].stats(), alone[name].stats()
        assert {key: own[key] for key in ("admitted", "evicted") if key in own} == {
            key: expected[key] for key in ("admitted", "evicted") if key in expected
        }
    assert group["both"].stats()["evicted"] > 0
    group.close() if not is_on_disk else group.commit()


def test_none_is_stepped_where_rows_of_one_cannot_leave() -> None:
    group = er.Group()
    group.table("plain", None, 4, rule=ADAM)
    group.table("kept", None, 4, rule=ADAM, eviction=er.Eviction(max_rows=3, keep=[1, 2]))
    group.table("small", None, 4, rule=ADAM, eviction=er.Eviction(max_rows=3))
    group.update({"kept": [1, 2]}, {"kept": np.ones((2, 4))})
    for name, text in (("small", "needs 4 at once. Raise"), ("kept", "at once beside those to `keep`")):
        ids = {"plain": [1], name: [5, 6, 7, 8] if name == "small" else [5, 6]}
        with pytest.raises(er.ArgumentError, match=f"table '{name}' may have 3 rows .* {text}"):
            group.update(ids, {each: np.ones((len(own), 4)) for each, own in ids.items()})
    assert [table.steps for table in group.open_tables()] == [0, 1, 0]
    assert group.stats()["rows_touched"] == 2


def test_a_member_gets_another_eviction_and_who_is_told(tmp_path: Path) -> None:
    told: list[np.ndarray] = []
    for path in (None, tmp_path / "g"):
        group = er.Group(path=path)
        group.table("a", 10, 4, rule=ADAM)
        table = group.table("b", 10, 4, rule=ADAM)
        group.update({"a": [1], "b": [1, 2, 3]}, {"a": np.ones((1, 4)), "b": np.ones((3, 4))})
        assert len(group.pools) == 1
        eviction = er.Eviction(max_rows=2, by="recency", evicted=told.append)
        assert group.table("b", 10, 4, eviction=eviction) is table
        assert len(group.pools) == 2  # as other members' steps may not wait for who leaves
        group.update({"a": [1], "b": [4]}, {"a": np.ones((1, 4)), "b": np.ones((1, 4))})
        assert np.concatenate(told).tolist() == [1, 2]
        assert group.table("b", 10, 4, eviction=er.Eviction(max_rows=2, by="recency")) is table
        assert table.spec.eviction is eviction  # who is told stays
        told.clear()
        if path is not None:
            group.commit()
            group.close()
            with er.open(path, kind=er.Group) as again:
                assert again["b"].spec.eviction is not None
                assert again["b"].export()[0].tolist() == [3, 4]


def test_counts_of_another_admission_are_not_lost() -> None:
    group = er.Group()
    table = group.table("a", None, 4, rule=ADAM, admission=er.Admission(2))
    table.update([1], np.ones((1, 4)))
    with pytest.raises(er.ArgumentError, match="`admission` of table 'a' must be that by which it has counted ids"):
        group.table("a", None, 4, admission=er.Admission(3))
    assert group.table("a", None, 4, admission=er.Admission(2)) is table


def test_gpu_memory_of_tables_on_disk_is_their_groups(tmp_path: Path) -> None:
    for path in (tmp_path / "rows", None):
        assert er.Group(path=path, device_memory="25%").device_memory == "25%"
    with pytest.raises(er.ArgumentError, match="`device_memory` is not a size: got 'much'"):
        er.Group(device_memory="much")
    with er.Group(path=tmp_path / "rows", device_memory=0) as group:
        told = r"of table 'users' of .*rows.* must be None or 0: got 7\. Tables .* one cache .* device_memory=7\)"
        with pytest.raises(er.UnsupportedError, match=told):
            group.table("users", 10, 4, device_memory=7)
        assert not len(group)
        assert group.table("users", 10, 4, device_memory=0).device_memory == 0
    assert er.Group().table("users", 10, 4, device_memory=7).device_memory == 7


def test_gpu_memory_of_a_group_is_for_all_of_its_tables() -> None:
    group = er.Group(device_memory="1MiB")
    told = r"of table 'a' must be None or 0, as the group was given one for all of its tables, 1048576: got '1KiB'\."
    with pytest.raises(er.ArgumentError, match=told):
        group.table("a", 10, 4, device_memory="1KiB")
    assert not len(group)
    own, left = group.table("a", 10, 4), group.table("b", 10, 4, device_memory=0)
    alone = er.Table(10, 4)
    assert [device_memory_of(each) for each in (own, left, alone)] == [1 << 20, 0, None]


def test_bags_of_several_pools_are_side_by_side() -> None:
    group, rng = group_of(a={}, b={"dim": 7}, c={}, d={"dim": 7}), np.random.default_rng(0)
    features = [
        BatchFeature(group[name], rng.integers(0, 100, (5, count)), mode=mode)
        for name, count, mode in (("b", 2, "mean"), ("a", 1, "sum"), ("d", 3, "sum"), ("a", 2, "max"), ("c", 2, "sum"))
    ]
    whole, apart = features_of.read(features, side_by_side=True), features_of.read(features)
    assert len(whole.parts) == 3
    assert (whole.side_by_side, apart.side_by_side) == (True, False)
    np.testing.assert_array_equal(whole.arrays[0], np.concatenate(apart.outputs, axis=1))
    for own, other in zip(whole.outputs, apart.outputs, strict=True):
        np.testing.assert_array_equal(own, other)

    wide = rng.standard_normal((5, 40)).astype(np.float32)
    grads = np.split(wide[:, : whole.arrays[0].shape[1]], np.cumsum([7, 4, 7, 4]), axis=1)
    expected = features_of.sum_gradients(apart, [own.copy() for own in grads])
    for found in (features_of.sum_gradients(whole, grads), features_of.sum_gradients(apart, grads)):
        assert [table for table, _ in found] == [table for table, _ in expected]
        for (_, own), (_, other) in zip(found, expected, strict=True):
            np.testing.assert_array_equal(own.values, other.values)
            assert own.square_norm == other.square_norm
    blocks = batches.sum_array(whole, np.concatenate(grads, axis=1))
    by_table: dict[er.Table, list[Any]] = {}
    for tables, own in blocks:
        for number, table in enumerate(tables):
            by_table.setdefault(table, []).append(own.of(number))
    for table, other in expected:
        np.testing.assert_array_equal(er.RowGradients.sum_of(by_table[table]).values, other.values)
    more = [*features, BatchFeature(group["a"], np.arange(5))]
    assert not features_of.read(more, side_by_side=True).side_by_side


def test_a_step_of_no_table_does_nothing() -> None:
    group = group_of(a={})
    group.update({}, {})
    assert group.lookup({}) == {}
    assert group["a"].steps == 0
