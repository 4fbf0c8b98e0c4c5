"""Checks of the arguments of a table's verbs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import Plan
from embedrock.batch.wrong_ids import in_array
from embedrock.errors import (
    ArgumentError,
    GradientError,
    NonFiniteGradientError,
    UnknownArgumentError,
    UnsupportedError,
    counted,
)
from embedrock.optimizers import Rule
from embedrock.spec.spec import Spec, untrained
from embedrock.table.rows import TableState, rounded


def check_out(out: Any, shape: tuple[int, ...], subject: str) -> None:
    """Raise `ArgumentError` unless `out` can hold float32 rows of this shape."""
    if out is None:
        return
    fits = isinstance(out, np.ndarray) and out.dtype == np.float32 and out.shape == shape
    if not (fits and out.flags.c_contiguous and out.flags.writeable):
        got = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise ArgumentError(
            f"`out` for {subject} must be a C-contiguous, writeable float32 array of shape {shape}: "
            f"got {got}. Pass np.empty({shape}, np.float32), or leave it out."
        )


def floats(name: str, values: npt.ArrayLike, shape: tuple[int, ...], subject: str) -> np.ndarray:
    """Return values for rows as contiguous float32 (n, dim).

    Raises:
        GradientError: they are not floats, or have another shape.
    """
    array = np.asarray(values)
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":  # of other libraries
        array = array.astype(np.float32)
    if array.dtype.kind != "f":
        raise GradientError(f"`{name}` of {subject} must be floats: got dtype {array.dtype}.")
    if array.shape != shape:
        raise GradientError(
            f"`{name}` of {subject} must have shape {shape}, that of the ids and `dim`: got {array.shape}."
        )
    if array.dtype == np.float32:
        return np.ascontiguousarray(array.reshape(-1, shape[-1]))
    with np.errstate(over="ignore"):  # a float64 that is too large becomes Inf, which the step refuses
        return np.ascontiguousarray(array.reshape(-1, shape[-1]), np.float32)


def assigned(plan: Plan, values: npt.ArrayLike, rows: TableState) -> np.ndarray:
    """Return values to assign to a plan's rows, float32 (unique, dim), rounded to the table's dtype."""
    spec, subject = rows.spec, rows.subject
    if spec.codec is not None:
        raise untrained(spec.dtype, "values to assign", subject)
    if len(plan.ids) != plan.inverse.size:
        raise ArgumentError(
            f"`ids` of assign must not repeat: got {plan.inverse.size} ids, {len(plan.ids)} of them different."
        )
    checked = floats("values", values, (*plan.shape, spec.dim), subject)
    if rows.lags:
        kind = type(spec.rule).__name__
        raise UnsupportedError(
            f"rows of {subject} cannot be assigned under {kind}(dense=True), where rows lag behind. "
            f"Assign them before the rule is set, or use {kind}()."
        )
    with np.errstate(over="ignore"):
        kept = rounded(checked[plan.order], spec)
    if not np.isfinite(kept).all():
        where = in_array((*plan.shape, spec.dim), "values")(_first_nonfinite(rounded(checked, spec)))
        raise GradientError(
            f"`values` of {subject} must be finite as {spec.dtype}: got NaN, Inf or a value too large {where}."
        )
    return kept


def _first_nonfinite(values: np.ndarray) -> int:
    return int(np.argmin(np.isfinite(values)))


def wrong_width(grads: RowGradients, dim: int, subject: str) -> GradientError:
    """Return the error for gradients that are not for rows of this width."""
    return GradientError(
        f"gradients of rows of {subject} must be float32 {(len(grads.plan.ids), dim)}: got {grads.values.dtype} "
        f"{grads.values.shape}. Were they summed for another table?"
    )


def nonfinite(grads: RowGradients, subject: str) -> NonFiniteGradientError:
    """Return the error for a step by gradients with NaN or Inf."""
    bad = grads.nonfinite_ids()
    where = f"{len(bad)} of {counted(len(grads.values), 'row')}, first ids {bad[:8].tolist()}"
    return NonFiniteGradientError(
        f"gradients of {subject} must be finite: got NaN or Inf in {where if len(bad) else 'rows of other processes'}. "
        "The step was refused, nothing has changed. Lower the learning rate, clip "
        'or scale the gradients, or pass on_nonfinite="skip" to leave such steps out.',
        len(bad),
        bad[:8],
    )


def nonfinite_in(error: NonFiniteGradientError, plan: Plan, grads: Any) -> NonFiniteGradientError:
    """Return the error with the position of the first value in the gradients that is not finite."""
    with np.errstate(over="ignore"):
        array = np.asarray(grads, np.float32)
    if np.isfinite(array).all():  # only their sums are not finite
        return error
    first = _first_nonfinite(array)
    row = int(plan.ids[plan.inverse[first // array.shape[-1]]])
    where = f"{array.flat[first]} {in_array(array.shape, '`grads`')(first)}, for id {row}"
    return NonFiniteGradientError(f"{error} The first is {where}.", error.count, error.ids)


def rule_of_step(spec: Spec, lr: float | None, changes: dict[str, Any], subject: str) -> Rule:
    """Return a table's rule with the hyperparameters of one step."""
    rule = spec.rule
    if spec.codec is not None:
        raise untrained(spec.dtype, "a step", subject)
    if rule is None:
        raise ArgumentError(
            f"{subject} has no rule to step by. Pass rule=er.Adam(lr=1e-3) when you make it, or call "
            "set_rule; in PyTorch, make an optimizer: ert.Adam(model)."
        )
    if lr is None and not changes:
        return rule
    try:
        return rule.with_changes({"lr": lr, **changes})
    except (ArgumentError, UnknownArgumentError) as error:
        raise of_step(error, subject) from error


def of_step(error: ArgumentError | UnknownArgumentError, subject: str) -> ArgumentError | UnknownArgumentError:
    """Return an error of a rule with the table added: a schedule that gives NaN as learning rate, for example."""
    return type(error)(f"{error} The step of {subject} was refused, and nothing has changed.")
