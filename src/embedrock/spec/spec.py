"""`Spec`: the frozen description of a table, from which record layout and sizes derive."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from embedrock.errors import ArgumentError, UnsupportedError, check_choice
from embedrock.spec.codecs import CODECS, Codec
from embedrock.system import forks

if TYPE_CHECKING:
    from embedrock.initializers import Initializer
    from embedrock.optimizers import Rule
    from embedrock.spec.admission import Admission
    from embedrock.spec.eviction import Eviction
    from embedrock.spec.frozen import FrozenRows


# The dtypes of weights, and their form in a record. NumPy has no bfloat16, and Numba no 16-bit floats. So 16-bit
# weights are kept as bits. Their forms differ so that a kernel can choose the codec by the dtype of the array.
STORAGES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16), "float16": np.dtype(np.int16)}
STATE_BYTES = 4  # optimizer state is always float32
MAX_ALIGNMENT = 16
OPEN_IDS = "None is for open ids, any int64."


class RecordLayout(NamedTuple):
    """The layout of a record: ``[weights | state columns]``, contiguous and aligned.

    Attributes:
        record_bytes: bytes from one record to the next.
        state_start: index of the first state column, in float32 units.
        state_width: total of float32 state columns.
        gaps: (start, end) of padding in bytes, always zero.
    """

    record_bytes: int
    state_start: int
    state_width: int
    gaps: tuple[tuple[int, int], ...]


SEGMENTS = (256, 512, 1024, 2048, 4096)
ROWS_OF_A_SEGMENT = 2441  # with the most segments, at most 2 % of a table's rows leave too early


@dataclass(frozen=True, eq=False)
class Spec:
    """Frozen description of a table.

    Args:
        rows: number of rows, or None for open ids (any int64).
        dim: columns of weights in a row.
        dtype: of the weights: "float32", "bfloat16" or "float16". Optimizer state is always float32. "int8" and "int4"
            are for rows that are only read, without a rule.
        rule: the sparse optimizer, or None for a table that is only read (or gets its rule later).
        init: initializer of rows.
        seed: of initial values and of stochastic rounding.
        admission: admission of rows to records; None: rows get records when they are stepped.
        eviction: eviction of rows; None: none.
        frozen: rows that no step changes; None: none.
        segments: parts of the hash space that admit and evict rows for themselves, 1 or a power of two: see `SEGMENTS`.

    Raises:
        ArgumentError: an invalid value.
        UnsupportedError: dynamic or frozen rows under a rule that moves rows without a gradient; frozen rows that may
            read as a default row that trains; training of int8 or int4.

    Example:
        >>> import embedrock as er
        >>> spec = er.Table(rows=10**9, dim=64, rule=er.Adam()).spec
        >>> spec.rows, spec.record_bytes  # weights and two moments, float32
        (1000000000, 768)
    """

    rows: int | None
    dim: int
    dtype: str
    rule: Rule | None
    init: Initializer
    seed: int
    admission: Admission | None = None
    eviction: Eviction | None = None
    frozen: FrozenRows | None = None
    segments: int = 1

    def __post_init__(self) -> None:
        if self.rows is not None:
            check_count("`rows`", self.rows, OPEN_IDS)
        check_count("`dim`", self.dim)
        check_choice("dtype", self.dtype, (*STORAGES, *CODECS))
        if self.codec is not None and (self.rule is not None or self.has_residents):
            raise untrained(self.dtype, f"rule={self.rule}" if self.rule is not None else "admission= or eviction=")
        if self.segments != 1 and (self.segments not in SEGMENTS or not self.has_residents):
            raise ArgumentError(
                f"`segments` must be 1, or one of {', '.join(map(str, SEGMENTS))} with admission or eviction: got "
                f"{self.segments!r}."
            )
        most = None if self.segments == 1 or self.eviction is None else self.eviction.most_rows(self.record_bytes)
        if most is not None and most < self.segments:
            raise ArgumentError(
                f"`max_rows` of a table with segments, as processes share it, must be at least their number, "
                f"{self.segments}: got {most}, by {self.eviction}. Raise max_rows= or max_bytes=."
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**64:
            raise ArgumentError(f"`seed` must be a whole number of at most 64 bits: got {self.seed!r}.")
        self.init.check(self.rows, self.dim)
        if self.rule is not None:
            self.rule.check_dim(self.dim)
        if self.has_residents and self.rule is not None and self.rule.history() is not None:
            raise UnsupportedError(
                f"rows cannot come and go under {self.rule}, which moves every row in each step, also those without a "
                "gradient. Leave dense=True out (under an optimizer of Keras: name the rule in the layer, "
                f"rule=er.{type(self.rule).__name__}()), or admission= and eviction=."
            )
        if self.frozen:
            self._check_frozen(self.frozen)

    def _check_frozen(self, frozen: FrozenRows) -> None:
        for start, stop in frozen.ranges:
            if self.rows is not None and not 0 <= start < stop <= self.rows:
                raise ArgumentError(
                    f"`frozen` must be ids in [0, {self.rows}), which the table has: got {range(start, stop)}. Leave "
                    "out the others, or make the table with rows=None, for any int64."
                )
        if self.rule is not None and self.rule.MOVES_ALL and self.rule.history() is not None:
            raise UnsupportedError(
                f"`frozen` rows cannot stay under {self.rule}, which moves every row in each step. Leave dense=True "
                f"out (under an optimizer of Keras: name the rule in the layer, rule=er.{type(self.rule).__name__}()), "
                "or frozen=."
            )
        if self.admission is not None and self.admission.default == "shared":
            raise UnsupportedError(
                "`frozen` rows cannot stay where rows without a record read as the default row, which trains: got "
                f"{self.admission}. Choose another default=, such as 'first', or leave frozen= out."
            )

    @property
    def policies(self) -> dict[str, Any]:
        return {"admission": self.admission, "eviction": self.eviction, "frozen": self.frozen}

    def are_trained(self, ids: np.ndarray) -> np.ndarray:
        """Return which rows (n,) steps change, all but the frozen ones: bool (n,)."""
        return ~self.frozen.has(ids) if self.frozen else np.ones(ids.shape, bool)

    @property
    def has_residents(self) -> bool:
        """Return whether some stepped rows have no record, or lose it."""
        return self.admission is not None or self.eviction is not None

    @property
    def codec(self) -> Codec | None:
        """The form of int8 and int4 weights; None for floats."""
        return CODECS.get(self.dtype)

    @property
    def value_dtype(self) -> str:
        """The dtype of weights when they are read: `dtype`, or "float32" of int8 and int4."""
        return self.dtype if self.codec is None else "float32"

    @forks.cached_property
    def words(self) -> np.dtype:
        """The dtype of `value_dtype` in a record of floats."""
        return STORAGES[self.value_dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of a record."""
        return self.dim * self.words.itemsize if self.codec is None else self.codec.nbytes(self.dim)

    @forks.cached_property
    def layout(self) -> RecordLayout:
        state_start = -(-self.weight_bytes // STATE_BYTES)
        state_width = 0 if self.rule is None else self.rule.state_width(self.dim)
        used = (state_start + state_width) * STATE_BYTES
        alignment = min(MAX_ALIGNMENT, 1 << (used - 1).bit_length()) if self.codec is None else STATE_BYTES
        record_bytes = -(-used // alignment) * alignment
        gaps = (self.weight_bytes, state_start * STATE_BYTES), (used, record_bytes)
        return RecordLayout(record_bytes, state_start, state_width, tuple(gap for gap in gaps if gap[0] < gap[1]))

    @forks.cached_property
    def key(self) -> np.uint64:
        """The seed as the generator's key."""
        return np.uint64(self.seed % 2**64)

    @forks.cached_property
    def first_state(self) -> np.ndarray:
        """Initial optimizer state of a row: float32 (state_width,)."""
        return np.empty(0, np.float32) if self.rule is None else self.rule.first_state(self.dim)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record, weights and state."""
        return self.layout.record_bytes

    @property
    def table_bytes(self) -> int | None:
        """Bytes of all records, or None for open ids."""
        return None if self.rows is None else self.rows * self.record_bytes

    @property
    def for_ranks(self) -> Spec:
        """Return this description for a table that ranks share: with segments, if rows come and go."""
        if not self.has_residents or self.segments > 1:
            return self
        most = self.eviction and self.eviction.most_rows(self.record_bytes)
        lines = 0 if self.admission is None else self.admission.lines  # of a sketch; each segment has some of its own
        fit = [each for each in SEGMENTS if each * ROWS_OF_A_SEGMENT <= (most or math.inf) and each <= (lines or each)]
        return replace(self, segments=max(fit, default=SEGMENTS[0]))

    def with_rule(self, rule: Rule | None) -> Spec:
        return replace(self, rule=rule)


def untrained(dtype: str, got: str, subject: str = "a table") -> UnsupportedError:
    """Return the error for training of rows that are only read."""
    return UnsupportedError(
        f"{subject} with rows of {dtype} must be only read: got {got}. Nothing has changed. Train a table of "
        f'dtype="float32", and write a copy as {dtype}: embedrock export TABLE COPY --dtype {dtype}.'
    )


def check_count(subject: str, value: object, remedy: str = "") -> None:
    """Raise `ArgumentError` unless a value is a valid number of rows, or of weights in a row."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        message = f"{subject} must be a whole number from 1 to 2**63 - 1: got {value!r}. {remedy}"
        raise ArgumentError(message.rstrip())
