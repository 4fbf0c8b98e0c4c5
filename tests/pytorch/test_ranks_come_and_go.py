"""Rows that come and go in tables that ranks share: the same rows and counters on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from come_and_go_ranks import ACTS, Life, Oracle, Program, check_life, drawn, play
from ranks import Ranks

from slow import slow

pytestmark = [
    pytest.mark.filterwarnings("ignore::embedrock.UncommittedWarning"),
    pytest.mark.filterwarnings("ignore:sharded=.*there is no process group yet:UserWarning"),
]


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    ranks = Ranks(3, timeout=120)
    yield ranks
    ranks.close()


def check(program: Program, together: Ranks | None, folder: Path) -> None:
    """Play a program life by life, beside its oracle."""
    oracle = Oracle(program)
    for number, life in enumerate(program.lives):
        oracle.live(life)
        args = program, number, str(folder)
        found = [play(0, *args)] if together is None else together.run(play, *args)
        here: list[Any] = [one for one in found if one is not None]
        assert len(here) == life.ranks
        check_life(oracle, here)
        oracle.end(life)
