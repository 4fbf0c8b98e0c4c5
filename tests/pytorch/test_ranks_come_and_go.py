"""Rows that come and go in tables that ranks share: the same rows and counters on any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from come_and_go_ranks import ACTS, Life, Oracle, Program, check_life, drawn, play
from ranks import Ranks

import embedrock as er
import embedrock.torch as ert
from embedrock.batch.ids import owners
from embedrock.spec.admission import DEFAULTS
from embedrock.table.table import rows_of
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


@pytest.mark.parametrize("seed", [1, *slow(*range(2, 20))])
def test_one_rank_has_what_one_table_has(seed: int, tmp_path: Path) -> None:
    check(drawn(seed, 1), None, tmp_path)


@pytest.mark.parametrize("seed", [3, 7, 12])
def test_ranks_have_what_one_table_has(seed: int, three: Ranks, tmp_path: Path) -> None:
    check(drawn(seed, 3), three, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_up_to_four_ranks_have_what_one_table_has(part: int, tmp_path: Path) -> None:
    four = Ranks(4, timeout=120)
    try:
        for seed in range(1000 + 40 * part, 1040 + 40 * part):
            (folder := tmp_path / str(seed)).mkdir()
            check(drawn(seed, 4), four, folder)
    finally:
        four.close()


def test_programs_of_a_few_seeds_have_everything_that_can_be_drawn() -> None:
    programs = [drawn(seed, 4) for seed in range(1000, 1040)]
    lives = [life for program in programs for life in program.lives]
    assert {name for life in lives for name, _ in life.acts} == set(ACTS)
    assert {life.ranks for life in lives} == {1, 2, 3, 4}
    assert {program.admission and program.admission.default for program in programs} == {None, *DEFAULTS}
    for name in ("on_disk", "positions", "dtype", "rule"):
        assert len({getattr(program, name) for program in programs}) > 1, name


def test_a_count_too_many_is_found(tmp_path: Path) -> None:
    admission = er.Admission(3)
    life = Life(1, (("train", 5),), False)
    program = Program(1, er.SGD(lr=0.5), "float32", admission, er.Eviction(max_rows=300), False, False, 0, (life,))
    oracle, found = Oracle(program), play(0, program, 0, str(tmp_path))
    assert found is not None
    oracle.live(life)
    check_life(oracle, [found])
    found["state"]["residents_now_counts"][0] += 1
    with pytest.raises(AssertionError):
        check_life(oracle, [found])


# ---------------------------------------------------------------- what is refused


def refused(rank: int, folder: str) -> dict[str, str]:
    """Return what is said where something cannot work, by name."""
    said = {}
    options: dict[str, Any] = {"seed": 1, "admission": er.Admission(2, default="shared")}
    layer = ert.Embedding(None, 3, sharded=True, **options)
    handle: Any = layer.handle
    optimizer = ert.SGD(layer, lr=1.0, clip_value=0.5)

    def backward() -> None:
        layer(torch.arange(6)).sum().backward()

    backward()
    said["clip_value"] = told(optimizer.step)
    optimizer.zero_grad()
    backward()
    said["clamp"] = told(lambda: handle.grad.clamp_(-1, 1))
    before = layer.table.steps
    optimizer = ert.SGD(layer, lr=1.0)
    own = np.arange(6)[rows_of(layer.table).owns(np.arange(6))]  # pyright: ignore[reportOptionalCall]
    layer.table.assign(own, np.ones((len(own), 3), np.float32))
    said["records between"] = told(optimizer.step)
    optimizer.zero_grad()
    assert layer.table.steps == before == 0
    ready = er.Table(None, 3, rule=er.SGD(lr=1.0), eviction=er.Eviction(max_rows=999))
    said["ready-made"] = told(lambda: ert.Embedding(ready, sharded=True))
    ert.Embedding(er.Table(None, 3, eviction=er.Eviction(max_rows=999), segments=None), sharded=True)
    path = f"{folder}/plain.rock"
    made = ert.Embedding(None, 3, path=path, sharded=True, seed=1)
    made.table.commit(step=1)
    made.table.close()
    later = {"path": path, "sharded": True, "seed": 1}
    said["later"] = told(lambda: ert.Embedding(None, 3, eviction=er.Eviction(max_rows=999), **later))
    ert.Embedding(None, 3, **later).table.close()  # as it was
    said["few rows"] = told(lambda: ert.Embedding(None, 3, sharded=True, eviction=er.Eviction(max_rows=99)))
    return said


def told(call: Any) -> str:
    try:
        call()
    except (er.EmbedrockError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


REFUSED = {
    "clip_value": r"UnsupportedError: elements of gradients of .*Admission\(default='shared'\).* Got clip_value=0\.5\.",
    "clamp": r"UnsupportedError: elements of gradients of .* cannot be clipped: .* Got a clamp to \[-1\.0, 1\.0\]\.",
    "records between": r"ArgumentError: rows of .* got or lost records since backward\(\).*zero_grad\(\) and backward",
    "ready-made": r"UnsupportedError: rows of .* made with segments=1.* er\.Table\(\.\.\., segments=None\) does\.",
    "later": r"UnsupportedError: rows of .*plain\.rock/shard-\d-of-3' cannot come and go.* made with segments=1",
    "few rows": r"ArgumentError: `max_rows` of a table with segments, .* at least their number, 256: got 99, by",
}


def test_what_cannot_work_is_refused_and_nothing_has_changed(three: Ranks, tmp_path: Path) -> None:
    for said in three.run(refused, str(tmp_path)):
        assert said.keys() == REFUSED.keys()
        for name, pattern in REFUSED.items():
            assert re.match(pattern, said[name]), (name, said[name])


def mirrored(rank: int) -> tuple[list[int], list[int]]:
    """Return the ids that a rank's mirror was told of, and the rows that it has."""
    left: list[int] = []
    eviction = er.Eviction(max_rows=256, by="recency", evicted=lambda ids: left.extend(ids.tolist()))
    layer = ert.Embedding(None, 2, sharded=True, seed=1, eviction=eviction)
    optimizer = ert.SGD(layer, lr=1.0)
    for step in range(3):
        layer(torch.arange(300 * step, 300 * step + 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return left, layer.table.export()[0].tolist()


def test_each_rank_is_told_of_its_own_rows_that_leave(three: Ranks) -> None:
    found = three.run(mirrored)
    assert sorted(each for gone, stay in found for each in gone + stay) == list(range(900))
    for rank, (gone, stay) in enumerate(found):
        assert gone
        assert set(owners(np.array(gone + stay), 3, 8)) == {rank}
