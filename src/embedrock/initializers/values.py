"""Initial values that are computed, or lie in an array; ``docs/first-values.md`` has the exact definitions."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from embedrock import kernels
from embedrock.errors import ArgumentError
from embedrock.system import forks

FLOAT32_MAX = float(np.finfo(np.float32).max)


class Initializer(ABC):
    """A function for the initial value of a row. Subclasses are frozen dataclasses."""

    @abstractmethod
    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        """Write initial values of rows ``ids`` int64 (n,) to ``out`` float32 (n, dim); `key` is the table's seed."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:  # pyright: ignore[reportAttributeAccessIssue]
            check_number(f"`{name}` of {type(self).__name__}", getattr(self, name))

    def check(self, rows: int | None, dim: int) -> None:
        """Raise `ArgumentError` if it cannot serve a table of `rows` rows (None: open ids) of `dim` columns."""
        return None

    @property
    def digest(self) -> str | None:
        """Digest of values that `describe` leaves out; None: it describes them all."""
        return None

    def is_exact_in(self, dtype: str) -> bool:
        """Return whether a table of a dtype has all values as they are, without rounding. False: perhaps not."""
        return False

    def describe(self) -> dict[str, Any]:
        """Return plain data for `read_initializer`."""
        return {"name": type(self).__name__, **asdict(self)}  # pyright: ignore[reportArgumentType]


def check_number(subject: str, value: Any) -> None:
    """Raise `ArgumentError` unless `value` is a finite float32."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or abs(float(value)) > FLOAT32_MAX:
        raise ArgumentError(f"{subject} must be a finite number: got {value!r}.")


@dataclass(frozen=True)
class Constant(Initializer):
    """Initial values that are all the same.

    Args:
        value: the value, a finite number.

    Example:
        >>> Constant(0.5)
        Constant(value=0.5)
    """

    value: float

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        kernels.cpu.launch(kernels.cpu.generator.constant_values, ids, float(self.value), out)


@dataclass(frozen=True)
class Zeros(Constant):
    """Initial values that are all 0.

    Example:
        >>> Zeros()
        Zeros()
    """

    value: float = field(default=0.0, init=False, repr=False)

    def describe(self) -> dict[str, Any]:
        return {"name": "Zeros"}


@dataclass(frozen=True)
class Normal(Initializer):
    """Normally distributed initial values; ``docs/first-values.md`` has the exact definition.

    Args:
        mean: mean of the distribution.
        std: its standard deviation, at least 0.

    Example:
        >>> Normal(std=0.01)
        Normal(mean=0.0, std=0.01)
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std < 0:
            raise ArgumentError(f"`std` of Normal must not be negative: got {self.std!r}.")

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        kernels.cpu.launch(kernels.cpu.generator.normal_values, ids, key, float(self.mean), float(self.std), out)


@dataclass(frozen=True)
class Uniform(Initializer):
    """Initial values uniformly distributed in ``[low, high]``; ``docs/first-values.md`` has the exact definition.

    Args:
        low: the least value.
        high: the largest value.

    Example:
        >>> Uniform(-0.05, 0.05)
        Uniform(low=-0.05, high=0.05)
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ArgumentError(f"`low` of Uniform must not exceed `high`: got {self.low!r} and {self.high!r}.")
        check_number("`high - low` of Uniform", float(self.high) - float(self.low))

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        kernels.cpu.launch(kernels.cpu.generator.uniform_values, ids, key, float(self.low), float(self.high), out)


LEAST_CUT, MOST_CUT = 0.1, 6.0  # beyond this, float32 cannot represent the kept part, or the tails


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Normally distributed initial values, no further from `mean` than `cut` times `std`.

    ``docs/first-values.md`` has the exact definition.

    Args:
        mean: mean of the distribution.
        std: standard deviation of the full distribution: with ``cut=2``, the truncated one has 0.87963 of it.
        cut: largest distance from `mean`, in units of `std`, from 0.1 to 6.

    Example:
        >>> TruncatedNormal(std=0.02)
        TruncatedNormal(mean=0.0, std=0.02, cut=2.0)
    """

    mean: float = 0.0
    std: float = 1.0
    cut: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std < 0:
            raise ArgumentError(f"`std` of TruncatedNormal must not be negative: got {self.std!r}.")
        if not LEAST_CUT <= self.cut <= MOST_CUT:
            raise ArgumentError(
                f"`cut` of TruncatedNormal, in units of `std`, must lie in [{LEAST_CUT}, {MOST_CUT}]: got "
                f"{self.cut!r}. Use Normal for a larger one, and Uniform for a smaller one."
            )

    @property
    def beyond(self) -> float:
        """Probability of each tail, a float32."""
        return float(np.float32(math.erfc(self.cut / math.sqrt(2)) / 2))

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        numbers = float(self.mean), float(self.std), self.beyond
        kernels.cpu.launch(kernels.cpu.generator.truncated_normal_values, ids, key, *numbers, out)


# Most rows of an array in its digest, evenly spread: saving a table does not read a file of terabytes.
DIGEST_BYTES = 64 << 20
DIGEST_ROWS = 1024


class Given(Initializer):
    """Initial values that somebody made, for all rows of a table. A saved table does not have them, but knows them.

    Attributes:
        shape: rows and columns.
        dtype: name of the values' dtype, "bfloat16" too.
        subject: name of the values in error messages.
    """

    shape: tuple[int, int]
    dtype: str
    subject: str

    def check(self, rows: int | None, dim: int) -> None:
        if (rows, dim) != self.shape:
            raise ArgumentError(f"{self.subject} must have the table's shape ({rows}, {dim}): got {self.shape}.")

    def describe(self) -> dict[str, Any]:
        return {"name": type(self).__name__, "dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True, eq=False)
class FromArray(Given):
    """Rows of an array: row ``i`` starts as ``array[i]``. The array is never copied: rows are read from it when needed.

    Args:
        array: 2-D (rows, dim), of floats; a `np.memmap` stays on disk. It must not change while a table uses it.

    Example:
        >>> FromArray(np.ones((3, 2), np.float32))
        FromArray(array=<float32 (3, 2)>)
    """

    array: np.ndarray
    subject = "`array` of FromArray"

    def __post_init__(self) -> None:
        self._check_array("floats", lambda dtype: dtype.kind == "f")

    def _check_array(self, values: str, fits: Callable[[np.dtype], bool]) -> None:
        if not isinstance(self.array, np.ndarray) or self.array.ndim != 2 or not fits(self.array.dtype):
            got = f"{getattr(self.array, 'dtype', type(self.array).__name__)} {getattr(self.array, 'shape', '')}"
            raise ArgumentError(
                f"`array` of {type(self).__name__} must be a 2-D NumPy array of {values}: got {got.strip()}."
            )

    @property
    def shape(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.array.shape

    @property
    def dtype(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return str(self.array.dtype)

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        # In id order, because a file is read fastest in its own order.
        order = np.argsort(ids)
        out[order] = self._floats(self.array[ids[order]])

    def _floats(self, rows: np.ndarray) -> np.ndarray:
        return rows

    @forks.cached_property
    def digest(self) -> str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        spread = np.linspace(0, len(self.array) - 1, DIGEST_ROWS).astype(np.int64)
        content = self.array if self.array.nbytes <= DIGEST_BYTES else self.array[spread]
        return hashlib.blake2b(np.ascontiguousarray(content).tobytes(), digest_size=8).hexdigest()

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "name": "FromArray"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(array=<{self.dtype} {self.shape}>)"


class FromBfloat16(FromArray):
    """Rows of a bfloat16 array: row ``i`` starts as the values with the bits ``array[i]``.

    Saved tables record a `FromArray`.

    Args:
        array: 2-D (rows, dim), of any dtype of two bytes: ``tensor.view(torch.int16).numpy()``, or an array of
            ml_dtypes' bfloat16.

    Example:
        >>> FromBfloat16(np.ones((3, 2), np.uint16))
        FromBfloat16(array=<bfloat16 (3, 2)>)
    """

    def __post_init__(self) -> None:
        self._check_array("2-byte values", lambda dtype: dtype.itemsize == 2)

    def _floats(self, rows: np.ndarray) -> np.ndarray:
        # The bits of a bfloat16 are the upper half of a float32's.
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    @property
    def dtype(self) -> str:
        return "bfloat16"
