"""`Pending`: gradients of rows that wait for a step, each behind one number that stands for it outside."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import make_plan
from embedrock.errors import ArgumentError, EmbedrockError
from embedrock.process import forks

# Backward passes of a table that one step may add up, over all replicas, micro-batches and lookups of each.
SLOTS = 256
# Stands for gradients that are all zero: they are stepped too, and 0 would say that there are none.
TINY = 1e-30
# Numbers of one forward pass that something scaled by one factor differ by rounding only.
SAME = 1e-4


class ForgottenGradientsError(EmbedrockError, RuntimeError):
    """Gradients of rows that no optimizer of ours applies, or a handle that something else writes to."""


class Arrival(NamedTuple):
    """What one backward pass brought.

    Attributes:
        replica, forward, lookup: whose it is, the how manieth forward pass of that replica it belongs to, and which
            lookup of the program. In this order gradients are summed, whenever they arrived.
        number: what stands for it.
        grads: of the rows.
    """

    replica: int
    forward: int
    lookup: int
    number: float
    grads: RowGradients


class Pending:
    """Gradients of a table's rows since its last step, and the numbers that stand for them.

    The handle's gradient is a vector of numbers: each backward pass fills one of its `SLOTS`. So whatever adds, scales
    or drops gradients outside does the same to those of the rows, for each pass by itself: replicas and micro-batches
    are summed, clipped and unscaled, and passes that nothing came of (a skipped step) are left out.

    The numbers of the lookups in one forward pass are chosen so that the norm of the vector is the L2 norm of the
    *sum* of their gradients. (Where a later lookup makes that norm smaller, which no number can, it is not: `norm`
    tells.)
    """

    def __init__(self) -> None:
        self._lock = forks.lock(forks.Rank.SECTION)
        self._arrivals: dict[int, Arrival] = {}  # by slot, in order of arrival
        self._next_slot = 0
        self._forwards: dict[int, int] = {}  # by replica
        self._sums: dict[int, RowGradients] = {}  # by replica, of its last forward pass

    def begin_forward(self, replica: int) -> None:
        """Note that a lookup begins. The first one after a backward pass begins a new forward pass."""
        with self._lock:
            if self._sums.pop(replica, None) is not None or replica not in self._forwards:
                self._forwards[replica] = self._forwards.get(replica, 0) + 1

    def add(self, replica: int, lookup: int, grads: RowGradients) -> tuple[int, float]:
        """Add what a backward pass brought; return the slot and the number for the handle's gradient."""
        with self._lock:
            slot = self._next_slot
            if slot in self._arrivals:
                self._arrivals.clear()  # an error for each offence, not for ever
                self._sums.clear()
                raise ForgottenGradientsError(
                    f"{SLOTS} backward passes of a table wait for a step, and none came: gradients that no optimizer "
                    "applies, or more than one step may add up. Freeze the layer if its rows are not trained "
                    "(layer.trainable = False); otherwise use fewer gradient_accumulation_steps, or look several "
                    "inputs up in one call: layer([ids, more_ids])."
                )
            self._next_slot = (slot + 1) % SLOTS
            number = self._number(replica, grads)
            forward = self._forwards.setdefault(replica, 1)
            self._arrivals[slot] = Arrival(replica, forward, lookup, number, grads)
            return slot, number

    def _number(self, replica: int, grads: RowGradients) -> float:
        before = self._sums.get(replica)
        if before is None:
            self._sums[replica], growth = grads, grads.square_norm
        else:
            self._sums[replica] = before.merge(grads)
            growth = self._sums[replica].square_norm - before.square_norm
        return _as_float32(growth)

    def norm(self, vector: np.ndarray) -> float:
        """Return the L2 norm of the sum of all that a handle's gradient stands for."""
        with self._lock:
            found = self._found(vector)
            return _summed(found).norm if found else 0.0

    def take(self, vector: np.ndarray, clip_value: float | None = None) -> RowGradients | None:
        """Return the sum of all that a handle's gradient stands for, scaled as it was; None where it is zero.

        It waits no longer, nor does what is older: nothing came of that.

        Args:
            vector: the handle's gradient.
            clip_value: each value of what a replica brought is clamped to +- this, before replicas are summed.

        Raises:
            ArgumentError: the handle's gradient stands for something that was stepped or dropped before.
        """
        with self._lock:
            found = self._found(vector)
            if not found:
                self._arrivals.clear()
                self._sums.clear()
                return None
            last: dict[int, int] = {}
            for arrival, _ in found:
                last[arrival.replica] = max(arrival.forward, last.get(arrival.replica, 0))
            self._sums.clear()
            self._forwards = {replica: forward + 1 for replica, forward in self._forwards.items()}
            taken = {id(arrival) for arrival, _ in found}
            self._arrivals = {
                slot: each
                for slot, each in self._arrivals.items()
                if id(each) not in taken and each.forward > last.get(each.replica, 0)
            }
            if clip_value is None:
                return _summed(found)
            of_replicas = [[pair for pair in found if pair[0].replica == replica] for replica in last]
            return functools.reduce(RowGradients.merge, [_summed(part).scaled(1.0, clip_value) for part in of_replicas])

    def drop(self) -> None:
        """Forget everything."""
        with self._lock:
            self._arrivals.clear()
            self._sums.clear()

    def _found(self, vector: np.ndarray) -> list[tuple[Arrival, float]]:
        """Return what a vector stands for, in the order in which it is summed, and the factor of each."""
        slots = np.flatnonzero(vector).tolist()
        if missing := [slot for slot in slots if slot not in self._arrivals]:
            raise ArgumentError(
                f"the handle's gradient stands for {len(slots)} backward passes, {len(missing)} of which were stepped "
                "or dropped before. Apply each gradient once, and before those of later batches."
            )
        numbers = {slot: float(vector[slot]) for slot in slots}
        found = [(self._arrivals[slot], numbers[slot]) for slot in slots]
        found.sort(key=lambda pair: (pair[0].forward, pair[0].replica, pair[0].lookup))
        return _with_factors(found)


def _with_factors(found: list[tuple[Arrival, float]]) -> list[tuple[Arrival, float]]:
    """Replace what became of each number by the factor that made it so: one for all of a forward pass."""
    factors = [1.0 if given == each.number else given / each.number for each, given in found]
    groups: dict[tuple[int, int], list[int]] = {}
    for k, (each, _) in enumerate(found):
        groups.setdefault((each.replica, each.forward), []).append(k)
    for group in groups.values():
        few = [factors[k] for k in group]
        if len(few) > 1 and 0 < max(few) - min(few) <= SAME * max(map(abs, few)):
            squares = sum(found[k][1] ** 2 for k in group), sum(found[k][0].number ** 2 for k in group)
            common = math.copysign(math.sqrt(squares[0] / squares[1]), few[0])
            factors = [common if k in group else factor for k, factor in enumerate(factors)]
    return [(each, factor) for (each, _), factor in zip(found, factors, strict=True)]


def _summed(found: list[tuple[Arrival, float]]) -> RowGradients:
    scaled = [arrival.grads.scaled(factor) for arrival, factor in found]
    if len(scaled) == 1:
        return scaled[0]
    plan = make_plan(np.concatenate([grads.plan.ids for grads in scaled]))
    return RowGradients.sum(plan, np.concatenate([grads.values for grads in scaled]))


def _as_float32(square: float) -> float:
    """Return the square root of `square` as a float32 above zero, Inf where there is none."""
    if not math.isfinite(square):
        return math.inf
    with np.errstate(over="ignore"):
        return float(np.float32(max(math.sqrt(max(square, 0.0)), TINY)))
