"""Rows that several real processes share, under stock DistributedDataParallel: the bits of one process."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from traced_ranks import check_program, drawn_program, play

import embedrock as er
import embedrock.torch as ert
import embedrock.torch.dcp as ert_dcp
from disks import BALLAST, fill, memory_disk
from embedrock.batch.ids import owners
from embedrock.distributed.resharding import reshard
from reference.codec import decode, encode_nearest
from scale import BYTES_OF_HEADS, Cluster, Load, simulate
from slow import slow

STEPS, BLOCK, DIM = 6, 32, 8
# Tests of what needs no other process make layers without one.
pytestmark = pytest.mark.filterwarnings("ignore:sharded=.*there is no process group yet:UserWarning")


@pytest.fixture(scope="module")
def pairs() -> Iterator[list[Ranks]]:
    started: list[Ranks] = []
    yield started
    for ranks in started:
        ranks.close()


@pytest.fixture
def pair(pairs: list[Ranks]) -> Ranks:
    """Two processes, that of other tests unless one is gone."""
    if not (pairs and pairs[-1].are_well):
        pairs.append(Ranks(2))
    return pairs[-1]


# ---------------------------------------------------------------- what each process trains


class Model(nn.Module):
    """Two tables, one of them looked up twice, and bags of a third."""

    def __init__(self, sharded: Sequence[Any], dense: bool, positions: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        alike: dict[str, Any] = {"init": er.Normal(std=0.1), "positions": positions}
        self.users = ert.Embedding(None, DIM, seed=1, sharded=sharded[0], **alike)
        self.items = ert.Embedding(10**6, DIM, seed=2, sharded=sharded[1], **alike)
        self.tags = ert.EmbeddingBag(10**6, DIM, mode="sum", seed=3, sharded=sharded[2], **alike)
        self.head = nn.Linear(DIM, 1) if dense else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        both = self.users(ids[:, 0]) * (self.items(ids[:, 1]) - self.items(ids[:, 2])) + self.tags(ids[:, 1:])
        return both.sum(1) if self.head is None else self.head(both).squeeze(1)

    @property
    def tables(self) -> list[er.Table]:
        return [self.users.table, self.items.table, self.tags.table]


def ids_of(step: int, block: int) -> torch.Tensor:
    draw = np.random.default_rng([step, block])
    return torch.from_numpy(draw.zipf(1.2, (BLOCK, 3)).clip(max=10**6 - 1).astype(np.int64))


def trained(net: Any, model: Model, batches: Sequence[Sequence[int]], of: int, clip: float) -> dict[str, Any]:
    """Train by batches of some blocks, one after the other, with all that PyTorch does to gradients."""
    weights = ert.dense_parameters(model)
    rows = ert.Adam(model, lr=0.05)
    optimizers = [rows, *([torch.optim.SGD(weights, lr=0.05)] if weights else [])]
    scaler, norms = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for step in range(STEPS):
        for k, blocks in enumerate(batches):
            waits = k < len(batches) - 1 and net is not model
            with net.no_sync() if waits else contextlib.nullcontext():
                ids = torch.cat([ids_of(step, block) for block in blocks])
                loss = nn.functional.softplus(net(ids)).sum() / of
                scaler.scale(loss * (math.inf if step == 2 and 1 in blocks else 1.0)).backward()  # on one rank only
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_([*weights, *ert.handles(model)], clip)))
        for optimizer in optimizers:
            scaler.step(optimizer)  # none in step 2
            optimizer.zero_grad()
        scaler.update()
    facts = [*norms, scaler.get_scale(), *(table.steps for table in model.tables)]
    return {"facts": facts, "rows": [table.export() for table in model.tables], "dense": [w.detach() for w in weights]}


def one_of_two(
    rank: int, sharded: Sequence[Any], dense: bool, clip: float, ddp: dict[str, Any], positions: bool = False
) -> dict[str, Any]:
    model = Model(sharded, dense, positions)
    net = DistributedDataParallel(model, **ddp)
    found = trained(net, model, [[rank], [2 + rank]], 2, clip)
    model.eval()
    with torch.no_grad():
        found["seen"] = [layer(torch.arange(50)[:, None]) for layer in (model.users, model.items, model.tags)]
    return found


APART, TOGETHER = ((0,), (1,), (2,), (3,)), ((0, 1), (2, 3))


@functools.cache
def alone(dense: bool, clip: float, batches: Sequence[Sequence[int]] = APART) -> dict[str, Any]:
    """One process, which adds the gradients of the same blocks one after the other, or of all ranks' as one batch."""
    model = Model([False] * 3, dense)
    found = trained(model, model, batches, 4, clip)
    model.eval()
    with torch.no_grad():
        found["seen"] = [layer(torch.arange(50)[:, None]) for layer in (model.users, model.items, model.tags)]
    return found


def check(found: list[dict[str, Any]], expected: dict[str, Any], sharded: Sequence[Any]) -> None:
    """Check that processes have what one has, to the bit, each row where it should be."""
    for mine in found:
        np.testing.assert_array_equal(mine["facts"], expected["facts"])
        for ours, theirs in zip(mine["seen"], expected["seen"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for place, kind in enumerate(sharded):
        ids, rows = expected["rows"][place]
        here = {True: owners(ids, 2), "rank 1": np.ones(len(ids), int)}.get(kind)
        for rank, mine in enumerate(found):
            own = np.ones(len(ids), bool) if here is None else here == rank
            np.testing.assert_array_equal(mine["rows"][place][0], ids[own])
            np.testing.assert_array_equal(mine["rows"][place][1], rows[own])


KINDS = [(True, True, True), (True, False, "rank 1"), (False, "rank 1", True)]


@pytest.mark.parametrize(("sharded", "clip"), [(KINDS[0], math.inf), (KINDS[0], 0.5), (KINDS[1], 0.5), (KINDS[2], 0.5)])
def test_two_processes_train_rows_to_the_bits_of_one(pair: Ranks, sharded: Sequence[Any], clip: float) -> None:
    check(pair.run(one_of_two, sharded, False, clip, {}), alone(False, clip), sharded)


def test_by_position_two_processes_train_rows_to_the_bits_of_one_with_their_batches_as_one(pair: Ranks) -> None:
    found, expected = pair.run(one_of_two, KINDS[1], False, 0.5, {}, True), alone(False, 0.5, TOGETHER)
    check(found, expected, KINDS[1])
    apart = alone(False, 0.5)["rows"][0][1]
    assert not np.array_equal(apart, expected["rows"][0][1])  # or any order would do


@pytest.mark.parametrize("ddp", ["gradient_as_bucket_view", "find_unused_parameters"])
def test_dense_layers_train_beside_as_ddp_does_it(pair: Ranks, ddp: str) -> None:
    found, expected = pair.run(one_of_two, KINDS[1], True, 0.5, {ddp: True}), alone(True, 0.5)
    for mine in found:
        np.testing.assert_array_equal(mine["facts"], found[0]["facts"])
        np.testing.assert_allclose(mine["facts"], expected["facts"], rtol=1e-5)
        for ours, theirs in zip(mine["seen"], expected["seen"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def one_of_four(rank: int, sharded: Sequence[Any]) -> dict[str, Any]:
    model = Model(sharded, False)
    return trained(DistributedDataParallel(model), model, [[rank]], 1, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [(True, True, True), (True, False, "rank 3")])
def test_four_processes_train_rows_to_the_bits_of_one(sharded: Sequence[Any]) -> None:
    ranks, expected = Ranks(4, timeout=60), alone(False, 0.5)
    try:
        found = ranks.run(one_of_four, sharded)
    finally:
        ranks.close()
    for rank, mine in enumerate(found):
        np.testing.assert_array_equal(mine["facts"], expected["facts"])
        for kind, (ids, rows), (own_ids, own_rows) in zip(sharded, expected["rows"], mine["rows"], strict=True):
            own = {True: owners(ids, 4) == rank, False: ids == ids}.get(kind, np.full(len(ids), rank == 3))
            np.testing.assert_array_equal(own_ids, ids[own])
            np.testing.assert_array_equal(own_rows, rows[own])


def trains_compiled(rank: int, where: str) -> list[Any]:
    """Train by a graph of the model inside of DDP, of DDP around it, or by none."""
    model = Model(KINDS[1], True)
    inner: Any = torch.compile(model, backend="aot_eager") if where == "inside" else model
    net: Any = DistributedDataParallel(inner)
    net = torch.compile(net, backend="aot_eager") if where == "outside" else net
    optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.SGD, lr=0.05)
    for step in range(4):
        nn.functional.softplus(net(ids_of(step, rank))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*(table.export() for table in model.tables), [weight.detach() for weight in ert.dense_parameters(model)]]


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
@pytest.mark.filterwarnings("ignore::embedrock.UncommittedWarning")
def test_two_ranks_play_a_program_to_the_bits_of_tables_alone(pair: Ranks, seed: int, tmp_path: Path) -> None:
    program = drawn_program(seed, 4)
    check_program(program, 2, pair.run(play, program, 2, str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_compiled_model_trains_shared_rows_to_the_same_bits(where: str) -> None:
    ranks = Ranks(2, timeout=120)
    try:
        plain, compiled = ranks.run(trains_compiled, ""), ranks.run(trains_compiled, where)
    finally:
        ranks.close()
    for expected, found in zip(plain, compiled, strict=True):
        for ours, theirs in zip(expected, found, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(one, other)
        assert all(len(ids) for ids, _ in found[:2])


# ---------------------------------------------------------------- what composes


def one_layer(sharded: Any = True, **options: Any) -> ert.Embedding:
    return ert.Embedding(100, 4, init=er.Normal(std=0.1), seed=7, sharded=sharded, **options)


def norms_of(rank: int, sharded: Any) -> list[float]:
    """Gradients of rows as PyTorch's utilities see them, on each rank."""
    layer = one_layer(sharded)
    optimizer = ert.SGD(layer, lr=1.0)
    layer(torch.arange(10) * (rank + 1)).sum().backward()
    handle: Any = layer.handle
    found = [float(nn.utils.get_total_norm([handle.grad], order)) for order in (1.0, 2.0, math.inf)]
    nn.utils.clip_grad_value_([handle], 0.75)
    found.append(handle.grad.item())
    before = layer(torch.arange(20)).detach()
    optimizer.step()
    moved = before - layer(torch.arange(20)).detach()
    return [*found, moved.abs().sum().item(), moved.abs().max().item()]


@pytest.mark.parametrize("sharded", [True, False, "rank 0"])
def test_norms_and_clamps_are_those_of_the_mean_over_ranks(pair: Ranks, sharded: Any) -> None:
    # Rows 0, 2, 4, 6 and 8 come from both ranks, five others from rank 0 and five from rank 1: means of 1 and 0.5.
    each = np.repeat([1.0] * 5 + [0.5] * 10, 4)
    clamped = np.minimum(each, 0.75)
    expected = [each.sum(), np.sqrt((each**2).sum()), 1.0, np.sqrt((clamped**2).sum()), clamped.sum(), 0.75]
    for found in pair.run(norms_of, sharded):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def uses_its_own_table(rank: int) -> list[Any]:
    """Replicas of two tables, of which each rank uses one."""
    layers = one_layer(False), one_layer(False)
    optimizer = ert.SGD(layers, lr=1.0)
    layers[rank](torch.tensor([3, 3 + rank])).sum().backward()
    optimizer.step()
    return [layer.table.export() for layer in layers]


def test_replicas_of_a_table_that_some_ranks_do_not_use_stay_equal(pair: Ranks) -> None:
    ours, theirs = pair.run(uses_its_own_table)
    for (ids, rows), (other_ids, other_rows) in zip(ours, theirs, strict=True):
        assert len(ids)
        np.testing.assert_array_equal(ids, other_ids)
        np.testing.assert_array_equal(rows, other_rows)


def lets_rows_come_and_go(rank: int, parts: Sequence[int] | None = None) -> tuple[list[Any], float]:
    """Train with the batches of a rank, or with those of several `parts` of one after the other."""
    layer = ert.Embedding(None, 4, seed=0, admission=er.Admission(2, within=6), eviction=er.Eviction(max_rows=40))
    rows, blocks = ert.Adam(layer, lr=0.1), parts or [rank]
    for step in range(12):
        for part in blocks:
            ids = torch.from_numpy(np.random.default_rng([step, part]).integers(0, 90, 25))
            (layer(ids).square().sum() / len(blocks)).backward()
        rows.step()
        rows.zero_grad()
    return [each.tolist() for each in layer.table.export()], layer.table.stats()["evicted"]


def test_replicas_agree_which_rows_come_and_go_as_one_process_does(pair: Ranks) -> None:
    expected = lets_rows_come_and_go(0, parts=[0, 1])
    assert expected[1] > 20
    assert pair.run(lets_rows_come_and_go) == [expected, expected]


def halves(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shared = one_layer(True, dtype=dtype)
    optimizer = ert.SGD(shared, lr=1.0)
    shared(torch.arange(rank, 40)).sum().backward()
    optimizer.step()
    alone = er.Table(100, 4, rule=er.SGD(lr=1.0), init=er.Normal(std=0.1), seed=7, dtype=str(dtype)[6:])
    alone.update(np.arange(40), np.full((40, 4), np.array([0.5] + [1.0] * 39)[:, None]))
    return shared(torch.arange(50)).detach().float(), torch.from_numpy(alone.lookup(np.arange(50)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits_are_shared(pair: Ranks, dtype: torch.dtype) -> None:
    for shared, alone in pair.run(halves, dtype):
        torch.testing.assert_close(shared, alone, rtol=0, atol=0)


def as_bfloat16(numbers: np.ndarray) -> np.ndarray:
    return decode(encode_nearest(numbers.astype(np.float32), np.uint16))


def brought_by(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=(40, 4)).astype(np.float32)


def sends_halves(rank: int, goes_ahead: bool) -> tuple[torch.Tensor, tuple[np.ndarray, np.ndarray]]:
    """Rank 1 looks the second half up only."""
    layer = one_layer(wire="bfloat16")
    optimizer, own = ert.SGD(layer, lr=1.0), slice(20 * rank, 40)
    batches = [torch.arange(40)[own]]
    for ids in ert.prefetch(batches, {layer: lambda ids: ids}) if goes_ahead else batches:
        (layer(ids) * torch.from_numpy(brought_by(rank))[own]).sum().backward()
        optimizer.step()
    return layer(torch.arange(50)).detach(), layer.table.export()


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_rows_and_gradients_are_sent_as_bfloat16_if_one_says_so(pair: Ranks, goes_ahead: bool) -> None:
    alone = er.Table(100, 4, rule=er.SGD(lr=1.0), init=er.Normal(std=0.1), seed=7)
    sums = as_bfloat16(brought_by(0))
    sums[20:] += as_bfloat16(brought_by(1))[20:]
    alone.update(np.arange(40), sums / 2)
    found = pair.run(sends_halves, goes_ahead)
    for seen, (ids, rows) in found:
        np.testing.assert_array_equal(rows, alone.lookup(ids))  # owners keep float32
        np.testing.assert_array_equal(seen, as_bfloat16(alone.lookup(np.arange(50))))
    assert sum(len(ids) for _, (ids, _) in found) == 40


def bags_with_padding(sharded: Any, blocks: Sequence[int], goes_ahead: bool) -> torch.Tensor:
    """Train bags in which some ids are padding. Return the row of each id."""
    bag = ert.EmbeddingBag(100, DIM, mode="mean", padding_idx=3, seed=7, sharded=sharded)
    optimizer = ert.Adam(bag, lr=0.1)
    batches = [[ids_of(step, block) % 5 for block in blocks] for step in range(3)]
    assert all((ids == 3).any() for batch in batches for ids in batch)
    asked = {bag: lambda batch: batch[0]}  # a rank has one block
    for batch in ert.prefetch(batches, asked) if goes_ahead else batches:
        for ids in batch:
            (bag(ids).square().sum() * len(blocks) ** -1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return bag(torch.arange(6)[:, None]).detach()


def trains_bags_with_padding(rank: int, goes_ahead: bool) -> torch.Tensor:
    return bags_with_padding(True, [rank], goes_ahead)


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_padding_of_bags_is_looked_up_by_no_rank(pair: Ranks, goes_ahead: bool) -> None:
    expected = bags_with_padding(False, [0, 1], goes_ahead=False)
    assert not expected[3].any()
    for found in pair.run(trains_bags_with_padding, goes_ahead):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def sends_otherwise(rank: int) -> str:
    with pytest.raises(er.OtherRankError) as told:
        one_layer(wire=("float32", "bfloat16")[rank])(torch.arange(3))
    return str(told.value)


def test_ranks_that_send_rows_in_different_ways_hear_of_it(pair: Ranks) -> None:
    for said in pair.run(sends_otherwise):
        assert re.search(r"got rank 0 is at [^;]*, Normal[^;]*\); rank 1 is at .*, sent as bfloat16\)", said)


# ---------------------------------------------------------------- what is refused, on all ranks


def refused(rank: int, which: str) -> tuple[str, str, torch.Tensor]:
    """Do something wrong on rank 1; then go on."""
    kind = said = "nothing"
    layer, other = one_layer(), one_layer()
    bad = {"id": 100, "nan": 1}.get(which, 1) if rank else 1
    try:
        if which == "order" and rank:
            other(torch.tensor([1]))
        elif which == "evaluates" and rank:
            with torch.no_grad():
                layer(torch.tensor([1]))
        elif which == "bag":
            bag = ert.EmbeddingBag(100, 4, seed=7, sharded=True)
            bag(torch.tensor([1, 2]), torch.tensor([0, 3 * rank]))
        else:
            loss = layer(torch.tensor([bad, 2.0 if rank and which == "floats" else 2])).sum()
            if which == "nan":
                optimizer = ert.SGD(layer, lr=1.0)
                (loss * (math.nan if rank else 1.0)).backward()
                optimizer.step()
    except Exception as error:
        kind, said = type(error).__name__, str(error)
    return kind, said, layer(torch.tensor([1, 2, 3])).detach()


@pytest.mark.parametrize(
    ("which", "kinds", "said"),
    [
        (
            "id",
            ("OtherRankError", "IdError"),
            r"rank 1 refused a lookup in .* must lie in \[0, 100\).* So no other does",
        ),
        ("floats", ("OtherRankError", "IdTypeError"), r"rank 1 refused a lookup in .* must be a dense tensor of .*"),
        (
            "bag",
            ("OtherRankError", "ArgumentError"),
            r"rank 1 refused a lookup in EmbeddingBag.*offsets` must.*",
        ),
        (
            "order",
            ("OtherRankError", "OtherRankError"),
            r"must do the same: got rank 0 is at .*; rank 1 is at .* train the same",
        ),
        (
            "evaluates",
            ("OtherRankError", "OtherRankError"),
            r"rank 0 is at a lookup in .*; rank 1 is at a lookup for no gradient in .*To evaluate on some ranks only",
        ),
        ("nan", ("NonFiniteGradientError", "NonFiniteGradientError"), r"finite: got NaN or Inf in .*row"),
    ],
)
def test_what_one_rank_refuses_is_refused_on_all_and_they_go_on(
    pair: Ranks, which: str, kinds: tuple[str, str], said: str
) -> None:
    found = pair.run(refused, which)
    first = er.Table(100, 4, init=er.Normal(std=0.1), seed=7).lookup([1, 2, 3])
    assert tuple(kind for kind, _, _ in found) == kinds
    assert re.search(said, found[0][1]), found[0][1]
    for _, _, rows in found:
        np.testing.assert_array_equal(rows, first)


def half_of_a_table(rank: int) -> list[str]:
    layer, said = one_layer(), []
    layer(torch.tensor([1]))
    for verb in (layer.state_dict, lambda: ert.freeze(layer), lambda: ert.average(layer)):
        try:
            verb()
        except er.UnsupportedError as error:
            said.append(str(error))
    return said


def test_what_needs_all_rows_is_refused_where_there_are_only_some(pair: Ranks) -> None:
    for said in pair.run(half_of_a_table):
        assert len(said) == 3
        assert all("are shared out over 2 processes" in one for one in said)


def reaches_for_others(rank: int) -> tuple[str, torch.Tensor]:
    layer = one_layer()
    layer.load_state_dict({"weight": torch.arange(400.0).reshape(100, 4)})
    said = ""
    try:
        layer.table.lookup(np.arange(100))
    except er.ArgumentError as error:
        said = str(error)
    return said, layer(torch.arange(100)).detach()


def test_rows_of_others_are_reached_by_the_layer_only(pair: Ranks) -> None:
    for said, rows in pair.run(reaches_for_others):
        assert re.search(r"rows of .* that other processes have cannot be reached here: got ids \[\d", said)
        torch.testing.assert_close(rows, torch.arange(400.0).reshape(100, 4), rtol=0, atol=0)


def runs_out_of_memory(rank: int, at: str) -> list[Any]:
    """Let one allocation of a step fail on rank 1; go on as if there had been no such batch."""
    layer = one_layer()
    optimizer, kind, said = ert.SGD(layer, lr=1.0), "nothing", ""
    module, _, name = at.rpartition(".")
    room = importlib.import_module(f"embedrock.distributed.{module}")
    ids, works = torch.arange(3) + 2 * rank, getattr(room, name)

    def fails(*args: Any) -> Any:
        setattr(room, name, works)
        raise MemoryError("no room for 3 rows")

    try:
        setattr(room, name, fails if rank else works)
        layer(ids).sum().backward()
        optimizer.step()
    except Exception as error:
        kind, said = type(error).__name__, str(error)
    finally:
        setattr(room, name, works)
    optimizer.zero_grad()
    steps = layer.table.steps
    layer(ids).sum().backward()
    optimizer.step()
    return [kind, said, steps, layer(torch.arange(5)).detach()]


@pytest.mark.parametrize("at", ["stages.ask", "stages.serve", "exchange.pack_all", "stages.bring", "stages.fold"])
def test_a_rank_that_runs_out_of_memory_refuses_the_batch_on_all(pair: Ranks, at: str) -> None:
    (kind, said, *mine), (error, _, *theirs) = pair.run(runs_out_of_memory, at)
    assert (kind, error) == ("OtherRankError", "MemoryError")
    assert re.search(r"rank 1 refused .*: no room for 3 rows. So no other does it, and nothing has changed", said)
    assert mine[0] == theirs[0] == 0
    table = er.Table(100, 4, init=er.Normal(std=0.1), rule=er.SGD(lr=1.0), seed=7)
    table.update([0, 1, 2, 2, 3, 4], np.full((6, 4), 0.5))
    for rows in (mine[1], theirs[1]):
        np.testing.assert_array_equal(rows, table.lookup(np.arange(5)))


def has_no_memory_to_step(rank: int, sharded: Any, at: str, folder: str) -> list[Any]:
    """Let rank 1 refuse a step that the other makes; then go back to the last checkpoint, and make it on both."""
    layer, said = one_layer(sharded), []
    optimizer = ert.SGD(layer, lr=1.0)
    for step in range(4):
        layer(torch.arange(3) + 2 * rank).sum().backward()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and step == 1:
                patch.setattr(f"embedrock.{at}", fails_for_memory)
            try:
                optimizer.step()
            except MemoryError as error:
                said.append(f"step: {error}")
        optimizer.zero_grad()
        if step == 0:
            ert.save(layer, folder, step=1)
        if step == 1:
            for _ in range(2):  # once
                try:
                    layer(torch.tensor([], dtype=torch.int64)).sum().backward()
                except er.OtherRankError as error:
                    said.append(str(error))
            optimizer.zero_grad()
            ert.load(layer, folder)
    return [said, layer(torch.arange(5)).detach()]


def fails_for_memory(*args: Any, **options: Any) -> Any:
    raise MemoryError("no room for 3 rows")


@pytest.mark.parametrize(
    ("sharded", "at"),
    [
        (True, "table.stepping.HostStep.make"),
        (True, "batch.gradients.RowGradients.scaled"),
        ("rank 1", "table.stepping.HostStep.make"),
        (False, "table.stepping.HostStep.make"),
    ],
)
def test_a_rank_that_runs_out_of_memory_in_a_step_tells_the_others(
    pair: Ranks, tmp_path: Path, sharded: Any, at: str
) -> None:
    ours, theirs = pair.run(has_no_memory_to_step, sharded, at, str(tmp_path))
    told = r"the last step was not made on this rank, by MemoryError: no room for 3 rows, and the others may have made"
    assert re.search(rf"rank 1 refused .*: {told} it. Load the last checkpoint on all ranks", ours[0][0])
    assert theirs[0][0] == "step: no room for 3 rows"
    assert re.search(told, theirs[0][1])
    if sharded != "rank 1":  # who has no rows, has made no step of them
        assert re.search(r"must have made the same steps on all ranks: got \[2, 1\]", ours[0][1])
    table = er.Table(100, 4, init=er.Normal(std=0.1), rule=er.SGD(lr=1.0), seed=7)
    for _ in range(3):
        table.update([0, 1, 2, 2, 3, 4], np.full((6, 4), 0.5))
    for _, rows in (ours, theirs):
        np.testing.assert_array_equal(rows, table.lookup(np.arange(5)))


def hangs(rank: int, file: str) -> str:
    layer = one_layer(dist.new_group(timeout=timedelta(seconds=0.5)))
    layer(torch.tensor([1]))
    if rank == 1:
        Path(file).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        layer(torch.tensor([1]))
    except er.WorkerLostError as error:
        return str(error)
    raise AssertionError


def test_a_rank_that_hangs_is_an_error_on_the_others_which_says_what_each_was_at(pair: Ranks, tmp_path: Path) -> None:
    pair.start(hangs, str(tmp_path / "pid"))
    waits = pair.result_of(0)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)  # and hears of it as it goes on
    assert re.search(r"did not answer within 0:00:00.500000: .*\. rank 0 was at a lookup in .* \(exchange 3\)", waits)
    assert "; of rank 1 nothing was heard. The others cannot go on" in waits
    assert re.search(r"rank 0 was at a lookup in .*; rank 1 was at a lookup in", pair.result_of(1))


def crosses(rank: int, ranks: int) -> str:
    """Look up in tables of groups of two, which are a circle: each rank in that with the next one first."""
    pairs = [sorted({first, (first + 1) % ranks}) for first in range(ranks)]
    groups = [dist.new_group(pair) for pair in pairs]  # on all ranks
    layers = {at: one_layer(groups[at]) for at, pair in enumerate(pairs) if rank in pair}
    for layer in layers.values():
        layer(torch.tensor([1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embedrock.distributed.near.PATIENCE_S", 0.1)
        with pytest.raises(er.OtherRankError) as caught:
            layers[rank](torch.tensor([2]))
        for layer in layers.values():
            with pytest.raises(er.EmbedrockError, match=r"Start all again|closed the connection|Broken pipe"):
                layer(torch.tensor([2]))
    return str(caught.value)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_wait_for_each_other_in_several_groups_hear_of_it(pair: Ranks, ranks: int) -> None:
    some = pair if ranks == 2 else Ranks(ranks)
    try:
        found = some.run(crosses, ranks)
        some.run(looks_up_in_a_new_group)
    finally:
        some.close() if some is not pair else None
    told = (
        r"rank \d is at a lookup in .*, and waits for another one, .* in another group(, after a lookup in .*)?, or "
        "for ranks that do: so all would wait for ever.*by empty ids"
    )
    assert all(re.search(told, said) for said in found)


def looks_up_in_two_groups(rank: int) -> None:
    """Share tables in a group beside that of all, on ranks of which one is in a third."""
    beside, _ = dist.new_group([0, 1]), dist.new_group([0])
    for layer in (one_layer(), one_layer(beside)):
        layer(torch.tensor([1])).sum().backward()


@pytest.mark.slow
def test_ranks_may_be_in_different_numbers_of_groups(pair: Ranks) -> None:
    pair.run(looks_up_in_two_groups)


def looks_up_in_a_new_group(rank: int) -> None:
    one_layer(dist.new_group())(torch.tensor([1]))


def has_no_room_to_say_so(rank: int) -> str:
    layer = one_layer(dist.new_group())
    layer(torch.tensor([1]))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("embedrock.distributed.exchange.pack_all", lambda *args: bytearray(1 << 62))
        try:
            layer(torch.tensor([1]))
        except (er.WorkerLostError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError


def loses_the_other(rank: int) -> tuple[str, str, str]:
    layer, first = one_layer(), ""
    layer(torch.tensor([1]))
    left = has_no_room_to_say_so(rank)
    if rank == 1:
        os._exit(1)
    try:
        layer(torch.tensor([1]))
    except er.WorkerLostError as error:
        first = str(error)
    try:
        layer(torch.tensor([1]))
    except er.WorkerLostError as error:
        return left, first, str(error)
    raise AssertionError


def test_a_rank_that_dies_or_has_no_memory_even_to_say_so_is_an_error_on_the_others_at_once(pair: Ranks) -> None:
    pair.start(loses_the_other)
    (left, first, again), gone = pair.results()
    assert gone is None
    assert "rank 0 of 2 waited for another one that failed, is gone" in first
    assert "start all again, as torchrun --max-restarts does" in first
    assert "; of rank 1 nothing was heard" in first
    assert first == again
    assert re.search(
        r"rank 0 was at a lookup in .*; rank 1 was at a lookup in .*, for which it had no memory left", left
    )


# ---------------------------------------------------------------- the page's script


def script() -> str:
    page = Path(__file__).parents[2] / "docs/shards.md"
    found = re.search(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def runs_script(rank: int, lines: str) -> tuple[np.ndarray, torch.Tensor]:
    made: dict[str, Any] = {}
    started, dist.init_process_group = dist.init_process_group, lambda *args: None
    ended, dist.destroy_process_group = dist.destroy_process_group, lambda *args: None
    try:
        exec(lines, made)
    finally:
        dist.init_process_group, dist.destroy_process_group = started, ended
    return made["model"][0].table.export()[0], made["model"][1].weight.detach()


def test_the_script_of_the_page_trains_in_two_processes(pair: Ranks) -> None:
    (ours, one), (theirs, other) = pair.run(runs_script, script())
    assert min(len(ours), len(theirs)) > 4000
    assert not np.intersect1d(ours, theirs).size
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("sharded", ["rank", "rank x", 3, None])
def test_what_sharded_may_be_is_told(sharded: Any) -> None:
    with pytest.raises(er.ArgumentError, match=r"`sharded` of ert.Embedding must be True .*'rank 0'.*got"):
        ert.Embedding(10, 2, sharded=sharded)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wire": "float16", "sharded": True}, r"`wire` of ert.Embedding must be one of 'float32', 'bfloat16': got"),
        ({"wire": "bfloat16"}, r"`wire` of ert.Embedding is of rows that are shared out: got .*sharded=False"),
        ({"wire": "bfloat16", "sharded": True, "dtype": torch.bfloat16}, r"`wire` .*rows of bfloat16.*as they are"),
    ],
)
def test_what_wire_may_be_is_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(er.ArgumentError, match=said):
        ert.Embedding(10, 2, **options)
    weights = torch.zeros(3, 2, dtype=options.pop("dtype", torch.float32))
    with pytest.raises(er.ArgumentError, match=said):
        ert.Embedding.from_pretrained(weights, **options)


def test_layers_on_one_table_share_it_by_the_same_terms() -> None:
    layer = one_layer(True, wire="bfloat16")
    assert ert.Embedding(layer.table, sharded=True, wire="bfloat16").handle is layer.handle
    with pytest.raises(er.ArgumentError, match=r"by sharded=True, wire='bfloat16', positions=False already: got"):
        ert.Embedding(layer.table, sharded=True)


def test_tables_of_a_group_are_not_shared_out() -> None:
    group = er.Group()
    with pytest.raises(er.UnsupportedError, match=r"`group` of ert.Embedding does not go with sharded=True: a group"):
        ert.Embedding(10, 2, name="users", group=group, sharded=True)
    assert "users" not in group
    with pytest.raises(er.UnsupportedError, match=r"`group` of ert.EmbeddingBag does not go with sharded='rank 0'"):
        ert.EmbeddingBag(group.table("users", 10, 2), sharded="rank 0")


@pytest.mark.parametrize("sharded", [True, "rank 0"])
def test_one_process_alone_trains_as_ever_and_says_so(sharded: Any) -> None:
    told = rf"^sharded={sharded!r} of ert.Embedding: there is no process group yet, .* or leave sharded= out"
    with pytest.warns(UserWarning, match=told) as warned:
        layer = one_layer(sharded)
    assert [one.filename for one in warned] == [__file__]
    optimizer = ert.SGD(layer, lr=1.0)
    layer(torch.tensor([3, 3])).sum().backward()
    optimizer.step()
    table = er.Table(100, 4, rule=er.SGD(lr=1.0), init=er.Normal(std=0.1), seed=7)
    table.update([3, 3], np.ones((2, 4)))
    np.testing.assert_array_equal(layer.table.lookup([3]), table.lookup([3]))


# ---------------------------------------------------------------- on disk


def on_disk(folder: str, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    paths = [str(Path(folder) / name) for name in ("parts.rock", "whole.rock")]
    options: dict[str, Any] = {"init": er.Normal(std=0.1), "memory": "2MiB"}
    layers = [
        ert.Embedding(None, DIM, seed=1, path=paths[0], sharded=True, **options, **more),
        ert.Embedding(None, DIM, seed=2, path=paths[1], sharded="rank 1", **options),
        ert.Embedding(None, DIM, seed=3, init=er.Normal(std=0.1)),
    ]
    return nn.ModuleList(layers), ert.Adam(layers, lr=0.05)


def step_on_disk(model: Any, optimizer: Any, step: int, blocks: Sequence[int]) -> None:
    for block in blocks:
        ids = ids_of(step, block)
        torch.stack([layer(ids[:, column]).square().sum() for column, layer in enumerate(model)]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def close(model: Any) -> None:
    for layer in model:
        layer.table.close()


def trains_on_disk(rank: int, folder: str, steps: range, saves_at: int) -> list[Any]:
    """Train; save in the middle, and be cut off at the end."""
    model, optimizer = on_disk(folder)
    if steps.start:
        assert ert.load(model, f"{folder}/checkpoints") == steps.start
    for step in steps:
        step_on_disk(model, optimizer, step, [rank])
        if step + 1 == saves_at:
            ert.save(model, f"{folder}/checkpoints", step=saves_at)
    for layer in model:
        layer.table.commit(step=99) if layer.table.is_on_disk and rank == 0 else None  # of which others never hear
    found = [layer(torch.arange(60)).detach() for layer in model]
    close(model)
    return found


def trains_until_killed(rank: int, folder: str) -> None:
    model, optimizer = on_disk(folder)
    with contextlib.suppress(ert.NoCheckpointError):
        ert.load(model, f"{folder}/checkpoints")
    for step in range(model[2].table.steps, 10**6):
        step_on_disk(model, optimizer, step, [rank])
        ert.save(model, f"{folder}/checkpoints", step=step + 1)
        Path(folder, f"at-{rank}").write_text(str(step + 1))


def looks_after_the_kill(rank: int, folder: str) -> tuple[int, list[torch.Tensor]]:
    model, _ = on_disk(folder)
    step = ert.load(model, f"{folder}/checkpoints")
    found = [layer(torch.arange(60)).detach() for layer in model]
    close(model)
    return step, found


@pytest.mark.slow
def test_whatever_is_killed_when_all_parts_are_those_of_one_step(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    layers = [ert.Embedding(None, DIM, seed=seed, init=er.Normal(std=0.1)) for seed in (1, 2, 3)]
    optimizer, done = ert.Adam(layers, lr=0.05), 0
    for number in range(8):
        ranks = Ranks(2, timeout=20)
        ranks.start(trains_until_killed, str(tmp_path))
        while not ((at := tmp_path / f"at-{number % 2}").exists() and int(at.read_text() or 0) > done + 1):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        ranks.processes[number % 2].kill()  # the other one hears of it, or is killed a moment later
        time.sleep(draw.uniform(0, 0.05))
        ranks.processes[1 - number % 2].kill()
        ranks.close()

        ranks = Ranks(2)
        found = ranks.run(looks_after_the_kill, str(tmp_path))
        ranks.close()
        step = found[0][0]
        assert step > done
        for made in range(done, step):
            for block in range(2):
                ids = ids_of(made, block)
                losses = [layer(ids[:, column]).square().sum() for column, layer in enumerate(layers)]
                (torch.stack(losses).sum() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        done = step
        for at, rows in found:
            assert at == step
            for ours, layer in zip(rows, layers, strict=True):
                torch.testing.assert_close(ours, layer(torch.arange(60)).detach(), rtol=0, atol=0)


def saves_where_no_room_is(rank: int, folder: str, disk: str) -> list[Any]:
    """Train and save, with rank 1's disk full in most steps; then begin again."""
    said: list[str] = []
    options: dict[str, Any] = {"init": er.Normal(std=0.1), "seed": 1, "sharded": True, "memory": "2MiB"}
    layer = ert.Embedding(None, DIM, path=f"{folder}/users.rock", **options)
    optimizer = ert.SGD(layer, lr=1.0)
    for step, is_full in enumerate([False, True, False, True, True, True, True]):
        layer(torch.arange(2000) + 1000 * step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank and is_full:
            fill(Path(disk), but=4096)
        try:
            ert.save(layer, f"{folder}/checkpoints", step=step + 1)
        except er.EmbedrockError as error:
            said.append(f"step {step + 1}, {type(error).__name__}: {error}")
        if rank:
            (Path(disk) / BALLAST).unlink(missing_ok=True)
    trained = layer(torch.arange(8000)).detach()
    layer.table.close()
    layer = ert.Embedding(None, DIM, path=f"{folder}/users.rock", **options)
    at = ert.load(layer, f"{folder}/checkpoints")
    resumed = layer(torch.arange(8000)).detach()
    layer.table.close()
    return [said, trained, at, resumed]


@pytest.mark.filterwarnings("ignore::embedrock.UncommittedWarning")
def test_a_full_disk_of_one_rank_refuses_checkpoints_on_all_and_they_go_on(pair: Ranks, tmp_path: Path) -> None:
    (tmp_path / "users.rock").mkdir()
    with memory_disk(tmp_path / "users.rock" / "shard-1-of-2", 8 << 20) as disk:
        ours, theirs = pair.run(saves_where_no_room_is, str(tmp_path), str(disk))
    for said, kind in ((ours[0], "OtherRankError"), (theirs[0], "CommitError")):
        assert [one.partition(":")[0] for one in said] == [f"step {step}, {kind}" for step in (2, 4, 5, 6, 7)]
    told = r"rank 1 refused ert.save, commits.*: .* are free.*users.rock.*So no other does it"
    assert all(re.search(told, one) for one in ours[0]), ours[0]
    table = er.Table(None, DIM, init=er.Normal(std=0.1), rule=er.SGD(lr=1.0), seed=1)
    after = []
    for step in range(7):
        table.update(np.arange(2000) + 1000 * step, np.ones((2000, DIM)))
        after.append(table.lookup(np.arange(8000)))
    for _, trained, at, resumed in (ours, theirs):
        np.testing.assert_array_equal(trained, after[-1])
        assert at == 3
        np.testing.assert_array_equal(resumed, after[2])


def grows_bigger(rank: int, folder: str) -> str:
    try:
        ert.Embedding(None, DIM, seed=1, path=f"{folder}/parts.rock", sharded=True)
    except er.ArgumentError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore::embedrock.UncommittedWarning")
def test_tables_on_disk_go_back_to_what_all_ranks_have_and_train_on_to_the_same_bits(
    pair: Ranks, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    pair.run(trains_on_disk, folder, range(4), 2)
    found = pair.run(trains_on_disk, folder, range(2, 5), 4)
    assert sorted(os.listdir(tmp_path / "parts.rock")) == ["SHARDED", "shard-0-of-2", "shard-1-of-2"]
    layers = [ert.Embedding(None, DIM, seed=seed, init=er.Normal(std=0.1)) for seed in (1, 2, 3)]
    optimizer = ert.Adam(layers, lr=0.05)
    for step in range(5):
        for handle in ert.handles(layers):
            assert handle.grad is None
        for block in range(2):
            ids = ids_of(step, block)
            losses = [layer(ids[:, column]).square().sum() for column, layer in enumerate(layers)]
            (torch.stack(losses).sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ranks in found:
        for ours, layer in zip(ranks, layers, strict=True):
            torch.testing.assert_close(ours, layer(torch.arange(60)).detach(), rtol=0, atol=0)
    done = reshard(f"{folder}/parts.rock", 3)
    assert (done.before, done.after, done.step) == (2, 3, 4)
    for said in pair.run(grows_bigger, folder):
        assert "must be opened by as many processes as its parts, 3: got 2" in said


def commits_more(rank: int, path: str, more: int, keep: int = 1) -> int:
    """Train and commit on both ranks; then commit on rank 0 only. Return the steps that the table was opened at."""
    layer = ert.Embedding(None, DIM, seed=1, path=path, memory="1MiB", sharded=True, keep=keep)
    optimizer, opened_at = ert.Adam(layer, lr=0.05), layer.table.steps
    for step in range(2 + more):
        layer(ids_of(step, rank)[:, 0]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 or step < 2:
            layer.table.commit(step=opened_at + step + 1)
    layer.table.close()
    return opened_at


@pytest.mark.filterwarnings("ignore::embedrock.UncommittedWarning")
def test_parts_are_opened_at_the_newest_commit_of_all(pair: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "users.rock")
    assert pair.run(commits_more, path, 2) == [0, 0]
    with er.open(path, mode="r") as table:
        assert table.steps == 2
    assert pair.run(commits_more, path, 3, 9) == [2, 2]
    pair.start(commits_more, path, 0, 9)
    for failure in pair.results():
        assert failure.kind == "ArgumentError"
        assert "but for the last two, as all ranks commit: got [3, 0] after the newest that all have" in failure.said


def opened_anew(rank: int, path: str) -> tuple[torch.Tensor, int]:
    layer = ert.Embedding(None, DIM, path=path, memory="1MiB", sharded=True, reshard="auto")
    found = layer(torch.arange(60)).detach(), layer.table.steps
    layer.table.close()
    return found


def test_parts_are_shared_out_anew_as_they_are_opened(pair: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "users.rock")
    pair.run(commits_more, path, 0)
    with er.open(path, mode="r") as table:
        expected = torch.from_numpy(table.lookup(np.arange(60)))
    layer = ert.Embedding(None, DIM, path=path, memory="1MiB", sharded=True, reshard="auto")
    torch.testing.assert_close(layer(torch.arange(60)).detach(), expected, rtol=0, atol=0)
    layer.table.close()
    assert sorted(os.listdir(path)) == ["SHARDED", "shard-0-of-1"]
    for rows, steps in pair.run(opened_anew, path):
        torch.testing.assert_close(rows, expected, rtol=0, atol=0)
        assert steps == 2
    assert sorted(os.listdir(path)) == ["SHARDED", "shard-0-of-2", "shard-1-of-2"]


# ---------------------------------------------------------------- in RAM


def in_ram() -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = [one_layer(kind) for kind in (True, "rank 1", False)]
    model = nn.ModuleList(layers)
    return model, ert.Adam(model, lr=0.05)


def steps_in_ram(model: Any, optimizer: Any, steps: range, blocks: Sequence[int]) -> list[torch.Tensor]:
    for step in steps:
        for block in blocks:
            ids = ids_of(step, block)[:, 0] % 100
            (torch.stack([layer(ids).square().sum() for layer in model]).sum() / len(blocks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [layer(torch.arange(100)).detach() for layer in model]


def saves_in_ram(rank: int, folder: str) -> list[torch.Tensor]:
    """Train, save, and go on; a new model loads, and goes on the same way."""
    model, optimizer = in_ram()
    steps_in_ram(model, optimizer, range(1), [rank])
    ert.save(model, folder, step=1, keep=1)
    steps_in_ram(model, optimizer, range(1, 3), [rank])
    ert.save(model, folder, step=3, keep=1)
    model, optimizer = in_ram()
    assert ert.load(model, folder) == 3
    return steps_in_ram(model, optimizer, range(3, 5), [rank])


def test_rows_that_are_shared_in_ram_are_saved_by_all_ranks(pair: Ranks, tmp_path: Path) -> None:
    found = pair.run(saves_in_ram, str(tmp_path))
    expected = steps_in_ram(*in_ram(), range(5), [0, 1])
    for rows in found:
        for ours, theirs in zip(rows, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    names = sorted(os.listdir(tmp_path))
    assert [re.sub("[0-9a-f]{8}", "token", name) for name in names] == ["step-3-token.part-1-of-2", "step-3-token.pt"]

    model, optimizer = in_ram()  # one process alone takes the rows of both
    assert ert.load(model, tmp_path) == 3
    for ours, theirs in zip(steps_in_ram(model, optimizer, range(3, 5), [0, 1]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    with pytest.raises(er.ArgumentError, match=r"has the rows of rank 0 of 2 only, and this process has all rows"):
        model.load_state_dict(torch.load(tmp_path / names[1])["model"])
    (tmp_path / names[0]).unlink()
    with pytest.raises(er.CorruptTableError, match=r"part-1-of-2.*All ranks must save to.* one folder that all see"):
        ert.load(model, tmp_path)


def grows_when_loaded(rank: int, kind: Any, path: str | None, folder: str) -> list[torch.Tensor]:
    """Train and save; then load with more rows, in a new layer or, of a table on disk, in one that has grown."""
    layer = ert.Embedding(100, DIM, seed=1, sharded=kind, path=path)
    optimizer = ert.Adam(layer, lr=0.05)
    steps_in_ram([layer], optimizer, range(2), [rank])
    ert.save(layer, folder, step=2)
    if path is None:
        layer = ert.Embedding(150, DIM, seed=2, sharded=kind)
        optimizer = ert.Adam(layer, lr=0.05)
    else:
        layer.grow(150)
        layer(torch.arange(100, 150)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ert.load(layer, folder, grow=True) == 2
    assert layer.num_embeddings == 150
    found = [layer(torch.arange(150)).detach(), *steps_in_ram([layer], optimizer, range(2, 3), [rank])]
    if path is not None:
        layer.table.commit()
        layer.table.close()
    return found


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("kind", [True, *slow("rank 1", False)])
def test_shared_rows_load_a_checkpoint_of_fewer(pair: Ranks, tmp_path: Path, kind: Any, on_disk: bool) -> None:
    path = str(tmp_path / "t") if on_disk and kind is True else None
    found = pair.run(grows_when_loaded, kind, path, str(tmp_path / "checkpoints"))
    layer = ert.Embedding(150, DIM, seed=1)
    optimizer = ert.Adam(layer, lr=0.05)
    steps_in_ram([layer], optimizer, range(2), [0, 1])
    expected = [layer(torch.arange(150)).detach(), *steps_in_ram([layer], optimizer, range(2, 3), [0, 1])]
    for rows in found:
        for ours, theirs in zip(rows, expected, strict=True):
            assert torch.equal(ours, theirs)


def shares_by_dcp(rank: int, folder: str) -> list[Any]:
    """Train, save by torch.distributed.checkpoint, train on; then load in a new model, and do so again."""
    found = []
    for kinds in [(True, False, "rank 1")] * 2:
        model = Model(kinds, True)
        net = DistributedDataParallel(model)
        optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.SGD, lr=0.05)
        with pytest.raises(er.UnsupportedError, match=r"embedrock.torch.dcp.state_dict\(model\) is what torch.distr"):
            model.state_dict()
        if found:
            state = {"model": ert_dcp.state_dict(model)}
            dcp.load(state, checkpoint_id=folder, planner=ert_dcp.LoadPlanner())
            model.load_state_dict(state["model"])
        for step in range(3, 5) if found else range(5):
            if step == 3 and not found:
                dcp.save({"model": ert_dcp.state_dict(model)}, checkpoint_id=folder)
            nn.functional.softplus(net(ids_of(step, rank))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([table.export() for table in model.tables])
    return found


def loads_by_dcp(folder: str) -> list[Any]:
    model = Model([False] * 3, True)
    state = {"model": ert_dcp.state_dict(model)}
    dcp.load(state, checkpoint_id=folder, planner=ert_dcp.LoadPlanner())
    model.load_state_dict(state["model"])
    return [table.export() for table in model.tables]


def test_torch_distributed_checkpoint_saves_and_loads_rows_that_are_shared(pair: Ranks, tmp_path: Path) -> None:
    for first, again in pair.run(shares_by_dcp, str(tmp_path / "dcp")):
        for (ids, rows), (its_ids, its_rows) in zip(first, again, strict=True):
            np.testing.assert_array_equal(ids, its_ids)
            np.testing.assert_array_equal(rows, its_rows)
    model = Model([False] * 3, True)
    optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.SGD, lr=0.05)
    for step in range(3):
        for block in range(2):
            nn.functional.softplus(model(ids_of(step, block)) / 1.0).sum().div(2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (ids, rows), (its_ids, its_rows) in zip(
        loads_by_dcp(str(tmp_path / "dcp")), [table.export() for table in model.tables], strict=True
    ):
        np.testing.assert_array_equal(ids, its_ids)  # one process has all rows of both
        np.testing.assert_allclose(rows, its_rows, rtol=1e-4, atol=1e-6)  # dense layers are DDP's


def shares_disks_by_dcp(rank: int, folder: str, goes_on: bool) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Train tables on disk, save them by torch.distributed.checkpoint, and train on; or load, and do so again."""
    model, optimizer = on_disk(folder)
    if goes_on:
        state = {"model": ert_dcp.state_dict(model)}
        dcp.load(state, checkpoint_id=f"{folder}/dcp", planner=ert_dcp.LoadPlanner())
        model.load_state_dict(state["model"])
    else:
        for step in range(2):
            step_on_disk(model, optimizer, step, [rank])
        dcp.save({"model": ert_dcp.state_dict(model)}, checkpoint_id=f"{folder}/dcp")
    seen = torch.stack([layer(torch.arange(60)).detach() for layer in model])
    for step in range(2, 4):
        step_on_disk(model, optimizer, step, [rank])
    after = torch.stack([layer(torch.arange(60)).detach() for layer in model])
    names = [commit["name"] for layer in model if layer.table.is_on_disk for commit in layer.table.commits()]
    close(model)
    return seen, after, names


@pytest.mark.filterwarnings("ignore::embedrock.UncommittedWarning")
def test_torch_distributed_checkpoint_saves_and_loads_tables_on_disk_that_are_shared(
    pair: Ranks, tmp_path: Path
) -> None:
    first = pair.run(shares_disks_by_dcp, str(tmp_path), False)
    again = pair.run(shares_disks_by_dcp, str(tmp_path), True)
    for (seen, after, names), (seen_again, after_again, _) in zip(first, again, strict=True):
        torch.testing.assert_close(seen, seen_again, rtol=0, atol=0)
        torch.testing.assert_close(after, after_again, rtol=0, atol=0)
        assert not torch.equal(seen, after)
        (name,) = {name for name in names if name is not None}
        assert re.fullmatch(r"dcp-[0-9a-f]{8}", name)
    assert len({name for _, _, names in first for name in names if name is not None}) == 1


def loads_disks_by_dcp(rank: int, folder: str, ranks: int) -> list[torch.Tensor]:
    """Load on any number of ranks, and make two steps more, of the blocks that two ranks have."""
    model, optimizer = on_disk(folder, reshard="auto")
    state = {"model": ert_dcp.state_dict(model)}
    dcp.load(state, checkpoint_id=f"{folder}/dcp", planner=ert_dcp.LoadPlanner(), no_dist=ranks == 1)
    model.load_state_dict(state["model"])
    seen = [torch.stack([layer(torch.arange(60)).detach() for layer in model])]
    for step in range(2, 4):
        for block in [0, 1] if ranks == 1 else [rank]:
            ids = ids_of(step, block) if block < 2 else torch.empty((0, 3), dtype=torch.int64)
            losses = [layer(ids[:, column]).square().sum() for column, layer in enumerate(model)]
            (torch.stack(losses).sum() * (ranks / 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    seen.append(torch.stack([layer(torch.arange(60)).detach() for layer in model]))
    close(model)
    return seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::embedrock.UncommittedWarning")
@pytest.mark.parametrize("ranks", [1, 3])
def test_torch_distributed_checkpoint_loads_tables_on_disk_on_another_number_of_ranks(
    pair: Ranks, tmp_path: Path, ranks: int
) -> None:
    seen, after, _ = pair.run(shares_disks_by_dcp, str(tmp_path), False)[0]
    others = Ranks(ranks, timeout=120)
    try:
        found = others.run(loads_disks_by_dcp, str(tmp_path), ranks)
    finally:
        others.close()
    for seen_there, after_there in found:
        torch.testing.assert_close(seen_there, seen, rtol=0, atol=0)
        # 3 / 2 is rounded where it is divided by 3 again
        torch.testing.assert_close(after_there, after, rtol=1e-5 * (ranks > 1), atol=1e-6 * (ranks > 1))


# ---------------------------------------------------------------- what travels


def traffic(
    rank: int, sharded: Any, dtype: torch.dtype, goes_ahead: bool = False, **options: Any
) -> tuple[float, float, float]:
    """Return the bytes that one step sends, what it should, and how many messages are exchanged."""
    layer = ert.Embedding(None, 64, seed=1, sharded=sharded, dtype=dtype, **options)
    optimizer = ert.SGD(layer, lr=0.1)
    ids = torch.from_numpy(np.random.default_rng(rank).zipf(1.05, 20_000).astype(np.int64))
    assert layer.handle.sharing is not None
    ranks, ahead = layer.handle.sharing.rank_group.ranks, layer.handle.sharing.rank_group.ahead
    sent, rounds = ranks.sent + ahead.sent, ranks.rounds
    for batch in ert.prefetch([ids], {layer: lambda ids: ids}) if goes_ahead else [ids]:
        layer(batch).float().sum().backward()
        optimizer.step()
    unique, weight = len(ids.unique()), 2 if "wire" in options else 4
    brought = unique
    if "positions" in options:  # the owner of a row that comes often gets all of its gradients
        brought = 2 * int((owners(ids.numpy(), 2) != rank).sum()) if sharded else len(ids)
    row = 64 * min(weight, torch.finfo(dtype).bits // 8)
    expected = ((row + 8) * unique + (64 * weight + 8) * brought) / 2 if sharded else (64 * 4 + 8) * brought
    return ranks.sent + ahead.sent - sent, expected, ranks.rounds - rounds


@pytest.mark.parametrize(
    ("given", "options", "rounds"),
    [
        ((True, torch.float32), {}, 4),
        ((True, torch.bfloat16), {}, 4),
        ((False, torch.float32), {}, 2),
        ((False, torch.float32), {"positions": True}, 2),
        ((True, torch.float32), {"wire": "bfloat16"}, 4),
        ((True, torch.float32, True), {}, 3),
        ((True, torch.float32, True), {"wire": "bfloat16"}, 3),
        ((True, torch.float32, True), {"positions": True}, 3),
    ],
)
def test_a_step_sends_each_unique_row_once_each_way(
    pair: Ranks, given: Sequence[Any], options: dict[str, Any], rounds: int
) -> None:
    for sent, expected, made in pair.run(functools.partial(traffic, **options), *given):
        assert abs(sent / expected - 1) < 0.02
        assert made == rounds


def garbage_of_a_step(rank: int) -> int:
    """Return how many objects of a step only the garbage collector frees."""
    layer = one_layer()
    optimizer = ert.SGD(layer, lr=0.1)
    for _ in range(2):
        gc.collect()
        gc.disable()
        layer(torch.arange(3) + 2 * rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.enable()
    return gc.collect()


def test_messages_and_rows_are_freed_without_the_garbage_collector(pair: Ranks) -> None:
    assert pair.run(garbage_of_a_step) == [0, 0]


def trains_without_memory_of_others(rank: int) -> tuple[list[np.ndarray], int]:
    """Train with ranks that see each other's memory, then with those of a machine each, as far as they can tell."""
    found, rounds = [], 0
    for is_near in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not is_near:
                patch.setattr("embedrock.distributed.near.MappedMemory.__init__", _sees_nothing)
            layer = one_layer(dist.new_group())
            assert layer.handle.sharing is not None
        optimizer, ranks = ert.Adam(layer, lr=0.1), layer.handle.sharing.rank_group.ranks
        for step in range(3):
            rounds = ranks.rounds
            layer(torch.arange(50) + 30 * rank + step).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            rounds = ranks.rounds - rounds
        found += layer.table.export()
    return found, rounds


def _sees_nothing(*args: Any) -> None:
    raise FileNotFoundError("/proc/1/fd/3")


def test_ranks_of_several_machines_train_to_the_bits_of_those_of_one(pair: Ranks) -> None:
    for (ids, rows, same_ids, same_rows), rounds in pair.run(trains_without_memory_of_others):
        assert rounds == 6  # sizes, and messages
        assert len(ids) > 10
        np.testing.assert_array_equal(ids, same_ids)
        np.testing.assert_array_equal(rows, same_rows)


def test_the_bytes_of_a_step_are_those_that_are_simulated(pair: Ranks) -> None:
    found = pair.run(traffic, True, torch.float32)
    log = [np.random.default_rng(rank).zipf(1.05, 20_000).astype(np.int64) for rank in range(2)]
    told = simulate(Load(10**12, 64, 20_000), Cluster(ranks=2), log=log)
    heads = sum(sent for sent, _, _ in found) - 2 * told.bytes_sent
    assert 0 <= heads <= 2 * BYTES_OF_HEADS


# ---------------------------------------------------------------- ids that go ahead


class Pooled(nn.Module):
    """Tables in RAM and on disk, shared out, at one rank, and replicated; one has a padding row."""

    def __init__(self, folder: str, alone: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        init = er.Normal(std=0.1)
        kinds: list[Any] = [False] * 3 if alone else [True, "rank 1", False]
        path = None if alone else f"{folder}/users.rock"
        memory = None if alone else "1MiB"
        self.users = ert.Embedding(None, DIM, init=init, seed=1, sharded=kinds[0], path=path, memory=memory)
        self.items = ert.Embedding(10**6, DIM, padding_idx=1, init=init, seed=2, sharded=kinds[1])
        self.tags = ert.EmbeddingBag(10**6, DIM, mode="sum", init=init, seed=3, sharded=kinds[2])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        users = self.users(ids[:, 0]) + self.users(ids[:16, 1]).sum(0)
        return (users * self.items(ids[:, 1]) + self.tags(ids[:, 1:])).sum(1)

    @property
    def ids(self) -> dict[Any, Any]:
        return {
            self.users: lambda ids: (ids[:, 0], ids[:16, 1]),
            self.items: lambda ids: ids[:, 1],
            self.tags: lambda ids: ids[:, 1:],
        }


def train_pooled(model: Pooled, net: Any, batches: Any, blocks: int, counts: Any = None) -> list[int]:
    rows, made = ert.Adam(model, lr=0.05), []
    for number, ids in enumerate(batches):
        before = 0 if counts is None else counts.rounds
        (nn.functional.softplus(net(ids)).sum() / blocks).backward()
        if (number + 1) % blocks == 0 or counts is not None:
            rows.step()
            rows.zero_grad()
        if counts is not None:
            made.append(counts.rounds - before)
    return made


def goes_ahead(rank: int, folder: str, depth: int) -> tuple[list[int], list[Any]]:
    model = Pooled(folder, alone=False)
    assert model.users.handle.sharing is not None
    rank_group = model.users.handle.sharing.rank_group
    batches = [ids_of(step, rank) for step in range(STEPS)]
    made = train_pooled(
        model, DistributedDataParallel(model), ert.prefetch(batches, model.ids, depth), 1, rank_group.ranks
    )
    tables = [model.users.table, model.items.table, model.tags.table]
    found = [table.export() for table in tables]
    model.users.table.close()
    return made, found


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.filterwarnings("ignore::embedrock.UncommittedWarning")
def test_ids_go_ahead_in_three_messages_a_step_and_change_no_bit(pair: Ranks, tmp_path: Path, depth: int) -> None:
    model = Pooled("", alone=True)
    train_pooled(model, model, [ids_of(step, block) for step in range(STEPS) for block in range(2)], 2)
    found = pair.run(goes_ahead, str(tmp_path), depth)
    for made, _ in found:
        assert made == [3] * STEPS  # rows, gradients, norms
    for place, table in enumerate([model.users.table, model.items.table, model.tags.table]):
        expected, weights = table.export()
        for rank, (_, parts) in enumerate(found):
            own = [owners(expected, 2) == rank, np.full(len(expected), rank == 1), np.ones(len(expected), bool)][place]
            ids, rows = parts[place]
            np.testing.assert_array_equal(ids, expected[own])  # the row of padding_idx, too, is its owner's
            np.testing.assert_array_equal(rows, weights[own])


def publishes(rank: int, folder: str) -> Any:
    """Train on disk, commit on both ranks, and publish from the first."""
    users = ert.Embedding(None, DIM, init=er.Normal(std=0.1), seed=1, sharded=True, path=f"{folder}/users.rock")
    rows, made = ert.Adagrad(users, lr=0.1), list[int]()
    with pytest.raises(er.UnsupportedError, match=r"on one rank: er\.publish\(layer\.table, folder\)$"):
        ert.publish(users, f"{folder}/served")
    for step in range(3):
        nn.functional.softplus(users(ids_of(step, rank))).sum().backward()
        rows.step()
        rows.zero_grad()
        users.table.commit(step=step)
        dist.barrier()
        if rank == 0:
            made.append(er.publish(users.table, f"{folder}/served").rows)
    users.table.close()
    return made


def test_one_rank_publishes_the_rows_of_all(pair: Ranks, tmp_path: Path) -> None:
    users = ert.Embedding(None, DIM, init=er.Normal(std=0.1), seed=1)
    rows, stepped = ert.Adagrad(users, lr=0.1), list[int]()
    for step in range(3):
        blocks = [ids_of(step, rank) for rank in range(2)]
        for block in blocks:
            nn.functional.softplus(users(block)).sum().backward()
        rows.step()
        rows.zero_grad()
        stepped.append(len(torch.cat(blocks).unique()))
    made, _ = pair.run(publishes, str(tmp_path))
    assert made == stepped
    with er.Subscriber(tmp_path / "served") as served, served.step() as step:
        assert step.step == 2
        for found, expected in zip(step["users"].export(), users.table.export(), strict=True):
            np.testing.assert_array_equal(found, expected)


# ---------------------------------------------------------------- ranks that have no batches left

LENGTHS = [5, 2]


def trains_unevenly(rank: int, goes_ahead: bool) -> list[Any]:
    """Train by different numbers of batches, with a schedule, clipping and accumulation; then evaluate on one rank."""
    model = Model([True, False, "rank 1"], dense=False)
    net = DistributedDataParallel(model)
    rows = ert.Adam(model, lr=0.05, betas=(0.8, 0.99))
    schedule = torch.optim.lr_scheduler.StepLR(rows, 1, 0.5)
    ids = [ids_of(step, rank) for step in range(LENGTHS[rank])]
    layers = model.users, model.items, model.tags
    columns = [0, slice(1, None), slice(1, None)]
    asked = {
        layer: functools.partial(lambda column, batch: batch[:, column], column)
        for layer, column in zip(layers, columns, strict=True)
    }
    with net.join(), ert.uneven(model):
        for batch in ert.prefetch(ids, asked) if goes_ahead else ids:
            rows.zero_grad()
            nn.functional.softplus(net(batch)).sum().backward()
            nn.utils.clip_grad_norm_(ert.handles(model), 2.0)
            rows.step()
            schedule.step()
    seen = []
    with ert.uneven(net), torch.no_grad():
        if rank == 1:
            seen = [model(ids_of(9, step)) for step in range(3)]
    assert all(handle.grad is None for handle in ert.handles(model))
    with torch.no_grad():
        seen.append(model(ids_of(9, rank)))  # all at once again
    return [[table.export() for table in model.tables], [table.steps for table in model.tables], seen]


def alone_unevenly() -> tuple[Model, list[torch.Tensor]]:
    model = Model([False] * 3, dense=False)
    rows = ert.Adam(model, lr=0.05, betas=(0.8, 0.99))
    schedule = torch.optim.lr_scheduler.StepLR(rows, 1, 0.5)
    for step in range(max(LENGTHS)):
        for rank in range(2):
            if step < LENGTHS[rank]:
                (nn.functional.softplus(model(ids_of(step, rank))).sum() / 2).backward()
        nn.utils.clip_grad_norm_(ert.handles(model), 2.0)
        rows.step()
        rows.zero_grad()
        schedule.step()
    with torch.no_grad():
        return model, [model(ids_of(9, step)) for step in range(3)]


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_ranks_that_have_no_batches_left_serve_the_others(pair: Ranks, goes_ahead: bool) -> None:
    model, expected = alone_unevenly()
    found = pair.run(trains_unevenly, goes_ahead)
    for place, table in enumerate(model.tables):
        ids, rows = table.export()
        for rank, (parts, steps, _) in enumerate(found):
            own = [owners(ids, 2) == rank, np.ones(len(ids), bool), np.full(len(ids), rank == 1)][place]
            np.testing.assert_array_equal(parts[place][0], ids[own])
            np.testing.assert_array_equal(parts[place][1], rows[own])
            assert steps[place] in (table.steps, 0 if place == 2 and rank == 0 else table.steps)
    for rank in range(2):
        torch.testing.assert_close(found[rank][2][-1], expected[rank], rtol=0, atol=0)
    for ours, theirs in zip(found[1][2], expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def fails_inside(rank: int, which: str) -> tuple[str, str]:
    layer = one_layer()
    try:
        if which == "loader":
            for ids in ert.prefetch([torch.arange(4)] * (2 + rank), {layer: lambda ids: ids}):
                layer(ids)
        elif which == "ids":
            for ids in ert.prefetch([torch.arange(4)] * 2, {layer: lambda ids: ids * (1 + 30 * rank)}):
                layer(ids * (1 + 30 * rank))
            for ids in ert.prefetch([torch.arange(4) + 97 * rank], {layer: lambda ids: ids}):
                layer(ids)
        else:
            with ert.uneven(layer):
                layer(torch.arange(4))
                if rank == 1 and which == "leaves":
                    raise RuntimeError("no room")
                if rank == 0 or which == "differs":
                    (layer if rank else one_layer(seed=8) if which == "differs" else layer)(torch.arange(3))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("which", "kinds", "said"),
    [
        ("loader", ("OtherRankError",) * 2, r"as many batches on all ranks: rank 0 has none, rank 1 is at batch"),
        ("ids", ("OtherRankError", "IdError"), r"rank 1 refused a lookup in .* must lie in \[0, 100\)"),
        ("leaves", ("OtherRankError", "RuntimeError"), r"failed inside of ert.uneven: .*rank 1 has failed: .*no room"),
    ],
)
def test_what_goes_wrong_between_uneven_ranks_is_an_error_on_all(
    pair: Ranks, which: str, kinds: tuple[str, str], said: str
) -> None:
    found = pair.run(fails_inside, which)
    assert tuple(kind for kind, _ in found) == kinds, found
    assert re.search(said, found[0][1]), found[0][1]


# ---------------------------------------------------------------- trainers, as torchrun starts them

SHARED = """
import torch, embedrock.torch as ert
torch.manual_seed(0)
users, dense = ert.Embedding(10**6, 8, sharded=True), torch.nn.Linear(8, 1)
model = torch.nn.Sequential(users, dense)
loader = torch.utils.data.DataLoader(torch.arange(600) % 97, batch_size=20)
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for ids in ert.prefetch(loader, {users: lambda ids: ids}):
    accelerator.backward(model(ids).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(), optimizer.zero_grad()
with model.join(), ert.uneven(model):
    for k in range(3 + 2 * accelerator.process_index):
        accelerator.backward(model(torch.arange(9) + k).square().mean())
        optimizer.step(), optimizer.zero_grad()
"""
FSDP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
fully_shard(dense, mesh=init_device_mesh("cpu", (2,)))
rows, weights = ert.Adam(model, lr=1e-2), torch.optim.Adam(dense.parameters(), lr=1e-2)
for ids in loader:
    model(ids + torch.distributed.get_rank()).square().mean().backward()
    for optimizer in (rows, weights):
        optimizer.step(), optimizer.zero_grad()
"""
LIGHTNING = """
import lightning.pytorch as pl
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, ids):
        return self.model(ids).square().mean()
    def configure_optimizers(self):
        return ert.optimizer(self, rows=ert.Adam, dense=torch.optim.Adam, lr=1e-2)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, gradient_clip_val=1.0, **quiet)
trainer.fit(Net(), loader)
"""
RESULT = """
import os
loss = float(model(torch.arange(97)).detach().square().mean())
os.write(1, f"result {users.table.steps} {loss}\\n".encode())  # at once, or lines of two processes mix
"""


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "steps"), [(ACCELERATE, 20), (FSDP, 30), (LIGHTNING, 15)])
def test_trainers_train_rows_that_two_processes_share(tmp_path: Path, trainer: str, steps: int) -> None:
    program = tmp_path / "train.py"
    program.write_text(SHARED + trainer + RESULT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(
        launch, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    found = re.findall(r"result (\d+) (\S+)", done.stdout)
    assert len(found) == 2, done.stderr[-2000:]
    assert found[0] == found[1]
    assert int(found[0][0]) == steps
    assert float(found[0][1]) < 0.2
