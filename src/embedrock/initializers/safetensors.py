"""Initial values from a published table, read in place from its safetensors files."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from embedrock import kernels
from embedrock.errors import ArgumentError, TableFileError
from embedrock.initializers.published import Extents, PublishedTable, only_table
from embedrock.initializers.values import DIGEST_ROWS, Given
from embedrock.io.vfs import OS_SYSTEM, open_file
from embedrock.system import forks, platform
from embedrock.system.arena import PAGE, ThreadMemory
from embedrock.system.buffers import address_of
from embedrock.system.sizes import MAP, Size, parse_bytes

SMALL = 32  # bytes of a row; smaller ones lie many in a page, and are read through the page cache
STAGING_BYTES = 16 << 20
GAP, LONGEST = 16 << 10, 256 << 10  # of a request, see the kernel `cover`

PROBED, COLD_SECONDS = 8, 30e-6  # mapped rows, and the longest time that they take if they are in RAM

_staging = ThreadMemory("reading rows of a published table")


class OpenExtents:
    """Open files of the extents of a table.

    Args:
        extents: places of the rows.
        is_mapped: whether they are read through the page cache, which all processes share.
    """

    def __init__(self, extents: Extents, is_mapped: bool) -> None:
        self.extents, self._is_mapped = extents, is_mapped
        paths = {shard.path for shard in extents.shards}
        files = {path: open_file(OS_SYSTEM, path, direct=not is_mapped) for path in paths}
        self._files = [files[shard.path] for shard in extents.shards]
        self._fds = np.array([file.fd for file in self._files], np.int64)
        self._begins = np.array([shard.start for shard in extents.shards], np.int64)
        self._limits = PAGE, GAP, LONGEST, max(STAGING_BYTES, extents.nbytes + 2 * PAGE)
        if is_mapped:
            for file in files.values():
                platform.expect_any_order(file.mapped)
            self._starts = np.array([address_of(file.mapped) for file in self._files], np.int64)
        else:
            self._limits = max(platform.block_of(file.fd) for file in files.values()), *self._limits[1:]

    def read(self, ids: np.ndarray, raw: np.ndarray, column: int) -> None:
        """Write the bytes of rows to ``raw[:, column:]``, uint8 (n, row_bytes)."""
        (numbers, offsets), extents = np.empty((2, len(ids)), np.int64), self.extents
        places = extents.firsts, self._begins, extents.rows_each, extents.nbytes
        kernels.cpu.launch(kernels.cpu.extents.place, ids, *places, numbers, offsets)
        self._check_unchanged(numbers)
        rows = np.arange(len(ids))
        if self._is_mapped:
            addresses = self._starts[numbers] + offsets
            if platform.CAN_ASK and self._is_cold(addresses, raw, column):
                # Many at once: a thread that meets a missing page would wait for each.
                for _, _, (fds, begins, sizes, _) in self._reads(numbers, offsets):
                    kernels.cpu.extents.ask(fds, begins, sizes)
            return self._copy(addresses, raw, rows, column)
        for part, starts, (fds, begins, sizes, places) in self._reads(numbers, offsets):
            memory = _staging.take(self._limits[-1])
            OS_SYSTEM.read_many(fds, begins, sizes, memory, places)
            self._copy(address_of(memory) + starts, raw, rows[part], column)

    def _reads(self, numbers: np.ndarray, offsets: np.ndarray) -> Iterator[tuple[slice, np.ndarray, list[np.ndarray]]]:
        """Iterate over reads: which rows, where in memory they start, and the requests as of the kernel `cover`."""
        fds, starts, done = self._fds[numbers], np.empty(len(offsets), np.int64), 0
        while done < len(offsets):
            planned, cover = np.empty((4, len(offsets) - done), np.int64), kernels.cpu.extents.cover
            rest = fds[done:], offsets[done:]
            count, requests = cover(*rest, self.extents.nbytes, self._limits, planned, starts)
            made = [np.ascontiguousarray(part[:requests]) for part in planned]
            yield slice(done, done + count), starts[:count], made
            done += count

    def _copy(self, addresses: np.ndarray, raw: np.ndarray, rows: np.ndarray, column: int) -> None:
        kernels.cpu.launch(kernels.cpu.extents.copy, addresses, self.extents.nbytes, raw, rows, column)

    def _is_cold(self, addresses: np.ndarray, raw: np.ndarray, column: int) -> bool:
        """Return whether some of the mapped rows seem not to be in RAM, by the time that a few take."""
        if len(addresses) <= 2 * PROBED:
            return True
        few = np.ascontiguousarray(addresses[:: len(addresses) // PROBED])
        begun = time.perf_counter()
        self._copy(few, raw, np.arange(len(few)), column)
        return time.perf_counter() - begun > COLD_SECONDS

    def _check_unchanged(self, numbers: np.ndarray) -> None:
        for number in np.flatnonzero(np.bincount(numbers)).tolist():
            file = self._files[number]
            if platform.stamp_of(file.fd) != self.extents.shards[number].stamp:
                raise TableFileError(
                    f"{file.path} must stay as it is while a table reads it: it has changed. Write a new file instead, "
                    "and make the table anew."
                )


class RowFiles:
    """Open files of a published table.

    Args:
        table: places and form of its rows.
        is_mapped: whether all files are read through the page cache.
    """

    def __init__(self, table: PublishedTable, is_mapped: bool) -> None:
        self.table, self._is_mapped = table, is_mapped
        self._parts = [(OpenExtents(one, is_mapped or one.nbytes < SMALL), at) for one, at in table.parts]

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Return rows as the files have them, uint8 (n, row_bytes). It reads least if ids ascend without repeats."""
        raw = np.zeros((len(ids), self.table.row_bytes), np.uint8)  # with gaps
        if self.table.lacks_scale:
            raw[:, -4:] = np.ones(1, np.float32).view(np.uint8)
        for extents, at in reversed(self._parts):
            extents.read(ids, raw, at)
        return raw

    def fill(self, ids: np.ndarray, out: np.ndarray) -> None:
        """Write the weights of rows to `out`, float32 (n, dim)."""
        slots = np.arange(len(ids))
        if not self._is_mapped and not np.all(ids[1:] > ids[:-1]):
            ids, inverse = np.unique(ids, return_inverse=True)
            slots = inverse.astype(np.int64)
        raw, positions = self.read(ids), np.arange(len(slots), dtype=np.int32)
        kernels.cpu.launch(kernels.cpu.rows.gather, self.table.rows_in(raw), slots, positions, out[:0], out)


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
            ``X.shard_0.weight``, ``X.shards.0.weight`` or ``X.0.weight``. "": the only matrix of the files.
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
    folder: str | os.PathLike[str]
    tensor: str = ""
    memory: Size = "256MiB"
    table: PublishedTable = field(init=False)

    def __post_init__(self) -> None:
        folder = os.path.abspath(os.fspath(self.folder))
        if not isinstance(self.tensor, str):
            raise ArgumentError(f"`tensor` of FromSafetensors must be a name: got {self.tensor!r}.")
        if self.memory != MAP:
            parse_bytes(self.memory)
        tensor = self.tensor or only_table(folder)
        table, subject = PublishedTable.find(folder, tensor), f"table {tensor!r} in {folder}"
        own = {"folder": folder, "tensor": tensor, "table": table, "subject": subject}
        vars(self).update(own, shape=(table.rows, table.dim), dtype=table.dtype)

    @forks.cached_property
    def files(self) -> RowFiles:
        """The open files of the table."""
        return RowFiles(self.table, self.memory == MAP)

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        self.files.fill(ids, out)

    def is_exact_in(self, dtype: str) -> bool:
        return self.table.is_exact_in(dtype)

    @forks.cached_property
    def digest(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        spread = np.unique(np.linspace(0, self.table.rows - 1, DIGEST_ROWS).astype(np.int64))
        form = f"{self.table.weight.dtype} {self.shape} {self.table.group}".encode()
        return hashlib.blake2b(form + self.files.read(spread).tobytes(), digest_size=8).hexdigest()

    def describe(self) -> dict[str, Any]:
        own = {"folder": self.folder, "tensor": self.tensor, "memory": self.memory}
        return {**super().describe(), **own, "digest": self.digest}

    @classmethod
    def found(cls, description: Mapping[str, Any], where: str, remedy: str = "") -> FromSafetensors:
        """Return the initializer of a result of `describe`, for the table at `where`. `remedy` is for another folder.

        Raises:
            TableFileError: its files are gone, or are others.
        """
        folder, tensor = description["folder"], description["tensor"]
        remedy = remedy or f"If they are in another folder, pass it: init=er.FromSafetensors(folder, {tensor!r})."
        try:
            made = cls(folder, tensor, description["memory"])
        except OSError as error:
            raise TableFileError(
                f"first values of {where} are those of {tensor!r} in {folder}: {str(error).rstrip('.')}. {remedy}"
            ) from error
        if (made.digest, list(made.shape)) != (description["digest"], description["shape"]):
            raise TableFileError(
                f"first values of {where} are those of {tensor!r} in {folder}, whose files must have the digest "
                f"{description['digest']} and the shape {description['shape']}: got {made.digest} and {[*made.shape]}. "
                f"Put the right files back. {remedy}"
            )
        return made

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.found, (self.describe(), f"a copy of {self}")

    def __deepcopy__(self, memo: dict[int, Any]) -> FromSafetensors:
        return self

    def __repr__(self) -> str:
        return f"FromSafetensors({self.tensor!r}, <{self.table.weight.dtype} {self.shape}>)"
