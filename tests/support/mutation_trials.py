"""What becomes of mutated tables: every case is opened, read, exported, verified, trained, committed and opened again.

Cases run in a child process with a limit of memory and of time, so that one that crashes it has a number.

    PYTHONPATH=tests python tests/support/mutation_trials.py plain 17           # runs one case again, here
    PYTHONPATH=tests python tests/support/mutation_trials.py sealed 0 500000 LOG  # many; goes on where LOG ends
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import embedrock as er
from embedrock.store import change_lists
from embedrock.store.verify import verify
from embedrock.table.changed_rows import ChangedRows
from mutations import Case, case_of, images, names_in, packed_image, system_of, table_in
from on_system import on

MEMORY = "256KiB"
MORE_BYTES = 64 << 20  # beyond what the process has when it begins
DATA_BYTES = 256 << 20  # of address space that is written to, with stacks of threads
MORE = "more bytes of RAM"
SUDDEN = "the process died", "the case took"
LONGEST_SECONDS = 60.0
CASES_OF_A_CHILD = 2000
WRITTEN = 4  # one case in so many that can be opened is trained and committed too


class Failure(NamedTuple):
    """What must not have happened.

    Attributes:
        kind: "plain" or "sealed".
        seed: of the case.
        text: what happened.
    """

    kind: str
    seed: int
    text: str

    def __str__(self) -> str:
        command = f"PYTHONPATH=tests python tests/support/mutation_trials.py {self.kind} {self.seed}"
        return f"{self.text}\nOnce more: {command}"


class Wrong(AssertionError):
    """Rows that are not those of the table."""


def tried(action: Callable[[], Any]) -> Any:
    """Return what an action returns; None where it is refused. Whatever else it raises is a failure."""
    try:
        return action()
    except er.EmbedrockError as error:
        str(error).encode("utf-8", "backslashreplace")
        return None


def try_case(case: Case) -> bool:
    """Do everything with a case, and return whether it could be opened. Raises what is no error of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        was_open = _read(case)
        tried(lambda: verify(system_of(case.files), "/t"))
        if was_open and case.seed % WRITTEN == 0:
            _write(case)
    return was_open


def _read(case: Case) -> bool:
    opened = tried(lambda: on(system_of(case.files)).open("/t", mode="r", memory=MEMORY))
    if opened is None:
        return False
    with opened:
        for name in names_in(opened):
            table = tried(lambda name=name: table_in(opened, name))
            if table is not None:
                _read_table(case, name, table)
        tried(opened.commits)
    return True


def _read_table(case: Case, name: str, table: er.Table) -> None:
    asked = _ids_for(case, name, table)
    found = tried(lambda: table.lookup(asked))
    for row in asked[::7] if found is None else ():
        part = tried(lambda row=row: table.lookup([row]))
        _check(case, name, table, np.array([row]), part)
    _check(case, name, table, asked, found)
    exported = tried(table.export)
    if exported is not None:
        _check(case, name, table, *exported)
        _check_sound(table, *exported)
    tried(lambda: sum(len(ids) for ids, _ in table.export_batches(7)))
    for since in (None, *range(table.last_commit + 1)):
        changes = tried(lambda since=since: [*table.changes(since)])
        if changes is not None:
            _check_changes(case, name, table, since, changes)


def _check_changes(case: Case, name: str, table: er.Table, since: int | None, changes: list[Any]) -> None:
    """Check the rows that were told, that no row is told twice, and that a plain mutation hides no changed row."""
    none = ChangedRows(np.empty(0, np.int64), np.empty((0, table.dim), np.float32), np.empty(0, np.int64))
    ids, rows, gone = map(np.concatenate, zip(none, *changes, strict=True))
    _check(case, name, table, ids, rows)
    told = np.sort(np.concatenate([ids, gone]))
    if not np.all(told[:-1] < told[1:]):
        raise Wrong(f"changes that repeat since {since}: {told[:9]}")
    before, now = (case.image.rows.get(number or 0, {}).get(name) for number in (since, table.last_commit))
    if case.sealed or before is None or now is None:
        return
    differ = case.image.asked[name][(before.view(np.uint32) != now.view(np.uint32)).any(axis=1)]
    if not np.isin(differ, told).all():
        raise Wrong(f"changes since {since} that are not told: {np.setdiff1d(differ, told)[:9]}")


def _ids_for(case: Case, name: str, table: er.Table) -> np.ndarray:
    """Return ids that a table has; a forged one may have another name."""
    asked = case.image.asked.get(name, np.arange(9))
    return asked if table.rows is None else asked[asked < table.rows]


def _check(case: Case, name: str, table: er.Table, ids: np.ndarray, weights: np.ndarray | None) -> None:
    """Check that a plain mutation has returned the rows of the commit."""
    if case.sealed or weights is None:
        return
    expected, asked = case.image.rows.get(table.last_commit, {}).get(name), case.image.asked[name]
    if expected is None:
        raise Wrong(f"a commit {table.last_commit} that never was")
    places = np.searchsorted(asked, ids)
    if not np.array_equal(asked[np.minimum(places, len(expected) - 1)], ids):
        raise Wrong(f"ids that the table does not have, among {ids[:9]}")
    wrong = ids[(expected[places].view(np.uint32) != weights.view(np.uint32)).any(axis=1)]
    if len(wrong):
        raise Wrong(f"other values in commit {table.last_commit}, of ids {wrong[:9]}")


def _check_sound(table: er.Table, ids: np.ndarray, weights: np.ndarray) -> None:
    """Check what holds of every table, forged or not: it has each row once, and no others than it says."""
    if not np.all(ids[:-1] < ids[1:]):
        raise Wrong(f"rows that repeat: {ids[:-1][ids[:-1] >= ids[1:]][:9]}")
    if table.rows is not None and len(ids) and not 0 <= ids[0] <= ids[-1] < table.rows:
        raise Wrong(f"rows {ids[0]} to {ids[-1]} of a table of {table.rows}")
    again = tried(lambda: table.lookup(ids))
    if again is not None and (again.view(np.uint32) != weights.view(np.uint32)).any():
        raise Wrong("rows that are exported as others than they are looked up")


def _write(case: Case) -> None:
    system, problems = system_of(case.files), list[str]()
    former, threading.excepthook = threading.excepthook, lambda told: problems.append(repr(told.exc_value))
    try:
        opened = tried(lambda: on(system).open("/t", memory=MEMORY))
        if opened is not None:
            try:
                with mock.patch.multiple(change_lists, JOINED=2, SINGLE=3):
                    _train(case, opened)
            finally:
                tried(opened.close)
            reopened = tried(lambda: on(system).open("/t", mode="r", memory=MEMORY))
            if reopened is not None:
                for name, table in _tables_in(reopened):
                    tried(lambda name=name, table=table: table.lookup(_ids_for(case, name, table)[:9]))
                reopened.close()
    finally:
        threading.excepthook = former
    if problems:
        raise Wrong(f"errors in threads: {problems}")


def _tables_in(opened: er.Table | er.Group) -> list[tuple[str, er.Table]]:
    """Return the tables that can be had, by name."""
    found = [(name, tried(lambda name=name: table_in(opened, name))) for name in names_in(opened)]
    return [(name, table) for name, table in found if table is not None]


def _train(case: Case, opened: er.Table | er.Group) -> None:
    batches = [(table, _ids_for(case, name, table)[:5]) for name, table in _tables_in(opened)]
    for table, ids in batches:
        tried(lambda table=table, ids=ids: table.update(ids, np.ones((len(ids), table.dim), np.float32)))
    tried(opened.commit)
    tried(opened.compact)
    _look_up(batches)
    commits = tried(opened.commits) or []
    if commits:
        tried(lambda: opened.rollback(commits[0]["commit"]))
        _look_up(batches)


def _look_up(batches: list[tuple[er.Table, np.ndarray]]) -> None:
    for table, ids in batches:
        tried(lambda table=table, ids=ids: table.lookup(ids))


# ---------------------------------------------------------------- in a child


def run(kind: str, seeds: range) -> list[Failure]:
    """Run cases in children, and return those that failed."""
    for image in (*images(), packed_image()):  # all code is compiled and loaded before there are children
        try_case(Case(0, image, image.files, kind == "sealed", []))
    failures, first = list[Failure](), seeds.start
    while first < seeds.stop:
        last = min(first + CASES_OF_A_CHILD, seeds.stop)
        found, first = _run_child(kind, range(first, last))
        for failure in found:
            # A child may have compiled a kernel, which takes RAM once; a table takes it every time.
            once_more = MORE in failure.text
            failures += _run_child(kind, range(failure.seed, failure.seed + 1))[0] if once_more else [failure]
    return [failure for failure in failures if not (failure.text.startswith(SUDDEN) and _ends_alone(failure))]


def _ends_alone(failure: Failure) -> bool:
    """Return whether a case ends in a process of its own. Locks of TensorFlow's threads may end a forked one."""
    if "tensorflow" not in sys.modules:
        return False
    command = [sys.executable, __file__, failure.kind, str(failure.seed)]
    path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    return not subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True).returncode


def _run_child(kind: str, seeds: range) -> tuple[list[Failure], int]:
    """Run cases in one child; return what failed, and the first one that it did not come to."""
    shared, (reading, writing) = mmap.mmap(-1, 8), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where threads wait, Python 3.12 warns of a fork
        process = os.fork()
    if process == 0:
        os.close(reading)
        os._exit(_serve(kind, seeds, shared, writing))
    os.close(writing)
    status = _watch(process, shared)
    with open(reading, encoding="utf-8") as pipe:
        failures = [Failure(kind, *json.loads(line)) for line in pipe]
    (at,) = struct.unpack("<q", shared)
    if status != 0:
        failures.append(Failure(kind, at, _ending(status)))
        return failures, at + 1
    return failures, seeds.stop


def _ending(status: int | None) -> str:
    if status is None:
        return f"the case took more than {LONGEST_SECONDS:g} s"
    if os.WIFSIGNALED(status):
        return f"the process died of {signal.Signals(os.WTERMSIG(status)).name}"
    return f"the process ended with status {os.WEXITSTATUS(status)}"


def _watch(process: int, shared: mmap.mmap) -> int | None:
    """Wait for a child; kill it, and return None, where it makes no progress."""
    seen, since = b"", time.monotonic()
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return status
        if shared[:] != seen:
            seen, since = shared[:], time.monotonic()
        elif time.monotonic() - since > LONGEST_SECONDS:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(0.01)


def _serve(kind: str, seeds: Iterable[int], shared: mmap.mmap, pipe: int) -> int:
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = _status_bytes("VmData") + DATA_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    allowed = _status_bytes("VmRSS") + MORE_BYTES
    for seed in seeds:
        shared[:] = struct.pack("<q", seed)
        text = _failure_of(kind, seed)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if peak > allowed:
            text, allowed = f"{peak - allowed + MORE_BYTES} {MORE}; {text or ''}", peak + MORE_BYTES
        if text:
            os.write(pipe, (json.dumps([seed, text]) + "\n").encode())
    return 0


def _failure_of(kind: str, seed: int) -> str | None:
    notes = ["it was not made"]
    try:
        case = case_of(seed, kind == "sealed")
        notes = [case.image.name, *case.notes]
        try_case(case)
    except BaseException:
        return f"{'; '.join(notes)[:400]}\n{traceback.format_exc()[-1500:]}"
    return None


def _status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) << 10


# ---------------------------------------------------------------- many


def run_logged(kind: str, seeds: range, log: Path) -> None:
    """Run cases, and note in a file what was done: another call goes on from there."""
    lines = log.read_text().splitlines() if log.exists() else []
    done = [int(line.split()[2]) for line in lines if line.startswith("done to")]
    first, started = max([seeds.start, *done]), time.monotonic()
    with log.open("a") as file:
        for begin in range(first, seeds.stop, CASES_OF_A_CHILD):
            part = range(begin, min(begin + CASES_OF_A_CHILD, seeds.stop))
            for failure in run(kind, part):
                print(failure, file=file)
            rate = (part.stop - first) / (time.monotonic() - started)
            print(f"done to {part.stop} of {kind}, {rate:.0f} cases/s", file=file, flush=True)


if __name__ == "__main__":
    chosen, numbers = sys.argv[1], list(map(int, sys.argv[2:4]))
    if len(numbers) == 1:
        again = case_of(numbers[0], chosen == "sealed")
        print(again.image.name, *again.notes, sep="\n")
        print("opened" if try_case(again) else "refused")
    else:
        run_logged(chosen, range(*numbers), Path(sys.argv[4]))
