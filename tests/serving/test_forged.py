"""Files of published folders are not trusted: a broken disk gives no other rows, and a forger crashes nothing."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from test_schedules import one_chain

import embedrock as er
from carrier import COPY, Carrier, PublishedStep, differences
from embedrock.serving import dense
from embedrock.store.publication import DenseEntry
from mutations import PLAIN, SEALED, Draft, changed, seal
from on_system import on
from slow import slow
from suites.faultfs import FaultFS

NO_TIME = 1e9


@functools.cache
def folder() -> PublishedStep:
    return one_chain()[4]


def mutated(seed: int, is_sealed: bool) -> tuple[Draft, FaultFS]:
    draft = Draft(random.Random(seed), {name: bytearray(data) for name, data in folder().files.items()}, is_sealed)
    for _ in range(draft.rng.choice([1, 1, 2, 3])):
        draft.notes.append(changed(draft, draft.rng.choice(SEALED if is_sealed else PLAIN)))
    if is_sealed:
        seal(draft)
    carrier = Carrier(one_chain(), np.random.default_rng(seed))
    for name, data in draft.files.items():
        try:
            carrier._put(name, bytes(data))
        except OSError:  # a file lies in the place of a folder
            continue
    return draft, carrier.system


@pytest.mark.parametrize("count", [60, *slow(5000)])
def test_a_broken_disk_shows_no_other_rows(count: int):
    expected, shown = {one.number: one for one in one_chain()}, 0
    for seed in range(count):
        draft, system = mutated(seed, is_sealed=False)
        try:
            served = on(system).Subscriber(COPY, memory="1MiB", patience=NO_TIME)
        except er.CorruptTableError as error:
            assert "expected a folder, got a file" in str(error)  # noqa: PT017  # few are refused
            continue
        with served:
            if served.number is not None:
                shown += 1
                with served.step() as step:
                    assert differences(step, expected[step.number]) == [], (seed, draft.notes)
    assert shown > count / 2


@pytest.mark.parametrize("count", [60, *slow(5000)])
def test_forged_folders_crash_nothing(count: int):
    shown = 0
    for seed in range(count):
        _, system = mutated(seed, is_sealed=True)
        try:
            with on(system).Subscriber(COPY, memory="1MiB", patience=NO_TIME) as served, served.step() as step:
                for name in step:
                    step[name].export()
                    step[name].lookup(np.arange(40))
                    shown += 1
        except er.EmbedrockError:
            continue
    assert shown > count / 10


def test_forged_dense_weights():
    rng, data = random.Random(0), dense.to_bytes({"a": np.arange(6.0).reshape(2, 3), "b": np.zeros(3, np.int8)})
    system, made = FaultFS(), 0
    for _ in range(2000):
        forged = bytearray(data)
        for _ in range(rng.choice([1, 2, 8])):
            forged[rng.randrange(150)] = rng.choice([*b'0129-[]{}",:ex', rng.randrange(256)])
        system.write_file("/a", bytes(forged))
        entry = DenseEntry("a", len(forged), dense.sha256_of(bytes(forged)))
        try:
            made += len(dense.read(system, "", entry)) > 0
        except er.CorruptTableError as error:
            assert "expected arrays as safetensors" in str(error)  # noqa: PT017  # most are read
    assert 20 < made < 1900


@pytest.mark.parametrize("header", [b"[]", b"7", b'{"a": 7}', b'{"a": {"dtype": "F32"}}', b"[" * 5000])
def test_headers_that_are_no_headers(header: bytes):
    data, system = len(header).to_bytes(8, "little") + header, FaultFS()
    system.write_file("/a", data)
    with pytest.raises(er.CorruptTableError, match="expected arrays as safetensors"):
        dense.read(system, "", DenseEntry("a", len(data), dense.sha256_of(data)))
