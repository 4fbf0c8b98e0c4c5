"""A row that was forgotten stays so when a checkpoint of before is loaded, by whatever call."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import embedrock as er
import embedrock.torch as ert
from embedrock.__main__ import main

IDS = torch.tensor([7, 8])


def made(location: Path, in_group: bool) -> Any:
    options: dict[str, Any] = {"init": er.Zeros(), "seed": 0}
    if in_group:
        options |= {
            "group": er.opened(location / "t") or er.Group(path=location / "t", memory="16MiB"),
            "name": "users",
        }
    else:
        options |= {"path": location / "t", "memory": "8MiB"}
    return torch.nn.Sequential(ert.Embedding(None, 4, **options), torch.nn.Linear(4, 1))


def trained(location: Path, in_group: bool) -> Any:
    model = made(location, in_group)
    optimizer = ert.optimizer(model, rows=ert.SGD, dense=torch.optim.SGD, lr=0.1)
    for _ in range(3):
        model(IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def by_save(model: Any, location: Path) -> Callable[[Any], object]:
    ert.save(model, location / "checkpoints", 3)
    return lambda other: ert.load(other, location / "checkpoints")


def by_state_dict(model: Any, location: Path) -> Callable[[Any], object]:
    torch.save(model.state_dict(), location / "model.pt")
    return lambda other: other.load_state_dict(torch.load(location / "model.pt", weights_only=True))


def by_rollback(model: Any, location: Path) -> Callable[[Any], object]:
    number = model[0].table.commit(name="before")
    return lambda other: other[0].table.rollback(number)


@pytest.mark.parametrize("in_group", [False, True], ids=["alone", "in a group"])
@pytest.mark.parametrize("who", ["the layer", "the command", "the layer, not committed"])
@pytest.mark.parametrize("save", [by_save, by_state_dict, by_rollback])
def test_it_stays_forgotten(
    save: Callable[..., Any], who: str, in_group: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = trained(tmp_path, in_group)
    wanted, load = model[0](IDS).detach(), save(model, tmp_path)
    wanted[0] = 0.0  # its first value
    if who == "the command":
        model[0].table.close() if not in_group else model[0].table.group.close()
        (tmp_path / "ids.txt").write_text("7\n")
        assert main(["forget", f"{tmp_path / 't'}{'#users' * in_group}", str(tmp_path / "ids.txt")]) == 0
        model = made(tmp_path, in_group)
    else:
        assert model[0].forget([7]) == 1
        if who == "the layer":
            model[0].table.commit()
    with caplog.at_level(logging.INFO, "embedrock"):
        load(model)
    assert "1 row of commit" in caplog.text
    assert "left out, forgotten since" in caplog.text
    assert torch.equal(model[0](IDS).detach(), wanted)
    assert model[0].table.stats()["rows_withheld"] == 1
    model[0].table.commit()
    model[0].table.group.close() if in_group else model[0].table.close()
    again = made(tmp_path, in_group)
    assert torch.equal(again[0](IDS).detach(), wanted)
    again[0].table.group.close() if in_group else again[0].table.close()


def test_rows_that_are_trained_anew_are_rows_again(tmp_path: Path):
    model = trained(tmp_path, False)
    table = model[0].table
    before = table.commit(name="before")
    table.forget([7])
    table.assign([7], torch.ones(1, 4).numpy())
    after = table.commit(name="after")
    table.assign([7], 2 * torch.ones(1, 4).numpy())
    table.rollback(after)
    assert table.lookup([7]).tolist() == [[1.0] * 4]
    table.rollback(before)
    assert not table.lookup([7]).any()
    table.rollback(after)
    assert table.lookup([7]).tolist() == [[1.0] * 4]
    table.close()


def test_the_command_that_drops_the_bytes_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = trained(tmp_path, False)
    secret = model[0](IDS).detach()[0].numpy().tobytes()
    ert.save(model, tmp_path / "checkpoints", 3)
    model[0].table.close()
    (tmp_path / "ids.txt").write_text("7\n")

    def has_secret() -> bool:
        return any(secret in path.read_bytes() for path in (tmp_path / "t").rglob("*") if path.is_file())

    with er.open(tmp_path / "t") as table:
        table.assign([7], [[1.2345678, 2.3456789, 3.4567891, 4.5678912]])
        secret = table.lookup([7]).tobytes()
        table.commit(name="it's kept")
    assert main(["forget", str(tmp_path / "t"), str(tmp_path / "ids.txt"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in told["kept_commits"]][-1] == "it's kept"
    assert has_secret()
    (command,) = told["remove"]
    assert main(shlex.split(command)[1:]) == 0
    assert not has_secret()
    with er.open(tmp_path / "t") as table:
        assert table.verify().problems == []
        assert len(table.commits()) == 1
        assert table.export()[0].tolist() == [8]


@pytest.mark.parametrize("by", ["hash", "vocabulary"])
def test_the_command_forgets_strings(by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = ["Zoë", "a b", "carol"]
    if by == "hash":
        ids, option = er.hash_ids(names), ["--hash"]
    else:
        with er.Vocabulary(tmp_path / "words") as words:
            ids = words.add(names)
            words.commit()
        option = ["--vocabulary", str(tmp_path / "words")]
    with er.Table(None, 2, rule=er.SGD(lr=0.1), path=tmp_path / "t") as table:
        table.assign(ids, [[1.0, 2.0]] * 3)
        table.commit()
    (tmp_path / "names.txt").write_text("Zoë\n\na b\nnobody\n", encoding="utf-8")
    assert main(["forget", str(tmp_path / "t"), str(tmp_path / "names.txt"), *option]) == 0
    told = capsys.readouterr().out
    assert told.startswith("2 rows of ")
    assert ("(1 string not in the vocabulary)" in told) == (by == "vocabulary")
    with er.open(tmp_path / "t", mode="r") as table:
        assert table.export()[0].tolist() == [ids[2]]
