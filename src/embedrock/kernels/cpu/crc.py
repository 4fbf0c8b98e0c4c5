"""CRC-32 of words while they are copied, equal to ``zlib.crc32`` of their bytes."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from embedrock.kernels.cpu.runtime import inlined

POLYNOMIAL = 0x04C11DB7
ALL_ONES = np.uint32(0xFFFFFFFF)
LANE_WORDS, LANES = 4, 4  # the processor multiplies lanes of 128 bits
CHUNK_WORDS = LANES * LANE_WORDS


def _make_tables() -> np.ndarray:
    # tables[k, b]: the CRC-32 of byte b followed by k zero bytes (Kounavis and Berry, "Slicing-by-16").
    tables = np.zeros((16, 256), np.uint32)
    tables[0] = np.arange(256)
    for _ in range(8):
        tables[0] = np.where(tables[0] & 1, (tables[0] >> 1) ^ np.uint32(0xEDB88320), tables[0] >> 1)
    for k in range(1, 16):
        tables[k] = (tables[k - 1] >> 8) ^ tables[0][tables[k - 1] & 255]
    return tables


_TABLES = _make_tables()


@inlined
def _slice(word, zeros):
    low = _TABLES[zeros + 3, word & np.uint32(255)] ^ _TABLES[zeros + 2, (word >> np.uint32(8)) & np.uint32(255)]
    return low ^ _TABLES[zeros + 1, (word >> np.uint32(16)) & np.uint32(255)] ^ _TABLES[zeros, word >> np.uint32(24)]


@inlined
def _begin(low, high):
    return _slice(low ^ ALL_ONES, 4) ^ _slice(high, 0)


@inlined
def _copy_rest(source, target, first, crc):
    count = target.shape[0]
    whole = first + (count - first) // 4 * 4
    for k in range(first, whole, 4):
        a, b, c, d = source[k], source[k + 1], source[k + 2], source[k + 3]
        crc = _slice(a ^ crc, 12) ^ _slice(b, 8) ^ _slice(c, 4) ^ _slice(d, 0)
        target[k], target[k + 1], target[k + 2], target[k + 3] = a, b, c, d
    for k in range(whole, count):
        crc = _slice(source[k] ^ crc, 0)
        target[k] = source[k]
    return crc ^ ALL_ONES


@inlined
def copy_by_tables(source, target, low, high):
    """Copy words uint32 and return the CRC-32 of an id (as two words) and the words.

    It runs at 2.2 GB/s for records of 768 bytes.
    """
    return _copy_rest(source, target, 0, _begin(low, high))


# ---------------------------------------------------------------- by carry-less products

# Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009). A lane of 128
# bits that stands n bits before another can be replaced by two products, added to the other lane. They are the products
# of its halves with x^(n+32) and x^(n-32) modulo the polynomial. So four lanes run over the words in step, and are
# reduced to one with the same CRC as all words before it.


def _power(n: int) -> int:
    # x^n modulo the polynomial, with reversed bits like the data.
    power = 1
    for _ in range(n):
        power <<= 1
        power ^= (1 << 32 | POLYNOMIAL) if power >> 32 else 0
    return int(f"{power:032b}"[::-1], 2) << 1


_I8, _I32, _WORD, _LANE = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.VectorType(ir.IntType(64), 2)


def _factors(distance_words: int) -> ir.Constant:
    bits = 32 * distance_words
    return ir.Constant(_LANE, [_WORD(_power(bits + 32)), _WORD(_power(bits - 32))])


class _Lanes:
    """Code generator of `_fold` for one call."""

    def __init__(self, builder: Any, source: Any, target: Any) -> None:
        self._builder, self._source, self._target = builder, source, target
        kind = ir.FunctionType(_LANE, [_LANE, _LANE, _I8])
        self._multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.pclmulqdq")

    def copied(self, index: Any) -> Any:
        builder, places = self._builder, []
        for data in (self._source, self._target):
            start = builder.gep(data, [builder.mul(index, _WORD(LANE_WORDS))])
            places.append(builder.bitcast(start, _LANE.as_pointer()))
        lane = builder.load(places[0], align=4)
        builder.store(lane, places[1], align=4)
        return lane

    def folded(self, lane: Any, factors: ir.Constant, onto: Any) -> Any:
        """Return the sum of a lane and an earlier one, moved by the distance that the factors encode."""
        builder, halves = self._builder, (_I8(half) for half in (0x00, 0x11))
        low, high = (builder.call(self._multiply, [lane, factors, half]) for half in halves)
        return builder.xor(builder.xor(low, high), onto)

    def run(self, chunks: Any, crc: Any) -> Any:
        """Copy all chunks, and return one lane with their CRC."""
        builder = self._builder
        numbers = [_WORD(k) for k in range(LANES)]
        lanes = [cgutils.alloca_once_value(builder, self.copied(number)) for number in numbers]
        start = builder.insert_element(ir.Constant(_LANE, None), builder.zext(crc, _WORD), _I32(0))
        builder.store(builder.xor(builder.load(lanes[0]), start), lanes[0])
        one = _WORD(1)
        with cgutils.for_range_slice(builder, one, chunks, one, _WORD) as (chunk, _):
            first = builder.mul(chunk, _WORD(LANES))
            for number, lane in zip(numbers, lanes, strict=True):
                data = self.copied(builder.add(first, number))
                builder.store(self.folded(builder.load(lane), _factors(CHUNK_WORDS), data), lane)
        whole = builder.load(lanes[0])
        for lane in lanes[1:]:
            whole = self.folded(whole, _factors(LANE_WORDS), builder.load(lane))
        return whole


@intrinsic
def _fold(typingctx: Any, source: Any, target: Any, chunks: Any, crc: Any) -> Any:
    """Copy `chunks` chunks, at least one; return two words, 16 bytes, with the same CRC."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = [context.make_array(signature.args[k])(context, builder, args[k]).data for k in (0, 1)]
        whole = _Lanes(builder, *data).run(args[2], args[3])
        halves = [builder.extract_element(whole, _I32(k)) for k in (0, 1)]
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(types.uint64, 2)(source, target, types.intp, types.uint32), generate


@inlined
def copy_by_products(source, target, low, high):
    """Copy as `copy_by_tables`, on processors with the instruction."""
    crc, chunks = _begin(low, high), target.shape[0] // CHUNK_WORDS
    if chunks:
        a, b = _fold(source, target, chunks, crc)
        crc = _slice(np.uint32(a), 12) ^ _slice(np.uint32(a >> np.uint64(32)), 8)
        crc ^= _slice(np.uint32(b), 4) ^ _slice(np.uint32(b >> np.uint64(32)), 0)
    return _copy_rest(source, target, chunks * CHUNK_WORDS, crc)


def has_products() -> bool:
    """Return whether kernels are compiled for a processor that multiplies without carries."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+pclmul" in features.split(",")


copy = copy_by_products if has_products() else copy_by_tables
