"""Checks of a step's gradients on the GPU: see `embedrock.device.device_errors`."""

from typing import Any, NamedTuple

import triton.language as tl

from embedrock.kernels.gpu.addresses import WORDS
from embedrock.kernels.gpu.runtime import inlined, kernel, launch, loaded
from embedrock.kernels.gpu.sums import is_last

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
NONFINITE = tl.constexpr(2)
BESIDE = tl.constexpr(3)
LINE = 4  # int32 a verdict; a multiple of 16 bytes, or kernels would be compiled for both alignments
LIVE, FACTOR, FINITE = 0, 1, 2
_LINE, _FACTOR, _FINITE = tl.constexpr(LINE), tl.constexpr(FACTOR), tl.constexpr(FINITE)
_WORDS, _FAULT = tl.constexpr(WORDS), tl.constexpr(7)  # of an entry


class VerdictCase(NamedTuple):
    """Inputs of the check of a step's gradients, for the kernels of the step. They all decide alike.

    Attributes:
        numbers: float32, current number of each table's gradients; or the first of them, if the others follow it. Or
            int32 (tables, LINE), their verdicts by `judge`, without `shown`.
        shown: the same of their norms as they were shown.
        first, stop: the first of the checked tables, and the one after the last.
        ticket: int32, a zeroed counter, zero again afterwards; None: another launch records a refusal.
        step: the number of the step, >= 1, or int64 () with it.
    """

    numbers: Any
    shown: Any
    first: int
    stop: int
    ticket: Any
    step: Any


@inlined
def _check(numbers, shown, fault, lane, here):
    """Return whether a step is made; of each table, its verdict (see `judge`), and the code of its error."""
    grad, known = tl.load(numbers + lane, mask=here, other=1.0), tl.load(shown + lane, mask=here, other=1.0)
    # Zero gradients stay zero with any factor, but must not hide a nonfinite number.
    untouched = tl.where(grad == 0.0, 1.0, grad)
    factor = tl.where(known != 0.0, tl.div_rn(grad, tl.where(known != 0.0, known, 1.0)), untouched)
    is_dropped = (grad == 0.0) & (known != 0.0)  # as of `grad.zero_()`, which also mends NaN and Inf
    own = is_dropped | (tl.abs(known * factor) <= FLOAT32_MAX)  # NaN is not finite
    code = tl.load(fault, mask=here, other=0)
    good = tl.min((own & (code == 0)).to(tl.int32), axis=0)
    live = good * (here & (is_dropped == 0)).to(tl.int32)
    return good, live, factor.to(tl.int32, bitcast=True), own, code


@inlined
def raise_flag(fault, here):
    """Raise the flags in RAM of errors int64 (4,), which their second words have the addresses of; 0: none."""
    flag = tl.load(fault + 1, mask=here, other=0)
    tl.store(flag.to(tl.pointer_type(tl.int64)), tl.zeros_like(flag) + 1, mask=here & (flag != 0))


@inlined
def _refuse(fault, code, own, refused, step):
    """Record a refused step in the errors of its tables."""
    first = tl.load(fault + 3, mask=refused, other=1)
    raise_flag(fault, refused & (code == 0))
    tl.debug_barrier()  # the stores overwrite the words read above
    tl.store(fault, tl.where(own, BESIDE, NONFINITE).to(tl.int64), mask=refused & (code == 0))
    tl.store(fault + 3, tl.zeros_like(first) + loaded(step), mask=refused & (first == 0))


@inlined
def verdicts_of(verdicts, shown, begin, end, ticket, step, entries, LANES: tl.constexpr):
    """Return `LIVE` and `FACTOR` of neighbouring tables, in each program of their step.

    For the first arguments see `VerdictCase`. All programs decide alike. The last one records a refusal, after all
    others have read the old errors.
    """
    lane = tl.arange(0, LANES)
    here = lane < end - begin
    if shown is None:
        live = tl.load(verdicts + lane * _LINE, mask=here, other=0)
        factor = tl.load(verdicts + lane * _LINE + _FACTOR, mask=here, other=0)
    else:
        fault = tl.load(entries + (begin + lane) * _WORDS + _FAULT, mask=here, other=0).to(tl.pointer_type(tl.int64))
        good, live, factor, own, code = _check(verdicts, shown, fault, lane, here)
        if ticket is not None:  # noqa: SIM102  # (Triton would evaluate both sides of `and`)
            if good == 0:  # noqa: SIM102
                if is_last(ticket, tl.num_programs(0) - 1):
                    _refuse(fault, code, own, here, step)
    return live, factor


@inlined
def verdict_of(table, live, factor, LANES: tl.constexpr):
    """Return of one table whether it is stepped, and the factor of its gradients."""
    mine = tl.arange(0, LANES) == table
    bits = tl.sum(tl.where(mine, factor, 0), axis=0)
    return tl.sum(tl.where(mine, live, 0), axis=0) != 0, bits.to(tl.float32, bitcast=True)


@kernel("count", "number", anywhere=("numbers", "shown"))
def _judge(numbers, shown, faults, verdicts, count, number, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    here = lane < count
    fault = tl.load(faults + lane, mask=here, other=0).to(tl.pointer_type(tl.int64))
    good, live, factor, own, code = _check(numbers, shown, fault, lane, here)
    verdict = verdicts + lane * _LINE
    tl.store(verdict, live, mask=here)
    tl.store(verdict + _FACTOR, factor, mask=here)
    tl.store(verdict + _FINITE, own.to(tl.int32), mask=here)
    _refuse(fault, code, own, here & (good == 0), number)


def judge(numbers, shown, faults, verdicts, number):
    """Check the gradients of all tables of a step: either all of them step, or none.

    Args:
        numbers: float32 (k,), or () for one table: current number of each table's gradients.
        shown: the same: their norms as they were shown.
        faults: int64 (k,), addresses of each table's error, int64 (4,): code, address of the flag in RAM (0: none),
            value, first refused step. A refused step writes it.
        verdicts: int32 (k, LINE) receives three words for each table. `LIVE`: 1 if its rows are stepped, as all tables
            can be and its gradients were not zeroed. `FACTOR`: the bits of the gradients' factor, float32. `FINITE`: 1
            if its own gradients are finite.
        number: of the step, >= 1, or int64 () with it.
    """
    count = verdicts.shape[0]
    lanes = 1 << (count - 1).bit_length()
    launch(_judge, 1, numbers, shown, faults, verdicts, count, number, num_warps=1, LANES=lanes)
