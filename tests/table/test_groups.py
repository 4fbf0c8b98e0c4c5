"""Tables of a group are, to the bit, the same tables alone."""

from __future__ import annotations

import pytest

from group_pair import play


@pytest.mark.parametrize("seed", range(5))
def test_members_are_the_same_as_tables_alone(seed: int) -> None:
    play(seed, 40)
