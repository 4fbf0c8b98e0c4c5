"""One table over many processes: owners of rows, and the messages between ranks over any transport."""

from __future__ import annotations
