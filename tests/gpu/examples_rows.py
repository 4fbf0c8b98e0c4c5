"""How generator.py and rows.py are called, for compile_all.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from embedrock.initializers import Zeros
from embedrock.kernels.gpu import generator, rows
from embedrock.kernels.gpu.runtime import Form
from embedrock.rules import Adam, Rule
from embedrock.spec import STORAGES, Spec
from embedrock.testing.kernels import DEFAULTS, DENSE, step_numbers

STEPS = 1, 16, 17  # Triton compiles a kernel anew for 1 and for multiples of 16, unless it is told not to
ONE = torch.zeros(1, dtype=torch.int32)
VERDICT = torch.zeros(4, dtype=torch.int32)
PLACES = torch.zeros(8, dtype=torch.int64)


def forms(rule: Rule, dims: tuple[int, ...] = (64,)) -> list[Form]:
    specs = [Spec(None, dim, dtype, rule, Zeros(), 0) for dim in dims for dtype in STORAGES]
    return [Form(spec.dim, spec.dtype, *spec.layout[:3]) for spec in specs]


def numbers(rule: Rule, step: int) -> Any:
    made = step_numbers(rule, step)
    return type(made)(*(torch.as_tensor(part) if hasattr(part, "shape") else part for part in made))


def example_records() -> None:
    for form in forms(Adam(), (1, 64)):
        values = torch.empty(8, form.dim)
        rows.gather(PLACES, values, ONE, form, values)
        rows.scatter(PLACES, values, ONE, form)


def example_first_values() -> None:
    for form, kind, seed in itertools.product(forms(Adam(), (1, 64)), generator.DRAWS, (1, 2**64 - 1)):
        drawn, values = (kind, 0.0, 1.0, 0.1), torch.empty(8, form.dim)
        rows.read(PLACES, PLACES, ONE, seed, drawn, form, values)
        new, first_state = torch.zeros(8, dtype=torch.uint8), torch.empty(form.state_width)
        rows.begin(PLACES, new, PLACES, seed, drawn, first_state, ONE, ONE, form)


def example_steps() -> None:
    for rule in (*DEFAULTS, *DENSE):
        for form in forms(rule)[:2]:
            values = torch.empty(8, form.dim)
            for step in STEPS:
                args = PLACES, PLACES, values, VERDICT, None, ONE, 0, step
                rows.step(*args, numbers(rule, step), form)
                if type(numbers(rule, step)) in rows.rules.REFRESHES:
                    rows.refresh(values, PLACES, ONE, numbers(rule, step), form)
    for form in forms(Adam(), (1, 17, 4096)):
        clipped = PLACES, PLACES, torch.empty(8, form.dim), VERDICT, 1.5, ONE, 0, 1
        rows.step(*clipped, numbers(Adam(), 1), form)
