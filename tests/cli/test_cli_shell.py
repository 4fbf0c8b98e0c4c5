"""The command as shells see it: pipes, terminals, encodings, and exit statuses."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
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
from embedrock.terminal.progress import Advance
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


def shell(script: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a script, in which `embedrock` is this command."""
    defined = f'embedrock() {{ "{sys.executable}" -m embedrock "$@"; }}\n{script}'
    return subprocess.run(
        ["bash", "-c", defined], capture_output=True, env=child_environment() | environment, timeout=300
    )


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


@pytest.mark.parametrize("encoding", ["latin-1", *slow("ascii")])
def test_a_terminal_without_the_letters(encoding: str):
    made("täble✓.rock")
    done = shell("embedrock info *.rock; embedrock info nö✓.rock", PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert b"Traceback" not in done.stderr, done.stderr.decode(encoding)
    told = done.stdout.decode(encoding)
    assert "\\u2713.rock" in told  # the check mark
    assert ("täble" in told) == (encoding == "latin-1")
    assert "there is no table here" in done.stderr.decode(encoding)


@pytest.mark.parametrize("option", ["", *slow("--json")])
def test_a_path_that_is_no_text(option: str):
    made(os.fsdecode(b"t\xff.rock"))
    done = shell(f"embedrock info t*.rock {option}")
    assert (done.returncode, done.stderr) == (DONE, b"")
    assert b"\\udcff.rock" in done.stdout


def on_terminal(*words: str) -> tuple[int, str]:
    """Run the command on a terminal; return its exit status and what it shows."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    command = [sys.executable, "-m", "embedrock", *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=child_environment()) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(ours)
    return process.returncode, shown.decode()


def test_a_terminal_gets_a_bar_and_no_colours():
    pytest.importorskip("tqdm", reason="draws the bar")
    np.save("a.npy", np.zeros((1000, 8), np.float32))
    status, shown = on_terminal("import", "a.npy", "t.rock")
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
    def progress(label: str, total: int, done: int) -> Iterator[Advance]:
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


def test_commits_tell_who_holds_them(capsys: pytest.CaptureFixture[str]):
    """A commit that a state dict refers to has a name that says so; whoever cleans up can see it."""
    torch = pytest.importorskip("torch", reason="the state dict is PyTorch's")
    import embedrock.torch as ert

    layer = ert.Embedding(9, 2, path="t.rock")
    state = torch.nn.Sequential(layer).state_dict()
    assert state
    layer.table.close()
    assert main(["commits", "t.rock"]) == DONE
    last = capsys.readouterr().out.splitlines()[-1]
    assert "state" in last
