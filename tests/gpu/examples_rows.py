"""How generator.py and rows.py are called, for compile_all.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tensors import table

from embedrock.initializers import Zeros
from embedrock.kernels.gpu import generator, rows
from embedrock.kernels.gpu.addresses import DeviceTables
from embedrock.kernels.gpu.gate import VerdictCase
from embedrock.kernels.gpu.runtime import RecordForm
from embedrock.optimizers import Adam, RowwiseAdagrad, Rule
from embedrock.spec.spec import STORAGES, Spec
from suites.kernels import DEFAULTS, DENSE, step_numbers

STEPS = 1, 16, 17  # Triton compiles a kernel anew for 1 and for multiples of 16, unless it is told not to
ONE = torch.zeros(1, dtype=torch.int32)
VERDICT = VerdictCase(torch.zeros(4, dtype=torch.int32), None, 0, 1, ONE, 3)
CASE = VerdictCase(torch.ones(()), torch.ones(()), 0, 1, ONE, 3)
KEYS = torch.zeros(8, dtype=torch.int64)
WHERE, CACHE = torch.zeros(8, dtype=torch.int32), [torch.zeros(8, dtype=torch.int64)] * 5


def forms(rule: Rule, dims: tuple[int, ...] = (64,)) -> list[RecordForm]:
    specs = [Spec(None, dim, dtype, rule, Zeros(), 0) for dim in dims for dtype in STORAGES]
    return [RecordForm(spec.dim, spec.dtype, *spec.layout[:3]) for spec in specs]


def numbers(rule: Rule, step: int) -> Any:
    made = step_numbers(rule, step)
    return type(made)(*(torch.as_tensor(part) if hasattr(part, "shape") else part for part in made))


def tables_of(form: RecordForm, drawn: Any = None, seed: int = 0) -> list[DeviceTables]:
    """Return a table that the host plans; then in place, cached, and near."""
    kinds = (None, (), False), (WHERE, (), False), (WHERE, CACHE, False), (WHERE, (), True)
    first = None if drawn is None else rows.InitialRecord(drawn, torch.empty(form.state_width))
    return [table(form, (2**40, 2**41), *kind, first=first, seed=seed) for kind in kinds]


def example_records() -> None:
    for form in forms(Adam(), (64, 1)):
        values = torch.empty(8, form.dim)
        for of in tables_of(form)[:3]:
            rows.read(KEYS, ONE, of, values, fresh=values)


def example_first_values() -> None:
    for form, kind, seed in itertools.product(forms(Adam(), (64, 1)), generator.DRAWS, (1, 2**64 - 1)):
        drawn, values = (kind, 0.0, 1.0, 0.1), torch.empty(8, form.dim)
        _, *every = tables_of(form, drawn, seed)
        for of in every:
            rows.read(KEYS, ONE, of, values)
            args = KEYS, KEYS, ONE, ONE, of, (0, 1), values
            for were, verdict in itertools.product((None, values), (VERDICT, CASE)):
                rows.step(*args, verdict, None, 1, numbers(Adam(), 1), were)
        for keys in (KEYS, KEYS.int()):
            rows.read(keys, 8, every[2], values)


def example_steps() -> None:
    for rule in (*DEFAULTS, *DENSE, RowwiseAdagrad(groups=4)):
        for form in forms(rule)[:2]:
            values, of = torch.empty(8, form.dim), tables_of(form, ("normal", 0.0, 0.1))[1]
            for step in STEPS:
                rows.step(KEYS, KEYS, ONE, ONE, of, (0, 1), values, VERDICT, None, step, numbers(rule, step))
                if type(numbers(rule, step)) in rows.rules.REFRESHES:
                    rows.read(KEYS, ONE, of, values, stale=numbers(rule, step))
    for form in forms(Adam(), (1, 17, 4096)):
        args = KEYS, KEYS, ONE, ONE, tables_of(form)[0], (0, 1), torch.empty(8, form.dim)
        rows.step(*args, VERDICT, 1.5, 1, numbers(Adam(), 1))


def in_memory(made: Any) -> Any:
    """Return a rule's numbers as those of captured steps: each where it is."""
    return type(made)(*(torch.empty(()) for _ in made))


def example_captured_steps() -> None:
    step = torch.empty((), dtype=torch.int64)
    for rule in DEFAULTS:
        for form in forms(rule)[:2]:
            values, of = torch.empty(8, form.dim), tables_of(form, ("normal", 0.0, 0.1))[1]
            for verdict in (VERDICT, CASE._replace(step=step)):
                args = KEYS, KEYS, ONE, ONE, of, (0, 1), values, verdict, None, step
                rows.step(*args, in_memory(numbers(rule, 1)))
