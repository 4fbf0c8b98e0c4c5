"""The specification: every kernel as NumPy that a reader believes at sight."""

from __future__ import annotations

from reference import (
    cache,
    codec,
    device,
    directory,
    extents,
    generator,
    mapped,
    ngrams,
    packed,
    plan,
    pooling,
    pread,
    residents,
    rows,
    rules,
    storage,
    strings,
    vocabulary,
)

__all__ = [
    "cache",
    "codec",
    "device",
    "directory",
    "extents",
    "generator",
    "mapped",
    "ngrams",
    "packed",
    "plan",
    "pooling",
    "pread",
    "residents",
    "rows",
    "rules",
    "storage",
    "strings",
    "vocabulary",
]
