"""`PendingGradients`: gradients of rows between a backward pass and a step."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from embedrock.errors import ArgumentError, ForgottenGradientsError
from embedrock.system import forks
from embedrock.table.event_time import newer

# Numbers in a token, and in the proxy variable. Files of models hold an optimizer's variables of this size.
SLOTS = 256
# Bits of each number: float32 adds different powers of two below 2^24 without rounding. Every other power is used,
# so that a doubled or halved token is invalid.
BITS = 12
USED = 0x555555
# The last slots count: each stands for many passes of one place, once no single bit is left.
COUNTING = 16
SINGLES = (SLOTS - COUNTING) * BITS
MANY = 1 << 16
# Kept passes that a program has read, and may read again elsewhere in it; kept steps of the other passes.
KEPT = 8


class BackwardResult(NamedTuple):
    """The gradients of one backward pass. They are summed in the order of the first three fields."""

    replica: int
    lookup: int  # of the program
    order: int  # count of the table's passes
    step: int  # number of steps of the table before it
    grads: Any  # of the rows, as the table's executor sums them
    time: float | None  # of the newest event, in seconds since 1970; None: it is not known


class PendingGradients:
    """Gradients of a table's rows that wait on the rows' executor, and the tokens for them in programs.

    Between lookups and the proxy variable, TensorFlow only adds gradients up: over lookups, and over iterations of a
    loop. So each backward pass gets a token, a vector with one bit set. A sum of tokens identifies its passes. If bits
    run out in a long loop, the next passes share a number. A sum must contain all of them. Users never see a token: a
    tape returns `RowSlices`.

    Args:
        sum_of: adds gradients up, see `ProgramExecutor.sum_of`.

    Attributes:
        outlives_steps: some program reads gradients after it has applied them.
        time: of the newest event of what was taken or read since the last step; None: it is not known.
    """

    time: float | None = None

    def __init__(self, sum_of: Callable[[Sequence[Any]], Any]) -> None:
        self.outlives_steps, self._sum_of = False, sum_of
        self._lock = forks.lock(forks.LockRank.SECTION)
        self._arrivals: dict[int, list[BackwardResult]] = {}  # by number, in order of arrival
        self._next = self._order = self._steps = 0
        self._shared: dict[tuple[int, int], int] = {}  # by place, the number that its passes share until it is read
        self._read: deque[tuple[int, list[BackwardResult]]] = deque()  # read by programs, in that order
        self._plans: deque[Any] = deque(maxlen=KEPT)  # plans of these, until the next step
        self._taken: dict[int, list[BackwardResult]] = {}  # of the current step

    def add(self, place: tuple[int, int], lookup: int, grads: Any, time: float | None = None) -> np.ndarray:
        """Store the gradients of a backward pass; return its token, float32 (SLOTS,).

        Args:
            place: the part of a program around the pass, and the replica. Passes of one place may share a number.
            lookup: number of the lookup in the program.
            grads: gradients of the rows.
            time: of their newest event.
        """
        with self._lock:
            number, self._order = self._number(place), self._order + 1
            self._arrivals[number].append(BackwardResult(place[1], lookup, self._order, self._steps, grads, time))
        return np.frombuffer(_token(number), np.float32).copy()

    def _number(self, place: tuple[int, int]) -> int:
        """Return the number of a place's next pass: one of its own, or a negative one that passes share."""
        if (number := self._next) not in self._arrivals:
            self._next, self._arrivals[number] = (number + 1) % SINGLES, []
            return number
        free = (number for number in range(-COUNTING, 0) if number not in self._arrivals)
        number = self._shared.setdefault(place, next(free, 0))
        if number == 0 or len(self._arrivals.setdefault(number, [])) == MANY:
            self._clear()  # an error for each offence, not for ever
            raise ForgottenGradientsError(
                f"more than {MANY} backward passes of a table wait, and no step or program has asked for their "
                "gradients: a loop that looks rows up so often for one gradient, or whose gradients nobody uses. Look "
                "several inputs up in one call, layer([ids, more_ids]). Freeze the layer if its rows are not trained "
                "(layer.trainable = False)."
            )
        return number

    def take(self, token: np.ndarray) -> Any:
        """Return, for a step, the sum of the gradients behind a sum of tokens; None if it is zero."""
        with self._lock:
            found = self._found(token)
            self._taken |= found
        return self._summed(found)

    def read(self, token: np.ndarray, is_last: bool) -> Any:
        """Return the sum of the gradients behind a sum of tokens, for a program that may read it again.

        `is_last` means that it will not: the gradients are dropped.
        """
        with self._lock:
            found = self._found(token)
            if is_last:
                self._forget(found)
            else:
                self._read.extend(found.items())
                over = len(self._read) - max(KEPT, len(found))
                self._forget(dict([self._read.popleft() for _ in range(over)]))
        summed = self._summed(found)
        if summed is not None:
            self._plans.append(summed.plan)
        return summed

    @property
    def plans(self) -> list[Any]:
        """The plans of the latest gradients that were read since the last step."""
        return list(self._plans)

    def _summed(self, found: Mapping[int, list[BackwardResult]]) -> Any:
        arrivals = [arrival for passes in found.values() for arrival in passes]
        for arrival in arrivals:
            self.time = newer(self.time, arrival.time)
        if len(arrivals) < 2:
            return arrivals[0].grads if arrivals else None
        return self._sum_of([each.grads for each in sorted(arrivals, key=lambda each: each[:3])])

    def end_step(self, time: float | None = None) -> None:
        """Drop the gradients of the step, and unused old ones. `time` is of sums that wait elsewhere."""
        with self._lock:
            self._steps, self.time = self._steps + 1, time
            if not self.outlives_steps:
                self._forget(self._taken)
            if self._arrivals:
                old = self._steps - KEPT
                self._forget({n: passes for n, passes in self._arrivals.items() if passes[-1].step <= old})
            self._taken = {}
            self._plans.clear()

    def _found(self, token: np.ndarray) -> dict[int, list[BackwardResult]]:
        sent, found, missing, is_partial = token.tobytes(), dict[int, list[BackwardResult]](), 0, False
        counts = _of_one_pass.get(sent) or _counts(sent)
        for number, count in counts.items():
            found[number] = passes = self._arrivals.get(number, [])
            missing += not passes
            is_partial |= len(passes) != count
        if missing:
            raise ArgumentError(
                f"a gradient of rows is the sum of {len(counts)} backward passes, {missing} of which are gone. Inside "
                f"of a tf.function, use gradients before {KEPT} more steps of their table."
            )
        if is_partial:
            raise ArgumentError(
                f"a gradient of rows is the sum of some of more than {SINGLES} backward passes of its table that wait: "
                "which ones cannot be told then. Apply the gradients of one long loop before the next one is run, or "
                "look several inputs up in one call, layer([ids, more_ids])."
            )
        if self._shared:
            self._shared = {place: number for place, number in self._shared.items() if number not in found}
        return found

    def _forget(self, found: Mapping[int, list[BackwardResult]]) -> None:
        """Drop arrivals whose numbers are not reused yet."""
        for number, arrivals in found.items():
            if self._arrivals.get(number) is arrivals:
                del self._arrivals[number]
        if self._shared:
            self._shared = {place: number for place, number in self._shared.items() if number in self._arrivals}

    def drop(self) -> None:
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._arrivals.clear()
        self._shared.clear()
        self._taken.clear()
        self._read.clear()
        self._plans.clear()


_of_one_pass: dict[bytes, dict[int, int]] = {}  # the result of `_counts` for the token of each pass


@functools.cache
def _token(number: int) -> bytes:
    """Return the token of a pass, float32 (SLOTS,)."""
    token = np.zeros(SLOTS, np.float32)
    if number < 0:
        token[number] = 1
    else:
        token[number // BITS] = 1 << 2 * (number % BITS)
    _of_one_pass[token.tobytes()] = {number: 1}
    return token.tobytes()


def _counts(token: bytes) -> dict[int, int]:
    """Return the number of passes by number in a sum of tokens, float32 (SLOTS,)."""
    numbers = np.frombuffer(token, np.float32)
    slots, counts = numbers.nonzero()[0], dict[int, int]()
    for slot, value in zip(slots.tolist(), numbers[slots].tolist(), strict=True):
        is_shared = slot >= SLOTS - COUNTING
        if value % 1 or (int(value) & ~USED and not is_shared):  # also NaN and Inf
            raise ArgumentError(
                "a gradient of rows was changed before its tape returned it, by a gradient function of your own. "
                "Change the gradients of what the layer returns, or those that the tape returns."
            )
        if is_shared:
            counts[slot - SLOTS] = int(value)
        else:
            counts |= {slot * BITS + bit: 1 for bit in range(BITS) if int(value) >> 2 * bit & 1}
    return counts
