"""`KeptPlans`: which lookups may still get gradients, and the plans that are kept for them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

from embedrock.process import forks

# Of a lookup whose plans are no longer kept when its gradients come, they are made again.
KEPT_BYTES = 1 << 27


class KeptPlans:
    """The plans of each lookup, on lease until its backward pass.

    What tells a backward pass which lookup it belongs to is the number of its lease, which goes through the graph.
    """

    def __init__(self) -> None:
        self._lock = forks.lock(forks.LockRank.SECTION)
        self._numbers = itertools.count(1)
        self._plans: OrderedDict[int, list[Any]] = OrderedDict()
        self._bytes = 0

    def grant(self, plans: list[Any]) -> int:
        """Return the number of a new lease, of the plans of a lookup: of tables, or of tables of a group."""
        with self._lock:
            number = next(self._numbers)
            self._plans[number] = plans
            self._bytes += _size(plans)
            while self._bytes > KEPT_BYTES and len(self._plans) > 1:
                self._bytes -= _size(self._plans.popitem(last=False)[1])
            return number

    def end(self, number: int) -> list[Any] | None:
        """Return the plans of the lookup whose gradients come; None where they are no longer kept, or came before."""
        with self._lock:
            plans = self._plans.pop(number, None)
            self._bytes -= 0 if plans is None else _size(plans)
            return plans


def _size(plans: list[Any]) -> int:
    return sum(plan.nbytes for plan in plans)


LEASES = KeptPlans()
