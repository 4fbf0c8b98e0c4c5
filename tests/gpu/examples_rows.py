"""How generator.py and rows.py are called, for compile_all.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from embedrock.initializers import Zeros
from embedrock.kernels.gpu import generator, rows
from embedrock.kernels.gpu.addresses import RecordAddresses, RecordMemory
from embedrock.kernels.gpu.gate import VerdictCase
from embedrock.kernels.gpu.runtime import RecordForm
from embedrock.optimizers import Adam, Rule
from embedrock.spec.spec import STORAGES, Spec
from suites.kernels import DEFAULTS, DENSE, step_numbers

STEPS = 1, 16, 17  # Triton compiles a kernel anew for 1 and for multiples of 16, unless it is told not to
ONE = torch.zeros(1, dtype=torch.int32)
VERDICT = torch.zeros(4, dtype=torch.int32)
CASE = VerdictCase(torch.ones(()), torch.ones(()), torch.zeros(4, dtype=torch.int64), ONE, 3)
KEYS = torch.zeros(8, dtype=torch.int64)
WHERE, DIRTY = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.uint8)


def forms(rule: Rule, dims: tuple[int, ...] = (64,)) -> list[RecordForm]:
    specs = [Spec(None, dim, dtype, rule, Zeros(), 0) for dim in dims for dtype in STORAGES]
    return [RecordForm(spec.dim, spec.dtype, *spec.layout[:3]) for spec in specs]


def numbers(rule: Rule, step: int) -> Any:
    made = step_numbers(rule, step)
    return type(made)(*(torch.as_tensor(part) if hasattr(part, "shape") else part for part in made))


def homes(form: RecordForm) -> list[RecordAddresses]:
    """Return those of a table that the host plans, in place, cached, and near."""
    kinds = (None, None, False), (WHERE, None, False), (WHERE, DIRTY, False), (WHERE, None, True)
    return [
        RecordAddresses(*kind, 1 + k, RecordMemory(2**40, 2**41, form.record_bytes)) for k, kind in enumerate(kinds)
    ]


def example_records() -> None:
    for form in forms(Adam(), (64, 1)):
        values = torch.empty(8, form.dim)
        for location in homes(form)[:3]:
            rows.gather(KEYS, values, ONE, location, form, values)


def example_first_values() -> None:
    for form, kind, seed in itertools.product(forms(Adam(), (64, 1)), generator.DRAWS, (1, 2**64 - 1)):
        drawn, values = (kind, 0.0, 1.0, 0.1), torch.empty(8, form.dim)
        first = rows.InitialRecord(drawn, torch.empty(form.state_width))
        for location in homes(form)[1:]:
            rows.read(KEYS, ONE, location, seed, drawn, form, values)
            args = KEYS, KEYS, values, VERDICT, None, ONE, location, first, seed, 1
            for were in (None, values):
                rows.step(*args, numbers(Adam(), 1), form, were)
                rows.step(*args[:3], CASE, *args[4:], numbers(Adam(), 1), form, were)
        for keys in (KEYS, KEYS.int()):
            rows.read(keys, 8, homes(form)[3], seed, drawn, form, values)


def example_steps() -> None:
    for rule in (*DEFAULTS, *DENSE):
        for form in forms(rule)[:2]:
            values, location = torch.empty(8, form.dim), homes(form)[1]
            first = rows.InitialRecord(("normal", 0.0, 0.1), torch.empty(form.state_width))
            for step in STEPS:
                args = KEYS, KEYS, values, VERDICT, None, ONE, location, first, 0, step
                rows.step(*args, numbers(rule, step), form)
                if type(numbers(rule, step)) in rows.rules.REFRESHES:
                    rows.refresh(values, KEYS, ONE, location, numbers(rule, step), form)
    for form in forms(Adam(), (1, 17, 4096)):
        clipped = KEYS, KEYS, torch.empty(8, form.dim), VERDICT, 1.5, ONE, homes(form)[0], None, 0, 1
        rows.step(*clipped, numbers(Adam(), 1), form)


def in_memory(made: Any) -> Any:
    """Return a rule's numbers as those of captured steps: each where it is."""
    return type(made)(*(torch.empty(()) for _ in made))


def example_captured_steps() -> None:
    step = torch.empty((), dtype=torch.int64)
    for rule in DEFAULTS:
        for form in forms(rule)[:2]:
            values, location = torch.empty(8, form.dim), homes(form)[1]
            first = rows.InitialRecord(("normal", 0.0, 0.1), torch.empty(form.state_width))
            for verdict in (VERDICT, CASE._replace(step=step)):
                args = KEYS, KEYS, values, verdict, None, ONE, location, first, 0, step
                rows.step(*args, in_memory(numbers(rule, 1)), form)
