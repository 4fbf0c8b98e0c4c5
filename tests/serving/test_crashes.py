"""A publisher that is killed, or loses power, at any call: what was published stays, and the next call goes on."""

from __future__ import annotations

import numpy as np
import pytest

import embedrock as er
from carrier import SOURCE, PublishedStep, Run, differences
from embedrock.io.vfs import File
from embedrock.serving.publisher import PublishOptions, publish_commits
from embedrock.serving.sources import opened_commit
from on_system import on
from suites.faultfs import FaultFS


def made_ready(forgets: bool) -> Run:
    """Return a run with two published steps, and a third one that is committed."""
    run = Run(FaultFS(), 5)
    for count in (60, 15):
        run.train(count)
        run.publish()
    run.train(15)
    if forgets:  # old files leave at once
        run.forget(5)
    run.group.commit()
    return run


def publish(run: Run, system: FaultFS) -> int:
    options = PublishOptions(dense=run.dense, system=system)
    with opened_commit(run.path, None, system) as commit:
        return publish_commits([(commit, {name: name for name in run.group})], SOURCE, options).number


def check(run: Run, system: FaultFS, before: PublishedStep, after: PublishedStep) -> None:
    """Check that one of two steps is shown, and that publishing goes on from there."""
    with on(system).Subscriber(SOURCE, memory="1MiB", patience=1e9) as served:
        with served.step() as step:
            assert not differences(step, before) or not differences(step, after), system.kind
        number = publish(run, system)
        assert served.refresh() or served.number == number
        with served.step() as step:
            assert (step.number, differences(step, after)) == (number, []), system.kind
        assert served.waiting is None


def states(forgets: bool, every: int) -> None:
    """Check what a loss of power may leave after each `every`-th call."""
    run = made_ready(forgets)
    clones, rng, calls = list[FaultFS](), np.random.default_rng(0), 0

    def after(name: str, path: str) -> None:
        nonlocal calls
        calls += 1
        if path.startswith(SOURCE) and calls % every == 0:
            clones.extend(run.system.crash_clones(rng))

    run.system.after = after
    number = publish(run, run.system)
    run.system.after = None
    last = run.step(number)
    assert len(clones) > 20
    for clone in clones[:: 1 if every == 1 else 5]:
        check(run, clone, run.steps[-1], last)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_loss_of_power_while_publishing(forgets: bool):
    states(forgets, 6)


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [False, True])
def test_a_loss_of_power_at_every_call(forgets: bool):
    states(forgets, 1)


def test_files_that_are_not_synced_are_found(monkeypatch: pytest.MonkeyPatch):
    sync = File.sync  # planted: the manifest may reach the disk before the data
    is_spared = f"{SOURCE}/manifest/", "/run/"
    monkeypatch.setattr(File, "sync", lambda self: sync(self) if self.path.startswith(is_spared) else None)
    with pytest.raises((er.EmbedrockError, AssertionError)):
        states(False, 1)
