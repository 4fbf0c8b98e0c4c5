"""Logs in Criteo's format: what is read, from where, and what is said of lines that are wrong."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from embedrock.demo.data import criteo
from embedrock.demo.data.criteo import CriteoLog, CriteoSplit
from embedrock.demo.data.interactions import LogError


def line(label: object = 1, numbers: str = "7", strings: str = "0000001f", **fields: str) -> str:
    """Return a line; `fields` are others by their number, from 1, as ``f3="x"``."""
    values = [str(label), *[numbers] * 13, *[strings] * 26]
    for name, value in fields.items():
        values[int(name[1:]) - 1] = value
    return "\t".join(values)


def some_lines(count: int, seed: int = 0) -> list[str]:
    """Return random lines, a third of whose fields are missing."""
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        numbers = ["" if random.random() < 1 / 3 else str(random.integers(-3, 10**6)) for _ in range(13)]
        strings = ["" if random.random() < 1 / 3 else f"{random.integers(0, 2**32):08x}" for _ in range(26)]
        lines.append("\t".join([str(random.integers(0, 2)), *numbers, *strings]))
    return lines


def written(folder: Path, text: str | bytes, name: str = "day_0") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def plainly(lines: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return labels, numbers and ids as a reader believes at sight."""
    fields = [each.split("\t") for each in lines]
    numbers = [[np.log1p(np.float32(max(0, int(value or 0)))) for value in each[1:14]] for each in fields]
    ids = [[int(value or "0", 16) for value in each[14:]] for each in fields]
    return np.array([float(each[0]) for each in fields]), np.array(numbers), np.array(ids)


def check(log: CriteoLog, lines: list[str], first: int, count: int) -> None:
    found = log.read(first, count)
    labels, numbers, ids = plainly(lines[first : first + count])
    np.testing.assert_array_equal(found.labels, labels)
    np.testing.assert_allclose(found.numbers, numbers, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate(found.ids, 1), ids)
    assert {each.shape for each in found.ids} == {(count, 1)}
    assert (found.labels.dtype, found.numbers.dtype, found.ids[0].dtype) == (np.float32, np.float32, np.int64)


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "not ended"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_lines_are_read_from_any_place_in_any_order(tmp_path, monkeypatch, end, last, packed):
    monkeypatch.setattr(criteo, "BLOCK", 700)  # a line has 200 bytes or so
    monkeypatch.setattr(criteo, "STRIDE", 8)
    lines = some_lines(50)
    text = (end.join(lines) + end * last).encode()
    with CriteoLog(written(tmp_path, gzip.compress(text) if packed else text)) as log:
        assert log.lines == 50
        for first, count in [(0, 50), (0, 7), (7, 7), (14, 1), (3, 20), (49, 1), (40, 10), (0, 1)]:
            check(log, lines, first, count)


def test_missing_and_negative_numbers_count_as_0_and_missing_strings_as_0(tmp_path):
    with CriteoLog(written(tmp_path, line(f2="", f3="-1", f15="", f16="FFFFFFFF") + "\n")) as log:
        found = log.read(0, 1)
    assert found.numbers[0, :3].tolist() == pytest.approx([0, 0, np.log(8)])
    assert [found.ids[0].item(), found.ids[1].item(), found.ids[2].item()] == [0, 2**32 - 1, 31]


def test_ids_below(tmp_path):
    with CriteoLog(written(tmp_path, line()), ids_below=10) as log:
        assert log.read(0, 1).ids[0].item() == 1


WRONG = {
    "missing columns": ("1\t2\t3", "expected 40 fields separated by tabs", "got '3: 1\\t2\\t3'"),
    "one column more": (line() + "\tx", "expected 40 fields", "got '41: "),
    "blank": ("", "expected 40 fields", "got '1: '"),
    "no label, as in Criteo's test.txt": (line().partition("\t")[2], "expected 40 fields", "got '39: "),
    "label missing": (line(label=""), "expected 0 or 1 as label", "got ''"),
    "label of 2": (line(label=2), "expected 0 or 1 as label", "got '2'"),
    "label below 0": (line(label=-1), "expected 0 or 1 as label", "got '-1'"),
    "number with a point": (line(f5="1.5"), "expected a whole number as field 5", "got '1.5'"),
    "only a minus": (line(f14="-"), "expected a whole number as field 14", "got '-'"),
    "number too long": (line(f14="1" * 16), "expected a whole number as field 14", "got '1111"),
    "no hexadecimal digit": (line(f15="0000001g"), "at most 8 hexadecimal digits as field 15", "got '0000001g'"),
    "too many digits": (line(f40="123456789"), "at most 8 hexadecimal digits as field 40", "got '123456789'"),
    "a return within": (line(f40="1\r\r"), "at most 8 hexadecimal digits as field 40", "got '1\\r'"),
}


@pytest.mark.parametrize(("wrong", "expected", "got"), WRONG.values(), ids=WRONG)
def test_wrong_lines_are_told_with_their_number(tmp_path, wrong, expected, got):
    path = written(tmp_path, "\n".join([*some_lines(20), wrong, *some_lines(3)]) + "\n")
    with CriteoLog(path) as log:
        assert log.read(5, 15).labels.shape == (15,)
        with pytest.raises(LogError) as error:
            log.read(5, 19)
    text = str(error.value)
    assert text.startswith(f"{path}, line 21: expected")
    assert expected in text
    assert got in text
    assert text.endswith("Fix or remove the line.")


def test_two_lines_that_have_the_right_number_of_fields_together(tmp_path):
    short, long = line().removesuffix("\t0000001f"), line() + "\t0000001f"
    with CriteoLog(written(tmp_path, f"{line()}\n{short}\n{long}\n")) as log, pytest.raises(LogError, match="line 2: "):
        log.read(0, 3)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(LogError, match="got an empty file"):
        CriteoLog(written(tmp_path, ""))
    with pytest.raises(LogError, match="missing: cannot be read: No such file"):
        CriteoLog(tmp_path / "missing")
    packed = gzip.compress("\n".join(some_lines(100)).encode())
    with pytest.raises(LogError, match=r"cannot be read: .*Check the file"):
        CriteoLog(written(tmp_path, packed[:-200]))


def test_batches_are_a_function_of_the_step_and_go_round(tmp_path):
    lines = some_lines(107)
    with CriteoLog(written(tmp_path, "\n".join(lines))) as log:
        split = CriteoSplit(log, 20)
        assert split.batches == 4
        assert len(split.test.labels) == 10
        check_test, numbers, _ = plainly(lines[97:])
        np.testing.assert_array_equal(split.test.labels, check_test)
        np.testing.assert_allclose(split.test.numbers, numbers, rtol=1e-6)
        for step in (0, 1, 3, 4, 9, 2):
            labels, numbers, _ = plainly(lines[step % 4 * 20 : step % 4 * 20 + 20])
            np.testing.assert_array_equal(split.batch(step).labels, labels)
            np.testing.assert_allclose(split.batch(step).numbers, numbers, rtol=1e-6)
        assert split.facts(6) == {"passes": 1.5}
        assert len(CriteoSplit(log, 1000).batch(3).labels) == 97


def test_a_split_needs_lines_and_both_labels(tmp_path):
    with CriteoLog(written(tmp_path, "\n".join(some_lines(9)))) as log, pytest.raises(LogError, match="got 9"):
        CriteoSplit(log, 4)
    with CriteoLog(written(tmp_path, "\n".join([line()] * 30))) as log, pytest.raises(LogError, match="got only 1"):
        CriteoSplit(log, 4)
