"""`UntrainedWeightsCheck`: notices that nobody steps the dense weights of a model whose rows are stepped.

`ert.Adam(model)` steps rows only. As the only optimizer of a loop, or of a trainer that takes one, it leaves all else
of the model as it was, and the loss falls nevertheless. The signs of it: dense parameters have gradients at two of our
steps, between these not one of them has changed, and there is no optimizer that holds one. (Without the last one, a
loss scaler that leaves out the first steps, or gradients that are accumulated for longer, would look alike.)
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from embedrock.process.callers import caller_level

PROBE = 8  # elements: those who write to parameter.data leave its version as it is
NAMED = 3


@runtime_checkable
class ShardedTensor(Protocol):
    """A tensor of which this process has a part: a `DTensor`, whose module need not be there to ask."""

    def to_local(self) -> Tensor:
        """Return the part."""
        ...


class UntrainedWarning(UserWarning):
    """Dense weights of a model that have gradients, and that no optimizer steps."""


class _SteppedParameter(NamedTuple):
    """A parameter as it was after a step."""

    parameter: weakref.ref[Tensor]
    version: int
    probe: Tensor


class UntrainedWeightsCheck:
    """Watches the dense parameters of a model over the first two steps at which they have gradients.

    Args:
        model: that an optimizer of ours was made of.
        name: of that optimizer, such as "ert.Adam".
        dense: its dense parameters, by name.
    """

    def __init__(self, model: nn.Module, name: str, dense: dict[str, nn.Parameter]) -> None:
        self._of, self._name = type(model).__name__, name
        self._dense = {name: weakref.ref(parameter) for name, parameter in dense.items()}
        self._seen: list[_SteppedParameter] | None = None
        self.is_over = False

    def after_step(self) -> None:
        """Look at the parameters after a step of ours, and warn of what was found, once."""
        waiting = {name: p for name, one in self._dense.items() if (p := one()) is not None and p.grad is not None}
        if not waiting:
            return
        if self._seen is None:
            self._seen = [_SteppedParameter(weakref.ref(p), p._version, _probe(p)) for p in waiting.values()]
            return
        self.is_over, seen, self._seen = True, self._seen, None
        if not any(map(_has_changed, seen)) and not _are_held(list(waiting.values())):
            warnings.warn(self._message(list(waiting)), UntrainedWarning, stacklevel=caller_level())

    def _message(self, names: list[str]) -> str:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return (
            f"{self._name} steps rows only, and nothing steps the dense weights of {self._of}: "
            f"{', '.join(names[:NAMED])}{more} had gradients at two steps, and have not changed. Make one optimizer of "
            f"both, ert.optimizer(model, rows={self._name}, dense=torch.optim.Adam, lr=1e-3), or another one of "
            "ert.dense_parameters(model), and call its step() too. If they should not train, call "
            "requires_grad_(False) on them."
        )


def _probe(parameter: Tensor) -> Tensor:
    here = parameter.detach()
    here = here.to_local() if isinstance(here, ShardedTensor) else here  # of FSDP2, of which a process has a part
    return here.reshape(-1)[:PROBE].clone()


def _has_changed(seen: _SteppedParameter) -> bool:
    parameter = seen.parameter()
    return parameter is None or parameter._version != seen.version or not torch.equal(_probe(parameter), seen.probe)


def _are_held(parameters: list[nn.Parameter]) -> bool:
    """Return whether there is an optimizer of one of these, whether it has stepped or not."""
    ids = set(map(id, parameters))
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    groups = [group for one in optimizers for group in getattr(one, "param_groups", ())]  # one may be half made
    return any(id(parameter) in ids for group in groups for parameter in group["params"])
