"""PyTorch and Triton on an emulated GPU, whose memory is the host's: all they do there is done on the CPU, at once.

Where a graph is captured, it is recorded instead, with the addresses and numbers that it has then, and done at each
replay. PyTorch loads this itself, where ``emulate.py`` says so.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

# Operators that do as well with memory that is the host's: they ask the library for memory, or only look at it.
NATIVE = {
    *("empty", "empty_strided", "new_empty_strided", "_efficientzerotensor", "resize_", "set_"),
    *("view", "as_strided", "_reshape_alias", "unfold", "view_as_real", "view_as_complex"),
    *("record_stream", "is_pinned", "_pin_memory", "_local_scalar_dense", "is_set_to"),
}
# What a GPU adds, or takes functions of, in another way: results are rounded otherwise than on a CPU.
ROUNDED_OTHERWISE = {
    *("sum", "mean", "prod", "cumsum", "norm", "linalg_vector_norm", "_foreach_norm", "var", "std", "var_mean"),
    *("mm", "addmm", "bmm", "baddbmm", "dot", "mv", "addmv", "exp", "log", "tanh", "sigmoid", "rsqrt"),
    *("index_add", "scatter_add", "embedding_dense_backward", "_softmax", "_log_softmax"),
}
ANY_KIND = 4  # cudaMemcpyDefault
GPU = torch.device("cuda", 0)
# Some tests replace them, to see what is allocated.
_empty, _empty_strided, _from_buffer = torch.empty, torch.empty_strided, torch.frombuffer

_graphs: dict[int, list[Callable[[], Any]]] = {}  # what replays do, by number of the capture
_kept: list[Any] = []  # what would end with its last name


def install() -> None:
    """Have all that PyTorch and Triton do on the GPU done on the CPU."""
    library = ctypes.CDLL(os.environ["EMULATED_GPU"])
    library.emulator_capture.argtypes = [ctypes.c_void_p]
    library.emulator_capture.restype = ctypes.c_size_t
    library.cudaMemcpyAsync.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    on_replay = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(_replay)
    library.emulator_on_replay(on_replay)
    operators = torch.library.Library("aten", "IMPL")
    _kept.extend([library, on_replay, operators])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each of them was there before
        for name, operator in _operators():
            operators.impl(name, _on_cpu(operator), "CUDA")
        operators.impl("aten::copy_", _copy, "CUDA")
    _install_for_triton()


def _operators() -> list[tuple[str, Any]]:
    """Return the operators of PyTorch that run kernels of its own, by name."""
    dispatcher: Any = torch._C
    found = list[tuple[str, Any]]()
    for name in dispatcher._dispatch_get_registrations_for_dispatch_key("CUDA"):
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if space == "aten" and base not in NATIVE and hasattr(torch.ops.aten, base):
            found.append((name, getattr(getattr(torch.ops.aten, base), overload or "default")))
    return found


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of the same memory."""
    storage = tensor.untyped_storage()
    whole = _empty(0, dtype=torch.uint8)
    if storage.nbytes():
        memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        whole = _from_buffer(memory, dtype=torch.uint8)
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return _empty(0, dtype=tensor.dtype).set_(whole.untyped_storage(), *place)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements are at one place, so that nobody can have written to them."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.size(), strict=True))


# ------------------------------------------------------------ operators


def _on_cpu(operator: Any) -> Callable[..., Any]:
    """Return what does on the CPU what an operator does on the GPU."""
    of_tensors = [str(argument.type) == "Tensor" for argument in operator._schema.arguments]
    is_rounded = operator._schema.name.removeprefix("aten::") in ROUNDED_OTHERWISE

    def call(*args: Any, **kwargs: Any) -> Any:
        # A number that stands for a tensor came as one, which another overload takes.
        is_number = any(wants and type(arg) in (int, float, bool) for wants, arg in zip(of_tensors, args, strict=False))
        chosen = operator.overloadpacket if is_number else operator
        return _rounded_otherwise(chosen, args, kwargs) if is_rounded else chosen(*args, **kwargs)

    return lambda *args, **kwargs: _Call(call, args, kwargs).result()


def _rounded_otherwise(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what an operator calculates in float64, of float32."""
    is_float32 = any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves(args))
    if not is_float32 or "out" in kwargs:
        return operator(*args, **kwargs)

    def changed(from_dtype: torch.dtype, to: torch.dtype) -> Callable[[Any], Any]:
        def change(value: Any) -> Any:
            is_one = isinstance(value, torch.Tensor) and value.dtype == from_dtype
            return value.to(to) if is_one else to if value is from_dtype else value

        return change

    wider, narrower = changed(torch.float32, torch.float64), changed(torch.float64, torch.float32)
    return tree_map(narrower, operator(*tree_map(wider, args), **tree_map(wider, kwargs)))


class _Call:
    """A call of an operator: by aliases of the GPU's memory, which outlive the tensors, as addresses in a graph do."""

    def __init__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._call = call
        self._given: dict[int, torch.Tensor] = {}  # tensors on the GPU, by their aliases
        self._aliases: list[torch.Tensor] = []
        self._args, self._kwargs = tree_map(self._down, args), tree_map(self._down, kwargs)
        self._sizes = [alias.size() for alias in self._aliases]
        self._made: list[torch.Tensor] = []  # aliases of the results that are new

    def result(self) -> Any:
        """Make the call, or record it; return its results, on the GPU."""
        graph = _graph()
        before = [] if graph is None else [(alias, alias.clone()) for alias in self._aliases if not _is_expanded(alias)]
        results = tree_map(self._up, self._call(*self._args, **self._kwargs))
        for alias, size in zip(self._aliases, self._sizes, strict=True):
            if alias.size() != size:  # of an `out`
                _alias(self._given[id(alias)].resize_(alias.size())).copy_(alias)
        if graph is not None:  # nothing has happened yet; numbers that may be places are inside of anything
            for alias, old in before:
                alias.copy_(old)
            for alias in self._made:
                alias.zero_()
            graph.append(self._again)
        return results

    def _again(self) -> None:
        results = tree_leaves(self._call(*self._args, **self._kwargs))
        new = [result for result in results if isinstance(result, torch.Tensor) and id(result) not in self._given]
        for alias, result in zip(self._made, new, strict=True):
            alias.copy_(result)

    def _down(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not _is_on_gpu(value):
            return value
        alias = _alias(value)
        self._given[id(alias)] = value
        self._aliases.append(alias)
        return alias

    def _up(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) in self._given:
            return self._given.get(id(value), value)
        new = _empty_strided(value.size(), value.stride(), dtype=value.dtype, device=GPU)
        self._made.append(_alias(new))
        self._made[-1].copy_(value)
        return new


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy on the current stream, as the library allows it: `Tensor.copy_`."""
    mine, theirs = (_alias(one) if _is_on_gpu(one) else one for one in (to, source))
    is_plain = to.dtype == source.dtype and to.size() == source.size()
    if is_plain and to.is_contiguous() and source.is_contiguous() and to.numel():
        _copy_bytes(mine, theirs)
    elif (graph := _graph()) is not None:
        graph.append(lambda: mine.copy_(theirs))
    else:
        mine.copy_(theirs)
    if to.device.type != source.device.type and not non_blocking:
        torch.cuda.current_stream().synchronize()
    return to


def _copy_bytes(to: torch.Tensor, source: torch.Tensor) -> None:
    nbytes, graph = to.numel() * to.element_size(), _graph()
    before = to if graph is None else to.clone()
    stream = torch.cuda.current_stream().cuda_stream
    code = _kept[0].cudaMemcpyAsync(to.data_ptr(), source.data_ptr(), nbytes, ANY_KIND, stream)
    if code:
        raise RuntimeError(f"CUDA error {code}: a copy of {nbytes} bytes")
    if graph is not None:
        to.copy_(before)
        graph.append(lambda: to.copy_(source))


# ------------------------------------------------------------ graphs


def _graph() -> list[Callable[[], Any]] | None:
    """Return what the current stream's work is recorded in, if it is."""
    number = _kept[0].emulator_capture(torch.cuda.current_stream().cuda_stream)
    return _graphs.setdefault(number, []) if number else None


def _replay(number: int) -> None:
    with torch.no_grad(), np.errstate(all="ignore"):
        for call in _graphs.get(number, ()):
            call()


# ------------------------------------------------------------ Triton


def _install_for_triton() -> None:
    """Have Triton's interpreter take tensors on the GPU as they lie, and Embedrock take it for a GPU."""
    from triton.runtime import interpreter

    from embedrock.kernels.gpu import runtime

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        lowered, graph = [_lowered(arg) for arg in args], _graph()
        if graph is None:
            launch(executor, *lowered, **kwargs)
        else:
            graph.append(lambda: launch(executor, *lowered, **kwargs))

    anything: Any = interpreter
    launch = anything.GridExecutor.__call__
    anything.GridExecutor.__call__ = launched
    anything.ReduceOps.sum = _sum
    anything_of_runtime: Any = runtime
    anything_of_runtime.is_interpreted = lambda: False


def _lowered(arg: Any) -> Any:
    """Return an argument of a kernel with the GPU's memory as the CPU's."""
    if isinstance(arg, tuple):
        lowered = map(_lowered, arg)
        return type(arg)(*lowered) if hasattr(arg, "_fields") else tuple(lowered)
    return _alias(arg) if _is_on_gpu(arg) else arg


def _sum(reduce: Any, tensor: Any) -> Any:
    """Add halves to halves, as threads do: rounded otherwise than NumPy's sums."""
    values = tensor.handle.data
    if values.dtype.kind == "f":
        values = values.reshape(-1) if reduce.axis is None else np.moveaxis(values, reduce.axis, 0)
        while len(values) > 1:
            half = len(values) // 2
            values = values[:half] + values[half:]
        summed = values[0]
        if reduce.keep_dims and reduce.axis is not None:
            summed = np.expand_dims(summed, reduce.axis)
    else:
        summed = np.sum(values, axis=reduce.axis, keepdims=reduce.keep_dims)
    return reduce.to_tensor(summed, tensor.dtype)
