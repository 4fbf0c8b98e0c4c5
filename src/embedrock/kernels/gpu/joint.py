"""Plans of several tables with one record layout: see ``tests/reference/device.py`` for references.

Rows of all tables share a space of keys, see `addresses`. One key before a table's rows and one after them are for ids
outside of the table. So a batch's keys are sorted and planned as if they were of one table.
"""

import triton.language as tl

from embedrock.kernels.gpu.addresses import WORDS
from embedrock.kernels.gpu.gate import raise_flag
from embedrock.kernels.gpu.plan import first_from
from embedrock.kernels.gpu.runtime import ReadyKernel, kernel, launch
from embedrock.kernels.gpu.sums import is_last

BAD_OFFSETS = tl.constexpr(4)  # error code of invalid bag starts
LANES = 1024

_WORDS = tl.constexpr(WORDS)


@kernel("n", "features")
def _join(ids, cuts, entries, keys, n, features, LANES: tl.constexpr):
    begin = tl.program_id(0) * LANES
    i, stop = begin + tl.arange(0, LANES), tl.minimum(begin + LANES, n)
    feature = features * 0
    while feature < features:
        first, last = tl.load(cuts + feature), tl.load(cuts + feature + 1)
        if (first < stop) & (last > begin):
            entry = entries + tl.load(cuts + features + 1 + feature) * _WORDS
            here = (i >= first) & (i < last)
            id = tl.load(ids + i, mask=here, other=0).to(tl.int64)  # noqa: A001
            id = tl.maximum(tl.minimum(id, tl.load(entry + 1)), -1)  # noqa: A001
            tl.store(keys + i, (tl.load(entry) + id).to(tl.int32), mask=here)
        feature += 1


def join(ids, cuts, features, tables, keys):
    """Write the keys int32 (n,) of ids (n,) of several features, one after the other.

    Args:
        ids: int64 or int32; ids outside of their table get the key before its rows, or the one after.
        cuts: int64 (at least 2 * features + 1,): first position of each feature, the last one's end, and each one's
            table.
        features: number of features.
        tables: see `addresses.DeviceTables`.
        keys: see above.
    """
    n = ids.shape[0]
    _ready_to_join.launch(-(-n // LANES), ids, cuts, tables.entries, keys, n, features)


_ready_to_join = ReadyKernel(_join, LANES=LANES)


@kernel("n", "features", "count", "tables", anywhere=("paddings", "tickets"))
def _bags(
    starts, cuts, entries, paddings, tickets, offsets, bags, words, n, features, count, tables, LANES: tl.constexpr
):
    begin = tl.program_id(0) * LANES
    i, stop = begin + tl.arange(0, LANES), begin + LANES
    feature = features * 0
    while feature < features:
        first, last = tl.load(cuts + feature), tl.load(cuts + feature + 1)
        table = tl.load(cuts + features + 1 + feature)
        more = cuts + 2 * features + 1 + feature
        bag, end = tl.load(more), tl.load(more + 1)
        size, where = tl.load(more + features + 1), starts + tl.load(more + 2 * features + 1)
        if (first < stop) & (last > begin):
            here = (i >= first) & (i < last)
            own = (i - first) // tl.maximum(size, 1)
            if size == 0:
                low = tl.zeros_like(i - first)
                own = tl.maximum(first_from(where, low, low + (end - bag), i - first + 1) - 1, 0)
            tl.store(bags + i, (bag + own).to(tl.int32), mask=here)
        if (bag < stop) & (end > begin):
            here = (i >= bag) & (i < end)
            own, length = i - bag, last - first
            at = own * size
            if size == 0:
                at = tl.load(where + own, mask=here, other=0).to(tl.int64)
                after = tl.load(where + own + 1, mask=here & (i + 1 < end), other=0).to(tl.int64)
                bad = (at < 0) | (at > tl.where(i + 1 < end, after, length)) | ((own == 0) & (at != 0))
                wrong = tl.sum((here & bad).to(tl.int32), axis=0)
                if wrong > 0:
                    tl.atomic_add(tickets + 1 + table, wrong, sem="relaxed")
                at = tl.minimum(tl.maximum(at, 0), length)
            word = tl.load(paddings + table) * 2 + tl.load(more + 3 * features + 1).to(tl.int32)
            tl.store(offsets + i, (first + at).to(tl.int32), mask=here)
            tl.store(words + i, tl.zeros([LANES], tl.int32) + word, mask=here)
        feature += 1
    tl.store(offsets + i, tl.zeros([LANES], tl.int32) + n, mask=i == count)
    if is_last(tickets, tl.num_programs(0) - 1):
        table = 0
        while table < tables:
            if tl.load(tickets + 1 + table) > 0:
                fault = tl.load(entries + table * _WORDS + 7).to(tl.pointer_type(tl.int64))
                code = tl.load(fault)
                tl.debug_barrier()  # the store overwrites the code read above
                raise_flag(fault, code == 0)
                tl.store(fault, tl.where(code == 0, BAD_OFFSETS, code))
            table += 1


def bags(starts, cuts, features, tables, paddings, tickets, offsets, bags, words):
    """Write the offsets of several features' bags, one after the other; record invalid starts.

    Args:
        starts: int64 or int32, first position of each bag within its feature, for features with bags of different
            sizes.
        cuts: int64 (6 * features + 2,): as for `join`; five more groups. First bag of each feature, and the end of the
            last. Ids of each bag of a feature, 0 if `starts` has them. First place of the feature in `starts`. 1 for
            means, else 0.
        features: number of features.
        tables: see `addresses.DeviceTables`.
        paddings: int32 (k,), the row of each table that counts in no bag, -1 for none.
        tickets: int32 (1 + k,), zeros: a counter of programs, and the invalid starts of each table.
        offsets: int32 (bags + 1,) receives the first position of each bag, and the end of the last.
        bags: int32 (n,) receives the bag of each position.
        words: int32 (bags,) receives 2 * the uncounted row of a bag, -1 for none, plus 1 for a mean.
    """
    n, count, k = bags.shape[0], words.shape[0], tables.entries.shape[0]
    args = starts, cuts, tables.entries, paddings, tickets, offsets, bags, words, n, features, count, k
    launch(_bags, -(-(max(n, count) + 1) // LANES), *args, LANES=LANES)
