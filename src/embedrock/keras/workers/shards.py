"""Shards of tables by id, one for each worker of a cluster: the shard of this worker, and its folder."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from embedrock.batch.gradients import RowGradients
from embedrock.distributed.commits import layout_of, part_to_open
from embedrock.distributed.owners import Shard
from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.keras.workers.cluster import WorkerGroup
from embedrock.system.paths import local_path
from embedrock.table.table import Table

# Shards and wire dtypes of tables of layers with ``sharded=True``, in one process too.
_shards: weakref.WeakKeyDictionary[Table, tuple[Shard, str]] = weakref.WeakKeyDictionary()


def shard_of(table: Table) -> Shard | None:
    """Return the shard that a table is; None for a table that has all of its rows."""
    shard, _ = _shards.get(table, (None, None))
    return shard if shard is not None and shard.ranks > 1 else None


def wire_of(table: Table) -> str:
    """Return the dtype of a table's float32 rows, and their gradients, on the wire between workers."""
    return _shards.get(table, (None, "float32"))[1]


def current_shard() -> Shard:
    """Return this worker's shard under the current strategy; in one process, the shard of everything."""
    workers = WorkerGroup(tf.distribute.get_strategy())
    return Shard(workers.rank, workers.count)


# ---------------------------------------------------------------- opening


def check_options(kind: str, rows: Any, options: Mapping[str, Any]) -> None:
    """Raise an error if a layer cannot be sharded: it has a ready-made table, or dynamic rows."""
    for name in ("admission", "eviction"):
        if options[name] is not None:
            raise UnsupportedError(
                f"`{name}` of {kind} does not go with `sharded`, as workers would have to decide together who has a "
                "record. Leave one of them out."
            )
    if options["commit_every"] is not None:
        raise UnsupportedError(
            f"`commit_every` of {kind} does not go with `sharded`, as workers that are killed would begin again from "
            "commits of different steps. Leave it out, and let erk.TableCheckpoint(folder, every=...) commit."
        )
    if isinstance(rows, Table):
        raise ArgumentError(
            f"`sharded` of {kind} goes with a table that the layer makes: got a ready-made er.Table. Give the layer "
            "its number of rows, and path= for a table on disk."
        )


def folder_of_shard(path: str | os.PathLike[str], label: str) -> str:
    """Return the folder of this worker's shard of the table at `path`.

    Raises:
        ArgumentError: the table at `path` has another number of shards.
    """
    shard = current_shard()
    path = local_path(path, f"`path` of {label}")
    if shard.ranks == 1 and layout_of(path) is None:
        return path
    return part_to_open(path, shard.rank, shard.ranks, label)


def note(table: Table, wire: str) -> None:
    """Record that a table is this worker's shard, whose rows are sent as `wire`."""
    _shards[table] = current_shard(), wire


def check_strategy(table: Table, label: str) -> None:
    """Raise an error if a layer is built under another strategy than its table was made under."""
    made, now = _shards.get(table, (None, None))[0], current_shard()
    if made is not None and made != now:
        raise ArgumentError(
            f"{label} is sharded and was made as part {made.rank} of {made.ranks}, but is built as part {now.rank} "
            f"of {now.ranks}. Make and build the model inside of `with strategy.scope():`."
        )


def check_whole(table: Table, label: str, verb: str) -> None:
    """Raise an error if an operation needs all rows of a sharded table."""
    if (shard := shard_of(table)) is not None:
        raise UnsupportedError(
            f"{label} cannot be {verb}: its table is sharded, and this worker has one of {shard.ranks} parts of it. "
            "Checkpoints of all parts are made by erk.TableCheckpoint, with path=; for other uses gather what "
            "layer.table.export() returns on each worker in one table first."
        )


# ---------------------------------------------------------------- steps and lookups


def own_part(shard: Shard | None, grads: RowGradients) -> RowGradients:
    """Return the gradients of the worker's own rows; all gradients if the step will be refused."""
    if shard is None or not grads.is_finite:
        return grads
    return grads.kept(shard.owns(grads.plan.ids))


def has_workers() -> bool:
    """Return whether the other workers run the same program, so that rows can be fetched from them."""
    return tf.distribute.get_replica_context() is not None and current_shard().ranks > 1


def check_own(table: Table, label: str, ids: np.ndarray) -> None:
    """Raise an error if ids of a lookup by one worker alone are in other shards of the table."""
    shard = shard_of(table)
    if shard is None:
        return
    flat = np.asarray(ids, np.int64).reshape(-1)
    if len(others := flat[~shard.owns(flat)]):
        raise ArgumentError(
            f"{label} is sharded, and rows of ids {others[:4].tolist()} are not here: this is worker "
            f"{shard.rank} of {shard.ranks}. Look them up on all workers at once: model.predict, or "
            "strategy.run(model, args=(ids,)) on each."
        )
