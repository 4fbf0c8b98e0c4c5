"""Initial values from a published table, read in place from its safetensors files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from embedrock import kernels
from embedrock.errors import TableFileError
from embedrock.initializers._initializer import Given
from embedrock.initializers.published import Extents, PublishedTable
from embedrock.io.vfs import OS_SYSTEM, File, open_file
from embedrock.system import forks, platform
from embedrock.system.arena import PAGE, ThreadMemory
from embedrock.system.buffers import address_of
from embedrock.system.sizes import MAP, Size, parse_bytes

DIGEST_ROWS = 1024
SMALL = 32  # bytes of a row; smaller ones lie many in a page, and are read through the page cache
STAGING_BYTES = 16 << 20
GAP, LONGEST = 16 << 10, 256 << 10  # of a request, see the kernel `cover`

_staging = ThreadMemory("reading rows of a published table")


class OpenExtents:
    """Open files of the extents of a table.

    Args:
        extents: places of the rows.
        is_mapped: whether they are read through the page cache, which all processes share.
    """

    def __init__(self, extents: Extents, is_mapped: bool) -> None:
        self.extents, self._is_mapped = extents, is_mapped
        files = dict[str, File]()
        for shard in extents.shards:
            if shard.path not in files:
                files[shard.path] = open_file(OS_SYSTEM, shard.path, direct=not is_mapped)
        self._files = [files[shard.path] for shard in extents.shards]
        self._fds = np.array([file.fd for file in self._files], np.int64)
        self._block, self._starts = PAGE, np.zeros(len(self._files), np.int64)
        if is_mapped:
            for file in files.values():
                platform.expect_any_order(file.mapped)
            self._starts = np.array([address_of(file.mapped) for file in self._files], np.int64)
        else:
            self._block = max(platform.block_of(file.fd) for file in files.values())
        self._stamps = {file.fd: platform.stamp_of(file.fd) for file in files.values()}

    def read(self, ids: np.ndarray, raw: np.ndarray, column: int) -> None:
        """Write the bytes of rows, whose ids ascend without repeats, to ``raw[:, column:]``, uint8 (n, row_bytes)."""
        numbers, offsets = self.extents.of(ids)
        self._check_unchanged(numbers)
        done, nbytes, fds = 0, self.extents.nbytes, self._fds[numbers]
        starts, rows = np.empty(len(ids), np.int64), np.arange(len(ids))
        planned = np.empty((4, len(ids)), np.int64)
        room = max(STAGING_BYTES, nbytes + 2 * PAGE)
        limits, cpu = (self._block, GAP, LONGEST, room), kernels.cpu
        while done < len(ids):
            count, requests = cpu.extents.cover(fds[done:], offsets[done:], nbytes, limits, planned, starts)
            end = done + count
            of_files, begins, sizes, places = (np.ascontiguousarray(part[:requests]) for part in planned)
            if self._is_mapped:
                if platform.CAN_ASK:
                    cpu.extents.ask(of_files, begins, sizes)
                addresses = self._starts[numbers[done:end]] + offsets[done:end]
            else:
                memory = _staging.take(room)
                OS_SYSTEM.read_many(of_files, begins, sizes, memory, places)
                addresses = address_of(memory) + starts[:count]
            cpu.launch(cpu.extents.copy, addresses, nbytes, raw, rows[done:end], column)
            done = end

    def _check_unchanged(self, numbers: np.ndarray) -> None:
        for number in np.unique(numbers).tolist():
            file = self._files[number]
            if platform.stamp_of(file.fd) != self._stamps[file.fd]:
                raise TableFileError(
                    f"{file.path} must stay as it is while a table reads it: it has changed. Write a new file instead, "
                    "and make the table anew."
                )


@dataclass(frozen=True, eq=False, repr=False)
class FromSafetensors(Given):
    """Rows of a published table, read in place from its safetensors files when they are needed. Nothing is converted.

    Rows of a table that were never stepped are read from the files. Rows that were stepped have records. So the table
    holds the difference to the published one, and so do its commits and its `state_dict`.

    The files hold F32, F16, BF16; or F8_E4M3, F8_E5M2 or I8 with no scale, one scale, one for each row or for each
    block, which are F32, F16, BF16 or F8_E8M0; or 4 bits in U32 with a scale and an offset for each group of columns. A
    weight is the float32 product of code and scale, plus the offset, rounded to the table's dtype.

    Args:
        folder: with the files, as published; or one file. They must not change while a table uses them.
        tensor: name of the table's tensor, without ``.weight`` and the number of a shard: shards are ``X.weight``,
            ``X.shard_0.weight``, ``X.shards.0.weight`` or ``X.0.weight``.
        memory: of a cache of rows, in the form that the files have, which all tables of this process with the same
            files share. "map": no cache of its own, but the system's, which all processes of the machine share.

    Raises:
        TableFileError: no such table, or a damaged file.
        UnsupportedError: another form of weights. It is named.

    Example:
        >>> import embedrock as er
        >>> base = er.FromSafetensors("DeepSeek-V4.1", "layers.1.engram.embed")  # doctest: +SKIP
        >>> table = er.Table(*base.shape, init=base, dtype=base.dtype, path="delta.rock")  # doctest: +SKIP
    """

    PLACE: ClassVar[frozenset[str]] = frozenset({"folder", "tensor", "memory"})  # in a description, not of the rows
    folder: str
    tensor: str
    memory: Size = "256MiB"
    table: PublishedTable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", os.path.abspath(os.fspath(self.folder)))
        if self.memory != MAP:
            parse_bytes(self.memory)
        object.__setattr__(self, "table", PublishedTable.find(self.folder, self.tensor))

    @property
    def shape(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.table.rows, self.table.dim

    @property
    def dtype(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.table.dtype

    @property
    def subject(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"table {self.tensor!r} in {self.folder}"

    @forks.cached_property
    def _open(self) -> list[tuple[OpenExtents, int]]:
        is_mapped = self.memory == MAP
        return [(OpenExtents(one, is_mapped or one.nbytes < SMALL), at) for one, at in self.table.parts]

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Return rows, whose ids ascend without repeats, as the files have them, uint8 (n, row_bytes)."""
        raw = np.zeros((len(ids), self.table.row_bytes), np.uint8)  # with gaps
        if self.table.lacks_scale:
            raw[:, -4:] = np.ones(1, np.float32).view(np.uint8)
        for extents, at in reversed(self._open):
            extents.read(ids, raw, at)
        return raw

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        unique, inverse = np.unique(ids, return_inverse=True)
        self.decode(self.read(unique), inverse.astype(np.int64), out)

    def decode(self, raw: np.ndarray, slots: np.ndarray, out: np.ndarray) -> None:
        """Write the weights of the rows in some slots of `read`'s result, 0 for slot -1, to `out`, float32 (n, dim)."""
        rows, positions = kernels.cpu.rows, np.arange(len(slots), dtype=np.int32)
        zeros = np.zeros((1, out.shape[1]), np.float32)
        kernels.cpu.launch(rows.gather, self.table.rows_in(raw), slots, positions, zeros, out)

    @forks.cached_property
    def digest(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        spread = np.unique(np.linspace(0, self.table.rows - 1, DIGEST_ROWS).astype(np.int64))
        form = f"{self.table.weight.dtype} {self.shape} {self.table.group}".encode()
        return hashlib.blake2b(form + self.read(spread).tobytes(), digest_size=8).hexdigest()

    def describe(self) -> dict[str, Any]:
        own = {"folder": self.folder, "tensor": self.tensor, "memory": self.memory}
        return {**super().describe(), **own, "digest": self.digest}

    @classmethod
    def found(cls, description: Mapping[str, Any], where: str) -> FromSafetensors:
        """Return the initializer of a result of `describe`, for the table at `where`.

        Raises:
            TableFileError: its files are gone, or are others.
        """
        folder, tensor = description["folder"], description["tensor"]
        remedy = f"If they are in another folder, pass it: init=er.FromSafetensors(folder, {tensor!r})."
        try:
            made = cls(folder, tensor, description["memory"])
        except OSError as error:
            raise TableFileError(
                f"first values of {where} are those of {tensor!r} in {folder}: {error} {remedy}"
            ) from error
        if (made.digest, list(made.shape)) != (description["digest"], description["shape"]):
            raise TableFileError(
                f"first values of {where} are those of {tensor!r} in {folder}, whose files must have the digest "
                f"{description['digest']} and the shape {description['shape']}: got {made.digest} and {[*made.shape]}. "
                f"Put the right files back. {remedy}"
            )
        return made

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.folder, self.tensor, self.memory)

    def __repr__(self) -> str:
        return f"FromSafetensors({self.tensor!r}, <{self.table.weight.dtype} {self.shape}>)"
