"""A sharded table that is published from one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.cli.main import main
from embedrock.distributed.commits import part_to_open
from embedrock.distributed.owners import Shard

DIM, RANKS, ROWS = 2, 3, 200


class Ranks:
    """The tables of all ranks, beside one table that has all rows."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.path, self.steps = folder / "users.rock", 0
        options = {"rows": ROWS, "rule": er.Adagrad(lr=1.0), "seed": 1, **options}
        self.parts = [
            er.Table(dim=DIM, path=part_to_open(str(self.path), rank, RANKS, "users"), keep=3, **options)
            for rank in range(RANKS)
        ]
        self.whole = er.Table(dim=DIM, **options)

    def train(self, ids: Any) -> None:
        self.steps += 1
        ids = np.asarray(ids)
        gradients = np.random.default_rng(self.steps).normal(size=(len(ids), DIM))
        self.whole.update(ids, gradients)
        for rank, table in enumerate(self.parts):
            own = self.shard(rank).owns(ids)
            table.update(ids[own], gradients[own])

    def forget(self, ids: list[int]) -> None:
        self.whole.forget(ids)
        for rank, table in enumerate(self.parts):
            table.forget(np.asarray(ids)[self.shard(rank).owns(np.asarray(ids))])

    def shard(self, rank: int) -> Shard:
        return Shard(rank, RANKS, segments=self.whole.spec.segments)

    def commit(self) -> None:
        for table in self.parts:
            table.commit(step=self.steps)

    def close(self) -> None:
        for table in self.parts:
            table.close()


def assert_served(served: er.Subscriber, ranks: Ranks, ids: Any = range(ROWS)) -> None:
    with served.step() as step:
        assert step.step == ranks.steps
        assert repr(step) == f"ServedStep({step.number}, training step {ranks.steps}: users)"
        assert np.array_equal(step["users"].lookup(ids), ranks.whole.lookup(ids))
        assert np.array_equal(step["users"].contains(ids), ranks.whole.contains(ids))
        assert len(step["users"]) == len(ranks.whole)


def test_all_parts_are_published_as_one_table(tmp_path: Path):
    ranks, out = Ranks(tmp_path), tmp_path / "served"
    ranks.train(np.arange(100))
    ranks.commit()
    made = er.publish(ranks.parts[1], out)
    assert (made.rows, made.is_base) == (100, True)
    with er.Subscriber(out, memory="2MiB", patience=0) as served:
        assert_served(served, ranks)
        ranks.train([3, 3, 150])
        ranks.commit()
        made = er.publish(ranks.parts[0], out)
        assert (made.rows, made.is_base) == (2, False)
        assert served.refresh()
        assert_served(served, ranks)

        ranks.train([7])
        ranks.parts[0].commit(step=ranks.steps)  # the others do not have this one yet
        assert not er.publish(ranks.parts[0], out).is_new
        for table in ranks.parts[1:]:
            table.commit(step=ranks.steps)
        with er.open(ranks.path, mode="r") as reader:
            assert er.publish(reader, out).rows == 1
        assert served.refresh()
        assert_served(served, ranks)

        ranks.forget([3, 7, 8])
        ranks.commit()
        assert main(["publish", str(ranks.parts[2].path), str(out)]) == 0  # the whole table all the same
        assert served.refresh()
        assert_served(served, ranks)
    ranks.close()


@pytest.mark.parametrize(
    "options",
    [
        {"init": er.FromArray(np.random.default_rng(3).normal(size=(ROWS, DIM)).astype(np.float32))},
        {"rule": er.AdamW(lr=0.1, weight_decay=0.1, dense=True)},
        {"rows": None},
        {"rows": None, "eviction": er.Eviction(idle=1), "segments": None},
        {"admission": er.Admission(2, default="zeros"), "segments": None},
    ],
    ids=["array", "dense", "open ids", "eviction", "admission"],
)
def test_rows_with_and_without_a_record(tmp_path: Path, options: dict[str, Any]):
    ranks, out = Ranks(tmp_path, **options), tmp_path / "served"
    for number in range(3):
        ranks.train([number, 5, 60 + number, 2**40 + number][: 4 if "rows" in options else 3])
        ranks.commit()
        er.publish(ranks.parts[0], out)
    with er.Subscriber(out, memory="2MiB", patience=0) as served:
        assert np.array_equal(served.lookup({"users": range(ROWS)})["users"], ranks.whole.lookup(range(ROWS)))
    ranks.close()


def test_other_numbers_of_ranks_begin_anew(tmp_path: Path):
    ranks, out = Ranks(tmp_path), tmp_path / "served"
    ranks.train(np.arange(50))
    ranks.commit()
    er.publish(ranks.parts[0], out)
    ranks.close()
    assert main(["reshard", str(ranks.path), "--shards", "2"]) == 0
    with er.open(ranks.path, mode="r") as reader, er.Subscriber(out, memory="2MiB", patience=0) as served:
        with served.step() as step:
            chain = step.chain
        before = set(out.rglob("*.rows"))
        er.publish(reader, out)
        assert not before.intersection(out.rglob("*.rows"))  # rows may have been forgotten meanwhile
        assert served.refresh()
        with served.step() as step:
            assert step.chain != chain
        assert_served(served, ranks)
