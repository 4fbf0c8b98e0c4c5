"""Subscribers of a folder whose files a bad copier carries: what is shown is always one published step."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

import embedrock as er
from carrier import COPY, Carrier, PublishedStep, Run, differences
from on_system import on
from slow import slow
from suites.faultfs import FaultFS

EVENTS = 40
FAST, MANY = 25, 6670  # schedules of each history


@functools.cache
def one_chain() -> list[PublishedStep]:
    """Bases, logs, a compaction, forgotten rows, and files that the publisher removes."""
    run = Run(FaultFS(), 0)
    for number in range(9):
        run.train(120 if number == 0 else 25, is_dense=number != 3)
        if number == 5:
            run.forget(4)
        run.publish(keep_hours=0.0 if number == 7 else 6.0)
    return run.steps


@functools.cache
def two_chains() -> list[PublishedStep]:
    """Another run goes on in the folder."""
    system = FaultFS()
    run, other = Run(system, 1), Run(system, 2, "/other")
    for number in range(7):
        now = run if number < 3 else other
        now.train(60 if number in (0, 3) else 20)
        now.publish()
    return [*run.steps, *other.steps]


@functools.cache
def begun_anew() -> list[PublishedStep]:
    """The publisher begins a folder anew, with the number 1, and the copy goes on."""
    system = FaultFS()
    run = Run(system, 3)
    for _ in range(4):
        run.train(40)
        run.publish()
    for _ in range(3):
        run.train(30)
        run.publish(folder="/anew")
    return run.steps


HISTORIES = {"one chain": one_chain, "two chains": two_chains, "begun anew": begun_anew}


def play(steps: list[PublishedStep], seed: int) -> tuple[Carrier, int]:
    """Carry the files, and check what is shown at each event; return the number of steps that were shown."""
    rng = np.random.default_rng(seed)
    carrier, known = Carrier(steps, rng), {(one.chain, one.number): place for place, one in enumerate(steps)}
    served, shown, told = on(carrier.system).Subscriber(COPY, memory="1MiB", patience=1e9), -1, list[str]()

    def look() -> int:
        if served.number is None:
            return -1
        with served.step() as step:
            place = known[step.chain, step.number]
            assert place >= shown, f"schedule {seed} went back: {told}"
            wrong = differences(step, steps[place]) if place != shown or rng.random() < 0.1 else []
        assert not wrong, f"schedule {seed} shows {wrong} of another step than {place}: {told}"
        return place

    seen = set[int]()
    for _ in range(EVENTS):
        told.append(carrier.act())
        if rng.random() < 0.8:
            served.refresh()
            shown = look()
            seen.add(shown)
    carrier.finish()
    served.refresh()
    if look() != len(steps) - 1:  # the first call looks at the newest numbers only
        served.refresh()
    assert look() == len(steps) - 1, f"schedule {seed} ends with step {served.number}, {served.waiting}: {told}"
    # A part of a manifest that the publisher has removed may stay for ever.
    stays = served.waiting is not None and f"manifest/{served.waiting.number:010d}.json" not in steps[-1].files
    assert served.waiting is None or stays
    served.close()
    assert carrier.system.open_files() == []
    return carrier, len(seen - {-1})


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_what_is_shown_is_always_one_published_step(history: Callable[[], list[PublishedStep]]):
    seen = [play(history(), seed)[1] for seed in range(FAST)]
    assert sum(seen) > 1.5 * FAST  # or nothing was tested


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_many_schedules(history: Callable[[], list[PublishedStep]], part: int):
    for seed in range(FAST + part * MANY // 3, FAST + (part + 1) * MANY // 3):
        play(history(), seed)


@pytest.mark.parametrize("seed", [*range(8), *slow(*range(8, 30))])
def test_damage_is_an_error_that_names_the_file(seed: int):
    carrier = Carrier(one_chain(), np.random.default_rng(seed))
    carrier.finish()
    name = carrier.damage()
    with pytest.raises(er.CorruptTableError) as caught:
        on(carrier.system).Subscriber(COPY, memory="1MiB", patience=0)
    assert f"{COPY}/{name} is " in str(caught.value)
    assert "Carry this file again from the folder that er.publish writes, or" in str(caught.value)


def test_a_file_that_is_replaced_between_two_tries():
    step = one_chain()[1]
    carrier = Carrier(one_chain(), np.random.default_rng(0))
    first, *_, last = sorted(name for name in step.needed if name.endswith((".rows", ".dlt")))

    def put(name: str, is_whole: bool) -> None:
        data = bytearray(step.files[name])
        data[4100] ^= not is_whole  # in a record
        carrier._put(name, bytes(data))

    for name in step.needed:
        carrier._put(name, step.files[name])
    put(last, is_whole=False)
    served = on(carrier.system).Subscriber(COPY, memory="1MiB", patience=1e9)
    put(first, is_whole=False)
    put(last, is_whole=True)
    assert not served.refresh()
    put(first, is_whole=True)
    assert served.refresh()
    served.close()
