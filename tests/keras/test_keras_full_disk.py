"""Files of Keras on a full disk: what is missing, and nothing half-written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest

import embedrock.keras as erk
from disks import check_full, memory_disk

ROWS, DIM = 20_000, 16
BYTES = ROWS * DIM * 4


def model_of(*more: keras.layers.Layer, **options: object) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((2,), dtype="int64"), erk.Embedding(ROWS, DIM, name="rows", **options), *more]
    )
    model.compile(optimizer=erk.optimizer("sgd"), loss="mse")
    return model


def fill_rows(model: keras.Model) -> None:
    model.layers[0].table.assign(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))


def test_saving_rows_in_ram(tmp_path: Path):
    model = model_of()
    fill_rows(model)
    with memory_disk(tmp_path / "disk", 1 << 20) as disk:
        with pytest.raises(
            OSError, match=r"the rows of 'rows', erk\.Embedding\(20000, 16\) could not be saved"
        ) as caught:
            model.save(disk / "model.keras")
        check_full(caught.value, disk / "model.keras", BYTES)
        assert os.listdir(disk) == []


def test_saving_where_the_temporary_folder_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = model_of()
    fill_rows(model)
    with memory_disk(tmp_path / "disk", 1 << 20) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        with pytest.raises(OSError, match=r"Keras' temporary folder: .*TMPDIR") as caught:
            model.save(tmp_path / "model.keras")
        check_full(caught.value, disk, BYTES)
        assert os.listdir(disk) == []


def test_exporting(tmp_path: Path):
    model = model_of()
    fill_rows(model)
    with memory_disk(tmp_path / "disk", 1 << 20) as disk:
        with pytest.raises(OSError, match="the model could not be exported") as caught:
            erk.export(model, disk / "served")
        check_full(caught.value, disk / "served", BYTES)
        assert os.listdir(disk) == []


def test_a_checkpoint_leaves_the_last_one(tmp_path: Path):
    """Rows are on another disk; the dense weights do not fit twice."""
    model, x = model_of(keras.layers.Dense(10_000), path=tmp_path / "t.rock"), np.ones((4, 2), np.int64)
    with memory_disk(tmp_path / "disk", 1 << 20) as disk:
        checkpoints = erk.TableCheckpoint(disk / "c")
        model.fit(x, np.ones((4, 2, 10_000)), epochs=1, verbose=0, callbacks=[checkpoints])
        (first,) = os.listdir(disk / "c")
        with pytest.raises(OSError, match="the checkpoint of step 2 could not be saved") as caught:
            model.fit(x, np.ones((4, 2, 10_000)), epochs=2, verbose=0, callbacks=[checkpoints])
        check_full(caught.value, disk / "c" / "step-2-", 17 * 10_000 * 4)
        assert [name for name in os.listdir(disk / "c") if ".tmp" not in name] == [first]
        model.layers[0].table.commit()
        checkpoints.restore(model)
        assert checkpoints.step == 1
    model.layers[0].table.close()
