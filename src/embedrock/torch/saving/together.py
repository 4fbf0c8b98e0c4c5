"""Several processes that save and load a model together: each its parts of tables; the first one has the files."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from torch import nn

from embedrock.errors import UnsupportedError
from embedrock.fronts.checkpoints import Checkpoint
from embedrock.shards.exchange import Exchange
from embedrock.torch.training.parameters import handles
from embedrock.torch.training.ranks import own_rank

Result = TypeVar("Result")


class SavingRanks:
    """The processes that share tables of a model, or this one alone.

    Args:
        model: of all of them.

    Attributes:
        members: which they are, by their ranks among all processes.
    """

    def __init__(self, model: nn.Module) -> None:
        found = {sharing.rank_group for handle in handles(model) if (sharing := handle.sharing) is not None}
        if len(found) > 1:
            raise UnsupportedError(
                f"tables of one model that is saved must be shared by the same processes: got {len(found)} groups of "
                "them. Save the models of each group apart."
            )
        rank_group = next(iter(found), None)
        self._exchange: Exchange | None = None if rank_group is None else rank_group.exchange
        self.members: Sequence[int] = (own_rank(),) if rank_group is None else rank_group.ranks.members

    @property
    def is_alone(self) -> bool:
        """Whether there are no others."""
        return self._exchange is None

    @property
    def rank(self) -> int:
        """Of this process."""
        return 0 if self._exchange is None else self._exchange.transport.rank

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return 1 if self._exchange is None else self._exchange.transport.ranks

    @property
    def is_first(self) -> bool:
        """Whether this process has the files."""
        return self._exchange is None or self._exchange.transport.rank == 0

    def do(self, what: str, act: Callable[[], Result]) -> Result:
        """Do something on all processes. What one of them raises is an error on all."""
        if self._exchange is None:
            return act()
        done: list[Result] = []

        def told() -> np.ndarray:
            done.append(act())
            return np.empty(0, np.int64)

        self._exchange.tell(what, told)
        return done[0]

    def token(self, what: str) -> str:
        """Return 8 hexadecimal digits that the first process draws."""
        own = np.array([secrets.randbits(32)], np.int64)
        drawn = own if self._exchange is None else self._exchange.tell(what, lambda: own)[0]
        return f"{int(drawn[0]):08x}"

    def same(self, made: Checkpoint) -> Checkpoint:
        """Return the checkpoint that the first process names."""
        return made if self._exchange is None else self._of_first("the name of a checkpoint", lambda: [made], made)[0]

    def last(self, find: Callable[[], list[Checkpoint]], like: Checkpoint) -> list[Checkpoint]:
        """Return the checkpoints that the first process finds."""
        return find() if self._exchange is None else self._of_first("the checkpoints that there are", find, like)

    def _of_first(self, what: str, find: Callable[[], list[Checkpoint]], like: Checkpoint) -> list[Checkpoint]:
        assert self._exchange is not None

        def told() -> np.ndarray:
            found = find() if self.is_first else []
            return np.array([[each.step, int(each.token, 16)] for each in found], np.int64).reshape(-1)

        numbers = self._exchange.tell(what, told)[0].reshape(-1, 2).tolist()
        return [like._replace(step=step, token=f"{token:08x}") for step, token in numbers]
