"""Saving and loading: which of Keras' and TensorFlow's ways reach a layer, and what each may store of its rows.

Rows on disk are never copied. The table commits, and the file gets a reference, {path, uuid, commit, step}. The commit
bears the name of the file, so that retention keeps it for as long as the file needs it (see `Place`).
Rows in RAM go to the assets of a ``.keras``. What has no assets (``.weights.h5``, `BackupAndRestore`,
`tf.train.Checkpoint`) refuses them.

Keras does not tell a layer where it is being saved to, nor whether there will be assets. `_local` looks it up in the
functions of Keras' that are being called. Where a later Keras has other ones, rows in RAM are refused, and commits get
no name; the tests say so.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from embedrock.errors import ArgumentError, CorruptTableError, UnsupportedError
from embedrock.fronts.references import Remedies, check_state, go_to, reference_to, tell_resumed
from embedrock.keras.saving.row_files import are_in, read_rows, write_rows
from embedrock.keras.training.optimizers import rebind
from embedrock.keras.workers.sharding import check_whole
from embedrock.table.table import Table

KEY = "embedrock"  # of what a layer stores
IN_ASSETS = "rows in assets"
KEPT_PER_FILE = 2  # the newer one, and that of a copy such as BackupAndRestore(double_checkpoint=True) makes
KERAS_SAVING = "keras.src.saving.saving_lib"
KERAS_LEGACY = "keras.src.legacy.saving.legacy_h5_format"
TF_CHECKPOINT = "tensorflow.python.checkpoint.checkpoint"

REMEDIES = Remedies(
    moved="Make the layer with path=, the place where that table is now; erk.load_model(file, relocate={old path: new "
    "path}) does so for a whole model.",
    dropped="A file keeps its rows until two newer ones were saved in its place: save to a name of its own, or by "
    "erk.TableCheckpoint.",
)

GO_BACK = (
    'Load the file as it was by erk.load_model(file, mode="r"); or close the table by layer.table.close(), or start '
    "another process, to go on from there; or take the open model back by model.load_weights(file)."
)

_made: ContextVar[Mapping[Table, int] | None] = ContextVar("_made", default=None)
_missing = object()

# Of a table that went back: the commit that it went to, and the number that this has now.
_origins: weakref.WeakKeyDictionary[Table, tuple[int, int]] = weakref.WeakKeyDictionary()


# ---------------------------------------------------------------- where a layer is being saved to


def _local(module: str, function: str, variable: str) -> Any:
    """Return what a local variable is in a function that is being called; `_missing` where it is not."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return frame.f_locals.get(variable, _missing)
        frame = frame.f_back
    return _missing


class Place(NamedTuple):
    """Where a layer is being saved to.

    Its key is the file, not just its path: one that was moved away, where another took its place, is another file.
    Those that only the system's own file can tell apart (remote ones) are told by path.

    Attributes:
        path: absolute, of a file; the prefix of a `tf.train.Checkpoint`.
        is_checkpoint: whether it is one of those, whose files TensorFlow removes.
    """

    path: str
    is_checkpoint: bool = False

    @property
    def _key(self) -> str:
        told = os.path.dirname(self.path) if self.is_checkpoint else f"{self.path}:{_file_number(self.path)}"
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    @property
    def _base(self) -> str:
        base = os.path.basename(self.path)
        return "".join(letter if letter.isprintable() else "?" for letter in base)[-64:]

    def new_name(self) -> str:
        """Return a new name for a commit."""
        return f"{self._base} {self._key} {secrets.token_hex(4)}"

    def owns(self, name: str | None) -> bool:
        """Tell whether a commit of that name was made for this file."""
        return name is not None and name.rsplit(" ", 1)[0] == f"{self._base} {self._key}"

    def is_over(self, name: str | None) -> bool:
        """Tell whether a commit was made for a checkpoint in the same folder that was removed since."""
        if not self.is_checkpoint or name is None or name.rsplit(" ", 2)[1:2] != [self._key]:
            return False
        index = os.path.join(os.path.dirname(self.path), name.rsplit(" ", 2)[0] + ".index")
        return not self.owns(name) and not os.path.exists(index)


def _file_number(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except (OSError, ValueError):
        return 0


def _place() -> Place | None:
    """Return where Keras is saving to; None for RAM, as when pickling."""
    for function, variable in (
        ("save_model", "filepath"),
        ("_save_model_to_fileobj", "fileobj"),
        ("_save_model_to_dir", "dirpath"),
        ("save_weights_only", "remote_filepath"),
        ("save_weights_only", "filepath"),
    ):
        found = _local(KERAS_SAVING, function, variable)
        found = getattr(found, "name", None) if isinstance(found, io.IOBase) else found
        if isinstance(found, str | os.PathLike):
            path = os.fspath(found)
            return Place(path if "://" in path else os.path.abspath(path))
    return None


def _check_outside(place: Place | None, table: Table) -> None:
    """Raise an error, and leave nothing, where a file is saved to the folder of a table."""
    if place is None or table.path is None:
        return
    folder = os.path.realpath(table.path)
    if not Path(os.path.realpath(place.path)).is_relative_to(folder):
        return
    if not place.is_checkpoint:
        with contextlib.suppress(OSError):
            os.unlink(place.path)  # which Keras has just made
    raise ArgumentError(
        f"a model must be saved outside of its tables: got {place.path!r}, inside of the table at {folder!r}. Save it "
        "to another folder."
    )


# ---------------------------------------------------------------- saving


@contextlib.contextmanager
def with_commits(made: Mapping[Table, int]) -> Iterator[None]:
    """Have layers refer to commits that were begun already, for whose end somebody else waits."""
    token = _made.set(made)
    try:
        yield
    finally:
        _made.reset(token)


def save_own_variables(layer: Any, store: Any) -> None:
    """Do what a layer's `save_own_variables` does: store which rows are meant."""
    _warn_between_steps(layer)
    if layer.table.is_on_disk:
        place = _place()
        _check_outside(place, layer.table)
        content: Any = _reference(layer, place)
    else:
        _check_assets(layer, "_save_state", "saved")
        content = IN_ASSETS
    store[KEY] = np.frombuffer(json.dumps(content).encode(), np.uint8)


def _warn_between_steps(layer: Any) -> None:
    """Say what is missing in a file that is made while gradients wait for more batches."""
    owner = layer.handle.owner if layer.built else None
    if owner is not None and is_accumulating(owner):
        warnings.warn(
            f"the model is saved between two steps of gradient_accumulation_steps={owner.gradient_accumulation_steps}: "
            f"gradients of rows of {layer.label} that wait are not saved, and training cannot go on from the file. "
            "Save after a step, by erk.TableCheckpoint for example; to predict, the file is whole.",
            stacklevel=2,
        )


def is_accumulating(optimizer: Any) -> bool:
    """Tell whether gradients wait for more batches."""
    steps = optimizer.gradient_accumulation_steps
    return bool(steps) and int(optimizer._iterations.numpy()) % steps != 0


def _check_assets(layer: Any, function: str, done: str) -> None:
    """Raise an error where there are no assets, and so no place for rows."""
    if _local(KERAS_SAVING, function, "assets_store") in (None, _missing):
        raise UnsupportedError(
            f"the rows of {layer.label} are in RAM, and cannot be {done} as weights alone (save_weights, load_weights, "
            "BackupAndRestore, ModelCheckpoint(save_weights_only=True)), which would lose them. Save the whole model, "
            'model.save("x.keras") or ModelCheckpoint("x.keras"), and load it by keras.models.load_model; or keep the '
            "rows on disk: path=..., where all of these work."
        )


def _reference(layer: Any, place: Place | None) -> dict[str, Any]:
    """Return the reference to a table on disk as it is now, whose commit the file will keep."""
    table, made = layer.table, _made.get()
    if made is not None and table in made:
        return {**_address(table), "commit": made[table], "step": iterations_of(layer)}
    if table.mode == "w" and place is not None:
        names = [commit["name"] for commit in table.commits()]
        if table.uncommitted or not place.owns(names[-1]):
            names.append(place.new_name())
            table.commit(step=iterations_of(layer), name=names[-1])
        own = [name for name in names if place.owns(name)]
        for name in own[:-KEPT_PER_FILE] + [name for name in names if place.is_over(name)]:
            table.release(name)
    elif table.uncommitted:
        table.commit(step=iterations_of(layer))
    return reference_to(table)


def _address(table: Table) -> dict[str, Any]:
    return {"path": str(table.path), "uuid": table.uuid}


def iterations_of(layer: Any) -> int | None:
    """Return how many steps the optimizer of a layer's rows has made; None where there is none."""
    owner = layer.handle.owner if layer.built else None
    return None if owner is None else int(owner.iterations.numpy())


def save_assets(layer: Any, folder: str) -> None:
    """Do what a layer's `save_assets` does: write the rows of a table in RAM, once for all layers on it."""
    table, done = layer.table, _tables_done("_save_state")
    if table.is_on_disk or table in done:
        return
    check_whole(table, layer.label, "saved")
    done.append(table)
    write_rows(table, folder)


def _tables_done(function: str) -> list[Table]:
    """Return the tables whose rows were written to, or read from, the assets of a file before."""
    store = _local(KERAS_SAVING, function, "assets_store")
    return [] if store is _missing else vars(store).setdefault("_embedrock_tables", [])


# ---------------------------------------------------------------- loading


def load_own_variables(layer: Any, store: Any) -> None:
    """Do what a layer's `load_own_variables` does: have the table go to the rows that are meant."""
    content = _content(layer, store)
    if content == IN_ASSETS:
        _check_in_ram(layer)
        _check_assets(layer, "_load_state", "loaded")
    else:
        _go_to(layer, content)
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


def _check_in_ram(layer: Any) -> None:
    if layer.table.is_on_disk:
        raise UnsupportedError(
            f"the state of {layer.label} must be a reference to its table on disk, at {layer.table.path!r}: got rows "
            "of a table in RAM. Load it into a model without path=, and write the rows that you want to keep by "
            "layer.table.assign(ids, values)."
        )


def _go_to(layer: Any, state: dict[str, Any]) -> None:
    """Take a layer's table to the commit of a reference."""
    table = layer.table
    check_state(table, state, layer.label, REMEDIES)
    if _is_at(table, state):
        layer.shares_open_table = False  # it is loaded, and may go anywhere from now on
        return
    if table.mode == "r":
        raise ArgumentError(
            f"{layer.label} has a snapshot of commit {table.last_commit}, which never moves, and the file refers to "
            f'commit {state["commit"]}: load it by erk.load_model(file, mode="r"), or open the table so: '
            f'er.open(path, mode="r", at={state["commit"]}).'
        )
    if layer.shares_open_table:  # (Keras tries again what has failed.)
        if table.uncommitted:  # it was not before: the optimizer of the loaded model has another rule
            table.rollback(table.last_commit)
        raise ArgumentError(
            f"the table of {layer.label} at {table.path!r} is open in this process, in another model that has gone on: "
            f"the file refers to commit {state['commit']}, and the table is at commit {table.last_commit}. {GO_BACK}"
        )
    go_to(table, state)
    _origins[table] = state["commit"], table.last_commit
    if layer.built:
        rebind(layer.handle)
    tell_resumed(table.path, state["step"], f" (commit {state['commit']})")


def _is_at(table: Table, state: dict[str, Any]) -> bool:
    here = table.last_commit
    return not table.uncommitted and (here == state["commit"] or _origins.get(table) == (state["commit"], here))


def load_assets(layer: Any, folder: str | None) -> None:
    """Do what a layer's `load_assets` does: read the rows of a table in RAM."""
    table, done = layer.table, _tables_done("_load_state")
    if table.is_on_disk or table in done:
        return
    if folder is None or not are_in(folder):
        raise ArgumentError(
            f"there are no rows for {layer.label} in the file: it is that of another model, or of one whose layers "
            "share a table that here they do not."
        )
    read_rows(table, folder)
    done.append(table)  # only now: Keras comes again to what has failed


# ---------------------------------------------------------------- tf.train.Checkpoint, get_weights


class RowState(tf.train.experimental.PythonState):
    """What `tf.train.Checkpoint` saves of a layer: the reference to its table on disk."""

    def __init__(self, layer: Any) -> None:
        self._reference = weakref.ref(layer)

    @property
    def _layer(self) -> Any:
        return self._reference()

    def serialize(self) -> bytes:
        """Return what to save."""
        layer = self._layer
        if _local(TF_CHECKPOINT, "restore", "self") is not _missing:
            return b""  # it is only asked which parts there are
        if not layer.table.is_on_disk:
            raise UnsupportedError(
                f"the rows of {layer.label} are in RAM, where tf.train.Checkpoint cannot reach them: they would be "
                'lost. Save the whole model, model.save("x.keras"), or keep the rows on disk: path=....'
            )
        _warn_between_steps(layer)
        prefix = _local(TF_CHECKPOINT, "save", "file_prefix")
        place = None if not isinstance(prefix, str) else Place(os.path.abspath(prefix), is_checkpoint=True)
        _check_outside(place, layer.table)
        return json.dumps(_reference(layer, place)).encode()

    def deserialize(self, string_value: bytes) -> None:
        """Take what was saved."""
        layer = self._layer
        _go_to(layer, json.loads(string_value))
        if layer.built:
            layer.handle.pending.drop()


def refuse_legacy_format(layer: Any) -> None:
    """Raise an error where Keras is writing a whole model as .h5, which asks a layer for nothing but its variables."""
    if _local(KERAS_LEGACY, "save_model_to_hdf5", "filepath") is not _missing:
        raise UnsupportedError(
            f"the rows of {layer.label} cannot be saved in the legacy .h5 format, which would lose them. Save as "
            '.keras: model.save("x.keras"), ModelCheckpoint("x.keras").'
        )


def refuse_get_weights(layer: Any) -> None:
    """Have `get_weights` refuse a layer's variable, which stands for the rows: no list of arrays can hold them."""
    label = layer.label

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"get_weights cannot return the rows of {label}, and set_weights cannot bring them back: "
            "EarlyStopping(restore_best_weights=True) and the like would lose them. Use "
            'ModelCheckpoint("best.keras", save_best_only=True) (or save_weights_only=True for rows on disk) beside '
            "EarlyStopping() and load that file; read rows by layer.table.lookup(ids)."
        )

    layer.handle.variable.numpy = refuse
