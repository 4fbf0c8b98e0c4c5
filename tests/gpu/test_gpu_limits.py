"""Where there is too little memory, no pinning, no Triton or no such GPU: what is said, and that nothing changes."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
    OPEN,
    ROWS,
    SOME_NEAR,
    Way,
    assert_same_table,
    batches,
    loss_of,
    make,
    on_device,
    train,
)
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

import embedrock as er
import embedrock.torch as ert
from embedrock.device import attach, executor, host_batch, pinned, requirements, steps
from embedrock.device import dense as direct
from embedrock.device import host_planned as hosted
from embedrock.device import stream_order as timeline
from embedrock.device.dense import DenseGpuExecutor
from embedrock.device.executor import GpuExecutor
from embedrock.errors import UnsupportedError
from embedrock.storage import device_layout as device_placing
from embedrock.storage import ram_backend as memory
from embedrock.table.table import rows_of
from slow import slow


class Scarce:
    """Has the n-th tensor from now on, and all after it, find no memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
        self.left = left
        for name in ("empty", "full", "zeros", "cat"):
            monkeypatch.setattr(torch, name, self._watched(getattr(torch, name)))

    def _watched(self, function: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("out of memory. Tried to allocate 20.00 MiB.")
            return function(*args, **kwargs)

        return made


@pytest.mark.parametrize(
    ("way", "left"),
    [
        (ALL_NEAR, 4),
        *slow(*((ALL_NEAR, left) for left in (0, 2, 6, 8))),
        *slow(*((SOME_NEAR[1], left) for left in (0, 2, 4, 6, 8))),
        *slow(*((OPEN, left) for left in range(0, 10, 2))),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_too_little_memory_leaves_the_table_at_the_step_before(way: Way, left: int, monkeypatch: pytest.MonkeyPatch):
    model = train(make(way), batches(2))
    before, steps, touched = model.weights(), model.table.steps, model.table.stats()["rows_touched"]
    with monkeypatch.context() as patch:
        scarce = Scarce(patch, left)
        try:
            loss_of(model, batches(1, seed=1)[0]).backward()
            model.step_rows.step()
        except er.MemoryBudgetError as error:
            assert "needs more GPU memory than there is: out of memory. Tried to allocate 20.00 MiB" in str(error)  # noqa: PT017
            assert "Nothing has changed. Pass a smaller device_memory=" in str(error)  # noqa: PT017
        except torch.OutOfMemoryError:
            assert left == 2  # the third tensor is the model's own
        else:
            pytest.skip(f"a step needs no {left + 1} tensors")
        assert scarce.left < 0
    model.zero_grad()
    assert (model.table.steps, model.table.stats()["rows_touched"]) == (steps, touched)
    np.testing.assert_array_equal(model.weights(), before)
    other = train(make(way), batches(2))
    np.testing.assert_array_equal(
        train(model, batches(2, seed=3)).weights(), train(other, batches(2, seed=3)).weights()
    )


class FailsAt(TorchDispatchMode):
    """Has the n-th call of PyTorch that may allocate find no memory. What the interpreter does for a kernel is none."""

    def __init__(self, patch: pytest.MonkeyPatch, left: int) -> None:
        super().__init__()
        self.left, self._in_kernel = left, False
        launch = interpreter.GridExecutor.__call__

        def launched(*args: Any, **options: Any) -> Any:
            self._in_kernel = True
            try:
                return launch(*args, **options)
            finally:
                self._in_kernel = False

        patch.setattr(interpreter.GridExecutor, "__call__", launched)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name, *_ = str(function).split(".")
        allocates_nothing = function.is_view or name.endswith("_") or namespace == "profiler"
        allocates_nothing |= name in ("_local_scalar_dense", "record_stream")
        if not (self._in_kernel or allocates_nothing):
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError(f"out of memory in {function}.")
        return function(*args, **(kwargs or {}))


def until_it_fits(act: Callable[[], object], after_failure: Callable[[], object]) -> int:
    """Act with less and less missing memory; return how often there was too little."""
    for left in itertools.count():
        with pytest.MonkeyPatch.context() as patch:
            scarce = FailsAt(patch, left)
            try:
                with scarce:
                    act()
            except (er.MemoryBudgetError, torch.OutOfMemoryError):  # of ours, or of the model that follows the rows
                assert scarce.left < 0
            else:
                return left
        after_failure()
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [ALL_NEAR, NONE_NEAR, SOME_NEAR[1], HOSTED[0], HOSTED[2], OPEN], ids=lambda way: way.name
)
def test_no_allocation_that_fails_leaves_half_a_step(way: Way):
    model, other = train(make(way), batches(2)), train(make(None), batches(2))
    before, ids = other.weights(), batches(1, seed=1)

    def is_as_before() -> None:
        model.zero_grad()
        assert model.table.steps == 2
        np.testing.assert_array_equal(model.weights(), before)

    def step() -> None:
        loss_of(model, ids[0]).backward()
        model.step_rows.step()

    assert until_it_fits(step, is_as_before) > 10  # or the step has asked for none by then
    other.zero_grad()
    loss_of(other, ids[0]).backward()
    other.step_rows.step()
    assert_same_table(model.table, other.table)


@pytest.mark.parametrize("way", [ALL_NEAR, *slow(SOME_NEAR[1], HOSTED[2], OPEN)], ids=lambda way: way.name)
def test_no_allocation_that_fails_loses_rows_that_are_brought_back(way: Way):
    model, other = train(make(way), batches(2)), train(make(None), batches(2))
    assert until_it_fits(model.weights, lambda: None) > 2
    np.testing.assert_array_equal(model.weights(), other.weights())


def test_a_table_that_does_not_fit_the_device(monkeypatch: pytest.MonkeyPatch):
    model = make(None)
    Scarce(monkeypatch, 1)
    with pytest.raises(er.MemoryBudgetError, match=r".*Embedding.*, to keep its rows on .*needs more GPU memory"):
        on_device(model.whole)(batches(1)[0])


@pytest.mark.parametrize(("near", "mode"), [(0, "host"), (1, "cached"), (50, "cached"), (ROWS, "device")])
def test_placement(near: int, mode: str):
    spec = er.Table(ROWS, DIM, rule=er.Adam()).spec
    budget = device_placing.memory_for(spec, near)
    chosen = device_placing.choose(spec, budget)
    assert (chosen.mode, chosen.near_rows) == (mode, near)
    assert chosen.bytes <= budget
    assert device_placing.choose(spec, 0) == device_placing.DeviceLayout("host", 0, ROWS * device_placing.MAP_BYTES)


@pytest.mark.parametrize("size", ["all of it", -1, True, 1.5])
def test_sizes_that_are_none(size: Any):
    with pytest.raises(er.ArgumentError, match="`device_memory`"):
        ert.Embedding(ROWS, DIM, device_memory=size)


def test_where_rows_are_shows():
    assert "rows used in RAM" in repr(train(make(NONE_NEAR), batches(1)).table)
    assert "all rows" in repr(train(make(ALL_NEAR), batches(1)).table)
    assert "planned by the host" in repr(train(make(HOSTED[0]), batches(1)).table)
    assert "rows used in RAM, hashed ids" in repr(train(make(HASHED[0]), batches(1)).table)
    assert "all rows (1.5 KiB), hashed ids" in repr(train(make(HASHED[2]), batches(1)).table)
    assert "15 rows cached (1.4 KiB), hashed ids" in repr(train(make(HASHED[2]), batches(3)).table)


def test_memory_that_cannot_be_pinned_is_said_and_used_by_the_cpu(monkeypatch: pytest.MonkeyPatch):
    def refuse(self: pinned.PinnedRecords, nbytes: int) -> None:
        raise pinned.PinningError("cudaHostRegister of 1 MiB returned 2")

    monkeypatch.setattr(pinned.PinnedRecords, "cover", refuse)
    model, other = make(NONE_NEAR), make(None)
    said = r"rows of .*Embedding.* are read and stepped by the CPU, and copied: .* returned 2"
    with pytest.warns(pinned.PinningWarning, match=said):
        train(model, batches(1))
    train(model, batches(3)[1:])
    np.testing.assert_array_equal(model.weights(), train(other, batches(3)).weights())
    assert model.table.executor is None


def test_without_triton_the_cpu_uses_the_rows_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requirements, "lack_for_kernels", requirements.lack_for_kernels.__wrapped__)
    monkeypatch.setattr(requirements, "has_triton", lambda: False)
    model, asked = make(None), make(NONE_NEAR)
    on_device(model.whole)
    with pytest.warns(
        ert.PlacementWarning, match=r"Triton.*is not installed: .*Embedding.* is read and stepped by the"
    ):
        train(model, batches(1))
    with pytest.raises(UnsupportedError, match=r"Embedding.* cannot have device_memory=0\. Install it"):
        train(asked, batches(1))


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let the requirements of kernels be looked for anew, on a machine that has them all."""
    monkeypatch.setattr(requirements, "lack_for_kernels", requirements.lack_for_kernels.__wrapped__)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(requirements.shutil, "which", {"gcc": "/usr/bin/gcc"}.get)
    assert requirements.lack_for_kernels("cuda") is None
    return monkeypatch


@pytest.mark.parametrize("lack", ["compiler", "headers"])
def test_without_what_triton_compiles_with_the_cpu_uses_the_rows_and_says_so(
    probes: pytest.MonkeyPatch, tmp_path: Path, lack: str
):
    if lack == "compiler":
        probes.setattr(requirements.shutil, "which", lambda name: None)
        said, remedy = (
            "there is no C compiler, gcc or clang, with which Triton",
            "apt-get install gcc, or name one by .*CC",
        )
    else:
        probes.setattr(requirements.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
        said, remedy = rf"Python's headers are missing \({tmp_path}/Python\.h\)", "apt-get install python3-dev"
    with pytest.warns(
        ert.PlacementWarning, match=rf"^{said}.*: the table is read and stepped by the CPU.* {remedy}\.$"
    ):
        assert requirements.device_side(er.Table(ROWS, DIM), torch.device("cuda")) is None
    with pytest.raises(
        UnsupportedError, match=rf"^{said}.*: the table cannot have device_memory=0\. Install.*{remedy}"
    ):
        requirements.device_side(er.Table(ROWS, DIM, device_memory=0), torch.device("cuda"))
    assert requirements.lack_for_kernels("cpu") is None  # where Triton's interpreter needs neither


def test_a_compiler_may_be_named_or_be_clang(probes: pytest.MonkeyPatch):
    probes.setattr(requirements.shutil, "which", {"clang": "/usr/bin/clang"}.get)
    assert requirements.lack_for_kernels("cuda") is None
    probes.setattr(requirements.shutil, "which", lambda name: None)
    probes.setenv("CC", "/opt/cc")
    assert requirements.lack_for_kernels("cuda") is None


def test_without_the_interpreter_a_cpu_is_no_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attach, "is_interpreted", lambda: False)
    with pytest.raises(UnsupportedError, match="Set TRITON_INTERPRET=1 before Python starts"):
        ert.place(make(None).whole, "cpu")


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    with pytest.raises(UnsupportedError, match=r"cuda:0 has compute capability 6\.1, and kernels .* need 7\.0"):
        attach.side_of(er.Table(ROWS, DIM), torch.device("cuda:0"))


def test_a_captured_stream_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="cannot be captured in a CUDA graph"):
        timeline.check_capture([timeline.StreamOrder(torch.device("cpu"), "a table")])


def test_pinning_that_fails_later_refuses_the_step(monkeypatch: pytest.MonkeyPatch):
    layer = ert.Embedding(None, DIM)
    optimizer = ert.SGD(layer, lr=0.1)
    on_device(layer)
    layer(torch.arange(5)).sum().backward()

    def refuse(self: pinned.PinnedRecords, nbytes: int) -> None:
        if nbytes:
            raise pinned.PinningError("the system refused")

    with monkeypatch.context() as patch:
        patch.setattr(pinned.PinnedRecords, "cover", refuse)
        with pytest.raises(er.MemoryBudgetError, match="the system refused"):
            optimizer.step()
    assert (layer.table.steps, layer.table.stats()["rows_touched"]) == (0, 0)
    optimizer.step()
    assert layer.table.steps == 1


def test_a_share_is_of_the_whole_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attach, "memory_limit", lambda: 4000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8000))
    assert attach._bytes_of("25%", torch.device("cpu")) == 1000  # of the interpreter
    assert attach._bytes_of("25%", torch.device("cuda")) == 2000
    assert attach._bytes_of(7, torch.device("cuda")) == 7


class FailsOnce:
    """Replaces a method by one that finds no memory when it is called for the first time."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.is_due, method = True, getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            if self.is_due:
                self.is_due = False
                raise torch.OutOfMemoryError("out of memory. Tried to allocate 1.60 GiB.")
            return method(*args, **kwargs)

        patch.setattr(owner, name, failing)


@pytest.mark.parametrize("name", ["_slots_where", "_check_ram", "_present_rows"])
def test_a_table_that_cannot_be_brought_back_now_is_whole_and_can_be_later(name: str, monkeypatch: pytest.MonkeyPatch):
    model, other = train(make(ALL_NEAR), batches(2)), train(make(None), batches(2))
    fails = FailsOnce(monkeypatch, DenseGpuExecutor, name)
    with pytest.raises(er.MemoryBudgetError, match=r"more GPU memory than there is: out of memory.* Nothing has chang"):
        model.weights()
    assert not fails.is_due
    train(model, batches(1, seed=1))  # it trains on
    np.testing.assert_array_equal(model.weights(), train(other, batches(1, seed=1)).weights())


def test_a_capture_that_a_table_meets_does_not_fail_it(monkeypatch: pytest.MonkeyPatch):
    model = train(make(SOME_NEAR[1]), batches(2))
    before = model.table.executor
    with monkeypatch.context() as patch:
        patch.setattr(type(before), "_finish", lambda executor: (_ for _ in ()).throw(UnsupportedError("captured")))
        with pytest.raises(UnsupportedError, match="captured"):
            model.weights()
    np.testing.assert_array_equal(model.weights(), train(make(None), batches(2)).weights())


def test_a_device_that_dies_while_rows_are_brought_back_fails_the_table(monkeypatch: pytest.MonkeyPatch):
    model = train(make(ALL_NEAR), batches(2))
    with monkeypatch.context() as patch:
        patch.setattr(DenseGpuExecutor, "_finish", lambda executor: (_ for _ in ()).throw(RuntimeError("CUDA error")))
        with pytest.raises(RuntimeError, match="CUDA error"):
            model.weights()
    with pytest.raises(er.EmbedrockError, match="failed, and some of its rows may have been stepped"):
        model.weights()


def test_rows_come_back_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    model, other, sizes = train(make(ALL_NEAR), batches(3)), train(make(None), batches(3)), []
    monkeypatch.setattr(executor, "COPIED_BYTES", 7 * model.table.spec.record_bytes)

    def noted(nbytes: int, device: torch.device) -> torch.Tensor:
        sizes.append(nbytes)
        return pinned.staging(nbytes, device)

    monkeypatch.setattr(direct, "staging", noted)
    assert_same_table(model.table, other.table)
    assert sizes == [7 * model.table.spec.record_bytes]


def test_rows_that_only_a_gpu_has_room_for_are_not_saved_and_train_on(monkeypatch: pytest.MonkeyPatch):
    model = train(make(ALL_NEAR), batches(2))
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_headroom", SimpleNamespace(take=lambda nbytes: False))
        said = r"\d+ rows of .* are in GPU memory only, and who reads or saves them needs them in RAM: .*needed"
        with pytest.raises(er.MemoryBudgetError, match=said):
            model.whole.state_dict()
        train(model, batches(1, seed=1))
    other = train(train(make(None), batches(2)), batches(1, seed=1))
    np.testing.assert_array_equal(model.weights(), other.weights())


def test_a_table_that_fits_the_gpu_and_not_the_ram_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attach, "available_bytes", lambda: 1000)
    with pytest.warns(ert.PlacementWarning, match=r"fits the GPU's memory, but not the RAM that is free: .* 1000 B"):
        train(make(ALL_NEAR), batches(1))


def test_a_device_side_that_is_closed_holds_no_memory():
    for way in (ALL_NEAR, SOME_NEAR[1], HOSTED[2]):
        model = train(make(way), batches(1))
        executor = model.table.executor
        assert isinstance(executor, GpuExecutor)
        executor.expect(batches(1)[0])
        model.rows(batches(1)[0])
        assert (executor.ahead is None) == (way is ALL_NEAR)  # of rows near, nothing is done ahead
        rows_of(model.table).leave_side()
        assert executor.ahead is None
        tensors = [executor.cache.records, *executor.cache.slots]
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0


def test_a_few_new_rows_cost_a_few_rows_of_upload(monkeypatch: pytest.MonkeyPatch):
    # First values that only the CPU can draw, as those of the GPU are made there.
    first = np.random.default_rng(0).standard_normal((1000, 64)).astype(np.float32)
    layer = ert.Embedding.from_pretrained(first, freeze=False)
    optimizer = ert.SGD(layer, lr=0.1)
    on_device(layer)
    layer(torch.arange(500)).sum().backward()
    optimizer.step()
    uploaded = []
    upload = hosted.uploaded

    def noted(array: np.ndarray, device: torch.device) -> torch.Tensor:
        uploaded.append(array.shape)
        return upload(array, device)

    monkeypatch.setattr(hosted, "uploaded", noted)
    found = layer(torch.arange(498, 502))
    np.testing.assert_array_equal(found.detach().cpu().numpy()[2:], first[500:502])
    assert [shape for shape in uploaded if len(shape) == 2] == [(2, 64)]


def counted(function: Any, calls: collections.Counter[str]) -> Any:
    def called(*args: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args)

    return called


def test_a_plan_of_the_host_is_one_upload(monkeypatch: pytest.MonkeyPatch):
    model, ids, uploads = make(HOSTED[0]), torch.arange(5), collections.Counter[str]()
    train(model, [ids])  # whose rows have records from then on
    for module, name in ((hosted, "uploaded"), (host_batch, "uploaded_together")):
        monkeypatch.setattr(module, name, counted(getattr(module, name), uploads))
    train(model, [ids])
    assert uploads == {"uploaded_together": 1}


def test_kernels_of_every_table_get_their_verdicts_alike(monkeypatch: pytest.MonkeyPatch):
    layers = torch.nn.ModuleList(ert.Embedding(ROWS, DIM, device_memory=0) for _ in range(3))
    optimizer = ert.SGD(layers, lr=0.1)
    on_device(layers)
    starts, step = set(), steps.begin_step

    def noted(parts: Any, verdict: torch.Tensor | None, number: Any) -> Any:
        assert verdict is not None
        starts.add(verdict.data_ptr() % 16)  # what Triton compiles kernels anew for
        return step(parts, verdict, number)

    monkeypatch.setattr(steps, "begin_step", noted)
    torch.stack([layer(torch.arange(3)).sum() for layer in layers]).sum().backward()
    optimizer.step()
    assert starts == {0}
