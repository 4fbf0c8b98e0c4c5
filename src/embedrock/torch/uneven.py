"""`uneven`: ranks with different numbers of batches, or evaluation on some ranks only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from embedrock.errors import WorkerLostError
from embedrock.torch.training.parameters import handles
from embedrock.torch.training.sharing import RankGroup, SharedTable


@contextmanager
def uneven(model: nn.Module) -> Iterator[None]:
    """Allow each rank its own number of lookups and training steps. All ranks enter and leave the block.

    A rank that leaves the block goes on at once. A thread then serves the other ranks until all have left. It looks up
    rows for them, sums their gradients, and makes their steps on its own rows. The next use of the model or its
    optimizers on that rank waits for the thread. A rank that has left adds no gradients to these steps.

    Inside, each lookup, backward and step takes two more messages, and `ert.prefetch` sends no ids ahead. Pending
    gradients are dropped on all ranks when the block ends. With one process, `uneven` does nothing.

    Args:
        model: model with embedding layers, with or without DistributedDataParallel.

    Raises:
        OtherRankError: inside the block, a rank failed, or does something else than the others.
        WorkerLostError: a rank is gone.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> model = ert.Embedding(10**9, 4)  # with sharded=True, in processes that torchrun starts
        >>> with ert.uneven(model):  # with net.join(), ert.uneven(model): where net is DistributedDataParallel(model)
        ...     for ids in torch.arange(6).split(2):
        ...         out = model(ids)
    """
    groups: dict[RankGroup, list[SharedTable]] = {}
    for handle in handles(model):
        if (sharing := handle.sharing) is not None:
            groups.setdefault(sharing.rank_group, []).append(sharing)
    for rank_group in groups:
        rank_group.exchange.uneven.enter()
    try:
        yield
    except WorkerLostError:
        raise
    except BaseException as error:
        for rank_group in groups:
            rank_group.exchange.uneven.fail(error)
        raise
    for rank_group, members in groups.items():
        rank_group.leave(members)
