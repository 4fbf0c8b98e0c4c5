"""The command as shells see it: pipes, terminals, encodings, and exit statuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from benchmarks.processes import child_environment
from embedrock.cli import imports
from embedrock.cli.main import DONE, FAILED, INTERRUPTED, main
from embedrock.cli.tables import DAMAGED
from slow import slow

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def made(path: str) -> str:
    with er.Table(9, 2, path=path) as table:
        table.assign([1], np.zeros((1, 2), np.float32))
        table.commit(name="größer")
    return path


def printed(monkeypatch: pytest.MonkeyPatch, encoding: str, *words: str) -> tuple[int, bytes]:
    """Run the command where standard output has an encoding; return its exit status and the bytes there."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding))
    status = main(words)
    return status, out.getvalue()


@pytest.mark.parametrize("words", ["info t.rock", *slow("", "--help", "verify t.rock --json")])
def test_a_reader_that_leaves_gets_no_traceback(words: str):
    made("t.rock")
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "embedrock", *words.split()]
    environment = child_environment()
    environment.pop("PYTHONUNBUFFERED", None)  # with it, argparse itself passes over the reader that left
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env=environment, timeout=300)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (FAILED, b"")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_without_the_letters(encoding: str, monkeypatch: pytest.MonkeyPatch):
    made("täble✓.rock")
    status, told = printed(monkeypatch, encoding, "info", "täble✓.rock")
    assert status == DONE
    assert "\\u2713.rock" in told.decode(encoding)  # the check mark
    assert ("täble" in told.decode(encoding)) == (encoding == "latin-1")


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_path_that_is_no_text(option: list[str], monkeypatch: pytest.MonkeyPatch):
    path = made(os.fsdecode(b"t\xff.rock"))
    status, told = printed(monkeypatch, "utf-8", "info", path, *option)
    assert status == DONE
    assert b"\\udcff.rock" in told


def on_terminal(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """Run the command on a terminal; return its exit status and what it shows."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    with os.fdopen(theirs, "w") as terminal, ThreadPoolExecutor(1) as reader:
        shown = reader.submit(read_all, ours)
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, terminal)
        status = main(words)
        terminal.close()
        return status, shown.result(60).decode()


def read_all(descriptor: int) -> bytes:
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(descriptor, 65536):
            shown += part
    os.close(descriptor)
    return shown


def test_a_terminal_gets_a_bar_and_no_colours(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tqdm", reason="draws the bar")
    np.save("a.npy", np.zeros((1000, 8), np.float32))
    status, shown = on_terminal(monkeypatch, "import", "a.npy", "t.rock")
    assert status == DONE
    bars = [part for part in shown.split("\r") if part.startswith("import a.npy:")]
    assert bars
    assert "/1000 [" in bars[0]  # of 1000 rows; then the time, what is left of it, and rows a second
    assert "rows/s" in bars[0]
    assert "1,000 rows, 8 dim, " in shown
    assert not re.search(r"\x1b\[[0-9;]*m", shown)


def test_the_bar_shows_megabytes_a_second(monkeypatch: pytest.MonkeyPatch):
    notes: list[str] = []

    @contextmanager
    def progress(label: str, total: int, done: int) -> Iterator[Callable[..., None]]:
        yield lambda count, note="": notes.append(note)

    monkeypatch.setattr(imports, "progress", progress)
    np.save("a.npy", np.zeros((1000, 8), np.float32))
    assert main(["import", "a.npy", "t.rock"]) == DONE
    assert notes
    assert all(re.fullmatch(r"[\d.e-]+ MB/s", note) for note in notes), notes


def test_exit_statuses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    documented = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert list(documented) == ["0", "1", "2", "3", "130"]
    made("t.rock")
    assert main(["info", "t.rock"]) == DONE == 0
    assert main(["info", "none.rock"]) == FAILED == 1
    with pytest.raises(SystemExit) as caught:
        main(["info"])
    assert caught.value.code == 2
    next(Path("t.rock/delta").iterdir()).write_bytes(b"damaged")
    assert main(["verify", "t.rock"]) == DAMAGED == 3

    def interrupted(*_: Any, **__: Any):
        raise KeyboardInterrupt

    monkeypatch.setattr(er, "open", interrupted)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    capsys.readouterr()
    assert main(["info", "t.rock"]) == INTERRUPTED == 130
    assert capsys.readouterr().err == "\nembedrock: interrupted\n"


@pytest.mark.parametrize(
    "words", ["info t.rock", "commits t.rock", "verify t.rock", "compact t.rock", "rollback t.rock 1"]
)
def test_json_is_one_object(capsys: pytest.CaptureFixture[str], words: str):
    made("t.rock")
    assert main([*words.split(), "--json"]) == DONE
    assert isinstance(json.loads(capsys.readouterr().out), dict)
