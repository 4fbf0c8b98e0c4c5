"""Model files and checkpoints: the parts of tables in them, saving and loading."""

from __future__ import annotations
