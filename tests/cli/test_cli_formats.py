"""Files of vectors: what each format reads and writes, in little RAM, and what is said of the rest."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import pickle
import shutil
import struct
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from embedrock.cli.formats import FORMATS, NAMES, format_to_read, format_to_write
from embedrock.cli.formats.base import (
    FileError,
    LineFile,
    Output,
    ReadOptions,
    RowBatch,
    VectorSource,
    keep_lines,
    part_of,
)
from embedrock.cli.formats.words import VocabularyFormat
from slow import examples

WRITTEN = [one.name for one in FORMATS if one.sink is not None]
TEXTS = ["glove", "word2vec"]
SUFFIXES = {one.name: one.suffix for one in FORMATS}
ROWS, DIM = 23, 3
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.fixture(autouse=True)
def _needs_pyarrow(request: pytest.FixtureRequest):
    params = str(request.node.callspec.params if hasattr(request.node, "callspec") else "")
    if "parquet" in params or "arrow" in params:
        pytest.importorskip("pyarrow", reason="Parquet and Arrow need pyarrow")


def vectors_of(rows: int, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, dim), dtype=np.float32)


def extent(vectors: np.ndarray) -> tuple[int, int]:
    rows, dim = vectors.shape
    return rows, dim


def write(name: str, folder: Path, ids: np.ndarray | None, vectors: np.ndarray, parts: tuple[int, ...] = ()) -> Path:
    """Write a file; at each of the numbers in `parts` the writer is ended, and another goes on."""
    path = folder / f"file{SUFFIXES[name]}"
    sink, done = NAMES[name].sink, 0
    assert sink is not None
    numbers = np.arange(len(vectors)) if ids is None else ids
    for end in (*parts, None):
        with contextlib.closing(sink(Output(path, *extent(vectors), ids is not None), done)) as writer:
            assert writer.holds(numbers[:done], vectors[:done])
            writer.write(numbers[done:end], vectors[done:end])
            writer.sync()
            if end is None:
                assert path in writer.finish()
            else:
                writer.write(numbers[end:], vectors[end:])  # not durable, and so written again
                done = end
    return path


def reading_of(name: str, ids: np.ndarray | None, dim: int = DIM) -> ReadOptions:
    words = "word" if name in TEXTS and ids is not None else None
    return ReadOptions(ids=words, dim=dim if name == "raw" else None)


def read(source: VectorSource, start: int = 0, batch_rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    batches = list(source.batches(start, batch_rows))
    ids = [np.empty(0, np.int64), *(batch.ids for batch in batches)]
    return np.concatenate(ids), np.concatenate([np.empty((0, source.dim), np.float32), *(b.vectors for b in batches)])


def opened(path: Path, reading: ReadOptions | None = None, name: str | None = None) -> VectorSource:
    return format_to_read(path, name).read(path, reading or ReadOptions())


def assert_reads(
    source: VectorSource, ids: np.ndarray, vectors: np.ndarray, start: int = 0, batch_rows: int | None = None
):
    assert (source.rows, source.dim) == vectors.shape
    got_ids, got = read(source, start, batch_rows)
    assert got_ids.dtype == np.int64
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got_ids, ids[start:])
    np.testing.assert_array_equal(got.view(np.uint32), vectors[start:].view(np.uint32))


def refusal(path: Path, reading: ReadOptions | None = None, name: str | None = None) -> str:
    with pytest.raises(FileError) as caught:
        read(opened(path, reading, name))
    assert str(path) in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("parts", [(), (1,), (7, 20), (ROWS,)], ids=str)
def test_what_was_written_is_read(tmp_path: Path, name: str, own_ids: bool, parts: tuple[int, ...]):
    ids = np.random.default_rng(1).permutation(ROWS) * 10**12 - 5 if own_ids else None
    vectors = vectors_of(ROWS)
    path = write(name, tmp_path, ids, vectors, parts)
    wanted = np.arange(ROWS) if ids is None else ids
    assert not list(tmp_path.glob("*.part"))
    for start, batch_rows in [(0, None), (0, 1), (5, 4), (ROWS - 1, 7), (ROWS, 7)]:
        assert_reads(opened(path, reading_of(name, ids)), wanted, vectors, start, batch_rows)


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rows_round_trip(name: str, data: st.DataObject):
    rows, dim = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    vectors = data.draw(hnp.arrays(np.float32, (rows, dim), elements=FLOAT32))
    ids = data.draw(hnp.arrays(np.int64, rows, unique=True) | st.none())
    parts = tuple(sorted(data.draw(st.sets(st.integers(1, rows), max_size=2))))
    with tempfile.TemporaryDirectory() as folder:
        path = write(name, Path(folder), ids, vectors, parts)
        source = opened(path, reading_of(name, ids, dim), name)
        assert_reads(source, np.arange(rows) if ids is None else ids, vectors, 0, data.draw(st.integers(1, 12)))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_part_with_other_rows_is_noticed(tmp_path: Path, name: str):
    vectors, ids = vectors_of(ROWS), np.arange(ROWS)
    sink = NAMES[name].sink
    assert sink is not None
    output = Output(tmp_path / f"file{SUFFIXES[name]}", *extent(vectors), True)
    writer = sink(output, 0)
    writer.write(ids[:9], vectors[:9])
    writer.sync()
    writer.close()
    again = sink(output, 9)
    assert again.holds(ids[4:9], vectors[4:9])
    assert not again.holds(ids[4:9], vectors[3:8])
    assert not again.holds(ids[3:8], vectors[4:9])
    again.close()


@pytest.mark.parametrize("name", WRITTEN)
def test_nothing_that_exists_is_replaced(tmp_path: Path, name: str):
    vectors = vectors_of(4)
    path = write(name, tmp_path, None, vectors)
    before = path.read_bytes()
    with pytest.raises(FileError, match="no file of this name"):
        write(name, tmp_path, None, vectors + 1)
    assert path.read_bytes() == before


def test_ids_beside_are_not_replaced(tmp_path: Path):
    write("npy", tmp_path, np.arange(4) + 9, vectors_of(4))
    with pytest.raises(FileError, match=r"file\.ids\.npy: expected no file of this name"):
        write("raw", tmp_path, np.arange(4), vectors_of(4))


# ---------------------------------------------------------------- what others write


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<f8", ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_any_floats(tmp_path: Path, dtype: str, order: Any):
    vectors = vectors_of(ROWS).astype(dtype)
    np.save(tmp_path / "a.npy", np.asarray(vectors, order=order))
    assert_reads(opened(tmp_path / "a.npy"), np.arange(ROWS), vectors.astype(np.float32), 4, 5)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path: Path, save: Callable[..., None]):
    vectors, ids = vectors_of(ROWS), np.arange(ROWS, dtype=np.uint32)[::-1]
    path = tmp_path / "a.npz"
    save(path, ids=ids, weight=vectors, other=vectors[:, 0])
    assert_reads(opened(path), ids.astype(np.int64), vectors, 3, 5)
    assert_reads(opened(path, ReadOptions(ids="row-number")), np.arange(ROWS), vectors)
    assert "no arrays" not in refusal(path, ReadOptions(ids="missing"))
    assert "expected 23 whole numbers as ids" in refusal(path, ReadOptions(ids="other"))
    save(path, a=vectors, b=vectors + 1, keys=ids)
    assert "expected one 2-D array of floats; got a float32 (23, 3), b float32 (23, 3)" in refusal(path)
    assert_reads(opened(path, ReadOptions(vectors="b", ids="keys")), ids.astype(np.int64), vectors + 1)
    assert "an array 'c'" in refusal(path, ReadOptions(vectors="c"))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
def test_raw_and_safetensors_of_any_floats(tmp_path: Path, dtype: str):
    vectors = vectors_of(ROWS)
    if dtype == "bfloat16":
        stored = (vectors.view(np.uint32) >> 16).astype(np.uint16)
        vectors = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        stored = vectors.astype(dtype)
        vectors = stored.astype(np.float32)
    (tmp_path / "a.raw").write_bytes(stored.tobytes())
    assert_reads(opened(tmp_path / "a.raw", ReadOptions(dim=DIM, dtype=dtype)), np.arange(ROWS), vectors, 2, 5)
    names = {"float32": "F32", "float16": "F16", "float64": "F64", "bfloat16": "BF16"}
    tensor = {"dtype": names[dtype], "shape": vectors.shape, "data_offsets": [0, stored.nbytes]}
    write_safetensors(tmp_path / "a.safetensors", {"__metadata__": {"a": "b"}, "emb.weight": tensor}, stored.tobytes())
    assert_reads(opened(tmp_path / "a.safetensors"), np.arange(ROWS), vectors, 2, 5)


def write_safetensors(path: Path, header: Any, data: bytes):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_safetensors_of_its_own_package(tmp_path: Path):
    package = pytest.importorskip("safetensors.numpy", reason="compared with the package safetensors")
    vectors, ids = vectors_of(ROWS), np.arange(ROWS) * 3
    package.save_file({"vectors": vectors, "ids": ids, "n": np.zeros((2, 2), np.int64)}, tmp_path / "a.safetensors")
    assert_reads(opened(tmp_path / "a.safetensors"), ids, vectors)
    (tmp_path / "b").mkdir()
    for own_ids in (ids, None):
        path = write("safetensors", tmp_path / "b", own_ids, vectors)
        found = package.load_file(path)
        np.testing.assert_array_equal(found.pop("weights"), vectors)
        if own_ids is not None:
            np.testing.assert_array_equal(found.pop("ids"), ids)
        assert not found
        path.unlink()


def test_numpy_reads_what_is_written(tmp_path: Path):
    vectors, ids = vectors_of(ROWS), np.arange(ROWS) * 3
    np.testing.assert_array_equal(np.load(write("npy", tmp_path, ids, vectors)), vectors)
    np.testing.assert_array_equal(np.load(tmp_path / "file.ids.npy"), ids)
    with np.load(write("npz", tmp_path, ids, vectors)) as found:
        np.testing.assert_array_equal(found["vectors"], vectors)
        np.testing.assert_array_equal(found["ids"], ids)


def write_parquet(path: Path, ids: Any, vectors: Any, kind: str, **options: Any):
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    kinds = {
        "list": arrow.list_(arrow.float32()),
        "large": arrow.large_list(arrow.float64()),
        "fixed": arrow.list_(arrow.float32(), DIM),
        "half": arrow.list_(arrow.float16(), DIM),
        "text": arrow.string(),
    }
    columns = {"id": arrow.array(ids), "vector": arrow.array(vectors, kinds[kind]), "more": arrow.array(ids)}
    parquet.write_table(arrow.table(columns), path, **options)


@pytest.mark.parametrize("kind", ["list", "large", "fixed", "half"])
@pytest.mark.parametrize("group", [4, 1000])
def test_parquet_of_any_lists(tmp_path: Path, kind: str, group: int):
    vectors, ids = vectors_of(ROWS), [5 * number for number in range(ROWS)]
    values = vectors.astype(np.float16) if kind == "half" else vectors
    write_parquet(tmp_path / "a.parquet", ids, list(values), kind, row_group_size=group)
    for start, batch_rows in [(0, None), (0, 3), (4, 3), (9, 100), (22, 1)]:
        source = opened(tmp_path / "a.parquet")
        assert_reads(source, np.array(ids), values.astype(np.float32), start, batch_rows)
    assert_reads(
        opened(tmp_path / "a.parquet", ReadOptions(ids="row-number")), np.arange(ROWS), values.astype(np.float32)
    )


@pytest.mark.parametrize(
    ("ids", "vectors", "kind", "text"),
    [
        ([1, 2, 3], [[1.0] * 3, [1.0] * 2, [1.0] * 3], "list", "row 1 (from 0): expected 3 numbers; got 2."),
        ([1, 2, 3], [[1.0] * 3, None, [1.0] * 3], "list", "row 1 (from 0): expected an id and a vector; got null."),
        ([1, None, 3], [[1.0] * 3] * 3, "fixed", "row 1 (from 0): expected an id and a vector; got null."),
        ([1, 2, 3], [[1.0] * 3, [1.0] * 3, [1.0, None, 1.0]], "fixed", "row 2 (from 0): expected numbers; got null"),
        ([1, 2, 3], [[1.0] * 3, [1.0] * 3, [1.0, float("nan"), 1.0]], "fixed", "row 2 (from 0): expected finite"),
        ([1, 2, 3], [[], [], []], "list", "row 0 (from 0): expected a vector; got []"),
        ([1, 2, 3], ["a", "b", "c"], "text", "expected a column 'vector' of lists of floats; got id (int64), vector"),
        (["a", "b", "c"], [[1.0] * 3] * 3, "fixed", "expected a column 'id' of integers; got id (string), vector"),
    ],
)
def test_parquet_refused(tmp_path: Path, ids: Any, vectors: Any, kind: str, text: str):
    write_parquet(tmp_path / "a.parquet", ids, vectors, kind)
    assert text in refusal(tmp_path / "a.parquet")


def test_parquet_that_is_none(tmp_path: Path):
    write_parquet(tmp_path / "a.parquet", np.empty(0, np.int64), [], "fixed")
    assert "expected rows; got none." in refusal(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    assert "expected a Parquet file" in refusal(tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", list(range(99)), list(vectors_of(99)), "fixed")
    data = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[:-40])
    assert "expected a Parquet file" in refusal(tmp_path / "a.parquet")


# ---------------------------------------------------------------- text


def text_file(folder: Path, text: str | bytes, suffix: str = ".txt") -> Path:
    path = folder / f"a{suffix}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def words_of(source: VectorSource) -> list[bytes]:
    return [word for batch in source.batches() for word in batch.words or []]


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n"])
@pytest.mark.parametrize("header", ["", "3 2"])
def test_words_and_numbers(tmp_path: Path, end: str, header: str):
    lines = [*([header] if header else []), "the 1 -2.5", "über 3e-2 4", "</s> 0 1E+3"]
    for text in (end.join(lines), end.join([*lines, ""])):
        source = opened(text_file(tmp_path, text))
        vectors = np.array([[1, -2.5], [0.03, 4], [0, 1000]], np.float32)
        assert_reads(source, np.arange(3), vectors, 1, 1)
        assert words_of(source) == [b"the", "über".encode(), b"</s>"]


def test_words_with_spaces(tmp_path: Path):
    source = opened(text_file(tmp_path, "the 1 2\n. . . 3 4\nat name@domain.com 5 6\ntwo  7  8\n"))
    assert_reads(source, np.arange(4), np.arange(1, 9, dtype=np.float32).reshape(4, 2))
    assert words_of(source) == [b"the", b". . .", b"at name@domain.com", b"two"]


def test_words_as_ids(tmp_path: Path):
    source = opened(text_file(tmp_path, "7 1 2\n-3 3 4\n"), ReadOptions(ids="word"))
    assert source.has_ids
    assert not source.has_words
    assert_reads(source, np.array([7, -3]), np.array([[1, 2], [3, 4]], np.float32))
    for word in ("x", "1.5", str(2**63)):
        text = refusal(text_file(tmp_path, f"7 1 2\n{word} 3 4\n"), ReadOptions(ids="word"))
        assert f"line 2: expected an int64 as word, for it is the id; got b'{word}'" in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected a word and its numbers; got an empty file."),
        ("word\n", "line 1: expected a word and its numbers"),
        ("a 1 2\nb 3\n", "line 2: expected a word and 2 numbers between spaces; got 2 fields: b'b 3\\n'"),
        ("a 1 2\nb 3 4 5\n", "line 2: expected a word and 2 numbers between spaces; got 4 fields"),
        ("a 1 2\nb 3 x\n", "line 2: expected a word and 2 numbers"),
        ("a 1 2\n\nc 3 4\n", "line 2: expected a word and 2 numbers"),
        ("a 1 2\nb 1-2 3\n", "line 2: expected a word and 2 numbers"),
        ("a 1 2\n 1 2\n", "line 2: expected a word and 2 numbers"),
        ("a 1 2\nb nan 2\n", "line 2: expected finite float32 numbers; got nan"),
        ("a 1 2\nb 1e39 2\n", "line 2: expected finite float32 numbers; got inf"),
        ("2 2\na 1 2\n", "line 3: expected 2 rows; got the end of the file after 1"),
        ("1 2\na 1 2\nb 3 4\n", "line 3: expected 1 row, as line 1 says; got more"),
        ("99999 99999\na 1 2\n", "line 1: expected numbers of rows and columns that fit the file"),
        ("0 2\n", "line 1: expected numbers of rows and columns that fit the file"),
    ],
)
def test_text_refused(tmp_path: Path, text: str, told: str):
    assert told in refusal(text_file(tmp_path, text)).replace('""', "''").replace("b''", "''")


def test_a_refusal_names_the_line_whatever_the_batch(tmp_path: Path):
    path = text_file(tmp_path, "".join(f"w{k} {k}.5 1\n" for k in range(50)) + "bad 1 two\n")
    for start, batch_rows in [(0, 7), (13, 4), (50, 1)]:
        with pytest.raises(FileError, match="line 51:"):
            read(opened(path), start, batch_rows)


def binary(words: list[bytes], vectors: np.ndarray, end: bytes = b"") -> bytes:
    rows = [word + b" " + row.tobytes() + end for word, row in zip(words, vectors, strict=True)]
    return b"%d %d\n" % vectors.shape + b"".join(rows)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_word2vec_binary(tmp_path: Path, end: bytes):
    words, vectors = [b"w%d" % k for k in range(ROWS)], vectors_of(ROWS)
    path = text_file(tmp_path, binary(words, vectors, end), ".bin")
    for start, batch_rows in [(0, None), (0, 5), (7, 4), (ROWS, 3)]:
        assert_reads(opened(path), np.arange(ROWS), vectors, start, batch_rows)
    assert words_of(opened(path)) == words


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_compressed_words(tmp_path: Path, suffix: str):
    """fastText's and Google's vectors come so."""
    words, vectors = [b"w%d" % k for k in range(ROWS)], vectors_of(ROWS)
    pack = {".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    path = text_file(tmp_path, pack(binary(words, vectors)), f".bin{suffix}")
    for start, batch_rows in [(0, None), (7, 4)]:
        assert_reads(opened(path), np.arange(ROWS), vectors, start, batch_rows)
    assert words_of(opened(path)) == words
    for header in (b"", b"2 2\n"):
        path = text_file(tmp_path, pack(header + b"the 1 2\n. . 3 4\n"), f".vec{suffix}")
        assert_reads(opened(path), np.arange(2), np.array([[1, 2], [3, 4]], np.float32), 1, 1)
    path = text_file(tmp_path, pack(b"99999 99999\nthe 1 2\n"), f".vec{suffix}")
    assert "line 1: expected numbers of rows and columns that fit the file" in refusal(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data[:-1], "row 22 (from 0): expected 12 bytes of numbers; got the end of the file after 11"),
        (lambda data: data + b"x", "expected 23 rows, as line 1 says; got more bytes after them"),
        (lambda data: data[:6] + b"\xff" * 9000, "row 0 (from 0): expected a word and a space"),
        (lambda data: b"9" * 9 + data, "line 1: expected numbers of rows and columns that fit the file"),
        (lambda data: data[6:], "line 1: expected the numbers of rows and columns"),
        (lambda data: data.replace(b"w3 ", b" "), "row 3 (from 0): expected a word and a space"),
    ],
)
def test_word2vec_binary_refused(tmp_path: Path, change: Callable[[bytes], bytes], told: str):
    data = binary([b"w%d" % k for k in range(ROWS)], np.ones((ROWS, DIM), np.float32))
    assert told in refusal(text_file(tmp_path, change(data), ".bin"))


@pytest.mark.parametrize("name", TEXTS)
def test_words_are_written(tmp_path: Path, name: str):
    words = tmp_path / "words.txt"
    words.write_bytes("the\nüber\na b\n".encode())
    vectors, sink = vectors_of(3), NAMES[name].sink
    assert sink is not None
    path = tmp_path / f"file{SUFFIXES[name]}"
    with contextlib.closing(sink(Output(path, *extent(vectors), False, words), 0)) as writer:
        writer.write(np.array([0, 1, 2]), vectors)
        writer.finish()
    assert words_of(opened(path)) == [b"the", "über".encode(), b"a b"]
    assert_reads(opened(path), np.arange(3), vectors)
    again = Output(tmp_path / f"again{SUFFIXES[name]}", *extent(vectors), False, words)
    refused = pytest.raises(FileError, match="got 3 words, and a row of id 3")
    with contextlib.closing(sink(again, 0)) as writer, refused:
        writer.write(np.array([1, 3]), vectors[:2])


@given(st.lists(st.binary(min_size=1, max_size=9).filter(lambda word: not set(word) & set(b"\n\r"))))
def test_vocabulary(words: list[bytes]):
    with tempfile.TemporaryDirectory() as folder:
        path, half = Path(folder) / "words.txt", len(words) // 2
        for done, end in ((0, half), (half, len(words))):
            writer = LineFile(path, done)
            writer.write([*words[done:end], b"left over"])
            writer.sync()
            writer.close()
        keep_lines(path, len(words))
        with contextlib.closing(VocabularyFormat(path)) as found:
            assert len(found) == len(words)
            assert found.of(np.arange(len(words))[::-1]) == words[::-1]


def test_keep_lines_needs_so_many(tmp_path: Path):
    path = text_file(tmp_path, "a\nb\nc")
    with pytest.raises(FileError, match="expected 3 lines from an earlier run; got 2"):
        keep_lines(path, 3)
    keep_lines(path, 1)
    assert path.read_bytes() == b"a\n"


# ---------------------------------------------------------------- what is refused


def npy_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


class Bomb:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "expected a .npy file of numbers"),
        (b"\x93NUMPY\x01\x00", "expected a .npy file of numbers"),
        (b"\x93NUMPY\x03\x00" + bytes(99), "version (3, 0) of the format"),
        (npy_bytes(np.zeros((4, 3), np.float32))[:-1], "expected 176 bytes for float32 (4, 3); got 175."),
        (npy_bytes(np.zeros((4, 3), np.float32)) + b"x", "got 177."),
        (npy_bytes(np.zeros((4, 3), np.int64)), "expected a 2-D array of floats; got int64 (4, 3)."),
        (npy_bytes(np.zeros(12, np.float32)), "expected a 2-D array of floats; got float32 (12,)."),
        (npy_bytes(np.zeros((4, 3), complex)), "expected numbers; got an array of complex128."),
        (npy_bytes(np.zeros((0, 3), np.float32)), "expected at least one row and column; got float32 (0, 3)."),
        (npy_bytes(np.zeros((3, 0), np.float32)), "expected at least one row and column; got float32 (3, 0)."),
        (npy_bytes(np.full((4, 3), np.inf, np.float32)), "row 0 (from 0): expected finite float32 numbers; got inf."),
        (npy_bytes(np.full((4, 3), 1e39)), "row 0 (from 0): expected finite float32 numbers; got inf."),
        (npy_bytes(np.zeros((4, 3), np.float32)).replace(b"(4, 3)", b"(4, -3)"), "expected"),
        (npy_bytes(np.zeros((4, 3), np.float32)).replace(b"(4, 3), ", b"(10**9,3)"), "expected a .npy file of numbers"),
        (npy_bytes(np.zeros((4, 3), np.float32)).replace(b"(4, 3), }  ", b"(4, 3000)}"), "expected"),
        (npy_bytes(np.array([Bomb()], object)), "Nothing is unpickled."),
        (pickle.dumps(Bomb()), "expected a .npy file of numbers"),
    ],
)
def test_npy_refused(tmp_path: Path, data: bytes, told: str):
    assert told in refusal(text_file(tmp_path, data, ".npy"))


def test_ids_refused(tmp_path: Path):
    np.save(tmp_path / "a.npy", vectors_of(4))
    np.save(tmp_path / "a.ids.npy", np.array([1, 2, 3]))
    with pytest.raises(FileError, match=r"a\.ids\.npy: expected 4 whole numbers as ids, .*; got int64 \(3,\)"):
        opened(tmp_path / "a.npy")
    np.save(tmp_path / "a.ids.npy", np.array([1, 2, 3, 2**63], np.uint64))
    assert f"row 3 (from 0): expected ids below 2**63; got {2**63}." in refusal(tmp_path / "a.npy")
    np.save(tmp_path / "own.npy", np.array([4, 3, 2, 1]))
    own = ReadOptions(ids=str(tmp_path / "own.npy"))
    assert_reads(opened(tmp_path / "a.npy", own), np.array([4, 3, 2, 1]), vectors_of(4))
    assert_reads(opened(tmp_path / "a.npy", ReadOptions(ids="row-number")), np.arange(4), vectors_of(4))


def test_npz_refused(tmp_path: Path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"PK\x03\x04 nothing")
    assert "expected a .npz file" in refusal(path)
    np.savez(path, vectors=np.asfortranarray(vectors_of(4)))
    assert "expected rows one after the other" in refusal(path)
    np.savez(path, vectors=np.array([Bomb()], object))
    assert "Nothing is unpickled." in refusal(path)
    np.savez(path, vectors=vectors_of(2), ids=np.array(["a", "b"]))
    assert (
        "ids: expected numbers; got an array of <U1, which are strings. If they are ids: Make integers of words"
        in refusal(path)
    )
    np.savez(path, vectors=vectors_of(2), ids=np.array([1, 2**64 - 1], np.uint64))
    assert "got 18446744073709551615. Take hashes by their bits, ids.view(np.int64)." in refusal(path)
    np.savez_compressed(path, vectors=vectors_of(40))
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vectors.npy", npy_bytes(np.zeros((4, 3), np.float32))[:-1])
    assert "expected 176 bytes" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "")
    assert "expected 1 to 1000 arrays; got 0" in refusal(path)
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    refusal(path)


F32 = {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"", "expected a safetensors file; got a header of 0 bytes"),
        (b"nonsense", "expected a header in JSON"),
        (b"[" * 100_000, "expected a header in JSON"),
        (b"[1]", "expected a header that names tensors; got list"),
        ({}, "expected one 2-D array of floats; got no arrays"),
        ({"a": 1}, "tensor 'a': expected dtype, shape and data_offsets; got 1"),
        ({"a": F32 | {"dtype": 5}}, "tensor 'a': expected dtype, shape and data_offsets"),
        ({"a": F32 | {"shape": [4, -3]}}, "tensor 'a': expected whole numbers as shape and offsets"),
        ({"a": F32 | {"shape": [4.0, 3]}}, "tensor 'a': expected whole numbers as shape and offsets"),
        ({"a": F32 | {"shape": [True, 12]}}, "tensor 'a': expected whole numbers as shape and offsets"),
        ({"a": F32 | {"shape": [4, 2**62]}}, "tensor 'a': expected"),
        (
            {"a": F32 | {"data_offsets": [0, 44]}},
            "tensor 'a': expected 48 bytes for F32 (4, 3); got bytes 0 to 44 of 48",
        ),
        (
            {"a": F32 | {"data_offsets": [4, 52]}},
            "tensor 'a': expected 48 bytes for F32 (4, 3); got bytes 4 to 52 of 48",
        ),
        ({"a": F32 | {"data_offsets": 7}}, "tensor 'a': expected dtype, shape and data_offsets"),
        ({"a": F32 | {"dtype": "F4"}}, "expected one 2-D array of floats; got no arrays"),
        ({"a": F32, "b": F32}, "Name one: --vectors NAME."),
        ({"a": F32, "ids": F32}, "Name one: --vectors NAME."),
    ],
)
def test_safetensors_refused(tmp_path: Path, header: Any, told: str):
    write_safetensors(tmp_path / "a.safetensors", header, bytes(48))
    assert told in refusal(tmp_path / "a.safetensors")


def test_safetensors_with_a_huge_header(tmp_path: Path):
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert "a header of 9223372036854775808 bytes in a file of 10" in refusal(tmp_path / "a.safetensors")


def test_raw_refused(tmp_path: Path):
    path = text_file(tmp_path, bytes(25), ".raw")
    assert "expected the width of its rows; got none. Pass --dim N." in refusal(path)
    assert "expected rows of 3 float32, 12 bytes each; got 25 bytes in all." in refusal(path, ReadOptions(dim=3))


def test_formats_by_name(tmp_path: Path):
    for one in FORMATS:
        path = text_file(tmp_path, "a 1 2\n", one.suffix.upper())
        wanted = "glove" if one.name == "word2vec" else one.name  # by its first line
        assert format_to_read(path, None).name == wanted
        assert format_to_read(path, one.name) is one
        if one.sink is not None:
            assert format_to_write(path, None) is one
    for name in ("a.zip", "a", "a.tar"):
        for choose in (format_to_read, format_to_write):
            with pytest.raises(FileError, match=r"expected one of \.npy \(npy\)"):
                choose(tmp_path / name, None)
    with pytest.raises(FileError, match="Unpack it"):
        format_to_read(tmp_path / "vectors.npy.gz", None)
    for choose in ("csv", None):
        with pytest.raises(FileError, match="Write it plain, and compress it then"):
            format_to_write(tmp_path / "vectors.csv.gz", choose)
    with pytest.raises(FileError, match=r"got '\.bin'"):
        format_to_write(tmp_path / "a.bin", None)


@pytest.mark.parametrize("name", [*(name for name in WRITTEN if name != "parquet"), "word2vec-binary"])
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_read_or_refused(name: str, data: st.DataObject):
    """Whatever is flipped, cut off or put in between: rows come out, or a FileError."""
    with tempfile.TemporaryDirectory() as folder:
        vectors = vectors_of(6)
        if name == "word2vec-binary":
            path = text_file(Path(folder), binary([b"w%d" % k for k in range(6)], vectors), ".bin")
        else:
            path = write(name, Path(folder), None, vectors)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, max(0, len(content) - 1)))
            content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
        path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
        try:
            source = opened(path, reading_of(name, None), name)
            for batch in source.batches(0, 2):
                assert isinstance(batch, RowBatch)
                assert batch.vectors.shape == (len(batch.ids), source.dim)
                assert np.isfinite(batch.vectors).all()
        except FileError:
            pass


# ---------------------------------------------------------------- RAM


def compress(path: Path, compressed: Path):
    options: dict[str, Any] = {"compression": zipfile.ZIP_DEFLATED, "compresslevel": 1}
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(compressed, "w", **options) as after:
        name = "vectors.npy"
        with before.open(name) as source, after.open(name, "w", force_zip64=True) as copy:
            shutil.copyfileobj(source, copy)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WRITTEN, "npz-compressed"])
def test_ram_does_not_follow_the_file(tmp_path: Path, name: str):
    """Write and read a file of 200 MB; what Python and NumPy allocate stays small."""
    kind, dim = name.removesuffix("-compressed"), 256
    rows, step = 200_000_000 // ((12 if name in TEXTS else 4) * dim), 4096
    path, sink = tmp_path / f"a{SUFFIXES[kind]}", NAMES[kind].sink
    assert sink is not None
    part = vectors_of(step, dim)
    tracemalloc.start()
    try:
        writer = sink(Output(path, rows, dim, False), 0)
        for first in range(0, rows, step):
            ids = np.arange(first, min(rows, first + step))
            writer.write(ids, part[: len(ids)])
        writer.finish()
        writer.close()
        if name == "npz-compressed":
            compress(path, tmp_path / "b.npz")
            path = tmp_path / "b.npz"
        seen = 0
        for batch in opened(path, reading_of(kind, None, dim)).batches():
            np.testing.assert_array_equal(batch.vectors[0], part[seen % step])
            seen += len(batch.ids)
        assert seen == rows
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60e6, f"{peak / 1e6:.0f} MB"
    assert not part_of(path).exists()
