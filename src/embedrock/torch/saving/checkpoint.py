"""`save` and `load`: one crash-safe checkpoint of tables on disk and the rest of a model.

Files are ``step-<step>-<token>.pt``. A file with ``.tmp`` is not published, or no longer.
`embedrock.frontend.checkpoints` describes how a file and the commits of tables become one checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import re
import warnings
import weakref
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import embedrock
from embedrock.errors import ArgumentError, CorruptTableError, EmbedrockError
from embedrock.frontend.arguments import zero_rows
from embedrock.frontend.checkpoints import (
    Checkpoint,
    CheckpointSuffixes,
    checkpoints,
    collect,
    drafts,
    free,
    older,
    one_of_each,
    retire,
)
from embedrock.frontend.growing import growing, grows
from embedrock.frontend.references import (
    Relocate,
    check_state,
    go_to,
    is_reference,
    keep_rule,
    kept_by,
    relocation,
    tell_resumed,
)
from embedrock.io.vfs import lacks_files, opened
from embedrock.system.paths import local_path
from embedrock.table.changes import has_more
from embedrock.table.storage import UncommittedWarning
from embedrock.table.table import Table
from embedrock.torch.layers.row_layer import REMEDIES, RowLayer
from embedrock.torch.layers.row_state import HOLDER, META, ROWS, key_of_part, part_of, row_meta
from embedrock.torch.saving.dense_parts import SavingRanks, as_parts, check_parts, take_parts, whole
from embedrock.torch.training.parameters import COMPILED, handles, uncompiled

PART_NAME = re.compile(r"(step-\d{1,18}-[0-9a-f]{8})\.part-(\d+)-of-(\d+)(?:\.tmp)?")

States = Mapping[str, Any]


def _part(made: Checkpoint, rank: int, ranks: int) -> Checkpoint:
    """Return a rank's part of a checkpoint: the rows in RAM that only this rank has."""
    ending = f".part-{rank}-of-{ranks}"
    return made._replace(endings=CheckpointSuffixes(ending, f"{ending}.tmp"))


def _shared(states: States) -> list[str]:
    """Return the prefixes of layers of which a model's state has one shard of the rows."""
    return [key.removesuffix(META) for key in states if key.endswith(META) and part_of(states[key]) is not None]


def _remove_parts(folder: Path, kept: Iterable[Checkpoint]) -> None:
    """Remove the parts of deleted checkpoints. Several processes may call it at once."""
    names = {each.file.name.partition(".")[0] for each in kept}
    for name in os.listdir(folder):
        match = PART_NAME.fullmatch(name)
        if match and match[1] not in names:
            with contextlib.suppress(FileNotFoundError):
                (folder / name).unlink()


def _with_all_parts(states: dict[str, Any], made: Checkpoint) -> dict[str, Any]:
    """Return the state in a checkpoint's file with the rows of all its parts, of which layers take their own.

    Raises:
        CorruptTableError: a part is missing.
    """
    parts: dict[int, States] = {0: states}
    found = copy.copy(states)  # keeps the versions of modules that PyTorch attaches
    for prefix in _shared(states):
        _, ranks = part_of(states[prefix + META]) or (0, 1)
        for rank in range(ranks):
            if rank not in parts:
                path = _part(made, rank, ranks).file
                if not path.exists():
                    raise CorruptTableError(
                        f"{str(path)!r} is missing: the rows in RAM that a process had are in it. All ranks must save "
                        "to, and load from, one folder that all see."
                    )
                parts[rank] = _torch_read(path, mmap=True)
            for key in [key for key in parts[rank] if key.startswith(prefix + ROWS)]:
                found.pop(key, None)
                found[prefix + key_of_part(key.removeprefix(prefix), rank, ranks)] = parts[rank][key]
    return found


def references(model: nn.Module, states: Mapping[str, Any]) -> Iterator[tuple[str, RowLayer, Mapping[str, Any]]]:
    """Iterate over layers with rows in ``model.state_dict()``: (label, layer, description of the rows)."""
    for name, layer in _row_layers(model).items():
        state = row_meta(states, f"{name}." if name else "", layer.handle.label)
        if state is not None:
            yield layer.handle.label, layer, state


def _open_moved(model: nn.Module, states: Mapping[str, Any], relocate: Relocate) -> None:
    """Open the moved tables. They replace the tables that layers made at the old paths."""
    meant = [(layer, state) for _, layer, state in references(model, states) if is_reference(state)]
    where = relocation("ert.load", relocate, [state["path"] for _, state in meant])
    for layer, state in meant:
        if layer.table.uuid == state["uuid"]:
            continue  # the layer has the new path, or shares a table that was opened before
        new_path = where(state["path"])
        if new_path != state["path"]:
            _replace(model, layer.table, new_path)


def _replace(model: nn.Module, old: Table, path: str) -> None:
    if old.group is not None:
        raise ArgumentError(
            f"`relocate` of ert.load cannot move {old.subject}, of the group at {str(old.path)!r}, alone. Make the "
            f"group with path={path!r}."
        )
    if old.steps:
        raise ArgumentError(
            f"`relocate` of ert.load would replace the table at {str(old.path)!r} by that at {path!r}, but it has been "
            f"trained for {old.steps} steps. Make the layer with path={path!r}."
        )
    new = embedrock.open(path, memory=old.options["memory"], init=old.spec.init)
    rows = old.rows if grows() and has_more(old.spec, new.rows) else new.rows  # `growing` adds the others
    if (rows, new.dim, new.spec.dtype) != (old.rows, old.dim, old.spec.dtype):
        new.close()
        raise ArgumentError(f"the table at {path!r} must be one like {old!r}: it is {new!r}.")
    keep_rule(new, old.rule)
    for layer in model.modules():
        if isinstance(layer, RowLayer) and layer.table is old:
            layer.take_over(new)
    with warnings.catch_warnings():
        if old.last_commit == 0:  # the layer made it just now, so nothing is lost
            warnings.simplefilter("ignore", UncommittedWarning)
        old.close()


FORMAT = 1
KEYS = ("embedrock_checkpoint", "step", "model", "optimizer")
ENDINGS = CheckpointSuffixes(".pt", ".tmp")

_refused: weakref.WeakSet[Table] = weakref.WeakSet()  # tables with a failed last commit


class NoCheckpointError(EmbedrockError, FileNotFoundError):
    """Error of a folder without a checkpoint."""


def save(
    model: nn.Module, folder: str | os.PathLike[str], step: int, optimizer: Any = None, *, keep: int | None = 2
) -> Path:
    """Save a model as one checkpoint: commit its tables on disk, and write all else to a file in `folder`.

    Even after a crash, `load` finds rows and dense weights of the same step. It is this step or, if the save did not
    finish, the step of the previous checkpoint. The commits stay as long as the checkpoint, for any `keep` of the
    tables.

    Args:
        model: has any number of embedding layers, on disk or in RAM. Rows in RAM go to the file. A compiled model gives
            the same file.
        folder: folder of this and earlier checkpoints. A missing folder is created.
        step: step of the training, at least the step of the last checkpoint in `folder`.
        optimizer: an optimizer, scheduler, scaler or other object with ``state_dict()``, or a list or dict of these.
        keep: number of checkpoints to keep; None: all. Older ones are deleted once this one is safe.

    Returns:
        The path of the file.

    Raises:
        ArgumentError: an argument is invalid.
        UnsupportedError: the saving processes cannot gather all shards of the dense weights.
        CommitError: a table could not be committed.
        OSError: the file could not be written. After this and a `CommitError`, the last checkpoint is intact.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> model = torch.nn.Sequential(ert.Embedding(10**9, 4, path="users.rock"), torch.nn.Linear(4, 1))
        >>> file = ert.save(model, "checkpoints", step=1000)
        >>> ert.load(model, "checkpoints")
        1000
    """
    model, folder = uncompiled(model), Path(local_path(folder, "`folder` of ert.save"))
    all_ranks = SavingRanks(model)
    _check(step, keep)
    parts, tables = _named(optimizer), _tables_on_disk(model)
    new = Checkpoint.new(folder, operator.index(step), ENDINGS)
    (made,) = all_ranks.of_first(lambda: [new], new, "the name of a checkpoint")

    def begin() -> list[Checkpoint]:
        check_parts(model, parts, all_ranks.members)
        return _earlier(made) if all_ranks.is_first else []

    before = all_ranks.do("ert.save", begin)
    _collect(all_ranks, made, tables)
    try:
        _save(all_ranks, made, model, tables, parts)
        all_ranks.do("ert.save, older ones", lambda: retire(older(before, made, keep)) if all_ranks.is_first else None)
        _collect(all_ranks, made, tables)
    except BaseException:
        if all_ranks.is_alone:
            with contextlib.suppress(Exception):  # the next save collects the rest
                collect(folder, ENDINGS, tables)
        raise
    _remove_parts(made.folder, all_ranks.of_first(lambda: checkpoints(made.folder, ENDINGS), made))
    return made.file


def _save(
    all_ranks: SavingRanks, made: Checkpoint, model: nn.Module, tables: list[Table], parts: dict[str, Any]
) -> None:
    """Save on all processes. Each one commits its tables, then the first one writes the file."""
    first = all_ranks.is_first
    all_ranks.do("ert.save, its draft", lambda: opened(made.begin) if first else None)
    again = any(table in _refused for table in tables)  # these first, or the others would advance at each attempt
    all_ranks.do("ert.save, commits that failed before", lambda: _commit(made, tables) if again else None)
    all_ranks.do("ert.save, commits", lambda: None if again else _commit(made, tables))
    content = all_ranks.do("ert.save, states", lambda: _content(made, model, parts))
    content = all_ranks.do("ert.save, dense parts", lambda: whole(content, is_kept=first))
    rank, ranks = all_ranks.rank, all_ranks.ranks
    all_ranks.do("ert.save, parts", lambda: None if first else _write_part(made, model, content, rank, ranks))
    all_ranks.do("ert.save, the file", lambda: _write(made, model, content) if first else None)


def _collect(all_ranks: SavingRanks, made: Checkpoint, tables: list[Table]) -> None:
    """Release the commits of unfinished checkpoints on all ranks, before the drafts that list them are deleted."""
    gone = all_ranks.of_first(lambda: drafts(made.folder, ENDINGS), made)
    all_ranks.do("ert.save, commits of older ones", lambda: free(gone, tables))
    if all_ranks.is_first:
        collect(made.folder, ENDINGS, ())


def _write_part(made: Checkpoint, model: nn.Module, content: dict[str, Any], rank: int, ranks: int) -> None:
    """Write a rank's part of a checkpoint, durably. Write nothing if no rows in RAM are shared."""
    states, part = content["model"], _part(made, rank, ranks)
    starts = tuple(prefix + ROWS for prefix in _shared(states))
    if not starts:
        return
    with _explained_if_full(made, model, content):
        opened(made.folder.mkdir, parents=True, exist_ok=True)
        try:
            with part.draft.open("wb") as file:
                torch.save({key: tensor for key, tensor in states.items() if key.startswith(starts)}, file)
            part.publish()
        except BaseException:
            with contextlib.suppress(OSError):
                part.draft.unlink()
            raise


def _earlier(made: Checkpoint) -> list[Checkpoint]:
    folder, before = made.folder, opened(checkpoints, made.folder, ENDINGS)
    if before and before[-1].step > made.step:
        raise ArgumentError(
            f"`step` of ert.save must be at least that of the last checkpoint, {before[-1].step}: got {made.step}. "
            f"Go on from that checkpoint by ert.load, or save to another folder than {str(folder)!r}."
        )
    return before


def _commit(made: Checkpoint, tables: list[Table]) -> None:
    for table in sorted(one_of_each(tables), key=lambda table: table not in _refused):
        _refused.add(table)
        table.commit(step=made.step, name=made.commit_name)
        _refused.discard(table)


def _content(made: Checkpoint, model: nn.Module, parts: dict[str, Any]) -> dict[str, Any]:
    states = {name: part.state_dict() for name, part in parts.items()}
    with kept_by(made.commit_name):
        return dict(zip(KEYS, (FORMAT, made.step, model.state_dict(), states), strict=True))


def _write(made: Checkpoint, model: nn.Module, content: dict[str, Any]) -> None:
    with _explained_if_full(made, model, content):
        with opened(made.draft.open, "wb") as file:
            torch.save(content, file)
        _check_readable(made.draft)
        made.publish()


def _explained_if_full(
    made: Checkpoint, model: nn.Module, content: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    in_ram = [handle.label for handle in handles(model) if not handle.table.is_on_disk]
    rows = f", with the rows of {', '.join(in_ram)}," if in_ram else ""
    return made.explained_if_full(lambda: _bytes_in(content), rows)


def _bytes_in(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    inner = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return sum(map(_bytes_in, inner))


def _check_readable(draft: Path) -> None:
    """Raise `ArgumentError` if `load` could not read the draft. `load` accepts data, but no code."""
    try:
        _read(draft, mmap=True)
    except CorruptTableError as error:
        raise ArgumentError(
            "the states of a checkpoint must be tensors, numbers, strings and containers of these, or of types given "
            f"to torch.serialization.add_safe_globals: {error.__cause__}"
        ) from error


def load(
    model: nn.Module,
    folder: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    relocate: Relocate | None = None,
    grow: bool = False,
) -> int:
    """Load the last checkpoint in `folder` into a model, and log one line with its step.

    Tables on disk go to the commits of the checkpoint. Later training is dropped. If the very first `save` was
    interrupted, there is no checkpoint. Then the tables go back to their state before that save.

    Args:
        model: model of the same form as the saved one, with the current `path` of each table.
        folder: as for `save`.
        optimizer: as for `save`. It is loaded, too.
        relocate: new paths of moved tables, for layers made with the old paths. It is {old path: new path}, or a
            function of the old path. The table at the new path replaces the layer's untrained table.
        grow: layers may have more rows than were saved, as for `load_state_dict`. Without it, a table on disk goes back
            to the rows of its commit, and rows in RAM are an error.

    Returns:
        The step of the checkpoint.

    Raises:
        NoCheckpointError: the folder has no checkpoint. (It is also a `FileNotFoundError`.)
        CorruptTableError: the file is damaged.
        ArgumentError: the checkpoint belongs to another model, or to other tables.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> model = torch.nn.Sequential(ert.Embedding(10, 4), torch.nn.Linear(4, 1))
        >>> file = ert.save(model, "saved", step=7)
        >>> ert.load(model, "saved")
        7
    """
    model = uncompiled(model)
    folder, parts = Path(local_path(folder, "`folder` of ert.load")), _named(optimizer)
    all_ranks = SavingRanks(model)
    found = all_ranks.of_first(lambda: opened(checkpoints, folder, ENDINGS), Checkpoint.new(folder, 0, ENDINGS))
    if not found:
        raise NoCheckpointError(f"{str(folder)!r} holds no checkpoint.{_undo_first(folder, model)}")
    with growing(_row_layers(model).values(), grow):
        step = all_ranks.do("ert.load", lambda: _load(model, found[-1], parts, relocate))
    if all_ranks.is_first:
        tell_resumed(folder, step)
    return step


def load_state_dict(
    model: nn.Module, state_dict: States, strict: bool = True, assign: bool = False, *, grow: bool = False
) -> Any:
    """Load a state dict as ``model.load_state_dict`` does, with `grow` also one of fewer rows.

    Args:
        model, state_dict, strict, assign: as of ``model.load_state_dict``, whose result is returned.
        grow: embedding layers may have more rows than were saved. Rows and their optimizer state are as saved, and new
            rows have their first values. Of a plain `weight` of `nn.Embedding`, only its rows are written.

    Raises:
        ArgumentError: the state is that of other layers, or has more rows.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> before, now = (torch.nn.Sequential(ert.Embedding(rows, 4), torch.nn.Linear(4, 1)) for rows in (10, 12))
        >>> ert.load_state_dict(now, before.state_dict(), grow=True)
        <All keys matched successfully>
    """
    layers = _row_layers(model)
    with growing(layers.values(), grow):
        for name, layer in layers.items():
            layer.check_rows(state_dict, f"{name}." if name else "")
        return model.load_state_dict(state_dict, strict, assign)


def _row_layers(model: nn.Module) -> dict[str, RowLayer]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, RowLayer)}


def _load(model: nn.Module, made: Checkpoint, parts: dict[str, Any], relocate: Relocate | None) -> int:
    content = _read(made.file)
    states = content["optimizer"]
    consume_prefix_in_state_dict_if_present(content["model"], COMPILED)  # for files of embedrock 0.1
    if missing := sorted(parts.keys() - states.keys()):
        raise ArgumentError(
            f"`optimizer` of ert.load must be what was given to ert.save, {sorted(states)}: got also {missing}."
        )
    content["model"] = _with_all_parts(content["model"], made)
    if relocate is not None:
        _open_moved(model, content["model"], relocate)
    for label, layer, state in references(model, content["model"]):
        if (shard := layer.handle.shard) is None or not shard.is_elsewhere:
            check_state(layer.table, state, label, REMEDIES)
    load_state_dict(model, as_parts(model, content["model"]))
    for name, part in parts.items():
        part.load_state_dict(states[name])
        take_parts(part)
    return content["step"]


def _undo_first(folder: Path, model: nn.Module) -> str:
    """Take tables back to before an interrupted first save, if they are unchanged since. Return a message about it."""
    unfinished, undone = drafts(folder, ENDINGS), []
    for table in _tables_on_disk(model):
        *before, last = table.commits()
        if before and any(draft.owns(last) for draft in unfinished):
            _go_back(model, table, before[-1])
            undone.append(str(table.path))
    return f" Its first one was cut short: {', '.join(undone)} went back to what came before it." if undone else ""


def _go_back(model: nn.Module, table: Table, commit: dict[str, Any]) -> None:
    """Take a table to an earlier commit. Before its first commit, padding rows are zeros, as layers make them."""
    layers = [each for each in model.modules() if isinstance(each, RowLayer) and each.table is table]
    padding = {layer.padding_idx for layer in layers if layer.padding_idx is not None}
    zeros = [row for row in sorted(padding) if not table.lookup([row]).any()]
    go_to(table, commit)
    if zeros and not table.stats()["rows_touched"]:
        zero_rows(table, zeros)


def _read(file: Path, **how: Any) -> dict[str, Any]:
    content = _torch_read(file, **how)
    if not isinstance(content, dict) or set(content) != set(KEYS) or content[KEYS[0]] != FORMAT:
        raise CorruptTableError(f"{str(file)!r} must be a checkpoint of ert.save, of format {FORMAT}: it is not.")
    return content


def _torch_read(file: Path, **how: Any) -> Any:
    try:
        opened(_check_sums, file)
        return opened(torch.load, file, map_location="cpu", weights_only=True, **how)
    except Exception as error:  # damaged bytes can raise any error
        if isinstance(error, MemoryError) or lacks_files(error):  # the error does not depend on the file
            raise
        raise CorruptTableError(
            f"checkpoint {str(file)!r} cannot be read: {error!r}. If it is damaged, move it to another folder: "
            "ert.load then takes the one before."
        ) from error


def _check_sums(file: Path) -> None:
    """Raise an error if a part of a file does not match its checksum. `torch.load` does not check it."""
    with zipfile.ZipFile(file) as archive:
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"{damaged} is not what was written")


def _tables_on_disk(model: nn.Module) -> list[Table]:
    """Return the writable tables on disk. A snapshot is saved by its reference only."""
    return [handle.table for handle in handles(model) if handle.table.is_on_disk and handle.table.mode == "w"]


def _named(optimizer: Any) -> dict[str, Any]:
    several = optimizer if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
    parts = optimizer if isinstance(optimizer, Mapping) else dict(enumerate(several))
    for part in parts.values():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ArgumentError(
                "`optimizer` must be an optimizer or something else with state_dict() and load_state_dict(), or a "
                f"list or dict of these: got {part!r}."
            )
    return {str(name): part for name, part in parts.items()}


def _check(step: Any, keep: Any) -> None:
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= operator.index(step) < 10**18:
        raise ArgumentError(f"`step` of ert.save must be a whole number from 0: got {step!r}.")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ArgumentError(f"`keep` of ert.save must be a whole number from 1, or None for all: got {keep!r}.")


def release(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Release the commits that a state dict refers to, in a model's tables on disk.

    A state dict retains its commits, for any `keep` of the tables. Call `release` before you delete the last file with
    that state. From then on the state can be loaded only while its commits are among the newest `keep`. Tables in RAM
    do not change.

    Args:
        model: model of the same form as the saved one.
        state_dict: state dict of the model, from ``torch.load`` of the file.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> model = torch.nn.Sequential(ert.Embedding(10**9, 4, path="users.rock"), torch.nn.Linear(4, 1))
        >>> state = model.state_dict()
        >>> model[0].table.commits()[-1]["name"]
        'state_dict-1'
        >>> ert.release(model, state)
        >>> model[0].table.commits()[-1]["name"]
    """
    for _, layer, state in references(model, state_dict):
        if is_reference(state) and state["uuid"] == layer.table.uuid:
            held = [commit for commit in layer.table.commits() if commit["commit"] == state["commit"]]
            for name in [commit["name"] for commit in held if str(commit["name"]).startswith(f"{HOLDER}-")]:
                layer.table.release(name)
