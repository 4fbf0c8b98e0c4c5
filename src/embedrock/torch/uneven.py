"""`uneven`: ranks with different numbers of batches, or of which only some evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from embedrock.errors import WorkerLostError
from embedrock.torch.training.parameters import handles
from embedrock.torch.training.sharing import RankGroup, SharedTable


@contextmanager
def uneven(model: nn.Module) -> Iterator[None]:
    """Let each rank look up and train as often as it has batches. All ranks enter and leave the block.

    A rank that leaves it goes on at once, and a thread does what the others need of it: it looks rows up for them, adds
    up their gradients and makes their steps with its own rows, until all have left. What the model or its optimizers
    do next on that rank waits for this. The steps are those of ranks that have left, with no gradients of theirs.

    Inside, each lookup, backward and step is announced in two more messages, and `ert.prefetch` sends no ids ahead.
    Gradients that wait when the block ends are dropped, on all ranks. Of one process it is nothing at all.

    Args:
        model: with embedding layers; under DistributedDataParallel or not.

    Raises:
        OtherRankError: inside, a rank has failed, or does something else than the others.
        WorkerLostError: a rank is gone.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> model = ert.Embedding(10**9, 4)  # with sharded=True, in processes that torchrun starts
        >>> with ert.uneven(model):  # with net.join(), ert.uneven(model): where net is DistributedDataParallel(model)
        ...     for ids in torch.arange(6).split(2):
        ...         out = model(ids)
    """
    crews: dict[RankGroup, list[SharedTable]] = {}
    for handle in handles(model):
        if (sharing := handle.sharing) is not None:
            crews.setdefault(sharing.rank_group, []).append(sharing)
    for rank_group in crews:
        rank_group.exchange.uneven.enter()
    try:
        yield
    except WorkerLostError:
        raise
    except BaseException as error:
        for rank_group in crews:
            rank_group.exchange.uneven.fail(error)
        raise
    for rank_group, members in crews.items():
        rank_group.leave(members)
