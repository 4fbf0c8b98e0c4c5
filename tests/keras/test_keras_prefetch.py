"""`erk.prefetch`: the same batches and bits, rows that are there in time, and nothing that stays behind."""

from __future__ import annotations

import gc
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.io.vfs import System
from embedrock.keras.prefetch import STRATEGY_AHEAD, prefetch
from embedrock.table import batches as batches_of_tables
from embedrock.table.table import rows_of
from on_system import on
from slow import slow

ROWS, DIM, BATCH, COUNT = 2000, 4, 16, 20
SMALL = 8 * BATCH  # rows in the cache


class SlowDisk(System):
    """A disk whose reads take 2 ms."""

    def read_many(self, fds: Any, offsets: Any, sizes: Any, out: Any, starts: Any) -> None:
        time.sleep(2e-3)
        super().read_many(fds, offsets, sizes, out, starts)


class Watch:
    """Sees rows of any table that are brought ahead, and those that a lookup does not find in RAM."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.held: Counter[int] = Counter()
        self.most_held = self.brought = 0
        self.missing: list[int] = []
        bring, plan = er.Table.bring, batches_of_tables.plan

        def watched_bring(table: er.Table, ids: Any) -> Any:
            pin = bring(table, ids)
            release = pin.release
            self.held[id(pin)] += 1
            self.brought += 1
            self.most_held = max(self.most_held, self.holds)

            def watched_release() -> None:
                release()
                self.held.pop(id(pin), None)

            pin.release = watched_release
            self.kept.append(pin)  # so that no other one gets its number
            return pin

        def watched_plan(*batch: Any) -> Any:
            made = plan(*batch)
            self.missing += [part.plan.missing for part in made.parts]
            return made

        self.kept: list[Any] = []
        patch.setattr(er.Table, "bring", watched_bring)
        patch.setattr(batches_of_tables, "plan", watched_plan)

    @property
    def holds(self) -> int:
        return sum(self.held.values())


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def soon(condition: Callable[[], bool]) -> bool:
    for _ in range(3000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def batches(seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, ROWS, (COUNT * BATCH, 1)), rng.standard_normal((COUNT * BATCH, 1)).astype(np.float32)


def dataset(seed: int = 5) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(batches(seed)).batch(BATCH)


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Callable[..., er.Table]]:
    """Makes tables, all of whose rows are in files and none in RAM."""
    made: list[er.Table] = []

    def make(cached: int = SMALL, name: str = "t") -> er.Table:
        path, ids = tmp_path / f"{name}.rock", np.arange(ROWS)
        with er.Table(ROWS, DIM, rule=er.SGD(lr=0.1), path=path, seed=3) as table:
            table.assign(ids, table.lookup(ids))
            table.commit()
        made.append(on(SlowDisk()).open(path, memory=table.memory_for(cached)))
        return made[-1]

    yield make
    gc.collect()
    for table in made:
        if not rows_of(table).is_closed:
            if table.uncommitted:
                table.commit()
            table.close()


def model_of(table: er.Table) -> Any:
    keras.utils.set_random_seed(1)
    layers = [erk.Embedding(table), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((1,), dtype="int64"), *layers])
    model.compile(erk.optimizer(keras.optimizers.SGD(0.1)), "mse")
    return model


def first(x: Any, y: Any) -> Any:
    return x


# ---------------------------------------------------------------- the dataset


def shapes_of_datasets() -> dict[str, tuple[tf.data.Dataset, Any]]:
    ids = tf.data.Dataset.range(12)
    ragged = tf.ragged.constant([[0], [], [1, 2], [3, 4, 5]], dtype=tf.int64)
    return {
        "alone": (ids.batch(3), lambda x: x),
        "dict": (ids.map(lambda k: {"user": k, "item": k}).batch(3), lambda x: [x["user"], x["item"]]),
        "three": (ids.map(lambda k: (k, k, 1.0)).batch(5), lambda x, y, w: x),
        "int32": (ids.map(lambda k: tf.cast(k, tf.int32)).batch(3), lambda x: x),
        "nested": (ids.map(lambda k: ((k, k), k)).batch(5, drop_remainder=True), lambda x, y: {"a": x[0], "b": y}),
        "ragged": (tf.data.Dataset.from_tensor_slices(ragged).batch(2), lambda x: x),
        "sparse": (tf.data.Dataset.from_tensors(tf.sparse.from_dense([[1, 0], [0, 2]])), lambda x: x),
        "unknown length": (ids.filter(lambda k: k > 4).batch(2), lambda x: x),
        "empty": (ids.take(0).batch(3), lambda x: x),
    }


def flat(source: tf.data.Dataset) -> list[list[Any]]:
    parts = ([part.numpy() for part in tf.nest.flatten(item, expand_composites=True)] for item in source)
    return [[part.tolist() for part in item] for item in parts]


@pytest.mark.parametrize(
    "name", [*("dict", "nested", "ragged", "empty"), *slow("alone", "three", "int32", "sparse", "unknown length")]
)
def test_elements_are_those_of_the_dataset(name: str, on_disk: Callable[..., er.Table]):
    source, ids_of = shapes_of_datasets()[name]
    ahead = prefetch(source, {on_disk(): ids_of}, 2)
    assert ahead.element_spec == source.element_spec
    assert ahead.cardinality() == source.cardinality()
    assert flat(ahead) == flat(source)


def test_shuffles_and_options_are_those_of_the_dataset(on_disk: Callable[..., er.Table]):
    def shuffled(depth: int) -> list[Any]:
        tf.random.set_seed(3)
        source = tf.data.Dataset.range(40).shuffle(40, reshuffle_each_iteration=True).batch(4)
        options = tf.data.Options()
        options.threading.private_threadpool_size = 2
        ahead = prefetch(source.with_options(options), {table: lambda x: x}, depth)
        assert ahead.options().threading.private_threadpool_size == 2
        return [flat(ahead), flat(ahead)]

    table = on_disk()
    assert shuffled(2) == shuffled(0)
    assert shuffled(2)[0] != shuffled(2)[1]


def test_an_endless_dataset(on_disk: Callable[..., er.Table]):
    ahead = prefetch(tf.data.Dataset.range(4).repeat().batch(2), {on_disk(): lambda x: x}, 2)
    assert ahead.cardinality() == tf.data.INFINITE_CARDINALITY
    assert flat(ahead.take(5)) == [[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]], [[0, 1]]]


def test_depth_0_and_tables_in_ram(watch: Watch, on_disk: Callable[..., er.Table]):
    source, table = dataset(), on_disk()
    assert prefetch(source, {table: first}, 0) is source
    in_ram = er.Table(ROWS, DIM)
    assert flat(prefetch(source, {in_ram: first}, 2)) == flat(source)
    assert watch.brought == 0
    assert flat(prefetch(source, {in_ram: first, table: first}, 2)) == flat(source)
    assert watch.brought == COUNT


# ---------------------------------------------------------------- training


def trained(table: er.Table, depth: int, **fit: Any) -> tuple[Any, ...]:
    model = model_of(table)
    train, other = (prefetch(dataset(seed), {model.layers[0]: first}, depth) for seed in (5, 6))
    history = model.fit(train, validation_data=other, verbose=0, **fit)
    found = [history.history["loss"], history.history["val_loss"], *table.export(), *model.layers[-1].get_weights()]
    table.commit()
    table.close()
    return tuple(np.asarray(part).tobytes() for part in found)


def test_fit_gives_the_same_bits(watch: Watch, on_disk: Callable[..., er.Table]):
    expected = trained(on_disk(ROWS, "a"), 0, epochs=2)
    assert watch.brought == 0
    for depth in (1, 3):
        assert trained(on_disk(SMALL, f"b{depth}"), depth, epochs=2) == expected
    assert watch.brought == 8 * COUNT
    assert soon(lambda: watch.holds == 0)


def test_rows_are_there_when_they_are_looked_up(watch: Watch, on_disk: Callable[..., er.Table]):
    table = on_disk()
    model = model_of(table)
    watch.missing.clear()
    model.fit(prefetch(dataset(), {model.layers[0]: first}, 2), epochs=2, verbose=0)
    assert watch.missing == [0] * 2 * COUNT
    assert watch.most_held == 3
    stats = table.stats()
    assert stats["evictions"] > 0  # the cache is so small that they were not there by chance
    watch.missing.clear()
    model.fit(dataset(), verbose=0)
    assert sum(watch.missing) > COUNT * BATCH / 2


def test_in_a_loop(watch: Watch, on_disk: Callable[..., er.Table]):
    table = on_disk()
    layer = erk.Embedding(table)
    for x, _ in prefetch(dataset(), {layer: first}, 2):
        assert table.plan(x.numpy()).missing == 0
        assert layer(x).shape == (BATCH, 1, DIM)

    @tf.function
    def total(source: tf.data.Dataset) -> Any:
        rows = tf.constant(0.0)
        for x, _ in source:
            rows += tf.reduce_sum(layer(x))
        return rows

    found = float(total(prefetch(dataset(), {layer: first}, 2)))
    assert found == pytest.approx(float(sum(table.lookup(x).sum() for x, _ in dataset().as_numpy_iterator())))
    assert soon(lambda: watch.holds == 0)


# ---------------------------------------------------------------- however a pass ends


def leave(source: tf.data.Dataset) -> None:
    for _ in source:
        raise KeyError


def test_a_loop_that_is_left_lets_rows_go(watch: Watch, on_disk: Callable[..., er.Table]):
    table = on_disk()
    ahead = prefetch(dataset(), {table: first}, 2)
    for k, _ in enumerate(ahead):
        if k == 4:
            break
    assert soon(lambda: watch.holds == 0)
    with pytest.raises(KeyError):
        leave(ahead)
    gc.collect()
    assert soon(lambda: watch.holds == 0)
    iterator = iter(ahead)
    next(iterator)
    assert soon(lambda: watch.holds == 3)
    others = iter(ahead)
    next(others)
    assert soon(lambda: watch.holds == 6)
    del iterator
    assert soon(lambda: watch.holds == 3)
    del others
    assert soon(lambda: watch.holds == 0)
    assert rows_of(table).tier.cache.victims(1).size == 1  # pyright: ignore
    assert list(ahead)
    assert soon(lambda: watch.holds == 0)


def test_steps_per_epoch_and_a_callback_that_stops(watch: Watch, on_disk: Callable[..., er.Table]):
    model = model_of(on_disk())
    ahead = prefetch(dataset(), {model.layers[0]: first}, 2)
    model.fit(ahead.repeat(), epochs=3, steps_per_epoch=4, verbose=0)
    gc.collect()
    assert soon(lambda: watch.holds == 0)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                raise KeyError(batch)

    with pytest.raises(KeyError):
        model.fit(ahead, callbacks=[Stop()], verbose=0)
    gc.collect()
    assert soon(lambda: watch.holds == 0)


def test_a_table_can_go(tmp_path: Path):
    table = er.Table(ROWS, DIM, path=tmp_path / "t.rock")
    ahead = prefetch(dataset(), {table: first}, 2)
    assert len(list(ahead)) == COUNT
    gone = weakref.ref(table)
    del table, ahead
    gc.collect()
    assert soon(lambda: gone() is None)


def test_an_error_of_the_dataset(watch: Watch, on_disk: Callable[..., er.Table]):
    def fail(x: Any, y: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(x, np.int64(ROWS - 1), "spoilt")]):
            return tf.identity(x), y

    x, y = batches()
    x[5 * BATCH] = ROWS - 1
    source = tf.data.Dataset.from_tensor_slices((np.minimum(x, ROWS - 1), y)).batch(BATCH).map(fail)
    with pytest.raises(tf.errors.InvalidArgumentError, match="spoilt"):
        list(prefetch(source, {on_disk(): first}, 2))
    gc.collect()
    assert soon(lambda: watch.holds == 0)


# ---------------------------------------------------------------- bad input


def refusal(model: Any, data: tf.data.Dataset) -> str:
    """Return the text of the error of `fit`."""
    with pytest.raises(tf.errors.OpError) as caught:
        model.fit(data, verbose=0)
    return str(caught.value)


def test_ids_outside_of_the_table_are_the_layers_to_refuse(watch: Watch, on_disk: Callable[..., er.Table]):
    table = on_disk()
    model = model_of(table)
    x, y = batches()
    x[-1] = ROWS
    source = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    def text(data: tf.data.Dataset) -> str:
        return next(line for line in refusal(model, data).splitlines() if "must lie in" in line)

    assert re.search(rf"got {ROWS} at \[\d+, 0\] of ids of shape \(\d+, 1\)", text(source))
    assert text(prefetch(source, {model.layers[0]: first}, 2)) == text(source)
    assert watch.brought == COUNT - 1
    gc.collect()
    assert soon(lambda: watch.holds == 0)


def test_a_cache_that_is_too_small_says_what_is_enough(watch: Watch, on_disk: Callable[..., er.Table]):
    table, depth = on_disk(), 12
    model = model_of(table)
    text = refusal(model, prefetch(dataset(), {model.layers[0]: first}, depth))
    assert "CacheTooSmallError: the cache of" in text
    assert f"erk.prefetch with depth={depth} keeps the rows of {depth + 1} batches" in text
    assert "is enough for them, and a lower `depth` needs less" in text
    gc.collect()
    assert soon(lambda: watch.holds == 0)
    model.fit(prefetch(dataset(), {model.layers[0]: first}, 1), verbose=0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (lambda data, layer: ([1], {layer: first}), r"`dataset` of erk.prefetch must be a tf.data.Dataset: got \[1\]"),
        (lambda data, layer: (data, {}), "must be a dict from layers to functions: got {}"),
        (lambda data, layer: (data, first), "must be a dict from layers to functions"),
        (lambda data, layer: (data, {keras.layers.Dense(1): first}), "must have layers of Embedrock's as its keys"),
        (lambda data, layer: (data, {layer: 3}), "must have functions of a batch as its values: got 3"),
        (lambda data, layer: (data, {layer: first}, -1), "whole number of batches, 0 or more: got -1"),
        (lambda data, layer: (data, {layer: first}, True), "whole number of batches, 0 or more: got True"),
        (lambda data, layer: (data, {layer: first}, 1.5), "whole number of batches, 0 or more: got 1.5"),
    ],
)
def test_what_it_refuses(arguments: Any, text: str):
    with pytest.raises(er.ArgumentError, match=text):
        prefetch(*arguments(dataset(), erk.Embedding(10, 2)))


def test_inside_of_a_function_of_tensorflow(on_disk: Callable[..., er.Table]):
    layer, source = erk.Embedding(on_disk()), dataset()

    @tf.function(autograph=False)
    def inside() -> Any:
        return prefetch(source, {layer: first}).reduce(0.0, lambda total, _: total)

    with pytest.raises(er.UnsupportedError, match="outside of tf"):
        inside()


def test_ids_that_are_no_integers(on_disk: Callable[..., er.Table]):
    layer = erk.Embedding(on_disk(), name="user")
    with pytest.raises(er.IdTypeError, match=r"ids for 'user', erk.Embedding.* must be integers.*got float32"):
        prefetch(dataset(), {layer: lambda x, y: y})


# ---------------------------------------------------------------- strategies


def test_under_a_strategy(watch: Watch, on_disk: Callable[..., er.Table]):
    def run(depth: int, name: str) -> Any:
        table = on_disk(name=name)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            model = model_of(table)
            model.build((None, 1))
        ahead = prefetch(dataset(), {model.layers[0]: first}, depth)
        watch.missing.clear()
        model.fit(ahead, epochs=2, verbose=0)
        gc.collect()
        assert soon(lambda: watch.holds == 0)
        seen = [
            [part.numpy().tolist() for part in strategy.experimental_local_results(x)]
            for x, _ in strategy.experimental_distribute_dataset(ahead)
        ]
        return seen, model, table

    seen, model, table = run(0, "a")
    assert watch.brought == 0
    assert sum(watch.missing) > 0
    ahead_seen, ahead_model, ahead_table = run(2, "b")
    assert ahead_seen == seen
    assert sum(watch.missing) == 0
    assert watch.most_held == 3 + STRATEGY_AHEAD
    assert all(map(np.array_equal, table.export(), ahead_table.export()))
    assert np.array_equal(model.layers[-1].get_weights()[0], ahead_model.layers[-1].get_weights()[0])
