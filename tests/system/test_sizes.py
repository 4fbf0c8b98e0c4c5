"""How sizes may be given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import embedrock as er
import embedrock.torch as ert
from embedrock.cli.main import main
from embedrock.errors import ArgumentError
from embedrock.system.ram import memory_limit
from embedrock.system.sizes import format_at_least, format_bytes, parse_bytes, parse_device_memory

GIB = 1 << 30
ACCEPTED = [
    (7, 7),
    (np.int64(7), 7),
    (1e9, 10**9),
    (np.float32(2**20), 1 << 20),
    ("1e9", 10**9),
    ("2.5E3", 2500),
    ("1_000_000", 10**6),
    ("9007199254740993", 9007199254740993),
    (2**60 + 1, 2**60 + 1),
    ("2G", 2 * GIB),
    ("2g", 2 * GIB),
    ("2GiB", 2 * GIB),
    ("2GB", 2 * 10**9),
    (" 1.5 K ", 1536),
    ("3M", 3 << 20),
    ("1T", 1 << 40),
    ("25%", 1000),
    ("12.5 %", 500),
    ("100%", 4000),
    ("0.001%", 1),
]
REFUSED = ["", "%", "G", "2 G B", "1e", "1e9999", "-1", "0", "0G", 0.0, -1.0, 0.5, "101%", True, None, [1], b"2G", 1j]


@pytest.mark.parametrize(("size", "expected"), ACCEPTED, ids=str)
def test_sizes(size: int | float | str, expected: int):
    found = parse_bytes(size, whole=lambda: 4000)
    assert (found, type(found)) == (expected, int)


@pytest.mark.parametrize("size", REFUSED, ids=repr)
def test_what_is_no_size_is_told_what_is_one(size: object):
    with pytest.raises(ArgumentError) as caught:
        parse_bytes(size, "memory")  # pyright: ignore[reportArgumentType]
    text = str(caught.value)
    assert text.startswith("`memory` ")
    assert repr(size) in text or type(size).__name__ in text
    assert 'Pass bytes, such as 1e9, a size such as "512MiB", "2GB" or "2G" (GiB), or a share such as "25%".' in text


def test_shares_are_of_the_ram_that_the_process_may_use(tmp_path: Path):
    quarter = int(memory_limit() * 0.25)
    assert parse_bytes("25%") == quarter
    for path in (None, tmp_path / "t.rock"):
        with er.Table(100, 4, path=path, memory="25%") as table:
            assert table.stats()["budget_bytes"] == quarter
    with er.open(tmp_path / "t.rock", mode="r", memory="1M") as table:
        assert table.stats()["budget_bytes"] == 1 << 20
    layer = ert.Embedding(100, 4, path=tmp_path / "layer.rock", memory=1e6)
    assert layer.table.stats()["budget_bytes"] == 10**6
    layer.table.close()
    given = ert.Embedding(100, 4, memory="2G")
    assert given.table.stats()["budget_bytes"] == 2 * GIB


def test_a_share_of_a_gpu_is_known_once_there_is_one():
    assert parse_device_memory(" 25% ") == "25%"
    assert parse_device_memory("2G") == 2 * GIB
    assert parse_device_memory(0) == 0
    assert parse_device_memory(None) is None
    assert er.Table(100, 4, device_memory="25%").options["device_memory"] == "25%"


def test_the_command_line_takes_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    er.Table(100, 4, path=tmp_path / "t.rock").close()
    for size in ("1%", "64M", "1e8"):
        assert main(["compact", str(tmp_path / "t.rock"), "--memory", size]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["compact", str(tmp_path / "t.rock"), "--memory", "much"])
    told = capsys.readouterr().err
    assert "`--memory` is not a size: got 'much'" in told
    assert '"2G" (GiB), or a share such as "25%"' in told


@pytest.mark.parametrize("count", [1, 1023, 1025, 2_113_000, 2 * GIB, 2 * GIB + 1, (1 << 20) - 1, 3072 * GIB + 1])
def test_a_size_to_pass_is_enough_and_at_most_a_tenth_of_its_unit_more(count: int):
    text = format_at_least(count)
    assert parse_bytes(text) >= count
    assert text == format_bytes(count) or parse_bytes(format_bytes(count)) < count
    unit = parse_bytes("1 " + text.split()[1])
    assert parse_bytes(text) - count <= unit / 10 + 1
