"""What other code does to a layer, and what becomes of it: each is done here, and docs/keras.md has what is found."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk

PAGE = Path(erk.__file__).parents[3] / "docs" / "keras.md"
HEADING = "### What other code does to a layer"
ROWS, DIM = 10, 4
IDS, TARGETS = np.array([[3, 3, 0], [1, 9, 0], [2, 2, 2], [5, 6, 7]]), np.ones((4, 1), np.float32)
WEIGHTS = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
READ = "Leave it out: `[v for v in model.trainable_variables if v is not layer.rows]`"
WRITE = "Rows are written by `layer.table.assign(ids, values)`"
ANEW = "For rows that begin anew make a new model, by `keras.models.clone_model(model)`"
NO_VARIABLE = "Read rows by `layer.table.lookup(ids)` or `layer.table.export()`, write them by `layer.table.assign`"
NOT_IN_ARRAYS = 'Use `ModelCheckpoint("best.keras", save_best_only=True)`'


def model_of(layer: Any, optimizer: Any) -> Any:
    pool, head = keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, pool, head])
    model.compile(optimizer, "mse")
    return model


def ours(**options: Any) -> Any:
    layer = erk.Embedding(ROWS, DIM, **options)
    layer.table.assign(np.arange(ROWS), WEIGHTS)
    return model_of(layer, erk.optimizer(keras.optimizers.SGD(0.1)))


def theirs() -> Any:
    layer = keras.layers.Embedding(ROWS, DIM)
    model = model_of(layer, keras.optimizers.SGD(0.1))
    layer.set_weights([WEIGHTS])
    return model


def rows_of(model: Any) -> np.ndarray:
    layer = model.layers[0]
    return layer.table.lookup(np.arange(ROWS)) if isinstance(layer, erk.Embedding) else layer.get_weights()[0]


def gradients_of(model: Any, variables: Any = None, ids: np.ndarray = IDS) -> list[Any]:
    tape: Any
    with tf.GradientTape() as tape:
        loss = keras.ops.mean((model(ids) - TARGETS[: len(ids)]) ** 2)
    return tape.gradient(loss, model.trainable_variables if variables is None else variables)


# ---------------------------------------------------------------- what ends as with keras.layers.Embedding


def project_conflicts(model: Any) -> None:
    """Step by gradients that were flattened, and put back by the shapes of the variables."""
    shapes = [variable.shape for variable in model.trainable_variables]
    flat = tf.concat([tf.reshape(g, [-1]) for g in gradients_of(model)], 0)
    other = -tf.reverse(flat, [0])
    flat -= tf.minimum(tf.reduce_sum(flat * other), 0.0) * other / tf.reduce_sum(other**2)
    parts = tf.split(flat, [int(np.prod(shape)) for shape in shapes])
    apply(model, [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)])


def accumulate(model: Any) -> None:
    sums = [tf.Variable(tf.zeros(variable.shape)) for variable in model.trainable_variables]
    for _ in range(2):
        for total, gradient in zip(sums, gradients_of(model), strict=True):
            total.assign_add(gradient)
    apply(model, sums)


def add_noise(model: Any) -> None:
    pairs = zip(gradients_of(model), model.trainable_variables, strict=True)
    apply(model, [g + tf.random.stateless_normal(v.shape, (1, 2)) for g, v in pairs])


def change_slices(model: Any) -> None:
    def doubled(gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient * 2
        return tf.IndexedSlices(gradient.values * 2, gradient.indices, gradient.dense_shape)

    apply(model, [doubled(gradient) for gradient in gradients_of(model)])


def clip(model: Any) -> None:
    ids = np.arange(9).reshape(3, 3)  # of ids that are repeated Keras' norm is another one
    apply(model, tf.clip_by_global_norm(gradients_of(model, ids=ids), 0.01)[0])


def apply(model: Any, gradients: Any) -> None:
    model.optimizer.apply(gradients, model.trainable_variables)


def ask_by_value(model: Any) -> None:
    apply(model, gradients_of(model, [variable.value for variable in model.trainable_variables]))


def ask_what_was_watched(model: Any) -> None:
    tape: Any
    with tf.GradientTape() as tape:
        loss = keras.ops.mean((model(IDS) - TARGETS) ** 2)
    watched = tape.watched_variables()
    variables = {id(variable.value): variable for variable in model.trainable_variables}
    model.optimizer.apply(tape.gradient(loss, watched), [variables[id(each)] for each in watched])


def scale_losses(model: Any) -> None:
    inner = keras.optimizers.SGD(0.1)
    inner = erk.optimizer(inner) if isinstance(model.layers[0], erk.Embedding) else inner
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
    fit(model)


def fit(model: Any) -> None:
    model.fit(IDS, TARGETS, verbose=0, shuffle=False)


def freeze(model: Any) -> None:
    model.layers[0].trainable = False
    model.compile(model.optimizer, "mse")
    fit(model)


def freeze_variable(model: Any) -> None:
    model.trainable_variables[0].trainable = False
    fit(model)


def clear_session(model: Any) -> None:
    keras.backend.clear_session()
    fit(model)


LIKE_KERAS: dict[str, Callable[[Any], None]] = {
    "gradients flattened and put back by `v.shape` (PCGrad)": project_conflicts,
    "sums of gradients in `tf.Variable(tf.zeros(v.shape))`": accumulate,
    "noise of `v.shape` on gradients": add_noise,
    "`tf.IndexedSlices(g.values * 2, g.indices, g.dense_shape)`": change_slices,
    "`tf.clip_by_global_norm(gradients, c)`": clip,
    "`tape.gradient(loss, [v.value for v in ...])`": ask_by_value,
    "`tape.gradient(loss, tape.watched_variables())`": ask_what_was_watched,
    "`LossScaleOptimizer(erk.optimizer(...))`": scale_losses,
    "`layer.trainable = False`": freeze,
    "`v.trainable = False`": freeze_variable,
    "`keras.backend.clear_session()`": clear_session,
}

# ---------------------------------------------------------------- what is right by itself


def count(model: Any) -> None:
    expected = ROWS * DIM + DIM + 1
    assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == model.count_params() == expected


def clone(model: Any) -> None:
    copied = keras.models.clone_model(model)
    assert copied.layers[0].table is not model.layers[0].table
    assert copied.layers[0].table.steps == 0
    assert not np.array_equal(rows_of(copied), rows_of(model))


def clone_tied(model: Any) -> None:
    ids, table = keras.Input((3,), dtype="int64"), model.layers[0].table
    tied = keras.Model(ids, [erk.Embedding(table)(ids), erk.Embedding(table)(ids)])
    for copied in (keras.models.clone_model(tied), keras.Model.from_config(tied.get_config()), copy.deepcopy(tied)):
        assert copied.layers[1].table is copied.layers[2].table is not table


def deepcopy(model: Any) -> None:
    copied = copy.deepcopy(model)
    np.testing.assert_array_equal(rows_of(copied), rows_of(model))
    before = rows_of(model)
    fit(copied)
    np.testing.assert_array_equal(rows_of(model), before)
    assert not np.array_equal(rows_of(copied), before)


def look_for_masks(model: Any) -> None:
    for kind in (erk.Embedding, erk.EmbeddingBag):
        for mask_zero in (False, True):
            expected = keras.layers.Embedding(ROWS, DIM, mask_zero=mask_zero).supports_masking
            layer = kind(ROWS, DIM, mask_zero=mask_zero)
            assert layer.supports_masking == erk.EmbeddingCollection({"a": layer}).supports_masking == expected
            layer.build()
            assert layer.supports_masking == expected


def call_stateless(model: Any) -> None:
    out, _ = model.stateless_call([v.value for v in model.trainable_variables], [], IDS)
    np.testing.assert_array_equal(out, model(IDS))


def ask_class(model: Any) -> None:
    assert isinstance(model.layers[0], keras.layers.Embedding)


RIGHT: dict[str, tuple[str, Callable[[Any], None]]] = {
    "`sum(np.prod(v.shape) for v in ...)`, `count_params()`, `summary()`": ("all rows", count),
    "`keras.models.clone_model(model)`": ("new rows, of a table in RAM", clone),
    "`clone_model`, `from_config`, `deepcopy` of layers on one table": ("on one table again", clone_tied),
    "`copy.deepcopy(model)`": ("a model with rows of its own, equal ones", deepcopy),
    "`layer.supports_masking`": ("`mask_zero`, as Keras'", look_for_masks),
    "`model.stateless_call([v.value for v in ...], ...)`": ("the rows as they are", call_stateless),
    "`isinstance(layer, keras.layers.Embedding)`": ("True, and `layer.embeddings` is refused: see below", ask_class),
}

# ---------------------------------------------------------------- what is refused


def reset_by_names(model: Any) -> None:
    for layer in model.layers:
        for name, initializer in vars(layer).items():
            if name.endswith("_initializer"):
                variable = getattr(layer, name.removesuffix("_initializer"), None)
                if variable is not None:
                    variable.assign(initializer(variable.shape))


def reset_what_has_an_initializer(model: Any) -> None:
    for layer in model.layers:
        for name in ("kernel", "bias", "embeddings"):
            initializer: Any = getattr(layer, f"{name}_initializer", None)
            if initializer is not None:
                getattr(layer, name).assign(initializer(getattr(layer, name).shape))


def reset_all(model: Any) -> None:
    initializer: Any = keras.initializers.get("uniform")
    for variable in model.trainable_variables:
        variable.assign(initializer(variable.shape))


def build_anew(model: Any) -> None:
    fit(model)
    model.layers[0].built = False
    model.layers[0].build((None, 3))


def average(model: Any) -> None:
    for variable, other in zip(model.trainable_variables, ours().trainable_variables, strict=True):
        variable.assign(0.9 * variable + 0.1 * other)


def follow(model: Any) -> None:
    for variable, other in zip(ours().trainable_variables, model.trainable_variables, strict=True):
        variable.assign(other)


def clip_adaptively(model: Any) -> None:
    pairs = zip(gradients_of(model), model.trainable_variables, strict=True)
    apply(model, [tf.clip_by_norm(g, 0.01 * tf.norm(v)) for g, v in pairs])


def keep_average(model: Any) -> None:
    model.compile(erk.optimizer(keras.optimizers.SGD(use_ema=True)), "mse")
    model.fit(IDS, TARGETS, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])


def step_by_hand(model: Any) -> None:
    for variable, gradient in zip(model.trainable_variables, gradients_of(model), strict=True):
        variable.assign_sub(0.1 * gradient)


def step_plainly(model: Any) -> None:
    model.compile("sgd", "mse")
    fit(model)


def prune(model: Any) -> None:
    for variable in model.layers[0].trainable_weights:
        variable.assign(variable * tf.cast(tf.abs(variable) > 0.01, variable.dtype))


def make_twice(model: Any) -> None:
    group = er.Group()
    for _ in range(2):
        erk.Embedding(ROWS, DIM, group=group, name="users").build()


def set_constraint(model: Any) -> None:
    model.layers[0].embeddings_constraint = keras.constraints.NonNeg()


def set_state(model: Any) -> None:
    name = model.layers[0].name
    model.set_state_tree({"trainable_variables": {model.name: {name: {"rows": np.zeros((ROWS, DIM))}}}})


def multiply_with_all(model: Any) -> None:
    layer: Any = model.layers[0]
    keras.ops.matmul(layer(IDS), keras.ops.transpose(layer.rows))


def load_other_rows(rows: int) -> Callable[[Any], None]:
    def load(model: Any) -> None:
        model.save("model.keras")
        other = model_of(erk.Embedding(rows, DIM), erk.optimizer("sgd"))
        before = other.layers[0].table.lookup(np.arange(rows))
        try:
            other.load_weights("model.keras")
        finally:
            np.testing.assert_array_equal(other.layers[0].table.lookup(np.arange(rows)), before)

    return load


def in_float64(model: Any) -> None:
    keras.config.set_dtype_policy("float64")
    try:
        model_of(erk.Embedding(ROWS, DIM, dtype="float32"), "sgd")(IDS)  # as the error says
        erk.Embedding(ROWS, DIM)
    finally:
        keras.config.set_dtype_policy("float32")


REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    '`layer.embeddings`, `hasattr(layer, "embeddings")`': (NO_VARIABLE, lambda m: hasattr(m.layers[0], "embeddings")),
    "`keras.layers.SpectralNormalization(layer)`": (
        NO_VARIABLE,
        lambda m: keras.layers.SpectralNormalization(erk.Embedding(ROWS, DIM))(IDS),
    ),
    "a reset by each `..._initializer` of a layer": (NO_VARIABLE, reset_by_names),
    "a reset of what has `embeddings_initializer`": (NO_VARIABLE, reset_what_has_an_initializer),
    "a reset by `v.assign(initializer(v.shape))`": (ANEW, reset_all),
    "a reset by `layer.built = False; layer.build(shape)`": (ANEW, build_anew),
    "`get_weights()` of model or layer": (NOT_IN_ARRAYS, lambda m: m.get_weights()),
    "`set_weights(arrays)` of model or layer": (
        "Write rows by `layer.table.assign(ids, values)`",
        lambda m: m.set_weights([WEIGHTS, np.ones((DIM, 1)), np.ones(1)]),
    ),
    "`model.set_state_tree(...)`": (WRITE, set_state),
    "`keras.ops.norm(v)`, `tf.norm(v)`, `tf.nn.l2_loss(v)`": (READ, lambda m: keras.ops.norm(m.layers[0].rows)),
    "`v.numpy()`": ("read rows by `layer.table.lookup(ids)`", lambda m: m.layers[0].rows.numpy()),
    "`np.array(v)`, `v.value.numpy()`": (READ, lambda m: m.layers[0].rows.value.numpy()),
    "`tf.zeros_like(v)`, `tf.Variable(v)`": (READ, lambda m: tf.Variable(m.layers[0].rows)),
    "all rows as a head: `matmul(x, transpose(v))`": (
        "all rows of a small table: `layer(tf.range(n))`",
        multiply_with_all,
    ),
    "adaptive gradient clipping by `tf.norm(v)`": (READ, clip_adaptively),
    "averages: `v.assign(0.9 * v + 0.1 * w)`": (READ, average),
    "target networks: `v.assign(w)`": (WRITE, follow),
    "`use_ema=True`, `SwapEMAWeights`": (
        "an average of all rows would touch every row at each step. Leave it out",
        keep_average,
    ),
    "steps by hand: `v.assign_sub(lr * g)`": (WRITE, step_by_hand),
    "a plain optimizer of Keras": ('`model.compile(optimizer=erk.optimizer("adam"), ...)`', step_plainly),
    "a second layer of a name in a group": ("To share them, give the layer the table", make_twice),
    "pruning by `v.assign(v * mask)`": (READ, prune),
    "`layer.embeddings_constraint = ...` when built": ("Set it before the layer is called", set_constraint),
    "`layer.quantize(...)`": (
        'use `dtype="bfloat16"` for rows of half the size',
        lambda m: m.layers[0].quantize("int8"),
    ),
    "`layer.enable_lora(...)`": ("rows are trained themselves", lambda m: m.layers[0].enable_lora(2)),
    "weights of fewer rows than the layer has": ("Pass `grow=True` for new rows of first values", load_other_rows(12)),
    "weights of more rows than the layer has": (
        "first call `grow(10)`. 2 rows with records would not fit: `shrink(8)` cuts them off",
        load_other_rows(8),
    ),
    "float64 as the policy of all layers": ('Give it `dtype="float32"`', in_float64),
}

# ---------------------------------------------------------------- tests


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("use", LIKE_KERAS.values(), ids=LIKE_KERAS)
def test_what_ends_as_with_an_embedding_of_keras(use: Callable[[Any], None]) -> None:
    mine, expected = ours(), theirs()
    use(mine)
    use(expected)
    np.testing.assert_allclose(rows_of(mine), rows_of(expected), rtol=0, atol=1e-6)
    np.testing.assert_allclose(mine.layers[-1].kernel, expected.layers[-1].kernel, rtol=0, atol=1e-6)
    assert use in (freeze, freeze_variable) or np.abs(rows_of(mine) - WEIGHTS).max() > 1e-4


@pytest.mark.parametrize("use", [use for _, use in RIGHT.values()], ids=RIGHT)
def test_what_is_right(use: Callable[[Any], None]) -> None:
    model = ours()
    use(model)
    np.testing.assert_array_equal(rows_of(model), WEIGHTS)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(("told", "use"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_says_what_to_write(told: str, use: Callable[[Any], Any], on_disk: bool) -> None:
    if on_disk and (use is in_float64 or use.__name__ == "load"):
        pytest.skip("it makes its own layers")
    model = ours(path="rows.rock" if on_disk else None)
    kernel = np.array(model.layers[-1].kernel)
    with pytest.raises((er.EmbedrockError, ValueError), match=re.escape(told.replace("`", ""))):
        use(model)
    if use is not build_anew:  # which trains before
        np.testing.assert_array_equal(rows_of(model), WEIGHTS)
    if use not in (build_anew, reset_by_names, reset_what_has_an_initializer, reset_all, average, follow):
        np.testing.assert_array_equal(model.layers[-1].kernel, kernel)
    if on_disk:
        model.layers[0].table.commit()
    model.layers[0].table.close()


def lines_of_the_table() -> list[str]:
    lines = [f"| {what} | right: as with `keras.layers.Embedding` |" for what in LIKE_KERAS]
    lines += [f"| {what} | right: {here} |" for what, (here, _) in RIGHT.items()]
    lines += [f"| {what} | refused: {told[0].lower()}{told[1:]} |" for what, (told, _) in REFUSED.items()]
    return ["| other code | here |", "| --- | --- |", *lines]


def test_the_page_has_this_table() -> None:
    section = PAGE.read_text().split(f"{HEADING}\n")[1].split("\n#")[0]
    found = [line for line in section.splitlines() if line.startswith("|")]
    assert found == lines_of_the_table(), "\n" + "\n".join(lines_of_the_table())
