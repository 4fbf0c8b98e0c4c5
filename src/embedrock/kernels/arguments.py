"""Step constants of rules' kernels: numbers of a whole step, computed in float64 outside the kernels.

A kernel knows its rule by the type of these tuples: one step kernel is compiled per type. The function of a
``DenseAdamStep`` is called ``dense_adam`` in each set of kernels: see `functions_of_steps`.

A history holds such constants for every step, as rows of an array. ``ADAM_COLUMN.eps`` is the column of `eps`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


def _columns(kind: Any) -> Any:
    return kind(*range(len(kind._fields)))


class SGDStep(NamedTuple):
    lr: float


class MomentumStep(NamedTuple):
    """Step constants of momentum. One of the rates is the learning rate, and the other 1."""

    gradient_rate: float  # factor of the gradient that enters the buffer
    momentum: float
    buffer_rate: float  # factor of the buffer in the update of the weights
    nesterov: float  # 1.0 or 0.0


MOMENTUM_COLUMN = _columns(MomentumStep)


class DenseMomentumStep(NamedTuple):
    """Step constants of momentum. ``history[t - 1]`` holds the numbers of step t, for the first `steps` steps."""

    history: Any  # float32 (capacity, len(MOMENTUM_COLUMN))
    log_fade: Any  # float64 (capacity + 1, 1): logarithm of the product of momentum up to step t
    steps: int
    largest_rate: float  # maximum buffer_rate of all steps


class AdagradStep(NamedTuple):
    lr: float
    eps_inside: float  # under the root; it or `eps` is 0
    eps: float


class RowwiseStep(NamedTuple):
    """Step constants of the rules with an accumulator ``h`` for each of the equal parts of a row."""

    lr: float
    keep: float  # factor of h, and
    add: float  # of the mean of squares that is added to it
    eps: float
    shrink: float  # factor of the weights before the step


class RMSpropStep(NamedTuple):
    lr: float
    alpha: float
    one_minus_alpha: float
    eps_inside: float  # under the root; it or `eps` is 0
    eps: float


RMSPROP_COLUMN = _columns(RMSpropStep)


class DenseRMSpropStep(NamedTuple):
    """Step constants of RMSprop. ``history[t - 1]`` holds the numbers of step t, for the first `steps` steps."""

    history: Any  # float32 (capacity, len(RMSPROP_COLUMN))
    log_fade: Any  # float64 (capacity + 1, 1): logarithm of the product of alpha up to step t
    steps: int


class AdamStep(NamedTuple):
    step_size: float
    one_minus_beta1: float
    one_minus_beta2: float
    eps: float


class AdamWStep(NamedTuple):
    step_size: float
    shrink: float
    decay: float  # the weights become shrink * w - decay * w, less the step: one of the two has no effect
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    bias_correction2_sqrt: float
    eps: float


class DenseAdamNumbers(NamedTuple):
    """Step constants of one step of dense Adam or AdamW."""

    step_size: float
    beta1: float
    beta2: float
    one_minus_beta1: float
    one_minus_beta2: float
    bias_correction2_sqrt: float
    eps: float
    shrink: float
    decay: float


ADAM_COLUMN = _columns(DenseAdamNumbers)


def adamw_step(numbers: DenseAdamNumbers) -> AdamWStep:
    """Return the step constants of one step of AdamW, for rows that are not stale."""
    return AdamWStep(*(getattr(numbers, name) for name in AdamWStep._fields))


class DenseAdamFades(NamedTuple):
    """The factors by which an untouched row fades in a step of dense Adam or AdamW."""

    first_moment: float  # beta1
    second_moment: float  # beta2
    weights: float  # shrink - decay


ADAM_FADE = _columns(DenseAdamFades)


class DenseAdamStep(NamedTuple):
    """Step constants of Adam and AdamW. ``history[t - 1]`` holds the numbers of step t, for the first `steps` steps."""

    history: Any  # float32 (capacity, len(ADAM_COLUMN))
    log_fade: Any  # float64 (capacity + 1, len(ADAM_FADE)): logarithms of the fades' products up to step t
    steps: int
    largest_step_size: float  # maximum of all steps
    fading: float  # 1.0 while beta1 < sqrt(beta2) * (shrink - decay) in every step, else 0.0


class FtrlStep(NamedTuple):
    lr: float  # 0: nothing moves
    l1: float
    l2: float
    beta: float
    l2_shrinkage: float


class DenseFtrlNumbers(NamedTuple):
    """Step constants of one step of dense Ftrl.

    A step that moves nothing has the constants of the last effective step, with ``-lr``.
    """

    lr: float  # 0 if no step has moved anything yet
    l1: float
    l2: float
    beta: float


FTRL_COLUMN = _columns(DenseFtrlNumbers)


class DenseFtrlStep(NamedTuple):
    """Step constants of Ftrl. ``history[t - 1]`` holds the numbers of step t, for the first `steps` steps."""

    history: Any  # float32 (capacity, len(FTRL_COLUMN))
    steps: int


STEPS: tuple[type, ...] = tuple(kind for name, kind in list(globals().items()) if name.endswith("Step"))


def functions_of_steps(functions: Mapping[str, Any], prefix: str = "") -> dict[type, Callable[..., Any]]:
    """Return the functions of steps by step type, found by name.

    Args:
        functions: the names of a file, ``globals()``. `DenseAdamStep` belongs to `dense_adam`.
        prefix: of the functions' names.
    """
    named = {name.replace("_", ""): function for name, function in functions.items() if name[0] != "_"}
    names = {kind: (prefix + kind.__name__.removesuffix("Step").lower()).replace("_", "") for kind in STEPS}
    return {kind: named[name] for kind, name in names.items() if name in named}
