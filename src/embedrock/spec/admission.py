"""`Admission`: how often an id must be seen before its row gets a record."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from embedrock.errors import ArgumentError, check_choice
from embedrock.kernels.constants import SKETCH_DEPTH as DEPTH
from embedrock.kernels.constants import SKETCH_LINE_BYTES as LINE_BYTES
from embedrock.system.sizes import Size, parse_bytes

DEFAULTS = ("first", "zeros", "shared")
MOST_SKETCHED = 256  # sightings that a cell of a sketch can tell
CELL_BITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Admission:
    """Says which rows of a table get a record: those whose id was seen often enough in training.

    An id is *seen* once in each step that has a gradient for it, however often the batch has it. Its row gets a record
    in the step in which it is seen for the `min_count`-th time, and is stepped in it. The gradients of the times before
    are dropped, and counted: ``table.stats()["gradients_dropped"]``, unless there is a shared row. Lookups are no
    sightings, nor are steps that were left out for NaN or Inf. `Table.assign` makes records at once.

    Args:
        min_count: sightings that a row needs; 1: every row that is stepped gets a record.
        within: sightings count for so many steps at most: those in this period of ``within / 2`` steps and in the one
            before it. None: for ever.
        sketch: counts in so many bytes, or "512KiB", whatever ids come (twice that with `within`). An id may seem to
            have been seen more often than it was, never less often: `sketch_bytes` says how large it should be. None:
            exact counts, of about 32 bytes for each id that has no record yet.
        default: what rows without a record are read as: their "first" values, "zeros", or the "shared" row, which
            trains for them: it gets the sum of their gradients, as one step of each batch, and none is dropped. It
            begins as row 0 does. Their record begins with the first value, whatever they were read as.

    Raises:
        ArgumentError: a value that cannot work.

    Example:
        >>> import embedrock as er
        >>> import numpy as np
        >>> table = er.Table(rows=None, dim=2, rule=er.SGD(lr=1.0), init=er.Zeros(), admission=er.Admission(2))
        >>> for ids in ([7, 8], [7, 9]):
        ...     table.update(ids, np.ones((2, 2), np.float32))
        >>> table.export()[0].tolist(), table.lookup([7]).tolist()
        ([7], [[-1.0, -1.0]])
    """

    min_count: int
    within: int | None = None
    sketch: Size | None = None
    default: str = "first"

    def __post_init__(self) -> None:
        check_whole("min_count", self.min_count, 1, "of an Admission")
        if self.within is not None:
            check_whole("within", self.within, 2, "of an Admission, in steps,")
            if self.min_count > 2 * self.period:
                raise ArgumentError(
                    f"`within` of an Admission must be at least {self.min_count + self.min_count % 2} steps, as an id "
                    f"is seen once in each, {self.min_count} times in all: got {self.within}."
                )
        check_choice("default", self.default, DEFAULTS)
        if self.sketch is None:
            return
        if isinstance(self.sketch, str) and "%" in self.sketch:
            raise ArgumentError(f"`sketch` of an Admission must be a number of bytes: got {self.sketch!r}.")
        nbytes = parse_bytes(self.sketch, "sketch")
        if self.min_count > MOST_SKETCHED:
            raise ArgumentError(
                f"`min_count` of an Admission with a sketch must be at most {MOST_SKETCHED}: got {self.min_count}. "
                "Leave sketch= out to count exactly."
            )
        if nbytes < LINE_BYTES:
            raise ArgumentError(f"`sketch` of an Admission must have at least {LINE_BYTES} bytes: got {self.sketch!r}.")

    @property
    def period(self) -> int:
        """Steps after which the older of two counts is dropped; 0: never."""
        return 0 if self.within is None else self.within // 2

    @property
    def cell_bits(self) -> int:
        """Bits of a cell of the sketch: enough to count to one less than `min_count`."""
        return next(bits for bits in CELL_BITS if self.min_count <= 1 << bits)

    @property
    def lines(self) -> int:
        """Lines of the sketch."""
        return 0 if self.sketch is None else parse_bytes(self.sketch, "sketch") // LINE_BYTES

    @staticmethod
    def sketch_bytes(ids: int, min_count: int, error: float = 0.01) -> int:
        """Return how large a sketch should be for so many different ids.

        An id that was never seen then seems to have been seen ``min_count - 1`` times with a probability of at most
        `error`, were all `ids` seen so often: by the formula of Bloom filters, with a fifth more as the cells of an id
        lie side by side.

        Raises:
            ArgumentError: `ids` or `min_count` is below 1, or `error` does not lie between 0 and 1.

        Example:
            >>> Admission.sketch_bytes(10**8, min_count=3) / 2**20 < 512
            True
        """
        check_whole("ids", ids, 1, "of sketch_bytes")
        if not isinstance(error, float) or not 0 < error < 1:
            raise ArgumentError(f"`error` of sketch_bytes must be a probability, between 0 and 1: got {error!r}.")
        cells = -DEPTH * ids / math.log1p(-(error ** (1 / DEPTH)))
        return math.ceil(1.2 * cells * Admission(min_count).cell_bits / 8 / LINE_BYTES) * LINE_BYTES

    def describe(self) -> dict[str, Any]:
        """Return it as plain data, from which `Admission` makes it again."""
        return asdict(self)


def check_whole(name: str, value: Any, least: int, of: str) -> None:
    """Raise `ArgumentError` unless a value is a whole number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**62:
        raise ArgumentError(f"`{name}` {of} must be a whole number of at least {least}: got {value!r}.")
