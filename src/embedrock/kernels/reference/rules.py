"""The update of every rule, on whole arrays: the specification of ``kernels/cpu/rules.py``.

Each function takes weights ``w`` (unique, dim), their optimizer state ``s`` (unique, state_width), the summed
gradients ``g`` (unique, dim), all float32, and the step's numbers; it changes ``w`` and ``s`` in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from embedrock.kernels import arguments

f32 = np.float32


def sgd(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.SGDStep) -> None:
    w -= f32(a.lr) * g


def momentum(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.MomentumStep) -> None:
    s[:] = s * f32(a.momentum) + g
    w -= f32(a.lr) * (g + f32(a.momentum) * s if a.nesterov else s)


def adagrad(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.AdagradStep) -> None:
    s += g * g
    w -= f32(a.lr) * (g / (np.sqrt(s) + f32(a.eps)))


def rowwise_adagrad(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.RowwiseAdagradStep) -> None:
    s[:, 0] += (np.square(g.astype(np.float64)).sum(axis=1) / g.shape[1]).astype(f32)
    w -= (f32(a.lr) / (np.sqrt(s) + f32(a.eps))) * g


def rmsprop(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.RMSpropStep) -> None:
    s[:] = s * f32(a.alpha) + (g * g) * f32(a.one_minus_alpha)
    w -= f32(a.lr) * (g / (np.sqrt(s) + f32(a.eps)))


def adam(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.AdamStep) -> None:
    m, v = np.hsplit(s, 2)
    m += (g - m) * f32(a.one_minus_beta1)
    v += (g * g - v) * f32(a.one_minus_beta2)
    w -= f32(a.step_size) * (m / (np.sqrt(v) + f32(a.eps)))


def adamw(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.AdamWStep) -> None:
    m, v = np.hsplit(s, 2)
    w *= f32(a.shrink)
    m += (g - m) * f32(a.one_minus_beta1)
    v[:] = v * f32(a.beta2) + (g * g) * f32(a.one_minus_beta2)
    w -= f32(a.step_size) * (m / (np.sqrt(v) / f32(a.bias_correction2_sqrt) + f32(a.eps)))


def ftrl(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.FtrlStep) -> None:
    n, z = np.hsplit(s, 2)
    grown = n + g * g
    z += g - (np.sqrt(grown) - np.sqrt(n)) / f32(a.lr) * w
    n[:] = grown
    shrunk = np.where(z > 0, f32(a.l1), -f32(a.l1)) - z
    w[:] = np.where(
        np.abs(z) > f32(a.l1), shrunk / ((f32(a.beta) + np.sqrt(n)) / f32(a.lr) + f32(2) * f32(a.l2)), f32(0)
    )


def _dense_adam_decay(w: np.ndarray, m: np.ndarray, v: np.ndarray, numbers: np.ndarray) -> None:
    step_size, beta1, beta2, _, _, bias_correction2_sqrt, eps = numbers
    m *= beta1
    v *= beta2
    w -= step_size * (m / (np.sqrt(v) / bias_correction2_sqrt + eps))


def refresh_dense_adam(w: np.ndarray, s: np.ndarray, a: arguments.DenseAdamStep) -> None:
    """Bring rows up to step ``a.steps``: the steps that dense Adam made while no batch touched them."""
    dim = w.shape[1]
    last = s[:, 2 * dim].copy().view(np.int32)
    for row in np.flatnonzero(last > 0):
        for numbers in a.history[last[row] : a.steps]:
            _dense_adam_decay(w[row], s[row, :dim], s[row, dim : 2 * dim], numbers)
    s[:, 2 * dim] = np.int32(a.steps).view(f32)


def dense_adam(w: np.ndarray, s: np.ndarray, g: np.ndarray, a: arguments.DenseAdamStep) -> None:
    dim = w.shape[1]
    refresh_dense_adam(w, s, a._replace(steps=a.steps - 1))
    step_size, _, beta2, one_minus_beta1, one_minus_beta2, bias_correction2_sqrt, eps = a.history[a.steps - 1]
    m, v = s[:, :dim], s[:, dim : 2 * dim]
    m += (g - m) * one_minus_beta1
    v[:] = v * beta2 + (g * g) * one_minus_beta2
    w -= step_size * (m / (np.sqrt(v) / bias_correction2_sqrt + eps))
    s[:, 2 * dim] = np.int32(a.steps).view(f32)


UPDATES: dict[type, Callable[[np.ndarray, np.ndarray, np.ndarray, Any], None]] = {
    arguments.SGDStep: sgd,
    arguments.MomentumStep: momentum,
    arguments.AdagradStep: adagrad,
    arguments.RowwiseAdagradStep: rowwise_adagrad,
    arguments.RMSpropStep: rmsprop,
    arguments.AdamStep: adam,
    arguments.AdamWStep: adamw,
    arguments.DenseAdamStep: dense_adam,
    arguments.FtrlStep: ftrl,
}

REFRESHES: dict[type, Callable[[np.ndarray, np.ndarray, Any], None]] = {
    arguments.DenseAdamStep: refresh_dense_adam,
}
