"""`Eviction`: which rows lose their records, and when."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from embedrock.batch.ids import check_ids
from embedrock.errors import ArgumentError, check_choice
from embedrock.spec.admission import check_whole
from embedrock.system.sizes import Size, duration, parse_bytes, parse_seconds

ORDERS = ("use", "recency", "age")
MOST_KEPT = 1 << 16


@dataclass(frozen=True, eq=False)
class Eviction:
    """A rule for which rows of a table lose their records. An evicted row begins anew when it comes back.

    A row is *used* in a step that has a gradient for it, or by `Table.assign`. Rows of the batch that is stepped never
    leave. Evictions depend only on the steps that were made and their ids: not on caches, threads or prefetching.

    Args:
        max_rows: most rows with records after each step.
        max_bytes: most bytes of their records; "2GiB" too.
        idle: steps without a use after which a row leaves, at the latest an eighth of them later. Or a time: "30d",
            "12 hours", "45m", "10s", a `timedelta` or a `timedelta64`. With `time=` in the steps, the time is that of
            events: see `Table.update`. Without it, it is the time of training. A pause of training, or a restart, then
            counts as little as a step. Two runs take other times, and may differ.
        by: order of eviction if there are too many rows. "use": least uses, a count that is halved every `half_life`
            steps. "recency": used last the longest time ago. "age": the oldest records. A clock hand samples four rows
            for each one that has to leave.
        half_life: of uses, in steps.
        keep: ids of rows that stay, up to 65,536.
        evicted: a function that gets the ids, int64 (n,), of rows that have left. It is called after the step,
            `Table.forget` or the rollback. Or a file to which they are appended, 8 bytes each, little-endian. If it
            fails, the step has been made, and they are reported with the next ones. An opened table needs it again. On
            disk it then also gets rows that left while another process had the table without it.
        returned: likewise, for rows that a rollback has restored; None: they are not reported.

    Raises:
        ArgumentError: an invalid value, or no limit of the rows.

    Example:
        >>> import embedrock as er
        >>> import numpy as np
        >>> table = er.Table(rows=None, dim=2, rule=er.SGD(lr=1.0), eviction=er.Eviction(max_rows=2, by="recency"))
        >>> for ids in ([7, 8], [9]):
        ...     table.update(ids, np.ones((len(ids), 2), np.float32))
        >>> table.export()[0].tolist()
        [8, 9]
    """

    max_rows: int | None = None
    max_bytes: Size | None = None
    idle: int | str | timedelta | np.timedelta64 | None = None
    by: str = "use"
    half_life: int = 1000
    keep: npt.ArrayLike | None = field(default=None, repr=False)
    evicted: Callable[[np.ndarray], object] | str | os.PathLike[str] | None = field(default=None, repr=False)
    returned: Callable[[np.ndarray], object] | str | os.PathLike[str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "idle", duration(self.idle))
        if self.max_rows is None and self.max_bytes is None and self.idle is None:
            raise ArgumentError("an Eviction must have `max_rows`, `max_bytes` or `idle`: got none of them.")
        if self.max_rows is not None:
            check_whole("max_rows", self.max_rows, 1, "of an Eviction")
        if self.max_bytes is not None:
            parse_bytes(self.max_bytes, "max_bytes")
        if self.idle is not None and not isinstance(self.idle, str):
            check_whole("idle", self.idle, 1, "of an Eviction, in steps,")
        check_choice("by", self.by, ORDERS)
        check_whole("half_life", self.half_life, 1, "of an Eviction, in steps,")
        for name, told in self.mirrors.items():
            _check_told(name, told)
        self.idle_seconds()
        self.kept()

    @property
    def mirrors(self) -> dict[str, Any]:
        """The listeners for rows that left, and that came back, by the argument's name."""
        return {"evicted": self.evicted, "returned": self.returned}

    @property
    def has_mirror(self) -> bool:
        return self.evicted is not None or self.returned is not None

    def idle_seconds(self) -> float:
        """Return `idle` in seconds if it is a time; otherwise 0."""
        if not isinstance(self.idle, str):
            return 0.0
        seconds = parse_seconds(self.idle)
        if seconds is None:
            raise ArgumentError(f'`idle` of an Eviction must be steps, or a time such as "30d": got {self.idle!r}.')
        return seconds

    def kept(self) -> np.ndarray:
        """Return the ids of `keep`, ascending."""
        ids = np.empty(0, np.int64) if self.keep is None else check_ids(self.keep, None, "`keep` of an Eviction")
        made = np.unique(ids)
        if len(made) > MOST_KEPT:  # every commit lists them
            raise ArgumentError(f"`keep` of an Eviction must be at most {MOST_KEPT} ids: got {len(made)}.")
        return made

    def most_rows(self, record_bytes: int) -> int | None:
        """Return the most rows with records of `record_bytes` bytes; None: no limit.

        Raises:
            ArgumentError: not one row fits.
        """
        limits = [] if self.max_rows is None else [self.max_rows]
        if self.max_bytes is not None:
            rows = parse_bytes(self.max_bytes, "max_bytes") // record_bytes
            if not rows:
                raise ArgumentError(
                    f"`max_bytes` of an Eviction must have room for a row, {record_bytes} bytes: got "
                    f"{self.max_bytes!r}."
                )
            limits.append(rows)
        return min(limits, default=None)

    def describe(self) -> dict[str, Any]:
        """Return it as plain data, without `evicted` and `returned`."""
        names = ("max_rows", "max_bytes", "idle", "by", "half_life")
        return {**{name: getattr(self, name) for name in names}, "keep": self.kept().tolist() or None}


def _check_told(name: str, told: Any) -> None:
    if told is None or callable(told):
        return
    if not isinstance(told, str | os.PathLike):
        raise ArgumentError(f"`{name}` of an Eviction must be a function or a file: got {told!r}.")
    if not os.path.isdir(folder := os.path.dirname(os.path.abspath(os.fspath(told)))):
        raise ArgumentError(
            f"`{name}` of an Eviction must be a file in a folder that there is: got {os.fspath(told)!r}. "
            f"Make {folder!r} first."
        )
