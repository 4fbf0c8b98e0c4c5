"""The host part of a step: rows of tables are stepped by their handles' gradients.

Programs call `step`; those of several workers call `message_to_workers` and `step_of_workers`. They refer to optimizers
weakly: see `host_calls.call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from embedrock import optimizers as rules
from embedrock.batch.gradients import RowGradients
from embedrock.distributed.messages import MessageReader, as_sent, pack_all
from embedrock.distributed.stages import NO_TIME, GradientBlock, fold
from embedrock.errors import ArgumentError, UnknownArgumentError, UnsupportedError
from embedrock.frontend.references import keep_rule
from embedrock.keras.training.following import follow
from embedrock.keras.training.handle import TableHandle
from embedrock.keras.training.regularization import constraint_on
from embedrock.keras.workers.shards import own_part, wire_of
from embedrock.optimizers import Rule
from embedrock.table.checks import of_step
from embedrock.table.event_time import newer
from embedrock.table.stepping import Part, StepRequest, step_all


def _summed(handles: Sequence[TableHandle], sizes: Sequence[Sequence[int]], arrays: Sequence[np.ndarray]) -> list[Any]:
    """Return the gradients of each table, summed over the replicas, from the arrays that these sent.

    Args:
        handles: handles of the tables.
        sizes: number of arrays of each replica, for each handle: see `RowSlices.sent`.
        arrays: all arrays, in that order.
    """
    found, start = list[Any](), 0
    for handle, of_replicas in zip(handles, sizes, strict=True):
        parts = []
        for size in of_replicas:
            parts.append(handle.gradients(arrays[start : start + size]))
            start += size
        found.append(parts[0] if len(parts) == 1 else handle.executor.sum_of(parts))
    return found


def step(
    known: Any,
    handles: list[TableHandle],
    sizes: Sequence[Sequence[int]],
    lr: np.ndarray,
    steps: np.ndarray,
    *arrays: np.ndarray,
) -> np.int64:
    """Step the rows of tables by their gradients; return the number of tables. For the arguments see `_summed`."""
    optimizer = _checked_owner(known, handles)
    return _step_by(optimizer, handles, float(lr), int(steps), _summed(handles, sizes, arrays))


def message_to_workers(
    known: Any, handles: list[TableHandle], sizes: Sequence[Sequence[int]], *arrays: np.ndarray
) -> np.ndarray:
    """Return a message to all workers: the gradients of this worker's handles. For the arguments see `_summed`."""
    _checked_owner(known, handles)
    message = []
    for handle, grads in zip(handles, _summed(handles, sizes, arrays), strict=True):
        sent = as_sent(grads.values, wire_of(handle.table))
        time = handle.pending.time
        head = np.array([len(grads.values), NO_TIME if time is None else int(time)], np.int64)
        message += [head, grads.plan.ids, sent]
    return pack_all([message]).flat


def step_of_workers(
    known: Any, handles: list[TableHandle], lr: np.ndarray, steps: np.ndarray, messages: np.ndarray
) -> np.int64:
    """Step this worker's rows by the messages of all workers, summed in the order of their ranks."""
    reader = MessageReader(messages)
    blocks: dict[TableHandle, list[GradientBlock]] = {handle: [] for handle in handles}
    while not reader.is_at_end:
        for handle in handles:
            (count, time), table = reader.ints(2).tolist(), handle.table
            handle.pending.time = newer(handle.pending.time, None if time == NO_TIME else time)
            blocks[handle].append(GradientBlock(reader.ints(count), reader.sent(count, table.dim, wire_of(table))))
    summed = [fold(blocks[handle]) for handle in handles]
    return _step_by(known(), handles, float(lr), int(steps), summed)


def _checked_owner(known: Any, handles: list[TableHandle]) -> Any:
    optimizer = known()
    for handle in handles:
        if not handle.claim(optimizer):
            raise ArgumentError(
                f"the rows of {handle.label} are held by another optimizer, which was built later than this "
                f"{type(optimizer).__name__} and has taken over their state. A table has one optimizer at a time: use "
                "one for all steps of the layer, or compile anew. Layers with a rule of their own, such as "
                "rule=er.Adam(), and plain SGD may be stepped by several."
            )
    return optimizer


def _step_by(optimizer: Any, handles: list[TableHandle], lr: float, steps: int, summed: Sequence[Any]) -> np.int64:
    made = dict[Any, Rule]()
    found = [step_rule(optimizer, handle, lr, steps, made) for handle in handles]
    for handle, rule in zip(handles, found, strict=True):
        handle.check_rule(optimizer, rule)  # before rows are copied to the GPU
    due, together = list[StepRequest](), list[Part]()
    for handle, rule, grads in zip(handles, found, summed, strict=True):
        change, executor = constraint_on(handle), handle.executor.stepped
        if change is None and type(grads) is RowGradients and grads.whole is not None:  # of tables without shards
            together.append((grads.whole, rule, handle.pending.time, grads.number, handle.state))
        else:
            own = own_part(handle.shard, grads)
            due.append(StepRequest((handle.state,), rule, own, change, executor, handle.pending.time))
    due += StepRequest.of_joint(sorted(together, key=lambda part: (id(part[0]), id(part[1]), part[2] or 0)))
    step_all(due, is_awaited=True)  # dense variables are not stepped if the rows are not
    for handle in handles:
        handle.pending.end_step()
    return np.int64(len(handles))


def check_constraint(handle: TableHandle, optimizer: Any) -> None:
    """Raise `UnsupportedError` if a constraint of rows would not last under their rule."""
    rule = step_rule(optimizer, handle)
    if "embeddings_constraint" in handle.brought and isinstance(rule, rules.Ftrl) and rule.dense:
        raise UnsupportedError(
            f"`embeddings_constraint` of {handle.label} cannot go with Ftrl, which makes every weight anew of its "
            "state at each step, also in rows that no batch touches. Leave it out, or give the layer a rule of its "
            "own, such as rule=er.Ftrl(), which steps the rows of the batch only."
        )


def rebind(handle: TableHandle) -> None:
    """Set the optimizer's rule again after a rollback of a table, if its records have the rule's state."""
    if handle.owner is not None:
        keep_rule(handle.table, step_rule(handle.owner, handle))


def step_rule(
    optimizer: Any, handle: TableHandle, lr: float | None = None, steps: int = 0, made: dict[Any, Rule] | None = None
) -> Rule:
    """Return the rule of a table's next step: its own, or else the optimizer's.

    Args:
        optimizer: steps the rows.
        handle: handle of the table.
        lr: learning rate of the step; None if only the record layout matters.
        steps: number of the optimizer's steps.
        made: rules of this step, which tables share.
    """
    own, table_steps = handle.own_rule, handle.state.steps
    if own is not None and (lr is None or own.brings_lr):
        return own
    decays = own is None and decays_rows(optimizer, handle)
    key, made = (id(own), decays, table_steps), {} if made is None else made
    if key not in made:
        try:
            if own is None:
                made[key] = follow(optimizer, 1e-3 if lr is None else lr, decays, steps, table_steps)
            else:
                made[key] = own.with_changes({"lr": lr})
        except (ArgumentError, UnknownArgumentError) as error:
            raise of_step(error, handle.label) from error
    return made[key]


def decays_rows(optimizer: Any, handle: TableHandle) -> bool:
    """Return whether an optimizer's weight decay applies to a table's rows."""
    return bool(optimizer.weight_decay) and optimizer._use_weight_decay(handle.variable)
