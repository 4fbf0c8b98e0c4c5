"""One table over many processes: who has which rows, and what they tell each other, whatever carries it."""

from __future__ import annotations
