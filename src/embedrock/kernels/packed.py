"""`PackedRows`: rows of weights in 8 or 4 bits, as kernels take them."""

from typing import Any, NamedTuple


class PackedRows(NamedTuple):
    """Rows whose weights are small codes: a weight is ``code * scale``, plus an offset if there is one.

    Codes, scales and offsets are three views, of one memory or of several. Each row of a view belongs to a slot. Scales
    and offsets are words of `codec.decode`, one for each group of neighbouring columns.

    Attributes:
        codes: int8 (slots, at least dim), a code each; or uint8 (slots, at least dim / 2), two codes each from 0 to 15,
            the lower half first. With `values`, uint8 (slots, at least dim), a code each.
        scales: words (slots, at least `scale_start` plus the groups).
        offsets: words of the same kind; not read if `offset_start` is -1.
        scale_start, offset_start: columns of the first group's scale and offset.
        group: columns in a group, even for codes of 4 bits. The last group may be shorter.
        values: float32 (256,), the number of each code; None: a code is its own.
    """

    codes: Any
    scales: Any
    offsets: Any
    scale_start: int
    offset_start: int
    group: int
    values: Any = None
