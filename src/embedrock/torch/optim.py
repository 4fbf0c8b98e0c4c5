"""Embedrock's optimizers as `torch.optim.Optimizer`: one class for each rule, made from the rule's own fields."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from embedrock import rules
from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.gradients import RowGradients
from embedrock.rules import Rule
from embedrock.torch.handle import Handle
from embedrock.torch.layer import RowLayer
from embedrock.torch.parameters import handles

Layers = nn.Module | Handle | Iterable[Any]

# Arguments of PyTorch's optimizers that a rule does not have, and what to do instead.
_OWN_KERNELS = "rows are stepped by Embedrock's own kernels. Leave it out"
REMEDIES = {
    "weight_decay": "only ert.AdamW has it, decoupled and for the rows touched",
    "momentum": "use ert.Momentum",
    "nesterov": "use ert.Momentum(..., nesterov=True)",
    "dampening": "ert.Momentum has none",
    "amsgrad": "there is no such rule",
    "centered": "there is no such rule",
    "lr_decay": "use a scheduler of torch.optim.lr_scheduler",
    "maximize": "negate the loss",
    "foreach": _OWN_KERNELS,
    "fused": _OWN_KERNELS,
    "capturable": _OWN_KERNELS,
    "differentiable": "a step of rows cannot be differentiated. Leave it out",
}


class _Due(NamedTuple):
    """One table's part in a step."""

    handle: Handle
    grads: RowGradients
    clip_value: float | None
    hyperparameters: dict[str, Any]


class RowOptimizer(torch.optim.Optimizer):
    """Steps the rows of embedding layers by a rule: base of `SGD`, `Adam` and the others.

    Args:
        layers: a model, layers, handles, or param groups: dicts with any of these under "params". Dense parameters of
            a model are left to an optimizer of PyTorch's: see `dense_parameters`.
        lr: learning rate; None: the rule's default.
        clip_value: clamp every element of the rows' gradients to ``[-clip_value, clip_value]``.
            (`torch.nn.utils.clip_grad_value_` would clamp the handle's gradient, which is a norm.)
        hyperparameters: further fields of the rule. Like ``lr`` they may differ by param group and change between
            steps, except where they decide what a row stores (``dense``, ``initial_accumulator_value``).

    A table has one optimizer at a time. It is bound to it when the optimizer is made: if the table's rule is of the
    same kind, rows keep their optimizer state (of a loaded checkpoint, say), otherwise they start with a fresh one.
    The optimizer state of the rows and their step count are kept with the rows, in ``model.state_dict()``;
    ``optimizer.state_dict()`` has the param groups.

    Raises:
        ArgumentError: no embedding layer among `layers`, or a hyperparameter that cannot work.
        UnsupportedError: an argument of PyTorch's optimizers that this one does not have.
    """

    rule_type: ClassVar[type[Rule]]

    def __init_subclass__(cls, *, rule: type[Rule], **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.rule_type = rule
        empty, by_name = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
        fields = [
            inspect.Parameter(f.name, by_name, default=f.default, annotation=f.type)
            for f in dataclasses.fields(rule)
        ]
        fields[0] = fields[0].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)  # lr
        layers = inspect.Parameter(
            "layers", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Layers", default=empty
        )
        clip_value = inspect.Parameter("clip_value", by_name, default=None, annotation="float | None")
        cls.__signature__ = inspect.Signature([layers, *fields, clip_value])

    def __init__(
        self,
        layers: Layers,
        lr: float | None = None,
        *,
        clip_value: float | None = None,
        **hyperparameters: Any,
    ) -> None:
        self._refuse(hyperparameters)
        given = hyperparameters if lr is None else {"lr": lr, **hyperparameters}
        defaults = dataclasses.asdict(self.rule_type(**_plain(given)))
        groups = (
            list(layers)
            if isinstance(layers, Iterable) and not isinstance(layers, nn.Module | Tensor)
            else [layers]
        )
        if not groups or not isinstance(groups[0], dict):
            groups = [{"params": layers if isinstance(layers, nn.Module) else groups}]
        super().__init__(groups, {**defaults, "clip_value": clip_value})

    def _refuse(self, hyperparameters: dict[str, Any]) -> None:
        fields = {field.name for field in dataclasses.fields(self.rule_type)}
        for name in hyperparameters:
            if name in REMEDIES and name not in fields:
                raise UnsupportedError(f"ert.{type(self).__name__} has no `{name}`: {REMEDIES[name]}.")

    # ------------------------------------------------------------ param groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group: a dict with a model, layers or handles under "params", and hyperparameters of its own."""
        layers = param_group["params"]
        found = handles(layers)
        if not found:
            raise ArgumentError(
                f"ert.{type(self).__name__} found no embedding layer of Embedrock's in {_summary(layers)}. Make the model "
                "with ert.Embedding or ert.EmbeddingBag; its other parameters are stepped by an optimizer of PyTorch's."
            )
        group = {**param_group, "params": found}
        _check_clip_value(group.get("clip_value"))
        rule = self._rule({**self.defaults, **group})
        super().add_param_group(group)
        self._bind(found, rule, layers if isinstance(layers, nn.Module) else None)

    def _bind(self, found: list[Handle], rule: Rule, model: nn.Module | None) -> None:
        for handle in found:
            handle.table.set_rule(rule)
            handle.vigil.bind(self, model)
        for name, module in model.named_modules() if model is not None else ():
            if name and isinstance(module, RowLayer):
                module.handle.label = f"{name!r} ({type(module).__name__}({module._describe()}))"

    def _rule(self, group: dict[str, Any]) -> Rule:
        names = [field.name for field in dataclasses.fields(self.rule_type)]
        return self.rule_type(**_plain({name: group[name] for name in names}))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a copy, or an unpickled one, holds its handles as the first one did
            self._bind(group["params"], self._rule(group), None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the param groups of `state_dict`; the rows and their optimizer state come with the model's."""
        for group in state_dict["param_groups"]:
            missing = self.defaults.keys() - group.keys()
            if missing:
                raise ArgumentError(
                    f"a state for ert.{type(self).__name__} must have {', '.join(sorted(missing))} in its param groups: "
                    "this one is of another optimizer."
                )
        super().load_state_dict(state_dict)

    # ------------------------------------------------------------ steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the rows that got gradients since the last `zero_grad`.

        A table whose ``handle.grad`` is None is left alone. Rows are stepped by their gradient times what
        ``handle.grad`` was multiplied by since the backward, so clipped and unscaled gradients arrive as such.

        Args:
            closure: computes the loss and its gradients anew.

        Returns:
            The closure's loss, or None.

        Raises:
            NonFiniteGradientError: gradients with NaN or Inf (unless the table says ``on_nonfinite="skip"``). No
                table has changed.
            ArgumentError: a table was bound to another optimizer, or ``handle.grad`` was set by hand.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = [part for group in self.param_groups for part in self._due(group)]
        # Tables that will refuse come first, so that no other has been stepped by then.
        for handle, grads, clip_value, hyperparameters in sorted(due, key=lambda part: part.grads.is_finite):
            handle.table.step(grads, clip_value=clip_value, **hyperparameters)
        for group in self.param_groups:
            for handle in group["params"]:
                handle.vigil.stepped()
        return loss

    def _due(self, group: dict[str, Any]) -> list[_Due]:
        rule = self._rule(group)
        changeable = {
            field.name: getattr(rule, field.name)
            for field in dataclasses.fields(rule)  # pyright: ignore[reportArgumentType]
            if field.name not in rule.FIXED
        }
        parts = []
        for handle in group["params"]:
            self._check_bound(handle, rule)
            handle.check_untouched()
            grads = handle.gradients()
            if grads is not None:
                parts.append(_Due(handle, grads, group["clip_value"], changeable))
        return parts

    def _check_bound(self, handle: Handle, rule: Rule) -> None:
        if handle.vigil.owner is not self:
            raise ArgumentError(
                f"the rows of {handle.label} are held by another optimizer, which was made after this "
                f"ert.{type(self).__name__}. A table has one optimizer at a time: step that one, or make this one anew."
            )
        if not rule.same_layout(handle.table.rule):
            raise ArgumentError(
                f"the rows of {handle.label} are laid out for {handle.table.rule}, this optimizer steps by {rule}. "
                f"Make the ert.{type(self).__name__} anew."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the pending gradients of the rows."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for handle in group["params"]:
                handle.pending.drop()


def _plain(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with tensors, which PyTorch allows for lr, as numbers."""
    return {
        name: value.item() if isinstance(value, Tensor) else value for name, value in hyperparameters.items()
    }


def _check_clip_value(clip_value: float | None) -> None:
    if clip_value is not None and not clip_value > 0:
        raise ArgumentError(f"`clip_value` must be a number > 0, or None: got {clip_value!r}.")


def _summary(layers: Layers) -> str:
    return f"this {type(layers).__name__}"


class SGD(RowOptimizer, rule=rules.SGD):
    """Steps rows by `er.SGD`: see there for the formula and the hyperparameters."""


class Momentum(RowOptimizer, rule=rules.Momentum):
    """Steps rows by `er.Momentum`: see there for the formula and the hyperparameters."""


class Adagrad(RowOptimizer, rule=rules.Adagrad):
    """Steps rows by `er.Adagrad`: see there for the formula and the hyperparameters."""


class RowwiseAdagrad(RowOptimizer, rule=rules.RowwiseAdagrad):
    """Steps rows by `er.RowwiseAdagrad`: see there for the formula and the hyperparameters."""


class RMSprop(RowOptimizer, rule=rules.RMSprop):
    """Steps rows by `er.RMSprop`: see there for the formula and the hyperparameters."""


class Adam(RowOptimizer, rule=rules.Adam):
    """Steps rows by `er.Adam`: see there for the formula and the hyperparameters."""


class AdamW(RowOptimizer, rule=rules.AdamW):
    """Steps rows by `er.AdamW`: see there for the formula and the hyperparameters."""


class Ftrl(RowOptimizer, rule=rules.Ftrl):
    """Steps rows by `er.Ftrl`: see there for the formula and the hyperparameters."""
