"""Arrays at addresses: kernels read ids and gradients, and write outputs, where their owners have them.

So any number of arrays is one argument, a matrix of addresses. Nothing counts references to their memory: a caller
keeps all arrays alive, and where they are, until the kernel has returned.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def address_of(typingctx: Any, array: Any) -> Any:
    """Return where the first item of an array is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.make_array(array)(context, builder, args[0]).data, ir.IntType(64))

    return types.intp(array), generate


def _viewer(dtype: Any) -> Any:
    kind = types.Array(dtype, 1, "C")

    @intrinsic
    def view(typingctx: Any, address: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            made, size = (
                context.make_array(kind)(context, builder),
                context.get_constant(types.intp, dtype.bitwidth // 8),
            )
            made.data = builder.inttoptr(args[0], context.get_data_type(dtype).as_pointer())
            made.nitems, made.itemsize = args[1], size
            made.shape, made.strides = cgutils.pack_array(builder, [args[1]]), cgutils.pack_array(builder, [size])
            made.meminfo, made.parent = (ir.Constant(part.type, None) for part in (made.meminfo, made.parent))
            return made._getvalue()

        return kind(types.intp, types.intp), generate

    return view


# ``int64s(address, count)`` is the array of `count` numbers at an address.
int64s, int32s, uint8s, float32s = map(_viewer, (types.int64, types.int32, types.uint8, types.float32))
