"""Layers of ours under a `MultiWorkerMirroredStrategy` of two real processes: tables replicated, and sharded by id."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import dense_twins as twins
import keras
import numpy as np
import pytest
import tensorflow as tf
from workers import outcomes_of, run

import embedrock as er
import embedrock.keras as erk
from benchmarks.processes import child_environment
from embedrock.batch.ids import HASH_BITS
from embedrock.distributed.owners import owners
from embedrock.distributed.resharding import reshard
from embedrock.errors import ArgumentError, EmbedrockError
from embedrock.keras.saving.checkpoint import TableCheckpoint
from embedrock.keras.workers.cluster import distribute, has_several_workers
from reference.codec import decode, encode_nearest

WORKERS, BATCH = 2, 16
ROUNDING: Any = {"rtol": 2e-5, "atol": 2e-6}

# Whatever uses TensorFlow runs in the workers, and starts with a strategy: what it makes must be made before all else.


def strategy_here() -> Any:
    return tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else tf.distribute.get_strategy()


def rank_of(strategy: Any) -> int:
    return strategy.cluster_resolver.task_id if has_several_workers(strategy) else 0


def dataset(bad: int | None = None) -> Any:
    ids, targets = twins.batches()
    if bad is not None:
        targets[bad] = np.inf
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices((ids, targets)).batch(BATCH).with_options(options)


def model_of(strategy: Any, embedding: Any, optimizer: Any) -> Any:
    """Return a compiled model that reads some rows of a table twice."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layer = embedding()
        ids: Any = keras.Input((twins.LENGTH,), dtype="int64")
        model: Any = twins.head(ids, keras.layers.Add()([layer(ids), layer(ids[:, ::-1])]))
        model.compile(optimizer(), "mse", run_eagerly=not has_several_workers(strategy))  # one is sooner done so
    return distribute(model) if has_several_workers(strategy) else model


def rows_of(sharded: bool, path: Path | None = None, **policies: Any) -> Any:
    return erk.Embedding(twins.ROWS, twins.DIM, er.Normal(std=0.1), seed=5, path=path, sharded=sharded, **policies)


def adam() -> Any:
    return erk.optimizer(keras.optimizers.Adam(0.05))


def state_of(model: Any) -> dict[str, Any]:
    """Return the rows that are here, the ids of those that were stepped, and all else."""
    table = next(layer for layer in model.layers if isinstance(layer, erk.Embedding)).table
    dense = [variable.numpy() for variable in model.trainable_variables if variable.name != "rows"]
    return {
        "rows": twins.every_row(table),
        "stepped": np.sort(table.export()[0]),
        "dense": dense,
        "steps": table.steps,
        "path": table.path,
        "bits": HASH_BITS if table.spec.segments == 1 else table.spec.segments.bit_length() - 1,
    }


def merged(results: list[dict[str, Any]]) -> np.ndarray:
    """Return the rows of a sharded table, each of its owner."""
    of = owners(np.arange(twins.ROWS), len(results), results[0]["bits"])
    return np.stack([results[rank]["rows"][row] for row, rank in enumerate(of)])


def check_state(results: list[dict[str, Any]], expected: dict[str, Any], sharded: bool) -> None:
    for result in results:
        assert result["steps"] == expected["steps"]
        for one, other in zip(result["dense"], expected["dense"], strict=True):
            np.testing.assert_allclose(one, other, **ROUNDING)
    for one, other in zip(results[0]["dense"], results[-1]["dense"], strict=True):
        np.testing.assert_array_equal(one, other)
    if sharded:
        np.testing.assert_allclose(merged(results), expected["rows"], **ROUNDING)
        check_parts(results, expected["stepped"])
    else:
        np.testing.assert_allclose(results[0]["rows"], expected["rows"], **ROUNDING)
        np.testing.assert_array_equal(results[0]["rows"], results[-1]["rows"])


def check_parts(results: list[dict[str, Any]], stepped: np.ndarray) -> None:
    """Check that each worker has its own rows, and no others."""
    for rank, result in enumerate(results):
        of = owners(stepped, len(results), result["bits"])
        np.testing.assert_array_equal(result["stepped"], stepped[of == rank])


# ---------------------------------------------------------------- training


def fitted(strategy: Any, sharded: bool, path: Path | None = None, **policies: Any) -> dict[str, Any]:
    model = model_of(strategy, lambda: rows_of(sharded, path, **policies), adam)
    history = model.fit(dataset(), epochs=2, verbose=0).history
    predicted = model.predict(dataset().map(lambda ids, _: ids), verbose=0)
    return {**state_of(model), "losses": history["loss"], "predicted": predicted}


def looped(strategy: Any, sharded: bool) -> dict[str, Any]:
    """A loop of one's own that clips gradients itself."""
    model = model_of(strategy, lambda: rows_of(sharded), adam)

    def replica_step(ids: tf.Tensor, targets: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(ids, training=True) - targets) ** 2) / BATCH
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    @tf.function
    def train_step(batch: Any) -> None:
        strategy.run(replica_step, args=batch)

    for batch in strategy.experimental_distribute_dataset(dataset()):
        train_step(batch)
    return state_of(model)


def scaled(strategy: Any, sharded: bool, bad: int) -> dict[str, Any]:
    """Loss scaling, with a step that is skipped for the sake of one sample."""
    scaler = keras.optimizers.LossScaleOptimizer
    model = model_of(strategy, lambda: rows_of(sharded), lambda: scaler(adam(), initial_scale=2.0**10))
    model.fit(dataset(bad), verbose=0)
    optimizer = model.optimizer
    return {
        **state_of(model),
        "scale": float(optimizer.dynamic_scale.numpy()),
        "iterations": int(optimizer.iterations.numpy()),
    }


def pooled(strategy: Any, sharded: bool) -> dict[str, Any]:
    """Bags of weighted rows, and rows of the same table, by one lookup."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layer = rows_of(sharded)
        ids: Any = keras.Input((twins.LENGTH,), dtype="int64")
        bag = erk.EmbeddingBag(layer.table, mode="max")
        both = erk.EmbeddingCollection({"rows": layer, "bags": bag})({"rows": ids, "bags": ids})
        joined = keras.layers.Concatenate(axis=1)([both["rows"], keras.layers.Reshape((1, twins.DIM))(both["bags"])])
        model: Any = twins.head(ids, joined)
        model.compile(adam(), "mse")
        model.embedding = layer
    model = distribute(model) if has_several_workers(strategy) else model
    model.fit(dataset(), verbose=0)
    dense = [variable.numpy() for variable in model.trainable_variables if variable.name != "rows"]
    table = layer.table
    return {"rows": twins.every_row(table), "stepped": np.sort(table.export()[0]), "dense": dense, "steps": table.steps}


BAD = {"of the first worker": 17, "of the second worker": 30}


def tour(folder: Path) -> dict[str, dict[str, Any]]:
    """Train one model after the other."""
    folder.mkdir(exist_ok=True)
    strategy = strategy_here()
    made = {"replicated": fitted(strategy, False), "sharded on disk": fitted(strategy, True, folder / "items.rock")}
    made["replicated"]["drawn"] = drawn_seeds(strategy)
    policies: dict[str, Any] = {
        "admission": er.Admission(2, within=6, default="zeros"),
        "eviction": er.Eviction(idle=2),
    }
    policies["rule"] = er.Adam()
    made["sharded, rows come and go"] = fitted(strategy, True, **policies)
    return made


def drawn_seeds(strategy: Any) -> list[int]:
    """Return the seeds of layers that were given none, on workers whose own would differ."""
    keras.utils.set_random_seed(rank_of(strategy))
    with strategy.scope():
        return [erk.Embedding(9, 2, sharded=sharded).table.spec.seed for sharded in (False, True)]


def long_tour(folder: Path) -> dict[str, dict[str, Any]]:
    strategy = strategy_here()
    made = {"sharded": fitted(strategy, True), "loop, replicated": looped(strategy, False)}
    made |= {"loop, sharded": looped(strategy, True)}
    folder.mkdir(exist_ok=True)
    own = folder / f"own-{rank_of(strategy)}.rock"
    made |= {"replicated on disk": fitted(strategy, False, own)}
    made |= {"bags, replicated": pooled(strategy, False), "bags, sharded": pooled(strategy, True)}
    for name, bad in BAD.items():
        made |= {
            f"scaled {name}, {kind}": scaled(strategy, kind == "sharded", bad) for kind in ("sharded", "replicated")
        }
    return made


def check_tour(function: Any, folder: Path) -> None:
    by_workers = run(function, folder / "two", workers=WORKERS)
    expected = run(function, folder / "one", workers=1)[0]
    for name, one in expected.items():
        results = [each[name] for each in by_workers]
        assert name != "sharded, rows come and go" or 0 < len(one["stepped"]) < len(expected["replicated"]["stepped"])
        check_state(results, one, "sharded" in name)
        for key in one.keys() & {"losses", "predicted", "scale", "iterations", "drawn"}:
            np.testing.assert_allclose(results[0][key], one[key], **ROUNDING)
            np.testing.assert_array_equal(results[0][key], results[-1][key])
    for name in by_workers[0]:
        if name.startswith("scaled"):
            assert expected[name]["iterations"] == 5  # of six batches
            assert expected[name]["scale"] == 2.0**9
        if name == "sharded on disk":
            parts = [Path(each[name]["path"]).name for each in by_workers]
            assert parts == ["shard-0-of-2", "shard-1-of-2"]


@pytest.mark.slow
def test_two_workers_train_as_one_process(tmp_path: Path) -> None:
    check_tour(tour, tmp_path)


@pytest.mark.slow
def test_two_workers_train_as_one_process_in_all_ways(tmp_path: Path) -> None:
    check_tour(long_tour, tmp_path)


@pytest.mark.slow
def test_three_workers_share_a_table() -> None:
    results = run(fitted_alone, workers=3)
    for one in results[1:]:
        for ours, theirs in zip(one["dense"], results[0]["dense"], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    stepped = np.sort(np.concatenate([one["stepped"] for one in results]))
    np.testing.assert_array_equal(stepped, np.unique(twins.batches()[0]))
    check_parts(results, stepped)


def fitted_alone() -> dict[str, Any]:
    return fitted(strategy_here(), True)


def committed(path: Path) -> dict[str, Any]:
    model = model_of(strategy_here(), lambda: rows_of(True, path), adam)
    model.fit(dataset(), verbose=0)
    layer = next(layer for layer in model.layers if isinstance(layer, erk.Embedding))
    layer.table.commit(step=1)
    return state_of(model)


OPENED_BY_TORCH = """
import sys
import numpy as np, torch, torch.distributed as dist, embedrock as er, embedrock.torch as ert
path, rank, ranks, rows, dim = sys.argv[1], *map(int, sys.argv[2:])
dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=ranks)
layer = ert.Embedding(rows, dim, init=er.Normal(std=0.1), seed=5, path=path, sharded=True)
np.savez(f"{path}.{rank}.npz", rows=layer(torch.arange(rows)).detach().numpy(), own=np.sort(layer.table.export()[0]))
dist.barrier()
"""


@pytest.mark.slow
def test_a_table_of_four_workers_is_opened_by_three_ranks_of_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path, ranks = tmp_path / "items.rock", 3
    trained = run(committed, path, workers=4)
    reshard(str(path), ranks)
    command = [sys.executable, "-c", OPENED_BY_TORCH, str(path)]
    numbers = [[str(number) for number in (rank, ranks, twins.ROWS, twins.DIM)] for rank in range(ranks)]
    processes = [subprocess.Popen([*command, *each], env=child_environment()) for each in numbers]
    assert [process.wait(120) for process in processes] == [0] * ranks
    stepped = np.sort(np.concatenate([worker["stepped"] for worker in trained]))
    for rank in range(ranks):
        found = np.load(f"{path}.{rank}.npz")
        np.testing.assert_array_equal(found["rows"], merged(trained))
        np.testing.assert_array_equal(found["own"], stepped[owners(stepped, ranks) == rank])


def in_16_bits() -> dict[str, np.ndarray]:
    """Look rows up and step them by gradients that are known, both sent as bfloat16."""
    strategy = strategy_here()
    rank, draw = rank_of(strategy), np.random.default_rng(rank_of(strategy))
    with strategy.scope():
        keras.utils.set_random_seed(1)
        layer: Any = erk.Embedding(twins.ROWS, twins.DIM, er.Normal(std=0.1), seed=5, sharded=True, wire="bfloat16")
        layer.build()
        optimizer = erk.optimizer(keras.optimizers.SGD(1.0))
        optimizer.build(layer.trainable_variables)
    assert layer.get_config()["wire"] == "bfloat16"
    ids, grads = np.arange(20) + 5 * rank, draw.normal(size=(20, twins.DIM)).astype(np.float32)

    def replica_step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = layer(tf.constant(ids), training=True)
            loss = tf.reduce_sum(rows * grads)
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return rows

    seen = np.asarray(strategy.run(tf.function(replica_step)))
    return {"ids": ids, "grads": grads, "seen": seen, "rows": twins.every_row(layer.table)}


@pytest.mark.slow
def test_rows_and_gradients_are_sent_in_16_bits_where_it_is_said() -> None:
    results = run(in_16_bits, workers=WORKERS)
    expected = er.Table(twins.ROWS, twins.DIM, init=er.Normal(std=0.1), seed=5).lookup(np.arange(twins.ROWS))
    first = in_bfloat16(expected)
    for one in results:
        np.testing.assert_array_equal(one["seen"], first[one["ids"]])
    total = np.zeros_like(expected)
    for one in results:
        total[one["ids"]] += in_bfloat16(one["grads"])
    np.testing.assert_array_equal(merged(results), expected - total)  # owners keep float32, and add up in it


def in_bfloat16(values: np.ndarray) -> np.ndarray:
    return decode(encode_nearest(values, np.uint16))


# ---------------------------------------------------------------- who has which rows


def test_owners_are_spread_evenly_whatever_the_ids() -> None:
    for ids in (np.arange(9000), 6 * np.arange(9000), 2**40 * np.arange(-4500, 4500)):
        for workers in (2, 3, 7):
            counts = np.bincount(owners(ids, workers), minlength=workers)
            assert np.abs(counts / len(ids) - 1 / workers).max() < 0.03


def test_owners_are_as_documented() -> None:
    ids = [0, 1, 2, 123456789, -1, 2**63 - 1]
    expected = [((i * 0x9E3779B97F4A7C15 % 2**64) >> 32) * 3 >> 32 for i in ids]
    assert owners(np.array(ids), 3).tolist() == expected


def test_in_one_process_a_sharded_table_is_a_table(tmp_path: Path) -> None:
    layer = erk.Embedding(10, 2, path=tmp_path / "items.rock", sharded=True)
    assert layer.table.path == str(tmp_path / "items.rock")
    assert layer.get_config()["sharded"] is True
    layer.table.close()


def test_one_process_does_not_open_a_table_of_two(tmp_path: Path) -> None:
    (tmp_path / "items.rock" / "shard-1-of-2").mkdir(parents=True)
    with pytest.raises(ArgumentError, match="must be opened by as many processes as its parts, 2: got 1"):
        erk.Embedding(10, 2, path=tmp_path / "items.rock", sharded=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wire": "float16", "sharded": True}, r"`wire` of erk.Embedding must be one of 'float32', 'bfloat16': got"),
        ({"wire": "bfloat16"}, r"`wire` of erk.Embedding is of rows that are shared out: got .*sharded=False"),
        ({"wire": "bfloat16", "sharded": True, "dtype": "float16"}, r"`wire` .*rows of float16, .*as they are"),
    ],
)
def test_what_wire_may_be_is_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        erk.Embedding(10, 2, **options)


def test_a_ready_made_table_cannot_be_sharded() -> None:
    with pytest.raises(ArgumentError, match=r"`sharded` of erk\.Embedding goes with a table that the layer makes"):
        erk.Embedding(er.Table(10, 2), sharded=True)


# ---------------------------------------------------------------- what is refused


def refusals(folder: Path) -> dict[str, str]:
    strategy = strategy_here()
    model = model_of(strategy, lambda: rows_of(True), adam)
    own = np.flatnonzero(owners(np.arange(twins.ROWS), WORKERS) == rank_of(strategy))
    ids = np.resize(own, (3, twins.LENGTH))
    alone = np.asarray(model(ids))
    said = {"own rows": str(alone.shape)}
    (folder / "of-three.rock" / "shard-0-of-3").mkdir(parents=True, exist_ok=True)
    outside = rows_of(True)

    def accumulating() -> Any:
        return erk.optimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))

    early = adam()
    for name, make in {
        "rows of others": lambda: model(np.arange(twins.LENGTH)[np.newaxis]),
        "three workers": lambda: model_of(strategy, lambda: rows_of(True, folder / "of-three.rock"), adam),
        "made outside": lambda: model_of(strategy, lambda: outside, adam),
        "accumulation": lambda: model_of(strategy, lambda: rows_of(True), accumulating).fit(dataset()),
        "early optimizer": lambda: model_of(strategy, lambda: rows_of(True), lambda: early).fit(dataset()),
        "save": lambda: model.save(folder / f"model-{rank_of(strategy)}.keras"),
        "export": lambda: erk_export(model, folder / "export"),
    }.items():
        try:
            make()
            said[name] = "nothing"
        except (EmbedrockError, tf.errors.OpError) as error:
            said[name] = str(error)
    return said


def erk_export(model: Any, folder: Path) -> None:
    from embedrock.keras.export import export

    export(model, str(folder))


REFUSED = {
    "own rows": r"\(3, 1\)",
    "rows of others": r"is sharded, and rows of ids \[.*\] are not here: this is worker \d of 2. Look them up on all",
    "three workers": "must be opened by as many processes as its parts, 3: got 2",
    "made outside": "was made as part 0 of 1, but is built as part . of 2. Make and build the model inside",
    "accumulation": "gradient_accumulation_steps=2 of SGD cannot go with several replicas: Keras 3",
    "early optimizer": "must be made under the strategy that the layer is under, CollectiveAllReduceStrategy: got one",
    "save": "cannot be saved: its table is sharded, .* made by erk.TableCheckpoint",
    "export": "cannot be exported: its table is sharded, and this worker has one of 2 parts",
}


@pytest.mark.slow
def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    for said in run(refusals, tmp_path, workers=WORKERS):
        for name, text in REFUSED.items():
            assert re.search(text, said[name]), (name, said[name])


# ---------------------------------------------------------------- a worker dies

EPOCHS = 4


def fit_until(folder: Path, victim: int, fatal_batch: int) -> dict[str, Any]:
    """Fit with checkpoints; a worker is killed in the `fatal_batch`-th batch."""
    strategy = strategy_here()
    folder.mkdir(exist_ok=True)
    rank, seen = rank_of(strategy), []

    def end(batch: int, logs: Any) -> None:
        seen.append(batch)
        if rank == victim and len(seen) == fatal_batch:
            os.kill(os.getpid(), signal.SIGKILL)

    model = model_of(strategy, lambda: rows_of(True, folder / "items.rock"), adam)
    killer = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    checkpoint = TableCheckpoint(folder / "checkpoints")
    model.fit(dataset(), epochs=EPOCHS, verbose=0, callbacks=[checkpoint, killer])
    return {**state_of(model), "batches": len(seen), "iterations": int(model.optimizer.iterations.numpy())}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_worker_was_killed_all_go_on_from_the_same_step(tmp_path: Path, victim: int) -> None:
    uninterrupted = run(fit_until, tmp_path / "a", victim, 0, workers=WORKERS)
    killed = outcomes_of(fit_until, tmp_path / "b", victim, 15, workers=WORKERS, timeout_s=60)
    assert killed[victim].code == -signal.SIGKILL
    assert "WorkerLostError" in killed[1 - victim].error
    assert killed[1 - victim].seconds < 40
    resumed = run(fit_until, tmp_path / "b", victim, 0, workers=WORKERS)
    for one, other in zip(resumed, uninterrupted, strict=True):
        assert one["batches"] == 12  # of 24
        assert one["iterations"] == other["iterations"] == 24
        np.testing.assert_array_equal(one["rows"], other["rows"])
        for mine, theirs in zip(one["dense"], other["dense"], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def unpublish(folder: Path, step: int) -> None:
    """Leave a checkpoint as a worker leaves it that is killed just before it exists."""
    (file,) = (file for file in folder.glob(f"step-{step}-*.weights.h5") if ".tmp." not in file.name)
    file.rename(file.with_name(file.name.replace(".weights.h5", ".tmp.weights.h5")))


@pytest.mark.slow
def test_a_checkpoint_that_not_all_workers_have_is_dropped(tmp_path: Path) -> None:
    uninterrupted = run(fit_until, tmp_path, -1, 0, workers=WORKERS)
    unpublish(tmp_path / "checkpoints" / "worker-1-of-2", step=24)
    resumed = run(fit_until, tmp_path, -1, 0, workers=WORKERS)
    for one, other in zip(resumed, uninterrupted, strict=True):
        assert (one["batches"], one["iterations"]) == (6, 24)
        np.testing.assert_array_equal(one["rows"], other["rows"])


@pytest.mark.slow
def test_without_a_checkpoint_of_all_workers_they_start_anew(tmp_path: Path) -> None:
    uninterrupted = run(fit_until, tmp_path / "a", -1, 0, workers=WORKERS)
    killed = outcomes_of(fit_until, tmp_path / "b", 0, 8, workers=WORKERS, timeout_s=60)
    assert killed[0].code == -signal.SIGKILL
    unpublish(tmp_path / "b" / "checkpoints" / "worker-0-of-2", step=6)
    resumed = run(fit_until, tmp_path / "b", -1, 0, workers=WORKERS)
    assert [one["batches"] for one in resumed] == [24, 24]
    for one, other in zip(resumed, uninterrupted, strict=True):
        np.testing.assert_array_equal(one["rows"], other["rows"])


@pytest.mark.slow
def test_workers_at_different_steps_do_not_go_on(tmp_path: Path) -> None:
    killed = outcomes_of(fit_until, tmp_path, 0, 8, workers=WORKERS, timeout_s=60)
    assert killed[0].code == -signal.SIGKILL
    shutil.rmtree(tmp_path / "checkpoints" / "worker-0-of-2")
    for outcome in outcomes_of(fit_until, tmp_path, -1, 0, workers=WORKERS, timeout_s=60):
        assert "all workers must have a checkpoint, or begin at the same step" in outcome.error
