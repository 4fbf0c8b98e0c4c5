"""A log of one's own: how files are read, what is held out, and two models that train alike."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

import demo
import own_log
from common import DataError
from interactions import Interactions, read_log
from leave_one_out import CANDIDATES, NEGATIVES, NOTHING, Unseen, leave_one_out
from slow import examples, slow

ROWS = [("7", "lamp", "3", "881250949"), ("ann", "5", "4.5", "881250950"), ("7", "5", "1", "881250951")]
SEPARATORS = {"tab": "\t", "comma": ",", "semicolon": ";", "movielens": "::", "space": " ", "spaces": "   "}


def read(folder: Path, text: str | bytes) -> Interactions:
    path = folder / "log.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_log(path)


def lines(separator: str, width: int) -> str:
    return "".join(separator.join(row[:width]) + "\n" for row in ROWS)


def assert_rows(log: Interactions, timed: bool) -> None:
    assert log.users.tolist() == [0, 1, 0]
    assert log.items.tolist() == [0, 1, 1]
    assert (log.num_users, log.names) == (2, [b"lamp", b"5"])
    assert log.users.dtype == log.items.dtype == np.int64
    assert (None if log.times is None else log.times.tolist()) == ([881250949 + k for k in range(3)] if timed else None)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("separator", SEPARATORS.values(), ids=SEPARATORS)
def test_separators_and_widths(tmp_path: Path, separator: str):
    for width in (2, 3, 4):
        assert_rows(read(tmp_path, lines(separator, width)), timed=width == 4)


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
    log = read(tmp_path, header + "\n" + lines("\t", 4))
    assert_rows(log, timed=True)
    assert log.form == "separated by tabs, header line"


def test_columns_blank_lines_quotes_and_bytes(tmp_path: Path):
    columns = "item,title,timestamp,user\n" + "".join(f"{i},a film,{t},{u}\n" for u, i, _, t in ROWS)
    assert_rows(read(tmp_path, columns), timed=True)
    blank = "\n\n  \n" + "7 , lamp,3,881250949\r\n\r\nann,5 ,4.5,881250950\n7,5,1,881250951"
    assert_rows(read(tmp_path, blank), timed=True)
    log = read(tmp_path, 'user,item\n"Smith, Ann","a ""b"" lamp"\nbob,"a ""b"" lamp"\n')
    assert (log.items.tolist(), log.num_users) == ([0, 0], 2)
    assert read(tmp_path, b"caf\xe9 1\ncaf\xe8 1\ncaf\xe9 2\n").users.tolist() == [0, 1, 0]  # no UTF-8
    assert read(tmp_path, b"\xef\xbb\xbf1 1\n1 2\n").num_users == 1  # a byte order mark
    assert read(tmp_path, "01 a\n1 a\n").num_users == 2
    strings = read(tmp_path, "ann lamp\nbob sofa\n")
    assert (len(strings.users), strings.form) == (2, "separated by whitespace, no header line")


@settings(max_examples=examples(20))
@given(
    st.lists(
        st.tuples(*[st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1)] * 2), min_size=2
    )
)
def test_any_text_survives_csv(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]):
    path = tmp_path_factory.mktemp("csv") / "log.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("user", "item"), *pairs])
    log = read_log(path)
    users, items = list(dict.fromkeys(u for u, _ in pairs)), list(dict.fromkeys(i for _, i in pairs))
    assert [(users[u], items[i]) for u, i in zip(log.users, log.items, strict=True)] == pairs


FOUR = "1\t2\t3\t4\n"
BAD = {
    "too few fields": (FOUR + "\n1\t2\t3\n", "line 3: expected 4 fields", "got 3: ['1', '2', '3']"),
    "too many fields": (FOUR + "1\t2\t3\t4\t5\n", "line 2: expected 4 fields", "got 5"),
    "one column": ("1\n2\n", "line 1: expected 2 to 4 fields", "got 1: ['1']"),
    "five columns": ("1,2,3,4,5\n", "line 1: expected 2 to 4 fields", "got 5"),
    "no user": ("1,2\n,2\n", "line 2: expected a user and an item", "got an empty field"),
    "no item": ("1,2\n1, \n", "line 2: expected a user and an item", "got an empty field"),
    "rating": ("1,2,5\n1,3,good\n", "line 2: expected a number as the rating", "got 'good'"),
    "timestamp": (FOUR + "1\t2\t3\t2024-05-01\n", "line 2: expected a number as the timestamp", "got '2024-05-01'"),
    "nan timestamp": (FOUR + "1\t2\t3\tnan\n", "line 2: expected a number as the timestamp", "got 'nan'"),
    "empty": ("", "expected one interaction per line", "got an empty file"),
    "only blank lines": ("\n \n\n", "expected one interaction per line", "got an empty file"),
    "only a header": ("user,item\n", "expected interactions after the header line", "got none"),
    "open quote": ('user,item\n1,2\n3,"4\n', "expected CSV", "got unexpected end of data"),
    "binary": (b"1 2\nPK\x03\x04\x00\x00\n", "expected one interaction per line", "got binary data"),
}


@pytest.mark.parametrize(("text", "expected", "got"), BAD.values(), ids=BAD)
def test_bad_lines(tmp_path: Path, text: str | bytes, expected: str, got: str):
    with pytest.raises(DataError) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path / "log.txt"))
    assert expected in str(error.value)
    assert got in str(error.value)


# ---------------------------------------------------------------- what is held out


def log_of(pairs: Any, times: list[float] | None = None, users: int = 0, items: int = 0) -> Interactions:
    array = np.array(pairs, np.int64).reshape(-1, 2)
    stamps = None if times is None else np.array(times, np.float64)
    names = [b""] * max(items, array[:, 1].max() + 1)
    return Interactions(array[:, 0].copy(), array[:, 1].copy(), stamps, max(users, array[:, 0].max() + 1), names, "")


@st.composite
def logs(draw: st.DrawFn) -> Interactions:
    users, items = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    pair = st.tuples(st.integers(0, users - 1), st.integers(0, items - 1))
    pairs = draw(st.lists(pair, min_size=1, max_size=40))
    stamp = st.integers(0, 5).map(float)
    return log_of(pairs, draw(st.none() | st.lists(stamp, min_size=len(pairs), max_size=len(pairs))), users, items)


def expected_order(log: Interactions, user: int) -> list[int]:
    """The user's items by time, ties in the order of the file, each once: the slow way."""
    times = np.zeros(len(log.users)) if log.times is None else log.times
    rows = sorted((time, row) for row, time in enumerate(times) if log.users[row] == user)
    return list(dict.fromkeys(int(log.items[row]) for _, row in rows))


@settings(max_examples=examples(60))
@given(logs(), st.integers(0, 3))
def test_the_last_item_is_held_out_among_unseen_ones(log: Interactions, seed: int):
    split = leave_one_out(log, seed)
    tested = dict(zip(split.test_users.tolist(), split.candidates.tolist(), strict=True))
    trained = defaultdict(list)
    for user, item in zip(split.users.tolist(), split.items.tolist(), strict=True):
        trained[user].append(item)
    orders = {user: expected_order(log, user) for user in set(log.users.tolist())}
    for user, order in orders.items():
        is_tested = 1 < len(order) < log.num_items
        assert (user in tested) == is_tested
        assert trained[user] == (order[:-1] if is_tested else order)
        if is_tested:
            held_out, *others = tested[user]
            real = [item for item in others if item != NOTHING]
            assert held_out == order[-1]
            assert len(set(real)) == len(real) == min(CANDIDATES, log.num_items - len(order))
            assert not set(real) & set(order)
    users, items, labels = split.epoch(seed, 1)
    negatives = [(user, item) for user, item, label in zip(users, items, labels, strict=True) if not label]
    assert all(item not in orders[user] and 0 <= item < log.num_items for user, item in negatives)
    assert len(negatives) == NEGATIVES * sum(len(orders[user]) < log.num_items for user in split.users.tolist())
    positives = sorted(zip(users[labels == 1].tolist(), items[labels == 1].tolist(), strict=True))
    assert positives == sorted(zip(split.users.tolist(), split.items.tolist(), strict=True))


def test_candidates_of_a_large_catalog_are_uniform():
    users = 3000
    log = log_of([(user, user % 2) for user in range(users)] + [(user, 150) for user in range(users)], items=151)
    negatives = leave_one_out(log, seed=3).candidates[:, 1:]
    assert all(len(set(row)) == CANDIDATES for row in negatives.tolist())
    # Each of 149 unseen items is among the 100 candidates of a user with chance 100/149: 6 standard deviations.
    counts = np.bincount(negatives.ravel(), minlength=151)[2:150]
    chance = 100 / 149
    assert np.abs(counts - users * chance).max() < 6 * np.sqrt(users * chance * (1 - chance))


def test_unseen_picks_every_unseen_item_once():
    random = np.random.default_rng(0)
    seen = random.random((20, 30)) < random.random((20, 1))
    unseen = Unseen(*np.nonzero(seen), num_users=20, num_items=30)
    everyone = np.repeat(np.arange(20), unseen.counts)
    ranks = np.concatenate([np.arange(count) for count in unseen.counts])
    np.testing.assert_array_equal((everyone, unseen.pick(everyone, ranks)), np.nonzero(~seen))


def test_epochs_are_deterministic_and_differ():
    split = leave_one_out(log_of(np.random.default_rng(0).integers(0, 40, (500, 2)), items=400), 5)
    first, again, second = split.epoch(5, 1), split.epoch(5, 1), split.epoch(5, 2)
    np.testing.assert_array_equal(first, again)
    assert sorted(first[1].tolist()) != sorted(second[1].tolist())


# ---------------------------------------------------------------- training


@pytest.fixture
def log(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    rows = [f"u{user}\tfilm {item}\t{k}" for k, (user, item) in enumerate(random.integers(0, 60, (1500, 2)))]
    path = tmp_path / "log.tsv"
    path.write_text("user\titem\ttimestamp\n" + "\n".join(rows))
    return path


@pytest.mark.parametrize("model", ["neumf", *slow("mf", "gmf")])
def test_both_train_alike(log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str):
    found: list[own_log.Learner] = []
    monkeypatch.setattr(own_log, "comparison", lambda *learners: found.extend(learners) or "")
    words = ["--data", str(log), "--model", model, "--epochs", "2", "--batch-size", "512", "--dim", "16"]
    demo.main(words)
    output = capsys.readouterr().out
    assert "separated by tabs, header line" in output
    assert "HR@10" in output
    ours, theirs = found
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
    assert ours.epochs[-1].hits == pytest.approx(theirs.epochs[-1].hits, abs=0.02)
    own_log.main([*words, "--no-compare"])
    assert "SparseAdam" not in capsys.readouterr().out


def compared(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[float, float, float]:
    """Train on a real log; return by how much losses and hit rates differ, and the last hit rate."""
    own_log.main(["--data", str(path), *options])
    output = capsys.readouterr().out
    losses = float(output.partition("differ by ")[2].split()[0])
    hits = float(output.partition("differs by ")[2].split()[0])
    return losses, hits, float(output.partition("\n\nlosses")[0].splitlines()[-1].split()[2])


def test_the_first_steps_on_a_real_log(data_folder: Path, capsys: pytest.CaptureFixture[str]):
    losses, hits, _ = compared(data_folder / "ml-100k.inter", capsys, "--epochs", "1", "--dim", "16")
    assert losses <= 1e-5
    assert hits <= 0.002


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gmf", "neumf"])
@pytest.mark.parametrize(("name", "hit_rate"), [("ml-100k.inter", 0.64), ("video_games.txt", 0.59)])
def test_real_logs_train_alike(
    data_folder: Path, capsys: pytest.CaptureFixture[str], name: str, hit_rate: float, model: str
):
    losses, hits, reached = compared(data_folder / name, capsys, "--model", model)
    assert losses <= 1e-5
    assert hits <= 0.002
    assert reached > hit_rate


def test_nothing_to_hold_out(tmp_path: Path):
    (tmp_path / "log.txt").write_text("1 2\n2 2\n3 1\n")
    with pytest.raises(DataError, match="expected users with two interactions or more; got none"):
        own_log.main(["--data", str(tmp_path / "log.txt")])


def test_a_model_that_does_not_tell_items_apart_gets_no_credit():
    split = leave_one_out(log_of([(0, 1), (0, 2), (1, 3), (1, 4)], items=9), seed=0)

    def same(users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return torch.zeros(items.shape)

    ranks = own_log.ranks_of(same, split)  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(ranks, (split.candidates[:, 1:] != NOTHING).sum(1))
