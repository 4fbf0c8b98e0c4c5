"""`Rule`: a sparse optimizer, as its state columns and its step constants."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import numpy as np

from embedrock.errors import ArgumentError, UnknownArgumentError, counted, did_you_mean

FLOAT32_MAX = float(np.finfo(np.float32).max)  # kernels take float32 numbers


class StateColumn(NamedTuple):
    """A part of a record's optimizer state.

    Attributes:
        name: the field's term for the content.
        per_row: float32 numbers of the row; 0: one per weight.
        first: value in a row that was never stepped.
    """

    name: str
    per_row: int = 0
    first: float = 0.0


# For stale rows: the bits of an int32, in the last column.
LAST_STEP = StateColumn("last_step", per_row=1)


class StepHistory(ABC):
    """The step constants of all steps of a table, from `Rule.dense_numbers`: for rows that catch up later.

    Subclasses convert them to kernel arguments.

    Args:
        kind: name of the rule.
        kept: numbers of columns and fades that the rule saves, if others with the same kernel save more; None: all.

    Attributes:
        moves_weights: whether untouched rows have stale weights too, not only stale state.
        blank: the columns of a step if they are not saved: constants that have no effect.
        fades: number of factors by which a row fades in a step that does not touch it.
        steps: number of remembered steps: no row has a later last step.
        content: the same object in histories of the same steps.
    """

    moves_weights: ClassVar[bool] = True
    blank: ClassVar[tuple[float, ...]]
    fades: ClassVar[int]
    steps: int
    content: Any

    def __init__(self, kind: type[Rule], kept: tuple[int, int] | None = None) -> None:
        self._kind, self._kept = kind, kept or (len(self.blank), self.fades)
        self._clear()

    def _clear(self) -> None:
        self.steps, self.content = 0, type(self)
        self._table = np.empty((0, len(self.blank)), np.float32)
        self._log_fade = np.zeros((1, self.fades))  # logarithms of the factors' products up to each step

    def make_room(self) -> None:
        """Reserve memory for one more step."""
        if self.steps == len(self._table):
            # New arrays, so that constants that callers hold stay valid.
            room = max(1024, self.steps)
            table = np.concatenate([self._table, np.zeros((room, len(self.blank)), np.float32)])
            log_fade = np.concatenate([self._log_fade, np.zeros((room, self.fades))])
            self._table, self._log_fade = table, log_fade

    def draft(self, rule: Rule) -> Any:
        """Do all of `append` that can fail, for one more step by a rule. Nothing changes. Return the `content` then."""
        self.make_room()
        step = self.steps
        self._table[step], log_fade = self._numbers_of(rule)
        self._log_fade[step + 1] = self._log_fade[step] + log_fade
        self._drafted = rule.last_numbers[3].setdefault(self.content, object())
        return self._drafted

    def append(self) -> None:
        """Record one more step, by the rule of the last `draft`."""
        self._bound(self._table[self.steps : self.steps + 1])
        self.content, self.steps = self._drafted, self.steps + 1

    @abstractmethod
    def numbers(self) -> Any:
        """Return the kernel's arguments for the last step, and for rows that catch up with it."""

    def _numbers_of(self, rule: Rule) -> tuple[Sequence[float], np.ndarray]:
        """Return the constants of the next step, and the logarithms of its factors."""
        step, known = self.steps + 1, rule.last_numbers
        if known is None or known[0] != step:
            numbers, factors = rule.dense_numbers(step)
            known = step, numbers, np.array([_log(factor) for factor in factors]), {}
            vars(rule)["last_numbers"] = known  # for other tables
        return known[1:3]

    def first_scale(self) -> float:
        """Return the product of the factors that scaled initial values of rows that were never stepped."""
        return 1.0

    def state(self) -> dict[str, np.ndarray]:
        """Return arrays for `load`."""
        columns, fades = self._kept
        return {"table": self._table[: self.steps, :columns], "log_fade": self._log_fade[: self.steps + 1, :fades]}

    def load(self, state: dict[str, np.ndarray], steps: int) -> None:
        """Restore a `state` of `steps` steps; raise `ArgumentError` if it does not fit."""
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
        self.steps, self.content = steps, object()
        self._table = np.tile(np.array(self.blank, np.float32), (steps, 1))
        self._table[:, :columns] = state["table"]
        self._log_fade = np.zeros((steps + 1, self.fades))
        self._log_fade[:, :fades] = state["log_fade"]
        self._bound(self._table)

    def _bound(self, rows: np.ndarray) -> None:  # noqa: B027
        """Update bounds over all steps by the constants of further steps."""


def _log(factor: float) -> float:
    return math.log(factor) if factor > 0 else -1e4  # exp(-1e4) is zero; -inf would turn differences into NaN


class Rule(ABC):
    """A sparse optimizer. Subclasses are frozen dataclasses: their fields are the hyperparameters.

    A step of a rule touches the rows of its batch only. The docstring of each rule says how the other rows change.
    """

    FIXED: ClassVar[frozenset[str]] = frozenset()  # hyperparameters that determine the content of a record
    BELOW: ClassVar[tuple[tuple[str, float], ...]] = ()  # numbers from 0, and what each must be less than
    ADDED: ClassVar[frozenset[str]] = frozenset()  # absent in release 0.1: left out of descriptions while off
    HISTORY: ClassVar[type[StepHistory] | None] = None  # with the argument `dense`, if the rule has it
    MOVES_ALL: ClassVar[bool] = False  # with `dense`, also rows that were never stepped
    COLUMNS: ClassVar[tuple[StateColumn, ...]] = ()  # of the state, before the last step of `dense`
    FADE: ClassVar[str]  # hyperparameter by which untouched rows fade then
    # A step, its constants and log fades, and `StepHistory.content` after it by before.
    last_numbers: ClassVar[Any] = None
    lr: float

    @property
    def brings_lr(self) -> bool:
        """True if the rule has its own learning rate. Otherwise a front end may use another one."""
        return vars(self).get("_brings_lr", False)

    def state(self) -> tuple[StateColumn, ...]:
        """Return the state columns in record order."""
        return (*self.COLUMNS, LAST_STEP) if getattr(self, "dense", False) else self.COLUMNS

    @abstractmethod
    def numbers(self, step: int) -> Any:
        """Return the kernel's arguments for step number `step` (the first is 1), for a rule without history."""

    def history(self) -> StepHistory | None:
        """Return a new, empty history if untouched rows must catch up later; else None."""
        kind = self.HISTORY if getattr(self, "dense", False) else None
        return None if kind is None else kind(type(self))

    def dense_numbers(self, step: int) -> tuple[Sequence[float], Sequence[float]]:
        """Return the constants of step number `step` for a `StepHistory`.

        These are the kernel's constants, and the factors by which untouched rows fade in the step.
        """
        return self.numbers(step), (float(getattr(self, self.FADE)),)

    def check(self) -> None:
        for name, below in (("lr", math.inf), *self.BELOW):
            self.check_number(name, getattr(self, name), below)

    def check_dim(self, dim: int, subject: str = "a table") -> None:  # noqa: B027
        """Raise `ArgumentError` if the rule cannot step rows of `dim` weights."""

    def check_number(self, name: str, value: Any, below: float) -> None:
        """Raise `ArgumentError` unless `value` is a number with ``0 <= value < below``."""
        is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        if not is_number or not 0 <= value < below or value > FLOAT32_MAX:
            raise ArgumentError(
                f"`{name}` of {type(self).__name__} must be a finite number in [0, {below:g}): got {value!r}."
            )

    def state_width(self, dim: int) -> int:
        """Return the float32 columns of state that a record needs."""
        return sum(column.per_row or dim for column in self.state())

    def first_state(self, dim: int) -> np.ndarray:
        """Return the state of a row that was never stepped: float32 (state_width,)."""
        columns = [np.full(c.per_row or dim, c.first, np.float32) for c in self.state()]
        return np.concatenate([np.empty(0, np.float32), *columns])

    def with_changes(self, changes: dict[str, Any]) -> Rule:
        """Return this rule with other hyperparameters for a step (None: unchanged).

        Raises:
            UnknownArgumentError: the rule has no such hyperparameter, or it may not change between steps.
            ArgumentError: a value is invalid.
        """
        changes = {name: value for name, value in changes.items() if value is not None}
        known = {field.name for field in dataclasses.fields(self)} - self.FIXED  # pyright: ignore[reportArgumentType]
        for name in changes:
            if name not in known:
                raise UnknownArgumentError(
                    f"{type(self).__name__} has no hyperparameter {name!r} that a step may change: "
                    f"it has {', '.join(sorted(known))}.{did_you_mean(name, known)}"
                )
        return dataclasses.replace(self, **changes) if changes else self  # pyright: ignore[reportArgumentType]

    def same_layout(self, other: Rule | None) -> bool:
        """Return whether this rule can step records of `other` without conversion."""
        if other is self:
            return True
        return other is not None and type(self) is type(other) and self._fixed == other._fixed

    @functools.cached_property  # each step calls it for each table
    def _fixed(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in sorted(self.FIXED))


R = TypeVar("R", bound=Rule)


@dataclass_transform(frozen_default=True)
def rule(cls: type[R]) -> type[R]:
    """Make a class a `Rule`: a frozen dataclass that checks its hyperparameters and names unknown ones."""
    made = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(made)]  # pyright: ignore[reportArgumentType]
    made.__init__ = _checked(made.__init__, names)
    return made


def _checked(init: Callable[..., None], names: list[str]) -> Callable[..., None]:
    def __init__(self: Rule, *args: Any, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if name not in names]
        if unknown or len(args) > len(names):
            got = f"{unknown[0]!r}.{did_you_mean(unknown[0], names)}" if unknown else f"{len(args)} values."
            raise UnknownArgumentError(f"{type(self).__name__} takes {', '.join(names)}: got {got}")
        init(self, *args, **kwargs)
        given = {*names[: len(args)], *kwargs}
        object.__setattr__(self, "_brings_lr", "lr" in given)
        self.check()

    __init__.__wrapped__ = init  # type: ignore[attr-defined]  # keeps the signature for help() and inspect
    return __init__
