"""`Buffers`: memory that is handed out again once no array uses it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from embedrock.system import buffers as module
from embedrock.system.buffers import Buffers, buffers

SHAPE = (300, 64)  # of float32: 75 KiB


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_is_used_again_once_no_array_uses_it() -> None:
    made = Buffers()
    first = made.empty(SHAPE, np.float32)
    first[:] = 1.0
    second = made.empty(SHAPE, np.float32)
    second[:] = 2.0
    assert (first == 1.0).all()
    assert address(first) != address(second)
    where, view = address(first), first[1:].view(np.int32)
    del first
    assert address(made.empty(SHAPE, np.float32)) != where  # a view of it is there still
    assert (view.view(np.float32) == 1.0).all()
    del view
    assert address(made.empty(SHAPE, np.float32)) == where


def test_copies_have_memory_of_their_own() -> None:
    made, given = Buffers(), np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)[:, ::2]
    copy = made.copy(given)
    assert np.array_equal(copy, given)
    assert copy.flags.c_contiguous
    assert not np.shares_memory(copy, given)


def test_batches_of_about_a_size_share_memory() -> None:
    made = Buffers()
    where = address(made.empty((3100, 64), np.float32))
    assert address(made.empty((3110, 64), np.float32)) == where
    assert address(made.empty((3110 * 32,), np.int64)) == where
    assert address(made.empty((9000, 64), np.float32)) != where


@pytest.mark.parametrize("rows", [300, 1000, 3306, 8192, 65_536])
def test_arrays_begin_where_tensorflow_takes_them_as_they_are(rows: int) -> None:
    made = buffers.empty((rows, 64), np.float32)
    assert (made.shape, made.dtype, address(made) % 64) == ((rows, 64), np.float32, 0)
    assert made.flags.c_contiguous
    assert made.flags.writeable


@pytest.mark.parametrize("shape", [(), (0, 4), (3, 4), (module.MOST_BYTES // 4 + 1,)], ids=str)
def test_the_smallest_and_the_largest_are_numpys(shape: tuple[int, ...]) -> None:
    made = Buffers()
    assert made.empty(shape, np.float32).shape == shape
    assert not made._kept


def test_what_is_kept_is_bounded() -> None:
    made = Buffers()
    arrays = [made.empty((module.MOST_BYTES // 4,), np.float32) for _ in range(10)]
    for k, array in enumerate(arrays):
        array[:] = k
    assert made._bytes == sum(memory.nbytes for memory, _ in made._kept) <= module.KEPT_BYTES
    assert all((array == k).all() for k, array in enumerate(arrays))  # whoever has what is not kept any more has it


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_shares_none_with_its_parent() -> None:
    made = Buffers()
    array = made.empty(SHAPE, np.float32)
    array[:] = 1.0
    child = os.fork()
    if not child:
        made.empty(SHAPE, np.float32)[:] = 2.0
        os._exit(int(not (array == 1.0).all()))
    assert os.waitpid(child, 0)[1] == 0
    assert (array == 1.0).all()
