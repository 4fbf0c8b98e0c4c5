"""Arrays at addresses: kernels read ids and gradients, and write outputs, where their owners have them.

So any number of arrays is one argument, a matrix of addresses. Nothing counts references to their memory: a caller
keeps all arrays alive, and where they are, until the kernel has returned.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _viewer(dtype: Any, ndim: int) -> Any:
    kind, word = types.Array(dtype, ndim, "C"), dtype.bitwidth // 8

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, shape = args[0], list(args[1 : 1 + ndim])
        size = context.get_constant(types.intp, word)
        strides = [*args[1 + ndim :], size]  # of a matrix, the bytes from row to row
        made = context.make_array(kind)(context, builder)
        made.data = builder.inttoptr(address, context.get_data_type(dtype).as_pointer())
        made.nitems = builder.mul(shape[0], shape[1]) if ndim == 2 else shape[0]
        made.itemsize = size
        made.shape, made.strides = cgutils.pack_array(builder, shape), cgutils.pack_array(builder, strides)
        made.meminfo = ir.Constant(made.meminfo.type, None)
        made.parent = ir.Constant(made.parent.type, None)
        return made._getvalue()

    if ndim == 1:

        @intrinsic
        def view(typingctx: Any, address: Any, count: Any) -> Any:
            return kind(types.intp, types.intp), generate

        return view

    @intrinsic
    def rows_view(typingctx: Any, address: Any, rows: Any, columns: Any, stride: Any) -> Any:
        return kind(*[types.intp] * 4), generate

    return rows_view


# ``int64s(address, count)`` is an array of `count` numbers.
int64s, int32s, float32s, uint8s = (
    _viewer(dtype, 1) for dtype in (types.int64, types.int32, types.float32, types.uint8)
)
# ``float32_rows(address, rows, columns, stride)`` has rows that lie `stride` bytes apart. If that is not their width,
# only `lanes` and `prefetch` find them: Numba's index takes a C-contiguous array's strides from its shape.
float32_rows = _viewer(types.float32, 2)
