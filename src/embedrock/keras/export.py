"""`export`: a model as a SavedModel that any TensorFlow loads and serves, without Embedrock and without Python."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.io.vfs import explained_if_full, full_disk
from embedrock.keras.layers.row_layer import KerasRowLayer
from embedrock.keras.saving.checkpoint import bytes_of
from embedrock.keras.serving.table import WHOLE_BYTES, ServingTable, extent, serving
from embedrock.system.paths import local_path
from embedrock.system.scopes import on_failure, set_within
from embedrock.table.missing import FIRST, Missing
from embedrock.table.table import Table, rows_of

MODEL_FILE = "model.keras"
HOST_CALLS = ("EagerPyFunc", "PyFunc", "PyFuncStateless")


def export(
    model: keras.Model,
    folder: str | os.PathLike[str],
    *,
    dependency: str | None = None,
    input_signature: Sequence[Any] | None = None,
    whole_bytes: int | str | None = None,
    missing: Any = None,
) -> None:
    """Write a model as it is now as a SavedModel, with its rows as variables. `model.export` cannot do this.

    The SavedModel has the forward pass for inference, as the function ``serve`` and the signatures "serve" and
    "serving_default". Rows are looked up to the same bits (see `ServingTable`). Both the export and a process that
    loads it need RAM for the saved rows. For a table larger than `whole_bytes`, these are the rows that were ever
    stepped. (TensorFlow keeps that RAM for its next tensors.)

    On a machine with a GPU, ``with tf.device("CPU:0"): tf.saved_model.load(folder)`` keeps the rows in RAM.

    Args:
        model: functional, Sequential or subclassed, built, with any number of embedding layers. It must not be trained
            meanwhile.
        folder: a new folder. It appears in one step with all its files, so a server may watch for it.
        dependency: "embedrock" for an export that depends on Embedrock, for tables larger than RAM: ``model.keras`` in
            `folder`. For tables on disk it has no rows, only the number of a commit, which is kept. Any number of
            processes load it by ``erk.load_model(file, mode="r")`` while the tables are trained on.
        input_signature: one for each argument of the model: a `tf.TensorSpec`, or a list or dict of such. None: the
            signature of the model's inputs. Keras does not know them for a subclassed model.
        whole_bytes: largest table, in bytes of weights or as "2GiB", that is saved with all of its rows; None: 256 MiB.
            From larger tables only rows that were stepped or assigned are saved. The initial values of the others are
            computed. (Tables made from an array always have all rows saved.)
        missing: values of rows that are not there: see `Embedding`. None: that of each layer.

    Raises:
        ArgumentError: the model is not built, its inputs are not known, or `folder` exists. Or a table lacks the row of
            `missing`.
        MemoryBudgetError: the rows would not fit this process's memory.
        OSError: the disk is full, or the folder cannot be written to.
        UnsupportedError: the model calls Python in other ways.

    Example:
        >>> import keras, numpy as np, tensorflow as tf, embedrock.keras as erk
        >>> model = keras.Sequential([keras.Input((2,), dtype="int64"), erk.Embedding(10**9, 4)])
        >>> erk.export(model, "exported")
        >>> served = tf.saved_model.load("exported")
        >>> served.serve(np.array([[3, 999_999_999]])).shape
        TensorShape([1, 2, 4])
    """
    if not isinstance(model, keras.Model) or not model.built:
        got = "one that is not built. Call it once" if isinstance(model, keras.Model) else f"{model!r}"
        raise ArgumentError(f"`model` of erk.export must be a Keras model that is built: got {got}.")
    dense_bytes = bytes_of(model.variables)
    if dependency is not None:
        others = {"input_signature": input_signature, "whole_bytes": whole_bytes, "missing": missing}
        _check_dependency(dependency, others)
        with _appearing(folder, dense_bytes) as draft:
            draft.mkdir()
            return model.save(draft / MODEL_FILE)
    signature = _signature_of(model) if input_signature is None else list(input_signature)
    limit = WHOLE_BYTES if whole_bytes is None else whole_bytes
    choices = _choices(model, Missing.of(missing, "erk.export"))
    size = dense_bytes + sum(extent(table, limit, choice)[1] for (table, _), choice in choices.items())
    with _appearing(folder, size) as draft:
        tables = {asked: ServingTable(asked[0], limit, choice) for asked, choice in choices.items()}
        with set_within(serving, tables):
            served = _served(model, [keras.tree.map_structure(_spec, one) for one in signature])
            served._tables = list(tables.values())
            signatures = dict.fromkeys(("serve", "serving_default"), served.serve.get_concrete_function())
            tf.saved_model.save(served, str(draft), signatures=signatures)


def _choices(model: keras.Model, given: Missing | None) -> dict[tuple[Table, Missing | None], Missing | None]:
    """Return the choice for rows that are not there, by the tables of a model's layers and the layers' own choices."""
    choices: dict[tuple[Table, Missing | None], Missing | None] = {}
    for layer in model._flatten_layers():
        if isinstance(layer, KerasRowLayer):
            choice = given and given._replace(padding=0 if layer.mask_zero else None)
            choices[layer.table, layer.missing] = layer.missing if given is None else choice
            rows_of(layer.table).row_instead(given or FIRST)  # an error, before anything is written
    return choices


def _served(model: keras.Model, signature: list[Any]) -> Any:
    """Return the forward pass of a model as the function ``serve`` of a module, with all objects that it needs."""
    module: Any = tf.Module()
    module.serve = tf.function(lambda *inputs: model(*inputs), input_signature=signature, autograph=False)
    concrete = module.serve.get_concrete_function()
    _check_host_calls(model, concrete)
    module._used = list(concrete.variables)
    parts = tf.train.TrackableView(model).descendants()
    module._resources = [one for one in parts if isinstance(one, tf.saved_model.experimental.TrackableResource)]
    return module


def _check_host_calls(model: keras.Model, concrete: Any) -> None:
    """Raise `UnsupportedError` if a function calls Python, which a server lacks."""
    graph = concrete.graph.as_graph_def()
    functions = [graph.node, *(function.node_def for function in graph.library.function)]
    calls = [node.name for nodes in functions for node in nodes if node.op in HOST_CALLS]
    if calls:
        raise UnsupportedError(
            f"model {model.name!r} cannot be exported: its forward pass calls Python, which no other process has, in "
            f"{', '.join(calls)}. Leave out tf.numpy_function and tf.py_function; if the model has none, a tf.function "
            "of its own was traced earlier with lookups in it: undecorate it."
        )


def _check_dependency(dependency: str, others: dict[str, Any]) -> None:
    if dependency != "embedrock":
        raise ArgumentError(f'`dependency` of erk.export must be "embedrock" or None: got {dependency!r}.')
    if given := [name for name, value in others.items() if value is not None]:
        raise ArgumentError(
            f'{", ".join(f"`{name}`" for name in given)} of erk.export cannot go with dependency="embedrock", which '
            "saves the model itself. Leave out one or the other."
        )


def _signature_of(model: keras.Model) -> list[Any]:
    if not getattr(model, "inputs", None):
        raise ArgumentError(
            f"`input_signature` of erk.export must be given for {type(model).__name__} {model.name!r}, whose inputs "
            'Keras does not know: for example [tf.TensorSpec((None, 20), "int64")], one for each argument of call().'
        )
    return list(model.inputs) if isinstance(model, keras.Sequential) else [model.input]


def _spec(given: Any) -> Any:
    """Return the `tf.TensorSpec` of an input, with any size of the first dimension."""
    if not isinstance(given, keras.KerasTensor):
        return given
    spec = tf.TensorSpec((None, *given.shape[1:]), given.dtype, given.name)
    if getattr(given, "ragged", False):
        return tf.RaggedTensorSpec(spec.shape, spec.dtype)
    return tf.SparseTensorSpec(spec.shape, spec.dtype) if given.sparse else spec


@contextmanager
def _appearing(path: str | os.PathLike[str], needed: int) -> Iterator[Path]:
    """Yield a draft folder, and rename it to `path` at the end. `needed` is its size in bytes, for the error."""
    folder = Path(local_path(path, "`folder` of erk.export"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError(
            f"`folder` of erk.export must be a new folder, or an empty one: got {str(folder)!r}. Give another."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    what, remedy = (
        "the model could not be exported",
        "Free some space, or export to another disk. Nothing of this is left.",
    )
    explained = explained_if_full(lambda: full_disk(str(folder), what, needed, remedy))
    with explained, on_failure(lambda: shutil.rmtree(draft, ignore_errors=True)):
        yield draft
        draft.replace(folder)
