"""What errors say to do about ids and strings, done: with what pandas, polars, Arrow and NumPy have them in."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import embedrock as er

BIG, OTHER = 2**60 + 1, 2**62 + 3
LISTS = [[BIG, 7], [], None, [OTHER]]


def columns(values: list[Any]) -> dict[str, Callable[[], Any]]:
    """Return how to make columns of values, some of which are None, by the names of their kinds."""

    def of(library: str, make: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: make(pytest.importorskip(library))

    return {
        "list": lambda: list(values),
        "objects": lambda: np.array([*values, None], object)[:-1],
        "Arrow": lambda: pa.array(values),
        "Arrow in chunks": lambda: pa.chunked_array([values[:1], values[1:]]),
        "polars": of("polars", lambda pl: pl.Series(values)),
        "pandas": of("pandas", lambda pd: pd.Series(values, dtype=object)),
        "pandas of Arrow": of(
            "pandas", lambda pd: pd.Series(pa.array(values), dtype=pd.ArrowDtype(pa.array(values).type))
        ),
    }


def numbers(values: list[Any]) -> dict[str, Callable[[], Any]]:
    def pandas(make: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: make(pytest.importorskip("pandas"))

    return {
        **columns(values),
        "list with NaN": lambda: [np.nan if value is None else value for value in values],
        "list of two shapes": lambda: [[value, 1.0] for value in values],
        "Arrow dictionary": lambda: pa.array(values).dictionary_encode(),
        "null in a dictionary": lambda: pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), pa.array(values)),
        "Int64": pandas(lambda pd: pd.Series(values, dtype="Int64")),
        "UInt64": pandas(lambda pd: pd.Series(values, dtype="UInt64")),
        "array of pandas": pandas(lambda pd: pd.array(values, dtype="Int64")),
        "index": pandas(lambda pd: pd.Index(values, dtype="Int64")),
        "category": pandas(lambda pd: pd.Series(values, dtype="Int64").astype("category")),
        "frame": pandas(lambda pd: pd.DataFrame({"a": pd.array(values, dtype="Int64"), "b": 1})),
    }


def table() -> Callable[[Any], Any]:
    return er.Table(None, 2).lookup


def group() -> Callable[[Any], Any]:
    made = er.Group()
    made.table("users", rows=None, dim=2)
    return lambda ids: made.lookup({"users": ids})["users"]


def torch_layer() -> Callable[[Any], Any]:
    pytest.importorskip("torch")
    import embedrock.torch as ert

    return ert.Embedding(None, 2)


def keras_layer() -> Callable[[Any], Any]:
    pytest.importorskip("keras")
    import embedrock.keras as erk

    return erk.Embedding(None, 2)


FRONTS = {"table": table, "group": group, "torch": torch_layer, "keras": keras_layer}


def pasted(text: str, pattern: str, **names: Any) -> Any:
    """Return what the code in a text gives that a pattern finds."""
    found = re.search(pattern, text)
    assert found is not None, text
    space: dict[str, Any] = {"np": np, "er": er, **names}
    if re.match(r"[\w, ]+ = ", found[0]):
        exec(found[0], space)
        return space["ids"], space["offsets"]
    return eval(found[0], space)


def refused(call: Callable[[Any], Any], value: Any) -> str:
    with pytest.raises((er.IdTypeError, er.IdError)) as caught:
        call(value)
    return re.sub(r"\x1b\[\dm", "", str(caught.value))


def as_array(ids: Any, text: str) -> np.ndarray:
    """Return what a layer of PyTorch is given, if its error says so."""
    found = re.search(r"torch\.from_numpy\(.*'int64'\)\)", text)
    if found is None:
        return np.asarray(ids)
    import torch

    return eval(found[0], {"torch": torch, "np": np, "ids": ids})


@pytest.mark.parametrize("kind", numbers([BIG, None, OTHER]))
@pytest.mark.parametrize("front", FRONTS)
def test_missing_ids(front: str, kind: str):
    if front == "keras" and kind.startswith("list"):
        pytest.skip("Keras refuses lists itself")
    call, ids = FRONTS[front](), numbers([BIG, None, OTHER])[kind]()
    text = refused(call, ids)
    assert "Leave out what is missing" in text
    filled = pasted(text, r"np\.array\(\[0 if .*?np\.shape\(ids\)\)|(?<=example: )ids\..*?(?=\.$|\. Make)", ids=ids)
    assert set(np.asarray(filled).ravel().tolist()) - {1} == {BIG, 0, OTHER}
    assert np.shape(filled) == np.shape(ids)
    assert call(as_array(filled, text)).shape == (*np.shape(ids), 2)
    if "missing, ids" in text:
        left = pasted(text, r"(?<=missing, )ids\..*?(?=, or)", ids=ids)
        assert set(np.asarray(left).ravel().tolist()) - {1} == {BIG, OTHER}
        call(as_array(left, text))


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("ids", [[float(BIG), np.nan], [float(BIG), 1.0]], ids=["NaN", "whole"])
def test_ids_that_were_rounded_before_are_not_cast(front: str, ids: list[float]):
    text = refused(FRONTS[front](), np.array(ids))
    assert "Above 2**53 not every whole number is a float64: ids were rounded, to those of others" in text
    for code in ("astype", "np.array(["):
        assert code not in text


@pytest.mark.parametrize("ids", [[BIG, 3.0], [-1, 2**63 + 5], [3, 2**64 - 5], [-1.0, 2**64 - 5]], ids=str)
def test_lists_of_which_numpy_makes_floats(ids: list[Any]):
    text = refused(table(), ids)
    found = pasted(text, r"np\.(?:array|asarray)\(.*?np\.(?:shape\(ids\)\)|int64\)(?=\.$))", ids=ids)
    assert [int(each) % 2**64 for each in found] == [int(each) % 2**64 for each in ids]
    assert table()(found).shape == (2, 2)


@pytest.mark.parametrize("kind", columns(LISTS))
def test_lists_of_ids(kind: str):
    ids = columns(LISTS)[kind]()
    found, offsets = er.jagged(ids)
    assert (found.tolist(), offsets.tolist()) == ([BIG, 7, OTHER], [0, 2, 2, 2])
    assert found.dtype == offsets.dtype == np.int64


@pytest.mark.parametrize("kind", columns([[BIG, 7], [OTHER]]))
@pytest.mark.parametrize("front", FRONTS)
def test_lists_of_ids_are_told_how(front: str, kind: str):
    if front == "keras" and kind == "list":
        pytest.skip("Keras refuses lists itself")
    ids = columns([[BIG, 7], [OTHER]])[kind]()
    found, offsets = pasted(refused(FRONTS[front](), ids), r"ids, offsets = er\.jagged\(ids\)", ids=ids)
    assert (found.tolist(), offsets.tolist()) == ([BIG, 7, OTHER], [0, 2])


@pytest.mark.parametrize("kind", columns([["a", "b"], ["b"]]))
@pytest.mark.parametrize("taker", ["hash_ids", "vocabulary"])
def test_lists_of_strings(taker: str, kind: str):
    values, vocabulary = columns([["a", "b"], ["b"]])[kind](), er.Vocabulary()
    vocabulary.add(["a", "b"])
    call = er.hash_ids if taker == "hash_ids" else vocabulary.lookup
    code = r"ids, offsets = er\.jagged\(values, [\w.]+\)"
    found, offsets = pasted(refused(call, values), code, values=values, vocabulary=vocabulary)
    assert found.tolist() == call(["a", "b", "b"]).tolist()
    assert offsets.tolist() == [0, 2]


@pytest.mark.parametrize("kind", columns(["a", None, "nan"]))
def test_missing_strings(kind: str):
    values = columns(["a", None, "nan"])[kind]()
    ids = pasted(refused(er.hash_ids, values), r"er\.hash_ids\(values, missing=-1\)", values=values)
    assert ids.tolist() == [*er.hash_ids(["a"]), -1, *er.hash_ids(["nan"])]  # a word "nan" is a word


@pytest.mark.parametrize(
    "values",
    [
        ["a", 7, b"c"],
        [b"a", 7, "c"],
        [7, b"a", "c"],
        [["a", 7], [b"c", "d"]],
        np.array([["a", 7], [b"c", "d"]], object),
        ["a", b"c\0"],
    ],
    ids=["str first", "bytes first", "int first", "nested", "2-D", "NUL"],
)
def test_strings_among_others(values: Any):
    found = pasted(refused(er.hash_ids, values), r"np\.array\(\[.*\)(?=\.$)", values=values)
    listed = [str(value) if isinstance(value, int) else value for value in np.asarray(values, object).ravel()]
    expected = [er.hash_ids(bytes(value) if not isinstance(value, str) else value) for value in listed]
    assert er.hash_ids(found).ravel().tolist() == expected
    assert found.shape == np.shape(values)


def test_hashes_beside_missing_ones_and_long_ones_as_strings():
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    ids = pandas.Series([2**63 + 1, None], dtype=object)
    filled = pasted(refused(table(), ids), r"ids\.fillna\(0\)", ids=ids)
    found = pasted(refused(table(), filled), r"np\.array\(\[int.*np\.shape\(ids\)\)", ids=filled)
    assert found.view(np.uint64).tolist() == [2**63 + 1, 0]
    values = polars.Series([2**100], dtype=polars.Int128)
    strings = pasted(refused(er.hash_ids, values), r"values\.cast\(str\)", values=values)
    assert er.hash_ids(strings).tolist() == er.hash_ids([str(2**100)]).tolist()


def jax_tables() -> Callable[[Any], Any]:
    pytest.importorskip("jax")
    import embedrock.jax as ej

    tables = ej.Tables(er.Table(None, 2))
    return lambda ids: tables.fetch(ids).rows


def bags() -> Callable[[Any], Any]:
    pytest.importorskip("torch")
    import embedrock.torch as ert

    return ert.EmbeddingBag(None, 2)


TAKERS = FRONTS | {"jax": jax_tables, "bags": bags}


@pytest.mark.parametrize("front", TAKERS)
def test_strings_name_a_hash_and_a_vocabulary(front: str):
    call, kinds = TAKERS[front](), columns(["a", "b"])
    if front != "jax":  # lists in a list are a tree of ids
        kinds["nested"] = lambda: [["a"], ["b"]]
    for kind, make in kinds.items():
        words = make()
        text = refused(call, words)
        assert "'a' at [0" in text, kind
        for code in (r"er\.hash_ids\(ids\)", r"er\.Vocabulary\(path\)\.add\(ids\)"):
            ids = pasted(text, code, ids=words, path=None)
            call(as_array(ids.reshape(2, -1), text))


def test_tensors_of_strings_name_a_hash_and_a_vocabulary():
    tf, erk = pytest.importorskip("tensorflow"), pytest.importorskip("embedrock.keras")
    for words in (tf.constant(["a", "b"]), tf.ragged.constant([["a"], ["b", "c"]])):
        text = refused(erk.Embedding(None, 2), words)
        assert "got string. Put an erk.Hashing() before it" in text
        assert "er.hash_ids(ids)" in text
        assert "er.Vocabulary(path).add(ids)" in text
        assert erk.Embedding(None, 2)(erk.Hashing()(words)).shape[0] == 2


def test_strings_given_to_a_table():
    words = np.array(["red", "green", "red"])
    text = refused(er.Table(1000, 2).lookup, words)
    hashed = pasted(text, r"er\.hash_ids\(ids\)", ids=words)
    text = refused(er.Table(1000, 2).lookup, hashed)
    assert "grow(" not in text
    buckets = pasted(text, r"er\.hash_ids\(strings, buckets=1000\)", strings=words)
    assert er.Table(1000, 2).lookup(buckets).shape == (3, 2)
    assert er.Table(None, 2).lookup(hashed).shape == (3, 2)


def test_ids_above_a_table_are_told_to_grow():
    made = er.Table(10, 2)
    before = made.lookup(np.arange(10))
    pasted("made." + re.findall(r"grow\(\d+\)", refused(made.lookup, [3, 12]))[0], r"made\.grow\(13\)", made=made)
    assert made.lookup([3, 12]).shape == (2, 2)
    assert (made.lookup(np.arange(10)) == before).all()


def test_jagged_refuses_what_is_no_list_of_ids():
    for lists, told in (
        ([[1], 2], "got '2' at"),
        (["ab"], "got 'ab' at"),
        ([[[1]]], "one level"),
        (pa.array([1]), "got '1'"),
    ):
        with pytest.raises(er.IdTypeError, match=told):
            er.jagged(lists)
    with pytest.raises(er.ArgumentError, match="an id for each of 2 values: got shape"):
        er.jagged([[1, 2]], lambda ids: ids[1:])
    for lists in (5, None, pa.table({"a": [[1]]}), pa.scalar(5)):
        with pytest.raises(er.IdTypeError, match=f"must be a column of lists.*got an? {type(lists).__name__}"):
            er.jagged(lists)
    with pytest.raises(er.IdTypeError, match=r"end to end: er\.jagged"):
        er.jagged([["a", None]], er.hash_ids)
    assert [part.tolist() for part in er.jagged(np.arange(4).reshape(2, 2))] == [[0, 1, 2, 3], [0, 2]]
    assert [part.tolist() for part in er.jagged([])] == [[], []]
    assert [part.tolist() for part in er.jagged([np.array([]), np.array([5])])] == [[5], [0, 0]]
