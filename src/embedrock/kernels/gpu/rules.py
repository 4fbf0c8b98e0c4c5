"""Update of every rule, on a tile of rows: of one row for the rules in `ONE_ROW`.

Each function takes the rows' weights ``w`` and summed gradients ``g``. They are float32 tiles (rows, BLOCK) with zeros
in the columns beyond dim. It changes the optimizer state at the addresses ``s`` (rows,) in memory. ``rows`` masks
existing rows, ``a`` are the step constants, apart from the integer ``steps``, and `FORM` is the `RecordForm`. It
returns the new weights.

The arithmetic is that of ``kernels/cpu/rules.py`` in the same order, with every operation rounded once. So the bits are
the same, except for exponential functions and sums of squares, which are rounded from float64.
"""

import triton.language as tl

from embedrock.kernels import arguments
from embedrock.kernels.gpu.numbers import loaded
from embedrock.kernels.gpu.runtime import inlined

STILL = tl.constexpr(2.0**-26)

# Columns of a history.
MOMENTUM, RMSPROP = tl.constexpr(arguments.MOMENTUM_COLUMN), tl.constexpr(arguments.RMSPROP_COLUMN)
ADAM, ADAM_FADE = tl.constexpr(arguments.ADAM_COLUMN), tl.constexpr(arguments.ADAM_FADE)
FTRL = tl.constexpr(arguments.FTRL_COLUMN)


@inlined
def _columns(s, rows, w, PART: tl.constexpr, FORM: tl.constexpr):
    # Return the addresses of each weight's state, and a mask of existing ones.
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
    # One number of each row: all warps read it, and one writes it, after all have read it.
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
def _row(history, t, COLUMNS: tl.constexpr):
    # The address of a step's constants, in the given columns.
    return history + t.to(tl.int64) * len(COLUMNS.value)


@inlined
def _fade(start, end):
    # The decay from one step to another, from the addresses of their logarithms.
    return tl.exp(tl.load(end) - tl.load(start)).to(tl.float32)


@inlined
def sgd(w, g, s, rows, a, steps, FORM: tl.constexpr):
    return w - loaded(a.lr) * g


@inlined
def _momentum_step(w, b, g, gradient_rate, keep, buffer_rate, nesterov):
    b = b * keep + gradient_rate * g
    return w - buffer_rate * tl.where(nesterov != 0.0, gradient_rate * g + keep * b, b), b


@inlined
def momentum(w, g, s, rows, a, steps, FORM: tl.constexpr):
    b = _load(s, rows, w, 0, FORM)
    w, b = _momentum_step(
        w, b, g, loaded(a.gradient_rate), loaded(a.momentum), loaded(a.buffer_rate), loaded(a.nesterov)
    )
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
            moving = _any(a.largest_rate * tl.abs(b) > tl.abs(w) * STILL)
        if moving:
            now = _row(a.history, t, MOMENTUM)
            keep, nesterov = tl.load(now + MOMENTUM.value.momentum), tl.load(now + MOMENTUM.value.nesterov)
            b *= keep
            w -= tl.load(now + MOMENTUM.value.buffer_rate) * (tl.where(nesterov != 0.0, keep, 1.0) * b)
            t += 1
        else:
            b *= _fade(a.log_fade + t, a.log_fade + until)
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
    now = _row(a.history, t, MOMENTUM)
    gradient_rate, keep = tl.load(now + MOMENTUM.value.gradient_rate), tl.load(now + MOMENTUM.value.momentum)
    buffer_rate, nesterov = tl.load(now + MOMENTUM.value.buffer_rate), tl.load(now + MOMENTUM.value.nesterov)
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
    return _moved(w, g, v, loaded(a.lr), loaded(a.eps_inside), loaded(a.eps))


@inlined
def rowwise_adagrad(w, g, s, rows, a, steps, FORM: tl.constexpr):
    wide = g.to(tl.float64)
    v = tl.load(s, mask=rows, other=0.0) + (tl.sum(wide * wide, 1) / FORM.dim).to(tl.float32)
    _store_one(s, rows, v, 0)
    scale = tl.div_rn(loaded(a.lr) + tl.zeros_like(v), tl.sqrt_rn(v) + loaded(a.eps))
    return w - scale[:, None] * g


@inlined
def rmsprop(w, g, s, rows, a, steps, FORM: tl.constexpr):
    v = _load(s, rows, w, 0, FORM) * loaded(a.alpha) + (g * g) * loaded(a.one_minus_alpha)
    _store(s, rows, v, 0, FORM)
    return _moved(w, g, v, loaded(a.lr), loaded(a.eps_inside), loaded(a.eps))


@inlined
def dense_rmsprop(w, g, s, rows, a, steps, FORM: tl.constexpr):
    now = _row(a.history, steps - 1, RMSPROP)
    alpha, rest = tl.load(now + RMSPROP.value.alpha), tl.load(now + RMSPROP.value.one_minus_alpha)
    inside, eps = tl.load(now + RMSPROP.value.eps_inside), tl.load(now + RMSPROP.value.eps)
    fade = _fade(a.log_fade + _last_steps(s, rows, FORM), a.log_fade + (steps - 1))
    v = (_load(s, rows, w, 0, FORM) * fade[:, None]) * alpha + (g * g) * rest
    _store(s, rows, v, 0, FORM)
    _set_last_steps(s, rows, steps, FORM)
    return _moved(w, g, v, tl.load(now + RMSPROP.value.lr), inside, eps)


@inlined
def adam(w, g, s, rows, a, steps, FORM: tl.constexpr):
    m, v = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
    m += (g - m) * loaded(a.one_minus_beta1)
    v += (g * g - v) * loaded(a.one_minus_beta2)
    _store(s, rows, m, 0, FORM)
    _store(s, rows, v, 1, FORM)
    return w - loaded(a.step_size) * tl.div_rn(m, tl.sqrt_rn(v) + loaded(a.eps))


@inlined
def _adamw_weights(w, m, v, step_size, correction, eps, shrink, decay):
    root = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + correction)
    return w * shrink - (w * decay + step_size * tl.div_rn(m, root + eps))


@inlined
def adamw(w, g, s, rows, a, steps, FORM: tl.constexpr):
    m, v = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
    m += (g - m) * loaded(a.one_minus_beta1)
    v = v * loaded(a.beta2) + (g * g) * loaded(a.one_minus_beta2)
    _store(s, rows, m, 0, FORM)
    _store(s, rows, v, 1, FORM)
    return _adamw_weights(
        w, m, v, loaded(a.step_size), loaded(a.bias_correction2_sqrt), loaded(a.eps), loaded(a.shrink), loaded(a.decay)
    )


@inlined
def _still_moving(w, m, v, largest):
    # A later step of this row is at most largest_step_size * |m| / (sqrt(v) + eps). It fades while beta1 < sqrt(beta2),
    # also beside weights that shrink. Below a quarter of a unit in the last place of w, it and all later steps round to
    # nothing.
    return _any(largest * tl.abs(m) > tl.abs(w) * STILL * tl.sqrt_rn(v))


@inlined
def _dense_adam_weights(w, m, v, now):
    step_size, correction = tl.load(now + ADAM.value.step_size), tl.load(now + ADAM.value.bias_correction2_sqrt)
    eps, shrink, decay = (
        tl.load(now + ADAM.value.eps),
        tl.load(now + ADAM.value.shrink),
        tl.load(now + ADAM.value.decay),
    )
    return _adamw_weights(w, m, v, step_size, correction, eps, shrink, decay)


@inlined
def _adam_decay(w, m, v, now):
    m *= tl.load(now + ADAM.value.beta1)
    v *= tl.load(now + ADAM.value.beta2)
    return _dense_adam_weights(w, m, v, now), m, v


@inlined
def _catch_up_adam(w, s, rows, a, until, FORM: tl.constexpr):
    m, v = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
    t = tl.max(_last_steps(s, rows, FORM), 0)
    if t == 0:  # never stepped: the moments are 0
        w *= tl.exp(tl.load(_row(a.log_fade, until, ADAM_FADE) + ADAM_FADE.value.weights)).to(tl.float32)
        t = until
    while t < until:
        moving = t >= 0
        if (a.fading != 0.0) & (t % 8 == 0):
            moving = _still_moving(w, m, v, a.largest_step_size)
        if moving:
            w, m, v = _adam_decay(w, m, v, _row(a.history, t, ADAM))
            t += 1
        else:  # only their own decay moves the weights in the remaining steps
            start, end = _row(a.log_fade, t, ADAM_FADE), _row(a.log_fade, until, ADAM_FADE)
            m *= _fade(start + ADAM_FADE.value.first_moment, end + ADAM_FADE.value.first_moment)
            v *= _fade(start + ADAM_FADE.value.second_moment, end + ADAM_FADE.value.second_moment)
            w *= _fade(start + ADAM_FADE.value.weights, end + ADAM_FADE.value.weights)
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
    now = _row(a.history, t, ADAM)
    m += (g - m) * tl.load(now + ADAM.value.one_minus_beta1)
    v = v * tl.load(now + ADAM.value.beta2) + (g * g) * tl.load(now + ADAM.value.one_minus_beta2)
    _store(s, rows, m, 0, FORM)
    _store(s, rows, v, 1, FORM)
    _set_last_steps(s, rows, steps, FORM)
    return _dense_adam_weights(w, m, v, now)


@inlined
def _ftrl_weights(w, n, z, lr, l1, l2, beta):
    lr += tl.zeros_like(n)
    shrunk = tl.where(z > 0.0, l1, -l1) - z
    moved = tl.div_rn(shrunk, tl.div_rn(beta + tl.sqrt_rn(n), lr) + 2.0 * l2)
    return tl.where(lr > 0.0, tl.where(tl.abs(z) > l1, moved, 0.0), w)


@inlined
def _ftrl_step(w, g, s, rows, lr, l1, l2, beta, shrinkage, FORM: tl.constexpr):
    before, z = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
    moves = lr + tl.zeros_like(w) > 0.0  # else a division by 0
    n = tl.where(moves, before + g * g, before)
    added = (g + shrinkage * w) - tl.div_rn(tl.sqrt_rn(n) - tl.sqrt_rn(before), lr + tl.zeros_like(n)) * w
    z = tl.where(moves, z + added, z)
    _store(s, rows, n, 0, FORM)
    _store(s, rows, z, 1, FORM)
    return _ftrl_weights(w, n, z, lr, l1, l2, beta)


@inlined
def ftrl(w, g, s, rows, a, steps, FORM: tl.constexpr):
    return _ftrl_step(
        w, g, s, rows, loaded(a.lr), loaded(a.l1), loaded(a.l2), loaded(a.beta), 2.0 * loaded(a.l2_shrinkage), FORM
    )


@inlined
def _ftrl_numbers(history, t):
    now = _row(history, t, FTRL)
    lr, l1 = tl.load(now + FTRL.value.lr), tl.load(now + FTRL.value.l1)
    return lr, l1, tl.load(now + FTRL.value.l2), tl.load(now + FTRL.value.beta)


@inlined
def refresh_dense_ftrl(w, s, rows, a, steps, FORM: tl.constexpr):
    """Catch up rows to step `steps`, which recomputed the weights of every row from its state."""
    if steps > 0:
        n, z = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
        lr, l1, l2, beta = _ftrl_numbers(a.history, steps - 1)
        w = _ftrl_weights(w, n, z, tl.abs(lr), l1, l2, beta)
    return w


@inlined
def dense_ftrl(w, g, s, rows, a, steps, FORM: tl.constexpr):
    t = steps - 1
    w = refresh_dense_ftrl(w, s, rows, a, t, FORM)
    lr, l1, l2, beta = _ftrl_numbers(a.history, t)
    return _ftrl_step(w, g, s, rows, lr, l1, l2, beta, 0.0, FORM)


UPDATES = arguments.functions_of_steps(globals())
REFRESHES = arguments.functions_of_steps(globals(), "refresh_")

ONE_ROW = {arguments.DenseMomentumStep, arguments.DenseAdamStep}  # their loops are as long as a row was not stepped
