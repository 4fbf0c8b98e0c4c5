"""`newest_event`: the time of a step's newest event, after all checks of what users pass as `time=`."""

from __future__ import annotations

import logging
import time as clocks
import weakref
from collections.abc import Iterable
from datetime import UTC, date
from typing import Any

import numpy as np

from embedrock.admission.clock import Clock
from embedrock.batch.wrong_ids import in_array
from embedrock.errors import ArgumentError
from embedrock.system.log import tell
from embedrock.table.rows import TableState

MOST_AHEAD = 86_400.0  # seconds after the machine's clock
UNITS = {"milliseconds": 1000, "microseconds": 10**6, "nanoseconds": 10**9}
PLAUSIBLE = 1e8  # seconds: in 1973
_told: weakref.WeakSet[Clock] = weakref.WeakSet()  # clocks of tables whose events went back


def newest_event(time: Any, tables: Iterable[TableState], subject: str) -> float | None:
    """Return the time of the newest event of a step, in seconds since 1970. Return None without any event.

    Args:
        time: of the events, one or any array of them; None: not known. Integers and floats are seconds since 1970.
            Dates are `datetime64`, `datetime` or pandas' Timestamp; without a zone they are in UTC.
        tables: that the step may change.
        subject: of messages.

    Raises:
        ArgumentError: times of a wrong type, not finite or below 0. Or the newest one is more than a day after the
            clock of the machine, or more than `idle` of a table after the median of all.
    """
    if time is None:
        return None
    seconds = seconds_of(time, subject)
    if not seconds.size:
        return None
    oldest, newest = float(seconds.min()), float(seconds.max())
    if not (oldest >= 0 and newest < np.inf):  # or NaN
        first = int(np.argmin((seconds >= 0) & (seconds < np.inf)))
        raise ArgumentError(
            f"`time` of {subject} must be finite and at least 0, in seconds since 1970: got "
            f"{seconds.flat[first]}{_at(seconds, first)}. Pass the times of events that are known."
        )
    at, now = _at(seconds, int(seconds.argmax())), clocks.time()
    if newest > now + MOST_AHEAD:
        likely = [unit for unit, count in UNITS.items() if PLAUSIBLE < newest / count <= now + MOST_AHEAD]
        remedy = "Leave out events of the future."
        if likely:
            remedy = f"If they are {likely[0]}, pass time / {UNITS[likely[0]]}."
        raise ArgumentError(
            f"`time` of {subject} must be seconds since 1970, at most a day after this machine's clock ({now:.0f}): "
            f"got {newest:.0f}{at}. One such event would make all rows idle. {remedy}"
        )
    for rows in tables:
        usage = None if rows.lifecycle is None else rows.lifecycle.usage
        if usage is None or not (clock := usage.clock).idle:
            continue
        middle = seconds.size // 2
        median = float(np.partition(seconds, middle, axis=None)[middle]) if newest - oldest > clock.idle else newest
        if newest - median > clock.idle:
            raise ArgumentError(
                f"`time` of {subject} must be at most `idle` ({clock.idle:.0f} s) after the median of its batch "
                f"({_date(median)}): got {_date(newest)}{at}. One wrong time would make all rows idle. Correct that "
                "event, or leave it out. Events of several periods go in batches of their own."
            )
        if clock.read.counts_events and newest < clock.read.now - clock.idle / 8 and clock not in _told:
            _told.add(clock)
            tell(
                f"{rows.subject}: events until {_date(newest)} come after one of {_date(clock.read.now)}. Its clock "
                "stays at the newest event, so they make no row idle. This is said once.",
                logging.WARNING,
            )
    return newest


def newer(one: float | None, other: float | None) -> float | None:
    """Return the larger of two times; None: it is not known."""
    return max([time for time in (one, other) if time is not None], default=None)


def seconds_of(time: Any, subject: str) -> np.ndarray:
    """Return times as seconds since 1970: float64 of the same shape, NaN for NaT."""
    array = np.asarray(time)
    if array.dtype == object and all(isinstance(each, date) for each in array.flat):
        array = np.array([_in_utc(each) for each in array.flat], "datetime64[us]").reshape(array.shape)
    if array.dtype.kind == "M":
        return (array - np.datetime64(0, "s")) / np.timedelta64(1, "s")
    if array.dtype.kind in "iuf":
        return array.astype(np.float64)
    raise ArgumentError(
        f"`time` of {subject} must be seconds since 1970, or dates such as datetime64: got dtype {array.dtype}. Of "
        "texts, pass pandas.to_datetime(time).to_numpy()."
    )


def _at(seconds: np.ndarray, position: int) -> str:
    return f" {in_array(seconds.shape, '`time`')(position)}" if seconds.ndim else ""


def _in_utc(moment: Any) -> Any:
    zone = getattr(moment, "tzinfo", None)
    return moment if zone is None else moment.astimezone(UTC).replace(tzinfo=None)


def _date(seconds: float) -> str:
    return f"{np.datetime64(int(seconds), 's')}"
