"""Tables and numbers for people."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines with aligned columns, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for first, *others in [head, ["-" * width for width in widths], *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def format_number(value: float) -> str:
    """Return a number with three digits that count.

    Example:
        >>> format_number(1.23456), format_number(12345.6)
        ('1.23', '12346')
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
