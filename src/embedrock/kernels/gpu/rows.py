"""Reads and steps of records on device, in GPU memory, or zero-copy in pinned host memory.

``keys`` (n,) are slots of rows, and `homes` are their record addresses, see `addresses.RecordAddresses`. ``count`` (1,)
int32 is the number of existing rows: nothing beyond is read or written. `form` is the layout of the records. All
launches are asynchronous, and nothing is allocated.
"""

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl

from embedrock.kernels.gpu import gate, rules
from embedrock.kernels.gpu.addresses import find, settle
from embedrock.kernels.gpu.codec import decode, encode_nearest, encode_stochastic
from embedrock.kernels.gpu.generator import DRAWS, draw_args, rounding_words
from embedrock.kernels.gpu.numbers import apart, loaded, of_step
from embedrock.kernels.gpu.runtime import ReadyKernel, inlined, kernel

_LIVE, _FACTOR = tl.constexpr(gate.LIVE), tl.constexpr(gate.FACTOR)


@inlined
def rows_of_program(count, FORM: tl.constexpr):
    """Return the lines that a program handles, and a mask of existing ones."""
    u = tl.program_id(0).to(tl.int64) * FORM.rows + tl.arange(0, FORM.rows)
    if count.dtype.is_ptr():
        count = tl.load(count)
    return u, u < count


@inlined
def _elements(u, here, FORM: tl.constexpr):
    """Return offsets in a tensor (n, dim), and a mask of existing elements."""
    columns = tl.arange(0, FORM.block)[None, :]
    return u[:, None] * FORM.dim + columns, here[:, None] & (columns < FORM.dim)


@inlined
def _weights(place, FORM: tl.constexpr):
    if FORM.dtype_name == "float32":
        start = place.to(tl.pointer_type(tl.float32))
    else:
        start = place.to(tl.pointer_type(tl.uint16))
    align: tl.constexpr = FORM.align
    return tl.multiple_of(start, align)[:, None] + tl.arange(0, FORM.block)[None, :]


@inlined
def _state(place, FORM: tl.constexpr):
    align: tl.constexpr = FORM.align
    return tl.multiple_of(place.to(tl.pointer_type(tl.float32)), align) + FORM.state_start


@inlined
def read_rows(lines, homes, origin, fresh, out, DRAW: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr):
    """Copy the weights of records to lines of `out`.

    Args:
        lines: their indices, a mask of existing ones, and their keys.
        homes: see `find`.
        origin: of rows without a record: ids of the lines, None: the keys; seed, a, b, c, see `draw_args`.
        fresh: line k is of key ``-1 - k``, if nothing is drawn.
        out: float32 (n, dim).
    """
    u, here, key = lines
    ids, seed, a, b, c = origin
    place, known, has, _ = find(key, here, homes, KIND, FORM.record_bytes)
    may_read = known if KIND.is_identity else has  # device memory exists even without a record
    _, inside = _elements(u, may_read, FORM)
    values = decode(tl.load(_weights(place, FORM), mask=inside, other=0), FORM)
    if DRAW is None:
        at, inside = _elements(-1 - key, here & (key < 0), FORM)
        values = tl.where(has[:, None], values, tl.load(fresh + at, mask=inside, other=0.0))
    else:
        absent = here & (has == 0)
        if tl.max(absent.to(tl.int32), 0) > 0:  # most rows have records
            row = key
            if ids is not None:
                row = tl.load(ids + u, mask=absent, other=0)
            drawn = DRAW(row, seed, a, b, c, FORM.block)
            values = tl.where(absent[:, None], decode(encode_nearest(drawn, FORM), FORM), values)
    at, inside = _elements(u, here, FORM)
    tl.store(out + at, values, mask=inside)


@kernel("count", "limit", "seed")
def _read(
    keys,
    ids,
    count,
    where,
    dirty,
    limit,
    near,
    far,
    fresh,
    seed: tl.uint64,
    a,
    b,
    c,
    out,
    DRAW: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
):
    u, here = rows_of_program(count, FORM)
    key = tl.load(keys + u, mask=here, other=-1).to(tl.int64)
    homes, origin = (where, dirty, limit, near, far), (ids, seed, a, b, c)
    read_rows((u, here, key), homes, origin, fresh, out, DRAW, KIND, FORM)


@inlined
def _begin(u, place, new, origin, DRAW: tl.constexpr, FORM: tl.constexpr):
    """Write the records of new rows: their initial values, and their initial state."""
    ids, shift, seed, a, b, c, first_state = origin
    words: tl.constexpr = FORM.dim if FORM.dtype_name == "float32" else FORM.state_start * 2
    tail: tl.constexpr = FORM.record_bytes // 4 - FORM.state_start
    columns = tl.arange(0, FORM.block)[None, :]
    drawn = DRAW(tl.load(ids + u, mask=new, other=0) - shift, seed, a, b, c, FORM.block)
    bits = encode_nearest(tl.where(columns < FORM.dim, drawn, 0.0), FORM)
    tl.store(_weights(place, FORM), bits, mask=new[:, None] & (columns < words))  # up to the state
    if tail > 0:
        columns = tl.arange(0, triton.next_power_of_2(tail))
        first = tl.load(first_state + columns, mask=columns < FORM.state_width, other=0.0)
        first = tl.broadcast_to(first[None, :], [FORM.rows, columns.shape[0]])
        at = _state(place, FORM)[:, None] + columns[None, :]
        tl.store(at, first, mask=new[:, None] & (columns < tail)[None, :])


@inlined
def step_rows(
    lines,
    homes,
    gradients,
    origin,
    numbers,
    DRAW: tl.constexpr,
    UPDATE: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
):
    """Step records by lines of gradients.

    Args:
        lines: their indices, a mask of stepped ones, and their keys.
        homes: see `find`.
        gradients: float32 (n, dim); the current weights of the rows, or None; a factor; a clip, or None.
        origin: of the rows: ids of the lines, their offset; seed, a, b, c; initial state.
        numbers: the number of the step, and the results of `apart`.
    """
    u, here, key = lines
    values, were, factor, clip = gradients
    ids, shift, seed, _, _, _, _ = origin
    step, of_rule, steps = numbers
    place, here, has, word = find(key, here, homes, KIND, FORM.record_bytes)
    settle(key, here, has, word, homes, KIND)
    if tl.max(here.to(tl.int32), 0) > 0:
        if DRAW is not None:
            new = here & (has == 0)
            if tl.max(new.to(tl.int32), 0) > 0:  # most rows have records
                _begin(u, place, new, origin, DRAW, FORM)
                tl.debug_barrier()  # the new records are read below
        at, inside = _elements(u, here, FORM)
        g = tl.load(values + at, mask=inside, other=0.0) * factor
        if clip is not None:
            g = tl.where(g > clip, clip, tl.where(g < -clip, -clip, g))  # NaN stays
        weights = _weights(place, FORM)
        if were is not None:
            w = tl.load(were + at, mask=inside, other=0.0)
        else:
            w = decode(tl.load(weights, mask=inside, other=0), FORM)
        w = UPDATE(w, g, _state(place, FORM), here, of_rule, steps, FORM)
        if FORM.dtype_name != "float32":
            random = rounding_words(tl.load(ids + u, mask=here, other=0) - shift, seed, loaded(step), FORM.block)
            w = encode_stochastic(w, random, FORM)
        tl.store(weights, w, mask=inside)


@kernel("limit", "seed", "step", "steps", "judged", anywhere=("verdict", "shown"))
def _step(
    keys,
    ids,
    values,
    were,
    verdict,
    shown,
    fault,
    tickets,
    judged,
    clip,
    count,
    where,
    dirty,
    limit,
    near,
    far,
    seed: tl.uint64,
    a,
    b,
    c,
    first_state,
    step,
    numbers,
    steps,
    DRAW: tl.constexpr,
    UPDATE: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
):
    u, here = rows_of_program(count, FORM)
    if fault is not None:
        is_made, factor = gate.judge_alone(verdict, shown, fault, tickets, judged)
    else:
        is_made = tl.load(verdict + _LIVE)
        factor = tl.load(verdict + _FACTOR).to(tl.float32, bitcast=True)
    here &= is_made != 0
    key = tl.load(keys + u, mask=here, other=-1)
    homes, gradients = (where, dirty, limit, near, far), (values, were, factor, clip)
    origin = ids, 0, seed, a, b, c, first_state
    step_rows((u, here, key), homes, gradients, origin, (step, numbers, steps), DRAW, UPDATE, KIND, FORM)


@kernel("limit", "steps")
def _refresh(
    rows,
    keys,
    count,
    where,
    dirty,
    limit,
    near,
    far,
    numbers,
    steps,
    REFRESH: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
):
    u, here = rows_of_program(count, FORM)
    key = tl.load(keys + u, mask=here, other=-1)
    place, _, has, _ = find(key, here, (where, dirty, limit, near, far), KIND, FORM.record_bytes)
    at, inside = _elements(u, here, FORM)
    w = tl.load(rows + at, mask=inside, other=0.0)
    w = REFRESH(w, _state(place, FORM), has, numbers, steps, FORM)
    tl.store(rows + at, w, mask=inside)


def read(keys, count, homes, seed, drawn, form, out, ids=None):
    """Copy the weights of records to `out` float32 (n, dim).

    A row without a record gets its initial value, rounded to nearest as in its future record.

    Args:
        keys: int64 or int32 (n,), slots of rows; keys of no row have no record.
        count: int32 (1,), or a number.
        homes: record addresses.
        seed: 64 bits.
        drawn: generator of initial values, see `generator.draw_args`.
        form: layout of the records.
        out: see above.
        ids: int64 (n,), which determine initial values, with `seed`; None: the keys do.
    """
    programs, ready = _to_read(form, homes.kind, drawn[0])
    ready.launch(programs(keys.shape[0]), keys, ids, count, homes.arguments, out, draw_args(seed, drawn), out)


def gather(keys, fresh, count, homes, form, out):
    """Copy the weights of records to `out` float32 (n, dim), as `read` does; key ``-1 - k`` is of ``fresh[k]``."""
    programs, ready = _to_read(form, homes.kind, None)
    ready.launch(programs(keys.shape[0]), keys, None, count, homes.arguments, fresh, draw_args(0, NOT_DRAWN), out)


class InitialRecord(NamedTuple):
    """Initial record of a row: `drawn`, see `generator.draw_args`, and its state float32 (state_width,)."""

    drawn: Any
    state: Any


def step(keys, ids, values, verdict, clip, count, homes, first, seed, step, numbers, form, were=None):
    """Step records by summed gradients. 16-bit weights are rounded stochastically.

    The step marks rows in `homes` as having records, and device records as dirty.

    Args:
        keys: int64 (n,), slots of rows. Keys of no row are left out.
        ids: int64 (n,), which determine initial values, and the rounding with `step`; both with `seed`.
        values: float32 (n, dim): the gradients.
        verdict: int32 (LINE,) of `gate.judge`: the decision and the gradients' factor. Or a `gate.VerdictCase`, which
            the kernel checks.
        clip: limit of the gradients' absolute values; None: no limit.
        count: int32 (1,).
        homes: record addresses.
        first: initial record of new rows; None: all rows have records.
        seed: 64 bits.
        step: the number of the step; or int64 () with it, and then all step constants are float32 ().
        numbers: a tuple of `embedrock.kernels.arguments`, with the type of the rule and tensors as arrays.
        form: layout of the records.
        were: the current weights of the rows, float32 (n, dim), which are then not read again; or None.
    """
    drawn, state = (NOT_DRAWN, values) if first is None else first
    programs, ready = _to_step(form, homes.kind_to_step, drawn[0], type(numbers))
    case = verdict if type(verdict) is gate.VerdictCase else (verdict, None, None, None, 0)
    clip = None if clip is None else float(clip)
    origin = draw_args(seed, drawn), state
    gradients = values, were, *case, clip, count
    ready.launch(programs(keys.shape[0]), keys, ids, *gradients, homes.arguments, *origin, *of_step(step, numbers))


def refresh(rows, keys, count, homes, numbers, form):
    """Catch up stale copies `rows` float32 (n, dim). The records stay unchanged.

    Rows without a record were never stepped: their state is 0.
    """
    rule = type(numbers)
    programs, ready = prepared(_refresh, form, most_rows(rule), REFRESH=rules.REFRESHES[rule], KIND=homes.kind)
    ready.launch(programs(keys.shape[0]), rows, keys, count, homes.arguments, *apart(numbers))


NOT_DRAWN = (None,)  # the generator of rows that are not drawn here


@functools.cache  # faster than the cache of `prepared`, as a lookup there would take longer than a launch
def _to_read(form, kind, draw):
    return prepared(_read, form, KIND=kind, DRAW=DRAWS.get(draw))


@functools.cache
def _to_step(form, kind, draw, rule):
    return prepared(_step, form, most_rows(rule), DRAW=DRAWS.get(draw), UPDATE=rules.UPDATES[rule], KIND=kind)


@functools.cache
def prepared(kernel, form, rows=None, **constexprs):
    """Return a function from a number of keys to a number of programs, and a kernel ready to launch.

    Args:
        kernel: of records, that takes a `FORM`.
        form: layout of the records.
        rows: maximum number of rows of a program; None: no limit.
        constexprs: the other constexprs of the kernel.
    """
    form = form.tiled(rows)
    return form.programs, ReadyKernel(kernel, FORM=form, num_warps=form.warps, **constexprs)


def most_rows(rule):
    """Return the maximum number of rows of a program for a type of step constants; None: no limit."""
    return 1 if rule in rules.ONE_ROW else None
