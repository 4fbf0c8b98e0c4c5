"""Folders that somebody else has prepared: nothing outside of them is written, and one error says what is there."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import TableFileError
from embedrock.io.vfs import OS_SYSTEM
from embedrock.store.history import read_history, write_history

PRECIOUS = "precious"
LINKED = {
    "another name of a file": os.link,
    "a symbolic link": os.symlink,
    "no file": lambda _, path: os.mkfifo(path),
    "a folder": lambda _, path: os.mkdir(path),
}


def table(path: Path) -> None:
    with er.Table(100, 4, path=path, rule=er.Adam(dense=True), seed=0, lock=True) as made:
        made.update([1], np.ones((1, 4)))
        made.commit()


def group(path: Path) -> None:
    with er.Group(path=path) as made:
        made.table("users", rows=100, dim=4)
        made.commit()


def vocabulary(path: Path) -> None:
    with er.Vocabulary(path) as made:
        made.add(["red"])
        made.commit()


MADE: dict[str, tuple[Callable[[Path], None], Callable[..., Any], str]] = {
    "table": (table, er.open, "base"),
    "group": (group, er.open, "base"),
    "vocabulary": (vocabulary, er.Vocabulary, "runs"),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("what", LINKED)
def test_a_lock_that_leads_elsewhere(tmp_path: Path, kind: str, what: str):
    make, open_it, _ = MADE[kind]
    make(tmp_path / "a")
    (tmp_path / "victim").write_text(PRECIOUS)
    (tmp_path / "a/LOCK").unlink()
    LINKED[what](tmp_path / "victim", tmp_path / "a/LOCK")
    with pytest.raises(TableFileError, match=f"must be a file with one name: it is {what}. .* move it away") as caught:
        open_it(tmp_path / "a")
    assert (tmp_path / "victim").read_text() == PRECIOUS
    open_it(tmp_path / "a", mode="r").close()
    os.rename(str(caught.value.filename), tmp_path / "moved")  # the remedy
    open_it(tmp_path / "a").close()
    assert (tmp_path / "victim").read_text() == PRECIOUS


@pytest.mark.parametrize("kind", MADE)
def test_a_copy_by_hard_links_has_a_lock_of_its_own(tmp_path: Path, kind: str):
    make, open_it, _ = MADE[kind]
    make(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=os.link)  # cp -al
    before = (tmp_path / "a/LOCK").read_text()
    with open_it(tmp_path / "b"), open_it(tmp_path / "a"):
        assert not os.path.samefile(tmp_path / "a/LOCK", tmp_path / "b/LOCK")
        assert before == (tmp_path / "a/LOCK").read_text()
    shutil.copytree(tmp_path / "a", tmp_path / "c", copy_function=os.link)
    with open_it(tmp_path / "a"), pytest.raises(BlockingIOError):  # a lock that is held is never replaced
        OS_SYSTEM.lock(str(tmp_path / "a/LOCK"), before)


@pytest.mark.parametrize("kind", MADE)
def test_a_lock_that_is_a_link_to_nothing(tmp_path: Path, kind: str):
    make, open_it, _ = MADE[kind]
    make(tmp_path / "a")
    (tmp_path / "a/LOCK").unlink()
    os.symlink(tmp_path / "nothing", tmp_path / "a/LOCK")
    with pytest.raises(TableFileError, match="a symbolic link"):
        open_it(tmp_path / "a")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("what", ["a symbolic link into the table at '.*/b'", "which is not there", "a file"])
def test_a_folder_that_leads_elsewhere(tmp_path: Path, kind: str, what: str):
    make, open_it, name = MADE[kind]
    make(tmp_path / "a")
    table(tmp_path / "b")
    before = sorted(tmp_path.glob("b/**/*"))
    own = tmp_path / "a" / name
    own.rename(tmp_path / "own")
    if what == "a file":
        own.write_text("")
    else:
        own.symlink_to(tmp_path / ("gone" if "not" in what else "b/base"))
    pattern = f"missing|{what}" if kind == "vocabulary" else what  # whose strings are there
    with pytest.raises((TableFileError, er.CorruptTableError), match=pattern):
        open_it(tmp_path / "a")
    assert sorted(tmp_path.glob("b/**/*")) == before
    own.unlink()
    (tmp_path / "own").rename(own)  # the remedy
    open_it(tmp_path / "a").close()


def test_a_folder_that_was_moved_to_another_disk_is_used(tmp_path: Path):
    table(tmp_path / "a")
    (tmp_path / "a/base").rename(tmp_path / "large")
    (tmp_path / "a/base").symlink_to(tmp_path / "large")
    with er.open(tmp_path / "a") as opened:
        opened.update([2], np.ones((1, 4)))
        opened.commit()
        opened.compact()


def test_a_history_that_was_made_up_is_not_read_whole(tmp_path: Path):
    folder, uuid = str(tmp_path), "0" * 32
    (tmp_path / "history").mkdir()
    part = write_history(OS_SYSTEM, folder, "history/1", uuid, {"a": np.arange(5.0)})
    assert read_history(OS_SYSTEM, folder, part, uuid)["a"].tolist() == [0, 1, 2, 3, 4]
    size = 1 << 28
    os.truncate(tmp_path / "history/1", size)  # sparse
    tracemalloc.start()
    with pytest.raises(er.CorruptTableError, match=f"expected {part.size} bytes, got {size}"):
        read_history(OS_SYSTEM, folder, part, uuid)
    with pytest.raises(er.CorruptTableError, match="expected bytes with CRC-32"):
        read_history(OS_SYSTEM, folder, type(part)(part.file, size, part.crc, part.count), uuid)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
