"""How joint.py and sums of several tables are called, for compile_all.py."""

from __future__ import annotations

import itertools

import torch
from examples_rows import KEYS, ONE, forms, in_memory, numbers
from examples_sums import COUNT, INVERSE, NORMS, ORDER, STARTS, N, scratch

from embedrock.kernels.gpu import directory, gate, joint, plan, rows, sums
from embedrock.kernels.gpu.addresses import WORDS, DeviceTables
from embedrock.kernels.gpu.runtime import RecordForm
from embedrock.optimizers import SGD, Adam

TABLES = 1, 3
CUTS = torch.zeros(7, dtype=torch.int64)


def tables_of(form: RecordForm, count: int, is_near: bool, draw: str, is_cached: bool = False) -> DeviceTables:
    kind = "device" if is_near else "cached" if is_cached else "host"
    return DeviceTables(torch.zeros(count, WORDS, dtype=torch.int64), kind, draw, form)


def case_of(count: int, start: int = 0) -> gate.VerdictCase:
    """Return gradients of tables that kernels check, wherever their numbers begin."""
    numbers = torch.ones(count + start)[start:]
    return gate.VerdictCase(numbers, numbers, 0, count, ONE, 3)


def judged(count: int) -> gate.VerdictCase:
    """Return tables with verdicts."""
    return gate.VerdictCase(torch.zeros(count, gate.LINE, dtype=torch.int32), None, 0, count, ONE, 3)


def example_plan() -> None:
    tables = tables_of(forms(Adam())[0], 3, True, "normal")
    for ids in (KEYS, KEYS.int()):
        joint.join(ids, CUTS, 3, tables, KEYS.int())
        plan.bounds(tables, KEYS, ONE, ids, KEYS, ONE, ONE)
        plan.collect(KEYS.int(), 9, KEYS, ONE, (KEYS, ONE, ONE, ONE, ONE), tables, None, (ids, ONE))
    for starts in (KEYS, KEYS.int()):
        joint.bags(starts, CUTS, 3, tables, ONE, ONE, COUNT, INVERSE, INVERSE)


def example_open_ids() -> None:
    counts, words = torch.zeros(plan.blocks(len(KEYS)), dtype=torch.int32), torch.zeros(9, dtype=torch.int64)
    some = torch.zeros(9, dtype=torch.int32)
    for count, start, dtype in itertools.product(TABLES, (0, 1), (torch.uint8, torch.int32)):  # wherever words begin
        tables, of = tables_of(forms(Adam())[0], count, True, "normal"), torch.zeros(len(KEYS), dtype=dtype)
        directory.tables(KEYS, words[start:], count, of)
        plan.collect(KEYS, 0, KEYS, counts, (KEYS, counts, counts, ONE, counts), of=(of, KEYS, KEYS))
        arrays, found = (KEYS, counts, of, ONE, words[start:]), (KEYS, counts, some[start:])
        directory.search(arrays, tables.entries, *found, counts)
        for case in (judged(count), case_of(count, start)):
            directory.enter(arrays, tables.entries, *found, some[start:], case)


WHERE = (False, False), (True, False), (False, True)  # all rows near; a cache


def example_rows() -> None:
    for draw, where, form in itertools.product(("constant", "normal"), WHERE, forms(Adam())[:2]):
        every = [tables_of(form, count, where[0], draw, where[1]) for count in TABLES]
        values = torch.zeros(8, form.dim)
        for given, tables in itertools.product(((KEYS.int(), len(KEYS)), (KEYS, ONE)), every):
            rows.read(*given, tables, values)
        for tables in every:
            rows.read(KEYS, ONE, tables, values, KEYS)
            rows.read(KEYS, 8, tables, values, KEYS, of=KEYS.int())
        for were, ids, tables in itertools.product((None, values), (None, KEYS), every):
            count = len(tables.entries)
            for verdicts in (judged(count), case_of(count), case_of(count, 1)):
                rows.step(KEYS, ids, ONE, ONE, tables, (0, count), values, verdicts, None, 1, numbers(Adam(), 1), were)
    tables, values = tables_of(forms(SGD())[0], 3, True, "uniform"), torch.zeros(8, 64)
    verdict, step = judged(3), torch.empty((), dtype=torch.int64)
    rows.step(KEYS, None, ONE, ONE, tables, (1, 2), values, verdict, 0.5, 1, numbers(SGD(), 1))
    for verdicts in (verdict, case_of(3)._replace(step=step), case_of(3)._replace(ticket=None)):
        rows.step(KEYS, None, ONE, ONE, tables, (1, 2), values, verdicts, None, step, in_memory(numbers(SGD(), 1)))


def example_sums_of_several_tables() -> None:
    values, argmax = torch.zeros(N, 64), torch.zeros(N, 64, dtype=torch.int32)
    shares = (sums.NO_SHARE, (INVERSE, None, torch.zeros(N)), (INVERSE, None, argmax))
    layout = torch.tensor(sums.layout_of((0, 40, 40, N), 64))
    for (what, share), start in itertools.product(enumerate(shares), (0, 1)):  # wherever words begin
        words, ends = torch.cat([layout[:start], layout])[start:], COUNT.repeat(4)[start:]
        plan = STARTS, ORDER, INVERSE, ends
        sums.sum_shares(what, values, share, plan, ends, scratch(64, 3), values, NORMS, words, int(layout[-1]))
