"""`Group`: tables that share a budget, and are looked up and stepped together. `open_table`: a table or group."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from embedrock.admission.lifecycle import RowLifecycle
from embedrock.batch.gradients import RowGradients
from embedrock.batch.ids import check_ids
from embedrock.batch.plan import make_plan
from embedrock.errors import (
    ArgumentError,
    ClosedTableError,
    UnknownTableError,
    UnsupportedError,
    did_you_mean,
    listed,
    with_article,
)
from embedrock.initializers import Initializer
from embedrock.optimizers import Rule
from embedrock.spec.admission import Admission
from embedrock.spec.description import POLICIES, describe_spec, rule_of, without_place
from embedrock.spec.eviction import Eviction
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Pin
from embedrock.storage.disk_pools import DiskPools
from embedrock.storage.record_pools import RamPools
from embedrock.storage.table_lock import TableLock
from embedrock.store.table_folder import TableFolder
from embedrock.system.interrupts import held_back
from embedrock.system.log import caller
from embedrock.system.notebook import html_table
from embedrock.system.paths import AnyPath
from embedrock.system.scopes import on_failure
from embedrock.system.sizes import Size, format_bytes, parse_device_memory
from embedrock.table import batches, checks, opened
from embedrock.table.batches import FeatureLayout
from embedrock.table.changed_rows import RowChanges
from embedrock.table.changes import change_policies, set_rule
from embedrock.table.event_time import newest_event
from embedrock.table.missing import Missing
from embedrock.table.opened import open_alone
from embedrock.table.opening import InitialValuesOf, check_on_nonfinite, new_spec, opening_of, rows_of_last_commit
from embedrock.table.options import (
    OpenArguments,
    OpenOptions,
    TableOptions,
    defaults,
    filled,
    index,
    refuse_options_of_files,
    refuse_unknown,
)
from embedrock.table.prefetch import bring, prefetch, room_for
from embedrock.table.rows import NOBODY, ChangeCounter, ClosedMember, Location, RamLocation, TableState
from embedrock.table.stepping import step_checked
from embedrock.table.storage import StorageManager, open_or_make, open_volume
from embedrock.table.stored import StoredVerbs
from embedrock.table.table import Table, rows_of

# Arguments of `Group.table`, by name.
GIVEN = ("dtype", "init", "seed", "rule", "on_nonfinite", "device_memory", *POLICIES)

_OPEN: dict[str, Any] = {"subject": "er.open", "first": ("path", "mode", "at", "kind"), "kind": OpenArguments}
NO_OPTIONS = {"on_nonfinite": None, "device_memory": None}
MOST_LAYOUTS = 64  # of batches of different members
MOST_SHOWN = 30  # members in a notebook


class Group(StoredVerbs):
    """Tables that share a budget of RAM, and are looked up and stepped together; with `path`, on disk.

    Each member is a `Table` like any other, with its own rows, dim, rule, initial values and steps. A member's results
    are, to the bit, those of the same table alone. Members of the same layout (dim, dtype, rule) keep their records in
    one place. So a call for all of them costs hardly more than one for a single table with as many rows.

    Args:
        memory: the most RAM of all members together, in bytes, "512MiB" or "25%". "auto", on disk: as much of the free
            RAM as pays. None: no limit in RAM; on disk a share of half of the RAM. All such tables of this process
            share that half.
        on_nonfinite: default of members for a step with NaN or Inf in its gradients, "raise" or "skip".
        path: a folder to keep all rows in. The group there is opened as of its last commit, or made.
        policy, keep, lock, mode: of a group on disk: see `Table`.
        commit_every: automatic commits of a group on disk, all members as one: see `Table`. Steps count for the member
            that has made most, and the commit's `step` is of that member.
        name: for error messages.
        device_memory: the most GPU memory for rows of all members in models on a GPU, in bytes, "2GiB" or "25%". 0:
            none. None: members in RAM have limits of their own, see `table`.

    Attributes:
        memory, on_nonfinite, device_memory: the values given.

    Raises:
        ArgumentError: an invalid value, or an option of groups on disk without `path`.
        TableFileError: `path` has something else, or a table alone.
        TableLockedError: another writer has the group at `path` open.
        CorruptTableError: the files at `path` are damaged.

    Example:
        >>> import embedrock as er
        >>> group = er.Group(memory="64MiB")
        >>> users = group.table("users", rows=10**9, dim=2, rule=er.SGD(lr=0.5), init=er.Zeros())
        >>> items = group.table("items", rows=10**6, dim=2, rule=er.SGD(lr=0.5), init=er.Zeros())
        >>> ones = np.ones((1, 2), np.float32)
        >>> group.update({"users": [7], "items": [7]}, {"users": ones, "items": 2 * ones})
        >>> group.lookup({"users": [7], "items": [7]})
        {'users': array([[-0.5, -0.5]], dtype=float32), 'items': array([[-1., -1.]], dtype=float32)}
    """

    _unlisted = "made members open_tables pools"

    def __init__(
        self,
        memory: Size | None = None,
        on_nonfinite: str = "raise",
        *,
        path: str | os.PathLike[str] | None = None,
        policy: str = "lfu",
        keep: int = 2,
        commit_every: int | str | timedelta | None = None,
        lock: bool = True,
        mode: str = "w",
        name: str | None = None,
        device_memory: Size | None = None,
    ) -> None:
        options = {"path": path, "memory": memory, "policy": policy, "keep": keep, "lock": lock, "mode": mode}
        options |= {"commit_every": commit_every, "name": name}
        check_on_nonfinite(on_nonfinite)
        if path is None:
            refuse_options_of_files({**defaults(TableOptions), **options}, "the group")
            location = RamLocation(RamPools(memory, "the group"), False, TableLock(), "the group")
            return self._begin(location, memory, on_nonfinite, parse_device_memory(device_memory))
        opening, of_gpu = opening_of(options), parse_device_memory(device_memory)
        with held_back():  # or Ctrl-C may leave files open without a group
            table_folder = open_alone(opening.path, lambda: open_or_make(opening, None))
            self._begin(_as_of_last_commit(table_folder, opening), opening.memory, on_nonfinite, of_gpu)

    def _begin(
        self, members: Location, memory: Size | None, on_nonfinite: str, device_memory: int | str | None
    ) -> None:
        self.memory, self.on_nonfinite, self.device_memory = memory, on_nonfinite, device_memory
        self.members, self.table_lock = members, members.table_lock
        self.storage = members if isinstance(members, StorageManager) else None
        self._tables: dict[str, Table] = {}  # open members
        self._layouts, self._closed_at = dict[tuple[Any, ...], FeatureLayout](), ""
        members.listener = weakref.WeakMethod(self._forget)
        if self.storage is not None:
            weakref.finalize(self, self.storage.abandon, is_forgotten=True)
        self._note()

    # ---------------------------------------------------------------- members

    def table(
        self,
        name: str,
        rows: int | None,
        dim: int,
        *,
        rule: Rule | None = None,
        init: Initializer | None = None,
        seed: int | None = None,
        dtype: str = "float32",
        on_nonfinite: str | None = None,
        device_memory: Size | None = None,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        frozen: Any = None,
    ) -> Table:
        """Return the member of that name: a new one, or the existing one if the arguments agree with it.

        Args:
            name: of the member; for error messages, too.
            rows: number of rows; None: open ids, any int64.
            dim: weights in a row.
            rule, init, seed, dtype: see `Table`. For an existing member, None means its own value.
            on_nonfinite: None: the group's value, or that of an existing member on disk.
            device_memory: see `Table`. None or 0 for members on disk, which share the group's, and for members of a
                group with a `device_memory`.
            admission, eviction, frozen: admission, eviction and frozen rows: see `Table`. For an existing member,
                another eviction or other frozen rows replace its own.

        Raises:
            ArgumentError: an invalid value, or another table has that name.
            UnsupportedError: `device_memory` of a member on disk.
            MemoryBudgetError: no row fits the group's `memory`.
        """
        values = dtype, init, seed, rule, on_nonfinite, device_memory, admission, eviction, frozen
        return self.made(name, rows, dim, dict(zip(GIVEN, values, strict=True)))

    def made(
        self, name: str, rows: int | None, dim: int, given: Mapping[str, Any], first: InitialValuesOf | None = None
    ) -> Table:
        """Return the member of that name: see `table`. `first` has default initial values of a new member."""
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"`name` of a table in a group must be a string that is not empty: got {name!r}.")
        self._check_device_memory(name, given["device_memory"])
        spec, asked = new_spec(rows, dim, given, first)
        asked |= dict.fromkeys(POLICIES)  # policies may change
        options = {"on_nonfinite": given["on_nonfinite"], "device_memory": parse_device_memory(given["device_memory"])}
        with self.table_lock.whole():
            self._check_usable()
            member = self.members.get(name)
            if member is None:
                return self._new(name, spec, options)
            if isinstance(member, ClosedMember):
                table = self._gone_on_with(name, member, spec, {**asked, **options})
            else:
                check_same(table := self[name], spec, {**asked, **options})
            self._change_policies(table, spec.policies)
            return table

    def _check_device_memory(self, name: str, given: Size | None) -> None:
        if self.storage is not None and parse_device_memory(given):
            raise UnsupportedError(
                f"`device_memory` of table {name!r} of {self.subject} must be None or 0: got {given!r}. Tables of a "
                "group on disk share one cache in GPU memory, as they do that in RAM. Give it to the group, "
                f"er.Group(path=..., device_memory={given!r})."
            )
        if self.device_memory is not None and parse_device_memory(given):
            raise ArgumentError(
                f"`device_memory` of table {name!r} must be None or 0, as the group was given one for all of its "
                f"tables, {self.device_memory!r}: got {given!r}. Leave one of them out."
            )

    def _change_policies(self, table: Table, given: Mapping[str, Any]) -> None:
        """Apply the policies that are given to an existing member."""
        rows, before, own = rows_of(table), describe_spec(table.spec), table.spec.policies
        new = {name: policy for name, policy in given.items() if policy is not None and _is_other(policy, own[name])}
        if table.mode == "w" and replace(table.spec, **new).has_residents and not table.spec.has_residents:
            rows.location.wait_for_quiet()
            rows.grow(replace(table.spec, **new))  # moves it to a pool of its own
        change_policies(rows, new, table.mode == "w")
        if table.mode == "w":
            rows.tell()
        if describe_spec(table.spec) != before:
            rows.version.advance(keeps_rows=True)

    def _check_usable(self) -> None:
        if self._closed_at:
            remedy = "Make a new er.Group." if self.storage is None else f"Open it again, er.open({self.path!r})."
            raise ClosedTableError(f"{self.subject} is closed{self._closed_at}. {remedy}")

    def _new(self, name: str, spec: Spec, options: Mapping[str, Any]) -> Table:
        own = options["on_nonfinite"]
        check_on_nonfinite(own or self.on_nonfinite)
        rows = TableState(self.members, own or self.on_nonfinite, name)
        rows.kept_options = {"on_nonfinite": own} if own else {}
        tier = self.members.idle_pools().part(spec, rows.subject)
        rows.install(spec, tier, lifecycle=RowLifecycle.of(spec, rows.subject))
        rows.given_rule = spec.rule
        self.members.enter(name, rows)
        rows.version.begin()
        return self._table(rows, name, options)

    def _table(self, rows: TableState, name: str, options: Mapping[str, Any]) -> Table:
        given = {**options, "name": name, "memory": None, "directory": "hashed"}
        self._tables[name] = Table.over(rows, self.storage, given, self)
        return self._tables[name]

    def _opened(self, name: str, options: Mapping[str, Any], init: Initializer | None) -> Table:
        assert self.storage is not None  # members in RAM are always open
        own = options["on_nonfinite"]
        check_on_nonfinite(own or self.on_nonfinite)
        return self._table(self.storage.open_member(name, init, own, self.on_nonfinite), name, options)

    def _gone_on_with(self, name: str, member: ClosedMember, spec: Spec, asked: Mapping[str, Any]) -> Table:
        """Return the table of a closed member, by the requested rule, if it agrees with the request."""
        own = rule_of(member.spec["rule"])
        is_alike = spec.rule is None or own is None or spec.rule.same_layout(own)
        fixed = {**asked, "rule": None if is_alike else asked["rule"], "on_nonfinite": None}
        check_alike(f"table {name!r}", member.spec, fixed, name)
        table = self._opened(name, asked, None if asked["init"] is None else spec.init)
        if spec.rule is not None and table.mode == "w":
            set_rule(rows_of(table), spec.rule)
            rows_of(table).given_rule = spec.rule
        return table

    def __getitem__(self, name: str) -> Table:
        table = self._tables.get(name)
        if table is not None:
            return table
        if isinstance(self.members.get(name), ClosedMember):
            with self.table_lock.whole():
                return self._opened(name, NO_OPTIONS, None)
        raise self._unknown(name)

    def _unknown(self, name: str) -> UnknownTableError:
        names = self.members.names
        known, meant = f"it has {listed(names)}" if names else "it is empty", did_you_mean(name, names)
        if not meant and self.mode == "r":
            meant = (
                f" This reader shows commit {self.last_commit}: a table that was made since comes by refresh(), once "
                "its writer has committed."
            )
        return UnknownTableError(f"{self.subject} has no table {name!r}: {known}.{meant}")

    def __contains__(self, name: object) -> bool:
        return name in self.members.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.members.names)

    def __len__(self) -> int:
        return len(self.members.names)

    def __bool__(self) -> bool:
        return True  # without tables, too: `er.opened(path) or er.Group(path=path)`

    def drop(self, name: str) -> None:
        """Close a member and release its memory. Layers that have it raise `ClosedTableError` from then on.

        On disk, the next commit leaves it out. Compaction, which begins after that, frees its space. Earlier commits
        keep it.

        Args:
            name: of the member.

        Raises:
            UnknownTableError: the group has no such member.
        """
        with self.table_lock.whole():
            if name not in self:
                raise self._unknown(name)
            self.members.drop(name)

    def rename(self, name: str, new: str) -> None:
        """Give a member another name; on disk from the next commit on.

        Args:
            name: of the member.
            new: its new name.

        Raises:
            ArgumentError: another table has that name, or it is empty.
            UnknownTableError: the group has no such member.
        """
        if not isinstance(new, str) or not new or (new in self and new != name):
            taken = f"{self.subject} has a table {new!r}" if new in self else f"got {new!r}"
            raise ArgumentError(f"table {name!r} must get a name that is not empty, and that no other has: {taken}.")
        with self.table_lock.whole():
            table = self[name]
            self.members.rename(name, new)
            table.name = new
            self._tables[new] = self._tables.pop(name)
            opened.register(new, table)

    def open_tables(self) -> list[Table]:
        """Return the open members: all in RAM; on disk those that were requested."""
        return [self._tables[name] for name in self.members.names if name in self._tables]

    def _forget(self, name: str) -> None:
        self._tables.pop(name, None)
        self._layouts.clear()

    # ---------------------------------------------------------------- all members at once

    def lookup(self, ids: Mapping[str, npt.ArrayLike], missing: Any = None) -> dict[str, np.ndarray]:
        """Return the weights of rows of some members: float32 of shape ``ids.shape + (dim,)``, by name.

        Args:
            ids: by name of the member: see `Table.lookup`.
            missing: values of rows that are not there, of all members: see `Table.lookup`.

        Raises:
            UnknownTableError: the group has no such member.
            IdError, IdTypeError: as for `Table.lookup`.
        """
        layout = self._layout(ids, Missing.of(missing, self.subject))
        with self.table_lock.alone():
            return dict(zip(ids, batches.look_up(layout, list(ids.values())), strict=True))

    def update(
        self,
        ids: Mapping[str, npt.ArrayLike],
        grads: Mapping[str, npt.ArrayLike],
        lr: float | None = None,
        time: Any = None,
    ) -> None:
        """Make one exact step of each of some members, by its own rule. If one is refused, none is stepped.

        Args:
            ids: by name of the member: see `Table.update`.
            grads: by name, for each of `ids`: floats of shape ``ids.shape + (dim,)``.
            lr: learning rate of this step, for all; None: each rule's own.
            time: of the events, for all members of the call: see `Table.update`.

        Raises:
            UnknownTableError: the group has no such member.
            ArgumentError: names in `ids` and `grads` differ.
            IdError, IdTypeError, GradientError, NonFiniteGradientError, MemoryBudgetError: as for `Table.update`.
        """
        layout = self._layout(ids)
        _check_by_name("grads", grads)
        if ids.keys() != grads.keys():
            raise ArgumentError(
                f"`grads` of the group must be for the tables in `ids`, {listed(ids)}: got {listed(grads)}."
            )
        if not ids:
            return
        with self.table_lock.lock:
            newest = newest_event(time, list(map(rows_of, layout.tables)), self.subject)
            batch = batches.plan(layout, list(ids.values()))
            given, rules = [], dict[Table, Rule]()
            for name, table, of_table in zip(ids, layout.tables, batch.ids, strict=True):
                rows = rows_of(table)
                given.append(checks.floats("grads", grads[name], (*of_table.shape, rows.spec.dim), rows.subject))
                rules[table] = checks.rule_of_step(rows.spec, lr, {}, rows.subject)
            blocks = batches.sum_blocks(batch, given)
            for tables, summed in blocks:
                if not summed.is_finite:
                    _refuse_nonfinite(tables, summed, zip(layout.tables, batch.ids, given, strict=True))
            step_checked(batches.requests_of(blocks, rules, newest))

    def _layout(self, ids: Mapping[str, npt.ArrayLike], missing: Missing | None = None) -> FeatureLayout:
        _check_by_name("ids", ids)
        tables = tuple([self[name] for name in ids])
        known = self._layouts.get(key := (*tables, missing))
        if known is None:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            known = self._layouts[key] = FeatureLayout(self.table_lock, tables, missing=missing)
        return known

    def prefetch(self, batches: Iterable[Mapping[str, Any]], depth: int = 2) -> Iterator[Any]:
        """Iterate over batches while rows of the next `depth` ones are loaded. It changes no bit of any result.

        Args:
            batches: ids by name of the member, for each batch. Members missing in a batch need no rows.
            depth: number of batches to load ahead.
        """
        ids_of = {self[name]: lambda batch, name=name: batch.get(name, NOBODY) for name in self}
        return prefetch(batches, ids_of, depth)

    def changes(self, since: int | None) -> dict[str, RowChanges]:
        """Return the rows of each member that changed since a commit, as of the last one. See `Table.changes`.

        Args:
            since: number of the commit. None: all rows with a record.
        """
        self._check_usable()
        return self._on_disk().changes(index(since))

    def bring(self, ids: Mapping[Table, npt.ArrayLike]) -> Pin:
        """Load rows of members from disk for a later batch, those of a pool at once: see `Table.bring`.

        Args:
            ids: by member: see `Table.lookup`.
        """
        return bring(self.table_lock, _by_rows(ids))

    def room_for(self, batches: Sequence[Mapping[Table, npt.ArrayLike]]) -> tuple[int, int]:
        """Return the number of different rows in batches, and a `memory` of the group that holds them.

        Args:
            batches: ids by member, for each batch.
        """
        return room_for([_by_rows(ids) for ids in batches])

    # ---------------------------------------------------------------- what it is

    _saved = "state() of each table"

    def _versions(self) -> list[ChangeCounter]:
        return self._on_disk().all_versions

    @property
    def is_open_here(self) -> bool:
        return not self._closed_at and (self.storage is None or self.storage.is_of_this_process)

    @property
    def subject(self) -> str:
        return self.members.subject

    # ---------------------------------------------------------------- the group

    def stats(self) -> dict[str, float]:
        """Return statistics of all members together. ``docs/api/statistics.md`` lists the keys."""
        with self.table_lock.alone():
            tiers = [member.tier for _, member in self.members.items()]
            told: dict[str, float] = {
                "tables": len(self),
                "pools": len(self.pools),
                "rows_touched": sum(tier.count for tier in tiers),
                "bytes_used": self.pools.bytes_used,
                "budget_bytes": self.pools.budget_bytes,
            }
            if isinstance(self.pools, DiskPools):
                told |= self.pools.stats()
            return told | self.members.stats()

    def describe(self) -> list[dict[str, Any]]:
        """Return a description of each member: name, rows, dim, dtype, seed, init, rule, steps, and rows with records.

        On disk, it opens no member.
        """
        with self.table_lock.alone():
            return [{"name": name, **_described(member)} for name, member in self.members.items()]

    def close(self) -> None:
        """Close all members, and release their memory. Closing twice is allowed.

        On disk, it waits for a running commit. Uncommitted changes are lost, with an `UncommittedWarning`.
        """
        with self.table_lock.whole():
            if self._closed_at:
                return
            if self.storage is not None:
                self.storage.commit_rest()
            try:
                self.members.close()
            finally:
                self._closed_at = f", since {caller()}"

    @property
    def pools(self) -> RamPools | DiskPools:
        """The backends of all members."""
        pools = self.members.pools
        assert isinstance(pools, RamPools | DiskPools)  # no other kinds exist
        return pools

    def __repr__(self) -> str:
        return f"Group({listed(self.members.names)}{self._place})"

    @property
    def _place(self) -> str:
        used, budget = format_bytes(self.pools.bytes_used), format_bytes(self.pools.budget_bytes)
        return f"{'' if self.path is None else f' on disk at {self.path!r}'}: {used} of {budget}"

    def _html(self) -> str:
        head = "name", "rows", "rows_touched", "dim", "dtype", "rule", "steps"
        told = [each | {"rule": rule_of(each["rule"])} for each in self.describe()]
        lines = [[key.replace("_", " ") for key in head], *([each[key] for key in head] for each in told[:MOST_SHOWN])]
        more = [[f"and {len(told) - MOST_SHOWN:,} more"]] * (len(told) > MOST_SHOWN)
        return html_table(f"Group{self._place}{self._committed(self.stats())}", lines + more)

    def __reduce__(self) -> Any:
        remedy = "Copy its tables, which gives tables alone, or save what state() of each returns"
        if self.path is not None:  # tables on disk have no state()
            remedy = f'Open what is committed in the other process: er.open({self.path!r}, mode="r")'
        raise UnsupportedError(f"a group cannot be pickled or copied: rows may be larger than memory. {remedy}.")


def open_table(path: AnyPath, mode: str = "w", at: int | None = None, **options: Unpack[OpenArguments]) -> Any:
    """Open a table alone on disk, or a group, as of a commit: `er.open`, except for sharded tables."""
    given, opening = asked(path, mode, at, options)
    with held_back():  # or Ctrl-C may leave files open without a table
        table_folder = open_alone(opening.path, lambda: open_volume(opening))
        if table_folder.manifest.is_group:
            if given["init"] is not None:
                table_folder.close()
                raise ArgumentError(
                    f"`init` is of one table, and {opening.path!r} holds a group: pass it to group.table(name, ...)."
                )
            return group_of(table_folder, opening, given)
        rows = rows_of_last_commit(table_folder, opening, {**given, "rule": None}, given["init"], None)
        return Table.over(*rows, given)


def group_of(table_folder: TableFolder, opening: OpenOptions, given: Mapping[str, Any]) -> Group:
    """Return the group of an open folder. `given` has the options of `er.open`. An error closes the folder."""
    group = Group.__new__(Group)
    members = _as_of_last_commit(table_folder, opening)
    group._begin(members, opening.memory, given["on_nonfinite"], given["device_memory"])
    return group


def asked(path: AnyPath, mode: str, at: int | None, options: Mapping[str, Any]) -> tuple[dict[str, Any], OpenOptions]:
    """Return all options of `er.open`, checked, and how to open the files."""
    given = filled(OpenArguments, options, functools.partial(refuse_unknown, **_OPEN))
    given |= {"path": path, "mode": mode, "directory": "auto"}
    given["device_memory"] = parse_device_memory(given["device_memory"])
    check_on_nonfinite(given["on_nonfinite"])
    return given, opening_of(given, at)


def _as_of_last_commit(table_folder: TableFolder, opening: OpenOptions) -> StorageManager:
    with on_failure(table_folder.close):
        storage = StorageManager(table_folder, opening)
        storage.resume()
    return storage


def _is_other(policy: Admission | Eviction, own: Admission | Eviction | None) -> bool:
    """Return whether a policy differs from the member's own, or reports evicted rows."""
    told, told_now = (getattr(one, "mirrors", {}) for one in (policy, own))
    is_told = any(each is not None and each is not told_now.get(name) for name, each in told.items())
    return own is None or policy.describe() != own.describe() or is_told


def device_memory_of(table: Table) -> int | str | None:
    """Return the GPU memory limit of a table's rows: its own, or that of its group."""
    group: Group | None = table.group
    return table.device_memory if group is None or table.device_memory is not None else group.device_memory


def check_same(table: Table, spec: Spec, asked: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` unless a member agrees with a request: see `check_alike`."""
    has = {**describe_spec(table.spec), "on_nonfinite": table.on_nonfinite, "device_memory": table.device_memory}
    check_alike(table.subject, has, asked, table.name)
    if asked["init"] is not None and spec.init.digest != table.spec.init.digest:
        raise _another(table.subject, has, asked, ["init"], table.name)


def check_alike(subject: str, has: Mapping[str, Any], asked: Mapping[str, Any], name: str | None) -> None:
    """Raise `ArgumentError` unless a member agrees with the arguments; None, except for `rows`, means its own."""
    different = [
        key
        for key, value in asked.items()
        if key in has and without_place(value) != without_place(has[key]) and (value is not None or key == "rows")
    ]
    if different:
        raise _another(subject, has, asked, different, name)


def _another(
    subject: str, has: Mapping[str, Any], asked: Mapping[str, Any], different: Sequence[str], name: str | None
) -> ArgumentError:
    got, own = (", ".join(f"{key}={values[key]!r}" for key in different) for values in (asked, has))
    return ArgumentError(
        f"{subject} of the group is another one: asked for {got}, and it has {own}. Use its own arguments "
        f"(group[{name!r}] needs none), or another name."
    )


def _described(member: TableState | ClosedMember) -> dict[str, Any]:
    spec = describe_spec(member.spec) if isinstance(member, TableState) else member.spec
    return {**spec, "steps": member.steps, "rows_touched": member.tier.count}


def _refuse_nonfinite(
    tables: Sequence[Table], grads: RowGradients, given: Iterable[tuple[Table, np.ndarray, np.ndarray]]
) -> None:
    """Raise the error of the first table whose gradients have NaN or Inf, and which does not skip such steps."""
    by_table = {table: (ids, own) for table, ids, own in given}
    for number, table in enumerate(tables):
        summed, rows = grads.of(number), rows_of(table)
        if not summed.is_finite and rows.on_nonfinite == "raise":
            (ids, own), error = by_table[table], checks.nonfinite(summed, rows.subject)
            raise checks.nonfinite_in(error, make_plan(ids), own.reshape(*ids.shape, -1))


def _by_rows(ids: Mapping[Table, npt.ArrayLike]) -> dict[TableState, np.ndarray]:
    for table in ids:
        rows_of(table).check()
    return {rows_of(table): check_ids(own, table.rows, table.subject) for table, own in ids.items()}


def _check_by_name(name: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        got = with_article(type(given).__name__)
        raise ArgumentError(f"`{name}` of the group must be a dict, by the names of its tables: got {got}.")
