"""Tables and numbers for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from embedrock.errors import plural

NAME_WIDTH = 7  # of facts, at least: those printed one after the other are aligned


@dataclass(frozen=True)
class Field:
    """What a table shows of each of its lines, in a column.

    Args:
        head: what stands above it.
        value: key of a line, or what returns its value; where that is None or not there, the cell is empty.
        form: returns the value as it is printed.
    """

    head: str
    value: str | Callable[[Any], Any]
    form: Callable[[Any], str] = str

    def cell(self, line: Any) -> str:
        """Return what stands in it for a line."""
        value = line.get(self.value) if isinstance(self.value, str) else self.value(line)
        return "" if value is None else self.form(value)


def format_lines(fields: Sequence[Field], lines: Sequence[Any]) -> str:
    """Return the table of some lines."""
    return format_table([one.head for one in fields], [[one.cell(line) for one in fields] for line in lines])


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines with aligned columns, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for first, *others in [head, ["-" * width for width in widths], *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def format_facts(facts: Mapping[str, str]) -> str:
    """Return a line for each fact: its name, and what it is. Further lines of a text go below its first one.

    Example:
        >>> print(format_facts({"rows": "10", "on disk": "1.5 KiB"}))
        rows     10
        on disk  1.5 KiB
    """
    width = max(NAME_WIDTH, *map(len, facts))
    below = "\n" + " " * (width + 2)
    return "\n".join(f"{name:{width}}  {text}".replace("\n", below) for name, text in facts.items())


def format_count(number: int, noun: str) -> str:
    """Return a number of things, thousands apart; `noun` is what one of them is called.

    Example:
        >>> format_count(1, "row"), format_count(12345, "row")
        ('1 row', '12,345 rows')
    """
    return f"{number:,} {plural(number, noun)}"


def format_number(value: float) -> str:
    """Return a number with three digits that count.

    Example:
        >>> format_number(1.23456), format_number(12345.6)
        ('1.23', '12346')
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_whole(value: float) -> str:
    """Return a number without its fraction, thousands apart."""
    return f"{value:,.0f}"


def format_factor(value: float) -> str:
    """Return a number of times."""
    return f"{format_number(value)}x"


def format_range(ends: Sequence[float]) -> str:
    """Return the least and the greatest of some numbers, given both."""
    return " - ".join(map(format_number, ends))


MANY = 10_000  # a larger number is shown as 12.3k


class Advance(Protocol):
    """Adds to what is done, and shows a few words beside it."""

    def __call__(self, count: int, note: str = "") -> None: ...


@contextmanager
def progress(label: str, total: int, done: int, unit: str = " rows") -> Iterator[Advance]:
    """Show how many of `total` rows, or steps, are done; without tqdm nothing is shown.

    Yields:
        A function that adds to them, and may show a few words beside: ``advance(count, "loss=0.5")``.
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


def say(text: str, transient: bool = False) -> None:
    """Print a line about how far it is; a transient one gives way to the next, and is for terminals only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="" if transient else "\n", file=sys.stderr, flush=True)
    elif not transient:
        print(text, file=sys.stderr, flush=True)
