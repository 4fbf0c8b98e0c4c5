"""Kernels that write what the functions of homes.py find and note, which other kernels are made of, for tests."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from embedrock.kernels.gpu import rows
from embedrock.kernels.gpu.addresses import DeviceTables, find, settle
from embedrock.kernels.gpu.codec import encode_nearest
from embedrock.kernels.gpu.runtime import inlined, launch


@inlined
def _locate(keys, count, entry, places, KIND: tl.constexpr, BYTES: tl.constexpr):
    u = tl.program_id(0)
    here = u < tl.load(count)
    key = tl.load(keys + u, mask=here, other=-1)
    place, _, has, _ = find(key, here, entry, KIND, BYTES)
    tl.store(places + u, tl.where(has, place, -1 - u.to(tl.int64)), mask=here)


def locate(keys: Any, count: Any, table: DeviceTables, places: Any) -> None:
    """Write the address of each record, or ``-1 - u`` where there is none."""
    args = keys, count, table.entries, places
    launch(_locate, len(keys), *args, KIND=table.kind, BYTES=table.form.record_bytes)


@inlined
def _settle(keys, count, live, entry, places, new, KIND: tl.constexpr, BYTES: tl.constexpr):
    u = tl.program_id(0)
    inside = u < tl.load(count)
    here = inside & (tl.load(live) != 0)
    key = tl.load(keys + u, mask=here, other=-1)
    place, known, has, word = find(key, here, entry, KIND, BYTES)
    settle(key, known, has, word, entry, KIND)
    tl.store(places + u, tl.where(known, place, -1), mask=inside)
    tl.store(new + u, (known & (has == 0)).to(tl.uint8), mask=inside)


def settle_rows(keys: Any, count: Any, live: Any, table: DeviceTables, places: Any, new: Any) -> None:
    """Do what a step does before it steps: write the addresses of what it steps, -1: nothing, and what is new."""
    args = keys, count, live, table.entries, places, new
    launch(_settle, len(keys), *args, KIND=table.kind, BYTES=table.form.record_bytes)


@inlined
def _scatter(keys, values, count, entry, KIND: tl.constexpr, FORM: tl.constexpr):
    u, here = rows.rows_of_program(count, FORM)
    key = tl.load(keys + u, mask=here, other=-1)
    size: tl.constexpr = FORM.record_bytes  # pyright: ignore[reportAttributeAccessIssue]
    place, _, has, _ = find(key, here, entry, KIND, size)
    at, inside = rows._elements(u, has, FORM)
    words = encode_nearest(tl.load(values + at, mask=inside, other=0.0), FORM)
    tl.store(rows._weights(place, FORM), words, mask=inside)


def scatter(keys: Any, values: Any, count: Any, table: DeviceTables) -> None:
    """Overwrite weights by `values` float32 (n, dim), rounded to nearest. Rows without a record are left out."""
    of_program, ready = rows.prepared(_scatter, table.form, KIND=table.kind)
    ready.launch(-(-len(keys) // of_program), keys, values, count, table.entries)
