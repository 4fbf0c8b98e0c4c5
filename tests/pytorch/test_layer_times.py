"""`time=` of layers: it rides with the gradients from the lookup to the step. Rows are those of `Table.update`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import embedrock as er
import embedrock.torch as ert
from embedrock.table.table import Table, rows_of

DAY = 86_400
IDS = torch.tensor([1, 2])


def eviction() -> er.Eviction:
    return er.Eviction(idle="30d")


def made(kind: type[Any] = ert.Embedding, **options: Any) -> Any:
    return kind(None, 2, seed=0, eviction=eviction(), **options)


def day_of(table: Table) -> float:
    """Return the time of a table's clock, in days."""
    lifecycle = rows_of(table).lifecycle
    assert lifecycle is not None
    assert lifecycle.usage is not None
    return lifecycle.usage.clock.read.now / DAY


def there(table: Table) -> list[int]:
    return table.export()[0].tolist()


class Case:
    """A layer and its optimizer, after a step of the ids at day 1."""

    def __init__(self, layer: Any = None, **options: Any) -> None:
        self.layer: Any = made() if layer is None else layer
        self.optimizer = ert.SGD(self.layer, lr=1.0, **options)
        self.backward(1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, day: float, ids: Tensor = IDS) -> None:
        self.layer(ids, time=day * DAY).sum().backward()

    def step(self) -> float:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return day_of(self.layer.table)


@pytest.mark.parametrize("way", ["plain", "clipped", "watched"])
def test_rows_of_a_layer_are_those_of_a_table(way: str):
    layer = made()
    optimizer = ert.SGD(layer, lr=0.5, clip_value=0.1 if way == "clipped" else None)
    if way == "watched":
        layer.handle.register_post_accumulate_grad_hook(lambda handle: None)
    twin = er.Table(None, 2, rule=er.SGD(lr=0.5), init=er.Normal(), seed=0, eviction=eviction())
    rng = np.random.default_rng(0)
    for step in range(60):
        ids, times = rng.integers(step, step + 5, (2, 4)), (3 * step + rng.random(2)) * DAY
        optimizer.zero_grad()
        layer(torch.from_numpy(ids), time=torch.from_numpy(times)).sum().backward()
        optimizer.step()
        grads = twin.sum(twin.plan(ids), np.ones((2, 4, 2), np.float32))
        twin.step(grads, clip_value=0.1 if way == "clipped" else None, time=times)
    for got, wanted in zip(layer.table.export(), twin.export(), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert layer.table.stats()["evicted"] == twin.stats()["evicted"] > 30
    assert day_of(layer.table) == day_of(twin)


def test_lookups_without_a_step_leave_the_clock():
    case = Case()
    case.layer(torch.tensor([9]), time=90 * DAY)  # the next batch, whose backward comes later
    with torch.no_grad():
        case.layer(IDS, time=91 * DAY)
    case.layer.eval()
    case.layer(IDS, time=92 * DAY)
    case.backward(2)
    assert case.step() == 2


def test_accumulation_takes_the_newest_event():
    case = Case()
    for day in (3, 20, 5):
        case.backward(day)
    case.layer(IDS).sum().backward()  # without a time, beside others
    assert case.step() == 20


def test_times_leave_with_the_gradients():
    case = Case()
    case.backward(20)
    case.optimizer.zero_grad()
    case.backward(2)
    assert case.step() == 2
    case.backward(21)
    case.optimizer.zero_grad(set_to_none=False)
    case.backward(3)
    assert case.step() == 3
    case.backward(22)
    case.layer.handle.grad = None
    case.backward(4)
    assert case.step() == 4
    case.backward(23)
    gradient: Any = case.layer.handle.grad
    gradient.zero_()
    case.optimizer.step()  # a step of no row
    assert day_of(case.layer.table) == 4


def test_gradients_that_are_asked_for_elsewhere_leave_the_clock():
    case = Case()
    out = case.layer(IDS, time=20 * DAY)
    torch.autograd.grad(out.sum(), [case.layer.handle])
    case.backward(2)
    assert case.step() == 2


def test_a_step_that_a_scaler_skips_leaves_the_clock():
    case, scaler = Case(), torch.amp.GradScaler("cpu")
    for day, factor in ((20, float("inf")), (2, 1.0)):
        scaler.scale(case.layer(IDS, time=day * DAY).sum() * factor).backward()
        scaler.step(case.optimizer)
        scaler.update()
        case.optimizer.zero_grad()
    assert day_of(case.layer.table) == 2


def test_a_refused_step_leaves_the_clock():
    case = Case()
    (case.layer(IDS, time=20 * DAY).sum() * float("nan")).backward()
    with pytest.raises(er.NonFiniteGradientError):
        case.optimizer.step()
    case.optimizer.zero_grad()
    case.backward(2)
    assert case.step() == 2


def test_a_retained_graph_has_its_time_again():
    case = Case()
    out = case.layer(IDS, time=20 * DAY).sum()
    out.backward(retain_graph=True)
    case.optimizer.zero_grad()
    case.backward(2)
    out.backward()
    assert case.step() == 20


def of_bag(bag: Any, time: Any) -> Tensor:
    return bag(torch.tensor([1, 2, 2]), torch.tensor([0, 1]), time=time)


def of_rows(bag: Any, time: Any) -> Tensor:
    return bag(torch.tensor([[1, 2]]), time=time)


def of_jagged(layer: Any, time: Any) -> Tensor:
    ids = torch.nested.nested_tensor_from_jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))
    found = layer(ids, time=time)
    return found.values() if found.is_nested else found


CALLS = {"bag": (ert.EmbeddingBag, of_bag), "rows": (ert.EmbeddingBag, of_rows),
         "jagged": (ert.Embedding, of_jagged), "jagged bags": (ert.EmbeddingBag, of_jagged)}  # fmt: skip


@pytest.mark.parametrize(("kind", "call"), CALLS.values(), ids=CALLS)
def test_all_inputs_take_a_time(kind: Any, call: Callable[..., Tensor]):
    layer = made(kind)
    optimizer = ert.SGD(layer, lr=1.0)
    call(layer, np.array([20 * DAY, 3])).sum().backward()
    optimizer.step()
    assert day_of(layer.table) == 20


@pytest.mark.parametrize("time", [20 * DAY, torch.tensor([3, 20 * DAY])], ids=["number", "column"])
def test_a_compiled_model_takes_a_time(time: Any):
    case = Case()
    step = torch.compile(lambda ids, time: case.layer(ids, time=time).sum(), backend="aot_eager")
    step(IDS, time).backward()
    assert case.step() == 20
    step(IDS, 21 * DAY if isinstance(time, int) else torch.tensor([3, 21 * DAY])).backward()
    assert case.step() == 21


# -------------------------------------------------------------------- collections


def bags(**options: Any) -> Any:
    configs = [ert.EmbeddingBagConfig(None, 2, name, options={"eviction": eviction()}) for name in "ab"]
    return ert.EmbeddingBagCollection([*configs, ert.EmbeddingBagConfig(9, 2, "c")], **options)


def summed(found: Any) -> Tensor:
    return found.sum() if isinstance(found, Tensor) else torch.stack([each.sum() for each in found.values()]).sum()


@pytest.mark.parametrize("way", ["each", "side by side", "alone"])
def test_a_collection_has_one_time_for_its_tables(way: str):
    model = bags()
    if way == "alone":
        model.layer_of("a").register_forward_hook(lambda *_: None)
    optimizer = ert.SGD(model, lr=1.0)
    ids = {name: torch.tensor([[1, 2]]) for name in "abc"}
    for day in (1, 20):
        found = model(ids, way == "side by side", torch.tensor([day * DAY]))
        summed(found).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert [day_of(model.layer_of(name).table) for name in "ab"] == [day, day]
    found = model(ids, time=22 * DAY)
    found["a"].sum().backward()  # no other table is stepped
    optimizer.step()
    assert [day_of(model.layer_of(name).table) for name in "ab"] == [22, 20]


def test_rows_of_a_collection_take_a_time():
    model = ert.EmbeddingCollection({"a": made(), "b": made()})
    optimizer = ert.SGD(model, lr=1.0)
    summed(model({"a": IDS, "b": IDS}, time=20 * DAY)).backward()
    optimizer.step()
    assert [day_of(model.layer_of(name).table) for name in "ab"] == [20, 20]


def test_tables_that_were_summed_together_may_have_several_times():
    model = bags()
    optimizer = ert.SGD(model, lr=1.0)
    ids = {name: torch.tensor([[1, 2]]) for name in "abc"}
    summed(model(ids, time=DAY)).backward()
    model.layer_of("a")(torch.tensor([[7]]), time=20 * DAY).sum().backward()
    optimizer.step()
    assert [day_of(model.layer_of(name).table) for name in "ab"] == [20, 1]


# -------------------------------------------------------------------- what is refused


def test_absurd_times_are_refused_and_nothing_changes():
    case = Case()
    before = case.layer.table.export()[1]
    with pytest.raises(er.ArgumentError, match=r"`time` of Embedding\(None, 2\) .* milliseconds, pass time / 1000"):
        case.layer(IDS, time=torch.tensor([1_735_689_600_000]))
    with pytest.raises(er.ArgumentError, match=r"at most `idle` \(2592000 s\) after the median of its batch"):
        case.layer(IDS, time=torch.tensor([2, 2, 99]) * DAY)
    assert case.layer.handle.grad is None
    np.testing.assert_array_equal(case.layer.table.export()[1], before)
    assert day_of(case.layer.table) == 1
    case.backward(2)
    assert case.step() == 2


def test_a_step_without_a_time_is_refused_after_steps_with_one():
    case = Case()
    case.layer(IDS).sum().backward()
    with pytest.raises(er.ArgumentError, match=r"must have time=, as the steps before"):
        case.optimizer.step()
    case.optimizer.zero_grad()
    assert there(case.layer.table) == [1, 2]
    case.backward(2)
    assert case.step() == 2
