"""References to tables on disk in Keras' files: the number of a commit instead of rows.

The table commits, and the file gets {path, uuid, commit, step}. The commit bears the name of the file, so retention
keeps it for as long as the file needs it. Without a known file (a pickle, a copy), the commit is kept until it is
released.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import warnings
import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from embedrock.errors import ArgumentError
from embedrock.frontend.references import (
    ReferenceRemedies,
    check_state,
    go_to,
    lasting_reference_to,
    reference_at,
    reference_to,
    tell_resumed,
)
from embedrock.io.vfs import full_disk
from embedrock.keras import callers
from embedrock.keras.training.steps import rebind
from embedrock.system import platform
from embedrock.table.group import Group
from embedrock.table.table import Table

HOLDER = "keras_state"  # prefix of commits whose file is unknown
KEPT_PER_FILE = 2  # the newer one, and that of a copy such as BackupAndRestore(double_checkpoint=True) makes

REMEDIES = ReferenceRemedies(
    moved="Make the layer with path=, the place where that table is now; erk.load_model(file, relocate={old path: new "
    "path}) does so for a whole model.",
    dropped="A file keeps its rows until two newer ones were saved in its place: save to a name of its own, or by "
    "erk.TableCheckpoint.",
)

GO_BACK = (
    'Load the file as it was by erk.load_model(file, mode="r"); or close what is open, er.close(path), or start '
    "another process, to go on from there; or take the open model back by model.load_weights(file)."
)

# Numbers of commits that were begun already, to which layers refer. The caller waits for their end.
begun_commits: ContextVar[Mapping[Table, int] | None] = ContextVar("begun_commits", default=None)

# For each table or group that rolled back: the target commit, and the number of the commit that this made.
_origins: weakref.WeakKeyDictionary[Table | Group, tuple[int, int]] = weakref.WeakKeyDictionary()


# ---------------------------------------------------------------- destinations


class SaveDestination(NamedTuple):
    """The destination of a save.

    The key identifies the file, not only the path: a new file in place of a moved one has another. Remote files have no
    file number, so their key identifies the path only.
    """

    path: str  # absolute path of a file; the prefix of a `tf.train.Checkpoint`
    is_checkpoint: bool = False  # whether it is a `tf.train.Checkpoint`, whose files TensorFlow removes

    @property
    def _key(self) -> str:
        identity = os.path.dirname(self.path)
        if not self.is_checkpoint:
            number = 0
            with contextlib.suppress(OSError, ValueError):
                number = os.stat(self.path).st_ino
            identity = f"{self.path}:{number}"
        return hashlib.sha256(identity.encode()).hexdigest()[:12]

    @property
    def _base(self) -> str:
        base = os.path.basename(self.path)
        return "".join(letter if letter.isprintable() else "?" for letter in base)[-64:]

    def new_name(self) -> str:
        return f"{self._base} {self._key} {secrets.token_hex(4)}"

    def owns(self, name: str | None) -> bool:
        """Return whether the named commit was made for this file."""
        return name is not None and name.rsplit(" ", 1)[0] == f"{self._base} {self._key}"

    def is_over(self, name: str | None) -> bool:
        """Return whether the named commit was made for a removed checkpoint of the same folder."""
        if not self.is_checkpoint or name is None or name.rsplit(" ", 2)[1:2] != [self._key]:
            return False
        index = os.path.join(os.path.dirname(self.path), name.rsplit(" ", 2)[0] + ".index")
        return not self.owns(name) and not os.path.exists(index)

    def _remove(self) -> None:
        if not self.is_checkpoint:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def check_room(self, needed: int, what: str) -> None:
        """Raise an error, and remove the begun file, if its disk has too little space. Keras would leave a part of it.

        Args:
            needed: bytes.
            what: the failed action, for the error.
        """
        if "://" not in self.path and platform.free_bytes(os.path.dirname(self.path)) < needed:
            error = full_disk(self.path, what, needed, "Free some space, or save to another disk.")
            self._remove()
            raise error

    def check_outside(self, table: Table) -> None:
        """Raise an error, and remove the begun file, if it is inside the folder of a table on disk."""
        folder = os.path.realpath(str(table.path))
        if Path(os.path.realpath(self.path)).is_relative_to(folder):
            self._remove()
            raise ArgumentError(
                f"a model must be saved outside of its tables: got {self.path!r}, inside of the table at {folder!r}. "
                "Save it to another folder."
            )


def destination_in_keras() -> SaveDestination | None:
    """Return the destination of Keras' running save; None for RAM, as when pickling."""
    for function, variable in (
        ("save_model", "filepath"),
        ("_save_model_to_fileobj", "fileobj"),
        ("_save_model_to_dir", "dirpath"),
        ("save_weights_only", "remote_filepath"),
        ("save_weights_only", "filepath"),
    ):
        found = callers.local(callers.KERAS_SAVING, function, variable)
        found = getattr(found, "name", None) if isinstance(found, io.IOBase) else found
        if isinstance(found, str | os.PathLike):
            path = os.fspath(found)
            return SaveDestination(path if "://" in path else os.path.abspath(path))
    return None


def destination_of_checkpoint() -> SaveDestination | None:
    """Return the destination of a running `tf.train.Checkpoint` save; None if it is unknown."""
    prefix = callers.local(callers.TF_CHECKPOINT, "save", "file_prefix")
    return SaveDestination(os.path.abspath(prefix), is_checkpoint=True) if isinstance(prefix, str) else None


# ---------------------------------------------------------------- saving


def reference_of(layer: Any, destination: SaveDestination | None) -> dict[str, Any]:
    """Return the reference to a table on disk as it is now. The commit is kept for as long as needed."""
    table, made = layer.table, begun_commits.get()
    if destination is not None:
        destination.check_outside(table)
    if made is not None and table in made:
        return reference_at(table, made[table], iterations_of(layer))
    if table.mode == "r" or destination is None:
        return lasting_reference_to(table, HOLDER, iterations_of(layer))
    is_changed, names = table.uncommitted, [commit["name"] for commit in table.commits()]
    if is_changed or not destination.owns(names[-1]):
        names.append(destination.new_name())
        table.commit(step=iterations_of(layer), name=names[-1])
    own = [name for name in names if destination.owns(name)]
    for name in own[:-KEPT_PER_FILE] + [name for name in names if destination.is_over(name)]:
        table.release(name)
    return reference_to(table)


def iterations_of(layer: Any) -> int | None:
    """Return the number of steps of a layer's optimizer; None without an optimizer."""
    owner = layer.handle.owner if layer.built else None
    return None if owner is None else int(owner.iterations.numpy())


def warn_between_steps(layer: Any) -> None:
    """Warn if gradients wait for more batches: a file saved now lacks them."""
    owner = layer.handle.owner if layer.built else None
    if owner is not None and is_accumulating(owner):
        warnings.warn(
            f"the model is saved between two steps of gradient_accumulation_steps={owner.gradient_accumulation_steps}: "
            f"gradients of rows of {layer.label} that wait are not saved, and training cannot go on from the file. "
            "Save after a step, by erk.TableCheckpoint for example; to predict, the file is whole.",
            stacklevel=2,
        )


def is_accumulating(optimizer: Any) -> bool:
    """Return whether gradients wait for more batches."""
    steps = optimizer.gradient_accumulation_steps
    return bool(steps) and int(optimizer._iterations.numpy()) % steps != 0


# ---------------------------------------------------------------- loading


def go_to_reference(layer: Any, state: dict[str, Any]) -> None:
    """Roll a layer's table back to the commit of a reference."""
    table = layer.table
    check_state(table, state, layer.label, REMEDIES)
    unit = table if table.group is None else table.group  # what rolls back as one
    is_changed, here = table.uncommitted, table.last_commit
    is_there = _origins.get(unit) == (state["commit"], here)
    if not is_changed and (here == state["commit"] or is_there):
        layer.shares_open_table = False  # it is loaded, and may go anywhere from now on
        return
    if table.mode == "r":
        raise ArgumentError(
            f"{layer.label} has a snapshot of commit {here}, which never moves, and the file refers to "
            f'commit {state["commit"]}: load it by erk.load_model(file, mode="r"), or open the table so: '
            f'er.open(path, mode="r", at={state["commit"]}).'
        )
    if layer.shares_open_table:  # (Keras retries after an error.)
        if table.uncommitted:  # it was not before: the optimizer of the loaded model has another rule
            table.rollback(table.last_commit)
        raise ArgumentError(
            f"the table of {layer.label} at {table.path!r} is open in this process, in another model that has gone on: "
            f"the file refers to commit {state['commit']}, and the table is at commit {table.last_commit}. {GO_BACK}"
        )
    go_to(table, state)
    _origins[unit] = state["commit"], table.last_commit
    if layer.built:
        rebind(layer.handle)
    if table.group is None or not is_there:  # once for a group
        tell_resumed(table.path, state["step"], f" (commit {state['commit']}), as saved with the model")
