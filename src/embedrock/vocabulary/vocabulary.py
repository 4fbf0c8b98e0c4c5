"""`Vocabulary`: strings to dense ids and back, the class that users call."""

from __future__ import annotations

import errno
import functools
import os
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from embedrock.batch.ids import check_ids
from embedrock.batch.strings import Strings, check_missing, strings_of
from embedrock.batch.wrong_ids import in_array
from embedrock.errors import (
    ArgumentError,
    ClosedTableError,
    IdError,
    IdTypeError,
    MemoryBudgetError,
    ReadOnlyTableError,
    UnknownStringError,
    UnsupportedError,
    check_choice,
)
from embedrock.io.vfs import SYSTEM
from embedrock.system import forks
from embedrock.system.interrupts import held_back
from embedrock.system.log import caller_level
from embedrock.system.notebook import PublicNames
from embedrock.system.paths import local_path
from embedrock.system.ram import memory_limit
from embedrock.system.scopes import ClosedAtEnd, on_failure
from embedrock.system.sizes import Size, format_bytes, parse_bytes
from embedrock.table.opened import note_writer, open_alone
from embedrock.table.options import MODES
from embedrock.table.storage import UncommittedWarning, check_step
from embedrock.vocabulary.blocks import MemTable, Recent, StringQuery
from embedrock.vocabulary.files import StringFiles
from embedrock.vocabulary.manifest import MOST_BYTES, MOST_STRINGS

DEFAULT_MEMORY = 256 << 20  # for one on disk
FRESH_SHARE, RESIDENT_SHARE, RECENT_SHARE = 4, 2, 8  # each takes one part in this many of its memory
PART, ITERATED = 1 << 20, 1 << 16  # strings looked up or added at once, and read at once
RAISE = "raise"


class Vocabulary(PublicNames, ClosedAtEnd):
    """Exact map from strings to dense ids 0, 1, 2, ... in order of first occurrence, and back.

    On disk it is append-only: an id never changes, and `commit` makes all strings so far durable. It may be larger than
    RAM: a lookup takes at most one disk read per string. Commit the vocabulary before the table of its ids. Then each
    row of the table has its string, even after a crash (docs/vocabulary.md).

    Args:
        path: a folder, created if missing. None: in RAM.
        memory: limit of RAM for strings and their indexes: bytes, "64MiB", "10%". None: 256 MiB on disk, and the
            machine's RAM without a path.
        mode: "w" to add strings, in one process at a time. "r" to read the last commit, also beside a writer.
        step: with mode "r", the strings of the commit with that step. They fit a table's commit of the same step. The
            last 1,000 steps are known.
        unknown: the string whose id unknown strings get in `lookup` and ``vocabulary[string]``, "[UNK]" for example. A
            writer adds it, so it has id 0 in a new vocabulary. Pass it whenever the vocabulary is opened. None: unknown
            strings have no id.

    Values are strings or bytes, in every form that `er.hash_ids` takes: arrays, lists, Series, Arrow, tensors of
    TensorFlow. A string and its UTF-8 bytes are the same. Missing values (None, NaN, nulls) raise an error with their
    position, unless `missing` gives them an id.

    ``string in vocabulary`` and ``vocabulary[string]`` are for one string, ``for string in vocabulary`` goes in order
    of the ids.

    Attributes:
        path: the folder, absolute; None in RAM.

    Example:
        >>> import embedrock as er
        >>> words = er.Vocabulary()
        >>> words.add(["red", "green", "red"])
        array([0, 1, 0])
        >>> words.lookup(["green", "blue"])
        array([ 1, -1])
        >>> words.strings([1, 0])
        array(['green', 'red'], dtype=object)
        >>> words["green"], "blue" in words, list(words)
        (1, False, ['red', 'green'])
    """

    _unlisted = "_[!_]* is_open_here subject"

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        memory: Size | None = None,
        mode: str = "w",
        *,
        step: int | None = None,
        unknown: str | bytes | None = None,
    ) -> None:
        self._files: StringFiles | None = None
        self._memtable, self._closed, self._process = MemTable(), False, os.getpid()
        check_choice("mode", mode, MODES)
        if isinstance(path, list | tuple | np.ndarray):
            raise ArgumentError("`path` of a vocabulary must be a folder: got strings. Pass these to add().")
        if not isinstance(unknown, str | bytes | None):
            raise ArgumentError(f"`unknown` of a vocabulary must be one string: got {unknown!r}.")
        self.path = None if path is None else os.path.abspath(local_path(path))
        self.subject = "the vocabulary" if path is None else f"vocabulary {self.path!r}"
        self._writes, self._lock = mode == "w", forks.lock(forks.LockRank.TABLE)
        self._step, self._as_of = step, MOST_STRINGS
        self._unknown = unknown
        if step is not None and self._writes:
            raise ArgumentError(f'`step` ({step!r}) of a vocabulary goes with mode="r": a writer has all strings.')
        if self.path is None:
            if not self._writes:
                raise ArgumentError('`mode="r"` goes with a path: a vocabulary in RAM is its process\' own.')
            self._memory = memory_limit() if memory is None else parse_bytes(memory)
            self._salt = (0, 0)
            return self._add_unknown()
        self._memory = DEFAULT_MEMORY if memory is None else parse_bytes(memory)
        (system := SYSTEM.get()).check_usable(self.subject)
        open_it = functools.partial(StringFiles.open_or_make if self._writes else StringFiles.open, system, self.path)
        self._files = open_alone(self.path, open_it) if self._writes else open_it()
        self._salt = self._files.manifest.salt
        with on_failure(self._close):
            if step is not None:
                self._as_of = self._strings_at(self._files, step)
        self._files.keep_resident(self._resident_bytes(self._files))
        self._files.recent = Recent(self._memory // RECENT_SHARE)
        with on_failure(self._close):
            self._add_unknown()
        if self._writes:
            note_writer(self, self.path)

    def _add_unknown(self) -> None:
        if self._unknown is not None and self._writes:
            self.add(self._unknown)

    def _strings_at(self, files: StringFiles, step: int) -> int:
        known = dict(files.manifest.steps)
        if step in known:
            return known[step]
        listed = ", ".join(map(str, [*known][-8:])) or "none"
        raise ArgumentError(
            f"{self.subject} must have been committed with the step that is asked for: got {step!r}, and the last ones "
            f"are {listed}. Commit it before each commit of the table: vocabulary.commit(step=...)."
        )

    # ------------------------------------------------------------ strings to ids

    def add(self, values: Any, missing: int | None = None) -> np.ndarray:
        """Return the ids of strings, int64 of their shape. New strings get the next ids, in order of occurrence.

        So ids depend only on the strings and their order, not on the calls or on `memory`.

        Args:
            values: strings.
            missing: the id of missing values, which are not added. None: they are an error.

        Raises:
            IdTypeError: a value is no string, or is missing, without `missing`. Nothing was added.
            ReadOnlyTableError: the vocabulary was opened with ``mode="r"``, or this is a child of the writer's process.
            MemoryBudgetError: the vocabulary is in RAM, and the strings do not fit.
            OSError: the disk failed. Strings added before keep their ids. Add all of these again.
        """
        check_missing(missing, self.subject)
        query, shape, absent = self._query(values, missing is not None)
        there = query.some(np.delete(np.arange(len(query.hashes)), absent)) if len(absent) else query
        with self._lock:
            self._check_writable()
            ids = np.concatenate([np.empty(0, np.int64), *map(self._add, _parts(there))])
        return np.insert(ids, absent - np.arange(len(absent)), missing or 0).reshape(shape)

    def lookup(self, values: Any, missing: int | str | None = None) -> np.ndarray:
        """Return the ids of strings, int64 of their shape.

        Args:
            values: strings.
            missing: the id of unknown strings and of missing values. "raise": both are an error. None: unknown strings
                get the id of the string `unknown` of the vocabulary, or -1 without it, and missing values are an error.
                A table with ``rows=`` refuses the id -1. (pandas' Categorical uses -1, too.)

        Raises:
            UnknownStringError: a string is unknown, with ``missing="raise"``, or the string `unknown` itself is.
            IdTypeError: a value is no string, or is missing, without an id as `missing`.
        """
        raises = isinstance(missing, str) and missing == RAISE
        check_missing(None if raises else missing, self.subject, f'"{RAISE}"')
        query, shape, absent = self._query(values, not raises and missing is not None)
        with self._lock:
            self._check_open()
            ids = np.concatenate([np.empty(0, np.int64), *map(self._find, _parts(query))])
        ids[ids >= self._as_of] = ids[absent] = -1
        unknown = np.flatnonzero(ids < 0)
        if len(unknown) and raises:
            raise self._lacks(query, int(unknown[0]), len(unknown), shape)
        if len(unknown) and missing is None:
            missing = -1 if self._unknown is None else int(self.lookup(self._unknown, RAISE))
        ids[unknown] = 0 if raises else int(missing or 0)
        return ids.reshape(shape)

    def __getitem__(self, value: str | bytes) -> int:
        """Return the id of one string.

        Raises:
            UnknownStringError: the string is unknown, and the vocabulary has no `unknown`. It is a `KeyError`.
            IdTypeError: `value` is no string.
        """
        return self._one(value, RAISE if self._unknown is None else None)

    def __contains__(self, value: object) -> bool:
        """Return whether a string is known."""
        return self._one(value, -1) >= 0

    def _one(self, value: Any, missing: int | str | None) -> int:
        if np.ndim(value) or isinstance(value, int | np.integer):
            call = "lookup(values)" if np.ndim(value) else f"strings([{value}]) for the string of an id"
            raise IdTypeError(f"a key of {self.subject} must be one string: got {value!r:.40}. Call {call}.")
        return int(self.lookup(value, missing))

    def _query(self, values: Any, fills: bool) -> tuple[StringQuery, tuple[int, ...], np.ndarray]:
        found, shape, absent = strings_of(values, self.subject, fills)
        sizes = found.ends - found.starts
        if len(sizes) and int(sizes.max()) > MOST_BYTES:
            position = int(np.argmax(sizes))
            raise ArgumentError(
                f"`values` of {self.subject} must be strings of at most {format_bytes(MOST_BYTES)}: got one of "
                f"{sizes[position]} bytes {in_array(shape, 'values')(position)}."
            )
        return StringQuery.of(found, self._salt), shape, absent

    def _find(self, query: StringQuery) -> np.ndarray:
        ids = self._memtable.find(query)
        ids[ids >= 0] += self._in_files
        if self._files is not None:
            left = np.flatnonzero(ids < 0)
            ids[left] = self._files.find(query if len(left) == len(ids) else query.some(left))
        return ids

    def _add(self, query: StringQuery) -> np.ndarray:
        ids = self._find(query)
        new = np.flatnonzero(ids < 0)
        if len(new):
            some = query.some(new)
            self._make_room(some)
            with held_back():
                ids[new] = self._memtable.insert(some) + self._in_files
        return ids

    def _make_room(self, query: StringQuery) -> None:
        count, nbytes = len(query.hashes), query.nbytes
        if len(self) + count > MOST_STRINGS:
            raise ArgumentError(f"{self.subject} has {len(self)} strings, and can have {MOST_STRINGS}.")
        full = self._memtable.bytes_with(count, nbytes) > self._memory // (1 if self._files is None else FRESH_SHARE)
        if full and self._files is not None and self._memtable.count:
            self._write_out(self._files)
        elif full and self._files is None:
            raise MemoryBudgetError(
                f"{self.subject} may take {format_bytes(self._memory)} of RAM, and {count} strings more do not fit. "
                "Raise memory=, or keep it on disk: er.Vocabulary(path)."
            )
        self._memtable.reserve(count, nbytes)

    def _write_out(self, files: StringFiles) -> None:
        with held_back():
            files.write(self._memtable)
            self._memtable = MemTable()
        files.merge_small()
        files.keep_resident(self._resident_bytes(files))

    def _resident_bytes(self, files: StringFiles) -> int:
        """Return the RAM for packed files in bytes. A reader uses all that is left, because no strings come."""
        left = self._memory - self._memory // RECENT_SHARE - files.index_bytes
        return self._memory // RESIDENT_SHARE if self._writes else left

    def _lacks(self, query: StringQuery, position: int, count: int, shape: tuple[int, ...]) -> IdError:
        text = query.data[query.starts[position] : query.stops[position]].tobytes()
        others = f" and {count - 1} others" if count > 1 else ""
        remedy = "add() gives new strings ids; missing=-1 marks them"
        if self._unknown in (text, text.decode(errors="replace")):
            remedy = "It is that of unknown=. Open the vocabulary once for writing with it, and commit"
        return UnknownStringError(
            f"`values` of {self.subject} must be strings that it has: got {text.decode(errors='replace')[:80]!r} "
            f"{in_array(shape, 'values')(position)}{others}. {remedy}."
        )

    # ------------------------------------------------------------ ids to strings

    def strings(self, ids: Any, kind: type = str) -> np.ndarray:
        """Return the strings of ids, as an array of objects of their shape.

        Args:
            ids: integers in ``[0, len(vocabulary))``. Ids may repeat.
            kind: `str`, or `bytes` if some strings are not UTF-8.

        Raises:
            IdError: no string has an id.
            IdTypeError: `ids` are no integers, or a string is not UTF-8 and `kind` is `str`.
        """
        if kind not in (str, bytes):
            raise ArgumentError(f"`kind` of {self.subject} must be str or bytes: got {kind!r}.")
        array = check_ids(ids, None, self.subject)
        flat = array.reshape(-1)
        with self._lock:
            self._check_open()
            bad = np.flatnonzero((flat < 0) | (flat >= len(self)))
            if len(bad):
                where = in_array(array.shape)(int(bad[0]))
                raise IdError(
                    f"`ids` of {self.subject} must lie in [0, {len(self)}), as many as it has strings: got "
                    f"{flat[bad[0]]} {where}."
                )
            unique, inverse = np.unique(flat, return_inverse=True)
            texts, sizes = self._texts(unique)
        out = np.empty(len(unique), object)
        out[:] = _listed(texts, sizes, kind, self.subject)
        return out[inverse.reshape(-1)].reshape(array.shape)

    def _texts(self, ids: np.ndarray) -> tuple[bytes, np.ndarray]:
        parts = list[tuple[np.ndarray, np.ndarray]]()
        for run in [] if self._files is None else self._files.runs:
            lo, hi = np.searchsorted(ids, (run.entry.first, run.end)).tolist()
            if lo < hi:
                parts.append(run.texts(ids[lo:hi]))
        parts.append(self._memtable.texts(ids[ids >= self._in_files] - self._in_files))
        return b"".join(texts.tobytes() for texts, _ in parts), np.concatenate([sizes for _, sizes in parts])

    def __len__(self) -> int:
        """Return the number of strings."""
        return min(self._in_files + self._memtable.count, self._as_of)

    def __bool__(self) -> bool:
        return True  # without strings, too: `er.opened(path) or er.Vocabulary(path)`

    def __iter__(self) -> Iterator[str]:
        """Iterate over the strings in order of their ids. At most 65,536 of them are in RAM at once."""
        first = 0
        while first < (end := min(len(self), first + ITERATED)):
            yield from self.strings(np.arange(first, end)).tolist()
            first = end

    @property
    def _in_files(self) -> int:
        return 0 if self._files is None else self._files.count

    # ------------------------------------------------------------ commits

    def commit(self, step: int | None = None) -> int:
        """Make all strings so far durable as one commit, and return its number.

        Without new strings, that is the last one.

        Args:
            step: the step of the table's next commit. ``Vocabulary(path, mode="r", step=...)`` then opens these
                strings. A step that is not the highest drops later steps: their training was cut off.

        Raises:
            CommitError: the commit failed. The last commit is intact, and no string is lost.
            ReadOnlyTableError: the vocabulary was opened with ``mode="r"``, or this is a child of the writer's process.
        """
        with self._lock:
            files = self._check_on_disk("commit()")
            check_step(step)
            try:
                if self._memtable.count:
                    self._write_out(files)
                with held_back():
                    return files.commit(step)
            except OSError as error:
                raise files.commit_error(error) from error

    def refresh(self, step: int | None = None) -> bool:
        """Switch a reader to the newest commit, in place. Return whether its strings have changed.

        Other threads can look up strings before and after the switch.

        Args:
            step: switch to the strings of the commit with that step, as ``Vocabulary(path, mode="r", step=...)`` does.

        Raises:
            ArgumentError: no commit has that step. The reader is unchanged.
            UnsupportedError: the vocabulary is not a reader.

        Example:
            >>> import tempfile
            >>> writer = Vocabulary(tempfile.mkdtemp() + "/words.rock")
            >>> reader = Vocabulary(writer.path, mode="r")
            >>> writer.add(["red"]), writer.commit()
            (array([0]), 1)
            >>> reader.lookup(["red"]), reader.refresh(), reader.lookup(["red"])
            (array([-1]), True, array([0]))
        """
        with self._lock:
            self._check_open()
            before = self._files
            if self._writes or before is None or self.path is None:
                raise UnsupportedError(
                    f'refresh() is for readers, er.Vocabulary(path, mode="r"): {self.subject} has all strings already.'
                )
            newest = StringFiles.open(before.system, self.path)
            with on_failure(lambda: newest.close(in_child=False)):
                as_of = MOST_STRINGS if step is None else self._strings_at(newest, step)
            newest.keep_resident(self._resident_bytes(newest))
            newest.recent = before.recent
            is_other = (newest.manifest.commit, as_of) != (before.manifest.commit, self._as_of)
            self._files, self._as_of, self._step = newest, as_of, step
            before.close(in_child=False)
            return is_other

    def compact(self) -> int:
        """Merge files and commit, and return the commit's number. A lookup then takes at most one read per string.

        A merge rewrites all strings except the first files. Additions merge files too, as they grow.

        Raises:
            CommitError: it failed (disk full, I/O error). The last commit is whole.
            UnsupportedError: the vocabulary is in RAM.
        """
        with self._lock:
            files = self._check_on_disk("compact()")
            try:
                if self._memtable.count:
                    self._write_out(files)
                files.merge(files.head)
                files.keep_resident(self._resident_bytes(files))
            except OSError as error:
                raise files.commit_error(error) from error
            return self.commit()

    def verify(self) -> None:
        """Read all files of the last commit. Raise `CorruptTableError` unless each string is found by its id."""
        with self._lock:
            self._check_open()
            for run in [] if self._files is None else self._files.runs:
                run.verify(self._salt)

    @property
    def uncommitted(self) -> bool:
        """Return whether some strings are in no commit."""
        return self._files is not None and len(self) > self._files.manifest.count

    def stats(self) -> dict[str, float]:
        """Return statistics: strings, files, bytes on disk and in RAM, and pages read."""
        runs = [] if self._files is None else self._files.runs
        return {
            "strings": len(self),
            "files": len(runs),
            "disk_bytes": sum(run.entry.size for run in runs),
            "ram_bytes": self._memtable.nbytes + (0 if self._files is None else self._files.nbytes),
            "pages_read": sum(run.reads for run in runs),
        }

    # ------------------------------------------------------------ life cycle

    @property
    def is_open_here(self) -> bool:
        """Return whether the vocabulary is open, in the process that created or opened it."""
        return not self._closed and os.getpid() == self._process

    def close(self) -> None:
        """Close the files, and release the lock. Uncommitted strings are lost, with a warning."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed, in_child = True, os.getpid() != self._process
        if self._files is None:
            return
        lost, last = len(self) - self._files.manifest.count, self._files.manifest.commit
        self._files.close(in_child)
        if lost and self._writes and not in_child:
            warnings.warn(
                f"{self.subject} is closed with {lost} strings since commit {last}, which are lost. Call commit() "
                "before.",
                UncommittedWarning,
                stacklevel=caller_level(),
            )

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._close()

    def __repr__(self) -> str:
        """Return a description with its place and number of strings."""
        if self._closed:
            return f"<{self.subject}, closed>"
        return f"<{self.subject}: {len(self)} strings{'' if self._writes else ', read only'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for another process, which opens a vocabulary on disk for reading, and copies one in RAM."""
        self._check_open()
        if self._files is None:
            count = len(self)
            texts, sizes = self._texts(np.arange(count))
            return _restored, (texts, sizes, self._memory, self._unknown)
        if self._writes:
            raise pickle.PicklingError(
                f"{self.subject} is open for writing, and another process cannot have it so. Commit it, and give the "
                'other process one that reads: er.Vocabulary(path, mode="r").'
            )
        reader = functools.partial(Vocabulary, mode="r", step=self._step, unknown=self._unknown)
        return reader, (self.path, self._memory)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedTableError(f"{self.subject} is closed. Open it again: er.Vocabulary(path).")

    def _check_writable(self) -> None:
        self._check_open()
        if not self._writes:
            text = f'{self.subject} was opened with mode="r" and cannot change. Open it with mode="w"'
        elif self._files is not None and os.getpid() != self._process:
            text = (
                f"{self.subject} is written by process {self._process}, and this is its child {os.getpid()}. Add "
                "strings in the parent, or look them up here"
            )
        else:
            return
        raise ReadOnlyTableError(errno.EROFS, text, self.path)

    def _check_on_disk(self, verb: str) -> StringFiles:
        self._check_writable()
        if self._files is None:
            raise UnsupportedError(
                f"{verb} is for vocabularies on disk, and this one is in RAM. Make one on disk, er.Vocabulary(path), "
                "and add the strings of this one: strings(range(len(vocabulary)))."
            )
        return self._files


def _parts(query: StringQuery) -> Iterator[StringQuery]:
    count = len(query.hashes)
    for first in range(0, count, PART):
        yield query if count <= PART else query.some(np.arange(first, min(first + PART, count)))


def _listed(texts: bytes, sizes: np.ndarray, kind: type, subject: str) -> list[Any]:
    ends = np.cumsum(sizes).tolist()
    pieces = [texts[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    if kind is bytes:
        return pieces
    try:
        return [piece.decode() for piece in pieces]
    except UnicodeDecodeError as error:
        raise IdTypeError(
            f"strings of {subject} must be UTF-8 to be text: got {error.object[:80]!r}. Read them by strings(ids, "
            "kind=bytes)."
        ) from None


def _restored(texts: bytes, sizes: np.ndarray, memory: int, unknown: str | bytes | None = None) -> Vocabulary:
    made, ends = Vocabulary(memory=memory), np.cumsum(sizes)
    made._add(StringQuery.of(Strings(np.frombuffer(texts, np.uint8), ends - sizes, ends), made._salt))
    made._unknown = unknown
    return made
