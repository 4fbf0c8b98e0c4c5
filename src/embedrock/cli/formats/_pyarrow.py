"""pyarrow, which is optional: without it CSV and TSV are read slowly, and Arrow and Parquet not at all."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from embedrock.errors import RequirementError


def import_pyarrow(kind: str, *parts: str) -> Any:
    """Return pyarrow, with some of its parts, to read or write a kind of file.

    Raises:
        RequirementError: it is not installed.
    """
    try:
        for part in parts:
            import_module(f"pyarrow.{part}")
        return import_module("pyarrow")
    except ImportError as error:
        raise RequirementError(
            f'{kind} needs pyarrow, which does not import: {error}. pip install "embedrock[files]"'
        ) from error


def find_pyarrow(*parts: str) -> Any | None:
    """Return pyarrow, with some of its parts; None where it is not installed."""
    try:
        return import_pyarrow("", *parts)
    except RequirementError:
        return None
