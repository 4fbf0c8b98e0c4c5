"""Trainers that people use: each fits, clips, accumulates, saves, and resumes to the same bits, in RAM and on disk."""

from __future__ import annotations

import copy
import logging
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
from torch.utils.data import DataLoader
from twins import embedding_twins, weight_of

import embedrock.torch as ert
from pages import run_page
from slow import slow

os.environ.setdefault("HF_HUB_OFFLINE", "1")
REPOSITORY = Path(__file__).resolve().parents[2]
ROWS, DIM = 300, 4
IDS = torch.randint(0, ROWS, (48,), generator=torch.Generator().manual_seed(0))
DATA: Any = [{"ids": int(k), "labels": float(k % 2)} for k in IDS]
EPOCHS = 3

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of trainers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty:UserWarning"),
]


class Model(nn.Module):
    """Two tables, one of them on disk if a folder is given, and dense parameters."""

    def __init__(self, folder: Path | None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        path: Any = {} if folder is None else {"path": folder / "users.rock"}
        self.user = ert.Embedding(ROWS, DIM, seed=0 if path else seed, **path)
        self.item = ert.EmbeddingBag(None, DIM, seed=seed, mode="sum")
        self.unused, self.unused_too = ert.Embedding(9, 2), ert.Embedding(9, 2)
        self.dense = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.dense(self.user(ids) + self.item(ids[:, None] * 10**9)).squeeze(-1)
        return {"logits": logits} | ({} if labels is None else {"loss": (logits - labels).square().mean()})


def optimizer_of(model: nn.Module) -> ert.ModelOptimizer:
    return ert.optimizer(model, rows=ert.Adam, dense=torch.optim.AdamW, lr=0.05)


def close(model: Any) -> None:
    """Commit and close what a run leaves open."""
    if model.user.table.is_on_disk:
        model.user.table.commit()
        model.user.table.close()


def result_of(model: Any) -> list[Tensor]:
    """Return all that was trained, and close the model's table."""
    item = model.item(IDS[:, None] * 10**9).detach()
    found = [weight_of(model.user), item, *(p.detach().clone() for p in ert.dense_parameters(model))]
    steps = torch.tensor([model.user.table.steps, model.item.table.steps])
    close(model)
    return [*found, steps]


def check_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert one[-1].tolist() == other[-1].tolist() != [0, 0]
    assert all(map(torch.equal, one, other))


# ---------------------------------------------------------------- one fit of each trainer


def lit_of(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer] = optimizer_of) -> Any:
    """Return a model as Lightning takes it, with an optimizer that is made of it."""
    pl = pytest.importorskip("lightning.pytorch")

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = make(self.model)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)}

    return Lit()


def lightning_trainer(epochs: int, callbacks: list[Any], **arguments: Any) -> Any:
    pl = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=callbacks, **quiet, **arguments)


def lightning_fit(folder: Path, model: Model, epochs: int, resume: bool) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    keep = pl.callbacks.ModelCheckpoint(folder / "lightning", save_last=True)
    trainer = lightning_trainer(epochs, [keep], gradient_clip_val=0.5, accumulate_grad_batches=2)
    last = folder / "lightning" / "last.ckpt" if resume else None
    trainer.fit(lit_of(model), DataLoader(DATA, batch_size=8), ckpt_path=last, weights_only=False)


def accelerate_fit(folder: Path, model: Model, epochs: int, resume: bool, safe: bool = True) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    parts = accelerator.prepare(model, optimizer, scheduler, DataLoader(DATA, batch_size=8))
    model, optimizer, scheduler, loader = parts
    if resume:
        accelerator.load_state(folder / "accelerate")
    for _ in range(epochs - (EPOCHS - 1 if resume else 0)):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if epochs < EPOCHS:
        accelerator.save_state(folder / "accelerate", safe_serialization=safe)


def accelerate_fit_by_torch(folder: Path, model: Model, epochs: int, resume: bool) -> None:
    accelerate_fit(folder, model, epochs, resume, safe=False)


def trainer_fit(folder: Path, model: Model, epochs: int, resume: bool) -> None:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(folder / "trainer"),
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        save_strategy="epoch",
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    optimizers = optimizer_of(model), None
    trainer = transformers.Trainer(model, arguments, train_dataset=DATA, optimizers=optimizers)
    trainer.train(resume_from_checkpoint=resume)


PLACES = [
    (lightning_fit, "in RAM"),
    (accelerate_fit, "on disk"),
    (accelerate_fit_by_torch, "in RAM"),
    (trainer_fit, "on disk"),
    *slow(
        (lightning_fit, "on disk"),
        (accelerate_fit, "in RAM"),
        (accelerate_fit_by_torch, "on disk"),
        (trainer_fit, "in RAM"),
    ),
]


@pytest.mark.parametrize(("fit", "where"), PLACES)
def test_a_run_that_was_cut_short_goes_on_to_the_same_bits(fit: Callable[..., None], where: str, tmp_path: Path):
    folders = [tmp_path / "straight", tmp_path / "resumed"]
    for folder in folders:
        folder.mkdir()
    table = folders if where == "on disk" else [None, None]
    straight = Model(table[0])
    fit(folders[0], straight, EPOCHS, resume=False)

    first = Model(table[1])
    fit(folders[1], first, EPOCHS - 1, resume=False)
    if where == "on disk":  # what comes after the checkpoint is lost
        optimizer = optimizer_of(first)
        first(IDS, IDS % 2)["loss"].backward()
        optimizer.step()
    close(first)
    again = Model(table[1], seed=1)
    fit(folders[1], again, EPOCHS, resume=True)
    check_same(result_of(again), result_of(straight))


def test_every_checkpoint_of_a_table_on_disk_loads(tmp_path: Path):
    """`save_top_k=-1`: tables keep two commits by themselves, and there are more files."""
    pl = pytest.importorskip("lightning.pytorch")
    model, epochs, states = Model(tmp_path), 5, []
    note = pl.callbacks.LambdaCallback(on_train_epoch_end=lambda *_: states.append(weight_of(model.user)))
    keep_all = pl.callbacks.ModelCheckpoint(tmp_path / "all", filename="{epoch}", save_top_k=-1)
    lit = lit_of(model)
    lightning_trainer(epochs, [note, keep_all]).fit(lit, DataLoader(DATA, batch_size=8))
    assert not torch.equal(states[1], states[2])
    for epoch in range(epochs):
        saved = torch.load(tmp_path / "all" / f"epoch={epoch}.ckpt", weights_only=False)["state_dict"]
        lit.load_state_dict(saved)
        assert torch.equal(weight_of(model.user), states[epoch])
    close(model)


def test_trainers_do_what_a_loop_does(tmp_path: Path):
    """Accumulated, clipped and stepped as by hand."""
    model, twin = Model(None), Model(None)
    accelerate_fit(tmp_path, model, EPOCHS, resume=False)
    rows, dense = ert.Adam(twin, lr=0.05), torch.optim.AdamW(ert.dense_parameters(twin), lr=0.05)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (rows, dense)]
    for index, batch in enumerate(list(DataLoader(DATA, batch_size=8)) * EPOCHS):
        (twin(**batch)["loss"] / 2).backward()
        if index % 2:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            for each in (rows, dense):
                each.step()
                each.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
    check_same(result_of(model), result_of(twin))


class Twin(nn.Module):
    def __init__(self, rows: nn.Module, dense: nn.Linear) -> None:
        super().__init__()
        self.rows, self.dense = rows, copy.deepcopy(dense)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.dense(self.rows(ids)).squeeze(-1) - labels).square().mean()}


def test_lightning_clips_each_element(tmp_path: Path):
    """`gradient_clip_algorithm="value"`, as of `nn.Embedding`."""
    layers, dense = embedding_twins(ROWS, DIM), nn.Linear(DIM, 1)
    mine, theirs = (Twin(layer, dense) for layer in layers)
    first, limit = weight_of(layers[0]), 1e-3
    arguments: Any = {"gradient_clip_val": limit, "gradient_clip_algorithm": "value", "enable_checkpointing": False}
    for model, make in (
        (mine, lambda model: ert.optimizer(model, rows=ert.SGD, dense=torch.optim.SGD, lr=1.0)),
        (theirs, lambda model: torch.optim.SGD(model.parameters(), lr=1.0)),
    ):
        lightning_trainer(1, [], **arguments).fit(lit_of(model, make), DataLoader(DATA, batch_size=8))
    moved = weight_of(layers[0]) - first
    assert moved.abs().max() >= 0.99 * limit  # some were clipped
    assert len(moved.abs().unique()) > 2  # not all of them
    torch.testing.assert_close(weight_of(layers[0]), layers[1].weight.detach(), rtol=0, atol=1e-7)
    torch.testing.assert_close(mine.dense.weight, theirs.dense.weight, rtol=0, atol=1e-7)


def test_save_pretrained(tmp_path: Path):
    hub = pytest.importorskip("huggingface_hub")

    class Published(Model, hub.PyTorchModelHubMixin):
        def __init__(self, seed: int = 0) -> None:
            Model.__init__(self, None, seed)

    model = Published()
    optimizer = optimizer_of(model)
    model(IDS, IDS % 2)["loss"].backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "hub")
    again: Any = Published.from_pretrained(tmp_path / "hub", seed=1)
    check_same(result_of(again), result_of(copy.deepcopy(model)))


@pytest.fixture
def _quiet() -> Iterator[None]:
    """Lightning tells about the machine at each fit."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@pytest.mark.usefixtures("_quiet")
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_page(REPOSITORY / "docs" / "trainers.md")


# ---------------------------------------------------------------- rows that processes share, as torchrun starts them

BEGIN = """
import contextlib, os, sys
import torch, embedrock.torch as ert
EPOCHS = int(sys.argv[1])
class Clicks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.users = ert.Embedding(1000, 8, seed=0, path="users.rock", memory="2MiB", sharded=True)
        self.head = torch.nn.Linear(8, 1)
    def forward(self, ids, labels=None):
        logits = self.head(self.users(ids)).squeeze(-1)
        return {"logits": logits} if labels is None else {"logits": logits, "loss": (logits - labels).square().mean()}
def make_model():
    torch.manual_seed(0)
    return Clicks()
def make_optimizer(model):
    return ert.optimizer(model, rows=ert.Adam, dense=torch.optim.AdamW, lr=1e-2)
data = [{"ids": k, "labels": float(k % 2)} for k in range(64)]
"""
OF_LIGHTNING = (
    BEGIN
    + """
import lightning
class LitClicks(lightning.LightningModule):
    def training_step(self, batch, index):
        return self.model(**batch)["loss"]
    def configure_optimizers(self):
        return make_optimizer(self.model)
"""
)
OF_HUGGINGFACE = BEGIN + "import transformers\n"
ENDED = """
table = (lit.model if "lit" in globals() else model).users.table
os.write(1, f"steps {table.steps}\\n".encode())
"""


def recipes() -> dict[str, str]:
    """Return the recipes of the page for rows that processes share, as programs."""
    page = (Path(__file__).parents[2] / "docs/trainers.md").read_text()
    _, _, section = page.partition("## Rows that processes share")
    of_lightning, of_huggingface = re.findall(r"```python no-run:[^\n]*\n(.*?)```", section, re.DOTALL)[:2]
    return {"lightning": OF_LIGHTNING + of_lightning, "transformers": OF_HUGGINGFACE + of_huggingface}


def launched(folder: Path, source: str, epochs: int) -> tuple[list[int], str]:
    """Return the steps that each rank's rows have seen in the end, and what was said."""
    program = folder / "train.py"
    program.write_text(source + ENDED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [*launch, str(epochs)], capture_output=True, text=True, timeout=200, env=environment, cwd=folder
    )
    return [int(steps) for steps in re.findall(r"steps (\d+)", done.stdout)], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_rows_that_processes_share_are_saved_by_all_and_training_goes_on(tmp_path: Path, trainer: str):
    pytest.importorskip(trainer)
    source = recipes()[trainer]
    for epochs, steps in ((1, 4), (3, 12)):
        found, said = launched(tmp_path, source, epochs)
        assert found == [steps] * 2, said[-3000:]
    assert "checkpoints resumed at step 1" in said


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_trainers_that_would_save_them_by_one_process_are_refused_before_training(tmp_path: Path, trainer: str):
    pytest.importorskip(trainer)
    source = recipes()[trainer]
    source = source.replace('save_strategy="no"', 'save_strategy="epoch"').replace("enable_checkpointing=False, ", "")
    source = source.replace("trainer.fit(", "@trainer.fit(").replace("trainer.train(", "@trainer.train(")
    head, _, call = source.partition("@")
    source = f"{head}try:\n    {call.strip()}\nexcept NotImplementedError as error:\n"
    found, said = launched(tmp_path, f"{source}    os.write(2, f'refused: {{error}}\\n'.encode())\n", 1)
    assert found == [0, 0], said[-3000:]
    kind = {"lightning": "Lightning's ModelCheckpoint", "transformers": "with save_strategy='epoch'"}[trainer]
    assert len(re.findall(rf"refused: .*{kind} would save the rows of .* by one process", said)) == 2, said[-3000:]
