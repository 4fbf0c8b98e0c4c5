"""Checks of a step's gradients on the GPU: see `embedrock.device.device_errors`."""

from typing import Any, NamedTuple

import triton.language as tl

from embedrock.kernels.gpu.numbers import loaded
from embedrock.kernels.gpu.runtime import inlined, kernel, launch
from embedrock.kernels.gpu.sums import is_last

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
NONFINITE = tl.constexpr(2)
BESIDE = tl.constexpr(3)
LINE = 4  # int32 a verdict; a multiple of 16 bytes, or kernels would be compiled for both alignments
LIVE, FACTOR, FINITE = 0, 1, 2
_LINE, _FACTOR, _FINITE = tl.constexpr(LINE), tl.constexpr(FACTOR), tl.constexpr(FINITE)


class VerdictCase(NamedTuple):
    """Inputs of the check of one table's gradients, for the kernel of the step.

    Attributes:
        number: float32 (), current number of the gradients.
        shown: float32 (), their norm as it was shown.
        fault: int64 (4,), error of the table.
        tickets: int32, a zeroed counter, zero again afterwards.
        step: the number of the step, >= 1, or int64 () with it.
    """

    number: Any
    shown: Any
    fault: Any
    tickets: Any
    step: Any


@inlined
def _weigh(grad, shown):
    """Return the factor of gradients, whether they are finite with it, and whether they were zeroed."""
    # Zero gradients stay zero with any factor, but must not hide a nonfinite number.
    untouched = tl.where(grad == 0.0, 1.0, grad)
    factor = tl.where(shown != 0.0, tl.div_rn(grad, tl.where(shown != 0.0, shown, 1.0)), untouched)
    is_finite = tl.abs(shown * factor) <= FLOAT32_MAX  # false for NaN
    return factor, is_finite, (grad == 0.0) & (shown != 0.0)


@inlined
def judge_alone(number, shown, fault, tickets, step):
    """Check the gradients of one table in each program of its step; return 1 or 0, and the factor.

    All programs decide alike. The last one records a refusal, after all others have read the old error.
    """
    factor, is_finite, is_dropped = _weigh(tl.load(number), tl.load(shown))
    code = tl.load(fault)
    is_good = is_finite & (code == 0)
    if is_good == 0:  # noqa: SIM102
        if is_last(tickets, tl.num_programs(0) - 1):  # (Triton would evaluate both sides of `and`)
            first = tl.load(fault + 3)
            tl.debug_barrier()  # the stores overwrite the words read above
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
    tl.debug_barrier()  # the stores overwrite the words read above
    tl.store(fault, tl.where(own, BESIDE, NONFINITE).to(tl.int64), mask=refused & (code == 0))
    tl.store(fault + 3, tl.zeros_like(first) + loaded(number), mask=refused & (first == 0))


def judge(numbers, shown, faults, verdicts, number):
    """Check the gradients of all tables of a step: either all of them step, or none.

    Args:
        numbers: float32 (k,), or () for one table: current number of each table's gradients.
        shown: the same: their norms as they were shown.
        faults: int64 (k,), addresses of each table's error, int64 (4,): code, number, value, first refused step. A
            refused step writes it.
        verdicts: int32 (k, LINE) receives three words for each table. `LIVE`: 1 if its rows are stepped, as all tables
            can be and its gradients were not zeroed. `FACTOR`: the bits of the gradients' factor, float32. `FINITE`: 1
            if its own gradients are finite.
        number: of the step, >= 1, or int64 () with it.
    """
    count = verdicts.shape[0]
    lanes = 1 << (count - 1).bit_length()
    launch(_judge, 1, numbers, shown, faults, verdicts, count, number, num_warps=1, LANES=lanes)
