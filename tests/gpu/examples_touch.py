"""The kernel that shows what pinned memory gives, for compile_all.py."""

from __future__ import annotations

import torch
from touch import touch


def example_touch() -> None:
    rows = torch.zeros(4, dtype=torch.int32)
    for width in (24, 192, 384):
        for writes in (False, True):
            touch(torch.zeros(8, width), rows, writes)
