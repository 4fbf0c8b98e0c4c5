"""The stream whose items are born and die, planted and from a log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import demo
import stream
from common import DataError, auc

TINY = ["--days", "3", "--steps-a-day", "15", "--alive", "200", "--batch-size", "512", "--lr", "0.1", "--dim", "2"]


def test_each_day_brings_new_items_and_takes_as_many():
    planted = stream.PlantedStream(alive=100, seed=0)
    days = [planted.shown(day, 0, 20_000) for day in range(3)]
    names = [set(day.names.tolist()) for day in days]
    regular = [{name for name in day if len(name) < 12} for day in names]
    assert [len(regular[0] & day) for day in regular] == [100, 80, 60]
    assert all(abs((len(day) - 100) / 20_000 - stream.SHOWN_ONCE) < 0.02 for day in names)
    assert not set.intersection(*names) - set.intersection(*regular)
    assert days[0].planted is not None
    assert 0.7 < auc(days[0].labels, days[0].planted) < 0.9
    for one, other in zip(stream.PlantedStream(alive=100, seed=0).shown(2, 0, 20_000), days[2], strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_learns_with_fewer_rows(capsys: pytest.CaptureFixture[str]):
    last = {line["table"]: line for line in stream.main(TINY) if line["day"] == 3}
    assert last.keys() == {"every id", "admission", "eviction", "both"}
    for line in last.values():
        assert 0.55 < line["auc"] < line["best"] < 0.9
    assert 2 * last["both"]["rows"] < last["every id"]["rows"]
    assert last["eviction"]["disk"] < last["every id"]["disk"]
    assert last["eviction"]["rows"] <= 1024
    assert "every id" in capsys.readouterr().out


def write_log(path: Path, interactions: int, days: int) -> list[bytes]:
    """Write a log of items of which each day has others, last line first; return its items in the order of time."""
    random = np.random.default_rng(0)
    items = [b"item \xe4 %d" % (10 * (k * days // interactions) + random.integers(10)) for k in range(interactions)]
    lines = [b"user %d\t%s\t5\t%d\n" % (k % 7, item, k) for k, item in enumerate(items)]
    path.write_bytes(b"".join(reversed(lines)))
    return items


def test_a_log_is_a_stream_of_its_items(tmp_path: Path):
    items = write_log(tmp_path / "log.tsv", 1000, days=4)
    logged = stream.LoggedStream(tmp_path / "log.tsv", days=4, batch_size=100, seed=0)
    assert (logged.steps_a_day, logged.items) == (5, len(set(items)))
    batches = [logged.shown(day, step, 100) for day in range(4) for step in range(5)]
    assert [name for batch in batches for name in batch.names[batch.labels == 1]] == items
    for end, batch in zip(range(50, 1001, 50), batches, strict=True):
        others = batch.names[batch.labels == 0].tolist()
        assert len(others) == 50
        assert set(others) <= set(items[:end])
    again = stream.LoggedStream(tmp_path / "log.tsv", days=4, batch_size=100, seed=0).shown(3, 4, 100)
    assert again.names.tolist() == batches[-1].names.tolist()
    with pytest.raises(DataError, match=r"an interaction for each of 1001 days or more; got 1000\. Pass fewer"):
        stream.LoggedStream(tmp_path / "log.tsv", days=1001, batch_size=100, seed=0)


def test_it_learns_from_a_log_of_strings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_log(tmp_path / "log.tsv", 4000, days=4)
    sizes = ["--days", "4", "--batch-size", "100", "--lr", "0.1", "--dim", "2"]
    demo.main(["--stream", "--data", str(tmp_path / "log.tsv"), *sizes])
    last = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  4  ")]
    assert [line[-6] for line in last if "every" in line] == ["40"]
    for line in last:
        assert float(line[-8]) > 0.6  # three of four items that are drawn are those of days before
        assert line[-7] == "?"
