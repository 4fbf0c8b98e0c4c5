"""`er.plan_tables` and ``embedrock plan``: what is proposed, what is told of it, what is refused."""

from __future__ import annotations

import itertools
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.cli.main import main
from embedrock.initializers import Zeros
from embedrock.kernels.keys import PART_BITS
from embedrock.planner import peak, proposal
from embedrock.planner.demand import (
    UNIT,
    best_split,
    bounded_zipf,
    curve_of,
    expected_misses,
    in_groups,
    lasting,
    read_demands,
)
from embedrock.planner.machine import EXAMPLE
from embedrock.planner.split import SplitOption, split
from embedrock.spec.spec import Spec
from embedrock.storage.ram_layout import place

TABLES: dict[str, Any] = {"user": {"rows": 500_000, "dim": 16}, "item": {"rows": 1000, "dim": 16, "ids": 3}}
PLAIN = {"machine": EXAMPLE, "steps": 8}


def options() -> list[list[SplitOption]]:
    random = np.random.default_rng(0)
    sizes, costs = np.cumsum(random.integers(1, 9, (4, 5)), axis=1), -np.sort(-random.random((4, 5)), axis=1)
    return [[*map(SplitOption, own.tolist(), each.tolist())] for own, each in zip(sizes, costs, strict=True)]


@pytest.mark.parametrize("budget", range(20, 90, 10))
def test_a_split_is_nearly_the_best_of_all(budget: int):
    tables = options()
    every = [each for each in itertools.product(*tables) if sum(one.nbytes for one in each) <= budget]
    found = split(tables, budget)
    if not every:
        assert found is None
        return
    assert found is not None
    assert sum(one.nbytes for one in found) <= budget
    best = min(sum(one.cost for one in each) for each in every)
    assert best <= sum(one.cost for one in found) <= 1.25 * best  # of few and large steps; tables have small ones


def test_tables_that_fit_are_in_ram():
    found = er.plan_tables(TABLES, 64, memory="1GiB", **PLAIN)
    assert [(one.tier, one.memory, one.reads) for one in found.tables] == [("RAM", None, 0.0)] * 2
    assert [one.demand.positions for one in found.tables] == [64, 192]
    assert found.depth == 0
    assert found.peak_bytes <= 1 << 30
    assert (found.reads, found.bound_s, found.reads_per_s, found.faster) == (0, 0, None, None)


def test_the_large_one_goes_to_disk_within_the_limit():
    limit = 217 << 20
    found = er.plan_tables(TABLES, 64, memory=limit, machine=EXAMPLE)
    user, item = found.tables
    assert (user.tier, item.tier) == ("disk", "RAM")
    assert found.peak_bytes <= limit
    assert user.memory is not None
    assert user.memory % UNIT == 0
    assert user.misses == user.reads == found.reads > 0  # long trained: each has a record
    assert (found.depth, found.reads_per_s, found.bound_s) == (2, 9e4, found.reads / 9e4)
    assert found.faster is not None
    assert er.plan_tables(TABLES, 64, memory=found.faster.split()[1], machine=EXAMPLE).reads <= found.reads / 2
    more = er.plan_tables(TABLES, 64, memory=limit + (20 << 20), machine=EXAMPLE).tables[0]
    assert more.misses < user.misses
    fresh = er.plan_tables(TABLES, 64, memory=limit, **PLAIN).tables[0]
    assert fresh.reads < fresh.misses  # most rows have no record yet


def test_the_lines_of_code_make_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = er.plan_tables(TABLES, 64, memory="217MiB", **PLAIN)
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    exec(found.code, made)
    assert (made["user"].rows, made["user"].dim, made["user"].is_on_disk) == (500_000, 16, True)
    assert made["user"].stats()["budget_bytes"] == found.tables[0].memory
    assert not made["item"].is_on_disk
    for name in TABLES:
        made[name].close()


def test_misses_are_those_of_a_real_table(tmp_path: Path):
    tables = {"t": {"rows": 20_000, "dim": 4, "zipf": 1.0}}
    (demand,) = read_demands(tables, 256, None, {})
    with er.Table(20_000, 4, rule=er.Adam(), path=tmp_path / "t.rock", memory=192 << 10) as table:
        slots = place(table.spec, 192 << 10, "t").slots
        batches = list(demand.batches(128))
        curve = curve_of(demand, [slots], 112)
        before = 0.0
        for step, ids in enumerate(batches):
            if step <= 112:
                before = table.stats()["misses"]
            table.update(ids, np.ones((len(ids), 4), np.float32))
        seen = (table.stats()["misses"] - before) / (len(batches) - 112)
        table.commit()
    assert float(curve.misses[0]) == pytest.approx(seen, rel=0.1)


def test_after_long_training_a_cache_is_a_little_worse_than_the_best():
    (demand,) = read_demands({"t": {"rows": 100_000, "dim": 16}}, 512, 1.1, {})
    curve = curve_of(demand, [1000, 2000], 100)
    for slots in (1000, 20_000, 99_999):
        best = expected_misses(100_000, 1.1, 512, slots)
        assert best <= lasting(demand, curve, slots) <= 1.5 * best
    assert lasting(demand, curve, 100_000) == 0
    assert (expected_misses(1, 1.1, 512, 0), expected_misses(1, 1.1, 512, 1)) == (1, 0)


def test_a_log_tells_what_is_missed():
    ids = bounded_zipf(np.random.default_rng(0).random(40_000), 1000, 1.0)
    found = er.plan_tables({"t": {"rows": 10**9, "dim": 64}}, 100, memory="300MiB", log={"t": ids}, **PLAIN)
    assert found.tables[0].rows_used <= 100
    with pytest.raises(er.ArgumentError, match="the log of 't' has fewer ids than one batch, 100"):
        er.plan_tables({"t": {"rows": 10**9, "dim": 64}}, 100, memory="300MiB", log={"t": ids[:99]}, **PLAIN)


def test_of_several_workers_each_has_a_part():
    alone, one = (er.plan_tables({"t": {"rows": 10**6}}, 64, workers=n, **PLAIN).tables[0] for n in (1, 4))
    assert one.demand.spec.rows == 250_833  # the largest part: a hash is even but for chance
    assert one.ram_bytes < alone.ram_bytes / 3


def test_of_workers_each_misses_its_part_of_what_all_ask_for():
    tables: dict[str, Any] = {"t": {"rows": 200_000, "dim": 16, "zipf": 1.0, "memory": "2MiB"}}
    alone = er.plan_tables(tables, 4 * 512, steps=60, machine=EXAMPLE).tables[0]
    part = {"t": tables["t"] | {"memory": "512KiB"}}
    found = er.plan_tables(part, 512, workers=4, steps=60, machine=EXAMPLE)
    (one,) = found.tables
    assert one.rows_used == pytest.approx(alone.rows_used / 4, rel=0.01)  # of rows that are its own
    assert one.misses == pytest.approx(alone.misses / 4, rel=0.1)
    asked = expected_misses(200_000, 1.0, 512, 0) * 3 / 4
    assert found.sent_bytes == pytest.approx(asked * (8 + 64 + 8 + 64))
    assert alone.sent_bytes == 0
    assert 't = ert.Embedding(200000, 16, sharded=True, path="t.rock", memory="' in found.code
    with pytest.raises(
        er.ArgumentError, match=r"table 'a' of er\.plan_tables is in group 'g', and workers share tables"
    ):
        er.plan_tables({"a": {"rows": 100, "group": "g"}}, 8, workers=2, **PLAIN)


def test_gpu_memory_goes_where_it_saves_most_of_the_bus():
    tables: dict[str, Any] = {"hot": {"rows": 5000, "zipf": 1.2}, "even": {"rows": 5000, "zipf": 0.0}}
    none, some, all_there = (
        er.plan_tables(tables, 1024, device_memory=size, machine=EXAMPLE, steps=steps)
        for size, steps in (("4KiB", 12), ("1536KiB", 40), ("1GiB", 12))
    )
    assert [one.near.placement.mode for one in none.tables if one.near] == ["host", "host"]
    hot, even = (one.near for one in some.tables)
    assert hot is not None
    assert even is not None
    assert hot.placement.mode == "cached"
    assert hot.placement.bytes >= even.placement.bytes
    assert hot.placement.bytes + even.placement.bytes <= 1536 << 10
    without = [one.rows_used * 768 * 2 for one in none.tables]
    assert hot.bus_bytes < without[0] / 3
    assert hot.bus_bytes + even.bus_bytes < 0.75 * sum(without)
    assert [one.near.misses for one in all_there.tables if one.near] == [0.0, 0.0]
    assert 'device_memory="' in some.code
    json.dumps(some.to_json())


def test_nothing_fits():
    with pytest.raises(
        er.NoPlanError, match=r"do not fit 185\.0 MiB of RAM, not even on disk: .*--memory \d+MiB"
    ) as ram:
        er.plan_tables(TABLES, 4096, memory="185MiB", **PLAIN)
    er.plan_tables(TABLES, 4096, memory=ram.value.needed["memory"] + UNIT, **PLAIN)
    with pytest.raises(er.NoPlanError, match=r"need .* of files: 1\.0 MiB may be used\. --disk \d+ is enough") as disk:
        er.plan_tables(TABLES, 64, memory="217MiB", disk="1MiB", **PLAIN)
    er.plan_tables(TABLES, 64, memory="217MiB", disk=disk.value.needed["disk"], **PLAIN)
    again = pickle.loads(pickle.dumps(disk.value))  # as a pool of processes sends it
    assert (str(again), again.needed) == (str(disk.value), disk.value.needed)


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({}, r"must be a dict of tables by name: got \{\}"),
        ({"t": 3}, "table 't' of er.plan_tables must be a dict, er.Spec or table: got 3"),
        ({"t": {"row": 3}}, "table 't' has no 'row': .* Did you mean 'rows'"),
        ({"t": {"rows": 0}}, "`rows` must be a whole number from 1"),
        ({"t": {"rows": 9, "rule": "adan"}}, "rule"),
        ({"t": {"rows": 9, "zipf": -1}}, "`zipf` of table 't' must be an exponent from 0 to 4: got -1"),
        ({"t": {"rows": 9, "ids": 0}}, "`ids` of table 't' must be how many a sample has, above 0: got 0"),
    ],
)
def test_what_cannot_be(tables: Any, told: str):
    with pytest.raises(er.ArgumentError, match=told):
        er.plan_tables(tables, 64, **PLAIN)


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"batch_size": True}, {"batch_size": 1, "workers": 0}])
def test_numbers_that_cannot_be(wrong: dict[str, Any]):
    with pytest.raises(er.ArgumentError, match="must be a whole number above 0"):
        er.plan_tables(TABLES, **wrong, **PLAIN)
    with pytest.raises(
        er.ArgumentError, match=r"`folder` of er\.plan_tables must be a folder that exists: got '/no/such'"
    ):
        er.plan_tables(TABLES, 1, folder="/no/such", **PLAIN)


def test_memories_begin_with_two_batches_and_end_with_all_of_use():
    (demand,) = read_demands({"t": {"rows": 100_000, "dim": 16}}, 64, None, {})
    placements = demand.placements(1 << 40)
    assert placements[0].slots >= 128
    assert placements[-1].slots == 100_000
    sizes = [one.budget_bytes for one in placements]
    assert sizes == sorted(sizes)
    assert all(size % UNIT == 0 for size in sizes)
    assert max(one.budget_bytes for one in demand.placements(5 * UNIT)) == 5 * UNIT


# ---------------------------------------------------------------- the command


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(proposal, "this_machine", lambda: EXAMPLE)
    return tmp_path


def test_a_file_of_tables(known: Path, capsys: pytest.CaptureFixture[str]):
    file = known / "t.toml"
    file.write_text('batch_size = 64\nmemory = "217MiB"\nsteps = 8\n[tables.user]\nrows = 500_000\ndim = 16\n')
    assert main(["plan", "--tables", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    wanted = er.plan_tables({"user": TABLES["user"]}, 64, memory="217MiB", **PLAIN)
    assert told == json.loads(json.dumps(wanted.to_json()))
    assert main(["plan", "--tables", str(file)]) == 0
    shown = capsys.readouterr().out
    assert wanted.code in shown
    assert "RAM" in shown
    assert main(["plan", "--tables", str(file), "--memory", "181MiB"]) == 3
    assert capsys.readouterr().out.startswith("nothing fits: the tables do not fit 181.0 MiB of RAM")


def test_a_folder_of_tables_and_a_log(known: Path, capsys: pytest.CaptureFixture[str]):
    (known / "tables").mkdir()
    with er.Table(1000, 4, rule=er.SGD(), path=known / "tables" / "user.rock") as table:
        table.commit()
    (known / "log.csv").write_text("user\n" + "\n".join(map(str, range(900))) + "\n")
    line = ["plan", "--tables", str(known / "tables"), "--log", str(known / "log.csv"), "--batch-size", "100", "--json"]
    assert main(line) == 0
    (told,) = json.loads(capsys.readouterr().out)["tables"]
    assert (told["name"], told["rows_used"]) == ("user", 100.0)


@pytest.mark.parametrize(
    ("log", "rows", "told"),
    [
        ("item\n1\n", "900", r"a column 'user' of ids; got item \(int64\)\. Name it: .* column = .NAME. of the table"),
        ("user\nann\n", "900", r"ids of 'user' from 0 to 899; got strings\. Make ids of them by er\.hash_ids, or say"),
        ("user\nann\n", '"open"', "the log of 'user' has fewer ids than one batch, 2. Give a longer one"),
        ("user\n", '"open"', r"log\.csv: expected ids; got none\. Check that it is the right file\."),
        ("user\n", "900", r"log\.csv: expected ids; got none\."),
        ("user\n7\n", "900", "the log of 'user' has fewer ids than one batch, 2"),
    ],
)
def test_logs_that_cannot_be(known: Path, capsys: Any, log: str, rows: str, told: str):
    (known / "log.csv").write_text(log)
    (known / "t.toml").write_text(f"batch_size = 2\n[tables.user]\nrows = {rows}\n")
    assert main(["plan", "--tables", str(known / "t.toml"), "--log", str(known / "log.csv")]) == 1
    assert re.search(told, capsys.readouterr().err)


def test_a_log_of_one_id(known: Path, capsys: Any):
    (known / "log.csv").write_text("user\n7\n")
    (known / "t.toml").write_text("batch_size = 1\n[tables.user]\nrows = 900\n")
    assert main(["plan", "--tables", str(known / "t.toml"), "--log", str(known / "log.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"][0]["rows_used"] == 1


@pytest.mark.parametrize("rate", [50.0, None])
def test_the_time_of_reads_is_a_bound_by_a_probe_of_the_folder(
    known: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, rate: float | None
):
    probed = list[str]()

    def random_reads(folder: str) -> float:
        probed.append(str(folder))
        if rate is None:
            raise PermissionError(13, "read-only")
        return rate

    monkeypatch.setattr(proposal, "this_machine", lambda: EXAMPLE._replace(reads_per_s=None))
    monkeypatch.setattr(proposal, "random_reads", random_reads)
    (known / "t.toml").write_text('batch_size = 64\nmemory = "217MiB"\n[tables.user]\nrows = 500_000\ndim = 16\n')
    words = ["plan", "--tables", str(known / "t.toml")]
    assert main([*words, "--folder", str(known), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["reads_per_s"], told["bound_s"]) == (rate, rate and told["reads"] / rate)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert bool(re.search("a step +at least", shown)) == (" reads at 50 reads a second" in shown) == (rate is not None)
    assert ("reads; the disk could not be probed" in shown) == (rate is None)
    assert main([*words, "--memory", "1GiB"]) == 0
    assert re.search("a step +reads nothing from disk", capsys.readouterr().out)
    assert probed == [str(known), "."]


@pytest.mark.slow
def test_this_machine_is_measured_in_seconds_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tables: dict[str, Any] = {"user": {"rows": 500_000, "dim": 16, "memory": "2MiB"}}
    found = er.plan_tables(tables, 64)
    assert (found.reads_per_s or 0) > 0
    assert 50 << 20 < found.peak_bytes < 1 << 30
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_being_written(known: Path, capsys: Any):
    (known / "tables").mkdir()
    with er.Table(1000, 4, rule=er.SGD(), path=known / "tables" / "user.rock") as table:
        table.commit()
        table.update([1], np.ones((1, 4)))
        assert main(["plan", "--tables", str(known / "tables"), "--batch-size", "10", "--json"]) == 0
        table.commit()
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["tables"]] == ["user"]


def test_tables_that_are_told_where_to_be():
    tables = {"a": {"rows": 50_000, "dim": 16, "memory": "RAM"}, "b": {"rows": 50_000, "dim": 16, "memory": "2MiB"}}
    found = er.plan_tables(tables, 64, **PLAIN)
    assert [(one.tier, one.memory) for one in found.tables] == [("RAM", None), ("disk", 2 << 20)]
    assert found.peak_then <= found.peak_bytes
    with pytest.raises(er.ArgumentError, match=r"`memory` of table 'a' must be .RAM., or .*: got 'big'"):
        er.plan_tables({"a": {"rows": 50_000, "memory": "big"}}, 64, **PLAIN)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no_such_module_x:make", r"looked for 'make' in the module 'no_such_module_x', .*ModuleNotFoundError"),
        ("json:dumps", r"looked for 'dumps' in the module 'json', .*TypeError"),
        ("nothing", r"must be a \.toml file, a folder that has tables, or package\.module:make_model: got 'nothing'"),
        ("t.toml", "must have tables, each as"),
        ("empty", "the folder 'empty' has no tables"),
    ],
)
def test_tables_that_are_none(known: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, text: str, told: str):
    monkeypatch.chdir(known)
    (known / "t.toml").write_text("batch_size = 3\n")
    (known / "empty").mkdir()
    assert main(["plan", "--tables", text]) == 1
    assert re.search(told, capsys.readouterr().err)


def test_tables_of_a_model_are_planned_with_the_state_of_a_rule(
    known: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.chdir(known)
    text = "import embedrock as er\nclass Layer:\n    name, table = 'a', {}\nclass Model:\n    layers = [Layer]\n"
    (known / "my_model.py").write_text(text.format("er.Table(1000, 4)"))
    for words, record_bytes in (([], 48), (["--rule", "sgd"], 16)):
        assert main(["plan", "--tables", "my_model:Model", "--batch-size", "10", "--json", *words]) == 0
        (told,) = json.loads(capsys.readouterr().out)["tables"]
        assert 1000 * record_bytes <= told["ram_bytes"] < 1000 * record_bytes + 9000
        assert ("rule=er.Adam()" in told["code"]) == (not words)
    sys.modules.pop("my_model")


def test_ram_that_a_budget_does_not_count():
    spec, memory = Spec(40_000, 16, "float32", er.Adam(), Zeros(), 0), 2 << 20
    placement = place(spec, memory, "t")
    none, some, many = (peak.on_disk(spec, placement, 20_000, logged) for logged in (0, 1000, 30_000))
    assert none <= some - 8 * 1000 <= memory + max(0, 20_000 * 24 - placement.overlay_bytes)  # the index of logs
    assert many - some == 8 * 29_000  # ids of rows in a log that no commit has
    assert peak.most_on_disk(placement) == memory + (1 << 20) - placement.overlay_bytes


def test_huge_pages_begin_where_the_memory_has_half_of_one():
    spec, budget = Spec(10**6, 256, "float32", er.Adam(), Zeros(), 0), 16 << 20
    placement = place(spec, budget, "t")
    numbers = range(1, placement.slots, 20)
    taken = [peak.on_disk(spec, placement, rows, 0) for rows in numbers]
    assert taken == sorted(taken)
    beyond = [nbytes - rows * spec.record_bytes for nbytes, rows in zip(taken, numbers, strict=True)]
    assert 0 <= beyond[0] < 4096
    assert 1 << 20 < max(beyond) < 2 << 20  # of a place that is not known, the mean; and the directory


# ---------------------------------------------------------------- groups

MANY: dict[str, Any] = {f"t{k}": {"rows": 200_000 + 1000 * (k % 3), "dim": 16} for k in range(26)}


def test_tables_on_disk_are_one_group_whose_lines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tables = MANY | {"tables": {"rows": 500, "dim": 8}, "a-b": {"rows": 500, "dim": 8}}
    tables = {name: told | {"memory": "RAM"} if name == "t3" else told for name, told in tables.items()}
    found = er.plan_tables(tables, 64, memory="320MiB", **PLAIN)
    (group,) = [one for one in found.tables if one.tier == "disk"]
    in_ram = [one.name for one in found.tables if one.tier == "RAM"]
    assert {"t3", "tables", "a-b"} <= {*in_ram}
    assert sorted([*group.members, *in_ram]) == sorted(tables)
    assert found.peak_bytes <= 320 << 20
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    exec(found.code, made)
    with made["tables_group"] as opened:
        assert list(opened) == group.members
        assert opened.stats()["budget_bytes"] == group.memory
        assert [made[name].rows for name in group.members] == [tables[name]["rows"] for name in group.members]
        ids = {name: np.arange(64) for name in group.members}
        opened.update(ids, {name: np.ones((64, 16), np.float32) for name in ids})
        opened.commit()
    assert (made["tables"].rows, made["a_b"].rows, made["t3"].is_on_disk) == (500, 500, False)
    for name in ("tables", "a_b", "t3"):
        made[name].close()


def test_many_small_tables_go_to_disk_where_they_do_not_fit():
    tables = {f"t{k}": {"rows": 30_000, "dim": 16} for k in range(26)}
    found = er.plan_tables(tables, 64, memory="260MiB", **PLAIN)
    assert "disk" in {one.tier for one in found.tables}
    assert found.peak_bytes <= 260 << 20


@pytest.mark.slow
def test_a_group_takes_the_place_of_its_tables_alone():
    limits: dict[str, Any] = {"memory": "320MiB", "machine": EXAMPLE}
    group, alone = er.plan_tables(MANY, 64, **limits), er.plan_tables(MANY, 64, alone=True, **limits)
    assert len(group.tables) < len(alone.tables) == 26
    assert 0 < group.reads <= 1.25 * alone.reads  # sizes of the cache are a quarter of a doubling apart
    assert all(not one.members for one in alone.tables)


def test_misses_of_a_group_are_those_of_a_real_one(tmp_path: Path):
    tables = {name: {"rows": 20_000, "dim": 4, "zipf": zipf, "group": "g"} for name, zipf in (("a", 1.2), ("b", 0.9))}
    demands = read_demands(tables, 128, None, {})
    (demand,) = in_groups(demands)
    batches = list(demand.batches(96))
    slots = place(demand.spec, 192 << 10, "g", is_pool=True).slots
    with er.Group(path=tmp_path / "g.rock", memory=192 << 10) as group:
        for name in tables:
            group.table(name, 20_000, 4, rule=er.Adam())
        before = 0
        for step, keys in enumerate(batches):
            before = group.stats()["misses"] if step == 80 else before
            ids = {name: keys[keys >> PART_BITS == k] & ((1 << PART_BITS) - 1) for k, name in enumerate(tables)}
            group.update(ids, {name: np.ones((len(some), 4), np.float32) for name, some in ids.items()})
        seen = (group.stats()["misses"] - before) / 16
        group.commit()
    assert float(curve_of(demand, [slots], 80).misses[0]) == pytest.approx(seen, rel=0.1)


@pytest.mark.parametrize("slots", [100, 1000, 5000])
def test_the_best_cache_of_several_popularities(slots: int):
    laws = [(2000, 1.3, 300), (3000, 0.8, 100), (1000, 0.0, 7)]
    chances = [-np.diff((np.arange(1, n + 1) ** (1 - z) - 1) / (1 - n ** (1 - z))) for n, z, _ in laws]
    often = [draws * own for own, (*_, draws) in zip(chances, laws, strict=True)]
    bound = np.sort(np.concatenate(often))[::-1][slots - 1]
    wanted = sum(own[own >= bound].sum() for own in often)
    kept = best_split(laws, slots)
    assert sum(kept) <= slots
    assert sum(own[:some].sum() for own, some in zip(often, kept, strict=True)) == pytest.approx(wanted, rel=0.01)


def test_a_group_that_a_file_names(known: Path, capsys: pytest.CaptureFixture[str]):
    file = known / "t.toml"
    own = 'rows = 500_000\ndim = 16\ngroup = "ads"\n'
    file.write_text(f'batch_size = 64\nsteps = 8\nmemory = "217MiB"\n[tables.a]\n{own}[tables.b]\n{own}')
    assert main(["plan", "--tables", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "ads: 2 tables  disk" in shown
    assert 'ads = er.Group(path="ads.rock", memory="' in shown
    assert 'b = ads.table("b", rows=500000, dim=16, rule=er.Adam())' in shown
    assert main(["plan", "--tables", str(file), "--memory", "1GiB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["members"], one["code"]) for one in told["tables"]] == [(["a", "b"], "er.Group()")]


def test_a_log_that_is_read_once_tells_of_a_group():
    log = {name: (np.arange(64) + 64 * (k % 9) for k in range(99)) for name in "ab"}
    plain: dict[str, Any] = {"machine": EXAMPLE, "memory": "240MiB"}
    found = er.plan_tables({name: {"rows": 10**6} for name in "ab"}, 64, log=log, **plain)
    assert [(one.members, one.rows_used) for one in found.tables] == [(["a", "b"], 128.0)]


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"dim": 8}, "group 'g' of a plan must have tables of one dim, .* 'b' is not as 'a'. Name another group"),
        ({"rows": None}, "group 'g' of a plan must have tables of .* with a number of rows"),
        ({"memory": "2MiB"}, "table 'b' shares the memory of group 'g': leave its own out"),
        ({"group": 3}, "`group` of table 'b' must be the name of a group: got 3"),
    ],
)
def test_groups_that_cannot_be(own: dict[str, Any], told: str):
    table: dict[str, Any] = {"rows": 900, "dim": 4, "group": "g"}
    with pytest.raises(er.ArgumentError, match=told):
        er.plan_tables({"a": table, "b": table | own}, 64, **PLAIN)


def test_smaller_records_read_less():
    plain: dict[str, Any] = {"memory": "230MiB", "machine": EXAMPLE, "batch_size": 4096}
    found = er.plan(TABLES, **plain)  # its old name
    half, lean = found.smaller
    assert (half.change, half.record_bytes) == ('dtype="bfloat16"', (320, 384))
    assert (lean.change, lean.record_bytes) == ("rule=er.RowwiseAdagrad()", (160, 384))
    told = {name: own | {"rule": "rowwiseadagrad"} for name, own in TABLES.items()}
    again = er.plan_tables(told, **plain)
    assert lean.reads == pytest.approx(again.reads, rel=0.1)
    assert lean.reads < found.reads
    assert not {lean.change} & {one.change for one in again.smaller}
    assert str(lean).endswith(" reads, records of 42% of the bytes")
