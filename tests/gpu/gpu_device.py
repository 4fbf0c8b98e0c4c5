"""Where the tests here run kernels: under Triton's interpreter, which has to be chosen before Triton is first imported.

``TRITON_INTERPRET=0 pytest tests/gpu`` runs them compiled, on a GPU.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
