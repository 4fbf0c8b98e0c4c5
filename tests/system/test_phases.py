"""`span`: phases of the work on rows, as tracers see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.system import spans
from embedrock.system.spans import forget, span, trace_by


class Tracer:
    """Notes what begins and ends, while it is on."""

    def __init__(self) -> None:
        self.is_on, self.begun, self.ended = True, Counter[str](), Counter[str]()

    def __call__(self, name: str):
        return self._noting(name) if self.is_on else None

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        self.begun[name] += 1
        try:
            yield
        finally:
            self.ended[name] += 1


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    made = Tracer()
    trace_by(made)
    yield made
    forget(made)


def test_a_table_on_disk_shows_each_phase(tracer: Tracer, tmp_path: Path):
    with er.Table(4096, 16, rule=er.Adam(), path=tmp_path / "t.rock", memory=64 << 10, seed=0) as table:
        for start in range(0, 4096, 128):
            ids = np.arange(start, start + 128)
            table.update(ids, table.lookup(ids))
        table.commit()
        table.lookup(np.arange(64))
        table.compact()
    assert tracer.begun == tracer.ended
    assert {"plan", "disk", "gather", "sum", "rule", "spill", "commit", "compaction"} <= set(tracer.begun)


def test_an_error_ends_its_phase(tracer: Tracer):
    with pytest.raises(KeyError), span("sum"):
        raise KeyError
    assert tracer.begun == tracer.ended == {"sum": 1}


def test_all_who_look_see_a_phase(tracer: Tracer):
    other = Tracer()
    trace_by(other)
    try:
        with span("plan"):
            assert tracer.begun == other.begun == {"plan": 1}
            assert not tracer.ended
            assert not other.ended
        assert tracer.ended == other.ended == {"plan": 1}
    finally:
        forget(other)


def test_nobody_who_looks_away_is_shown_anything(tracer: Tracer):
    tracer.is_on = False
    with span("plan"):
        pass
    assert not tracer.begun
    forget(tracer)
    tracer.is_on = True
    with span("plan"):
        pass
    assert not tracer.begun


def test_nothing_is_made_where_nobody_looks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spans, "_tracers", ((lambda: True, lambda name: None),))
    assert span("read") is span("plan") is spans._NOTHING
