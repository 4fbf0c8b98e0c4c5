"""The files behind a table on disk, for tests that make them fail, or look at them."""

from __future__ import annotations

import embedrock as er
from embedrock.table.files import Files
from embedrock.table.table import rows_of


def files_of(table: er.Table) -> Files:
    """Return a table's files."""
    home = rows_of(table).home
    assert isinstance(home, Files)
    return home
