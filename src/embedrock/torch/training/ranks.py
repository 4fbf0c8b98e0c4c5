"""`Ranks`: the processes of a group of torch.distributed, as what carries messages between them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from embedrock.errors import WorkerLostError
from embedrock.machine.buffers import buffers
from embedrock.shards.messages import WORD, joined

PATIENCE_S = 1.0  # for what other ranks were at, once one is lost

are_there_groups: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False


class Ranks:
    """A `Transport`: carries messages on a group of its own, so that nothing meets with what DDP and others send.

    Args:
        parent: the group whose ranks, and whose timeout, it has. All of them make one at the same time.

    Attributes:
        rank, ranks: of this process, and how many there are.
        sent: bytes that went to other ranks.
        rounds: collective operations so far.
        at: what this rank is at, in words, for errors.
    """

    def __init__(self, parent: dist.ProcessGroup) -> None:
        members, self._timeout = dist.get_process_group_ranks(parent), _timeout_of(parent)
        self.rank, self.ranks = dist.get_rank(parent), len(members)
        self.sent = self.rounds = 0
        self.at = "the first message"
        self._lost: WorkerLostError | None = None
        self._group: Any = dist.new_group(members, self._timeout, "gloo", use_local_synchronization=True)
        self._store: Any = distributed_c10d._get_process_group_store(self._group)

    def swap(self, parts: Sequence[np.ndarray], sizes: Sequence[int] | None = None) -> list[np.ndarray]:
        """Give each rank its message; return what each has for this one: see `Transport.swap`."""
        return self.begin(parts, self._sizes([len(part) for part in parts]) if sizes is None else sizes)()

    def begin(self, parts: Sequence[np.ndarray], sizes: Sequence[int]) -> Callable[[], list[np.ndarray]]:
        """Begin to do what `swap` does; return what waits until it is done. What is begun later ends later."""
        ours, theirs = [len(part) for part in parts], list(sizes)
        got, message = torch.from_numpy(buffers.empty((sum(theirs),), WORD)), torch.from_numpy(joined(parts))
        begun = self._do(lambda: dist.all_to_all_single(got, message, theirs, ours, group=self._group, async_op=True))
        self._count_sent(ours, WORD)

        def end(keeps: object = message) -> list[np.ndarray]:
            self._do(begun.wait)
            return [piece.numpy() for piece in got.split(theirs)]

        return end

    def _sizes(self, ours: list[int]) -> list[int]:
        theirs = torch.empty(self.ranks, dtype=torch.int64)
        self._do(lambda: dist.all_to_all_single(theirs, torch.tensor(ours), group=self._group))
        self._count_sent([1] * self.ranks, np.int64)
        return theirs.tolist()

    def gather(self, facts: np.ndarray) -> list[np.ndarray]:
        """Give all ranks an array; return that of each: see `Transport.gather`."""
        ours = torch.from_numpy(np.ascontiguousarray(facts))
        theirs = torch.empty((self.ranks * len(ours), *ours.shape[1:]), dtype=ours.dtype)
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # until 2.13
        self._do(lambda: getattr(dist, name)(theirs, ours, group=self._group))
        self._count_sent([ours.numel()] * self.ranks, facts.dtype)
        return [part.numpy() for part in theirs.split(len(ours))]

    def leave(self) -> None:
        """Carry no more, and close the connections: see `Transport.leave`."""
        if self._lost is None:
            self._lost = WorkerLostError(
                f"rank {self.rank} of {self.ranks} had no memory left for {self.at}, and has left the others. All "
                "have to end: start them again, with smaller batches or more memory."
            )
            with contextlib.suppress(RuntimeError):  # the others are told all the same, by the end of the connections
                self._store.set(_at(self.rank), f"{self.at}, for which it had no memory left")
            dist.destroy_process_group(self._group)
            self._group = None

    def _count_sent(self, elements: Sequence[int], dtype: Any) -> None:
        self.rounds += 1
        self.sent += (sum(elements) - elements[self.rank]) * np.dtype(dtype).itemsize

    def _do(self, operation: Callable[[], Any]) -> Any:
        """Do a part of a collective operation. One that failed leaves the group of no more use."""
        if self._lost is not None:
            raise self._lost
        try:
            return operation()
        except RuntimeError as error:
            reason = " ".join(str(error).split()).rpartition("] ")[2].partition(" This is typically")[0]
            self._lost = WorkerLostError(
                f"rank {self.rank} of {self.ranks} waited for another one that failed, is gone or did not answer "
                f"within {self._timeout}: {reason.rstrip('.')}. {self._each_was_at()}. The others cannot go on without "
                "it, and this process has to end, too: start all again, as torchrun --max-restarts does. How long a "
                "rank is waited for is the timeout of dist.init_process_group."
            )
            raise self._lost from error

    def _each_was_at(self) -> str:
        """Return what ranks were at as they gave up, as far as they say so in the store of the group."""
        told = {self.rank: self.at}
        asking = threading.Thread(target=self._ask_each, args=(told,), name="embedrock-lost", daemon=True)
        asking.start()  # a store of a rank that hangs answers no one
        asking.join(2 * PATIENCE_S)
        found = dict(told)
        silent = [f"rank {rank}" for rank in range(self.ranks) if rank not in found]
        was_at = "; ".join(f"rank {rank} was at {found[rank]}" for rank in sorted(found))
        return was_at + (f"; of {', '.join(silent)} nothing was heard" if silent else "")

    def _ask_each(self, told: dict[int, str]) -> None:
        until, missing = time.monotonic() + PATIENCE_S, set(range(self.ranks)) - {self.rank}
        try:
            self._store.set(_at(self.rank), self.at)
            while missing and time.monotonic() < until:
                for rank in [rank for rank in missing if self._store.check([_at(rank)])]:
                    told[rank] = self._store.get(_at(rank)).decode()
                    missing.remove(rank)
                time.sleep(0.02)
        except RuntimeError:  # the store went with the rank that is lost
            return


def _at(rank: int) -> str:
    return f"embedrock rank {rank} was at"


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a group waits, that of its backend for the CPU if it has one."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return timedelta(minutes=30)


def group_of(given: Any) -> dist.ProcessGroup | None:
    """Return the group of processes that train together, None where there is none, or this process is alone in it.

    Args:
        given: a group; anything else stands for that of all processes.
    """
    if not are_there_groups():
        return None
    group: Any = given if isinstance(given, dist.ProcessGroup) else dist.group.WORLD
    return group if group is not None and group.size() > 1 else None
