"""What people do with Embedrock, for `platforms` to do on other systems. Each returns a digest of all rows it got."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er
from embedrock.cli.main import main

IDS = np.array([[3, 14], [3, 999]])
ROWS, DIM = 1000, 4


def _digest(*arrays: Any) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()


def _steps(table: er.Table, batches: int = 3) -> None:
    rng = np.random.default_rng(0)
    for _ in range(batches):
        ids = rng.integers(0, ROWS, 200)
        plan = table.plan(ids)
        table.apply(plan, np.tanh(table.read(plan)) + 1)
    table.update(IDS, np.ones((*IDS.shape, DIM), np.float32), lr=0.5)


def ram() -> str:
    """Train tables in RAM of every directory, save them and load them; ask them all they tell."""
    got = []
    for rows in (ROWS, 10**9, None):
        table, other = (er.Table(rows, DIM, rule=er.Adam(lr=0.1), seed=1, memory="16MiB") for _ in range(2))
        _steps(table)
        other.load_state(table.state())
        assert "in RAM" in repr(table)
        assert 0 < table.stats()["bytes_used"] <= 16 << 20
        got += [table.lookup(np.arange(ROWS)), other.lookup(IDS)]
    er.Table(10**9, DIM).close()  # of the default budget
    return _digest(*got)


def command_line() -> str:
    """Ask the command for its version, for help, and for a table that is not there."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        for words in (["--version"], ["--help"], ["info", "nothing.rock"]):
            with contextlib.suppress(SystemExit):
                main(words)
    return told.getvalue()


def disk() -> str:
    """Train a table on disk that is larger than its budget, commit, go on from there, compact and verify."""
    got = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "users.rock")
        for step in range(3):
            with er.Table(ROWS, DIM, rule=er.Adam(lr=0.1), seed=1, memory="40KiB", path=path) as table:
                _steps(table)
                table.commit(step=step)
                got.append(table.lookup(IDS))
        with er.open(path) as table:
            table.compact()
            got.append(table.lookup(np.arange(ROWS)))
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["verify", str(path)]) == 0
    return _digest(*got)


def full_syncs() -> str:
    """Return how many files one commit has synced down to the disk on macOS."""
    with tempfile.TemporaryDirectory() as folder, er.Table(ROWS, DIM, path=Path(folder, "users.rock")) as table:
        table.assign([1, 2], np.ones((2, DIM), np.float32))
        os.full_syncs.clear()  # type: ignore[attr-defined]
        table.commit()
        return str(len(os.full_syncs))  # type: ignore[attr-defined]


def refused_on_disk() -> str:
    """Ask for tables on disk in all ways; return what is said, and what is left."""
    told = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "users.rock")
        for ask in (lambda: er.Table(ROWS, DIM, path=path), lambda: er.open(path), lambda: er.open(path, mode="r")):
            try:
                ask()
            except er.UnsupportedError as error:
                told.append(str(error).replace(folder, ""))
        left = os.listdir(folder)
    return "\n".join([*told, f"left: {left}"])


def torch_layers() -> str:
    """Train a model of PyTorch with rows in RAM; save it, load it and go on."""
    import torch

    import embedrock.torch as ert

    torch.manual_seed(0)
    models = [torch.nn.Sequential(ert.Embedding(ROWS, DIM), torch.nn.Linear(DIM, 1)) for _ in range(2)]
    both = ert.optimizer(models[0], rows=ert.Adam, dense=torch.optim.Adam)
    for step in range(3):
        both.zero_grad()
        models[0](torch.from_numpy(IDS) - step).sum().backward()
        both.step()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(models[0].state_dict(), Path(folder, "state.pt"))
        models[1].load_state_dict(torch.load(Path(folder, "state.pt")))
        ert.save(models[0], Path(folder, "checkpoints"), step=3)
        ert.load(models[1], Path(folder, "checkpoints"))
    with torch.no_grad():
        results = [model(torch.arange(ROWS)).numpy() for model in models]
    assert (results[0] == results[1]).all()
    return _digest(*results)


def keras_fit() -> str:
    """Train a model of Keras with rows in RAM, by `fit`; save it, load it and predict."""
    import keras

    import embedrock.keras as erk

    keras.utils.set_random_seed(0)
    layers = [keras.Input((2,), dtype="int64"), erk.Embedding(ROWS, DIM), keras.layers.Flatten(), keras.layers.Dense(1)]
    model: Any = keras.Sequential(layers)
    model.compile(optimizer=erk.optimizer("adam"), loss="mse")
    model.fit(np.tile(IDS, (8, 1)), np.ones((16, 1)), batch_size=4, epochs=2, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder, "model.keras"))
        again: Any = keras.models.load_model(Path(folder, "model.keras"))
    results = [one.predict(IDS, verbose=0) for one in (model, again)]
    assert (results[0] == results[1]).all()
    return _digest(model.layers[0].table.lookup(np.arange(ROWS)))
