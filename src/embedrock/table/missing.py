"""`Missing`: the values of rows that are not there, where a caller wants others than their initial values."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from embedrock.errors import ArgumentError, IdError, UnsupportedError, counted, did_you_mean
from embedrock.spec.frozen import FrozenRows

CHOICES = ("first", "zeros", "shared", "raise")
SHOWN_IDS = 8


class Missing(NamedTuple):
    """Choice of the values of rows that are not there. It is false if they are the initial values.

    Attributes:
        choice: one of `CHOICES`, or "row".
        values: of "row".
        padding: id of a layer's padding row, which is there; None: none.
        frozen: rows of the table that are there, as no step makes records of them; None: none.
    """

    choice: str
    values: tuple[float, ...] = ()
    padding: int | None = None
    frozen: FrozenRows | None = None

    @classmethod
    def of(cls, given: Any, subject: str = "the table") -> Missing | None:
        """Return the choice of an argument `missing`; None: the table's own.

        Raises:
            ArgumentError: it is neither a choice nor a row.
        """
        if given is None or isinstance(given, Missing):
            return given
        if isinstance(given, str) and given in CHOICES:
            return cls(given)
        row = None if isinstance(given, str) else np.asarray(given)
        if row is not None and row.ndim == 1 and row.dtype.kind in "fiu":
            with np.errstate(over="ignore"):
                row = row.astype(np.float32)
            if np.isfinite(row).all():
                return cls("row", tuple(row.tolist()))
        meant = did_you_mean(given, CHOICES) if isinstance(given, str) else ""
        raise ArgumentError(
            f"`missing` of {subject} must be one of {', '.join(CHOICES)}, or a row of finite floats: got {given!r}."
            f"{meant}"
        )

    def __bool__(self) -> bool:
        return self.choice != "first"

    def __repr__(self) -> str:
        return repr(self.given)

    @property
    def given(self) -> Any:
        """The argument, as plain data."""
        return list(self.values) if self.choice == "row" else self.choice

    def absent(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids (n,) without records are not there: all but padding and frozen rows. bool (n,)."""
        absent = np.ones(len(ids), bool) if self.padding is None else ids != self.padding
        return absent & ~self.frozen.has(ids) if self.frozen else absent


FIRST = Missing("first")


def no_row(subject: str, ids: np.ndarray) -> IdError:
    """Return the error of ids (n,) without a row, where ``missing="raise"`` demands one."""
    ids = np.unique(ids)
    more = len(ids) - SHOWN_IDS
    got = f"{ids[:SHOWN_IDS].tolist()}{f' and {more} more' * (more > 0)}"
    return IdError(
        f"`ids` of {subject} must have rows, as missing='raise' demands: {counted(len(ids), 'id')} without one, {got}. "
        "Leave out those that table.contains(ids) does not find, or choose their value: missing='zeros', or a row."
    )


def check_reads(missing: Missing | None, label: str, trains: bool = False, is_elsewhere: bool = False) -> None:
    """Raise `UnsupportedError` if rows that train, or that others than this process's CPU read, have a choice."""
    if missing and trains:
        raise UnsupportedError(
            f"{label} has missing={missing}, and trains: a row would be read as one value, and trained from another, "
            "its initial value. Freeze the layer, call the model for inference (eval(), or training=False), or set "
            "layer.missing = None."
        )
    if missing and is_elsewhere:
        raise UnsupportedError(
            f"`missing` ({missing}) of {label} goes with rows that this process's CPU reads: these are on a GPU, "
            "shared out over processes, or averages, where a row that is not there has its initial value. Leave it "
            "out, or use the rows on the CPU of one process."
        )
