"""`ej.prefetch`: rows come from disk ahead of their batch, and are read once the batch before is applied."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import embedrock as er

pytest.importorskip("jax")

import embedrock.jax as ej

ROWS, DIM, BATCH = 8192, 4, 64


def trained(group: er.Group, depth: int, seed: int) -> list[bytes]:
    """Return the rows of each batch as they were fetched, and all in the end. Each batch has rows of the one before."""
    for name in ("a", "b"):
        group.table(name, rows=ROWS, dim=DIM, rule=er.Adam(lr=0.1), init=er.Normal(), seed=0)
    random, tables = np.random.default_rng(seed), ej.Tables(group)
    hot, seen = random.integers(0, ROWS, BATCH // 2), list[bytes]()
    loader = [{name: np.append(hot, random.integers(0, ROWS, BATCH // 2)) for name in group} for _ in range(40)]
    for batch, _ in ej.prefetch(loader, tables, depth):
        seen += [np.asarray(rows).tobytes() for rows in batch.rows.values()]
        grads = {name: random.normal(size=rows.shape).astype(np.float32) for name, rows in batch.rows.items()}
        tables.apply(batch, grads, True)
    return [*seen, *(group[name].lookup(np.arange(ROWS)).tobytes() for name in group)]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_any_depth_gives_the_same_bits(depth: int, tmp_path: Path) -> None:
    with er.Group(path=tmp_path / "tables", memory="96KiB", commit_every=1000) as group:
        assert trained(group, depth, seed=depth) == trained(er.Group(), 0, seed=depth)


def test_rows_are_in_the_cache_before_they_are_read(tmp_path: Path) -> None:
    with er.Table(rows=ROWS, dim=DIM, rule=er.SGD(), path=tmp_path / "table", memory="96KiB") as table:
        for ids in np.split(np.arange(ROWS), ROWS // BATCH):  # the first rows leave the cache
            table.update(ids, np.ones((len(ids), DIM), np.float32))
        table.commit()
        fetcher, reads = ej.Tables(table).fetcher, [int(table.stats()["reads"])]
        planned = fetcher.plan([[np.arange(BATCH)]])
        pin = fetcher.bring(lambda: planned)
        reads.append(int(table.stats()["reads"]))
        fetcher.fetch(planned)
        pin.release()
        assert reads[0] < reads[1] == table.stats()["reads"]
