"""Reads and steps of records on device, in GPU memory, or zero-copy in pinned host memory.

``keys`` (n,) are of rows of the `tables`, see `addresses.DeviceTables`. ``count`` (1,) int32 is the number of existing
rows: nothing beyond is read or written. All launches are asynchronous, and nothing is allocated.
"""

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl

from embedrock.kernels.gpu import gate, rules
from embedrock.kernels.gpu.addresses import WORDS, find, settle, span_of
from embedrock.kernels.gpu.codec import decode, encode_nearest, encode_stochastic
from embedrock.kernels.gpu.generator import DRAWS, ROUNDING, row_words
from embedrock.kernels.gpu.runtime import ReadyKernel, inlined, kernel, loaded

_WORDS = tl.constexpr(WORDS)


@inlined
def rows_of_program(count, FORM: tl.constexpr):
    """Return the lines that a program handles, and a mask of existing ones."""
    u = tl.program_id(0).to(tl.int64) * FORM.rows + tl.arange(0, FORM.rows)
    return u, u < loaded(count)


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
def _ids(lines, ids, here):
    """Return the ids of lines, see `step`."""
    u, _, row = lines
    if ids is not None:
        row = tl.load(ids + u, mask=here, other=0)
    return row


@inlined
def _read_rows(lines, entry, ids, fresh, out, stale, DRAW, REFRESH, KIND, FORM):
    """Copy the weights of records to `out`; `lines`: their indices, those of their rows, a mask, and their keys."""
    u, row, here, key = lines
    place, known, has, _ = find(key, here, entry, KIND, FORM.record_bytes)
    may_read = known if KIND == "device" else has  # device memory exists even without a record
    _, inside = _elements(u, may_read, FORM)
    values = decode(tl.load(_weights(place, FORM), mask=inside, other=0), FORM)
    if DRAW is None:
        at, inside = _elements(-1 - key, here & (key < 0), FORM)
        values = tl.where(has[:, None], values, tl.load(fresh + at, mask=inside, other=0.0))
    else:
        absent = here & (has == 0)
        if tl.max(absent.to(tl.int32), 0) > 0:  # most rows have records
            drawn = DRAW(_ids((row, here, key), ids, absent), entry, FORM.block)
            values = tl.where(absent[:, None], decode(encode_nearest(drawn, FORM), FORM), values)
    if REFRESH is not None:
        numbers, steps = stale
        values = REFRESH(values, _state(place, FORM), has, numbers, steps, FORM)[0]
    at, inside = _elements(u, here, FORM)
    tl.store(out + at, values, mask=inside)


@kernel("count", "tables", "steps")
def _read(
    keys,
    of,
    ids,
    fresh,
    count,
    entries,
    tables,
    out,
    numbers,
    steps,
    ALONE: tl.constexpr,
    DRAW: tl.constexpr,
    REFRESH: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
):
    u, here = rows_of_program(count, FORM)
    row = u
    if of is not None:
        row = tl.load(of + u, mask=here, other=0)
    key = tl.load(keys + row, mask=here, other=0).to(tl.int64)
    table, last = span_of(entries, tables, key, here, ALONE)
    while table <= last:
        entry = entries + table * _WORDS
        own = key - tl.load(entry)
        mine = here
        if not ALONE:
            mine &= (own >= -1) & (own <= tl.load(entry + 1))
        _read_rows((u, row, mine, own), entry, ids, fresh, out, (numbers, steps), DRAW, REFRESH, KIND, FORM)
        table += 1


@inlined
def _begin(ids, place, new, entry, DRAW, FORM):
    """Write the records of new rows: their initial values, and their initial state."""
    words: tl.constexpr = FORM.dim if FORM.dtype_name == "float32" else FORM.state_start * 2
    tail: tl.constexpr = FORM.record_bytes // 4 - FORM.state_start
    columns = tl.arange(0, FORM.block)[None, :]
    bits = encode_nearest(tl.where(columns < FORM.dim, DRAW(ids, entry, FORM.block), 0.0), FORM)
    tl.store(_weights(place, FORM), bits, mask=new[:, None] & (columns < words))  # up to the state
    if tail > 0:
        columns = tl.arange(0, triton.next_power_of_2(tail))
        initial = tl.load(entry + 6).to(tl.pointer_type(tl.float32))
        first = tl.load(initial + columns, mask=columns < FORM.state_width, other=0.0)
        first = tl.broadcast_to(first[None, :], [FORM.rows, columns.shape[0]])
        at = _state(place, FORM)[:, None] + columns[None, :]
        tl.store(at, first, mask=new[:, None] & (columns < tail)[None, :])


@inlined
def _step_rows(lines, entry, ids, gradients, numbers, DRAW, UPDATE, KIND, FORM):
    """Step records of a table by lines of gradients.

    Args:
        lines: their indices, a mask of stepped ones, and their keys in the table.
        entry: of the table.
        ids: see `step`.
        gradients: float32 (n, dim); the current weights of the rows, or None; a factor; a clip, or None.
        numbers: the number of the step, and the results of `_apart`.
    """
    u, here, key = lines
    values, were, factor, clip = gradients
    step, of_rule, steps = numbers
    place, here, has, word = find(key, here, entry, KIND, FORM.record_bytes)
    settle(key, here, has, word, entry, KIND)
    if tl.max(here.to(tl.int32), 0) > 0:
        if DRAW is not None:
            new = here & (has == 0)
            if tl.max(new.to(tl.int32), 0) > 0:  # most rows have records
                _begin(_ids(lines, ids, new), place, new, entry, DRAW, FORM)
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
            random = row_words(_ids(lines, ids, here), entry, loaded(step), ROUNDING, FORM.block)
            w = encode_stochastic(w, random, FORM)
        tl.store(weights, w, mask=inside)


@kernel("tables", "begin", "end", "step", "steps", "first", "stop", "judged", anywhere=("verdicts", "shown"))
def _step(
    keys,
    ids,
    bounds,
    count,
    entries,
    tables,
    begin,
    end,
    values,
    were,
    verdicts,
    shown,
    first,
    stop,
    ticket,
    judged,
    clip,
    step,
    numbers,
    steps,
    TABLES: tl.constexpr,
    DRAW: tl.constexpr,
    UPDATE: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
):
    u, here = rows_of_program(count, FORM)
    key, made = tl.load(keys + u, mask=here, other=-1).to(tl.int64), (step, numbers, steps)
    every, factors = gate.verdicts_of(verdicts, shown, first, stop, ticket, judged, entries, TABLES)
    table, last = span_of(entries, tables, key, here, TABLES == 1)
    table, last = tl.maximum(table, begin), tl.minimum(last, end - 1)
    while table <= last:
        entry = entries + table * _WORDS
        live, factor = gate.verdict_of(table - first, every, factors, TABLES)
        mine = here & live & (u != tl.load(bounds + tables + 1 + table))
        gradients = values, were, factor, clip
        _step_rows((u, mine, key - tl.load(entry)), entry, ids, gradients, made, DRAW, UPDATE, KIND, FORM)
        table += 1


def read(keys, count, tables, out, ids=None, fresh=None, stale=None, of=None):
    """Copy the weights of records to `out` float32 (n, dim).

    A row without a record gets its initial value, rounded to nearest as in its future record.

    Args:
        keys: int64 or int32 (n,); keys of no row have no record.
        count: int32 (1,), or a number.
        ids: int64 (n,), which determine initial values, with the table's seed; None: the keys do.
        fresh: float32; if the host creates the records of a table, key ``-1 - k`` is of ``fresh[k]``.
        stale: step constants of a dense rule, by which the copies catch up, see `step`; None: they are not stale. Rows
            without a record were never stepped: their state is 0.
        of: int32 (lines,), the row of each line of `out`; `count` is of the lines. None: a line for each row.
    """
    lines, k = keys if of is None else of, tables.entries.shape[0]
    rows, ready = _to_read(tables.form, tables.kind, tables.draw, type(stale), k == 1)
    ready.launch(-(-lines.shape[0] // rows), keys, of, ids, fresh, count, tables.entries, k, out, *_apart(stale))


class InitialRecord(NamedTuple):
    """Initial record of a row.

    Attributes:
        drawn: generator of initial values and its numbers: ("constant", value), ("uniform", low, high), ("normal",
            mean, std) or ("truncated_normal", mean, std, beyond).
        state: float32 (state_width,).
    """

    drawn: Any
    state: Any


def step(keys, ids, count, bounds, tables, which, values, case, clip, step, numbers, were=None):
    """Step the records of some neighbouring tables by summed gradients. 16-bit weights are rounded stochastically.

    The step marks rows as having records, and device records as dirty.

    Args:
        keys: int64 (n,). Keys of no row are left out.
        ids: int64 (n,), which determine initial values, and the rounding with `step`; both with the table's seed. None:
            the keys do.
        count: int32 (1,).
        bounds: see `plan.bounds`. Padding rows are left out.
        which: the first of the stepped tables, and the one after the last.
        values: float32 (n, dim): the gradients.
        case: see `gate.VerdictCase`. The last step of its tables has the ticket.
        clip: limit of the gradients' absolute values; None: no limit.
        step: the number of the step; or int64 () with it, and then all step constants are float32 (). The same for all.
        numbers: a tuple of `embedrock.kernels.arguments`, with the type of the rule and tensors as arrays.
        were: the current weights of the rows, float32 (n, dim), which are then not read again; or None.
    """
    count_of_tables = tables.entries.shape[0]
    rows, ready = _to_step(tables.form, tables.kind, tables.draw, type(numbers), count_of_tables)
    clip = None if clip is None else float(clip)
    gradients = values, were, *case, clip
    of_rows = keys, ids, bounds, count, tables.entries, count_of_tables, *which
    number = step % 2**32 if type(step) is int else step
    ready.launch(-(-keys.shape[0] // rows), *of_rows, *gradients, number, *_apart(numbers))


_FLOATS = frozenset({float})


def _apart(numbers):
    """Return a rule's step constants as floats and tensors, and the only integer, which varies from step to step."""
    if numbers is None or _FLOATS.issuperset(map(type, numbers)):
        return numbers, 0
    steps = getattr(numbers, "steps", 0)
    apart = [value if type(value) is float or hasattr(value, "data_ptr") else float(value) for value in numbers]
    return type(numbers)(*apart), steps


@functools.cache  # a lookup among the kernels of `launch` would take longer than a launch
def _to_read(form, kind, draw, rule, is_alone):
    refresh = rules.REFRESHES.get(rule)
    return prepared(_read, form, rule, ALONE=is_alone, DRAW=DRAWS.get(draw), REFRESH=refresh, KIND=kind)


@functools.cache
def _to_step(form, kind, draw, rule, tables):
    lanes, update = 1 << (tables - 1).bit_length(), rules.UPDATES[rule]
    return prepared(_step, form, rule, TABLES=lanes, DRAW=DRAWS.get(draw), UPDATE=update, KIND=kind)


def prepared(kernel, form, rule=None, **constexprs):
    """Return the number of rows of a program, and a kernel ready to launch.

    Args:
        kernel: of records, that takes a `FORM`.
        form: layout of the records.
        rule: type of the step constants.
        constexprs: the other constexprs of the kernel.
    """
    form = form.tiled(1 if rule in rules.ONE_ROW else None)
    return form.rows, ReadyKernel(kernel, FORM=form, num_warps=form.warps, **constexprs)
