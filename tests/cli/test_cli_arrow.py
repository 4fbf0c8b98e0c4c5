"""Arrow's files and streams, and what other programs write of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedrock.cli.formats import columns, format_to_read
from embedrock.cli.formats.base import FileError, Output, ReadOptions, VectorSource

pyarrow: Any = pytest.importorskip("pyarrow", reason="Arrow's files need pyarrow")
ipc: Any = pytest.importorskip("pyarrow.ipc")
feather: Any = pytest.importorskip("pyarrow.feather")

ROWS, DIM = 23, 3


def vectors_of(rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, DIM), dtype=np.float32)


def table_of(ids: Any, vectors: Any, kind: Any = None) -> Any:
    lists = pyarrow.array(list(vectors), kind or pyarrow.list_(pyarrow.float32(), DIM))
    more = pyarrow.array(["x"] * len(ids))
    return pyarrow.table({"more": more, "id": pyarrow.array(ids), "vector": lists})


def write(path: Path, table: Any, form: str = "file", chunk: int = 5, compression: str | None = None) -> Path:
    make = ipc.new_file if form == "file" else ipc.new_stream
    with make(str(path), table.schema, options=ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return path


def opened(path: Path, **options: Any) -> VectorSource:
    return format_to_read(path, None).read(path, ReadOptions(**options))


def assert_reads(source: VectorSource, ids: np.ndarray, vectors: np.ndarray, start: int, batch_rows: int | None):
    batches = list(source.batches(start, batch_rows))
    assert all(len(batch.ids) <= (batch_rows or ROWS) for batch in batches)
    np.testing.assert_array_equal(np.concatenate([batch.ids for batch in batches]), ids[start:])
    np.testing.assert_array_equal(np.concatenate([batch.vectors for batch in batches]), vectors[start:])


@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_files_and_streams(tmp_path: Path, form: str, compression: str | None, chunk: int):
    ids, vectors = np.arange(ROWS)[::-1] * 10**12, vectors_of()
    path = write(tmp_path / "a.arrow", table_of(ids, vectors), form, chunk, compression)
    for start, batch_rows in [(0, None), (0, 1), (4, 3), (22, 9)]:
        assert_reads(opened(path), ids, vectors, start, batch_rows)
    assert_reads(opened(path, ids="row-number"), np.arange(ROWS), vectors, 3, 4)


@pytest.mark.parametrize("suffix", [".arrow", ".feather", ".ipc", ".arrows"])
def test_suffixes(tmp_path: Path, suffix: str):
    vectors = vectors_of()
    feather.write_feather(table_of(np.arange(ROWS), vectors), str(tmp_path / f"a{suffix}"))
    assert_reads(opened(tmp_path / f"a{suffix}"), np.arange(ROWS), vectors, 0, None)


@pytest.mark.parametrize("kind", ["list", "large", "half"])
def test_lists_of_any_floats(tmp_path: Path, kind: str):
    kinds = {
        "list": pyarrow.list_(pyarrow.float32()),
        "large": pyarrow.large_list(pyarrow.float64()),
        "half": pyarrow.list_(pyarrow.float16(), DIM),
    }
    vectors = vectors_of().astype(np.float16)
    path = write(tmp_path / "a.arrow", table_of(np.arange(ROWS), vectors, kinds[kind]))
    assert_reads(opened(path), np.arange(ROWS), vectors.astype(np.float32), 4, 3)


def test_a_sink_writes_what_pyarrow_reads(tmp_path: Path):
    ids, vectors = np.arange(ROWS) * 7, vectors_of()
    sink = columns.columns_sink(Output(tmp_path / "a.arrow", ROWS, DIM, True), 0, columns.ArrowFile)
    sink.write(ids, vectors)
    sink.finish()
    sink.close()
    found = feather.read_table(str(tmp_path / "a.arrow"))
    assert found.column("id").to_pylist() == ids.tolist()
    np.testing.assert_array_equal(np.array(found.column("vector").to_pylist(), np.float32), vectors)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(FileError) as caught:
        list(opened(path, **options).batches())
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", ["file", "stream"])
def test_refused(tmp_path: Path, form: str):
    path, vectors = tmp_path / "a.arrow", vectors_of()
    write(path, table_of(["a"] * ROWS, vectors), form)
    assert "expected a column 'id' of integers; got more (string), id (string), vector (" in refusal(path)
    assert "expected a column 'v' of lists of floats; got more" in refusal(path, ids="row-number", vectors="v")
    write(path, table_of([1, None, 3], [[1.0] * 3] * 3), form)
    assert "row 1 (from 0): expected an id and a vector; got null." in refusal(path)
    write(path, table_of([1, 2, 3], [[1.0] * 3, [1.0] * 2, [1.0] * 3], pyarrow.list_(pyarrow.float32())), form)
    assert "row 1 (from 0): expected 3 numbers; got 2." in refusal(path)
    write(path, table_of([1, 2], [[1.0] * 3, [1.0, float("nan"), 1.0]]), form)
    assert "row 1 (from 0): expected finite float32 numbers; got nan." in refusal(path)
    write(path, table_of([1][:0], []), form)
    assert "expected" in refusal(path)
    write(path, table_of(np.arange(ROWS), vectors), form)
    path.write_bytes(path.read_bytes()[:-200])
    assert "expected an Arrow file; got" in refusal(path)


@pytest.mark.parametrize("data", [b"", b"FEA1nothing", b"nothing at all, but some text", b"ARROW1\0\0"])
def test_what_is_no_arrow_file(tmp_path: Path, data: bytes):
    (tmp_path / "a.arrow").write_bytes(data)
    assert "expected an Arrow file; got" in refusal(tmp_path / "a.arrow")
