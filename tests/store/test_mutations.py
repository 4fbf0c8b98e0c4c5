"""Mutated tables: see `mutations.py`. A broken disk never gives other rows, and a forged table crashes nothing.

The slow runs are longer where EMBEDROCK_MUTATIONS says so: 10^6 cases of each kind take some hours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mutation_trials
from embedrock.store import reading
from embedrock.store.segments import Segment
from mutation_trials import Failure, run
from mutations import Case, case_of, images, packed_image
from slow import slow

MANY = int(os.environ.get("EMBEDROCK_MUTATIONS", "20000"))
COUNTS = (100, *slow(MANY))
SUPPORT = Path(mutation_trials.__file__).parent


@pytest.mark.parametrize("count", COUNTS)
def test_a_broken_disk_never_gives_other_rows(count: int):
    assert run("plain", range(count)) == []


@pytest.mark.parametrize("count", COUNTS)
def test_forged_tables_crash_nothing(count: int):
    assert run("sealed", range(count)) == []


@pytest.mark.parametrize("seed", [1191, 2166])  # arrays of several lengths; one with a number for a name
def test_histories_that_were_taken_for_sound(seed: int):
    assert run("sealed", range(seed, seed + 1)) == []


def test_tables_are_what_they_are_before_they_are_mutated():
    for image in (*images(), packed_image()):
        assert mutation_trials.try_case(Case(0, image, image.files, False, []))


def test_mutations_reach_what_is_behind_the_checksums():
    opened = [mutation_trials._read(case_of(seed, True)) for seed in range(60)]
    assert 20 < sum(opened) < 50


def test_a_checksum_that_is_skipped_is_found(monkeypatch: pytest.MonkeyPatch):
    unseal = reading.unseal

    def skipped(*args: Any) -> np.ndarray:
        return unseal(*args)[:0]

    monkeypatch.setattr(reading, "unseal", skipped)
    failures = run("plain", range(60))
    assert any("Wrong: other values in commit" in failure.text for failure in failures)


def test_an_index_that_is_not_checked_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Segment, "_check_index", lambda run, index: None)
    failures = run("sealed", range(400, 430))
    assert failures
    assert "Once more: PYTHONPATH=tests python tests/support/mutation_trials.py sealed" in str(failures[0])


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        ("import os; os.kill(os.getpid(), 11)", "the process died of SIGSEGV"),
        ("import time; time.sleep(99)", "the case took more than 0.5 s"),
        ("b'x' * (99 << 20)", "more bytes of RAM"),
        ("bytearray(999 << 20)", "MemoryError"),
        ("[][0]", "IndexError"),
    ],
)
def test_the_trial_notices(harm: str, text: str, monkeypatch: pytest.MonkeyPatch):
    def try_case(case: Case) -> bool:
        if case.seed == 3 and case.notes:
            exec(harm)
        return True

    monkeypatch.setattr(mutation_trials, "try_case", try_case)
    monkeypatch.setattr(mutation_trials, "_ends_alone", lambda failure: False)  # as it has the true `try_case`
    if "took more" in text:  # a busy machine is slow with all others
        monkeypatch.setattr(mutation_trials, "LONGEST_SECONDS", 0.5)
    (failure,) = run("sealed", range(6))
    assert (failure.kind, failure.seed) == ("sealed", 3)
    assert text in failure.text


def test_a_case_ends_alone_or_dies_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorflow", sys)
    assert mutation_trials._ends_alone(Failure("sealed", 5, "the process died"))
    monkeypatch.setattr(sys, "executable", "false")  # a program that fails
    assert not mutation_trials._ends_alone(Failure("sealed", 5, "the process died"))


def test_a_run_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done = list[int]()

    def note(kind: str, seeds: range) -> list[Failure]:
        done.extend(seeds)
        return [Failure(kind, seed, "bad") for seed in seeds if seed == 7]

    monkeypatch.setattr(mutation_trials, "run", note)
    monkeypatch.setattr(mutation_trials, "CASES_OF_A_CHILD", 4)
    log = tmp_path / "log"
    for stop in (6, 6, 10):
        mutation_trials.run_logged("plain", range(1, stop), log)
    assert done == list(range(1, 10))
    assert [line for line in log.read_text().splitlines() if line.startswith("bad")] == ["bad"]


@pytest.mark.slow
def test_one_case_runs_alone():
    command = [sys.executable, SUPPORT / "mutation_trials.py", "sealed", "5"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(SUPPORT.parent)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    case = case_of(5, True)
    assert done.stdout.splitlines()[0] == case.image.name
    assert done.stdout.splitlines()[-1] in ("opened", "refused")
