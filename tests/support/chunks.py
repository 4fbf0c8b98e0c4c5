"""Chunks of a base without files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embedrock.store.base import Base
from embedrock.store.segments import Segment


@dataclass(eq=False)
class Chunk:
    """What a base asks of a run: see `Run`."""

    lo: int
    hi: int
    kind: str
    number: int
    count: int
    ids: np.ndarray | None
    folded_below: int = 0
    known_index: np.ndarray | None = None

    locations = Segment.locations

    def index(self) -> np.ndarray | None:
        return self.ids


def base_of(chunks: list[Any]) -> Base:
    return Base(chunks)
