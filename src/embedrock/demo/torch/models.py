"""Recommenders on any embedding layers: matrix factorization, two models of the NCF paper, and DLRM.

He et al., "Neural Collaborative Filtering", WWW 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from embedrock.demo.model_spec import DlrmSpec, ModelSpec

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


class DLRM(nn.Module):
    """A deep learning recommendation model: features and numbers meet in dot products, and an MLP weighs these.

    Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019.

    Args:
        bags: turns the ids of each feature, (n, bag), into a list of their sums, (n, dim).
        features: how many there are.
        dim: width of all of them.
        numbers: how many numbers an example has.
        bottom: widths of the hidden layers that the numbers go through; one as wide as the rows follows.
        top: widths of the hidden layers that score.
    """

    def __init__(
        self, bags: nn.Module, features: int, dim: int, numbers: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.bags = bags
        self.bottom = _mlp(numbers, (*bottom, dim))
        self._one, self._other = torch.tril_indices(1 + features, 1 + features, -1).unbind()
        self.top = _mlp(dim + len(self._one), top)
        self.score = nn.Linear(top[-1], 1)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return a logit for each example: (n,).

        Args:
            *inputs: the ids of each feature, (n, bag), and the numbers, float32 (n, numbers).
        """
        *ids, numbers = inputs
        described = self.bottom(numbers)
        vectors = torch.stack([described, *self.bags(*ids)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self._one, self._other]
        return self.score(self.top(torch.cat([described, products], 1))).squeeze(-1)


def _mlp(width: int, widths: Sequence[int]) -> nn.Sequential:
    """Return layers of such widths, each with a ReLU."""
    sizes = pairwise([width, *widths])
    return nn.Sequential(*(module for each in sizes for module in (nn.Linear(*each), nn.ReLU())))


MODELS: dict[str, type[MF | GMF | NeuMF]] = {"mf": MF, "gmf": GMF, "neumf": NeuMF}


def make_model(
    spec: ModelSpec, layers: Sequence[nn.Module], together: Callable[[Mapping[str, nn.Module]], nn.Module]
) -> nn.Module:
    """Return a model, given a layer for each of its features, and what makes one module of bags."""
    if isinstance(spec, DlrmSpec):
        names = [feature.name for feature in spec.features]
        bags = together(dict(zip(names, layers, strict=True)))
        return DLRM(bags, len(layers), spec.dim, spec.numbers, spec.bottom, spec.top)
    users, items = layers
    return MODELS[spec.model](users, items, spec.dim)
