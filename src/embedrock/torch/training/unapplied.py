"""`UnappliedGradientsCheck`: detects a training loop without an Embedrock optimizer.

PyTorch's own optimizers cannot step rows. A loop with only those would train everything except the embeddings,
unnoticed. Pending gradients alone are no mistake: they may accumulate, be zeroed unused (a warm-up), or only be
inspected. The sign of a mistake is a step of *another* optimizer while they wait. PyTorch's hook on all optimizers
reports such steps. The hook is installed only while gradients wait for the first step of an Embedrock optimizer. After
that step, the loop is taken to be correct.
"""

from __future__ import annotations

import gc
import itertools
import math
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from embedrock.errors import ForgottenGradientsError
from embedrock.system.log import caller_level

# An optimizer made of layers does not reveal the other optimizers of the same model. One step of another may
# belong to a second network. Two such steps, each after new gradients and without a step of ours, are a mistake.
PASSES = 2


BOTH = "ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=1e-3)"  # for error messages


class UnappliedGradientsCheck:
    """Check that an Embedrock optimizer steps a handle with gradients.

    Args:
        watched: the handle, referenced weakly.

    Attributes:
        holder: reference to the optimizer that was made of the handle last.
        is_settled: an optimizer has stepped the handle, and no gradients wait for another.
        passed_by: the optimizer that stepped while gradients were pending; "" for none.
    """

    def __init__(self, watched: Any) -> None:
        self._watched = weakref.ref(watched)
        self.holder: weakref.ref[Optimizer] | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._stepped = self.is_settled = False
        self._new_gradients = self._waits = False
        self._passes = 0
        self.passed_by = ""

    @property
    def owner(self) -> Optimizer | None:
        """Embedrock optimizer of the handle, if it is still alive."""
        return None if self.holder is None else self.holder()

    def bind(self, owner: Optimizer, model: nn.Module | None) -> None:
        """Record the optimizer of the handle, and its model if that has dense parameters."""
        self.holder = weakref.ref(owner)
        self._model = None if model is None else weakref.ref(model)
        _ours.add(owner)
        self.forgive()

    def received(self) -> None:
        """Record that gradients are pending."""
        if not self._stepped or self.owner is None:
            self._new_gradients = self._waits = True
            self.is_settled = False
            _waiting.add(self)
            global _hook
            if _hook is None:
                _hook = register_optimizer_step_post_hook(_after_any_step)

    def stepped(self) -> None:
        """Record a step of the handle's optimizer."""
        self._stepped = self.is_settled = True
        self.forgive()
        if self._waits:
            _waiting.discard(self)
            self._waits = False

    def see(self, other: Optimizer) -> None:
        """Record a step of another optimizer, if the handle's optimizer should have stepped, too."""
        owner, watched = self.owner, self._watched()
        if other is owner or watched is None or not watched.waits():  # zeroed on purpose, as in a warm-up
            return
        if (owner is None or self._is_passed_by(other)) and not _is_skipped(watched.grad):
            self.passed_by = f"ert.{type(other).__name__}" if other in _ours else type(other).__name__

    def _is_passed_by(self, other: Optimizer) -> bool:
        """Return whether another optimizer's step reveals a forgotten step of the handle's optimizer."""
        if other in _ours:  # an optimizer of other rows: the two may alternate
            return False
        if parameters := self._model_parameters():
            # A second network's optimizer may step first: a discriminator's, while a generator's gradients wait.
            return not _parameters(other).isdisjoint(parameters)
        self._passes += self._new_gradients
        self._new_gradients = False
        return self._passes >= PASSES

    def _model_parameters(self) -> set[int]:
        model = None if self._model is None else self._model()
        return set() if model is None else set(map(id, model.parameters()))

    def forgive(self) -> None:
        """Discard the recorded steps of other optimizers."""
        self._new_gradients, self._passes, self.passed_by = False, 0, ""

    def check(self, label: str) -> None:
        """Raise `ForgottenGradientsError` if another optimizer stepped while gradients were pending."""
        if not self.passed_by:
            return
        other, remedy = self.passed_by, self._remedy()
        self.forgive()  # report each mistake once
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


def is_capturing() -> bool:
    """Return whether work on the current stream is captured in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _is_skipped(grad: Tensor) -> bool:
    """Return whether `GradScaler` skips the step of these gradients. Waits for a GPU, outside of captures."""
    return is_capturing() or not math.isfinite(grad.item())


def _after_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _hook
    for unapplied in list(_waiting):
        unapplied.see(optimizer)
    if not _waiting and _hook is not None:
        _hook.remove()
        _hook = None


def _parameters(optimizer: Optimizer) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())  # it may be half made
    return {id(parameter) for group in groups for parameter in group["params"]}


def _no_dict() -> None:
    """Replace a reference to a state dict that is gone."""


class StateDictCheck:
    """Check of a table's rows in state dicts: each contains the rows once, and no other code writes to them.

    Attributes:
        watched: for each tensor of the last state dict, the counter of writes to it, and its count then; None without.
    """

    def __init__(self) -> None:
        self.watched: list[tuple[Tensor, int]] | None = None
        self._saved: tuple[Any, str] = _no_dict, ""  # last state dict with the rows, and the prefix of its layer
        # Missing keys of the last load, and this table's; None: the load has its rows.
        self._loaded: tuple[list[str], set[str] | None] = [], None

    def is_saved_first(self, destination: Any, prefix: str) -> bool:
        """Return whether a state dict has no rows of the table yet under another prefix."""
        known, of = self._saved
        if known() is destination and of != prefix:
            return False
        self._saved = weakref.ref(destination) if isinstance(destination, OrderedDict) else _no_dict, prefix
        return True

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Watch tensors of a state dict for writes, which would not reach the rows."""
        self.watched = []
        for tensor in tensors:
            counter = tensor.detach()  # it has no elements, but counts writes to the tensor, as ``_version``
            counter.data = torch.empty(0, dtype=tensor.dtype, device="cpu")
            self.watched.append((counter, tensor._version))

    def check(self, label: str) -> None:
        """Raise `ForgottenGradientsError` if other code wrote to a watched tensor."""
        if all(counter._version == version for counter, version in self.watched or ()):
            if self._saved[0]() is None:  # the state dict is gone
                self.watched = None
            return
        self.watched = None  # report each write once
        raise ForgottenGradientsError(
            f"something wrote to the rows of {label} in what state_dict() returned, as averages of models do: "
            "those are copies, so that no row changed. Average rows by ert.average(model); put what was changed back "
            "by model.load_state_dict(state), or change rows by layer.table.assign(ids, values)."
        )

    def found_in(self, missing_keys: list[str]) -> None:
        """Record that the load with this list of missing keys has rows. So no layer on the table misses them."""
        self.watched = None
        known, keys = self._loaded
        if known is missing_keys and keys:
            missing_keys[:] = [key for key in missing_keys if key not in keys]
        self._loaded = missing_keys, None

    def missed_in(self, missing_keys: list[str], key: str) -> None:
        """Record that a layer on the table finds no rows in the load with this list of missing keys."""
        known, keys = self._loaded if self._loaded[0] is missing_keys else (missing_keys, set())
        if keys is not None:
            missing_keys.append(key)
            self._loaded = known, {*keys, key}


PROBE = 8  # elements to compare, because writes to parameter.data do not change its version
NAMED = 3


class UntrainedWarning(UserWarning):
    """Warning: dense weights of a model have gradients, but no optimizer steps them."""


class UntrainedWeightsCheck:
    """Check that the first two steps with gradients change the dense parameters of an Embedrock optimizer's model."""

    def __init__(self, model: nn.Module, name: str, dense: dict[str, nn.Parameter]) -> None:
        self._of, self._name = type(model).__name__, name
        self._dense = {name: weakref.ref(parameter) for name, parameter in dense.items()}
        self._seen: list[tuple[weakref.ref[Tensor], int, Tensor]] | None = None  # parameters, versions and probes
        self.is_over = False

    def after_step(self) -> None:
        """Inspect the parameters after a step of the optimizer. Warn once if they do not train."""
        waiting = {name: p for name, one in self._dense.items() if (p := one()) is not None and p.grad is not None}
        if not waiting:
            return
        if self._seen is None:
            self._seen = [(weakref.ref(p), p._version, _probe(p)) for p in waiting.values()]
            return
        self.is_over, seen, self._seen = True, self._seen, None
        if not any(itertools.starmap(_has_changed, seen)) and not _are_held(list(waiting.values())):
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
    if hasattr(here, "to_local"):  # a DTensor: a process has a shard of FSDP2's parameters
        here = here.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    return here.reshape(-1)[:PROBE].clone()


def _has_changed(known: weakref.ref[Tensor], version: int, probe: Tensor) -> bool:
    parameter = known()
    return parameter is None or parameter._version != version or not torch.equal(_probe(parameter), probe)


def _are_held(parameters: list[nn.Parameter]) -> bool:
    """Return whether an optimizer holds one of the parameters, even without a step so far."""
    ids = set(map(id, parameters))
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
    return any(not ids.isdisjoint(_parameters(one)) for one in optimizers)
