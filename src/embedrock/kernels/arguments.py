"""What one step tells a rule's kernel: numbers that hold for the whole step, computed in float64 outside.

The type of these tuples is how a kernel knows its rule: one step kernel is compiled per type.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class SGDStep(NamedTuple):
    lr: float


class MomentumStep(NamedTuple):
    lr: float
    momentum: float
    nesterov: float  # 1.0 or 0.0


class AdagradStep(NamedTuple):
    lr: float
    eps: float


class RowwiseAdagradStep(NamedTuple):
    lr: float
    eps: float


class RMSpropStep(NamedTuple):
    lr: float
    alpha: float
    one_minus_alpha: float
    eps: float


class AdamStep(NamedTuple):
    step_size: float
    one_minus_beta1: float
    one_minus_beta2: float
    eps: float


class AdamWStep(NamedTuple):
    step_size: float
    shrink: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    bias_correction2_sqrt: float
    eps: float


class DenseAdamStep(NamedTuple):
    """``history[t - 1]`` holds the numbers of step t, for the first `steps` steps."""

    history: Any  # float32 (capacity, len(DENSE_ADAM_COLUMNS))
    log_fade: Any  # float64 (capacity + 1, 2): logarithms of the products of beta1 and of beta2 up to step t
    steps: int
    largest_step_size: float  # of all steps so far
    fading: float  # 1.0 while beta1 < sqrt(beta2) in every step so far, else 0.0


DENSE_ADAM_COLUMNS = (
    "step_size",
    "beta1",
    "beta2",
    "one_minus_beta1",
    "one_minus_beta2",
    "bias_correction2_sqrt",
    "eps",
)


class FtrlStep(NamedTuple):
    lr: float
    l1: float
    l2: float
    beta: float
