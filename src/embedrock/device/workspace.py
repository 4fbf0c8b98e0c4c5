"""Memory of batches on a device, which batches of the same sizes use one after the other."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from embedrock.kernels.gpu.binding import TensorPart


class ScratchLayout(NamedTuple):
    """Layout of tensors and parts in one allocation of 4-byte elements, each aligned to 16 bytes.

    Attributes:
        size: of all elements.
        cuts: sizes of the splits, including gaps.
        tensors: selects the tensors among the splits.
        parts: begins and shapes of the parts.
    """

    size: int
    cuts: list[int]
    tensors: Callable[[Any], Any]
    parts: list[tuple[int, tuple[int, ...]]]


def carved(device: torch.device, layout: ScratchLayout) -> list[Any]:
    """Return int32 tensors and parts in one new allocation."""
    size, cuts, tensors, parts = layout
    whole = torch.empty(size, dtype=torch.int32, device=device)
    made = tensors(torch.split_with_sizes(whole, cuts))
    return [*made, *[TensorPart(whole, start, shape, torch.int32) for start, shape in parts]]


@functools.lru_cache(maxsize=256)
def layout(sizes: tuple[int, ...], more: tuple[int, ...] = ()) -> ScratchLayout:
    """Return the layout of two or more tensors and of `more` parts, given their numbers of elements."""
    cuts, places = list[int](), list[int]()  # with gaps where needed
    for size in sizes:
        places.append(len(cuts))
        cuts += (size, -size % 4) if size % 4 else (size,)
    starts = [*itertools.accumulate((aligned(size) for size in more), initial=sum(cuts))]
    parts = [(start, (size,)) for start, size in zip(starts, more, strict=False)]
    return ScratchLayout(starts[-1], [*cuts, starts[-1] - sum(cuts)], operator.itemgetter(*places), parts)


def aligned(count: int) -> int:
    """Return a number of 4-byte elements rounded up to a multiple of 16 bytes."""
    return count + -count % 4


class Workspace:
    """Arrays of one batch. Once nothing refers to the workspace, the next batch of its sizes uses them.

    Batches of one layout follow each other in `StreamOrder`. So the device has finished with the arrays by then.

    Attributes:
        arrays: tensors, and parts of tensors.
        free: list that takes the arrays back; None: nobody uses them again.
    """

    __slots__ = ("arrays", "free")

    def __del__(self) -> None:
        if self.free is not None:
            self.free.append(self.arrays)
