"""The exactness gate with ranks: whatever kinds of tables are mixed, and wherever rows lie, they have the same bits.

What is drawn does not depend on the number of ranks: so a program has the same bits on any number. `test_shards.py`
plays some on two ranks in the fast suite.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks
from traced_ranks import EVENTS, check_program, drawn_program, play

from slow import slow

pytestmark = [
    pytest.mark.filterwarnings("ignore::embedrock.UncommittedWarning"),
    pytest.mark.filterwarnings("ignore:sharded=.*there is no process group yet:UserWarning"),
]


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_one_rank_plays_programs_to_the_bits_of_tables_alone(seed: int, tmp_path: Path) -> None:
    program = drawn_program(seed, 6)
    found: Any = play(0, program, 1, str(tmp_path))
    check_program(program, 1, [found])
    _, tables = found
    tables[0][2][-1, 0] ^= 1  # a gate that stops nothing proves nothing
    with pytest.raises(AssertionError, match="not equal"):
        check_program(program, 1, [found])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "seeds"), [(1, 60), (2, 60), (3, 30), (4, 30)])
def test_ranks_play_programs_to_the_bits_of_tables_alone(ranks: int, seeds: int, tmp_path: Path) -> None:
    together = Ranks(ranks, timeout=120)
    try:
        for seed in range(100 * ranks, 100 * ranks + seeds):
            program, folder = drawn_program(seed, 10), tmp_path / str(seed)
            folder.mkdir()
            check_program(program, ranks, together.run(play, program, ranks, str(folder)))
    finally:
        together.close()


def test_programs_of_a_few_seeds_have_everything_that_can_be_drawn() -> None:
    programs = [drawn_program(seed, 10) for seed in range(100, 160)]
    assert {name for program in programs for name, _ in program.acts} == set(EVENTS)
    for name in ("kind", "lookups", "bags", "dtype", "is_open"):
        assert len({getattr(table, name) for program in programs for table in program.tables}) > 1, name
    mixed = [len({table.kind for table in program.tables}) for program in programs]
    assert np.mean(np.array(mixed) > 1) > 0.3
