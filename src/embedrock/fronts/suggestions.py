"""What somebody may have meant who mistyped a name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LEAST_LIKENESS = 0.6


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that is most like a word; None where none is."""
    found = {name.lower(): name for name in names}
    close = get_close_matches(word.lower(), found, 1, LEAST_LIKENESS)
    return found[close[0]] if close else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return a question with the name that is most like a word, after a space; "" where none is.

    Example:
        >>> did_you_mean("imprt", ["info", "import", "export"])
        " Did you mean 'import'?"
    """
    name = nearest(word, names)
    return "" if name is None else f" Did you mean {name!r}?"
