"""Parameters that only `make test-all` runs: a fast representative stands beside them."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Return the parameters, marked slow; a plain tuple has the values of several arguments."""
    sets = (value if type(value) is tuple else (value,) for value in values)
    return [pytest.param(*arguments, marks=pytest.mark.slow) for arguments in sets]
