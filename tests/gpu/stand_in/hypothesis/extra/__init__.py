"""See above."""

from __future__ import annotations

from hypothesis import Anything

numpy = Anything()
