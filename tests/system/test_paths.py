"""Addresses in the place of paths: refused by name, everywhere, before a folder "s3:" is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

import embedrock as er
from embedrock.cli.main import main
from embedrock.frontend.references import Relocate, relocation
from embedrock.system.paths import local_path

URLS = {
    "s3://models/users.rock": r"an address in a remote store\. Copy it to a local disk, or mount the store \(s3\)",
    "gs://models/users.rock": r"an address in a remote store\. Copy it",
    "hdfs://host:9000/users.rock": r"an address in a remote store\. Copy it",
    "https://example.org/users.rock": r"an address of another machine or service\. Copy it",
    "file:///data/a%20b/users.rock": r"the address of a local path\. Pass the path itself: '/data/a b/users\.rock'\.",
    "FILE://localhost/data/users.rock": r"the address of a local path\. Pass the path itself: '/data/users\.rock'\.",
    "file://server/users.rock": r"an address of another machine or service\. Copy it",
}
OPENERS: dict[str, Callable[[str], object]] = {
    "Table": lambda path: er.Table(10, 4, path=path),
    "Table to read": lambda path: er.Table(10, 4, path=path, mode="r"),
    "open": er.open,
    "open to read": lambda path: er.open(path, mode="r"),
}


@pytest.fixture(autouse=True)
def nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("url", URLS)
def test_an_address_is_told_by_name(url: str):
    text = f"`path` must be a folder on a disk of this machine: got '{url}', {URLS[url]}"
    with pytest.raises(er.ArgumentError, match=text):
        local_path(url)


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("path", ["s3://users.rock", PurePosixPath("s3://users.rock")], ids=["str", "Path"])
def test_no_table_is_at_an_address(opener: str, path: str):
    with pytest.raises(
        er.ArgumentError, match=r"`path` must be a folder on a disk .* got 's3:/.*mount the store \(s3\)"
    ):
        OPENERS[opener](path)


@pytest.mark.parametrize(
    "path", ["users.rock", "a:b", "C:/users.rock", "./s3://users.rock", "/data/s3://x", "a b/c", "runs:2024/x"]
)
def test_other_paths_are_taken_as_they_are(path: str):
    assert local_path(path) == path


def test_a_home_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(
        er.ArgumentError, match=r"got '~/t\.rock', whose ~ only shells replace\. Pass '/home/me/t\.rock'"
    ):
        er.Table(10, 4, path="~/t.rock")
    assert local_path("~nobody-of-this-name/t.rock") == "~nobody-of-this-name/t.rock"
    (tmp_path / "~").mkdir()
    assert local_path("~/t.rock") == "~/t.rock"
    (tmp_path / "~").rmdir()


@pytest.mark.parametrize("moved", [{"old": "s3://users"}, lambda path: "s3://users"], ids=["mapping", "function"])
def test_no_table_was_moved_to_an_address(moved: Relocate):
    with pytest.raises(
        er.ArgumentError, match=r"`relocate` of ert\.load .* on a disk of this machine: got 's3://users'"
    ):
        relocation("ert.load", moved, ["old"])("old")


def test_a_folder_of_such_a_name_may_be_meant(tmp_path: Path):
    (tmp_path / "runs:").mkdir()
    assert local_path("runs:/users.rock") == "runs:/users.rock"
    (tmp_path / "runs:").rmdir()


COMMANDS = [
    *([name, "s3://users.rock"] for name in ("info", "verify", "commits", "compact")),
    ["rollback", "s3://users.rock", "1"],
    ["export", "s3://users.rock", "users.npy"],
    ["export", "users.rock", "s3://users.npy"],
    ["import", "s3://users.npy", "users.rock"],
    ["import", "users.npy", "s3://users.rock"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_command_line(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "on a disk of this machine: got 's3://users." in capsys.readouterr().err
