"""What happens between backward and step on a device: accumulation, scaling, clipping, zeroing, and what is refused."""

from __future__ import annotations

import collections
import gc
import itertools
import re
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gpu_models import (
    ALL_NEAR,
    DIM,
    HASHED,
    HOSTED,
    NONE_NEAR,
    ROWS,
    SOME_NEAR,
    Model,
    Way,
    assert_same_table,
    batches,
    by_name,
    loss_of,
    make,
    off_device,
    on_device,
    train,
)

import embedrock as er
import embedrock.torch as ert
from embedrock.errors import UnsupportedError
from embedrock.kernels.gpu import runtime
from slow import slow

FEW = [SOME_NEAR[1], HOSTED[0], *slow(ALL_NEAR, *HASHED)]  # all near is a part of the others' ways
ONE = [SOME_NEAR[1], *slow(HOSTED[0], ALL_NEAR, *HASHED)]


def both(way: Way, loop: Any, **arguments: Any) -> None:
    """Run a loop with the rows on the device and on the CPU, and compare all bits."""
    models = [make(way, **arguments), make(None, **arguments)]
    for model in models:
        loop(model)
    assert_same_table(models[0].table, models[1].table)


def scale_gradients(model: Model, factor: float) -> None:
    for parameter in model.whole.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(factor)


@pytest.mark.parametrize("way", FEW, ids=by_name)
def test_gradients_accumulate(way: Way):
    def loop(model: Model) -> None:
        some = batches(4)
        for k, ids in enumerate(some):
            loss_of(model, ids).backward()
            if k % 2:
                summed = model.rows.handle.gradients()
                assert summed is not None
                np.testing.assert_array_equal(np.sort(summed.row_ids()), torch.cat(some[k - 1 : k + 1]).unique().cpu())
                model.step()
                model.zero_grad()

    both(way, loop)


@pytest.mark.parametrize("way", ONE, ids=by_name)
def test_gradients_scaled_in_the_middle_of_an_accumulation(way: Way):
    def loop(model: Model) -> None:
        loss_of(model, batches(1)[0]).backward()
        scale_gradients(model, 0.5)
        loss_of(model, batches(1, seed=1)[0]).backward()
        model.step()

    both(way, loop)


@pytest.mark.parametrize("way", ONE, ids=by_name)
def test_gradients_zeroed_in_the_middle_touch_no_row(way: Way):
    def loop(model: Model) -> None:
        train(model, batches(1))
        loss_of(model, batches(1, seed=1)[0]).backward()
        scale_gradients(model, 0.0)
        loss_of(model, batches(1, seed=2)[0]).backward()
        model.step()

    both(way, loop)


@pytest.mark.parametrize("way", ONE, ids=by_name)
def test_a_step_of_zeroed_gradients_counts_and_touches_no_row(way: Way):
    def loop(model: Model) -> None:
        train(model, batches(1))
        loss_of(model, batches(1, seed=1)[0]).backward()
        scale_gradients(model, 0.0)
        model.step()
        train(model, batches(1, seed=2))

    both(way, loop)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("way", ONE, ids=by_name)
def test_gradients_that_are_zeroed_may_have_been_nan(way: Way, on_nonfinite: str):
    def loop(model: Model) -> None:
        for seed, is_accumulated in enumerate((False, True), 1):
            train(model, batches(1))
            (loss_of(model, batches(1, seed=seed)[0]) * float("nan")).backward()
            for parameter in model.whole.parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()
            if is_accumulated:
                loss_of(model, batches(1, seed=9)[0]).backward()
            model.step()
            model.zero_grad()
        assert model.table.steps == 4

    both(way, loop, on_nonfinite=on_nonfinite)


@pytest.mark.parametrize("way", ONE, ids=by_name)
def test_clipping_by_norm_and_by_value(way: Way):
    """Both are clipped by the norm of the first: PyTorch rounds a norm of several parameters otherwise on a GPU."""
    models = [make(way), make(None)]
    for model in models:
        model.step_rows.param_groups[0]["clip_value"] = 0.02
    for ids in batches(3):
        norms = list[torch.Tensor]()
        for model in models:
            model.zero_grad()
            loss_of(model, ids).backward()
            everything = [*ert.dense_parameters(model.whole), *ert.handles(model.whole)]
            own = torch.nn.utils.get_total_norm([one.grad for one in everything if one.grad is not None])
            norms.append(own.cpu())
            torch.nn.utils.clip_grads_with_norm_(everything, 0.3, norms[0])
            model.step()
        assert 0.3 < norms[0].item() == pytest.approx(norms[1].item(), rel=1e-6)
    assert_same_table(models[0].table, models[1].table)


@pytest.mark.parametrize("way", ONE, ids=by_name)
def test_clipping_by_norms_of_other_orders_and_by_pytorch_s_value(way: Way):
    models = [make(way), make(None)]
    for clip_value, order in zip((None, 0.05, 0.02), (1.0, 3.0, float("inf")), strict=True):
        norms = []
        for model in models:
            handles, ids = ert.handles(model.whole), batches(1, seed=int(order < 2))[0]
            model.zero_grad()
            for half in (ids[:9], ids[9:]):
                loss_of(model, half).backward()
            if clip_value is not None:
                torch.nn.utils.clip_grad_value_(handles, clip_value)
            norms.append(torch.nn.utils.clip_grad_norm_(handles, 0.01, norm_type=order).item())
            model.step()
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        np.testing.assert_allclose(models[0].weights(), models[1].weights(), rtol=1e-5, atol=1e-7)


def test_the_norm_is_that_of_the_rows_gradients():
    mine, theirs = make(ALL_NEAR), make(None)
    for model in (mine, theirs):
        loss_of(model, batches(1)[0]).backward()
    assert mine.rows.handle.grad is not None
    assert mine.rows.handle.grad.item() == pytest.approx(theirs.rows.handle.grad.item(), rel=1e-7)  # type: ignore[union-attr]
    # Autograd keeps the number that the kernel wrote, and that does not keep the gradients alive.
    assert mine.rows.handle.grad.untyped_storage().nbytes() <= 16 * 64  # no memory of a batch


def test_two_lookups_in_one_backward():
    def loop(model: Model) -> None:
        for a, b in zip(batches(2), batches(2, seed=1), strict=True):
            model.zero_grad()
            (loss_of(model, a) + loss_of(model, b)).backward()
            model.step()

    both(SOME_NEAR[1], loop)


@pytest.mark.parametrize("way", ONE, ids=by_name)
def test_gradients_of_any_strides(way: Way):
    def loop(model: Model) -> None:
        ids = batches(1)[0].reshape(-1)
        model.rows(ids).sum().backward()  # expanded from one number
        rows = model.rows(ids).t()  # its gradient comes transposed
        (rows * torch.arange(rows.numel(), device=rows.device).reshape(rows.shape)).sum().backward()
        model.step()

    both(way, loop)


@pytest.mark.parametrize("arguments", [{"padding_idx": 0}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}], ids=str)
@pytest.mark.parametrize("way", ONE, ids=by_name)
def test_options_of_layers(way: Way, arguments: dict[str, Any]):
    both(way, lambda model: train(model, batches(3)), **arguments)


def bag_losses(mode: str, where: bool, **arguments: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    torch.manual_seed(1)
    bag = ert.EmbeddingBag(ROWS, DIM, mode=mode, **{k: v for k, v in arguments.items() if k != "weighted"})
    optimizer = ert.Adagrad(bag, lr=0.1)
    if where:
        on_device(bag)
    of_weights = []
    for ids in batches(3):
        weights = torch.linspace(0.1, 1, len(ids)).requires_grad_() if arguments.get("weighted") else None
        offsets = torch.tensor([0, 0, 7, 11])
        bag(ids, offsets, per_sample_weights=weights).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if weights is not None and weights.grad is not None:
            of_weights.append(weights.grad.numpy())
    return bag.table.lookup(np.arange(ROWS)), of_weights


KINDS_OF_BAGS = [{}, {"padding_idx": 1}, {"device_memory": 0}, {"directory": "hashed"}]
BAGS = list(itertools.product(["sum", "mean", "max"], KINDS_OF_BAGS))


@pytest.mark.parametrize(
    ("mode", "arguments"), [*BAGS[::7], *slow(*(bag for k, bag in enumerate(BAGS) if k % 7))], ids=str
)
def test_bags(mode: str, arguments: dict[str, Any]):
    (mine, _), (theirs, _) = bag_losses(mode, True, **arguments), bag_losses(mode, False, **arguments)
    np.testing.assert_array_equal(mine, theirs)


def test_bags_with_weights():
    (mine, mine_weights), (theirs, their_weights) = (bag_losses("sum", where, weighted=True) for where in (True, False))
    np.testing.assert_array_equal(mine, theirs)
    for a, b in zip(mine_weights, their_weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("way", "bad"),
    [
        *((ALL_NEAR, -1), (NONE_NEAR, ROWS), (SOME_NEAR[1], 2**62), (SOME_NEAR[1], -1)),
        *slow((ALL_NEAR, ROWS), (ALL_NEAR, 2**62), (NONE_NEAR, -1), (NONE_NEAR, 2**62), (SOME_NEAR[1], ROWS)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_ids_outside_of_the_table(way: Way, bad: int):
    model = train(make(way), batches(2))
    before, told = model.weights(), bad
    with pytest.raises(
        er.IdError, match=rf"`ids` of .*Embedding.* must lie in \[0, {ROWS}\): got {told} in an earlier"
    ):
        train(model, [torch.tensor([3, bad]), *batches(3)])
    model.zero_grad()
    assert model.table.steps == 2
    np.testing.assert_array_equal(model.weights(), before)
    train(model, batches(1))  # it goes on
    assert model.table.steps == 3


@pytest.mark.parametrize("way", [ALL_NEAR, NONE_NEAR, SOME_NEAR[1]], ids=by_name)
def test_gradients_that_are_not_finite_are_refused_and_said_later(way: Way):
    model = train(make(way), batches(2))
    before = model.weights()

    def spoil(model: Model) -> None:
        assert model.rows.handle.grad is not None
        model.rows.handle.grad.fill_(float("nan"))

    with pytest.raises(er.NonFiniteGradientError, match=r"must be finite: got NaN or Inf in an earlier step"):
        train(train(model, batches(1, seed=1), spoil), batches(3))
    model.zero_grad()
    assert model.table.steps == 2
    np.testing.assert_array_equal(model.weights(), before)
    train(model, batches(1))
    assert model.table.steps == 3


def test_a_step_that_one_table_cannot_make_is_made_by_none():
    layers = [ert.Embedding(ROWS, DIM, seed=k) for k in range(2)]
    optimizer = ert.Adam(layers, lr=0.1)
    on_device(torch.nn.ModuleList(layers))
    tables = [layer.table for layer in layers]
    before = [table.lookup(np.arange(ROWS)) for table in tables]
    for layer, factor in zip(layers, (1.0, float("inf")), strict=True):
        (layer(batches(1)[0]).sum() * factor).backward()
    optimizer.step()  # refused, which is not known here
    with pytest.raises(er.NonFiniteGradientError):
        layers[1](batches(1)[0])
    optimizer.zero_grad()
    assert [table.steps for table in tables] == [0, 0]
    for table, rows in zip(tables, before, strict=True):
        np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), rows)
        assert table.stats()["rows_touched"] == 0


@pytest.mark.parametrize("is_gone", [True, False])
def test_the_error_of_a_table_is_raised_by_the_others_of_its_step(is_gone: bool):
    layers = [ert.Embedding(ROWS, DIM, seed=k) for k in range(2)]
    optimizer = ert.Adam(layers, lr=0.1)
    on_device(torch.nn.ModuleList(layers))
    bad, good = (layer(batches(1)[0]).sum() for layer in layers)
    (bad * torch.inf + good).backward()
    optimizer.step()
    optimizer.zero_grad()
    subject = re.escape(layers[0].table.subject)
    expected = rf"gradients of {subject} must be finite: got NaN or Inf in an earlier step"
    if is_gone:
        del optimizer, layers[0], bad, good
        gc.collect()
        expected = r"was refused on the GPU\. Another table of that step, which is gone since, .* refused \(1 so far\)"
    rest = layers[-1]
    with pytest.raises(er.NonFiniteGradientError, match=expected):
        rest(batches(1)[0])
    assert rest.table.steps == 0
    rest(batches(1)[0]).sum().backward()
    ert.Adam(rest, lr=0.1).step()
    assert rest.table.steps == 1


@pytest.mark.parametrize("waits", [True, *slow(False)])
def test_a_step_that_several_tables_cannot_make_is_one_error(waits: bool):
    """The host waits for the GPU where a table on the CPU is stepped beside: it is told in the step itself then."""
    layers = [ert.Embedding(ROWS, DIM, seed=k) for k in range(2 + waits)]
    optimizer = ert.Adam(layers, lr=0.1)
    on_device(torch.nn.ModuleList(layers[:2]))
    torch.stack([layer(batches(1)[0]).sum() * float("inf") for layer in layers[:2]]).sum().backward()
    if waits:
        layers[2](batches(1)[0]).sum().backward()
        with pytest.raises(er.NonFiniteGradientError, match=r"NaN or Inf, on the GPU\. The step was refused, nothing"):
            optimizer.step()
    else:
        optimizer.step()
        with pytest.raises(er.NonFiniteGradientError, match=r"refused \(1 so far\)"):
            layers[0](batches(1)[0])
    optimizer.zero_grad()
    torch.stack([layer(batches(1)[0]).sum().cpu() for layer in layers]).sum().backward()
    optimizer.step()
    assert [layer.table.steps for layer in layers] == [1] * len(layers)


def test_steps_that_are_not_finite_can_be_left_out():
    def loop(model: Model) -> None:
        def spoil(model: Model) -> None:
            assert model.rows.handle.grad is not None
            model.rows.handle.grad.fill_(float("inf"))

        train(model, batches(2))
        train(model, batches(1, seed=1), spoil)
        train(model, batches(2, seed=2))
        assert model.table.stats()["skipped_steps"] == 1

    both(SOME_NEAR[1], loop, on_nonfinite="skip")


def test_rows_whose_first_step_a_scaler_skips_are_not_forgotten():
    """The dense weights are stepped all the same, as their gradients do not overflow."""

    def loop(model: Model) -> None:
        (weight,) = ert.dense_parameters(model.whole)
        scaler = torch.amp.GradScaler(weight.device.type, init_scale=2.0**16)
        for k in range(3):
            model.zero_grad()
            rows = model.rows(batches(1)[0]).sum() * (1.0 if k else 1e38)
            scaler.scale(rows + weight.sum()).backward()
            for optimizer in (model.step_rows, model.step_dense):
                scaler.step(optimizer)
            scaler.update()

    both(ALL_NEAR, loop)


@pytest.mark.parametrize("offsets", [[1, 3], [0, 5, 3], [0, 99]])
def test_offsets_of_bags_on_the_host_are_refused_at_once(offsets: list[int]):
    bag = ert.EmbeddingBag(ROWS, DIM)
    on_device(bag)
    with pytest.raises(er.ArgumentError, match="`offsets` must start at 0"):
        bag(batches(1)[0], torch.tensor(offsets))


def test_no_second_derivative():
    model = make(ALL_NEAR)
    with pytest.raises(UnsupportedError, match="cannot be differentiated again"):
        loss_of(model, batches(1)[0]).backward(create_graph=True)


def test_a_model_does_not_move_in_the_middle_of_an_accumulation():
    model = make(ALL_NEAR)
    loss_of(model, batches(1)[0]).backward()
    norm = model.rows.handle.grad
    with pytest.raises(UnsupportedError, match=r"cannot move to cpu while gradients of them wait.*zero_grad\(\) first"):
        off_device(model.whole)
    assert model.rows.handle.grad is norm
    model.step()
    off_device(model.whole)


def test_a_loop_that_forgets_our_optimizer_is_noticed():
    layer = ert.Embedding(ROWS, DIM)
    dense = torch.nn.Linear(DIM, 1)
    model = torch.nn.Sequential(layer, dense)
    on_device(model)
    optimizer = torch.optim.SGD(ert.dense_parameters(model), lr=0.1)
    ids = batches(1)[0]
    model(ids).sum().backward()
    optimizer.step()
    with pytest.raises(ert.ForgottenGradientsError):
        model(ids)


def test_bags_without_gradients():
    bag, other = (ert.EmbeddingBag(ROWS, DIM, mode="sum", seed=0) for _ in range(2))
    on_device(bag)
    with torch.no_grad():
        ids, weights = batches(1)[0], torch.linspace(0, 1, 20)
        mine, theirs = (layer(ids, torch.tensor([0, 7]), weights) for layer in (bag, other))
    assert torch.equal(mine.cpu(), theirs)


def test_gradients_that_are_all_zero_make_a_step():
    def loop(model: Model) -> None:
        train(model, batches(1))
        model.zero_grad()
        (model.rows(batches(1)[0]) * 0.0).sum().backward()
        model.step_rows.step()

    both(ALL_NEAR, loop)


@pytest.mark.parametrize("way", FEW, ids=by_name)
def test_a_lookup_of_nothing(way: Way):
    def loop(model: Model) -> None:
        for ids in (batches(1)[0], batches(1)[0][:0]):
            model.zero_grad()
            loss_of(model, ids).backward()
            model.step()

    both(way, loop, padding_idx=0)


@pytest.mark.parametrize("way", FEW, ids=by_name)
def test_the_first_lookup_may_be_one_of_inference(way: Way):
    def loop(model: Model) -> None:
        with torch.inference_mode():
            model.rows(batches(1)[0])
        train(model, batches(3))

    both(way, loop)


def test_a_layer_that_shrinks_rows_beside_one_that_does_not():
    def loop(model: Model) -> None:
        train(model, batches(1))
        model.zero_grad()
        shrinking = ert.Embedding(model.table, max_norm=0.5)
        for ids in batches(2, seed=1):
            (shrinking(ids).square().sum() + model.rows(ids).sum()).backward()
            model.step_rows.step()
            model.step_rows.zero_grad()

    both(ALL_NEAR, loop)


def test_a_table_whose_new_rows_have_no_room_keeps_the_others_from_stepping():
    layers = [ert.Embedding(None, DIM, memory=size, seed=1) for size in ("1MiB", 2000)]
    optimizer = ert.SGD(layers, lr=0.1)
    on_device(torch.nn.ModuleList(layers))
    for layer in layers:
        layer(torch.arange(60)).sum().backward()
    with pytest.raises(er.MemoryBudgetError):
        optimizer.step()
    assert [(layer.table.steps, layer.table.stats()["rows_touched"]) for layer in layers] == [(0, 0), (0, 0)]


def test_a_batch_that_is_expected_refuses_no_step_before_it():
    model = make(SOME_NEAR[1])
    ids = [*batches(2), torch.tensor([1, ROWS])]
    with pytest.raises(er.IdError):
        train(model, ert.prefetch(ids, {model.rows: lambda ids: ids}, depth=1)).weights()
    model.zero_grad()
    assert_same_table(model.table, train(make(None), batches(2)).table)


def test_a_batch_that_is_expected_is_planned_once(monkeypatch: pytest.MonkeyPatch):
    model, ids, launched = make(SOME_NEAR[1]), batches(3), collections.Counter()
    monkeypatch.setattr(runtime, "on_launch", lambda kernel, *args: launched.update([kernel.fn.__name__]))
    train(model, ert.prefetch(ids, {model.rows: lambda ids: ids}))
    assert (launched["_collect"], launched["_exchange"]) == (3, 3)
    assert launched["_bounds"] == 2  # the ids of two are checked when they are looked up
    assert_same_table(model.table, train(make(None), ids).table)


def test_a_batch_that_changed_since_it_was_expected_is_planned_anew():
    model, ids = make(SOME_NEAR[1]), batches(3)
    changed = [ids[0], ids[1].flip(0), ids[2]]

    def mark_dirty() -> Iterator[torch.Tensor]:
        for k, some in enumerate(ert.prefetch(ids, {model.rows: lambda ids: ids})):
            yield some.copy_(changed[k])

    assert_same_table(train(model, mark_dirty()).table, train(make(None), changed).table)


def test_a_table_that_nobody_has_any_more_is_gone_at_once():
    gc.disable()  # by counting references alone
    try:
        model = train(make(SOME_NEAR[1]), batches(2))
        table = weakref.ref(model.table)
        executor = weakref.ref(model.table.executor)
        model.zero_grad()
        del model
        assert table() is None
        assert executor() is None
    finally:
        gc.enable()
