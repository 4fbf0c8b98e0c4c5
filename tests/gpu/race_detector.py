"""Finds races of kernels under Triton's interpreter, to the byte: between programs of a launch, and within a program.

Programs of a launch may run in any order and at once, so none may read or write what another one writes, unless it has
waited for that: both add to one place atomically, the one behind a barrier after it wrote, with release, and the other
later, with acquire, and a barrier before it reads. What is only added to atomically may be read at any time. Within a
program, threads that load what others have stored, or store what others load, need a barrier between; what one tile of
addresses loads and stores is each thread's own. Programs are run in random order, but those of kernels `IN_ORDER` in
that of their numbers, as they wait for what earlier ones add.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from triton.runtime import interpreter

IN_ORDER = {"_collect"}


class Access(NamedTuple):
    """What a program did: "reads", "writes" or "adds" (atomically), where, and between which of its barriers."""

    program: int
    barriers: int
    kind: str
    tile: np.ndarray
    touched: np.ndarray  # bytes
    known: dict[int, int]  # programs, and how many of their barriers' parts happened before

    def is_before(self, later: Access) -> bool:
        """Whether this happens before a later access of another program, however programs run."""
        # What a program adds atomically it tells by that. What its other threads did it tells once it waited for them.
        return self.barriers < later.known.get(self.program, -1) + (self.kind == "adds")

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
        launching: the name of the kernel that is launched.
    """

    def __init__(self, seed: int) -> None:
        self.found: set[tuple[str, str]] = set()
        self.launched: set[str] = set()
        self.launching = ""
        self._random = random.Random(seed)
        self._accesses: list[Access] = []
        self._program = self._barriers = 0
        self._order: list[int] = []
        self._known: dict[int, int] = {}  # of this program
        self._heard: dict[int, int] = {}  # by a thread of it, of which the others hear at the next barrier
        self._told: dict[int, dict[int, int]] = {}  # by those who added to a place

    def synchronizes(self, place: int) -> None:
        """Note an atomic operation that releases what was done before the last barrier, and acquires."""
        told = self._told.setdefault(place, {})
        self._heard = _later(self._heard, told)
        self._told[place] = _later(told, {**self._known, self._program: self._barriers})

    def touches(self, kind: str, pointers: Any, mask: Any, itemsize: int) -> None:
        shape = np.broadcast_shapes(pointers.shape, mask.shape)
        tile = np.broadcast_to(pointers, shape).astype(np.int64)
        starts = np.unique(tile[np.broadcast_to(mask, shape).astype(bool)])
        touched = (starts[:, None] + np.arange(itemsize)).reshape(-1)
        if touched.size:
            self._accesses.append(Access(self._program, self._barriers, kind, tile, touched, self._known))

    def barrier(self) -> None:
        self._barriers += 1
        self._known = _later(self._known, self._heard)

    def begin_grid(self, size: int) -> None:
        order = range(size)
        self._order = [*order] if self.launching in IN_ORDER else self._random.sample(order, size)

    def begin_program(self, index: int) -> int:
        self._program, self._barriers, self._known, self._heard = self._order[index], 0, {}, {}
        return self._program

    def end_launch(self, name: str) -> None:
        accesses, self._accesses, self._told = self._accesses, [], {}
        self.launched.add(name)
        self.found |= {(name, what) for what in (*self._between(accesses), *self._within(accesses))}

    @staticmethod
    def _between(accesses: list[Access]) -> set[str]:
        """Return what is wrong with bytes that a program writes and another one uses."""
        at = np.concatenate([np.empty(0, np.int64), *(access.touched for access in accesses)])
        by = np.repeat(np.arange(len(accesses)), [len(access.touched) for access in accesses])
        program = np.array([access.program for access in accesses], np.int64)[by]
        order = np.lexsort((by, at))
        at, by, program = at[order], by[order], program[order]
        starts = np.flatnonzero(np.diff(at, prepend=-1))
        several = np.maximum.reduceat(program, starts) != np.minimum.reduceat(program, starts) if len(at) else starts
        ends = np.append(starts[1:], len(at))
        users = {tuple(by[start:end]) for start, end in zip(starts[several], ends[several], strict=True)}
        pairs = {pair for some in users for pair in itertools.combinations(some, 2)}
        return {*filter(None, (_wrong(accesses[one], accesses[two]) for one, two in pairs))}

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


def _wrong(one: Access, two: Access) -> str | None:
    """Return what is wrong with two programs' accesses to one byte, of which the first ran earlier."""
    kinds = {one.kind, two.kind}
    if one.program == two.program or "writes" not in kinds or one.is_before(two):
        return None
    other = kinds - {"writes"}
    return f"a program {other.pop()} what another one writes" if other else "two programs write the same"


def _later(one: dict[int, int], two: dict[int, int]) -> dict[int, int]:
    return {program: max(one.get(program, 0), two.get(program, 0)) for program in {*one, *two}}


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

    def add(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        detector.touches("adds", pointers.data, mask.data, value.data.dtype.itemsize)
        if sem == interpreter._ir.MEM_SEMANTIC.ACQUIRE_RELEASE and pointers.data.size == 1:
            detector.synchronizes(int(pointers.data.item()))
        return before["create_atomic_rmw"](self, operation, pointers, value, mask, sem, scope)

    def compare(self: Any, pointers: Any, expected: Any, value: Any, sem: Any, scope: Any) -> Any:
        assert sem == interpreter._ir.MEM_SEMANTIC.RELAXED  # it tells nothing and hears nothing
        detector.touches("adds", pointers.data, np.array(True), value.data.dtype.itemsize)
        return before["create_atomic_cas"](self, pointers, expected, value, sem, scope)

    def begin_grid(self: Any, x: int, y: int, z: int) -> None:
        detector.begin_grid(x)
        before["set_grid_dim"](self, x, y, z)

    def begin_program(self: Any, x: int, y: int, z: int) -> None:
        before["set_grid_idx"](self, detector.begin_program(x), y, z)

    replaced = {
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_rmw": add,
        "create_atomic_cas": compare,
        "create_barrier": lambda self: detector.barrier(),
        "set_grid_dim": begin_grid,
        "set_grid_idx": begin_program,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(builder, name, function)
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **options: Any) -> Any:
        detector.launching = self.fn.__name__
        done = launch(self, *args, **options)
        detector.end_launch(self.fn.__name__)
        return done

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    return detector
