"""The crash-state explorer: lives of tables on a real folder, and what a table must be after any loss of power in them.

The system calls of a life are recorded (`recorded_calls.py`). Each state that a crash can leave of them is written to a
folder, opened, compared with a table in RAM that made the same steps, verified, trained and committed; and what the
recovery does is recorded too, so that it can lose power as well.

    # Checks one state of a life that a failed test has kept:
    PYTHONPATH=tests python tests/support/crash_states.py LIFE NUMBER
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import embedrock as er
from embedrock.io.vfs import System
from embedrock.table.table import rows_of
from on_system import on
from recorded_calls import LAWS, Call, Disk, Recorder, Write, made, put
from small_pieces import cut_small, some_goal
from suites import records_of
from table_files import compact_in_background, files_of

ROWS, DIM, BATCH, SLOTS, KEEP = 60, 3, 6, 14, 2
TABLE, MEMORY = "table", "64KiB"
RULES = (er.Adam(lr=0.1), er.Momentum(lr=0.1), er.SGD(lr=0.1))  # of records of three layouts
DENSE = er.Adam(lr=0.1, dense=True)  # has a history
ALONE = ""  # name of a table that is no member of a group
KINDS: dict[str, dict[str, dict[str, Any]]] = {  # what is in a folder: tables by name
    "adam": {ALONE: {"rows": ROWS, "rule": RULES[0]}},
    "dense": {ALONE: {"rows": ROWS, "rule": DENSE}},
    "open": {ALONE: {"rows": None, "rule": RULES[1], "dtype": "bfloat16"}},
    "come and go": {
        ALONE: {
            "rows": None,
            "rule": RULES[0],
            "admission": er.Admission(2, within=20),
            "eviction": er.Eviction(max_rows=2 * BATCH, idle=15),
        }
    },
    "group": {  # two share a pool, and rows of one come and go
        "users": {"rows": ROWS, "rule": RULES[0]},
        "items": {"rows": ROWS, "rule": er.Adam(lr=0.2)},
        "words": {"rows": None, "rule": DENSE, "dtype": "bfloat16"},
        "terms": {"rows": None, "rule": RULES[0], "eviction": er.Eviction(max_rows=2 * BATCH)},
    },
}
Tables = dict[str, er.Table]  # by name
AGAIN = 8  # one state in so many also loses power while it recovers ...
RECOVERIES = 4  # ... in so many ways
RAM = Path("/dev/shm")  # a folder of files that need no disk, where there is one


class Content(NamedTuple):
    """All of a table that a commit must bring back, to the bit."""

    rows: int | None
    steps: int
    rule: str
    ids: bytes
    records: bytes
    weights: bytes
    history: bytes


Contents = dict[str, Content]  # of the tables of a commit


def contents_of(tables: Tables) -> Contents:
    return {name: content_of(table) for name, table in tables.items()}


def content_of(table: er.Table) -> Content:
    (ids, records), history = records_of(table), rows_of(table).history
    kept = {} if history is None else history.state()
    if (lifecycle := rows_of(table).lifecycle) is not None:
        kept = {**kept, **lifecycle.state()}
    arrays = b"".join(name.encode() + array.tobytes() for name, array in sorted(kept.items()))
    weights = table.lookup(np.arange(ROWS)).tobytes()
    return Content(table.rows, table.steps, repr(table.rule), ids.tobytes(), records.tobytes(), weights, arrays)


def train(tables: Tables, number: int) -> None:
    """Make a step of each, that is a function of its number."""
    for k, table in enumerate(tables.values()):  # others of each, so that none can pass for another
        train_one(table, number + k)


def train_one(table: er.Table, number: int) -> None:
    rng = np.random.default_rng(number)
    hot, any_row = rng.integers(0, BATCH, BATCH), rng.integers(0, ROWS, BATCH)
    ids = np.where(rng.random(BATCH) < 0.3, hot, any_row)
    table.update(ids, rng.standard_normal((BATCH, DIM)).astype(np.float32))


def train_on(tables: Tables) -> None:
    """Make the step that is made after every crash."""
    train(tables, 10**6)


def contents_from(tables: Tables, kind: str) -> tuple[Contents, ...]:
    """Return the content of tables now, and after one and two steps more that are made after a crash."""
    contents, tables = [contents_of(tables)], copy.deepcopy(tables) or in_ram(kind)
    for _ in range(2):
        train_on(tables)
        contents.append(contents_of(tables))
    return tuple(contents)


# ---------------------------------------------------------------- what is in a folder


def in_ram(kind: str) -> Tables:
    """Return new tables in RAM."""
    return {name: er.Table(dim=DIM, seed=1, **what) for name, what in KINDS[kind].items()}


def on_disk(kind: str, path: Path, options: dict[str, Any]) -> er.Table | er.Group:
    """Return a new table on disk, or a new group without members."""
    if ALONE in KINDS[kind]:
        return er.Table(dim=DIM, seed=1, path=path, **KINDS[kind][ALONE], **options)
    return er.Group(path=path, **options)


def tables_in(folder: er.Table | er.Group) -> Tables:
    """Return the tables that there are."""
    return {ALONE: folder} if isinstance(folder, er.Table) else {name: folder[name] for name in folder}


def all_tables_in(folder: er.Table | er.Group, kind: str) -> Tables:
    """Return the tables, those made anew that a group does not have yet: its first commit has none."""
    if isinstance(folder, er.Group) and not len(folder):
        for name, what in KINDS[kind].items():
            folder.table(name, dim=DIM, seed=1, **what)
    return tables_in(folder)


# ---------------------------------------------------------------- what is promised


class Mark(NamedTuple):
    """What a program knows, as of a position in its calls.

    Attributes:
        position: calls made before.
        what: "begun" (the commit may be found from now on), "done" (it is durable), "kept" (until it is released: it
            has a name) or "released".
        commit: its number.
        contents: of a commit that was begun; see `contents_from`.
    """

    position: int
    what: str
    commit: int
    contents: tuple[Contents, ...] = ()


@dataclass
class Trace:
    """The calls of a program, and what it was promised on the way.

    Attributes:
        kind: of `KINDS`.
        name: for messages.
        begins: position of the first call that may be lost.
    """

    kind: str
    name: str
    calls: list[Call]
    begins: int = 0
    marks: list[Mark] = field(default_factory=list)

    def mark(self, what: str, commit: int, contents: tuple[Contents, ...] = ()) -> None:
        self.marks.append(Mark(len(self.calls), what, commit, contents))

    def found(self, last: int, kept: set[int], contents: dict[int, tuple[Contents, ...]], is_new: bool) -> None:
        """Note the commits of a table that was opened, or made just now, so that they must not be lost."""
        since = len(self.calls) if is_new else self.begins
        self.marks += [Mark(self.begins, "begun", commit, each) for commit, each in contents.items()]
        self.marks += [Mark(since, "done", last), *(Mark(since, "kept", commit) for commit in kept)]

    def known(self, what: str, point: int) -> list[Mark]:
        """Return the marks of a kind up to a position."""
        return [mark for mark in self.marks if mark.what == what and mark.position <= point]

    def acknowledged(self, point: int) -> int:
        """Return the number of the last commit that must be there, -1 for none."""
        return max((mark.commit for mark in self.known("done", point)), default=-1)

    def contents_at(self, commit: int, point: int) -> tuple[Contents, ...]:
        """Return what a commit that was found holds; fail if it cannot be."""
        last = self.acknowledged(point)
        assert commit >= last, f"commit {last} is lost: {commit} was opened"
        return self.contents_of(commit, point)

    def contents_of(self, commit: int, point: int) -> tuple[Contents, ...]:
        found = [mark.contents for mark in self.known("begun", point) if mark.commit == commit]
        assert found, f"commit {commit} was never made"
        return found[-1]

    def promise(self, point: int) -> tuple[Any, ...]:
        """Return all that decides what may be found."""
        begun = frozenset(mark.commit for mark in self.known("begun", point))
        return self.acknowledged(point), begun, frozenset(self.kept(point))

    def kept(self, point: int) -> set[int]:
        """Return the commits that have a name, and must be there."""
        kept, released = ({mark.commit for mark in self.known(what, point)} for what in ("kept", "released"))
        return kept - released


# ---------------------------------------------------------------- lives


class Life:
    """Tables that are made, trained, committed, and all else that can happen to them, with some in RAM beside them."""

    def __init__(self, seed: int, kind: str, root: Path) -> None:
        self.rng, self.kind, self.root = random.Random(seed), kind, root
        self.system = Recorder(root)
        self.trace = Trace(kind, f"life {seed} of {kind!r}", self.system.calls)
        self.ram = in_ram(kind)
        self._saved: dict[int, Tables] = {}
        self._names: dict[str, int] = {}
        self._under_way: tuple[int, str | None] | None = None
        self._made, self._steps = 0, seed * 1000
        widest = er.Table(ROWS, DIM, rule=RULES[0])
        memory = len(KINDS[kind]) * widest.memory_for(SLOTS)
        self._options = {"memory": memory, "keep": KEEP}

    def live(self, acts: int) -> Trace:
        self._begin(0, self.ram if ALONE in self.ram else {})
        self.folder = on(self.system)(on_disk, self.kind, self.root / TABLE, self._options)
        self.trace.mark("done", 0)
        self.tables = all_tables_in(self.folder, self.kind)
        for name in ("train", "commit", *self.rng.choices(list(ACTS), list(WEIGHTS.values()), k=acts), "reopen"):
            ACTS[name](self)
        self._close()
        return self.trace

    def _begin(self, commit: int, tables: Tables) -> None:
        self._saved[commit] = copy.deepcopy(tables)
        self.trace.mark("begun", commit, contents_from(tables, self.kind))

    def _next(self) -> int:
        """Return the number of the next commit, once the one in the background has ended."""
        files_of(self.folder).end_commit()
        if self._under_way is not None:
            self._done(*self._under_way)
        return self.folder.last_commit + 1

    def _done(self, commit: int, name: str | None) -> None:
        self._under_way = None
        self.trace.mark("done", commit)
        if name is not None:
            self._names[name] = commit
            self.trace.mark("kept", commit)

    def train(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self._steps += 1
            train(self.tables, self._steps)
            train(self.ram, self._steps)

    def commit(self, wait: bool = True, named: bool = False) -> None:
        self._made += 1
        number, name = self._next(), f"number {self._made}" if named else None
        self._begin(number, self.ram)
        assert self.folder.commit(name=name, wait=wait) == number
        if wait:
            self._done(number, name)
        else:
            self._under_way = number, name
            self.train()

    def release(self) -> None:
        self._next()
        if self._names:
            name = self.rng.choice(list(self._names))
            self.trace.mark("released", self._names.pop(name))
            self.folder.release(name)

    def compact(self) -> None:
        number = self._next()
        self._begin(number, self._saved[number - 1])
        if self.folder.compact() == number:
            self._done(number, None)

    def compact_behind(self) -> None:
        stores, draw = files_of(self.folder).table_folder.stores, self.rng.random()
        compact_in_background(self.folder, some_goal(self.rng.choice(stores), draw))
        self.train()

    def rollback(self) -> None:
        number, target = self._next(), self.rng.choice([commit["commit"] for commit in self.folder.commits()])
        self._begin(number, self._saved[target])
        assert self.folder.rollback(target) == number
        self._done(number, None)
        self._go_on_from(target)

    def _go_on_from(self, commit: int) -> None:
        """Take the tables in RAM to what they were at a commit, and check that those on disk are the same."""
        assert contents_of(tables_in(self.folder)) == contents_of(self._saved[commit])
        self.ram = copy.deepcopy(self._saved[commit]) or in_ram(self.kind)
        self.tables = all_tables_in(self.folder, self.kind)

    def _one(self) -> tuple[er.Table, er.Table]:
        """Return a table, and the one in RAM."""
        name = self.rng.choice(list(self.ram))
        return self.tables[name], self.ram[name]

    def change_layout(self) -> None:
        """Give the records another layout, which the next commit has, unless the table is abandoned before."""
        pair = self._one()
        rule = self.rng.choice([rule for rule in RULES if rule != pair[1].rule])
        for table in pair:
            table.set_rule(rule, reset_state=True)
        self.train()

    def grow(self) -> None:
        """Get more rows, or open ids, which the next commit has, unless the table is abandoned before."""
        pair = self._one()
        if (before := pair[1].rows) is not None:
            rows = self.rng.choice([before + 1, 3 * ROWS + before, None])
            for table in pair:
                table.grow(rows)
        self.train()

    def reopen(self, abandoned: bool = False) -> None:
        if not abandoned:
            self.commit()
        number = self._next()
        self._close()
        self.folder = on(self.system).open(self.root / TABLE, **self._options)
        self._go_on_from(number - 1)

    def _close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", er.UncommittedWarning)
            self.folder.close()


ACTS: dict[str, Callable[[Life], None]] = {
    "train": Life.train,
    "commit": Life.commit,
    "commit behind": lambda life: life.commit(wait=False),
    "named commit": lambda life: life.commit(named=True),
    "named behind": lambda life: life.commit(wait=False, named=True),
    "release": Life.release,
    "compact": Life.compact,
    "compact behind": Life.compact_behind,
    "rollback": Life.rollback,
    "lay out": Life.change_layout,
    "grow": Life.grow,
    "reopen": Life.reopen,
    "abandon": lambda life: life.reopen(abandoned=True),
}
WEIGHTS = dict.fromkeys(ACTS, 1) | {"train": 3, "commit behind": 3, "commit": 2, "compact behind": 2}


# ---------------------------------------------------------------- states


class State(NamedTuple):
    """One thing that a crash can leave.

    Attributes:
        point: calls that were made before.
        law: by which some of them are lost.
        disk: what is there.
    """

    point: int
    law: str
    disk: Disk


def state_of(trace: Trace, number: int) -> State:
    """Return a state by its number: every call in turn, by every law in turn, with what is lost drawn anew."""
    rng, points = random.Random(number), len(trace.calls) - trace.begins
    point = trace.begins + 1 + number * 7919 % points
    law = list(LAWS)[number % len(LAWS)]
    return State(point, law, made(LAWS[law](trace.calls[:point], rng)))


class Explorer:
    """Checks states, and counts them.

    Args:
        root: an empty folder.

    Attributes:
        seen: states that were checked, by what is on the disk and what was promised.
    """

    def __init__(self, root: Path) -> None:
        self._root, self.seen = root, set[int]()

    def explore(self, trace: Trace, number: int) -> None:
        """Check a state of a trace, and for some numbers what is left when the power is lost again on recovery."""
        recovery = self._check_new(trace, number)
        if recovery is not None and number % AGAIN == 0 and len(recovery.calls) > recovery.begins:
            for again in range(RECOVERIES):
                self._check_new(recovery, number + again)

    def _check_new(self, trace: Trace, number: int) -> Trace | None:
        """Check a state unless it was seen before; return what was done to recover."""
        state = state_of(trace, number)
        key = hash((frozenset(state.disk.items()), trace.promise(state.point)))
        if key in self.seen:
            return None
        self.seen.add(key)
        try:
            return self.check(trace, state)
        except BaseException as error:
            last = trace.calls[state.point - 1]
            error.add_note(f"{trace.name}, after call {state.point - 1} ({_told(last)}), {state.law}")
            raise

    def check(self, trace: Trace, state: State) -> Trace:
        """Open what a crash has left, and go on. Returns what was done."""
        put(state.disk, self._root)
        system = Recorder(self._root, state.disk)
        recovery = Trace(trace.kind, f"recovery in {trace.name}", system.calls, len(system.calls))
        try:
            recover(trace, state.point, recovery, self._root / TABLE, system)
        finally:
            for path in self._root.iterdir():
                shutil.rmtree(path)
        return recovery


def recover(trace: Trace, point: int, recovery: Trace, path: Path, system: System) -> None:
    """Open what a crash has left, compare it with what was promised, and train and commit it."""
    options, is_new = {"memory": MEMORY, "keep": KEEP}, False
    try:
        folder = on(system).open(path, **options)
    except er.TableFileError:
        assert trace.acknowledged(point) < 0, "there is no table"
        folder, is_new = on(system)(on_disk, trace.kind, path, options), True
    with folder:
        commit = folder.last_commit
        contents = trace.contents_at(commit, point)
        numbers = [each["commit"] for each in folder.commits()]
        of_all = {number: trace.contents_of(number, point) for number in numbers}
        recovery.found(commit, trace.kept(point), of_all, is_new)
        check_folder(folder, contents[0])
        verdict = folder.verify()
        assert (verdict.problems, verdict.newest_good) == ([], commit), verdict
        check_commits(path, folder, trace, point, system)
        check_changes(folder, trace, point)
        train_on(all_tables_in(folder, trace.kind))
        recovery.mark("begun", commit + 1, contents[1:])
        assert folder.commit() == commit + 1
        recovery.mark("done", commit + 1)
        check_changes(folder, recovery, len(recovery.calls))
    check_commit(path, commit + 1, contents[1], system)


def check_commit(path: Path, commit: int, expected: Contents, system: System) -> None:
    with on(system).open(path, mode="r", at=commit, memory=MEMORY) as folder:
        check_folder(folder, expected)


def check_folder(folder: er.Table | er.Group, expected: Contents) -> None:
    assert contents_of(tables_in(folder)) == expected, f"commit {folder.last_commit} has another content"
    assert folder.stats()["rows_touched"] == sum(len(content.ids) // 8 for content in expected.values())


def check_commits(path: Path, folder: er.Table | er.Group, trace: Trace, point: int, system: System) -> None:
    """Fail unless the folder has the files of its commits and no others, and one more of these can be opened."""
    numbers = [commit["commit"] for commit in folder.commits()]
    assert trace.kept(point) <= set(numbers), "a commit that has a name is lost"
    manifests = [json.loads(file.read_bytes().splitlines()[0]) for file in (path / "manifest").glob("*.json")]
    assert len(manifests) == len(numbers)
    named = {part["file"]: part["size"] for each in manifests for part in files_named_in(each)}
    found = {str(file.relative_to(path)): file.stat().st_size for kind in FILES for file in path.glob(f"{kind}/**/*.*")}
    assert found.items() >= named.items(), "a file that a commit names is missing"
    assert found == named, f"{found.keys() - named.keys()} should have been removed"
    older = numbers[point % len(numbers)]
    if older != folder.last_commit:
        check_commit(path, older, trace.contents_of(older, point)[0], system)


def check_changes(folder: er.Table | er.Group, trace: Trace, point: int) -> None:
    """Fail unless changes since some commits name all rows that differ, or are refused in words."""
    now, last = contents_of(tables_in(folder)), folder.last_commit
    for since in {last, max(last - 1, 0), point % (last + 1)}:
        known = [mark.contents[0] for mark in trace.known("begun", point) if mark.commit == since]
        for name, table in tables_in(folder).items() if known else ():
            try:
                changes = [*table.changes(since)]
            except (er.HistoryDroppedError, er.UnsupportedError):
                continue
            check_named(known[-1].get(name), now[name], changes)


def check_named(before: Content | None, now: Content, changes: list[Any]) -> None:
    """Fail unless changes have every row whose record differs, and say which of them have none."""
    old, new = ({} if content is None else records_in(content) for content in (before, now))
    named = {int(row) for ids, *_ in changes for row in ids}
    gone = {int(row) for *_, ids in changes for row in ids}
    missing = {row for row in old.keys() | new.keys() if old.get(row) != new.get(row)} - named - gone
    assert not missing, f"rows {missing} changed, and no list says so"
    assert named <= new.keys()
    assert gone.isdisjoint(new)


def records_in(content: Content) -> dict[int, bytes]:
    ids = np.frombuffer(content.ids, np.int64).tolist()
    width = len(content.records) // max(len(ids), 1)
    return {row: content.records[place * width : (place + 1) * width] for place, row in enumerate(ids)}


def files_named_in(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Go through the files that a manifest names: of a table alone, or of the pools and members of a group."""
    for one in (manifest, *manifest.get("pools", ()), *manifest.get("members", ())):
        for kind in FILES:
            yield from one.get(kind, ())


FILES = ("base", "delta", "history")


def _told(call: Call) -> str:
    return f"Write to {call.file} at {call.offset}, {len(call.data)} bytes" if isinstance(call, Write) else repr(call)


# ---------------------------------------------------------------- programs


@contextmanager
def folder_in_ram() -> Iterator[Path]:
    """Make a folder, and remove it at the end."""
    with tempfile.TemporaryDirectory(dir=RAM if os.access(RAM, os.W_OK) else None) as name:
        yield Path(name)


def recorded_life(seed: int, kind: str, acts: int) -> Trace:
    with folder_in_ram() as root, cut_small():
        return Life(seed, kind, root).live(acts)


def explore_life(trace: Trace, states: int, kept_at: Path) -> int:
    """Check states of a life, and return how many there were; a life of which one is bad is kept in a file."""
    with folder_in_ram() as root:
        explorer = Explorer(root)
        for number in range(states):
            try:
                explorer.explore(trace, number)
            except BaseException as error:
                kept_at.write_bytes(pickle.dumps(trace))
                error.add_note(f"{trace.name}; again: PYTHONPATH=src:tests python {__file__} {kept_at} {number}")
                raise
        return len(explorer.seen)


def main(life: str, number: str) -> None:
    trace = pickle.loads(Path(life).read_bytes())
    with folder_in_ram() as root:
        Explorer(root).explore(trace, int(number))
    print("nothing is wrong with it")


if __name__ == "__main__":
    main(*sys.argv[1:])
