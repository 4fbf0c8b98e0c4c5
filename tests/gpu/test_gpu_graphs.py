"""Training steps in CUDA graphs, on the fake GPU: each replay makes the step that launches would have made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import fake_cuda
import fake_graph
import numpy as np
import pytest
import torch
from fake_cuda import FakeGPU
from fake_graph import FakeGraphs
from gpu_device import INTERPRETED
from gpu_models import DIM, EVERYTHING, ROWS, DrawnByHost, memory_of
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert
from embedrock.device import cache, copies, features
from embedrock.device.copies import DeviceEvent
from embedrock.device.executor import GpuExecutor
from embedrock.device.graph_capture import GraphCapture
from embedrock.errors import ArgumentError, IdError, NonFiniteGradientError, UnsupportedError
from slow import slow

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="its GPU is a fake")

RULES = "SGD", "Momentum", "Adagrad", "RowwiseAdagrad", "RMSprop", "Adam", "AdamW", "Ftrl"
INIT = er.Normal(std=0.5)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    made = fake_cuda.install(monkeypatch)
    with made:
        yield made


@pytest.fixture
def graphs(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGraphs]:
    made = fake_graph.install(gpu, monkeypatch)
    yield made
    made.made.clear()  # what they use is unpinned by the fake, too


def layer(seed: int = 5, on_gpu: bool = True, near: int | None = None, **arguments: Any) -> ert.Embedding:
    memory = memory_of(near) if on_gpu else None
    options: dict[str, Any] = {"init": INIT, "seed": seed, "device_memory": memory, **arguments}
    made = ert.Embedding(ROWS, DIM, **options)
    if on_gpu:
        ert.place(made, "cuda")
    return made


def batches(count: int, n: int = 9) -> list[Tensor]:
    """Return ids, some of them twice."""
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.integers(0, 20, n)) for _ in range(count)]


class Pair:
    """A model that trains in graphs, and the same on the CPU.

    Attributes:
        graphed: makes a step of the first.
    """

    def __init__(self, make: Callable[[bool], nn.Module], optimize: Callable[[nn.Module], list[Any]]) -> None:
        self.models = make(True), make(False)
        self.optimizers = [optimize(model) for model in self.models]
        self.steps = [self._step(*both) for both in zip(self.models, self.optimizers, strict=True)]
        self.graphed = ert.graphed(self.steps[0], *self.optimizers[0])

    @staticmethod
    def _step(model: nn.Module, optimizers: list[Any]) -> Callable[..., Tensor]:
        def step(*ids: Any) -> Tensor:
            loss = model(*ids).square().sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return step

    def step(self, *ids: Any) -> None:
        """Make a step of both; the graph's is on the device."""
        np.testing.assert_array_equal(self.graphed(*ids).cpu(), self.steps[1](*ids))

    def check(self) -> None:
        """Fail where tables differ."""
        for mine, other in zip(*map(ert.handles, self.models), strict=True):
            np.testing.assert_array_equal(mine.table.lookup(np.arange(ROWS)), other.table.lookup(np.arange(ROWS)))
            for got, expected in zip(mine.table.state().items(), other.table.state().items(), strict=True):
                np.testing.assert_equal(got, expected)


class Sum(nn.Module):
    """Layers of the same ids, one after the other, as a sum."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([layer(ids).float() for layer in self.layers]).sum(0)


def pair(near: int | None = None, rule: str = "Adam", **arguments: Any) -> Pair:
    """Return one layer, twice."""
    return Pair(
        lambda on_gpu: layer(on_gpu=on_gpu, near=near, **arguments), lambda model: [getattr(ert, rule)(model, lr=0.1)]
    )


# ---------------------------------------------------------------- replays make the steps that launches make


@pytest.mark.parametrize(("near", "rules"), [(17, RULES[4:6]), *slow((17, RULES), (None, RULES), (0, RULES))], ids=str)
def test_replays_make_the_steps_of_every_rule(
    gpu: FakeGPU, graphs: FakeGraphs, near: int | None, rules: tuple[str, ...]
):
    def make(on_gpu: bool) -> nn.Module:
        dtypes = torch.float32, torch.bfloat16
        return Sum(*(layer(k, on_gpu, near, dtype=dtypes[k % 2]) for k, _ in enumerate(rules)))

    def optimize(model: Any) -> list[Any]:
        return [getattr(ert, rule)(own, lr=0.1) for rule, own in zip(rules, model.layers, strict=True)]

    both = Pair(make, optimize)
    for k, ids in enumerate(batches(5)):
        for optimizer in (*both.optimizers[0], *both.optimizers[1]):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + k)
        both.step(ids)
    assert (both.graphed.graphs, len(graphs.made)) == (1, 1)
    both.check()
    assert gpu.races == []


@pytest.mark.parametrize("near", [17, *slow(None)], ids=["cached", "near"])
def test_a_collection_whose_learning_rates_part(gpu: FakeGPU, graphs: FakeGraphs, near: int | None):
    def make(on_gpu: bool) -> nn.Module:
        return ert.EmbeddingCollection({str(k): layer(k, on_gpu, near) for k in range(3)})

    def optimize(model: Any) -> list[Any]:
        first, *others = ert.handles(model)
        return [ert.AdamW([{"params": [first]}, {"params": others}], lr=0.1)]

    both = Pair(make, optimize)
    for model in both.models:
        model.register_forward_hook(lambda _, __, found: torch.cat(list(found.values())))
    for k, ids in enumerate(batches(7)):
        if k == 4:
            for (optimizer,) in both.optimizers:
                optimizer.param_groups[0]["lr"] = 0.01
        both.step({str(t): ids + t + 20 * (k % 2) for t in range(3)})
    kernels = [[name for name, _ in graph.calls if name == "_step"] for graph in graphs.made]
    assert list(map(len, kernels)) == [1, 2]  # tables whose numbers part are stepped apart, in another graph
    fetched = [handle.table.stats().get("device_fetched", 0) for handle in ert.handles(both.models[0])]
    assert all(fetched) == (near is not None)
    both.check()


def test_bags_of_several_ids(graphs: FakeGraphs):
    def make(on_gpu: bool) -> nn.Module:
        bags = ert.EmbeddingBagCollection(
            {
                str(k): ert.EmbeddingBag(
                    ROWS, DIM, mode=mode, init=INIT, seed=k, device_memory=EVERYTHING if on_gpu else None
                )
                for k, mode in enumerate(("sum", "mean"))
            }
        )
        if on_gpu:
            ert.place(bags, "cuda")
        bags.register_forward_hook(lambda _, __, found: torch.cat(list(found.values())))
        return bags

    both = Pair(make, lambda model: [ert.Adagrad(model, lr=0.1)])
    starts = torch.tensor([0, 2, 2])
    for ids in batches(4):
        both.step({"0": (ids, starts), "1": (ids, starts)})
    assert len(graphs.made) == 1
    both.check()


def test_what_happens_between_replays(gpu: FakeGPU, graphs: FakeGraphs):
    both = pair()
    ids = batches(9)
    for k in range(4):
        both.step(ids[k])
    for one in both.models:
        one.eval()(ids[4])
        one.train()
    for step in both.steps:  # by launches
        step(ids[5])
    both.step(ids[6])
    both.check()  # which brings rows to RAM
    state = both.models[1].state_dict()
    both.step(ids[7])
    for one in both.models:
        one.load_state_dict(state)
    for _ in range(3):  # captured anew: the rows' memory is another
        both.step(ids[8])
    both.step(ids[8][:4])  # another form, which is yet to be captured
    both.check()
    assert gpu.races == []
    assert (both.graphed.graphs, len(graphs.made)) == (1, 2)


def test_prefetching_beside_it_and_a_buffer_that_is_filled_anew(gpu: FakeGPU, graphs: FakeGraphs):
    both, buffer = pair(0), torch.empty(9, dtype=torch.int64, pin_memory=True)
    for ids in ert.prefetch(batches(5), {both.models[0]: lambda ids: ids}):  # pyright: ignore
        buffer.copy_(ids)
        both.graphed(buffer)
        both.steps[1](ids)
    both.check()
    assert gpu.races == []


def test_what_a_step_returns_is_not_written_to_again(graphs: FakeGraphs):
    both = pair()
    losses = [both.graphed(ids) for ids in batches(5)]
    expected = [both.steps[1](ids) for ids in batches(5)]
    np.testing.assert_array_equal([loss.cpu() for loss in losses], expected)
    assert all(handle.grad is None for handle in ert.handles(both.models[0]))


def test_gradients_that_were_stepped_wait_for_nothing(graphs: FakeGraphs):
    both = pair()
    for k, ids in enumerate(batches(8)):
        for model, optimizers in zip(both.models, both.optimizers, strict=True):
            if k in (0, 1, 3, 4, 6):  # by launches: before the first call, before the capture, between replays
                model(ids + 7).square().sum().backward()
                optimizers[0].step()  # and no zero_grad()
        both.optimizers[1][0].zero_grad()
        both.step(ids)
    assert both.graphed.graphs == len(graphs.made) == 1
    both.check()


def test_a_model_with_dense_weights_behind_one_optimizer(graphs: FakeGraphs):
    def make(on_gpu: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(layer(on_gpu=on_gpu), nn.Linear(DIM, 1))

    both = Pair(make, lambda model: [ert.optimizer(model, rows=ert.SGD, dense=torch.optim.SGD, lr=0.01)])
    for ids in batches(5):
        both.step(ids)
    both.check()
    np.testing.assert_array_equal(*(model[1].weight.detach() for model in both.models))  # pyright: ignore


def cached_counts() -> list[dict[str, float]]:
    """Train two layers with a cache, in graphs and by launches; return their statistics."""
    layers = [layer(near=17) for _ in range(2)]
    optimizers = [ert.Adam(own, lr=0.1) for own in layers]
    steps = [Pair._step(own, [optimizer]) for own, optimizer in zip(layers, optimizers, strict=True)]
    steps[0] = ert.graphed(steps[0], optimizers[0])
    for own, step in zip(layers, steps, strict=True):
        for k, ids in enumerate(batches(12)):
            if k in (5, 8):
                own(ids + 30)  # a lookup that no step follows
            step(ids + 7 * k)
    mine, theirs = (own.table.lookup(np.arange(ROWS)) for own in layers)
    np.testing.assert_array_equal(mine, theirs)
    return [own.table.stats() for own in layers]


def test_a_cache_goes_on_as_it_would_by_launches(gpu: FakeGPU, graphs: FakeGraphs):
    mine, theirs = cached_counts()
    assert mine == theirs
    assert min(mine["device_evictions"], mine["device_written_back"], mine["device_fetched"]) > 3
    (graph,) = graphs.made
    assert {"_insert", "_exchange"} <= {name for name, _ in graph.calls}
    assert gpu.races == []


@pytest.mark.parametrize("near", [17, *slow(None)], ids=["cached", "near"])
def test_a_recording_copies_nothing_from_ram(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch, near: int | None):
    """Replays would copy what is in that memory by then. Lookups between warm-up and recording change streams."""
    trained, ids, recordings = pair(near), batches(6), [False]
    record = GraphCapture._set_recording

    def note(self: GraphCapture, is_recording: bool) -> None:
        recordings.append(is_recording)
        record(self, is_recording)

    def upload(array: np.ndarray, device: torch.device) -> Tensor:
        assert not recordings[-1]
        return copies.uploaded(array, device)

    monkeypatch.setattr(GraphCapture, "_set_recording", note)
    for module in (cache, features):
        monkeypatch.setattr(module, "uploaded", upload)
    for batch in ids:
        trained.step(batch)
        with torch.no_grad():
            for model in trained.models:
                model(batch[:3])
    assert True in recordings
    trained.check()


@pytest.mark.slow
def test_moments_of_batches_that_are_baked_in_are_found(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch):
    begin = GraphCapture.begin_batch

    def baked(self: GraphCapture, executor: Any, n: int, trains: bool) -> Any:
        begin(self, executor, n, trains)
        return executor.cache.begin_batch(0, executor.clock, trains=False)

    monkeypatch.setattr(GraphCapture, "begin_batch", baked)
    mine, theirs = cached_counts()  # rows have the same bits even so
    assert mine != theirs


def baked(self: GraphCapture, executor: GpuExecutor, rule: er.Rule) -> Any:
    """Have a step's numbers as arguments of the launch."""
    return executor.rows.steps + 1, rule.numbers(executor.rows.steps + 1)


def test_numbers_that_are_baked_in_are_found(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch):
    both = pair()
    ids = batches(5)
    for k in range(2):
        both.step(ids[k])
    monkeypatch.setattr(GraphCapture, "begin_step", baked)
    for k in range(2, 5):
        both.graphed(ids[k])
        both.steps[1](ids[k])
    with pytest.raises(AssertionError):
        both.check()


class Halved(Sum):
    """The same in float16, whose gradients overflow."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).half().float()


def scaled(near: int | None, unscales: bool) -> tuple[list[Halved], Callable[..., Tensor], Callable[..., Tensor]]:
    """Return models whose gradients are scaled, in graphs and on the CPU, and a step of each."""
    models = [Halved(layer(1, on_gpu, near), layer(2, on_gpu, near)) for on_gpu in (True, False)]

    def step_of(model: Halved) -> tuple[ert.RowOptimizer, Callable[..., Tensor]]:
        scaler, rows = torch.amp.GradScaler("cpu", 2.0**18, growth_interval=2), ert.Adam(model, lr=0.1)

        def step(ids: Tensor) -> Tensor:
            rows.zero_grad()
            scaler.scale(model(ids).square().sum()).backward()
            if unscales:
                scaler.unscale_(rows)
                torch.nn.utils.clip_grad_value_(ert.handles(model), 0.5)
            scaler.step(rows)
            scaler.update()
            return scaler._get_scale_async().clone()  # pyright: ignore[reportOptionalMemberAccess]

        return rows, step

    (rows, step), (_, other) = map(step_of, models)
    return models, ert.graphed(step, rows), other


@pytest.mark.parametrize(("near", "unscales"), [(17, True), *slow((17, False), (None, True), (0, False))])
def test_a_scaler_skips_replays_that_overflow(gpu: FakeGPU, graphs: FakeGraphs, near: int | None, unscales: bool):
    models, step, other = scaled(near, unscales)
    steps = list[int]()
    for ids in batches(14):
        np.testing.assert_array_equal(step(ids), other(ids))
        counts = {handle.table.steps for model in models for handle in ert.handles(model)}
        assert len(counts) == 1
        steps += counts
    assert 1 < len(set(steps)) < len(steps) - 4  # some are skipped, also after the capture
    assert len(graphs.made) == 1
    for mine, theirs in zip(*map(ert.handles, models), strict=True):
        np.testing.assert_array_equal(mine.table.lookup(np.arange(ROWS)), theirs.table.lookup(np.arange(ROWS)))
    assert gpu.races == []


# ---------------------------------------------------------------- errors


def test_a_scaled_replay_with_wrong_ids_is_an_error_at_once(graphs: FakeGraphs):
    models, step, _ = scaled(None, unscales=False)
    ids = torch.arange(5)
    for _ in range(8):
        step(ids)
    (count,) = {handle.table.steps for handle in ert.handles(models[0])}
    for wrong in (ROWS, 4):  # each table has an error of its own
        with pytest.raises(IdError, match=r"got 120 in an earlier batch, on the GPU. Steps .* refused \(1 so far\)"):
            step(torch.tensor([0, 1, 2, 3, wrong]))
    for _ in range(2):  # of which one may overflow
        step(ids)
    assert all(handle.table.steps > count for handle in ert.handles(models[0]))


def test_ids_outside_of_the_table_refuse_replays(graphs: FakeGraphs):
    both, ids = pair(), batches(5)
    for k in range(3):
        both.step(ids[k])
    wrong = ids[3].clone()
    wrong[4] = ROWS
    both.graphed(wrong)
    both.models[0].table.executor.faults.look()  # pyright: ignore
    with pytest.raises(IdError, match=r"got 120 in an earlier batch, on the GPU. Steps .* refused \(1 so far\)"):
        both.graphed(ids[4])
    both.check()
    both.step(ids[4])
    both.check()


def test_gradients_that_are_not_finite_refuse_replays_of_all_tables(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
):
    both = Pair(lambda on_gpu: Scaled(layer(1, on_gpu), layer(2, on_gpu)), lambda model: [ert.Adam(model, lr=0.1)])
    ids, one = batches(6), torch.ones(())
    for k in range(4):
        both.step(ids[k], one)
    with monkeypatch.context() as patched:
        patched.setattr(DeviceEvent, "has_come", lambda _: False)  # the GPU is behind
        both.graphed(ids[4], one * float("nan"))
        both.graphed(ids[4], one)
    with pytest.raises(NonFiniteGradientError, match=r"refused \(2 so far\)"):
        both.graphed(ids[5], one)
    both.check()
    both.step(ids[5], one)
    both.check()


class Scaled(Sum):
    """The same, the first times a number."""

    def forward(self, ids: Tensor, factor: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.cat([self.layers[0](ids) * factor, self.layers[1](ids)])


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "hashed": ({"directory": "hashed"}, "the host counts its rows"),
    "of the host": ({"init": DrawnByHost()}, "the host plans its batches"),
    "skipping": ({"on_nonfinite": "skip"}, "of on_nonfinite=.* a GradScaler in the step skips it, too"),
    "max_norm": ({"max_norm": 1.0}, "the CPU reads and steps its rows, which max_norm shrinks"),
}


@pytest.mark.parametrize("odd", ODD)
def test_tables_that_no_graph_can_step_are_refused(graphs: FakeGraphs, odd: str):
    arguments, why = ODD[odd]
    one = layer(**arguments)
    rows = ert.Adam(one, lr=0.1)
    with pytest.raises(UnsupportedError, match=f"cannot be captured in a CUDA graph: {why}.* Leave that out, or call"):
        ert.graphed(lambda ids: one(ids), rows)(torch.arange(3))
    assert one.table.steps == 0


@pytest.mark.parametrize("near", [EVERYTHING, 0])
def test_a_collection_of_open_ids_is_refused(graphs: FakeGraphs, near: int):
    layers = {name: ert.Embedding(None, DIM, seed=k, device_memory=near) for k, name in enumerate("ab")}
    model = ert.EmbeddingCollection(layers)
    ert.place(model, "cuda")
    rows, ids = ert.Adam(model, lr=0.1), dict.fromkeys("ab", torch.arange(3))

    def step(ids: dict[str, Tensor]) -> None:
        torch.cat([*model(ids).values()]).sum().backward()
        rows.step()
        rows.zero_grad()

    with pytest.raises(UnsupportedError, match=r"'embeddings\.a', .* cannot be captured .*: the host counts its rows"):
        ert.graphed(step, rows)(ids)
    assert [layer.table.steps for layer in layers.values()] == [0, 0]
    step(ids)  # without a graph
    assert [layer.table.stats()["rows_touched"] for layer in layers.values()] == [3, 3]


def test_dense_rules_and_averages_are_refused(graphs: FakeGraphs):
    one = layer()
    rows = ert.Adam(one, lr=0.1, dense=True)
    with pytest.raises(UnsupportedError, match="its rule has dense=True"):
        ert.graphed(one, rows)(torch.arange(3))
    one, other = layer(), layer(on_gpu=False)
    averaged = ert.average(nn.Sequential(one))
    with pytest.raises(UnsupportedError, match="its rows are averaged"):
        ert.graphed(one, ert.Adam(one))(torch.arange(3))
    del averaged
    with pytest.raises(UnsupportedError, match=r"the CPU reads and steps its rows\. Move the model first, model.to"):
        ert.graphed(other, ert.Adam(other))


def test_a_step_that_cannot_be_captured_is_not_made(graphs: FakeGraphs):
    one, ids = layer(), torch.arange(3)
    rows = ert.Adam(one, lr=0.1)

    def reads(ids: Tensor) -> None:
        loss = one(ids).sum()
        loss.item()
        loss.backward()
        rows.step()

    step = ert.graphed(reads, rows, warmup=1)
    step(ids)
    for _ in range(2):
        with pytest.raises(
            UnsupportedError, match=r"capturing: aten._local_scalar_dense No step of this batch was made\. .*\(item\(\)"
        ):
            step(ids)
    assert one.table.steps == 1
    reads(ids)
    assert one.table.steps == 2


def test_a_scaler_that_reads_what_it_found_is_refused(graphs: FakeGraphs):
    one, ids = layer(), torch.arange(3)
    model = nn.Sequential(one, nn.Linear(DIM, 1))
    both = ert.optimizer(model, rows=ert.SGD, dense=torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def step(ids: Tensor) -> None:
        scaler.scale(model(ids).sum()).backward()
        scaler.step(both)
        scaler.update()
        both.zero_grad()

    graphed = ert.graphed(step, both, warmup=1)
    graphed(ids)
    with pytest.raises(UnsupportedError, match=r"With a GradScaler, they need fused=True, too, .* each optimizer, not"):
        graphed(ids)
    assert one.table.steps == 1


def test_a_step_of_another_thread_while_one_is_captured_is_refused(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch):
    both, refused = pair(), list[str]()
    (rows,) = both.optimizers[0]
    step = rows.step

    def step_beside() -> None:
        if graphs.graph is not None:
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # as a thread beside it sees it
                with pytest.raises(UnsupportedError, match="another thread captures") as told:
                    step()
            refused.append(str(told.value))
        step()

    monkeypatch.setattr(rows, "step", step_beside)
    judged = list[int]()
    judge = GraphCapture.judge

    def noted(captured: GraphCapture) -> Tensor:
        judged.append(captured.is_recording)
        return judge(captured)

    monkeypatch.setattr(GraphCapture, "judge", noted)
    for k in range(5):
        both.step(torch.arange(6) + k)
    assert len(refused) == 1
    assert sum(judged) == 1  # the step that is captured, and no other one
    both.check()


def test_ids_on_the_host_and_second_steps_are_refused(graphs: FakeGraphs):
    one, ids = layer(), torch.arange(3)
    rows, other = ert.Adam(one, lr=0.1), layer(2)

    def twice(ids: Tensor) -> None:
        for _ in range(2):
            one(ids).sum().backward()
            rows.step()
            rows.zero_grad()

    with pytest.raises(UnsupportedError, match=r"must be on cuda:0 in a captured step: got some on cpu"):
        ert.graphed(lambda: one(ids), rows)()
    with pytest.raises(UnsupportedError, match="are stepped twice in one captured step"):
        ert.graphed(twice, rows)(ids)
    step = ert.graphed(lambda ids: other(ids), rows, warmup=1)
    step(ids)  # by launches: the table is not the optimizer's
    with pytest.raises(UnsupportedError, match="of optimizers that have all embedding layers"):
        step(ids)


def test_arguments_and_results_that_would_stay_are_refused(graphs: FakeGraphs):
    one, ids = layer(), torch.arange(3)
    rows = ert.Adam(one, lr=0.1)
    step = ert.graphed(lambda ids, *more: 3.0 if more else one(ids).sum().backward(), rows)
    with pytest.raises(ArgumentError, match=r"plain values: got ndarray, .* Pass tensors of its data\."):
        step(ids.numpy())
    with pytest.raises(ArgumentError, match=r"got a Parameter, torch\.strided, .* Pass tensors of its data\."):
        step(nn.Parameter(torch.ones(3), requires_grad=False))
    with pytest.raises(ArgumentError, match=r"got a tensor with requires_grad=True, .* Pass its detach\(\)\."):
        step(torch.ones(3, requires_grad=True))
    with pytest.raises(ArgumentError, match=r"or None: got float, .* Return tensors, and read their values after"):
        step(ids, True)
    one(ids).sum().backward()
    with pytest.raises(ArgumentError, match=r"wait for a step outside .* step\(\) or zero_grad\(\) before"):
        step(ids)
    with pytest.raises(ArgumentError, match=r"of ert.Adam or ert.optimizer: got none"):
        ert.graphed(step)
    with pytest.raises(ArgumentError, match=r"`warmup` of ert.graphed must be a number of calls >= 1: got 0"):
        ert.graphed(step, rows, warmup=0)
    with pytest.raises(UnsupportedError, match=r"ert.Adam has no `capturable`: ert.graphed\(step, optimizer\)"):
        ert.Adam(one, capturable=True)


def test_modes_of_pytorch_are_part_of_the_form(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch):
    both, ids = pair(), torch.arange(3)
    for _ in range(3):
        both.step(ids)
    assert both.graphed.graphs == 1
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        both.graphed(ids)
    assert ert.handles(both.models[0])[0].table.steps == 3
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    both.step(ids)  # by launches: the first of its form
    assert both.graphed.graphs == 1
    both.check()


def test_a_graphed_step_is_not_copied(graphs: FakeGraphs):
    with pytest.raises(UnsupportedError, match=r"can neither be copied nor pickled.*ert.graphed\(step, optimizer\)"):
        copy.deepcopy(pair().graphed)


def test_many_forms_are_launched_with_a_warning(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("embedrock.torch.graphs.MOST_GRAPHS", 1)
    both, (ids,) = pair(), batches(1)
    both.step(ids)
    with pytest.warns(UserWarning, match="has 1 graphs of this step"):
        both.step(ids[:3])
    both.step(ids[:4])
    both.check()
