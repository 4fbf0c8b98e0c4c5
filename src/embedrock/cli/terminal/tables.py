"""Tables and numbers for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from embedrock.errors import plural

NAME_WIDTH = 7  # least width of a fact's name: it aligns facts that are printed one after the other


@dataclass(frozen=True)
class Field:
    """A column of a table.

    Args:
        head: heading of the column.
        value: key of a line, or function of a line. If the value is None or missing, the cell is empty.
        form: formats the value.
    """

    head: str
    value: str | Callable[[Any], Any]
    form: Callable[[Any], str] = str

    def cell(self, line: Any) -> str:
        """Return the cell of a line."""
        value = line.get(self.value) if isinstance(self.value, str) else self.value(line)
        return "" if value is None else self.form(value)


def format_lines(fields: Sequence[Field], lines: Sequence[Any]) -> str:
    """Format lines as a table."""
    return format_table([one.head for one in fields], [[one.cell(line) for one in fields] for line in lines])


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows in aligned columns, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for first, *others in [head, ["-" * width for width in widths], *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def format_facts(facts: Mapping[str, str]) -> str:
    """Format a line for each fact: its name and value. Further lines of a value go below the first one.

    Example:
        >>> print(format_facts({"rows": "10", "on disk": "1.5 KiB"}))
        rows     10
        on disk  1.5 KiB
    """
    width = max(NAME_WIDTH, *map(len, facts))
    below = "\n" + " " * (width + 2)
    return "\n".join(f"{name:{width}}  {text}".replace("\n", below) for name, text in facts.items())


def format_count(number: int, noun: str) -> str:
    """Format a number of things with thousands separators; `noun` is the singular name.

    Example:
        >>> format_count(1, "row"), format_count(12345, "row")
        ('1 row', '12,345 rows')
    """
    return f"{number:,} {plural(number, noun)}"


def format_number(value: float) -> str:
    """Format a number with three significant digits.

    Example:
        >>> format_number(1.23456), format_number(12345.6)
        ('1.23', '12346')
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_whole(value: float) -> str:
    """Format a number without its fraction, with thousands separators."""
    return f"{value:,.0f}"


MANY = 10_000  # a larger number is shown as 12.3k


@contextmanager
def progress(label: str, total: int, done: int, unit: str = " rows") -> Iterator[Callable[..., None]]:
    """Show how many of `total` rows, or steps, are done; without tqdm, show nothing.

    Yields:
        A function that adds to the progress, and may show a few words beside it: ``advance(count, "loss=0.5")``.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count, note="": None
        return
    scale = total > MANY
    with tqdm(desc=label, total=total, initial=done, unit=unit, unit_scale=scale, leave=False, disable=None) as bar:

        def advance(count: int, note: str = "") -> None:
            if note:
                bar.set_postfix_str(note, refresh=False)
            bar.update(count)

        yield advance
