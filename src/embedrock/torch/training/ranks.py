"""`Ranks`: transport of messages between the processes of a torch.distributed group."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from embedrock.distributed.messages import WORD, Mail
from embedrock.distributed.near import CircleError, NearRanks
from embedrock.errors import EmbedrockError, OtherRankError, WorkerLostError
from embedrock.system.buffers import buffers
from embedrock.system.shared_memory import MOST

IN_CIRCLES = (
    " If none of them hangs, they may wait for each other in several groups, as not all do the same in the same order."
)
PATIENCE_S = 1.0  # wait for reports of other ranks, once one is lost

_made_beside: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # number of new groups
_near_ones: weakref.WeakSet[Ranks] = weakref.WeakSet()  # of this process


# As `dist.is_initialized`, without calls of Python: each step asks several times.
are_there_groups: Callable[[], Any] = functools.partial(getattr, distributed_c10d._world, "_default_pg")


class Ranks:
    """Transport of messages on a process group of its own, so that messages never mix with those of DDP and others.

    Args:
        parent: group with the ranks and the timeout. All its ranks make a `Ranks` at the same time.
        is_near: if all ranks are on one machine, they read each other's messages in place.

    Attributes:
        rank, ranks: rank of this process, and number of ranks.
        members: global ranks of the processes.
        sent: bytes sent to other ranks.
        waited_s: seconds in collective operations: waiting for ranks and for bytes.
        rounds: number of collective operations so far.
        at: returns the current activity of this rank, in words, for errors.
    """

    def __init__(self, parent: dist.ProcessGroup, is_near: bool = True) -> None:
        self.members, self._timeout = dist.get_process_group_ranks(parent), _timeout_of(parent)
        self.rank, self.ranks = dist.get_rank(parent), len(self.members)
        self.sent = self.rounds = 0
        self.waited_s = 0.0
        self.at: Callable[[], str] = lambda: "the first message"
        self._lost: EmbedrockError | None = None
        self._group: Any = _group_beside(parent, self._timeout)
        self._store: Any = distributed_c10d._get_process_group_store(self._group)
        self._near: NearRanks | None = None
        if is_near:
            self._near = NearRanks.of(self.rank, self.ranks, self.gather)
            _near_ones.add(self)

    def room(self, words: int) -> np.ndarray:
        """Return memory for the messages of the next `swap`, int32 (words,), which then sends them without a copy."""
        return buffers.empty((words,), WORD) if self._near is None else self._near.room(words)

    def swap(self, mail: Mail, sizes: Sequence[int] | None = None) -> list[np.ndarray]:
        """Send each rank its message. Return the messages from all ranks, int32 (words,), valid until the next swap.

        Args:
            mail: the messages.
            sizes: sizes of the received messages in words, where known.

        Raises:
            WorkerLostError: a rank is gone, or did not answer in time.
        """
        if self._near is not None:
            self.sent += mail.flat.nbytes
            return self._near.read(self.swap_rows(self._near.left(mail)))
        known = self.swap_rows(np.array([mail.sizes], np.int64).T)[:, 0].tolist() if sizes is None else sizes
        return self.begin(mail, known)()

    def begin(self, mail: Mail, sizes: Sequence[int]) -> Callable[[], list[np.ndarray]]:
        """Begin a `swap`. Return a function that waits for its end. Operations end in the order in which they begin."""
        theirs = list(sizes)
        theirs[self.rank] = 0
        got = torch.from_numpy(buffers.empty((sum(theirs),), WORD))
        self.sent += mail.flat.nbytes
        end = self._begin(got, torch.from_numpy(mail.flat), theirs, mail.sizes)
        return lambda: [piece.numpy() for piece in end().split(theirs)]

    def swap_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Send each rank its row of int64 (ranks, n). Return the rows received, and this rank's own."""
        near = self._near
        if near is None or numbers[0].nbytes > MOST:
            return self.begin_rows(numbers)()
        self._count_rows(numbers)
        self.rounds += 1
        return self._do(lambda: near.swapped(numbers, self._timeout.total_seconds()))

    def begin_rows(self, numbers: np.ndarray) -> Callable[[], np.ndarray]:
        """Begin a `swap_rows`. Return a function that waits for its end."""
        self._count_rows(numbers)
        got = torch.empty(numbers.shape, dtype=torch.int64)
        end = self._begin(got, torch.from_numpy(np.ascontiguousarray(numbers)))
        return lambda: end().numpy()

    def gather(self, facts: np.ndarray) -> np.ndarray:
        """Send all ranks 8-byte numbers (n,), equally many on each. Return those of all ranks, (ranks, n)."""
        bits = facts.view(np.int64)
        return self.swap_rows(bits[None].repeat(self.ranks, axis=0)).view(facts.dtype)  # faster than an all-gather

    def _begin(self, got: torch.Tensor, sent: torch.Tensor, *sizes: list[int]) -> Callable[[], torch.Tensor]:
        begun = self._do(lambda: dist.all_to_all_single(got, sent, *sizes, group=self._group, async_op=True))
        self.rounds += 1

        def end(keeps: object = sent) -> torch.Tensor:
            self._do(begun.wait)
            return got

        return end

    def _count_rows(self, numbers: np.ndarray) -> None:
        self.sent += numbers.nbytes - numbers[0].nbytes  # a rank sends itself nothing

    def _crossed(self) -> OtherRankError:
        """Return the error of a circular wait, and close the groups where others wait for this rank."""
        waiting = [other for other in _near_ones if other._lost is None and other._near and other._near.is_waited_for]
        after = "".join(f", after {other.at()}" for other in waiting)
        error = OtherRankError(
            f"rank {self.rank} is at {self.at()}, and waits for another one, which should be, too, but waits for it in "
            f"another group{after}, or for ranks that do: so all would wait for ever. All ranks must do the same in "
            "the same order, in all groups that they are in: a table that a batch does not use is looked up by empty "
            "ids. Start all again."
        )
        for other in waiting:
            other._lost = error
            other._close()
        return error

    def leave(self) -> None:
        """Stop communicating: operations of the other ranks with this one raise `WorkerLostError` at once."""
        if self._lost is None:
            self._lost = WorkerLostError(
                f"rank {self.rank} of {self.ranks} had no memory left for {self.at()}, and has left the others. All "
                "have to end: start them again, with smaller batches or more memory."
            )
            with contextlib.suppress(RuntimeError):  # the others notice anyway, when the connections end
                self._store.set(_at(self.rank), f"{self.at()}, for which it had no memory left")
            self._close()
            dist.destroy_process_group(self._group)
            self._group = None

    def _close(self) -> None:
        """Close the messages in place, so that waiting ranks notice at once."""
        if self._near is not None:
            self._near.close()

    def _do(self, operation: Callable[[], Any]) -> Any:
        """Run a part of a collective operation. After a failure, the group is unusable."""
        if self._lost is not None:
            raise self._lost
        began = time.perf_counter()
        try:
            done = operation()
            self.waited_s += time.perf_counter() - began
            return done
        except CircleError as circle:
            self._lost = self._crossed()
            self._close()
            raise self._lost from circle
        except (RuntimeError, OSError) as error:
            self._close()
            reason = " ".join(str(error).split()).rpartition("] ")[2].partition(" This is typically")[0]
            is_late = "timed out" in str(error).lower()
            self._lost = WorkerLostError(
                f"rank {self.rank} of {self.ranks} waited for another one that failed, is gone or did not answer "
                f"within {self._timeout}: {reason.rstrip('.')}. {self._each_was_at()}. The others cannot go on without "
                "it, and this process has to end, too: start all again, as torchrun --max-restarts does. How long a "
                f"rank is waited for is the timeout of dist.init_process_group.{IN_CIRCLES if is_late else ''}"
            )
            raise self._lost from error

    def _each_was_at(self) -> str:
        """Return the last activity of each rank, as far as the group's store has it."""
        activities = {self.rank: self.at()}
        reader = threading.Thread(target=self._read_each, args=(activities,), name="embedrock-lost", daemon=True)
        reader.start()  # the store of a rank that hangs does not answer
        reader.join(2 * PATIENCE_S)
        found = dict(activities)
        silent = [f"rank {rank}" for rank in range(self.ranks) if rank not in found]
        was_at = "; ".join(f"rank {rank} was at {found[rank]}" for rank in sorted(found))
        return was_at + (f"; of {', '.join(silent)} nothing was heard" if silent else "")

    def _read_each(self, activities: dict[int, str]) -> None:
        until, missing = time.monotonic() + PATIENCE_S, set(range(self.ranks)) - {self.rank}
        try:
            self._store.set(_at(self.rank), self.at())
            while missing and time.monotonic() < until:
                for rank in [rank for rank in missing if self._store.check([_at(rank)])]:
                    activities[rank] = self._store.get(_at(rank)).decode()
                    missing.remove(rank)
                time.sleep(0.02)
        except RuntimeError:  # the store was on the lost rank
            return


def _group_beside(parent: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """Make another group of the same ranks. All its ranks call it at the same time, other ranks do not."""
    if parent is dist.group.WORLD:
        return _made(None, timeout)
    # PyTorch names such a group by its ranks, and by the number of groups of a process. So every rank joins equally
    # many. They exchange the numbers through a store, because messages of the parent may need a GPU.
    members, own = dist.get_process_group_ranks(parent), dist.get_rank()
    _made_beside[parent] = nth = _made_beside.get(parent, 0) + 1
    store: Any = distributed_c10d._get_process_group_store(parent)
    count, key = len(distributed_c10d._world.pg_names), f"embedrock, group {nth}, groups of rank"
    store.set(f"{key} {own}", str(count))
    for _ in range(count, max(int(store.get(f"{key} {rank}")) for rank in members)):
        _made([own], timeout)
    return _made(members, timeout)


def _made(members: list[int] | None, timeout: timedelta) -> Any:
    return dist.new_group(members, timeout, "gloo", use_local_synchronization=members is not None)


def _at(rank: int) -> str:
    return f"embedrock rank {rank} was at"


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a group, preferably that of its CPU backend."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(device)).options._timeout
    return timedelta(minutes=30)


def group_of(given: Any) -> dist.ProcessGroup | None:
    """Return the group of processes that train together; None without a group, or alone in it.

    Args:
        given: a group. Anything else means the group of all processes.
    """
    if not are_there_groups():
        return None
    group: Any = given if isinstance(given, dist.ProcessGroup) else dist.group.WORLD
    return group if group is not None and group.size() > 1 else None
