"""Faults planted in the publisher or the subscriber, each of which the schedules of a bad carrier find."""

from __future__ import annotations

from typing import Any

import pytest
from test_schedules import one_chain, play

import embedrock as er
from carrier import SOURCE, PublishedStep, Run
from embedrock.serving import publisher, subscriber
from embedrock.store.record_store import RecordStore
from suites.faultfs import FaultFS

SEEDS = range(40)


def published() -> list[PublishedStep]:
    run = Run(FaultFS(), 7)
    for number in range(4):
        run.train(60 if number == 0 else 10)
        if number == 2:
            run.forget(5)
        run.publish()
    return run.steps


def is_found(steps: list[PublishedStep]) -> bool:
    for seed in SEEDS:
        try:
            play(steps, seed)
        except (AssertionError, er.CorruptTableError):
            return True
    return False


def test_without_a_fault_nothing_is_found():
    assert not is_found(published())


def test_seals_that_are_not_read(monkeypatch: pytest.MonkeyPatch):
    steps = one_chain()
    monkeypatch.setattr(subscriber, "check_seals", lambda segment: None)
    assert is_found(steps)


def test_dense_weights_of_the_step_before(monkeypatch: pytest.MonkeyPatch):
    def before(self: Any, arrays: Any) -> Any:
        return self._before.dense or dense(self, arrays)

    dense = publisher._NextStep._dense
    monkeypatch.setattr(publisher._NextStep, "_dense", before)
    assert is_found(published())


def test_tombstones_that_are_left_out(monkeypatch: pytest.MonkeyPatch):
    def discard(self: RecordStore, ids: Any) -> None:
        if self.folder != SOURCE:
            own(self, ids)

    own = RecordStore.discard
    monkeypatch.setattr(RecordStore, "discard", discard)
    with pytest.raises(er.CorruptTableError, match=r"0003.json is damaged: expected `count` in"):
        published()


def test_a_manifest_that_is_shown_before_its_data(monkeypatch: pytest.MonkeyPatch):
    steps = one_chain()
    # Planted: the subscriber does not wait for the dense weights that the manifest names.
    monkeypatch.setattr(subscriber.dense_files, "read", lambda system, folder, entry: {})
    assert is_found(steps)
