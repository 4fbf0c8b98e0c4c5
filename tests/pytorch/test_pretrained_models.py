"""Published models of transformers whose table stays in their files: loaded, generated from, fine-tuned, passed on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert
from pages import run_page
from slow import slow

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers: Any = pytest.importorskip("transformers")
safetensors: Any = pytest.importorskip("safetensors.torch")
load_file, save_file = safetensors.load_file, safetensors.save_file

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"
VOCABULARY, WIDTH = 300, 16
TOKENS = torch.randint(3, VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(0))
TABLE = "model.embed_tokens"

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of transformers
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging = transformers.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    logging.set_verbosity(before)


def publish(folder: Path, seed: int = 0, **options: Any) -> Path:
    """Save a small model in several files, as bfloat16."""
    torch.manual_seed(seed)
    sizes = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.5}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, **sizes, **options)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="10KB")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = publish(tmp_path_factory.mktemp("published") / "base")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def layer_on(folder: Path, **options: Any) -> ert.Embedding:
    return ert.Embedding.from_pretrained(er.FromSafetensors(folder, TABLE), **options)


def replaced(folder: Path, **options: Any) -> Any:
    model = load(folder)
    model.set_input_embeddings(layer_on(folder, **options))
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def generated(model: Any, **options: Any) -> Tensor:
    return model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=5, pad_token_id=0, **options)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_page(PAGE)


# ---------------------------------------------------------------- in the place of nn.Embedding


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.float, nn.Module.bfloat16, nn.Module.eval])
def test_outputs_have_the_same_bits(base: Path, cast: Callable[[Any], Any]):
    model, twin = cast(replaced(base)), cast(load(base))
    assert logits(model).dtype == logits(twin).dtype
    assert torch.equal(logits(model), logits(twin))
    for options in ({}, {"cache_implementation": "static"}, {"num_beams": 2, "do_sample": False}):
        assert torch.equal(generated(model, **options), generated(twin, **options))


def test_a_folder_of_links_as_in_the_cache_of_the_hub(base: Path, tmp_path: Path):
    for file in base.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert torch.equal(logits(replaced(tmp_path)), logits(load(base)))


def test_what_is_saved_has_no_rows_of_the_base(base: Path, tmp_path: Path):
    model = replaced(base, freeze=False)
    model.get_input_embeddings().table.assign([TOKENS[0, 0]], torch.ones(1, WIDTH).numpy())
    assert ert.num_parameters(model) == load(base).num_parameters()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = {key.removeprefix(f"{TABLE}.rows."): tensor for key, tensor in saved.items() if TABLE in key}
    assert sorted(found) == ["ids", "meta", "weight"]
    assert found["ids"].tolist() == [TOKENS[0, 0]]
    again = replaced(base)
    again.load_state_dict(saved)
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(again), logits(load(base)))


def publish_gemma(folder: Path, rows: int) -> Any:
    """Return a small model with a table of its own for each layer. It is saved."""
    torch.manual_seed(0)
    sizes = {"head_dim": 4, "laurel_rank": 4, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]}
    sizes |= {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["sliding_attention", "full_attention"]
    made = transformers.Gemma3nForCausalLM(
        transformers.Gemma3nTextConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, vocab_size_per_layer_input=rows, hidden_size_per_layer_input=8,
            layer_types=kinds, **sizes,
        )
    ).bfloat16()  # fmt: skip
    for name, parameter in made.named_parameters():
        if name.endswith("correct_output_scale"):  # it starts as zeros, which hide the table
            nn.init.ones_(parameter)
    made.save_pretrained(folder)
    return made


def test_a_layer_that_scales(tmp_path: Path):
    publish_gemma(tmp_path, VOCABULARY)
    twin, model = load(tmp_path), load(tmp_path)
    without = ert.Embedding.from_pretrained(er.FromSafetensors(tmp_path, f"{TABLE}_per_layer"))
    model.model.embed_tokens_per_layer, old = without, model.model.embed_tokens_per_layer
    assert not torch.equal(logits(model), logits(twin))
    model.model.embed_tokens_per_layer = old
    recipe = re.search(r"^```python no-run: [^\n]* Gemma 3n\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert recipe
    exec(recipe[1], {"model": model, "folder": tmp_path, "torch": torch, "er": er, "ert": ert})
    assert isinstance(model.model.embed_tokens_per_layer, ert.Embedding)
    assert torch.equal(logits(model), logits(twin))


def test_scales_of_fp8_are_applied(base: Path, tmp_path: Path):
    """transformers takes codes for weights."""
    tensors = {key: tensor for file in base.glob("*.safetensors") for key, tensor in load_file(file).items()}
    rows = tensors[f"{TABLE}.weight"].float()
    scales = rows.abs().amax(1, keepdim=True) / 448
    codes = (rows / scales).to(torch.float8_e4m3fn)
    tensors |= {f"{TABLE}.weight": codes, f"{TABLE}.weight_scale": scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    expected = (codes.float() * scales).bfloat16()
    assert torch.equal(layer_on(tmp_path)(torch.arange(VOCABULARY)), expected)
    twin, loaded = load(base), load(tmp_path)
    assert torch.equal(loaded.get_input_embeddings().weight, codes.bfloat16())
    twin.get_input_embeddings().weight.data = expected
    assert torch.equal(logits(replaced(tmp_path)), logits(twin))


def test_what_a_model_cannot_do_with_the_layer_is_an_error(tmp_path: Path):
    accelerate: Any = pytest.importorskip("accelerate")
    tied = replaced(publish(tmp_path / "tied", tie_word_embeddings=True))
    assert torch.equal(logits(tied), logits(load(tmp_path / "tied")))
    with pytest.raises(AttributeError, match=r"model\.embed_tokens\.weight"):
        tied.tie_weights()
    with pytest.raises(er.ArgumentError, match=r"those of a published table, .* has no further rows: got 308 rows"):
        tied.resize_token_embeddings(VOCABULARY + 8)
    with pytest.raises(er.UnsupportedError, match=r"the rows are not in the model\. First offload the model, and then"):
        accelerate.cpu_offload(tied, execution_device="cpu")
    model = accelerate.cpu_offload(load(tmp_path / "tied"), execution_device="cpu")
    model.set_input_embeddings(layer_on(tmp_path / "tied"))
    assert torch.equal(logits(model), logits(load(tmp_path / "tied")))


LOAD = """
import sys, torch, transformers, embedrock as er, embedrock.torch as ert
def used():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))) >> 10
class WithoutTable(transformers.Gemma3nForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens_per_layer = torch.nn.Identity()
ways = {"mapped": (transformers.Gemma3nForCausalLM, {}), "left out": (WithoutTable, {"dtype": torch.float32})}
(kind, options), before = ways[sys.argv[1]], used()
model = kind.from_pretrained(sys.argv[2], **options)
after = used()
base = er.FromSafetensors(sys.argv[2], "model.embed_tokens_per_layer")
model.model.embed_tokens_per_layer = ert.Embedding.from_pretrained(base, **options)
with torch.no_grad():
    model(torch.tensor([[3, 4]]))
print("MiB", after - before, used() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("how", ["mapped", "left out"])
def test_loading_reads_no_table(tmp_path: Path, how: str):
    """A table of 4 GiB, a file with a hole, beside the weights of a small model."""
    folder, size, name = tmp_path / "big", 4 << 30, "model.embed_tokens_per_layer.weight"
    rows = size // (2 * 16)
    publish_gemma(folder, VOCABULARY)
    tensors = load_file(folder / "model.safetensors")
    assert tensors.pop(name).shape[1] == 16
    save_file(tensors, folder / "rest.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    of_table = {name: {"dtype": "BF16", "shape": [rows, 16], "data_offsets": [0, size]}}
    header = json.dumps(of_table | {"__metadata__": {"format": "pt"}}).encode()
    with open(folder / "table.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    places = dict.fromkeys(tensors, "rest.safetensors") | {name: "table.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size_per_layer_input": rows}))
    command = [sys.executable, "-c", LOAD, how, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(int(each) < 1000 for each in done.stdout.split("MiB")[1].split())


# ---------------------------------------------------------------- rows beside an adapter


def adapted(base: Path, seed: int = 0, **options: Any) -> Any:
    """Return a model with an adapter of PEFT, and rows that train."""
    peft: Any = pytest.importorskip("peft")
    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(load(base), lora)
    model.set_input_embeddings(layer_on(base, freeze=False, **options))
    return model


def plain(base: Path, seed: int = 0, **options: Any) -> Any:
    """Return a model whose last norm trains in the place of an adapter."""
    torch.manual_seed(seed)
    model = load(base).requires_grad_(False)
    model.model.norm.requires_grad_(True)
    model.set_input_embeddings(layer_on(base, freeze=False, **options))
    return model


class SaveRows(transformers.TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        rows = model.get_input_embeddings().state_dict()
        save_file(rows, f"{args.output_dir}/checkpoint-{state.global_step}/rows.safetensors")


def fit(model: Any, folder: Path, epochs: int, resume: str | None = None, **options: Any) -> Any:
    optimizer = ert.optimizer(model, rows=ert.RowwiseAdagrad, dense=torch.optim.AdamW, lr=1e-2)
    if resume is not None:
        model.get_input_embeddings().load_state_dict(load_file(f"{resume}/rows.safetensors"))
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=epochs, per_device_train_batch_size=4, save_strategy="epoch", use_cpu=True,
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, logging_strategy="no", **options,
    )  # fmt: skip
    data: Any = [{"input_ids": row, "labels": row} for row in TOKENS]
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[SaveRows()]
    )
    trainer.train(resume_from_checkpoint=resume)
    return model.eval()


def close(model: Any) -> None:
    table = model.get_input_embeddings().table
    if table.is_on_disk:
        table.commit()
        table.close()


HOW = {
    "accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "bfloat16": {"bf16": True},
    "checkpointed": {"gradient_checkpointing": True},
}


FITS = [
    (adapted, "accumulated", "on disk"),
    (plain, "bfloat16", "in RAM"),
    *slow(
        (adapted, "bfloat16", "in RAM"),
        (adapted, "checkpointed", "in RAM"),
        (plain, "accumulated", "on disk"),
        (plain, "checkpointed", "in RAM"),
    ),
]


@pytest.mark.parametrize(("make", "how", "where"), FITS)
def test_a_run_that_was_cut_short_goes_on_to_the_same_bits(
    base: Path, tmp_path: Path, make: Callable[..., Any], how: str, where: str
):
    def path(name: str) -> dict[str, Any]:
        return {"path": tmp_path / name} if where == "on disk" else {}

    straight = fit(make(base, **path("one.rock")), tmp_path / "straight", 2, **HOW[how])
    first = fit(make(base, **path("two.rock")), tmp_path / "first", 1, **HOW[how])
    (checkpoint,) = (tmp_path / "first").iterdir()
    close(first)
    resumed = fit(make(base, 1, **path("two.rock")), tmp_path / "resumed", 2, str(checkpoint), **HOW[how])
    assert torch.equal(logits(resumed), logits(straight))
    rows = straight.get_input_embeddings()(torch.arange(VOCABULARY)).detach()
    changed = (rows != load(base).get_input_embeddings().weight).any(1).nonzero().flatten()
    assert set(changed.tolist()) <= set(TOKENS.flatten().tolist())
    assert len(changed) > 20
    close(straight)
    close(resumed)


@pytest.mark.parametrize("where", ["in RAM", "on disk"])
def test_base_and_adapter_and_rows_are_the_tuned_model(base: Path, tmp_path: Path, where: str):
    peft: Any = pytest.importorskip("peft")
    (adapter := tmp_path / "adapter").mkdir()
    path: Any = {"path": adapter / "rows.rock"} if where == "on disk" else {}
    tuned = fit(adapted(base, **path), tmp_path / "trainer", 1)
    expected = logits(tuned)
    assert not torch.equal(expected, logits(load(base)))
    tuned.save_pretrained(adapter)
    if where == "in RAM":
        save_file(tuned.get_input_embeddings().state_dict(), adapter / "rows.safetensors")
    close(tuned)
    moved = publish(tmp_path / "cache of somebody else")
    model = load(moved)
    if where == "on disk":
        table = er.open(adapter / "rows.rock", init=er.FromSafetensors(moved, TABLE))
        model.set_input_embeddings(ert.Embedding(table))
    else:
        model.set_input_embeddings(layer_on(moved))
        model.get_input_embeddings().load_state_dict(load_file(adapter / "rows.safetensors"))
    again = peft.PeftModel.from_pretrained(model, adapter).eval()
    assert torch.equal(logits(again), expected)
    with again.disable_adapter():
        assert not torch.equal(logits(again), expected)
    again.get_input_embeddings().table.close()


def test_rows_are_refused_over_another_base(base: Path, tmp_path: Path):
    trained = layer_on(base, freeze=False, path=tmp_path / "rows.rock")
    trained.table.assign([3], torch.ones(1, WIDTH).numpy())
    in_ram = layer_on(base)
    in_ram.table.assign([3], torch.ones(1, WIDTH).numpy())
    trained.table.commit()
    trained.table.close()
    other = publish(tmp_path / "other", seed=1)
    with pytest.raises(er.ArgumentError, match=r"must have first values .* got those of digest"):
        layer_on(other).load_state_dict(in_ram.state_dict())
    with pytest.raises(er.TableFileError, match=r"`init` of .* must be that of the table, .*: got "):
        er.open(tmp_path / "rows.rock", init=er.FromSafetensors(other, TABLE))


def test_the_error_of_a_base_that_is_gone(tmp_path: Path):
    gone = publish(tmp_path / "gone")
    layer_on(gone, freeze=False, path=tmp_path / "rows.rock").table.close()
    gone.rename(tmp_path / "moved")
    remedy = r"there is no folder [^ ]*gone, .* If they are in another folder, pass it: init=er\.FromSafetensors"
    with pytest.raises(er.TableFileError, match=remedy):
        er.open(tmp_path / "rows.rock")
    er.open(tmp_path / "rows.rock", init=er.FromSafetensors(tmp_path / "moved", TABLE)).close()


def test_peft_cannot_load_a_layer_among_its_modules_to_save(base: Path, tmp_path: Path):
    """Its loader knows only keys that the layer has before it is loaded. So the layer refuses a part of its state."""
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    model = peft.get_peft_model(replaced(base), config)
    ert.SGD(model, lr=0.1)
    model.get_input_embeddings().modules_to_save["default"].table.assign([3], torch.ones(1, WIDTH).numpy())
    model.save_pretrained(tmp_path)
    with pytest.raises(er.ArgumentError, match=r"must be .* as its `rows\.meta` says: got none"):
        peft.PeftModel.from_pretrained(replaced(base), tmp_path)
    with pytest.raises(er.UnsupportedError, match=r"deepcopy\(\) is for tables in RAM"):
        peft.get_peft_model(replaced(base, path=tmp_path / "rows.rock"), config)
