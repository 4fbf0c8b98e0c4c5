"""Reading logs of interactions: what is accepted, and what is said of the rest."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedrock.demo.data.interactions import Interactions, LogError, read_log

ROWS = [("7", "lamp", "3", "881250949"), ("ann", "5", "4.5", "881250950"), ("7", "5", "1", "881250951")]
SEPARATORS = {"tab": "\t", "comma": ",", "semicolon": ";", "movielens": "::", "space": " ", "spaces": "   "}


def read(folder: Path, text: str | bytes) -> Interactions:
    path = folder / "log.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_log(path)


def lines(rows: list[tuple[str, ...]], separator: str, width: int) -> str:
    return "".join(separator.join(row[:width]) + "\n" for row in rows)


def assert_rows(log: Interactions, timed: bool) -> None:
    """Assert that `log` is what `ROWS` say."""
    assert log.users.tolist() == [0, 1, 0]
    assert log.items.tolist() == [0, 1, 1]
    assert (log.num_users, log.num_items) == (2, 2)
    assert log.users.dtype == log.items.dtype == np.int64
    if timed:
        assert log.times is not None
        assert log.times.tolist() == [881250949.0, 881250950.0, 881250951.0]
    else:
        assert log.times is None


@pytest.mark.parametrize("separator", SEPARATORS.values(), ids=SEPARATORS)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_separators_and_widths(tmp_path: Path, separator: str, width: int):
    assert_rows(read(tmp_path, lines(ROWS, separator, width)), timed=width == 4)


@pytest.mark.parametrize(
    "header",
    [
        "user_id:token\titem_id:token\trating:float\ttimestamp:float",  # RecBole
        "userId\tmovieId\trating\ttimestamp",  # MovieLens
        "who\twhat\tstars\twhen",  # text above numbers
        "User ID\tItem ID\tRating\tTime",
    ],
)
def test_headers(tmp_path: Path, header: str):
    log = read(tmp_path, header + "\n" + lines(ROWS, "\t", 4))
    assert_rows(log, timed=True)
    assert "header line" in log.form
    assert "no header line" not in log.form


def test_a_header_decides_the_columns(tmp_path: Path):
    text = "item,title,timestamp,user\n" + "".join(f"{i},a film,{t},{u}\n" for u, i, _, t in ROWS)
    assert_rows(read(tmp_path, text), timed=True)


def test_three_columns_named_user_item_timestamp_are_no_ratings(tmp_path: Path):
    text = "user,item,timestamp\n" + "".join(f"{u},{i},{t}\n" for u, i, _, t in ROWS)
    assert_rows(read(tmp_path, text), timed=True)


def test_string_ids_without_header_are_data(tmp_path: Path):
    log = read(tmp_path, "ann lamp\nbob sofa\n")
    assert len(log.users) == 2
    assert "no header line" in log.form


def test_a_header_of_unknown_names_over_strings_and_numbers_is_found(tmp_path: Path):
    assert len(read(tmp_path, "who,what,points\nann,lamp,3\nbob,sofa,4\n").users) == 2


def test_blank_lines_spaces_and_line_ends(tmp_path: Path):
    text = "\n\n  \n" + "7 , lamp,3,881250949\r\n\r\nann,5 ,4.5,881250950\n7,5,1,881250951"
    assert_rows(read(tmp_path, text), timed=True)


def test_quoted_csv(tmp_path: Path):
    log = read(tmp_path, 'user,item\n"Smith, Ann","a ""b"" lamp"\nbob,"a ""b"" lamp"\n')
    assert log.items.tolist() == [0, 0]
    assert log.num_users == 2


def test_bytes_that_are_not_utf8_are_ids(tmp_path: Path):
    log = read(tmp_path, b"caf\xe9 1\ncaf\xe8 1\ncaf\xe9 2\n")
    assert log.users.tolist() == [0, 1, 0]


def test_byte_order_mark_is_no_part_of_an_id(tmp_path: Path):
    assert read(tmp_path, b"\xef\xbb\xbf1 1\n1 2\n").num_users == 1


def test_ids_are_text(tmp_path: Path):
    assert read(tmp_path, "01 a\n1 a\n").num_users == 2


@given(
    st.lists(
        st.tuples(*[st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1)] * 2), min_size=2
    )
)
def test_any_text_survives_csv(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]):
    path = tmp_path_factory.mktemp("csv") / "log.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("user", "item"))
        writer.writerows(pairs)
    log = read_log(path)
    users, items = list(dict.fromkeys(u for u, _ in pairs)), list(dict.fromkeys(i for _, i in pairs))
    assert [(users[u], items[i]) for u, i in zip(log.users, log.items, strict=True)] == pairs


FOUR = "1\t2\t3\t4\n"
BAD = {
    "too few fields": (FOUR + "\n1\t2\t3\n", "line 3: expected 4 fields", "got 3: '1 2 3'"),
    "too many fields": (FOUR + "1\t2\t3\t4\t5\n", "line 2: expected 4 fields", "got 5"),
    "one column": ("1\n2\n", "line 1: expected 2 to 4 fields", "got 1: '1'"),
    "five columns": ("1,2,3,4,5\n", "line 1: expected 2 to 4 fields", "got 5"),
    "no user": ("1,2\n,2\n", "line 2: expected a user and an item", "got an empty field"),
    "no item": ("1,2\n1, \n", "line 2: expected a user and an item", "got an empty field"),
    "rating": ("1,2,5\n1,3,good\n", "line 2: expected a number as rating", "got 'good'"),
    "empty rating": ("1,2,5\n1,3,\n", "line 2: expected a number as rating", "got ''"),
    "timestamp": (FOUR + "1\t2\t3\t2024-05-01\n", "line 2: expected a number as timestamp", "got '2024-05-01'"),
    "nan timestamp": (FOUR + "1\t2\t3\tnan\n", "line 2: expected a number as timestamp", "got 'nan'"),
    "infinite timestamp": (FOUR + "1\t2\t3\tinf\n", "line 2: expected a number as timestamp", "got 'inf'"),
    "empty": ("", "expected one interaction per line", "got an empty file"),
    "only blank lines": ("\n \n\n", "expected one interaction per line", "got an empty file"),
    "only a header": ("user,item\n", "expected interactions after the header line", "got none"),
    "open quote": ('user,item\n1,2\n3,"4\n', "line 3: expected CSV", "got unexpected end of data"),
    "text after a quote": ('user,item\n"1"x,2\n', "line 2: expected CSV", "Close its quotes"),
    "binary": (b"1 2\nPK\x03\x04\x00\x00\n", "line 2: expected a line of text", "got binary data"),
}


@pytest.mark.parametrize(("text", "expected", "got"), BAD.values(), ids=BAD)
def test_bad_lines(tmp_path: Path, text: str | bytes, expected: str, got: str):
    with pytest.raises(LogError) as error:
        read(tmp_path, text)
    message = str(error.value)
    assert message.startswith(str(tmp_path / "log.txt"))
    assert expected in message
    assert got in message
    assert message.endswith(".")


def test_missing_file(tmp_path: Path):
    with pytest.raises(LogError, match=r"cannot be read: No such file or directory\. Check the path\."):
        read_log(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("name", "interactions", "users", "items", "timed"),
    [("ml-100k.inter", 100_000, 943, 1682, True), ("video_games.txt", 287_107, 31_013, 23_715, False)],
)
def test_real_logs(data_folder: Path, name: str, interactions: int, users: int, items: int, timed: bool):
    log = read_log(data_folder / name)
    assert (len(log.users), log.num_users, log.num_items) == (interactions, users, items)
    assert (log.times is not None) == timed
