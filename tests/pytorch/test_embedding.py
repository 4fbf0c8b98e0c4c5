"""`ert.Embedding` against `nn.Embedding`, argument by argument."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from twins import DIM, ROWS, check_equal, embedding_twins, gradient_of, rows_of, weight_of

import embedrock as er
import embedrock.torch as ert

ARGUMENTS = [
    {},
    {"padding_idx": 3},
    {"padding_idx": 0},
    {"padding_idx": -1},
    {"padding_idx": -ROWS},
    {"max_norm": 1.0},
    {"max_norm": 1.5, "norm_type": 1.0},
    {"max_norm": 0.7, "norm_type": float("inf")},
    {"max_norm": 2.0, "norm_type": 3.0, "padding_idx": 2},
    {"scale_grad_by_freq": True},
    {"scale_grad_by_freq": True, "padding_idx": 1, "max_norm": 1.0},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=repr)
@pytest.mark.parametrize("shape", [(40,), (3, 7, 2), (), (0,), (4, 0)])
def test_like_torch(arguments: dict, shape: tuple[int, ...]):
    mine, theirs = embedding_twins(**arguments)
    assert mine.padding_idx == theirs.padding_idx
    rows, dense = ert.SGD(mine, lr=0.5), torch.optim.SGD(theirs.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids = torch.randint(0, ROWS, shape, generator=generator)
        out, expected = mine(ids), theirs(ids)
        torch.testing.assert_close(out, expected)
        towards = torch.randn(expected.shape, generator=generator)
        for loss, optimizer in ((out - towards, rows), (expected - towards, dense)):
            optimizer.zero_grad()
            loss.square().sum().backward()
        assert theirs.weight.grad is not None
        torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)
        rows.step()
        dense.step()
        check_equal(mine, theirs)


@given(
    ids=st.lists(st.integers(0, ROWS - 1), max_size=60),
    padding_idx=st.none() | st.integers(-ROWS, ROWS - 1),
    max_norm=st.none() | st.floats(0.1, 3.0),
    norm_type=st.sampled_from([1.0, 2.0, 3.5, float("inf")]),
    scale_grad_by_freq=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_any_arguments_like_torch(ids, padding_idx, max_norm, norm_type, scale_grad_by_freq, dtype):
    mine, theirs = embedding_twins(
        padding_idx=padding_idx, max_norm=max_norm, norm_type=norm_type, scale_grad_by_freq=scale_grad_by_freq
    )
    batch = torch.tensor(ids, dtype=dtype)
    out, expected = mine(batch), theirs(batch)
    torch.testing.assert_close(out, expected)
    factors = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    (out * factors).sum().backward()
    (expected * factors).sum().backward()
    assert theirs.weight.grad is not None
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)
    check_equal(mine, theirs)


def test_gradients_and_sgd_are_bit_equal():
    mine, theirs = embedding_twins(ROWS, 64)
    rows, dense = ert.SGD(mine, lr=0.25), torch.optim.SGD(theirs.parameters(), lr=0.25)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        ids, factors = torch.randint(0, ROWS, (200,), generator=generator), torch.randn(200, 64, generator=generator)
        for layer, optimizer in ((mine, rows), (theirs, dense)):
            optimizer.zero_grad()
            (layer(ids) * factors).sum().backward()
            optimizer.step()
        assert torch.equal(weight_of(mine), theirs.weight)


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference_mode", "frozen"])
def test_max_norm_works_in_every_mode(mode: str):
    mine, theirs = embedding_twins(max_norm=1.0)
    ids = torch.arange(5)
    for layer in (mine, theirs):
        layer.train(mode == "train").requires_grad_(mode != "frozen")
        with torch.inference_mode(mode == "inference_mode"), torch.set_grad_enabled(mode != "no_grad"):
            assert (layer(ids).norm(dim=1) <= 1.0 + 1e-6).all()
    check_equal(mine, theirs)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_gradients_without_grad_mode(context):
    layer = ert.Embedding(ROWS, DIM)
    with context():
        assert not layer(torch.arange(3)).requires_grad
    assert layer.eval()(torch.arange(3)).requires_grad  # as with nn.Embedding


def test_made_and_used_in_inference_mode_it_still_trains_later():
    with torch.inference_mode():
        layer = ert.Embedding(ROWS, DIM)
        layer(torch.arange(3))
    optimizer = ert.SGD(layer, lr=1.0)
    layer(torch.arange(3)).sum().backward()
    optimizer.step()
    assert layer.table.stats()["rows_touched"] == 3


def test_frozen_rows_get_no_gradient():
    layer = ert.Embedding(ROWS, DIM).requires_grad_(False)
    assert not layer(torch.arange(3)).requires_grad
    layer.requires_grad_(True)
    assert layer(torch.arange(3)).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_rows(dtype: torch.dtype):
    mine, theirs = embedding_twins(dtype=dtype)
    ids = torch.tensor([1, 2, 1])
    assert mine(ids).dtype == theirs(ids).dtype == dtype
    assert torch.equal(mine(ids), theirs(ids))
    (mine(ids) * 0.5).sum().backward()
    (theirs(ids) * 0.5).sum().backward()
    assert theirs.weight.grad is not None
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["plain", "expanded", "strided"])
def test_16_bit_gradients_are_summed_as_float32(dtype: torch.dtype, form: str):
    layer = ert.Embedding(ROWS, 6, seed=3, dtype=dtype)
    table = er.Table(ROWS, 6, seed=3, dtype=str(dtype)[6:])
    ids = torch.tensor([[1, 2, 1], [5, 1, 7]])
    grads = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(4)).to(dtype)
    forms = {"plain": grads[..., :6].clone(), "expanded": grads[:1, :1, :6].expand(2, 3, 6), "strided": grads[..., ::2]}
    rows = ert.RowwiseRMSprop(layer, lr=0.1, groups=2, weight_decay=0.1)
    table.set_rule(er.RowwiseRMSprop(lr=0.1, groups=2, weight_decay=0.1))
    for _ in range(3):
        out = layer(ids)
        assert torch.equal(out, torch.from_numpy(table.lookup(ids.numpy())).to(dtype))
        out.backward(forms[form])
        rows.step()
        rows.zero_grad()
        table.update(ids.numpy(), forms[form].float().numpy())
    assert torch.equal(weight_of(layer), torch.from_numpy(table.lookup(range(ROWS))).to(weight_of(layer).dtype))


def test_outputs_follow_the_models_dtype():
    layer = ert.Embedding(ROWS, DIM)
    model = nn.Sequential(layer, nn.Linear(DIM, 1)).to(torch.bfloat16)
    assert model(torch.arange(3)).dtype == torch.bfloat16
    assert layer.handle.dtype == torch.float32  # a norm in bfloat16 would scale the rows
    assert layer.table.spec.dtype == "float32"
    model(torch.arange(3)).sum().backward()
    assert gradient_of(layer).count_nonzero() > 0
    assert model.double()(torch.arange(3)).dtype == torch.float64


def test_gradient_of_an_expanded_or_strided_output():
    mine, theirs = embedding_twins()
    for layer in (mine, theirs):
        layer(torch.arange(4)).t()[:, ::2].sum().backward()
    assert theirs.weight.grad is not None
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


def test_strided_ids():
    mine, theirs = embedding_twins()
    ids = torch.arange(20).reshape(4, 5).t()[::2]
    assert torch.equal(mine(ids), theirs(ids))


def test_padding_idx_may_be_any_whole_number():
    layer = ert.Embedding(ROWS, DIM, padding_idx=np.int64(-1))  # pyright: ignore[reportArgumentType]
    assert type(layer.padding_idx) is int
    assert layer.padding_idx == ROWS - 1


def test_padding_idx_of_open_ids_is_checked_too():
    with pytest.raises(er.ArgumentError, match="`padding_idx`"):
        ert.Embedding(None, DIM, padding_idx=1.5)  # pyright: ignore[reportArgumentType]


def test_open_ids():
    layer = ert.Embedding(None, DIM, padding_idx=-7)
    optimizer = ert.SGD(layer, lr=1.0)
    ids = torch.tensor([-7, 2**62, -(2**63), 5])
    before = layer(ids).detach().clone()
    assert before[0].count_nonzero() == 0
    layer(ids).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer(ids), before - torch.tensor([0.0, 1, 1, 1])[:, None])
    assert layer.num_embeddings is None


def test_a_ready_made_table():
    table = er.Table(10, 3, init=er.Constant(2.0), name="ready")
    layer = ert.Embedding(table, padding_idx=1)
    assert layer.table is table
    assert (layer.num_embeddings, layer.embedding_dim) == (10, 3)
    assert layer(torch.tensor([1])).tolist() == [[2.0, 2.0, 2.0]]  # a table's own rows are not zeroed
    assert repr(layer).startswith("Embedding(10, 3, padding_idx=1, name='ready'; 0 rows touched, in RAM, ")


def test_repr_is_that_of_torch_and_says_where_the_rows_are(tmp_path: Path):
    arguments = {"padding_idx": 2, "max_norm": 1.5, "norm_type": 1.0, "scale_grad_by_freq": True}
    layers = ert.Embedding(7, 3, memory="1MiB"), ert.Embedding(7, 3, memory="1MiB", **arguments)
    theirs = nn.Embedding(7, 3), nn.Embedding(7, 3, **arguments)
    took = "0 rows touched, in RAM, 1 B", "1 row touched, in RAM, 113 B"  # that of padding is written
    for mine, its, rows in zip(layers, theirs, took, strict=True):
        assert repr(mine) == f"{repr(its)[:-1]}; {rows} of 1.0 MiB)"
    model = nn.Sequential(ert.Embedding(10**9, 3, path=tmp_path / "users.rock", memory="1MiB"))
    with er.open(tmp_path / "users.rock", mode="r", memory="1MiB") as snapshot:
        assert "users.rock' (read only) behind" in repr(snapshot)
    line = str(model).splitlines()[1]
    assert f"(0): Embedding(1000000000, 3; 0 rows touched, on disk at '{tmp_path}/users.rock' behind a cache in" in line
    assert line.endswith(" of 1.0 MiB)")
    rows_of(model[0]).close()
    assert "; closed)" in str(model)


def test_first_values_are_standard_normal_and_lazy():
    layer = ert.Embedding(10**9, 64, seed=3)
    values = layer(torch.arange(0, 10**9, 10**6))
    assert abs(values.mean().item()) < 0.02
    assert abs(values.std().item() - 1) < 0.02
    assert layer.table.stats()["rows_touched"] == 0


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (torch.tensor([0, ROWS]), er.IdError),
        (torch.tensor([-1]), er.IdError),
        (torch.tensor([0.0]), er.IdTypeError),
        (torch.tensor([True]), er.IdTypeError),
        (torch.tensor([1], dtype=torch.int16), er.IdTypeError),
        (torch.tensor([1], dtype=torch.uint8), er.IdTypeError),
        (torch.eye(3).long().to_sparse(), er.IdTypeError),
        (np.array([1]), er.IdTypeError),
        ([1], er.IdTypeError),
    ],
    ids=str,
)
@pytest.mark.parametrize("layer", [ert.Embedding(ROWS, DIM), ert.EmbeddingBag(ROWS, DIM)], ids=["embedding", "bag"])
def test_wrong_ids(layer, ids, error):
    offsets = torch.tensor([0]) if isinstance(layer, ert.EmbeddingBag) and getattr(ids, "ndim", 1) == 1 else None
    with pytest.raises(error):
        layer(ids, offsets) if offsets is not None else layer(ids)
    assert layer.table.stats()["rows_touched"] == 0


REFUSED = [
    ({"sparse": True}, er.UnsupportedError, "always stepped sparsely"),
    ({"device": "cuda"}, er.UnsupportedError, r"\.to\(device\)"),
    ({"_weight": torch.ones(3, 2)}, er.UnsupportedError, "from_pretrained"),
    ({"paht": "users.rock"}, er.UnknownArgumentError, "no argument `paht`"),
    ({"dtype": torch.float64}, er.ArgumentError, "torch.bfloat16"),
    ({"padding_idx": 3}, er.ArgumentError, r"\[-3, 3\)"),
    ({"padding_idx": -4}, er.ArgumentError, r"\[-3, 3\)"),
    ({"padding_idx": 1.5}, er.ArgumentError, "`padding_idx` must be an int or None: got 1.5"),
    ({"padding_idx": True}, er.ArgumentError, "`padding_idx` must be an int or None: got True"),
    ({"max_norm": -1.0}, er.ArgumentError, "`max_norm`"),
    ({"max_norm": "a"}, er.ArgumentError, "`max_norm` must be a number >= 0, or None: got 'a'"),
    ({"max_norm": True}, er.ArgumentError, "`max_norm`"),
    ({"max_norm": float("nan")}, er.ArgumentError, "`max_norm`"),
    ({"norm_type": "x"}, er.ArgumentError, "`norm_type` must be a number.*'x'"),
    ({"norm_type": None}, er.ArgumentError, "`norm_type`"),
    ({"norm_type": float("nan")}, er.ArgumentError, "`norm_type`"),
    ({"memory": "much"}, er.ArgumentError, "`memory`"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("kind", [ert.Embedding, ert.EmbeddingBag])
def test_refused_arguments(kind, arguments, error, text):
    with pytest.raises(error, match=text):
        kind(3, 2, **arguments)


@pytest.mark.parametrize("kind", [ert.Embedding, ert.EmbeddingBag])
def test_layers_take_and_show_all_options_of_a_table(kind):
    options = {"rule", "seed", "path", "memory", "directory", "on_nonfinite", "name", "policy", "keep", "device_memory"}
    shown = inspect.signature(kind).parameters
    assert (options | {"init", "dtype"}) <= shown.keys()
    assert (shown["device_memory"].default, shown["policy"].default) == (None, "lfu")
    assert options <= inspect.signature(kind.from_pretrained).parameters.keys()
    layers = [kind(3, 2, device_memory="1MiB"), kind.from_pretrained(torch.ones(3, 2), device_memory="1MiB")]
    assert [layer.table.device_memory for layer in layers] == [2**20] * 2


@pytest.mark.parametrize("arguments", [{"embedding_dim": 3}, {"memory": "1GB"}, {"seed": 1}, {"name": "other"}])
def test_a_ready_made_table_brings_its_own_arguments(arguments):
    with pytest.raises(er.ArgumentError, match=f"`{next(iter(arguments))}`.*belongs to the table"):
        ert.Embedding(er.Table(10, 3), **arguments)


def test_a_missing_dim_is_named():
    with pytest.raises(er.ArgumentError, match="`embedding_dim`"):
        ert.Embedding(10)


def test_weight_is_refused_and_says_what_to_use():
    layer = ert.Embedding(ROWS, DIM)
    assert not hasattr(layer, "weight")
    with pytest.raises(AttributeError, match=r"table\.lookup.*table\.assign.*init=.*from_pretrained"):
        nn.init.xavier_uniform_(layer.weight)
    with pytest.raises(AttributeError, match="not a parameter"):
        layer.weight = nn.Parameter(torch.zeros(ROWS, DIM))
    with pytest.raises(AttributeError, match="no attribute 'wieght'"):
        layer.wieght  # noqa: B018


# ---------------------------------------------------------------- the whole table


def test_all_rows_at_once_are_differentiable():
    """A tied head, and the softmax over all rows that goes with it: `layer(torch.arange(n))` is the weight."""
    mine, theirs = embedding_twins()
    for step in range(3):
        for layer, whole in ((mine, mine(torch.arange(ROWS))), (theirs, theirs.weight)):
            hidden = layer(torch.tensor([[1, 2], [2 + step, 5]])).sum(1)
            nn.functional.cross_entropy(hidden @ whole.t(), torch.tensor([4, step])).backward()
        assert theirs.weight.grad is not None
        torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)
        for optimizer in (ert.SGD(mine, lr=0.5), torch.optim.SGD(theirs.parameters(), lr=0.5)):
            optimizer.step()
            optimizer.zero_grad()
    check_equal(mine, theirs)


def test_rows_that_are_propagated_over_a_graph():
    """LightGCN: the mean of all rows over some powers of the adjacency."""
    mine, theirs = embedding_twins()
    adjacency = torch.rand(ROWS, ROWS, generator=torch.Generator().manual_seed(1)) / ROWS
    found = []
    for whole in (mine(torch.arange(ROWS)), theirs.weight):
        hops = [whole, adjacency @ whole, adjacency @ (adjacency @ whole)]
        final = torch.stack(hops).mean(0)
        (final[[1, 2, 3]] * final[[4, 5, 6]]).sum().backward()
        found.append(final)
    torch.testing.assert_close(*found)
    assert theirs.weight.grad is not None
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


def test_weight_names_what_to_use_for_all_rows():
    with pytest.raises(AttributeError, match=r"For all rows at once, as a head or a softmax needs them, call .*arange"):
        ert.Embedding(ROWS, DIM).weight  # noqa: B018


# ---------------------------------------------------------------- numbers of parameters


def test_num_parameters(tmp_path: Path):
    table = er.Table(None, 3)
    tied = [ert.Embedding(10**9, 64), ert.Embedding(table), ert.EmbeddingBag(table)]
    on_disk = ert.Embedding(1000, 2, path=tmp_path / "t.rock")
    model = nn.Sequential(*tied, on_disk, nn.Linear(4, 5))
    table.assign([5, -7], np.ones((2, 3)))
    on_disk.table.assign([1], np.ones((1, 2)))
    assert ert.num_parameters(model) == 64 * 10**9 + 2 * 3 + 2000 + 25
    assert ert.num_parameters(model, touched=True) == 2 * 3 + 2 + 25
    assert ert.num_parameters(nn.Linear(4, 5)) == 25
    on_disk.table.commit()
    on_disk.table.close()
