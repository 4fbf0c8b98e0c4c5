"""Words of messages: counts with their nouns, one of several values, and what somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from embedrock.errors import ArgumentError

LEAST_LIKENESS = 0.6


def plural(number: int, noun: str) -> str:
    """Return what so many things are called; `noun` is what one of them is.

    Example:
        >>> plural(1, "row"), plural(2, "row")
        ('row', 'rows')
    """
    return noun if number == 1 else f"{noun}s"


def with_article(noun: str) -> str:
    """Return one of what a noun says.

    Example:
        >>> with_article("id"), with_article("string")
        ('an id', 'a string')
    """
    return f"{'an' if noun[0] in 'aeioAEIO' else 'a'} {noun}"


def counted(number: int, noun: str) -> str:
    """Return a number of things.

    Example:
        >>> counted(1, "row"), counted(12345, "row")
        ('1 row', '12345 rows')
    """
    return f"{number} {plural(number, noun)}"


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that is most like a word; None where none is."""
    found = {name.lower(): name for name in names}
    close = get_close_matches(word.lower(), found, 1, LEAST_LIKENESS)
    return found[close[0]] if close else None


def did_you_mean(word: object, names: Iterable[str]) -> str:
    """Return a question with the name that is most like a word, after a space; "" where none is.

    Example:
        >>> did_you_mean("imprt", ["info", "import", "export"])
        " Did you mean 'import'?"
    """
    name = nearest(str(word), names)
    return "" if name is None else f" Did you mean {name!r}?"


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `ArgumentError` unless an argument has one of some values.

    Example:
        >>> check_choice("policy", "lruu", ("lfu", "lru"))
        Traceback (most recent call last):
        ...
        embedrock.errors.ArgumentError: `policy` must be one of lfu, lru: got 'lruu'. Did you mean 'lru'?
    """
    known = tuple(choices)
    if not isinstance(value, str) or value not in known:
        raise not_one_of(f"`{name}`", value, known)


def not_one_of(what: str, value: Any, choices: Iterable[str]) -> ArgumentError:
    """Return the error of something that must be one of some values, and is not."""
    known = list(choices)
    return ArgumentError(f"{what} must be one of {', '.join(known)}: got {value!r}.{did_you_mean(value, known)}")
