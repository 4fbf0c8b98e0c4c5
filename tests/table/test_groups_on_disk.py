"""Groups on disk: members are the same as tables alone in RAM, and one folder, budget and commit are of all of them."""

from __future__ import annotations

import errno
import gc
import itertools
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from disk_groups import ADAM, KINDS, made, step
from embedrock.errors import ArgumentError, ClosedTableError, TableFileError, TableLockedError
from embedrock.io.vfs import System
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.disk_pools import DiskPools
from embedrock.storage.record_pools import RecordRange
from embedrock.table.stepping import StepRequest, step_all
from embedrock.table.table import rows_of
from group_pair import DiskGroupPair, play
from on_system import on
from same_tables import check_same
from slow import slow
from small_pieces import cut_small
from suites import FaultFS, records_of
from support import features as features_of
from support.features import BatchFeature


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 4))])
def test_members_are_the_same_as_tables_alone(seed: int) -> None:
    play(seed, 30, DiskGroupPair)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 104))
def test_members_are_the_same_as_tables_alone_for_long(seed: int) -> None:
    er.set_threads(1 + seed % 4)
    with cut_small():
        play(seed, 100, DiskGroupPair)


def content_of(group: er.Group) -> dict[str, Any]:
    """Return all that a commit must bring back."""
    found = {}
    for name in group:
        (ids, records), table = records_of(group[name]), group[name]
        found[name] = (ids.tobytes(), records.tobytes(), table.steps, table.lookup(np.arange(100)).tobytes())
    return found


# -------------------------------------------------------------------- opened again


def test_the_same_code_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m.rock"
    with made(path) as group:
        step(group, 0)
        before = content_of(group)
        assert group.commit(step=7) == 1
        assert (group.last_step, group.uncommitted) == (7, False)
    with made(path) as group:
        assert content_of(group) == before
        assert not group.uncommitted
        step(group, 1)
        assert group["a"].commit() == 2  # which is a commit of all
        assert not group.uncommitted
        assert group["b"].last_commit == group.last_commit == 2
    with er.open(path, mode="r", at=1, kind=er.Group) as snapshot:
        assert list(snapshot) == list(KINDS)
        assert content_of(snapshot) == before
        with pytest.raises(er.ReadOnlyTableError, match="opened with mode"):
            step(snapshot, 2)
        with pytest.raises(er.ReadOnlyTableError, match="opened with mode"):
            snapshot.table("new", 10, 4)
    with er.open(path, kind=er.Group) as group:
        assert group["b"].rule == er.Adam(lr=0.2)
        assert group["c"].steps == 2


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"dim": 5}, "asked for dim=5, and it has dim=4"),
        ({"rows": 7}, "asked for rows=7, and it has rows=1000000000"),
        ({"rule": er.SGD()}, "asked for rule={'name': 'SGD'.*and it has rule=.*'name': 'Adam'"),
        ({"seed": 9}, "asked for seed=9, and it has seed=0"),
        ({"init": er.Zeros()}, "asked for init={'name': 'Zeros'.*and it has init=.*'name': 'Normal'"),
    ],
)
def test_another_table_is_refused(other: dict[str, Any], said: str, tmp_path: Path) -> None:
    with made(tmp_path / "m") as group:
        group.commit()
    with er.Group(path=tmp_path / "m") as group:
        with pytest.raises(er.ArgumentError, match=f"table 'a' of the group is another one: {said}"):
            group.table("a", **{**KINDS["a"], "seed": 0, **other})
        assert group.table("a", 10**9, 4, rule=er.Adam(lr=3.0)).rule == er.Adam(lr=3.0)


def test_first_values_from_an_array_are_given_again(tmp_path: Path) -> None:
    init = er.FromArray(np.arange(8, dtype=np.float32).reshape(4, 2))
    with er.Group(path=tmp_path / "m") as group:
        group.table("fixed", 4, 2, init=init)
        group.table("other", 4, 2)
        group.commit()
    with er.open(tmp_path / "m", kind=er.Group) as group:
        with pytest.raises(TableFileError, match=r"m#fixed come from an array.*Pass it again"):
            group["fixed"]
        assert group["other"].rows == 4
        group.commit()  # carries the other one along
        assert group.table("fixed", 4, 2, init=init).lookup([3]).tolist() == [[6.0, 7.0]]


def test_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "m"
    group = made(path)
    group.commit()
    assert er.opened(path) is group
    for again in (lambda: made(path), lambda: er.open(path), lambda: er.Table(10, 4, path=path)):
        with pytest.raises(TableLockedError, match=f"already: group '{path}', since .*er.close"):
            again()
    er.close(path)
    assert er.opened(path) is None
    with pytest.raises(ClosedTableError, match=r"group '.*' is closed, since"):
        group.table("new", 10, 4)
    with pytest.raises(ClosedTableError, match=r"table 'a' is closed, since .*Open the group again"):
        group["a"].lookup([1])
    made(path).close()


def test_a_group_is_no_table_alone(tmp_path: Path) -> None:
    made(tmp_path / "m").close()
    with pytest.raises(TableFileError, match="holds a group of 0 tables, not one alone"):
        er.Table(10, 4, path=tmp_path / "m")
    er.Table(10, 4, path=tmp_path / "t").close()
    with pytest.raises(TableFileError, match="holds a table alone, no group"):
        er.Group(path=tmp_path / "t")
    with pytest.raises(er.ArgumentError, match="keep=9"):
        er.Group(keep=9)
    with er.Group() as group:
        for call in (group.commit, group.commits, group.compact, group.verify, lambda: group.rollback(0)):
            with pytest.raises(er.UnsupportedError, match="the group lives in RAM and has no commits"):
                call()


# -------------------------------------------------------------------- members come and go


def test_a_dropped_table_gives_its_space_back(tmp_path: Path) -> None:
    with made(tmp_path / "m", memory="4MiB", keep=1) as group:
        for number in range(20):
            step(group, number)
        group["a"].update(np.arange(5000), np.ones((5000, 4), np.float32))
        group.commit()
        group.compact()
        large = group["b"].stats()["disk_bytes"]
        kept = group["a"]
        table = group["a"]
        group.drop("a")
        with pytest.raises(ClosedTableError, match=r"It was dropped from the group at .* make it anew by group\.table"):
            table.lookup([1])
        with pytest.raises(ClosedTableError, match="table 'a' is closed, since"):
            kept.lookup([1])
        assert group.uncommitted
        group.commit()
        group.compact()
        assert group["b"].stats()["disk_bytes"] < large / 10
        assert not group.verify().problems
        group.table("a", **KINDS["a"], seed=0)  # another part: nothing is left of the one that was
        assert group["a"].stats()["rows_touched"] == 0
        assert np.array_equal(group["a"].lookup([3]), er.Table(10**9, 4, rule=ADAM, seed=0).lookup([3]))


def test_numbers_of_a_group_are_those_of_its_pools_together(tmp_path: Path) -> None:
    with er.Group(path=tmp_path / "g.rock", memory="1MiB") as group:
        for name, dim in (("a", 4), ("b", 4), ("c", 8)):  # two pools
            group.table(name, 1000, dim, rule=er.SGD(lr=0.1))
        for _ in range(3):
            group.update(
                {"a": [1, 2], "b": [3], "c": [4]}, {"a": np.ones((2, 4)), "b": np.ones((1, 4)), "c": np.ones((1, 8))}
            )
        group.commit()
        told, one, other = (each.stats() for each in (group, group["a"], group["c"]))
        for name in ("hits", "misses", "cache_slots", "disk_bytes", "bytes_written"):
            assert told[name] == one[name] + other[name], name
        assert one["hits"] == group["b"].stats()["hits"]  # of their pool
        assert told["commit"] == 1


def read_and_stepped(group: er.Group, ids: dict[str, np.ndarray]) -> None:
    """Read a batch and step it, as layers do."""
    reading = features_of.read([BatchFeature(group[name], of_table) for name, of_table in ids.items()])
    summed = features_of.sum_gradients(reading, [np.ones(out.shape, np.float32) for out in reading.outputs])
    step_all([StepRequest((rows_of(table),), table.rule or ADAM, grads) for table, grads in summed])


def test_a_batch_is_one_use_of_its_rows_read_and_stepped(tmp_path: Path) -> None:
    with made(tmp_path / "m") as group:
        ids = {"a": np.arange(20), "b": np.arange(10, 40)}
        for seen in (50, 100):  # new rows, and known ones
            read_and_stepped(group, ids)
            stats = group.stats()
            assert stats["hits"] + stats["misses"] == seen
        for _ in range(2):  # which no read comes before: each is a batch
            group.update(ids, {name: np.ones((len(of_table), 4)) for name, of_table in ids.items()})
        assert group.stats()["hits"] == 150
        assert group.stats()["misses"] == 50
        group.commit()


def test_going_back_brings_tables_back(tmp_path: Path) -> None:
    with made(tmp_path / "m") as group:
        step(group, 0)
        first, before = group.commit(), content_of(group)
        group.drop("b")
        group.rename("c", "d")
        new = group.table("new", 10, 4)
        step(group, 1, ["a"])
        group.commit(wait=False)
        a = group["a"]
        assert group.rollback(first) == 3
        assert list(group) == list(KINDS)
        assert content_of(group) == before
        assert group["a"] is a
        with pytest.raises(ClosedTableError):
            new.lookup([1])


def test_names_in_a_closed_group(tmp_path: Path) -> None:
    with made(tmp_path / "m") as group:
        step(group, 0)
        before = content_of(group)
        group["c"].close()  # as one that nobody has open, with changes
        assert group.uncommitted
        group.rename("a", "A")
        group.commit()
    with er.open(tmp_path / "m", kind=er.Group) as group:
        assert list(group) == ["A", "b", "c", "going"]
        assert content_of(group) == {"A" if name == "a" else name: each for name, each in before.items()}


@pytest.mark.parametrize("kind", ["c", "going"])
@pytest.mark.parametrize("way", ["closed while it is written", "swapped", "swapped and closed", "closed and swapped"])
def test_a_commit_has_what_a_table_remembers_besides_its_rows(tmp_path: Path, kind: str, way: str) -> None:
    with er.Group(path=tmp_path / "m", memory="256KiB") as group:
        for seed, name in enumerate(("one", "two")):
            group.table(name, **KINDS[kind], seed=seed)
        step(group, 0, ["one"])
        for number in range(5):
            step(group, number, ["two"])
        group.commit()
        if way == "closed while it is written":
            for number in range(5, 8):
                step(group, number, ["one"])
            group.commit(wait=False)
            group["one"].close()
            step(group, 8, ["two"])
        elif way == "closed and swapped":
            group["one"].close()
            group["two"].close()
        if "swapped" in way:
            for name, new in (("one", "it"), ("two", "one"), ("it", "two")):
                group.rename(name, new)
        if way == "swapped and closed":
            group["one"].close()
        group.commit()
        expected = content_of(group)
    with er.open(tmp_path / "m", kind=er.Group) as group:
        assert content_of(group) == expected
        step(group, 9, ["one", "two"])
        group.commit()
        expected = content_of(group)
        assert group.verify().problems == []
    with er.open(tmp_path / "m", mode="r", kind=er.Group) as group:
        assert content_of(group) == expected


# -------------------------------------------------------------------- one budget


def test_a_batch_that_is_too_large_says_what_each_table_needs(tmp_path: Path) -> None:
    with er.Group(path=tmp_path / "m", memory=100_000) as group:
        for name, dim in (("wide", 64), ("narrow", 4)):
            group.table(name, 10**6, dim, rule=er.SGD(lr=0.1))
        ids = {"wide": np.arange(1000), "narrow": np.arange(10)}
        grads = {name: np.ones((len(own), group[name].dim), np.float32) for name, own in ids.items()}
        said = r"rows of 2 tables: 1,000 of table 'wide' \(250.0 KiB\), 10 of table 'narrow' \(160 B\). memory=(\d+)"
        with pytest.raises(er.CacheTooSmallError, match=said) as caught:
            group.update(ids, grads)
        assert group["wide"].steps == group["narrow"].steps == 0
        enough = int(str(caught.value).rpartition("memory=")[2].split()[0])
        assert group.lookup(ids)["wide"].shape == (1000, 64)  # what is only read may have any size
    with er.open(tmp_path / "m", memory=enough, kind=er.Group) as group:
        for name, dim in (("wide", 64), ("narrow", 4)):
            group.table(name, 10**6, dim, rule=er.SGD(lr=0.1))
        group.update(ids, grads)
        assert group["wide"].steps == 1
        group.commit()


def test_pools_lend_each_other_the_budget(tmp_path: Path) -> None:
    with er.Group(path=tmp_path / "m", memory=1_000_000) as group:
        alone = er.Group()
        for each in (group, alone):
            for seed, dim in enumerate((16, 17)):
                each.table(f"t{seed}", 10**6, dim, rule=er.SGD(lr=0.1), seed=seed)
        for number in range(6):  # now one needs most of it, now the other
            rng = np.random.default_rng(number)
            sizes = {"t0": 2500, "t1": 50} if number % 2 else {"t0": 50, "t1": 2500}
            ids = {name: rng.integers(0, 10**6, size) for name, size in sizes.items()}
            grads = {name: rng.standard_normal((len(own), group[name].dim)) for name, own in ids.items()}
            for each in (group, alone):
                each.update(ids, grads)
        for name in alone:
            check_same(group[name], alone[name])
        group.commit()


def test_small_members_leave_the_cache_what_they_need_not_of_the_overlay(tmp_path: Path) -> None:
    def tier_of(group: er.Group) -> DiskBackend:
        assert isinstance(group.pools, DiskPools)
        return group.pools.tiers[0]

    with er.Group(path=tmp_path / "m", memory="8MiB") as group:
        group.table("large", 10**6, 128)
        alone = tier_of(group).placement
        assert alone.overlay_bytes == (8 << 20) * 3 // 16
        group.table("small", 2000, 128)
        both = tier_of(group).placement
        # 24 bytes for each row of the small one, of which half of the budget holds all, and 3/16 of the rest.
        assert both.overlay_bytes == 2000 * 24 + ((8 << 20) - 2000 * 512) * 3 // 16
        assert both.slots > alone.slots
        group.table("middle", 20_000, 128)  # which is larger than an even share, and has fewer rows than that has room
        three, rest = tier_of(group).placement, (8 << 20) - 2000 * 512
        assert rest * 3 / 32 > 20_000 * 24
        assert three.overlay_bytes == (2000 + 20_000) * 24 + rest * 3 // 32
        group.commit()
    with er.open(tmp_path / "m", memory="8MiB", kind=er.Group) as group:
        assert tier_of(group).placement == three


# -------------------------------------------------------------------- reads of all members


class Counting(System):
    """Counts the reads of many records."""

    reads = 0

    def read_many(
        self, fds: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, out: np.ndarray, starts: np.ndarray
    ) -> None:
        self.reads += 1
        super().read_many(fds, offsets, sizes, out, starts)


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[tuple[er.Group, er.Group, Counting]]:
    """Six tables of one pool and two of another, with 2,000 rows each in files; the same in RAM; and their system."""
    system, ids = Counting(), np.arange(2000)
    kinds = {f"t{k}": {"rows": 2000, "dim": 4 if k < 6 else 5, "rule": ADAM, "seed": k} for k in range(8)}
    groups = [on(system).Group(path=tmp_path / "m"), er.Group()]
    for group in groups:
        for name, kind in kinds.items():
            group.table(name, **kind)
        group.update(dict.fromkeys(kinds, ids), {name: np.ones((2000, group[name].dim)) for name in kinds})
    groups[0].commit()
    groups[0].close()
    with on(system).open(tmp_path / "m", memory="400KiB") as group:
        yield group, groups[1], system


def test_rows_of_all_members_of_a_pool_are_one_read(counted: tuple[er.Group, er.Group, Counting]) -> None:
    group, alone, system = counted
    before, ids = system.reads, {name: np.arange(7, 40) for name in group}
    found, expected = group.lookup(ids), alone.lookup(ids)
    assert system.reads == before + 2  # one for each pool
    assert all(np.array_equal(found[name], expected[name]) for name in group)
    batches = [{name: np.arange(lo, lo + 50) for name in group} for lo in (100, 300, 500)]
    before = system.reads
    for batch in group.prefetch(batches, depth=1):
        found, expected = group.lookup(batch), alone.lookup(batch)
        assert all(np.array_equal(found[name], expected[name]) for name in group)
    assert system.reads == before + 2 * len(batches)  # by prefetch alone


def test_a_window_that_is_too_large_says_what_the_group_needs(counted: tuple[er.Group, er.Group, Counting]) -> None:
    group, path = counted[0], str(counted[0].path)
    batches = [{name: np.arange(lo, lo + 300) for name in group} for lo in (0, 300, 600)]
    with pytest.raises(er.CacheTooSmallError, match=r"depth=2 .* here 7,?200 rows: memory=(\d+) ") as caught:
        list(group.prefetch(batches, depth=2))
    enough = int(str(caught.value).rpartition("memory=")[2].split()[0])
    group.close()
    with er.open(path, memory=enough) as group:
        assert len(list(group.prefetch(batches, depth=2))) == 3
    with er.open(path, memory=enough // 2) as group, pytest.raises(er.CacheTooSmallError):
        list(group.prefetch(batches, depth=2))


# -------------------------------------------------------------------- crashes and failures


class Life:
    """A small life of a group, whose content at each commit is known."""

    def __init__(self, system: FaultFS) -> None:
        self.system, self.contents, self.done = system, dict[int, Any](), -1

    def commit(self, **how: Any) -> None:
        assert self.group.storage is not None
        self.group.storage.end_commit()
        number = self.group.last_commit + 1
        self.contents[number] = content_of(self.group)
        assert self.group.commit(**how) == number
        self.done = number if how.get("wait", True) else self.done

    def live(self) -> None:
        """Train, commit, compact, drop, go back and open again."""
        self.contents[0] = {}
        self.group = on(self.system)(made, "/m", memory=30_000)
        self.done = 0
        for number in range(4):
            step(self.group, number)
            self.commit(wait=number != 1)
        self.group.compact()
        self.contents[self.group.last_commit] = self.contents[self.done]
        self.group.drop("b")
        step(self.group, 9, ["a", "c"])
        self.commit()
        self.group.compact()
        self.contents[self.group.last_commit] = self.contents[self.done]
        self.done = self.group.last_commit
        self.group.close()

    def check(self, system: FaultFS) -> None:
        """Fail unless a group that was opened after a crash is as of one commit, not before the last that was done."""
        if self.done < 0 and not system.exists("/m/manifest/0000000000.json"):
            return
        with on(system).open("/m", memory=30_000) as group:
            assert group.last_commit >= self.done
            expected = self.contents.get(group.last_commit, self.contents[max(self.contents)])
            assert content_of(group) == expected
            assert not group.verify().problems
            if "a" in group:
                step(group, 99, ["a"])
            group.commit()


def crash_everywhere(share: int) -> int:
    """Lose power after every call of a life (one in `share`), in several ways; return how often."""
    system, rng, seen, calls = FaultFS(), np.random.default_rng(0), itertools.count(1), itertools.count()
    life, count = Life(system), 0

    def crash(name: str, path: str) -> None:
        nonlocal count
        if next(calls) % share:
            return
        for clone in system.crash_clones(rng):
            count = next(seen)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", er.UncommittedWarning)
                life.check(clone)

    system.after = crash
    with cut_small():
        life.live()
    return count


def test_a_crash_leaves_all_tables_as_of_one_commit() -> None:
    assert crash_everywhere(40) > 5


@pytest.mark.slow
def test_a_crash_after_every_call_leaves_all_tables_as_of_one_commit() -> None:
    assert crash_everywhere(1) > 500


def fail_at(op: int, fault: int) -> bool:
    """Have one call of the file system fail; return whether there was such a call."""
    system = FaultFS()
    with on(system)(made, "/m", memory=30_000, keep=9) as group:
        step(group, 0)
        group.commit()
        before = content_of(group)
        step(group, 1)
        after, start = content_of(group), system.ops
        system.fail(start + op, fault)
        try:
            group.commit()
        except er.CommitError as error:
            assert error.errno in (fault, errno.EIO)  # noqa: PT017
            assert group.last_commit == 1
            assert content_of(group) == after
            is_broken = group.storage is not None and group.storage.table_folder.broken is not None
            with on(system).open("/m", mode="r") as reader:
                assert content_of(reader) in (before, *[after] * is_broken)
            if is_broken:  # the manifest is there, but may not survive a loss of power
                with pytest.raises(er.CommitError, match="no longer taken"):
                    group.commit()
                system.mend()
                return True
        was_there = system.ops > start + op
        system.mend()
        if group.uncommitted:
            group.commit()
        with on(system).open("/m", mode="r") as reader:
            assert content_of(reader) == after
            assert not reader.verify().problems
    return was_there


@pytest.mark.filterwarnings("ignore::embedrock.table.storage.UncommittedWarning")
@pytest.mark.parametrize("fault", [errno.ENOSPC, *slow(errno.EIO)])
def test_a_commit_that_fails_leaves_all_tables(fault: int) -> None:
    op = 0
    while fail_at(op, fault):
        op += 1
    assert op > 10


def test_flipped_bits_are_noticed(tmp_path: Path) -> None:
    with made(tmp_path / "m", memory="1MiB") as group:
        for number in range(5):
            step(group, number)
            group.commit()
        group.compact()
        step(group, 6)
        group.commit()
    rng = np.random.default_rng(0)
    for file in sorted(path for path in (tmp_path / "m").rglob("*") if path.is_file() and path.name != "LOCK"):
        data = file.read_bytes()
        for position in rng.integers(0, len(data), 6).tolist():
            bad = bytearray(data)
            bad[position] ^= 1 << int(rng.integers(8))
            file.write_bytes(bad)
            try:
                with er.open(tmp_path / "m", mode="r") as group:
                    assert group.verify().problems, (file, position)
            except er.CorruptTableError:
                pass
        file.write_bytes(data)
    with er.open(tmp_path / "m", mode="r") as group:
        assert not group.verify().problems


def test_a_commit_that_says_other_rows_of_a_member_than_its_pool_has_is_damaged(tmp_path: Path) -> None:
    with made(tmp_path / "m.rock") as group:
        step(group, 0)
        group.commit()
        part = rows_of(group["b"]).tier
        assert isinstance(part, RecordRange)
        part.admitted(1)  # as a forged manifest says
        with pytest.raises(
            er.CorruptTableError, match=r"the pool of table 'b' is damaged: expected 1\d rows of it, got"
        ):
            group["b"].export()
        part.admitted(-2)
        with pytest.raises(
            er.CorruptTableError, match=r"the pool of table 'b' is damaged: expected \d+ rows? of it, got"
        ):
            group["b"].export()
        part.admitted(1)
        part.spec = replace(part.spec, rows=3)  # as a forged log has keys that no id of the table has
        with pytest.raises(er.CorruptTableError, match=r"expected ids in \[0, 3\), got \d+ to \d+\. Restore the file"):
            group["b"].export()
        assert len(group["a"].export()[0])  # others are whole


@pytest.mark.parametrize(("of_group", "of_member"), [("raise", "skip"), ("skip", "raise"), ("skip", "skip")])
def test_what_a_member_does_about_nan_outlives_restarts(tmp_path: Path, of_group: str, of_member: str):
    path = tmp_path / "tables"
    with er.Group(path=path, on_nonfinite=of_group) as group:
        group.table("a", 10, 2, rule=er.SGD(lr=0.1), on_nonfinite=of_member)
        group.table("b", 10, 2, rule=er.SGD(lr=0.1))
        group.commit()
    for now in ("raise", of_group):
        with er.Group(path=path, on_nonfinite=now) as group:
            assert (group["a"].on_nonfinite, group["b"].on_nonfinite) == (of_member, now)
            group["a"].close()  # resting, it is carried along
            group["b"].assign([1], np.ones((1, 2), np.float32))
            group.commit()
    with er.Group(path=path) as group:  # another choice, where it is asked for
        assert group.table("a", 10, 2, on_nonfinite="raise").on_nonfinite == "raise"
        group.commit()
    with er.Group(path=path, on_nonfinite="skip") as group:
        assert group["a"].on_nonfinite == "raise"


def test_a_rollback_to_other_first_values_is_refused_before_anything_changes(tmp_path: Path) -> None:
    arrays = np.ones((10, 2), np.float32), np.ones((20, 2), np.float32)
    with er.Group(path=tmp_path / "g", keep=5) as group:
        group.table("a", 10, 2, rule=er.SGD(lr=1.0), init=er.FromArray(arrays[0]))
        first = group.commit()
        group["a"].grow(20, init=er.FromArray(arrays[1]))
        group["a"].update([15], np.ones((1, 2), np.float32))
        with pytest.raises(TableFileError, match="must be that of the table"):
            group.rollback(first)
        assert (group["a"].lookup([15]) == 0).all()
        group.commit()


def test_a_folder_whose_memory_is_nonsense_is_let_go(tmp_path: Path) -> None:
    for name, make in (("t", lambda **more: er.Table(10, 2, **more)), ("g", er.Group)):
        make(path=tmp_path / name).close()
        with pytest.raises(ArgumentError, match="memory"):
            make(path=tmp_path / name, memory="much")
        make(path=tmp_path / name).close()


def test_a_group_that_nobody_has_any_more_is_collected_and_closed(tmp_path: Path) -> None:
    group = er.Group(path=tmp_path / "g")
    group.table("a", 10, 2, rule=er.SGD(lr=1.0))
    group.update({"a": [1]}, {"a": np.ones((1, 2), np.float32)})
    known = weakref.ref(group)
    del group
    with pytest.warns(er.UncommittedWarning, match="which are lost"):
        gc.collect()
    assert known() is None
    er.Group(path=tmp_path / "g").close()
