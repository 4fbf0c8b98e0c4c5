"""What other code does to a parameter or its gradient, done to a handle: right, or an error, and nothing in silence.

`USES` is the table in docs/pytorch.md: `python tests/pytorch/test_other_code.py` writes it there, and a test looks
whether it is there. Each line is run: on a model with `nn.Embedding`, whose results a right one has to equal, and on
one with ours; an error leaves rows and dense weights as they were, and the next step is as if it had not been tried.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.parametrize
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    get_total_norm,
    parameters_to_vector,
    parametrizations,
    prune,
    vector_to_parameters,
)
from torch.optim.swa_utils import AveragedModel

import embedrock as er
import embedrock.torch as ert

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"
BEGIN, END = "<!-- begin: what other code does -->\n", "<!-- end: what other code does -->\n"
ROWS, DIM = 20, 4
IDS = torch.tensor([3, 1, 3, 7])
REFUSED = er.UnsupportedError
WROTE = ert.ForgottenGradientsError

READ = "rows are in the batch, `layer(ids)`, or in `layer.table.export()`"
DENSE = "go through `ert.dense_parameters(model)`"
SET = "change the loss, or the gradient of the output: `layer(ids).register_hook(...)`"
BOTH = "`ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=1e-3)`"


class Model(nn.Module):
    def __init__(self, ours: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(ROWS, DIM)
        self.rows = ert.Embedding(ROWS, DIM) if ours else nn.Embedding(ROWS, DIM)
        self.rows.load_state_dict({"weight": weight})
        torch.manual_seed(1)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rows(ids)).square()


class Case:
    """A model after a backward, what stands for its rows among the parameters, and its optimizer."""

    def __init__(self, ours: bool) -> None:
        self.ours, self.model = ours, Model(ours)
        self.layer: Any = self.model.rows
        self.p: Any = self.layer.handle if ours else self.layer.weight
        self.optimizer: torch.optim.Optimizer = (
            ert.optimizer(self.model, rows=ert.SGD, dense=torch.optim.SGD, lr=0.1)
            if ours
            else torch.optim.SGD(self.model.parameters(), lr=0.1)
        )
        self.backward()

    @property
    def parameters(self) -> list[Any]:
        return list(self.model.parameters())

    @property
    def grads(self) -> list[Any]:
        return [parameter.grad for parameter in self.parameters]

    def backward(self) -> None:
        self.model(IDS).sum().backward()

    def step(self, done: Any = None) -> None:
        """Make a step, after something was done."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        with torch.no_grad():
            return [self.layer(torch.arange(ROWS)).clone(), *(part.clone() for part in self.model.head.parameters())]


class Use(NamedTuple):
    """A line of the table.

    Attributes:
        what: the code does, `p` being a parameter of the model.
        told: what is to be known, or written instead.
        does: does it.
        error: that comes of it, at once or by the next step or forward; None: it is right.
    """

    what: str
    told: str
    does: Callable[[Case], Any]
    error: type[Exception] | None = None


def in_place(name: str) -> Callable[[Case], Any]:
    """Return what calls a method of `p.data`."""
    arguments = {"copy_": [torch.ones(())], "fill_": [1.0], "addcdiv_": [torch.ones(()), torch.ones(())]}
    return lambda case: getattr(case.p.data, name)(*arguments.get(name, []))


def no_grad(does: Callable[[Case], Any]) -> Callable[[Case], Any]:
    return torch.no_grad()(does)


def stepped(make: Callable[[Any], Any]) -> Callable[[Case], Any]:
    return lambda case: make(case.model.parameters()).step(lambda: torch.zeros(()))


def each(*does: Callable[[Case], Any], error: type[Exception]) -> Callable[[Case], Any]:
    """Do several things, each of which has to raise the error."""

    def do(case: Case) -> None:
        for one in does[:-1]:
            with pytest.raises(error):
                one(case)
        does[-1](case)

    return do


def saved_and_back(case: Case) -> None:
    kept = case.p.grad.clone()
    case.optimizer.zero_grad()
    case.p.grad = kept


def copied_back(case: Case) -> None:
    kept = case.p.grad.clone()
    case.p.grad.zero_()
    case.p.grad.copy_(kept)


def surgery(case: Case) -> None:
    one = case.p.grad.clone()
    case.optimizer.zero_grad()
    case.backward()
    case.p.grad = one + case.p.grad


def reduced(case: Case) -> None:
    """Do as an all-reduce in buckets of one process does: no number changes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        bucket = torch.cat([grad.reshape(-1) for grad in case.grads])
        dist.all_reduce(bucket)
        parts = (bucket / 1).split([grad.numel() for grad in case.grads])
        for grad, part in zip(case.grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
    finally:
        dist.destroy_process_group()


def scaled(case: Case) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    case.optimizer.zero_grad()
    scaler.scale(case.model(IDS).sum()).backward()
    scaler.unscale_(case.optimizer)
    scaler.step(case.optimizer)


def noticed(case: Case) -> None:
    seen: list[Any] = []
    case.p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    case.optimizer.zero_grad()
    case.backward()
    assert seen == [case.p.grad.norm().item()]


def noticed_by_layer(case: Case) -> None:
    seen: list[Any] = []
    case.layer.register_full_backward_hook(lambda layer, given, got: seen.append(got[0].shape))
    case.optimizer.zero_grad()
    case.backward()
    assert seen == [(4, DIM)]


def copied(case: Case) -> None:
    other = copy.deepcopy(case.model)
    before = case.weights()
    other.rows(IDS).sum().backward()
    with torch.no_grad():
        assert torch.equal(other.rows(IDS), case.layer(IDS))
    assert all(map(torch.equal, before, case.weights()))


def shown_once(case: Case) -> None:
    assert [p.shape for p in case.parameters if p is case.p] == ([()] if case.ours else [(ROWS, DIM)])
    assert isinstance(case.p, nn.Parameter)
    assert case.p.dtype == torch.float32
    assert not case.ours or ert.num_parameters(case.model) == ROWS * DIM + DIM + 1


def frozen(case: Case) -> None:
    case.layer.requires_grad_(False)
    case.optimizer.zero_grad()
    case.backward()
    assert case.p.grad is None


def tied(case: Case) -> None:
    other: Any = ert.Embedding(case.layer.table) if case.ours else nn.Embedding(ROWS, DIM, _weight=case.layer.weight)
    if not case.ours:
        other.weight = case.layer.weight
    other(IDS + 1).square().sum().backward()


def loaded(case: Case) -> None:
    state = copy.deepcopy(case.model.state_dict())
    case.optimizer.step()
    case.model.load_state_dict(state)


def ema_of_states(case: Case) -> None:
    other = copy.deepcopy(case.model)
    for e, p in zip(other.state_dict().values(), case.model.state_dict().values(), strict=True):
        if e.is_floating_point():
            e.mul_(0.9).add_(p, alpha=0.1)
    other(IDS)


def lerp_of_states(case: Case) -> None:
    one, other = case.model.state_dict(), copy.deepcopy(case.model).state_dict()
    case.model.load_state_dict({key: 0.5 * one[key] + 0.5 * other[key] for key in one})


def converted(case: Case) -> None:
    assert case.model.double()(IDS).dtype == torch.float64
    case.model.float()
    if case.ours:
        assert case.layer.half()(IDS).dtype == torch.float16
        assert case.layer.to(torch.bfloat16)(IDS).dtype == torch.bfloat16
        assert case.layer.table.spec.dtype == "float32"
        case.layer.float()


def moved(case: Case) -> None:
    case.model.to("cpu")
    for p in case.parameters:
        p.data = p.data.to("cpu")


def compiled(case: Case) -> None:
    case.optimizer.zero_grad()
    torch.compile(case.model, backend="eager")(IDS).sum().backward()


def called(case: Case) -> None:
    case.optimizer.zero_grad()
    functional_call(case.model, dict(case.model.named_parameters()), (IDS,)).sum().backward()


def called_with_others(case: Case) -> None:
    parts = {name: p.detach().clone() for name, p in case.model.named_parameters()}
    functional_call(case.model, parts, (IDS,))


def in_transform(transform: Any) -> Callable[[Case], Any]:
    def do(case: Case) -> None:
        transform(lambda parts: functional_call(case.model, parts, (IDS,)).sum())(dict(case.model.named_parameters()))

    return do


def over_ids(case: Case) -> None:
    torch.func.vmap(case.model)(IDS[:, None])


def pushed(case: Case) -> None:
    parts = {name: p.detach() for name, p in case.model.named_parameters()}
    torch.func.jvp(lambda parts: functional_call(case.model, parts, (IDS,)).sum(), (parts,), (parts,))


def resized(case: Case) -> None:
    case.layer.weight.data = torch.cat([case.layer.weight.data, torch.zeros(5, DIM)])


def new_rows(case: Case) -> None:
    """Let folds begin anew; no two seeds draw alike, so that there is nothing to compare but that rows changed."""
    before = case.layer(IDS).detach().clone()
    case.layer.reset_parameters()
    assert not torch.equal(case.layer(IDS), before)
    case.optimizer.zero_grad()
    case.layer.load_state_dict({"weight": torch.ones(ROWS, DIM)})
    case.backward()


GROUPS: dict[str, list[Use]] = {
    "reads the value": [
        Use(
            "`p.norm()`, `p.data.norm()`, `torch._foreach_norm` (AGC, LARC, LARS, logs)",
            f"{READ}; {DENSE}",
            each(
                lambda c: c.p.norm(),
                lambda c: c.p.data.norm(),
                lambda c: torch.linalg.vector_norm(c.p.detach()),
                lambda c: torch._foreach_norm(c.parameters),
                lambda c: get_total_norm(c.parameters),
                error=REFUSED,
            ),
            REFUSED,
        ),
        Use(
            "`p.sum()`, `p.mean()`, `p.abs().max()`, `p.pow(2).sum()` (a penalty)",
            "a penalty on the rows of the batch, below, or the decay of `ert.AdamW`",
            each(
                lambda c: c.p.sum(),
                lambda c: c.p.mean(),
                lambda c: c.p.abs().max(),
                lambda c: c.p.pow(2).sum(),
                lambda c: 0.1 * c.p,
                lambda c: c.p.isfinite(),
                error=REFUSED,
            ),
            REFUSED,
        ),
        Use(
            "`p - q`, `torch.equal(p, q)`, `p.dot(q)` (a distance of two models)",
            "the same of `one(ids)` and `other(ids)`",
            each(
                lambda c: c.p - 1,
                lambda c: 1 - c.p,
                lambda c: torch.equal(c.p, c.p.clone()),
                lambda c: c.p.clone() + c.p,
                lambda c: c.p == 0,
                error=REFUSED,
            ),
            REFUSED,
        ),
        Use(
            "`p.item()`, `p.tolist()`, `p.detach().cpu().numpy()` (histograms)",
            READ,
            each(
                lambda c: c.p.item(),
                lambda c: c.p.tolist(),
                lambda c: c.p.detach().cpu().numpy(),
                lambda c: float(c.p),
                lambda c: c.p.data.clone().numpy(),
                error=REFUSED,
            ),
            REFUSED,
        ),
        Use(
            "`parameters_to_vector`, `torch.stack`, `pickle` of `p.data`",
            DENSE,
            each(
                lambda c: parameters_to_vector(c.model.parameters()),
                lambda c: torch.stack([c.p, c.p]),
                lambda c: pickle.dumps(c.p.data),
                error=REFUSED,
            ),
            REFUSED,
        ),
        Use(
            "`p.shape`, `p.numel()`, `p.dtype`, `isinstance(p, nn.Parameter)`",
            "one float32 for all rows; `ert.num_parameters(model)` counts weights",
            shown_once,
        ),
        Use(
            "`torch.zeros_like(p)`, `p.detach()`, `p.clone()`, `copy.copy(p)`",
            "what comes of it has no rows, and is refused alike where it is read",
            lambda c: (torch.zeros_like(c.p), c.p.detach(), c.p.clone(), repr(c.p.data), copy.copy(c.layer)),
        ),
    ],
    "writes the value": [
        Use(
            "`p.add_(e)`, `p.mul_(1 - decay)`, `p.copy_(q)`, `p.lerp_(q, t)` (SAM, decay by hand, Polyak, EMA)",
            f"{BOTH}, `ert.AdamW`, `ert.average(model, decay)`",
            no_grad(
                each(
                    lambda c: c.p.add_(1.0),
                    lambda c: c.p.mul_(0.9),
                    lambda c: c.p.sub_(c.p.grad * 0.1),
                    lambda c: c.p.data.add_(c.p.grad),
                    lambda c: c.p.copy_(torch.ones(())),
                    lambda c: c.p.zero_(),
                    lambda c: c.p.lerp_(torch.ones(()), 0.5),
                    lambda c: torch._foreach_mul_(c.parameters[:1], 0.9),
                    lambda c: c.p.detach().fill_(1.0),
                    lambda c: c.p.__setitem__(..., 1.0),
                    error=WROTE,
                )
            ),
            WROTE,
        ),
        Use(
            "`p.data = q`, `vector_to_parameters`",
            "`layer.table.assign(ids, values)`",
            each(
                lambda c: setattr(c.p, "data", torch.ones(())),
                lambda c: vector_to_parameters(torch.ones(10), c.model.parameters()),
                error=WROTE,
            ),
            WROTE,
        ),
        Use(
            "`torch.utils.swap_tensors(p, q)`",
            "`layer.table.assign(ids, values)`",
            lambda c: torch.utils.swap_tensors(c.p, nn.Parameter(torch.ones(()))),
            RuntimeError,
        ),
        Use(
            "`nn.init.normal_(p)` and all others",
            "`init=er.Normal(std=0.02)`",
            each(
                lambda c: nn.init.normal_(c.p),
                lambda c: nn.init.constant_(c.p, 1.0),
                lambda c: nn.init.uniform_(c.p),
                lambda c: nn.init.trunc_normal_(c.p),
                error=WROTE,
            ),
            WROTE,
        ),
        Use(
            "an optimizer of others: `torch.optim.AdamW(model.parameters())`, with `foreach` or `fused`, `LBFGS`",
            BOTH,
            each(
                *map(
                    stepped,
                    (
                        torch.optim.SGD,
                        torch.optim.AdamW,
                        lambda ps: torch.optim.AdamW(ps, foreach=True),
                        lambda ps: torch.optim.AdamW(ps, fused=True),
                        torch.optim.LBFGS,
                    ),
                ),
                error=er.EmbedrockError,
            ),
            WROTE,
        ),
        Use(
            "`AveragedModel(model).update_parameters(model)`, as of Lightning's `WeightAveraging`",
            "rows are averaged, as by `ert.average(model, decay)`",
            lambda c: AveragedModel(c.model).update_parameters(c.model),
        ),
    ],
    "writes the gradient": [
        Use(
            "`p.grad *= c`, `p.grad.div_(c)`, `p.grad.data.mul_(c)`, `torch._foreach_mul_`",
            "rows follow",
            lambda c: (
                c.p.grad.mul_(0.5),
                c.p.grad.data.mul_(3.0),
                c.p.grad.div_(2.0),
                torch._foreach_mul_(c.grads, 0.7),
                c.p.grad.neg_(),
            ),
        ),
        Use(
            "`p.grad = p.grad * c`, `p.grad.clone()` put back later",
            "rows follow",
            lambda c: (setattr(c.p, "grad", c.p.grad * 0.5), saved_and_back(c), copied_back(c)),
        ),
        Use(
            "`p.grad = None`, `p.grad.zero_()`, `model.zero_grad(set_to_none=False)`",
            "drops the rows' gradients",
            lambda c: (
                c.p.grad.zero_(),
                c.backward(),
                c.model.zero_grad(set_to_none=False),
                c.backward(),
                setattr(c.p, "grad", None),
                c.backward(),
            ),
        ),
        Use(
            "`clip_grad_norm_` of any order, `clip_grad_value_`, `p.grad.norm()`",
            "of the rows' gradients",
            lambda c: (
                clip_grad_norm_(c.model.parameters(), 0.5),
                clip_grad_norm_(c.model.parameters(), 0.4, norm_type=1),
                clip_grad_value_(c.model.parameters(), 0.01),
                c.p.grad.norm(),
                c.p.grad.data.norm(1),
            ),
        ),
        Use("`GradScaler`, an all-reduce in buckets", "rows follow", lambda c: (reduced(c), scaled(c))),
        Use(
            "`p.grad.copy_(g)`, `p.grad.data.copy_`, `p.grad[...] = g`, `fill_`, `.data =`, `set_`, `_foreach_copy_`",
            "gradients of several losses add up: `(a + b).backward()`",
            each(
                lambda c: c.p.grad.copy_(c.p.grad * 0 + 9),
                lambda c: c.p.grad.data.copy_(torch.tensor(9.0)),
                lambda c: c.p.grad.__setitem__(..., torch.tensor(9.0)),
                lambda c: c.p.grad.fill_(9.0),
                lambda c: setattr(c.p.grad, "data", torch.tensor(9.0)),
                lambda c: c.p.grad.set_(torch.tensor(9.0)),
                lambda c: torch._foreach_copy_(c.grads[:1], [torch.tensor(9.0)]),
                lambda c: c.p.grad.masked_fill_(torch.tensor(True), 9.0),
                lambda c: torch.add(c.p.grad, 1.0, out=c.p.grad),
                error=REFUSED,
            ),
            REFUSED,
        ),
        Use("`p.grad = g`", SET, lambda c: setattr(c.p, "grad", torch.tensor(9.0)), er.ArgumentError),
        Use(
            "`g1 + g2` of two backwards (PCGrad, GradVac, MGDA)",
            "weight the losses: `(w1 * a + w2 * b).backward()`",
            surgery,
            REFUSED,
        ),
        Use(
            "`p.grad.add_(noise)`, `addcmul_`, `sign_`, `nan_to_num_`, `lerp_`",
            SET,
            each(
                lambda c: c.p.grad.add_(1.0),
                lambda c: c.p.grad.addcmul_(torch.ones(()), torch.ones(())),
                lambda c: c.p.grad.sign_(),
                lambda c: torch.nan_to_num_(c.p.grad),
                lambda c: c.p.grad.lerp_(torch.ones(()), 0.5),
                lambda c: c.p.grad.__iadd__(1.0),
                lambda c: torch._foreach_add_(c.grads[:1], 1.0),
                lambda c: c.p.grad.normal_(),
                error=REFUSED,
            ),
            REFUSED,
        ),
        Use("`p.register_hook(f)`", SET, lambda c: c.p.register_hook(lambda grad: grad), REFUSED),
        Use("`p.register_post_accumulate_grad_hook(f)`", "it sees `p.grad`, the norm", noticed),
        Use("`layer.register_full_backward_hook(f)`", "it sees the gradient of the output", noticed_by_layer),
    ],
    "copies, shares, moves": [
        Use("`copy.deepcopy(model)`", "rows are copied; of tables on disk: an error", copied),
        Use("tied weights", "`ert.Embedding(layer.table)`", tied),
        Use(
            "`other.weight = layer.weight`",
            "`ert.Embedding(layer.table)`",
            lambda c: setattr(c.model.head, "weight", c.layer.weight),
            AttributeError,
        ),
        Use("`model.state_dict()`, `load_state_dict`, `torch.save` of it", "rows are in it, once", loaded),
        Use(
            "writes to `model.state_dict().values()`, as an EMA of state dicts",
            "`ert.average(model, decay)`",
            ema_of_states,
            WROTE,
        ),
        Use("a mean of two state dicts", "`ert.average(model, decay)`", lerp_of_states, er.EmbedrockError),
        Use(
            "`pickle`, `torch.save(model)`",
            "`torch.save(model.state_dict(), ...)`",
            lambda c: pickle.dumps(c.model),
            er.EmbedrockError,
        ),
        Use(
            "`model.half()`, `bfloat16()`, `double()`, `to(dtype)`",
            "outputs follow, rows keep their `dtype`",
            converted,
        ),
        Use("`model.to(device)`, `p.data = p.data.to(device)`", "outputs follow; on a GPU the rows, too", moved),
        Use(
            "`model.share_memory()`",
            "train in one process, or with `sharded=`",
            lambda c: c.model.share_memory(),
            REFUSED,
        ),
        Use("`requires_grad_(False)`", "the rows are frozen", frozen),
    ],
    "asks for the layer": [
        Use(
            "`layer.weight`",
            "the error names what there is for each use of it",
            lambda c: c.layer.weight,
            AttributeError,
        ),
        Use("`layer.reset_parameters()`", "rows, their optimizer state and steps begin anew", new_rows),
        Use("`layer.weight.data = ...`, to resize", "`layer.grow(n)`", resized, AttributeError),
        Use(
            "`weight_norm(layer)`, `spectral_norm`, `prune`, `parametrize`",
            "there is no line for it",
            each(
                lambda c: parametrizations.weight_norm(c.layer),
                lambda c: parametrizations.spectral_norm(c.layer),
                lambda c: prune.l1_unstructured(c.layer, "weight", 0.5),
                error=Exception,
            ),
            AttributeError,
        ),
        Use(
            '`parametrize.register_parametrization(layer, "handle", ...)`',
            "there is no line for it",
            lambda c: nn.utils.parametrize.register_parametrization(c.layer, "handle", nn.Tanh()),
            er.EmbedrockError,
        ),
    ],
    "calls the model otherwise": [
        Use("`torch.compile(model)`", "one graph", compiled),
        Use("`functional_call(model, dict(model.named_parameters()), ids)`", "as a call of the model", called),
        Use(
            "`functional_call` with other tensors (MAML)",
            "look rows up outside, `rows = layer(ids)`",
            called_with_others,
            REFUSED,
        ),
        Use(
            "`torch.func.grad`, `jacrev`, `vmap`, `jvp` over the model",
            "look rows up outside, `rows = layer(ids)`",
            each(in_transform(torch.func.grad), in_transform(torch.func.jacrev), pushed, over_ids, error=REFUSED),
            REFUSED,
        ),
        Use(
            "`stack_module_state([model, ...])`",
            "look rows up outside, `rows = layer(ids)`",
            lambda c: torch.func.stack_module_state([c.model, copy.deepcopy(c.model)]),
            REFUSED,
        ),
    ],
}
USES = [pytest.param(use, id=use.what[:40]) for uses in GROUPS.values() for use in uses]


def table() -> str:
    """Return the table of the page."""
    lines = ["| other code | with the handle `p` of a layer | |", "| --- | --- | --- |"]
    for group, uses in GROUPS.items():
        lines.append(f"| **{group}** | | |")
        lines += [f"| {use.what} | {'right' if use.error is None else 'error'} | {use.told} |" for use in uses]
    return "\n".join(lines) + "\n"


def page_with_table(page: str) -> str:
    """Return the page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


@pytest.mark.filterwarnings("ignore:Full backward hook")  # of PyTorch's, for nn.Embedding alike
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which torch.func calls
@pytest.mark.parametrize("use", USES)
def test_a_use(use: Use):
    mine, theirs = Case(ours=True), Case(ours=False)
    before = mine.weights()
    if use.error is None:
        for case in (mine, theirs):
            use.does(case)
    else:
        with pytest.raises(use.error) as found:
            mine.step(use.does(mine))
        assert len(str(found.value)) > 50  # it is one that says what to do
        assert all(map(torch.equal, before, mine.weights()))
        mine.optimizer.zero_grad()
        mine.backward()
    for case in (mine, theirs):
        case.step()
    torch.testing.assert_close(mine.weights(), theirs.weights())


def test_the_page_has_this_table():
    page = PAGE.read_text()
    assert page == page_with_table(page), f"run: {Path(sys.executable).name} {Path(__file__).name}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
