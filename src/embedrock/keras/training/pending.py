"""`Pending`: gradients of rows between a backward pass and what becomes of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import Plan
from embedrock.errors import ArgumentError, EmbedrockError
from embedrock.process import forks

# Numbers in a token, and in the variable that stands for rows; files of models hold what optimizers keep of it.
SLOTS = 256
# Of each number: float32 adds up different powers of two below 2^24 without rounding. Every other power is used, so
# that a token that was doubled or halved on its way is none.
BITS = 12
USED = 0x555555
# Backward passes of a table that may wait, over all replicas, lookups, and times that a loop runs a lookup.
PASSES = SLOTS * BITS
# Passes whose gradients a program has read, and may read again elsewhere in it; steps for which others are kept.
KEPT = 8


class ForgottenGradientsError(EmbedrockError, RuntimeError):
    """Gradients of rows that no optimizer of ours applies, or a variable for rows that something else writes to."""


class Arrival(NamedTuple):
    """What one backward pass brought.

    Attributes:
        replica, lookup: whose it is, and of which lookup of the program. In this order gradients are summed.
        step: after how many steps of the table it came.
        grads: of the rows.
    """

    replica: int
    lookup: int
    step: int
    grads: RowGradients


class Pending:
    """Gradients of a table's rows that are on the host, and the tokens that stand for them in programs.

    Between lookups and the variable that stands for rows, TensorFlow does nothing with gradients but add them up:
    those of several lookups, of all rounds of a loop. So each backward pass gets a token, a vector with one bit set,
    and a sum of tokens tells which passes it is of. Users never see one: what a tape returns are `RowSlices`.

    Attributes:
        outlives_steps: some program looks at gradients after it has applied them.
    """

    def __init__(self) -> None:
        self.outlives_steps = False
        self._lock = forks.lock(forks.Rank.SECTION)
        self._arrivals: dict[int, Arrival] = {}  # by number, in order of arrival
        self._next = 0
        self._read: deque[tuple[int, Arrival]] = deque()  # what programs have read, in that order
        self._plans: deque[Plan] = deque(maxlen=KEPT)  # of that, until the next step
        self._taken: dict[int, Arrival] = {}  # by the step that is being made
        self._steps = 0

    def add(self, replica: int, lookup: int, grads: RowGradients) -> np.ndarray:
        """Take what a backward pass brought; return its token, float32 (SLOTS,)."""
        with self._lock:
            number = self._next
            if number in self._arrivals:
                self._clear()  # an error for each offence, not for ever
                raise ForgottenGradientsError(
                    f"{PASSES} backward passes of a table wait for a step in a tf.function, and none came: a loop that "
                    "looks rows up so often, or whose gradients no optimizer applies. Look several inputs up in one "
                    "call, layer([ids, more_ids]). Freeze the layer if its rows are not trained (layer.trainable = "
                    "False)."
                )
            self._next = (number + 1) % PASSES
            self._arrivals[number] = Arrival(replica, lookup, self._steps, grads)
        token = np.zeros(SLOTS, np.float32)
        token[number // BITS] = 1 << 2 * (number % BITS)
        return token

    def take(self, token: np.ndarray) -> RowGradients | None:
        """Return, for a step, the sum of the gradients that a sum of tokens stands for; None where it is zero."""
        with self._lock:
            found = self._found(token)
            self._taken.update(found)
        return _summed(found.values())

    def read(self, token: np.ndarray, is_last: bool) -> RowGradients | None:
        """Return the same to somebody who may read it again, or for the last time."""
        with self._lock:
            found = self._found(token)
            if is_last:
                self._forget(found.items())
            else:
                self._read.extend(found.items())
                over = len(self._read) - max(KEPT, len(found))
                self._forget([self._read.popleft() for _ in range(over)])
        summed = _summed(found.values())
        if summed is not None:
            self._plans.append(summed.plan)
        return summed

    def plan_of(self, ids: np.ndarray) -> Plan | None:
        """Return the plan of gradients that were read since the last step, by their rows' ids; None if none were."""
        return next((plan for plan in list(self._plans) if np.array_equal(plan.ids, ids)), None)

    def end_step(self) -> None:
        """Forget what was stepped, and what has waited for long: nothing came of that."""
        with self._lock:
            self._steps += 1
            self._forget(() if self.outlives_steps else self._taken.items())
            self._forget([pair for pair in self._arrivals.items() if pair[1].step <= self._steps - KEPT])
            self._taken = {}
            self._plans.clear()

    def _found(self, token: np.ndarray) -> dict[int, Arrival]:
        numbers = _numbers(token)
        if missing := [number for number in numbers if number not in self._arrivals]:
            raise ArgumentError(
                f"a gradient of rows is the sum of {len(numbers)} backward passes, {len(missing)} of which are gone. "
                f"Inside of a tf.function, use gradients before {KEPT} more steps of their table."
            )
        return {number: self._arrivals[number] for number in numbers}

    def _forget(self, pairs: Iterable[tuple[int, Arrival]]) -> None:
        """Forget arrivals, where their numbers are still theirs."""
        for number, arrival in pairs:
            if self._arrivals.get(number) is arrival:
                del self._arrivals[number]

    def drop(self) -> None:
        """Forget everything."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._arrivals.clear()
        self._taken.clear()
        self._read.clear()
        self._plans.clear()


def _summed(found: Iterable[Arrival]) -> RowGradients | None:
    ordered = sorted(found, key=lambda each: (each.replica, each.lookup))
    return RowGradients.sum_of([each.grads for each in ordered]) if ordered else None


def _numbers(token: np.ndarray) -> list[int]:
    """Return the numbers of the passes that a sum of tokens is of."""
    slots = np.flatnonzero(token)
    whole = token[slots].astype(np.int64)
    if (whole != token[slots]).any() or (whole & ~USED).any():
        raise ArgumentError(
            "a gradient of rows was changed before its tape returned it, by a gradient function of your own. Change "
            "the gradients of what the layer returns, or those that the tape returns."
        )
    pairs = zip(slots.tolist(), whole.tolist(), strict=True)
    return [slot * BITS + bit for slot, bits in pairs for bit in range(BITS) if bits >> 2 * bit & 1]
