"""`Tables`: those of a learner together, whether they are a group or shared out over processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Protocol

from embedrock.table.group import Group
from embedrock.table.storage import UncommittedWarning

Numbers = dict[str, Any]


class Tables(Protocol):
    """The tables of a learner."""

    def stats(self) -> Numbers:
        """Return numbers about all of them together."""
        ...

    def each(self) -> list[Numbers]:
        """Return numbers about each, in the order of the features that they are for."""
        ...

    def close(self) -> None:
        """Give them back. What no checkpoint has is lost, which is said elsewhere."""
        ...


class GroupTables:
    """Tables in a group: `Tables`."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def stats(self) -> Numbers:
        """Return numbers about all of them together."""
        return self._group.stats()

    def each(self) -> list[Numbers]:
        """Return numbers about each."""
        return [self._group[name].stats() for name in self._group]

    def close(self) -> None:
        """Give them back."""
        close_all([self._group])


def close_all(tables: Iterable[Any]) -> None:
    """Close tables or groups, whether or not they were committed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncommittedWarning)
        for table in tables:
            table.close()
