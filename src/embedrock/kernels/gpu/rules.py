"""The update of every rule, on a tile of rows: of one row for the rules in `ONE_ROW`.

Each function takes the rows' weights ``w`` and summed gradients ``g``, float32 tiles (rows, BLOCK) whose columns beyond
dim are 0; the addresses ``s`` (rows,) of their optimizer state, which it changes in place; ``rows``, which of them are
there; the step's numbers ``a`` with their ``steps`` apart; and the `Form`. It returns the weights as they become.
The arithmetic is that of ``kernels/cpu/rules.py`` in the same order, every operation rounded once: the same bits, but
for what goes through the exponential function or a sum of squares, which are rounded from float64.
"""

import triton.language as tl

from embedrock.kernels import arguments
from embedrock.kernels.gpu.runtime import inlined

STILL = tl.constexpr(2.0**-26)


@inlined
def _columns(s, rows, w, PART: tl.constexpr, FORM: tl.constexpr):
    # The addresses of the state that belongs to each weight, and which of them are there.
    columns = tl.arange(0, w.shape[1])[None, :]
    return s[:, None] + PART * FORM.dim + columns, rows[:, None] & (columns < FORM.dim)


@inlined
def _load(s, rows, w, PART: tl.constexpr, FORM: tl.constexpr):
    at, there = _columns(s, rows, w, PART, FORM)
    return tl.load(at, mask=there, other=0.0)


@inlined
def _store(s, rows, value, PART: tl.constexpr, FORM: tl.constexpr):
    at, there = _columns(s, rows, value, PART, FORM)
    tl.store(at, value, mask=there)


@inlined
def _store_one(s, rows, value, COLUMN: tl.constexpr):
    # Of each row: all warps read such a number, and one writes it, not before all have read it.
    tl.debug_barrier()
    tl.store(s + COLUMN, value, mask=rows)


@inlined
def _last_steps(s, rows, FORM: tl.constexpr):
    # The step at which each row was last stepped: an int32's bits in the last column.
    return tl.load(s + (FORM.state_width - 1), mask=rows, other=0.0).to(tl.int32, bitcast=True)


@inlined
def _set_last_steps(s, rows, steps, FORM: tl.constexpr):
    value = tl.full(s.shape, steps, tl.int32).to(tl.float32, bitcast=True)
    _store_one(s, rows, value, FORM.state_width - 1)


@inlined
def _number(history, t, COLUMN: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.load(history + t.to(tl.int64) * COLUMNS + COLUMN)


@inlined
def _fade(log_fade, since, until, COLUMN: tl.constexpr, COLUMNS: tl.constexpr):
    end = _number(log_fade, until, COLUMN, COLUMNS)
    return tl.exp(end - _number(log_fade, since, COLUMN, COLUMNS)).to(tl.float32)


@inlined
def sgd(w, g, s, rows, a, steps, FORM: tl.constexpr):
    return w - a.lr * g


@inlined
def _momentum_step(w, b, g, gradient_rate, keep, buffer_rate, nesterov):
    b = b * keep + gradient_rate * g
    return w - buffer_rate * tl.where(nesterov != 0.0, gradient_rate * g + keep * b, b), b


@inlined
def momentum(w, g, s, rows, a, steps, FORM: tl.constexpr):
    b = _load(s, rows, w, 0, FORM)
    w, b = _momentum_step(w, b, g, a.gradient_rate, a.momentum, a.buffer_rate, a.nesterov)
    _store(s, rows, b, 0, FORM)
    return w


@inlined
def _any(condition):
    return tl.max(condition.to(tl.int32)) > 0


@inlined
def _catch_up_momentum(w, s, rows, a, until, FORM: tl.constexpr):
    b = _load(s, rows, w, 0, FORM)
    t = tl.max(_last_steps(s, rows, FORM), 0)
    while t < until:
        moving = t >= 0
        if t % 8 == 0:  # a later step is at most largest_rate * |b|, and b fades: see _catch_up_adam
            moving = _any(a.largest_rate * tl.abs(b) > STILL * tl.abs(w))
        if moving:
            keep, rate = _number(a.history, t, 1, 4), _number(a.history, t, 2, 4)
            b *= keep
            w -= rate * (tl.where(_number(a.history, t, 3, 4) != 0.0, keep, 1.0) * b)
            t += 1
        else:
            b *= _fade(a.log_fade, t, until, 0, 1)
            t = until
    return w, b


@inlined
def refresh_dense_momentum(w, s, rows, a, steps, FORM: tl.constexpr):
    w, _ = _catch_up_momentum(w, s, rows, a, steps, FORM)
    return w


@inlined
def dense_momentum(w, g, s, rows, a, steps, FORM: tl.constexpr):
    t = steps - 1
    w, b = _catch_up_momentum(w, s, rows, a, t, FORM)
    gradient_rate, keep = _number(a.history, t, 0, 4), _number(a.history, t, 1, 4)
    buffer_rate, nesterov = _number(a.history, t, 2, 4), _number(a.history, t, 3, 4)
    w, b = _momentum_step(w, b, g, gradient_rate, keep, buffer_rate, nesterov)
    _store(s, rows, b, 0, FORM)
    _set_last_steps(s, rows, steps, FORM)
    return w


@inlined
def _moved(w, g, v, lr, eps_inside, eps):
    return w - lr * tl.div_rn(g, tl.sqrt_rn(v + eps_inside) + eps)


@inlined
def adagrad(w, g, s, rows, a, steps, FORM: tl.constexpr):
    v = _load(s, rows, w, 0, FORM) + g * g
    _store(s, rows, v, 0, FORM)
    return _moved(w, g, v, a.lr, a.eps_inside, a.eps)


@inlined
def rowwise_adagrad(w, g, s, rows, a, steps, FORM: tl.constexpr):
    wide = g.to(tl.float64)
    v = tl.load(s, mask=rows, other=0.0) + (tl.sum(wide * wide, 1) / FORM.dim).to(tl.float32)
    _store_one(s, rows, v, 0)
    scale = tl.div_rn(a.lr + tl.zeros_like(v), tl.sqrt_rn(v) + a.eps)
    return w - scale[:, None] * g


@inlined
def rmsprop(w, g, s, rows, a, steps, FORM: tl.constexpr):
    v = _load(s, rows, w, 0, FORM) * a.alpha + (g * g) * a.one_minus_alpha
    _store(s, rows, v, 0, FORM)
    return _moved(w, g, v, a.lr, a.eps_inside, a.eps)


@inlined
def dense_rmsprop(w, g, s, rows, a, steps, FORM: tl.constexpr):
    t = steps - 1
    fade = _fade(a.log_fade, _last_steps(s, rows, FORM), t, 0, 1)
    lr, alpha, rest = _number(a.history, t, 0, 5), _number(a.history, t, 1, 5), _number(a.history, t, 2, 5)
    v = (_load(s, rows, w, 0, FORM) * fade[:, None]) * alpha + (g * g) * rest
    _store(s, rows, v, 0, FORM)
    _set_last_steps(s, rows, steps, FORM)
    return _moved(w, g, v, lr, _number(a.history, t, 3, 5), _number(a.history, t, 4, 5))


@inlined
def adam(w, g, s, rows, a, steps, FORM: tl.constexpr):
    m, v = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
    m += (g - m) * a.one_minus_beta1
    v += (g * g - v) * a.one_minus_beta2
    _store(s, rows, m, 0, FORM)
    _store(s, rows, v, 1, FORM)
    return w - a.step_size * tl.div_rn(m, tl.sqrt_rn(v) + a.eps)


@inlined
def _adamw_weights(w, m, v, step_size, correction, eps, shrink, decay):
    root = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + correction)
    return w * shrink - (w * decay + step_size * tl.div_rn(m, root + eps))


@inlined
def adamw(w, g, s, rows, a, steps, FORM: tl.constexpr):
    m, v = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
    m += (g - m) * a.one_minus_beta1
    v = v * a.beta2 + (g * g) * a.one_minus_beta2
    _store(s, rows, m, 0, FORM)
    _store(s, rows, v, 1, FORM)
    return _adamw_weights(w, m, v, a.step_size, a.bias_correction2_sqrt, a.eps, a.shrink, a.decay)


@inlined
def _still_moving(w, m, v, largest):
    # A later step of this row is at most largest_step_size * |m| / (sqrt(v) + eps), and fades while
    # beta1 < sqrt(beta2), also beside weights that shrink. Below a quarter of a unit in the last place of w it rounds
    # to nothing, as do all after it.
    return _any(largest * tl.abs(m) > STILL * tl.abs(w) * tl.sqrt_rn(v))


@inlined
def _adam_decay(w, m, v, history, t):
    m *= _number(history, t, 1, 9)
    v *= _number(history, t, 2, 9)
    step_size, correction, eps = _number(history, t, 0, 9), _number(history, t, 5, 9), _number(history, t, 6, 9)
    shrink, decay = _number(history, t, 7, 9), _number(history, t, 8, 9)
    return _adamw_weights(w, m, v, step_size, correction, eps, shrink, decay), m, v


@inlined
def _catch_up_adam(w, s, rows, a, until, FORM: tl.constexpr):
    m, v = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
    t = tl.max(_last_steps(s, rows, FORM), 0)
    if t == 0:  # it was never stepped: its moments are 0
        w *= tl.exp(_number(a.log_fade, until, 2, 3)).to(tl.float32)
        t = until
    while t < until:
        moving = t >= 0
        if (a.fading != 0.0) & (t % 8 == 0):
            moving = _still_moving(w, m, v, a.largest_step_size)
        if moving:
            w, m, v = _adam_decay(w, m, v, a.history, t)
            t += 1
        else:  # none of the other steps moves the weights but by their own decay
            m *= _fade(a.log_fade, t, until, 0, 3)
            v *= _fade(a.log_fade, t, until, 1, 3)
            w *= _fade(a.log_fade, t, until, 2, 3)
            t = until
    return w, m, v


@inlined
def refresh_dense_adam(w, s, rows, a, steps, FORM: tl.constexpr):
    w, _, _ = _catch_up_adam(w, s, rows, a, steps, FORM)
    return w


@inlined
def dense_adam(w, g, s, rows, a, steps, FORM: tl.constexpr):
    t = steps - 1
    w, m, v = _catch_up_adam(w, s, rows, a, t, FORM)
    m += (g - m) * _number(a.history, t, 3, 9)
    v = v * _number(a.history, t, 2, 9) + (g * g) * _number(a.history, t, 4, 9)
    _store(s, rows, m, 0, FORM)
    _store(s, rows, v, 1, FORM)
    _set_last_steps(s, rows, steps, FORM)
    step_size, correction, eps = _number(a.history, t, 0, 9), _number(a.history, t, 5, 9), _number(a.history, t, 6, 9)
    shrink, decay = _number(a.history, t, 7, 9), _number(a.history, t, 8, 9)
    return _adamw_weights(w, m, v, step_size, correction, eps, shrink, decay)


@inlined
def _ftrl_weights(n, z, lr, l1, l2, beta):
    lr += tl.zeros_like(n)
    shrunk = tl.where(z > 0.0, l1, -l1) - z
    moved = tl.div_rn(shrunk, tl.div_rn(beta + tl.sqrt_rn(n), lr) + 2.0 * l2)
    return tl.where(tl.abs(z) > l1, moved, 0.0)


@inlined
def _ftrl_step(w, g, s, rows, lr, l1, l2, beta, shrinkage, FORM: tl.constexpr):
    before, z = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
    n = before + g * g
    z += (g + shrinkage * w) - tl.div_rn(tl.sqrt_rn(n) - tl.sqrt_rn(before), lr + tl.zeros_like(n)) * w
    _store(s, rows, n, 0, FORM)
    _store(s, rows, z, 1, FORM)
    return _ftrl_weights(n, z, lr, l1, l2, beta)


@inlined
def ftrl(w, g, s, rows, a, steps, FORM: tl.constexpr):
    return _ftrl_step(w, g, s, rows, a.lr, a.l1, a.l2, a.beta, 2.0 * a.l2_shrinkage, FORM)


@inlined
def refresh_dense_ftrl(w, s, rows, a, steps, FORM: tl.constexpr):
    """Bring rows up to step `steps`, which made their weights anew of their state, as it does to every row."""
    if steps > 0:
        n, z, t = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM), steps - 1
        lr, l1 = _number(a.history, t, 0, 4), _number(a.history, t, 1, 4)
        w = _ftrl_weights(n, z, lr, l1, _number(a.history, t, 2, 4), _number(a.history, t, 3, 4))
    return w


@inlined
def dense_ftrl(w, g, s, rows, a, steps, FORM: tl.constexpr):
    t = steps - 1
    w = refresh_dense_ftrl(w, s, rows, a, t, FORM)
    lr, l1, l2 = _number(a.history, t, 0, 4), _number(a.history, t, 1, 4), _number(a.history, t, 2, 4)
    return _ftrl_step(w, g, s, rows, lr, l1, l2, _number(a.history, t, 3, 4), 0.0, FORM)


UPDATES = {
    arguments.SGDStep: sgd,
    arguments.MomentumStep: momentum,
    arguments.DenseMomentumStep: dense_momentum,
    arguments.AdagradStep: adagrad,
    arguments.RowwiseAdagradStep: rowwise_adagrad,
    arguments.RMSpropStep: rmsprop,
    arguments.DenseRMSpropStep: dense_rmsprop,
    arguments.AdamStep: adam,
    arguments.AdamWStep: adamw,
    arguments.DenseAdamStep: dense_adam,
    arguments.FtrlStep: ftrl,
    arguments.DenseFtrlStep: dense_ftrl,
}

REFRESHES = {
    arguments.DenseMomentumStep: refresh_dense_momentum,
    arguments.DenseAdamStep: refresh_dense_adam,
    arguments.DenseFtrlStep: refresh_dense_ftrl,
}

ONE_ROW = {arguments.DenseMomentumStep, arguments.DenseAdamStep}  # their loops are as long as a row has been away
