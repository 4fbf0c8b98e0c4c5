"""Dense tensors of which each process has a part (DTensors, of FSDP2 or tensor parallelism), in checkpoints: whole."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

from embedrock.errors import UnsupportedError


def is_part(tensor: Any) -> bool:
    """Return whether processes have parts of a tensor. No module is loaded for it: somebody has made the tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_parts(model: nn.Module, optimizers: Mapping[str, Any], ranks: Collection[int]) -> None:
    """See to it that processes that save together can make the dense tensors whole.

    Args:
        model: which is saved.
        optimizers: what else is, by name.
        ranks: the processes, by their ranks among all.

    Raises:
        UnsupportedError: they cannot.
    """
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
    """Go through tensors in parts: what they are called, and of optimizer state the parameter."""
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
    """Return a state with whole tensors, on the CPU, in place of parts. All processes call it, with states alike.

    Args:
        state: nested dicts, lists and tuples.
        is_kept: this process needs it; else it returns None in the place of these tensors.
    """
    if is_part(state):
        made = state.detach().full_tensor()
        return made.cpu() if is_kept else None
    if isinstance(state, MutableMapping):
        made = copy.copy(state)  # with the versions of modules that PyTorch keeps beside
        made.update({key: whole(value, is_kept) for key, value in state.items()})
        return made
    if type(state) in (list, tuple):
        return type(state)(whole(value, is_kept) for value in state)
    return state


def as_parts(model: nn.Module, states: dict[str, Any]) -> dict[str, Any]:
    """Return a model's state that loads into parts: whole tensors, each of which this process takes its part of."""
    own = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    made = copy.copy(states)
    made.update({key: _spread(value, own[key]) for key, value in states.items() if _fits(value, own.get(key))})
    return made


def take_parts(optimizer: Any) -> None:
    """Let an optimizer that has loaded whole tensors keep its part of each, as its parameters are in parts."""
    for parameter, key, value in list(_state_of(optimizer)):
        if _fits(value, parameter):
            optimizer.state[parameter][key] = _spread(value, parameter)


def _fits(value: Any, own: Any) -> bool:
    return is_part(own) and isinstance(value, Tensor) and not is_part(value) and value.shape == own.shape


def _spread(value: Tensor, like: Any) -> Any:
    """Return a whole tensor that all processes have, in parts as another one."""
    tensors = sys.modules["torch.distributed.tensor"]
    mesh = like.device_mesh
    value = value.to(like.to_local().device)
    everywhere = tensors.DTensor.from_local(value, mesh, [tensors.Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, like.placements)
