"""The contenders of ``bench shards``: processes that make a step together."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from embedrock.bench.harness.comparison import StepSession
from embedrock.bench.harness.processes import Child
from embedrock.bench.harness.workload import Workload
from embedrock.bench.shards.contenders import CONTENDERS, our_layer, step_of_ranks, torch_layer


@pytest.mark.slow
@pytest.mark.parametrize("make", [partial(our_layer, sharded=True), partial(our_layer, sharded=False), torch_layer])
def test_processes_make_their_steps_together(make: Any) -> None:
    session = StepSession, partial(step_of_ranks, make=make, ranks=2), Workload(rows=1000, dim=4, batch=32, batches=3)
    with Child(*session, environment={"EMBEDROCK_THREADS": "1"}, timeout_s=120) as child:
        assert len(child.call("turn", 3, 60).steps_s) == 3


def test_a_contender_takes_the_ram_of_its_processes() -> None:
    needs = {one.name: one.need(Workload()).host for one in CONTENDERS}
    assert needs["ours-sharded-4"] > needs["ours-sharded-2"] > needs["ours-alone"]
