"""`generation`: a number that every change raises on which resolved lookups rest."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

_numbers = itertools.count(1)


class Generation:
    """Generation of all layers and handles of the process.

    Attributes:
        now: the number. It differs after each change of a layer's attributes, or of the place of a handle's rows.
        layouts: all `LayerLayout`s.
    """

    now = 0

    def __init__(self) -> None:
        self.layouts = weakref.WeakSet[Any]()

    def advance(self, gone: Any = None) -> None:
        """Begin a generation. Layouts with the handle `gone`, which has another table now, leave the tables at once."""
        self.now = next(_numbers)  # no two threads get one number
        for layout in list(self.layouts) if gone is not None else ():
            layout.leave(gone)


generation = Generation()
