"""`TableBase`: what a table says of itself at once. `exclusive`, `whole`: how its verbs wait for their turn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from embedrock.process.interrupts import held_back
from embedrock.rules import Rule
from embedrock.spec import Spec
from embedrock.table.location import ChangeCounter
from embedrock.table.rows import TableState
from embedrock.table.rule_changes import first_scale
from embedrock.table.stored import StoredVerbs
from embedrock.tiers.placing import memory_for
from embedrock.tiers.side import StaleExecutor

F = TypeVar("F", bound="TableBase")
P = ParamSpec("P")
T = TypeVar("T")


class TableBase(StoredVerbs):
    """What is known of a table, whoever has its turn.

    Attributes:
        device_memory: the most GPU memory that its rows may take, in bytes or as "25%"; None for half of what is free.
        name: for error messages, and for pickling by reference.
    """

    device_memory: int | str | None
    name: str | None
    group: Any  # the `Group` that it is a member of; None for a table alone
    _rows: TableState
    _placing: dict[str, Any]  # of its options, those that a table in RAM and one on disk have

    @property
    def spec(self) -> Spec:
        """The table's frozen description."""
        return self._rows.spec

    @property
    def rows(self) -> int | None:
        """Number of rows, or None for open ids."""
        return self.spec.rows

    @property
    def dim(self) -> int:
        """Weights in a row."""
        return self.spec.dim

    @property
    def rule(self) -> Rule | None:
        """The sparse optimizer of `update`."""
        return self.spec.rule

    @property
    def options(self) -> dict[str, Any]:
        """What of the table's arguments is no part of `spec`: with the spec's, they make another table like it."""
        made_with = {**self._placing, "on_nonfinite": self.on_nonfinite, "name": self.name}
        made_with["device_memory"] = self.device_memory
        if self.storage is None:
            return made_with
        opening = self.storage.opening
        names = "path", "policy", "keep", "commit_every"
        return made_with | {name: getattr(opening, name) for name in names}

    @property
    def subject(self) -> str:
        """What error messages call it."""
        return self._rows.subject

    @property
    def on_nonfinite(self) -> str:
        """What a step with NaN or Inf in its gradients does."""
        return self._rows.on_nonfinite

    @property
    def steps(self) -> int:
        """Steps applied so far."""
        return self._rows.steps

    @property
    def first_scale(self) -> float:
        """What first values have been multiplied by in rows without records: 1, but under dense AdamW and Ftrl."""
        return first_scale(self._rows)

    @property
    def executor(self) -> StaleExecutor | None:
        """The rows in another memory, a GPU's."""
        return self._rows.executor

    def _check_usable(self) -> None:
        self._checked_rows().check_open()

    def _versions(self) -> tuple[ChangeCounter]:
        return (self._rows.version,)

    def _checked_rows(self) -> TableState:
        """Return the rows, once the side has raised what went wrong in earlier calls."""
        self._rows.check()
        return self._rows

    # ---------------------------------------------------------------- tables on disk

    @property
    def is_open_here(self) -> bool:
        """Whether it is open, and by this process, not by one whose child this is."""
        return not self._rows.is_closed and self._rows.is_of_this_process

    def memory_for(self, rows: int) -> int:
        """Return a `memory` in bytes with which a table on disk holds so many rows of this kind in its cache."""
        return memory_for(self.spec, rows)


def exclusive(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Run a method alone: a table serves one call at a time, so that no reader sees half a step."""

    @functools.wraps(method)
    def locked(self: F, *args: P.args, **kwargs: P.kwargs) -> T:
        table_lock = self._rows.table_lock  # as `TableLock.alone`, without a generator
        table_lock.queue()
        with table_lock.lock:
            if table_lock.running is not None:
                table_lock.wait_for_step()
            return method(self, *args, **kwargs)

    return locked


def whole(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Run a method that changes the table alone and to its end: Ctrl-C waits."""
    alone = exclusive(method)

    @functools.wraps(method)
    def uninterrupted(self: F, *args: P.args, **kwargs: P.kwargs) -> T:
        with held_back():
            return alone(self, *args, **kwargs)

    return uninterrupted
