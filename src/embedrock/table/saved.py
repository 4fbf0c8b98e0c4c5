"""What `Table.state` returned, checked before a table takes it."""

from __future__ import annotations

from typing import Any

import numpy as np

from embedrock.batch.ids import check_ids
from embedrock.batch.plan import make_plan
from embedrock.errors import ArgumentError
from embedrock.rules import History
from embedrock.spec import Spec

STATE_FORMAT = 1
KEYS = ("format", "rows", "dim", "dtype", "seed", "init", "rule", "steps", "skipped_steps", "ids", "records")
HISTORY = "history_"


def check_state(state: dict[str, Any], expected: dict[str, Any], subject: str) -> None:
    """Raise `ArgumentError` unless a state is whole, and that of a table like the one described by `expected`."""
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise ArgumentError(f"a state for {subject} must have {', '.join(KEYS)}: {', '.join(missing)} missing.")
    for key in ("format", "rows", "dim", "dtype", "init"):
        if state[key] != expected[key]:
            raise ArgumentError(
                f"a state for {subject} must have {key} {expected[key]!r}: got {state[key]!r}. "
                "Make the table with the arguments it was saved with."
            )


def read_rows(state: dict[str, Any], spec: Spec, subject: str) -> tuple[np.ndarray, np.ndarray, History | None]:
    """Return a state's ids int64 (n,), records uint8 (n, record_bytes), and history.

    Raises:
        ArgumentError, IdError, IdTypeError: they do not fit each other, or the table.
    """
    ids = check_ids(np.asarray(state["ids"]), spec.rows, subject)
    records, expected = np.asarray(state["records"]), (len(ids), spec.record_bytes)
    if records.dtype != np.uint8 or records.shape != expected:
        raise ArgumentError(
            f"`records` of a state for {subject} must be uint8 {expected}: got {records.dtype} {records.shape}."
        )
    if ids.ndim != 1 or len(make_plan(ids).ids) != len(ids):
        raise ArgumentError(f"`ids` of a state for {subject} must be 1-D and not repeat: got shape {ids.shape}.")
    history = None if spec.rule is None else spec.rule.history()
    if history is not None:
        arrays = {key.removeprefix(HISTORY): value for key, value in state.items() if key.startswith(HISTORY)}
        history.load(arrays, int(state["steps"]))
    return ids, records, history
