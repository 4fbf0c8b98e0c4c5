"""Records on disk: append-only files, and where in them the record of a row is."""

from __future__ import annotations
