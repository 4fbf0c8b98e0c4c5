"""Makes the golden vocabularies: `python tests/golden/make_vocabulary.py [FOLDER]`. None is ever made again.

A release that cannot open them, or finds other ids, has broken the format.
"""

from __future__ import annotations

import sys
from pathlib import Path

import embedrock as er
from embedrock.vocabulary import files

FOLDER = Path(__file__).resolve().parent / "vocabulary-1"
WORDS = ["", "Grüße", "日本語", "inner\0zero", "x" * 9000, *(f"word {k}" for k in range(300))]

WITH_STEPS = FOLDER.with_name("vocabulary-2")  # three commits, with the steps of a table
WITH_SHAPES = FOLDER.with_name("vocabulary-3")  # files say what their strings are like


def make(target: Path) -> None:
    """Write the golden vocabulary, of two files."""
    files.HEAD_BYTES = 9000
    with er.Vocabulary(target) as vocabulary:
        vocabulary.add(WORDS)
        vocabulary.commit(step=7)
    (target / "LOCK").unlink()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else WITH_SHAPES
    if not target.exists():
        make(target)
