"""First values that tables are tested with: one of each kind that can be made from plain data."""

from __future__ import annotations

import embedrock as er

FIRST_VALUES = (er.Zeros(), er.Constant(0.3), er.Uniform(-1, 2), er.Normal(1, 2), er.TruncatedNormal(1, 2, 1.5))
