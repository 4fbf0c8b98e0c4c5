"""Arrays in files, read from front to back in little RAM: .npy, .npz, raw numbers, safetensors."""

from __future__ import annotations

import errno
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np

from embedrock.batch.wrong_ids import OF_STRINGS
from embedrock.cli.formats.base import (
    FLOATS,
    ROW_NUMBERS,
    Output,
    ReadOptions,
    Region,
    Regions,
    RowBatch,
    VectorSource,
    fail,
    npy_region,
    part_of,
    publish,
)
from embedrock.cli.formats.files import check_kind
from embedrock.cli.terminal.tables import format_count
from embedrock.errors import did_you_mean
from embedrock.initializers import FromSafetensors
from embedrock.initializers.published import PARTS, SHARD
from embedrock.io.safetensors import DTYPES, header_of, read_header

CODED = ("F8_E4M3", "F8_E5M2")  # types of 8-bit floats, by their names in safetensors
NUMBERED = re.compile(rf"{SHARD}(?:\.weight)?$")
TENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # the names of these types in safetensors
OF_BITS = "Take hashes by their bits, ids.view(np.int64)."
MAPPING, MAPPING_ROWS = "mapping", 1 << 16
WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
LEAST_ID, MOST_ID = -(2**63), 2**63 - 1
CUT_OFF = "The file was cut off: get it again."
MAX_NPY_HEADER_BYTES = 10_000
# NumPy's errors for damaged headers, which it passes to Python's parser and tokenizer.
BROKEN_NPY = (ValueError, TypeError, SyntaxError, RecursionError, TokenError, UserWarning)
READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
MAX_MEMBERS = 1000
BROKEN_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)  # errors of zipfile
GET_AGAIN = "Check that it is the right file, or get it again."


@dataclass(frozen=True)
class Array:
    """An array in a file."""

    path: Path
    name: str  # in the file; "" if it is the only one
    offset: int  # of the first element
    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool = False  # whether columns lie one after the other
    bits: str = ""  # name of a type that NumPy lacks, of which the elements are bits: "bfloat16", or in `CODED`
    member: str | None = None  # of an archive; None: the file itself

    @property
    def length(self) -> int:
        """Number of rows, or elements."""
        return next(iter(self.shape), 0)

    @property
    def is_vectors(self) -> bool:
        """True if it can be a table's vectors."""
        return len(self.shape) == 2 and (self.dtype.kind == "f" or self.bits != "")

    @property
    def kind(self) -> str:
        """Type and shape, for people."""
        return f"{self.bits or self.dtype} {self.shape}"

    def check_size(self, nbytes: int, remedy: str) -> None:
        """Raise unless a file, or member of an archive, of `nbytes` bytes ends with the array."""
        expected = self.offset + self.dtype.itemsize * int(np.prod(self.shape, dtype=object))
        if nbytes != expected:
            fail(self.path, f"{expected} bytes for {self.kind}", f"{nbytes}", remedy, self.name)

    def parts(self, start: int, rows: int) -> Iterator[np.ndarray]:
        """Iterate over the array from row `start` on, `rows` at a time; bfloat16 as float32."""
        if self.fortran and len(self.shape) > 1:
            mapped = np.memmap(self.path, self.dtype, "r", self.offset, self.shape, "F")
            yield from (mapped[first : first + rows] for first in range(start, self.length, rows))
            return
        width = self.dtype.itemsize * int(np.prod(self.shape[1:]))
        with open(self.path, "rb") if self.member is None else _opened(self.path, self.member) as file:
            file.seek(self.offset + start * width)
            for first in range(start, self.length, rows):
                count = min(rows, self.length - first)
                data = file.read(count * width)
                if len(data) != count * width:
                    expected = format_count(count * width, "byte")
                    fail(self.path, expected, f"{len(data)}", CUT_OFF, f"row {first} (from 0)")
                part = np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])
                yield (part.astype(np.uint32) << 16).view(np.float32) if self.bits == "bfloat16" else part


class Arrays(VectorSource):
    """An array of vectors, and perhaps one of ids. Arrays that are neither are a `FileError`."""

    def __init__(self, path: Path, vectors: Array, ids: Array | None) -> None:
        self.path, self._vectors, self._ids, self.has_ids = path, vectors, ids, ids is not None
        if not vectors.is_vectors:
            remedy = 'Convert it: array.astype("float32").reshape(rows, dim).'
            fail(vectors.path, "a 2-D array of floats", vectors.kind, remedy, vectors.name)
        if 0 in vectors.shape:
            remedy = "Check that it is the right file."
            fail(vectors.path, "at least one row and column", vectors.kind, remedy, vectors.name)
        self.rows, self.dim = vectors.shape
        self.coded = FromSafetensors(str(path), vectors.name) if vectors.bits in CODED else None
        if ids is not None and (ids.shape != (self.rows,) or ids.dtype.kind not in "iu" or ids.bits):
            expected = f"{format_count(self.rows, 'whole number')} as ids, one for each vector"
            fail(ids.path, expected, ids.kind, f"Name another array, or say --ids {ROW_NUMBERS}.", ids.name)

    def _batches(self, start: int, batch_rows: int) -> Iterator[RowBatch]:
        ids = repeat(None) if self._ids is None else self._ids.parts(start, batch_rows)
        vectors = self._vectors.parts(start, batch_rows) if self.coded is None else self._decoded(start, batch_rows)
        for part, own in zip(vectors, ids, strict=False):
            with np.errstate(over="ignore"):  # a float64 that is too large becomes Inf, which is refused
                vectors = np.ascontiguousarray(part, np.float32)
            yield RowBatch(np.arange(start, start + len(part)) if own is None else as_ids(own, self, start), vectors)
            start += len(part)

    def _decoded(self, start: int, batch_rows: int) -> Iterator[np.ndarray]:
        """Iterate over 8-bit floats times their scales, if there are some beside them in the file."""
        assert self.coded is not None
        for first in range(start, self.rows, batch_rows):
            ids = np.arange(first, min(first + batch_rows, self.rows))
            part = np.empty((len(ids), self.dim), np.float32)
            self.coded.fill(ids, np.uint64(0), part)
            yield part


def as_ids(ids: np.ndarray, source: VectorSource, start: int) -> np.ndarray:
    """Return integers of any type as int64, the ids of rows `start` and on."""
    if ids.dtype.kind == "u" and ids.size and int(ids.max()) >= 2**63:
        row = int(np.argmax(ids))
        source.fail("ids below 2**63", f"{ids[row]}", OF_BITS, source.place(start + row))
    return ids.astype(np.int64)


def as_id(text: str) -> int:
    """Return the id in a text, or raise `ValueError`."""
    if not WHOLE.fullmatch(text.strip(" \t")):
        raise ValueError("a whole number as id")
    value = int(text)
    if not LEAST_ID <= value <= MOST_ID:
        raise ValueError("ids from -2**63 to 2**63 - 1")
    return value


def is_number(text: str) -> bool:
    """Return whether a text is a number, without the underscores that Python accepts."""
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text


def choose(path: Path, arrays: dict[str, Array], options: ReadOptions) -> Arrays:
    """Return a source of the arrays that the user named, or else of the only possible ones."""
    listed = ", ".join(f"{name} {array.kind}" for name, array in arrays.items()) or "no arrays"
    found = [name for name, array in arrays.items() if array.is_vectors]
    name = options.vectors
    if name is None:
        if len(found) != 1:
            fail(path, "one 2-D array of floats", listed, "Name one: --vectors NAME.")
        name = found[0]
    if name not in arrays:
        hint = did_you_mean(name, arrays)
        fail(path, f"an array {name!r} of vectors", listed, f"Name one of these: --vectors NAME.{hint}")
    _check_mapping(path, arrays, options)
    ids = options.ids or ("ids" if "ids" in arrays else ROW_NUMBERS)
    if ids not in arrays and ids.endswith(".npy"):
        return Arrays(path, arrays[name], npy_array(Path(ids)))
    if ids != ROW_NUMBERS and ids not in arrays:
        remedy = f"Name one of these, or say --ids {ROW_NUMBERS}.{did_you_mean(ids, arrays)}"
        fail(path, f"an array {ids!r} of ids", listed, remedy)
    return Arrays(path, arrays[name], None if ids == ROW_NUMBERS else arrays[ids])


def _check_mapping(path: Path, arrays: dict[str, Array], options: ReadOptions) -> None:
    """Refuse to omit model2vec's map from tokens to the vectors that they share."""
    found = arrays.get(MAPPING)
    if options.ids is None and "ids" not in arrays and found is not None and len(found.shape) == 1:
        first, is_identity = 0, found.dtype.kind in "iu"
        for part in found.parts(0, MAPPING_ROWS) if is_identity else ():
            is_identity &= bool((part == np.arange(first, first + len(part))).all())
            first += len(part)
        if not is_identity:
            remedy = (
                f"Import what numpy.save writes of each: vectors[{MAPPING}]; or say --ids {ROW_NUMBERS}, to number "
                "the vectors as they are."
            )
            fail(path, "a vector for each row", f"an array {MAPPING!r} {found.kind} of which token has which", remedy)


def read_npy(path: Path, options: ReadOptions) -> Arrays:
    """Open a .npy file."""
    return Arrays(path, npy_array(path), ids_beside(path, options.ids))


def beside(path: Path) -> Path:
    """Return the path of the ids of a file without ids: ``vectors.ids.npy`` beside ``vectors.npy``."""
    return path.with_suffix(".ids.npy")


def ids_beside(path: Path, ids: str | None) -> Array | None:
    """Return the ids of a file without any: those of file `ids`, or of an existing file beside it."""
    if ids == ROW_NUMBERS:
        return None
    if ids is None:
        return npy_array(beside(path)) if beside(path).exists() else None
    return npy_array(Path(ids))


def npy_array(path: Path) -> Array:
    """Return the array of a .npy file, after a check of the file's size."""
    check_kind(path, "a .npy file of numbers", (".npy",))
    with open(path, "rb") as file:
        array = parse_header(file, path)
    array.check_size(path.stat().st_size, "Get or write the file again.")
    return array


def parse_header(file: IO[bytes], path: Path, name: str = "") -> Array:
    """Read the header of a .npy file, without unpickling."""
    try:
        version = np.lib.format.read_magic(file)
        if version not in READERS:
            raise ValueError(f"version {version} of the format")
        shape, fortran, dtype = READERS[version](file, max_header_size=MAX_NPY_HEADER_BYTES)
    except BROKEN_NPY as error:
        fail(path, "a .npy file of numbers", f"{error}", "Write it by numpy.save.", name)
    if dtype.kind in "US":
        fail(path, "numbers", f"an array of {dtype}, which are strings", f"If they are ids: {OF_STRINGS}", name)
    if dtype.kind not in "fiu":
        fail(path, "numbers", f"an array of {dtype}", "Nothing is unpickled. Convert it to float32.", name)
    return Array(path, name, file.tell(), dtype, shape, fortran)


class NpySink(Regions):
    """A sink for a .npy file, or for raw numbers. Unless rows are numbered from 0, ids are in a .npy beside."""

    def __init__(self, output: Output, done: int, is_raw: bool = False) -> None:
        super().__init__(output, done)
        path = beside(output.path)
        if path.exists() and output.has_ids and not (done and not part_of(path).exists()):
            fail(path, "no file of this name yet", "one", "Move it away, or choose another name.")
        # An earlier run may already have renamed the ids.
        ids = path if path.exists() else part_of(path)
        vectors, shape = part_of(output.path), (output.rows, output.dim)
        dtype = FLOATS[output.dtype]
        self.parts = [Region(vectors, b"", 0, dtype, shape) if is_raw else npy_region(vectors, dtype, shape)]
        self.parts += [npy_region(ids, "<i8", (output.rows,))] if output.has_ids else []

    def finish(self) -> list[Path]:
        for region in self.parts:
            region.end()
        path, (_, *ids) = self.output.path, self.parts
        for region in ids:
            if region.path != beside(path):
                publish(region.path, beside(path))
        return [publish(part_of(path), path), *(beside(path) for _ in ids)]


def read_raw(path: Path, options: ReadOptions) -> Arrays:
    """Open a file of raw numbers."""
    name = options.dtype or "float32"
    if options.dim is None:
        fail(path, "the width of its rows", "none", "Pass --dim N.")
    dtype = np.dtype(FLOATS[name])
    rows, rest = divmod(path.stat().st_size, dtype.itemsize * options.dim)
    if rest:
        expected = f"rows of {options.dim} {name}, {dtype.itemsize * options.dim} bytes each"
        fail(path, expected, f"{format_count(path.stat().st_size, 'byte')} in all", "Check --dim and --dtype.")
    shape = rows, options.dim
    vectors = Array(path, "", 0, dtype, shape, bits="bfloat16" if name == "bfloat16" else "")
    return Arrays(path, vectors, ids_beside(path, options.ids))


def read_npz(path: Path, options: ReadOptions) -> Arrays:
    """Open a .npz file."""
    with _as_file_errors(path, "a .npz file"), zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
    if not 0 < len(members) <= MAX_MEMBERS:
        fail(path, f"1 to {MAX_MEMBERS} arrays", f"{len(members)}", GET_AGAIN)
    arrays: dict[str, Array] = {}
    for member in members:
        with _opened(path, member.filename) as file:
            array = parse_header(file, path, member.filename.removesuffix(".npy"))
        array.check_size(member.file_size, GET_AGAIN)
        if array.fortran and len(array.shape) > 1:
            remedy = "Save numpy.ascontiguousarray(array), or a .npy file."
            fail(path, "rows one after the other", "columns one after the other", remedy, array.name)
        arrays[array.name] = replace(array, member=member.filename)
    return choose(path, arrays, options)


@contextmanager
def _as_file_errors(path: Path, expected: str, name: str = "") -> Iterator[None]:
    try:
        yield
    except BROKEN_ZIP as error:
        fail(path, expected, f"{error}", GET_AGAIN, name)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fail(path, expected, "places outside the file", GET_AGAIN, name)


@contextmanager
def _opened(path: Path, name: str) -> Iterator[IO[bytes]]:
    with _as_file_errors(path, "a whole .npz file", name), zipfile.ZipFile(path) as archive, archive.open(name) as file:
        yield file


def pack_npz(path: Path, *arrays: Any) -> None:
    """Write an array "vectors" and perhaps one of "ids", not compressed."""
    with open(path, "wb") as file:
        np.savez(file, **dict(zip(("vectors", "ids"), arrays, strict=False)))


def read_safetensors(path: Path, options: ReadOptions) -> Arrays:
    """Open a .safetensors file."""
    tensors = read_header(str(path), partial(fail, path, remedy=GET_AGAIN))
    has_codes, arrays = any(tensor.dtype in CODED for tensor in tensors.values()), dict[str, Array]()
    scales = {name for name in tensors if has_codes and PARTS.get(name.rpartition(".")[2]) == "scale"}
    for name, (_, _, kind, shape, start, _) in tensors.items():
        if kind in DTYPES.keys() - {"BOOL", "F8_E8M0"} and name not in scales:
            bits = kind if kind in CODED else "bfloat16" if kind == "BF16" else ""
            arrays[name] = Array(path, name, start, np.dtype(DTYPES[kind]), shape, bits=bits)
    source = choose(path, arrays, options)
    coded = source.coded
    shard = None if coded is None else NUMBERED.search(coded.tensor)
    if coded is not None and coded.table.lacks_scale and (scales or (shard and shard[1])):
        remedy = "Read all files in place, er.FromSafetensors(folder, name), which finds scales that shards share."
        got = ", ".join(sorted(scales)) or "none, in a file of a shard"
        source.fail("scales that are named as the tensor is", got, remedy, coded.tensor)
    return source


class SafetensorsSink(Regions):
    """A sink for tensors "weights" and, unless rows are numbered from 0, "ids"."""

    def __init__(self, output: Output, done: int) -> None:
        super().__init__(output, done)
        part, rows, dim = part_of(output.path), output.rows, output.dim
        end_of_ids = 8 * rows if output.has_ids else 0
        tensors = {"ids": ("I64", (rows,))} if output.has_ids else {}
        header = header_of(tensors | {"weights": (TENSORS[output.dtype], (rows, dim))}, output.about)
        self.parts = [Region(part, header, len(header) + end_of_ids, FLOATS[output.dtype], (rows, dim))]
        self.parts += [Region(part, header, len(header), "<i8", (rows,))] if output.has_ids else []

    def finish(self) -> list[Path]:
        self.sync()
        self.parts[0].end()  # the last in the file
        return [publish(self.parts[0].path, self.output.path)]
