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
MOST_SKETCHED = 256  # largest `min_count` with a sketch: cells count to one less
CELL_BITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Admission:
    """A rule for which rows of a table get a record: those of ids that training has seen often enough.

    An id is *seen* once in each step that has a gradient for it, however often the batch has it. The step that sees it
    for the `min_count`-th time makes its record, and steps it. The gradients of earlier steps are dropped, and counted
    in ``table.stats()["gradients_dropped"]``, unless there is a default row. Lookups do not count, nor do steps that
    were skipped for NaN or Inf. `Table.assign` makes records at once.

    Args:
        min_count: number of times that an id must be seen; 1: every row that is stepped gets a record.
        within: the most steps for which a count is kept. It has the present period of ``within / 2`` steps, and the one
            before. None: for ever.
        sketch: count in this many bytes, or "512KiB", for any number of ids (twice as many with `within`). A count may
            be too high, never too low: `sketch_bytes` returns the size needed. None: exact counts, of about 32 bytes
            for each id that has no record yet.
        default: value of rows without a record: their "first" values, "zeros", or the "shared" default row. Their
            gradients train the default row: it gets their sum, as one step of each batch, and none is dropped. It
            begins as row 0 does. A record always begins with the row's initial value.

    Raises:
        ArgumentError: an invalid value.

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
        """Bits of a cell of the sketch: enough to count to ``min_count - 1``."""
        return next(bits for bits in CELL_BITS if self.min_count <= 1 << bits)

    @property
    def lines(self) -> int:
        """Lines of the sketch."""
        return 0 if self.sketch is None else parse_bytes(self.sketch, "sketch") // LINE_BYTES

    @staticmethod
    def sketch_bytes(ids: int, min_count: int, error: float = 0.01) -> int:
        """Return the size of a sketch for `ids` different ids.

        With it, an unseen id reaches a count of ``min_count - 1`` with a probability of at most `error`. That holds
        even if all `ids` were seen as often. It is the formula of Bloom filters, plus a fifth because the cells of an
        id lie side by side.

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
        """Return it as plain data, the arguments of an equal `Admission`."""
        return asdict(self)


def check_whole(name: str, value: Any, least: int, of: str) -> None:
    """Raise `ArgumentError` unless a value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**62:
        raise ArgumentError(f"`{name}` {of} must be a whole number of at least {least}: got {value!r}.")
