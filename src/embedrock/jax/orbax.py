"""Checkpoints by Orbax: tables as an item, beside dense weights of the same step."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import orbax.checkpoint as ocp

from embedrock.errors import ArgumentError
from embedrock.frontend.checkpoints import load_tables, save_tables
from embedrock.frontend.references import ReferenceRemedies
from embedrock.jax.tables import Tables
from embedrock.storage.commit import StorageCommit
from embedrock.system.paths import local_path

FILES, TMP = "orbax-*.json", ocp.path.step.TMP_DIR_SUFFIX
MOVED = "Make the table with path=, the place where that table is now."
REMEDIES = ReferenceRemedies(MOVED, "Restore another step of manager.all_steps().", "table")


class TablesHandler(ocp.CheckpointHandler):
    """Handler of `TablesSave` and `TablesRestore`. Orbax finds it by them."""

    _begun: ClassVar[dict[str, tuple[StorageCommit, ...]]] = {}  # by folder: Orbax may finalize by another instance

    def save(self, directory: Any, args: TablesSave) -> None:
        folder = Path(local_path(directory, "the folder of a checkpoint with tables"))
        (item, step), root = (each.name.partition(TMP)[0] for each in (folder, folder.parent)), folder.parent.parent
        # A new folder in the place of a moved one has another key, and releases none of its commits.
        key = hashlib.sha256(f"{root.resolve()} {root.stat().st_ino} {item}".encode()).hexdigest()[:12]
        saved = [each / item for each in root.iterdir() if TMP not in each.name]  # also by a manager that still saves:
        held = {file.stem for each in (*map(Path, tuple(self._begun)), *saved) for file in each.glob(FILES)}
        number = int(found[0]) if (found := re.search(r"\d+$", step)) else None
        self._begun[str(folder)] = save_tables(args.tables.by_name, folder, f"orbax-{key}-", held, number)

    def finalize(self, directory: Any) -> None:
        for commit in self._begun.pop(local_path(directory), ()):
            commit.join()
            if commit.error is not None:
                raise commit.error

    def restore(self, directory: Any, args: TablesRestore) -> Tables:
        load_tables(args.tables.by_name, Path(local_path(directory)), FILES, REMEDIES)
        return args.tables


@ocp.args.register_with_handler(TablesHandler, for_save=True)
@dataclass
class TablesSave(ocp.args.CheckpointArgs):
    """Argument to save tables as they are now. Those on disk keep a commit until `max_to_keep` drops the step.

    Save before the first step, too: a run that is killed in its first save leaves its rows in tables on disk.

    Args:
        tables: to be saved.

    Raises:
        ArgumentError: `tables` is no `ej.Tables`.

    Example:
        >>> import os, orbax.checkpoint as ocp, embedrock as er, embedrock.jax as ej, embedrock.jax.orbax as ejo
        >>> manager, tables = ocp.CheckpointManager(os.path.abspath("steps")), ej.Tables(er.Table(rows=9, dim=4))
        >>> saved = manager.save(0, args=ocp.args.Composite(rows=ejo.TablesSave(tables)))
    """

    tables: Tables

    def __post_init__(self) -> None:
        if not isinstance(self.tables, Tables):
            raise ArgumentError(f"`tables` of {type(self).__name__} must be an ej.Tables: got {self.tables!r}.")


@ocp.args.register_with_handler(TablesHandler, for_restore=True)
class TablesRestore(TablesSave):
    """Argument to take tables back to a step, all or none. Each keeps its rule's learning rate.

    Args:
        tables: those that were saved, by the same names.

    Example:
        >>> import os, orbax.checkpoint as ocp, embedrock as er, embedrock.jax as ej, embedrock.jax.orbax as ejo
        >>> manager, tables = ocp.CheckpointManager(os.path.abspath("steps")), ej.Tables(er.Table(rows=9, dim=4))
        >>> saved = manager.save(0, args=ocp.args.Composite(rows=ejo.TablesSave(tables)))
        >>> restored = manager.restore(0, args=ocp.args.Composite(rows=ejo.TablesRestore(tables)))
    """
