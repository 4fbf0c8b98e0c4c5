"""What a machine can do: measured, kept, read again; and the model of cost that its numbers are for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from embedrock.cli import machines as command
from embedrock.cli.main import main
from embedrock.machine.readers import THREADS
from embedrock.machine.vfs import DIRECT_BYTES
from embedrock.planner import machine as machines
from embedrock.planner.cost import (
    NO_DISK,
    READING,
    SPILLING,
    TERMS,
    WARM_BYTES,
    Disk,
    Taken,
    Work,
    faster,
    fit,
    run_bytes,
    seconds_of,
    terms,
)
from embedrock.planner.machine import Gpu, Machine, MachineFileError, load, save
from embedrock.planner.sharing import Network
from embedrock.store.reading import GAP

DISK = Disk((1, 100), (1e-4, 1e-3), 1e9, 1e9)
CONSTANTS = {name: 10.0 ** -(3 + number % 5) for number, name in enumerate(TERMS)} | {"disk_read": 1.2}
GPU, NETWORK = Gpu("H1", 80 << 30, 2e12, 1e9, 5e10, 4e10), Network(2e-5, 1e9, "gloo")
MACHINE = Machine(
    1.0, 0.5, 2, 1 << 30, 1 << 27, 1e10, {64: 1e8}, {1: 1.0, 2: 1.5}, "/data", DISK, CONSTANTS, (GPU,), NETWORK,
    [(Work(2, 1, 4, 48), Taken(1.0))],
)  # fmt: skip


def works() -> list[Work]:
    random = np.random.default_rng(0)
    made = []
    for k in range(120):
        n, dim, on_disk = int(random.integers(512, 65_536)), int(random.integers(4, 256)), k % 4 > 0
        u, nbytes = n * random.random(), 1e7 * 10 ** (random.random() * (k % 4))
        new, reads, spilled = (
            u * np.sort(random.random(3))[::-1] * (k % 5 > 0, on_disk and k % 3 > 0, on_disk and k % 7 > 0)
        )
        tables, grown = int(random.integers(1, 30)), float(new * random.random() * 4096)
        work = Work(n, u, dim, 12 * dim, new * random.random(), on_disk, reads, spilled, nbytes, nbytes, k % 2 > 0)
        work = work._replace(slots=int(u * (1 + 20 * random.random())), cold=random.random())
        made.append(work._replace(grown_bytes=grown, tables=tables, batch_bytes=tables * n * dim * 4.0))
    return made


def taken_by(work: Work) -> Taken:
    seconds = seconds_of(work, DISK, CONSTANTS)
    return Taken(sum(seconds.values()), *(sum(seconds[name] for name in part) for part in (READING, SPILLING)))


def test_constants_are_found_again_from_what_steps_took():
    found = fit([(work, taken_by(work)) for work in works()], DISK)
    assert found == pytest.approx(CONSTANTS, rel=1e-4)


def test_the_faster_of_two_measurements_is_kept():
    fast, slow = [(Work(1, 1, 4, 48), Taken(one)) for one in (1.0, 2.0)]
    assert faster([fast, slow], [slow, fast]) == [fast, fast]
    assert faster([slow], [fast, fast]) == [slow]  # of another version, which had other runs
    other = Machine(**{**vars(MACHINE), "disk": Disk((1, 100), (2e-4, 5e-4), 2e9, 5e8), "copy": 9e9, "runs": (fast,)})
    joined = Machine(**{**vars(MACHINE), "runs": (slow,)}).joined(other)
    assert joined.disk == Disk((1, 100), (1e-4, 5e-4), 2e9, 1e9)
    assert (joined.copy, joined.runs, joined.constants) == (1e10, [fast], fit([fast], joined.disk))


def test_no_constant_is_negative():
    random = np.random.default_rng(1)
    found = fit([(work, Taken(random.random())) for work in works()], DISK)
    assert all(value >= 0 for value in found.values())
    assert any(found.values())


def test_terms_of_a_step():
    work = Work(100, 60, 8, 96)
    told = terms(work, NO_DISK)
    assert {name: amount for name, amount in told.items() if amount} == {
        "first": 1, "position": 100, "position_byte": 3200, "row": 60, "row_byte": 5760}  # fmt: skip
    on_disk = terms(work._replace(on_disk=True, reads=100, new=20, spilled=30, file_bytes=1e12, tables=4), DISK)
    wanted = "first", "next", "first_disk", "next_disk", "come", "leave", "moved_byte", "spill_byte", "disk_read"
    assert {name: on_disk[name] for name in wanted} == {
        "first": 0.25, "next": 0.75, "first_disk": 0.25, "next_disk": 0.75, "come": 120, "leave": 30,
        "moved_byte": 130 * 96, "spill_byte": 2880, "disk_read": pytest.approx(1e-3, rel=1e-3)}  # fmt: skip
    small = terms(work._replace(on_disk=True, reads=100, file_bytes=1e7, run_bytes=1e7), DISK)
    assert small["disk_read"] == 0 < small["cached_request"] < 100  # in the page cache
    assert small["reader"] == THREADS
    between = terms(work._replace(on_disk=True, reads=100, run_bytes=float(DIRECT_BYTES), is_written=True), DISK)
    assert 0 < between["disk_read"] < on_disk["disk_read"]  # as a log that has just grown to that
    assert 0 == on_disk["written_read"] < between["written_read"] < 100
    chunks = run_bytes(10**6, 772)
    assert chunks < DIRECT_BYTES < run_bytes(10**8, 772)  # a compacted table has files of many sizes
    assert terms(work._replace(on_disk=True, reads=100, file_bytes=1e9, run_bytes=chunks), DISK)["disk_read"] == 0


def test_room_is_made_for_rows_that_are_read_and_for_those_that_are_new():
    both = Work(100, 60, 8, 96, new=20, on_disk=True, reads=30, spilled=50)
    for work, calls in (
        (both, 2),
        (both._replace(new=0.0), 1),
        (both._replace(reads=0.5), 1.5),
        (both._replace(spilled=0.1), 0.1),
    ):
        told = terms(work, DISK)
        assert told["leave_call"] == told["spill_call"] == calls


def test_a_small_cache_is_tried_often_and_few_new_rows_have_one_thread():
    work = Work(100, 1000, 8, 96, new=20, on_disk=True, slots=6400)
    assert [terms(work._replace(slots=slots), DISK)["trial_call"] for slots in (6400, 12_800, 100)] == [3.75, 1.875, 0]
    assert terms(work._replace(on_disk=False), DISK)["trial_call"] == 0
    assert [terms(work._replace(new=new), DISK)["alone_number"] for new in (20, 2000)] == [160, 0]


def test_a_base_that_was_just_written_is_read_from_the_disk():
    work = Work(1, 1, 8, 96, on_disk=True, reads=100, file_bytes=1e12, run_bytes=6e6, cold=0.5)
    told = terms(work, DISK)
    assert told["disk_read"] == pytest.approx(DISK.read_seconds(50), rel=1e-3)
    assert told["cached_request"] == pytest.approx(100, rel=1e-3)
    log = work._replace(log_reads=40, log_bytes=6e7)
    assert [part.cold for part in log.sources] == [0.5, 0.0]


def test_values_that_the_processors_cache_does_not_hold():
    work = Work(1 << 14, 10, 64, 768, batch_bytes=4.0 * WARM_BYTES)
    assert terms(work, NO_DISK)["cold_byte"] == 0.75 * terms(work, NO_DISK)["position_byte"]


def test_records_close_to_each_other_are_one_request():
    far, close = (Work(1, 1, 8, 96, on_disk=True, reads=1000, file_bytes=size) for size in (1e12, 5e7))
    assert far.requests(GAP) == pytest.approx(1000, rel=1e-3)
    assert 700 < close.requests(GAP) < 730  # of 1000 gaps of 50 KB on average, those of more than 16 KiB
    assert close.bytes_read > far.bytes_read * 0.7


def test_reads_of_a_log_and_of_the_base_are_asked_for_apart():
    base = Work(1, 1, 8, 96, on_disk=True, reads=600, file_bytes=1e9, run_bytes=6e6)
    log = base._replace(reads=400, file_bytes=6e7, run_bytes=6e7, is_written=True)
    work = base._replace(reads=1000, is_written=True, log_reads=400, log_bytes=6e7)
    assert work.sources == (base._replace(log_reads=400, log_bytes=6e7), log._replace(log_reads=400, log_bytes=6e7))
    told, of_base, of_log = (terms(each, DISK) for each in (work, base, log))
    assert (of_base["disk_read"], of_log["cached_request"]) == (0, 0)  # the log is read past the page cache
    assert {name: told[name] for name in READING} == pytest.approx(
        {name: of_base[name] + of_log[name] for name in READING} | {"read_call": 1})  # fmt: skip


def test_seconds_of_reads():
    assert [DISK.read_seconds(n) for n in (0, 0.5, 1, 10, 100, 1000)] == pytest.approx(
        [0, 5e-5, 1e-4, 1e-4 * 10**0.5, 1e-3, 1e-2]
    )


def test_what_is_kept_is_what_was_measured(tmp_path: Path):
    path = save(MACHINE, tmp_path / "sub" / "machine.json")
    assert load(path) == MACHINE
    assert [*path.parent.iterdir()] == [path]
    assert load(tmp_path / "none") is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}', '{"format": 99, "time": 1}', "\x00"])
def test_a_file_of_something_else(tmp_path: Path, text: str):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(MachineFileError, match=r"cannot be read .*Measure anew: embedrock machine --again\."):
        load(path)
    assert path.read_text() == text


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machines, "cache_file", lambda: tmp_path / "machine.json")
    measured = []
    monkeypatch.setattr(machines, "measure", lambda folder, say: (measured.append(folder), MACHINE)[1])
    monkeypatch.setattr(command, "_same_disk", lambda where, other: True)
    return tmp_path / "machine.json"


def test_the_command_measures_once(kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert main(["machine", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first == json.loads(json.dumps(MACHINE.to_json()))
    monkeypatch.setattr(machines, "measure", None)
    assert main(["machine"]) == 0
    shown = capsys.readouterr().out
    assert "10,000/s 1 at once, 100,000/s 100 at once, of 4 KiB" in shown
    assert shown.endswith(f"{kept}\n")


def test_the_command_measures_once_more(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert main(["machine"]) == 0
    faster_disk = Machine(**{**vars(MACHINE), "disk": Disk((1, 100), (5e-5, 2e-3), 1e9, 1e9)})
    monkeypatch.setattr(machines, "measure", lambda folder, say: faster_disk)
    assert main(["machine", "--more"]) == 0
    assert load(kept) == MACHINE.joined(faster_disk) != MACHINE
    assert "20,000/s 1 at once, 100,000/s 100 at once" in capsys.readouterr().out


def test_a_busy_machine_is_told():
    assert "busy" not in machines.told(MACHINE)["cores"]
    busy = Machine(**{**vars(MACHINE), "load": 4.5})
    assert machines.told(busy)["cores"].endswith("; busy, with a load of 4.5: measure again")


def test_no_folder(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["machine", "/no/such/folder"])
    assert "must be a folder that exists: got '/no/such/folder'" in capsys.readouterr().err


@pytest.mark.slow
def test_measuring_leaves_nothing(tmp_path: Path):
    said: list[str] = []
    found = machines.measure(tmp_path, said.append)
    assert not [*tmp_path.iterdir()]
    assert said[:2] == ["memory", "disk"]
    assert set(found.constants) == set(TERMS)
    assert found.copy > 0 < found.disk.append
    assert Machine.of_json(json.loads(json.dumps(found.to_json()))) == found
