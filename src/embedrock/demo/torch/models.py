"""Recommenders on any embedding layers: matrix factorization, and two models of the NCF paper.

He et al., "Neural Collaborative Filtering", WWW 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MLP_SHRINKS = 3  # hidden layers, each half as wide as what it is given


class MF(nn.Module):
    """Matrix factorization: the inner product of user and item, and a bias that is read off each row.

    Args:
        users, items: layers that turn ids of shape S into S + (dim,).
        dim: width of both.
    """

    def __init__(self, users: nn.Module, items: nn.Module, dim: int) -> None:
        super().__init__()
        self.users, self.items = users, items
        self.user_bias, self.item_bias = nn.Linear(dim, 1), nn.Linear(dim, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return a logit for each pair.

        Args:
            users, items: ids whose shapes broadcast, so that one user can be scored against many items: (n, 1)
                and (n, m).

        Returns:
            Their broadcast shape.
        """
        p, q = self.users(users), self.items(items)
        return (p * q).sum(-1) + (self.user_bias(p) + self.item_bias(q)).squeeze(-1)


class GMF(nn.Module):
    """Generalized matrix factorization: a learned weighing of the product of user and item.

    Args:
        users, items, dim: as for `MF`.
    """

    def __init__(self, users: nn.Module, items: nn.Module, dim: int) -> None:
        super().__init__()
        self.users, self.items = users, items
        self.score = nn.Linear(dim, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return a logit for each pair, as `MF` does."""
        return self.score(self.users(users) * self.items(items)).squeeze(-1)


class NeuMF(nn.Module):
    """Neural matrix factorization: `GMF` and a small MLP side by side, weighed together.

    The paper gives either part embeddings of its own. Here they are the two halves of one row, which is the same
    model, because Adam treats each column by itself. The paper's ReLU is a SiLU here: a ReLU near 0 makes a
    visible difference of the last bit of a sum, and two runs that should agree drift apart after some 1000 steps.

    Args:
        users, items, dim: as for `MF`; `dim` must be a multiple of 8.
    """

    def __init__(self, users: nn.Module, items: nn.Module, dim: int) -> None:
        super().__init__()
        self.users, self.items = users, items
        layers: list[nn.Module] = []
        for shrink in range(MLP_SHRINKS):
            layers += [nn.Linear(dim >> shrink, dim >> (shrink + 1)), nn.SiLU()]
        self.mlp = nn.Sequential(*layers)
        self.score = nn.Linear(dim // 2 + (dim >> MLP_SHRINKS), 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return a logit for each pair, as `MF` does."""
        (user_gmf, user_mlp), (item_gmf, item_mlp) = (
            self.users(users).chunk(2, -1),
            self.items(items).chunk(2, -1),
        )
        deep = self.mlp(torch.cat(torch.broadcast_tensors(user_mlp, item_mlp), -1))
        return self.score(torch.cat([user_gmf * item_gmf, deep], -1)).squeeze(-1)


MODELS: dict[str, type[MF | GMF | NeuMF]] = {"mf": MF, "gmf": GMF, "neumf": NeuMF}
