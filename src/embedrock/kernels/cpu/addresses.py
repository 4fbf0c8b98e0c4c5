"""Arrays at addresses: kernels read ids and gradients, and write outputs, where their owners have them.

So any number of arrays is one argument, a matrix of addresses. Nothing counts references to their memory: a caller
keeps all arrays alive, and where they are, until the kernel has returned.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from embedrock.kernels.cpu.runtime import kernel

# Where NumPy's objects have the address of their data, number of dimensions, and addresses of shape and strides. Any
# compiled extension reads them there. Asking an array by `__array_interface__` takes a microsecond.
HEADER = object.__basicsize__


@intrinsic
def address_of(typingctx: Any, array: Any) -> Any:
    """Return where the first item of an array is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.make_array(array)(context, builder, args[0]).data, ir.IntType(64))

    return types.intp(array), generate


def _view(kind: types.Array) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(kind)(context, builder)
        size = context.get_constant(types.intp, kind.dtype.bitwidth // 8)
        made.data = builder.inttoptr(args[0], context.get_data_type(kind.dtype).as_pointer())
        made.nitems, made.itemsize = args[1], size
        made.shape, made.strides = cgutils.pack_array(builder, [args[1]]), cgutils.pack_array(builder, [size])
        made.meminfo, made.parent = (ir.Constant(part.type, None) for part in (made.meminfo, made.parent))
        return made._getvalue()

    return generate


def _viewer(dtype: Any) -> Any:
    kind = types.Array(dtype, 1, "C")
    return intrinsic(lambda typingctx, address, count: (kind(types.intp, types.intp), _view(kind)))


@intrinsic
def words_at(typingctx: Any, address: Any, count: Any, like: Any) -> Any:
    """Return the array of `count` numbers at an address, of the dtype of another array."""
    kind = types.Array(like.dtype, 1, "C")
    return kind(types.intp, types.intp, like), _view(kind)


# ``int64s(address, count)`` is the array of `count` numbers at an address.
int64s, int32s, uint8s, float32s = map(_viewer, (types.int64, types.int32, types.uint8, types.float32))


@kernel()
def read_sources(objects, sources):
    """Write the address and the number of items of each array: int64 (arrays, 2). `objects` are the arrays' ``id``."""
    for k in range(objects.shape[0]):
        header, count = int64s(objects[k] + HEADER, 4), 1
        for size in int64s(header[2], int32s(objects[k] + HEADER + 8, 1)[0]):
            count *= size
        sources[k, 0], sources[k, 1] = header[0], count


@kernel()
def read_places(objects, begins, places):
    """Write where the rows of each feature are, address and stride in bytes: int64 (features, 2).

    A feature has an array of its own in `objects`, by ``id``, or begins so many bytes after the start of the only one.
    """
    for k in range(places.shape[0]):
        is_own = begins.shape[0] == 0
        header = int64s(objects[k if is_own else 0] + HEADER, 4)
        places[k, 0] = header[0] + (0 if is_own else begins[k])
        places[k, 1] = int64s(header[3], 1)[0]
