"""`er.hash_ids`: SipHash-2-4 of strings in whatever people have them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

import embedrock as er
from reference.strings import sip_hash

WORDS = ["", "a", "eight888", "fifteen letters", "Grüße", "日本語", "\U0001f600 smile", "inner\0zero", "x" * 300]
# Of SipHash-2-4 with the key 00 01 ... 0f and the texts 00, 00 01, ...: from its authors' reference implementation.
VECTORS = {0: 0x726FDB47DD0E0E31, 1: 0x74F839C593DC67FD, 8: 0x93F5F5799A932462, 15: 0xA129CA6149BE45E5}
SALT = (0x0706050403020100, 0x0F0E0D0C0B0A0908)


def expected(words: list[str], salt: tuple[int, int] = (0, 0), buckets: int = 2**63 - 1) -> list[int]:
    return [sip_hash(word.encode(), *salt) % buckets for word in words]


@pytest.mark.parametrize("size", VECTORS)
def test_the_vectors_of_its_authors(size: int):
    text = bytes(range(size))
    assert sip_hash(text, *SALT) == VECTORS[size]
    assert er.hash_ids([text], salt=SALT)[0] == VECTORS[size] % (2**63 - 1)


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        np.array,
        lambda words: np.array(words, np.array(words).dtype.newbyteorder(">")),
        lambda words: np.array(words, object),
        lambda words: np.array(words, np.dtypes.StringDType()),
        lambda words: [word.encode() for word in words],
        lambda words: np.array([word.encode() for word in words]),
        pyarrow.array,
        lambda words: pyarrow.array(words, pyarrow.large_string()),
        lambda words: pyarrow.array(words, pyarrow.string_view()),
        lambda words: pyarrow.array(words).dictionary_encode(),
        lambda words: pyarrow.chunked_array([words[:4], words[4:]]),
        lambda words: pyarrow.array(["before", *words])[1:],
    ],
    ids=["list", "tuple", "U", "U, other bytes first", "object", "StringDType", "bytes", "S", "Arrow", "large", "view",
         "dictionary", "chunked", "sliced"],
)  # fmt: skip
def test_whatever_they_are_in(form: Any):
    assert er.hash_ids(form(WORDS), salt=7).tolist() == expected(WORDS, (7, 7))
    assert er.hash_ids(form(WORDS), buckets=1000).tolist() == expected(WORDS, buckets=1000)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=20))
def test_any_text(words: list[str]):
    found = er.hash_ids(words)
    assert found.tolist() == expected(words)
    if not any(word.endswith("\0") for word in words):  # which NumPy drops
        assert er.hash_ids(np.array(words, str)).tolist() == found.tolist()


def test_shapes():
    assert er.hash_ids([["a", "b"], ["c", "d"]]).tolist() == er.hash_ids(["a", "b", "c", "d"]).reshape(2, 2).tolist()
    assert er.hash_ids("a").shape == ()
    assert er.hash_ids([]).shape == er.hash_ids(pyarrow.array([], pyarrow.string())).shape == (0,)
    assert er.hash_ids(np.array(WORDS)[::-2]).tolist() == expected(WORDS[::-2])
    assert er.hash_ids(pyarrow.chunked_array([], pyarrow.string())).shape == er.hash_ids(pyarrow.nulls(0)).shape == (0,)


def test_every_process_gives_the_same():
    program = "import embedrock as er; print(er.hash_ids(['user 7'], salt=1)[0])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(found.stdout) == expected(["user 7"], (1, 1))[0]


def test_ids_are_those_of_tensorflow():
    tf, keras = pytest.importorskip("tensorflow"), pytest.importorskip("keras")
    words = tf.constant(WORDS)
    found = er.hash_ids(words, salt=(3, 2**62))
    assert tf.strings.to_hash_bucket_strong(words, 2**63 - 1, [3, 2**62]).numpy().tolist() == found.tolist()
    layer = keras.layers.Hashing(1000, salt=[3, 2**62])
    assert layer(words).numpy().tolist() == er.hash_ids(WORDS, salt=(3, 2**62), buckets=1000).tolist()


def test_a_table_takes_them():
    table = er.Table(None, 4, seed=0, rule=er.SGD(lr=1.0))
    table.update(er.hash_ids(["red", "green"]), np.ones((2, 4)))
    assert table.stats()["rows_touched"] == 2
    er.Table(1000, 4).lookup(er.hash_ids(["red", "green"], buckets=1000))


NULL_IN_DICTIONARY = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1]), pyarrow.array(["a", None]))
MISSING = r"Leave out what is missing, or give it an id of its own: er\.hash_ids\(values, missing=-1\)\.$"


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (["a", None], rf".*got None at \[1\] of values of shape \(2,\)\. {MISSING}"),
        ([["a", "b"], ["c", None]], rf".*got None at \[1, 1\] of values of shape \(2, 2\)\. {MISSING}"),
        (np.array(["a", np.nan], object), rf".*got nan at \[1\] of values of shape \(2,\)\. {MISSING}"),
        (pyarrow.array(["a", None, "b"]), rf".*got None at \[1\] of values of shape \(3,\)\. {MISSING}"),
        (["a", 3], r"all strings or all bytes: got 3 at \[1\].*, of type int among str\. .*str\(value\)\.encode"),
        ([b"a", "b"], r"all strings or all bytes: got 'b' at \[1\] .*, of type str among bytes\. .*\.encode\(\)"),
        ([bytearray(b"a")], r"got bytearray\(b'a'\) at \[0\] .* Make bytes of all of them: .*bytes\(value\) if"),
        ([7, "a"], r"got 7 at \[0\] of values of shape \(2,\), of type int\. Make bytes of all of them"),
        (np.array([1.5]), r"got dtype float64\. Integers are ids as they are; pass .*\.astype\(str\)"),
        (pyarrow.array([1, 2]), r"got an Arrow array of int64"),
        (NULL_IN_DICTIONARY, rf".*got None at \[1\] of values of shape \(2,\)\. {MISSING}"),
        (pyarrow.array([1, 2]).dictionary_encode(), r"got an Arrow array of dictionary<values=int64"),
        (np.ma.array(["a", "b"], mask=[False, True]), r"got a masked value at \[1\] .*missing=-1"),
        (["ok", "half \ud83d"], r"Unicode text: got 'half \\ud83d' at \[1\] .*errors='replace'"),
        (np.array(["ok", "half \ud83d"]), r"Unicode text: got 'half \\ud83d' at \[1\]"),
        (pyarrow.table({"x": ["a"]}), r'got an Arrow Table. Pass one column of a table, values\["name"\], or an array'),
        ((c for c in "ab"), r"strings in an array or a list: got a generator\. Pass list\(values\)"),
        ([["a"], ["b", "c"]], r"lists of several lengths\. .*er\.jagged\(values, er\.hash_ids\)"),
    ],
    ids=["None", "nested", "NaN", "Arrow null", "mixed", "bytes and text", "bytearray", "first", "floats",
         "Arrow integers", "null in a dictionary", "dictionary of integers", "masked", "surrogate",
         "surrogate in U", "Arrow table", "iterator", "ragged"],
)  # fmt: skip
def test_what_is_no_string(values: Any, what: str):
    with pytest.raises(er.IdTypeError, match=f"^`values` of hash_ids must be .*{what}"):
        er.hash_ids(values)


OBJECTS = np.array(["a", None, float("nan"), "b"], object)


@pytest.mark.parametrize(
    "values",
    [
        ["a", None, float("nan"), "b"],
        [b"a", None, np.float32("nan"), b"b"],
        OBJECTS,
        np.ma.array(["a", "x", "y", "b"], mask=[False, True, True, False]),
        np.ma.array(["a", None, "y", "b"], object, mask=[False, False, True, False]),
        pyarrow.array(["a", None, None, "b"]),
        pyarrow.chunked_array([["a", None], [None, "b"]]),
        pyarrow.array(["x", "a", None, None, "b"], pyarrow.string_view())[1:],
        pyarrow.array(["a", None, None, "b"]).dictionary_encode(),
        pandas.Series(["a", None, pandas.NA, "b"], index=[7, 8, 9, 9]),
        pandas.Series(["a", None, None, "b"], dtype="string"),
        pandas.Series(["a", None, None, "b"], dtype="category"),
        pandas.Series(["a", None, None, "b"], dtype=pandas.ArrowDtype(pyarrow.string())),
        polars.Series(["a", None, None, "b"]),
        polars.Series(["a", None, None, "b"], dtype=polars.Categorical),
    ],
    ids=["list", "bytes", "objects", "masked", "masked objects", "Arrow", "chunked", "view", "dictionary", "pandas",
         "pandas string", "category", "pandas Arrow", "polars", "polars categorical"],
)  # fmt: skip
def test_missing_values_get_an_id(values: Any):
    a, b = expected(["a", "b"], buckets=1000)
    assert er.hash_ids(values, buckets=1000, missing=1000).tolist() == [a, 1000, 1000, b]
    assert er.hash_ids(values, buckets=1000, missing=-1).tolist() == [a, -1, -1, b]
    with pytest.raises(er.IdTypeError, match=rf"at \[[12]\] of values of shape \(4,\)\. {MISSING}"):
        er.hash_ids(values)


def test_what_is_no_string_stays_an_error_beside_missing_values():
    nothing = [
        [None, None],
        np.array([np.nan] * 2),
        pyarrow.nulls(2),
        polars.Series([None] * 2),
        pandas.Series([None] * 2),
    ]
    for values in nothing:
        assert er.hash_ids(values, missing=3).tolist() == [3, 3]
    for values in (
        ["a", None, 3],
        np.array([1.5, np.nan]),
        pyarrow.array([1, None]),
        [["a"], None],
        pandas.Series([1]),
    ):
        with pytest.raises(er.IdTypeError, match=r"^`values` of hash_ids must be"):
            er.hash_ids(values, missing=0)
    for missing in ("a", True, 2**63):
        with pytest.raises(er.ArgumentError, match=r"`missing` of hash_ids must be an id or None: got "):
            er.hash_ids(["a"], missing=missing)  # pyright: ignore[reportArgumentType]


LISTS: list[list[str] | None] = [["a", "b"], [], None, ["b"]]


@pytest.mark.parametrize(
    "column",
    [
        pandas.Series(LISTS, index=[3, 4, 4, 5]),
        pandas.Series([None if each is None else np.array(each, object) for each in LISTS]),
        pandas.Series(LISTS, dtype=pandas.ArrowDtype(pyarrow.list_(pyarrow.string()))),
        polars.Series(LISTS),
        pyarrow.array(LISTS),
        pyarrow.array([["x"], *LISTS], pyarrow.large_list(pyarrow.string()))[1:],
        pyarrow.chunked_array([LISTS[:1], LISTS[1:]]),
        pyarrow.array(LISTS, pyarrow.list_view(pyarrow.string())),
    ],
    ids=["pandas", "pandas arrays", "pandas Arrow", "polars", "Arrow", "large", "chunked", "view"],
)
def test_columns_of_lists_of_strings(column: Any):
    ids, offsets = er.jagged(column, er.hash_ids)
    assert (ids.tolist(), offsets.tolist()) == (expected(["a", "b", "b"]), [0, 2, 2, 2])
    ids, offsets = er.jagged(column, er.Vocabulary().add)
    assert (ids.tolist(), offsets.tolist()) == ([0, 1, 1], [0, 2, 2, 2])
    with pytest.raises(
        er.IdTypeError, match=r"must be integers: got .*'a' at \[0\].*er\.jagged\(lists, er\.hash_ids\)"
    ):
        er.jagged(column)


def test_lists_of_one_length_and_nulls_in_lists():
    for column in (
        pyarrow.array([["a", "b"], None, ["b", "a"]], pyarrow.list_(pyarrow.string(), 2)),
        polars.Series([["a", "b"], None, ["b", "a"]], dtype=polars.Array(polars.String, 2)),
    ):
        ids, offsets = er.jagged(column, er.hash_ids)
        assert (ids.tolist(), offsets.tolist()) == (expected(["a", "b", "b", "a"]), [0, 2, 2])
    holes = [["a", None], ["b"]]
    for column in (holes, pandas.Series(holes), polars.Series(holes), pyarrow.array(holes)):
        with pytest.raises(
            er.IdTypeError, match=r"got None at \[1\].*give it an id of its own: er.hash_ids\(values, missing=-1\)"
        ):
            er.jagged(column, er.hash_ids)
        ids, offsets = er.jagged(column, lambda values: er.hash_ids(values, missing=7))
        assert (ids.tolist(), offsets.tolist()) == ([*expected(["a"]), 7, *expected(["b"])], [0, 2])


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"salt": -1}, r"`salt` of hash_ids must be a number in \[0, 2\*\*64\), or two of them: got -1"),
        ({"salt": (1, 2, 3)}, r"got \(1, 2, 3\)"),
        ({"salt": "pepper"}, "got 'pepper'"),
        ({"buckets": 0}, r"`buckets` of hash_ids must be a number in \[1, 2\*\*63\), the table's rows, or None: got 0"),
        ({"buckets": 2**63}, "got 9223372036854775808"),
        ({"buckets": True}, "got True"),
    ],
    ids=["negative", "three", "word", "none", "many", "flag"],
)
def test_options_that_cannot_be(options: dict[str, Any], what: str):
    with pytest.raises(er.ArgumentError, match=what):
        er.hash_ids(["a"], **options)


def test_the_remedy_for_mixed_values_keeps_missing_ones():
    values = [7, None, b"a", "b", float("nan")]
    with pytest.raises(er.IdTypeError, match="Make bytes of all of them: ") as caught:
        er.hash_ids(values, missing=-1)
    code = str(caught.value).partition("Make bytes of all of them: ")[2].removesuffix(".")
    seven, a, b = expected(["7", "a", "b"])
    assert er.hash_ids(eval(code, {"np": np, "values": values}), missing=-1).tolist() == [seven, -1, a, b, -1]
