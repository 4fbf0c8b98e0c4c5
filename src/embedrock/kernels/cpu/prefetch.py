"""Software prefetch: loads of memory into the cache before use."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

CACHE_LINE = 64


def emit_prefetch(builder: Any, start: Any, nbytes: Any, for_writing: int = 0) -> None:
    """Emit LLVM code that prefetches all cache lines of `nbytes` bytes from address `start` on."""
    word, i32 = ir.IntType(64), ir.IntType(32)
    pointer = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    line = ir.Constant(word, CACHE_LINE)
    first, end = builder.and_(start, ir.Constant(word, -CACHE_LINE)), builder.add(start, nbytes)
    with cgutils.for_range_slice(builder, first, end, line, word) as (place, _):
        address = builder.inttoptr(place, pointer)
        builder.call(function, [address, i32(for_writing), i32(3), i32(1)])


def _prefetch(for_writing: int) -> Any:
    @intrinsic
    def prefetch_row(typingctx: Any, rows: Any, index: Any, nbytes: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            stride = builder.extract_value(array.strides, 0)
            start = builder.add(builder.ptrtoint(array.data, ir.IntType(64)), builder.mul(args[1], stride))
            emit_prefetch(builder, start, args[2], for_writing)
            return context.get_dummy_value()

        return types.void(rows, types.intp, types.intp), generate

    return prefetch_row


# Prefetch the first `nbytes` of ``rows[index]`` (2-D, C-contiguous). Memory that another core will write next must not
# be prefetched for writing.
prefetch, prefetch_to_write = _prefetch(0), _prefetch(1)


def _prefetch_at(for_writing: int) -> Any:
    @intrinsic
    def prefetch_bytes(typingctx: Any, address: Any, nbytes: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit_prefetch(builder, *args, for_writing)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return prefetch_bytes


# Prefetch `nbytes` from an address on.
prefetch_at, prefetch_to_write_at = _prefetch_at(0), _prefetch_at(1)
