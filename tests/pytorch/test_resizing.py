"""`resize_token_embeddings` of transformers on models whose input embeddings are ours, beside those of `nn.Embedding`.

The cases are those of transformers' own tests: more rows, fewer rows, a multiple, a head that is tied and one that is
not. Both models draw from one generator, so all rows must be equal.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import embedrock as er
import embedrock.torch as ert
from embedrock.torch.layers.row_layer import RowLayer
from slow import slow

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers: Any = pytest.importorskip("transformers")

WORDS, WIDTH = 40, 8
IDS = torch.randint(3, WORDS - 15, (2, 5), generator=torch.Generator().manual_seed(0))
BERT = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
GPT2 = {"n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 1}
BART = {
    **{"d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2},
    **{"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "forced_eos_token_id": 2},
}
UNTIED = {"tie_word_embeddings": False}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT without a head": ("BertModel", "BertConfig", BERT),
    "BERT": ("BertForMaskedLM", "BertConfig", BERT),
    "BERT, untied": ("BertForMaskedLM", "BertConfig", BERT | UNTIED),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "GPT-2, untied": ("GPT2LMHeadModel", "GPT2Config", GPT2 | UNTIED),
    "BART": ("BartForConditionalGeneration", "BartConfig", BART),
}
FAST = "BERT, untied", "GPT-2"
of_each_model = pytest.mark.parametrize("name", [*FAST, *slow(*(name for name in MODELS if name not in FAST))])

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging = transformers.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def make(name: str) -> Any:
    kind, config, sizes = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(vocab_size=WORDS, **sizes)).eval()


def with_ours(model: Any, **options: Any) -> ert.Embedding:
    """Give a model a layer of the same rows, and return the layer."""
    old = model.get_input_embeddings()
    layer = ert.Embedding(WORDS, WIDTH, padding_idx=old.padding_idx, rule=er.Adam(lr=0.1), **options)
    layer.table.assign(np.arange(WORDS), old.weight.detach().numpy())
    model.set_input_embeddings(layer)
    assert model.get_input_embeddings() is layer
    return layer


def resize(model: Any, *args: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    return model.resize_token_embeddings(*args, **options)


def check_same(model: Any, twin: Any, layer: ert.Embedding, cut: int = WORDS) -> None:
    """Fail unless a model has the rows, sizes and old rows of the head that its twin has."""
    rows = twin.get_input_embeddings()
    assert model.get_input_embeddings() is layer
    assert layer.num_embeddings == rows.num_embeddings == rows.weight.shape[0]
    assert torch.equal(layer(torch.arange(rows.num_embeddings)), rows.weight)
    assert layer.padding_idx == rows.padding_idx
    assert model.config.vocab_size == twin.config.vocab_size == rows.num_embeddings
    assert not any(isinstance(each, nn.Embedding) and len(each.weight) == WORDS for each in model.modules())
    head, expected = model.get_output_embeddings(), twin.get_output_embeddings()
    if head is None:
        assert expected is None
    else:
        new = slice(None) if not twin.config.tie_word_embeddings else slice(cut)  # in ours, a tied head is one alone
        assert head.weight.shape == expected.weight.shape
        assert torch.equal(head.weight[new], expected.weight[new])
        assert head.out_features == expected.out_features
        assert (head.bias is None) == (expected.bias is None)
        assert head.bias is None or torch.equal(head.bias, expected.bias)
    with torch.no_grad():
        out, other = (each(IDS)[0] for each in (model, twin))
    assert torch.equal(out[..., :cut], other[..., :cut])


@of_each_model
def test_what_transformers_tests(name: str):
    model, twin = make(name), make(name)
    layer = with_ours(model)
    for size, options in (
        (WORDS + 10, {}),
        (WORDS + 10, {}),  # again, as a cell that is run twice
        (WORDS - 15, {}),
        (WORDS, {"mean_resizing": False}),
        (WORDS + 3, {"pad_to_multiple_of": 32}),
        (None, {"pad_to_multiple_of": 10}),
        (None, {}),
    ):
        results = [resize(each, size, **options) for each in (model, twin)]
        check_same(model, twin, layer, cut=WORDS - 15)
        shapes = [result.weight.shape for result in results if not isinstance(result, RowLayer)]
        assert set(shapes) == {twin.get_input_embeddings().weight.shape}
        assert "Bart" in type(model).__name__ or results[0] is layer
    tied = int(twin.config.tie_word_embeddings and model.get_output_embeddings() is not None)
    assert len(list(model.parameters())) == len(list(twin.parameters())) + tied
    ids = torch.full_like(IDS, model.config.vocab_size - 1)
    model(ids)[0].sum().backward()
    with pytest.raises(ValueError, match="which is not and integer"):
        resize(model, WORDS, pad_to_multiple_of=1.3)
    check_same(model, twin, layer, cut=WORDS - 15)


def test_rows_come_from_the_mean_of_the_old_ones():
    model = make("GPT-2")
    layer = with_ours(model)
    resize(model, WORDS + 10)
    rows = layer(torch.arange(WORDS + 10)).detach()
    torch.testing.assert_close(rows[WORDS:].mean(0), rows[:WORDS].mean(0), atol=1e-3, rtol=1e-1)


class TiedHead(nn.Module):
    """A head whose rows are those of the table."""

    def __init__(self, layer: ert.Embedding) -> None:
        super().__init__()
        self.rows = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.rows(torch.arange(self.rows.num_embeddings or 0)))


@pytest.mark.parametrize("shares", ["the layer", "the table"])
def test_a_head_that_shares_the_table_grows_with_it(shares: str):
    model, twin = make("GPT-2"), make("GPT-2")
    layer = with_ours(model)
    model.set_output_embeddings(TiedHead(layer if shares == "the layer" else ert.Embedding(layer.table)))
    for size in (WORDS + 10, WORDS - 15):
        assert resize(model, size) is layer
        resize(twin, size)
        assert torch.equal(layer(torch.arange(size)), twin.lm_head.weight)
        with torch.no_grad():
            assert model(IDS).logits.shape[-1] == size
            assert torch.equal(model(IDS).logits, twin(IDS).logits)


@pytest.mark.parametrize("on_disk", [False, True])
def test_training_goes_on(on_disk: bool, tmp_path: Path):
    """Old rows keep their optimizer state; new rows begin theirs, as rows of a grown table that were assigned."""
    model = make("BERT, untied")
    layer = with_ours(model, seed=1, **({"path": tmp_path / "t"} if on_disk else {}))
    optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.SGD, lr=0.1)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(ids)[0].square().mean().backward()
        optimizer.step()

    step(IDS)
    expected = er.Table(WORDS, WIDTH, rule=layer.table.rule, seed=1)
    expected.load_state(layer.table)
    resize(model, WORDS + 10)
    expected.grow(WORDS + 10)
    new = np.arange(WORDS, WORDS + 10)
    expected.assign(new, layer.table.lookup(new))
    copied = er.Table(WORDS + 10, WIDTH, rule=layer.table.rule)
    copied.load_state(layer.table)
    for name, values in expected.state().items():
        np.testing.assert_array_equal(copied.state()[name], values)
    before = layer.table.lookup([WORDS + 9])
    optimizer = ert.optimizer(model, rows=optimizer.rows, dense=torch.optim.SGD, lr=0.1)  # the head has other weights
    step(IDS + 25)
    assert layer.table.steps == expected.steps + 1
    assert (layer.table.lookup([WORDS + 9]) != before).any() == bool((IDS + 25 == WORDS + 9).any())
    if on_disk:
        layer.table.commit()
        layer.table.close()
        with er.open(tmp_path / "t") as table:
            assert table.rows == WORDS + 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_made_of_weights(dtype: torch.dtype):
    """Its first values come from an array, which gets more rows."""
    model, twin = (make("GPT-2").to(dtype) for _ in range(2))
    layer = ert.Embedding.from_pretrained(model.get_input_embeddings().weight.detach(), freeze=False)
    model.set_input_embeddings(layer)
    for each in (model, twin):
        resize(each, WORDS + 10)
    assert torch.equal(layer(torch.arange(WORDS + 10)), twin.get_input_embeddings().weight)
    again = ert.Embedding.from_pretrained(make("GPT-2").to(dtype).get_input_embeddings().weight.detach(), freeze=False)
    other = make("GPT-2").to(dtype)
    other.set_input_embeddings(again)
    other.resize_token_embeddings(WORDS + 10)  # as when a script resumes: other draws, and then the saved rows
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(torch.arange(WORDS + 10)), layer(torch.arange(WORDS + 10)))


@pytest.mark.parametrize(
    ("make_layer", "problem"),
    [
        (lambda: ert.Embedding(None, WIDTH), "takes any int64 as an id"),
        (lambda: ert.Embedding(WORDS, WIDTH, rule=er.AdamW(dense=True)), "cannot be assigned under AdamW"),
        (lambda: ert.Embedding(WORDS, WIDTH, memory="2KiB", directory="direct"), "2.0 KiB may be used"),
        (lambda: ert.Embedding(WORDS, WIDTH, eviction=er.Eviction(max_rows=5)), "may have 5 rows"),
    ],
)
def test_what_cannot_be_resized_stays_as_it_is(make_layer: Any, problem: str):
    model = make("GPT-2, untied")
    layer, head = make_layer(), model.lm_head.weight.clone()
    model.set_input_embeddings(layer)
    before = layer(torch.arange(WORDS)).detach()
    with pytest.raises((er.EmbedrockError, NotImplementedError), match=problem):
        model.resize_token_embeddings(WORDS + 100)
    assert model.get_input_embeddings() is layer
    assert layer.num_embeddings in (None, WORDS)
    assert torch.equal(layer(torch.arange(WORDS)), before)
    assert torch.equal(model.lm_head.weight, head)
    assert model.config.vocab_size == WORDS
    assert not {"get_input_embeddings", "tie_weights"} & model.__dict__.keys()


def test_a_published_table_has_no_further_rows(tmp_path: Path):
    model = make("GPT-2")
    model.save_pretrained(tmp_path)
    layer = ert.Embedding.from_pretrained(er.FromSafetensors(tmp_path, "transformer.wte"))
    model.set_input_embeddings(layer)
    with pytest.raises(er.ArgumentError, match=r"published table.* has no further rows"):
        model.resize_token_embeddings(WORDS + 10)
    assert (layer.num_embeddings, model.config.vocab_size) == (WORDS, WORDS)


ORDERS = {
    "transformers first": "import transformers, torch, embedrock.torch as ert; layer = ert.Embedding(40, 8)",
    "transformers last": "import torch, embedrock.torch as ert; layer = ert.Embedding(40, 8); import transformers",
    "the model first": "import torch, transformers; make = lambda: transformers.GPT2Model(transformers.GPT2Config("
    "vocab_size=40, n_embd=8, n_layer=1, n_head=2)); model = make(); import embedrock.torch as ert; "
    "layer = ert.Embedding(40, 8)",
}
RUN = """
transformers.logging.set_verbosity_error()
config = transformers.GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2)
model = globals().get("model") or transformers.GPT2Model(config)
model.set_input_embeddings(layer)
assert model.resize_token_embeddings(48) is layer and layer.num_embeddings == 48
plain = transformers.GPT2Model(config)
assert type(plain.resize_token_embeddings(50)) is torch.nn.Embedding and plain.config.vocab_size == 50
"""


@pytest.mark.parametrize("order", ["transformers last", *slow("transformers first", "the model first")])
def test_the_order_of_imports_does_not_matter(order: str):
    done = subprocess.run([sys.executable, "-c", f"{ORDERS[order]}\n{RUN}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
