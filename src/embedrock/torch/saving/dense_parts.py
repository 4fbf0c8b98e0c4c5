"""Sharded dense tensors (DTensors of FSDP2 or tensor parallelism) in checkpoints, which hold full tensors."""

from __future__ import annotations

import copy
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from embedrock.distributed.exchange import Exchange
from embedrock.errors import UnsupportedError
from embedrock.frontend.checkpoints import Checkpoint
from embedrock.torch.training.parameters import handles
from embedrock.torch.training.ranks import are_there_groups


def is_part(tensor: Any) -> bool:
    """Return whether a tensor is sharded over processes. A DTensor's module is imported already."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_parts(model: nn.Module, optimizers: Mapping[str, Any], ranks: Collection[int]) -> None:
    """Raise `UnsupportedError` unless the saving processes, by global rank, can gather the sharded dense tensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(each, fsdp.FullyShardedDataParallel) for each in model.modules()):
        raise UnsupportedError(
            "ert.save cannot put together what FullyShardedDataParallel (FSDP1) has made of dense weights: processes "
            "have flat parts of them, and of their optimizer state. Call torch.distributed.fsdp.fully_shard on those "
            "layers instead."
        )
    for name, tensor, parameter in _parts(model, optimizers):
        meant = set(tensor.device_mesh.mesh.flatten().tolist())
        if not meant <= set(ranks):
            raise UnsupportedError(
                f"{name} is in parts (DTensor), which ranks {sorted(meant)} have, and ert.save is called by ranks "
                f"{sorted(ranks)}, as those share the tables: it cannot put them together. Share the tables over the "
                "same ranks, by sharded= of their layers, or make the mesh of these."
            )
        if parameter is not None and tensor.shape != parameter.shape:
            raise UnsupportedError(
                f"{name} is in parts (DTensor) of another shape than its parameter, {tuple(tensor.shape)}, not "
                f"{tuple(parameter.shape)}: ert.load could not tell whose they are. Leave this optimizer out of "
                "ert.save, and save it by torch.distributed.checkpoint; or take torch.optim.AdamW."
            )


def _parts(model: nn.Module, optimizers: Mapping[str, Any]) -> Iterator[tuple[str, Any, Tensor | None]]:
    """Iterate over sharded tensors: name, tensor, and for optimizer state its parameter."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_part(tensor):
            yield f"{name!r}", tensor, None
    for part, optimizer in optimizers.items():
        for parameter, key, value in _state_of(optimizer):
            if is_part(value):
                yield f"{key!r} of optimizer {part}", value, parameter


def _state_of(optimizer: Any) -> Iterator[tuple[Tensor, str, Any]]:
    state = getattr(optimizer, "state", None)
    for parameter, values in list(state.items()) if isinstance(state, Mapping) else ():
        if isinstance(parameter, Tensor) and isinstance(values, Mapping):
            yield from ((parameter, key, value) for key, value in values.items())


def whole(state: Any, is_kept: bool) -> Any:
    """Return a state with full tensors on the CPU in place of shards; None in place of each one unless `is_kept`.

    All processes call it with equal structures.
    """
    if is_part(state):
        made = state.detach().full_tensor()
        return made.cpu() if is_kept else None
    if isinstance(state, MutableMapping):
        made = copy.copy(state)  # keeps the versions of modules that PyTorch attaches
        made.update({key: whole(value, is_kept) for key, value in state.items()})
        return made
    if type(state) in (list, tuple):
        return type(state)(whole(value, is_kept) for value in state)
    return state


def as_parts(model: nn.Module, states: dict[str, Any]) -> dict[str, Any]:
    """Return a model's state that loads into shards: this process takes its shard of each full tensor."""
    own = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    made = copy.copy(states)
    made.update({key: _spread(value, own.get(key)) for key, value in states.items()})
    return made


def take_parts(optimizer: Any) -> None:
    """Shard the full tensors of a loaded optimizer state, as its parameters are sharded."""
    for parameter, key, value in list(_state_of(optimizer)):
        optimizer.state[parameter][key] = _spread(value, parameter)


def _spread(value: Any, like: Any) -> Any:
    """Return a full tensor of all processes, sharded like another tensor of its shape. Other values stay."""
    if not is_part(like) or not isinstance(value, Tensor) or is_part(value) or value.shape != like.shape:
        return value
    tensors = sys.modules["torch.distributed.tensor"]
    mesh = like.device_mesh
    value = value.to(like.to_local().device)
    everywhere = tensors.DTensor.from_local(value, mesh, [tensors.Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, like.placements)


Result = TypeVar("Result")


class SavingRanks:
    """Processes that share tables of a model, by their global ranks `members`; or this process alone.

    The one that `is_first` writes the files.
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
        alone = dist.get_rank() if are_there_groups() else 0
        self.members: Sequence[int] = (alone,) if rank_group is None else rank_group.ranks.members
        self.rank, self.ranks = (0, 1) if rank_group is None else (rank_group.ranks.rank, rank_group.ranks.ranks)
        self.is_alone, self.is_first = self._exchange is None, self.rank == 0

    def do(self, what: str, act: Callable[[], Result]) -> Result:
        return act() if self._exchange is None else self._exchange.do(what, act)

    def token(self, what: str) -> str:
        """Return 8 hexadecimal digits that the first process draws."""
        own = np.array([secrets.randbits(32)], np.int64)
        drawn = own if self._exchange is None else self._exchange.tell(what, lambda: own)[0]
        return f"{int(drawn[0]):08x}"

    def of_first(
        self, find: Callable[[], list[Checkpoint]], like: Checkpoint, what: str = "the checkpoints that there are"
    ) -> list[Checkpoint]:
        """Return what the first process returns: checkpoints in the folder of `like`. `what` names them in errors."""
        if self._exchange is None:
            return find()

        def message() -> np.ndarray:
            found = find() if self.is_first else []
            return np.array([[each.step, int(each.token, 16)] for each in found], np.int64).reshape(-1)

        numbers = self._exchange.tell(what, message)[0].reshape(-1, 2).tolist()
        return [like._replace(step=step, token=f"{token:08x}") for step, token in numbers]
