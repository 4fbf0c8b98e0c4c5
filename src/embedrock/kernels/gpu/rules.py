"""Update of every rule, on a tile of rows: of one row for the rules in `ONE_ROW`.

Each function takes the rows' weights ``w`` and summed gradients ``g``. They are float32 tiles (rows, BLOCK) with zeros
in the columns beyond dim. It changes the optimizer state at the addresses ``s`` (rows,) in memory. ``rows`` masks
existing rows, ``a`` are the step constants, apart from the integer ``steps``, and `FORM` is the `RecordForm`. It
returns the new weights. The functions ``catch_up_...`` take stale rows to step ``until``, and return their weights and
state.

The arithmetic is that of ``kernels/cpu/rules.py`` in the same order, with every operation rounded once. So the bits are
the same, except for exponential functions and sums of squares, which are rounded from float64.
"""

import triton.language as tl

from embedrock.kernels import arguments
from embedrock.kernels.gpu.runtime import inlined, loaded

STILL = tl.constexpr(2.0**-26)
DenseAdamNumbers, DenseFtrlNumbers = arguments.DenseAdamNumbers, arguments.DenseFtrlNumbers
MomentumStep, RMSpropStep = arguments.MomentumStep, arguments.RMSpropStep
FADE = tl.constexpr(arguments.ADAM_FADE)


@inlined
def _columns(s, rows, w, PART, FORM):
    # Return the addresses of each weight's state, and a mask of existing ones.
    columns = tl.arange(0, w.shape[1])[None, :]
    return s[:, None] + PART * FORM.dim + columns, rows[:, None] & (columns < FORM.dim)


@inlined
def _load(s, rows, w, PART, FORM):
    at, there = _columns(s, rows, w, PART, FORM)
    return tl.load(at, mask=there, other=0.0)


@inlined
def _store(s, rows, value, PART, FORM):
    at, there = _columns(s, rows, value, PART, FORM)
    tl.store(at, value, mask=there)


@inlined
def _store_one(s, rows, value, COLUMN):
    # One number of each row: all warps read it, and one writes it, after all have read it.
    tl.debug_barrier()
    tl.store(s + COLUMN, value, mask=rows)


@inlined
def _last_steps(s, rows, FORM):
    # The step at which each row was last stepped: an int32's bits in the last column.
    return tl.load(s + (FORM.state_width - 1), mask=rows, other=0.0).to(tl.int32, bitcast=True)


@inlined
def _set_last_steps(s, rows, steps, FORM):
    value = tl.full(s.shape, steps, tl.int32).to(tl.float32, bitcast=True)
    _store_one(s, rows, value, FORM.state_width - 1)


@inlined
def _fade(log_fade, start, end, COLUMN=0, COLUMNS=1):
    # The decay from one step to another, from its logarithms.
    log_fade += COLUMN
    start, end = log_fade + start.to(tl.int64) * COLUMNS, log_fade + end.to(tl.int64) * COLUMNS
    return tl.exp(tl.load(end) - tl.load(start)).to(tl.float32)


@inlined
def sgd(w, g, s, rows, a, steps, FORM):
    return w - loaded(a.lr) * g


@inlined
def momentum(w, g, s, rows, a, steps, FORM, b=None):
    if b is None:
        b = _load(s, rows, w, 0, FORM)
    gradient_rate, keep = loaded(a.gradient_rate), loaded(a.momentum)
    b = b * keep + gradient_rate * g
    _store(s, rows, b, 0, FORM)
    return w - loaded(a.buffer_rate) * tl.where(loaded(a.nesterov) != 0.0, gradient_rate * g + keep * b, b)


@inlined
def _momentum_numbers(history, t):
    # The addresses of a step's constants, as in all functions like this.
    now = history + t.to(tl.int64) * 4
    return MomentumStep(now, now + 1, now + 2, now + 3)


@inlined
def _any(condition):
    return tl.max(condition.to(tl.int32)) > 0


@inlined
def catch_up_dense_momentum(w, s, rows, a, until, FORM):
    b = _load(s, rows, w, 0, FORM)
    t = tl.max(_last_steps(s, rows, FORM), 0)
    while t < until:
        moving = t >= 0
        if t % 8 == 0:  # a later step is at most largest_rate * |b|, and b fades: see catch_up_dense_adam
            moving = _any(a.largest_rate * tl.abs(b) > tl.abs(w) * STILL)
        if moving:
            now = _momentum_numbers(a.history, t)
            keep = loaded(now.momentum)
            b *= keep
            w -= loaded(now.buffer_rate) * (tl.where(loaded(now.nesterov) != 0.0, keep, 1.0) * b)
            t += 1
        else:
            b *= _fade(a.log_fade, t, until)
            t = until
    return w, b


@inlined
def dense_momentum(w, g, s, rows, a, steps, FORM):
    w, b = catch_up_dense_momentum(w, s, rows, a, steps - 1, FORM)
    w = momentum(w, g, s, rows, _momentum_numbers(a.history, steps - 1), steps, FORM, b)
    _set_last_steps(s, rows, steps, FORM)
    return w


@inlined
def _moved(w, g, v, lr, eps_inside, eps):
    return w - lr * tl.div_rn(g, tl.sqrt_rn(v + eps_inside) + eps)


@inlined
def adagrad(w, g, s, rows, a, steps, FORM):
    v = _load(s, rows, w, 0, FORM) + g * g
    _store(s, rows, v, 0, FORM)
    return _moved(w, g, v, loaded(a.lr), loaded(a.eps_inside), loaded(a.eps))


@inlined
def rowwise(w, g, s, rows, a, steps, FORM):
    wide, scale, width = g.to(tl.float64), tl.zeros_like(g), FORM.dim // FORM.state_width
    part = tl.arange(0, w.shape[1])[None, :] // width
    for k in range(FORM.state_width):
        mean = (tl.sum(tl.where(part == k, wide * wide, 0.0), 1) / width).to(tl.float32)
        v = loaded(a.keep) * tl.load(s + k, mask=rows, other=0.0) + loaded(a.add) * mean
        _store_one(s, rows, v, k)
        own = tl.div_rn(loaded(a.lr) + tl.zeros_like(v), tl.sqrt_rn(v) + loaded(a.eps))
        scale = tl.where(part == k, own[:, None], scale)
    return loaded(a.shrink) * w - scale * g


@inlined
def rmsprop(w, g, s, rows, a, steps, FORM, fade=1.0):
    v = (_load(s, rows, w, 0, FORM) * fade) * loaded(a.alpha) + (g * g) * loaded(a.one_minus_alpha)
    _store(s, rows, v, 0, FORM)
    return _moved(w, g, v, loaded(a.lr), loaded(a.eps_inside), loaded(a.eps))


@inlined
def dense_rmsprop(w, g, s, rows, a, steps, FORM):
    fade = _fade(a.log_fade, _last_steps(s, rows, FORM), steps - 1)
    now = a.history + (steps - 1).to(tl.int64) * 5
    w = rmsprop(w, g, s, rows, RMSpropStep(now, now + 1, now + 2, now + 3, now + 4), steps, FORM, fade[:, None])
    _set_last_steps(s, rows, steps, FORM)
    return w


@inlined
def adam(w, g, s, rows, a, steps, FORM):
    m, v = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
    m += (g - m) * loaded(a.one_minus_beta1)
    v += (g * g - v) * loaded(a.one_minus_beta2)
    _store(s, rows, m, 0, FORM)
    _store(s, rows, v, 1, FORM)
    return w - loaded(a.step_size) * tl.div_rn(m, tl.sqrt_rn(v) + loaded(a.eps))


@inlined
def _adamw_weights(w, m, v, a):
    root = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + loaded(a.bias_correction2_sqrt))
    change = loaded(a.step_size) * tl.div_rn(m, root + loaded(a.eps))
    return w * loaded(a.shrink) - (w * loaded(a.decay) + change)


@inlined
def adamw(w, g, s, rows, a, steps, FORM, m=None, v=None):
    if m is None:
        m, v = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
    m += (g - m) * loaded(a.one_minus_beta1)
    v = v * loaded(a.beta2) + (g * g) * loaded(a.one_minus_beta2)
    _store(s, rows, m, 0, FORM)
    _store(s, rows, v, 1, FORM)
    return _adamw_weights(w, m, v, a)


@inlined
def _adam_numbers(history, t):
    now = history + t.to(tl.int64) * 9
    return DenseAdamNumbers(now, now + 1, now + 2, now + 3, now + 4, now + 5, now + 6, now + 7, now + 8)


@inlined
def catch_up_dense_adam(w, s, rows, a, until, FORM):
    m, v = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
    t = tl.max(_last_steps(s, rows, FORM), 0)
    if t == 0:  # never stepped: the moments are 0
        w *= _fade(a.log_fade, t, until, FADE.value.weights, 3)
        t = until
    while t < until:
        moving = t >= 0
        # A later step of this row is at most largest_step_size * |m| / (sqrt(v) + eps). It fades while
        # beta1 < sqrt(beta2), also beside weights that shrink. Below a quarter of a unit in the last place of w, it and
        # all later steps round to nothing.
        if (a.fading != 0.0) & (t % 8 == 0):
            moving = _any(a.largest_step_size * tl.abs(m) > tl.abs(w) * STILL * tl.sqrt_rn(v))
        if moving:
            now = _adam_numbers(a.history, t)
            m *= loaded(now.beta1)
            v *= loaded(now.beta2)
            w = _adamw_weights(w, m, v, now)
            t += 1
        else:  # only their own decay moves the weights in the remaining steps
            m *= _fade(a.log_fade, t, until, FADE.value.first_moment, 3)
            v *= _fade(a.log_fade, t, until, FADE.value.second_moment, 3)
            w *= _fade(a.log_fade, t, until, FADE.value.weights, 3)
            t = until
    return w, m, v


@inlined
def dense_adam(w, g, s, rows, a, steps, FORM):
    w, m, v = catch_up_dense_adam(w, s, rows, a, steps - 1, FORM)
    w = adamw(w, g, s, rows, _adam_numbers(a.history, steps - 1), steps, FORM, m, v)
    _set_last_steps(s, rows, steps, FORM)
    return w


@inlined
def _ftrl_weights(w, n, z, lr, a):
    l1, lr = loaded(a.l1), lr + tl.zeros_like(n)
    shrunk = tl.where(z > 0.0, l1, -l1) - z
    moved = tl.div_rn(shrunk, tl.div_rn(loaded(a.beta) + tl.sqrt_rn(n), lr) + 2.0 * loaded(a.l2))
    return tl.where(lr > 0.0, tl.where(tl.abs(z) > l1, moved, 0.0), w)


@inlined
def _ftrl_step(w, g, s, rows, a, shrinkage, FORM):
    before, z = _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM)
    lr = loaded(a.lr) + tl.zeros_like(w)
    moves = lr > 0.0  # else a division by 0
    n = tl.where(moves, before + g * g, before)
    added = (g + shrinkage * w) - tl.div_rn(tl.sqrt_rn(n) - tl.sqrt_rn(before), lr) * w
    z = tl.where(moves, z + added, z)
    _store(s, rows, n, 0, FORM)
    _store(s, rows, z, 1, FORM)
    return _ftrl_weights(w, n, z, lr, a)


@inlined
def ftrl(w, g, s, rows, a, steps, FORM):
    return _ftrl_step(w, g, s, rows, a, 2.0 * loaded(a.l2_shrinkage), FORM)


@inlined
def _ftrl_numbers(history, t):
    now = history + t.to(tl.int64) * 4
    return DenseFtrlNumbers(now, now + 1, now + 2, now + 3)


@inlined
def catch_up_dense_ftrl(w, s, rows, a, until, FORM):
    if until > 0:  # that step recomputed the weights of every row from its state
        now = _ftrl_numbers(a.history, until - 1)
        w = _ftrl_weights(w, _load(s, rows, w, 0, FORM), _load(s, rows, w, 1, FORM), tl.abs(loaded(now.lr)), now)
    return (w,)


@inlined
def dense_ftrl(w, g, s, rows, a, steps, FORM):
    w = catch_up_dense_ftrl(w, s, rows, a, steps - 1, FORM)[0]
    return _ftrl_step(w, g, s, rows, _ftrl_numbers(a.history, steps - 1), 0.0, FORM)


UPDATES = arguments.functions_of_steps(globals())
REFRESHES = arguments.functions_of_steps(globals(), "catch_up_")

ONE_ROW = {arguments.DenseMomentumStep, arguments.DenseAdamStep}  # their loops are as long as a row was not stepped
