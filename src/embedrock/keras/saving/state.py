"""A layer's part of Keras' files: the ways to save that reach a layer, and their content.

Rows on disk are never copied: a file gets a reference to a commit. Rows in RAM go to the assets of a ``.keras``.
Formats without assets (``.weights.h5``, `BackupAndRestore`, `tf.train.Checkpoint`) refuse them.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import weakref
import zipfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from embedrock.errors import ArgumentError, CorruptTableError, UnsupportedError
from embedrock.frontend.references import reference_to
from embedrock.frontend.row_files import are_in, read_rows, size_of_rows, write_rows
from embedrock.io.vfs import explained_if_full, full_disk
from embedrock.keras import callers
from embedrock.keras.saving.references import (
    destination_in_keras,
    destination_of_checkpoint,
    go_to_reference,
    iterations_of,
    reference_of,
    warn_between_steps,
)
from embedrock.keras.workers.shards import check_whole
from embedrock.table.table import Table

KEY = "embedrock"  # a layer's key in a file
IN_ASSETS = "rows in assets"
ASSETS = "assets"  # a folder in a ``.keras``
DONE = "_embedrock_tables"  # an attribute of the file: its tables with rows written or read


# ---------------------------------------------------------------- saving


def save_own_variables(layer: Any, store: Any) -> None:
    """Store the reference to a layer's table, or the note that its rows are in the assets."""
    warn_between_steps(layer)
    if layer.table.is_on_disk:
        content: Any = reference_of(layer, destination_in_keras())
    else:
        _check_assets(layer, "_save_state", "saved")
        content = IN_ASSETS
    store[KEY] = np.frombuffer(json.dumps(content).encode(), np.uint8)


def _check_assets(layer: Any, function: str, done: str) -> None:
    if callers.local(callers.KERAS_SAVING, function, "assets_store") in (None, callers.MISSING):
        raise _no_place(layer.label, done)


def _no_place(label: str, done: str) -> UnsupportedError:
    return UnsupportedError(
        f"the rows of {label} are in RAM, and cannot be {done} as weights alone (save_weights, "
        "BackupAndRestore, ModelCheckpoint(save_weights_only=True)), which would lose them. Save the whole model, "
        'model.save("x.keras") or ModelCheckpoint("x.keras"), and load it by keras.models.load_model; or keep the '
        "rows on disk: path=..., where all of these work."
    )


def save_assets(layer: Any, dir_path: str) -> None:
    """Write the rows of a table in RAM, once for all layers on it."""
    table, done = layer.table, _tables_done("_save_state")
    if table.is_on_disk or table in done:
        return
    check_whole(table, layer.label, "saved")
    done.append(table)
    needed = sum(size_of_rows(each) for each in done)
    if (there := destination_in_keras()) is not None:
        there.check_room(needed, f"the rows of {layer.label} could not be saved")
    what = f"the rows of {layer.label} could not be written to Keras' temporary folder"
    remedy = "Free some space, or let the environment variable TMPDIR name a folder on another disk."
    with explained_if_full(lambda: full_disk(dir_path, what, needed, remedy)):
        write_rows(table, dir_path)


def _tables_done(function: str) -> list[Table]:
    """Return the tables whose rows were already written to, or read from, the file's assets."""
    store = callers.local(callers.KERAS_SAVING, function, "assets_store")
    return [] if store is callers.MISSING else vars(store).setdefault(DONE, [])


# ---------------------------------------------------------------- loading


def load_own_variables(layer: Any, store: Any) -> None:
    """Restore a layer's table to the stored reference or assets."""
    content = _content(layer, store)
    if content == IN_ASSETS:
        archive = callers.local(callers.KERAS_SAVING, "load_weights_only", "archive")
        if isinstance(archive, zipfile.ZipFile):
            _load_from(archive, layer)
        else:
            _check_assets(layer, "_load_state", "loaded")
    else:
        go_to_reference(layer, content)
    if layer.built:
        layer.handle.pending.drop()


def _content(layer: Any, store: Any) -> Any:
    try:
        content = json.loads(bytes(np.asarray(store[KEY])))
    except KeyError:
        raise ArgumentError(
            f"there are no rows for {layer.label} in the file: it is that of another model, or of another layer than "
            f"erk.{type(layer).__name__}. Rows of a keras.layers.Embedding are taken over by "
            f"erk.{type(layer).__name__}.from_pretrained(weights)."
        ) from None
    if content != IN_ASSETS and not isinstance(content, dict):
        raise CorruptTableError(f"what a file has of {layer.label} must be a reference to a table: got {content!r}.")
    return content


def _load_from(archive: zipfile.ZipFile, layer: Any) -> None:
    """Read rows from the assets of a ``.keras``, which `load_weights` ignores."""
    inside = callers.local(callers.KERAS_SAVING, "_load_state", "inner_path")
    names = [name for name in archive.namelist() if name.startswith(f"{ASSETS}/{inside}/")]
    done = vars(archive).setdefault(DONE, [])
    with tempfile.TemporaryDirectory() as folder:
        archive.extractall(folder, names)
        _read(layer, os.path.join(folder, ASSETS, str(inside)), done)


def load_assets(layer: Any, dir_path: str | None) -> None:
    """Read the rows of a table that was in RAM."""
    if not layer.table.is_on_disk or are_in(dir_path):  # a table on disk has a reference, as a rule
        _read(layer, dir_path, _tables_done("_load_state"))


def _read(layer: Any, folder: str | None, done: list[Table]) -> None:
    """Read the rows of a layer from a folder, unless another layer on its table has done so."""
    table = layer.table
    if table in done:
        return
    if folder is None or not are_in(folder):
        raise ArgumentError(
            f"there are no rows for {layer.label} in the file: it is that of another model, or of one whose layers "
            "share a table that here they do not."
        )
    read_rows(table, folder)
    done.append(table)  # only now: Keras retries after an error


class RowState(tf.train.experimental.PythonState):
    """A layer's entry in a `tf.train.Checkpoint`: the reference to its table on disk."""

    def __init__(self, layer: Any) -> None:
        self._layer: Any = weakref.ref(layer)

    def serialize(self) -> bytes:
        layer = self._layer()
        if callers.local(callers.TF_CHECKPOINT, "restore", "self") is not callers.MISSING:
            return b""  # a restore reads only the names of the parts
        if not layer.table.is_on_disk:
            raise UnsupportedError(
                f"the rows of {layer.label} are in RAM, where tf.train.Checkpoint cannot reach them: they would be "
                'lost. Save the whole model, model.save("x.keras"), or keep the rows on disk: path=....'
            )
        warn_between_steps(layer)
        return json.dumps(reference_of(layer, destination_of_checkpoint())).encode()

    def deserialize(self, string_value: bytes) -> None:
        layer = self._layer()
        go_to_reference(layer, json.loads(string_value))
        if layer.built:
            layer.handle.pending.drop()


# ---------------------------------------------------------------- refused ways to save


def refuse_legacy_format(layer: Any) -> None:
    """Raise an error if Keras is writing a whole model as .h5, which saves only a layer's variables."""
    if callers.local(callers.KERAS_LEGACY, "save_model_to_hdf5", "filepath") is not callers.MISSING:
        raise UnsupportedError(
            f"the rows of {layer.label} cannot be saved in the legacy .h5 format, which would lose them. Save as "
            '.keras: model.save("x.keras"), ModelCheckpoint("x.keras").'
        )


_holds = weakref.WeakValueDictionary[tuple[int, str], set[int]]()


class KeptRows:
    """Rows in the weights that `EarlyStopping` keeps: a commit on disk, or a copy in RAM.

    Args:
        layer: layer of the rows.
        name: name of the commit, which all tables of a group share. It is released with the last object of its name.
    """

    shape = ()

    def __init__(self, layer: Any, name: str) -> None:
        table, self._layer = layer.table, weakref.ref(layer)
        if table.is_on_disk and table.mode != "r":
            if table.uncommitted or table.commits()[-1]["name"] != name:
                table.commit(step=iterations_of(layer), name=name)
            if (hold := _holds.get((id(table), name))) is None:
                hold = _holds[id(table), name] = set()
                weakref.finalize(hold, _release, weakref.ref(table), name)
            self._hold = hold  # Keras takes the weights of the first epoch twice
        self._state = reference_to(table) if table.is_on_disk else table.state()

    def put_back(self) -> None:
        """Restore the rows and their optimizer state."""
        layer: Any = self._layer()
        if layer.table.is_on_disk:
            go_to_reference(layer, self._state)
        else:
            layer.table.load_state(self._state, grow=True)  # the layer may have grown since
        layer.handle.pending.drop()


def _release(known: weakref.ref[Table], name: str) -> None:
    table = known()
    if table is not None and table.is_open_here:
        with contextlib.suppress(FileNotFoundError):  # at exit: a temporary folder may be gone, with all commits
            table.release(name)


def rows_in_weights(known: weakref.ref[Any], *args: Any, **kwargs: Any) -> KeptRows:
    """Return what stands for a layer's rows in `get_weights` of `EarlyStopping`. No list of arrays can hold them."""
    layer: Any = known()
    stopping, epoch = (callers.local(callers.KERAS_STOPPING, "on_epoch_end", name) for name in ("self", "epoch"))
    if stopping is callers.MISSING:
        raise UnsupportedError(
            f"get_weights cannot return the rows of {layer.label}, and set_weights cannot bring them back. Use "
            'ModelCheckpoint("best.keras", save_best_only=True) and load that file, or '
            "EarlyStopping(restore_best_weights=True); read rows by layer.table.lookup(ids)."
        )
    return KeptRows(layer, f"best weights of epoch {epoch}, {id(stopping):x}")


def check_callbacks(layer: Any) -> None:
    """Raise an error if the running `fit` has a callback that would lose a layer's rows.

    The callback itself would fail only at the end of an epoch, whose training would be lost.
    """
    for callback in getattr(callers.local(callers.KERAS_TRAINER, "fit", "callbacks"), "callbacks", ()):
        if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights:
            check_whole(layer.table, layer.label, "kept by EarlyStopping(restore_best_weights=True)")
        saves_weights_alone = isinstance(callback, keras.callbacks.BackupAndRestore) or (
            isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_weights_only
        )
        if saves_weights_alone and not layer.table.is_on_disk:
            raise _no_place(layer.label, "saved")
