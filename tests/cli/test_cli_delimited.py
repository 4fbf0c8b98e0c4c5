"""CSV and TSV: read to the bits that Python reads, or refused in words that name the line and the column."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedrock.batch.wrong_ids import OF_STRINGS
from embedrock.cli.formats import delimited, format_to_read, format_to_write
from embedrock.cli.formats.base import FileError, Output, ReadOptions, VectorSource
from embedrock.errors import RequirementError
from slow import examples

pytest.importorskip("pyarrow.csv", reason="CSV is read by pyarrow")

# What a field may hold that a reader could take for something else.
ODD = ["", " ", "nan", "-NaN", "inf", "Infinity", "1e400", "-1e-400", "1e39", "+1", "1_0", "0x1F", " 1 ", "\t2", "1."]
ODD += ['"3"', '"4"5', '5"6"', '"7\n8"', '"', '""', '"9""0"', '"1,2"', "1\r2", "\r", "\u0661", "nan(x)", "\ufeff1"]
ODD += ["-", "1e", "\0", "007", "-0", "1.0", ".5", "true", "null", "NA", "1 2", "1;2", "1\n", "\n"]
ODD += ["9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809"]
NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(lambda value: f"{value:.9g}"),
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e38, max_value=1e38).map(repr),
    st.decimals(-10, 10, allow_nan=False, places=30).map(str),
    st.integers(-(10**20), 10**20).map(str),
    st.sampled_from(
        ["16777217", "1.00000005960464477539062", "0.1e-0000000000000000001", " 2 ", "-0", "007", "1.", "+1"]
    ),
)
IDS = st.integers(-(2**63), 2**63 - 1).map(str)


def told(path: Path, options: ReadOptions) -> Any:
    """Return what a file has, bit by bit, or what is said of it."""
    try:
        source = format_to_read(path, None).read(path, options)
        batches = list(source.batches(0, 3))
    except FileError as error:
        return str(error)
    ids = np.concatenate([batch.ids for batch in batches])
    vectors = np.concatenate([batch.vectors for batch in batches])
    assert (ids.dtype, vectors.dtype, vectors.shape) == (np.int64, np.float32, (source.rows, source.dim))
    return ids.tolist(), vectors.view(np.uint32).tolist()


Rows = list[tuple[str, list[str]]]  # of a file: ids and numbers


@st.composite
def files(draw: st.DrawFn, odd: bool) -> tuple[str, bytes, Rows]:
    suffix = draw(st.sampled_from([".csv", ".tsv"]))
    separator, end = {".csv": ",", ".tsv": "\t"}[suffix], draw(st.sampled_from(["\n", "\r\n"]))
    dim, texts = draw(st.integers(1, 3)), draw(st.booleans())
    number, one_id = (NUMBERS | st.sampled_from(ODD), IDS | st.sampled_from(ODD)) if odd else (NUMBERS, IDS)
    names = ["id", *(f"v{column}" for column in range(dim)), *(["title"] if texts else [])]
    lines = [separator.join(names)] if draw(st.booleans()) or texts else []
    rows: Rows = []
    for _ in range(draw(st.integers(1, 9))):
        rows.append((draw(one_id), [draw(number) for _ in range(dim)]))
        fields = [rows[-1][0], *rows[-1][1]]
        if draw(st.booleans()):
            fields = [f'"{field}"' for field in fields]
        title = draw(st.sampled_from([*ODD, "a", '"b, c"', '"d ""e"""', 'f"']) if odd else st.just('"b c"'))
        lines += [separator.join([*fields, *([title] if texts else [])]), *[""] * draw(st.integers(0, 1))]
    text = "\ufeff" * draw(st.integers(0, 1)) + end.join(lines) + end * draw(st.integers(0, 2))
    return suffix, text.encode(), rows


def told_of(suffix: str, data: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(delimited, "BLOCK_BYTES", 96)
        patch.setattr(delimited, "CHUNK_BYTES", 40)
        path = Path(folder) / f"a{suffix}"
        path.write_bytes(data)
        return told(path, ReadOptions(vectors="v") if b"title" in data else ReadOptions())


@settings(max_examples=examples(60), deadline=None)
@given(file=files(odd=False))
def test_numbers_are_read_as_python_reads_them(file: tuple[str, bytes, Rows]):
    """To float64, which is rounded to float32 once."""
    suffix, data, rows = file
    with np.errstate(over="ignore"):
        vectors = np.array([[float(text) for text in numbers] for _, numbers in rows], np.float32)
    assert told_of(suffix, data) == ([int(one) for one, _ in rows], vectors.view(np.uint32).tolist())


@settings(max_examples=examples(100), deadline=None)
@given(file=files(odd=True))
def test_odd_files_are_read_or_refused(file: tuple[str, bytes, Rows]):
    """Each row as it stands there, or a FileError."""
    suffix, data, rows = file
    found = told_of(suffix, data)
    if not isinstance(found, str):
        assert len(found[0]) <= len(rows) + data.count(b"\r") + data.count(b"\n")
        assert np.isfinite(np.array(found[1], np.uint32).view(np.float32)).all()


# ---------------------------------------------------------------- what columns are


def write(folder: Path, text: str | bytes, name: str = "a.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def opened(path: Path, **options: Any) -> VectorSource:
    return format_to_read(path, None).read(path, ReadOptions(**options))


def rows(path: Path, **options: Any) -> dict[int, list[float]]:
    batches = list(opened(path, **options).batches())
    return {int(one): row.tolist() for batch in batches for one, row in zip(batch.ids, batch.vectors, strict=True)}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("id,a,b\n7,1,2\n9,3,4\n", {}),
        ("ID,0,1\n7,1,2\n9,3,4\n", {}),  # a DataFrame whose columns have numbers, and whose index has a name
        (",0,1\n7,1,2\n9,3,4\n", {}),  # one whose index has none
        ("7,1,2\n9,3,4\n", {}),
        ("7;1;2\n9;3;4\n", {}),
        ("7\t1\t2\n9\t3\t4\n", {}),
        ("\n\r\n7,1,2\n\n9,3,4", {}),
        ("a,user,b\n1,7,2\n3,9,4\n", {"ids": "user"}),
        ("1,7,2\n3,9,4\n", {"ids": "1"}),
        ('id,title,v_0,v_1\n7,"a, b",1,2\n9,"c ""d""",3,4\n', {"vectors": "v"}),
        ("v1,v2,x,id\n1,2,,7\n3,4,none,9\n", {"vectors": "v"}),
        ("0,1,2\n7,1,2\n9,3,4\n", {"header": True, "ids": "0"}),
    ],
)
def test_columns(tmp_path: Path, text: str, options: dict[str, Any]):
    assert rows(write(tmp_path, text), **options) == {7: [1, 2], 9: [3, 4]}


def test_rows_are_numbered_where_a_file_has_no_ids(tmp_path: Path):
    assert rows(write(tmp_path, "0.5,1\n2,3\n"), ids="row-number") == {0: [0.5, 1], 1: [2, 3]}
    assert rows(write(tmp_path, "0,1\n2,3\n"), ids="row-number", header=False) == {0: [0, 1], 1: [2, 3]}
    assert rows(write(tmp_path, "a,b\n2,3\n"), ids="row-number") == {0: [2, 3]}


@pytest.mark.parametrize(
    ("text", "options", "error"),
    [
        ("", {}, "expected rows; got an empty file."),
        ("id,a\n\n", {}, "expected rows; got none."),
        (
            "0,1,2\n7,1,2\n",
            {},
            "line 1: expected names of columns, or a row; got 0, 1, 2, ..., which may be both. "
            "Say whether it names the columns: --header or --no-header.",
        ),
        ("7,x,2\n", {}, "line 1: expected names of columns, or a row of numbers; got '7' and 'x'. Say whether"),
        ("user,a\n7,1\n", {}, "expected one column 'id' of ids; got columns 'user', 'a'. Name it: --ids NAME, or say"),
        ("id,id,a\n7,8,1\n", {}, "expected one column 'id' of ids; got columns 'id', 'id', 'a'."),
        ("id,a\n7,1\n", {"vectors": "v"}, "expected columns v0, v1, ... of numbers; got columns 'id', 'a'."),
        ("id\n7\n", {}, "expected columns of numbers; got columns 'id'."),
        ("id,a\n7,1\n0.5,2\n", {}, "line 3, column 'id': expected a whole number as id; got '0.5'. Fix or remove"),
        ("id,a\n7,1\n9,x\n", {}, "line 3, column 'a': expected a number; got 'x'. Fix or remove the line."),
        ("id,a\n7,1\n\n9,\n", {}, "line 4, column 'a': expected a number; got an empty field."),
        ("id,a\n7,1\n,2\n", {}, "line 3, column 'id': expected a whole number as id; got an empty field."),
        ("id,a\n7,1\n\n9,nan\n", {}, "line 4, column 'a': expected finite float32 numbers; got nan."),
        ("id,a\n7,1e39\n", {}, "line 2, column 'a': expected finite float32 numbers; got inf."),
        ("id,a\n7,1\n9,2,3\n", {}, "line 3: expected 2 columns, as in the first line; got 3."),
        ("id,a\n7\n", {}, "line 2: expected 2 columns, as in the first line; got 1."),
        (
            'id,a\n7,"1\n',
            {},
            "line 2: expected columns, and quotes in pairs; got a quote that its line does not close.",
        ),
        (
            f"id,a\n{2**63},1\n",
            {},
            "line 2, column 'id': expected ids from -2**63 to 2**63 - 1; got '9223372036854775808'.",
        ),
        ("7,1\n9,1_0\n", {}, "line 2, column '1': expected a number; got '1_0'."),
    ],
)
def test_refused(tmp_path: Path, text: str, options: dict[str, Any], error: str):
    path = write(tmp_path, text)
    said = told(path, ReadOptions(**options))
    assert str(path) in said
    assert error in said


@pytest.mark.parametrize("first", [0, 3])
def test_a_refusal_names_the_line_whatever_the_start(tmp_path: Path, first: int):
    source = opened(write(tmp_path, "id,a\n7,1\n\n8,1\n9,1\n\n10,x\n"))
    with pytest.raises(FileError, match="line 7, column 'a': expected a number; got 'x'"):
        list(source.batches(first, 1))


def test_an_end_of_a_line_in_quotes_is_refused(tmp_path: Path):
    """Also in a column that is not read: rows are counted by lines."""
    path = write(tmp_path, 'id,v0,title\n7,1,a\n8,2,"b\nc"\n9,3,d\n')
    said = told(path, ReadOptions(vectors="v"))
    assert "line 3: expected columns, and quotes in pairs; got a quote that its line does not close." in said
    path = write(tmp_path, 'id,v0,title\n7,1,a\n8,2,"b\n9,3,d\n')
    assert "line 3: expected columns, and quotes in pairs" in told(path, ReadOptions(vectors="v"))


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(delimited, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 50)
    path = write(tmp_path, "7,1\n" * 20 + "7," + "1" * 300 + "\n")
    with pytest.raises(FileError, match="line 21: expected a line of text; got more than 100 bytes without its end"):
        opened(path)


def test_the_place_of_any_row_is_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 20)
    lines = ["id,a", *("" if k % 5 == 2 else f"{k},{k}.5" for k in range(60))]
    source = opened(write(tmp_path, "\n".join(lines)))
    wanted = [number for number, line in enumerate(lines, 1) if line][1:]
    assert [source.place(row) for row in range(source.rows)] == [f"line {number}" for number in wanted]


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    path = write(tmp_path, "id,a\n7,1\n")
    with pytest.raises(RequirementError, match=r'^CSV needs pyarrow, .* pip install "embedrock\[files\]"$'):
        opened(path)
    sink = format_to_write(tmp_path / "b.csv", None).sink
    assert sink is not None
    with pytest.raises(RequirementError, match=r"^CSV needs pyarrow"):
        sink(Output(tmp_path / "b.csv", 1, 1, True), 0)
    assert not (tmp_path / "b.csv.part").exists()


# ---------------------------------------------------------------- compressed, and large


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_compressed(tmp_path: Path, suffix: str, pack: Any):
    data = pack(b"id,a\n7,1\n")
    assert rows(write(tmp_path, data, f"a.csv{suffix}")) == {7: [1]}
    cut_off = write(tmp_path, data[:-3], f"b.CSV{suffix.upper()}")
    with pytest.raises(FileError, match="expected a whole compressed file; got"):
        rows(cut_off)


def test_compressed_by_zstd(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow", reason="zstd is unpacked by pyarrow")
    with arrow.output_stream(str(tmp_path / "a.tsv.zst"), compression="zstd") as file:
        file.write(b"id\ta\n7\t1\n")
    assert rows(tmp_path / "a.tsv.zst") == {7: [1]}
    write(tmp_path, b"\x28\xb5\x2f\xfdnone", "b.csv.zst")
    with pytest.raises(FileError, match="expected a whole compressed file; got"):
        rows(tmp_path / "b.csv.zst")


def test_ram_is_that_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of Python's objects, and of pyarrow's."""
    arrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 1 << 16)
    path = write(tmp_path, "id,a,b\n" + "".join(f"{k},{k}.25,0.125\n" for k in range(200_000)))
    for part in (0, 150_000):  # the rest of the file, and a quarter of that
        before, most, seen = arrow.total_allocated_bytes(), 0, 0
        tracemalloc.start()
        for batch in opened(path).batches(part):
            seen += len(batch.ids)
            most = max(most, arrow.total_allocated_bytes() - before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert seen == 200_000 - part
        assert max(peak, most) < 2e6, (peak, most)


# ---------------------------------------------------------------- strings as ids


def test_strings_as_ids(tmp_path: Path):
    """They are told the ways that work, as everywhere else."""
    text = str(told(write(tmp_path, "id,a\n7,1\nann,2\n"), ReadOptions()))
    assert "line 3, column 'id': expected a whole number as id; got 'ann'. Fix or remove the line." in text
    assert text.endswith(OF_STRINGS)
    for other in ("", "0.5"):
        assert OF_STRINGS not in str(told(write(tmp_path, f"id,a\n{other},2\n"), ReadOptions()))


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
def test_strings_as_ids_in_columns(tmp_path: Path, suffix: str):
    arrow: Any = pytest.importorskip("pyarrow", reason="Parquet and Arrow need pyarrow")
    table = arrow.table({"id": ["ann", "bob"], "vector": [[1.0], [2.0]]})
    path = str(tmp_path / f"a{suffix}")
    if suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        pytest.importorskip("pyarrow.feather").write_feather(table, path)
    with pytest.raises(FileError) as caught:
        opened(Path(path))
    assert "expected a column 'id' of integers; got id (string)" in str(caught.value)
    assert str(caught.value).endswith(OF_STRINGS)


def test_strings_as_ids_in_npz(tmp_path: Path):
    np.savez(tmp_path / "a.npz", vectors=np.zeros((2, 1)), ids=np.array(["ann", "bob"]))
    with pytest.raises(FileError) as caught:
        opened(tmp_path / "a.npz")
    assert "ids: expected numbers; got an array of <U3, which are strings. If they are ids: " in str(caught.value)
    assert str(caught.value).endswith(OF_STRINGS)
