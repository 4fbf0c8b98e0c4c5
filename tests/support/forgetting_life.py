"""Tables that are filled, forget, commit, go back, and are killed: what was forgotten must never be seen again.

Each value that a row ever gets is another one, so that whoever sees it knows when it was written. `Book` knows what
each commit holds, and which values were forgotten; `Life` does things to tables, and says so to a book. As a program it
is a server, as `kill_loop.py` is: it forks a child for each line of JSON on stdin, the arguments of `run`, which says
to stdout what it does, for a book elsewhere, until it is killed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import embedrock as er
from embedrock.io.vfs import OS_SYSTEM, System
from format_reader import read_group, read_table
from kill_loop import Deadly, cut_small, say
from on_system import on
from table_files import compact_in_background, files_of

IDS, DIM = 24, 2
COMES_AND_GOES = {"rows": None, "admission": er.Admission(2), "eviction": er.Eviction(max_rows=1000)}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "alone": {"": {"rows": IDS}},
    "comes and goes": {"": COMES_AND_GOES},
    "group": {"users": {"rows": IDS}, "items": {"rows": IDS}, "words": COMES_AND_GOES},
}
Rows = dict[int, float]  # what the first column of each row is, by id


class Content(NamedTuple):
    """What a commit holds: the tables by name, and the rows of each table."""

    names: dict[str, int]
    rows: dict[int, Rows]

    def copy(self) -> Content:
        return Content(dict(self.names), {table: dict(rows) for table, rows in self.rows.items()})


class Book:
    """What each commit holds, whatever was forgotten since, and which values were forgotten."""

    def __init__(self, kind: str) -> None:
        names = {name: number for number, name in enumerate(KINDS[kind])}
        self.now = Content(names, {number: {} for number in names.values()})
        self.commits = {0: self.now.copy() if kind != "group" else Content({}, {})}
        self.last, self.dead = 0, set[float]()
        self._dying, self._seen = set[float](), dict[tuple[int, int], set[float]]()
        self._begun: tuple[int, Content, set[float]] | None = None

    def assign(self, name: str, ids: list[int], values: list[float]) -> None:
        table = self.now.names[name]
        self.now.rows[table] |= zip(ids, values, strict=True)
        for row, value in zip(ids, values, strict=True):
            self._seen.setdefault((table, row), set()).add(value)

    def forget(self, name: str, ids: list[int]) -> None:
        table = self.now.names[name]
        for row in ids:
            self.now.rows[table].pop(row, None)
            self._dying |= self._seen.get((table, row), set())

    def rename(self, old: str, new: str) -> None:
        self.now.names[new] = self.now.names.pop(old)

    def begin(self, number: int) -> None:
        self._begun = number, self.now.copy(), self._dying
        self._dying = set()

    def begin_compaction(self, number: int) -> None:
        self._begun = number, self.commits[self.last].copy(), set()

    def begin_rollback(self, number: int, target: int) -> None:
        self._begun = number, self.commits[target].copy(), self._dying

    def done(self, number: int) -> None:
        """Note that a commit is there, and nothing is under way any more."""
        if self._begun is not None and number == self._begun[0]:
            _, content, forgotten = self._begun
            self.commits[number], self.last = content, number
            self.dead |= forgotten
        self._begun = None

    def back(self) -> None:
        """Go on from the last commit: after a rollback, or a kill."""
        self.now, self._dying = self.shown(self.last), set()

    def found(self, number: int) -> None:
        """Take what a killed process has left, where the newest commit is of that number."""
        possible = {self.last, *([] if self._begun is None else [self._begun[0]])}
        assert number in possible, f"commit {number} was found, and {possible} were possible"
        self.done(number)
        self.back()

    def shown(self, number: int) -> Content:
        """Return what a commit shows."""
        names, rows = self.commits[number]
        kept = {table: {row: v for row, v in own.items() if v not in self.dead} for table, own in rows.items()}
        return Content(dict(names), kept)


def tables_of(folder: er.Table | er.Group) -> dict[str, er.Table]:
    return {"": folder} if isinstance(folder, er.Table) else {name: folder[name] for name in folder}


def shown_by(folder: er.Table | er.Group) -> dict[str, Rows]:
    """Return what tables show, by export; by lookup of all ids it is the same."""
    found = dict[str, Rows]()
    for name, table in tables_of(folder).items():
        ids, values = table.export()
        found[name] = dict(zip(ids.tolist(), values[:, 0].tolist(), strict=True))
        looked_up = table.lookup(np.arange(IDS))[:, 0]
        np.testing.assert_array_equal(looked_up, [found[name].get(row, 0.0) for row in range(IDS)])
        assert table.stats()["rows_touched"] == len(ids)
    return found


def check(path: Path, book: Book, system: System = OS_SYSTEM) -> int:
    """Fail unless each commit shows what it should; return how many rows are withheld."""
    with on(system).open(path, mode="r") as newest:
        numbers, withheld = [each["commit"] for each in newest.commits()], 0
        assert newest.verify().problems == []
    assert numbers[-1] == book.last
    for number in numbers:
        content = book.shown(number)
        wanted = {name: content.rows[table] for name, table in content.names.items()}
        with on(system).open(path, mode="r", at=number) as reader:
            assert shown_by(reader) == wanted, f"commit {number}"
            withheld += int(reader.stats().get("rows_withheld", 0))
        if system is OS_SYSTEM:  # by the description of the format alone
            is_group = isinstance(newest, er.Group)
            told = {"": read_table(path, number)} if not is_group else read_group(path, number)
            assert {name: sorted(rows) for name, (_, rows) in told.items()} == {
                name: sorted(rows) for name, rows in wanted.items()
            }
    return withheld


class Life:
    """Things that are done to tables in a folder."""

    def __init__(self, path: Path, kind: str, draw: int, first_value: int, book: Any, system: System) -> None:
        self.path, self.kind, self.book, self.system = path, kind, book, system
        self.rng, self.value, self._made = random.Random(draw), first_value, 0
        self._under_way: int | None = None
        self.open()

    def open(self) -> None:
        self.keep = self.rng.choice([1, 2, 5])
        how = {"memory": "4MiB", "keep": self.keep}
        if self.kind == "group":
            self.folder = on(self.system).Group(path=self.path, **how)
            for name, options in KINDS["group"].items() if not len(self.folder) else ():
                self.folder.table(name, dim=DIM, init=er.Zeros(), rule=er.SGD(lr=0.1), **options)
        else:
            arguments = {**KINDS[self.kind][""], "dim": DIM, "init": er.Zeros(), "rule": er.SGD(lr=0.1)}
            self.folder = on(self.system).Table(path=self.path, **arguments, **how)

    def _some(self) -> tuple[str, er.Table, list[int]]:
        name = self.rng.choice(list(tables_of(self.folder)))
        ids = self.rng.sample(range(IDS), self.rng.randint(1, 6))
        return name, tables_of(self.folder)[name], sorted(ids)

    def assign(self) -> None:
        name, table, ids = self._some()
        values = [float(self.value + k) for k in range(1, 1 + len(ids))]
        self.value += len(ids)
        self.book.assign(name, ids, values)
        table.assign(ids, np.repeat(np.array(values, np.float32)[:, None], DIM, axis=1))

    def forget(self) -> None:
        name, table, ids = self._some()
        self.book.forget(name, ids)
        table.forget(ids)

    def rename(self) -> None:
        if isinstance(self.folder, er.Group):
            self._made += 1
            old, new = self.rng.choice(list(self.folder)), f"table {self.value} {self._made}"
            self.book.rename(old, new)
            self.folder.rename(old, new)

    def _settle(self) -> int:
        """Return the number of the next commit, once the one in the background has ended."""
        files_of(self.folder).end_commit()
        if self._under_way is not None:
            self.book.done(self._under_way)
            self._under_way = None
        return self.folder.last_commit + 1

    def commit(self, named: bool = False, wait: bool = True) -> None:
        number = self._settle()
        self.book.begin(number)
        self.folder.commit(name=f"number {number}" if named else None, wait=wait)
        self._under_way = number
        if wait:
            self._settle()

    def commit_behind(self) -> None:
        self.commit(wait=False, named=self.rng.random() < 0.5)
        self.forget()
        self.assign()

    def compact(self) -> None:
        number = self._settle()
        self.book.begin_compaction(number)
        self.book.done(self.folder.compact())

    def compact_behind(self) -> None:
        compact_in_background(self.folder)
        self.assign()

    def rollback(self) -> None:
        number, commits = self._settle(), [each["commit"] for each in self.folder.commits()]
        if self.kind == "group":  # its first commit has no tables
            commits = [each for each in commits if each]
        if commits:
            target = self.rng.choice(commits)
            self.book.begin_rollback(number, target)
            self.folder.rollback(target)
            self.book.done(number)
            self.book.back()

    def release(self) -> None:
        self._settle()
        named = [each["name"] for each in self.folder.commits() if each["name"] is not None]
        if named:
            self.folder.release(named[0])

    def reopen(self) -> None:
        """Close the tables, with a commit or without, and open them again."""
        if self.rng.random() < 0.7 or not self.folder.last_commit:
            self.commit()
        number = self._settle() - 1
        self.close()
        self.book.found(number)
        self.open()

    def restart(self) -> None:
        """Open the tables again, of which nobody knows what became."""
        self._under_way = None
        self.open()

    def close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", er.UncommittedWarning)
            self.folder.close()


ACTS: dict[str, Callable[[Life], None]] = {
    "assign": Life.assign,
    "forget": Life.forget,
    "commit": Life.commit,
    "named": lambda life: life.commit(named=True),
    "behind": Life.commit_behind,
    "rollback": Life.rollback,
    "compact": Life.compact,
    "compact behind": Life.compact_behind,
    "rename": Life.rename,
    "release": Life.release,
    "reopen": Life.reopen,
}
WEIGHTS = dict.fromkeys(ACTS, 1) | {"assign": 3, "forget": 3, "rollback": 2, "named": 2, "behind": 2}


class Speaker:
    """A book that says everything to another process."""

    def __getattr__(self, verb: str) -> Callable[..., None]:
        return lambda *what: say(json.dumps([verb, *what]))


def run(path: str, kind: str, draw: int, value: int, acts: int, dies_at: int) -> None:
    """Live until killed."""
    if draw % 2:
        cut_small()
    life = Life(Path(path), kind, draw, value, Speaker(), Deadly(dies_at))
    for name in life.rng.choices(list(ACTS), list(WEIGHTS.values()), k=acts):
        ACTS[name](life)
    life.commit()
    life.close()
    say("end")


def warm_up() -> None:
    """Load all kernels, in this process."""
    import tempfile

    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            life = Life(Path(folder) / "t", kind, 1, 0, Book(kind), OS_SYSTEM)
            for act in ("assign", "commit", "forget", "named", "rollback", "assign", "commit", "compact", "reopen"):
                ACTS[act](life)
            life.close()


def child(line: str) -> int:
    if number := os.fork():
        return number
    try:
        run(**json.loads(line))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    warm_up()
    say("ready")
    for line in sys.stdin:
        _, status = os.waitpid(child(line), 0)
        say(f"exit {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
