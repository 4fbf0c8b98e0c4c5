"""`optimizer`: one `torch.optim.Optimizer` for rows and dense parameters of a model, as trainers need it."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from embedrock.errors import ArgumentError, UnknownArgumentError, UnsupportedError, counted, did_you_mean
from embedrock.torch.optim import RowOptimizer
from embedrock.torch.training.backward import as_it_is
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.parameters import dense_parameters
from embedrock.torch.training.unapplied import BOTH

Optimizer = torch.optim.Optimizer

SHOWN = 3  # parameter names in an error message


def optimizer(
    model: nn.Module,
    rows: RowOptimizer | Callable[..., RowOptimizer],
    dense: Optimizer | Callable[..., Optimizer] | None = None,
    lr: float | None = None,
    **others: Any,
) -> ModelOptimizer:
    """Make one optimizer of a whole model: of its embedding layers' rows and all other parameters.

    Args:
        model: model with embedding layers. It may have no other parameters.
        rows: one of Embedrock's optimizers. It is a class (``ert.Adam``), another function of the model
            (``functools.partial(ert.Adam, lr=1e-2)``), or an optimizer of layers of the model.
        dense: one of PyTorch's optimizers. It is a class, another function of the parameters, or an optimizer of
            ``ert.dense_parameters(model)``. A model without dense parameters needs none.
        lr: learning rate of the optimizers that this function makes; None: their defaults. If both are classes, their
            defaults must be equal.
        others: none are accepted. Pass arguments of one optimizer by `functools.partial`.

    Raises:
        ArgumentError: `rows` or `dense` is missing, or gives something else. Or no optimizer takes `lr`, or the two
            defaults of `lr` differ.
        UnknownArgumentError: an argument is unknown.

    Example:
        >>> import embedrock.torch as ert
        >>> model = nn.Sequential(ert.Embedding(10**9, 4), nn.Linear(4, 1))
        >>> optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.AdamW, lr=1e-3)
        >>> model(torch.tensor([3, 14])).sum().backward()
        >>> optimizer.step(); optimizer.zero_grad()
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.001, 0.001]
    """
    for name in others:
        raise UnknownArgumentError(
            f"ert.optimizer has no argument `{name}`: it takes rows, dense and lr. What is for one of the two "
            f"optimizers, functools.partial gives to it: dense=functools.partial(torch.optim.Adam, {name}=...)."
            f"{did_you_mean(name, ('model', 'rows', 'dense', 'lr'))}"
        )
    if lr is not None and isinstance(rows, Optimizer) and isinstance(dense, Optimizer):
        raise ArgumentError("`lr` of ert.optimizer is for optimizers that it makes: both of these have their own.")
    weights = dense_parameters(model)
    if weights and dense is None:
        names = [repr(name) for name, parameter in model.named_parameters() if not isinstance(parameter, Handle)]
        some = f"{', '.join(names[:SHOWN])}{', ...' * (len(names) > SHOWN)}"
        raise ArgumentError(
            f"`dense` of ert.optimizer must step what the model has beside rows, {counted(len(names), 'parameter')} "
            f"({some}): got None. For example: {BOTH}."
        )
    if weights and lr is None:
        _check_same_rate(rows, dense)
    # First the checks that change no table: rows get their rule when all else is right.
    of_weights = _made("dense", dense, Optimizer, weights, lr) if weights or isinstance(dense, Optimizer) else None
    return ModelOptimizer(_made("rows", rows, RowOptimizer, model, lr), of_weights)


def _check_same_rate(rows: Any, dense: Any) -> None:
    """Raise an error if the default learning rates of rows and dense parameters differ."""
    mine, other = _default_rate(rows), _default_rate(dense)
    if mine is not None and other is not None and mine != other:
        name = f"ert.{_class_of(rows).__name__}"
        raise ArgumentError(
            f"`lr` of ert.optimizer is missing, and the defaults differ: {name} would step the rows by {mine}, "
            f"{_class_of(dense).__name__} all else by {other}. Pass lr=..., a rate for both, or rates of their own: "
            f"rows=functools.partial({name}, lr={mine})."
        )


def _default_rate(given: Any) -> float | None:
    """Return the default learning rate of an optimizer class; None if it is unknown."""
    made = _class_of(given)
    has_rate = isinstance(given, functools.partial) and (given.args or "lr" in given.keywords)
    if has_rate or not (isinstance(made, type) and issubclass(made, Optimizer)):
        return None
    rate = inspect.signature(made).parameters.get("lr")
    return rate.default if rate is not None and isinstance(rate.default, int | float) else None


def _class_of(given: Any) -> Any:
    return given.func if isinstance(given, functools.partial) else given


def _made(name: str, given: Any, kind: type, of: Any, lr: float | None) -> Any:
    """Return an optimizer: the given one, or the result of a class or function for `of`."""
    if isinstance(given, type) and not issubclass(given, kind):
        raise _wrong(name, given.__name__)
    if not isinstance(given, Optimizer) and callable(given):
        given = given(of) if lr is None else given(of, lr=lr)
    if not isinstance(given, kind) or isinstance(given, RowOptimizer) != (kind is RowOptimizer):
        raise _wrong(name, repr(given))
    return given


def _wrong(name: str, got: str) -> ArgumentError:
    whose = "Embedrock's (ert.Adam)" if name == "rows" else "PyTorch's (torch.optim.Adam)"
    return ArgumentError(
        f"`{name}` of ert.optimizer must be an optimizer of {whose}, or make one: got {got}. For example: {BOTH}."
    )


def _parameters(part: Any) -> list[Any]:
    """Return the parameters of an entry of a param group: a module, a parameter, or one with its name."""
    return list(part.parameters()) if isinstance(part, nn.Module) else [part[1] if isinstance(part, tuple) else part]


class ModelOptimizer(Optimizer):
    """Optimizer that combines an optimizer of rows and one of dense parameters. `optimizer` makes it.

    The param groups are the same dicts as in the two optimizers. So a scheduler's changes reach both. A step steps the
    rows first. If that raises an error, nothing has changed.

    Args:
        rows: optimizer of rows.
        dense: optimizer of all else; None without dense parameters.

    Attributes:
        rows, dense: the two optimizers.

    Example:
        >>> import embedrock.torch as ert
        >>> model = nn.Sequential(ert.Embedding(10, 4), nn.Linear(4, 1))
        >>> optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=1e-3)
        >>> type(optimizer.rows).__name__, type(optimizer.dense).__name__, len(optimizer.param_groups)
        ('Adam', 'Adam', 2)
    """

    rows: RowOptimizer
    dense: Optimizer | None
    _owners: list[Optimizer]  # of each param group

    def __init__(self, rows: RowOptimizer, dense: Optimizer | None) -> None:
        if dense is not None and any(isinstance(p, Handle) for group in dense.param_groups for p in group["params"]):
            raise ArgumentError(
                "`dense` of ert.optimizer must be made of ert.dense_parameters(model): it was given handles of "
                f"embedding layers too, whose rows it cannot step. For example: {BOTH}."
            )
        if isinstance(dense, torch.optim.LBFGS):
            raise UnsupportedError(
                "torch.optim.LBFGS calls a closure many times in a step, in which rows would change once: step it "
                "and an optimizer of rows by hand."
            )
        known = {} if dense is None else dense.defaults
        shared = {name: value for name, value in rows.defaults.items() if dense is None or name in known}
        owners: list[Optimizer] = [part for part in (rows, dense) if part is not None for _ in part.param_groups]
        # as after unpickling, because PyTorch's __init__ would make its own param groups
        self.__setstate__({"defaults": shared, "rows": rows, "dense": dense, "_owners": owners})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Param groups of both optimizers, in the order in which they were added."""
        groups = {id(part): iter(part.param_groups) for part in self._parts}
        return [next(groups[id(owner)]) for owner in self._owners]

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """State of the dense parameters. The state of rows is with the rows."""
        return (self.dense or self.rows).state

    @property
    def _parts(self) -> list[Optimizer]:
        return [part for part in (self.rows, self.dense) if part is not None]

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("defaults", "rows", "dense", "_owners")}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to one of the optimizers: layers or handles, or dense parameters.

        Raises:
            ArgumentError: the group mixes both, or has dense parameters without an optimizer for them.
        """
        params = param_group["params"]
        several = [params] if isinstance(params, nn.Module | torch.Tensor) else list(params)
        are_handles = {isinstance(parameter, Handle) for part in several for parameter in _parameters(part)}
        if len(are_handles) > 1:
            raise ArgumentError(
                "a param group of ert.optimizer must be of embedding layers or of dense parameters: got both. Add "
                "two, of ert.handles(module) and of ert.dense_parameters(module)."
            )
        owner = self.rows if True in are_handles else self.dense
        if owner is None:
            raise ArgumentError(
                "a param group of dense parameters needs an optimizer of these: the model had none when "
                "ert.optimizer was called. Call it again."
            )
        owner.add_param_group({**param_group, "params": params if isinstance(params, nn.Module) else several})
        self._owners.append(owner)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the param groups and the dense parameters' state. Rows and their state are in the model's state dict.

        Raises:
            ValueError: the state dict has other param groups, as for PyTorch's optimizers.
            ArgumentError: the state dict belongs to another optimizer of rows.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        sizes, expected = ([len(group["params"]) for group in each] for each in (groups, self.param_groups))
        if sizes != expected:
            raise ValueError(f"a state of this optimizer must have param groups of {expected} parameters: got {sizes}.")
        for part in self._parts:
            own = [group for group, owner in zip(groups, self._owners, strict=True) if owner is part]
            indices = {index for group in own for index in group["params"]}
            state = {index: value for index, value in state_dict["state"].items() if index in indices}
            part.load_state_dict({"state": state, "param_groups": own})
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @as_it_is
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the rows, as `RowOptimizer.step` does, then the dense parameters.

        Args:
            closure: computes the loss and its gradients anew. It is called once.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    @as_it_is
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of rows and dense parameters."""
        for part in self._parts:
            part.zero_grad(set_to_none)
