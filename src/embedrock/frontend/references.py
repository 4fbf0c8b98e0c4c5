"""References to tables on disk in a saved state: the commit of a table, and no rows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.optimizers import Rule
from embedrock.system.log import tell
from embedrock.system.paths import local_path
from embedrock.system.scopes import set_within
from embedrock.table.changes import set_rule
from embedrock.table.table import Table, rows_of

Relocate = Mapping[str, str] | Callable[[str], str]
PARTS = "parts"  # number of shards, in references to tables in shards
KEYS = ("path", "uuid", "commit", "step")
MEMBER = "member"  # name of the table in its group, in references to its tables
MANY = 16  # commits held by references: a warning comes at this number, and at each doubling

_checkpoint: ContextVar[str | None] = ContextVar("checkpoint", default=None)


class HeldCommitsWarning(UserWarning):
    """A warning that commits held by references add up, or that nothing holds the commit of a reference."""


class ReferenceRemedies(NamedTuple):
    """Remedies for a reference that does not fit, in a front end's words: sentences for error messages."""

    moved: str  # if the reference is to another table than the layer's
    dropped: str  # if its commit is no longer kept
    owner: str = "layer"  # what has the table: "layer", or "table" itself


def tell_resumed(what: object, step: int | None, more: str = "") -> None:
    """Log one line with the step that something was resumed from."""
    at = "at a commit without a step" if step is None else f"at step {step}"
    tell(f"{what} resumed {at}{more}")


def reference_to(table: Table) -> dict[str, Any]:
    """Return the reference to a table on disk as it is now. Commit uncommitted changes first."""
    if table.uncommitted:
        table.commit()
    return reference_at(table, table.last_commit, table.last_step)


def reference_at(table: Table, commit: int, step: int | None) -> dict[str, Any]:
    """Return the reference to a table on disk as of a commit, which may still be running."""
    made = {"path": str(table.path), "uuid": table.uuid, "commit": commit, "step": step}
    return made if table.group is None else {**made, MEMBER: table.name}


def kept_by(checkpoint: str) -> AbstractContextManager[None]:
    """Make references refer to commits that the named checkpoint keeps for as long as it needs them."""
    return set_within(_checkpoint, checkpoint)


def is_kept() -> bool:
    """Return whether a state made now goes to a checkpoint, which all processes make together."""
    return _checkpoint.get() is not None


def lasting_reference_to(table: Table, holder: str, step: int | None = None) -> dict[str, Any]:
    """Return the reference to a table on disk as it is now. Only a release drops its commit.

    The last commit is reused if it is held already and the table has no uncommitted changes. Otherwise a new commit is
    made. The commit's name begins with `holder`, so a list of commits shows its user. `step` is the step of the
    training for uncommitted changes.
    """
    if table.mode == "r":
        names = {commit["commit"]: commit["name"] for commit in table.commits()}
        if names.get(table.last_commit) is None:
            warnings.warn(
                f"the state refers to commit {table.last_commit} of {table.path!r}, which is open for reading: its "
                "writer drops that commit once keep= newer ones are there. Commit it there with a name.",
                HeldCommitsWarning,
                stacklevel=2,
            )
    elif _checkpoint.get() is None:
        is_changed = table.uncommitted
        names = [commit["name"] or "" for commit in table.commits()]
        if is_changed or not names[-1].startswith(f"{holder}-"):
            table.commit(step=step if is_changed else table.last_step, name=f"{holder}-{table.last_commit + 1}")
            warn_of_many(table, holder, 1 + sum(name.startswith(f"{holder}-") for name in names))
    return reference_to(table)


def warn_of_many(table: Table, holder: str, count: int) -> None:
    """Warn, at doubling counts, that many commits have names beginning with `holder`."""
    if count >= MANY and count & (count - 1) == 0:
        warnings.warn(
            f"{table.path!r} keeps {count} commits because states refer to them, and the disk space that these need: "
            f"`embedrock commits` lists them as {holder}-<number>. Let go of those whose files are gone, by "
            "table.release(name).",
            HeldCommitsWarning,
            stacklevel=2,
        )


def reference_to_parts(path: str, ranks: int) -> dict[str, Any]:
    """Return the reference to a table in shards, each as of the checkpoint in progress.

    The reference is equal on all processes. Each process that has rows has a commit of the checkpoint's name.

    Args:
        path: the layers' `path`.
        ranks: number of processes.

    Raises:
        UnsupportedError: no checkpoint is in progress.
    """
    name = _checkpoint.get()
    if name is None:
        raise UnsupportedError(
            f"the table at {path!r} is that of {ranks} processes, which commit together: a bare state dict cannot "
            "refer to it. Save by ert.save on all ranks, or what embedrock.torch.dcp.state_dict(model) returns by "
            "torch.distributed.checkpoint."
        )
    return {"path": path, "uuid": name, "commit": name, "step": None, PARTS: ranks}


def _part_of(table: Table, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the commit of a table that a reference to shards names; None without one."""
    return next((commit for commit in table.commits() if commit["name"] == state["commit"]), None)


def is_reference(state: Mapping[str, Any]) -> bool:
    """Return whether the state of a layer is a reference instead of rows."""
    return "uuid" in state


def check_state(table: Table, state: Mapping[str, Any], label: str, remedies: ReferenceRemedies) -> None:
    """Raise an error unless a layer's table fits a state that is a reference. A state with rows passes."""
    if not is_reference(state):
        return
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise ArgumentError(f"a reference for {label} must have {', '.join(KEYS)}: {', '.join(missing)} missing.")
    meant = f"commit {state['commit']} of the table that was at {state['path']!r}, uuid {state['uuid']}"
    owner, member = remedies.owner, f"[{state[MEMBER]!r}]" if MEMBER in state else ""
    if not table.is_on_disk:
        raise ArgumentError(
            f"the state of {label} must have rows, because its table is in RAM: got a reference to {meant}. "
            f"Make the {owner} with path=, the place where that table is now; or take its rows into RAM, by "
            f"{'' if owner == 'table' else f'{owner}.'}table.load_state(er.open(path, mode='r', at={state['commit']})"
            f"{member})."
        )
    if PARTS in state:
        if _part_of(table, state) is None:
            raise ArgumentError(
                f"the state of {label} refers to commit {state['commit']} of a table in parts that was at "
                f"{state['path']!r}: the one at {str(table.path)!r} has no such commit. Make the layer with the path "
                "and sharded= that it was saved with; where the commit was dropped there, load a later checkpoint."
            )
        return
    if table.uuid != state["uuid"]:
        raise ArgumentError(
            f"the state of {label} must be that of its own table, at {str(table.path)!r}, uuid {table.uuid}: got a "
            f"reference to {meant}. {remedies.moved}"
        )
    own = None if table.group is None else table.name
    if state.get(MEMBER) != own:
        named = state.get(MEMBER)
        meant_one, has = (f"table {name!r} of a group" if name else "a table alone" for name in (named, own))
        remedy = f" Make the {owner} with name={named!r}, or group.rename({own!r}, {named!r})." if named and own else ""
        raise ArgumentError(f"the state of {label} refers to {meant}, {meant_one}: the {owner} has {has}.{remedy}")
    there = [commit["commit"] for commit in table.commits()]
    if state["commit"] not in there:
        raise ArgumentError(
            f"the state of {label} refers to {meant}, which is no longer kept: the table has commits "
            f"{', '.join(map(str, there))}. {remedies.dropped}"
        )


def relocation(function: str, relocate: Relocate | None, old_paths: Sequence[str]) -> Callable[[str], str]:
    """Return a function from the path in a reference to the table's path now.

    Args:
        function: the function with the argument `relocate`, such as "ert.load", for error messages.
        relocate: {old path: new path}, or such a function; None: no table has moved.
        old_paths: paths in the references.

    Raises:
        ArgumentError: `relocate` has a path that no reference has.
    """
    if not isinstance(relocate, Mapping):
        where = relocate or (lambda path: path)
        return lambda path: local_path(where(path), f"what `relocate` of {function} returns")
    subject = f"a new path in `relocate` of {function}"
    by_place = {os.path.abspath(old): local_path(new, subject) for old, new in relocate.items()}
    if unknown := by_place.keys() - set(map(os.path.abspath, old_paths)):
        raise ArgumentError(
            f"`relocate` of {function} must have old paths as its keys, here {', '.join(old_paths) or 'none'}: "
            f"got {', '.join(sorted(unknown))}."
        )
    return lambda path: by_place.get(os.path.abspath(path), path)


def go_to(table: Table, state: Mapping[str, Any]) -> None:
    """Roll a table back to the commit of a checked reference. Changes since that commit are lost.

    The other tables of its group go back with it.
    """
    found = _part_of(table, state) if PARTS in state else None
    commit = state["commit"] if found is None else found["commit"]
    if not table.uncommitted and commit in (table.last_commit, rows_of(table).location.went_back_to):
        return
    tables = [table] if table.group is None else table.group.open_tables()
    wanted = {each: each.rule for each in tables}
    table.rollback(commit)
    for each, rule in wanted.items():
        if each.is_open_here:  # the commit's own rule
            keep_rule(each, rule)


def keep_rule(table: Table, wanted: Rule | None) -> None:
    """Set the rule that an optimizer wants, if the table's records have its state."""
    if wanted is not None and (table.rule is None or wanted.same_layout(table.rule)):
        with (rows := rows_of(table)).table_lock.whole():
            set_rule(rows, wanted)  # otherwise the optimizer's next step says that it must be made anew
