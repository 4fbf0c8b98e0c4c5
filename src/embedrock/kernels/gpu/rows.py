"""Reads and steps of records on device, in GPU memory, or zero-copy in pinned host memory.

``keys`` (n,) are of rows of the `tables`, see `addresses.DeviceTables`. ``count`` (1,) int32 is the number of existing
rows: nothing beyond is read or written. All launches are asynchronous, and nothing is allocated.
"""

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl

from embedrock.kernels.gpu import gate, rules
from embedrock.kernels.gpu.addresses import WORDS, drawn_of, find, homes_of, settle, span_of
from embedrock.kernels.gpu.codec import decode, encode_nearest, encode_stochastic
from embedrock.kernels.gpu.generator import DRAWS, rounding_words
from embedrock.kernels.gpu.numbers import apart, loaded, of_step
from embedrock.kernels.gpu.runtime import ReadyKernel, inlined, kernel

_WORDS = tl.constexpr(WORDS)


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
        lines: their indices, those of their rows, a mask of existing ones, and their keys.
        homes: see `homes_of`.
        origin: of rows without a record: ids of the rows, None: the keys; seed, a, b, c, see `drawn_of`.
        fresh: line k is of key ``-1 - k``, if nothing is drawn.
        out: float32 (n, dim).
    """
    u, row, here, key = lines
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
            id = key  # noqa: A001
            if ids is not None:
                id = tl.load(ids + row, mask=absent, other=0)  # noqa: A001
            drawn = DRAW(id, seed, a, b, c, FORM.block)
            values = tl.where(absent[:, None], decode(encode_nearest(drawn, FORM), FORM), values)
    at, inside = _elements(u, here, FORM)
    tl.store(out + at, values, mask=inside)


@kernel("count", "tables")
def _read(
    keys,
    of,
    ids,
    fresh,
    count,
    entries,
    tables,
    out,
    ALONE: tl.constexpr,
    DRAW: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
):
    u, here = rows_of_program(count, FORM)
    row = u
    if of is not None:
        row = tl.load(of + u, mask=here, other=0)
    key = tl.load(keys + row, mask=here, other=0).to(tl.int64)
    if ALONE:
        seed, a, b, c = drawn_of(entries)
        lines = u, row, here, key - tl.load(entries)
        read_rows(lines, homes_of(entries, KIND), (ids, seed, a, b, c), fresh, out, DRAW, KIND, FORM)
    else:
        table, last = span_of(entries, tables, key, here)
        while table <= last:
            entry = entries + table * _WORDS
            own = key - tl.load(entry)
            lines = u, row, here & (own >= -1) & (own <= tl.load(entry + 1)), own
            seed, a, b, c = drawn_of(entry)
            read_rows(lines, homes_of(entry, KIND), (ids, seed, a, b, c), fresh, out, DRAW, KIND, FORM)
            table += 1


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
        homes: see `homes_of`.
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


@inlined
def _step_table(
    lines,
    entry,
    gradients,
    ids,
    numbers,
    DRAW: tl.constexpr,
    UPDATE: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
):
    """Step the records of a table among lines of several: see `step_rows`.

    `ids`: of the lines, and the share of the table's first key in their offset.
    """
    u, here, key = lines
    first = tl.load(entry)
    seed, a, b, c = drawn_of(entry)
    origin = ids[0], first * ids[1], seed, a, b, c, tl.load(entry + 6).to(tl.pointer_type(tl.float32))
    homes = homes_of(entry, KIND)
    step_rows((u, here, key - first), homes, gradients, origin, numbers, DRAW, UPDATE, KIND, FORM)


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
    own_ids = keys, 1
    if ids is not None:
        own_ids = ids, 0
    every, factors = gate.verdicts_of(verdicts, shown, first, stop, ticket, judged, entries, TABLES)
    if TABLES == 1:
        if bounds is not None:
            here &= u != tl.load(bounds + 2)
        live, factor = gate.verdict_of(0, every, factors, TABLES)
        _step_table(
            (u, here & live, key), entries, (values, were, factor, clip), own_ids, made, DRAW, UPDATE, KIND, FORM
        )
    else:
        table, last = span_of(entries, tables, key, here)
        table, last = tl.maximum(table, begin), tl.minimum(last, end - 1)
        while table <= last:
            live, factor = gate.verdict_of(table - first, every, factors, TABLES)
            mine, gradients = here & live & (u != tl.load(bounds + tables + 1 + table)), (values, were, factor, clip)
            _step_table((u, mine, key), entries + table * _WORDS, gradients, own_ids, made, DRAW, UPDATE, KIND, FORM)
            table += 1


@kernel("steps")
def _refresh(rows, keys, count, entries, numbers, steps, REFRESH: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr):
    u, here = rows_of_program(count, FORM)
    key = tl.load(keys + u, mask=here, other=0) - tl.load(entries)
    place, _, has, _ = find(key, here, homes_of(entries, KIND), KIND, FORM.record_bytes)
    at, inside = _elements(u, here, FORM)
    w = tl.load(rows + at, mask=inside, other=0.0)
    w = REFRESH(w, _state(place, FORM), has, numbers, steps, FORM)
    tl.store(rows + at, w, mask=inside)


def read(keys, count, tables, out, ids=None, fresh=None, of=None):
    """Copy the weights of records to `out` float32 (n, dim).

    A row without a record gets its initial value, rounded to nearest as in its future record.

    Args:
        keys: int64 or int32 (n,); keys of no row have no record.
        count: int32 (1,), or a number.
        tables: see above.
        out: see above.
        ids: int64 (n,), which determine initial values, with the table's seed; None: the keys do.
        fresh: float32; if the host creates the records of a table, key ``-1 - k`` is of ``fresh[k]``.
        of: int32 (lines,), the row of each line of `out`; `count` is of the lines. None: a line for each row.
    """
    lines = keys if of is None else of
    count_of_tables = tables.entries.shape[0]
    programs, ready = _to_read(tables.form, tables.kind, tables.draw, count_of_tables == 1)
    ready.launch(programs(lines.shape[0]), keys, of, ids, fresh, count, tables.entries, count_of_tables, out)


class InitialRecord(NamedTuple):
    """Initial record of a row.

    Attributes:
        drawn: generator of initial values and its numbers: ("constant", value), ("uniform", low, high), ("normal",
            mean, std) or ("truncated_normal", mean, std, beyond).
        state: float32 (state_width,).
    """

    drawn: Any
    state: Any


def step(keys, ids, count, bounds, tables, which, values, verdicts, clip, step, numbers, were=None):
    """Step the records of some neighbouring tables by summed gradients. 16-bit weights are rounded stochastically.

    The step marks rows as having records, and device records as dirty.

    Args:
        keys: int64 (n,). Keys of no row are left out.
        ids: int64 (n,), which determine initial values, and the rounding with `step`; both with the table's seed. None:
            the keys do.
        count: int32 (1,).
        bounds: see `joint.bounds`. Padding rows are left out. None: there are none.
        tables: see above.
        which: the first of the stepped tables, and the one after the last.
        values: float32 (n, dim): the gradients.
        verdicts: int32 (stepped tables, LINE) of `gate.judge`: decisions, and factors of gradients. Or a
            `gate.VerdictCase`, which the kernel checks. The last step of its tables has the ticket.
        clip: limit of the gradients' absolute values; None: no limit.
        step: the number of the step; or int64 () with it, and then all step constants are float32 (). The same for all.
        numbers: a tuple of `embedrock.kernels.arguments`, with the type of the rule and tensors as arrays.
        were: the current weights of the rows, float32 (n, dim), which are then not read again; or None.
    """
    count_of_tables = tables.entries.shape[0]
    programs, ready = _to_step(tables.form, tables.kind, tables.draw, type(numbers), count_of_tables)
    clip = None if clip is None else float(clip)
    gradients = values, were, *gate.case_of(verdicts, which), clip
    of_rows = keys, ids, bounds, count, tables.entries, count_of_tables, *which
    ready.launch(programs(keys.shape[0]), *of_rows, *gradients, *of_step(step, numbers))


def refresh(rows, keys, count, tables, numbers):
    """Catch up stale copies `rows` float32 (n, dim), of one table. The records stay unchanged.

    Rows without a record were never stepped: their state is 0.
    """
    rule = type(numbers)
    constexprs = {"REFRESH": rules.REFRESHES[rule], "KIND": tables.kind}
    programs, ready = prepared(_refresh, tables.form, most_rows(rule), **constexprs)
    ready.launch(programs(keys.shape[0]), rows, keys, count, tables.entries, *apart(numbers))


@functools.cache  # faster than the cache of `prepared`, as a lookup there would take longer than a launch
def _to_read(form, kind, draw, is_alone):
    return prepared(_read, form, ALONE=is_alone, DRAW=DRAWS.get(draw), KIND=kind)


@functools.cache
def _to_step(form, kind, draw, rule, tables):
    lanes, update = 1 << (tables - 1).bit_length(), rules.UPDATES[rule]
    return prepared(_step, form, most_rows(rule), TABLES=lanes, DRAW=DRAWS.get(draw), UPDATE=update, KIND=kind)


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
