"""A vocabulary on a disk that fails and loses power: no commit is lost, no id changes, and nothing is half done."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import EmbedrockError
from embedrock.io.vfs import File
from embedrock.vocabulary import blocks, files
from on_system import on
from slow import slow
from suites import FaultFS
from suites.faultfs import CHANGES, applies

PATH, MEMORY = "/data/v", "4KiB"  # some 25 strings in RAM
FAULTS = (errno.EIO, errno.ENOSPC, errno.EINTR, "short")
RNG = np.random.default_rng(0)
BATCHES = [[f"{'long ' * (k % 5) * 30}{k}" for k in RNG.integers(0, 60 + 30 * n, 25)] for n in range(7)]
WORDS = list(dict.fromkeys(word for batch in BATCHES for word in batch))  # the id of each is its place
COUNTS = [len({word for batch in BATCHES[: n + 1] for word in batch}) for n in range(len(BATCHES))]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocks, "PIECE_PAGES", 2)
    monkeypatch.setattr(files, "HEAD_BYTES", 4000)


class Life:
    """What a program does with a vocabulary; what fails it does again, on one opened anew where need be."""

    def __init__(self, system: FaultFS) -> None:
        self.system, self.vocabulary = system, None
        self.durable, self.begun, self.errors = 0, 0, list[OSError]()

    def run(self) -> None:
        for n, batch in enumerate(BATCHES):
            self.attempt(lambda batch=batch: self.add(batch))
            if n % 2:
                self.begun = max(self.begun, COUNTS[n])
                self.attempt(lambda n=n: self.make_durable(n, "compact" if n == 5 else "commit"))
        self.close()

    def attempt(self, act: Callable[[], None]) -> None:
        for _ in range(6):
            try:
                act()
            except OSError as error:
                self.errors.append(error)
                if self.vocabulary is not None and "open it again" in str(error):
                    self.close()
                if error.errno == errno.ENOSPC:
                    self.system.mend()
            else:
                return
        raise AssertionError(f"it goes on failing: {self.errors}")

    def opened(self) -> er.Vocabulary:
        if self.vocabulary is None:
            self.vocabulary = on(self.system).Vocabulary(PATH, MEMORY)
        return self.vocabulary

    def add(self, batch: list[str]) -> None:
        assert self.opened().add(batch).tolist() == [WORDS.index(word) for word in batch]

    def make_durable(self, n: int, verb: str) -> None:
        for batch in BATCHES[: n + 1]:  # those that were lost as it was opened anew
            self.add(batch)
        getattr(self.opened(), verb)()
        self.durable = COUNTS[n]

    def close(self) -> None:
        with warnings.catch_warnings(), suppress(OSError):
            warnings.simplefilter("ignore", er.UncommittedWarning)
            if self.vocabulary is not None:
                self.vocabulary.close()
        self.vocabulary = None


def check(system: FaultFS, life: Life) -> None:
    """Open what is there, compare it with what was promised, and go on with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", er.UncommittedWarning)
        with on(system).Vocabulary(PATH, MEMORY) as vocabulary:
            count = len(vocabulary)
            assert life.durable <= count <= max(life.begun, life.durable), f"{count} strings, {system.kind}"
            assert count in (0, *COUNTS)
            assert vocabulary.strings(np.arange(count)).tolist() == WORDS[:count]
            assert vocabulary.lookup(WORDS).tolist() == [k if k < count else -1 for k in range(len(WORDS))]
            vocabulary.verify()
            assert vocabulary.add(WORDS).tolist() == list(range(len(WORDS)))
            vocabulary.commit()
        left = system.listdir(f"{PATH}/runs")
        assert len(left) == vocabulary_files(system), "files that nothing needs stay"


def vocabulary_files(system: FaultFS) -> int:
    with on(system).Vocabulary(PATH, MEMORY, mode="r") as vocabulary:
        return int(vocabulary.stats()["files"])


def new_system() -> FaultFS:
    system = FaultFS()
    system.mkdir("/data")
    system.fsync_folder("/data")
    system.fsync_folder("/")
    return system


def test_the_life_does_what_it_should():
    system = new_system()
    life = Life(system)
    life.run()
    assert life.durable == COUNTS[5]
    assert not life.errors
    assert any("unlink" in call and ".voc" in call for call in system.journal), "nothing was merged"
    check(system, life)


def fail_calls(every: int) -> int:
    """Fail one of so many calls, each in a way of its own, and go on; return how many."""
    journal = new_system()
    Life(journal).run()
    ways = [
        (fault, late) for fault in FAULTS for late in (False, True) if not late or fault in (errno.EIO, errno.ENOSPC)
    ]
    cases = [(op, *way) for op in range(new_system().ops, journal.ops) for way in ways]
    cases = [case for case in cases if applies(case[1], journal.journal[case[0]])][::every]
    for case in cases:
        system = new_system()
        system.fail(*case)
        life = Life(system)
        life.run()
        system.mend()
        assert life.durable == COUNTS[5]
        check(system, life)
    return len(cases)


def lose_power(every: int, seed: int) -> int:
    """Lose power after one of so many calls, in every way, and go on from there; return how many states that gives."""
    system, rng, calls, states = new_system(), np.random.default_rng(seed), 0, 0
    life = Life(system)

    def after(name: str, path: str) -> None:
        nonlocal calls, states
        calls += name in CHANGES
        if name in CHANGES and calls % every == seed % every:
            for clone in system.crash_clones(rng):
                check(clone, life)
                states += 1

    system.after = after
    try:
        life.run()
    finally:
        system.after = None
        life.close()
    return states


def test_calls_that_fail():
    assert fail_calls(every=97) > 5


@pytest.mark.slow
def test_every_call_fails_once_in_every_way():
    assert fail_calls(every=1) > 1000


def test_power_is_lost():
    assert lose_power(every=41, seed=1) > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_power_is_lost_after_every_call(seed: int):
    assert lose_power(every=1, seed=seed) > 500


@pytest.mark.parametrize("end", [".tmp", *slow(".voc", "/runs", "/vocabulary")])
def test_a_sync_that_is_left_out_is_noticed(end: str, monkeypatch: pytest.MonkeyPatch):
    """A check that finds nothing proves nothing."""
    sync, sync_folder = File.sync, FaultFS.fsync_folder
    monkeypatch.setattr(File, "sync", lambda self: None if self.path.endswith(end) else sync(self))
    monkeypatch.setattr(
        FaultFS, "fsync_folder", lambda self, path: None if path.endswith(end) else sync_folder(self, path)
    )
    with pytest.raises((AssertionError, EmbedrockError)):
        lose_power(every=1, seed=0)


def test_a_full_disk_is_told_and_gone_on_with():
    system = new_system()
    vocabulary = on(system).Vocabulary(PATH, MEMORY)
    vocabulary.add(BATCHES[0])
    system.capacity = sum(map(len, system.files().values())) + 5000
    with pytest.raises(er.CommitError, match=r"commit 1 failed: .*Free some space.*Commit 0 is whole, and so are the"):
        vocabulary.commit()
    assert vocabulary.lookup(BATCHES[0]).tolist() == [WORDS.index(word) for word in BATCHES[0]]
    system.mend()
    assert vocabulary.commit() == 1
    vocabulary.close()
    assert len(on(system).Vocabulary(PATH)) == COUNTS[0]


def test_ctrl_c_leaves_it_whole():
    """It may come in the middle of any call of the system: what was added before keeps its ids, and it goes on."""
    journal = new_system()
    Life(journal).run()
    for op in range(new_system().ops, journal.ops, 83):
        system = new_system()
        life = Life(system)

        def interrupt(name: str, path: str, system: FaultFS = system, op: int = op) -> None:
            if system.ops >= op and name != "close":
                system.before = None
                raise KeyboardInterrupt

        system.before = interrupt
        try:
            life.run()
        except KeyboardInterrupt:
            life.attempt(lambda life=life: life.make_durable(4, "commit"))
            life.begun = COUNTS[-1]  # what was added before is committed with it
        system.before = None  # by another salt, it may have made fewer calls
        life.close()
        check(system, life)


# ---------------------------------------------------------------- a vocabulary and a table


def train(words: er.Vocabulary, table: er.Table, batches: range, commit_every: int) -> None:
    """Train a table with strings, and commit both, the vocabulary first."""
    for n in batches:
        ids = words.add(BATCHES[n])
        table.update(ids, np.full((len(ids), 2), 0.1 * (n + 1), np.float32))
        if (n + 1) % commit_every == 0:
            words.commit()
            table.commit(step=n + 1)


def test_a_table_finds_its_strings_after_a_crash():
    resume_after_crashes(5)


@pytest.mark.slow
def test_a_table_finds_its_strings_after_any_crash():
    resume_after_crashes(150)


def resume_after_crashes(most: int) -> None:
    """The vocabulary knows what the table's last commit knows, and a resumed run ends at the bits of a whole one."""
    whole = er.Table(None, 2, rule=er.Adam(lr=0.1), seed=3)
    train(er.Vocabulary(), whole, range(6), 99)
    expected = whole.lookup(np.arange(COUNTS[5]))
    system, rng, clones = new_system(), np.random.default_rng(0), list[FaultFS]()

    def opened(system: FaultFS) -> tuple[er.Vocabulary, er.Table]:
        table = on(system).Table(None, 2, rule=er.Adam(lr=0.1), seed=3, path="/data/t", memory="1MiB")
        return on(system).Vocabulary(PATH, MEMORY), table

    words, table = opened(system)
    begun = system.ops
    system.after = lambda name, path: clones.extend(list(system.crash_clones(rng))[system.ops % 9 :: 9])
    train(words, table, range(6), 2)
    system.after = None
    words.close(), table.close()
    assert system.ops - begun > 50
    for clone in clones[:: max(1, len(clones) // most)]:
        words, table = opened(clone)
        step = table.commits()[-1]["step"] or 0
        assert len(words) >= (COUNTS[step - 1] if step else 0)  # each row of the table has its string
        train(words, table, range(step, 6), 2)
        assert words.strings(np.arange(len(words))).tolist() == WORDS[: COUNTS[5]]
        assert np.array_equal(table.lookup(np.arange(COUNTS[5])), expected)
        words.close(), table.close()


# ---------------------------------------------------------------- processes that are killed

PROGRAM = """
import sys, embedrock as er
words, k = er.Vocabulary(sys.argv[1], memory="64KiB"), 0
while True:
    words.add([f"word {n}" for n in range(37 * k, 37 * k + 100)])
    k += 1
    words.commit() if k % 3 else words.compact()
    print(len(words), flush=True)
"""


@pytest.mark.slow
def test_killed_processes_lose_nothing(tmp_path: Path):
    rng, kills = np.random.default_rng(0), 25
    for _ in range(kills):
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, tmp_path / "v"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        told = [program.stdout.readline()]
        time.sleep(rng.random() * 0.3)
        os.kill(program.pid, signal.SIGKILL)
        rest, errors = program.communicate()
        assert "Error" not in errors
        told += rest.splitlines()
        durable = max(int(line) for line in told if line.strip())
        with er.Vocabulary(tmp_path / "v") as vocabulary:
            assert len(vocabulary) >= durable
            count = len(vocabulary)
            assert vocabulary.strings(np.arange(count)).tolist() == [f"word {n}" for n in range(count)]
            vocabulary.verify()


def test_damaged_files_are_told(tmp_path: Path):
    """Whatever byte is changed: what is read is what was written, or it is an error that names the file."""
    rng, words = np.random.default_rng(0), [f"word {k}" for k in range(2000)]
    with er.Vocabulary(tmp_path / "v") as vocabulary:
        vocabulary.add(words)
        vocabulary.commit()
    there = [path for folder in ("runs", "vocabulary") for path in (tmp_path / "v" / folder).iterdir()]
    caught = 0
    for k in range(150):
        path = there[k % len(there)]
        data = bytearray(path.read_bytes())
        good = bytes(data)
        place = int(rng.integers(0, len(data)))
        data[place] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(data if k % 5 else data[:place])
        error = ""
        try:
            with er.Vocabulary(tmp_path / "v", mode="r", memory=("1KiB", "1GiB")[k % 2]) as vocabulary:
                vocabulary.verify()
                assert vocabulary.lookup(words).tolist() == list(range(2000))
                assert vocabulary.strings(np.arange(2000)).tolist() == words
        except EmbedrockError as raised:
            error = str(raised)
        assert not error or str(tmp_path / "v") in error
        caught += bool(error)
        path.write_bytes(good)
    assert caught > 140
