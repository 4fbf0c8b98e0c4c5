"""Files of models and what they have of tables: saved, loaded, and made as checkpoints while training."""

from __future__ import annotations
