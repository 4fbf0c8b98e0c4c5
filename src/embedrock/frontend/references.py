"""What a state holds of a table on disk: no rows, only which commit of which table is meant."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.optimizers import Rule
from embedrock.system.log import tell
from embedrock.system.paths import local_path
from embedrock.table.rule_changes import set_rule
from embedrock.table.table import Table, rows_of

Relocate = Mapping[str, str] | Callable[[str], str]
PARTS = "parts"  # how many there are, in references to tables in parts
KEYS = ("path", "uuid", "commit", "step")
MEMBER = "member"  # of a reference to a table of a group: its name there
MANY = 16  # commits that references hold; it is told at this number, and at each doubling

_manager: ContextVar[str | None] = ContextVar("keeper", default=None)


class HeldCommitsWarning(UserWarning):
    """Commits that references keep add up, or nothing keeps the commit that a reference names."""


class ReferenceRemedies(NamedTuple):
    """What to do about a reference that does not fit, in a front end's words: sentences for error messages.

    Attributes:
        moved: where it is to another table than the layer's.
        dropped: where its commit is no longer kept.
    """

    moved: str
    dropped: str


def tell_resumed(what: object, step: int | None, more: str = "") -> None:
    """Log one line with the step that something was resumed from."""
    at = "at a commit without a step" if step is None else f"at step {step}"
    tell(f"{what} resumed {at}{more}")


def reference_to(table: Table) -> dict[str, Any]:
    """Return the reference to a table on disk as it is now. Changes that are not committed yet are, first."""
    if table.uncommitted:
        table.commit()
    return reference_at(table, table.last_commit, table.last_step)


def reference_at(table: Table, commit: int, step: int | None) -> dict[str, Any]:
    """Return the reference to a table on disk as of a commit, which may be still under way."""
    made = {"path": str(table.path), "uuid": table.uuid, "commit": commit, "step": step}
    return made if table.group is None else {**made, MEMBER: table.name}


@contextlib.contextmanager
def kept_by(checkpoint: str) -> Iterator[None]:
    """Let references be to commits that a checkpoint of this name keeps for as long as it needs them."""
    token = _manager.set(checkpoint)
    try:
        yield
    finally:
        _manager.reset(token)


def is_kept() -> bool:
    """Return whether what is made of tables now goes to a checkpoint, which all processes make together."""
    return _manager.get() is not None


def lasting_reference_to(table: Table, holder: str, step: int | None = None) -> dict[str, Any]:
    """Return the reference to a table on disk as it is now, whose commit nothing but a release drops.

    It is the last commit, if that is held already and is what the table is now, or else a new one. Its name begins
    with `holder`, which says in a list of commits who needs it. `step` is that of the training, for what is not
    committed yet.
    """
    if table.mode == "r":
        _warn_if_fleeting(table)
    elif _manager.get() is None:
        is_changed = table.uncommitted
        names = [commit["name"] or "" for commit in table.commits()]
        if is_changed or not names[-1].startswith(f"{holder}-"):
            table.commit(step=step if is_changed else table.last_step, name=f"{holder}-{table.last_commit + 1}")
            warn_of_many(table, holder, 1 + sum(name.startswith(f"{holder}-") for name in names))
    return reference_to(table)


def _warn_if_fleeting(table: Table) -> None:
    names = {commit["commit"]: commit["name"] for commit in table.commits()}
    if names.get(table.last_commit) is None:
        warnings.warn(
            f"the state refers to commit {table.last_commit} of {table.path!r}, which is open for reading: its writer "
            "drops that commit once keep= newer ones are there. Commit it there with a name.",
            HeldCommitsWarning,
            stacklevel=2,
        )


def warn_of_many(table: Table, holder: str, count: int) -> None:
    """Warn, now and then, of commits that add up: so many whose names begin with `holder`."""
    if count >= MANY and count & (count - 1) == 0:
        warnings.warn(
            f"{table.path!r} keeps {count} commits because states refer to them, and the disk space that these need: "
            f"`embedrock commits` lists them as {holder}-<number>. Let go of those whose files are gone, by "
            "table.release(name).",
            HeldCommitsWarning,
            stacklevel=2,
        )


def reference_to_parts(path: str, ranks: int) -> dict[str, Any]:
    """Return the reference to a table whose rows several processes have, each as of the checkpoint that is being made.

    It is the same on all of them: each that has rows has a commit of the checkpoint's name.

    Args:
        path: that the layers were given.
        ranks: how many processes there are.

    Raises:
        UnsupportedError: no checkpoint is being made.
    """
    name = _manager.get()
    if name is None:
        raise UnsupportedError(
            f"the table at {path!r} is that of {ranks} processes, which commit together: a bare state dict cannot "
            "refer to it. Save by ert.save on all ranks, or what embedrock.torch.dcp.state_dict(model) returns by "
            "torch.distributed.checkpoint."
        )
    return {"path": path, "uuid": name, "commit": name, "step": None, PARTS: ranks}


def _part_of(table: Table, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the commit of a table that a reference to parts names; None where it has none."""
    return next((commit for commit in table.commits() if commit["name"] == state["commit"]), None)


def is_reference(state: Mapping[str, Any]) -> bool:
    """Return whether the state of a layer is a reference, instead of rows."""
    return "uuid" in state


def check_state(table: Table, state: Mapping[str, Any], label: str, remedies: ReferenceRemedies) -> None:
    """Raise an error unless a table can take the state of a layer, as far as tables on disk are concerned."""
    if is_reference(state):
        _check_reference(table, state, label, remedies)


def _check_reference(table: Table, state: Mapping[str, Any], label: str, remedies: ReferenceRemedies) -> None:
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise ArgumentError(f"a reference for {label} must have {', '.join(KEYS)}: {', '.join(missing)} missing.")
    meant = f"commit {state['commit']} of the table that was at {state['path']!r}, uuid {state['uuid']}"
    if not table.is_on_disk:
        raise ArgumentError(
            f"the state of {label} must have rows, because its table is in RAM: got a reference to {meant}. "
            "Make the layer with path=, the place where that table is now; or take its rows into RAM, by "
            f"layer.table.load_state(er.open(path, mode='r', at={state['commit']}))."
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
        remedy = f" Make the layer with name={named!r}, or group.rename({own!r}, {named!r})." if named and own else ""
        raise ArgumentError(f"the state of {label} refers to {meant}, {meant_one}: the layer has {has}.{remedy}")
    there = [commit["commit"] for commit in table.commits()]
    if state["commit"] not in there:
        raise ArgumentError(
            f"the state of {label} refers to {meant}, which is no longer kept: the table has commits "
            f"{', '.join(map(str, there))}. {remedies.dropped}"
        )


def relocation(function: str, relocate: Relocate | None, old_paths: Sequence[str]) -> Callable[[str], str]:
    """Return a function that gives the path of a table now, of its path in a reference.

    Args:
        function: that has the argument `relocate`, such as "ert.load", for error messages.
        relocate: {old path: new path}, or such a function; None: all are where they were.
        old_paths: those in references.

    Raises:
        ArgumentError: `relocate` has a path that no reference has.
    """
    if not isinstance(relocate, Mapping):
        where = relocate or (lambda path: path)
        return lambda path: local_path(where(path), f"what `relocate` of {function} returns")
    by_place = {
        os.path.abspath(old): local_path(new, f"a new path in `relocate` of {function}")
        for old, new in relocate.items()
    }
    if unknown := by_place.keys() - set(map(os.path.abspath, old_paths)):
        raise ArgumentError(
            f"`relocate` of {function} must have old paths as its keys, here {', '.join(old_paths) or 'none'}: "
            f"got {', '.join(sorted(unknown))}."
        )
    return lambda path: by_place.get(os.path.abspath(path), path)


def go_to(table: Table, state: Mapping[str, Any]) -> None:
    """Take a table to the commit that a reference names, which was checked. Changes since that commit are lost.

    The other tables of its group go there with it.
    """
    found = _part_of(table, state) if PARTS in state else None
    commit = state["commit"] if found is None else found["commit"]
    if not table.uncommitted and commit in (table.last_commit, rows_of(table).location.went_back_to):
        return
    tables = [table] if table.group is None else table.group.open_tables()
    wanted = {each: each.rule for each in tables}
    table.rollback(commit)
    for each, rule in wanted.items():
        if each.is_open_here:  # the commit has it
            keep_rule(each, rule)


def keep_rule(table: Table, wanted: Rule | None) -> None:
    """Give a table the rule that an optimizer wants, where its records allow it."""
    if wanted is not None and (table.rule is None or wanted.same_layout(table.rule)):
        with (rows := rows_of(table)).table_lock.whole():
            set_rule(rows, wanted)  # otherwise the optimizer says, at its next step, that it must be made anew
