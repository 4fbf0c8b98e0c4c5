"""`er.Vocabulary` against a dict, in RAM and on disk, in all that users do with it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import embedrock as er
from embedrock.errors import (
    ArgumentError,
    ClosedTableError,
    IdError,
    IdTypeError,
    MemoryBudgetError,
    ReadOnlyTableError,
    TableFileError,
    TableLockedError,
    UnsupportedError,
)
from embedrock.vocabulary import blocks, files, runs
from on_system import on
from slow import examples
from suites import FaultFS

WORDS = ["", "a", "eight888", "Grüße", "日本語", "\U0001f600 smile", "inner\0zero", "x" * 300, "x" * 9000]


def check(vocabulary: er.Vocabulary, known: dict[str, int]) -> None:
    """Compare all that a vocabulary has with a dict."""
    words = list(known)
    assert len(vocabulary) == len(words)
    assert vocabulary.lookup(words).tolist() == list(range(len(words)))
    assert vocabulary.strings(np.arange(len(words))).tolist() == words
    assert vocabulary.lookup([f"{word}?" for word in words if f"{word}?" not in known]).tolist() == [-1] * sum(
        f"{word}?" not in known for word in words
    )


def add(vocabulary: er.Vocabulary, known: dict[str, int], words: list[str]) -> None:
    expected = [known.setdefault(word, len(known)) for word in words]
    assert vocabulary.add(words).tolist() == expected


def some_words(seed: int, count: int, most: int) -> list[str]:
    return [f"word {number}" for number in np.random.default_rng(seed).integers(0, most, count)]


@pytest.fixture(params=["RAM", "disk"])
def vocabulary(request: pytest.FixtureRequest, tmp_path: Path):
    made = er.Vocabulary(None if request.param == "RAM" else tmp_path / "words.rock")
    yield made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", er.UncommittedWarning)
        made.close()


# ---------------------------------------------------------------- strings and ids


def test_ids_are_in_order_of_first_occurrence(vocabulary: er.Vocabulary):
    assert vocabulary.add(["red", "green", "red"]).tolist() == [0, 1, 0]
    assert vocabulary.add(["blue", "green"]).tolist() == [2, 1]
    assert vocabulary.lookup([["blue", "none"], ["red", "red"]]).tolist() == [[2, -1], [0, 0]]
    assert vocabulary.strings([[2, 0], [1, 1]]).tolist() == [["blue", "red"], ["green", "green"]]
    assert len(vocabulary) == 3


@pytest.mark.parametrize(
    "form",
    [
        np.array,
        tuple,
        pyarrow.array,
        lambda words: [word.encode() for word in words],
        lambda words: np.array(words, object),
    ],
    ids=["U", "tuple", "Arrow", "bytes", "objects"],
)  # fmt: skip
def test_whatever_they_are_in(form: Any, vocabulary: er.Vocabulary):
    assert vocabulary.add(WORDS).tolist() == list(range(len(WORDS)))
    assert vocabulary.add(form(WORDS)).tolist() == list(range(len(WORDS)))
    assert vocabulary.strings(np.arange(len(WORDS))).tolist() == WORDS
    assert vocabulary.strings([3], kind=bytes).tolist() == ["Grüße".encode()]


def test_nothing(vocabulary: er.Vocabulary):
    assert vocabulary.add([]).shape == vocabulary.lookup([]).shape == vocabulary.strings([]).shape == (0,)
    assert vocabulary.lookup(["a"]).tolist() == [-1]
    assert vocabulary.add("a").shape == vocabulary.strings(0).shape == ()


def test_bytes_that_are_no_text(vocabulary: er.Vocabulary):
    assert vocabulary.add([b"\xff", b"\x00\x00"]).tolist() == [0, 1]
    assert vocabulary.strings([0, 1], bytes).tolist() == [b"\xff", b"\x00\x00"]
    with pytest.raises(IdTypeError, match=r"strings of .*vocabulary.* must be UTF-8 to be text.*kind=bytes"):
        vocabulary.strings([0])


ACTS = st.sampled_from(["nothing", "commit", "compact", "2KiB", "1GiB"])  # the last two open it anew


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.tuples(st.lists(st.text("abé\0", max_size=3), max_size=12), ACTS), max_size=8))
def test_any_program(program: list[tuple[list[str], str]]):
    known, committed, system = dict[str, int](), dict[str, int](), FaultFS()
    system.mkdir("/data")
    vocabulary = on(system).Vocabulary("/data/v", memory="2KiB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", er.UncommittedWarning)
        for batch, act in program:
            add(vocabulary, known, batch)
            if act.endswith("iB"):
                vocabulary.close()
                vocabulary, known = on(system).Vocabulary("/data/v", memory=act), {**committed}
            elif act != "nothing":
                getattr(vocabulary, act)()
                committed = {**known}
            check(vocabulary, known)
        vocabulary.verify()
        vocabulary.close()


def test_the_budget_and_the_cuts_change_nothing(tmp_path: Path):
    words, expected = some_words(0, 4000, 1500), dict[str, int]()
    in_order = [expected.setdefault(word, len(expected)) for word in words]
    for memory, cut in (("4KiB", 100), ("64KiB", 1000), ("64MiB", 4000)):
        with er.Vocabulary(tmp_path / memory, memory) as vocabulary:
            found = [vocabulary.add(words[k : k + cut]) for k in range(0, len(words), cut)]
            assert np.concatenate(found).tolist() == in_order
            vocabulary.commit()
            check(vocabulary, expected)
            vocabulary.verify()
        with er.Vocabulary(tmp_path / memory, memory, mode="r") as vocabulary:
            check(vocabulary, expected)


def test_files_are_merged_as_they_grow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "HEAD_BYTES", 20_000)
    monkeypatch.setattr(blocks, "PIECE_PAGES", 3)
    monkeypatch.setattr(runs, "LOOKED_UP_PAGES", 3)  # several, which threads take in turn
    known, system = dict[str, int](), FaultFS()
    system.mkdir("/data")
    with on(system).Vocabulary("/data/v", memory="16KiB") as vocabulary:
        for k in range(60):
            add(vocabulary, known, some_words(k, 200, 20_000))
            if k % 7 == 0:
                vocabulary.commit()
        vocabulary.commit()
        assert 2 <= vocabulary.stats()["files"] <= 6
        check(vocabulary, known)
        vocabulary.verify()
        before = vocabulary.stats()["disk_bytes"]
        vocabulary.compact()
        assert vocabulary.stats()["files"] == 1 + files.HEADS  # those that came first stay in some of their own
        assert vocabulary.stats()["disk_bytes"] <= before
        check(vocabulary, known)
        vocabulary.verify()
        assert len(system.listdir("/data/v/runs")) == 1 + files.HEADS
        assert len(system.listdir("/data/v/vocabulary")) == 1


def test_equal_hashes_are_told_apart_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Strings whose hashes are equal, or equal in what an entry has of them, stay together and are all found."""
    from embedrock.vocabulary.blocks import StringQuery

    of = StringQuery.of
    monkeypatch.setattr(
        StringQuery, "of", lambda strings, salt: (found := of(strings, salt))._replace(hashes=found.hashes % 5 << 29)
    )
    known = dict[str, int]()
    with er.Vocabulary(tmp_path / "v", memory="8KiB") as vocabulary:
        for k in range(8):
            add(vocabulary, known, some_words(k, 150, 1000))
        vocabulary.commit()
        vocabulary.compact()
        check(vocabulary, known)
        vocabulary.verify()


def test_a_lookup_reads_a_page_for_each_string(tmp_path: Path):
    words = [f"word {k}" for k in range(20_000)]
    with er.Vocabulary(tmp_path / "v") as vocabulary:
        vocabulary.add(words)
        vocabulary.commit()
    with er.Vocabulary(tmp_path / "v", memory="64KiB", mode="r") as vocabulary:
        vocabulary.lookup(words[::2000])
        assert vocabulary.stats()["pages_read"] <= 10
        vocabulary.strings([5, 10_000])
        assert vocabulary.stats()["pages_read"] <= 12
    with er.Vocabulary(tmp_path / "v", memory="64MiB", mode="r") as vocabulary:
        assert vocabulary.lookup(words).tolist() == list(range(20_000))
        assert vocabulary.stats()["ram_bytes"] < 10 * 20_000  # of which a character takes 4 bits
        assert vocabulary.stats()["pages_read"] == 0


def test_opening_reads_no_strings_and_a_string_is_read_once(tmp_path: Path):
    words = [f"word {k}" for k in range(20_000)]
    with er.Vocabulary(tmp_path / "v") as vocabulary:
        vocabulary.add(words)
        vocabulary.commit()
    with er.Vocabulary(tmp_path / "v", memory="256KiB", mode="r") as vocabulary:
        assert vocabulary.stats()["ram_bytes"] < 16 << 10
        assert vocabulary.lookup(words[::2000]).tolist() == list(range(0, 20_000, 2000))
        pages = vocabulary.stats()["pages_read"]
        assert 0 < pages <= 10
        assert vocabulary.lookup(words[::2000]).tolist() == list(range(0, 20_000, 2000))
        assert vocabulary.stats()["pages_read"] == pages
        rng = np.random.default_rng(0)
        for _ in range(200):  # whatever is found, what is kept of it stays within bounds
            ids = rng.integers(0, 20_000, 100)
            assert vocabulary.lookup([words[k] for k in ids]).tolist() == ids.tolist()
        assert vocabulary.stats()["ram_bytes"] < 256 << 10
        most = vocabulary.stats()["pages_read"]
        assert vocabulary.lookup(words).tolist() == list(range(20_000))
        assert vocabulary.stats()["pages_read"] == most  # all of the file is in RAM, as it was read often
    with er.Vocabulary(tmp_path / "v", memory="64KiB", mode="r") as vocabulary:
        for _ in range(3):
            assert vocabulary.lookup(words).tolist() == list(range(20_000))
        assert vocabulary.stats()["ram_bytes"] < 64 << 10


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("verb", ["add", "lookup"])
def test_what_is_no_string(verb: str, vocabulary: er.Vocabulary):
    vocabulary.add(["a"])
    for values, message in (
        (["b", None], r"`values` of .*vocabulary.* must be strings or bytes: got None at \[1\]"),
        (["b", float("nan")], r"got nan at \[1\].*Leave out"),
        (pyarrow.array(["b", None]), r"got None at \[1\]"),
        (["b", "\ud800"], r"must be Unicode text: got '\\ud800' at \[1\]"),
        ([1, 2], r"must be all strings or all bytes|must be strings or bytes"),
        (["b", b"c"], "must be all strings or all bytes"),
    ):
        with pytest.raises(IdTypeError, match=message):
            getattr(vocabulary, verb)(values)
    with pytest.raises(ArgumentError, match=r"must be strings of at most 1.0 MiB: got one of 1048577 bytes at \[1\]"):
        getattr(vocabulary, verb)(["b", "x" * (2**20 + 1)])
    assert len(vocabulary) == 1


def test_unknown_strings(vocabulary: er.Vocabulary):
    vocabulary.add(["a", "b"])
    assert vocabulary.lookup(["b", "c"], missing=7).tolist() == [1, 7]
    with pytest.raises(
        IdError, match=r"must be strings that it has: got 'c' at \[1\] of values .* and 1 others.*add\(\)"
    ):
        vocabulary.lookup(["b", "c", "d"], missing="raise")
    for bad in (True, "no", 2**63):
        with pytest.raises(ArgumentError, match=rf'`missing` of .* must be an id or "raise": got {bad!r}'):
            vocabulary.lookup(["b"], missing=bad)
        with pytest.raises(ArgumentError, match=rf"`missing` of .* must be an id or None: got {bad!r}"):
            vocabulary.add(["c"], missing=bad)  # pyright: ignore[reportArgumentType]
    assert len(vocabulary) == 2


def test_missing_values_get_an_id(vocabulary: er.Vocabulary):
    assert vocabulary.add([["a", None], [float("nan"), "b"]], missing=-7).tolist() == [[0, -7], [-7, 1]]
    assert vocabulary.add(pyarrow.array([None, "", None]), missing=0).tolist() == [0, 2, 0]
    assert vocabulary.add([None], missing=5).tolist() == [5]
    for number in (np.int32(5), np.uint64(5)):
        assert vocabulary.add([None, "b"], missing=number).dtype == np.int64  # pyright: ignore[reportArgumentType]
    assert list(vocabulary) == ["a", "b", ""]  # no missing value was added
    assert vocabulary.lookup(["b", None, "?", ""], missing=9).tolist() == [1, 9, 9, 2]
    for missing in (None, "raise"):
        with pytest.raises(IdTypeError, match=r"got None at \[1\].*give it an id of its own: pass missing=-1\."):
            vocabulary.lookup(["b", None], missing=missing)


def test_as_a_mapping(vocabulary: er.Vocabulary, monkeypatch: pytest.MonkeyPatch):
    assert vocabulary  # also without strings
    vocabulary.add(WORDS)
    monkeypatch.setattr("embedrock.vocabulary.vocabulary.ITERATED", 4)
    assert list(vocabulary) == WORDS
    iterated = iter(vocabulary)
    assert [next(iterated) for _ in WORDS] == WORDS
    vocabulary.add(["later", "last"])  # as a list's, the iterator goes on with them
    assert list(iterated) == ["later", "last"]
    assert [vocabulary[word] for word in WORDS] == list(range(len(WORDS)))
    assert vocabulary["Grüße".encode()] == 3
    assert [word in vocabulary for word in ("a", b"a", "b", None)] == [True, True, False, False]
    with pytest.raises(KeyError, match=r"^`values` of .* must be strings that it has: got 'b' at \[\]") as caught:
        vocabulary["b"]
    assert isinstance(caught.value, er.UnknownStringError)
    assert isinstance(caught.value, IdError)
    uses: tuple[Any, ...] = vocabulary.__getitem__, vocabulary.__contains__
    for use in uses:
        with pytest.raises(IdTypeError, match=r"must be one string: got \['a'\]\. Call lookup\(values\)"):
            use(["a"])
    with pytest.raises(IdTypeError, match=r"must be one string: got 3\. Call strings\(\[3\]\) for the string of an id"):
        vocabulary[3]  # pyright: ignore[reportArgumentType]


def test_unknown_strings_get_the_id_of_one(tmp_path: Path):
    for path in (None, tmp_path / "words.rock"):
        with er.Vocabulary(path, unknown="[UNK]") as vocabulary:
            assert vocabulary.add(["a", "b"]).tolist() == [1, 2]
            assert vocabulary.lookup(["b", "?", "[UNK]"]).tolist() == [2, 0, 0]
            assert (vocabulary["?"], vocabulary["b"], "?" in vocabulary) == (0, 2, False)
            assert vocabulary.lookup(["?"], missing=-1).tolist() == [-1]
            with pytest.raises(er.UnknownStringError, match="got '\\?'"):
                vocabulary.lookup(["?"], missing="raise")
            with pytest.raises(IdTypeError, match="got None at"):
                vocabulary.lookup([None])
            if path is None:
                assert pickle.loads(pickle.dumps(vocabulary)).lookup(["?"]).tolist() == [0]
            else:
                vocabulary.commit()
    path = tmp_path / "words.rock"
    with er.Vocabulary(path, mode="r", unknown="[UNK]") as reader:
        assert pickle.loads(pickle.dumps(reader)).lookup(["?", "a"]).tolist() == [0, 1]
    with er.Vocabulary(path, mode="r", unknown="[UNK]2") as reader:
        assert reader["a"] == 1
        with pytest.raises(er.UnknownStringError, match=r"got '\[UNK\]2' at \[\].*unknown=\. Open .* once for writing"):
            reader.lookup(["?"])
    for mode, wrong in (("w", 3), ("r", 3), ("w", ["a", "b"])):
        with pytest.raises(ArgumentError, match="`unknown` of a vocabulary must be one string: got "):
            er.Vocabulary(path, mode=mode, unknown=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match=r"must be a folder: got strings\. Pass these to add\(\)"):
        er.Vocabulary(["a", "b"])  # pyright: ignore[reportArgumentType]
    with er.Vocabulary(path, unknown="b") as again:  # the lock is free, and no string was added
        assert (again["?"], len(again)) == (2, 3)


def test_wrong_ids(vocabulary: er.Vocabulary):
    vocabulary.add(["a", "b"])
    for ids in ([0, 2], [0, -1]):
        with pytest.raises(IdError, match=rf"must lie in \[0, 2\), as many as it has strings: got {ids[1]} at \[1\]"):
            vocabulary.strings(ids)
    with pytest.raises(IdTypeError, match="must be integers"):
        vocabulary.strings([0.5])
    with pytest.raises(ArgumentError, match="must be str or bytes"):
        vocabulary.strings([0], kind=int)


def test_in_ram_only(tmp_path: Path):
    vocabulary = er.Vocabulary(memory="32KiB")
    vocabulary.add(["a"])
    with pytest.raises(MemoryBudgetError, match=r"may take 32.0 KiB of RAM, and 2000 strings more do not fit.*path"):
        vocabulary.add([f"word {k}" for k in range(2000)])
    assert len(vocabulary) == 1
    for verb in ("commit", "compact"):
        with pytest.raises(UnsupportedError, match="on disk, and this one is in RAM"):
            getattr(vocabulary, verb)()
    copy = pickle.loads(pickle.dumps(vocabulary))
    assert copy.add(["b", "a"]).tolist() == [1, 0]
    assert len(vocabulary) == 1
    with pytest.raises(ArgumentError, match=r"`mode=\"r\"` goes with a path"):
        er.Vocabulary(mode="r")


def test_a_closed_one(vocabulary: er.Vocabulary):
    vocabulary.add(["a"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", er.UncommittedWarning)
        vocabulary.close()
    for act in (vocabulary.add, vocabulary.lookup, vocabulary.strings):
        with pytest.raises(ClosedTableError, match=r"is closed\. Open it again"):
            act([])
    assert "closed" in repr(vocabulary)


# ---------------------------------------------------------------- files


def test_what_was_not_committed_is_lost_and_told(tmp_path: Path):
    vocabulary = er.Vocabulary(tmp_path / "v")
    vocabulary.add(["a"])
    assert vocabulary.uncommitted
    assert vocabulary.commit() == 1
    assert not vocabulary.uncommitted
    assert vocabulary.commit() == 1  # nothing is new
    vocabulary.add(["b", "c"])
    with pytest.warns(er.UncommittedWarning, match="is closed with 2 strings since commit 1, which are lost"):
        vocabulary.close()
    with er.Vocabulary(tmp_path / "v") as vocabulary:
        check(vocabulary, {"a": 0})


def test_a_cell_that_is_run_again(tmp_path: Path):
    path = tmp_path / "v"
    first = er.Vocabulary(path)
    first.add(["a", "b"])
    assert er.opened(path) is first
    first.commit()
    er.close(path)
    assert er.opened(path) is None
    again = er.Vocabulary(path)
    assert len(again) == 2
    del again  # nobody has it any more
    assert len(er.Vocabulary(path)) == 2


def test_one_writer_and_readers(tmp_path: Path):
    writer = er.Vocabulary(tmp_path / "v")
    writer.add(["a", "b"])
    writer.commit()
    with pytest.raises(TableLockedError, match=r"already: vocabulary '.*test_vocabulary\.py:\d+.*mode=\"r\""):
        er.Vocabulary(tmp_path / "v")
    reader = er.Vocabulary(tmp_path / "v", mode="r")
    for k in range(20):
        writer.add([f"more {k}"])
        writer.commit()
    check(reader, {"a": 0, "b": 1})  # as of when it was opened
    assert len(er.Vocabulary(tmp_path / "v", mode="r")) == 22
    for act in (lambda: reader.add(["c"]), reader.commit, reader.compact):
        with pytest.raises(ReadOnlyTableError, match=r"was opened with mode=\"r\" and cannot change"):
            act()
    writer.close()
    assert er.Vocabulary(tmp_path / "v").lookup(["b"]).tolist() == [1]


def test_what_is_no_vocabulary(tmp_path: Path):
    with pytest.raises(TableFileError, match=r"there is no vocabulary here: a folder with vocabulary/\*.json"):
        er.Vocabulary(tmp_path / "none", mode="r")
    er.Table(10, 2, path=tmp_path / "table").close()
    with pytest.raises(TableFileError, match="the folder of a new vocabulary must be empty, and has"):
        er.Vocabulary(tmp_path / "table")
    er.Vocabulary(tmp_path / "v").close()
    with pytest.raises(TableFileError, match="there is no table here"):
        er.open(tmp_path / "v")
    with pytest.raises(TableFileError, match="the folder of a new table must be empty, and has"):
        er.Table(10, 2, path=tmp_path / "v")


def test_many_threads(tmp_path: Path):
    with er.Vocabulary(tmp_path / "v", memory="32KiB") as vocabulary:
        found = dict[str, int]()

        def work(seed: int) -> None:
            for k in range(10):
                words = some_words(10 * seed + k, 50, 2000)
                found.update(zip(words, vocabulary.add(words).tolist(), strict=True))
                if k == 5:
                    vocabulary.commit()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check(vocabulary, dict(sorted(found.items(), key=lambda item: item[1])))
        vocabulary.commit()


# ---------------------------------------------------------------- processes


def looked_up(vocabulary: er.Vocabulary, words: list[str], queue: Any) -> None:
    try:
        queue.put(vocabulary.lookup(words).tolist())
    except Exception as error:
        queue.put(str(error))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_forked_child_looks_up_and_adds_nothing(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    with er.Vocabulary(tmp_path / "v", memory="16KiB") as vocabulary:
        words = [f"word {k}" for k in range(1000)]
        vocabulary.add(words)
        vocabulary.commit()
        vocabulary.add(["new"])
        queue = context.SimpleQueue()
        child = context.Process(target=looked_up, args=(vocabulary, [*words[:3], "new"], queue))
        child.start()
        assert queue.get() == [0, 1, 2, 1000]
        child.join()
        adding = context.Process(target=lambda: added_in_child(vocabulary, queue))
        adding.start()
        assert "is written by process" in queue.get()
        adding.join()
        vocabulary.commit()
    with er.Vocabulary(tmp_path / "v") as vocabulary:  # the child's end let nobody else in, and closed nothing
        assert len(vocabulary) == 1001


def added_in_child(vocabulary: er.Vocabulary, queue: Any) -> None:
    try:
        vocabulary.add(["other"])
    except ReadOnlyTableError as error:
        queue.put(str(error))


@pytest.mark.slow
def test_a_spawned_child_opens_it_for_reading(tmp_path: Path):
    with er.Vocabulary(tmp_path / "v") as vocabulary:
        vocabulary.add(["a", "b"])
        vocabulary.commit()
        with pytest.raises(pickle.PicklingError, match=r"is open for writing.*mode=\"r\""):
            pickle.dumps(vocabulary)
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        reader = er.Vocabulary(tmp_path / "v", mode="r")
        child = context.Process(target=looked_up, args=(reader, ["b", "c"], queue))
        child.start()
        assert queue.get() == [1, -1]
        child.join()


def test_a_reader_goes_on_with_the_newest_commit(tmp_path: Path):
    writer = er.Vocabulary(tmp_path / "v")
    writer.add(["a"])
    writer.commit(step=1)
    with er.Vocabulary(tmp_path / "v", mode="r") as reader:
        assert not reader.refresh()
        writer.add(["b"])
        assert not reader.refresh()  # no commit has it
        writer.commit(step=2)
        assert reader.lookup(["b"]).tolist() == [-1]
        assert reader.refresh()
        assert reader.lookup(["a", "b"]).tolist() == [0, 1]
        assert reader.refresh(step=1)
        assert (len(reader), reader.lookup(["b"]).tolist()) == (1, [-1])
        with pytest.raises(ArgumentError, match="got 9, and the last ones are 1, 2"):
            reader.refresh(step=9)
        assert reader.lookup(["a", "b"]).tolist() == [0, -1]
        assert reader.refresh()
        assert len(pickle.loads(pickle.dumps(reader))) == 2
    with pytest.raises(ClosedTableError):
        reader.refresh()
    for other in (writer, er.Vocabulary()):
        with pytest.raises(UnsupportedError, match=r"refresh\(\) is for readers, .* has all strings already"):
            other.refresh()
    writer.close()


def test_a_reader_has_the_strings_of_a_step_of_the_table(tmp_path: Path):
    words = er.Vocabulary(tmp_path / "words")
    table = er.Table(None, 2, path=tmp_path / "table", rule=er.SGD(lr=0.1), keep=9)
    for step in range(3):
        ids = words.add([f"word {k}" for k in range(4 * (step + 1))])
        table.update(ids, np.ones((len(ids), 2), np.float32))
        words.commit(step=step)
        table.commit(step=step)
    words.add(["late"])
    words.commit()
    for step in range(3):
        with (
            er.Vocabulary(tmp_path / "words", mode="r", step=step) as as_of,
            er.open(tmp_path / "table", mode="r", at=step + 1) as snapshot,
        ):
            assert len(as_of) == snapshot.stats()["rows_touched"] == 4 * (step + 1)
            assert as_of.lookup(["late", f"word {4 * (step + 1)}", "word 0"]).tolist() == [-1, -1, 0]
            assert len(pickle.loads(pickle.dumps(as_of))) == len(as_of)
            with pytest.raises(er.IdError, match="as many as it has strings"):
                as_of.strings([len(as_of)])
    words.add(["another run"])
    words.commit(step=1)  # which went on from step 0
    with pytest.raises(er.ArgumentError, match=r"the step that is asked for: got 2, and the last ones are 0, 1\. Com"):
        er.Vocabulary(tmp_path / "words", mode="r", step=2)
    with pytest.raises(er.ArgumentError, match=r'`step` \(2\) of a vocabulary goes with mode="r"'):
        er.Vocabulary(tmp_path / "other", step=2)
    with pytest.raises(
        er.ArgumentError, match=r"`step` of a commit must be a whole number of 64 bits or None: got 1\.5"
    ):
        words.commit(step=1.5)  # pyright: ignore[reportArgumentType]
    words.close()
    table.close()
