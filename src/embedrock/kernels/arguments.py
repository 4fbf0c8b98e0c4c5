"""What one step tells a rule's kernel: numbers that hold for the whole step, computed in float64 outside.

The type of these tuples is how a kernel knows its rule: one step kernel is compiled per type.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class SGDStep(NamedTuple):
    lr: float


class MomentumStep(NamedTuple):
    """One of the rates is the learning rate, and the other 1."""

    gradient_rate: float  # of the gradient, on its way into the buffer
    momentum: float
    buffer_rate: float  # of the buffer, on its way into the weights
    nesterov: float  # 1.0 or 0.0


class DenseMomentumStep(NamedTuple):
    """``history[t - 1]`` holds the numbers of step t, for the first `steps` steps."""

    history: Any  # float32 (capacity, len(DENSE_MOMENTUM_COLUMNS))
    log_fade: Any  # float64 (capacity + 1, 1): logarithm of the product of momentum up to step t
    steps: int
    largest_rate: float  # buffer_rate, of all steps so far


DENSE_MOMENTUM_COLUMNS = ("gradient_rate", "momentum", "buffer_rate", "nesterov")


class AdagradStep(NamedTuple):
    lr: float
    eps_inside: float  # under the root; it or `eps` is 0
    eps: float


class RowwiseAdagradStep(NamedTuple):
    lr: float
    eps: float


class RMSpropStep(NamedTuple):
    lr: float
    alpha: float
    one_minus_alpha: float
    eps_inside: float  # under the root; it or `eps` is 0
    eps: float


class DenseRMSpropStep(NamedTuple):
    """``history[t - 1]`` holds the numbers of step t, for the first `steps` steps."""

    history: Any  # float32 (capacity, len(DENSE_RMSPROP_COLUMNS))
    log_fade: Any  # float64 (capacity + 1, 1): logarithm of the product of alpha up to step t
    steps: int


DENSE_RMSPROP_COLUMNS = ("lr", "alpha", "one_minus_alpha", "eps_inside", "eps")


class AdamStep(NamedTuple):
    step_size: float
    one_minus_beta1: float
    one_minus_beta2: float
    eps: float


class AdamWStep(NamedTuple):
    step_size: float
    shrink: float
    decay: float  # the weights become shrink * w - decay * w, less the step: one of the two says nothing
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    bias_correction2_sqrt: float
    eps: float


class DenseAdamStep(NamedTuple):
    """Of Adam and AdamW. ``history[t - 1]`` holds the numbers of step t, for the first `steps` steps."""

    history: Any  # float32 (capacity, len(DENSE_ADAM_COLUMNS))
    log_fade: Any  # float64 (capacity + 1, 3): logarithms of the products of beta1, beta2 and shrink - decay up to t
    steps: int
    largest_step_size: float  # of all steps so far
    fading: float  # 1.0 while beta1 < sqrt(beta2) * (shrink - decay) in every step so far, else 0.0


DENSE_ADAM_COLUMNS = (
    "step_size",
    "beta1",
    "beta2",
    "one_minus_beta1",
    "one_minus_beta2",
    "bias_correction2_sqrt",
    "eps",
    "shrink",
    "decay",
)


class FtrlStep(NamedTuple):
    lr: float
    l1: float
    l2: float
    beta: float
    l2_shrinkage: float


class DenseFtrlStep(NamedTuple):
    """``history[t - 1]`` holds the numbers of step t, for the first `steps` steps."""

    history: Any  # float32 (capacity, len(DENSE_FTRL_COLUMNS))
    steps: int


DENSE_FTRL_COLUMNS = ("lr", "l1", "l2", "beta")
