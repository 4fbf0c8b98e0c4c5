"""RAM pinned for a GPU: in parts, all of them or none, without an error left behind, and not for forked children."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_runtime import GPU, FakeLibrary, use
from gpu_device import INTERPRETED

import embedrock.torch as ert
from embedrock.device import cuda_runtime, pinned
from embedrock.device.pinned import PinnedRecords, PinningError
from embedrock.errors import UnsupportedError
from embedrock.system import platform
from embedrock.system.arena import Arena
from forked import in_child

PAGE = mmap.PAGESIZE


def nothing() -> None:
    """Wait for what uses the memory: nobody does."""


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "LEAST_PART_BYTES", 2 * PAGE)
    monkeypatch.setattr(pinned, "MOST_PART_BYTES", 6 * PAGE)


def test_parts_are_of_whole_huge_pages_and_not_too_large():
    for size in (pinned.LEAST_PART_BYTES, pinned.MOST_PART_BYTES):
        assert size % (2 << 20) == 0
    assert pinned.MOST_PART_BYTES < 512 << 30  # which newer drivers refuse


@pytest.mark.usefixtures("small_parts")
def test_memory_is_pinned_in_parts_as_far_as_it_is_needed_and_let_go(monkeypatch: pytest.MonkeyPatch):
    library, memory = use(monkeypatch, FakeLibrary(most=6 * PAGE)), Arena(21 * PAGE + 5, "a table").memory
    held = PinnedRecords(memory, GPU, nothing)
    for wanted, parts in ((1, [2]), (2 * PAGE, [2]), (3 * PAGE, [2, 2]), (len(memory), [2, 2, 6, 6, 5])):
        held.cover(wanted)
        assert [-(-size // PAGE) for size in library.registered.values()][: len(parts) - 1] == parts[:-1]
    assert sum(library.registered.values()) == len(memory)
    assert min(library.registered) == held.address
    held.close()
    assert not library.registered
    held.close()
    assert library.last_error == 0


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("refused", [0, 1, 3])
def test_what_is_refused_leaves_neither_parts_nor_an_error_behind(monkeypatch: pytest.MonkeyPatch, refused: int):
    library, memory = use(monkeypatch, FakeLibrary(refused=(refused + 1,))), Arena(32 * PAGE, "a table").memory
    held = PinnedRecords(memory, GPU, nothing)
    held.cover(1)
    before = dict(library.registered)
    said = r"refused to pin .* of RAM for the GPU \(cudaHostRegister returned 2\)"
    with pytest.raises(PinningError, match=said):
        held.cover(len(memory))
    assert library.registered == before
    assert library.last_error == 0  # or the next kernel would die for it
    held.cover(len(memory))
    assert sum(library.registered.values()) == len(memory)
    held.close()


def test_memory_that_goes_first_is_let_go_once_nothing_uses_it(monkeypatch: pytest.MonkeyPatch):
    library, waited = use(monkeypatch, FakeLibrary()), []
    held = PinnedRecords(np.zeros(5000, np.uint8), GPU, lambda: waited.append(len(library.registered)))
    held.cover(5000)
    del held
    assert waited == [1]
    assert not library.registered


def test_memory_is_pinned_and_let_go_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch):
    library, memory = use(monkeypatch, FakeLibrary()), Arena(PAGE, "a table").memory
    library.is_capturing = True
    held = PinnedRecords(memory, GPU, nothing)
    held.cover(1)
    assert library.registered
    held.close()
    assert not library.registered
    assert library.capture_mode == 0  # as it was


def test_a_device_that_has_other_addresses_is_refused(monkeypatch: pytest.MonkeyPatch):
    library = use(monkeypatch, FakeLibrary(same_addresses=False))
    with pytest.raises(PinningError, match=r"^cuda:0 does not find pinned RAM at the addresses that the CPU"):
        PinnedRecords(np.zeros(5000, np.uint8), GPU, nothing).cover(1)
    assert not library.registered


def test_without_the_library_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_runtime.torch.cuda, "init", lambda: None)
    monkeypatch.setattr(platform, "loaded_libraries", lambda name: [])
    monkeypatch.setattr(pinned, "cuda_runtime", cuda_runtime.cuda_runtime.__wrapped__)
    with pytest.raises(PinningError, match=r"runtime library \(libcudart\) is not among those that this process has"):
        PinnedRecords(np.zeros(5000, np.uint8), GPU, nothing).cover(1)


@pytest.mark.parametrize(
    ("linked", "knowing", "found"),
    [
        ((), (), "libcudart.so.13.0.1"),
        (("libc10_cuda.so",), ("libc10_cuda.so",), "libc10_cuda.so"),  # which finds that which PyTorch calls
        (("libc10_cuda.so",), (), "libcudart.so.13.0.1"),
    ],
)
def test_the_library_is_the_one_that_pytorch_has_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, linked: tuple[str, ...], knowing: tuple[str, ...], found: str
):
    folder, maps = "/opt/with space/lib", tmp_path / "maps"
    names = "libcudart.so.11.0", "libcudart.so.13.0.1", "libcudart_like.so.13", "libtorch.so", *linked
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 123    {folder}/{name}\n" for name in names))
    knows = {f"{folder}/{name}": SimpleNamespace(path=name, cudaHostRegister=None) for name in (*names[:2], *knowing)}
    monkeypatch.setattr(platform, "_MAPS", maps)
    monkeypatch.setattr(cuda_runtime.torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_runtime.torch.cuda, "init", lambda: None)
    monkeypatch.setattr(platform, "library", lambda path: knows.get(path, object()))
    assert cuda_runtime.cuda_runtime.__wrapped__()._library.path == found


def pages_of(memory: np.ndarray) -> int:
    """Return how many pages of some memory this process has in RAM."""
    return int(platform.resident_pages(memory.ctypes.data, memory.nbytes).sum())


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="the system has no such advice")
def test_a_forked_child_gets_no_pinned_page(monkeypatch: pytest.MonkeyPatch):
    use(monkeypatch, FakeLibrary())
    memory = Arena(64 * PAGE, "a table").memory
    memory[:] = 1
    held = PinnedRecords(memory, GPU, nothing)
    held.cover(len(memory))

    def has_none() -> None:
        assert pages_of(memory) == 0

    def has_all() -> None:
        assert pages_of(memory) == 64
        assert memory.all()

    in_child(has_none)
    held.close()
    in_child(has_all)


@pytest.mark.skipif(not INTERPRETED, reason="CUDA itself fails in a forked child")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_is_told_that_its_rows_are_with_its_parent():
    layer, ids = ert.Embedding(20, 4, seed=0, device_memory=0), torch.arange(3)
    ert.place(layer, "cpu")
    before = layer(ids).detach().clone()

    def is_refused() -> None:
        said = (
            rf"on a GPU, in process {parent}, and this is its child {os.getpid()}: no GPU is of use after a fork\. Look"
        )
        for look_up in (lambda: layer(ids), lambda: layer.table.lookup([0])):
            with pytest.raises(UnsupportedError, match=said):
                look_up()

    parent = os.getpid()
    in_child(is_refused)
    torch.testing.assert_close(layer(ids).detach(), before, rtol=0, atol=0)
