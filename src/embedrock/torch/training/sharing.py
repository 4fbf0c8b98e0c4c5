"""Tables shared by several processes: owners send rows, and receive gradients at the end of a backward."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import distributed as dist
from torch.autograd import Variable

from embedrock.batch.gradients import RowGradients, shown_for
from embedrock.batch.ids import check_ids
from embedrock.batch.plan import Plan
from embedrock.distributed import stages
from embedrock.distributed.exchange import Brought, Exchange
from embedrock.distributed.owners import Placement, Replica, Shard, SharedPlan
from embedrock.distributed.stages import NO_TIME, GradientBlock
from embedrock.distributed.transport import Op
from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.optimizers import Rule
from embedrock.table.event_time import newer
from embedrock.table.rows import NOBODY, TableState
from embedrock.table.stepping import StepRequest, prepare, step_all
from embedrock.table.table import Table, rows_of
from embedrock.torch.training.backward import BackwardPass
from embedrock.torch.training.cpu_executor import CpuExecutor
from embedrock.torch.training.ranks import Ranks, are_there_groups


def check_trainers(label: str) -> None:
    """Inspect the callers once. Raise an error if a trainer would save sharded rows from one process.

    Raises:
        UnsupportedError: a trainer would. All processes raise it in the same lookup, before any message.
    """
    kinds = [kind for kind in map(_kind_in, ("lightning.pytorch", "pytorch_lightning")) if kind is not None]
    huggingface = _kind_in("transformers.trainer")
    frame = sys._getframe(1) if kinds or huggingface is not None else None
    while frame is not None:
        caller: Any = frame.f_locals.get("self")
        saves = remedy = ""
        if huggingface is not None and isinstance(caller, huggingface):
            saves, remedy = _of_huggingface(caller, huggingface), "transformers.TrainingArguments(save_strategy='no')"
        elif isinstance(caller, tuple(kinds)):
            saves, remedy = _of_lightning(caller), "lightning.Trainer(enable_checkpointing=False)"
        if saves:
            raise UnsupportedError(
                f"{saves} would save the rows of {label} by one process, which has only a part of them (sharded=). "
                f"Give {remedy}, and call ert.save(model, folder, step=...) on all ranks, from a callback or a hook: "
                "docs/trainers.md has both. Nothing was trained."
            )
        frame = frame.f_back


def _kind_in(module: str) -> Any:
    return getattr(sys.modules.get(module), "Trainer", None)


def _of_huggingface(trainer: Any, kind: Any) -> str:
    strategy = getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)
    is_own = type(trainer)._save_checkpoint is kind._save_checkpoint  # otherwise the user overrides the saving
    return f"transformers.Trainer with save_strategy={strategy!r}" if is_own and strategy != "no" else ""


def _of_lightning(trainer: Any) -> str:
    callbacks = trainer.checkpoint_callbacks
    saving = [each for each in callbacks if getattr(each, "save_top_k", 0) or getattr(each, "save_last", False)]
    return f"Lightning's {type(saving[0]).__name__}" if saving else ""


# PyTorch runs callbacks of a backward in the order in which they were queued. DDP's last one sets the means of
# gradients, and another callback queues it. So this one queues itself as often before it acts.
REPEATS = 3

HOLDER = re.compile(r"rank (\d+)")
Sharded = Any  # bool, "rank N" or a ProcessGroup

_rank_groups: weakref.WeakKeyDictionary[Any, RankGroup] = weakref.WeakKeyDictionary()

# Number of tables with a handle, by description, for each group of processes. So tables that a process made
# earlier, or with others, do not count.
_made: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
_made_alone: dict[str, int] = {}


class ShardingOptions(NamedTuple):
    """Options of `Embedding` for sharing a layer's rows with other processes."""

    sharded: Sharded = False
    path: str | None = None  # of sharded rows on disk; None: in RAM
    wire: str = "float32"
    positions: bool = False

    @staticmethod
    def of(options: Mapping[str, Any]) -> ShardingOptions:
        """Return the sharding options among the options of a layer."""
        path = options.get("path")
        given = {name: options[name] for name in ("sharded", "wire", "positions") if name in options}
        return ShardingOptions(path=None if path is None else os.fspath(path), **given)

    @property
    def are_default(self) -> bool:
        """True if all options except the path are defaults."""
        return self._replace(path=None) == ShardingOptions()

    @property
    def told(self) -> str:
        """Description of the options, in words."""
        return f"sharded={self.sharded!r}, wire={self.wire!r}, positions={self.positions!r}"


def check_sharded(layer: str, sharded: Sharded) -> None:
    """Raise `ArgumentError` unless `sharded` of a layer has a valid value."""
    is_holder = isinstance(sharded, str) and HOLDER.fullmatch(sharded) is not None
    if not (isinstance(sharded, bool) or is_holder or isinstance(sharded, dist.ProcessGroup)):
        raise ArgumentError(
            f"`sharded` of {layer} must be True (rows are shared out over all ranks), 'rank 0' (that one has all "
            f"rows), a ProcessGroup (its ranks share them) or False (each rank has all rows): got {sharded!r}."
        )


def holder_of(sharded: Sharded) -> int | None:
    """Return the rank that has all rows; None: several have some."""
    return int(sharded.removeprefix("rank ")) if isinstance(sharded, str) else None


class RankGroup:
    """Ranks of a process group of torch.distributed, and the tables that they share.

    Attributes:
        ranks: transport of their messages.
        exchange: exchange of ids, rows and gradients.
        loops: number of loops over batches with prefetched ids.
        current: current prefetched batch for lookups, by whether gradients are recorded.
        changes: number of times that rows may have changed.
        members: the shared tables, by key.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks, self._group = Ranks(group), group
        self.exchange = Exchange(self.ranks)
        self.loops = self.changes = 0
        self.current: dict[bool, Any] = {}
        self._ahead: Ranks | None = None
        self.members: weakref.WeakValueDictionary[int, SharedTable] = weakref.WeakValueDictionary()
        self._arrived: weakref.WeakKeyDictionary[BackwardPass, dict[int, Any]] = weakref.WeakKeyDictionary()

    @staticmethod
    def of(group: dist.ProcessGroup) -> RankGroup:
        """Return the object of a group. All ranks make the first call at the same time."""
        if group not in _rank_groups:
            _rank_groups[group] = RankGroup(group)
        return _rank_groups[group]

    @property
    def ahead(self) -> Ranks:
        """Transport of ids of later batches. All ranks read it first at the same time."""
        if self._ahead is None:
            self._ahead = Ranks(self._group, is_near=False)
        return self._ahead

    def arrive(self, sharing: SharedTable, blocks: Sequence[GradientBlock]) -> None:
        """Take a table's gradients of a backward. At its end, one exchange sends those of all tables to the owners."""
        run = BackwardPass.current()
        if run not in self._arrived:
            self._arrived[run] = {}
            _queue(lambda: self._share(self._arrived.pop(run)), REPEATS)
        self._arrived[run][sharing.key] = sharing, blocks

    def _share(self, arrived: Brought) -> None:
        for member, grads, square in self.exchange.share(arrived, self.members.get):
            member.handle.show(SharedGradients.of_ranks(grads, square, member), member.time)

    def leave(self, members: Sequence[SharedTable]) -> None:
        """Answer the other ranks without own data until all have left. Then drop the gradients of these tables."""
        handles = [member.handle for member in members]  # the program may have dropped them by then

        def end() -> None:
            for handle in handles:
                handle.forget()

        self.exchange.uneven.leave(self._take_part, end)

    def _take_part(self, busy: Sequence[Op]) -> None:
        op = busy[0]
        if op["do"] == "look":
            members = [self.members[key] for key in op["keys"]]
            nothing = [member.shard.plan(np.empty(0, np.int64)) for member in members]
            self.exchange.rows(members, nothing, op["trains"])
        elif op["do"] == "share":
            for key, factor in {key: factor for one in busy for key, factor in one["waits"].items()}.items():
                self.members[int(key)].follow(factor)
            self._share({})
        elif op["do"] == "step":
            self._step(op["parts"])
        else:
            self.exchange.tell(op["what"], _refuse_as_gone)

    def _step(self, parts: Sequence[Mapping[str, Any]]) -> None:
        due, members = [], [self.members[part["key"]] for part in parts]
        for member, part in zip(members, parts, strict=True):
            member.follow(part["factor"])
            rule = replace(member.table.rule, **part["rule"])  # pyright: ignore[reportArgumentType]
            pending = member.handle.pending
            if pending.grads is not None:
                grads = pending.grads.clipped(part["clip"])
                due.append(StepRequest((rows_of(member.table),), rule, grads, time=pending.time))
        step_all(due)
        for member in members:
            member.handle.stepped()


class OptimizedRows(NamedTuple):
    """Rows that an optimizer steps."""

    handle: Any
    rule: Rule | None  # current one of their steps; None: the table is only read
    clip_value: float | None  # bound of each element of their gradients
    rows: TableState


def fall_behind(handles: Iterable[Any], error: Exception) -> None:
    """Inform all ranks that this rank did not step its tables, because of an error."""
    for exchange in {handle.sharing.rank_group.exchange for handle in handles if handle.sharing is not None}:
        exchange.fall_behind(error)


def announce_steps(due: Iterable[OptimizedRows]) -> None:
    """Announce steps to ranks without batches left. They make the same steps: see `ert.uneven`."""
    groups: dict[RankGroup, dict[SharedTable, OptimizedRows]] = {}
    for part in due:
        if (sharing := part.handle.sharing) is not None:
            groups.setdefault(sharing.rank_group, {})[sharing] = part
    for rank_group, parts in groups.items():
        rank_group.exchange.uneven.announce(partial(_step_of, parts))


def _step_of(due: Mapping[SharedTable, OptimizedRows]) -> Op:
    told = [
        {"key": one.key, "factor": one.waits, "clip": part.clip_value, "rule": _numbers_of(part.rule)}
        for one, part in due.items()
    ]
    said = "is at a step of " + ", ".join(one.label for one in due)
    return {"do": "step", "said": said, "mark": f"step {[part['key'] for part in told]}", "parts": told}


def _numbers_of(rule: Any) -> dict[str, Any]:
    """Return the hyperparameters that another process needs for a step by its own rule of this type."""
    names = (field.name for field in fields(rule))
    return {name: getattr(rule, name) for name in names if name not in rule.FIXED}


def _refuse_as_gone() -> np.ndarray:
    raise UnsupportedError(
        "this rank has left ert.uneven, and takes part in lookups, backwards and steps only. Do so after the block, on "
        "all ranks"
    )


def _queue(action: Any, repeats: int) -> None:
    """Queue a callback for the end of the running backward, after the callbacks that others have queued."""
    later = action if not repeats else lambda: _queue(action, repeats - 1)
    Variable._execution_engine.queue_callback(later)


class SharedTable:
    """Table of a handle that the ranks of a group share: an `ExchangeMember` of their exchange.

    Args:
        handle: handle of the rows, referenced weakly.

    Attributes:
        group: group of the ranks.
        rank_group: the ranks, and the tables that they share.
        key: identifier of the table: the same on all ranks, and different from that of any other table.
        placement: placement of the table's rows on ranks.
        wire: dtype of float32 rows and gradients in messages.
        sums_positions: gradients are sent by position, and owners sum them in the order of all ranks' batch.
        executor: executor of lookups, which reads from the owners or on this process.
        served: plan of the last requests of all ranks, and their ids, by rank.
        time: of the newest event on all ranks, of the last gradients that `fold` returned: see `Pending`.
    """

    time: float | None = None

    def __init__(self, handle: Any, group: dist.ProcessGroup) -> None:
        self._handle, self.group, self._is_new = weakref.ref(handle), group, True
        self.rank_group = RankGroup.of(group)
        self.placement = _placement(handle, self.rank_group.ranks)
        self.wire, self.sums_positions = handle.terms.wire, handle.terms.positions
        self.served: tuple[Plan, Sequence[np.ndarray]] | None = None
        told = f"{handle.name_for_others()} {self.placement._replace(rank=0)} {self._sent}"
        self.key = int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "little") >> 1
        self.rank_group.members[self.key] = self
        self.executor = CpuExecutor(handle.table, sums_positions=self.sums_positions)
        if isinstance(self.placement, Shard):
            self.executor.planner, self.executor.rows = self.plan, lambda plan: plan.fetch(plan)
            rows_of(handle.table).owns = self.placement.owns

    @property
    def handle(self) -> Any:
        handle = self._handle()
        assert handle is not None  # the handle owns this object, and is in use
        return handle

    @property
    def label(self) -> str:
        """Name of the table in error messages."""
        return f"{self.handle.label} ({self.handle.known_as}{self._sent})"

    @property
    def _sent(self) -> str:
        sent = "" if self.wire == ShardingOptions().wire else f", sent as {self.wire}"
        return f"{sent}, by position" if self.sums_positions else sent

    @property
    def table(self) -> Table:
        """Table of the rows on this process."""
        return self.handle.table

    @property
    def shard(self) -> Shard:
        """Placement of rows that are sharded."""
        assert isinstance(self.placement, Shard)
        return self.placement

    def plan(self, ids: np.ndarray, trains: bool) -> SharedPlan:
        """Plan a lookup, from the prefetched batch if one has the table."""
        ids = check_ids(ids, self.table.rows, self.table.subject)
        if self._is_new:
            self._is_new = False
            check_trainers(self.handle.label)
        ahead = self._ahead()
        return self.shard.plan(ids, partial(self._rows, trains)) if ahead is None else ahead.plan(self, ids)

    def _rows(self, trains: bool, plan: SharedPlan) -> np.ndarray:
        return self.rank_group.exchange.rows([self], [plan], trains)[0]

    def _ahead(self) -> Any:
        current = self.rank_group.current.get(torch.is_grad_enabled())
        return current if current is not None and self in current.plans else None

    def refuse(self, error: Exception, trains: bool) -> NoReturn:
        """Raise the error of a lookup on all ranks."""
        ahead = self._ahead()
        if ahead is not None:
            ahead.rows(self)  # the other ranks request it, and it refuses wrong ids of theirs, too
            raise error
        self.rank_group.exchange.refuse([self], error, trains)

    def arrive(self, grads: RowGradients, time: float | None) -> None:
        split = grads.plan.split if isinstance(grads.plan, SharedPlan) else None
        blocks = [GradientBlock(grads.plan.ids, grads.values, split)]
        if isinstance(grads, PositionGradients):
            blocks = grads.lookups
        newest = NO_TIME if time is None else int(time)
        self.rank_group.arrive(self, [block._replace(time=newest) for block in blocks])

    @property
    def waits(self) -> float | None:
        """Factor of the pending sums; None without pending sums."""
        waits = self.handle.pending.grads if self.handle.grad is not None else None
        return waits.factor if isinstance(waits, SharedGradients) else None

    def follow(self, factor: float | None) -> None:
        """Set the factor of the pending sums to that of another rank: see `waits`."""
        pending = self.handle.pending
        if factor is None:
            self.handle.forget()
        elif isinstance(pending.grads, SharedGradients):
            pending.grads = replace(pending.grads, factor=factor)

    def fold(self, ranks: Sequence[Sequence[GradientBlock]]) -> RowGradients:
        """Return the sum of the pending gradients and of each rank's blocks, in order. Raises the errors of a step."""
        handle = self.handle
        waits = handle.pending.grads if handle.grad is not None else None
        before = [waits.sums] if isinstance(waits, SharedGradients) else []
        if self.sums_positions:
            merged = RowGradients.sum_of([*before, stages.fold_positions(ranks, self._planned)])
        else:
            waiting = [GradientBlock(grads.plan.ids, grads.values) for grads in before]
            merged = stages.fold([*waiting, *itertools.chain.from_iterable(ranks)], self._planned)
        newest = max((block.time for blocks in ranks for block in blocks), default=NO_TIME)
        self.time = newer(handle.pending.time if before else None, None if newest == NO_TIME else newest)
        if handle.table.mode == "w":
            handle.table.check_step(merged, self.time)  # otherwise only ranks with room would make the step
        return merged

    def turned_away(self, grads: RowGradients) -> tuple[np.ndarray, np.ndarray] | None:
        """Return ids and gradients of the rows of `fold` that a step turns away here: int64 (n,), float32 (n, dim).

        None: the table has no default row that ranks train together.
        """
        rows = rows_of(self.table)
        is_whole = not isinstance(self.placement, Shard) or self.placement.holder is not None
        if rows.shared is None or is_whole or self.table.mode != "w":
            return None
        with rows.table_lock.whole():
            decision = prepare(rows, grads.plan, time=self.time).decision
        if decision is None or decision.rows is None:
            return NOBODY, grads.values[:0]
        return decision.turned_away, grads.values[~decision.rows]

    def _planned(self, ids: Sequence[np.ndarray]) -> Plan:
        """Return the plan of the ids of blocks, which are usually those of the last lookup."""
        served, self.served = self.served, None
        if served is not None and len(served[1]) == len(ids) and all(map(np.array_equal, served[1], ids)):
            return served[0]
        return self.handle.table.plan(np.concatenate(ids))


def _placement(handle: Any, ranks: Ranks) -> Placement:
    sharded = handle.terms.sharded
    if sharded is False:
        return Replica(ranks.rank, ranks.ranks)
    holder = holder_of(sharded)
    if holder is not None and holder >= ranks.ranks:
        raise ArgumentError(f"`sharded` of {handle.label} must be a rank below {ranks.ranks}: got {sharded!r}.")
    if handle.max_norm is not None:
        raise UnsupportedError(
            f"`max_norm` of {handle.label} does not go with rows that several processes share: a lookup would change "
            "them on one only. Leave it out, or clip by a constraint of your own."
        )
    return Shard(ranks.rank, ranks.ranks, holder, handle.table.spec.segments)


def known_as(handle: Any) -> str:
    """Return the name of a handle's table in its process group. Processes make equal tables in the same order."""
    table, group = handle.table, handle.terms.sharded
    spec = table.spec
    name = "" if table.name is None else f"{table.name!r}, "
    told = f"{name}{spec.rows} x {spec.dim} {spec.dtype}, seed {spec.seed}, {type(spec.init).__name__}"
    is_in_group = are_there_groups()
    told += "" if is_in_group else ", made before the process group"
    of_group = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
    made = _made.setdefault(of_group, {}) if is_in_group else _made_alone
    made[told] = nth = made.get(told, 0) + 1
    return told if nth == 1 else f"{told}, number {nth}"


SNAP = 2.0**-20  # relative to a power of two: possible loss when float32 numbers are averaged over ranks


@dataclass(eq=False, kw_only=True)
class SharedGradients(RowGradients):
    """Row gradients summed over ranks. Outside code sees the norm of their mean over all ranks."""

    factor: float  # of the sums in a step: 1 / ranks, times all later scaling of `shown`. It is applied once.
    is_finite_everywhere: bool  # no rank has NaN or Inf
    sharing: SharedTable  # the table on this rank

    @staticmethod
    def of_ranks(rows: RowGradients, square: float, sharing: SharedTable) -> SharedGradients:
        """Take sums, and their square norm over all ranks."""
        ranks, is_finite = sharing.placement.ranks, math.isfinite(square)
        shown = shown_for(math.sqrt(square) / ranks if is_finite else math.inf)
        own = {"factor": 1.0 / ranks, "is_finite_everywhere": is_finite, "sharing": sharing}
        return SharedGradients(
            rows.plan, rows.values, rows.square_norm, scaled_to=shown, of_default=rows.of_default, **own
        )

    @property
    def sums(self) -> RowGradients:
        """Sums over ranks, scaled as `shown` was. Blocks of later backwards are added to them."""
        return self.scaled(self.factor * self.sharing.placement.ranks)

    def _rescaled(self, factor: float, shown: float) -> SharedGradients:
        return replace(self, scaled_to=shown, factor=self.factor * (_snapped(factor) if self.shown else factor))

    def clipped(self, clip_value: float | None) -> RowGradients:
        if clip_value is not None:
            self._check_no_default(f"clip_value={clip_value}")
        due = self.scaled(self.factor, clip_value)
        if self.of_default is not None:
            due = replace(due, of_default=self.of_default.scaled(self.factor))
        # So all ranks refuse or skip a step together.
        return due if self.is_finite_everywhere else RowGradients(due.plan, due.values, math.nan)

    def vector_norm(self, order: float) -> float:
        """Return the norm over all ranks. All ranks call it."""
        here = abs(self.factor) ** (order != 0) * super().vector_norm(order)
        if isinstance(self.sharing.placement, Replica):
            return here
        norms = self.sharing.rank_group.exchange.numbers(f"a norm of order {order}", here)
        if order in (0, math.inf):
            return float(norms.sum() if order == 0 else norms.max())
        return float((norms**order).sum() ** (1.0 / order))

    def _check_no_default(self, got: str) -> None:
        if self.of_default is not None:
            raise UnsupportedError(
                f"elements of gradients of {self.sharing.label} cannot be clipped: rows that are not admitted train "
                "one default row (Admission(default='shared')), and only its sum is known on all processes. Got "
                f"{got}. Nothing has changed. Clip by the norm, torch.nn.utils.clip_grad_norm_, or take "
                "default='first'."
            )

    def clamped(self, low: float | None, high: float | None) -> SharedGradients:
        """Return the gradients with every element of the mean clamped to ``[low, high]``. All ranks call it."""
        self._check_no_default(f"a clamp to [{low}, {high}]")
        placement = self.sharing.placement
        mean = self.scaled(self.factor)
        clamped = mean.with_values(np.clip(mean.values, low, high) * np.float32(placement.ranks))
        squares = self.sharing.rank_group.exchange.numbers("a clamp", clamped.square_norm)
        return SharedGradients.of_ranks(clamped, placement.total(squares), self.sharing)


def _snapped(factor: float) -> float:
    """Round a factor to a power of two that is close: the average of three equal numbers may be inexact."""
    if not math.isfinite(factor):
        return factor
    power = math.copysign(2.0 ** round(math.log2(abs(factor))), factor)
    return power if abs(factor / power - 1.0) < SNAP else factor


@dataclass(eq=False, kw_only=True)
class PositionGradients(RowGradients):
    """Row gradients of this rank, with the gradients of positions that they sum."""

    lookups: tuple[GradientBlock, ...]  # of each lookup, in the order of the backward

    @staticmethod
    def of_sums(sums: RowGradients, lookups: tuple[GradientBlock, ...]) -> PositionGradients:
        return PositionGradients(sums.plan, sums.values, sums.square_norm, lookups=lookups)

    def merge(self, other: RowGradients) -> PositionGradients:
        assert isinstance(other, PositionGradients)  # as the executor sums
        return PositionGradients.of_sums(super().merge(other), self.lookups + other.lookups)
