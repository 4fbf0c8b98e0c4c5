"""Objects in notebooks: the names to complete, and a table of facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from html import escape


class PublicNames:
    """Base of classes with names for other parts of the library, which `dir` leaves out: patterns in `_unlisted`."""

    def __dir__(self) -> list[str]:
        patterns = " ".join(vars(kind).get("_unlisted", "") for kind in type(self).__mro__).split()
        return [name for name in super().__dir__() if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def html_table(caption: str, lines: Iterable[Sequence[object]]) -> str:
    """Return a table in HTML. It has no colours of its own, so that light and dark notebooks show it in theirs."""
    rows = ("".join(f"<td>{escape(str(cell))}</td>" for cell in line) for line in lines)
    return f"<table><caption>{escape(caption)}</caption>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
