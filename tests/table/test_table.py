"""`Table`: what it refuses, how it uses memory, and what it carries over."""

from __future__ import annotations

import copy
import math
import pickle
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.storage import ram_backend as memory
from embedrock.system import ram
from embedrock.table.stepping import StepRequest, prepare, step_all
from embedrock.table.table import rows_of
from first_values import FIRST_VALUES

DIM = 4
ONES = np.ones((1, DIM), np.float32)
A_LIST: Any = [[1.0]]


def make(rows: int | None = 100, **arguments: Any) -> er.Table:
    options: dict[str, Any] = {"rule": er.Adam(lr=0.1), "seed": 0, "name": "users", **arguments}
    return er.Table(rows, DIM, **options)


def unchanged(table: er.Table, before: tuple[int, bytes]) -> bool:
    return (table.steps, table.lookup(np.arange(10)).tobytes()) == before


@pytest.fixture(params=["direct", "hashed"])
def table(request: pytest.FixtureRequest) -> er.Table:
    made = make(directory=request.param)
    made.update([1, 2, 3], np.ones((3, DIM)))
    return made


BAD_IDS: list[tuple[Any, type[Exception], str]] = [
    (
        [-1],
        er.IdError,
        r"`ids` of table 'users' must lie in \[0, 100\): got -1 at \[0\] of ids of shape \(1,\). For any int64",
    ),
    ([[5, 6], [100, 7]], er.IdError, r"must lie in \[0, 100\): got 100 at \[1, 0\] of ids of shape \(2, 2\)"),
    ([2**63], er.IdError, r"got 9223372036854775808 at \[0\]"),
    (np.array([2**64 - 1], np.uint64), er.IdError, "got 18446744073709551615"),
    ([1.0], er.IdTypeError, r"`ids` of table 'users' must be integers: got dtype float64"),
    ([np.nan], er.IdTypeError, "got a missing one"),
    ([True], er.IdTypeError, "got dtype bool"),
    (["1"], er.IdTypeError, "must be integers: got dtype <U1"),
    ([None], er.IdTypeError, "got dtype object"),
]


@pytest.mark.parametrize(("ids", "error", "message"), BAD_IDS, ids=lambda v: repr(v)[:30])
def test_bad_ids(table: er.Table, ids: Any, error: type[Exception], message: str) -> None:
    before = table.steps, table.lookup(np.arange(10)).tobytes()
    for call in (table.lookup, table.plan, lambda i: table.update(i, np.ones((*np.shape(i), DIM)))):
        with pytest.raises(error, match=message):
            call(ids)
    assert unchanged(table, before)


def test_errors_are_also_builtins() -> None:
    table = make()
    for error, builtin in (
        (er.IdError, IndexError),
        (er.IdTypeError, TypeError),
        (er.GradientError, ValueError),
    ):
        assert issubclass(error, er.EmbedrockError)
        assert issubclass(error, builtin)
    with pytest.raises(IndexError):
        table.lookup([100])


def test_unsigned_and_small_ids_are_ids() -> None:
    table = make()
    expected = table.lookup([3, 7])
    for dtype in (np.uint8, np.int16, np.uint32, np.uint64, np.int64):
        np.testing.assert_array_equal(table.lookup(np.array([3, 7], dtype)), expected)
    np.testing.assert_array_equal(table.lookup(np.array([7, 0, 3])[::-2]), expected)
    assert table.lookup([]).shape == (0, DIM)
    assert table.lookup(np.empty((3, 0), np.int32)).shape == (3, 0, DIM)
    assert table.lookup(5).shape == (DIM,)
    with pytest.raises(er.IdTypeError):
        table.lookup(np.empty(0))


BAD_GRADS: list[tuple[Any, str]] = [
    (
        np.ones((2, DIM)),
        r"`grads` of table 'users' must have shape \(3, 4\), that of the ids and `dim`: got \(2, 4\)",
    ),
    (np.ones((3, DIM + 1)), r"got \(3, 5\)"),
    (np.ones(3 * DIM), r"got \(12,\)"),
    (np.ones((3, DIM), np.int64), "`grads` of table 'users' must be floats: got dtype int64"),
    (np.ones((3, DIM), bool), "got dtype bool"),
    (np.ones((3, DIM), complex), "got dtype complex128"),
]


@pytest.mark.parametrize(("grads", "message"), BAD_GRADS, ids=lambda v: repr(v)[:30])
def test_bad_grads(table: er.Table, grads: Any, message: str) -> None:
    before = table.steps, table.lookup(np.arange(10)).tobytes()
    with pytest.raises(er.GradientError, match=message):
        table.update([1, 2, 5], grads)
    assert unchanged(table, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_nonfinite_gradients(table: er.Table, bad: float) -> None:
    before = table.steps, table.lookup(np.arange(10)).tobytes()
    grads = np.ones((4, DIM))
    grads[1, 2] = grads[3, 0] = bad
    message = r"gradients of table 'users' must be finite: got NaN or Inf in 2 of 4 rows, first ids \[7, 9\]"
    where = r"\. The first is (nan|-?inf) at \[1, 2\] of `grads` of shape \(4, 4\), for id 7\.$"
    with pytest.raises(er.NonFiniteGradientError, match=message + ".*" + where) as caught:
        table.update([1, 7, 8, 9], grads)
    assert caught.value.count == 2
    assert caught.value.ids.tolist() == [7, 9]
    assert unchanged(table, before)
    assert table.stats()["rows_touched"] == 3


def test_finite_gradients_whose_sum_is_not() -> None:
    table = make()
    huge = np.full((2, DIM), 3e38, np.float32)
    with pytest.raises(er.NonFiniteGradientError, match="in 1 of 1 row,"):
        table.update([5, 5], huge)
    table.update([5, 6], huge)  # no overflow: their norm does not fit float32, but that is no reason to refuse
    assert np.isfinite(table.lookup([5, 6])).all()


def test_skipping_nonfinite_steps() -> None:
    table = make(on_nonfinite="skip")
    before = table.lookup([1, 2])
    table.update([1, 2], [[np.nan] * DIM, [1.0] * DIM])
    np.testing.assert_array_equal(table.lookup([1, 2]), before)
    assert table.stats()["skipped_steps"] == 1
    assert table.steps == 0


BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"rows": 0},
        er.ArgumentError,
        r"`rows` must be a whole number from 1 to 2\*\*63 - 1: got 0. None is for open ids",
    ),
    ({"rows": -5}, er.ArgumentError, "got -5"),
    ({"rows": 2.0}, er.ArgumentError, "got 2.0"),
    ({"rows": True}, er.ArgumentError, "got True"),
    ({"dim": 0}, er.ArgumentError, "`dim` must be a whole number"),
    ({"dim": None}, er.ArgumentError, "`dim` must be a whole number.*got None"),
    (
        {"dtype": "float64"},
        er.ArgumentError,
        "`dtype` must be one of float32, bfloat16, float16, int8, int4: got 'float64'",
    ),
    ({"dtype": np.float32}, er.ArgumentError, "`dtype` must be one of"),
    ({"seed": 2**64}, er.ArgumentError, "`seed` must be a whole number of at most 64 bits"),
    ({"seed": 0.5}, er.ArgumentError, "`seed`"),
    (
        {"rule": "adam"},
        er.ArgumentError,
        r"`rule` must be a Rule or None: got 'adam'. For example er.Adam\(\)",
    ),
    ({"rule": er.Adam}, er.ArgumentError, "`rule` must be.*Pass an instance"),
    ({"init": 0.1}, er.ArgumentError, "`init` must be an Initializer or None"),
    ({"on_nonfinite": "ignore"}, er.ArgumentError, "`on_nonfinite` must be one of raise, skip: got 'ignore'"),
    ({"directory": "tree"}, er.ArgumentError, "`directory` must be one of auto, direct, hashed"),
    ({"rows": None, "directory": "direct"}, er.ArgumentError, "open ids"),
    ({"memory": "lots"}, er.ArgumentError, "`memory` is not a size: got 'lots'.*512MiB"),
    ({"memory": "-1GB"}, er.ArgumentError, "`memory` is not a size"),
    ({"memory": "5 parsecs"}, er.ArgumentError, "`memory` is not a size"),
    ({"memory": 0}, er.ArgumentError, "`memory` must be positive: got 0"),
    ({"memory": 1.5}, er.ArgumentError, r"`memory` is not a size: got 1\.5"),
    ({"memory": float("nan")}, er.ArgumentError, "`memory` is not a size: got nan"),
    ({"memory": float("inf")}, er.ArgumentError, "`memory` is not a size: got inf"),
    ({"memory": "150%"}, er.ArgumentError, "`memory` must be at most 100%: got '150%'.*such as \"25%\""),
    ({"memory": "0%"}, er.ArgumentError, "`memory` must be positive: got '0%'"),
    ({"memory": "-5%"}, er.ArgumentError, "`memory` is not a size"),
    ({"memory": "1 e9"}, er.ArgumentError, "`memory` is not a size"),
    ({"memory": ["1GB"]}, er.ArgumentError, "`memory` must be a number or a str, got list.*1e9.*512MiB.*2G.*25%"),
    ({"device_memory": "half"}, er.ArgumentError, "`device_memory` is not a size: got 'half'.*25%"),
    ({"device_memory": "101%"}, er.ArgumentError, "`device_memory` must be at most 100%"),
    ({"memory": 8}, er.MemoryBudgetError, "a row of the table takes 24 bytes: budget 8 bytes. Raise memory="),
    ({"dim": 2**40}, er.MemoryBudgetError, "a row of the table takes"),
    ({"memory": True}, er.ArgumentError, "`memory` must be a number or a str, got bool"),
    ({"cols": 3}, er.UnknownArgumentError, "Table has no argument 'cols': it takes rows, dim, rule"),
    ({"rows": 10**12, "directory": "direct"}, er.MemoryBudgetError, 'Pass directory="hashed"'),
    ({"rows": 3, "init": er.FromArray(np.ones((2, DIM)))}, er.ArgumentError, r"shape \(3, 4\): got \(2, 4\)"),
    ({"rows": None, "init": er.FromArray(np.ones((2, DIM)))}, er.ArgumentError, r"shape \(None, 4\)"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_ARGUMENTS, ids=lambda v: repr(v)[:40])
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"rows": 10, "dim": DIM, **change}
    with pytest.raises(error, match=message):
        er.Table(**arguments)


def test_bad_initializers() -> None:
    for make_init, message in (
        (lambda: er.Normal(std=-1), "`std` of Normal must not be negative: got -1"),
        (lambda: er.Normal(mean=float("nan")), "`mean` of Normal must be a finite number: got nan"),
        (lambda: er.Uniform(1, 0), "`low` of Uniform must not exceed `high`"),
        (lambda: er.Constant(1e39), "`value` of Constant must be a finite number"),
        (lambda: er.FromArray(np.ones(3)), "must be a 2-D NumPy array of floats: got float64"),
        (lambda: er.FromArray(np.ones((3, 2), int)), "2-D NumPy array of floats: got int64"),
        (lambda: er.FromArray(A_LIST), "got list"),
    ):
        with pytest.raises(er.ArgumentError, match=message):
            make_init()


def test_a_budget_is_respected() -> None:
    table = make(10**6, memory="1MiB")
    fitting = (2**20 - 2 * 1024 * 64) // (table.spec.record_bytes + 8)
    ids = np.arange(10**6, dtype=np.int64)
    table.update(ids[: fitting // 2], np.ones((fitting // 2, DIM)))
    before = table.export()
    with pytest.raises(
        er.MemoryBudgetError, match=r"table 'users' has \d+ rows in RAM and this batch touches 500000 new"
    ) as e:
        table.update(ids[-500_000:], np.ones((500_000, DIM)))
    assert "MiB" in str(e.value)
    assert "budget 1.0 MiB. Raise memory=" in str(e.value)
    np.testing.assert_array_equal(table.export()[1], before[1])
    assert table.steps == 1
    assert table.stats()["bytes_used"] <= 2**20
    table.lookup(ids)  # reading takes no room
    table.update(ids[: fitting // 2], np.ones((fitting // 2, DIM)))  # nor do rows that are there


def test_tables_without_a_budget_take_what_is_left_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_headroom", ram.FreeMemory())
    monkeypatch.setattr(ram, "memory_limit", lambda: 64 << 20)  # 1 MiB is left to others, and looked at at once
    left = 10 << 20
    monkeypatch.setattr(ram, "available_bytes", lambda: left)
    monkeypatch.setattr(memory, "available_bytes", lambda: left)
    first, second, told = make(10**7), make(None), make(None, memory="20MiB")
    ids = np.arange((3 << 20) // first.spec.record_bytes, dtype=np.int64)
    gradients = np.ones((len(ids), DIM))
    for table in (first, second):  # 3 MiB each, and what finds them
        table.update(ids, gradients)
        left -= 3 << 20
    wanted = r"has \d+ rows in RAM and this batch touches \d+ new ones: 7\.5 MiB needed, and 4\.0 MiB left of the RAM"
    for table in (first, second):
        with pytest.raises(er.MemoryBudgetError, match=wanted):
            table.update(ids + len(ids), gradients)
        assert (table.steps, table.stats()["rows_touched"]) == (1, len(ids))
        table.update(ids, gradients)  # rows that are there take none
    told.update(np.concatenate([ids, ids + len(ids)]), np.concatenate([gradients, gradients]))
    first.grow(None)


def test_budgets_decide_the_directory() -> None:
    assert make(1000, memory="1MiB").stats()["direct"] == 1
    assert make(10**6, memory="1MiB").stats()["direct"] == 0
    assert make(10**9).stats()["direct"] == 0
    assert make(None).stats()["direct"] == 0


def test_looking_up_stores_nothing() -> None:
    table = make(None)
    first = table.lookup(np.arange(-500, 500))
    assert table.stats()["rows_touched"] == 0
    table.update([3], ONES)
    assert table.stats()["rows_touched"] == 1
    np.testing.assert_array_equal(np.delete(table.lookup(np.arange(-500, 500)), 503, 0), np.delete(first, 503, 0))


@pytest.mark.parametrize("init", FIRST_VALUES, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_first_values_depend_on_nothing_else(init: er.Initializer, dtype: str) -> None:
    ids = np.random.default_rng(0).integers(0, 10**6, 3000)
    expected = er.Table(10**6, DIM, init=init, seed=9, dtype=dtype, directory="direct").lookup(ids)
    other = er.Table(None, DIM, init=init, seed=9, dtype=dtype, rule=er.SGD())
    for part in np.array_split(np.random.default_rng(1).permutation(ids), 7):
        other.update(part, np.zeros((len(part), DIM)))
    np.testing.assert_array_equal(other.lookup(ids), expected)
    if not isinstance(init, er.Constant):
        assert (er.Table(10**6, DIM, init=init, seed=10, dtype=dtype).lookup(ids) != expected).any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_first_values_from_an_array(dtype: str) -> None:
    array = np.random.default_rng(0).standard_normal((50, DIM)).astype(dtype)
    table = er.Table(50, DIM, init=er.FromArray(array), rule=er.SGD(lr=1.0))
    ids = np.array([[3, 49], [0, 3]])
    np.testing.assert_array_equal(table.lookup(ids), array.astype(np.float32)[ids])
    table.update([3], ONES)
    np.testing.assert_array_equal(table.lookup([3]), array.astype(np.float32)[[3]] - 1)
    assert table.stats()["rows_touched"] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_tables_are_unbiased(dtype: str) -> None:
    """Steps far below the weights' precision must add up; rounding to nearest would lose them all."""
    rows, steps, lr = 2000, 100, 1e-5
    table = er.Table(rows, 8, rule=er.SGD(lr=lr), init=er.Constant(1.0), dtype=dtype)
    ids, grads = np.arange(rows), np.ones((rows, 8), np.float32)
    for _ in range(steps):
        table.update(ids, grads)
    moved = 1.0 - table.lookup(ids).astype(np.float64)
    spacing = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]  # of the numbers just below 1
    standard_error = np.sqrt(steps * lr * spacing / moved.size)
    assert abs(moved.mean() - steps * lr) < 4 * standard_error
    assert standard_error < 0.1 * steps * lr


def test_16_bit_results_are_deterministic() -> None:
    def train(directory: str, order: np.ndarray) -> bytes:
        table = er.Table(500, DIM, rule=er.Adam(lr=0.01), dtype="bfloat16", directory=directory, seed=4)
        grads = np.random.default_rng(0).standard_normal((500, DIM)).astype(np.float32)
        for _ in range(5):
            table.update(order, grads[order])
        return table.lookup(np.arange(500)).tobytes()

    shuffled = np.random.default_rng(1).permutation(500)
    assert train("direct", np.arange(500)) == train("hashed", shuffled)


def test_assign() -> None:
    table = make(dtype="float32")
    table.update([1], ONES)
    table.assign([5, 1], [[1, 2, 3, 4.0], [5, 6, 7, 8.0]])
    np.testing.assert_array_equal(table.lookup([1, 5]), [[5, 6, 7, 8], [1, 2, 3, 4]])
    with pytest.raises(er.ArgumentError, match="`ids` of assign must not repeat: got 3 ids, 2 of them different"):
        table.assign([1, 2, 1], np.ones((3, DIM)))
    with pytest.raises(er.GradientError, match=r"`values` of table 'users' must have shape \(1, 4\)"):
        table.assign([1], np.ones((1, 3)))
    told = (
        r"`values` of table 'users' must be finite as float16: got NaN, Inf or a value too large at \[1, 2\] of values"
    )
    with pytest.raises(er.GradientError, match=told + r" of shape \(2, 4\)\.$"):
        make(dtype="float16").assign([9, 1], [[1, 2, 3, 4], [1, 2, 1e5, 4]])


def test_a_rule_can_come_later() -> None:
    table = er.Table(100, DIM, init=er.Constant(1.0))
    with pytest.raises(er.ArgumentError, match=r"the table has no rule to step by. Pass rule=er.Adam"):
        table.update([1], ONES)
    table.assign([3], ONES * 5)
    table.set_rule(er.SGD(lr=1.0))
    table.update([3, 4], np.ones((2, DIM)))
    np.testing.assert_array_equal(table.lookup([3, 4, 5])[:, 0], [4, 0, 1])
    table.set_rule(er.Adagrad(lr=1.0))
    np.testing.assert_array_equal(table.lookup([3, 4, 5])[:, 0], [4, 0, 1])
    assert table.steps == 0
    table.update([3], ONES)
    table.set_rule(er.Adagrad(lr=0.5))  # the same layout: state and steps stay
    assert table.steps == 1


def test_a_rule_that_does_not_fit_changes_nothing() -> None:
    table = er.Table(10**6, DIM, rule=er.SGD(), memory="600KiB", directory="hashed")
    table.update(np.arange(9000), np.ones((9000, DIM)))
    before = table.export()[1]
    with pytest.raises(er.MemoryBudgetError):
        table.set_rule(er.Adam())
    assert table.rule == er.SGD()
    np.testing.assert_array_equal(table.export()[1], before)


def test_state_round_trip(table: er.Table) -> None:
    state = {k: np.array(v) if isinstance(v, np.ndarray) else v for k, v in table.state().items()}
    table.update([2, 50], np.full((2, DIM), 0.3))
    expected = table.lookup(np.arange(100))
    other = make(directory="hashed", seed=77)
    other.load_state(state)
    assert other.steps == 1
    other.update([2, 50], np.full((2, DIM), 0.3))
    np.testing.assert_array_equal(other.lookup(np.arange(100)), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 99}, "must have rows 99: got 100"),
        ({"dtype": "float16"}, "must have dtype 'float16': got 'float32'"),
        ({"init": er.Zeros()}, r"must have init 'Zeros\(\)': got 'Normal"),
        ({"rule": er.SGD()}, r"must be that of its rule SGD\(lr=0.01\): got one of Adam"),
    ],
)
def test_states_of_other_tables_are_refused(table: er.Table, arguments: dict[str, Any], message: str) -> None:
    other = make(**arguments)
    other.update([1], ONES)
    before = other.lookup([1])
    with pytest.raises(er.ArgumentError, match=message):
        other.load_state(table.state())
    np.testing.assert_array_equal(other.lookup([1]), before)


@pytest.mark.parametrize("directory", ["direct", "hashed"])
def test_export_in_batches(directory: str) -> None:
    table = make(5000, directory=directory)
    ids = np.random.default_rng(0).permutation(5000)[:1234]
    table.update(ids, np.ones((1234, DIM)))
    parts = list(table.export_batches(100))
    assert max(len(part) for part, _ in parts) <= 100
    got = np.concatenate([part for part, _ in parts])
    assert sorted(got.tolist()) == sorted(ids.tolist())
    np.testing.assert_array_equal(np.concatenate([w for _, w in parts]), table.lookup(got))
    with pytest.raises(er.ArgumentError, match="was changed while it was being exported"):  # noqa: PT012
        for _ in table.export_batches(100):
            table.update([1], ONES)
    with pytest.raises(er.ArgumentError, match="`batch_rows` must be at least 1"):
        next(table.export_batches(0))


def test_use_after_close(table: er.Table) -> None:
    plan = table.plan([1])
    batches = table.export_batches()
    table.close()
    table.close()
    for call in (
        lambda: table.lookup([1]),
        lambda: table.update([1], ONES),
        lambda: table.read(plan),
        lambda: table.apply(plan, ONES),
        lambda: table.plan([1]),
        lambda: table.export(),
        lambda: next(batches),
        lambda: table.stats(),
        lambda: table.assign([1], ONES),
        lambda: table.set_rule(None),
        lambda: table.state(),
    ):
        with pytest.raises(
            er.ClosedTableError, match=r"table 'users' is closed, since .*test_table.py:\d+\. Make a new"
        ):
            call()
    assert "closed" in repr(table)
    with make() as other:
        pass
    with pytest.raises(er.ClosedTableError):
        other.lookup([1])


def test_a_plan_of_another_table_is_looked_up_anew() -> None:
    small, large = make(10), make(10**6, name="items")
    plan = large.plan([5, 6])
    np.testing.assert_array_equal(small.read(plan), small.lookup([5, 6]))
    with pytest.raises(er.IdError, match=r"must lie in \[0, 10\)"):
        small.read(large.plan([500_000]))


def test_threads_that_update_at_once_are_serialised() -> None:
    table = er.Table(1000, 32, rule=er.SGD(lr=1.0), init=er.Zeros())
    ids, grads = np.arange(1000), np.ones((1000, 32), np.float32)
    torn: list[np.ndarray] = []

    def update() -> None:
        for _ in range(25):
            table.update(ids, grads)

    def look() -> None:
        for _ in range(50):
            rows = table.lookup(ids)
            if (rows != rows[0, 0]).any():
                torn.append(rows)

    threads = [threading.Thread(target=target) for target in (update, update, update, update, look, look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn
    assert table.steps == 100
    np.testing.assert_array_equal(table.lookup(ids), np.full((1000, 32), -100, np.float32))


def test_copies_are_independent(table: er.Table) -> None:
    other = copy.deepcopy(table)
    before = table.lookup(np.arange(100))
    np.testing.assert_array_equal(other.lookup(np.arange(100)), before)
    other.update([1], ONES)
    np.testing.assert_array_equal(table.lookup(np.arange(100)), before)
    assert other.steps == 2


def test_pickling_is_by_reference() -> None:
    table = make(name="by reference")
    assert pickle.loads(pickle.dumps(table)) is table
    with pytest.raises(er.UnsupportedError, match=r"the table cannot be pickled.*Give it a name"):
        pickle.dumps(er.Table(5, DIM))
    text = pickle.dumps(table)
    newer = make(name="by reference")
    with pytest.raises(er.UnsupportedError, match=r"a name of its own, as another table got 'by reference' since"):
        pickle.dumps(table)
    with pytest.raises(er.UnsupportedError):
        pickle.dumps(table)
    assert pickle.loads(text) is newer
    del newer, table
    with pytest.raises(er.ArgumentError, match="no table named 'by reference' is open in this process"):
        pickle.loads(text)


def test_repr_and_stats() -> None:
    table = make(rule=er.SGD(), memory="1MiB")
    table.update([1], ONES)
    what = "name='users', rows=100, dim=4, dtype='float32', seed=0, rule=SGD(lr=0.01)"
    assert repr(table) == f"Table({what}, 1 row touched, in RAM, 1.6 KiB of 1.0 MiB)"
    stats = table.stats()
    assert all(isinstance(value, int | float) for value in stats.values())
    assert stats["record_bytes"] == 16
    assert stats["table_bytes"] == 1600


@pytest.mark.parametrize(
    ("dim", "dtype", "rule", "record_bytes"),
    [
        (64, "float32", er.Adam(), 768),
        (64, "float32", None, 256),
        (64, "bfloat16", er.Adam(), 640),
        (64, "float32", er.RowwiseAdagrad(), 272),
        (64, "float32", er.Adam(dense=True), 784),
        (1, "float32", er.SGD(), 4),
        (1, "float16", er.SGD(), 4),
        (3, "float16", er.SGD(), 8),
        (3, "float32", er.SGD(), 16),
    ],
)
def test_record_bytes(dim: int, dtype: str, rule: er.Rule | None, record_bytes: int) -> None:
    assert er.Table(10, dim, rule=rule, dtype=dtype).spec.record_bytes == record_bytes


@pytest.mark.parametrize(
    "out",
    [
        np.empty((4, DIM), np.float32),
        np.empty((3, DIM)),
        np.empty((DIM, 3), np.float32).T,
        np.broadcast_to(np.float32(0), (3, DIM)),
        [[0.0] * DIM] * 3,
    ],
    ids=["shape", "dtype", "order", "read-only", "list"],
)
def test_read_checks_out(table: er.Table, out: Any) -> None:
    with pytest.raises(er.ArgumentError, match=r"`out` for table 'users' must be .* float32 array of shape \(3, 4\)"):
        table.read(table.plan([1, 2, 3]), out)
    fitting = np.empty((3, DIM), np.float32)
    assert table.read(table.plan([1, 2, 3]), fitting) is fitting


def test_gradients_summed_for_another_table_are_refused(table: er.Table) -> None:
    wide = er.Table(100, 2 * DIM)
    grads = wide.sum(wide.plan([1]), np.ones((1, 2 * DIM)))
    before = table.steps, table.lookup(np.arange(10)).tobytes()
    for call in (table.step, table.check_step):
        with pytest.raises(er.GradientError, match=r"must be float32 \(1, 4\): got float32 \(1, 8\)"):
            call(grads)
    assert unchanged(table, before)
    own = table.sum(table.plan([1]), ONES)
    with pytest.raises(er.ArgumentError, match="`clip_value` must be a number > 0, or None: got -1"):
        table.step(own, clip_value=-1)
    with pytest.raises(er.ArgumentError, match="`rule` must be laid out as the rule of table 'users'"):
        step_all([StepRequest((rows_of(table),), er.SGD(), own)])
    assert unchanged(table, before)


def test_a_step_can_be_checked_before_it_is_made() -> None:
    table = make(10**6, memory="100KiB")
    table.check_step(table.sum(table.plan([1]), ONES))
    ids = np.arange(10_000)
    with pytest.raises(er.MemoryBudgetError):
        table.check_step(table.sum(table.plan(ids), np.ones((10_000, DIM))))
    assert table.stats()["rows_touched"] == 0


BROKEN_STATES: list[tuple[dict[str, Any], str]] = [
    ({"ids": None}, "ids missing"),
    ({"steps": None}, "steps missing"),
    ({"ids": np.array([1, 100, 3])}, r"must lie in \[0, 100\): got 100"),
    ({"ids": np.array([1, 1, 3])}, "not repeat"),
    ({"ids": np.array([1.0, 2, 3])}, "must be integers"),
    (
        {"records": np.zeros((1, 48), np.uint8)},
        r"`records` of a state for table 'users' must be uint8 \(3, 60\)|uint8 \(3, ",
    ),
    ({"history_table": None}, r"`history_table` of a state of Adam\(dense=True\) must have shape \(1, 7\)"),
    ({"steps": 2}, "must have shape"),
    ({"history_table": np.zeros((1, 7), np.int64)}, r"must have shape \(1, 7\) of floats after 1 step: got int64"),
    *(
        ({"steps": value}, "`steps` of a state .* must be a whole number in")
        for value in (-1, 1.0, math.nan, "1", 2**70)
    ),
    ({"seed": 0.5}, "`seed` of a state .* must be a whole number in"),
    *(
        ({"last_step": value}, "must have been last stepped in one of its steps, 1 to 1")
        for value in (-1, 2, 2**31 - 1)
    ),
]


@pytest.mark.parametrize(("change", "message"), BROKEN_STATES, ids=lambda v: repr(v)[:30])
def test_broken_states_change_nothing(change: dict[str, Any], message: str) -> None:
    table = make(rule=er.Adam(lr=0.1, dense=True))
    table.update([1, 2, 3], np.ones((3, DIM)))
    state = {**table.state(), **change}
    state = {key: value for key, value in state.items() if value is not None}
    if (last := state.pop("last_step", None)) is not None:
        layout = table.spec.layout
        state["records"].view(np.int32)[1, layout.state_start + layout.state_width - 1] = last
    before = table.steps, table.lookup(np.arange(10)).tobytes()
    with pytest.raises(er.EmbedrockError, match=message):
        table.load_state(state)
    assert unchanged(table, before)


def test_a_closed_table_loads_no_state(table: er.Table) -> None:
    state = {k: np.array(v) if isinstance(v, np.ndarray) else v for k, v in table.state().items()}
    table.close()
    with pytest.raises(er.ClosedTableError):
        table.load_state(state)


@pytest.mark.parametrize(("rule", "may_be"), [(er.Adam(), True), (er.Adam(dense=True), False)])
def test_a_step_of_few_rows_is_made_at_once(monkeypatch: pytest.MonkeyPatch, rule: er.Rule, may_be: bool) -> None:
    er.set_threads(2)
    tables = [er.Table(50, 4, rule=rule, seed=1) for _ in range(2)]
    ids = np.arange(50)
    for step in range(3):
        grads = np.random.default_rng(step).standard_normal((50, 4), np.float32)
        for table, most in zip(tables, (0, 50 * tables[0].spec.record_bytes), strict=True):
            monkeypatch.setattr("embedrock.table.stepping.STEP_HERE_BYTES", most)
            table.update(ids[step:], grads[step:])
            assert (not rows_of(table).table_lock.running) == (may_be and most > 0)
    np.testing.assert_array_equal(tables[0].lookup(ids), tables[1].lookup(ids))


def test_a_failed_background_step_is_not_forgotten(table: er.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(type(rows_of(table).tier.records), "step", fail)
    with pytest.raises(MemoryError):  # noqa: PT012  # at once with one thread, at the next call with several
        table.update([1], ONES)
        table.lookup([1])
    if er.get_threads() > 1:
        for call in (lambda: table.lookup([1]), lambda: table.update([1], ONES), table.state):
            with pytest.raises(er.EmbedrockError, match=r"step 2 of table 'users' failed.*no room.*last state"):
                call()


def test_nonfinite_errors_cross_processes() -> None:
    error = er.NonFiniteGradientError("text", 2, np.array([5, 6]))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.count, again.ids.tolist()) == ("text", 2, [5, 6])


def test_exports_notice_assignments() -> None:
    table = make(5000)
    table.update(np.arange(5000), np.ones((5000, DIM)))
    batches = table.export_batches(100)
    next(batches)
    table.assign([1], ONES)
    with pytest.raises(er.ArgumentError, match="was changed while it was being exported"):
        next(batches)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interrupts_leave_whole_steps(dtype: str) -> None:
    """Ctrl-C at random instants: the table is always one that a number of whole steps leads to."""
    grads = np.random.default_rng(0).standard_normal((600, DIM)).astype(np.float32)
    ids = np.arange(600)

    def new() -> er.Table:
        return er.Table(1000, DIM, rule=er.Adam(lr=0.1), dtype=dtype, seed=0, directory="hashed")

    new().update(ids, grads)  # loads the kernels: an interrupt in a callback of LLVM's is lost, or ends the process
    expected = {0: new().lookup(ids).tobytes()}
    replay = new()
    random, main = np.random.default_rng(1), threading.main_thread()
    for _ in range(60):
        table = new()
        timer = threading.Timer(random.uniform(0, 0.004), signal.pthread_kill, (main.ident, signal.SIGINT))
        try:
            timer.start()
            while timer.is_alive():
                table.update(ids, grads)
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass
        timer.join()
        while replay.steps < table.steps:
            replay.update(ids, grads)
            expected[replay.steps] = replay.lookup(ids).tobytes()
        assert table.lookup(ids).tobytes() == expected[table.steps]


def test_a_step_that_was_checked_looks_for_its_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make(10**6, directory="hashed")
    tier, asked = rows_of(table).tier, list[int]()
    find, check_room = tier.find, tier.check_room
    monkeypatch.setattr(tier, "find", lambda ids: asked.append(len(ids)) or find(ids))
    monkeypatch.setattr(tier, "check_room", lambda more: asked.append(-more) or check_room(more))
    grads = table.sum(table.plan([1, 2, 1]), np.ones((3, DIM)))
    assert asked == []  # the plan's kernel has found them
    table.check_step(grads)
    assert asked == [2, -2]  # rows that had no record may have one by now
    assert table.rule is not None
    step_all([StepRequest((rows_of(table),), table.rule, grads)])
    assert asked == [2, -2]
    step_all([StepRequest((rows_of(table),), table.rule, grads)])  # the table has changed since the check
    assert asked == [2, -2, 2]  # and no row is new now
    assert table.stats()["rows_touched"] == 2


def test_records_that_were_made_for_a_step_that_failed_are_found_by_the_next_one() -> None:
    table = er.Table(rows=None, dim=2, rule=er.SGD(lr=1.0), init=er.Zeros())
    rows = rows_of(table)
    grads = table.sum(table.plan([5, 6]), np.ones((2, 2), np.float32))
    table.check_step(grads)
    with rows.table_lock.alone():
        prepare(rows, grads.plan, is_step=False).begin()  # and what comes next fails
    table.check_step(grads)
    table.step(grads)
    assert table.stats()["rows_touched"] == 2
    np.testing.assert_array_equal(table.export()[0], [5, 6])
    np.testing.assert_array_equal(table.lookup([5, 6]), np.full((2, 2), -1.0))


def test_a_closed_table_counts_no_step_that_is_left_out() -> None:
    table = er.Table(4, 2, rule=er.SGD(lr=1.0), on_nonfinite="skip")
    grads = table.sum(table.plan([1]), np.full((1, 2), np.nan, np.float32))
    table.close()
    with pytest.raises(er.ClosedTableError, match="is closed"):
        table.step(grads)


@pytest.mark.parametrize("state", [None, 3, "users.rock"], ids=["None", "number", "path"])
def test_what_is_no_state(state: Any):
    table = er.Table(10, 4, name="users")
    with pytest.raises(er.ArgumentError, match=r"a state for table 'users' must be a dict, .* or a table: got "):
        table.load_state(state)
