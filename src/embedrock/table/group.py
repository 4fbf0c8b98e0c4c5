"""`Group`: tables that share a budget, and are looked up and stepped together."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from embedrock.admission.lifecycle import RowLifecycle
from embedrock.batch.gradients import RowGradients
from embedrock.batch.ids import check_ids
from embedrock.batch.plan import make_plan
from embedrock.errors import (
    ArgumentError,
    ClosedTableError,
    NonFiniteGradientError,
    UnknownTableError,
    UnsupportedError,
    did_you_mean,
    with_article,
)
from embedrock.initializers import Initializer
from embedrock.io.vfs import OS_SYSTEM, System
from embedrock.optimizers import Rule
from embedrock.spec.admission import Admission
from embedrock.spec.description import POLICIES, describe_spec, rule_of
from embedrock.spec.eviction import Eviction
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Pin
from embedrock.storage.disk_pools import DiskOfGroup
from embedrock.storage.record_pools import RamPools
from embedrock.storage.table_lock import TableLock
from embedrock.store.table_folder import TableFolder
from embedrock.system.interrupts import held_back
from embedrock.system.log import caller
from embedrock.system.sizes import Size, format_bytes, parse_device_memory
from embedrock.table import batches, checks, named
from embedrock.table.batches import BatchFeature, GroupPlan, PoolLookup
from embedrock.table.growing import change_policies
from embedrock.table.location import ChangeCounter
from embedrock.table.members import ClosedMember, MemberRegistry, RamLocation
from embedrock.table.opened import open_alone
from embedrock.table.opening import InitialValuesOf, check_on_nonfinite, new_spec, opening_of
from embedrock.table.options import OpenOptions, TableOptions, defaults, refuse_options_of_files
from embedrock.table.prefetch import bring, prefetch, room_for
from embedrock.table.rows import TableState
from embedrock.table.rule_changes import set_rule
from embedrock.table.stepping import StepRequest, step_members
from embedrock.table.storage import StorageManager, open_or_make
from embedrock.table.stored import StoredVerbs
from embedrock.table.table import Table, rows_of

# Arguments of `Group.table`, by name.
GIVEN = ("dtype", "init", "seed", "rule", "on_nonfinite", "device_memory", *POLICIES)

NO_OPTIONS = {"on_nonfinite": None, "device_memory": None}
_NO_IDS = np.empty(0, np.int64)


class Group(StoredVerbs):
    """Tables that share a budget of RAM, and are looked up and stepped together; with `path`, on disk.

    Each member is a `Table` like any other, with its own rows, dim, rule, first values and steps: its results are, to
    the bit, those of the same table alone. Members that are laid out alike (dim, dtype, rule) have their records in one
    place, so that a call for all of them costs hardly more than one for a single table with as many rows.

    Args:
        memory: the most RAM that all members may take together, in bytes, "512MiB" or "25%"; "auto", on disk: what
            pays of what is left. None: all of it; on disk a share of half of it, which all is that tables on disk of
            this process were not told, together.
        on_nonfinite: of members that do not say it: what a step with NaN or Inf in its gradients does, "raise" or
            "skip".
        path: a folder to keep all rows in. The group there is opened as of its last commit, or made.
        policy, keep, lock, mode, system: of a group on disk: see `Table`.
        commit_every: a group on disk commits by itself, all members as one: see `Table`. Steps are those that one of
            them has made, and the commit's `step` is of the member that has made most.
        name: for error messages.
        device_memory: the most GPU memory that rows of all members may take together once models that have them are
            on a GPU, in bytes, "2GiB" or "25%"; 0: none. None: of a member in RAM what it is given itself, see `table`.

    Attributes:
        memory, on_nonfinite, device_memory: what it was given.

    Raises:
        ArgumentError: a value that cannot work, or an option of groups on disk without `path`.
        TableFileError: at `path` there is something else, or a table alone.
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
        system: System = OS_SYSTEM,
        device_memory: Size | None = None,
    ) -> None:
        options = {"path": path, "memory": memory, "policy": policy, "keep": keep, "lock": lock, "mode": mode}
        options |= {"commit_every": commit_every, "name": name, "system": system}
        check_on_nonfinite(on_nonfinite)
        if path is None:
            refuse_options_of_files({**defaults(TableOptions), **options}, "the group")
            location = RamLocation(RamPools(memory, "the group"), False, TableLock(), "the group")
            return self._begin(location, memory, on_nonfinite, parse_device_memory(device_memory))
        opening, of_gpu = opening_of(options), parse_device_memory(device_memory)
        with held_back():  # or Ctrl-C may leave files open that no group has
            table_folder = open_alone(opening.path, lambda: open_or_make(opening, None))
            self._begin(_as_of_last_commit(table_folder, opening), opening.memory, on_nonfinite, of_gpu)

    @classmethod
    def over(
        cls, table_folder: TableFolder, opening: OpenOptions, on_nonfinite: str, device_memory: int | str | None
    ) -> Group:
        """Return the group of files that were opened."""
        made = cls.__new__(cls)
        made._begin(_as_of_last_commit(table_folder, opening), opening.memory, on_nonfinite, device_memory)
        return made

    def _begin(
        self, members: MemberRegistry, memory: Size | None, on_nonfinite: str, device_memory: int | str | None
    ) -> None:
        self.memory, self.on_nonfinite, self.device_memory = memory, on_nonfinite, device_memory
        self.members, self.table_lock = members, members.table_lock
        self.storage = members if isinstance(members, StorageManager) else None
        self._tables: dict[str, Table] = {}  # those that are open
        self._routes, self._closed_at = batches.PoolLayouts(), ""
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
    ) -> Table:
        """Return the member of that name: a new one, or the one that there is, if that is what is asked for.

        Args:
            name: of the member; for error messages, too.
            rows: number of rows; None: open ids, any int64.
            dim: weights in a row.
            rule, init, seed, dtype: see `Table`. None of a member that there is: whatever it has.
            on_nonfinite: None: what the group was given, or what a member on disk was given when it was made.
            device_memory: see `Table`; None or 0 of members on disk, which share what the group is given, and of a
                group that was given one for all.
            admission, eviction: which rows get a record, and which lose it: see `Table`. Of a member that there is,
                another eviction takes the place of the one that it has.

        Raises:
            ArgumentError: a value that cannot work, or there is another table of that name.
            UnsupportedError: `device_memory` of a member on disk.
            MemoryBudgetError: no row fits the group's `memory`.
        """
        values = dtype, init, seed, rule, on_nonfinite, device_memory, admission, eviction
        return self.made(name, rows, dim, dict(zip(GIVEN, values, strict=True)))

    def made(
        self, name: str, rows: int | None, dim: int, given: Mapping[str, Any], first: InitialValuesOf | None = None
    ) -> Table:
        """Return what `table` returns.

        Args:
            name, rows, dim: see `table`.
            given: its other arguments.
            first: what draws first values of a new member, where the arguments do not say it.
        """
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"`name` of a table in a group must be a string that is not empty: got {name!r}.")
        self._check_device_memory(name, given["device_memory"])
        spec, asked = new_spec(rows, dim, given, first)
        asked |= dict.fromkeys(POLICIES)  # which may become others
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
        """Let rows of a member that there is come and go by other policies: those that are given."""
        rows, before, own = rows_of(table), describe_spec(table.spec), table.spec.policies
        new = {name: policy for name, policy in given.items() if policy is not None and _is_other(policy, own[name])}
        if new and table.mode == "w" and not table.spec.has_residents:
            rows.location.wait_for_quiet()
            rows.grow(replace(table.spec, **new))  # in a pool of its own
        change_policies(rows, new, table.mode == "w")
        if table.mode == "w":
            rows.tell()
        if describe_spec(table.spec) != before:
            rows.version.advance(keeps_rows=True)

    def _check_usable(self) -> None:
        if self._closed_at:
            raise ClosedTableError(f"{self.subject} is closed{self._closed_at}. {self._reopening}")

    @property
    def _reopening(self) -> str:
        return "Make a new er.Group." if self.storage is None else f"Open it again, er.open({self.path!r})."

    def _new(self, name: str, spec: Spec, options: Mapping[str, Any]) -> Table:
        own = options["on_nonfinite"]
        check_on_nonfinite(own or self.on_nonfinite)
        rows = TableState(self.members, own or self.on_nonfinite, name)
        rows.kept_options = {"on_nonfinite": own} if own else {}
        rows.install(spec, self.members.empty_tier(spec, rows.subject), lifecycle=RowLifecycle.of(spec, rows.subject))
        rows.given_rule = spec.rule
        (self.members.enter if self.storage is None else self.storage.enter_new)(name, rows)
        return self._table(rows, name, options)

    def _table(self, rows: TableState, name: str, options: Mapping[str, Any]) -> Table:
        given = {**options, "name": name, "memory": None, "directory": "hashed"}
        self._tables[name] = Table.over(rows, self.storage, given, self)
        return self._tables[name]

    def _opened(self, name: str, options: Mapping[str, Any], init: Initializer | None) -> Table:
        """Return the table of a member on disk that nobody had open."""
        assert self.storage is not None  # those in RAM never rest
        own = options["on_nonfinite"]
        check_on_nonfinite(own or self.on_nonfinite)
        return self._table(self.storage.open_member(name, init, own, self.on_nonfinite), name, options)

    def _gone_on_with(self, name: str, member: ClosedMember, spec: Spec, asked: Mapping[str, Any]) -> Table:
        """Return the table of a member that nobody had open, by the rule that was asked for, if it is that."""
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
        known, meant = f"it has {_names(names)}" if names else "it is empty", did_you_mean(name, names) or self._later()
        return UnknownTableError(f"{self.subject} has no table {name!r}: {known}.{meant}")

    def _later(self) -> str:
        """Return what a reader can do for a table that was made after the commit that it shows."""
        if self.mode == "w":
            return ""
        return (
            f" This reader shows commit {self.last_commit}: a table that was made since comes by refresh(), once its "
            "writer has committed."
        )

    def __contains__(self, name: object) -> bool:
        return name in self.members.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.members.names)

    def __len__(self) -> int:
        return len(self.members.names)

    def __bool__(self) -> bool:
        return True  # without tables, too: `er.opened(path) or er.Group(path=path)`

    def drop(self, name: str) -> None:
        """Close a member and give its memory back. Layers that have it raise `ClosedTableError` from then on.

        On disk the next commit is without it, and compaction, which begins after that, gives its space back. Commits
        from before keep it.
        """
        with self.table_lock.whole():
            if name not in self:
                raise self._unknown(name)
            self.members.drop(name)

    def rename(self, name: str, new: str) -> None:
        """Give a member another name; on disk from the next commit on.

        Raises:
            ArgumentError: there is a table of that name.
        """
        if not isinstance(new, str) or not new or (new in self and new != name):
            taken = f"{self.subject} has a table {new!r}" if new in self else f"got {new!r}"
            raise ArgumentError(f"table {name!r} must get a name that is not empty, and that no other has: {taken}.")
        with self.table_lock.whole():
            table = self[name]
            self.members.rename(name, new)
            table.name = new
            self._tables[new] = self._tables.pop(name)
            named.register(new, table)

    def open_tables(self) -> list[Table]:
        """Return the members that are open: all in RAM; on disk those that somebody has asked for."""
        return [self._tables[name] for name in self.members.names if name in self._tables]

    def _forget(self, name: str) -> None:
        self._tables.pop(name, None)
        self._routes.clear()

    # ---------------------------------------------------------------- all members at once

    def lookup(self, ids: Mapping[str, npt.ArrayLike]) -> dict[str, np.ndarray]:
        """Return the weights of rows of some members: float32 of shape ``ids.shape + (dim,)``, by name.

        Args:
            ids: by name of the member: see `Table.lookup`.

        Raises:
            UnknownTableError: the group has no such member.
            IdError, IdTypeError: as for `Table.lookup`.
        """
        features = self._features(ids)
        with self.table_lock.alone():
            return dict(zip(ids, batches.look_up(features, self._routes), strict=True))

    def update(
        self, ids: Mapping[str, npt.ArrayLike], grads: Mapping[str, npt.ArrayLike], lr: float | None = None
    ) -> None:
        """Make one exact step of each of some members, by its own rule: of all of them or, if one is refused, of none.

        Args:
            ids: by name of the member: see `Table.update`.
            grads: by name, for each of `ids`: floats of shape ``ids.shape + (dim,)``.
            lr: learning rate of this step, for all; None: each rule's own.

        Raises:
            UnknownTableError: the group has no such member.
            ArgumentError: names in `ids` and `grads` differ.
            IdError, IdTypeError, GradientError, NonFiniteGradientError, MemoryBudgetError: as for `Table.update`.
        """
        features = self._features(ids)
        _check_by_name("grads", grads)
        if ids.keys() != grads.keys():
            raise ArgumentError(
                f"`grads` of the group must be for the tables in `ids`, {_names(ids)}: got {_names(grads)}."
            )
        with self.table_lock.lock:
            batch = batches.plan(features, self._routes)  # while the step before, which moves no record, may be running
            given = [_checked_grads(feature, grads[name]) for feature, name in zip(batch.features, ids, strict=True)]
            by_rows = {
                rows_of(feature.table): (feature, own) for feature, own in zip(batch.features, given, strict=True)
            }
            rules = {rows: checks.rule_of_step(rows.spec.rule, lr, {}, rows.subject) for rows in by_rows}
            summed = [(rows_of(table), own) for table, own in batches.sum_gradients(batches.unread(batch), given)]
            for rows, own in summed:
                if not own.is_finite and rows.on_nonfinite == "raise":
                    raise _nonfinite(own, rows.subject, *by_rows[rows])
            step_members([StepRequest(rows, rules[rows], own) for rows, own in summed])

    def _features(self, ids: Mapping[str, npt.ArrayLike]) -> list[BatchFeature]:
        _check_by_name("ids", ids)
        return [BatchFeature(self[name], of_table) for name, of_table in ids.items()]

    def plan(self, features: Sequence[BatchFeature]) -> GroupPlan:
        """Return what a batch of some members needs: see `BatchFeature`.

        Raises:
            IdError, IdTypeError: as for `Table.lookup`.
        """
        with self.table_lock.lock:  # but not alone: the step before, which moves no record, may still be running
            return batches.plan(features, self._routes)

    def read(self, batch: GroupPlan, for_weights: bool = False, side_by_side: bool = False) -> PoolLookup:
        """Return the rows and bags of a batch.

        Args:
            batch: its plan.
            for_weights: `weight_gradients` will be asked for.
            side_by_side: the only one of ``reading.arrays`` is (batch, features, dim), as rows (batch * features, dim),
                of a batch that `batches.may_be_side_by_side`.
        """
        with self.table_lock.alone():
            reading = batches.read(batch, for_weights, side_by_side)
        self.members.prepared_steps.begin(
            (share.plan.ids, share.route.rows, share.plan.rows) for share in reading.batch.shares
        )
        return reading

    def sum(self, reading: PoolLookup, grads: Sequence[np.ndarray | None]) -> list[tuple[Table, RowGradients]]:
        """Return the gradients of each member in a batch, summed to one for each row.

        Features that share a table are one batch of it, in their order.

        Args:
            reading: of the batch.
            grads: for each feature, float32 of the shape of its output; None where none came: it touches no row.
        """
        return batches.sum_gradients(reading, grads)

    def sum_arrays(self, reading: PoolLookup, grads: Sequence[np.ndarray]) -> list[tuple[Table, RowGradients]]:
        """Return what `sum` returns, from the gradients of ``reading.arrays``: C-contiguous, of their shapes."""
        return batches.sum_arrays(reading, grads)

    def weight_gradients(self, reading: PoolLookup, grads: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        """Return the gradients of positions' weights, float32 (n,), for each feature; None where it has none."""
        return batches.weight_gradients(reading, grads)

    def prefetch(self, batches: Iterable[Mapping[str, Any]], depth: int = 2) -> Iterator[Any]:
        """Go through batches, ids by name of the member, while the rows of the next `depth` ones are brought up.

        That changes no bit of any result: see `Table.prefetch`. What a batch leaves out needs no rows.
        """
        return prefetch(batches, {self[name]: functools.partial(_ids_of, name) for name in self}, depth)

    def bring(self, ids: Mapping[Table, npt.ArrayLike]) -> Pin:
        """Bring rows of members up from disk that a later batch will use, those of a pool at once: see `Table.bring`.

        Args:
            ids: by member: see `Table.lookup`.
        """
        return bring(self.table_lock, _by_rows(ids))

    def room_for(self, batches: Sequence[Mapping[Table, npt.ArrayLike]]) -> tuple[int, int]:
        """Return how many different rows batches have together, and a `memory` of the group that holds these."""
        return room_for([_by_rows(ids) for ids in batches])

    # ---------------------------------------------------------------- what it is

    _saved = "state() of each table"

    def _versions(self) -> list[ChangeCounter]:
        return self._on_disk().all_versions

    @property
    def is_open_here(self) -> bool:
        """Whether it is open, and by this process, not by one whose child this is."""
        return not self._closed_at and (self.storage is None or self.storage.is_of_this_process)

    @property
    def subject(self) -> str:
        """What error messages call it."""
        return self.members.subject

    # ---------------------------------------------------------------- the group

    def stats(self) -> dict[str, float]:
        """Return numbers about all members together."""
        with self.table_lock.alone():
            tiers = [member.tier for _, member in self.members.items()]
            told: dict[str, float] = {
                "tables": len(self),
                "pools": len(self.pools),
                "rows_touched": sum(tier.count for tier in tiers),
                "bytes_used": self.pools.bytes_used,
                "budget_bytes": self.pools.budget_bytes,
            }
            if isinstance(self.pools, DiskOfGroup):
                told |= self.pools.stats()
            return told | self.members.stats()

    def describe(self) -> list[dict[str, Any]]:
        """Return what each member is: name, rows, dim, dtype, seed, init, rule, and its steps and rows with records.

        On disk that opens none.
        """
        with self.table_lock.alone():
            return [{"name": name, **_described(member)} for name, member in self.members.items()]

    def close(self) -> None:
        """Close all members, and give their memory back. Closing twice is allowed.

        On disk, a commit that runs in the background is waited for. Changes that no commit has are lost, with an
        `UncommittedWarning`.
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
    def pools(self) -> RamPools | DiskOfGroup:
        """The tiers of all members."""
        pools = self.members.pools
        assert isinstance(pools, RamPools | DiskOfGroup)  # it makes no others
        return pools

    def __repr__(self) -> str:
        used, budget = format_bytes(self.pools.bytes_used), format_bytes(self.pools.budget_bytes)
        where = "" if self.path is None else f" on disk at {self.path!r}"
        return f"Group({_names(self.members.names)}{where}: {used} of {budget})"

    def __reduce__(self) -> Any:
        remedy = "Copy its tables, which gives tables alone, or save what state() of each returns"
        if self.path is not None:  # whose tables are on disk, and have no state()
            remedy = f'Open what is committed in the other process: er.open({self.path!r}, mode="r")'
        raise UnsupportedError(f"a group cannot be pickled or copied: rows may be larger than memory. {remedy}.")


def _as_of_last_commit(table_folder: TableFolder, opening: OpenOptions) -> StorageManager:
    try:
        storage = StorageManager(table_folder, opening)
        storage.resume()
    except BaseException:
        table_folder.close()
        raise
    return storage


def _is_other(policy: Admission | Eviction, own: Admission | Eviction | None) -> bool:
    """Return whether a policy is another one, or tells others of the rows that leave."""
    told, told_now = (getattr(one, "mirrors", {}) for one in (policy, own))
    is_told = any(each is not None and each is not told_now.get(name) for name, each in told.items())
    return own is None or policy.describe() != own.describe() or is_told


def device_memory_of(table: Table) -> int | str | None:
    """Return the GPU memory that a table's rows may take, as it was given: to the table, or to its group for all."""
    group: Group | None = table.group
    return table.device_memory if group is None or table.device_memory is not None else group.device_memory


def check_same(table: Table, spec: Spec, asked: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` unless a member is what is asked for.

    Args:
        table: the member.
        spec: of the table that is asked for.
        asked: its arguments; None, but for `rows`, means whatever the member has.
    """
    has = {**describe_spec(table.spec), "on_nonfinite": table.on_nonfinite, "device_memory": table.device_memory}
    check_alike(table.subject, has, asked, table.name)
    if asked["init"] is not None and spec.init.digest != table.spec.init.digest:
        raise _another(table.subject, has, asked, ["init"], table.name)


def check_alike(subject: str, has: Mapping[str, Any], asked: Mapping[str, Any], name: str | None) -> None:
    """Raise `ArgumentError` unless a member has what is asked for; None, but for `rows`, means whatever it has."""
    different = [
        key for key, value in asked.items() if key in has and value != has[key] and (value is not None or key == "rows")
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


def _by_rows(ids: Mapping[Table, npt.ArrayLike]) -> dict[TableState, np.ndarray]:
    for table in ids:
        rows_of(table).check()
    return {rows_of(table): check_ids(own, table.rows, table.subject) for table, own in ids.items()}


def _ids_of(name: str, batch: Mapping[str, Any]) -> Any:
    """Return what a batch needs of a member."""
    return batch.get(name, _NO_IDS)


def _checked_grads(feature: BatchFeature, grads: npt.ArrayLike) -> np.ndarray:
    table = feature.table
    return checks.floats("grads", grads, (*np.shape(feature.ids), table.dim), table.subject)


def _nonfinite(own: RowGradients, subject: str, feature: BatchFeature, grads: np.ndarray) -> NonFiniteGradientError:
    ids = np.asarray(feature.ids)
    return checks.nonfinite_in(checks.nonfinite(own, subject), make_plan(ids), grads.reshape(*ids.shape, -1))


def _check_by_name(name: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        got = with_article(type(given).__name__)
        raise ArgumentError(f"`{name}` of the group must be a dict, by the names of its tables: got {got}.")


def _names(tables: Iterable[str]) -> str:
    return ", ".join(map(repr, tables)) or "none"
