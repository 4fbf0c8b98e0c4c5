"""Reading, beginning and stepping records where they lie: near, in GPU memory, or far, in pinned host memory.

``places`` (n,) int64 are addresses of records. A negative place ``-1 - k`` says that there is none. ``count`` (1,)
int32 says how many of the n rows there are: nothing beyond is read or written. `form` describes the records. All
launches are asynchronous, and nothing is allocated.
"""

from math import gcd

import triton.language as tl

from embedrock.kernels.gpu import gate, rules
from embedrock.kernels.gpu.codec import decode, encode_nearest, encode_stochastic
from embedrock.kernels.gpu.generator import draw_args, rounding_words
from embedrock.kernels.gpu.runtime import inlined, kernel, launch, single, tile

_LIVE, _FACTOR = tl.constexpr(gate.LIVE), tl.constexpr(gate.FACTOR)
ALIGNMENT = 16  # of the first record of any memory: GPUs read and write 16 bytes at a time


@inlined
def _rows(count, ROWS: tl.constexpr):
    u = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return u, u < tl.load(count)


@inlined
def _tile(u, here, BLOCK: tl.constexpr, FORM: tl.constexpr):
    # Offsets in a tensor (n, dim), and which of them are there.
    columns = tl.arange(0, BLOCK)[None, :]
    return u[:, None] * FORM.dim + columns, here[:, None] & (columns < FORM.dim)


@inlined
def _weights(place, BLOCK: tl.constexpr, FORM: tl.constexpr, ALIGN: tl.constexpr):
    if FORM.dtype_name == "float32":
        start = place.to(tl.pointer_type(tl.float32))
    else:
        start = place.to(tl.pointer_type(tl.uint16))
    return tl.multiple_of(start, ALIGN)[:, None] + tl.arange(0, BLOCK)[None, :]


@inlined
def _state(place, FORM: tl.constexpr, ALIGN: tl.constexpr):
    return tl.multiple_of(place.to(tl.pointer_type(tl.float32)), ALIGN) + FORM.state_start


@kernel()
def _gather(
    places,
    fresh,
    count,
    out,
    FORM: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u, here = _rows(count, ROWS)
    place = tl.load(places + u, mask=here, other=0)
    stored = here & (place >= 0)
    _, inside = _tile(u, stored, BLOCK, FORM)
    words = tl.load(_weights(place, BLOCK, FORM, ALIGN), mask=inside, other=0)
    at, inside = _tile(-1 - place, here & (place < 0), BLOCK, FORM)
    values = tl.where(stored[:, None], decode(words, FORM), tl.load(fresh + at, mask=inside, other=0.0))
    at, inside = _tile(u, here, BLOCK, FORM)
    tl.store(out + at, values, mask=inside)


@kernel("seed")
def _read(
    places,
    ids,
    count,
    seed: tl.uint64,
    a,
    b,
    c,
    out,
    DRAW: tl.constexpr,
    FORM: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u, here = _rows(count, ROWS)
    place = tl.load(places + u, mask=here, other=0)
    _, inside = _tile(u, here & (place >= 0), BLOCK, FORM)
    values = decode(tl.load(_weights(place, BLOCK, FORM, ALIGN), mask=inside, other=0), FORM)
    absent = here & (place < 0)
    if tl.max(absent.to(tl.int32), 0) > 0:  # most rows have records
        drawn = DRAW(tl.load(ids + u, mask=absent, other=0), seed, a, b, c, BLOCK)
        values = tl.where(absent[:, None], decode(encode_nearest(drawn, FORM), FORM), values)
    at, inside = _tile(u, here, BLOCK, FORM)
    tl.store(out + at, values, mask=inside)


@kernel()
def _scatter(
    places,
    values,
    count,
    FORM: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u, here = _rows(count, ROWS)
    place = tl.load(places + u, mask=here, other=-1)
    at, inside = _tile(u, place >= 0, BLOCK, FORM)
    words = encode_nearest(tl.load(values + at, mask=inside, other=0.0), FORM)
    tl.store(_weights(place, BLOCK, FORM, ALIGN), words, mask=inside)


@kernel("seed")
def _begin(
    places,
    new,
    ids,
    seed: tl.uint64,
    a,
    b,
    c,
    first_state,
    count,
    live,
    DRAW: tl.constexpr,
    FORM: tl.constexpr,
    ALIGN: tl.constexpr,
    WORDS: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u, here = _rows(count, ROWS)
    here &= tl.load(live) != 0
    here &= tl.load(new + u, mask=here, other=0) != 0
    if tl.max(here.to(tl.int32), 0) > 0:  # most rows have records
        place = tl.load(places + u, mask=here, other=0)
        columns = tl.arange(0, BLOCK)[None, :]
        drawn = DRAW(tl.load(ids + u, mask=here, other=0), seed, a, b, c, BLOCK)
        words = encode_nearest(tl.where(columns < FORM.dim, drawn, 0.0), FORM)
        tl.store(_weights(place, BLOCK, FORM, ALIGN), words, mask=here[:, None] & (columns < WORDS))
        columns = tl.arange(0, TAIL_BLOCK)
        first = tl.load(first_state + columns, mask=columns < FORM.state_width, other=0.0)
        first = tl.broadcast_to(first[None, :], [ROWS, TAIL_BLOCK])
        at = _state(place, FORM, ALIGN)[:, None] + columns[None, :]
        tl.store(at, first, mask=here[:, None] & (columns < TAIL)[None, :])


@kernel("seed", "step", "steps")
def _step(
    places,
    ids,
    values,
    verdict,
    clip,
    count,
    seed: tl.uint64,
    step: tl.uint32,
    numbers,
    steps,
    UPDATE: tl.constexpr,
    CLIPS: tl.constexpr,
    FORM: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u, here = _rows(count, ROWS)
    here &= tl.load(verdict + _LIVE) != 0
    place = tl.load(places + u, mask=here, other=-1)
    here = place >= 0
    if tl.max(here.to(tl.int32), 0) > 0:
        at, inside = _tile(u, here, BLOCK, FORM)
        g = tl.load(values + at, mask=inside, other=0.0) * tl.load(verdict + _FACTOR).to(tl.float32, bitcast=True)
        if CLIPS:
            g = tl.where(g > clip, clip, tl.where(g < -clip, -clip, g))  # NaN stays
        weights = _weights(place, BLOCK, FORM, ALIGN)
        w = decode(tl.load(weights, mask=inside, other=0), FORM)
        w = UPDATE(w, g, _state(place, FORM, ALIGN), here, numbers, steps, FORM)
        if FORM.dtype_name != "float32":
            random = rounding_words(tl.load(ids + u, mask=here, other=0), seed, step, BLOCK)
            w = encode_stochastic(w, random, FORM)
        tl.store(weights, w, mask=inside)


@kernel("steps")
def _refresh(
    rows,
    places,
    count,
    numbers,
    steps,
    REFRESH: tl.constexpr,
    FORM: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u, here = _rows(count, ROWS)
    place = tl.load(places + u, mask=here, other=-1)
    at, inside = _tile(u, here, BLOCK, FORM)
    w = tl.load(rows + at, mask=inside, other=0.0)
    w = REFRESH(w, _state(place, FORM, ALIGN), place >= 0, numbers, steps, FORM)
    tl.store(rows + at, w, mask=inside)


def gather(places, fresh, count, form, out):
    """Copy the weights of records to `out` float32 (n, dim).

    A place ``-1 - k`` stands for ``fresh[k]``, a row that has no record yet.
    """
    _launch(_gather, places, (places, fresh, count, out), form)


def read(places, ids, count, seed, drawn, form, out):
    """Copy the weights of records to `out` float32 (n, dim).

    A row without a record gets its first value, rounded to nearest as it will be stored.

    Args:
        places: of the records.
        ids: int64 (n,), which decide first values, with `seed`.
        count: int32 (1,).
        seed: 64 bits.
        drawn: how first values are drawn, see `generator.draw_args`.
        form: of the records.
        out: see above.
    """
    args, constexprs = draw_args(seed, drawn)
    _launch(_read, places, (places, ids, count, *args, out), form, **constexprs)


def scatter(places, values, count, form):
    """Overwrite weights by `values` float32 (n, dim), rounded to nearest. Rows without a record are left out."""
    _launch(_scatter, places, (places, values, count), form)


def begin(places, new, ids, seed, drawn, first_state, count, live, form):
    """Write the records of rows where `new` uint8 (n,) is not 0: their first values and first state.

    Args:
        places: of the records, of which only the new ones are looked at.
        new: which records are new.
        ids: int64 (n,), which decide first values, with `seed`.
        seed: 64 bits.
        drawn: how first values are drawn, see `generator.draw_args`.
        first_state: float32 (state_width,).
        count: int32 (1,).
        live: int32 (1,): where it is 0, nothing happens.
        form: of the records.
    """
    tail = form.record_bytes // 4 - form.state_start
    words = form.dim if form.dtype_name == "float32" else form.state_start * 2  # with the gap before the state
    sizes = {"WORDS": words, "TAIL": tail, "TAIL_BLOCK": tile(tail).block}
    args, constexprs = draw_args(seed, drawn)
    _launch(_begin, places, (places, new, ids, *args, first_state, count, live), form, **constexprs, **sizes)


def step(places, ids, values, verdict, clip, count, seed, step, numbers, form):
    """Step records by summed gradients. 16-bit weights are rounded stochastically.

    Args:
        places: of the records. Rows without one are left out.
        ids: int64 (n,), which decide the rounding, with `seed` and `step`.
        values: float32 (n, dim): the gradients.
        verdict: int32 (LINE,) of `gate.judge`: whether anything happens, and what gradients are multiplied by.
        clip: a number: then they are clamped to ``[-clip, clip]``; or None.
        count: int32 (1,).
        seed: 64 bits.
        step: the number of the step.
        numbers: a tuple of `embedrock.kernels.arguments`, whose type says which rule it is. Its arrays are tensors.
        form: of the records.
    """
    clips = clip is not None
    args = places, ids, values, verdict, single(clip) if clips else 0.0, count, seed % 2**64, step % 2**32
    update = rules.UPDATES[type(numbers)]
    _launch(_step, places, (*args, *_apart(numbers)), form, _most_rows(numbers), UPDATE=update, CLIPS=clips)


def refresh(rows, places, count, numbers, form):
    """Bring copies `rows` float32 (n, dim) up to date. The records stay as they are.

    Rows without a record were never stepped: their state is 0.
    """
    refresh = rules.REFRESHES[type(numbers)]
    _launch(_refresh, places, (rows, places, count, *_apart(numbers)), form, _most_rows(numbers), REFRESH=refresh)


def _launch(kernel, places, args, form, rows=None, **constexprs):
    part = tile(form.dim, rows)
    options = {**part.options, **constexprs}
    align = gcd(form.record_bytes, ALIGNMENT)
    launch(kernel, part.programs(places.shape[0]), *args, FORM=form, ALIGN=align, **options)


def _most_rows(numbers):
    return 1 if type(numbers) in rules.ONE_ROW else None


def _apart(numbers):
    """Return a rule's numbers as float32 and tensors, and its only integer, which varies from step to step."""
    steps = getattr(numbers, "steps", 0)
    plain = [value if hasattr(value, "data_ptr") else single(value) for value in numbers]
    return type(numbers)(*plain), steps
