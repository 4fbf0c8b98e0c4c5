"""`load_model`, and the tables that layers get while Keras loads a model."""

from __future__ import annotations

import contextlib
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
from embedrock.frontend.arguments import make_table
from embedrock.frontend.growing import growing
from embedrock.frontend.references import Relocate, is_reference, relocation
from embedrock.initializers import FromSafetensors, Given
from embedrock.keras import callers
from embedrock.keras.saving.references import GO_BACK
from embedrock.keras.saving.state import KEY
from embedrock.keras.training.handle import LOADED
from embedrock.system.paths import local_path
from embedrock.system.scopes import set_within
from embedrock.table.group import Group, open_table
from embedrock.table.opened import opened
from embedrock.table.opening import InitialValuesOf
from embedrock.table.table import Table


class _Loading(NamedTuple):
    """The options of a running `load_model`."""

    mode: str  # "w", or "r" for snapshots
    where: Callable[[str], str]  # from the path of a table in the file to its path now
    commits: Mapping[str, int]  # by path in the file


_loading: ContextVar[_Loading | None] = ContextVar("_loading", default=None)

# Tables of layers, so that a loading model shares the open ones.
tables_of_layers: weakref.WeakSet[Table] = weakref.WeakSet()

_COPYING = (
    (callers.KERAS_CLONING, "wrapped_clone_function", "cache"),
    (callers.KERAS_FUNCTIONAL, "functional_from_config", "created_layers"),
)


def load_model(
    filepath: str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
    *,
    mode: str = "w",
    relocate: Relocate | None = None,
    **more: Any,
) -> Any:
    """Load a ``.keras`` as `keras.models.load_model` does, with tables that have moved, or as snapshots.

    `keras.models.load_model` is enough if no table on disk has moved, and all may go back to the file's commit. No
    commit is lost by that, but training continues from there.

    Args:
        filepath, custom_objects, more: as of Keras'.
        mode: "r" opens snapshots of the tables on disk, as of the file's commits. The model reads while others train,
            in this process or another, and cannot be trained.
        relocate: new paths of tables on disk, and of folders of published tables: {old path: new path}, or a function
            of the old path.

    Raises:
        ArgumentError: `relocate` has a path that the file does not refer to, or a commit is gone.
        TableLockedError: a table is open for writing elsewhere, and the mode is "w".

    Example:
        >>> import keras, numpy as np, embedrock.keras as erk
        >>> model = keras.Sequential([keras.Input((2,), dtype="int64"), erk.Embedding(10**9, 4, path="users.rock")])
        >>> model.save("model.keras")
        >>> served = erk.load_model("model.keras", mode="r")
        >>> bool((served(np.array([[3, 14]])) == model(np.array([[3, 14]]))).numpy().all())
        True
    """
    if mode not in ("w", "r"):
        raise ArgumentError(f'`mode` of erk.load_model must be "w" or "r": got {mode!r}.')
    filepath = local_path(filepath, "`filepath` of erk.load_model", "file")
    found, folders = _places_in(filepath)
    loading = _Loading(mode, relocation("erk.load_model", relocate, [*found, *folders]), found)
    with set_within(_loading, loading):
        return keras.models.load_model(filepath, custom_objects, **more)


def load_weights(model: Any, filepath: str | os.PathLike[str], *, grow: bool = False, **more: Any) -> None:
    """Load weights as ``model.load_weights`` does, with `grow` also those of fewer rows.

    Args:
        model, filepath, more: as of ``model.load_weights``.
        grow: embedding layers may have more rows than were saved. Rows and their optimizer state are as saved, and new
            rows have their first values. Without it, a table on disk goes back to the rows of its commit, and rows in
            RAM are an error.

    Example:
        >>> import keras, embedrock.keras as erk
        >>> before, now = (keras.Sequential([keras.Input((2,)), erk.Embedding(rows, 4)]) for rows in (10, 12))
        >>> before.save("model.keras")
        >>> erk.load_weights(now, "model.keras", grow=True)
    """
    with growing([layer for layer in model._flatten_layers() if hasattr(layer, "_row_state")], grow):
        model.load_weights(filepath, **more)


def _places_in(file: str) -> tuple[dict[str, int], list[str]]:
    """Return the commits of tables on disk by path, and folders of published tables, to which a file refers.

    A ``.weights.h5`` refers to no published tables.
    """
    tables, folders = dict[str, int](), list[str]()

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name.rsplit("/", 1)[-1] == KEY:
            content = json.loads(bytes(np.asarray(item)))
            tables.update({content["path"]: content["commit"]} if is_reference(content) else {})

    def note(part: dict[str, Any]) -> None:
        folders.extend([part["folder"]] if part.get("name") == FromSafetensors.__name__ else [])

    with contextlib.ExitStack() as stack:
        content: Any = file
        if file.endswith(".keras"):
            archive = stack.enter_context(zipfile.ZipFile(file))
            json.loads(archive.read("config.json"), object_hook=note)
            content = stack.enter_context(archive.open("model.weights.h5"))
        stack.enter_context(h5py.File(content, "r")).visititems(visit)
    return tables, folders


# ---------------------------------------------------------------- tables of loading layers


def shared_objects() -> dict[Any, Any] | None:
    """Return the dict shared by all objects of a model during a save or load; None outside of one."""
    return global_state.get_global_attribute(LOADED)


def copied_objects() -> dict[Any, Any] | None:
    """Return the dict shared by all layers of a model that Keras clones or makes from a config; None otherwise."""
    for asking in _COPYING:
        if (found := callers.local(*asking)) is not callers.MISSING:
            return found
    return None


def is_tied(layer: Any) -> bool:
    """Return whether Keras is reading the config of a model in which several layers share a layer's table."""
    model = callers.local(callers.KERAS_FUNCTIONAL, "get_config", "self")
    layers = [] if model is callers.MISSING else model._flatten_layers()
    return sum(getattr(each, "_table", None) is layer.table for each in layers) > 1


def open_for(options: Mapping[str, Any], first: InitialValuesOf | None = None) -> tuple[Table, bool]:
    """Return the table of a layer's options, opened or new, and whether another model shares it.

    For a loading model, the path in the options is that in the file.
    """
    path, more = options.get("path"), {name: own for name, own in options.items() if name not in ("rows", "dim")}

    def made(now: str | None) -> Table:
        return make_table(options["rows"], options["dim"], {**more, "path": now}, first)

    return (made(path), False) if path is None or shared_objects() is None else found_once(path, options, made)


def found_once(path: str, options: Mapping[str, Any], open_it: Callable[[str], Any]) -> tuple[Any, bool]:
    """Return the table or group at a path, and whether another model shares it. All layers of a model share it."""
    loading, shared = _loading.get(), shared_objects()
    assert shared is not None  # a model is loading
    old_path = os.path.abspath(path)
    if (KEY, old_path) not in shared:
        now = path_now(old_path)
        if not os.path.isdir(os.path.join(now, "manifest")):
            raise ArgumentError(
                f"there is no table at {now!r}, to which the file refers. If it was moved, load the model by "
                f"erk.load_model(file, relocate={{old path: new path}}), where the old path is {old_path!r}."
            )
        if loading is not None and loading.mode == "r":
            shared[KEY, old_path] = open_snapshot(now, loading.commits.get(old_path), options), False
        else:
            found = _open_in_this_process(now)
            if found is not None and found.uncommitted:  # refused now, as the loaded optimizer might change more
                what = "group" if isinstance(found, Group) else "table"
                raise ArgumentError(
                    f"the {what} at {now!r} is open in this process, and has changes since commit "
                    f"{found.last_commit}: the file refers to an earlier state. {GO_BACK}"
                )
            shared[KEY, old_path] = (open_it(now), False) if found is None else (found, True)
    return shared[KEY, old_path]


def open_snapshot(path: str, at: int | None, options: Mapping[str, Any]) -> Any:
    """Open a table or group for reading, as of a commit."""
    drawn = ["init"] * isinstance(options.get("init"), Given)
    names = ("memory", "on_nonfinite", "policy", "device_memory", "name", "missing", *drawn)
    return open_table(path, mode="r", at=at, **{name: options[name] for name in names if name in options})


def path_now(path: str) -> str:
    """Return the path now of a table in a loading file."""
    loading = _loading.get()
    return path if loading is None else os.path.abspath(loading.where(path))


def _open_in_this_process(path: str) -> Table | Group | None:
    """Return the open writer of a table or group, if layers of this process use it."""
    found = opened(path)
    if found is not None and found.uncommitted:
        del found  # perhaps unreachable: models are cycles, which are collected late
        gc.collect()
        found = opened(path)
    return found if any(table in tables_of_layers for table in _tables_in(found)) else None


def _tables_in(found: Table | Group | None) -> list[Table]:
    if isinstance(found, Group):
        return found.open_tables()
    return [] if found is None else [found]


def check_not_copied(path: str, label: str, member: str | None = None) -> None:
    """Raise an error if a layer is copied while its table on disk is open. A copy has rows of its own.

    Args:
        path: path of the table, or of its group.
        label: name of the layer in error messages.
        member: the table's name in its group.
    """
    tables = _tables_in(_open_in_this_process(os.path.abspath(path)))
    where = path if member is None else f"{path}#{member}"
    if any(member in (None, table.name) for table in tables):
        raise UnsupportedError(
            f"{label} cannot be copied (clone_model, from_config): its table on disk at {where!r} is open, and a copy "
            "needs one of its own. To share the rows, or to give the copy others, pass clone_function to clone_model: "
            "lambda layer: erk.Embedding(layer.table) or erk.Embedding(..., path=another one) for these layers."
        )
