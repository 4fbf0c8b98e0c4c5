"""Arguments of compiled kernels: two launches share one exactly where Triton would compile one for both."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend

from embedrock.kernels.gpu.binding import Fixed, Part, bound, plain


class Numbers(NamedTuple):
    """As those of a rule are."""

    lr: Any
    steps: Any


whole = torch.zeros(64, dtype=torch.int32)
integers = 0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1, 2**63 - 16, 2**63, 2**64 - 1
tensors = *(whole[k:] for k in (0, 1, 4)), *(whole.to(dtype) for dtype in (torch.int64, torch.float32, torch.float16))
parts = Part(whole, 0, (4,), torch.int32), Part(whole, 1, (4,), torch.int32), Part(whole, 4, (2,), torch.int64)
tuples = (1, 2.0), (1, 3.0), (1, 2), Numbers(1.0, 2), Numbers(1.0, 16), Numbers(tensors[0], 1), Numbers(tensors[1], 1)
ARGUMENTS: tuple[Any, ...] = *integers, 0.5, 1.0, None, *tensors, *parts, *tuples


def as_triton_sees(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what Triton compiles a kernel for of arguments."""
    return tuple(native_specialize_impl(BaseBackend, arg, False, True, True) for arg in plain(args))


def kind(*args: Any) -> Any:
    """Return what launches are told apart by."""
    return bound(args)[0]


def test_a_kernel_is_shared_only_where_triton_would_share_it() -> None:
    for one, other in itertools.product(ARGUMENTS, repeat=2):
        is_shared = as_triton_sees((one,)) == as_triton_sees((other,))
        if kind(0.5, one, 1) == kind(0.5, other, 1):
            assert is_shared, (one, other)
            assert kind(Fixed(one)) == kind(Fixed(other)), (one, other)
        elif is_shared:  # it is looked for twice, but of two types only
            assert type(one) is not type(other), (one, other)


def test_each_address_counts() -> None:
    aligned, other = tensors[:2]
    assert len({kind(*args) for args in itertools.product((aligned, other), repeat=3)}) == 8


def test_kernels_get_addresses_and_numbers() -> None:
    tensor, part = tensors[1], parts[1]
    assert bound((tensor, 3, None, part, Fixed(part, 1), Numbers(tensor, 2.0)))[1] == (
        *(tensor.data_ptr(), 3, None, whole.data_ptr() + 4, whole.data_ptr() + 4, 1),
        (tensor.data_ptr(), 2.0),
    )
