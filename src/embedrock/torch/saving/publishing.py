"""`publish`: publishes the rows and dense weights of a model while it trains."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from embedrock.errors import ArgumentError, UnsupportedError, check_choice
from embedrock.frontend.checkpoints import one_of_each
from embedrock.serving.dense import Bfloat16, Dense
from embedrock.serving.publisher import (
    KEEP_HOURS,
    Published,
    PublishOptions,
    arrays_of,
    member_name,
    publish_commits,
    published_name,
)
from embedrock.serving.sources import opened_commit
from embedrock.spec.codecs import CODECS
from embedrock.spec.spec import STORAGES
from embedrock.storage.commit import StorageCommit
from embedrock.system.log import tell
from embedrock.system.paths import local_path
from embedrock.system.scopes import ClosedAtEnd
from embedrock.system.sizes import to_seconds
from embedrock.table.table import Table
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.saving.dense_parts import is_part
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.parameters import handles, uncompiled

HELD = "published-"  # start of the tag that a commit has until it is published
_publishers: weakref.WeakValueDictionary[str, Publisher] = weakref.WeakValueDictionary()  # by folder
PAUSE_S = 0.02  # between two looks whether a commit has ended


def publish(
    model: nn.Module,
    folder: str | os.PathLike[str],
    every: float | str = 60,
    dtype: str | None = None,
    *,
    keep_hours: float = KEEP_HOURS,
) -> Publisher:
    """Publish a model while it trains: rows of its tables on disk, and its other weights, of one and the same step.

    The first call of the model after `every` seconds commits the tables, and copies the other weights. A thread writes
    both to `folder`, as `er.publish` does. Training goes on meanwhile. An error is logged, and the next step is tried
    again; `close` raises the error of the last one. A second call for the same folder closes the publisher before.

    Args:
        model: has embedding layers with ``path=``. Pass what training calls: of a compiled model, the compiled one.
        folder: a folder for published rows only.
        every: seconds between two steps, or a time such as "5min".
        dtype: of the published rows; None: the tables' own.
        keep_hours: see `er.publish`.

    Returns:
        The `Publisher`. ``publisher.publish()`` publishes now; ``publisher.close()`` ends it.

    Raises:
        ArgumentError: an argument is invalid, or the model has no embedding layers.
        UnsupportedError: rows live in RAM, or are shared with other processes. Of a table on disk that is shared, one
            process may publish each commit: ``er.publish(layer.table, folder)``.

    Example:
        >>> import torch, embedrock as er, embedrock.torch as ert
        >>> model = torch.nn.Sequential(ert.Embedding(100, 4, path="users.rock"), torch.nn.Linear(4, 1))
        >>> publisher = ert.publish(model, "served", every="1min")
        >>> publisher.publish(step=1).number
        1
        >>> with er.Subscriber("served").step() as step:
        ...     sorted(step), sorted(step.dense)
        (['users'], ['1.bias', '1.weight'])
        >>> publisher.close()
    """
    return Publisher(model, folder, every, PublishOptions(dtype, keep_hours))


class Publisher(ClosedAtEnd):
    """Publisher of a model in training. See `publish`.

    Attributes:
        last: the last published step, None before the first.
        error: the error of the last try. None: it had none.

    Args:
        model, folder, every: as for `publish`.
        options: how rows are published.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> model = torch.nn.Sequential(ert.Embedding(100, 4, path="offers.rock"))
        >>> with ert.publish(model, "offered") as publisher:
        ...     print(publisher.last, publisher.publish(step=1).number, publisher.error)
        None 1 None
    """

    def __init__(
        self, model: nn.Module, folder: str | os.PathLike[str], every: float | str, options: PublishOptions
    ) -> None:
        if options.dtype is not None:
            check_choice("dtype", options.dtype, (*STORAGES, *CODECS))
        self._model, self._folder = model, os.path.abspath(local_path(folder, "`folder` of ert.publish"))
        self._every, self._options = to_seconds(every, "`every` of ert.publish"), options
        self._tables = _tables_of(model)
        if (before := _publishers.get(os.path.realpath(self._folder))) is not None:  # of a cell that ran before
            with contextlib.suppress(Exception):  # it was logged
                before.close()
        for table in self._tables:  # of a process that was killed
            for tag in {str(commit["name"]) for commit in table.commits()}:
                if tag.startswith(HELD):
                    table.release(tag)
        self._due, self._thread = time.monotonic() + self._every, None
        self.last: Published | None = None
        self.error: Exception | None = None

        def look(module: nn.Module, _: Any) -> None:
            if module is model:  # and not a copy of it
                self._look()

        hook: Any = torch.compiler.disable(look)
        self._hook = model.register_forward_pre_hook(hook)  # keeps this publisher as long as the model
        _publishers[os.path.realpath(self._folder)] = self

    def _look(self) -> None:
        """Begin the next step if it is due. Between two calls of the model, rows and dense weights are of one step."""
        is_busy = self._thread is not None and self._thread.is_alive()
        pending = (table._on_disk().pending for table in self._tables)  # looked at only if the step is due
        if time.monotonic() < self._due or is_busy or not all(one is None or one.is_done for one in pending):
            return
        self._thread = threading.Thread(target=self._run, args=(self._begin(None),), name="embedrock-publish")
        self._thread.start()

    def _begin(self, step: int | None) -> Callable[[], Published]:
        """Begin commits of one step, and copy its dense weights. Return a function that publishes them."""
        self._due, tag = time.monotonic() + self._every, f"{HELD}{secrets.token_hex(4)}"
        step = max(each.steps for each in self._tables) if step is None else step
        commits = list[tuple[StorageCommit, Table]]()
        for table in self._tables:
            table.commit(step=step, name=tag, wait=False)
            commits.append((table._on_disk().last_begun, table))
        arrays = arrays_of(*(handle.table for handle in handles(self._model)))
        options = self._options._replace(dense=dense_of(self._model), step=step, inits=arrays)
        return functools.partial(self._publish, commits, tag, options)

    def _run(self, publish_begun: Callable[[], Published]) -> None:
        try:
            self.last, self.error = publish_begun(), None
        except Exception as error:
            self.error = error
            tell(f"{self._folder}: a step was not published: {error}", logging.ERROR)

    def _publish(self, commits: list[tuple[StorageCommit, Table]], tag: str, options: PublishOptions) -> Published:
        try:
            with ExitStack() as opened:
                sources = []
                for commit, table in commits:
                    while not commit.is_done:  # without making it hurry, at the cost of training
                        time.sleep(PAUSE_S)
                    if commit.error is not None:
                        raise commit.error
                    path, system = table._on_disk().opening.path, table._on_disk().opening.system
                    found = opened.enter_context(opened_commit(path, commit.number, system))
                    sources.append((found, self._names_in(table)))
                return publish_commits(sources, self._folder, options)
        finally:
            for _, table in commits:
                table.release(tag)

    def _names_in(self, table: Table) -> dict[str, str]:
        """Return the names of the model's tables in a folder, by the names under which they are published."""
        own = (handle.table for handle in handles(self._model))
        return {published_name(each): member_name(each) for each in own if each.path == table.path}

    def publish(self, step: int | None = None) -> Published:
        """Publish the present rows and weights now. Return when that is done.

        Args:
            step: training step; None: the steps of the tables.
        """
        self._wait()
        publish_begun = self._begin(step)
        for table in self._tables:
            table._on_disk().end_commit()
        self.last, self.error = publish_begun(), None
        return self.last

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """End publishing. A step that has begun is published first.

        Raises:
            Exception: the last step was not published. A second call raises nothing.
        """
        self._hook.remove()
        self._wait()
        error, self.error = self.error, None
        if error is not None:
            raise error


def _tables_of(model: nn.Module) -> list[Table]:
    """Return a model's tables, one of each folder.

    Raises:
        ArgumentError: it has none, or two of one name.
        UnsupportedError: rows cannot be published.
    """
    found = handles(model)
    for handle in found:
        reason = "several processes share them. After a commit of all, on one rank: er.publish(layer.table, folder)"
        if not handle.table.is_on_disk or handle.table.mode != "w":
            reason = "they have no commits, as their table is not written to disk here. Give the layer a path=..."
        elif handle.sharing is None:
            continue
        raise UnsupportedError(f"the rows of {handle.label} cannot be published: {reason}")
    tables = list({id(handle.table): handle.table for handle in found}.values())
    names = [published_name(table) for table in tables]
    if not tables or len(set(names)) < len(names):
        got = f"tables named {', '.join(names)}" if tables else "no embedding layers"
        raise ArgumentError(f"`model` of ert.publish must have embedding layers whose tables' names differ: got {got}.")
    return one_of_each(tables)


def dense_of(model: nn.Module) -> Dense:
    """Return copies of a model's parameters and persistent buffers by name, without the handles of rows."""
    found = dict[str, Any]()
    for prefix, module in uncompiled(model).named_modules(remove_duplicate=False):
        for name, tensor in {} if isinstance(module, RowLayer) else (module._parameters | module._buffers).items():
            is_kept = name not in module._non_persistent_buffers_set and not isinstance(tensor, Handle)
            if tensor is not None and is_kept:
                found[f"{prefix}{'.' * bool(prefix)}{name}"] = _copied(name, tensor)
    return found


def _copied(name: str, tensor: torch.Tensor) -> Any:
    if is_part(tensor):
        raise UnsupportedError(
            f"{name!r} cannot be published: it is in parts (DTensor), which several processes have. Publish the tables "
            "alone, er.publish(table, folder)."
        )
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    if copy.dtype == torch.bfloat16:
        return Bfloat16(copy.view(torch.uint16).numpy())
    return copy.numpy()
