"""Ids that are none: what the error says, where, and that the code which it advises works."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow
import pytest

import embedrock as er

BIG = np.array([3, 2**64 - 5, 2**63], np.uint64)


class Series:
    """What a pandas Series is to NumPy."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.values, object)

    def __len__(self) -> int:
        return len(self.values)


def refused(ids: Any, rows: int | None = 100) -> str:
    """Return the text of the error that a table raises for ids; it is as it was."""
    table = er.Table(rows, 4, rule=er.SGD(lr=0.5), seed=0, name="users")
    table.update([1], np.ones((1, 4)))
    before = table.steps, table.lookup([0, 1]).tobytes()
    texts = set()
    for call in (table.lookup, table.plan, table.bring, lambda ids: table.update(ids, np.ones((1, 4)))):
        with pytest.raises((er.IdError, er.IdTypeError)) as caught:
            call(ids)
        texts.add(str(caught.value))
    assert (table.steps, table.lookup([0, 1]).tobytes()) == before
    assert len(texts) == 1
    return texts.pop()


def advised(text: str, pattern: str, ids: Any) -> Any:
    """Run the code in a message that a pattern finds, on these ids; return what it gives."""
    found = re.search(pattern, text)
    assert found is not None, text
    space: dict[str, Any] = {"np": np, "er": er, "ids": ids, "path": None, "N": 100}
    if re.match(r"[\w, ]+ = ", found[0]):
        exec(found[0], space)
        return space["ids"]
    return eval(found[0], space)


WORDS = ["b", "a", "b"]
STRINGS: dict[str, Any] = {
    "list": WORDS,
    "U": np.array(WORDS),
    "object": np.array(WORDS, object),
    "StringDType": np.array(WORDS, np.dtypes.StringDType()),
    "bytes": np.array(WORDS, "S"),
    "objects of bytes": np.array([b"b", b"a", b"b"], object),
    "pyarrow": pyarrow.array(WORDS),
    "pyarrow dictionary": pyarrow.array(WORDS).dictionary_encode(),
    "Series": Series(WORDS),
}
VOCABULARY = r"er\.Vocabulary\(path\)\.add\(ids\)"
MISSING = r"np\.array\(\[0 if.*?np\.shape\(ids\)\)|ids\.fill_null\(0\)"
HASH = r"er\.hash_ids\(ids\)"


@pytest.mark.parametrize("ids", STRINGS.values(), ids=STRINGS)
def test_strings(ids: Any):
    text = refused(ids)
    assert re.match(
        r"`ids` of table 'users' must be integers: got dtype .*'b' at \[0\] of ids of shape \(3,\)\. ", text
    )
    for part in ("kept with the model", "erk.Hashing()"):
        assert part in text
    assert text.endswith("Not by Python's hash(), which differs in every process.")
    codes = advised(text, VOCABULARY, ids)
    assert codes.tolist() == [0, 1, 0]
    assert er.Table(2, 4).lookup(codes).shape == (3, 4)
    assert er.Table(100, 4).lookup(advised(text, r"er\.hash_ids\(ids, buckets=N\)", ids)).shape == (3, 4)
    hashes = advised(text, HASH, ids)
    assert hashes[0] == hashes[2] != hashes[1]
    table = er.Table(None, 4, seed=0)
    found = table.lookup(hashes)
    assert (found[0] == found[2]).all()
    assert (found[0] != found[1]).any()


@pytest.mark.slow
def test_the_hash_is_that_of_every_process_and_pythons_is_not():
    """What the text says of both."""
    source = f"import embedrock as er; ids = ['b', 'a']; print({advised_source(refused(['b', 'a']))}, hash('b'))"
    told = [
        subprocess.run(
            [sys.executable, "-c", source],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("]")
        for seed in ("1", "2")
    ]
    assert told[0][0] == told[1][0]
    assert told[0][1] != told[1][1]


def advised_source(text: str) -> str:
    found = re.search(HASH, text)
    assert found is not None
    return found[0]


@pytest.mark.parametrize(
    "ids",
    [["a", None, "a"], Series(["a", np.nan, "a"]), pyarrow.array(["a", None, "a"])],
    ids=["None", "NaN", "pyarrow"],
)
def test_missing_strings(ids: Any):
    text = refused(ids)
    assert "'a' at [0] of ids of shape (3,). Some are missing. " in text
    codes = advised(text, r"er\.hash_ids\(ids, missing=-1\)", ids)
    assert codes[0] == codes[2] != codes[1] == -1


def test_strings_among_others():
    ids = np.array(["a", 7, "a"], object)
    text = refused(ids)
    assert "got dtype object, 'a' at [0] of ids of shape (3,). First make bytes of all of them, " in text
    strings = advised(text, r"ids = np\.array\(\[b'' if.*?np\.shape\(ids\)\)", ids)
    codes = advised(text, VOCABULARY, strings)
    assert codes[0] == codes[2] != codes[1]
    assert len(set(advised(text, HASH, strings))) == 2


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        ([1, None, 3], r"dtype object, None at \[1\] of ids of shape \(3,\)"),
        (np.array([1.0, np.nan, 3.0]), r"dtype float64, nan at \[1\] of ids of shape \(3,\)"),
        (pyarrow.array([1, None, 3]), r"a missing one at \[1\]"),
        (Series([1, float("nan"), 3]), r"dtype object, nan at \[1\]"),
        (pyarrow.array([1.0, float("nan"), 3.0]), r"dtype float64, nan at \[1\]"),
    ],
    ids=["None", "NaN", "pyarrow", "Series", "NaN of pyarrow"],
)
def test_missing_ids(ids: Any, what: str):
    text = refused(ids)
    assert re.search(
        rf"must be integers: got {what}.*\. Leave out what is missing.*, or give it an id that no other has", text
    )
    assert advised(text, MISSING, ids).tolist() == [1, 0, 3]


class NA:
    """What pandas.NA is: nothing that can be compared."""

    def __repr__(self) -> str:
        return "<NA>"

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")


def test_missing_ids_of_pandas():
    ids = np.array([[1, NA()], [3, 4]], object)
    text = refused(ids)
    assert "got dtype object, <NA> at [0, 1] of ids of shape (2, 2). Leave out what is missing, or" in text
    assert advised(text, MISSING, ids).tolist() == [[1, 0], [3, 4]]


def test_masked_ids():
    ids = np.ma.MaskedArray([[1, 2], [3, 4]], [[False, False], [True, False]])
    text = refused(ids)
    assert "got a masked array, with a missing one at [1, 0] of ids of shape (2, 2). Leave out" in text
    assert advised(text, r"ids\.filled\(0\)", ids).tolist() == [[1, 2], [0, 4]]
    assert advised(text, r"ids\.compressed\(\)", ids).tolist() == [1, 2, 4]
    assert er.Table(9, 4).lookup(np.ma.MaskedArray([1, 2], [False, False])).shape == (2, 4)


@pytest.mark.parametrize(
    "ids",
    [np.array([1.0, 2.0]), np.array([1, 2], np.float16), np.array([1, 2], object), Series([1, 2]), [True, True]],
    ids=["floats", "float16", "object", "Series", "booleans"],
)
def test_what_a_cast_makes_ids_of(ids: Any):
    text = refused(ids)
    assert advised(text, r"np\.asarray\(ids\)\.astype\('int64'\)", ids).dtype == np.int64


def test_floats_that_are_no_ids():
    text = refused(np.array([[1.0, 2.0], [0.5, 3.0]]))
    assert "got dtype float64, 0.5 at [1, 0] of ids of shape (2, 2). That is no whole number: pass ids, not" in text
    assert "2**24 not every whole number is a float32" in refused(np.array([2.0**25], np.float32))
    assert "2**24" not in refused(np.array([2.0**24], np.float32))


def test_a_mask():
    mask = np.array([False, True, True])
    found = re.search(r"np\.flatnonzero\(mask\)", refused(mask))
    assert found is not None
    assert eval(found[0], {"np": np, "mask": mask}).tolist() == [1, 2]


def test_hashes_of_64_bits():
    text = refused(BIG, rows=None)
    assert "`ids` of table 'users' must lie in [-9223372036854775808, 9223372036854775808): got " in text
    assert "got 18446744073709551611 at [1] of ids of shape (3,). Hashes of 64 bits go by their bits" in text
    for ids in (BIG, BIG.tolist()):
        signed = advised(text, r"np\.asarray\(ids, np\.uint64\)\.view\(np\.int64\)", ids)
        assert signed.tolist() == [3, -5, -(2**63)]
        assert er.Table(None, 4).lookup(signed).shape == (3, 4)


def test_hashes_of_64_bits_are_not_told_to_take_more_rows():
    """A table with rows=None would refuse them next."""
    assert "Hashes of 64 bits go by their bits into a table with rows=None" in refused(BIG, rows=100)


class Wide:
    """What polars makes of hashes in CSV, of which NumPy makes no array."""

    dtype = "Int128"

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise RuntimeError("cannot convert i128 to NumPy")

    def __len__(self) -> int:
        return len(BIG)

    def drop_nulls(self) -> list[int]:
        return BIG.tolist()


def test_integers_of_128_bits():
    text = refused(Wide(), rows=None)
    assert "must be integers of 64 bits: got dtype Int128." in text
    signed = advised(text, r"np\.array\(\[id % .*\.view\(np\.int64\)", Wide())
    assert signed.tolist() == [3, -5, -(2**63)]


def test_lists_of_hashes_of_which_numpy_makes_floats():
    ids = [3, 2**64 - 5]
    text = refused(ids, rows=None)
    assert "astype" not in text  # which would change them
    assert advised(text, r"np\.asarray\(ids, np\.uint64\)\.view\(np\.int64\)", ids).tolist() == [3, -5]


def test_longer_hashes():
    text = refused([1, 2**100 + 7], rows=None)
    assert f"must be integers: got {2**100 + 7} at [1] of ids of shape (2,). Ids have 64 bits" in text
    assert advised(text, r"np\.array\(\[int\(id\) % 2.*?np\.int64\)", [1, 2**100 + 7]).tolist() == [1, 7]


def test_what_is_advised_keeps_the_shape():
    words = np.array([["b", "a"], ["b", "c"]])
    text = refused(words)
    assert er.Table(None, 4).lookup(advised(text, HASH, words)).shape == (2, 2, 4)
    long = [[1, 2**100 + 7], [2, 3]]
    pattern = r"np\.array\(\[int\(id\) % 2.*?np\.shape\(ids\)\)"
    assert advised(refused(long, rows=None), pattern, long).tolist() == [[1, 7], [2, 3]]


def test_lists_of_several_lengths():
    text = refused([[1, 2], [3]])
    assert text.startswith("`ids` of table 'users' must be integers in one shape: got lists of several lengths (")
    assert advised(text, r"ids, offsets = er\.jagged\(ids\)", [[1, 2], [3]]).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("ids", "where"),
    [
        ([[5, 6], [100, 7]], "got 100 at [1, 0] of ids of shape (2, 2)"),
        (np.arange(98, 101), "got 100 at [2] of ids of shape (3,)"),
        (np.int64(-1), "got -1 at [] of ids of shape ()"),
        (np.asfortranarray([[1, 2, 3], [4, 5, 1000]]), "got 1000 at [1, 2] of ids of shape (2, 3)"),
    ],
)
def test_where_an_id_lies_outside(ids: Any, where: str):
    assert refused(ids).startswith(f"`ids` of table 'users' must lie in [0, 100): {where}. ")


def test_what_gives_an_id_its_row():
    """In the words of a table and of every layer."""
    text = refused([1, 205, 300])
    assert text.endswith(
        " For more rows, grow(301). For any int64, make it with rows=None; a layer, with num_embeddings=None or "
        "input_dim=None."
    )
    table = er.Table(100, 4)
    table.grow(301)
    assert table.lookup([1, 205, 300]).shape == (3, 4)
    assert "grow" not in refused([-1])
    assert "-9223372036854775808 at [0] of ids of shape (1,). (That is what a cast makes of NaN" in refused([-(2**63)])


def test_others():
    assert refused(np.array(["2020-01-01"], "M8[D]")).endswith("got dtype datetime64[D]. Pass an array of integers.")
    assert "got dtype object, {'a': 1} at [0] of ids of shape (1,). Pass integers." in refused([{"a": 1}])
