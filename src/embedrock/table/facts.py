"""`Facts`: what a table says of itself at once. `exclusive`, `whole`: how its verbs wait for their turn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from embedrock.errors import UnsupportedError
from embedrock.process.interrupts import held_back
from embedrock.rules import Rule
from embedrock.spec import Spec
from embedrock.table.keeper import Keeper
from embedrock.table.rows import Rows
from embedrock.table.rule_changes import first_scale
from embedrock.tiers.placing import memory_for
from embedrock.tiers.side import Side

F = TypeVar("F", bound="Facts")
P = ParamSpec("P")
T = TypeVar("T")


class Facts:
    """What is known of a table, whoever has its turn.

    Attributes:
        device_memory: the most GPU memory that its rows may take, in bytes or as "25%"; None for half of what is free.
        name: for error messages, and for pickling by reference.
    """

    device_memory: int | str | None
    name: str | None
    _rows: Rows
    _files: Keeper | None
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
        if self._files is None:
            return made_with
        opening = self._files.opening
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
    def side(self) -> Side | None:
        """The rows in another memory, a GPU's."""
        return self._rows.side

    @property
    def group(self) -> Any:
        """The `Group` that it is a member of; None for a table alone."""
        return self._rows.home.group

    def _checked_rows(self) -> Rows:
        """Return the rows, once the side has raised what went wrong in earlier calls."""
        self._rows.check()
        return self._rows

    # ---------------------------------------------------------------- tables on disk

    def _on_disk(self) -> Keeper:
        if self._files is None:
            raise UnsupportedError(
                f"{self.subject} lives in RAM and has no commits. Make it with path=..., or save what state() returns."
            )
        return self._files

    @property
    def path(self) -> str | None:
        """The folder of a table on disk, absolute; None for a table in RAM."""
        return None if self._files is None else self._files.opening.path

    @property
    def is_on_disk(self) -> bool:
        """Whether its rows live on disk."""
        return self._files is not None

    @property
    def is_open_here(self) -> bool:
        """Whether it is open, and by this process, not by one whose child this is."""
        return not self._rows.is_closed and self._rows.is_of_this_process

    @property
    def mode(self) -> str:
        """ "w", or "r" for a snapshot."""
        return "w" if self._files is None else self._files.opening.mode

    @property
    def uuid(self) -> str:
        """What tells a table on disk from all others, wherever it is moved: 32 hexadecimal digits."""
        return self._on_disk().uuid

    @property
    def last_commit(self) -> int:
        """Number of the last commit that is durable."""
        return self._on_disk().last_commit

    @property
    def last_step(self) -> int | None:
        """The `step` that was given to the last commit."""
        return self._on_disk().last_step

    def commits(self) -> list[dict[str, Any]]:
        """Return the commits that there are, the oldest first: dicts of commit, step, name, time, rows and bytes."""
        return self._on_disk().commits()

    def memory_for(self, rows: int) -> int:
        """Return a `memory` in bytes with which a table on disk holds so many rows of this kind in its cache."""
        return memory_for(self.spec, rows)

    @property
    def uncommitted(self) -> bool:
        """Whether a table on disk has changes that no commit has. A commit under way is waited for.

        So ask it before `last_commit`, which is that one then.
        """
        if self._files is None:
            return False
        return not self._rows.version.is_committed or not self._files.is_durable(self._rows)


def exclusive(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
    """Run a method alone: a table serves one call at a time, so that no reader sees half a step."""

    @functools.wraps(method)
    def locked(self: F, *args: P.args, **kwargs: P.kwargs) -> T:
        turn = self._rows.turn  # as `Turn.alone`, without a generator
        turn.queue()
        with turn.lock:
            if turn.running is not None:
                turn.settle()
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
