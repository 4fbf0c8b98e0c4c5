"""`Rule`: a sparse optimizer, as the state columns it needs and the numbers of one step."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import numpy as np

from embedrock.errors import ArgumentError, UnknownArgumentError, did_you_mean

FLOAT32_MAX = float(np.finfo(np.float32).max)  # kernels have float32 numbers


class StateColumn(NamedTuple):
    """A part of a record's optimizer state.

    Attributes:
        name: what it holds, in the field's terms.
        per_row: one float32 for the row, instead of one for each of its weights.
        first: its value in a row that was never stepped.
    """

    name: str
    per_row: bool = False
    first: float = 0.0


# Of rows that lag behind: the bits of an int32, in the last column.
LAST_STEP = StateColumn("last_step", per_row=True)


class StepHistory(ABC):
    """What a rule must remember of past steps, for rows that lag behind. It belongs to a table.

    Attributes:
        moves_weights: whether weights of rows that a batch did not touch lag behind too, not only their state.
    """

    moves_weights: ClassVar[bool] = True

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps that it remembers: no row can have been stepped later than the last of them."""

    def make_room(self) -> None:  # noqa: B027
        """Make room for the numbers of one more step."""

    @abstractmethod
    def draft(self, rule: Any) -> None:
        """Do all that can fail of `append` for one more step by a rule. Nothing changes."""

    @abstractmethod
    def append(self) -> None:
        """Note the numbers of one more step, by the rule of the last `draft`."""

    @abstractmethod
    def numbers(self) -> Any:
        """Return the kernel's arguments for the step appended last, and for bringing rows up to it."""

    def first_scale(self) -> float:
        """Return what the first values of rows that were never stepped have been multiplied by."""
        return 1.0

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """Return arrays from which `load` restores it."""

    @abstractmethod
    def load(self, state: dict[str, np.ndarray], steps: int) -> None:
        """Replace it by what `state` returned after `steps` steps; raise `ArgumentError` where that does not fit."""


class Rule(ABC):
    """A sparse optimizer. Subclasses are frozen dataclasses: their fields are the hyperparameters.

    A step of a rule touches the rows of its batch only. What that means for the other rows is said in the docstring
    of each rule.
    """

    FIXED: ClassVar[frozenset[str]] = frozenset()  # hyperparameters that decide what a record holds
    ADDED: ClassVar[frozenset[str]] = frozenset()  # those that 0.1 did not have: left out of descriptions while off
    lr: float

    @property
    def brings_lr(self) -> bool:
        """Whether it was given its learning rate. Otherwise a front end may have rows follow another one."""
        return vars(self).get("_brings_lr", False)

    @abstractmethod
    def state(self) -> tuple[StateColumn, ...]:
        """Return the state columns, in the order in which they lie in a record."""

    @abstractmethod
    def numbers(self, step: int) -> Any:
        """Return the kernel's arguments for step number `step` (the first is 1), if there is no history."""

    def history(self) -> StepHistory | None:
        """Return a new, empty history, if rows that were not touched must catch up later."""
        return None

    def dense_numbers(self, step: int) -> tuple[Sequence[float], Sequence[float]]:
        """Return what a `DenseHistory` remembers of step number `step`.

        The kernel's numbers, and the factors by which a row fades that the step does not touch.
        """
        raise TypeError(f"{type(self).__name__} has no dense history")

    def check(self) -> None:
        """Raise `ArgumentError` where hyperparameters cannot work."""
        self.at_least("lr", 0.0)

    def at_least(self, name: str, low: float, below: float = math.inf) -> None:
        """Raise `ArgumentError` unless ``low <= value < below``."""
        self.check_number(name, getattr(self, name), low, below)

    def check_number(self, name: str, value: Any, low: float, below: float = math.inf) -> None:
        """Raise `ArgumentError` unless `value` is a number with ``low <= value < below``."""
        is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        if not is_number or not low <= value < below or value > FLOAT32_MAX:
            raise ArgumentError(
                f"`{name}` of {type(self).__name__} must be a finite number in [{low:g}, {below:g}): got {value!r}."
            )

    def state_width(self, dim: int) -> int:
        """Return the float32 columns of state that a record needs."""
        return sum(1 if column.per_row else dim for column in self.state())

    def first_state(self, dim: int) -> np.ndarray:
        """Return the state of a row that was never stepped: float32 (state_width,)."""
        columns = [np.full(1 if c.per_row else dim, c.first, np.float32) for c in self.state()]
        return np.concatenate([np.empty(0, np.float32), *columns])

    def with_changes(self, changes: dict[str, Any]) -> Rule:
        """Return this rule with other hyperparameters for a step (None: as they are).

        Raises:
            UnknownArgumentError: the rule has no such hyperparameter, or it may not change between steps.
            ArgumentError: a value cannot work.
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
        """Return whether records of `other` can be stepped by this rule as they are."""
        if other is self:
            return True
        return other is not None and type(self) is type(other) and self._fixed == other._fixed

    @functools.cached_property  # a step asks for it of each table
    def _fixed(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in sorted(self.FIXED))


R = TypeVar("R", bound=Rule)


@dataclass_transform(frozen_default=True)
def rule(cls: type[R]) -> type[R]:
    """Make a `Rule` of a class: a frozen dataclass that checks its hyperparameters and names unknown ones."""
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
