"""What stands in for Hypothesis on a machine that has none: tests that need it are skipped, all others run."""

from __future__ import annotations

from typing import Any

import pytest


class Anything:
    """Has all attributes, and can be called with all arguments."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def given(*args: Any, **kwargs: Any) -> Any:
    """Skip a test."""

    def replace(function: Any) -> Any:
        @pytest.mark.skip(reason="Hypothesis is not installed")
        def skipped() -> None:
            """Do nothing."""

        skipped.__name__ = function.__name__
        return skipped

    return replace


class settings:
    """Decorates nothing."""

    register_profile = load_profile = staticmethod(lambda *args, **kwargs: None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take whatever is set."""

    def __call__(self, function: Any) -> Any:
        return function


strategies = HealthCheck = Phase = Anything()
