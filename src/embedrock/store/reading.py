"""Reads of stored records: sorted, neighbours together, each checked by its CRC. Disk reads take whole blocks."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from embedrock import kernels
from embedrock.errors import CorruptTableError, TableFileError, nearest
from embedrock.io.vfs import System
from embedrock.kernels.constants import CRC_BYTES, RUN_SHIFT
from embedrock.store import manifest as manifests
from embedrock.store import publishing
from embedrock.store.segments import Segment
from embedrock.system.arena import ThreadMemory

STAGING_BYTES = 8 << 20
LONGEST_REQUEST = 256 << 10
GAP = 16 << 10  # bytes between two records that one request reads through
# Small files are in the page cache, where unneeded bytes cost more than a request. With a cache of a quarter of a table
# of 31 MB, a step of 16,384 rows read 31 MB in 17 ms. With these values it read 4.5 MB in 12 ms.
CACHED_BLOCK, CACHED_GAP = 64, 512
NAMED = 8  # ids that an error or a problem names


Runs: TypeAlias = Sequence[Segment] | Mapping[int, Segment]  # segments by number


_staging = ThreadMemory("reading records")  # for whole blocks, before their records are copied out


def read_records(
    system: System,
    segments: Runs,
    locations: np.ndarray,
    ids: np.ndarray,
    records: np.ndarray,
    slots: np.ndarray,
    staging: int | None = None,
) -> tuple[int, int]:
    """Read stored records into slots, and return the number of requests and of bytes.

    Several threads may call it at once, each with its own slots.

    Args:
        locations: int64 (n,), all >= 0, in any order. Locations may repeat.
        ids: int64 (n,), the rows of the records.
        records: uint8 (slots, record_bytes).
        slots: int64 (n,), without repeats.
        staging: limit of bytes that this thread reads at a time. None: `STAGING_BYTES`.

    Raises:
        CorruptTableError: a record is not the one written for its row. The content of the slots is then undefined.
        OSError: the system failed to read.
    """
    order = np.argsort(locations)
    locations, requests, nbytes = locations[order], 0, 0
    for files, part in _by_kind(system, segments, locations, min(staging or STAGING_BYTES, STAGING_BYTES)):
        chosen = order[part]
        left = locations[part], ids[chosen], slots[chosen]
        while len(left[0]):
            count, *cost = _read_batch(system, files, *left, records)
            left, requests, nbytes = tuple(each[count:] for each in left), requests + cost[0], nbytes + cost[1]
    return requests, nbytes


class _Files(NamedTuple):
    """Files of segments that all bypass the page cache, or all use it.

    Attributes:
        runs: segments by number.
        fds: descriptors by number. A file that grows beyond some size is read through a new descriptor.
        block: bytes of a block. Reads take whole blocks.
        gap: bytes between two records that one request reads through.
        staging: bytes read at a time, about.
    """

    runs: Runs
    fds: dict[int, int]
    block: int
    gap: int
    staging: int


def _by_kind(
    system: System, segments: Runs, locations: np.ndarray, staging: int
) -> Iterator[tuple[_Files, np.ndarray]]:
    """Yield the direct files and the cached files, each with the positions of their locations. Locations ascend."""
    numbers = locations >> RUN_SHIFT
    first = np.diff(numbers, prepend=numbers[:1] - 1) != 0
    fds = {number: segments[number].file.fd for number in numbers[first].tolist()}
    direct = np.array([number for number, fd in fds.items() if system.is_direct(fd)], np.int64)
    is_direct = np.isin(numbers, direct)
    kinds = (is_direct, kernels.cpu.storage.BLOCK, GAP), (~is_direct, CACHED_BLOCK, CACHED_GAP)
    for chosen, block, gap in kinds:
        if chosen.any():
            yield _Files(segments, fds, block, gap, staging), np.flatnonzero(chosen)


def _read_batch(
    system: System, files: _Files, locations: np.ndarray, ids: np.ndarray, slots: np.ndarray, records: np.ndarray
) -> tuple[int, int, int]:
    """Read the first records that fit the thread's staging memory. Locations ascend.

    Return the number of these records, of requests, and of bytes.
    """
    storage, stride = kernels.cpu.storage, records.shape[1] + CRC_BYTES
    room = max(files.staging, stride + 2 * storage.BLOCK)
    locations = locations[: room // stride + 1]
    planned, starts = np.empty((4, len(locations)), np.int64), np.empty(len(locations), np.int64)
    runs, positions = locations >> RUN_SHIFT, locations & ((1 << RUN_SHIFT) - 1)
    places = files.runs[int(runs[0])].first + positions * stride
    limits = files.block, files.gap, LONGEST_REQUEST, room
    count, requests = kernels.cpu.extents.cover(runs, places, stride, limits, planned, starts)
    numbers, of_request = np.unique(planned[0, :requests], return_inverse=True)
    fds, memory = np.array([files.fds[number] for number in numbers.tolist()], np.int64), _staging.take(room)
    offsets, sizes, begins = (np.ascontiguousarray(row) for row in planned[1:, :requests])
    system.read_many(fds[of_request], offsets, sizes, memory, begins)
    marks = marks_of([files.runs[number] for number in numbers.tolist()], numbers, locations[:count])
    bad = unseal(memory, starts[:count], ids[:count], marks, records, slots[:count])
    if len(bad):
        raise corrupt(files.runs, locations[bad], ids[bad])
    return count, requests, int(sizes.sum())


def unseal(
    memory: np.ndarray, starts: np.ndarray, ids: np.ndarray, marks: np.ndarray, records: np.ndarray, slots: np.ndarray
) -> np.ndarray:
    """Copy records out of memory, and return the positions of damaged ones."""
    good = np.empty(len(starts), np.uint8)
    kernels.cpu.launch(kernels.cpu.storage.unseal, memory, starts, ids, marks, records, slots, good)
    return np.flatnonzero(good == 0)


def marks_of(runs: Sequence[Segment], numbers: np.ndarray, locations: np.ndarray) -> np.ndarray:
    """Return the marks of records of some segments, whose numbers ascend, uint32 (n,)."""
    marks = np.empty(len(locations), np.uint32)
    salts, steps = (np.array([getattr(segment, name) for segment in runs], np.uint32) for name in ("salt", "step"))
    kernels.cpu.launch(kernels.cpu.storage.mark, locations, numbers, salts, steps, marks)
    return marks


def corrupt(segments: Runs, locations: np.ndarray, ids: np.ndarray) -> CorruptTableError:
    """Return the error of damaged records of these ids."""
    numbers = locations >> RUN_SHIFT
    rows = np.sort(ids[numbers == numbers[0]])
    named = ", ".join(map(str, rows[:NAMED].tolist())) + (", ..." if len(rows) > NAMED else "")
    return CorruptTableError(
        f"{segments[int(numbers[0])].file.path} is damaged: {len(rows)} record(s) do not fit their checksums, ids "
        f"{named}. "
        '`embedrock verify PATH` lists all damage and the newest good commit N. To read it: er.open(path, mode="r", '
        "at=N). To go on from it: `embedrock rollback PATH N`."
    )


CHECKPOINT = re.compile(r"step-\d+-[0-9a-f]{8}\..+")  # names of the files of `ert.save` and of Keras' `TableCheckpoint`
SHARDED = "SHARDED"  # the file in the folder of a sharded table
VOCABULARY = "vocabulary"  # the folder of a vocabulary's commits
LOOKED_AT = 1000  # names of a folder that are checked, at most
SHOWN = 3


def holds_table(system: System, folder: str) -> bool:
    """Return whether a folder has a table. A table has a commit from its creation on."""
    return system.exists(f"{folder}/manifest") and bool(manifests.numbers(system, folder))


def what_is_at(system: System, folder: str) -> str:
    """Return sentences about a folder's content and how to open it. "": nothing of Embedrock."""
    with contextlib.suppress(OSError):  # this process may not read it
        if system.exists(f"{folder}/{SHARDED}"):
            return (
                "It holds a table in parts, which as many processes write, each by a layer with sharded=True. To read "
                f'it: er.open({folder!r}, mode="r")'
            )
        if holds_table(system, folder):
            return f"It holds a table, or a group of tables: er.open({folder!r})"
        if holds_vocabulary(system, folder):
            return f"It holds a vocabulary: er.Vocabulary({folder!r})"
        if any(map(CHECKPOINT.fullmatch, system.listdir(folder))):
            return "It has checkpoints of a model, whose tables lie where its layers' path= says"
    return ""


def holds_vocabulary(system: System, folder: str) -> bool:
    """Return whether a folder has a vocabulary. A vocabulary has a commit from its creation on."""
    inside = f"{folder}/{VOCABULARY}"
    return system.exists(inside) and bool(publishing.numbers(system, inside))


def check_table(system: System, path: str) -> None:
    """Raise `TableFileError` if a path has no table. The error suggests a similar path."""
    if not holds_table(system, path):
        hint = _hint(system, os.path.abspath(path))
        expected = ": a folder with manifest/*.json was expected"
        make = "Make one: er.Table(rows, dim, path=...), or look for a typing error"
        text = f"there is no table here{'' if hint else expected}. {hint or make}"
        raise TableFileError(errno.ENOENT, text, path)


def table_around(system: System, path: str) -> str | None:
    """Return the folder of the table that contains a path, or None."""
    while (parent := os.path.dirname(path)) != path:
        if _is_table(system, parent):
            return parent
        path = parent
    return None


def _hint(system: System, path: str) -> str:
    if (around := table_around(system, path)) is not None:
        return f"It lies inside of one: {around}"
    folder, name = os.path.split(path)
    try:
        system.listdir(path)
    except FileNotFoundError:
        tables = tables_in(system, folder)
        meant = nearest(name, tables)
        return f"Did you mean {folder}/{meant}?" if meant else _listed(folder, tables)
    except NotADirectoryError:
        return _what_file_is(name)
    except OSError:  # this process may not read it
        return ""
    return what_is_at(system, path) or _listed(path, tables_in(system, path))


def _what_file_is(name: str) -> str:
    if CHECKPOINT.fullmatch(name):
        return (
            "This is a checkpoint of a model: load it with the model, by ert.load(model, folder) or Keras. Its tables "
            "lie where the layers' path= says"
        )
    return "A table is a folder, and this is a file. To make a table of a file of vectors: embedrock import FILE TABLE"


def _listed(folder: str, names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(f"{folder}/{name}" for name in names[:SHOWN])
    more = ", ..." if len(names) > SHOWN else ""
    return f"There {'is one' if len(names) == 1 else 'are some'} in {folder}: {shown}{more}"


def tables_in(system: System, folder: str) -> list[str]:
    """Return the names of the tables in a folder, among its first entries."""
    try:
        names = sorted(system.listdir(folder))[:LOOKED_AT]
    except OSError:  # missing, or not readable by this process
        return []
    return [name for name in names if _is_table(system, f"{folder}/{name}")]


def _is_table(system: System, folder: str) -> bool:
    with contextlib.suppress(OSError):  # this process may not read it
        return holds_table(system, folder)
    return False
