"""Makes the golden vocabulary: `python tests/golden/make_vocabulary.py [FOLDER]`. It is never made again.

A release that cannot open it, or finds other ids, has broken the format.
"""

from __future__ import annotations

import sys
from pathlib import Path

import embedrock as er
from embedrock.vocabulary import files

FOLDER = Path(__file__).resolve().parent / "vocabulary-1"
WORDS = ["", "Grüße", "日本語", "inner\0zero", "x" * 9000, *(f"word {k}" for k in range(300))]

if __name__ == "__main__":
    files.HEAD_BYTES = 4000  # two files
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    with er.Vocabulary(target) as vocabulary:
        vocabulary.add(WORDS)
        vocabulary.commit()
    (target / "LOCK").unlink()
