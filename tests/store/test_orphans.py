"""What a writer left behind is removed by the next one; what could be anybody else's stays, and is told of."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import EmbedrockError
from embedrock.store import change_lists
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store.segments import make_header
from on_system import on
from slow import slow
from suites import FaultFS
from table_files import files_of, lists_of_commits, store_of

ROWS, DIM = 300, 3
RULE = er.Adam(lr=0.1, dense=True)  # has a history, which is a file of each commit
SEED = 1
PATH = "/data/t"


def made_system() -> FaultFS:
    system = FaultFS()
    system.mkdir("/data")
    return system


def open_table(system: FaultFS, rule: er.Rule = RULE) -> er.Table:
    return on(system).Table(ROWS, DIM, rule=rule, seed=SEED, path=PATH, memory="1MiB", keep=2)


def train(table: er.Table, seed: int, first: int = 0) -> None:
    rng = np.random.default_rng(seed)
    table.update(rng.integers(first, ROWS, 40), rng.standard_normal((40, DIM)).astype(np.float32))


def unnamed(system: FaultFS) -> set[str]:
    """Return the names of all files that no commit names, but the lock, and the list of changes of each commit."""
    names = {path.removeprefix(f"{PATH}/") for path in system.files()} - {"LOCK"}
    commits = {f"manifest/{number:010d}" for number in manifests.numbers(system, PATH)}
    return (
        names
        - folders.named_files(system, PATH)
        - lists_of_commits(system, PATH)
        - {f"{name}{end}" for name in commits for end in (".json", ".released")}
    )


def used(system: FaultFS) -> int:
    return sum(map(len, system.files().values()))


# Where the disk is full: nothing fits, or a log's header does, or some rows do as well, or all but the manifest.
ROOM = (0, 1, 4095, 4096, 4096 + 200, 4 * 4096, 4 * 4096 + 1500)


def is_refused(table: er.Table, wait: bool) -> bool:
    """Commit; return whether the disk was too full for it."""
    try:
        table.commit(wait=wait)
        files_of(table).end_commit()
    except er.CommitError as error:
        return error.errno == errno.ENOSPC
    return False


@pytest.mark.parametrize("rule", [RULE, er.SGD(lr=0.1)], ids=repr)
@pytest.mark.parametrize("room", ROOM)
def test_refused_commits_leave_no_files_behind(room: int, rule: er.Rule) -> None:
    system = made_system()
    with open_table(system, rule) as table:
        train(table, 0)
        table.commit()
        train(table, 1)
        system.capacity = used(system) + room
        refused = sum(is_refused(table, wait=bool(attempt % 3)) for attempt in range(30))
        assert refused or room >= 4096 + 200
        assert len(unnamed(system)) <= 1  # a log that has some of the rows, and goes on
        assert not [path for path, data in system.files().items() if not data and path.endswith(("dlt", "his"))]
        assert len(system.open_files()) < 10
        system.mend()
        table.commit()
        assert table.verify().problems == []
        expected = er.Table(ROWS, DIM, rule=rule, seed=SEED)
        train(expected, 0)
        train(expected, 1)
        np.testing.assert_array_equal(table.lookup(range(ROWS)), expected.lookup(range(ROWS)))


@pytest.mark.parametrize("count", slow(1000))
def test_a_thousand_refused_commits_leave_no_files_behind(count: int) -> None:
    system = made_system()
    with open_table(system) as table:
        train(table, 0)
        table.commit()
        for attempt in range(count):
            train(table, attempt)
            system.capacity = used(system) + ROOM[attempt % 5]
            with pytest.raises(er.CommitError):
                table.commit()
            system.mend()
            assert len(unnamed(system)) <= 1
        table.commit()


def test_what_a_crash_leaves_is_removed_by_the_next_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power is lost after each call that changes something; then the table opens, and has only what commits name."""
    monkeypatch.setattr(change_lists, "JOINED", 2)
    monkeypatch.setattr(change_lists, "SINGLE", 3)
    system, rng, left = made_system(), np.random.default_rng(0), set[str]()

    def crash(_name: str, _path: str) -> None:
        for clone in system.crash_clones(rng):
            try:
                table = on(clone).open(PATH, memory="1MiB")
            except er.TableFileError:
                continue
            with table:
                left.update(unnamed(clone))

    table = open_table(system)
    train(table, 0)
    table.commit(name="first")
    system.after = crash
    train(table, 1)
    table.commit()
    train(table, 2)
    table.compact()
    table.release("first")
    train(table, 3)
    table.commit()
    system.after = None
    table.close()
    assert any(not file.is_single for file in change_lists.files_in(system, PATH, table.uuid))
    assert left == set()


def test_files_that_may_be_somebodys_stay_and_are_told_of(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with er.Table(ROWS, DIM, rule=RULE, seed=SEED, path=path) as table:
        train(table, 0)
        table.commit()
        uuid = files_of(table).table_folder.manifest.uuid
    ours = next((path / "delta").iterdir())
    theirs = {
        "delta/0000000009-1.dlt": make_header("ab" * 16, 28, "delta/0000000009-1.dlt")
        + b"rows" * 99,  # another table's
        f"delta/{ours.name}.bak": ours.read_bytes(),  # a copy that somebody made
        "delta/0000000008-1.dlt": b"my notes",
        "delta/notes.txt": b"",
        "base/mine": b"",
        "history/0000000009-7.his": bytes(9000),
        "history/0000000009-ffffffff-7.his": bytes(9000),
    }
    own = {
        "delta/0000000002-1.dlt": b"",
        f"delta/0000000002-{uuid[:8]}-2.dlt": make_header(uuid, 28, "any")[:700],
        "history/0000000002-3.his": make_header(uuid, 0, "history/0000000002-3.his") + b"torn",
        f"base/0000000002-{uuid[:8]}-4/c0.rows": bytes(9999),
        "manifest/0000000000.released": b"",
        "manifest/.0000000007.tmp": b"{",
    }
    (path / f"base/0000000002-{uuid[:8]}-4").mkdir()
    (path / "base/0000000002-5").mkdir()
    for name, data in (theirs | own).items():
        (path / name).write_bytes(data)
    os.remove(path / "manifest/0000000000.json")
    with er.open(path) as table:
        found = table.verify()
        assert found.problems == []
        assert found.strange == sorted(theirs, key=lambda name: (name.split("/")[0], name))
    assert {name for name in theirs if (path / name).read_bytes() == theirs[name]} == set(theirs)
    assert not [name for name in own if (path / name).exists()]
    assert not list((path / "base").glob("*-*"))
    told = subprocess.run(
        [sys.executable, "-m", "embedrock", "verify", str(path)], capture_output=True, text=True, check=True
    )
    assert "7 files that no commit names" in told.stdout
    assert "delta/0000000008-1.dlt" in told.stdout


def small_disk(folder: Path) -> Callable[[], None]:
    """Mount a file system of 1 MiB, and return what takes it away."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True).returncode:
        pytest.skip("this container may not mount a file system")
    return lambda: subprocess.run(["umount", folder], check=True) and None


def test_a_full_disk_that_is_one(tmp_path: Path) -> None:
    take_away = small_disk(tmp_path / "disk")
    try:
        with er.Table(ROWS, DIM, rule=RULE, seed=SEED, path=tmp_path / "disk/t", memory="1MiB") as table:
            train(table, 0)
            table.commit()
            before = set((tmp_path / "disk").rglob("*"))
            with open(tmp_path / "disk/filler", "wb", buffering=0) as filler:
                try:
                    while True:
                        filler.write(bytes(4096))
                except OSError:
                    pass
            for seed in range(20):
                train(table, seed)
                with pytest.raises(er.CommitError, match="the disk is full"):
                    table.commit()
            assert len(set((tmp_path / "disk").rglob("*")) - before) <= 2  # the filler, and a log that goes on
            os.remove(tmp_path / "disk/filler")
            table.commit()
            assert table.verify().problems == []
    finally:
        take_away()


def open_files(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open, again and again where it has them so."""
    found = list[str]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in found if name.startswith(str(folder)))


def open_wrongly(path: Path, what: str) -> er.Table:
    if what == "rows":
        return er.Table(ROWS + 1, DIM, path=path)
    return er.open(path, mode="x" if what == "mode" else "w")


@pytest.mark.parametrize("what", ["truncated", "missing", "foreign", "mode", "rows", "locked"])
def test_opening_that_fails_leaves_no_file_open(what: str, tmp_path: Path, small_heap: None) -> None:
    path = tmp_path / "t"
    with er.Table(ROWS, DIM, rule=RULE, seed=SEED, path=path) as table:
        train(table, 0)
        table.commit()
        run = path / store_of(table).delta[0].path
    data = run.read_bytes()
    if what == "missing":
        run.unlink()
    elif what == "truncated":
        run.write_bytes(data[:-1])
    elif what == "foreign":
        run.write_bytes(data[:30] + b"x" + data[31:])
    holder = er.open(path) if what == "locked" else None
    before = open_files(path)
    for _ in range(3):  # each looks for tables that nobody has any more
        with pytest.raises((EmbedrockError, OSError)):
            open_wrongly(path, what)
    assert open_files(path) == before
    if holder is not None:
        holder.close()
