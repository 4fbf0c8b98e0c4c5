"""Read a log in Criteo's format: a line is a label, 13 numbers and 26 hexadecimal strings, separated by tabs.

The numbers and strings may be missing. As in MLPerf's preprocessing, a number x becomes log(1 + x), one below 0 or
missing counts as 0, and so does a missing string. Strings are read as numbers of base 16. Those are the ids: tables of
open ids need no vocabulary, no second pass and no limit of frequency, and no two strings share a row. With `ids_below`
they are taken modulo that, as MLPerf does before it makes its vocabularies.
"""

from __future__ import annotations

import gzip
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from embedrock.demo.data.examples import Impressions
from embedrock.demo.data.interactions import LogError
from embedrock.demo.metrics import auc
from embedrock.terminal.tables import format_count

NUMBERS, STRINGS = 13, 26
FIELDS = 1 + NUMBERS + STRINGS
MAX_DIGITS, MAX_HEX_DIGITS = 15, 8
BLOCK = 1 << 23  # bytes that are read at a time
STRIDE = 1 << 14  # lines between two whose places are known
TEST_LINES = 50_000  # at most, and a tenth of the log
TAB, NEWLINE, RETURN, MINUS = b"\t\n\r-"
GZIP = b"\x1f\x8b"
FORM = f"{FIELDS} fields separated by tabs: a label, {NUMBERS} whole numbers and {STRINGS} hexadecimal strings"

HEX = np.full(256, 16, np.uint8)
for _letters, _first in ((b"0123456789", 0), (b"abcdef", 10), (b"ABCDEF", 10)):
    HEX[np.frombuffer(_letters, np.uint8)] = np.arange(_first, _first + len(_letters))


class CriteoLog:
    """A file in Criteo's format, plain or packed by gzip, which is never in RAM as a whole.

    Making it reads the file once, to count its lines. Later reads go on where the last one ended, or from a place that
    is known; packed files have to be unpacked up to there.

    Args:
        path: of the file.
        ids_below: ids are taken modulo this; None: as they are.

    Attributes:
        lines: how many there are.
        features: strings of a line.

    Raises:
        LogError: it cannot be read, or has no lines; and whenever a line is malformed, with its number.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "day_0"
        ...     _ = path.write_text("\\t".join(["1", *"7" * 13, *["0000001f"] * 25, ""]) + "\\n")
        ...     with CriteoLog(path) as log:
        ...         some = log.read(0, 1)
        >>> some.labels, some.numbers[0, :2].round(3), some.ids[0], some.ids[25]
        (array([1.], dtype=float32), array([2.079, 2.079], dtype=float32), array([[31]]), array([[0]]))
    """

    features = STRINGS

    def __init__(self, path: Path, ids_below: int | None = None) -> None:
        self.path, self._ids_below = path, ids_below
        try:
            self._file = _open(path)
        except OSError as error:
            self._cannot_read(error)
        with ExitStack() as stack:
            stack.callback(self._file.close)
            try:
                self.lines, self._places = self._count()
            except (OSError, EOFError, zlib.error) as error:
                self._cannot_read(error)
            if not self.lines:
                raise LogError(f"{path}: expected lines of {FORM}; got an empty file. Check that it is the right file.")
            stack.pop_all()
        self._line, self._rest = -1, b""  # where the next read goes on, and what was read beyond it

    def __enter__(self) -> CriteoLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def read(self, first: int, count: int) -> Impressions:
        """Return some lines, from 0; all of them must be there."""
        try:
            return self._parsed(self._text(first, count), first)
        except (OSError, EOFError, zlib.error) as error:
            self._cannot_read(error)

    def _count(self) -> tuple[int, list[int]]:
        """Return how many lines there are, and where every `STRIDE`-th begins."""
        lines, start, places, last = 0, 0, [0], NEWLINE
        while block := self._file.read(BLOCK):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == NEWLINE)
            places += (start + 1 + ends[(STRIDE - 1 - lines) % STRIDE :: STRIDE]).tolist()
            lines, start, last = lines + len(ends), start + len(block), block[-1]
        return lines + (last != NEWLINE), places

    def _text(self, first: int, count: int) -> bytes:
        """Return some lines as they are, all with an end."""
        if first != self._line:
            self._file.seek(self._places[first // STRIDE])
            self._rest = b""
            self._take(first % STRIDE)
        text = self._take(count)
        self._line = first + count
        return text

    def _take(self, count: int) -> bytes:
        """Return the next lines."""
        blocks, found = [], 0
        while found < count:
            block = self._rest or self._file.read(BLOCK) or b"\n"  # after the last line, which may have no end
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == NEWLINE)
            wanted = count - found
            cut = int(ends[wanted - 1]) + 1 if len(ends) >= wanted else len(block)
            blocks.append(block[:cut])
            self._rest, found = block[cut:], found + min(len(ends), wanted)
        return b"".join(blocks)

    def _parsed(self, text: bytes, first: int) -> Impressions:
        data = np.frombuffer(text, np.uint8)
        ends = np.flatnonzero((data == TAB) | (data == NEWLINE))
        lines = _lines_of(data, ends)
        if lines is None:
            self._refuse_width(text, first)
        starts, ends = lines
        digits = data[np.maximum(ends[:, -1] - 1, 0)] == RETURN
        ends[:, -1] -= digits  # a line that ends as in Windows
        labels, numbers = self._numbers(data, starts[:, : 1 + NUMBERS], ends[:, : 1 + NUMBERS], first)
        ids = self._ids(data, starts[:, 1 + NUMBERS :], ends[:, 1 + NUMBERS :], first)
        return Impressions(tuple(ids.T[:, :, None]), np.log1p(numbers), labels)

    def _numbers(
        self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray, first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return labels and numbers."""
        minus = (starts < ends) & (data[starts] == MINUS)
        values, wrong = _digits(data, starts + minus, ends, 10, MAX_DIGITS)
        wrong |= minus & (starts + 1 == ends)
        wrong[:, 0] |= (starts[:, 0] == ends[:, 0]) | minus[:, 0] | (values[:, 0] > 1)
        if wrong.any():
            line, field = np.argwhere(wrong)[0]
            got = data[starts[line, field] : ends[line, field]].tobytes()
            expected = f"a whole number as field {field + 1}" if field else "0 or 1 as label"
            self._refuse(first + int(line), expected, got)
        return values[:, 0].astype(np.float32), np.where(minus, 0, values)[:, 1:].astype(np.float32)

    def _ids(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray, first: int) -> np.ndarray:
        values, wrong = _digits(data, starts, ends, 16, MAX_HEX_DIGITS)
        if wrong.any():
            line, field = np.argwhere(wrong)[0]
            got = data[starts[line, field] : ends[line, field]].tobytes()
            expected = f"at most {MAX_HEX_DIGITS} hexadecimal digits as field {field + 2 + NUMBERS}"
            self._refuse(first + int(line), expected, got)
        return values if self._ids_below is None else values % self._ids_below

    def _refuse_width(self, text: bytes, first: int) -> NoReturn:
        for number, line in enumerate(text.split(b"\n")):
            if line.count(b"\t") != FIELDS - 1:
                self._refuse(first + number, FORM, b"%d: %s" % (line.count(b"\t") + 1, line))
        raise AssertionError("a line with other fields was found before")

    def _refuse(self, line: int, expected: str, got: bytes) -> NoReturn:
        shown = got[:60].decode("utf-8", "replace")
        raise LogError(f"{self.path}, line {line + 1}: expected {expected}; got {shown!r}. Fix or remove the line.")

    def _cannot_read(self, error: Exception) -> NoReturn:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise LogError(f"{self.path}: cannot be read: {reason}. Check the file.") from error


def _open(path: Path) -> IO[bytes]:
    with open(path, "rb") as file:
        packed = file.read(len(GZIP)) == GZIP
    # Typed so, because GzipFile is read as files are, and is none for a type checker.
    unpacked: Any = gzip.open(path) if packed else open(path, "rb")  # noqa: SIM115  # closed by its log
    return unpacked


def _lines_of(data: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return where the fields of each line begin and end, (lines, FIELDS); None if not every line has so many."""
    if len(ends) % FIELDS:
        return None
    ends = ends.reshape(-1, FIELDS)
    kinds = data[ends]
    if (kinds[:, -1] != NEWLINE).any() or (kinds[:, :-1] != TAB).any():
        return None
    flat = np.concatenate([[0], ends.ravel()[:-1] + 1])
    return flat.reshape(-1, FIELDS), ends


def _digits(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, base: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of fields, int64, 0 where one is empty, and which fields are no numbers."""
    lengths = ends - starts
    wrong = lengths > most
    values = np.zeros(starts.shape, np.int64)
    for place in range(min(int(lengths.max(initial=0)), most)):
        inside = place < lengths
        digits = HEX[data[np.where(inside, starts + place, 0)]]
        wrong |= inside & (digits >= base)
        values = np.where(inside, values * base + digits, values)
    return values, wrong


class CriteoSplit:
    """The lines of a log to train on, by number of the step, and its last ones to test on: a `Source`.

    Args:
        log: that is open for as long.
        batch_size: lines in a batch.

    Attributes:
        test: its last lines.
        best: nobody knows.
        batches: in one pass; steps go round them. The lines of a last, smaller batch are not trained on.

    Raises:
        LogError: there are too few lines, or no clicks, or nothing else, to test on.
    """

    best = None

    def __init__(self, log: CriteoLog, batch_size: int) -> None:
        self._log = log
        tested = min(TEST_LINES, log.lines // 10)
        trained = log.lines - tested
        self._batch_size, self.batches = min(batch_size, trained), max(1, trained // batch_size)
        if not tested:
            raise LogError(f"{log.path}: expected 10 lines or more, a tenth of them to test on; got {log.lines}.")
        self.test = log.read(trained, tested)
        try:
            auc(self.test.labels, self.test.labels)
        except ValueError as error:
            raise LogError(
                f"{log.path}: expected labels 0 and 1 among its last {format_count(tested, 'line')}, which are tested "
                f"on; got only {self.test.labels[0]:.0f}. Shuffle the lines, or take more."
            ) from error

    def batch(self, step: int) -> Impressions:
        """Return what is trained on in a step; the first one is step 0."""
        return self._log.read(step % self.batches * self._batch_size, self._batch_size)

    def facts(self, steps: int) -> dict[str, float]:
        """Return how often all of it was trained on."""
        return {"passes": steps / self.batches}
