"""A kernel that reads and writes records, and does nothing else: the most that host memory can give."""

# Triton takes annotations for its own
from __future__ import annotations

from typing import Any

import triton.language as tl

from embedrock.kernels.gpu.runtime import RecordForm, kernel, launch


@kernel("count")
def _touch_records(
    rows, records, count, WIDTH: tl.constexpr, WRITES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + number, mask=number < count, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    here = (number < count)[:, None] & (column < WIDTH)
    place = records + row[:, None] * WIDTH + column
    values = tl.load(place, mask=here, other=0.0) + 1.0
    # Without a store nothing would be read: of records that are only read, one that never happens.
    tl.store(place, values, mask=here if WRITES else here & (values < 0.0))


def touch(records: Any, rows: Any, writes: bool) -> None:
    """Read different `rows` of `records` float32 (n, width), which are not negative, and write them if asked to."""
    width = records.shape[1]
    part = RecordForm(width, "float32", 4 * width, width, 0).tiled()
    constexprs = {"WIDTH": width, "WRITES": writes, "ROWS": part.rows, "BLOCK": part.block}
    args = rows, records, len(rows)  # first what is on the GPU, whose stream it is
    launch(_touch_records, -(-len(rows) // part.rows), *args, **constexprs, num_warps=part.warps)
