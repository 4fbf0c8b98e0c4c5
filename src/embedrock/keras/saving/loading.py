"""`load_model`, and the tables that layers get while Keras loads a model."""

from __future__ import annotations

import gc
import json
import os
import weakref
import zipfile
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import h5py
import keras
import numpy as np
from keras.src.backend.common import global_state

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.fronts.arguments import make_table
from embedrock.fronts.references import Relocate, is_reference, relocation
from embedrock.initializers import FromArray, Initializer
from embedrock.keras.saving.references import GO_BACK
from embedrock.keras.saving.state import KEY
from embedrock.keras.training.handle import LOADED
from embedrock.machine.paths import local_path
from embedrock.table.open import open_table
from embedrock.table.opened import opened
from embedrock.table.opening import FirstValues
from embedrock.table.table import Table


class _Loading(NamedTuple):
    """What `load_model` was asked for, and how tables of the file are to be opened.

    Attributes:
        mode: "w", or "r" for snapshots.
        where: the path of a table now, of its path then.
        commits: of each path then.
    """

    mode: str
    where: Callable[[str], str]
    commits: Mapping[str, int]


_loading: ContextVar[_Loading | None] = ContextVar("_loading", default=None)

# Tables of layers, so that a model that is loaded shares those that are open.
_tables: weakref.WeakSet[Table] = weakref.WeakSet()


def load_model(
    filepath: str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
    *,
    mode: str = "w",
    relocate: Relocate | None = None,
    **more: Any,
) -> Any:
    """Load a ``.keras`` as `keras.models.load_model` does, with tables that lie elsewhere now, or as snapshots.

    `keras.models.load_model` is enough where tables on disk are where they were and may go back to the commit that
    the file refers to: no commit is lost, but what comes next goes on from there.

    Args:
        filepath, custom_objects, more: as of Keras'.
        mode: "r" opens snapshots of the tables on disk, as of the file's commits. It reads while others train, in
            this process or another, and cannot be trained.
        relocate: where tables on disk lie now: {old path: new path}, or a function of the old path.

    Raises:
        ArgumentError: `relocate` has a path that the file does not refer to, or a commit is no longer there.
        TableLockedError: a table is open for writing elsewhere, and the mode is "w".
    """
    if mode not in ("w", "r"):
        raise ArgumentError(f'`mode` of erk.load_model must be "w" or "r": got {mode!r}.')
    filepath = local_path(filepath, "`filepath` of erk.load_model", "file")
    found = {state["path"]: state["commit"] for state in references_in(filepath)}
    token = _loading.set(_Loading(mode, relocation("erk.load_model", relocate, list(found)), found))
    try:
        return keras.models.load_model(filepath, custom_objects, **more)
    finally:
        _loading.reset(token)


def references_in(file: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the references to tables on disk in a ``.keras`` or ``.weights.h5``."""
    if str(file).endswith(".keras"):
        with zipfile.ZipFile(file) as archive, archive.open("model.weights.h5") as inner:
            return _references_in(inner)
    return _references_in(file)


def _references_in(file: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name.rsplit("/", 1)[-1] == KEY:
            content = json.loads(bytes(np.asarray(item)))
            found.extend([content] if is_reference(content) else [])

    with h5py.File(file, "r") as opened:
        opened.visititems(visit)
    return found


# ---------------------------------------------------------------- tables of layers that are loaded


def shared_objects() -> dict[Any, Any] | None:
    """Return what all objects of a model that is being saved or loaded share; None where none is."""
    return global_state.get_global_attribute(LOADED)


def open_for(path: str, options: Mapping[str, Any], first: FirstValues | None = None) -> tuple[Table, bool]:
    """Return the table at a path, for a layer of a model that is being loaded, and whether another model has it too.

    Args:
        path: at which the table was when the model was saved.
        options: with which it is opened: arguments of `Table`.
        first: what draws first values where the options do not say it.
    """
    loading, shared = _loading.get(), shared_objects()
    assert shared is not None  # a model is being loaded
    asked = os.path.abspath(path)
    if (KEY, asked) not in shared:
        now = path_now(asked)
        if not os.path.isdir(os.path.join(now, "manifest")):
            raise ArgumentError(
                f"there is no table at {now!r}, to which the file refers. If it was moved, load the model by "
                f"erk.load_model(file, relocate={{old path: new path}}), where the old path is {asked!r}."
            )
        if loading is not None and loading.mode == "r":
            shared[KEY, asked] = open_snapshot(now, loading.commits.get(asked), options), False
        else:
            table = _open_in_this_process(now)
            if table is not None and table.uncommitted:  # refused now, as the loaded optimizer might change more
                raise ArgumentError(
                    f"the table at {now!r} is open in this process, and has changes since commit {table.last_commit}: "
                    f"the file refers to an earlier state. {GO_BACK}"
                )
            shared[KEY, asked] = (
                (open_or_make({**options, "path": now}, first), False) if table is None else (table, True)
            )
    return shared[KEY, asked]


def open_snapshot(path: str, at: int | None, options: Mapping[str, Any]) -> Table:
    """Open a table for reading, as of a commit."""
    names = ("memory", "on_nonfinite", "policy", "device_memory", "name", *["init"] * is_from_array(options["init"]))
    return open_table(path, mode="r", at=at, **{name: options[name] for name in names if name in options})


def open_or_make(options: Mapping[str, Any], first: FirstValues | None = None) -> Table:
    """Return a new table, or the one that there is at its path; of that, tell where it goes on."""
    more = {name: value for name, value in options.items() if name not in ("rows", "dim")}
    return make_table(options["rows"], options["dim"], more, first)


def path_now(path: str) -> str:
    """Return where the table of a file that is being loaded lies now."""
    loading = _loading.get()
    return path if loading is None else os.path.abspath(loading.where(path))


def is_from_array(init: Any) -> bool:
    """Return whether first values come from an array."""
    return isinstance(init, Initializer) and init.describe()["name"] == FromArray.__name__


def _open_in_this_process(path: str) -> Table | None:
    """Return the writer of a table that layers of this process have."""
    table = opened(path)
    if table is not None and table.uncommitted:
        del table  # perhaps nobody has it any more: models are cycles, which are collected late
        gc.collect()
        table = opened(path)
    return table if table in _tables else None


def check_not_copied(path: str, label: str) -> None:
    """Raise an error where a layer is copied whose table on disk is open: a copy has rows of its own."""
    if _open_in_this_process(os.path.abspath(path)) is not None:
        raise UnsupportedError(
            f"{label} cannot be copied (clone_model, from_config): its table on disk at {path!r} is open, and a copy "
            "needs one of its own. To share the rows, or to give the copy others, pass clone_function to clone_model: "
            "lambda layer: erk.Embedding(layer.table) or erk.Embedding(..., path=another one) for these layers."
        )


def remember(table: Table) -> None:
    """Note that a layer has a table."""
    _tables.add(table)
