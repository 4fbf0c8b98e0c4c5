"""Seeds that nobody gave: drawn, so that no two tables start alike, kept with the rows, and not asked for again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import embedrock as er

IDS = np.arange(50)


def test_tables_start_apart_unless_they_are_given_a_seed():
    tables = [er.Table(50, 4) for _ in range(26)]
    assert len({table.spec.seed for table in tables}) == 26
    assert all(0 <= table.spec.seed < 2**63 for table in tables)  # what any file or framework can hold
    firsts = np.stack([table.lookup(IDS) for table in tables])
    assert len(np.unique(firsts)) > 0.999 * firsts.size
    np.testing.assert_array_equal(er.Table(50, 4, seed=7).lookup(IDS), er.Table(50, 4, seed=7).lookup(IDS))


def test_no_row_is_nearest_to_that_of_its_own_id_in_another_table():
    users, items = (er.Table(1000, 16).lookup(np.arange(1000)) for _ in range(2))
    own = (users @ items.T).argmax(1) == np.arange(1000)
    assert own.mean() < 0.02  # by chance: 0.001


def test_repr_shows_the_seed():
    assert "seed=7, " in repr(er.Table(5, 2, seed=7))


def test_a_table_that_is_there_keeps_its_seed_where_none_is_given(tmp_path: Path):
    with er.Table(50, 4, path=tmp_path / "drawn.rock") as made:
        seed, first = made.spec.seed, made.lookup(IDS)
    with er.Table(50, 4, path=tmp_path / "drawn.rock") as again:
        assert again.spec.seed == seed
        np.testing.assert_array_equal(again.lookup(IDS), first)
    with er.Table(50, 4, path=tmp_path / "drawn.rock", seed=seed) as again:
        assert again.spec.seed == seed
    with er.Table(50, 4, path=tmp_path / "drawn.rock", mode="r") as reader:
        np.testing.assert_array_equal(reader.lookup(IDS), first)


def test_a_seed_that_is_given_is_compared_with_that_of_the_table_there(tmp_path: Path):
    er.Table(50, 4, path=tmp_path / "seven.rock", seed=7).close()
    with pytest.raises(er.TableFileError, match=r"seed differ. Asked for .*seed=0.* it holds .*seed=7"):
        er.Table(50, 4, path=tmp_path / "seven.rock", seed=0)


def test_a_state_brings_its_seed():
    one, other = er.Table(50, 4, rule=er.SGD(lr=1.0)), er.Table(50, 4, rule=er.SGD(lr=1.0))
    one.update([3], np.ones((1, 4)))
    other.load_state(one.state())
    assert other.spec.seed == one.spec.seed
    np.testing.assert_array_equal(other.lookup(IDS), one.lookup(IDS))


@pytest.mark.parametrize("seed", [1.5, "7", True, 2**64, -(2**63) - 1])
def test_seeds_that_are_none(seed: object):
    with pytest.raises(er.EmbedrockError, match="`seed` must be a whole number of at most 64 bits: got"):
        er.Table(5, 2, seed=seed)  # pyright: ignore[reportArgumentType]
