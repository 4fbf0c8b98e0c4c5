"""What a notebook shows of an object: names to complete, and a table of facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from html import escape
from typing import ClassVar


class PublicNames:
    """Base of classes with names for other parts of the library: `dir`, and so completion, leaves these out.

    Attributes:
        _unlisted: patterns of the names, apart by spaces. Those of all base classes count.
    """

    _unlisted: ClassVar[str] = ""

    def __dir__(self) -> list[str]:
        patterns = " ".join(vars(kind).get("_unlisted", "") for kind in type(self).__mro__).split()
        return [name for name in super().__dir__() if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def html_table(caption: str, lines: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Return a table in HTML. It has no colours of its own, so that light and dark notebooks show it in theirs.

    Example:
        >>> html_table("Table", [("dim", 64)])
        '<table><caption>Table</caption><tr><td>dim</td><td>64</td></tr></table>'
    """

    def row(cells: Sequence[object], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"

    rows = [*([row(head, "th")] if head else ()), *(row(line, "td") for line in lines)]
    return f"<table><caption>{escape(caption)}</caption>{''.join(rows)}</table>"
