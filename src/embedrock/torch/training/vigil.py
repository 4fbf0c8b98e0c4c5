"""`UnappliedGradientsCheck`: notices a training loop that forgot our optimizer.

An optimizer of PyTorch's own cannot step rows, so a loop with no other would train all but the embeddings, and
nobody would notice. Gradients may well wait while nothing steps (accumulation), be zeroed unused (a warm-up), or be
taken only to be looked at. The sign of a mistake is that *another* optimizer stepped while they waited. We see that
through PyTorch's hook on all optimizers, which is installed only while gradients wait for a first step of ours: a loop
that has stepped its rows once is taken to know when to.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from embedrock.errors import EmbedrockError

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
