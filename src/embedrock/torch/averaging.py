"""`average`: a model whose weights and rows are averages of those of another one, as `AveragedModel` of PyTorch's."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from embedrock.errors import ArgumentError
from embedrock.fronts.arguments import is_number
from embedrock.torch.training.averages import AveragedHandle
from embedrock.torch.training.parameters import dense_parameters, handles


class AveragedModel(nn.Module):
    """A model of averages, which `average` makes: call it as the model.

    Attributes:
        module: the model with averages in the place of weights and rows. Its rows do not train. Its ``state_dict()``
            has averages of the rows that were stepped, and can be loaded into a model with rows in RAM.
        n_averaged: how many updates there were.
    """

    n_averaged: Tensor

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        super().__init__()
        if decay is not None and not (is_number(decay) and 0 <= decay <= 1):
            raise ArgumentError(f"`decay` of ert.average must be a number from 0 to 1, or None: got {decay!r}.")
        averaged = {handle: AveragedHandle.of(handle, decay) for handle in handles(model)}
        memo: dict[int, Any] = {id(handle): mine for handle, mine in averaged.items()}
        memo |= {id(handle.table): handle.table for handle in averaged}  # whose rows are not copied
        self.module = copy.deepcopy(model, memo).requires_grad_(False)
        self._averages = [mine.average for mine in averaged.values()]
        self._average_dense = (
            swa_utils.get_swa_multi_avg_fn() if decay is None else swa_utils.get_ema_multi_avg_fn(decay)
        )
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device="cpu"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with averages."""
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the weights and rows of the model as they are now into the averages. Call it after each step.

        It costs what the dense weights do, and the rows that were stepped since the last update.

        Raises:
            UnsupportedError: rows were changed by something else than an optimizer's step.
        """
        for average in self._averages:
            average.update()
        mine = [parameter.detach() for parameter in dense_parameters(self.module)]
        theirs = [t.detach().to(m.device) for m, t in zip(mine, dense_parameters(model), strict=True)]
        if self.n_averaged == 0:
            for averaged, parameter in zip(mine, theirs, strict=True):
                averaged.copy_(parameter)
        elif mine:
            self._average_dense(mine, theirs, self.n_averaged)
        for averaged, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            averaged.copy_(buffer)
        self.n_averaged += 1

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for average in self._averages:  # before their rows come
            average.updates = int(self.n_averaged)


def average(model: nn.Module, decay: float | None = 0.999) -> AveragedModel:
    """Return a model of averages over training: of dense weights, and of rows, which PyTorch's own cannot reach.

    The averages are those of `torch.optim.swa_utils.AveragedModel` over all weights of all rows. An update costs what
    the rows do that were stepped since the one before, and RAM is needed for rows that were ever stepped.

    Args:
        model: with embedding layers; whatever steps their rows must be optimizers of Embedrock's.
        decay: what each update keeps of an exponential average (EMA); None: all updates count the same (SWA).

    Raises:
        ArgumentError: `decay` is not a number from 0 to 1.
        UnsupportedError: rows that change without a step: with ``dense=True``, ``max_norm``, an eviction or the shared
            row of an admission.

    Example:
        >>> import embedrock.torch as ert
        >>> model = nn.Sequential(ert.Embedding(10**9, 4), nn.Linear(4, 1))
        >>> optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=1e-3)
        >>> averaged = ert.average(model, decay=0.99)
        >>> for ids in torch.arange(6).reshape(3, 2):
        ...     model(ids).sum().backward()
        ...     optimizer.step(); optimizer.zero_grad()
        ...     averaged.update_parameters(model)
        >>> averaged(torch.tensor([3])).shape
        torch.Size([1, 1])
    """
    return AveragedModel(model, decay)
