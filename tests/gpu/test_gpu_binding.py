"""Arguments of compiled kernels: two launches share one exactly where Triton would compile one for both."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.backends.nvidia.driver import CudaLauncher

from embedrock.kernels.gpu.binding import TensorPart, binder, launcher, plain
from embedrock.kernels.gpu.runtime import straight


class Numbers(NamedTuple):
    """As those of a rule are."""

    lr: Any
    steps: Any


whole = torch.zeros(64, dtype=torch.int32)
integers = 0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1, 2**63 - 16, 2**63, 2**64 - 1
tensors = *(whole[k:] for k in (0, 1, 4)), *(whole.to(dtype) for dtype in (torch.int64, torch.float32, torch.float16))
parts = (
    TensorPart(whole, 0, (4,), torch.int32),
    TensorPart(whole, 1, (4,), torch.int32),
    TensorPart(whole, 4, (2,), torch.int64),
)
tuples = (1, 2.0), (1, 3.0), (1, 2), Numbers(1.0, 2), Numbers(1.0, 16), Numbers(tensors[0], 1), Numbers(tensors[1], 1)
ARGUMENTS: tuple[Any, ...] = *integers, 0.5, 1.0, None, *tensors, *parts, *tuples


def as_triton_sees(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what Triton compiles a kernel for of arguments."""
    return tuple(native_specialize_impl(BaseBackend, arg, False, True, True) for arg in plain(args))


def bound(*args: Any) -> Any:
    """Return the specialization of arguments, and the arguments for kernels."""
    return binder((*map(type, args),))(*args)


def kind(*args: Any) -> Any:
    """Return what launches are told apart by."""
    return bound(*args)[0]


def test_a_kernel_is_shared_only_where_triton_would_share_it() -> None:
    for one, other in itertools.product(ARGUMENTS, repeat=2):
        is_shared = as_triton_sees((one,)) == as_triton_sees((other,))
        if kind(0.5, one, 1) == kind(0.5, other, 1):
            assert is_shared, (one, other)
        elif is_shared:  # it is looked for twice, but of two types only
            assert type(one) is not type(other), (one, other)


def test_each_address_counts() -> None:
    aligned, other = tensors[:2]
    assert len({kind(*args) for args in itertools.product((aligned, other), repeat=3)}) == 8


def test_kernels_get_addresses_and_numbers() -> None:
    tensor, part = tensors[1], parts[1]
    assert bound(tensor, 3, None, part, Numbers(tensor, 2.0))[1] == (
        *(tensor.data_ptr(), 3, None, whole.data_ptr() + 4),
        (tensor.data_ptr(), 2.0),
    )


class Launched:
    """What `launcher` makes of arguments of some types, with what was told of launches."""

    def __init__(self, args: tuple[Any, ...], varying: list[bool]) -> None:
        self.compiled: dict[Any, Any] = {}
        self.anew: list[Any] = []
        self.calls: list[Any] = []
        hooks, types = SimpleNamespace(launch_enter_hook=None), tuple(map(type, args))
        self.hooks = hooks
        self.launch = launcher(types, varying, compiled=self.compiled, hooks=hooks, anew=self._note)

    def _note(self, key: Any, grid: int, args: tuple[Any, ...]) -> None:
        self.anew.append((grid, args))
        self.compiled[key] = lambda *call: self.calls.append(call), lambda device: ("stream", device), ("handle",), (9,)


def test_what_was_compiled_is_launched_with_addresses_and_constants() -> None:
    args = tensors[0], 3, parts[1], 1, Numbers(0.5, 2.0)
    made = Launched(args, [True] * 6)
    made.launch(7, *args)
    made.launch(8, *args)
    assert made.anew == [(7, args)]
    device, address = tensors[0].get_device(), tensors[0].data_ptr()
    values = address, 3, whole.data_ptr() + 4, 1, (0.5, 2.0), 9
    assert made.calls == [(8, 1, 1, ("stream", device), "handle", *values)]
    made.hooks.launch_enter_hook = print  # somebody watches
    made.launch(9, *args)
    assert len(made.anew) == 2


def test_integers_that_vary_share_a_kernel_where_their_types_are_the_same() -> None:
    made = Launched((tensors[0], 1, 1), [False, True, False])
    for number in (1, 2, 16, 2**31 - 1, -1, -16, 2**31, 2**62):
        made.launch(1, tensors[0], number, 3)
    assert [args[1] for _, args in made.anew] == [1, 2**31]
    for number in (1, 16, 3, 5, 32):
        made.launch(1, tensors[0], 7, number)
    assert [args[2] for _, args in made.anew[2:]] == [1, 16]


# Since Triton 3.8 a launcher takes a kernel's arguments as one tuple, and is called itself.
takes_arguments = pytest.mark.skipif(
    "kernel_metadata" in inspect.signature(CudaLauncher.__call__).parameters, reason="Triton's launcher is another kind"
)


def launcher_of(scratch: int) -> Any:
    """Return a launcher of Triton's that launches nothing, of a kernel that wants so many bytes."""
    made: Any = object.__new__(CudaLauncher)
    sizes = {"global_scratch_size": scratch, "global_scratch_align": 1}
    sizes |= {"profile_scratch_size": 0, "profile_scratch_align": 1}
    vars(made).update(sizes, num_ctas=1, launch_cooperative_grid=False, launch_pdl=True, calls=[])
    made.launch = lambda *call: made.calls.append(call)
    return made


@takes_arguments
def test_kernels_are_launched_below_what_triton_asks_at_each_launch() -> None:
    launcher, handles = launcher_of(0), ("function", "metadata", None, None, None)
    run, first = straight(launcher, handles)
    assert run is launcher.launch
    assert not launcher.calls  # while it was found out
    launcher(7, 1, 1, 5, *handles, 3, 4.0)
    run(7, 1, 1, 5, *first, 3, 4.0)
    assert launcher.calls[0] == launcher.calls[1]


@takes_arguments
def test_a_kernel_that_wants_memory_is_launched_by_triton() -> None:
    launcher, handles = launcher_of(16), ("function", "metadata", None, None, None)
    assert straight(launcher, handles) == (launcher, handles)


@takes_arguments
def test_a_launcher_of_another_kind_is_called_itself() -> None:
    def launcher(*call: Any) -> None: ...

    assert straight(launcher, ("function",)) == (launcher, ("function",))
    wrapped = launcher_of(0)
    wrapped.launch_pdl = object()  # something that may differ from launch to launch
    assert straight(wrapped, ("function",)) == (wrapped, ("function",))
