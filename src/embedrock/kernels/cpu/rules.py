"""The update of every rule, on one row.

Each function takes one row and the step constants. A row is weights ``w`` (dim,), optimizer state ``s`` (state_width,)
and summed gradient ``g`` (dim,), all float32. The function changes ``w`` and ``s`` in place. `update_row` dispatches on
the type of the constants; the step kernel in ``rows.py`` is compiled once for each. The functions ``catch_up_...``
take a stale row to step ``until``, with the steps of the dense rule while no batch touched the row.
"""

import numpy as np
from numba import types
from numba.extending import overload

from embedrock.kernels import arguments
from embedrock.kernels.arguments import ADAM_COLUMN, ADAM_FADE, FTRL_COLUMN, MOMENTUM_COLUMN, RMSPROP_COLUMN
from embedrock.kernels.cpu.lanes import NARROW, square_sum
from embedrock.kernels.cpu.runtime import by_types, inlined, kernel

f32 = np.float32


@kernel()
def _last_step(s, step):
    """Return the number of a row's last step, and store another: an int32's bits in the last column."""
    last = f32(s[s.shape[0] - 1]).view(np.int32)
    s[s.shape[0] - 1] = np.int32(step).view(f32)
    return last


def sgd(w, s, g, a):
    lr = f32(a.lr)
    for d in range(w.shape[0]):
        w[d] -= lr * g[d]


@inlined
def _momentum_step(w, s, g, gradient_rate, keep, buffer_rate, nesterov):
    if nesterov != f32(0):
        for d in range(w.shape[0]):
            s[d] = s[d] * keep + gradient_rate * g[d]
            w[d] -= buffer_rate * (gradient_rate * g[d] + keep * s[d])
    else:
        for d in range(w.shape[0]):
            s[d] = s[d] * keep + gradient_rate * g[d]
            w[d] -= buffer_rate * s[d]


def momentum(w, s, g, a):
    _momentum_step(w, s, g, f32(a.gradient_rate), f32(a.momentum), f32(a.buffer_rate), f32(a.nesterov))


@kernel()
def catch_up_dense_momentum(w, s, a, until):
    dim = w.shape[0]
    for t in range(_last_step(s, until), until):
        keep, rate = a.history[t, MOMENTUM_COLUMN.momentum], a.history[t, MOMENTUM_COLUMN.buffer_rate]
        if t % 8 == 0 and not _coasting(w, s, a):
            fade = f32(np.exp(a.log_fade[until, 0] - a.log_fade[t, 0]))
            for d in range(dim):
                s[d] *= fade
            return
        ahead = keep if a.history[t, MOMENTUM_COLUMN.nesterov] != f32(0) else f32(1)
        for d in range(dim):
            s[d] *= keep
            w[d] -= rate * (ahead * s[d])


@kernel()
def _coasting(w, s, a):
    # A later step of this row is at most largest_rate * |b|, and b fades: see _still_moving.
    largest = f32(a.largest_rate)
    moving = 0
    for d in range(w.shape[0]):
        moving += largest * np.abs(s[d]) > f32(2.0**-26) * np.abs(w[d])
    return moving > 0


def dense_momentum(w, s, g, a):
    t = a.steps - 1
    catch_up_dense_momentum(w, s, a, t)
    now, at = a.history[t], MOMENTUM_COLUMN
    _momentum_step(w, s, g, now[at.gradient_rate], now[at.momentum], now[at.buffer_rate], now[at.nesterov])
    _last_step(s, a.steps)


def adagrad(w, s, g, a):
    lr, eps_inside, eps = f32(a.lr), f32(a.eps_inside), f32(a.eps)
    for d in range(w.shape[0]):
        s[d] += g[d] * g[d]
        w[d] -= lr * (g[d] / (np.sqrt(s[d] + eps_inside) + eps))


def rowwise(w, s, g, a):
    keep, add, shrink = f32(a.keep), f32(a.add), f32(a.shrink)
    width = g.shape[0] if s.shape[0] == 1 else g.shape[0] // s.shape[0]
    for k in range(s.shape[0]):
        own, grad = w[k * width : (k + 1) * width], g[k * width : (k + 1) * width]
        s[k] = keep * s[k] + add * f32(square_sum(grad) / width)
        scale = f32(a.lr) / (np.sqrt(s[k]) + f32(a.eps))
        for d in range(width):
            own[d] = shrink * own[d] - scale * grad[d]


@inlined
def _rmsprop_step(w, s, g, fade, lr, alpha, rest, eps_inside, eps):
    for d in range(w.shape[0]):
        s[d] = (s[d] * fade) * alpha + (g[d] * g[d]) * rest
        w[d] -= lr * (g[d] / (np.sqrt(s[d] + eps_inside) + eps))


def rmsprop(w, s, g, a):
    alpha, rest = f32(a.alpha), f32(a.one_minus_alpha)
    _rmsprop_step(w, s, g, f32(1), f32(a.lr), alpha, rest, f32(a.eps_inside), f32(a.eps))


def dense_rmsprop(w, s, g, a):
    t, now, at = a.steps - 1, a.history[a.steps - 1], RMSPROP_COLUMN
    fade = f32(np.exp(a.log_fade[t, 0] - a.log_fade[_last_step(s, a.steps), 0]))
    numbers = now[at.lr], now[at.alpha], now[at.one_minus_alpha], now[at.eps_inside], now[at.eps]
    _rmsprop_step(w, s, g, fade, *numbers)


def adam(w, s, g, a):
    step_size, rest1, rest2, eps = f32(a.step_size), f32(a.one_minus_beta1), f32(a.one_minus_beta2), f32(a.eps)
    dim = w.shape[0]
    for d in range(dim):
        m = s[d] + (g[d] - s[d]) * rest1
        v = s[dim + d] + (g[d] * g[d] - s[dim + d]) * rest2
        s[d] = m
        s[dim + d] = v
        w[d] -= step_size * (m / (np.sqrt(v) + eps))


@inlined
def _adamw_step(w, s, g, step_size, beta2, rest1, rest2, correction, eps, shrink, decay):
    dim = w.shape[0]
    for d in range(dim):
        m = s[d] + (g[d] - s[d]) * rest1
        v = s[dim + d] * beta2 + (g[d] * g[d]) * rest2
        s[d] = m
        s[dim + d] = v
        w[d] = w[d] * shrink - (w[d] * decay + step_size * (m / (np.sqrt(v) / correction + eps)))


def adamw(w, s, g, a):
    rest1, rest2, correction = f32(a.one_minus_beta1), f32(a.one_minus_beta2), f32(a.bias_correction2_sqrt)
    step_size, beta2, eps, shrink, decay = f32(a.step_size), f32(a.beta2), f32(a.eps), f32(a.shrink), f32(a.decay)
    _adamw_step(w, s, g, step_size, beta2, rest1, rest2, correction, eps, shrink, decay)


@inlined
def _ftrl_weight(n, z, lr, l1, l2, beta):
    shrunk = (l1 if z > f32(0) else -l1) - z
    moved = shrunk / ((beta + np.sqrt(n)) / lr + f32(2) * l2)
    return moved if np.abs(z) > l1 else f32(0)


@inlined
def _ftrl_step(w, s, g, lr, l1, l2, beta, shrinkage):
    if lr <= f32(0):  # it moves nothing, and must not be a divisor
        return
    dim = w.shape[0]
    for d in range(dim):
        n = s[d] + g[d] * g[d]
        z = s[dim + d] + ((g[d] + shrinkage * w[d]) - (np.sqrt(n) - np.sqrt(s[d])) / lr * w[d])
        s[d] = n
        s[dim + d] = z
        w[d] = _ftrl_weight(n, z, lr, l1, l2, beta)


def ftrl(w, s, g, a):
    _ftrl_step(w, s, g, f32(a.lr), f32(a.l1), f32(a.l2), f32(a.beta), f32(2) * f32(a.l2_shrinkage))


@kernel()
def catch_up_dense_ftrl(w, s, a, until):
    if until == 0:
        return
    dim, now, at = w.shape[0], a.history[until - 1], FTRL_COLUMN
    lr, l1, l2, beta = np.abs(now[at.lr]), now[at.l1], now[at.l2], now[at.beta]
    if lr == f32(0):
        return
    for d in range(dim):
        w[d] = _ftrl_weight(s[d], s[dim + d], lr, l1, l2, beta)


def dense_ftrl(w, s, g, a):
    t = a.steps - 1
    catch_up_dense_ftrl(w, s, a, t)
    now, at = a.history[t], FTRL_COLUMN
    _ftrl_step(w, s, g, now[at.lr], now[at.l1], now[at.l2], now[at.beta], f32(0))


@kernel()
def _still_moving(w, s, a):
    # A later step of this row is at most largest_step_size * |m| / (sqrt(v) + eps). It fades while beta1 < sqrt(beta2),
    # also beside weights that shrink. Below a quarter of a unit in the last place of w it rounds to nothing, as do all
    # later steps.
    dim = w.shape[0]
    largest = f32(a.largest_step_size)
    for start in range(0, dim, NARROW):  # mostly the first columns move
        moving = 0
        for d in range(start, min(start + NARROW, dim)):
            moving += largest * np.abs(s[d]) > f32(2.0**-26) * np.abs(w[d]) * np.sqrt(s[dim + d])
        if moving > 0:
            return True
    return False


@kernel()
def _fade(w, s, a, since, until):
    # The remaining steps, if they move the weights only by decay.
    dim = w.shape[0]
    end, start, at = a.log_fade[until], a.log_fade[since], ADAM_FADE
    fade1 = f32(np.exp(end[at.first_moment] - start[at.first_moment]))
    fade2 = f32(np.exp(end[at.second_moment] - start[at.second_moment]))
    fade3 = f32(np.exp(end[at.weights] - start[at.weights]))
    for d in range(dim):
        s[d] *= fade1
        s[dim + d] *= fade2
        w[d] *= fade3


@kernel()
def catch_up_dense_adam(w, s, a, until):
    dim = w.shape[0]
    last = _last_step(s, until)
    if last == 0:  # never stepped: the moments are 0
        shrink = f32(np.exp(a.log_fade[until, ADAM_FADE.weights]))
        for d in range(dim):
            w[d] *= shrink
        return
    for t in range(last, until):
        if a.fading != 0.0 and t % 8 == 0 and not _still_moving(w, s, a):
            _fade(w, s, a, t, until)
            return
        now, at = a.history[t], ADAM_COLUMN
        step_size, beta1, beta2, eps = now[at.step_size], now[at.beta1], now[at.beta2], now[at.eps]
        correction, shrink, decay = now[at.bias_correction2_sqrt], now[at.shrink], now[at.decay]
        if correction == f32(1):  # in Keras' form: a division less, and the same bits
            for d in range(dim):
                m = s[d] * beta1
                v = s[dim + d] * beta2
                s[d] = m
                s[dim + d] = v
                w[d] = w[d] * shrink - (w[d] * decay + step_size * (m / (np.sqrt(v) + eps)))
            continue
        for d in range(dim):
            m = s[d] * beta1
            v = s[dim + d] * beta2
            s[d] = m
            s[dim + d] = v
            w[d] = w[d] * shrink - (w[d] * decay + step_size * (m / (np.sqrt(v) / correction + eps)))


def dense_adam(w, s, g, a):
    t = a.steps - 1
    catch_up_dense_adam(w, s, a, t)
    now, at = a.history[t], ADAM_COLUMN
    step_size, beta2, rest1, rest2 = now[at.step_size], now[at.beta2], now[at.one_minus_beta1], now[at.one_minus_beta2]
    correction, eps, shrink, decay = now[at.bias_correction2_sqrt], now[at.eps], now[at.shrink], now[at.decay]
    _adamw_step(w, s, g, step_size, beta2, rest1, rest2, correction, eps, shrink, decay)
    _last_step(s, a.steps)


UPDATES = arguments.functions_of_steps(globals())
REFRESHES = arguments.functions_of_steps(globals(), "catch_up_")


@by_types  # inlined, or its arguments go by the stack: 0.49 instead of 0.35 ms of 28,958 rows
def update_row(w, s, g, a):  # Numba compares argument lists, annotations included: none here
    """Step one row by the rule of ``a``."""
    return UPDATES.get(a.instance_class) if isinstance(a, types.BaseNamedTuple) else None


def refresh_row(w, s, a):
    """Catch one row up by the rule of ``a``. Compiled code only."""


@overload(refresh_row)
def _refresh_row(w, s, a):
    catch_up = REFRESHES.get(a.instance_class) if isinstance(a, types.BaseNamedTuple) else None
    return catch_up and (lambda w, s, a: catch_up(w, s, a, a.steps))
