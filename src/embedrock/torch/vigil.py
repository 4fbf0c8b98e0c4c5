"""`Vigil`: notices a training loop that forgot our optimizer.

An optimizer of PyTorch's own cannot step rows, so a loop with no other would train all but the embeddings, and
nobody would notice. Gradients may well wait while nothing steps (accumulation), be zeroed unused (a warm-up), or be
taken only to be looked at. The sign of a mistake is that *another* optimizer stepped while they waited. We see that
through PyTorch's hook on all optimizers, which is installed only while gradients wait for a first step of ours.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from embedrock.errors import EmbedrockError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class ForgottenGradientsError(EmbedrockError, RuntimeError):
    """Gradients of rows that no optimizer applied, or a handle that something else wrote to."""


class Vigil:
    """Watches over the gradients of one handle until an optimizer of ours has stepped it."""

    def __init__(self) -> None:
        self._owner: weakref.ref[Optimizer] | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._stepped = False
        self._passed_by = ""

    @property
    def owner(self) -> Optimizer | None:
        """The optimizer of ours that holds the handle, if it is still alive."""
        return None if self._owner is None else self._owner()

    def bind(self, owner: Optimizer, model: nn.Module | None) -> None:
        """Note which optimizer of ours holds the handle, and the model it was made for, if one was given."""
        self._owner = weakref.ref(owner)
        self._model = None if model is None else weakref.ref(model)
        self._passed_by = ""

    def received(self) -> None:
        """Note that gradients wait."""
        if not self._stepped or self.owner is None:
            _waiting.add(self)
            _listen()

    def stepped(self) -> None:
        """Note that our optimizer stepped."""
        self._stepped, self._passed_by = True, ""
        _waiting.discard(self)

    def see(self, other: Optimizer) -> None:
        """Take note of another optimizer's step, if one of ours should have gone with it."""
        owner = self.owner
        if other is owner:
            return
        # A second network's optimizer may well step first: a discriminator's, while a generator's gradients wait.
        if owner is None or not _parameters(other).isdisjoint(self._model_parameters()):
            self._passed_by = type(other).__name__

    def _model_parameters(self) -> set[int]:
        model = None if self._model is None else self._model()
        return set() if model is None else set(map(id, model.parameters()))

    def forgive(self) -> None:
        """Forget what other optimizers did, once it has been complained about."""
        self._passed_by = ""

    def check(self, label: str) -> None:
        """Raise `ForgottenGradientsError` if another optimizer stepped while gradients waited for ours."""
        if not self._passed_by:
            return
        other, owner = self._passed_by, self.owner
        self.forgive()  # an error for each offence, not for ever
        remedy = (
            "make `optimizer = ert.Adam(model, lr=1e-3)`, call its step() beside the other's"
            if owner is None
            else f"call step() of your ert.{type(owner).__name__} beside the other's"
        )
        raise ForgottenGradientsError(
            f"gradients of {label} were applied by no optimizer: {other} stepped, but rows are stepped by "
            f"Embedrock's optimizers only. In your training loop, {remedy}, and give the other "
            "ert.dense_parameters(model). If these rows should not train, call requires_grad_(False) on the layer."
        )


_waiting: weakref.WeakSet[Vigil] = weakref.WeakSet()
_hook: RemovableHandle | None = None


def _listen() -> None:
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_any_step)


def _after_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _hook
    for vigil in list(_waiting):
        vigil.see(optimizer)
    if not _waiting and _hook is not None:
        _hook.remove()
        _hook = None


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
