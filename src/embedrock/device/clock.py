"""`BatchCounter`: the numbers of batches."""

from __future__ import annotations

FIRST_STAMP = 1 << 16  # 0, that of rows that were never used, has to look long ago


class BatchCounter:
    """The numbers of batches: of those of one table, or of all tables that share a cache.

    Attributes:
        stamp: of the last batch.
        begun: stamp of the first lookup since the last step.
        tables: how many look rows up between two steps.
    """

    def __init__(self) -> None:
        self.stamp, self.begun, self.tables = FIRST_STAMP, FIRST_STAMP + 1, 1

    def oldest(self, kept: int) -> int:
        """Return the stamp of the oldest lookup since the last step, of at most `kept` of each table."""
        return max(self.begun, self.stamp - kept * self.tables)
