"""Where the tests here run kernels: under Triton's interpreter, or on a GPU (tests/conftest.py says how to choose)."""

from __future__ import annotations

import os

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
