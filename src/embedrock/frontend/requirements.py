"""The packages that a front end needs, checked before it imports any of them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from itertools import takewhile

from embedrock.errors import RequirementError

# Names of distributions that differ from the names of their packages.
DISTRIBUTIONS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos", "tf-nightly"),
    "keras": ("keras", "keras-nightly"),
}


def require(who: str, extra: str, packages: Mapping[str, str]) -> None:
    """Raise `RequirementError` unless packages are installed, each of at least a version. None is imported.

    Args:
        who: the part of Embedrock that needs them, for error messages.
        extra: the extra of Embedrock that installs them.
        packages: the least version of each. A package of unknown version counts as new enough.

    Example:
        >>> require("this page", "torch", {"numpy": "1.26"})
        >>> require("this page", "torch", {"numpy": "100.0"})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        embedrock.errors.RequirementError: this page needs numpy 100.0 or newer: found ... "embedrock[torch]"
    """
    remedy = f'pip install --upgrade "embedrock[{extra}]"'
    for name, least in packages.items():
        if importlib.util.find_spec(name) is None:
            raise RequirementError(f"{who} needs {name} {least} or newer, which is not installed: {remedy}")
        found = _version(name)
        if found is not None and _numbers(found) < _numbers(least):
            raise RequirementError(f"{who} needs {name} {least} or newer: found {found}. {remedy}")


def _version(name: str) -> str | None:
    """Return the version of a package: its own ``__version__`` if imported, or else the installed one."""
    if (version := getattr(sys.modules.get(name), "__version__", None)) is not None:
        return str(version)
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 5) of "2.5.1rc1" and of "2.5"."""
    return tuple(int(part) for part in takewhile(str.isdecimal, re.split(r"[.+]", version)))[:2]
