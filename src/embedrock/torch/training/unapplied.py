"""`UnappliedGradientsCheck`: notices a training loop that forgot our optimizer.

An optimizer of PyTorch's own cannot step rows, so a loop with no other would train all but the embeddings, and
nobody would notice. Gradients may well wait while nothing steps (accumulation), be zeroed unused (a warm-up), or be
taken only to be looked at. The sign of a mistake is that *another* optimizer stepped while they waited. We see that
through PyTorch's hook on all optimizers, which is installed only while gradients wait for a first step of ours: a loop
that has stepped its rows once is taken to know when to.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from embedrock.errors import EmbedrockError
from embedrock.system.log import caller_level

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


# An optimizer made of layers does not tell which other optimizers train the same model. One step of another may then
# be that of a second network; two, each after new gradients and none of ours between, are taken for a mistake.
PASSES = 2


BOTH = "ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=1e-3)"  # for error messages


class ForgottenGradientsError(EmbedrockError, RuntimeError):
    """Gradients of rows that no optimizer applied, or a handle that something else wrote to."""


class HasGradients(Protocol):
    """What has gradients."""

    def waits(self) -> bool:
        """Return whether gradients wait for a step, as far as the host knows."""
        ...


class UnappliedGradientsCheck:
    """Watches over the gradients of one handle until an optimizer of ours has stepped it.

    Args:
        watched: the handle, which must not be kept alive.
    """

    def __init__(self, watched: HasGradients) -> None:
        self._watched = weakref.ref(watched)
        self._owner: weakref.ref[Optimizer] | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._stepped = False
        self._new_gradients = self._waits = False
        self._passes = 0
        self._passed_by = ""

    @property
    def owner(self) -> Optimizer | None:
        """The optimizer of ours that holds the handle, if it is still alive."""
        return None if self._owner is None else self._owner()

    def bind(self, owner: Optimizer, model: nn.Module | None) -> None:
        """Note which optimizer of ours holds the handle, and the model with dense parameters that it was given."""
        self._owner = weakref.ref(owner)
        self._model = None if model is None else weakref.ref(model)
        _ours.add(owner)
        self.forgive()

    def received(self) -> None:
        """Note that gradients wait."""
        if not self._stepped or self.owner is None:
            self._new_gradients = self._waits = True
            _waiting.add(self)
            _listen()

    def stepped(self) -> None:
        """Note that our optimizer stepped."""
        self._stepped = True
        self.forgive()
        if self._waits:
            _waiting.discard(self)
            self._waits = False

    def see(self, other: Optimizer) -> None:
        """Take note of another optimizer's step, if one of ours should have gone with it."""
        owner, watched = self.owner, self._watched()
        if other is owner or watched is None or not watched.waits():  # zeroed on purpose, as in a warm-up
            return
        if owner is None or self._is_passed_by(other):
            self._passed_by = f"ert.{type(other).__name__}" if other in _ours else type(other).__name__

    def _is_passed_by(self, other: Optimizer) -> bool:
        """Return whether another optimizer's step shows that ours is forgotten."""
        if other in _ours:  # of other rows: the two may take turns
            return False
        if parameters := self._model_parameters():
            # A second network's optimizer may well step first: a discriminator's, while a generator's gradients wait.
            return not _parameters(other).isdisjoint(parameters)
        self._passes += self._new_gradients
        self._new_gradients = False
        return self._passes >= PASSES

    def _model_parameters(self) -> set[int]:
        model = None if self._model is None else self._model()
        return set() if model is None else set(map(id, model.parameters()))

    def forgive(self) -> None:
        """Forget what other optimizers did, once it has been complained about."""
        self._new_gradients, self._passes, self._passed_by = False, 0, ""

    def check(self, label: str) -> None:
        """Raise `ForgottenGradientsError` if another optimizer stepped while gradients waited for ours."""
        if not self._passed_by:
            return
        other, remedy = self._passed_by, self._remedy()
        self.forgive()  # an error for each offence, not for ever
        raise ForgottenGradientsError(
            f"gradients of {label} were applied by no optimizer: {other} stepped, but these rows are stepped only by "
            f"an optimizer of Embedrock's that was made of them. In your training loop, {remedy}, and give an "
            "optimizer of PyTorch's ert.dense_parameters(model). If these rows should not train, call "
            "requires_grad_(False) on the layer."
        )

    def _remedy(self) -> str:
        if self.owner is None:
            return (
                f"make `optimizer = {BOTH}`, which steps both; or make `ert.Adam(model, lr=1e-3)`, call its step() "
                "beside the other's"
            )
        name = f"ert.{type(self.owner).__name__}"
        if self._model_parameters():
            return f"call step() of your {name} beside the other's"
        return (
            f"call step() of your {name} beside the other's (if the other trains another network, make yours of the "
            f"whole model, `{name}(model)`, which tells them apart)"
        )


_ours: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers of rows
_waiting: weakref.WeakSet[UnappliedGradientsCheck] = weakref.WeakSet()
_hook: RemovableHandle | None = None


def _listen() -> None:
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_any_step)


def _after_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _hook
    for unapplied in list(_waiting):
        unapplied.see(optimizer)
    if not _waiting and _hook is not None:
        _hook.remove()
        _hook = None


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


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
