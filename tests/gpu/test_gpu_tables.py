"""Tables whose rows are on a device: the same bits wherever they are, and what reads them in between."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import DEVICE, INTERPRETED
from gpu_models import (
    ALL_NEAR,
    BATCH,
    DIM,
    HASHED,
    HOSTED,
    NONE_NEAR,
    OPEN,
    ROWS,
    SOME_NEAR,
    WAYS,
    Model,
    Way,
    assert_same_table,
    batches,
    by_name,
    loss_of,
    make,
    on_device,
    on_disk,
    train,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import embedrock as er
import embedrock.torch as ert
from embedrock.device import attach
from embedrock.device.executor import GpuExecutor
from embedrock.device.host_planned import HostPlannedExecutor
from embedrock.errors import IdError
from embedrock.optimizers import RULES
from embedrock.table.table import rows_of
from first_values import FIRST_VALUES
from slow import slow

DIRECT = [ALL_NEAR, NONE_NEAR, *SOME_NEAR]
# On a GPU, division and roots are those of the CPU, and nothing is fused; exponentials are not the same function.
# Row-wise rules sum squares, in another order.
OPTIONS: dict[str, dict[str, Any]] = {
    "Momentum": {"nesterov": True},
    "AdamW": {"weight_decay": 0.1},
    "Ftrl": {"l1": 0.01},
}
NAMES = [kind.__name__ for kind in RULES if not kind.__name__.startswith("Rowwise")]
TO_THE_BIT = [(name, OPTIONS.get(name, {})) for name in NAMES]


FEW = [NONE_NEAR, SOME_NEAR[1], HOSTED[2], HASHED[2]]  # the others take parts of their ways


@pytest.mark.parametrize("way", [*FEW, *slow(*(way for way in WAYS if way not in FEW))], ids=by_name)
def test_training_gives_the_bits_of_the_cpu(way: Way):
    ids = batches(4)
    assert_same_table(train(make(way), ids).table, train(make(None), ids).table)


@pytest.mark.parametrize(("rule", "options"), TO_THE_BIT, ids=str)
def test_every_rule_gives_the_bits_of_the_cpu(rule: str, options: dict[str, Any]):
    ids = batches(2)
    mine, theirs = (train(make(way, rule, options), ids) for way in (NONE_NEAR, None))
    assert_same_table(mine.table, theirs.table)


DENSE = "Adam", "Momentum", "Ftrl", "RMSprop"


@pytest.mark.parametrize(
    ("way", "rule"),
    [
        (SOME_NEAR[1], "Adam"),
        (HASHED[0], "Momentum"),
        *slow(*((way, rule) for way in (SOME_NEAR[1], ALL_NEAR, HOSTED[0], HASHED[2]) for rule in DENSE)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_rows_catch_up_with_dense_rules(way: Way, rule: str):
    ids = batches(3)
    mine, theirs = (train(make(where, rule, {"dense": True}), ids) for where in (way, None))
    np.testing.assert_allclose(mine.weights(), theirs.weights(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        (SOME_NEAR[1], torch.float16),
        (HASHED[0], torch.bfloat16),
        *slow(
            (ALL_NEAR, torch.bfloat16),
            (ALL_NEAR, torch.float16),
            (SOME_NEAR[1], torch.bfloat16),
            (HOSTED[0], torch.float16),
            (HASHED[2], torch.float16),
        ),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_16_bit_weights_are_rounded_as_on_the_cpu(way: Way, dtype: torch.dtype):
    ids = batches(2)
    mine, theirs = (train(make(where, dtype=dtype), ids) for where in (way, None))
    assert_same_table(mine.table, theirs.table)


@pytest.mark.parametrize("init", FIRST_VALUES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_values_are_those_of_the_cpu(init: er.Initializer, dtype: torch.dtype):
    layer, on_cpu = (ert.Embedding(ROWS, DIM, init=init, seed=3, dtype=dtype) for _ in range(2))
    on_device(layer)
    ids = torch.arange(ROWS)
    assert torch.equal(layer(ids).cpu(), on_cpu(ids))
    assert layer.table.stats()["rows_touched"] == 0


def test_first_values_that_only_the_cpu_can_draw():
    weights = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
    models = [ert.Embedding.from_pretrained(weights, freeze=False) for _ in range(2)]
    steps = [ert.Adam(model, lr=0.1) for model in models]
    on_device(models[0])
    for ids, (model, optimizer) in itertools.product(batches(3), zip(models, steps, strict=True)):
        model(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    mine, theirs = (model.table.lookup(np.arange(ROWS)) for model in models)
    np.testing.assert_array_equal(mine, theirs)


# Not shrunk: an example takes a second in the interpreter.
SLOW = settings(max_examples=2, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])


@SLOW
@given(
    seed=st.integers(0, 2**32), near=st.integers(1, ROWS - 1), depth=st.integers(0, 3), every=st.integers(1, 3),
    rule=st.sampled_from(["Adam", "SGD", "RowwiseAdagrad"]),
)  # fmt: skip
def test_no_cache_size_depth_or_accumulation_changes_a_bit(seed: int, near: int, depth: int, every: int, rule: str):
    models = [make(ALL_NEAR, rule), make(Way("cache", near), rule)]
    for model, ahead in zip(models, (0, depth), strict=True):
        for k, ids in enumerate(ert.prefetch(batches(5, seed), {model.rows: lambda ids: ids}, depth=ahead)):
            loss_of(model, ids).backward()
            if (k + 1) % every == 0:
                model.step()
                model.zero_grad()
            if k == 3:
                model.rows(torch.arange(40))  # not announced
    assert_same_table(models[0].table, models[1].table)


@pytest.mark.parametrize("way", [HOSTED[2], *slow(HOSTED[0], HOSTED[1], HOSTED[3])], ids=by_name)
def test_what_the_host_plans_is_planned_once_ahead_of_its_lookup(way: Way, monkeypatch: pytest.MonkeyPatch):
    ids, planned, plan = batches(4), list[int](), HostPlannedExecutor._host_planned

    def noted(executor: HostPlannedExecutor, asked: torch.Tensor) -> Any:
        planned.append(asked.data_ptr())
        return plan(executor, asked)

    model = make(way)
    monkeypatch.setattr(HostPlannedExecutor, "_host_planned", noted)
    for k, some in enumerate(ert.prefetch(ids, {model.rows: lambda ids: ids})):
        train(model, [some])
        assert planned == [each.data_ptr() for each in ids[: k + 2]]
        if k == 1:
            ids[2].add_(1).clamp_(max=ROWS - 1)  # so that what was planned ahead is not of it any more
            planned.pop()
    assert_same_table(model.table, train(make(None), ids).table)
    model.table.close()


def test_ids_outside_of_a_table_that_the_host_plans_are_an_error_when_they_are_looked_up():
    model, ids = make(HOSTED[0]), [torch.arange(3), torch.tensor([ROWS])]
    there = ert.prefetch(ids, {model.rows: lambda ids: ids})
    train(model, [next(there)])
    bad = next(there)
    with pytest.raises(IdError, match=rf"got {ROWS}"):
        model.rows(bad)


def test_batches_that_are_larger_than_the_cache():
    ids = [torch.randperm(ROWS) for _ in range(2)]
    assert_same_table(train(make(Way("three near", 3)), ids).table, train(make(ALL_NEAR), ids).table)


def test_a_cache_is_used():
    model = train(make(Way("most near", 80)), batches(8))
    stats = model.table.stats()
    assert stats["device_slots"] == 80
    assert stats["device_hits"] > stats["device_fetched"] > 0
    assert stats["device_hits"] + stats["device_misses"] + stats["device_first_uses"] == sum(
        len(ids.unique()) for ids in batches(8)
    )
    assert "80 rows cached" in repr(model.table)


@pytest.mark.parametrize("way", [ALL_NEAR, SOME_NEAR[1], HOSTED[2], HASHED[2]], ids=by_name)
def test_counting_brings_nothing_back(way: Way):
    model, other = train(make(way), batches(3)), train(make(None), batches(3))
    executor = model.table.executor
    assert isinstance(executor, GpuExecutor)
    before = executor.cache.slots.dirty.sum(), list(rows_of(model.table).table_lock.running)
    stats = model.table.stats()
    assert (executor.cache.slots.dirty.sum(), list(rows_of(model.table).table_lock.running)) == before
    assert stats["rows_touched"] == other.table.stats()["rows_touched"] > 0
    assert stats["steps"] == 3
    np.testing.assert_array_equal(model.weights(), other.weights())
    assert model.table.stats()["rows_touched"] == stats["rows_touched"]


@pytest.mark.parametrize("way", [HOSTED[2], HASHED[2]], ids=by_name)
def test_a_cache_of_a_hashed_table_is_used(way: Way):
    model = train(make(way), batches(8))
    stats = model.table.stats()
    assert 0 < stats["device_slots"] < 20
    assert stats["device_hits"] > 0
    assert stats["device_evictions"] > 0
    assert "rows cached" in repr(model.table)


@pytest.mark.parametrize("memory", [200_000, *slow(None)])
def test_hashed_tables_that_grow(memory: int | None):
    layers = [ert.Embedding(11_000, 3, seed=1, directory="hashed", device_memory=memory) for _ in range(2)]
    steps = [ert.SGD(layer, lr=0.1) for layer in layers]
    on_device(layers[0])
    for k in range(3):
        ids = torch.arange(1200) * 7 + 1000 * k
        for layer, optimizer in zip(layers, steps, strict=True):
            layer(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (ids, mine), (others, theirs) = (layer.table.export() for layer in layers)
    np.testing.assert_array_equal(ids, others)
    np.testing.assert_array_equal(mine, theirs)


def test_lookups_without_steps_fill_the_cache():
    model = train(make(Way("some near", 20)), batches(3))
    with torch.no_grad():
        for _ in range(3):
            model.rows(torch.arange(15))
        before = model.table.stats()
        model.rows(torch.arange(15))
    after = model.table.stats()
    near = after["device_hits"] - before["device_hits"]
    assert near == 15 - (after["device_first_uses"] - before["device_first_uses"])


@pytest.mark.parametrize("way", WAYS, ids=by_name)
def test_who_changes_rows_on_the_cpu_waits_for_lookups(way: Way):
    model = make(way)
    with torch.no_grad():
        model.rows(batches(1)[0])
    assert rows_of(model.table).table_lock.running == [model.table.executor]


def test_evicted_rows_are_written_back():
    model = train(make(Way("five near", 5)), batches(4))
    stats = model.table.stats()
    assert stats["device_evictions"] >= stats["device_written_back"] > 0


@pytest.mark.parametrize("way", [ALL_NEAR, NONE_NEAR, SOME_NEAR[1], *slow(HOSTED[0]), HASHED[0]], ids=by_name)
def test_the_cpu_can_read_and_change_rows_in_between(way: Way):
    models = [make(way), make(None)]
    for model in models:
        train(model, batches(2))
        model.table.assign([3, 77], np.ones((2, DIM), np.float32))
        train(model, batches(2, seed=1))
        model.table.update([3, 5, 3], np.ones((3, DIM), np.float32), lr=0.1)
        train(model, batches(1, seed=2))
    assert_same_table(models[0].table, models[1].table)


@pytest.mark.parametrize("way", [ALL_NEAR, NONE_NEAR, SOME_NEAR[1], *slow(HOSTED[0]), HASHED[0]], ids=by_name)
def test_checkpoints_and_copies(way: Way):
    model, other = train(make(way), batches(3)), make(way)
    other.whole.load_state_dict(copy.deepcopy(model.whole.state_dict()))
    twin = copy.deepcopy(model.rows)
    assert_same_table(twin.table, model.table)
    more = batches(2, seed=1)
    assert_same_table(train(other, more).table, train(model, more).table)


def test_another_rule_lays_the_records_out_anew():
    models = [train(make(way), batches(2)) for way in (SOME_NEAR[1], None)]
    for model in models:
        model.table.set_rule(None, reset_state=True)
        optimizer = ert.SGD(model.whole, lr=0.1)
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
    np.testing.assert_array_equal(models[0].weights(), models[1].weights())


def test_a_table_that_was_trained_on_the_cpu_goes_on_there_and_back():
    model, other = make(None), make(None)
    train(other, batches(6))
    train(model, batches(6)[:2])
    on_device(model.whole)
    train(model, batches(6)[2:4])
    model.rows.handle.move(torch.device("cpu"))
    model.whole.cpu()
    train(model, batches(6)[4:])
    assert_same_table(model.table, other.table)
    assert model.table.executor is None


@pytest.mark.parametrize("depth", [0, 2])
def test_a_table_on_disk_behind_a_small_cache(tmp_path: Path, depth: int):
    model, other = make(on_disk(tmp_path)), make(None)
    train(model, ert.prefetch(batches(6), {model.rows: lambda ids: ids}, depth=depth))
    train(other, batches(6))
    assert_same_table(model.table, other.table)
    model.table.commit()
    model.table.close()
    with er.open(tmp_path / "rows.rock", mode="r") as table:
        np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), other.weights())


def test_a_table_on_disk_evicts_and_commits_while_it_trains(tmp_path: Path):
    rows, dim = 4000, 64
    layers = [
        ert.Embedding(rows, dim, path=str(tmp_path / "rows.rock"), memory="150KiB", seed=1),
        ert.Embedding(rows, dim, seed=1),
    ]
    steps = [ert.Adam(layer, lr=0.1) for layer in layers]
    on_device(layers[0])
    for k in range(5):
        ids = torch.from_numpy(np.random.default_rng(k).integers(0, rows, 40))
        for layer, optimizer in zip(layers, steps, strict=True):
            layer(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        layers[0].table.commit(wait=k % 2 == 0)
    assert layers[0].table.stats()["evictions"] > 0
    mine, theirs = (layer.table.lookup(np.arange(rows)) for layer in layers)
    np.testing.assert_array_equal(mine, theirs)
    layers[0].table.commit()
    layers[0].table.close()


def test_two_tables_and_one_on_the_cpu_step_together():
    def made() -> tuple[list[ert.Embedding], ert.Adam]:
        layers = [ert.Embedding(ROWS, DIM, seed=k) for k in range(3)]
        return layers, ert.Adam(layers, lr=0.1)

    (mine, mine_step), (theirs, their_step) = made(), made()
    on_device(mine[0])
    on_device(mine[1])
    for k, (layers, optimizer) in itertools.product(range(3), ((mine, mine_step), (theirs, their_step))):
        for layer in layers:
            layer(batches(1, seed=k)[0]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(mine, theirs, strict=True):
        assert_same_table(a.table, b.table)


def host_reads(model: Model, ids: torch.Tensor) -> list[str]:
    """Return where our code reads a tensor's value on the host in a step: that waits for a GPU."""
    readers, seen = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__"), []
    before = {name: getattr(torch.Tensor, name) for name in readers}

    def watched(name: str) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code
            ours = "embedrock" in caller.co_filename
            # What faults read was copied to the host before. The handle and its gradient are looked at only where they
            # are on the CPU, as they are here.
            on_cpu = caller.co_name in ("_is_untouched", "_check_origin")
            if ours and not caller.co_filename.endswith("faults.py") and not on_cpu:
                seen.append(f"{name} in {caller.co_filename}")
            return before[name](self, *args, **kwargs)

        return read

    try:
        for name in readers:
            setattr(torch.Tensor, name, watched(name))
        train(model, [ids])
    finally:
        for name, function in before.items():
            setattr(torch.Tensor, name, function)
    return seen


@pytest.mark.skipif(not INTERPRETED, reason="with a GPU, PyTorch itself tells: the next test")
@pytest.mark.parametrize("way", DIRECT, ids=by_name)
def test_a_step_reads_nothing_from_the_device(way: Way):
    model = train(make(way), batches(2))
    assert host_reads(model, batches(1, seed=4)[0]) == []


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    gc.collect()  # a table that goes waits for the GPU
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says that it does not see all waiting
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("way", DIRECT, ids=by_name)
def test_a_step_waits_for_no_gpu(way: Way):
    model = train(make(way), batches(2))
    ids = batches(1, seed=4)[0].to(DEVICE)
    with waiting_is_an_error():
        train(model, [ids])


@pytest.mark.gpu
@pytest.mark.parametrize("way", DIRECT, ids=by_name)
def test_streams_of_the_caller(way: Way):
    model, other = make(way), make(way)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for k, ids in enumerate(batches(6)):
        with torch.cuda.stream(streams[k % 2]):
            streams[k % 2].wait_stream(streams[1 - k % 2])
            train(model, [ids.to(DEVICE)])
    torch.cuda.synchronize()
    assert_same_table(model.table, train(other, batches(6)).table)


@pytest.mark.parametrize("way", [ALL_NEAR, *slow(NONE_NEAR, *SOME_NEAR, OPEN, *HOSTED, *HASHED)], ids=by_name)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_be_a_column_of_others(dtype: torch.dtype, way: Way):
    model, columns = make(way), torch.stack(batches(3), dim=1).to(dtype)
    train(model, columns.unbind(1))
    assert_same_table(train(make(None), batches(3)).table, model.table)
    with torch.no_grad():
        found = model.rows(columns[:, 1])
    np.testing.assert_array_equal(found.cpu().numpy(), model.table.lookup(columns[:, 1].numpy()))


def test_ids_may_be_on_either_side():
    model = make(ALL_NEAR)
    ids = batches(1)[0]
    assert torch.equal(model.rows(ids), model.rows(ids.to(DEVICE)))
    assert model.rows(ids.int()).shape == (BATCH, DIM)
    assert model.rows(ids[:0]).shape == (0, DIM)
    with pytest.raises(er.IdTypeError, match=r"must be a dense tensor of torch\.int32 or torch\.int64"):
        model.rows(ids.float())


@pytest.mark.parametrize("way", [SOME_NEAR[1], *slow(ALL_NEAR, HOSTED[0], HASHED[0])], ids=by_name)
@pytest.mark.parametrize("rows", [3 * ROWS, *slow(None)])
def test_tables_that_grow_come_back_from_the_device_and_go_there_again(way: Way, rows: int | None):
    mine, theirs = (train(make(where), batches(2)) for where in (way, None))
    with pytest.raises(er.UnsupportedError, match=rf"cannot grow while its rows are used on .*Call grow\({rows}\)"):
        mine.table.grow(rows)
    mine.zero_grad()
    loss_of(mine, batches(1)[0]).backward()
    with pytest.raises(er.UnsupportedError, match=r"while gradients of them wait for a step"):
        mine.rows.grow(rows)
    assert mine.table.rows == ROWS
    for model in (mine, theirs):
        model.zero_grad()
        model.rows.grow(rows)
        train(model, batches(2, seed=1))
    assert mine.table.executor is not None
    assert_same_table(mine.table, theirs.table)
    model_ids = torch.arange(2 * ROWS)
    assert torch.equal(mine.rows(model_ids).cpu(), theirs.rows(model_ids))
    with pytest.raises(er.UnsupportedError, match=rf"cannot shrink while its rows are used on .*Call shrink\({ROWS}\)"):
        mine.table.shrink(ROWS)
    for model in (mine, theirs):
        model.zero_grad()
        model.rows.shrink(ROWS)
        train(model, [ids % ROWS for ids in batches(2, seed=2)])
    assert mine.table.executor is not None
    assert_same_table(mine.table, theirs.table)


@pytest.mark.parametrize("way", [ALL_NEAR, *slow(*SOME_NEAR, OPEN, HOSTED[0], HASHED[0], HASHED[2])], ids=by_name)
def test_rows_are_forgotten_by_the_layer_and_go_to_the_device_again(way: Way):
    mine, theirs = (train(make(where), batches(2)) for where in (way, None))
    ids, plans = batches(2)[1][:9], way is not HOSTED[0]
    if plans:
        with pytest.raises(er.UnsupportedError, match=r"cannot forget rows while .*Call forget\(ids\) of a layer"):
            mine.table.forget(ids)
        mine.zero_grad()
        loss_of(mine, ids).backward()
        with pytest.raises(er.UnsupportedError, match=r"while gradients of them wait for a step"):
            mine.rows.forget(ids)
    for model in (mine, theirs):
        model.zero_grad()
    assert mine.rows.forget(ids) == theirs.rows.forget(ids) == len(set(ids.tolist()))
    assert (mine.table.executor is None) == plans
    for model in (mine, theirs):
        train(model, batches(2, seed=1))
    assert mine.table.executor is not None
    assert_same_table(mine.table, theirs.table)


@pytest.mark.parametrize("way", [SOME_NEAR[0], *slow(ALL_NEAR, OPEN, HOSTED[2])], ids=by_name)
def test_two_threads_whose_first_lookups_come_at_once_have_the_rows_at_one_place(
    way: Way, monkeypatch: pytest.MonkeyPatch
):
    mine, theirs = (make(where) for where in (way, None))
    made, ids = attach._made, batches(1)[0]
    other = threading.Thread(target=lambda: mine.rows(ids))
    executors: list[GpuExecutor | None] = []

    def made_beside(*args: Any) -> GpuExecutor | None:
        if not executors:
            executors.append(None)
            other.start()
            other.join(0.2)  # it waits for this thread
        executors.append(made(*args))
        return executors[-1]

    monkeypatch.setattr(attach, "_made", made_beside)
    mine.rows(ids)
    other.join()
    assert executors == [None, mine.table.executor]
    assert_same_table(train(mine, batches(2)).table, train(theirs, batches(2)).table)
