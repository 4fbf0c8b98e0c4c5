"""Where the tests here run kernels: under Triton's interpreter, or on a GPU (tests/conftest.py says how to choose)."""

from __future__ import annotations

import os

IS_SLOW = os.environ["TRITON_INTERPRET"] == "1"  # kernels are interpreted: sizes are those of toys
INTERPRETED = IS_SLOW and "EMULATED_GPU" not in os.environ  # and there is no GPU: see emulate.py
DEVICE = "cpu" if INTERPRETED else "cuda"
