"""The contenders of ``bench shards``: processes that make a step together."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from embedrock.bench.harness.processes import Child
from embedrock.bench.harness.workload import Workload
from embedrock.bench.shards.contenders import CONTENDERS, our_layer, torch_layer, torchrec_layer
from embedrock.bench.shards.ranks import RanksSession


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "loop"),
    [
        (partial(our_layer, sharded=True), "plain"),
        (partial(our_layer, sharded=True), "prefetch"),
        (partial(our_layer, sharded=True), "uneven"),
        (partial(our_layer, sharded=False), "plain"),
        (torch_layer, "plain"),
        (torchrec_layer, "plain"),
    ],
)
def test_processes_make_their_steps_together(make: Any, loop: str) -> None:
    if make is torchrec_layer:
        pytest.importorskip("torchrec")
    session = RanksSession, make, loop, 2, Workload(rows=10_000, dim=64, batch=2048, batches=3)
    with Child(*session, environment={"EMBEDROCK_THREADS": "1"}, timeout_s=120) as child:
        turn = child.call("turn", 3, 60)
    assert len(turn.steps_s) == 3
    assert len(turn.meters) == 2
    for meters in turn.meters:
        assert meters.cpu_s > 0
        assert (meters.sent is None) == (make in (torch_layer, torchrec_layer))
        if meters.sent is not None and loop != "uneven":  # which announces what it does, by texts
            assert abs(meters.sent / meters.formula - 1) < 0.02


def test_a_contender_takes_the_ram_of_its_processes() -> None:
    needs = {one.name: one.need(Workload()).host for one in CONTENDERS}
    assert needs["ours-sharded-4"] > needs["ours-sharded-2"] > needs["ours-alone"]
