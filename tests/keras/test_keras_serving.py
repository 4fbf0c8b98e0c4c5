"""Rows as TensorFlow variables: the same bits as the table's, also where there is no Embedrock."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
from embedrock.batch.plan import make_plan
from embedrock.errors import IdTypeError, MemoryBudgetError, UnsupportedError
from embedrock.initializers import Initializer
from embedrock.keras.serving import table as serving
from embedrock.keras.serving.table import ServingTable, first_values, philox, pooled, standard_normal
from reference import generator
from support.bags import bags_of
from support.bags import pooled as pooled_by_kernels

EXTREMES = [0, -1, 2**63 - 1, -(2**63), 2**32, 2**31, 2**32 - 1]
INITIALIZERS = [
    er.Zeros(),
    er.Constant(-0.1),
    er.Uniform(-0.05, 0.05),
    er.Uniform(-3e37, 3e38),
    er.Normal(),
    er.Normal(0.3, 1e-5),
    er.Normal(0.0, 0.0),
    er.TruncatedNormal(0.3, 1e-5),
    er.TruncatedNormal(cut=6.0),
]

# Runs where `import embedrock` fails: compares the bits of what `lookup` returns with those of files.
COMPARE = """
import sys
sys.modules["embedrock"] = None
import pathlib, numpy as np, tensorflow as tf
for folder in sys.argv[1:]:
    served = tf.saved_model.load(folder)
    for ids in sorted(pathlib.Path(folder).glob("ids*.npy")):
        got, want = served.lookup(tf.constant(np.load(ids))).numpy(), np.load(str(ids).replace("ids", "rows"))
        assert got.shape == want.shape and (got.view(np.uint32) == want.view(np.uint32)).all(), str(ids)
    print(folder, "is right")
"""


def same_bits(got, want):
    return got.shape == want.shape and np.array_equal(np.asarray(got).view(np.uint32), want.view(np.uint32))


def some_ids(rows, count=100, seed=0):
    low, high = (-(2**63), 2**63 - 1) if rows is None else (0, rows)
    return np.random.default_rng(seed).integers(low, high, count)


def trained(rows, dim, **options):
    """Return a table with rows that were stepped, and their ids."""
    table, ids = er.Table(rows, dim, **{"rule": er.SGD(lr=0.1), **options}), np.unique(some_ids(rows))
    table.update(ids, np.random.default_rng(1).normal(size=(len(ids), dim)))
    return table, ids


def fresh_process(*folders):
    command = [sys.executable, "-c", COMPARE, *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def with_lookup(table, *limit, **options):
    """Return a table's rows as variables, with their lookup as a function that is saved with them."""
    served: Any = ServingTable(table, *limit, **options)
    served.lookup = tf.function(served, input_signature=[tf.TensorSpec(None, tf.int64, "ids")], autograph=False)
    return served


def save(folder: Path, table, *batches, **options):
    """Export a table alone, and beside it what it must say of batches of ids."""
    served = with_lookup(table, **options)
    tf.saved_model.save(served, str(folder), signatures=served.lookup)
    for number, ids in enumerate(batches):
        np.save(folder / f"ids{number}.npy", np.asarray(ids, np.int64))
        np.save(folder / f"rows{number}.npy", table.lookup(np.asarray(ids, np.int64)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("init", INITIALIZERS, ids=repr)
def test_first_values_have_the_bits_of_the_kernels(init, dtype):
    ids = np.r_[some_ids(None, 500), EXTREMES]
    for dim, seed in ((1, 0), (4, -5), (7, 2**64 - 1)):
        table = er.Table(None, dim, init=init, seed=seed, dtype=dtype)
        assert same_bits(first_values(table.spec, tf.constant(ids)).numpy(), table.lookup(ids))


def test_first_values_compiled_as_a_graph():
    table = er.Table(None, 6, init=er.Normal(0.3, 0.01), seed=9)
    ids = np.r_[some_ids(None, 500), EXTREMES]
    drawn = tf.function(lambda given: first_values(table.spec, given), autograph=False)
    assert same_bits(drawn(tf.constant(ids)).numpy(), table.lookup(ids))


def test_standard_normal_has_the_bits_of_the_reference():
    edges = np.arange(2**12)
    words = np.r_[edges, 2**31 + edges, 2**32 - 1 - edges, np.random.default_rng(2).integers(0, 2**32, 10**6)]
    got = standard_normal(tf.constant(words.astype(np.uint64))).numpy()
    assert same_bits(got, generator.standard_normal(words.astype(np.uint32)))


def test_philox_gives_the_known_answers():
    counter = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    words = philox([tf.constant([word], tf.uint64) for word in counter], 0x299F31D0A4093822)
    assert [int(word[0]) for word in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1000, 10**12, None])
def test_lookup_has_the_bits_of_the_table(rows, dtype):
    table, ids = trained(rows, 7, dtype=dtype)
    served = with_lookup(table)
    for batch in (ids, ids[:20].reshape(2, 5, 2), np.r_[some_ids(rows, 50, 1), ids[-1:], ids[-1:]], ids[3], ids[:0]):
        assert same_bits(served.lookup(tf.constant(batch)).numpy(), table.lookup(batch))


def test_a_small_limit_gives_the_same_rows():
    table, _ = trained(1000, 7)
    everything = np.arange(1000)
    whole, found = with_lookup(table), with_lookup(table, whole_bytes=1)
    assert len(whole.variables) == 1
    assert len(found.variables) == 3
    for served in (whole, found):
        assert same_bits(served.lookup(tf.constant(everything)).numpy(), table.lookup(everything))


def test_a_table_whose_rows_are_all_stepped_is_saved_whole_whatever_the_limit():
    table = er.Table(50, 4, rule=er.SGD())
    table.update(np.arange(50), np.ones((50, 4), np.float32))
    assert [variable.shape for variable in ServingTable(table, whole_bytes=1).variables] == [(50, 4)]


@pytest.mark.parametrize("rows", [1000, None])
def test_untouched_tables(rows):
    table = er.Table(rows, 3)
    served = with_lookup(table, whole_bytes=1)
    assert same_bits(served.lookup(tf.constant([[5, 7]], tf.int64)).numpy(), table.lookup([[5, 7]]))


def test_rows_that_lag_behind_are_exported_as_they_are_looked_up():
    table, ids = trained(None, 4, rule=er.Adam(dense=True))
    table.update(ids[:5], np.ones((5, 4), np.float32))
    assert same_bits(with_lookup(table).lookup(tf.constant(ids)).numpy(), table.lookup(ids))


@pytest.mark.parametrize("whole_bytes", [1, "1MiB"])
def test_tables_on_disk_with_a_small_cache(tmp_path, whole_bytes):
    table = er.Table(20_000, 32, path=tmp_path / "t.rock", memory="600KiB", rule=er.SGD(lr=0.1))
    for start in range(0, 4000, 500):
        table.update(np.arange(start, start + 500), np.ones((500, 32), np.float32))
    ids = np.arange(0, 20_000, 7)
    assert same_bits(with_lookup(table, whole_bytes).lookup(tf.constant(ids)).numpy(), table.lookup(ids))
    table.commit()
    table.close()


def test_rows_of_16_bits_are_kept_in_16_bits():
    table, _ = trained(None, 4, dtype="bfloat16")
    rows = [variable for variable in ServingTable(table).variables if "rows" in variable.name]
    assert [variable.dtype for variable in rows] == [tf.bfloat16]


@pytest.mark.parametrize("mode", ["sum", "weighted", "max"])
def test_bags_have_the_bits_of_the_kernels(mode):
    rng = np.random.default_rng(0)
    rows, offsets = (
        rng.normal(size=(500, 7)).astype(np.float32),
        np.r_[0, 0, np.sort(rng.integers(0, 500, 60)), 500, 500],
    )
    weights = rng.normal(size=500).astype(np.float32) if mode == "weighted" else None
    bags = bags_of(offsets, "max" if mode == "max" else "sum")
    want, _ = pooled_by_kernels(make_plan(np.arange(500)), rows, weights, bags)
    given = None if weights is None else tf.constant(weights)
    for function in (pooled, tf.function(pooled, autograph=False)):
        assert same_bits(function(tf.constant(rows), tf.constant(offsets), given, mode == "max").numpy(), want)


def test_bags_want_a_weight_for_each_id():
    with pytest.raises(tf.errors.InvalidArgumentError, match="1 values, but the requested shape has 3"):
        pooled(tf.ones((3, 2)), tf.constant([0, 3], tf.int64), tf.ones(1))


def test_ids_of_other_integers():
    table, _ = trained(100, 4)
    for dtype in (np.int32, np.uint8, np.uint64):
        ids = np.arange(100, dtype=dtype)
        assert same_bits(ServingTable(table)(tf.constant(ids)).numpy(), table.lookup(ids))


def test_the_static_shape_is_known():
    shapes = []
    served = ServingTable(er.Table(100, 4))
    tf.function(lambda ids: shapes.append(served(ids).shape)).get_concrete_function(tf.TensorSpec((None, 3), tf.int32))
    assert shapes[0].as_list() == [None, 3, 4]


@pytest.mark.parametrize(("rows", "bad"), [(1000, 1000), (1000, -1), (2**40, 2**40)])
def test_ids_outside_the_table_fail(rows, bad):
    served = with_lookup(er.Table(rows, 4, name="users"), whole_bytes="1MiB")
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        served.lookup(tf.constant([[5, 6], [bad, bad + 1]], tf.int64))
    for part in ("`ids` of table", "users", f"must lie in [0, {rows})", f"[{bad}] [at position] [2]"):
        assert part in caught.value.message


def test_unsigned_ids_beyond_int64_fail():
    served = ServingTable(er.Table(None, 4))
    assert served(tf.constant([2**63 - 1], tf.uint64)).shape == (1, 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must lie in"):
        served(tf.constant([2**63], tf.uint64))


def test_ids_that_are_no_integers_are_refused():
    with pytest.raises(IdTypeError, match="must be integers: got float32"):
        ServingTable(er.Table(10, 4))(tf.constant([1.0]))


def test_tables_made_from_an_array_are_saved_whole():
    array = np.random.default_rng(0).random((300, 4), np.float32)
    table = er.Table(300, 4, init=er.FromArray(array), rule=er.SGD(lr=1.0))
    table.update([7], np.ones((1, 4), np.float32))
    ids = np.arange(300)
    assert same_bits(with_lookup(table, whole_bytes=1).lookup(tf.constant(ids)).numpy(), table.lookup(ids))


@dataclass(frozen=True)
class Ids(Initializer):
    def fill(self, ids, key, out):
        out[:] = ids[:, None]


def test_an_initializer_that_tensorflow_does_not_know_needs_all_rows():
    table = er.Table(100, 4, init=Ids())
    assert same_bits(with_lookup(table, 1).lookup(tf.constant([7], tf.int64)).numpy(), table.lookup([7]))
    with pytest.raises(UnsupportedError, match=r"its ids are open, and its rows start as Ids.*only Python computes"):
        ServingTable(er.Table(None, 4, init=Ids()))


def test_rows_beyond_the_memory_are_refused(monkeypatch):
    monkeypatch.setattr(serving, "memory_limit", lambda: 1000)
    with pytest.raises(MemoryBudgetError, match=r"must fit this process's memory, 1000 B: they take 1\.6 KiB"):
        ServingTable(er.Table(100, 4))


@pytest.mark.slow  # test_export.py has a process that serves a model each time
def test_a_process_without_embedrock_reads_the_same_bits(tmp_path):
    whole, ids = trained(1000, 7, dtype="bfloat16")
    save(tmp_path / "whole", whole, np.arange(1000), ids.reshape(-1, 1), 5, [])
    found, ids = trained(10**9, 5, init=er.Normal(0.1, 0.01))
    save(tmp_path / "found", found, ids, np.r_[ids, some_ids(10**9, 99, 3)].reshape(1, -1, 1), 10**9 - 1, [])
    opened, ids = trained(None, 3, init=er.Uniform(-1, 1), seed=11)
    save(tmp_path / "open", opened, np.r_[ids, EXTREMES], some_ids(None, 60, 4).reshape(3, 4, 5))
    save(tmp_path / "wrong", opened, ids)
    rows = opened.lookup(ids)
    rows[-1, -1] = np.nextafter(rows[-1, -1], np.float32(9))
    np.save(tmp_path / "wrong" / "rows0.npy", rows)
    done = fresh_process(*(tmp_path / name for name in ("whole", "found", "open", "wrong")))
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        str(tmp_path / name) for name in ("whole", "found", "open")
    ]
    assert done.returncode == 1
    assert f"AssertionError: {tmp_path}/wrong/ids0.npy" in done.stderr


# Prints by how many GiB the anonymous memory (without pages of files) grew at most.
EXPORT_LARGE = """
import sys, threading, time
import numpy as np, tensorflow as tf, embedrock as er
from embedrock.keras.serving.table import ServingTable

def used():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 2**20

def watch():
    while True:
        peak[0] = max(peak[0], used())
        time.sleep(0.01)

array = np.load(sys.argv[1], mmap_mode="r")
tf.saved_model.save(ServingTable(er.Table(10, 4)), sys.argv[2] + "-first")
peak, before = [0.0], used()
threading.Thread(target=watch, daemon=True).start()
table = er.Table(*array.shape, init=er.FromArray(array), rule=er.SGD(lr=1.0))
table.update([0, len(array) - 1], np.ones((2, array.shape[1]), np.float32))
served = ServingTable(table)
lookup = tf.function(served, input_signature=[tf.TensorSpec(None, tf.int64, "ids")], autograph=False)
tf.saved_model.save(served, sys.argv[2], signatures=lookup)
print(peak[0] - before)
"""


@pytest.mark.slow
def test_a_table_of_3_gb_is_exported_in_its_own_size(tmp_path):
    shape = 12_600_000, 64  # 3.2e9 bytes
    array = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float32, shape)
    touched = np.r_[0, some_ids(shape[0], 500), shape[0] - 1]
    array[touched] = np.random.default_rng(0).random((len(touched), 64), np.float32)
    array.flush()
    command = [sys.executable, "-c", EXPORT_LARGE, str(tmp_path / "rows.npy"), str(tmp_path / "exported")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 3.01 + 0.4  # GiB: the rows, and some batches of them
    want = array[touched]
    want[[0, -1]] -= 1
    np.save(tmp_path / "exported" / "ids0.npy", touched)
    np.save(tmp_path / "exported" / "rows0.npy", want)
    assert "is right" in fresh_process(tmp_path / "exported").stdout
