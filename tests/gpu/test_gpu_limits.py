"""Where there is too little memory, no pinning, no Triton or no such GPU: what is said, and that nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_models import ALL_NEAR, DIM, NONE_NEAR, ROWS, SOME_NEAR, Way, batches, loss_of, make, on_device, train

import embedrock as er
import embedrock.torch as ert
from embedrock.device import attach, pinned, placement, timeline
from embedrock.device.hosted import HostedSide
from embedrock.errors import UnsupportedError
from embedrock.table.table import rows_of
from embedrock.torch.training import side
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
        *((ALL_NEAR, 4), (SOME_NEAR[1], 0), (SOME_NEAR[1], 10)),
        *slow(*((ALL_NEAR, left) for left in (0, 2, 6, 8, 10, 12))),
        *slow(*((SOME_NEAR[1], left) for left in (2, 4, 6, 8, 12))),
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


def test_a_table_that_does_not_fit_the_device(monkeypatch: pytest.MonkeyPatch):
    model = make(None)
    Scarce(monkeypatch, 1)
    with pytest.raises(er.MemoryBudgetError, match=r".*Embedding.*, to keep its rows on .*needs more GPU memory"):
        on_device(model.whole)(batches(1)[0])


@pytest.mark.parametrize(("near", "mode"), [(0, "host"), (1, "cached"), (50, "cached"), (ROWS, "device")])
def test_placement(near: int, mode: str):
    spec = er.Table(ROWS, DIM, rule=er.Adam()).spec
    budget = placement.memory_for(spec, near)
    chosen = placement.choose(spec, budget)
    assert (chosen.mode, chosen.near_rows) == (mode, near)
    assert chosen.bytes <= budget
    assert placement.choose(spec, 0) == placement.DevicePlacement("host", 0, ROWS * placement.MAP_BYTES)


@pytest.mark.parametrize("size", ["all of it", -1, True, 1.5])
def test_sizes_that_are_none(size: Any):
    with pytest.raises(er.ArgumentError, match="`device_memory`"):
        ert.Embedding(ROWS, DIM, device_memory=size)


def test_where_rows_are_shows():
    assert "rows used in RAM" in repr(train(make(NONE_NEAR), batches(1)).table)
    assert "all rows" in repr(train(make(ALL_NEAR), batches(1)).table)
    hashed = ert.Embedding(ROWS, DIM, directory="hashed")
    on_device(hashed)
    hashed(batches(1)[0])
    assert "planned by the host" in repr(hashed.table)


def test_memory_that_cannot_be_pinned_is_said_and_used_by_the_cpu(monkeypatch: pytest.MonkeyPatch):
    def refuse(self: pinned.Pinned, nbytes: int) -> None:
        raise pinned.PinningError("cudaHostRegister of 1 MiB returned 2")

    monkeypatch.setattr(pinned.Pinned, "cover", refuse)
    model, other = make(NONE_NEAR), make(None)
    said = r"rows of .*Embedding.* are read and stepped by the CPU, and copied: .* returned 2"
    with pytest.warns(pinned.PinningWarning, match=said):
        train(model, batches(1))
    train(model, batches(3)[1:])
    np.testing.assert_array_equal(model.weights(), train(other, batches(3)).weights())
    assert model.table.side is None


def test_pinned_memory_is_let_go(monkeypatch: pytest.MonkeyPatch):
    class Runtime:
        def __init__(self) -> None:
            self.registered: dict[int, int] = {}

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            if nbytes > 3000:
                return 2
            self.registered[address] = nbytes
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            del self.registered[address]

    runtime, memory = Runtime(), np.zeros(5000, np.uint8)
    monkeypatch.setattr(pinned, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    monkeypatch.setattr(pinned, "PART_BYTES", 1024)
    held = pinned.Pinned(memory, torch.device("cuda"))
    held.cover(1)
    held.cover(2100)
    assert sum(runtime.registered.values()) == 2100
    said = r"refused to pin 4\.9 KiB of RAM for the GPU \(cudaHostRegister returned 2\)"
    other = pinned.Pinned(np.zeros(5000, np.uint8), torch.device("cuda"))
    with pytest.raises(pinned.PinningError, match=said):
        other.cover(5000)
    other.close()
    held.close()
    assert not runtime.registered


def test_without_triton_the_cpu_uses_the_rows_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(side, "lack_for_kernels", side.lack_for_kernels.__wrapped__)
    monkeypatch.setattr(side, "has_triton", lambda: False)
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
    monkeypatch.setattr(side, "lack_for_kernels", side.lack_for_kernels.__wrapped__)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(side.shutil, "which", {"gcc": "/usr/bin/gcc"}.get)
    assert side.lack_for_kernels("cuda") is None
    return monkeypatch


@pytest.mark.parametrize("lack", ["compiler", "headers"])
def test_without_what_triton_compiles_with_the_cpu_uses_the_rows_and_says_so(
    probes: pytest.MonkeyPatch, tmp_path: Path, lack: str
):
    if lack == "compiler":
        probes.setattr(side.shutil, "which", lambda name: None)
        said, remedy = (
            "there is no C compiler, gcc or clang, with which Triton",
            "apt-get install gcc, or name one by .*CC",
        )
    else:
        probes.setattr(side.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
        said, remedy = rf"Python's headers are missing \({tmp_path}/Python\.h\)", "apt-get install python3-dev"
    with pytest.warns(
        ert.PlacementWarning, match=rf"^{said}.*: the table is read and stepped by the CPU.* {remedy}\.$"
    ):
        assert side.device_side(er.Table(ROWS, DIM), torch.device("cuda")) is None
    with pytest.raises(
        UnsupportedError, match=rf"^{said}.*: the table cannot have device_memory=0\. Install.*{remedy}"
    ):
        side.device_side(er.Table(ROWS, DIM, device_memory=0), torch.device("cuda"))
    assert side.lack_for_kernels("cpu") is None  # where Triton's interpreter needs neither


def test_a_compiler_may_be_named_or_be_clang(probes: pytest.MonkeyPatch):
    probes.setattr(side.shutil, "which", {"clang": "/usr/bin/clang"}.get)
    assert side.lack_for_kernels("cuda") is None
    probes.setattr(side.shutil, "which", lambda name: None)
    probes.setenv("CC", "/opt/cc")
    assert side.lack_for_kernels("cuda") is None


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
        timeline.refuse_capture()


def test_memory_that_a_table_on_disk_does_not_use_is_said(tmp_path: Path):
    layer = ert.Embedding(ROWS, DIM, path=str(tmp_path / "rows.rock"), memory="1MiB", device_memory="1MiB")
    on_device(layer)
    with pytest.warns(ert.PlacementWarning, match=r"is on disk: .* device_memory=1048576 is not used"):
        layer(batches(1)[0])
    layer.table.close()


def test_pinning_that_fails_later_refuses_the_step(monkeypatch: pytest.MonkeyPatch):
    layer = ert.Embedding(None, DIM)
    optimizer = ert.SGD(layer, lr=0.1)
    on_device(layer)
    layer(torch.arange(5)).sum().backward()

    def refuse(self: pinned.Pinned, nbytes: int) -> None:
        if nbytes:
            raise pinned.PinningError("the system refused")

    with monkeypatch.context() as patch:
        patch.setattr(pinned.Pinned, "cover", refuse)
        with pytest.raises(er.MemoryBudgetError, match="the system refused"):
            optimizer.step()
    assert (layer.table.steps, layer.table.stats()["rows_touched"]) == (0, 0)
    optimizer.step()
    assert layer.table.steps == 1


def test_a_step_that_fails_for_memory_once_its_records_are_made_is_made_by_the_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = ert.Embedding(None, 2, init=er.Zeros())
    optimizer = ert.SGD(layer, lr=1.0)
    ert.place(layer, "cpu")
    layer(torch.tensor([5, 6])).sum().backward()
    follow, fails = HostedSide._follow, iter([True])

    def follow_or_fail(side: HostedSide) -> None:
        if rows_of(layer.table).tier.count and next(fails, False):  # the records are there
            raise torch.OutOfMemoryError("CUDA out of memory")
        follow(side)

    monkeypatch.setattr(HostedSide, "_follow", follow_or_fail)
    with pytest.raises(er.MemoryBudgetError):
        optimizer.step()
    optimizer.step()
    np.testing.assert_array_equal(layer.table.export()[0], [5, 6])
    np.testing.assert_array_equal(layer.table.lookup([5, 6]), np.full((2, 2), -1.0))


def test_a_share_is_of_the_whole_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attach, "memory_limit", lambda: 4000)
    monkeypatch.setattr(attach, "_total_bytes", lambda device: 8000)
    assert attach._bytes_of("25%", torch.device("cpu")) == 1000  # of the interpreter
    assert attach._bytes_of("25%", torch.device("cuda")) == 2000
    assert attach._bytes_of(7, torch.device("cuda")) == 7
