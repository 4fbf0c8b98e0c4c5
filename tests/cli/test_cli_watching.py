"""``embedrock top | report``, and the file of numbers that they read."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.cli import watching
from embedrock.cli.histories import FIELDS as SHOWN
from embedrock.cli.histories import best_split, changes, now, state
from embedrock.cli.main import main
from embedrock.cli.pages import page
from embedrock.system.spans import span
from embedrock.table import numbers, opened
from embedrock.table.numbers import (
    FIELDS,
    HEADER,
    PHASES,
    RECORD,
    SAMPLES,
    PhaseClock,
    StatsFile,
    StatsRing,
    files_in,
    runtime_folder,
)
from slow import slow


@pytest.fixture
def table(tmp_path: Path):
    with er.Table(5000, 4, rule=er.SGD(lr=0.1), path=tmp_path / "u&v.rock", memory="64KiB", seed=0) as made:
        yield made
        made.commit()


@pytest.fixture
def kept(table: er.Table) -> er.Table:
    """A table with three samples, of which the process took one at each of steps 0, 1 and 2."""
    ring = StatsRing(table)
    for k in range(3):
        ring.add({"time": 100.0 + k, "steps": k, "hits": 3 * k, "misses": k, "reads": k, "timed": k / 8,
                  "disk_s": k / 16, "committed": 90.0, "commit": 7})  # fmt: skip
    ring.close()
    return table


def test_samples_are_those_of_the_table(table: er.Table):
    path = Path(f"{table.path}.stats")
    er.keep_stats(0.01)
    try:
        end = time.monotonic() + 30
        ids = np.arange(5000)
        while time.monotonic() < end:
            table.update(ids[:500], table.lookup(ids[:500]))
            if path in files_in(table.path or "") and len(StatsFile.read(path).samples["time"]) > 3:
                break
    finally:
        er.keep_stats(None)
    told, samples = StatsFile.read(path)
    assert (told["table"], told["uuid"]) == (table.path, table.uuid)
    assert 1 <= samples["steps"][-1] <= table.steps
    assert (np.diff(samples["number"]) == 1).all()
    assert samples["budget_bytes"][-1] == 64 << 10
    assert samples["hits"][-1] + samples["misses"][-1] > 0


def test_numbers_change_no_bit(tmp_path: Path):
    def trained(path: Path) -> np.ndarray:
        with er.Table(300, 4, rule=er.Adam(), path=path, memory="64KiB", seed=0) as made:
            for _ in range(20):
                made.update(np.arange(300), made.lookup(np.arange(300)))
            made.commit()
            return made.lookup(np.arange(300))

    plain = trained(tmp_path / "a")
    er.keep_stats(0.01)
    try:
        assert np.array_equal(trained(tmp_path / "b"), plain)
    finally:
        er.keep_stats(None)


@pytest.mark.parametrize("_time", [0, *slow(1, 2)])
def test_a_program_that_leaves_its_tables_open_ends_in_silence(tmp_path: Path, _time: int):
    program = f"""
import numpy as np, embedrock as er
er.keep_stats(every=0.01)
tables = [er.Table(10**6, 4, rule=er.Adam(), path={str(tmp_path)!r} + f"/{{k}}", memory="1MiB") for k in range(8)]
for table in tables:
    table.update([1], np.ones((1, 4)))
    table.commit()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_a_ring_goes_round_and_on(table: er.Table, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numbers, "SAMPLES", 4)
    for first in (0, 5):  # the second is that of a process that came later
        ring = StatsRing(table)
        assert ring.number == first
        for k in range(5):
            ring.add({"steps": first + k})
        ring.close()
    assert StatsFile.read(ring.path).samples["steps"].tolist() == [6, 7, 8, 9]
    assert SAMPLES * RECORD + HEADER < 1.2e6


def test_half_a_sample_is_none(kept: er.Table):
    path = Path(f"{kept.path}.stats")
    data = bytearray(path.read_bytes())
    data[HEADER + 2 * RECORD - 8 : HEADER + 2 * RECORD] = np.float64(99).tobytes()
    path.write_bytes(bytes(data[:-5]))
    assert StatsFile.read(path).samples["steps"].tolist() == [0]


def test_the_file_of_another_table_is_begun_anew(kept: er.Table, tmp_path: Path):
    Path(f"{kept.path}.stats").rename(tmp_path / "w.rock.stats")
    with er.Table(9, 4, path=tmp_path / "w.rock") as other:
        assert StatsRing(other).number == 0
    assert not len(StatsFile.read(tmp_path / "w.rock.stats").samples["time"])


def test_a_clock_takes_what_is_inside_from_what_is_around():
    clock = PhaseClock()
    assert clock("sum") is None
    clock.is_on = True
    around, inside = clock("read"), clock("disk")
    assert around is not None
    assert inside is not None
    with around, inside:
        time.sleep(0.01)
    assert clock.seconds["disk"] >= 0.01 > clock.seconds["read"]


def test_a_rare_phase_counts_while_it_runs_and_once():
    clock = PhaseClock()
    with clock("commit") or contextlib.nullcontext():
        time.sleep(0.01)
        during = clock.read()["commit"]
    after = clock.read()["commit"]
    assert 0.01 <= during <= after == clock.read()["commit"]


def test_numbers_that_cannot_be_written_are_told_once(table: er.Table, monkeypatch: pytest.MonkeyPatch):
    Path(f"{table.path}.stats").mkdir()
    manager = numbers._Recorder(1e6)
    try:
        with pytest.warns(er.StatsWarning, match=r"numbers of table .* are written no more: .*Is a directory"):
            manager.sample()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.sample()
    finally:
        manager.stop()
    with span("sum"):
        assert "sum" not in manager._clock.seconds


@pytest.mark.parametrize("every", [0, -1, True, "1", float("nan")])
def test_seconds_that_cannot_be(every: float):
    with pytest.raises(er.ArgumentError, match=r"`every` of er\.keep_stats must be seconds"):
        er.keep_stats(every)


def test_top(kept: er.Table, capsys: pytest.CaptureFixture[str]):
    assert main(["top", kept.path or "", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["tables"]
    assert (told["table"], told["steps"], told["steps_per_s"], told["hit_rate"], told["commit"]) == (
        "u&v.rock",
        2,
        1,
        0.75,
        7,
    )
    assert told["shares"]["disk"] == 0.5
    assert not told["is_live"]
    assert main(["top", str(Path(kept.path or "").parent), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "u&v.rock, of the time: disk 50% (ended at " in shown


@pytest.mark.parametrize("inside", [True, False])
def test_top_of_the_folder_where_one_is(
    inside: bool, kept: er.Table, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(kept.path if inside and kept.path else Path(kept.path or "").parent)
    assert main(["top", ".", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["tables"]
    assert told["table"] == "u&v.rock"


def test_a_process_that_began_anew_has_no_rate():
    samples = {name: np.array([5.0, 1.0, 2.0]) for name in FIELDS} | {"time": np.array([1.0, 2.0, 3.0])}
    found = changes(samples)
    assert np.isnan(found["steps_per_s"]).tolist() == [True, False]
    assert set(PHASES) < set(found)


class Page(HTMLParser):
    """Notes tags, attributes that fetch something, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.fetched, self.text = [], [], ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_report(kept: er.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 1 table\n"
    read = Page()
    read.feed(out.read_text())
    assert not read.fetched
    assert "script" not in read.tags
    assert read.tags.count("svg") == 5  # steps, hits, reads, shares; commits
    assert (read.tags.count("polyline"), read.tags.count("polygon")) == (4, 1)
    assert "u&v.rock" in read.text
    assert "disk 50.0%" in read.text
    assert "prefers-color-scheme: dark" in read.text


def test_a_report_says_what_and_where_and_shows_values_where_the_pointer_is(kept: er.Table):
    shown = page({"": [StatsFile.read(f"{kept.path}.stats")]})
    told = StatsFile.read(f"{kept.path}.stats").told
    assert "<title>u&amp;v.rock</title>" in shown
    facts = f"5,000 rows · dim 4 · float32 · SGD(lr=0.1) · process {os.getpid()} on {told['host']} · from "
    assert html.escape(str(kept.path)) in shown
    assert facts in shown
    assert " · ended at " in shown
    assert '<text x="76" y="14">0:01:41 h: 1</text>' in shown  # steps a second, at the second sample
    assert '<text x="76" y="14">0:01:42 h: 75.0%</text>' in shown
    assert "disk 50%" in shown


def test_runs_lie_over_each_other(kept: er.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, factor in (("a", 1), ("b", 2)):
        found = StatsFile.read(f"{kept.path}.stats")
        (tmp_path / name).mkdir()
        with er.Table(9, 4, path=tmp_path / name / "u&v.rock") as table:
            ring = StatsRing(table)
            for k, sample in enumerate(zip(*found.samples.values(), strict=True)):
                one = dict(zip(found.samples, sample, strict=True))
                ring.add({**one, "time": 1e9 * factor + k, "steps": one["steps"] * factor}, {"pools": [POOL]})
            ring.close()
    out = tmp_path / "r.html"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 2 tables of 2 runs\n"
    shown = out.read_text()
    read = Page()
    read.feed(shown)
    assert not read.fetched
    assert (read.tags.count("h1"), read.tags.count("svg")) == (1, 7)  # shares twice, and a curve of both
    steps = re.findall(r"<svg.*?</svg>", shown)[0]
    assert [len(points.split()) for points in re.findall(r'polyline stroke="(?:#\w+)" points="([^"]*)', steps)] == [
        2,
        2,
    ]
    assert len(set(re.findall(r'polyline stroke="(#\w+)"', steps))) == 2
    assert re.search(r">0:00:0\d h<tspan[^>]*>a 1</tspan><tspan[^>]*>b 2</tspan>", steps)
    assert "a 1 at the end, 1 at most; b 2 at the end, 2 at most" in read.text
    one = StatsFile.read(tmp_path / "a/u&v.rock.stats")
    short = StatsFile(one.told, {name: values[:1] for name, values in one.samples.items()})
    assert page({"a": [one], "short": [short], "none": [StatsFile(one.told, {"time": np.zeros(0)})]}).count("<svg") == 6
    # the only tables of two runs lie over each other whatever their names, and folders with equal names are told apart
    (tmp_path / "b" / "u&v.rock.stats").rename(tmp_path / "b" / "w.rock.stats")
    assert main(["report", str(tmp_path / "a/u&v.rock"), str(tmp_path / "b/w.rock"), "--out", str(out)]) == 0
    assert "<h1>u&amp;v.rock</h1>" in out.read_text()
    (tmp_path / "c/a").mkdir(parents=True)
    (tmp_path / "b" / "w.rock.stats").rename(tmp_path / "c/a/u&v.rock.stats")
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "c/a"), "--out", str(out)]) == 0
    assert f"</b>{html.escape(str(tmp_path / 'c/a'))}</span>" in out.read_text()


CURVE = [[1 << 20, 40.0, 1.0], [2 << 20, 20.0, 0.0], [4 << 20, 5.0, 1.0]]
POOL = {"record_bytes": 48, "budget_bytes": 2 << 20, "curve": CURVE, "rows": 100.0, "new": 2.0, "missed": 20.0}


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A file about a group of two pools, one of which gains more by memory than the other one."""
    flat = [[point[0], 10.0 - point[0] / (1 << 22), 0.0] for point in CURVE]
    with er.Group(path=tmp_path / "g.rock", memory="4MiB") as group:
        ring = StatsRing(group)
        members = [{"name": "table 'a<b'", "rows": 1234, "steps": 5, "curve": [[1 << 20, 30.0], [4 << 20, 12.0]]}]
        pools = [POOL, {**POOL, "curve": flat, "missed": 9.5}]
        ring.add(
            {"time": time.time(), "steps": 5, "committed": 1.0}, {"kind": "group", "pools": pools, "members": members}
        )
    return Path(ring.path)


def test_a_curve_says_where_one_is(told: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["top", str(told.with_suffix("")), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "rows missed a step, of 100, by memory=, pool 1 of 2; 2 of them are new" in shown
    assert f"  >    2.0 MiB {'#' * 15}{' ' * 15} 20 you are here\n" in shown
    assert f"       4.0 MiB {'#' * 4} " in shown
    assert "best split of the memory over pools: 2.0 MiB, 2.0 MiB" in shown
    assert "  table 'a<b'  1,234      5               30       12\n" in shown
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    read = Page()
    read.feed((tmp_path / "r.html").read_text())
    assert not read.fetched
    assert read.tags.count("text") > 2 * len(CURVE)
    assert "you are here: 2.0 MiB, 20 of 100 rows" in read.text
    assert "table 'a<b'1,23453012" in read.text


def test_plots_lie_within_their_boxes(told: Path, kept: er.Table):
    shown = page({"": [StatsFile.read(path) for path in (told, Path(f"{kept.path}.stats"))]})
    boxes = re.findall(r'<svg viewBox="0 0 640 200".*?</svg>', shown)
    assert len(boxes) == shown.count("<svg") > 5
    for box in boxes:
        points = [point.split(",") for line in re.findall(r"points=[\"']([^\"']*)", box) for point in line.split(" ")]
        points += re.findall(r'cx="([^"]*)" cy="([^"]*)"', box)
        xs, ys = np.array(points, float).T
        assert (xs >= 0).all() & (xs <= 640).all() & (ys >= 0).all() & (ys <= 200).all()
    assert not re.search(r"https?:|url\(|@import|nan|inf\b", shown)


def test_a_group_of_very_many_tables_keeps_their_names_at_least(tmp_path: Path):
    with er.Group(path=tmp_path / "g.rock", memory="4MiB") as group:
        ring = StatsRing(group)
        curve = [[1 << 20, 1.5]] * 9
        ring.add({}, {"members": [{"name": f"t{k}", "curve": curve} for k in range(600)]})
    members = StatsFile.read(ring.path).told["members"]
    assert members[-1] == {"name": "t599", "curve": []}


@pytest.mark.parametrize("width", [200, 60, 30])
def test_top_is_as_wide_as_the_terminal_and_folds_what_is_wider(told: Path, width: int):
    lines = [line for line in [now(StatsFile.read(told))] if line]
    shown = watching._text(lines, width)
    table, details = shown.split("\n\n")[:2]
    assert all(len(line) <= width for line in table.splitlines())
    assert all(len(line) <= max(width, 40) for line in details.splitlines() if "table 'a<b'" not in line)
    assert {
        field.head for field in SHOWN if field.cell(lines[0]) and field.head not in " ".join(shown.split())
    } == set()
    assert ("reads/s" in table) == (width == 200)
    on_screen = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", watching.screen(lines, width, 12)).split("\n")
    assert len(on_screen) == 12
    assert all(len(line) <= width for line in on_screen)
    assert on_screen[-2].startswith("... ")
    assert "you are here" in re.sub(r"\s+", " ", watching.screen(lines, width, 99)) or width < 60


def in_terminal(words: list[str], keys: bytes, number: int = signal.SIGINT) -> tuple[int, str]:
    """Run a command in a terminal and press keys, or send a signal for b"". Return its status, and all it showed."""
    master, slave = os.openpty()
    before = termios.tcgetattr(slave)
    words, written = [sys.executable, "-m", "embedrock", *words], b""
    with subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave) as process:
        while b"leaves" not in written and select.select([master], [], [], 60)[0]:
            written += os.read(master, 4096)
        assert termios.tcgetattr(slave)[3] != before[3]  # neither echo nor lines
        os.write(master, keys) if keys else process.send_signal(number)
        assert process.wait(60) is not None
    while select.select([master], [], [], 0)[0]:
        written += os.read(master, 4096)
    assert termios.tcgetattr(slave) == before
    os.close(slave)
    os.close(master)
    return process.returncode, written.decode()


def test_q_leaves_top_and_the_terminal_is_as_before(told: Path):
    status, written = in_terminal(["top", str(told.with_suffix("")), "--every", "99"], b"xq")
    assert status == 0
    assert written.startswith(watching.ENTER)
    assert written.endswith(watching.LEAVE)
    assert "of the time" in written


@pytest.mark.slow
def test_ctrl_c_leaves_top_and_the_terminal_is_as_before(told: Path):
    status, written = in_terminal(["top", str(told.with_suffix("")), "--every", "99"], b"")
    assert status == 130
    assert written.endswith("embedrock: interrupted\r\n")
    status, written = in_terminal(["top", str(told.with_suffix("")), "--every", "99"], b"", signal.SIGTERM)
    assert status == 143
    assert written.endswith(watching.LEAVE)


def test_top_without_a_keyboard_only_waits(
    told: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdin", io.StringIO("q"))
    monkeypatch.setattr(time, "sleep", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        watching.watch(lambda: [line for line in [now(StatsFile.read(told))] if line], 1.0)
    shown = capsys.readouterr().out
    assert "table" in shown
    assert shown.endswith(watching.LEAVE)


def test_a_run_says_when_it_ended(tmp_path: Path, manager: numbers._Recorder, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "t.rock"
    table = er.Table(100, 4, rule=er.SGD(), path=path, memory="1MiB")
    manager.sample()
    assert (line := now(StatsFile.read(f"{path}.stats"))) is not None
    assert (line["is_live"], line["ended"], state(line)) == (True, None, "")
    for _ in range(3):
        table.update([1], np.ones((1, 4)))
    table.commit()
    table.close()
    manager.sample()
    assert (line := now(StatsFile.read(f"{path}.stats"))) is not None
    assert (line["is_live"], line["steps"]) == (False, 3)
    assert re.fullmatch(r"ended at \d\d:\d\d:\d\d, after step 3", state(line))
    assert main(["top", str(path), "--once"]) == 0
    assert f"({state(line)})" in capsys.readouterr().out
    with er.Table(100, 4, rule=er.SGD(), path=path, memory="1MiB") as table:
        table.update([1], np.ones((1, 4)))
        manager.sample()
        table.commit()
    assert (line := now(StatsFile.read(f"{path}.stats"))) is not None
    assert line["ended"] is None  # the next one trains


def test_the_end_of_keep_stats_takes_the_last_steps(tmp_path: Path):
    er.keep_stats(1e6)
    with er.Table(100, 4, rule=er.SGD(), path=tmp_path / "t.rock", memory="1MiB") as table:
        table.update([1], np.ones((1, 4)))
        er.keep_stats(None)
        table.commit()
    assert (line := now(StatsFile.read(tmp_path / "t.rock.stats"))) is not None
    assert state(line).endswith("after step 1")


def test_the_end_of_a_program_takes_the_last_numbers(tmp_path: Path):
    code = """import sys, numpy as np, embedrock as er
er.keep_stats(1e6)
group = er.Group(path=sys.argv[1])
table = group.table("users", rows=9, dim=2, rule=er.SGD())
table.update([1], np.ones((1, 2), np.float32))
group.commit()"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "g.rock"], check=True)
    found = StatsFile.read(tmp_path / "g.rock.stats")
    assert len(found.samples["time"]) == 1
    assert (line := now(found)) is not None
    assert (line["rows"], line["members"][0]["steps"]) == (1, 1)  # not those of a table that is closed
    assert min(line["ram_bytes"], line["budget_bytes"], line["disk_bytes"]) > 0
    assert state(line).endswith("after step 1")


@pytest.mark.parametrize(
    ("host", "pid", "said"),
    [
        ("", os.getpid(), rf"no sample for \d+ s, though process {os.getpid()} is there"),
        ("", 2**22 + 1, r"process 4194305 is gone: killed after 20\d\d-.*, step 5"),
        ("elsewhere", 7, r"no sample for \d+ s: does process 7 run on elsewhere\?"),
    ],
    ids=["alive", "gone", "elsewhere"],
)
def test_a_run_without_an_end(told: Path, host: str, pid: int, said: str):
    found = StatsFile.read(told)
    found.samples["time"] = np.array([1.7e9])
    assert (line := now(found)) is not None
    assert re.fullmatch(said, state(line | {"ended": None, "pid": pid, "host": host or line["host"]}))


def test_samples_far_apart_are_those_of_a_run_that_lives(told: Path):
    found = StatsFile.read(told)
    found.samples["time"] = np.array([time.time() - 100])
    lives = [now(StatsFile({**found.told, "ended": None, "every": every}, found.samples)) for every in (1.0, 60.0)]
    assert [line and line["is_live"] for line in lives] == [False, True]


def test_a_forked_child_ends_no_run(kept: er.Table):
    ring = StatsRing(kept)
    ring._told["pid"] += 1
    ring.close()
    assert "ended" not in StatsFile.read(ring.path).told


def test_the_best_split_takes_from_who_gains_less():
    flat = [[point[0], 10.0, 0.0] for point in CURVE]
    pools = [{**POOL, "budget_bytes": 3 << 20}, {**POOL, "curve": flat, "budget_bytes": 2 << 20}]
    assert best_split({"pools": pools}) == {"memory": [4 << 20, 1 << 20], "missed": 15.0}
    assert best_split({"pools": pools[:1]}) is None
    assert best_split({"pools": [POOL, {**POOL, "curve": []}]}) is None


def test_what_is_half_written_is_read_again(told: Path, monkeypatch: pytest.MonkeyPatch):
    data, tries = told.read_bytes(), []
    half = data[:40] + b"?" + data[41:]
    monkeypatch.setattr(Path, "read_bytes", lambda path: tries.append(path) or (half if len(tries) < 3 else data))
    assert StatsFile.read(told).told["kind"] == "group"
    monkeypatch.setattr(Path, "read_bytes", lambda path: half)
    with pytest.raises(ValueError, match="has no numbers of a table"):
        StatsFile.read(told)


def test_of_very_many_members_none_is_listed(tmp_path: Path):
    with er.Group(path=tmp_path / "g.rock", memory="4MiB") as group:
        ring = StatsRing(group)
        ring.add({}, {"members": [{"name": "x" * 1000}] * 100})
    assert StatsFile.read(ring.path).told["members"] == []


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[numbers._Recorder]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    all_open, before = opened.all_open, set(opened.all_open())  # what other tests have left
    monkeypatch.setattr(opened, "all_open", lambda: [each for each in all_open() if each not in before])
    made = numbers._Recorder(1e6)
    yield made
    made.stop()


def test_tables_and_groups_in_ram_and_on_disk(
    manager: numbers._Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    table, group = er.Table(100, 4, rule=er.SGD(), name="seen", seed=0), er.Group()
    kept = er.Group(path=tmp_path / "g.rock", memory="1MiB")
    for each in (group, kept):
        each.table("users", 100, 4, rule=er.SGD())
        each.table("items", 100, 8, rule=er.SGD())
        each.update({"users": [1, 2]}, {"users": np.ones((2, 4))})
    table.update([3], np.ones((1, 4)))
    manager.sample()
    assert main(["top", str(runtime_folder()), "--json"]) == 0
    lines = {line["table"].partition(",")[0]: line for line in json.loads(capsys.readouterr().out)["tables"]}
    assert (lines["seen in RAM"]["rows"], lines["seen in RAM"]["steps"]) == (1, 1)
    assert lines["seen in RAM"]["hit_rate"] is None
    found = lines["group in RAM"]
    assert [(one["name"], one["rows"]) for one in found["members"]] == [("users", 2), ("items", 0)]
    assert main(["top", kept.path or "", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["tables"]
    assert (line["kind"], line["rows"], line["budget_bytes"], len(line["pools"])) == ("group", 2, 1 << 20, 2)
    assert main(["report", str(runtime_folder()), "--out", str(tmp_path / "r.html")]) == 0
    kept.commit()
    for each in (table, group, kept):
        each.close()
    manager.sample()  # of none of them


def test_old_files_in_the_runtime_directory_go(manager: numbers._Recorder):
    runtime_folder().mkdir(parents=True)
    old, new = (runtime_folder() / name for name in ("1-1.stats", "2-1.stats"))
    for path in (old, new):
        path.touch()
    os.utime(old, (1.0, 1.0))
    with er.Table(100, 4):
        manager.sample()
    assert (old.exists(), new.exists()) == (False, True)


def test_the_runtime_directory_is_of_one_user(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert runtime_folder().name == f"embedrock-{os.getuid()}"


def test_tables_in_training_come_first_and_the_last_to_end_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, age in (("a", 9000), ("b", 300), ("c", 0)):
        with er.Table(10, 4, path=tmp_path / f"{name}.rock") as table:
            ring = StatsRing(table)
            ring.add({"time": time.time() - age, "steps": 1})
            if age:
                ring.close()
    assert main(["top", str(tmp_path), "--json"]) == 0
    assert [line["table"] for line in json.loads(capsys.readouterr().out)["tables"]] == ["c.rock", "b.rock", "a.rock"]


def test_prometheus(kept: er.Table, tmp_path: Path):
    parser = pytest.importorskip("prometheus_client.parser")
    out = tmp_path / "embedrock.prom"
    assert main(["top", kept.path or "", "--once", "--prometheus", str(out)]) == 0
    found = {family.name: family for family in parser.text_string_to_metric_families(out.read_text())}
    (sample,) = found["embedrock_steps"].samples
    pid = str(StatsFile.read(f"{kept.path}.stats").told["pid"])
    assert (sample.labels, sample.value) == ({"pid": pid, "table": "u&v.rock"}, 2.0)
    assert found["embedrock_share_disk"].samples[0].value == 0.5
    assert found["embedrock_steps"].type == "gauge"
    assert list(tmp_path.glob("embedrock.prom*")) == [out]


def test_names_of_tables_for_prometheus(told: Path, tmp_path: Path):
    parser = pytest.importorskip("prometheus_client.parser")
    line = now(StatsFile.read(told)) or {}
    name = 'a "b"\\c\nd'
    watching.write_metrics([line | {"table": name}], tmp_path / "x.prom")
    family, *_ = parser.text_string_to_metric_families((tmp_path / "x.prom").read_text())
    assert family.samples[0].labels["table"] == name


def test_a_report_without_samples(table: er.Table):
    ring = StatsRing(table)
    ring.close()
    assert "No samples yet." in page({"": [StatsFile.read(ring.path)]})


@pytest.mark.parametrize("command", ["top", "report"])
def test_a_folder_that_is_not_there(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([command, str(tmp_path / "none")]) == 1
    assert f"there is no folder '{tmp_path / 'none'}'. Call er.keep_stats() in the program" in capsys.readouterr().err


def test_no_table_in_ram_was_ever_kept(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["top"]) == 1
    assert "are no numbers of tables. Call er.keep_stats() in the program" in capsys.readouterr().err


def test_no_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["top", str(tmp_path)]) == 1
    assert "Call er.keep_stats() in the program that trains them, and" in capsys.readouterr().err
    (tmp_path / "x.stats").write_text("1 something else")
    assert main(["top", str(tmp_path)]) == 1
    assert "has no numbers of a table, as er.keep_stats writes them" in capsys.readouterr().err
