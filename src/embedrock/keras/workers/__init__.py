"""Several workers of a cluster: `fit` repaired, what they tell each other, and who has which rows."""

from __future__ import annotations
