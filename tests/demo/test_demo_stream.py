"""The demo on a stream whose items are born and die."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.cli.main import FAILED, main
from embedrock.demo import collisions
from embedrock.demo.data.interactions import LogError
from embedrock.demo.data.logged_stream import LoggedStream
from embedrock.demo.data.planted_stream import PlantedStream
from embedrock.demo.metrics import auc

TINY = [
    "demo",
    "--stream",
    "--days",
    "3",
    "--steps-a-day",
    "15",
    "--alive",
    "200",
    "--batch-size",
    "512",
    "--lr",
    "0.1",
    "--dim",
    "2",
]


@pytest.fixture(autouse=True)
def no_torchrec(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collisions, "are_installed", lambda: False)


def test_each_day_brings_new_items_and_takes_as_many():
    stream = PlantedStream(alive=100, born=20, once=0.25, seed=0)
    days = [stream.shown(day, 0, 20_000) for day in range(3)]
    names = [set(day.names.tolist()) for day in days]
    regular = [{name for name in day if len(name) < 12} for day in names]
    assert [len(day) for day in regular] == [100, 100, 100]
    assert [len(regular[0] & day) for day in regular] == [100, 80, 60]
    once = [len(day) - 100 for day in names]
    assert all(abs(count / 20_000 - 0.25) < 0.02 for count in once)
    assert not set.intersection(*names) - set.intersection(*regular)
    assert days[0].planted is not None
    assert 0.7 < auc(days[0].labels, days[0].planted) < 0.9
    again = PlantedStream(alive=100, born=20, once=0.25, seed=0).shown(2, 0, 20_000)
    for one, other in zip(again, days[2], strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_learns_with_fewer_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*TINY, "--json", str(tmp_path / "out.json")]) == 0
    days = json.loads((tmp_path / "out.json").read_text())["days"]
    last = {line["table"]: line for line in days if line["day"] == 3}
    assert last.keys() == {"every id", "admission", "eviction", "both"}
    for line in last.values():
        assert 0.55 < line["auc"] < line["best"] < 0.9
    assert 2 * last["both"]["rows"] < last["every id"]["rows"]
    assert last["eviction"]["disk_bytes"] < last["every id"]["disk_bytes"]
    assert last["eviction"]["rows"] <= 1024
    assert "every id" in capsys.readouterr().out


class TwoSlots:
    """Ids share two slots, of which one begins anew before each batch."""

    nbytes = 123

    def __init__(self, name: str, rows: int) -> None:
        assert rows == 1024

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return ids % 2, np.array([1])


def test_torchrec_is_beside_it_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collisions, "are_installed", lambda: True)
    monkeypatch.setattr(collisions, "ManagedCollisions", TwoSlots)
    few = [*TINY, "--days", "1", "--steps-a-day", "2", "--json", str(tmp_path / "out.json")]
    assert main(few) == 0
    lines = {line["table"]: line for line in json.loads((tmp_path / "out.json").read_text())["days"]}
    assert lines.keys() == {"every id", "admission", "eviction", "both", *collisions.POLICIES}
    for name in collisions.POLICIES:
        assert (lines[name]["rows"], lines[name]["ram_bytes"]) == (2, 2 * 32 + 123)
    assert main([*few, "--no-compare"]) == 0
    assert [line["table"] for line in json.loads((tmp_path / "out.json").read_text())["days"]] == ["both"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # its own
def test_torchrec_gives_ids_slots_and_takes_them_back():
    pytest.importorskip("torchrec")
    slots = collisions.ManagedCollisions("TorchRec LFU", 64)
    gone = 0
    for step in range(60):
        got, evicted = slots(er.hash_ids([f"{step} {k}" for k in range(20)]))
        assert got.shape == (20,)
        assert ((got >= 0) & (got < 64)).all()
        gone += len(evicted)
    assert gone > 20
    assert slots.nbytes > 64 * 16


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with pytest.raises(SystemExit):
        main([*TINY, "--users", "5"])
    assert "argument --users: does not go with --stream" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["demo", "--days", "5"])
    assert "argument --days: only goes with --stream" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*TINY, "--png", str(tmp_path / "x.png")]) == FAILED
    assert "--png needs matplotlib, which does not import" in capsys.readouterr().err


def test_the_days_are_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    assert main([*TINY, "--days", "2", "--png", str(tmp_path / "days.png")]) == 0
    assert (tmp_path / "days.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def _write_log(path: Path, interactions: int, days: int) -> list[bytes]:
    """Write a log of items of which each day has others, last line first; return its items in the order of time."""
    random = np.random.default_rng(0)
    items = [b"item \xe4 %d" % (10 * (k * days // interactions) + random.integers(10)) for k in range(interactions)]
    lines = [b"user %d\t%s\t5\t%d\n" % (k % 7, item, k) for k, item in enumerate(items)]
    path.write_bytes(b"".join(reversed(lines)))
    return items


def test_a_log_is_a_stream_of_its_items(tmp_path: Path):
    items = _write_log(tmp_path / "log.tsv", 1000, days=4)
    stream = LoggedStream(tmp_path / "log.tsv", days=4, batch_size=100, seed=0)
    assert (stream.steps_a_day, stream.interactions, stream.items) == (5, 1000, len(set(items)))
    batches = [stream.shown(day, step, 100) for day in range(4) for step in range(5)]
    taken = [name for batch in batches for name in batch.names[batch.labels == 1]]
    assert taken == items
    for end, batch in zip(range(50, 1001, 50), batches, strict=True):
        others = batch.names[batch.labels == 0].tolist()
        assert len(others) == 50
        assert set(others) <= set(items[:end])
    assert {name for batch in batches[-5:] for name in batch.names[batch.labels == 0].tolist()} >= set(items[:250])
    again = LoggedStream(tmp_path / "log.tsv", days=4, batch_size=100, seed=0).shown(3, 4, 100)
    assert again.names.tolist() == batches[-1].names.tolist()
    with pytest.raises(LogError, match=r"expected an interaction for each of 1001 days or more; got 1000\. Pass fewer"):
        LoggedStream(tmp_path / "log.tsv", days=1001, batch_size=100, seed=0)


def test_it_learns_from_a_log_of_strings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _write_log(tmp_path / "log.tsv", 4000, days=4)
    words = ["demo", "--stream", "--data", str(tmp_path / "log.tsv")]
    sizes = ["--days", "4", "--batch-size", "100", "--lr", "0.1", "--dim", "2"]
    assert main([*words, *sizes, "--json", str(tmp_path / "out.json")]) == 0
    days = json.loads((tmp_path / "out.json").read_text())["days"]
    last = {line["table"]: line for line in days if line["day"] == 4}
    assert last["every id"]["rows"] == 40
    for line in last.values():
        assert line["auc"] > 0.6  # three of four items that are drawn are those of days before
        assert line["best"] is None
    assert "4,000 interactions, each beside an item of those seen before" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--alive", "5"])
    assert "argument --alive: only goes without --data FILE, which says how many" in capsys.readouterr().err
