"""Embedrock's optimizers as `torch.optim.Optimizer`: one class for each rule, made from the fields of the rule."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from embedrock import optimizers as rules
from embedrock.errors import ArgumentError, UnknownArgumentError, UnsupportedError
from embedrock.frontend.arguments import is_number, may_bind
from embedrock.optimizers import Rule
from embedrock.system.notebook import PublicNames
from embedrock.table.changes import RuleTaker, bind_rule, check_may_bind
from embedrock.table.checks import of_step
from embedrock.table.rows import TableState
from embedrock.table.stepping import Part, StepRequest, step_all
from embedrock.table.table import rows_of
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.training.backward import as_it_is
from embedrock.torch.training.handle import Handle, check_untouched, drop_gradients, note_steps
from embedrock.torch.training.parameters import handles
from embedrock.torch.training.ranks import are_there_groups
from embedrock.torch.training.sharing import OptimizedRows, announce_steps, fall_behind
from embedrock.torch.training.unapplied import UntrainedWeightsCheck, is_capturing

Layers = nn.Module | Handle | Iterable[Any]

# arguments of PyTorch's optimizers that a rule lacks, with the remedy
_OWN_KERNELS = "rows are stepped by Embedrock's own kernels. Leave it out"
REMEDIES = {
    "weight_decay": "ert.AdamW, RowwiseAdagrad and RowwiseRMSprop have it, decoupled and for the rows touched",
    "momentum": "use ert.Momentum",
    "nesterov": "use ert.Momentum(..., nesterov=True)",
    "dampening": "ert.Momentum has none",
    "amsgrad": "there is no such rule",
    "centered": "there is no such rule",
    "lr_decay": "use a scheduler of torch.optim.lr_scheduler",
    "maximize": "negate the loss",
    "foreach": _OWN_KERNELS,
    "fused": _OWN_KERNELS,
    "capturable": "ert.graphed(step, optimizer) captures a training step in a CUDA graph. Leave it out",
    "differentiable": "a step of rows cannot be differentiated. Leave it out",
}

SCALING = "grad_scale", "found_inf"  # attributes that `GradScaler` sets for a step

ARGS = """

    Args:
        layers: a model, layers, handles, or param groups: see `RowOptimizer`.
{}        clip_value: clamp every element of the rows' gradients to ``[-clip_value, clip_value]``; None: do not.
        reset_state: reset optimizer state of another kind of rule. The weights stay.

    Raises:
        ArgumentError, UnsupportedError: as for `RowOptimizer`.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> layer = ert.Embedding(10**9, 4)
        >>> optimizer = ert.{}(layer, lr=0.01)
        >>> layer(torch.tensor([3, 14])).sum().backward()
        >>> optimizer.step(); optimizer.zero_grad()
        >>> layer.table.steps
        1
    """


class RowOptimizer(PublicNames, torch.optim.Optimizer):
    """Optimizer that steps rows of embedding layers by a rule: base of `SGD`, `Adam` and the others.

    Args:
        layers: a model, layers, handles, or param groups: dicts with any of these under "params". Dense parameters of a
            model need an optimizer of PyTorch's: see `dense_parameters`.
        lr: learning rate; None: the rule's default.
        reset_state: reset optimizer state that belongs to another kind of rule, or to other fixed hyperparameters. It
            also replaces the `rule=` of a table. The weights stay as they are.
        clip_value: clamp every element of the rows' gradients to ``[-clip_value, clip_value]``.
            (`torch.nn.utils.clip_grad_value_` does so too.)
        hyperparameters: further fields of the rule. Like ``lr`` they may differ between param groups and change between
            steps. Fixed fields (``Rule.FIXED``) decide what a row stores, and do not change. If left out, they come
            from the table's rule of this kind, else from the rule's defaults.

    A table has one optimizer at a time: the latest. Rows keep their optimizer state if the table's rule was of the same
    kind, for instance from a checkpoint. The state and the step count stay with the rows, in ``model.state_dict()``.
    The param groups are in ``optimizer.state_dict()``.

    Raises:
        ArgumentError: no embedding layer among `layers`, or a hyperparameter is invalid. Or a table has a `rule=` of
            another kind, or its rows have state of another kind, without `reset_state`.
        UnsupportedError: the optimizer lacks an argument of PyTorch's, or a layer with `max_norm` has `dense=True`.

    Example:
        >>> import embedrock.torch as ert
        >>> optimizer = ert.Adagrad(ert.Embedding(10, 4), lr=0.1)
        >>> isinstance(optimizer, ert.RowOptimizer), optimizer.param_groups[0]["lr"]
        (True, 0.1)
    """

    rule_type: ClassVar[type[Rule]]
    _unlisted = "bound fields rule_type"
    fields: ClassVar[tuple[str, ...]]
    _resets_state = False
    _watches: Sequence[UntrainedWeightsCheck] = ()
    _checked_groups: dict[int, _CheckedGroup]

    def __init_subclass__(cls, *, rule: type[Rule] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if rule is None:  # a subclass of one of Embedrock's
            return
        fields = dataclasses.fields(rule)  # pyright: ignore[reportArgumentType]
        cls.rule_type, cls.fields = rule, tuple(field.name for field in fields)
        # help() and editors show these parameters instead of **hyperparameters.
        either, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter("layers", either),
            *(inspect.Parameter(f.name, either if f.name == "lr" else by_name, default=f.default) for f in fields),
            inspect.Parameter("clip_value", by_name, default=None),
            inspect.Parameter("reset_state", by_name, default=False),
        ]
        cls.__signature__ = inspect.Signature(parameters)
        hyperparameters = re.search(r" {8}lr: .*?\n(?=\n)", rule.__doc__ or "", re.DOTALL)  # None under python -OO
        if hyperparameters and cls.__doc__:
            cls.__doc__ += ARGS.format(hyperparameters[0], cls.__name__)

    def __init__(
        self,
        layers: Layers,
        lr: float | Tensor | None = None,
        *,
        clip_value: float | None = None,
        reset_state: bool = False,
        **hyperparameters: Any,
    ) -> None:
        for name in hyperparameters:
            if name in REMEDIES and name not in self.fields:
                raise UnsupportedError(f"ert.{type(self).__name__} has no `{name}`: {REMEDIES[name]}.")
        given = hyperparameters if lr is None else {"lr": lr, **hyperparameters}
        rule = self.rule_type(**{name: _plain(value) for name, value in given.items()})
        defaults = {name: getattr(rule, name) for name in self.fields}
        fixed = {name: hyperparameters.get(name) for name in self.rule_type.FIXED}  # None: as in the table's rule
        self._resets_state, self._checked_groups = reset_state, {}
        super().__init__(_param_groups(layers), {**defaults, **fixed, "clip_value": clip_value})
        self._resets_state = False  # for later tables, in a param group or a copy

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `step`, as PyTorch does for profilers and hooks. Without these, its wrapper takes a 20th of a step."""
        seen = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: RowOptimizer, *args: Any, **kwargs: Any) -> Any:
            is_seen = profiler._is_profiler_enabled or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
            is_seen = is_seen or self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            return (seen if is_seen else func)(self, *args, **kwargs)

        return step

    # ------------------------------------------------------------ param groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group: a dict with layers under "params", and their hyperparameters."""
        layers = param_group["params"]
        found = handles(layers)
        if not found:
            raise ArgumentError(
                f"ert.{type(self).__name__} found no embedding layer of Embedrock's in the {type(layers).__name__} it "
                "was given. Make layers by ert.Embedding or ert.EmbeddingBag; other parameters are stepped by an "
                "optimizer of PyTorch's."
            )
        if all(handle.average is not None for handle in found):
            raise UnsupportedError(
                f"ert.{type(self).__name__} cannot step {found[0].label}: averages follow the model that trains. Give "
                "it that model, and call averaged.update_parameters(model) after each step."
            )
        group = {**self.defaults, **param_group, "params": found}
        _check_clip_value(group["clip_value"])
        self._rule(group)
        model = layers if isinstance(layers, nn.Module) else None
        for name, module in model.named_modules() if model is not None else ():
            if isinstance(module, RowLayer):
                module.name_in_model(name)
        for handle in found:
            rule = self._rule(group, handle.table.rule)
            handle.check_rule(rule)
            if handle.requires_grad:
                check_may_bind(rows_of(handle.table), rule, self._described(handle))
        super().add_param_group(group)
        # A model of nothing but rows, such as a layer, does not reveal the other optimizers of the training.
        named = [] if model is None else model.named_parameters()
        dense = {name: parameter for name, parameter in named if not isinstance(parameter, Handle)}
        self._bind(group, model if dense else None)
        if model is not None and dense:
            self._watches = [*self._watches, UntrainedWeightsCheck(model, f"ert.{type(self).__name__}", dense)]

    def _bind(self, group: dict[str, Any], model: nn.Module | None) -> None:
        for handle in group["params"]:
            rule = self._rule(group, handle.table.rule)
            rows, taker = rows_of(handle.table), self._described(handle)
            # Frozen rows are not stepped. They keep a fixed rule and their state until they train.
            if handle.requires_grad or may_bind(rows, rule, taker._replace(resets_state=False)):
                bind_rule(rows, rule, taker)
            handle.unapplied.bind(self, model)
            handle.sharing  # noqa: B018  # from now on known to other processes, even if no batch uses it here

    def _described(self, handle: Handle) -> RuleTaker:
        own = type(handle.table.rule)
        go_on = f"Make an ert.{own.__name__} of them to go on so."
        if own is self.rule_type:
            go_on = f"Leave out {', '.join(sorted(own.FIXED))} to go on so."
        return RuleTaker(f"ert.{type(self).__name__}", handle.label, go_on, self._resets_state)

    def _rule(self, group: dict[str, Any], own: Rule | None = None) -> Rule:
        values = tuple(map(group.__getitem__, self.fields))
        if not _PLAIN.issuperset(map(type, values)):
            values = tuple(map(_plain, values))
        return _make_rule(self.rule_type, values, own if isinstance(own, self.rule_type) else None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._checked_groups = {}
        for group in self.param_groups:  # a copy, or an unpickled one, holds its handles as the original did
            self._bind(group, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the param groups of `state_dict`. Rows and their optimizer state are in the model's state dict."""
        for group in state_dict["param_groups"]:
            # PyTorch's __setstate__ adds entries to self.defaults that a state may lack.
            missing = sorted({*self.fields, "clip_value"} - group.keys())
            if missing:
                raise ArgumentError(
                    f"a state for ert.{type(self).__name__} must have {', '.join(missing)} in its param groups: this "
                    "one is of another optimizer."
                )
        super().load_state_dict(state_dict)

    # ------------------------------------------------------------ steps

    @as_it_is
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the rows with gradients since the last `zero_grad`.

        A table without ``handle.grad`` is not stepped. Factors applied to ``handle.grad`` since the backward also apply
        to the rows' gradients. So unscaled and clipped gradients work as usual. All tables are stepped or, after an
        error, none. The records are stepped in the background, and every reader of rows waits for that.

        Args:
            closure: computes the loss and its gradients anew.

        Returns:
            The closure's loss, or None.

        Raises:
            NonFiniteGradientError: gradients with NaN or Inf (unless the table has ``on_nonfinite="skip"``).
            MemoryBudgetError: the new rows of a table do not fit its memory.
            ClosedTableError: a table with gradients was closed.
            ReadOnlyTableError: a table with gradients was opened with ``mode="r"``.
            ForgottenGradientsError: something wrote to a handle.
            ArgumentError: another optimizer holds a table, ``handle.grad`` was set by hand, or a hyperparameter in a
                param group is invalid.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if "found_inf" in vars(self):
            self._unscale(**{name: vars(self)[name] for name in SCALING})
        records = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # a context manager takes four times as long
        try:
            due: list[StepRequest] = []
            for group in self.param_groups:
                self._add_due(group, due)
            if are_there_groups():
                stepped = {rows for request in due for rows in request.tables}
                announce_steps([part for part in self.bound() if part.rows in stepped])
            step_all(due)
        except (MemoryError, OSError) as error:  # all ranks refuse other errors alike
            fall_behind((handle for group in self.param_groups for handle in group["params"]), error)
            raise
        finally:
            torch._C._set_grad_enabled(records)
        for group in self.param_groups:
            note_steps(group["params"])
        if self._watches:
            for watch in self._watches:
                watch.after_step()
            self._watches = [watch for watch in self._watches if not watch.is_over]
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True in a CUDA graph's capture: `GradScaler` then reads nothing on the host, and sets `SCALING`."""
        return is_capturing()

    def _unscale(self, grad_scale: Tensor | None, found_inf: Tensor) -> None:
        """Do what `GradScaler` would: unscale gradients, and have the GPU skip the step if it has found Inf."""
        factor = torch.ones_like(found_inf) if grad_scale is None else grad_scale.double().reciprocal().float()
        factor = factor.masked_fill(found_inf != 0.0, math.inf)
        for part in self.bound():
            if part.handle.grad is not None:
                part.handle.grad.mul_(factor)
                executor: Any = part.handle.executor()
                executor.timeline.captured.skips.append(executor)

    def _add_due(self, group: dict[str, Any], due: list[StepRequest]) -> None:
        """Add the steps of a param group to `due`: one for all tables whose gradients were summed together."""
        bound = self._bound(group)
        check_untouched(list(map(_HANDLE, filter(_OWN_RULE, bound))))
        together: list[Part] = []
        current: Any = None  # gradients of several tables, which a step can take as they are
        for handle, rule, clip, rows in bound:
            pending = handle.pending
            joint = pending.joint
            is_plain = clip is None and not handle.followers
            if joint is not None and rule is not None and is_plain and (joint is current or joint.is_current):
                current = joint
                together += ((joint, rule, pending.time, pending.number, rows),)
            elif (grads := handle.gradients()) is not None:
                if rule is None:
                    pending.executor.prepare(grads.clipped(None))  # raises ReadOnlyTableError
                    continue
                for follower in handle.followers or ():
                    follower.note(grads)
                executor: Any = handle.executor_of_gradients()
                executor = executor if executor.judge else None
                time = None if pending.grads is None else pending.time  # zeroed in place
                due.append(StepRequest((rows,), rule, grads.clipped(clip), None, executor, time))
        due += StepRequest.of_joint(together)

    def bound(self) -> list[OptimizedRows]:
        """Return the rows that a step may change, each with its rule and clip value.

        Raises:
            ArgumentError: as in `step`.
        """
        return [part for group in self.param_groups for part in self._bound(group)]

    def _bound(self, group: dict[str, Any]) -> Sequence[OptimizedRows]:
        values = tuple(map(group.__getitem__, (*self.fields, "clip_value")))
        known = self._checked_groups.get(id(group))
        if known is not None and known.is_current(group, values):
            return known.bound
        bound = list(self._checked(group))
        are_laid_out = all(part.rule is None or part.rule.same_layout(part.handle.table.rule) for part in bound)
        if are_laid_out and _PLAIN.issuperset(map(type, values)):
            rows = [part.rows for part in bound]
            self._checked_groups[id(group)] = _CheckedGroup(group, values, bound, rows, _rests(group["params"], rows))
        return bound

    def _checked(self, group: dict[str, Any]) -> Iterator[OptimizedRows]:
        rules = dict[int, tuple[Rule, bool]]()  # by identity of the tables' own rules, which are few
        clip, mine = group["clip_value"], type(self).__name__
        _check_clip_value(clip)
        for handle in group["params"]:
            if handle.table.mode == "r":
                yield OptimizedRows(handle, None, clip, rows_of(handle.table))
                continue
            own = handle.table.rule
            known = rules.get(id(own))
            if known is None:
                try:
                    rule = self._rule(group, own)
                except (ArgumentError, UnknownArgumentError) as error:
                    raise of_step(error, handle.label) from error
                known = rules[id(own)] = rule, rule.same_layout(own)
            rule, is_laid_out = known
            if handle.unapplied.owner is not self:
                raise ArgumentError(
                    f"the rows of {handle.label} are held by another optimizer, made after this ert.{mine}. A table "
                    "has one optimizer at a time: step that one, or make this one anew."
                )
            if not is_laid_out and (handle.requires_grad or handle.grad is not None):
                raise ArgumentError(
                    f"the rows of {handle.label} are laid out for {handle.table.rule}, and this ert.{mine} steps by "
                    f"{rule}. Make the ert.{mine} anew."
                )
            yield OptimizedRows(handle, rule, clip, rows_of(handle.table))

    @as_it_is
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the pending gradients of the rows."""
        if not set_to_none:
            super().zero_grad(set_to_none)
        for group in self.param_groups:
            drop_gradients(group["params"], set_to_none)


class _CheckedGroup(NamedTuple):
    """The rows of a param group that a step may change, as long as nothing changes that their checks rest on."""

    group: dict[str, Any]
    values: tuple[Any, ...]  # its hyperparameters
    bound: list[OptimizedRows]
    rows: list[TableState]  # of the handles' tables
    rests: tuple[list[Any], ...]  # each handle's identity, its table and the optimizer that holds it, and its rule

    def is_current(self, group: dict[str, Any], values: tuple[Any, ...]) -> bool:
        is_same = group is self.group and values == self.values
        return is_same and _rests(group["params"], self.rows) == self.rests


_HELD, _RULE = attrgetter("table", "unapplied.holder"), attrgetter("spec.rule")
_HANDLE, _OWN_RULE = attrgetter("handle"), attrgetter("rule")


def _rests(handles: Sequence[Any], rows: Sequence[TableState]) -> tuple[list[Any], ...]:
    return list(map(id, handles)), list(map(_HELD, handles)), list(map(_RULE, rows))


def _param_groups(layers: Layers) -> list[dict[str, Any]]:
    if isinstance(layers, nn.Module | Tensor) or not isinstance(layers, Iterable):
        return [{"params": layers}]
    items = list(layers)
    return items if items and isinstance(items[0], dict) else [{"params": items}]


@functools.lru_cache(maxsize=256)
def _make_rule(rule_type: type[Rule], values: tuple[Any, ...], own: Rule | None) -> Rule:
    """Return a rule with these field values. Fixed fields may come from the table's rule."""
    # Cached: a step with the hyperparameters of the last step need not check them again.
    names = (field.name for field in dataclasses.fields(rule_type))  # pyright: ignore[reportArgumentType]
    given = dict(zip(names, values, strict=True))
    for name in rule_type.FIXED:
        if given[name] is None:  # the value of the table's rule
            del given[name]
            if own is not None:
                given[name] = getattr(own, name)
    return rule_type(**given)


_PLAIN = frozenset({float, int, bool, tuple, type(None)})


def _plain(value: Any) -> Any:
    """Return a hyperparameter as a plain value: a tensor lr as a number, a list as a tuple."""
    if isinstance(value, Tensor):
        return value.item()
    return tuple(value) if isinstance(value, list) else value


def _check_clip_value(clip_value: float | None) -> None:
    if clip_value is not None and not (is_number(clip_value) and clip_value > 0):
        raise ArgumentError(f"`clip_value` must be a number > 0, or None: got {clip_value!r}.")


class SGD(RowOptimizer, rule=rules.SGD):
    """Optimizer of rows by `er.SGD`, which documents the formula."""


class Momentum(RowOptimizer, rule=rules.Momentum):
    """Optimizer of rows by `er.Momentum`, which documents the formula."""


class Adagrad(RowOptimizer, rule=rules.Adagrad):
    """Optimizer of rows by `er.Adagrad`, which documents the formula."""


class RowwiseAdagrad(RowOptimizer, rule=rules.RowwiseAdagrad):
    """Optimizer of rows by `er.RowwiseAdagrad`, which documents the formula."""


class RowwiseRMSprop(RowOptimizer, rule=rules.RowwiseRMSprop):
    """Optimizer of rows by `er.RowwiseRMSprop`, which documents the formula."""


class RMSprop(RowOptimizer, rule=rules.RMSprop):
    """Optimizer of rows by `er.RMSprop`, which documents the formula."""


class Adam(RowOptimizer, rule=rules.Adam):
    """Optimizer of rows by `er.Adam`, which documents the formula."""


class AdamW(RowOptimizer, rule=rules.AdamW):
    """Optimizer of rows by `er.AdamW`, which documents the formula."""


class Ftrl(RowOptimizer, rule=rules.Ftrl):
    """Optimizer of rows by `er.Ftrl`, which documents the formula."""
