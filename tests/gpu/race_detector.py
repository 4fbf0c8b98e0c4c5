"""Finds races of kernels under Triton's interpreter, to the byte: between programs of a launch, and within a program.

Programs of a launch may run in any order and at once, so none may read or write what another one writes. Within a
program, threads that load what others have stored, or store what others load, need a barrier between; what one tile of
addresses loads and stores is each thread's own. Programs are run in random order.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from triton.runtime import interpreter


class Access(NamedTuple):
    """What a program did: "reads", "writes" or "adds" (atomically), where, and between which of its barriers."""

    program: int
    barriers: int
    kind: str
    tile: np.ndarray
    touched: np.ndarray  # bytes

    def overlaps(self, other: Access) -> bool:
        one, two = self.touched, other.touched
        if not (one.size and two.size) or one[-1] < two[0] or two[-1] < one[0]:
            return False
        return bool(np.isin(one, two, assume_unique=True).any())


class RaceDetector:
    """Watches the kernels that are launched.

    Attributes:
        found: (kernel, what is wrong), each once.
        launched: names of the kernels that were watched.
    """

    def __init__(self, seed: int) -> None:
        self.found: set[tuple[str, str]] = set()
        self.launched: set[str] = set()
        self._random = random.Random(seed)
        self._accesses: list[Access] = []
        self._program = self._barriers = 0
        self._order: list[int] = []

    def touches(self, kind: str, pointers: Any, mask: Any, itemsize: int) -> None:
        shape = np.broadcast_shapes(pointers.shape, mask.shape)
        tile = np.broadcast_to(pointers, shape).astype(np.int64)
        starts = np.unique(tile[np.broadcast_to(mask, shape).astype(bool)])
        touched = (starts[:, None] + np.arange(itemsize)).reshape(-1)
        if touched.size:
            self._accesses.append(Access(self._program, self._barriers, kind, tile, touched))

    def barrier(self) -> None:
        self._barriers += 1

    def begin_grid(self, size: int) -> None:
        self._order = self._random.sample(range(size), size)

    def begin_program(self, index: int) -> int:
        self._program, self._barriers = self._order[index], 0
        return self._program

    def end_launch(self, name: str) -> None:
        accesses, self._accesses = self._accesses, []
        self.launched.add(name)
        self.found |= {(name, what) for what in (*self._between(accesses), *self._within(accesses))}

    @staticmethod
    def _between(accesses: list[Access]) -> set[str]:
        """Return which bytes that a program writes another one uses."""
        found = set()
        at, by = _bytes_of(accesses, "writes")
        order = np.lexsort((by, at))
        at, by = at[order], by[order]
        if bool(((at[1:] == at[:-1]) & (by[1:] != by[:-1])).any()):
            found.add("two programs write the same")
        for kind in ("reads", "adds"):
            used, user = _bytes_of(accesses, kind)
            index = np.searchsorted(at, used)
            index[index == len(at)] = 0
            if len(at) and bool(((at[index] == used) & (by[index] != user)).any()):
                found.add(f"a program {kind} what another one writes")
        return found

    @staticmethod
    def _within(accesses: list[Access]) -> set[str]:
        found = set()
        ordered = sorted(accesses, key=lambda access: (access.program, access.barriers))
        for _, group in itertools.groupby(ordered, key=lambda access: (access.program, access.barriers)):
            for one, two in itertools.combinations(list(group), 2):
                kinds = {one.kind, two.kind}
                if kinds in ({"reads"}, {"adds"}) or np.array_equal(one.tile, two.tile):
                    continue
                if one.overlaps(two):
                    found.add(f"no barrier between what {one.kind} and what {two.kind}")
        return found


def _bytes_of(accesses: list[Access], kind: str) -> tuple[np.ndarray, np.ndarray]:
    some = [access for access in accesses if access.kind == kind]
    nothing = np.empty(0, np.int64)
    at = np.concatenate([nothing, *(access.touched for access in some)])
    return at, np.concatenate([nothing, *(np.full(len(access.touched), access.program) for access in some)])


def install(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> RaceDetector:
    """Watch all kernels that are launched from now on."""
    detector, builder = RaceDetector(seed), interpreter.InterpreterBuilder
    before = {name: getattr(builder, name) for name in vars(builder)}

    def size_of(handle: Any) -> int:
        return interpreter._get_np_dtype(handle.get_element_ty()).itemsize

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        detector.touches("reads", pointers.data, mask.data, size_of(pointers))
        return before["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        detector.touches("writes", pointers.data, mask.data, value.data.dtype.itemsize)
        return before["create_masked_store"](self, pointers, value, mask, *rest)

    def add(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        detector.touches("adds", pointers.data, mask.data, value.data.dtype.itemsize)
        return before["create_atomic_rmw"](self, operation, pointers, value, mask, *rest)

    def begin_grid(self: Any, x: int, y: int, z: int) -> None:
        detector.begin_grid(x)
        before["set_grid_dim"](self, x, y, z)

    def begin_program(self: Any, x: int, y: int, z: int) -> None:
        before["set_grid_idx"](self, detector.begin_program(x), y, z)

    replaced = {
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_rmw": add,
        "create_barrier": lambda self: detector.barrier(),
        "set_grid_dim": begin_grid,
        "set_grid_idx": begin_program,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(builder, name, function)
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **options: Any) -> Any:
        done = launch(self, *args, **options)
        detector.end_launch(self.fn.__name__)
        return done

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    return detector
