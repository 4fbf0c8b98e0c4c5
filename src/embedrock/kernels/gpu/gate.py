"""Whether a step may be made, decided where the gradients are: see `embedrock.device.device_errors`."""

from typing import Any, NamedTuple

import triton.language as tl

from embedrock.kernels.gpu.numbers import loaded
from embedrock.kernels.gpu.runtime import inlined, kernel, launch
from embedrock.kernels.gpu.sums import is_last

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
NONFINITE = tl.constexpr(2)
BESIDE = tl.constexpr(3)
LINE = 4  # of int32: each table's verdict begins at a multiple of 16 bytes, or kernels would be compiled for both cases
LIVE, FACTOR, FINITE = 0, 1, 2
_LINE, _FACTOR, _FINITE = tl.constexpr(LINE), tl.constexpr(FACTOR), tl.constexpr(FINITE)


class VerdictCase(NamedTuple):
    """What a step of one table is judged by, for the kernel that makes it.

    Attributes:
        number: float32 (), what stands for the gradients now.
        shown: float32 (), what was shown for them.
        fault: int64 (4,), of the table.
        tickets: int32, one zero, which it is again afterwards.
        step: the number of the step, >= 1; or where it is, int64 ().
    """

    number: Any
    shown: Any
    fault: Any
    pins: Any
    step: Any


@inlined
def _weigh(grad, shown):
    """Return what gradients are to be multiplied by, whether they are finite then, and whether they were zeroed."""
    # Gradients that are all zero stay so by any factor, but must not hide that a number is not finite.
    untouched = tl.where(grad == 0.0, 1.0, grad)
    factor = tl.where(shown != 0.0, tl.div_rn(grad, tl.where(shown != 0.0, shown, 1.0)), untouched)
    is_finite = tl.abs(shown * factor) <= FLOAT32_MAX  # false for NaN
    return factor, is_finite, (grad == 0.0) & (shown != 0.0)


@inlined
def judge_alone(number, shown, fault, pins, step):
    """Decide about a step of one table in each program that makes it; return 1 if it is made, else 0, and the factor.

    All decide alike. The last one notes what was refused, when all others have looked whether something was before.
    """
    factor, is_finite, is_dropped = _weigh(tl.load(number), tl.load(shown))
    code = tl.load(fault)
    is_good = is_finite & (code == 0)
    if is_good == 0:  # noqa: SIM102
        if is_last(pins, tl.num_programs(0) - 1):  # (of `and`, Triton would do both sides)
            first = tl.load(fault + 3)
            tl.debug_barrier()  # what was read is overwritten
            if code == 0:
                tl.store(fault, NONFINITE)
            if first == 0:
                tl.store(fault + 3, loaded(step))
    return (is_good & (is_dropped == 0)).to(tl.int32), factor


@kernel("count", "number", anywhere=("numbers", "shown"))
def _judge(numbers, shown, faults, verdicts, count, number, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    here = lane < count
    grad = tl.load(numbers + lane, mask=here, other=1.0)
    shown = tl.load(shown + lane, mask=here, other=1.0)
    factor, own, is_dropped = _weigh(grad, shown)
    fault = tl.load(faults + lane, mask=here, other=0).to(tl.pointer_type(tl.int64))
    code = tl.load(fault, mask=here, other=0)
    good = tl.min((own & (code == 0)).to(tl.int32), axis=0)
    verdict = verdicts + lane * _LINE
    tl.store(verdict, good * (is_dropped == 0).to(tl.int32), mask=here)
    tl.store(verdict + _FACTOR, factor.to(tl.int32, bitcast=True), mask=here)
    tl.store(verdict + _FINITE, own.to(tl.int32), mask=here)
    refused = here & (good == 0)
    first = tl.load(fault + 3, mask=refused, other=1)
    tl.debug_barrier()  # what was read is overwritten
    tl.store(fault, tl.where(own, BESIDE, NONFINITE).to(tl.int64), mask=refused & (code == 0))
    tl.store(fault + 3, tl.zeros_like(first) + loaded(number), mask=refused & (first == 0))


def judge(numbers, shown, faults, verdicts, number):
    """Decide for all tables of a step whether it is made: all of them step, or none.

    Args:
        numbers: float32 (k,), or () for one table: what stands for the gradients of each table now.
        shown: the same: what was shown for them.
        faults: int64 (k,), addresses of each table's fault, int64 (4,): code, what it is of, a value, and the number of
            the first step that was refused. Written where a step is refused.
        verdicts: int32 (k, LINE) receives, for each table: at `LIVE`, 1 where its rows are stepped, as all tables can
            be and its gradients were not zeroed; at `FACTOR`, the bits of what gradients are to be multiplied by,
            float32; at `FINITE`, 1 where its own gradients are finite.
        number: of the step, >= 1; or where it is, int64 ().
    """
    count, lanes = verdicts.shape[0], 1
    while lanes < count:
        lanes *= 2
    launch(_judge, 1, numbers, shown, faults, verdicts, count, number, num_warps=1, LANES=lanes)
