"""`SaveDestination`: the file that Keras is writing a layer to. The commits of the file bear its name."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from embedrock.errors import ArgumentError
from embedrock.io.vfs import full_disk
from embedrock.keras import callers
from embedrock.system import platform
from embedrock.table.table import Table


class SaveDestination(NamedTuple):
    """The destination of a save.

    The key identifies the file, not only the path: a new file in place of a moved one has another. Remote files have no
    file number, so their key identifies the path only.

    Attributes:
        path: absolute path of a file; the prefix of a `tf.train.Checkpoint`.
        is_checkpoint: whether it is a `tf.train.Checkpoint`, whose files TensorFlow removes.
    """

    path: str
    is_checkpoint: bool = False

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


def of_keras() -> SaveDestination | None:
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


def of_tf_checkpoint() -> SaveDestination | None:
    """Return the destination of a running `tf.train.Checkpoint` save; None if it is unknown."""
    prefix = callers.local(callers.TF_CHECKPOINT, "save", "file_prefix")
    return SaveDestination(os.path.abspath(prefix), is_checkpoint=True) if isinstance(prefix, str) else None
