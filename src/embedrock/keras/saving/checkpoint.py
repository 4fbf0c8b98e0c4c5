"""`TableCheckpoint`: a callback of `fit` that makes checkpoints."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.frontend.checkpoints import (
    Checkpoint,
    CheckpointSuffixes,
    checkpoints,
    collect,
    drafts,
    drop,
    older,
    one_of_each,
)
from embedrock.frontend.references import go_to
from embedrock.keras import callers
from embedrock.keras.saving.loading import load_weights
from embedrock.keras.saving.references import begun_commits, is_accumulating
from embedrock.keras.training.handle import handles_of
from embedrock.keras.workers.cluster import WorkerGroup
from embedrock.system.log import tell
from embedrock.system.paths import local_path
from embedrock.system.scopes import set_within
from embedrock.table.table import Table

POSITION = "embedrock_epoch_and_batch"
ENDINGS = CheckpointSuffixes(file=".weights.h5", draft=".tmp.weights.h5")


class TableCheckpoint(keras.callbacks.Callback):
    """A callback that checkpoints a model with tables on disk: rows, dense weights and optimizer, atomically.

    After any crash, `fit` finds all three of the same step. It begins by going back to the last checkpoint in `folder`,
    and resumes in the epoch of that checkpoint. No other callback is needed for that; Keras' own may be used beside it.

    Each checkpoint is a file, ``step-<step>-<token>.weights.h5``, which `model.load_weights` reads too, and a commit of
    each table on disk. The commit is kept for as long as the file, whatever the tables' own `keep`. Commits are written
    in the background while training continues; only the last waits. The next step raises the errors of a commit.

    From a checkpoint in the middle of an epoch, `fit` resumes with the next batch. It reads the batches before and
    skips them. The batches are the same if an epoch has its batches in the same order each time. To repeat the epoch,
    or to skip batches in the pipeline, call ``callback.restore(model)`` and set ``callback.batch = 0`` before ``fit``.

    Under several workers, each has a folder of its own inside `folder`, ``worker-<rank>-of-<workers>``. After the loss
    of a worker and a restart of all, they go back to their last common checkpoint.

    Args:
        folder: folder of the checkpoints, created if it is missing. Each training needs one of its own.
        every: batches from one checkpoint to the next, or "epoch". (While gradients accumulate over several batches,
            the checkpoint waits for the step.)
        keep: number of checkpoints to keep; None: all.
        resume: go back to the last checkpoint when `fit` begins, unless the model is there already.
        grow: layers may have more rows than at the checkpoint, as for `load_weights`.

    Attributes:
        step: ``optimizer.iterations`` of the checkpoint that the model went back to; None without one.
        epoch: epoch of the checkpoint, from 0; the next epoch if it was made at the end of one.
        batch: number of batches of that epoch before the checkpoint, which `fit` will skip.

    Raises:
        ArgumentError: an invalid argument, a folder inside of a table, or an epoch with fewer batches than to be
            skipped.
        UnsupportedError: a table is in RAM.

    Example:
        >>> import keras, numpy as np, embedrock.keras as erk
        >>> model = keras.Sequential([keras.Input((2,), dtype="int64"), erk.Embedding(10**9, 4, path="items.rock")])
        >>> model.compile(optimizer=erk.optimizer("adam"), loss="mse")
        >>> ids, y = np.array([[3, 14], [159, 265_358_979]]), np.zeros((2, 2, 4))
        >>> history = model.fit(ids, y, epochs=2, verbose=0, callbacks=[erk.TableCheckpoint("checkpoints")])
        >>> model.layers[0].table.last_step
        2
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | str = "epoch",
        *,
        keep: int | None = 2,
        resume: bool = True,
        grow: bool = False,
    ) -> None:
        super().__init__()
        _check_count("every", every, "epoch")
        _check_count("keep", keep, None)
        self.folder = Path(local_path(folder, "`folder` of erk.TableCheckpoint"))
        self.every, self.keep, self.resume, self.grow = every, keep, resume, grow
        self.step: int | None = None
        self.epoch = self.batch = 0
        self._seen, self._is_due, self._left_out = 0, False, 0
        # A written draft whose commits run in the background, and their numbers.
        self._underway: tuple[Checkpoint, Mapping[Table, int]] | None = None
        self._workers = WorkerGroup(None)

    @property
    def _trained(self) -> Any:
        return self.model

    @property
    def _own_folder(self) -> Path:
        workers = self._workers
        return self.folder if workers.count == 1 else self.folder / f"worker-{workers.rank}-of-{workers.count}"

    # ---------------------------------------------------------------- callback methods

    def on_train_begin(self, logs: Any = None) -> None:
        self._check(self._trained)
        self._seen, self._is_due, self._underway, self._left_out = 0, False, None, 0
        if self.resume and (self.restore(self._trained) or self.step == _step_of(self._trained)):
            _check_batches((self.params or {}).get("steps"), self.batch)
            epoch, self._left_out = self._in_epochs(self.epoch, self.batch)
            self._trained._initial_epoch = epoch  # as BackupAndRestore does
        elif self.resume and not _step_of(self._trained):
            for table in _tables(self._trained):
                if table.is_on_disk and table.steps:
                    begun = f"dense weights begin anew, and rows of {table.path} go on after step {table.steps}"
                    tell(f"{self._own_folder} has no checkpoint: {begun}", logging.WARNING)
        collect(self._own_folder, ENDINGS, _tables(self._trained))
        self._position = self.epoch, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._position = epoch, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._left_out and _leave_out(self._left_out):
            self._position = self._position[0], self._left_out
        self._left_out = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Make a checkpoint if one is due; publish the one before once its commits are durable."""
        epoch, before = self._position
        done = batch + 1 if batch >= before else before + batch + 1  # `fit` numbers the first batch by all before it
        self._position, self._seen = self._in_epochs(epoch, done), self._seen + done - before
        self._finish()
        self._is_due |= self.every != "epoch" and self._seen >= int(self.every)
        self._save_if_due()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._position = epoch + 1, 0
        self._is_due |= self.every == "epoch"
        self._save_if_due()

    def on_train_end(self, logs: Any = None) -> None:
        """Make the last checkpoint, and wait for it."""
        self._finish(wait=True)
        now, newest = (_step_of(self._trained), self._position), checkpoints(self._own_folder, ENDINGS)[-1:]
        if [(each.step, _position_in(each.file)) for each in newest] != [now] and _has_stepped(self._trained):
            self._save()
            self._finish(wait=True)

    def _in_epochs(self, epoch: int, batch: int) -> tuple[int, int]:
        """Return the position after some batches of an epoch. After its last batch, that is the next epoch."""
        of_epoch = (self.params or {}).get("steps")  # None: unknown
        return (epoch, batch) if of_epoch is None or batch < of_epoch else (epoch + 1, 0)

    # ---------------------------------------------------------------- saving

    def _save_if_due(self) -> None:
        if self._is_due and _has_stepped(self._trained):
            self._save()

    def _save(self) -> None:
        """Begin a checkpoint: start the commits in the background, and write the draft."""
        self._is_due, self._seen = False, 0
        made = Checkpoint.new(self._own_folder, _step_of(self._trained), ENDINGS)
        made.begin()
        tables = _tables(self._trained)
        begun = {
            table.path: table.commit(step=made.step, name=made.commit_name, wait=False) for table in one_of_each(tables)
        }
        commits = {table: begun[table.path] for table in tables}
        self._finish()  # the one before: a table has one commit at a time
        variables = *self._trained.variables, *self._trained.optimizer.variables
        with made.explained_if_full(lambda: bytes_of(variables)):
            with set_within(begun_commits, commits):
                self._trained.save_weights(made.draft)
            with h5py.File(made.draft, "a") as file:
                file.attrs[POSITION] = self._position
        self._underway = made, commits

    def _finish(self, wait: bool = False) -> None:
        """Publish the checkpoint in progress once its commits are durable, then drop old ones."""
        if self._underway is None:
            return
        made, commits = self._underway
        for table, number in commits.items():
            if wait and table.last_commit < number:
                table.commit(step=made.step, name=made.commit_name)  # this waits for the one before
        # All workers publish at one time. So each has the last checkpoint but one of every other.
        if not self._workers.all(all(table.last_commit >= number for table, number in commits.items())):
            return
        self._underway = None
        made.publish()
        before = [each for each in checkpoints(self._own_folder, ENDINGS) if each != made]
        drop(older(before, made, self.keep), commits)

    # ---------------------------------------------------------------- going back

    def restore(self, model: keras.Model) -> bool:
        """Take a model, compiled and built, back to the last checkpoint. Return whether anything changed.

        If the very first checkpoint was cut short, no checkpoint exists, and tables go back to before it.
        """
        self._check(model)
        found = self._agree(checkpoints(self._own_folder, ENDINGS), _tables(model))
        if not found:
            return False
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        is_there = _step_of(model) == found[-1].step and not any(table.uncommitted for table in _tables(model))
        epoch, batch = _position_in(found[-1].file)
        if is_there and (not batch or self.step == found[-1].step):
            return False
        if not is_there:
            load_weights(model, found[-1].file, grow=self.grow)
        # In the middle of an epoch, no training has ended: `fit` would continue as if the model were one batch further.
        self.step, self.epoch, self.batch = found[-1].step, epoch, batch
        return not is_there

    def _agree(self, found: list[Checkpoint], tables: list[Table]) -> list[Checkpoint]:
        """Return the checkpoints that all workers have. Drop newer ones, which a lost worker never made."""
        steps = self._workers.common([each.step for each in found])
        agreed = [each for each in found if each.step in steps]
        newer = [each for each in found if not agreed or each.step > agreed[-1].step]
        if not agreed:
            self._undo([*newer, *drafts(self._own_folder, ENDINGS)], tables)
            self._check_alike(tables)
        drop(newer, tables)
        return agreed

    def _check_alike(self, tables: list[Table]) -> None:
        for table in tables:
            if not self._workers.common([table.steps]):
                raise ArgumentError(
                    f"all workers must have a checkpoint, or begin at the same step: there is no checkpoint in "
                    f"{str(self.folder)!r} that all have, and the table at {table.path!r} has seen {table.steps} "
                    "steps, others more or fewer. Bring the checkpoints back, or begin anew with other folders."
                )

    def _undo(self, checkpoints_undone: list[Checkpoint], tables: list[Table]) -> None:
        for table in one_of_each(tables):
            commits = table.commits()
            is_undone = [any(each.owns(commit) for each in checkpoints_undone) for commit in commits]
            if is_undone[-1] and not is_undone[0]:
                go_to(table, commits[is_undone.index(True) - 1])

    # ---------------------------------------------------------------- checks

    def _check(self, model: keras.Model) -> None:
        if not model.built or model.optimizer is None:
            raise ArgumentError(
                "TableCheckpoint must be given a model that is compiled and built: give it a keras.Input, or call it "
                "on a batch of data, so that what was saved can be loaded into it."
            )
        self._workers = WorkerGroup(model._distribute_strategy)
        if self._workers.count > 1 and self.keep == 1:
            raise ArgumentError(
                "`keep` of TableCheckpoint must be 2 or more under several workers, or None: got 1. When a worker is "
                "lost, the others may have a checkpoint that it has not; they go back to the one before."
            )
        _check_workers(self.folder, self._workers.count)
        folder = os.path.realpath(self.folder)
        for handle in handles_of(model):
            table = handle.table
            if not table.is_on_disk:
                raise UnsupportedError(
                    f"TableCheckpoint is for tables on disk, and the rows of {handle.label} are in RAM. Make the layer "
                    'with path=..., or use keras.callbacks.ModelCheckpoint("x.keras").'
                )
            if Path(folder).is_relative_to(os.path.realpath(str(table.path))):
                raise ArgumentError(
                    f"`folder` of TableCheckpoint must be outside of tables: got {folder!r}, inside of the table at "
                    f"{table.path!r}. Choose another folder."
                )


def _check_count(name: str, value: Any, other: str | None) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_count and value != other:
        raise ArgumentError(f"`{name}` of TableCheckpoint must be a whole number from 1, or {other!r}: got {value!r}.")


def _check_workers(folder: Path, workers: int) -> None:
    names = [path.name for path in folder.glob("worker-*-of-*")]
    if others := [name for name in names if not name.endswith(f"-of-{workers}")]:
        raise ArgumentError(
            f"the checkpoints in {str(folder)!r} must be those of as many workers as there are, {workers}: got "
            f"{others[0]}. Start as many as made them, or choose another folder."
        )


def _tables(model: keras.Model) -> list[Table]:
    """Return the tables that can change. A file has only the reference to a snapshot."""
    return [handle.table for handle in handles_of(model) if handle.table.mode == "w"]


def _step_of(model: keras.Model) -> int:
    return int(model.optimizer.iterations.numpy())


def _has_stepped(model: keras.Model) -> bool:
    """Return whether no gradients wait for more batches. A file does not hold such gradients."""
    return not is_accumulating(getattr(model.optimizer, "inner_optimizer", model.optimizer))


def _position_in(file: Path) -> tuple[int, int]:
    with h5py.File(file) as opened:
        epoch, batch = np.asarray(opened.attrs[POSITION]).tolist()
    return epoch, batch


def bytes_of(variables: Iterable[keras.Variable]) -> int:
    """Return the total bytes of variables."""
    return sum(math.prod(each.shape) * tf.as_dtype(each.dtype).size for each in variables)


# ---------------------------------------------------------------- batches to skip


def _leave_out(count: int) -> bool:
    """Skip the next batches of the running `fit`, and count them as done. Return whether that was possible.

    Must be called when `fit` begins with the first batch of an epoch.

    Raises:
        ArgumentError: the epoch has fewer batches.
    """
    found: Any = [callers.local(callers.KERAS_TRAINER, "fit", name) for name in ("epoch_iterator", "iterator")]
    if callers.MISSING in found:
        return False
    epoch, batches = found
    for done in range(count):
        if next(batches, None) is None:
            _check_batches(done, count)
    for _ in range(0, count, epoch.steps_per_execution):  # the batch numbers come from here
        next(epoch, None)
    return True


def _check_batches(there: int | None, count: int) -> None:
    """Raise `ArgumentError` if an epoch of `there` batches (None: unknown) has fewer than `count`."""
    if there is not None and there < count:
        raise ArgumentError(
            f"`fit` goes on from a checkpoint that was made after batch {count} of an epoch, and "
            f"got epochs of {there}. Give it the data and the batch size that it had; or have it repeat "
            "the epoch: callback.restore(model), and then callback.batch = 0, before fit."
        )
