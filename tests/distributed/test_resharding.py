"""Tables in parts: the folder of them, and the rows shared out over another number of ranks."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.__main__ import main
from embedrock.distributed import commits, resharding
from embedrock.distributed.commits import ShardFolders, layout_of, part_to_open
from embedrock.distributed.owners import Shard
from embedrock.distributed.resharding import reshard
from embedrock.storage import disk_backend as tiers_disk
from embedrock.store import compaction
from embedrock.store.segments import Log
from embedrock.system import platform
from embedrock.table.table import rows_of
from lifecycles import whole_of
from slow import slow

DIM, ROWS = 4, 300


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(step)
    return draw.integers(0, 1000, ROWS) * 7919, draw.normal(size=(ROWS, DIM)).astype(np.float32)


def step_parts(tables: list[er.Table], steps: range) -> None:
    """Step the parts of a table as ranks do, each its own rows."""
    for step in steps:
        ids, grads = batch(step)
        for rank, table in enumerate(tables):
            own = Shard(rank, len(tables)).owns(ids)
            table.update(ids[own], grads[own])


def opened(path: str, ranks: int, **options: Any) -> list[er.Table]:
    parts = [part_to_open(path, rank, ranks, "users") for rank in range(ranks)]
    return [er.Table(None, DIM, path=part, seed=3, rule=er.Adam(lr=0.1), memory="1MiB", **options) for part in parts]


def commit(tables: list[er.Table], step: int, name: str | None) -> None:
    for table in tables:
        table.commit(step=step, name=name)
        table.close()


def content(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids and weights of all parts together, and of each row the part that has it."""
    layout = layout_of(path)
    assert layout is not None
    found = [er.open(part, mode="r") for part in layout.parts]
    ids, rows = (np.concatenate(part) for part in zip(*(table.export() for table in found), strict=True))
    for rank, table in enumerate(found):
        assert Shard(rank, layout.ranks).owns(table.export()[0]).all()
        table.close()
    order = np.argsort(ids)
    return ids[order], rows[order], ids


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few rows be read at a time, and chunks have few."""
    monkeypatch.setattr(resharding, "BATCH_BYTES", 4096)
    monkeypatch.setattr(compaction, "SMALL_CHUNK_BYTES", 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("before", "after", "dense"), [(2, 3, False), (3, 1, True), (1, 2, False)])
def test_rows_shared_out_anew_train_on_to_the_bits_of_one_table(
    tmp_path: Path, before: int, after: int, dense: bool
) -> None:
    path = str(tmp_path / "users.rock")
    rule = er.AdamW(lr=0.1, dense=True) if dense else er.Adam(lr=0.1)
    parts = [part_to_open(path, rank, before, "users") for rank in range(before)]
    tables = [er.Table(None, DIM, path=part, seed=3, rule=rule, memory="1MiB") for part in parts]
    step_parts(tables, range(2))
    tables[0].commit()
    tables[0].compact()  # so that rows are in chunks and in logs
    step_parts(tables, range(2, 3))
    commit(tables, 3, "three")

    done = reshard(path, after)
    assert (done.before, done.after, done.step, done.name) == (before, after, 3, "three")
    tables = [er.open(part_to_open(path, rank, after, "users")) for rank in range(after)]
    assert [table.steps for table in tables] == [3] * after
    assert len(os.listdir(f"{path}/shard-0-of-{after}/base")) == 1
    assert len(list(Path(path, f"shard-0-of-{after}").glob("base/*/*.rows"))) > 2
    step_parts(tables, range(3, 5))
    commit(tables, 5, None)
    for part in ShardFolders(path, after).parts:
        with er.open(part) as table:
            table.compact()
            assert not table.verify().problems

    alone = er.Table(None, DIM, seed=3, rule=rule)
    step_parts([alone], range(5))
    ids, rows, _ = content(path)
    np.testing.assert_array_equal(ids, alone.export()[0])
    np.testing.assert_array_equal(rows, alone.export()[1])
    assert done.rows == len(np.unique(np.concatenate([batch(step)[0] for step in range(3)])))


def test_it_goes_on_where_it_was_killed_and_the_old_parts_stay_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "users.rock")
    tables = opened(path, 2)
    step_parts(tables, range(2))
    commit(tables, 2, "two")
    expected = content(path)[:2]

    made: list[int] = []
    load = resharding.load

    def stops(rows: Any, *args: Any) -> None:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(1)
        load(rows, *args)

    monkeypatch.setattr(resharding, "AT_ONCE", 1)
    monkeypatch.setattr(resharding, "load", stops)
    with pytest.raises(KeyboardInterrupt):
        reshard(path, 3)
    assert layout_of(path) == ShardFolders(path, 2)
    np.testing.assert_array_equal(content(path)[1], expected[1])

    made.clear()
    reshard(path, 3)
    assert len(made) == 1  # the third: the two before it are there
    np.testing.assert_array_equal(content(path)[0], expected[0])
    np.testing.assert_array_equal(content(path)[1], expected[1])
    assert sorted(os.listdir(path)) == ["SHARDED", *(f"shard-{rank}-of-3" for rank in range(3))]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("which", ["write", "read"])
def test_what_fails_in_one_part_ends_all_and_the_same_call_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    path, calls = str(tmp_path / "users.rock"), 0
    tables = opened(path, 2)
    step_parts(tables, range(2))
    commit(tables, 2, "two")
    expected = content(path)[:2]
    owner, name = {"write": (Log, "append"), "read": (tiers_disk.DiskBackend, "read_through")}[which]
    does = getattr(owner, name)

    def fails(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise OSError(errno.EIO, "the disk")
        return does(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(OSError, match="the disk"):
            reshard(path, 3)
    np.testing.assert_array_equal(content(path)[1], expected[1])
    reshard(path, 3)
    np.testing.assert_array_equal(content(path)[0], expected[0])
    np.testing.assert_array_equal(content(path)[1], expected[1])


def test_a_row_that_two_parts_have_is_told(tmp_path: Path) -> None:
    path = str(tmp_path / "users.rock")
    tables = opened(path, 2)
    for table in tables:
        table.update([7], np.ones((1, DIM), np.float32))
    commit(tables, 1, "one")
    with pytest.raises(er.CorruptTableError, match=r"a row of \[7, 7\] is in two parts of the table"):
        reshard(path, 1)


KILLED = """
import sys
from embedrock.system import platform
from embedrock.distributed import commits, resharding
resharding.AT_ONCE, resharding.BATCH_BYTES = 2, 1 << 16
resharding.reshard(sys.argv[1], 3)
"""


@pytest.mark.slow
def test_it_is_killed_at_random_and_loses_nothing(tmp_path: Path) -> None:
    path, draw = str(tmp_path / "users.rock"), np.random.default_rng(1)
    tables = opened(path, 2)
    for rank, table in enumerate(tables):
        ids = np.arange(60_000)[Shard(rank, 2).owns(np.arange(60_000))]
        for part in np.array_split(ids, 8):
            table.update(part, np.ones((len(part), DIM), np.float32))
    commit(tables, 8, "eight")
    expected, lives = content(path)[:2], 0
    while (layout_of(path) or ShardFolders(path, 2)).ranks == 2:
        with subprocess.Popen([sys.executable, "-c", KILLED, path]) as process:
            try:
                process.wait(float(draw.uniform(0.3, 4.0)) + lives / 20)
            except subprocess.TimeoutExpired:
                process.kill()
        lives += 1
    reshard(path, 3)  # what the last one left is removed
    np.testing.assert_array_equal(content(path)[0], expected[0])
    np.testing.assert_array_equal(content(path)[1], expected[1])
    assert sorted(os.listdir(path)) == ["SHARDED", *(f"shard-{rank}-of-3" for rank in range(3))]


def test_what_is_left_of_an_earlier_time_does_not_pass_for_a_new_part(tmp_path: Path) -> None:
    path = str(tmp_path / "users.rock")
    tables = opened(path, 2)
    step_parts(tables, range(1))
    commit(tables, 1, None)
    reshard(path, 1)
    reshard(path, 2)
    shutil.copytree(f"{path}/shard-1-of-2", tmp_path / "left")
    reshard(path, 1)
    (tmp_path / "left").rename(f"{path}/shard-1-of-2")  # where it was killed before it had removed that
    tables = opened(path, 1)
    step_parts(tables, range(1, 2))
    commit(tables, 2, None)
    expected = content(path)[:2]
    reshard(path, 2)
    np.testing.assert_array_equal(content(path)[0], expected[0])
    np.testing.assert_array_equal(content(path)[1], expected[1])


def test_parts_that_stopped_at_different_commits_go_by_the_newest_that_all_have(tmp_path: Path) -> None:
    path = str(tmp_path / "users.rock")
    tables = opened(path, 2)
    step_parts(tables, range(2))
    for table in tables:
        table.commit(step=2, name="two")
    step_parts(tables, range(2, 3))
    commit(tables[:1], 3, "three")  # of which the other one never heard
    tables[1].rollback(tables[1].last_commit)
    tables[1].close()
    assert reshard(path, 1)[:2] == (2, 1)
    alone = er.Table(None, DIM, seed=3, rule=er.Adam(lr=0.1))
    step_parts([alone], range(2))
    np.testing.assert_array_equal(content(path)[1], alone.export()[1])


def test_what_cannot_be_resharded_is_told(tmp_path: Path) -> None:
    path = str(tmp_path / "users.rock")
    with pytest.raises(er.TableFileError, match="no table in parts here: a folder with SHARDED"):
        reshard(path, 2)
    tables = opened(path, 2)
    with pytest.raises(er.ArgumentError, match=r"as many processes as its parts, 2: got 3.* --shards 3"):
        part_to_open(path, 0, 3, "users")
    with pytest.raises(er.TableLockedError):
        reshard(path, 3)
    step_parts(tables[:1], range(1))
    commit(tables, 1, None)
    with pytest.raises(er.ArgumentError, match=r"a commit in common: .* have made \[0, 1\] steps"):
        reshard(path, 3)
    (tmp_path / "users.rock/SHARDED").write_text("two")
    with pytest.raises(er.CorruptTableError, match="must say how many parts"):
        layout_of(path)
    (tmp_path / "users.rock/SHARDED").write_text('{"format": 2}')
    with pytest.raises(er.NewerFormatError, match="format 2, and this release reads 1"):
        layout_of(path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").touch()
    with pytest.raises(er.TableFileError, match=r"a folder of their own: this one has 'notes\.txt'"):
        part_to_open(str(tmp_path / "other"), 0, 2, "users")


# ---------------------------------------------------------------- commits with a name


class Model:
    """A table in parts, beside one in RAM that is told the same: what each commit with a name must be."""

    def __init__(self, path: str, seed: int, policies: dict[str, Any]) -> None:
        self.path, self.draw, self.ranks, self.steps = path, np.random.default_rng(seed), 2, 0
        self.made_by: dict[str, Any] = {"seed": 3, "rule": er.Adam(lr=0.1), **policies}
        self.made_by |= {"segments": None} if policies else {}
        self.alone = er.Table(1000, DIM, **self.made_by)
        self.named: dict[str, dict[str, Any]] = {}
        # Ids that were forgotten since a commit: whether it has them still is not looked at here.
        self.gone: dict[str, set[int]] = {}
        self.unsure = set[int]()
        self.committed = self.alone.state()
        self.open()

    def open(self) -> None:
        paths = [part_to_open(self.path, rank, self.ranks, "users") for rank in range(self.ranks)]
        options: dict[str, Any] = {"memory": "256KiB", "keep": 3}
        if (self.committed or {}).get("steps"):
            self.tables = [er.open(path, **options) for path in paths]
        else:
            self.tables = [er.Table(1000, DIM, path=path, **self.made_by, **options) for path in paths]

    def own(self, ids: np.ndarray) -> list[np.ndarray]:
        segments = self.alone.spec.segments
        return [Shard(rank, self.ranks, segments=segments).owns(ids) for rank in range(self.ranks)]

    def train(self) -> None:
        for _ in range(int(self.draw.integers(1, 4))):
            ids, grads = self.draw.integers(0, 1000, 40), self.draw.normal(size=(40, DIM)).astype(np.float32)
            for table, own in zip(self.tables, self.own(ids), strict=True):
                table.update(ids[own], grads[own])
            self.alone.update(ids, grads)
            self.steps += 1

    def forget(self) -> None:
        ids = self.draw.choice(self.alone.export()[0], 5) if self.alone.steps else np.empty(0, np.int64)
        for table, own in zip(self.tables, self.own(ids), strict=True):
            table.forget(np.unique(ids[own]))
        self.alone.forget(np.unique(ids))
        for gone in self.gone.values():
            gone |= set(ids.tolist())
        self.commit(None)  # or the parts that have none of the ids would not know of it

    def commit(self, name: str | None) -> None:
        for table in self.tables:
            table.commit(step=self.steps, name=name)
        self.committed = self.alone.state()
        if name is not None:
            self.named[name], self.gone[name] = self.committed, set(self.unsure)

    def commit_named(self) -> None:
        self.commit(f"step-{self.steps}-{self.draw.integers(10**6)}")

    def commit_plain(self) -> None:
        self.commit(None)

    def cut_short(self) -> None:
        """Commit in one part only, as a save does that is killed; all go back to the newest that all have."""
        self.tables[0].commit(step=self.steps, name=f"cut-{self.draw.integers(10**6)}")
        self.tables[0].rollback(self.tables[0].commits()[-2]["commit"])
        self.lose()

    def lose(self) -> None:
        for table in self.tables:
            table.rollback(table.last_commit)
        self.alone.load_state(self.committed)

    def compact(self) -> None:
        for table in self.tables:
            table.compact()

    def release(self) -> None:
        if len(self.named) > 2:
            name = self.drawn_name()
            del self.named[name]
            for table in self.tables:
                table.release(name)

    def drawn_name(self) -> str:
        return sorted(self.named)[int(self.draw.integers(len(self.named)))]

    def go_back(self) -> None:
        if self.named:
            name = self.drawn_name()
            for table in self.tables:
                table.rollback(next(one["commit"] for one in table.commits() if one["name"] == name))
            self.alone.load_state(self.named[name])
            self.committed = self.named[name]
            self.unsure |= self.gone[name]

    def reshard(self) -> None:
        for table in self.tables:
            table.close()
        if not self.committed["steps"]:
            return self.open()
        before, self.ranks = self.ranks, int(self.draw.integers(1, 5))
        assert reshard(self.path, self.ranks)[:2] == (before, self.ranks)
        self.alone.load_state(self.committed)
        self.open()

    def check(self) -> None:
        for name, state in self.named.items():
            found = [
                er.open(str(table.path), mode="r", at=next(c["commit"] for c in table.commits() if c["name"] == name))
                for table in self.tables
            ]
            assert {table.steps for table in found} == {state["steps"]}
            told: list[Any] = []
            kept = [rows_of(table).tier.snapshot() for table in found]
            ids, records = (np.concatenate(part) for part in zip(*kept, strict=True))
            for got, of in ((ids, records), (state["ids"], state["records"])):
                order = np.argsort(got)
                told.append([each[order][~np.isin(got[order], list(self.gone[name]))] for each in (got, of)])
            for ours, expected in zip(*told, strict=True):
                np.testing.assert_array_equal(ours, expected)
            self.check_lifecycle([table.spec for table in found], [rows_of(table).lifecycle for table in found], state)
            for table in found:
                table.close()

    def check_lifecycle(self, specs: list[Any], found: list[Any], state: dict[str, Any]) -> None:
        """Compare what all parts know of rows with what one table knew."""
        if None in found:
            return
        assert {spec.segments for spec in specs} == {self.alone.spec.segments}
        of_one = er.Table(1000, DIM, **self.made_by)
        of_one.load_state(state)
        one: Any = rows_of(of_one).lifecycle
        for each in (*found, one):
            each.begin_period(each.steps + 1)
        assert {each.steps for each in found} == {one.steps}
        assert {name: sum(each.counts[name] for each in found) for name in one.counts} == one.counts
        assert whole_of([each.state() for each in found]) == whole_of([one.state()])


ACTS = ["train"] * 4 + ["commit_named"] * 2 + ["commit_plain", "cut_short", "lose", "compact", "release", "go_back"]
ACTS += ["reshard"] * 2 + ["forget"]
POLICIES: list[dict[str, Any]] = [
    {"admission": er.Admission(2, within=3), "eviction": er.Eviction(max_rows=300, idle=9)},
    {"admission": er.Admission(2, within=4, sketch="64KiB", default="zeros"), "eviction": er.Eviction(max_rows=256)},
]


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore::embedrock.UncommittedWarning")
@pytest.mark.parametrize("seed", [0, *slow(*range(1, 40))])
@pytest.mark.parametrize("comes_and_goes", [False, True])
def test_every_commit_with_a_name_stays_whatever_happens(tmp_path: Path, seed: int, comes_and_goes: bool) -> None:
    model = Model(str(tmp_path / "users.rock"), seed, POLICIES[seed % 2] if comes_and_goes else {})
    # What was forgotten is left out of earlier commits, and one table that goes back to them has it again.
    acts = [act for act in ACTS if act != "forget" or not comes_and_goes]
    for act in ["train", "commit_named", *model.draw.choice(acts, 25)]:
        getattr(model, act)()
        model.check()


def numbers_of(path: str, name: str) -> tuple[er.Table, ...]:
    """Return the parts of a table as of a commit of that name."""
    layout = layout_of(path)
    assert layout is not None
    kept = [commits.kept_in(part).values() for part in layout.parts]
    numbers = [next(each.numbers[0] for each in marks if each.name == name) for marks in kept]
    return tuple(er.open(part, mode="r", at=at) for part, at in zip(layout.parts, numbers, strict=True))


def whole(path: str, name: str) -> tuple[list[int], dict[int, bytes], Any]:
    """Return what a commit has, in all parts together."""
    found, content = numbers_of(path, name), {}
    for table in found:
        ids, records = rows_of(table).tier.snapshot()
        content |= {int(one): record.tobytes() for one, record in zip(ids, records, strict=True)}
    spec, steps = found[0].spec, [table.steps for table in found]
    for table in found:
        table.close()
    return sorted(set(steps)), content, (spec.rows, repr(spec.rule))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dense", [False, True])
def test_commits_of_another_rule_or_of_fewer_rows_are_taken_over(tmp_path: Path, dense: bool) -> None:
    path, rules = str(tmp_path / "users.rock"), (er.AdamW(lr=0.1, dense=dense), er.Adagrad(lr=0.2))
    parts = [part_to_open(path, rank, 2, "users") for rank in range(2)]
    tables = [er.Table(8000, DIM, path=part, seed=3, rule=rules[0], memory="1MiB") for part in parts]
    expected, names = {}, ["one", "two", "grown", "other", "last"]
    for number, name in enumerate(names):
        for rank, table in enumerate(tables):
            if name == "grown":
                table.grow(9000)
            if name == "other" and not dense:
                table.set_rule(rules[1], reset_state=True)
            ids = np.arange(50 * number, 50 * number + 100)
            own = ids[Shard(rank, 2).owns(ids)]
            table.update(own, np.ones((len(own), DIM), np.float32), lr=0.1 + number)
            table.commit(step=number, name=name)
    for table in tables:
        table.close()
    expected = {name: whole(path, name) for name in names}
    reshard(path, 3)
    assert {name: whole(path, name) for name in names} == expected
    reshard(path, 1)
    assert {name: whole(path, name) for name in names} == expected


def test_of_a_later_commit_only_the_rows_that_differ_are_written(tmp_path: Path) -> None:
    path = str(tmp_path / "users.rock")
    tables = opened(path, 2, keep=9)
    step_parts(tables, range(20))
    for table in tables:
        table.commit(step=20, name="one")
        table.compact()
    tables[0].update([7919 * 3], np.ones((1, DIM), np.float32))
    tables[1].update([], np.empty((0, DIM), np.float32))
    commit(tables, 21, "two")
    reshard(path, 1)
    (part,) = numbers_of(path, "two")
    (content,) = rows_of(part).location.table_folder.manifest.pools  # pyright: ignore[reportAttributeAccessIssue]
    assert [entry.count for entry in content.delta] == [1]
    part.close()


def test_the_name_that_resharding_gives_is_not_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "users.rock")
    tables = opened(path, 2)
    step_parts(tables, range(1))
    commit(tables, 1, None)
    name = reshard(path, 1).name
    with er.open(f"{path}/shard-0-of-1") as table:
        assert name.startswith("resharded-")
        assert [one["name"] for one in table.commits()] == [None, None]


@pytest.mark.parametrize("name", ["state_dict-1", "worker-1-of-2-1-0123abcd"])
def test_what_one_part_alone_is_referred_to_by_is_not_given_up(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "users.rock")
    tables = opened(path, 2)
    step_parts(tables, range(1))
    tables[1].commit(step=1, name=name)
    commit(tables, 1, "one")
    with pytest.raises(er.UnsupportedError, match=rf"commit '{name}' of one part, shard-1-of-2.*release") as caught:
        reshard(path, 3)
    assert sorted(os.listdir(path)) == ["SHARDED", "shard-0-of-2", "shard-1-of-2"]
    remedy = str(caught.value).partition("give that state up: ")[2].removesuffix(".")
    exec(remedy, {"er": er})
    gc.collect()
    assert reshard(path, 3)[:2] == (2, 3)


def test_a_damaged_commit_may_have_a_name_so_nothing_is_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "users.rock")
    tables = opened(path, 2)
    step_parts(tables, range(1))
    for table in tables:
        table.commit(step=1, name="one")
    step_parts(tables, range(1, 2))
    commit(tables, 2, "two")
    (tmp_path / "users.rock/shard-1-of-2/manifest/0000000001.json").write_text("{}")
    with pytest.raises(er.CorruptTableError, match=r"0000000001\.json"):
        reshard(path, 3)
    assert sorted(os.listdir(path)) == ["SHARDED", "shard-0-of-2", "shard-1-of-2"]


def test_all_that_is_needed_is_checked_first_and_nothing_stays_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "users.rock")
    tables = opened(path, 2)
    step_parts(tables, range(3))
    commit(tables, 3, "three")
    expected, there = content(path), sorted(os.listdir(path))
    rows = len(expected[0])
    needed = rows * (3 * 4 * DIM + 12)
    said = rf"shared out over 3 parts: .*\({needed} bytes\) more are needed, .* Free some\. The 2 parts that there were"
    with monkeypatch.context() as patch:
        patch.setattr(platform, "free_bytes", lambda path: needed - 1)
        patch.setattr(resharding.Resharding, "make_all", lambda work: pytest.fail("it began"))
        with pytest.raises(OSError, match=said):
            reshard(path, 3)
    assert sorted(os.listdir(path)) == there

    append = Log.append
    calls: list[int] = []

    def fails(*args: Any) -> Any:  # others took the room meanwhile
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(*args)

    with monkeypatch.context() as patch:
        patch.setattr(resharding, "AT_ONCE", 1)
        patch.setattr(Log, "append", fails)
        with pytest.raises(OSError, match=said):
            reshard(path, 3)
    assert sorted(os.listdir(path)) == there
    reshard(path, 3)
    np.testing.assert_array_equal(content(path)[1], expected[1])


def test_what_was_forgotten_stays_so_in_parts_and_when_they_are_shared_out_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, tables = str(tmp_path / "users.rock"), opened(str(tmp_path / "users.rock"), 2, keep=5)
    step_parts(tables, range(2))
    commit(tables, 2, "before")
    wanted = np.unique(batch(0)[0])[:20]
    (tmp_path / "ids.txt").write_text("\n".join(map(str, wanted.tolist())))
    assert main(["forget", path, str(tmp_path / "ids.txt")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("20 rows of 20 ids forgotten")
    assert [line.strip().split()[:2] for line in told[-2:]] == [["embedrock", "compact"]] * 2
    with er.open(path, mode="r", at=1) as table:  # of all parts
        assert not np.isin(wanted, table.export()[0]).any()
        rows = len(table.export()[0])
    tables = [er.open(part, keep=5) for part in ShardFolders(path, 2).parts]
    for table in tables:
        table.rollback(1)  # as ranks do that load a checkpoint
        table.close()
    reshard(path, 3)
    ids, _, _ = content(path)
    assert len(ids) == rows
    assert not np.isin(wanted, ids).any()
