"""Work on several streams and beside the host: all that has to be done before something else is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_cuda
import fake_runtime
import numpy as np
import pytest
import torch
from fake_cuda import FakeGPU
from gpu_device import INTERPRETED
from gpu_models import DIM, ROWS, memory_of

import embedrock as er
import embedrock.torch as ert
from embedrock.device import attach, cuda_runtime, memory_for
from embedrock.device import executor as side
from embedrock.device import stream_order as timeline
from embedrock.device.lookup import DeviceLookup
from embedrock.errors import UnsupportedError
from slow import slow

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="its GPU is a fake")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    made = fake_cuda.install(monkeypatch)
    with made:
        yield made


class Trained:
    """Some layers on the fake GPU, and the same on the CPU."""

    def __init__(self, near: int | None, count: int = 1, rows: int | None = ROWS, **arguments: Any) -> None:
        memory = memory_of(near) if rows else memory_for(er.Table(None, DIM, rule=er.Adam()).spec, near or 0)
        options = {"init": er.Normal(std=0.5), "seed": 5, **arguments}
        self.layers = [ert.Embedding(rows, DIM, **options, device_memory=memory) for _ in range(count)]
        self.others = [ert.Embedding(rows, DIM, **options) for _ in range(count)]
        wholes = [torch.nn.ModuleList(layers) for layers in (self.layers, self.others)]
        self.optimizers = [ert.Adam(whole, lr=0.1) for whole in wholes]
        ert.place(wholes[0], "cuda")

    def step(self, ids: torch.Tensor) -> None:
        """Make a step of all, whose ids may be overwritten as soon as this returns."""
        for layers, optimizer in zip((self.layers, self.others), self.optimizers, strict=True):
            torch.stack([layer(ids).sum() for layer in layers]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def check(self, gpu: FakeGPU) -> None:
        """Fail where something was not waited for, or where tables differ."""
        for mine, other in zip(self.layers, self.others, strict=True):
            np.testing.assert_array_equal(mine.table.lookup(np.arange(ROWS)), other.table.lookup(np.arange(ROWS)))
        assert gpu.races == []


THERE_AND_BACK = [torch.arange(6 + k) + 20 * (k % 2) for k in range(4)]  # rows that were stepped come back


def test_a_buffer_that_is_filled_anew_at_once(gpu: FakeGPU):
    trained, buffer = Trained(0), torch.empty(6, dtype=torch.int64, pin_memory=True)
    for k in range(2):
        buffer.copy_(torch.arange(6) + 4 * k)
        trained.step(buffer)
    trained.check(gpu)


@pytest.mark.parametrize("near", [17, *slow(None, 0)], ids=str)
def test_streams_may_change_from_step_to_step(gpu: FakeGPU, near: int | None):
    trained = Trained(near)
    streams = [gpu.new_stream() for _ in range(2)]
    for k in range(3):
        with gpu.on(streams[k % 2]):
            streams[k % 2].wait_stream(streams[1 - k % 2])  # the loop's own order: model, loss, gradients
            trained.step(torch.arange(6 + k) + 4 * k)  # scratch of other sizes
    trained.check(gpu)


@pytest.mark.parametrize("near", [None, 0, *slow(17)], ids=str)
def test_memory_of_batches_of_one_size_may_change_streams(gpu: FakeGPU, near: int | None):
    trained, streams = Trained(near, count=2), [gpu.new_stream() for _ in range(3)]
    both = [*zip((trained.layers, trained.others), trained.optimizers, strict=True)]
    wholes = [ert.EmbeddingCollection({str(k): layer for k, layer in enumerate(layers)}) for layers, _ in both]
    for k in range(6):
        stream = streams[k % 3]
        with gpu.on(stream):
            stream.wait_stream(streams[(k - 1) % 3])
            ids = torch.arange(6) + 4 * k  # of sizes that recur
            for whole, (_, optimizer) in zip(wholes, both, strict=True):
                found = whole({"0": ids, "1": ids[:3]})
                torch.stack([each.sum() for each in found.values()]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if k == 3:  # other batches, with memory of their own
                trained.step(ids)
    with gpu.on(streams[2]):
        for _, optimizer in both:
            del optimizer.param_groups[:]
    del wholes, both
    trained.check(gpu)


@pytest.mark.parametrize("near", slow(100, 9, 0))
def test_streams_may_change_where_the_directory_is_on_the_device(gpu: FakeGPU, near: int):
    trained, streams = Trained(near, rows=None), [gpu.new_stream() for _ in range(2)]
    batches = [*THERE_AND_BACK, *(torch.arange(700) + 600 * k for k in range(3))]  # so that the directory grows
    for k, ids in enumerate(ert.prefetch(batches, {trained.layers[0]: lambda ids: ids})):
        with gpu.on(streams[k % 2]):
            streams[k % 2].wait_stream(streams[1 - k % 2])
            trained.step(ids)
    assert "open ids" in repr(trained.layers[0].table)
    trained.check(gpu)


def test_a_side_that_is_made_on_one_stream_and_used_on_another(gpu: FakeGPU):
    trained, other = Trained(17), gpu.new_stream()
    trained.layers[0].handle.executor()
    with gpu.on(other):
        trained.step(torch.arange(6))
    trained.check(gpu)


def test_rows_are_not_attached_while_a_stream_is_captured(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch):
    table = er.Table(ROWS, DIM, device_memory=memory_of(17))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="cannot be captured in a CUDA graph"):
        attach.side_of(table, fake_cuda.GPU)
    assert table.executor is None


def test_a_table_that_was_read_on_another_stream_meanwhile_is_waited_for(gpu: FakeGPU):
    trained, other = Trained(0, count=2), gpu.new_stream()
    torch.stack([layer(torch.arange(5)).sum() for layer in trained.layers]).sum().backward()
    with gpu.on(other), torch.no_grad():
        trained.layers[1](torch.tensor([ROWS]))  # which is noted there
    trained.optimizers[0].step()
    assert gpu.races == []
    with pytest.raises(er.IdError, match=r"in an earlier batch, on the GPU\. Steps .* refused \(1 so far\)"):
        trained.layers[1].table.lookup([0])


def test_tables_that_are_used_together_wait_for_what_each_has_done_alone(gpu: FakeGPU):
    trained, other = Trained(0, count=2), gpu.new_stream()
    both = [*zip((trained.layers, trained.others), trained.optimizers, strict=True)]
    with gpu.on(other):
        for layers, optimizer in both:
            layers[1](torch.arange(5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for layers, optimizer in both:
        rows = ert.EmbeddingCollection({str(k): layer for k, layer in enumerate(layers)})
        found = rows({str(k): torch.arange(3) for k in range(2)})
        torch.stack([each.sum() for each in found.values()]).sum().backward()
        optimizer.step()
    trained.check(gpu)


@pytest.mark.parametrize(("rows", "near"), [(ROWS, 17), *slow((None, 100))])
def test_copies_ahead_of_tables_together_are_waited_for_by_each(gpu: FakeGPU, rows: int | None, near: int):
    trained, other = Trained(near, count=2, rows=rows), gpu.new_stream()
    first, second = trained.layers
    both = [*zip((trained.layers, trained.others), trained.optimizers, strict=True)]
    wholes = [ert.EmbeddingCollection({str(k): layer for k, layer in enumerate(layers)}) for layers, _ in both]
    given = [(ids, ids.flip(0) + 1) for ids in THERE_AND_BACK]
    for k, batch in enumerate(ert.prefetch(given, {first: lambda both: both[0], second: lambda both: both[1]})):
        for whole, (layers, optimizer) in zip(wholes, both, strict=True):
            if k == 2:  # what was copied for both is used by one, on another stream
                with gpu.on(other):
                    layers[1](batch[1]).sum().backward()
                    optimizer.step()
            else:
                found = whole({str(t): ids for t, ids in enumerate(batch)})
                torch.stack([each.sum() for each in found.values()]).sum().backward()
                optimizer.step()
            optimizer.zero_grad()
    assert all((layer.table.stats()["device_fetched"] > 0) == (rows is not None) for layer in trained.layers)
    trained.check(gpu)


@pytest.mark.parametrize("arguments", [{}, {"directory": "hashed"}], ids=str)
def test_copies_ahead_are_waited_for(gpu: FakeGPU, arguments: dict[str, Any]):
    trained = Trained(5, **arguments)
    for ids in ert.prefetch(THERE_AND_BACK, {trained.layers[0]: lambda ids: ids}):
        trained.step(ids)
    assert trained.layers[0].table.stats()["device_fetched"] > 0
    trained.check(gpu)


def test_the_host_waits_so_that_no_other_thread_s_capture_of_a_graph_breaks(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
):
    library, modes = fake_runtime.use(monkeypatch, fake_runtime.FakeLibrary()), []

    def noted(wait: Any) -> Any:
        return lambda self: (modes.append(library.capture_mode), wait(self))

    for kind in fake_cuda.Stream, fake_cuda.Event:
        monkeypatch.setattr(kind, "synchronize", noted(kind.synchronize))
    trained = Trained(17)
    trained.step(torch.arange(6))
    trained.check(gpu)
    assert set(modes) == {cuda_runtime.RELAXED}
    assert library.capture_mode == 0


def test_cuda_is_the_current_gpu(gpu: FakeGPU):
    trained = Trained(None)
    assert trained.layers[0].handle.rows_on == torch.device("cuda", 0)
    before = trained.layers[0].handle.executor()
    trained.layers[0](torch.arange(3)).sum().backward()
    ert.place(torch.nn.Sequential(), "cuda")
    trained.layers[0].handle.move(torch.device("cuda"))  # where it is: gradients may wait
    assert trained.layers[0].handle.executor() is before


def test_a_second_gpu_is_refused(gpu: FakeGPU):
    trained, other = Trained(None), er.Table(ROWS, DIM, seed=1)
    trained.step(torch.arange(3))
    said = (
        r"cannot be used on cuda:1: those of .*Embedding.* are on cuda:0, and a process uses rows on one GPU\. Put all"
    )
    with pytest.raises(UnsupportedError, match=said):
        attach.side_of(other, torch.device("cuda", 1))
    assert other.executor is None
    trained.step(torch.arange(3))
    trained.check(gpu)


# ---------------------------------------------------------------- the fake finds what it is there for


def late_ids(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Take pinned tensors as they are, as `on_device` once did."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def test_pinned_ids_that_are_read_late_are_found(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(side, "on_device", late_ids)
    trained, buffer = Trained(0), torch.empty(6, dtype=torch.int64, pin_memory=True)
    for k in range(2):
        buffer.copy_(torch.arange(6) + 4 * k)
        trained.layers[0](buffer)
    assert any("copy_ on host does not wait for default" in race for race in gpu.races)


@pytest.mark.parametrize("name", ["wait_for_copies", "take_over", *slow("begin", "uses")])
def test_what_is_not_waited_for_is_found(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(timeline.StreamOrder, name, lambda *args: None)
    layer, streams = ert.Embedding(ROWS, DIM, device_memory=memory_of(17)), [gpu.new_stream() for _ in range(2)]
    optimizer = ert.SGD(layer, lr=0.1)
    ert.place(layer, "cuda")
    layer.handle.executor()
    for k, ids in enumerate(ert.prefetch(THERE_AND_BACK, {layer: lambda ids: ids})):
        with gpu.on(streams[k % 2]):
            if name in ("wait_for_copies", "uses"):
                streams[k % 2].wait_stream(streams[1 - k % 2])
            layer(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert gpu.races


@pytest.mark.parametrize("not_waited_for", [None, "TensorFlow", "PyTorch"])
def test_tensorflow_and_pytorch_wait_for_each_other(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, not_waited_for: str | None
):
    tf: Any = pytest.importorskip("tensorflow")
    from embedrock.keras.training import gpu_executor

    theirs, shared, seen = gpu.new_stream(), [], gpu_executor._seen  # memory of TensorFlow's, which it keeps so far
    freeing: Any = gpu.host

    def used_by_tensorflow(tensor: torch.Tensor) -> None:
        memory = gpu.memory_of(tensor)
        assert memory is not None
        gpu.uses(memory, theirs, True, "TensorFlow")

    def seen_after_a_kernel(tensor: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            shared.append(seen(tensor))
        with gpu.on(freeing):
            gpu.keep(shared[-1], is_on_gpu=True)
        used_by_tensorflow(shared[-1])
        if not_waited_for != "TensorFlow":
            theirs.synchronize()  # as TensorFlow says that its to_dlpack does
        return shared[-1]

    monkeypatch.setattr(gpu_executor, "_seen", seen_after_a_kernel)
    if not_waited_for == "PyTorch":
        monkeypatch.setattr(gpu_executor, "wait_for_caller", lambda device: None)
    table = er.Table(ROWS, DIM, rule=er.SGD(lr=0.1), init=er.Normal(std=0.5), seed=5, device_memory=memory_of(None))
    first = table.lookup(np.arange(6))
    side = gpu_executor.TensorFlowGpuExecutor(table, "a layer", gpu_executor.DlpackTransfer("/CPU:0", fake_cuda.GPU))

    def looked_up(ids: torch.Tensor, grads: torch.Tensor) -> list[torch.Tensor]:
        lookup = DeviceLookup(side.stepped.layout(), [ids.clone()], trains=True)
        found = lookup.read()
        ((summed, _),) = lookup.sums([grads])
        return [*found, *side.shown(summed.of(0), is_last=True)]

    ids, grads = tf.range(6, dtype=tf.int64), tf.ones((6, DIM))
    found = side.call(looked_up, [ids, grads], [tf.float32, tf.float32, tf.int64], functions=[])
    for tensor in shared:
        used_by_tensorflow(tensor)  # which reads what it got, and frees what it gave
    for tensor, expected in zip(found, (first, np.ones((6, DIM)), np.arange(6)), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), expected)
    assert bool(gpu.races) == (not_waited_for is not None)
    assert all("TensorFlow" in race or theirs.name in race for race in gpu.races)
