"""`DenseHistory`: step constants of all steps, for rows that catch up with a dense optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from embedrock.errors import ArgumentError, counted
from embedrock.optimizers._rule import Rule, StepHistory


class DenseHistory(StepHistory):
    """The step constants of all steps of a table, from `Rule.dense_numbers`.

    Subclasses convert them to kernel arguments.

    Args:
        kind: name of the rule.
        kept: numbers of columns and fades that the rule saves, if others with the same kernel save more; None: all.

    Attributes:
        blank: the columns of a step if they are not saved: constants that have no effect.
        fades: number of factors by which a row fades in a step that does not touch it.
    """

    blank: ClassVar[tuple[float, ...]]
    fades: ClassVar[int]

    def __init__(self, kind: type[Rule], kept: tuple[int, int] | None = None) -> None:
        self._kind, self._kept = kind, kept or (len(self.blank), self.fades)
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._table = np.empty((0, len(self.blank)), np.float32)
        self._log_fade = np.zeros((1, self.fades))  # logarithms of the factors' products up to each step

    @property
    def steps(self) -> int:
        return self._steps

    def make_room(self) -> None:
        if self._steps == len(self._table):
            # New arrays, so that constants that callers hold stay valid.
            room = max(1024, self._steps)
            table = np.concatenate([self._table, np.zeros((room, len(self.blank)), np.float32)])
            log_fade = np.concatenate([self._log_fade, np.zeros((room, self.fades))])
            self._table, self._log_fade = table, log_fade

    def draft(self, rule: Rule) -> None:
        self.make_room()
        step = self._steps
        self._table[step], factors = self._numbers_of(rule)
        self._log_fade[step + 1] = self._log_fade[step] + [_log(factor) for factor in factors]

    def append(self) -> None:
        self._bound(self._table[self._steps : self._steps + 1])
        self._steps += 1

    def _numbers_of(self, rule: Rule) -> tuple[Sequence[float], Sequence[float]]:
        """Return the constants of the next step: see `Rule.dense_numbers`."""
        return rule.dense_numbers(self._steps + 1)

    def state(self) -> dict[str, np.ndarray]:
        columns, fades = self._kept
        return {"table": self._table[: self._steps, :columns], "log_fade": self._log_fade[: self._steps + 1, :fades]}

    def load(self, state: dict[str, np.ndarray], steps: int) -> None:
        columns, fades = self._kept
        shapes = {"table": (steps, columns), "log_fade": (steps + 1, fades)}
        state = {name: np.empty(shape) for name, shape in shapes.items() if 0 in shape} | state  # files omit empty ones
        for name, shape in shapes.items():
            if name not in state or np.shape(state[name]) != shape or np.asarray(state[name]).dtype.kind != "f":
                got = f"{np.asarray(state[name]).dtype} {np.shape(state[name])}" if name in state else "none"
                raise ArgumentError(
                    f"`history_{name}` of a state of {self._kind.__name__}(dense=True) must have shape {shape} of "
                    f"floats after {counted(steps, 'step')}: got {got}."
                )
        self._clear()
        self._steps = steps
        self._table = np.tile(np.array(self.blank, np.float32), (steps, 1))
        self._table[:, :columns] = state["table"]
        self._log_fade = np.zeros((steps + 1, self.fades))
        self._log_fade[:, :fades] = state["log_fade"]
        self._bound(self._table)

    def _bound(self, rows: np.ndarray) -> None:
        """Update bounds over all steps by the constants of further steps."""


def _log(factor: float) -> float:
    return math.log(factor) if factor > 0 else -1e4  # exp(-1e4) is zero; -inf would turn differences into NaN
