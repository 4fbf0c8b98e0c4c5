"""`generation`: a number that every change raises on which resolved lookups rest."""

from __future__ import annotations

import itertools

_numbers = itertools.count(1)


class Generation:
    """Generation of all layers and handles of the process.

    Attributes:
        now: the number. It differs after each change of a layer's attributes, or of the place of a handle's rows.
    """

    now = 0

    def advance(self) -> None:
        self.now = next(_numbers)  # no two threads get one number


generation = Generation()
