"""`PublishedTable`: where the rows of a published table lie, in shards of safetensors files as they are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from embedrock.errors import TableFileError, UnsupportedError, counted, did_you_mean
from embedrock.io.safetensors import DTYPES, StoredTensor, read_header
from embedrock.kernels.packed import PackedRows

ENDING = ".safetensors"
INDEX = f"{ENDING}.index.json"  # end of the name of the file that names the file of each tensor
CONFIG = "config.json"
NUMBERED = re.compile(r"(.*-)(\d+)-of-(\d{1,6})\.safetensors")
SHARD = r"(?:\.(?:shards?[._]?)?([0-9]+))?"  # between the name of a table and that of its tensor
PARTS = {"weight": "weight", "": "weight", "biases": "offset"}
PARTS |= dict.fromkeys(("weight_scale", "weight_scale_inv", "scale", "scales"), "scale")
# Names of tensors beside the weights, if these have a form that is not read here.
OTHER_FORMS = re.compile("scale|zero|zp|bias|packed|shape|g_idx|absmax|quant|qweight|codebook|lut")
ALIGNMENT = 4  # bytes of a row's parts in RAM

FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.int16), "BF16": np.dtype(np.uint16)}  # as `codec.decode`
NAMES = {"F32": "float32", "F16": "float16"}  # dtypes of a table; all others are bfloat16
SCALES = {**FLOATS, "F8_E8M0": np.dtype(np.uint8)}
GROUPS = 32, 64, 128  # columns of 4 bits that share a scale; the same tensors of 3 or 6 bits would have others
FORMS = "F32, F16 and BF16; F8_E4M3, F8_E5M2 and I8 with a scale or none; U32 of 4 bits with scales and biases"

_BYTES = np.arange(256, dtype=np.uint16)
# An E5M2 is the upper byte of a float16. The exponent of an E4M3 is a bit shorter, its bias is 8 less: a factor of 256.
_E5M2 = (_BYTES << 8).view(np.float16).astype(np.float32)
_E4M3 = ((_BYTES & 128) << 8 | (_BYTES & 127) << 7).view(np.float16).astype(np.float32) * 256
_E4M3[_BYTES & 127 == 127] = np.nan
CODES = {"F8_E4M3": _E4M3, "F8_E5M2": _E5M2, "I8": None}  # the numbers of the codes, float32 (256,)
Shards = dict[int, StoredTensor]  # tensors by number


class Extents(NamedTuple):
    """One tensor of a table, in shards: where the bytes of each row are.

    Attributes:
        shards: the tensors, in order.
        firsts: int64 (shards + 1,), first row of each shard, and the end.
        rows_each: int64 (shards,), rows of the table that share a row of the tensor.
        nbytes: bytes of a row.
    """

    shards: Sequence[StoredTensor]
    firsts: np.ndarray
    rows_each: np.ndarray
    nbytes: int

    @property
    def dtype(self) -> str:
        return self.shards[0].dtype

    @property
    def columns(self) -> int:
        return self.nbytes // np.dtype(DTYPES[self.dtype]).itemsize


class PublishedTable(NamedTuple):
    """Places and form of the rows of a published table.

    A row in RAM has the bytes of its parts one after another: codes or floats, scales, offsets.

    Attributes:
        weight: extents of the weights.
        scale, offset: of the other parts; None: there are none.
        dim: columns of the table.
        group: columns that share a scale.
    """

    weight: Extents
    scale: Extents | None
    offset: Extents | None
    dim: int
    group: int

    @staticmethod
    def find(folder: str, name: str) -> PublishedTable:
        """Find a table in the safetensors files of a folder, or in one file.

        Args:
            name: of the table's tensor, without the number of a shard; ``.weight`` may be left out.

        Raises:
            TableFileError: there is no such table, or a shard is missing.
            UnsupportedError: its form is none that is read here.
        """
        name = name.removesuffix(".weight")
        where = f"table {name!r} in {folder}"
        parts = _parts(folder, name, where)
        weight = _sharded(parts["weight"], where)
        if weight.dtype == "U32" and (bits := _bits(folder, name)) != 4:
            raise _unread(where, f"codes of {bits} bits, as {CONFIG} says")
        return _form(weight, parts, where)

    @property
    def rows(self) -> int:
        return int(self.weight.firsts[-1])

    @property
    def dtype(self) -> str:
        """The dtype of a table that has the rows."""
        return NAMES.get(self.weight.dtype, "bfloat16")

    def is_exact_in(self, dtype: str) -> bool:
        """Return whether a table of a dtype has the rows as they are, without rounding."""
        return dtype == "float32" or (dtype == self.dtype and self.scale is None)

    @property
    def parts(self) -> Iterator[tuple[Extents, int]]:
        """Iterate over the extents, and where their bytes begin in a row in RAM."""
        at = 0
        for extents in (self.weight, self.scale, self.offset):
            if extents is not None:
                yield extents, at
                at += -(-extents.nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in RAM. Of codes without a scale, the last ones are the number 1."""
        *_, (last, at) = self.parts
        return at + -(-last.nbytes // ALIGNMENT) * ALIGNMENT + 4 * self.lacks_scale

    @property
    def lacks_scale(self) -> bool:
        return self.scale is None and self.weight.dtype in CODES

    def rows_in(self, raw: np.ndarray) -> np.ndarray | PackedRows:
        """Return rows in RAM, uint8 (n, row_bytes), as kernels read them."""
        dtype = self.weight.dtype
        if dtype in FLOATS:
            return raw.view(FLOATS[dtype])
        starts = [at for _, at in self.parts]
        scales = np.dtype(np.float32) if self.scale is None else SCALES[self.scale.dtype]
        first = (starts[1] if self.scale is not None else self.row_bytes - 4) // scales.itemsize
        second = -1 if self.offset is None else starts[2] // scales.itemsize
        codes, words, values = raw.view(np.int8) if dtype == "I8" else raw, raw.view(scales), CODES.get(dtype)
        return PackedRows(codes, words, words, first, second, self.group, values)

    def __str__(self) -> str:
        scale = "" if self.scale is None else f", {self.scale.dtype} scales of {self.group} columns"
        shards = counted(len(self.weight.shards), "shard")
        return f"{self.rows} rows of {self.dim}, {self.weight.dtype}{scale}, in {shards}"


def _files(folder: str, pattern: re.Pattern[str]) -> tuple[list[str], set[str]]:
    """Return the files to look into, in order, those that an index of the folder names, or all; and their tensors.

    Of the table's tensors, all that the index names.
    """
    if os.path.isfile(folder):
        return [folder], set()
    if not os.path.isdir(folder):
        raise TableFileError(
            f"there is no folder {folder}, which must hold {ENDING} files. Pass the folder of a checkpoint, as "
            "huggingface_hub.snapshot_download(name) returns it."
        )
    names = [name for name in os.listdir(folder) if not name.startswith(".")]
    indexes, tensors = [name for name in names if name.endswith(INDEX)], set[str]()
    if len(indexes) == 1:
        files = _weight_map(os.path.join(folder, indexes[0]))
        tensors = {tensor for tensor in files if pattern.fullmatch(tensor)}
        named = {files[tensor] for tensor in tensors or files}
    else:
        named = {name for name in names if name.endswith(ENDING)}
        _check_complete(folder, named)
    paths = [os.path.join(folder, file) for file in sorted(named)]
    if missing := [path for path in paths if not os.path.isfile(path)]:
        raise TableFileError(f"{folder} must have all files that its index names: {missing[0]} is missing. Get it.")
    return paths, tensors


def _weight_map(index: str) -> dict[str, str]:
    """Return the file of each tensor, as an index names them."""
    with open(index, "rb") as file:
        try:
            files = json.load(file)["weight_map"]
            return {str(tensor): os.path.basename(files[tensor]) for tensor in files}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            text = f"{index} must name the file of each tensor: got {error!r}. Get it again."
            raise TableFileError(text) from error


def _bits(folder: str, name: str) -> Any:
    """Return the bits of packed codes of a table, as the folder's configuration says, or else 4."""
    try:
        with open(os.path.join(folder if os.path.isdir(folder) else os.path.dirname(folder), CONFIG), "rb") as file:
            general = json.load(file)["quantization"]
        own = general.get(name, general)
        return own.get("bits", 4)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 4


def _check_complete(folder: str, names: set[str]) -> None:
    """Raise `TableFileError` if files are missing, of those that count themselves: ``model-00001-of-00008``."""
    numbers = dict[tuple[str, str], set[int]]()
    for part in filter(None, map(NUMBERED.fullmatch, names)):
        numbers.setdefault((part[1], part[3]), set()).add(int(part[2]))
    for (begin, count), found in numbers.items():
        if len(found) < int(count):
            name = f"{begin}{min({*range(1, int(count) + 1)} - found):0{len(count)}}-of-{count}{ENDING}"
            raise TableFileError(f"{folder} must have all its {int(count)} files: {name} is missing. Get it again.")


def _parts(folder: str, name: str, where: str) -> dict[str, Shards]:
    """Return the tensors of a table by part and number of the shard."""
    pattern = re.compile(rf"{re.escape(name)}{SHARD}(?:\.([^.]+))?")
    parts, seen, strays = dict[str, Shards](), list[StoredTensor](), dict[str, StoredTensor]()
    paths, missing = _files(folder, pattern)
    for path in paths:
        for tensor in read_header(path, partial(_damaged, path)).values():
            missing.discard(tensor.name)
            found = pattern.fullmatch(tensor.name)
            kind = "" if found is None else found[2] or ""
            if found is None:
                seen.append(tensor)
            elif kind not in PARTS:
                strays[kind] = tensor
            elif (other := parts.setdefault(PARTS[kind], {}).setdefault(int(found[1] or 0), tensor)) is not tensor:
                raise TableFileError(
                    f"{where} must have each part once: got {other.name!r} in {other.path} and {tensor.name!r} in "
                    f"{path}. If one of the files is a copy, move it away, or pass the other one."
                )
    if missing:
        raise TableFileError(f"{where} must have {min(missing)!r}, which the index names: it is missing. Get its file.")
    coded = {tensor.shape[:1] for tensor in parts.get("weight", {}).values() if tensor.dtype not in FLOATS}
    beside = tuple(f"{tensor.name}_" for tensor in parts.get("weight", {}).values() if coded)
    strays |= {tensor.name: tensor for tensor in seen if tensor.name.startswith(beside)}
    for kind, tensor in strays.items():
        if OTHER_FORMS.search(kind) or (coded and tensor.shape[:1] in {(), (1,), *coded}):  # it may be a scale
            raise _unread(where, f"a tensor {tensor.name!r}, {tensor.dtype} {tensor.shape}")
    if "weight" not in parts:
        raise _no_table(where, name, seen)
    return parts


def _damaged(path: str, expected: str, got: str, where: str = "") -> NoReturn:
    of = f", {where}" if where else ""
    raise TableFileError(f"{path}{of} must have {expected}: got {got}. It is another file, or damaged: get it again.")


def _no_table(where: str, name: str, seen: Sequence[StoredTensor]) -> TableFileError:
    tables, named = _tables(seen)
    return TableFileError(f"there is no {where}: its files have {named}. Name its tensor.{did_you_mean(name, tables)}")


def _tables(tensors: Iterable[StoredTensor]) -> tuple[list[str], str]:
    """Return the names of all tables, and a text with the first of them."""
    names = {re.sub(rf"{SHARD}\.weight$", "", tensor.name) for tensor in tensors if len(tensor.shape) == 2}
    tables = sorted(names, key=lambda name: (len(name), name))
    return tables, ", ".join(tables[:8]) or "no matrix"


def only_table(folder: str) -> str:
    """Return the name of the only table in a folder or file. Raise `TableFileError` if there are several, or none."""
    paths, _ = _files(folder, re.compile("$^"))  # of no tensor: all files
    tensors = [tensor for path in paths for tensor in read_header(path, partial(_damaged, path)).values()]
    tables, named = _tables(each for each in tensors if not OTHER_FORMS.search(each.name.rpartition(".")[2]))
    if len(tables) != 1:
        raise TableFileError(f"{folder} must have one matrix, unless you name one: got {named}. Pass tensor=.")
    return tables[0]


def _unread(where: str, got: str) -> UnsupportedError:
    return UnsupportedError(f"the rows of {where} must have a form that is read as it is, {FORMS}: got {got}.")


def _sharded(tensors: Shards, where: str) -> Extents:
    """Return the extents of a tensor's shards."""
    shards = [tensors[number] for number in sorted(tensors)]
    if missing := set(range(len(shards))) - tensors.keys():
        raise TableFileError(f"all shards of {where} must be there: {min(missing)} is missing. Get the files again.")
    for shard in shards:
        if shard.dtype not in DTYPES or len(shard.shape) != 2 or 0 in shard.shape:
            raise _unread(where, f"{shard.name!r}, {shard.dtype} {shard.shape}")
        if (shard.dtype, shard.shape[1]) != (shards[0].dtype, shards[0].shape[1]):
            kinds = " and ".join(f"{each.name!r}, {each.dtype} {each.shape}" for each in (shards[0], shard))
            raise _unread(where, f"shards that differ, {kinds}")
    rows = [shard.shape[0] for shard in shards]
    return Extents(shards, np.cumsum([0, *rows]), np.ones(len(shards), np.int64), shards[0].row_bytes)


def _form(weight: Extents, parts: dict[str, Shards], where: str) -> PublishedTable:
    """Return the table of some weights and its other parts."""
    scale, offset = ([*parts.get(part, {}).values()] for part in ("scale", "offset"))
    got = " with ".join([weight.dtype, *(f"{each[0].name!r}, {each[0].dtype}" for each in (scale, offset) if each)])
    is_packed = weight.dtype == "U32"
    if is_packed:
        fits = bool(scale and offset)
    else:
        fits = not offset and (weight.dtype in CODES or (weight.dtype in FLOATS and not scale))
    if not fits or any(each.dtype not in SCALES or each.dtype != scale[0].dtype for each in (*scale, *offset)):
        raise _unread(where, got)
    dim = weight.columns * (8 if is_packed else 1)
    if not scale:
        return PublishedTable(weight, None, None, dim, dim)
    made = [_beside(weight, parts[part], dim, where) for part in ("scale", "offset") if part in parts]
    if len({each.columns for each in made}) > 1:
        raise _unread(where, got)
    group = _block(dim, made[0].columns, "columns", where)
    if is_packed and group not in GROUPS:
        raise _unread(where, f"groups of {group} columns, which 4 bits do not have")
    return PublishedTable(weight, made[0], made[1] if is_packed else None, dim, group)


def _beside(weight: Extents, tensors: Shards, dim: int, where: str) -> Extents:
    """Return the extents of scales, which may be one for all rows, for each shard, for blocks of rows or for a row."""
    shards = [tensors[number] for number in sorted(tensors)]
    firsts = weight.firsts if len(shards) == len(weight.shards) else weight.firsts[[0, -1]]
    if len(firsts) != len(shards) + 1 or tensors.keys() != set(range(len(shards))):
        raise _unread(where, f"{counted(len(shards), 'shard')} of {shards[0].name!r}")
    lengths, columns = np.diff(firsts).tolist(), prod(shards[0].shape[1:])
    for rows, tensor in zip(lengths, shards, strict=True):
        is_matrix = len(tensor.shape) == 2 or (prod(tensor.shape) in (1, rows) and len(tensor.shape) < 2)
        if not is_matrix or prod(tensor.shape[1:]) != columns or columns > dim:
            raise _unread(where, f"{tensor.name!r}, {tensor.dtype} {tensor.shape}")
    each = [_block(rows, (*tensor.shape, 1)[0], "rows", where) for rows, tensor in zip(lengths, shards, strict=True)]
    return Extents(shards, firsts, np.array(each, np.int64), shards[0].row_bytes)


def _block(count: int, blocks: int, what: str, where: str) -> int:
    """Return how many of `count` items share one of `blocks` scales: a divisor, or a power of two."""
    found = {count // blocks} if blocks and count % blocks == 0 else set[int]()
    found |= {size for k in range(63) if blocks and -(-count // (size := 1 << k)) == blocks and blocks > 1}
    if len(found) != 1:
        raise _unread(where, f"{counted(blocks, 'scale')} for {count} {what}, so that blocks may have {sorted(found)}")
    return found.pop()
