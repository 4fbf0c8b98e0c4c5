"""Data parallel training over eight devices, which XLA emulates: `eight_devices` is the program."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eight_devices
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import embedrock as er
import embedrock.jax as ej
import programs
from slow import slow

FAST = "one", "jit", "shard_map", "jit explicit", "one by position", "shard_map by position", "shard_map nan"
SLOW = "shard_map explicit", "jit ahead", "jit by position", "jit nan"
# Sums of 64 numbers, and of eight parts of 8, differ by their rounding. Rows are about 1, so are the sums of 12 steps.
ROUNDING = 16 * float(np.finfo(np.float32).eps)

Arrays = dict[str, np.ndarray]


def run(folder: Path, *names: str) -> tuple[dict[str, Any], dict[str, Arrays]]:
    """Run the program; return what it prints, and the arrays of each run."""
    text = Path(eight_devices.__file__).read_text()
    done = programs.run(text, programs.CORE, str(folder), *names)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), {name: dict(np.load(folder / f"{name}.npz")) for name in names}


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Arrays]]:
    return run(tmp_path_factory.mktemp("fast"), *FAST)


@pytest.fixture(scope="module")
def result_of(fast: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Arrays]:
    """Return the arrays of a run by its name. The first slow one runs them all."""
    results = fast[1]

    def of(name: str) -> Arrays:
        if name not in results:
            results.update(run(tmp_path_factory.mktemp("slow"), *SLOW)[1])
        return results[name]

    return of


def assert_equal(one: Arrays, other: Arrays):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def ids_of_users() -> list[np.ndarray]:
    return [ids["user"] for ids, _ in eight_devices.batches()]


def test_positions_are_spread_and_rows_are_everywhere(fast: Any):
    facts, _ = fast
    assert facts["devices"] == 8
    assert facts["placed"]["firsts"] == [0, 8, 16, 24, 32, 40, 48, 56]
    assert sorted(facts["placed"]["positions"]) == [
        [[device, 8] for device in range(8)], [[device, 8] for device in range(8)],
        [[device, 8, 3] for device in range(8)],
    ]  # fmt: skip
    assert facts["placed"]["rows"] == 2 * [[[device, 128, 8] for device in range(8)]]


@pytest.mark.parametrize("name", ["jit", "shard_map", "jit explicit", *slow("shard_map explicit", "jit ahead")])
def test_eight_devices_train_as_one_does(name: str, result_of: Callable[[str], Arrays]):
    one, eight = result_of("one"), result_of(name)
    assert one.keys() == eight.keys()
    for part in one:
        np.testing.assert_allclose(eight[part], one[part], rtol=0, atol=ROUNDING, err_msg=part)
    assert eight["steps"].tolist() == [eight_devices.STEPS] * 2  # one step of rows a batch, not one a device
    start = eight_devices.table(0, er.SGD(lr=1.0)).lookup(np.arange(eight_devices.ROWS["user"]))
    assert np.abs(one["user"] - start).mean() > 1e4 * ROUNDING  # an eighth of a gradient too much would be seen


@pytest.mark.parametrize("name", ["shard_map by position", *slow("jit by position")])
def test_gradients_of_positions_give_the_bits_of_one_device(name: str, result_of: Callable[[str], Arrays]):
    """Dense weights stay, so gradients of positions have equal bits. The table sums them in one order."""
    one, eight = result_of("one by position"), result_of(name)
    assert eight["gradients"].shape == (eight_devices.STEPS, eight_devices.SIZE, eight_devices.DIM)
    assert_equal(one, eight)
    oracle = eight_devices.table(0, er.Adam(lr=0.05))
    for ids, grads in zip(ids_of_users(), eight["gradients"], strict=True):
        oracle.update(ids, grads)
    np.testing.assert_array_equal(oracle.lookup(np.arange(eight_devices.ROWS["user"])), eight["user"])


def test_a_sum_over_devices_is_that_of_its_positions(result_of: Callable[[str], Arrays]):
    """Runs with dense weights that stay and with others start alike: the first gradients are those of one model."""
    ids, by_position = ids_of_users()[0], result_of("one by position")["gradients"][0].astype(np.float64)
    expected = np.zeros((eight_devices.ROWS["user"], eight_devices.DIM))
    np.add.at(expected, ids, by_position)
    of_rows = result_of("shard_map")["gradients"][0]
    assert not of_rows[len(np.unique(ids)) :].any()
    # Rows are in an order of the table's own: each expected sum is one of the rows.
    found = of_rows[np.argmin(np.abs(of_rows[:, None] - expected).sum(-1), axis=0)]
    bound = np.finfo(np.float32).eps * np.bincount(ids).max() ** 2 * np.abs(by_position).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
    assert bound < 1e-3 * np.abs(by_position).max()


@pytest.mark.parametrize("name", ["shard_map nan", *slow("jit nan")])
def test_nan_on_one_device_leaves_all_as_it_was(name: str, result_of: Callable[[str], Arrays]):
    result, steps = result_of(name), eight_devices.STEPS
    assert result["steps"].tolist() == [steps - 1] * 2
    for part in ("user", "item", "dense user", "dense item"):
        np.testing.assert_array_equal(result[part], result[f"before {part}"])
        assert (result[part] != result_of("shard_map")[part]).any()  # the step without NaN changes it
    assert np.isnan(result["gradients"][-1]).any()
    assert not np.isnan(result["gradients"][:-1]).any()


def test_runs_repeat_to_the_bit(fast: Any, tmp_path: Path):
    names = "jit", "shard_map"
    _, again = run(tmp_path, *names)
    for name in names:
        assert_equal(fast[1][name], again[name])


@pytest.mark.parametrize("mesh", eight_devices.MESHES)
def test_a_batch_that_devices_cannot_share_is_refused(mesh: str, fast: Any):
    refused = fast[0][f"refused {mesh}"]
    assert re.search(r"dimension\b.*\b60\b", refused["error"])  # JAX's own words, which differ by release
    assert re.search(r"\b8\b", refused["error"])
    assert refused["steps"] == 0
    assert refused["next"] == eight_devices.SIZE


@pytest.mark.parametrize(
    "wrong", [Mesh(jax.devices()[:1], ("data",)), PartitionSpec("data"), jax.devices()[0]], ids=type
)
def test_what_is_no_sharding_is_refused(wrong: Any):
    remedy = "jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names[0]))"
    with pytest.raises(er.ArgumentError) as caught:
        ej.Tables(er.Table(rows=9, dim=2), sharding=wrong)
    assert str(caught.value) == f"`sharding` must be a NamedSharding of a mesh: got {wrong!r}. Pass {remedy}."
    sharding = eval(remedy, {"jax": jax, "mesh": Mesh(jax.devices()[:1], ("data",))})
    assert ej.Tables(er.Table(rows=9, dim=2), sharding=sharding).fetch(np.arange(3)).lookup().shape == (3, 2)
