"""The update of every rule, on whole arrays: the specification of ``kernels/cpu/rules.py``.

Each function takes weights ``w`` (unique, dim), their optimizer state ``s`` (unique, state_width), the summed
gradients ``g`` (unique, dim), all float32, and the step's numbers; it changes ``w`` and ``s`` in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from embedrock.kernels import arguments

f32 = np.float32


def sgd(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.SGDStep) -> None:
    w -= f32(a.lr) * g


def momentum(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.MomentumStep) -> None:
    _momentum_step(w, s, g, (f32(a.gradient_rate), f32(a.momentum), f32(a.buffer_rate), a.nesterov))


def _momentum_step(w: np.ndarray, b: np.ndarray, g: np.ndarray | f32, numbers: Sequence[Any] | np.ndarray) -> None:
    gradient_rate, momentum, buffer_rate, nesterov = numbers
    b[:] = b * momentum + gradient_rate * g
    w -= buffer_rate * (gradient_rate * g + momentum * b if nesterov else b)


def refresh_dense_momentum(w: np.ndarray, s: np.ndarray, a: arguments.DenseMomentumStep) -> None:
    """Bring rows up to step ``a.steps``: the steps that dense momentum made while no batch touched them."""
    for row, last in enumerate(_last_steps(s)):
        for numbers in a.history[last : a.steps]:
            _momentum_step(w[row], s[row, :-1], f32(0), numbers)
    _set_last_steps(s, a.steps)


def dense_momentum(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.DenseMomentumStep) -> None:
    refresh_dense_momentum(w, s, a._replace(steps=a.steps - 1))
    _momentum_step(w, s[:, :-1], g, a.history[a.steps - 1])
    _set_last_steps(s, a.steps)


def adagrad(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.AdagradStep) -> None:
    s += g * g
    w -= f32(a.lr) * (g / (np.sqrt(s + f32(a.eps_inside)) + f32(a.eps)))


def rowwise(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.RowwiseStep) -> None:
    parts = g.reshape(*s.shape, -1)
    s[:] = f32(a.keep) * s + f32(a.add) * np.square(parts, dtype=np.float64).mean(axis=2).astype(f32)
    scale = f32(a.lr) / (np.sqrt(s) + f32(a.eps))
    w[:] = f32(a.shrink) * w - (scale[:, :, None] * parts).reshape(w.shape)


def rmsprop(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.RMSpropStep) -> None:
    s[:] = s * f32(a.alpha) + (g * g) * f32(a.one_minus_alpha)
    w -= f32(a.lr) * (g / (np.sqrt(s + f32(a.eps_inside)) + f32(a.eps)))


def dense_rmsprop(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.DenseRMSpropStep) -> None:
    v, t = s[:, :-1], a.steps - 1
    for row, last in enumerate(_last_steps(s)):
        for alpha in a.history[last:t, arguments.RMSPROP_COLUMN.alpha]:
            v[row] *= alpha
    rmsprop(w, v, g, arguments.RMSpropStep(*a.history[t]))
    _set_last_steps(s, a.steps)


def adam(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.AdamStep) -> None:
    m, v = np.hsplit(s, 2)
    m += (g - m) * f32(a.one_minus_beta1)
    v += (g * g - v) * f32(a.one_minus_beta2)
    w -= f32(a.step_size) * (m / (np.sqrt(v) + f32(a.eps)))


def adamw(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.AdamWStep) -> None:
    m, v = np.hsplit(s, 2)
    m += (g - m) * f32(a.one_minus_beta1)
    v[:] = v * f32(a.beta2) + (g * g) * f32(a.one_minus_beta2)
    step = f32(a.step_size) * (m / (np.sqrt(v) / f32(a.bias_correction2_sqrt) + f32(a.eps)))
    w[:] = w * f32(a.shrink) - (w * f32(a.decay) + step)


def ftrl(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.FtrlStep) -> None:
    if a.lr <= 0:  # it moves nothing; to divide by it would
        return
    n, z = np.hsplit(s, 2)
    grown = n + g * g
    z += (g + f32(2) * f32(a.l2_shrinkage) * w) - (np.sqrt(grown) - np.sqrt(n)) / f32(a.lr) * w
    n[:] = grown
    w[:] = _ftrl_weights(s, [f32(number) for number in a[:4]])


def _ftrl_weights(s: np.ndarray, numbers: Sequence[Any] | np.ndarray) -> np.ndarray:
    (n, z), (lr, l1, l2, beta) = np.hsplit(s, 2), numbers
    shrunk = np.where(z > 0, l1, -l1) - z
    with np.errstate(divide="ignore", invalid="ignore"):  # of a quotient that is not chosen
        return np.where(np.abs(z) > l1, shrunk / ((beta + np.sqrt(n)) / lr + f32(2) * l2), f32(0))


def refresh_dense_ftrl(w: np.ndarray, s: np.ndarray, a: arguments.DenseFtrlStep) -> None:
    """Bring rows up to step ``a.steps``, which made their weights anew of their state, as it does to every row."""
    if a.steps and a.history[a.steps - 1, arguments.FTRL_COLUMN.lr]:
        w[:] = _ftrl_weights(s, np.abs(a.history[a.steps - 1]))


def dense_ftrl(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.DenseFtrlStep) -> None:
    refresh_dense_ftrl(w, s, a._replace(steps=a.steps - 1))
    ftrl(w, s, g, arguments.FtrlStep(*a.history[a.steps - 1], l2_shrinkage=0.0))


def refresh_dense_adam(w: np.ndarray, s: np.ndarray, a: arguments.DenseAdamStep) -> None:
    """Bring rows up to step ``a.steps``: the steps that dense Adam made while no batch touched them."""
    dim = w.shape[1]
    for row, last in enumerate(_last_steps(s)):
        for numbers in a.history[last : a.steps]:
            n = arguments.DenseAdamNumbers(*numbers)
            if last == 0:  # it was never stepped: its moments are 0
                w[row] = w[row] * n.shrink - w[row] * n.decay
                continue
            m, v = s[row, :dim], s[row, dim : 2 * dim]
            m *= n.beta1
            v *= n.beta2
            step = n.step_size * (m / (np.sqrt(v) / n.bias_correction2_sqrt + n.eps))
            w[row] = w[row] * n.shrink - (w[row] * n.decay + step)
    _set_last_steps(s, a.steps)


def dense_adam(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.DenseAdamStep) -> None:
    refresh_dense_adam(w, s, a._replace(steps=a.steps - 1))
    adamw(w, s[:, :-1], g, arguments.adamw_step(arguments.DenseAdamNumbers(*a.history[a.steps - 1])))
    _set_last_steps(s, a.steps)


def _last_steps(s: np.ndarray) -> np.ndarray:
    """Return the step at which each row was last stepped: the bits of an int32 in the last column."""
    return s[:, -1].copy().view(np.int32)


def _set_last_steps(s: np.ndarray, step: int) -> None:
    s[:, -1] = np.int32(step).view(f32)


UPDATES = arguments.functions_of_steps(globals())
REFRESHES = arguments.functions_of_steps(globals(), "refresh_")
