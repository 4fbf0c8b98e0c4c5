"""Readers with ``memory="map"``: the same rows as with a cache, from pages that processes share, without a write."""

from __future__ import annotations

import itertools
import os
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import embedrock as er
import programs
import reference
from embedrock import kernels
from embedrock.errors import ArgumentError, CorruptTableError, UnsupportedError
from embedrock.io.vfs import System
from embedrock.kernels.constants import RUN_SHIFT
from embedrock.kernels.cpu.mapped import PLACE
from embedrock.storage.mapped_backend import MappedBackend, MappedSegments
from embedrock.store import manifest as manifests
from embedrock.table.table import rows_of
from on_system import on
from slow import slow_but
from suites import FaultFS
from suites.faultfs import CHANGES
from table_files import store_of

ROWS, DIM = 500, 5
TABLES: dict[str, dict[str, Any]] = {
    "adam": {"rule": er.Adam(lr=0.1)},
    "dense adam": {"rule": er.Adam(lr=0.1, dense=True)},
    "bfloat16": {"rule": er.SGD(lr=0.1), "dtype": "bfloat16"},
    "open ids": {"rule": er.Adagrad(lr=0.1), "rows": None, "dtype": "float16"},
    "come and go": {"rule": er.SGD(lr=0.1), "rows": None, "eviction": er.Eviction(max_rows=90)},
}


def mapped(path: str, **options: Any) -> Any:
    return er.open(path, mode="r", memory="map", **options)


def life(table: er.Table, rng: np.random.Generator) -> Iterator[None]:
    """Train, commit, compact and forget; yield after each commit."""
    for act in range(8):
        ids = rng.integers(0, ROWS, 60)
        table.update(ids, rng.standard_normal((60, DIM)).astype(np.float32))
        if act % 3 == 2:
            table.forget(rng.integers(0, ROWS, 9))
        table.commit(step=act)
        if act % 4 == 1:
            table.compact()
        yield


@pytest.mark.parametrize("options", slow_but(TABLES, "dense adam", "come and go"))
def test_rows_are_those_of_a_reader_with_a_cache(options: dict[str, Any], tmp_path: Path) -> None:
    path, rng = str(tmp_path / "t"), np.random.default_rng(0)
    given: dict[str, Any] = {"rows": ROWS, "dim": DIM, "path": path, "memory": "1MiB", "keep": 3}
    with er.Table(**given | options) as table:
        table.commit()
        follower = mapped(path)
        for _ in life(table, rng):
            follower.refresh()
            ids = rng.integers(0, ROWS, (7, 30))
            with er.open(path, mode="r", memory="1MiB") as expected, mapped(path) as found:
                for each in (found, follower):
                    np.testing.assert_array_equal(each.lookup(ids), expected.lookup(ids))
                    np.testing.assert_array_equal(each.lookup(ids[:0]), expected.lookup(ids[:0]))
                    for got, wanted in zip(each.export(), expected.export(), strict=True):
                        np.testing.assert_array_equal(got, wanted)
                    assert each.last_commit == expected.last_commit
            at = min(one["commit"] for one in table.commits())
            with er.open(path, mode="r", memory="1MiB", at=at) as expected, mapped(path, at=at) as found:
                np.testing.assert_array_equal(found.lookup(ids), expected.lookup(ids))
        follower.close()


SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (64,), (3, 0, 2), (5, 13), (1, 1300))
MISSING = None, "zeros", "raise", np.arange(DIM) / 4


def _result(ask: Callable[..., np.ndarray], *args: Any) -> Any:
    try:
        found = ask(*args)
    except er.EmbedrockError as error:
        return type(error), str(error)
    return found.shape, found.dtype, found.tobytes()


def _by_plan(table: er.Table, ids: np.ndarray) -> np.ndarray:
    return table.read(table.plan(ids))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "open ids", "dense"])
def test_lookups_are_those_of_a_plan_and_of_a_cache(kind: str, tmp_path: Path) -> None:
    er.set_threads(3)
    rng, path = np.random.default_rng(2), str(tmp_path / "t")
    rows, dtype = None if kind == "open ids" else ROWS, kind if kind[-1].isdigit() else "float32"
    rule = er.Adam(dense=True) if kind == "dense" else er.Adam()
    known = rng.integers(-(2**63), 2**63 - 1, 200) if rows is None else np.arange(0, ROWS, 3)
    grads, is_packed = rng.standard_normal((len(known), DIM)).astype(np.float32), dtype in ("int8", "int4")
    source = er.Table(rows, DIM, rule=rule, seed=1)
    source.update(known, grads)
    given: Any = {"rule": None} if is_packed else {"rule": rule}
    with er.Table(rows, DIM, path=path, dtype=dtype, seed=1, memory="1MiB", **given) as table:
        table.load_state(source) if is_packed else table.update(known, grads)
        table.commit()
        table.compact()
        if not is_packed:
            table.update(known[5:60], grads[5:60])
        table.forget(known[40:50])
        table.commit()
    with mapped(path) as found, er.open(path, mode="r", memory="1MiB") as cached:
        for shape, words in itertools.product(SHAPES, (np.int64, np.int32, np.uint64)):
            for others in (np.array([7]), np.array([-1, ROWS, ROWS + 1])):
                ids = rng.choice(np.concatenate([known, known[:9], others]), shape)
                ids = np.asarray(ids % 2**15 if rows is None and words is not np.int64 else ids).astype(words)
                for missing in MISSING if words is np.int64 else MISSING[:1]:
                    expected = _result(cached.lookup, ids, None, missing)
                    assert _result(found.lookup, ids, None, missing) == expected
                    out = np.full((*shape, DIM), 7, np.float32)
                    if isinstance(expected[0], tuple):
                        assert found.lookup(ids, out, missing) is out
                        assert out.tobytes() == expected[2]
                assert _result(_by_plan, found, ids) == _result(found.lookup, ids)
                assert _result(found.contains, ids) == _result(cached.contains, ids)


def test_members_of_a_group_are_mapped(tmp_path: Path) -> None:
    path, ids = str(tmp_path / "m"), np.arange(0, 90, 3)
    with er.Group(path=path, memory="1MiB") as group:
        for name in ("users", "items"):
            group.table(name, 100, DIM, rule=er.SGD(lr=1.0), init=er.Normal())
        group.update({"users": ids, "items": ids[::2]}, {"users": np.ones((30, DIM)), "items": np.ones((15, DIM))})
        group.commit()
        with er.open(path, mode="r", kind=er.Group) as expected, mapped(path) as found:
            asked = {"users": np.arange(100), "items": np.arange(100)}
            for name, rows in found.lookup(asked).items():
                np.testing.assert_array_equal(rows, expected[name].lookup(asked[name]))
                assert isinstance(rows_of(found[name]).tier.pool, MappedBackend)


def test_a_table_without_files_is_mapped(tmp_path: Path) -> None:
    with er.Table(ROWS, DIM, path=tmp_path / "t", init=er.Normal()) as table, mapped(str(tmp_path / "t")) as found:
        np.testing.assert_array_equal(found.lookup([1, 2]), table.lookup([1, 2]))
        assert len(found.export()[0]) == 0


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return the path of a table with a sorted segment and two logs."""
    path = str(tmp_path / "t")
    with er.Table(ROWS, DIM, path=path, rule=er.Adam(), memory="1MiB") as table:
        for act in range(4):
            table.assign(np.arange(act, 200, 1 + act), np.full((len(range(act, 200, 1 + act)), DIM), float(act)))
            table.commit()
            if act == 1:
                table.compact()
    return path


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_damage_is_an_error_and_names_the_row(path: str, kind: str) -> None:
    last = manifests.numbers(System(), path)[-1]
    name = next(name for name in manifests.read(System(), path, last).files if name.startswith(kind))
    with open(f"{path}/{name}", "r+b") as file:
        file.seek(4096)
        byte = file.read(1)[0]
        file.seek(4096)
        file.write(bytes([byte ^ 1]))
    with er.open(path, mode="r") as table, pytest.raises(CorruptTableError, match=re.escape(name)) as expected:
        table.export()
    ids = re.findall(r"ids ([\d, ]+)\.", str(expected.value))[0]
    with mapped(path) as found:
        for read in (found.export, lambda: found.lookup(np.arange(ROWS)), lambda: found.lookup([int(ids)])):
            with pytest.raises(CorruptTableError, match=rf"{re.escape(name)} is damaged: .*, ids {ids}\."):
                read()
        others = np.setdiff1d(np.arange(ROWS), [int(ids)])
        found.lookup(others)


def test_nothing_is_written_or_locked(path: str) -> None:
    class ReadOnly(System):
        def open(self, path: str, flags: int) -> int:
            assert flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) == 0, path
            return super().open(path, flags)

    def refuse(self: System, *args: Any) -> Any:
        raise AssertionError(args)

    for name in CHANGES - {"create"}:
        setattr(ReadOnly, name, refuse)
    before = {each: each.stat().st_mtime_ns for each in Path(path).rglob("*")}
    with on(ReadOnly())(mapped, path) as found:
        found.lookup(np.arange(ROWS))
        assert not found.refresh()
    assert {each: each.stat().st_mtime_ns for each in Path(path).rglob("*")} == before


def test_writers_cannot_be_mapped(path: str) -> None:
    text = re.escape('`memory="map"` is for readers: er.open(path, mode="r", memory="map").')
    for make in (
        lambda: er.open(path, memory="map"),
        lambda: er.Table(ROWS, DIM, memory="map"),
        lambda: er.Table(ROWS, DIM, path=path, memory="map"),
        lambda: er.Group(path=f"{path}-group", memory="map"),
    ):
        with pytest.raises(ArgumentError, match=text):
            make()


def test_a_gpu_is_refused(path: str) -> None:
    with mapped(path) as found, pytest.raises(UnsupportedError, match='opened with memory="map", have no place in RAM'):
        rows_of(found).tier.add_listener(cast(Any, None))


SHARED = """
import sys
import numpy as np
import embedrock as er

def status(name):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) << 10

with er.open(sys.argv[1], mode="r", memory="map") as table:
    table.lookup(np.arange(64))  # loads kernels
    before = {name: status(name) for name in ("RssAnon", "RssFile")}
    for first in range(0, table.spec.rows, 4096):
        table.lookup(np.arange(first, first + 4096))
    print(*(status(name) - before[name] for name in before))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_rows_lie_in_pages_of_files_and_not_in_those_of_the_process(tmp_path: Path) -> None:
    rows, path = 1 << 16, str(tmp_path / "t")
    with er.Table(rows, 128, path=path, memory="128MiB") as table:
        table.assign(np.arange(rows), np.ones((rows, 128), np.float32))
        table.commit()
    ended = programs.run(SHARED, programs.CORE, path)
    assert ended.returncode == 0, ended.stderr
    anonymous, of_files = map(int, ended.stdout.split())
    assert of_files > 30 << 20
    assert anonymous < 8 << 20


def test_closed_files_leave_memory_at_once(tmp_path: Path) -> None:
    path, maps = str(tmp_path / "t"), Path("/proc/self/maps")
    with er.Table(ROWS, DIM, path=path, rule=er.SGD(lr=1.0)) as table:
        table.update([1], np.ones((1, DIM)))
        table.commit()
        with mapped(path) as reader:
            arrays = [weakref.ref(run.file.mapped) for run in store_of(reader).runs.values()]
            assert [one for one in arrays if one() is not None]
        assert not [one for one in arrays if one() is not None]  # while the closed reader is still there

        with er.Subscriber(tmp_path / "served") as served:  # steps that are not shown any more
            for number in range(3):
                table.update([number], np.ones((1, DIM)))
                table.commit()
                er.publish(table, tmp_path / "served", keep_hours=0, dtype=("int8", None)[number % 2])
                served.refresh()
            if maps.exists():
                files = [line for line in maps.read_text().splitlines() if f"{tmp_path}/served" in line]
                assert files
                assert not [line for line in files if line.endswith("(deleted)")]


def test_files_in_memory_are_mapped_too() -> None:
    system = FaultFS()
    with on(system).Table(ROWS, DIM, path="/t", init=er.Zeros(), rule=er.SGD(lr=1.0)) as table:
        table.update([3], np.ones((1, DIM)))
        table.commit()
    with on(system)(mapped, "/t") as found:
        np.testing.assert_array_equal(found.lookup([3, 4])[:, 0], [-1, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("damage", [False, True])
def test_the_kernel_is_its_reference(tmp_path: Path, dtype: str, damage: bool) -> None:
    path, rng = str(tmp_path / "t"), np.random.default_rng(1)
    with er.Table(ROWS, DIM, path=path, rule=er.Adam(lr=0.1), dtype=dtype, memory="1MiB") as table:
        for _ in life(table, rng):
            pass
    with er.open(path, mode="r") as table:
        store, spec = store_of(table), table.spec
        segments = MappedSegments.of(store)
        low = segments.memory.ctypes.data
        files = {number: run.file.mapped for number, run in store.runs.items()}
        copies = {number: file.copy() for number, file in files.items()}
        memory, places = np.concatenate([copies[n].view(np.uint32) for n in copies]), segments.places.copy()
        start = 0
        for number, file in copies.items():
            places[number, 0] += start - (files[number].ctypes.data - low) // 4
            start += file.nbytes // 4
        ids = rng.integers(0, ROWS, 300)
        if damage:
            location = int(store.locate(ids).max())
            place = places[location >> RUN_SHIFT, 0] + (location & PLACE) * (spec.record_bytes // 4 + 1)
            memory[place + 1] ^= 4
        results = []
        for function in (reference.mapped.read, kernels.cpu.mapped.read):
            locations, out = np.empty(300, np.int64), np.empty((300, DIM), np.float32)
            records = np.zeros(300 * spec.record_bytes, np.uint8).reshape(300, -1)
            args = ids, locations, records, records.view(spec.words), out
            function(store.log_index.place, store.base.index, memory, places, *args, *((0, 300) if results else ()))
            results.append((locations, records, out))
        for expected, got in zip(*results, strict=True):
            np.testing.assert_array_equal(got, expected)
        assert (results[0][0] == -1).any()
        assert (results[0][0] < -1).any() == damage
