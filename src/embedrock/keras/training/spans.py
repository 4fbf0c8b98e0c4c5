"""Spans of `tf.profiler` around what the host does for a table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def span(work: str, tables: int = 1) -> Iterator[None]:
    """Show a piece of work, "lookup", "fetch", "sum" or "step", in the traces of `tf.profiler`."""
    with tf.profiler.experimental.Trace(f"embedrock.{work}", tables=tables):
        yield
