"""Log-structured store of records: append-only segments, an index of rows, manifests, commits and compaction."""

from __future__ import annotations
