"""`leave_out`: skip batches so that `fit` resumes in the middle of an epoch."""

from __future__ import annotations

from typing import Any

from embedrock.errors import ArgumentError
from embedrock.keras import callers


def leave_out(count: int) -> bool:
    """Skip the next batches of the running `fit`, and count them as done. Return whether that was possible.

    Must be called when `fit` begins with the first batch of an epoch.

    Raises:
        ArgumentError: the epoch has fewer batches.
    """
    found: Any = [callers.local(callers.KERAS_TRAINER, "fit", name) for name in ("epoch_iterator", "iterator")]
    if callers.MISSING in found:
        return False
    epoch, batches = found
    for done in range(count):
        if next(batches, None) is None:
            check_batches(done, count)
    for _ in range(0, count, epoch.steps_per_execution):  # the batch numbers come from here
        next(epoch, None)
    return True


def check_batches(there: int | None, count: int) -> None:
    """Raise `ArgumentError` if an epoch of `there` batches (None: unknown) has fewer than `count`."""
    if there is not None and there < count:
        raise ArgumentError(
            f"`fit` goes on from a checkpoint that was made after batch {count} of an epoch, and "
            f"got epochs of {there}. Give it the data and the batch size that it had; or have it repeat "
            "the epoch: callback.restore(model), and then callback.batch = 0, before fit."
        )
