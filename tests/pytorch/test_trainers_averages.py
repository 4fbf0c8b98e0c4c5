"""Averages that trainers make of a model, beside those of the same model with an `nn.Embedding`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.utils.data import DataLoader, TensorDataset

import embedrock as er
import embedrock.torch as ert

ROWS, DIM, EPOCHS = 60, 4, 3
FIRST = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(5))
IDS = torch.randint(0, ROWS - 10, (48,), generator=torch.Generator().manual_seed(6))
EVERY = torch.arange(ROWS)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*overrides the configure_model:UserWarning"),
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


class Model(nn.Module):
    def __init__(self, rows: Any, rule: Any = ert.SGD) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.rows, self.head, self.rule = rows, nn.Linear(DIM, 1), rule

    def forward(self, ids: Tensor) -> Tensor:
        return (self.head(self.rows(ids)) - 1).square().mean()

    def optimizer(self) -> Any:
        if isinstance(self.rows, nn.Embedding):
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return ert.optimizer(self, rows=self.rule, dense=torch.optim.SGD, lr=0.1)


def ours(folder: Path | None = None) -> Model:
    """A model with rows in RAM, or in a folder."""
    path: Any = {} if folder is None else {"path": folder / "rows.rock"}
    layer = ert.Embedding(ROWS, DIM, **path)
    if not path or layer.table.last_commit == 0:
        layer.load_state_dict({"weight": FIRST})
        if path:
            layer.table.commit()
    return Model(layer)


def theirs() -> Model:
    return Model(nn.Embedding.from_pretrained(FIRST.clone(), freeze=False))


def contents(model: Any) -> list[Tensor]:
    with torch.no_grad():
        return [model.rows(EVERY), model.head.weight.clone(), model.head.bias.clone()]


def check_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(contents(one), contents(other), rtol=2e-6, atol=2e-6)


def lit(model: Model) -> Any:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.seen = model, []

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.model(batch[0])

        def validation_step(self, batch: Any, index: int) -> None:
            self.seen.append(self.model(batch[0]).item())

        def configure_optimizers(self) -> Any:
            return self.model.optimizer()

    return Lit()


def fit(model: Model, callbacks: list[Any], epochs: int = EPOCHS, resume: Any = None, **more: Any) -> Any:
    import lightning

    made, saves = lit(model), any("Checkpoint" in type(callback).__name__ for callback in callbacks)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=callbacks, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=saves, **more
    )  # fmt: skip
    loader = DataLoader(TensorDataset(IDS), batch_size=8)
    trainer.fit(made, loader, DataLoader(TensorDataset(IDS[:9]), batch_size=4), ckpt_path=resume)
    return made


def swa() -> Any:
    from lightning.pytorch.callbacks import WeightAveraging

    return WeightAveraging()


def ema(**options: Any) -> Any:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return EMAWeightAveraging(decay=0.9, **options)


def by_epoch() -> Any:
    from lightning.pytorch.callbacks import WeightAveraging

    class ByEpoch(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return epoch_idx is not None

    return ByEpoch(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))


CALLBACKS = [swa, ema, lambda: ema(update_every_n_steps=4, update_starting_at_step=5), by_epoch]


@pytest.mark.parametrize("where", ["RAM", "disk"])
@pytest.mark.parametrize("make", CALLBACKS, ids=["swa", "ema", "late", "epochs"])
def test_averages_of_lightning(make: Callable[[], Any], where: str, tmp_path: Path):
    """Validation sees the averages, training goes on with the rows, and the last model has the averages."""
    mine, other = ours(tmp_path if where == "disk" else None), theirs()
    made = [fit(model, [make()]) for model in (mine, other)]
    check_close(mine, other)
    assert made[0].seen == pytest.approx(made[1].seen, rel=1e-5)
    assert len(set(made[1].seen)) > EPOCHS
    table = mine.rows.table
    np.testing.assert_array_equal(table.lookup(EVERY.numpy()), contents(mine)[0].numpy())  # they are in the table
    if where == "disk":
        table.commit()
        table.close()
        with er.open(tmp_path / "rows.rock", mode="r") as again:
            np.testing.assert_allclose(again.lookup(EVERY.numpy()), contents(other)[0].numpy(), rtol=0, atol=2e-6)


def test_training_goes_on_from_the_averages():
    """A second `fit` begins with the averages of the first."""
    mine, other = ours(), theirs()
    for _ in range(2):
        for model in (mine, other):
            fit(model, [ema()])
        check_close(mine, other)


def checkpoint(folder: Path) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(folder / "lightning", filename="{epoch}", save_top_k=-1, enable_version_counter=False)


@pytest.mark.parametrize("where", ["RAM", "disk"])
def test_a_checkpoint_of_lightning_has_the_averages_and_the_rows(where: str, tmp_path: Path):
    folders = [tmp_path / name for name in ("mine", "whole", "theirs")]
    for folder in folders:
        folder.mkdir()
    kept = [folder if where == "disk" else None for folder in folders]
    mine, other = ours(kept[0]), theirs()
    fit(mine, [ema(), checkpoint(folders[0])], epochs=2)
    fit(other, [ema(), checkpoint(folders[2])], epochs=2)
    check_close(mine, other)
    paths = [folder / "lightning" / "epoch=0.ckpt" for folder in folders]
    # To predict: the state dict of the checkpoint has the averages of its epoch.
    states = [torch.load(path, weights_only=False)["state_dict"] for path in (paths[0], paths[2])]
    for model, state in zip((mine, other), states, strict=True):
        lit(model).load_state_dict(state)
    check_close(mine, other)
    if where == "disk":
        mine.rows.table.rollback(mine.rows.table.last_commit)
        mine.rows.table.close()
    # To train on: rows and averages are those of the epoch.
    resumed, whole = ours(kept[0]), ours(kept[1])
    fit(resumed, [ema(), checkpoint(folders[0])], resume=paths[0])
    fit(whole, [ema()])
    fit(other := theirs(), [ema()])
    check_close(whole, other)
    check_close(resumed, other)
    torch.testing.assert_close(contents(resumed), contents(whole), rtol=1e-6, atol=1e-7)
    for model in (resumed, whole) if where == "disk" else ():
        model.rows.table.commit()
        model.rows.table.close()


REFUSED = [
    {"max_norm": 1.0},
    {"eviction": er.Eviction(max_rows=9)},
    {"admission": er.Admission(2, default="shared")},
]


@pytest.mark.parametrize("options", [*REFUSED, {"dense": True}], ids=str)
@pytest.mark.parametrize("where", ["RAM", "disk"])
def test_rows_that_change_without_a_step_are_refused_before_training(where: str, options: Any, tmp_path: Path):
    own = {} if "dense" in options else options
    layer = ert.Embedding(ROWS, DIM, **own, **({} if where == "RAM" else {"path": tmp_path / "rows.rock"}))
    model = Model(layer, lambda layers, lr: ert.Adam(layers, lr=lr, **({} if own else options)))
    before = [each.clone() for each in ert.dense_parameters(model)]
    with pytest.raises(er.UnsupportedError, match=r"^rows of .* cannot be averaged: with .*Leave that out, or the av"):
        fit(model, [swa()])
    assert all(map(torch.equal, before, ert.dense_parameters(model)))
    assert layer.table.steps == 0
    if where == "disk":
        layer.table.close()


# ---------------------------------------------------------------- PyTorch's averages


FUNCTIONS: dict[str, dict[str, Any]] = {
    "swa": {},
    "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "emas": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "swa_fn": {"avg_fn": swa_utils.get_swa_avg_fn()},
    "warm_up": {"avg_fn": lambda e, p, n: e.lerp(p, 1 - min(0.999, (1 + int(n)) / (10 + int(n))))},
    "by_tensors": {"avg_fn": lambda e, p, n: e.lerp(p, 1 / (n + 1))},
    "parts": {"avg_fn": lambda e, p, n: torch.add(e / 2, p, alpha=0.5).sub_(e - e)},
    "buffers": {"avg_fn": swa_utils.get_ema_avg_fn(0.9), "use_buffers": True},
    "slow": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9999)},
}


def train(models: list[Model], optimizers: list[Any], seed: int = 0) -> None:
    ids = torch.randint(0, 20, (8,), generator=torch.Generator().manual_seed(seed))
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("where", ["RAM", "disk"])
def test_averages_of_pytorch(name: str, where: str, tmp_path: Path):
    models = [ours(tmp_path if where == "disk" else None), theirs()]
    optimizers = [model.optimizer() for model in models]
    averages = [swa_utils.AveragedModel(model, **FUNCTIONS[name]) for model in models]
    for k in range(60 if name == "slow" else 12):
        train(models, optimizers, k)
        for average, model in zip(averages, models, strict=True):
            if k % 3 != 1:
                average.update_parameters(model)
        check_close(averages[0].module, averages[1].module)
    check_close(*models)
    if where == "disk":
        models[0].rows.table.commit()
        models[0].rows.table.close()


def swap(average: Any, model: Any) -> None:
    for a, c in zip(average.parameters(), model.parameters(), strict=True):
        old = a.data.clone()
        a.data.copy_(c.data)
        c.data.copy_(old)


def pair() -> tuple[list[Any], list[Any], list[Any]]:
    models = [ours(), theirs()]
    optimizers = [model.optimizer() for model in models]
    averages = [swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5)) for model in models]
    for seed in range(3):
        train(models, optimizers, seed)
        for average, model in zip(averages, models, strict=True):
            average.update_parameters(model)
    return models, optimizers, averages


def test_a_swap_of_a_model_and_its_average():
    models, optimizers, averages = pair()
    before = contents(models[0])
    for average, model in zip(averages, models, strict=True):
        swap(average.module, model)
    check_close(*models)
    assert not torch.equal(contents(models[0])[0], before[0])
    frozen: Any = ert.freeze(models[0])
    assert torch.equal(frozen.rows(EVERY), contents(models[0])[0])
    with pytest.raises(
        er.UnsupportedError, match=r"cannot be read in the average's place: the layer shows their.* Swap the"
    ):
        averages[0].module.rows(EVERY)
    with pytest.raises(er.UnsupportedError, match=r"cannot be saved: the layer shows their averages.* Swap the model"):
        models[0].state_dict()
    models[0](EVERY).backward()
    with pytest.raises(
        er.UnsupportedError, match=r"cannot be stepped: the layer shows their averages.* Swap the model"
    ):
        optimizers[0].step()
    optimizers[0].zero_grad()
    for use, done in ((copy.deepcopy, "copied"), (ert.average, "averaged")):
        with pytest.raises(
            er.UnsupportedError, match=rf"cannot be {done}: .* or load a state dict into the model\. Aft"
        ):
            use(models[0])
    for average, model in zip(averages, models, strict=True):
        swap(average.module, model)
    assert all(map(torch.equal, contents(models[0]), before))
    for seed in range(3):
        train(models, optimizers, seed)
        for average, model in zip(averages, models, strict=True):
            average.update_parameters(model)
    check_close(*models)
    check_close(averages[0].module, averages[1].module)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_model_that_loads_a_state_trains_on_beside_its_old_average(is_swapped: bool):
    models, optimizers, averages = pair()
    for average, model in zip(averages, models, strict=True):
        state = copy.deepcopy(model.state_dict())
        if is_swapped:
            swap(average.module, model)
        model.load_state_dict(state)
    check_close(*models)
    train(models, optimizers)
    check_close(*models)
    with pytest.raises(er.UnsupportedError, match=r"not known\. Make it anew: ert\.average\(model\)"):
        averages[0].update_parameters(models[0])
    new = [swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5)) for model in models]
    train(models, optimizers, 1)
    for average, model in zip(new, models, strict=True):
        average.update_parameters(model)
    check_close(*models)
    check_close(new[0].module, new[1].module)


def test_a_model_that_takes_its_average_over():
    models, optimizers, averages = pair()
    for average, model in zip(averages, models, strict=True):
        for a, c in zip(average.module.parameters(), model.parameters(), strict=True):
            c.data.copy_(a.data)
    check_close(*models)
    check_close(averages[0].module, averages[1].module)
    np.testing.assert_array_equal(models[0].rows.table.lookup(EVERY.numpy()), contents(models[0])[0].numpy())
    train(models, optimizers)
    for average, model in zip(averages, models, strict=True):
        average.update_parameters(model)
    check_close(*models)
    check_close(averages[0].module, averages[1].module)


WRONG = {
    "a sum": lambda e, p, n: e + p,
    "half of it": lambda e, p, n: 0.5 * e,
    "beyond the rows": lambda e, p, n: 3 * p - 2 * e,
    "a norm": lambda e, p, n: e + p * p.norm(),
    "a number": lambda e, p, n: e * 0.9 + p * 0.1 + 1e-3,
    "a product": lambda e, p, n: e * p,
    "a quotient": lambda e, p, n: e / p,
    "zeros": lambda e, p, n: torch.ones_like(e),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_average_is_refused(name: str):
    model = ours()
    average = swa_utils.AveragedModel(model, avg_fn=WRONG[name])
    optimizer = model.optimizer()
    average.update_parameters(model)
    train([model], [optimizer])
    before = contents(average.module)[0]
    with pytest.raises(er.EmbedrockError, match=r"wrote to the handle of|reads the value of the handle"):
        average.update_parameters(model)
    assert torch.equal(contents(average.module)[0], before)
    assert torch.equal(contents(model)[0], torch.from_numpy(model.rows.table.lookup(EVERY.numpy())))


def test_an_average_of_another_models_rows_is_refused():
    model, other = ours(), ours()
    average = swa_utils.AveragedModel(model)
    swa_utils.AveragedModel(other)
    with pytest.raises(ert.ForgottenGradientsError, match="wrote to the handle of the average of"):
        average.update_parameters(other)


def test_a_backup_of_rows_that_have_changed_is_refused():
    """The pattern of `torch_ema`: `store`, then `restore`. Clones of values hold no rows."""
    models, optimizers, averages = pair()
    backups = [[p.data.clone() for p in model.parameters()] for model in (models[0], averages[0].module)]
    train(models, optimizers)
    averages[0].update_parameters(models[0])
    for model, backup in zip((models[0], averages[0].module), backups, strict=True):
        with pytest.raises(ert.ForgottenGradientsError, match="wrote to the handle of"):
            ert.handles(model)[0].data.copy_(backup[0])


def test_two_averages_of_one_model():
    models = [ours(), theirs()]
    optimizers = [model.optimizer() for model in models]
    both = [[ert.average(models[0], 0.5), swa_utils.AveragedModel(models[0])],
            [swa_utils.AveragedModel(models[1], multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5)),
             swa_utils.AveragedModel(models[1])]]  # fmt: skip
    for seed in range(4):
        train(models, optimizers, seed)
        for averages, model in zip(both, models, strict=True):
            for average in averages:
                average.update_parameters(model)
    for one, other in zip(*both, strict=True):
        check_close(one.module, other.module)


# ---------------------------------------------------------------- the best checkpoint


@pytest.mark.parametrize("where", ["RAM", "disk"])
def test_the_best_checkpoint_of_lightning(where: str, tmp_path: Path):
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    seen: list[list[Tensor]] = []

    class Score(Callback):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("score", float(abs(trainer.current_epoch - 1)))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(contents(pl_module.model))

    model = ours(tmp_path if where == "disk" else None)
    best = ModelCheckpoint(tmp_path / "lightning", monitor="score", mode="min", save_top_k=1)
    made = fit(model, [Score(), best])
    state = torch.load(best.best_model_path, weights_only=False)
    assert state["epoch"] == 1
    made.load_state_dict(state["state_dict"])
    assert all(map(torch.equal, contents(model), seen[1]))
    assert model.rows.table.steps == 2 * 6
    if where == "disk":
        model.rows.table.close()


@pytest.mark.parametrize("where", ["RAM", "disk"])
def test_the_best_model_at_the_end_of_hugging_faces_trainer(where: str, tmp_path: Path):
    import transformers

    seen: list[list[Tensor]] = []

    class Batched(Model):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
            loss = (self.head(self.rows(ids)).squeeze(-1) - 1).square()
            return {"loss": loss.mean(), "logits": loss}

    def score(_: Any) -> dict[str, float]:
        seen.append(contents(model))
        return {"score": float(abs(len(seen) - 2))}

    rows = ours(tmp_path if where == "disk" else None).rows
    model = Batched(rows)
    arguments = transformers.TrainingArguments(
        str(tmp_path / "trainer"), num_train_epochs=4, per_device_train_batch_size=8, use_cpu=True, report_to=[],
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="score",
        greater_is_better=False, disable_tqdm=True, logging_strategy="no", save_total_limit=2,
    )  # fmt: skip
    data: Any = [{"ids": int(k), "labels": 1.0} for k in IDS]
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data[:8], optimizers=(model.optimizer(), None),
        compute_metrics=score,
    )  # fmt: skip
    trainer.train()
    assert len(seen) == 4
    assert all(map(torch.equal, contents(model), seen[1]))
    assert rows.table.steps == 2 * 6
    if where == "disk":
        rows.table.close()


# ---------------------------------------------------------------- averages of other libraries


def ema_of_copies(model: Any) -> Callable[[], None]:
    """As `timm.utils.ModelEmaV3`: a copy, and `lerp` of parameters."""
    shadow = copy.deepcopy(model)
    return lambda: torch._foreach_lerp_(tuple(shadow.parameters()), tuple(model.parameters()), weight=0.1)


def ema_of_states(model: Any) -> Callable[[], None]:
    """As `timm.utils.ModelEmaV2`: a copy, and averages of the tensors in its state dict."""
    shadow = copy.deepcopy(model)

    def update() -> None:
        for e, p in zip(shadow.state_dict().values(), model.state_dict().values(), strict=True):
            e.copy_(0.9 * e + 0.1 * p)
        shadow(IDS)

    return update


def ema_of_clones(model: Any) -> Callable[[], None]:
    """As `torch_ema` and diffusers' `EMAModel`: a list of clones."""
    shadow = [parameter.clone().detach() for parameter in model.parameters()]

    def update() -> None:
        for e, p in zip(shadow, model.parameters(), strict=True):
            e.sub_(0.1 * (e - p))

    return update


@pytest.mark.parametrize("make", [ema_of_copies, ema_of_states, ema_of_clones])
def test_averages_of_other_libraries_are_refused_at_the_first_update(make: Any):
    model = ours()
    update, optimizer = make(model), model.optimizer()
    train([model], [optimizer])
    with torch.no_grad(), pytest.raises(er.EmbedrockError, match=r"ert\.average|reads the value of the handle"):
        update()


def test_a_copy_of_rows_on_disk_is_refused(tmp_path: Path):
    model = ours(tmp_path)
    for make in (ema_of_copies, ema_of_states):
        with pytest.raises(er.UnsupportedError, match=r"deepcopy.*on disk"):
            make(model)
    model.rows.table.close()
