"""The update of every rule, on one row.

Each function takes one row's weights ``w`` (dim,), its optimizer state ``s`` (state_width,), its summed gradient
``g`` (dim,), all float32, and the step's numbers; it changes ``w`` and ``s`` in place. `update_row` is the one that
belongs to the type of the numbers; the step kernel in ``rows.py`` is compiled once for each.
"""

from collections.abc import Callable

import numpy as np
from numba import types
from numba.extending import overload

from embedrock.kernels import arguments
from embedrock.kernels.cpu.lanes import square_sum
from embedrock.kernels.cpu.runtime import kernel

f32 = np.float32


def sgd(w, s, g, a):
    lr = f32(a.lr)
    for d in range(w.shape[0]):
        w[d] -= lr * g[d]


def momentum(w, s, g, a):
    lr, keep = f32(a.lr), f32(a.momentum)
    if a.nesterov != 0.0:
        for d in range(w.shape[0]):
            s[d] = s[d] * keep + g[d]
            w[d] -= lr * (g[d] + keep * s[d])
    else:
        for d in range(w.shape[0]):
            s[d] = s[d] * keep + g[d]
            w[d] -= lr * s[d]


def adagrad(w, s, g, a):
    lr, eps = f32(a.lr), f32(a.eps)
    for d in range(w.shape[0]):
        s[d] += g[d] * g[d]
        w[d] -= lr * (g[d] / (np.sqrt(s[d]) + eps))


def rowwise_adagrad(w, s, g, a):
    s[0] += f32(square_sum(g) / g.shape[0])
    scale = f32(a.lr) / (np.sqrt(s[0]) + f32(a.eps))
    for d in range(w.shape[0]):
        w[d] -= scale * g[d]


def rmsprop(w, s, g, a):
    lr, alpha, rest, eps = f32(a.lr), f32(a.alpha), f32(a.one_minus_alpha), f32(a.eps)
    for d in range(w.shape[0]):
        s[d] = s[d] * alpha + (g[d] * g[d]) * rest
        w[d] -= lr * (g[d] / (np.sqrt(s[d]) + eps))


def adam(w, s, g, a):
    step_size, rest1, rest2, eps = (
        f32(a.step_size),
        f32(a.one_minus_beta1),
        f32(a.one_minus_beta2),
        f32(a.eps),
    )
    dim = w.shape[0]
    for d in range(dim):
        m = s[d] + (g[d] - s[d]) * rest1
        v = s[dim + d] + (g[d] * g[d] - s[dim + d]) * rest2
        s[d] = m
        s[dim + d] = v
        w[d] -= step_size * (m / (np.sqrt(v) + eps))


def adamw(w, s, g, a):
    step_size, shrink, rest1 = f32(a.step_size), f32(a.shrink), f32(a.one_minus_beta1)
    beta2, rest2, correction, eps = (
        f32(a.beta2),
        f32(a.one_minus_beta2),
        f32(a.bias_correction2_sqrt),
        f32(a.eps),
    )
    dim = w.shape[0]
    for d in range(dim):
        m = s[d] + (g[d] - s[d]) * rest1
        v = s[dim + d] * beta2 + (g[d] * g[d]) * rest2
        s[d] = m
        s[dim + d] = v
        w[d] = w[d] * shrink - step_size * (m / (np.sqrt(v) / correction + eps))


def ftrl(w, s, g, a):
    lr, l1, l2, beta = f32(a.lr), f32(a.l1), f32(a.l2), f32(a.beta)
    dim = w.shape[0]
    for d in range(dim):
        n = s[d] + g[d] * g[d]
        z = s[dim + d] + (g[d] - (np.sqrt(n) - np.sqrt(s[d])) / lr * w[d])
        s[d] = n
        s[dim + d] = z
        shrunk = (l1 if z > f32(0) else -l1) - z
        moved = shrunk / ((beta + np.sqrt(n)) / lr + f32(2) * l2)
        w[d] = moved if np.abs(z) > l1 else f32(0)


@kernel
def _still_moving(w, s, a):
    # A later step of this row is at most largest_step_size * |m| / (sqrt(v) + eps), and fades while
    # beta1 < sqrt(beta2). Below a quarter of a unit in the last place of w it rounds to nothing, as do all after it.
    dim = w.shape[0]
    largest = f32(a.largest_step_size)
    moving = 0
    for d in range(dim):
        moving += largest * np.abs(s[d]) > f32(2.0**-26) * np.abs(w[d]) * np.sqrt(s[dim + d])
    return moving > 0


@kernel
def _fade(s, a, since, until):
    # The rest of the steps, when none of them moves the weights any more.
    dim = s.shape[0] // 2
    fade1 = f32(np.exp(a.log_fade[until, 0] - a.log_fade[since, 0]))
    fade2 = f32(np.exp(a.log_fade[until, 1] - a.log_fade[since, 1]))
    for d in range(dim):
        s[d] *= fade1
        s[dim + d] *= fade2


@kernel
def _catch_up(w, s, a, until):
    dim = w.shape[0]
    last = f32(s[2 * dim]).view(np.int32)
    s[2 * dim] = np.int32(until).view(f32)
    if last == 0:
        return
    for t in range(last, until):
        if a.fading != 0.0 and t % 8 == 0 and not _still_moving(w, s, a):
            _fade(s, a, t, until)
            return
        step_size, beta1, beta2 = a.history[t, 0], a.history[t, 1], a.history[t, 2]
        correction, eps = a.history[t, 5], a.history[t, 6]
        for d in range(dim):
            m = s[d] * beta1
            v = s[dim + d] * beta2
            s[d] = m
            s[dim + d] = v
            w[d] -= step_size * (m / (np.sqrt(v) / correction + eps))


def refresh_dense_adam(w, s, a):
    """Bring a row up to step ``a.steps``: the steps that dense Adam made while no batch touched it."""
    _catch_up(w, s, a, a.steps)


def dense_adam(w, s, g, a):
    dim = w.shape[0]
    t = a.steps - 1
    _catch_up(w, s, a, t)
    step_size, beta2, rest1, rest2 = a.history[t, 0], a.history[t, 2], a.history[t, 3], a.history[t, 4]
    correction, eps = a.history[t, 5], a.history[t, 6]
    for d in range(dim):
        m = s[d] + (g[d] - s[d]) * rest1
        v = s[dim + d] * beta2 + (g[d] * g[d]) * rest2
        s[d] = m
        s[dim + d] = v
        w[d] -= step_size * (m / (np.sqrt(v) / correction + eps))
    s[2 * dim] = np.int32(a.steps).view(f32)


UPDATES: dict[type, Callable[..., None]] = {
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


REFRESHES: dict[type, Callable[..., None]] = {arguments.DenseAdamStep: refresh_dense_adam}


def update_row(w, s, g, a):
    """Step one row by the rule that ``a`` belongs to. Compiled code only."""


@overload(update_row)
def _update_row(w, s, g, a):  # Numba compares argument lists, annotations included: none here
    return UPDATES.get(a.instance_class) if isinstance(a, types.BaseNamedTuple) else None


def refresh_row(w, s, a):
    """Bring one row up to date by the rule that ``a`` belongs to. Compiled code only."""


@overload(refresh_row)
def _refresh_row(w, s, a):
    return REFRESHES.get(a.instance_class) if isinstance(a, types.BaseNamedTuple) else None
