"""Tables that several processes share: rows come from their owners, and gradients go there once a backward is over."""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd import Variable

from embedrock.batch.gradients import RowGradients
from embedrock.batch.ids import check_ids
from embedrock.batch.plan import Plan, make_plan
from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.shards import stages
from embedrock.shards.exchange import Exchange
from embedrock.shards.owners import Placement, Replica, Shard
from embedrock.shards.stages import Block
from embedrock.table.table import Table, rows_of
from embedrock.torch.training.backward import Backward
from embedrock.torch.training.host_side import HostGradients, HostSide
from embedrock.torch.training.ranks import Ranks, group_of
from embedrock.torch.training.shared_gradients import SharedGradients

if TYPE_CHECKING:
    from embedrock.torch.training.handle import Handle

# What queues callbacks in a backward runs them in turn. DDP's last one, which puts the means of gradients where the
# gradients are, is queued by another: so ours queues itself as often before it does anything.
TURNS = 3

HOLDER = re.compile(r"rank (\d+)")
Sharded = Any  # bool, "rank N" or a ProcessGroup

_crews: weakref.WeakKeyDictionary[Any, Crew] = weakref.WeakKeyDictionary()

_made: dict[str, int] = {}  # how many tables had a handle, by what tells them apart


def check_sharded(layer: str, sharded: Sharded) -> None:
    """Raise `ArgumentError` unless `sharded` of a layer says who has which rows."""
    is_holder = isinstance(sharded, str) and HOLDER.fullmatch(sharded) is not None
    if not (isinstance(sharded, bool) or is_holder or isinstance(sharded, dist.ProcessGroup)):
        raise ArgumentError(
            f"`sharded` of {layer} must be True (rows are shared out over all ranks), 'rank 0' (that one has all "
            f"rows), a ProcessGroup (its ranks share them) or False (each rank has all rows): got {sharded!r}."
        )


def holder_of(sharded: str) -> int:
    """Return which rank has all rows."""
    return int(sharded.removeprefix("rank "))


class Crew:
    """The ranks of a group and the tables that they share.

    Args:
        group: of torch.distributed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = Ranks(group)
        self.exchange = Exchange(self.ranks)
        self._members: weakref.WeakValueDictionary[int, Sharing] = weakref.WeakValueDictionary()
        self._arrived: weakref.WeakKeyDictionary[Backward, dict[Sharing, Block]] = weakref.WeakKeyDictionary()

    @staticmethod
    def of(group: dist.ProcessGroup) -> Crew:
        """Return that of a group. All ranks ask for it first at the same time."""
        if group not in _crews:
            _crews[group] = Crew(group)
        return _crews[group]

    def join(self, sharing: Sharing) -> None:
        """Take in a table."""
        self._members[sharing.key] = sharing

    def arrive(self, sharing: Sharing, block: Block) -> None:
        """Take what a backward brings for a table; all go to their owners in one exchange, once it is over."""
        run = Backward.current()
        if run not in self._arrived:
            self._arrived[run] = {}
            _queue(lambda: self._exchange(run), TURNS)
        self._arrived[run][sharing] = block

    def _exchange(self, run: Backward) -> None:
        arrived = {sharing.key: (sharing, block) for sharing, block in self._arrived.pop(run).items()}
        for member, verdict in self.exchange.share(arrived, self._members.get):
            assert isinstance(member, Sharing)
            member.show(SharedGradients.of_ranks(verdict, self.exchange, member.placement))


def _queue(action: Any, turns: int) -> None:
    """Let autograd do something when the backward that runs is over, and what others have queued is done."""
    later = action if not turns else lambda: _queue(action, turns - 1)
    Variable._execution_engine.queue_callback(later)


class Sharing:
    """A handle's table as the ranks of a group share it: a `Member` of their exchange.

    Args:
        handle: which must not be kept alive.
        group: of the ranks.

    Attributes:
        group: of the ranks.
        side: where its rows are looked up: at their owners, or here.
    """

    def __init__(self, handle: Handle, group: dist.ProcessGroup) -> None:
        self._handle, self.group = weakref.ref(handle), group
        self._crew = Crew.of(group)
        self.placement = _placement(handle, self._crew.ranks)
        known_as = f"{handle.known_as} {self.placement._replace(rank=0)}"
        self.key = int.from_bytes(hashlib.blake2b(known_as.encode(), digest_size=8).digest(), "little") >> 1
        self._crew.join(self)
        self.side = HostSide(handle.table)
        if isinstance(self.placement, Shard):
            self.side = ShardSide(handle.table, self)
            rows_of(handle.table).owns = self.placement.owns

    @property
    def exchange(self) -> Exchange:
        """What all tables of the group go by."""
        return self._crew.exchange

    @property
    def handle(self) -> Handle:
        """Of the rows."""
        handle = self._handle()
        assert handle is not None  # which has this, and is in use
        return handle

    @property
    def label(self) -> str:
        """What error messages call it."""
        return f"{self.handle.label} ({self.handle.known_as})"

    @property
    def table(self) -> Table:
        """The rows that are here."""
        return self.handle.table

    # ------------------------------------------------------------ lookups

    def rows(self, plan: Plan) -> np.ndarray:
        """Return each row of a plan once, from whoever has it: float32 (unique, dim)."""
        return self._crew.exchange.rows([self], [plan.ids])[0]

    def refuse(self, error: Exception) -> None:
        """Refuse a lookup on the other ranks, as here."""
        self._crew.exchange.refuse([self], error)

    # ------------------------------------------------------------ gradients

    def arrive(self, grads: HostGradients) -> None:
        """Take what a backward brings, summed by row."""
        self._crew.arrive(self, Block(grads.plan.ids, grads.values))

    def fold(self, blocks: Sequence[Block]) -> RowGradients:
        """Return the sum of what waits and of blocks, in their order; raise what its step would raise."""
        handle = self.handle
        waits = handle.pending.grads if handle.grad is not None else None
        before = [Block(waits.plan.ids, waits.sums)] if isinstance(waits, SharedGradients) else []
        folded = stages.fold([*before, *blocks], handle.table.plan)
        if handle.table.mode == "w":
            handle.table.check_step(folded)  # or a step would be made by those that have room, and no others
        return folded

    def show(self, grads: SharedGradients) -> None:
        """Let the handle's gradient stand for what all ranks have brought."""
        self.handle.show(grads)


def _placement(handle: Handle, ranks: Ranks) -> Placement:
    sharded = handle.sharded
    if sharded is False:
        return Replica(ranks.rank, ranks.ranks)
    holder = holder_of(sharded) if isinstance(sharded, str) else None
    if holder is not None and holder >= ranks.ranks:
        raise ArgumentError(f"`sharded` of {handle.label} must be a rank below {ranks.ranks}: got {sharded!r}.")
    if handle.max_norm is not None:
        raise UnsupportedError(
            f"`max_norm` of {handle.label} does not go with rows that several processes share: a lookup would change "
            "them on one only. Leave it out, or clip by a constraint of your own."
        )
    return Shard(ranks.rank, ranks.ranks, holder)


def known_as(table: Table) -> str:
    """Return what a table that gets a handle is known by to other processes, which make the same ones in turn."""
    spec = table.spec
    name = "" if table.name is None else f"{table.name!r}, "
    told = f"{name}{spec.rows} x {spec.dim} {spec.dtype}, seed {spec.seed}, {type(spec.init).__name__}"
    _made[told] = nth = _made.get(told, 0) + 1
    return told if nth == 1 else f"{told}, number {nth}"


class ShardSide(HostSide):
    """Rows that their owners read, and the CPU: a `RowSide`. All ranks look up at the same time.

    Args:
        table: the rows that are here.
        sharing: with the others.
    """

    def __init__(self, table: Table, sharing: Sharing) -> None:
        super().__init__(table)
        self._sharing = sharing

    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows for no gradient: float32 ``ids.shape + (dim,)``."""
        return self.read(self.plan(ids, trains=False))

    def plan(self, ids: Tensor, trains: bool) -> Plan:
        """Decide what a batch of ids needs."""
        try:
            return make_plan(check_ids(ids.cpu().numpy(), self.table.rows, self.table.subject))
        except Exception as error:
            self._sharing.refuse(error)
            raise

    def read(self, plan: Plan) -> Tensor:
        """Return the row of each position: float32 ``plan.shape + (dim,)``."""
        rows = np.take(self.read_rows(plan), plan.inverse, axis=0, mode="clip")
        return torch.from_numpy(rows.reshape(*plan.shape, self.table.dim))

    def read_rows(self, plan: Plan) -> np.ndarray:
        """Return each row once: float32 (unique, dim)."""
        return self._sharing.rows(plan)


def sharing_of(handle: Handle, earlier: Sharing | None) -> Sharing | None:
    """Return how the processes of a group share a handle's table; None where this process trains alone.

    Args:
        handle: of the table.
        earlier: what this returned before.
    """
    group = group_of(handle.sharded)
    if group is None:
        return None
    return earlier if earlier is not None and earlier.group is group else Sharing(handle, group)
