"""Reductions over a row, in eight explicit lanes.

LLVM may not reorder a floating-point sum, so a plain loop runs one addition at a time (45 against 9 nanoseconds for 64
columns). Lanes written out give it eight sums that it may not mix: the same bits on every machine, whatever the width
of its vectors.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
_WORD, _DOUBLE = ir.IntType(64), ir.DoubleType()
_FLOATS, _DOUBLES = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_DOUBLE, LANES)


@intrinsic
def square_sum(typingctx: Any, row: Any) -> Any:
    """Return the sum of squares of a contiguous float32 row, in float64."""
    if not (isinstance(row, types.Array) and row.dtype == types.float32 and row.ndim == 1 and row.layout == "C"):
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        size = builder.extract_value(array.shape, 0)
        whole = builder.and_(size, ir.Constant(_WORD, -LANES))
        sums = cgutils.alloca_once_value(builder, ir.Constant(_DOUBLES, [0.0] * LANES))
        with cgutils.for_range_slice(builder, ir.Constant(_WORD, 0), whole, ir.Constant(_WORD, LANES), _WORD) as (d, _):
            block = builder.bitcast(builder.gep(array.data, [d]), _FLOATS.as_pointer())
            _add_square(builder, sums, builder.fpext(builder.load(block, align=4), _DOUBLES))
        rest = cgutils.alloca_once_value(builder, ir.Constant(_DOUBLE, 0.0))
        with cgutils.for_range_slice(builder, whole, size, ir.Constant(_WORD, 1), _WORD) as (d, _):
            _add_square(builder, rest, builder.fpext(builder.load(builder.gep(array.data, [d])), _DOUBLE))
        return builder.fadd(_pairwise(builder, builder.load(sums)), builder.load(rest))

    return types.float64(row), generate


def _add_square(builder: Any, total: Any, value: Any) -> None:
    builder.store(builder.fadd(builder.load(total), builder.fmul(value, value)), total)


def _pairwise(builder: Any, vector: Any) -> Any:
    parts = [builder.extract_element(vector, ir.Constant(ir.IntType(32), k)) for k in range(LANES)]
    while len(parts) > 1:
        parts = [builder.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
