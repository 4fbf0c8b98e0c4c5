"""`from_pretrained` of a file's name, in PyTorch and in Keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import embedrock as er
from embedrock.frontend import pretrained

WEIGHTS = np.random.default_rng(0).standard_normal((70_000, 2), dtype=np.float32)
IDS = [5, 69_999, 0]


def torch_rows(*given: Any, **options: Any) -> tuple[np.ndarray, str]:
    ert = pytest.importorskip("embedrock.torch")
    layer = ert.Embedding.from_pretrained(*given, **options)
    assert (layer.num_embeddings, layer.embedding_dim) == WEIGHTS.shape
    return layer.table.lookup(IDS), str(layer.dtype).removeprefix("torch.")


def bag_rows(*given: Any, **options: Any) -> tuple[np.ndarray, str]:
    ert = pytest.importorskip("embedrock.torch")
    layer = ert.EmbeddingBag.from_pretrained(*given, **options)
    return layer.table.lookup(IDS), str(layer.dtype).removeprefix("torch.")


def keras_rows(*given: Any, **options: Any) -> tuple[np.ndarray, str]:
    erk = pytest.importorskip("embedrock.keras")
    layer = erk.Embedding.from_pretrained(*given, **options)
    return layer(np.array(IDS)).numpy().astype(np.float32), layer.variable_dtype


FRONTS = {"torch": torch_rows, "bag": bag_rows, "keras": keras_rows}
Front = Callable[..., tuple[np.ndarray, str]]


@pytest.fixture(params=FRONTS)
def front(request: pytest.FixtureRequest) -> Front:
    return FRONTS[request.param]


def test_a_npy_file_is_mapped(front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(
        np.lib.format,
        "open_memmap",
        lambda *args, load=np.lib.format.open_memmap, **kwargs: seen.append(load(*args, **kwargs)) or seen[-1],
    )
    for dtype in ("float32", "float16"):
        np.save(tmp_path / "vectors.npy", WEIGHTS.astype(dtype))
        found, kind = front(tmp_path / "vectors.npy")
        assert np.array_equal(found, WEIGHTS.astype(dtype)[IDS].astype(np.float32))
        assert kind == dtype
        assert isinstance(seen[-1], np.memmap)


def test_safetensors(front: Front, tmp_path: Path):
    one, folder = tmp_path / "one.safetensors", tmp_path / "model"
    folder.mkdir()
    save_file({"embed.weight": WEIGHTS, "norm": WEIGHTS[0]}, one)
    save_file({"a.shard_0.weight": WEIGHTS[:60_000]}, folder / "1.safetensors")
    save_file({"a.shard_1.weight": WEIGHTS[60_000:], "b.weight": WEIGHTS[:3]}, folder / "2.safetensors")
    for given, options in ((str(one), {}), (one, {"tensor": "embed"}), (folder, {"tensor": "a"})):
        assert np.array_equal(front(given, **options)[0], WEIGHTS[IDS])
    with pytest.raises(
        er.TableFileError, match=r"model must have one matrix, unless you name one: got a, b\. Pass tensor="
    ):
        front(folder)
    with pytest.raises(er.TableFileError, match=r"there is no table 'c' in .*its files have a, b"):
        front(folder, tensor="c")
    assert er.FromSafetensors(one).tensor == "embed"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_table(front: Front, tmp_path: Path, dtype: str):
    with er.Table(*WEIGHTS.shape, path=tmp_path / "t.rock", dtype=dtype, seed=1, init=er.Normal()) as table:
        table.assign([5, 69_999], WEIGHTS[:2])
        table.commit()
        expected = table.lookup(IDS)  # rows with records, and one without
        found, kind = front(tmp_path / "t.rock")  # beside its writer
    assert np.array_equal(found, expected)
    assert kind == dtype


def test_what_is_refused(front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "glove.txt").write_text("a 1 2\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY\x01\x00")
    np.savez(tmp_path / "several.npz", WEIGHTS)
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    np.save(tmp_path / "flat.npy", WEIGHTS[0])
    er.Table(None, 2, path=tmp_path / "open.rock").close()
    er.Table(2, 2, path=tmp_path / "t.rock").close()
    group = er.Group(path=tmp_path / "group.rock")
    group.table("users", rows=2, dim=2)
    group.commit()
    group.close()
    for name, error, message in (
        (
            "glove.txt",
            er.ArgumentError,
            r"must be a \.npy file, .*got '.*', a file '\.txt'\. `embedrock import FILE TABLE`",
        ),
        ("none.npy", er.ArgumentError, r"got '.*none\.npy', no file or folder of this name"),
        ("empty", er.TableFileError, "empty"),
        ("cut.npy", er.TableFileError, r"cut\.npy must hold one array of numbers: got .*\. Get the file again"),
        ("several.npy", er.TableFileError, r"must hold one array of numbers: got the magic string is not correct"),
        ("flat.npy", er.ArgumentError, r"must be a 2-D .*got shape \(2,\)"),
        ("open.rock", er.ArgumentError, r"must be one table with a number of rows: got Table\(rows=None"),
        ("group.rock", er.ArgumentError, r"must be one table with a number of rows: got "),
    ):
        with pytest.raises(error, match=message):
            front(tmp_path / name)
    with pytest.raises(er.ArgumentError, match=r"`tensor` names a tensor of \.safetensors files: got 'a', and"):
        front(WEIGHTS, tensor="a")
    monkeypatch.setattr(pretrained, "available_bytes", lambda: 8)
    with pytest.raises(
        er.MemoryBudgetError, match=r"are 16 B in '.*t\.rock', and 8 B of RAM.*embedrock export .*--all`"
    ):
        front(tmp_path / "t.rock")


def test_a_layer_on_disk_over_a_file_is_opened_again(tmp_path: Path):
    torch, ert = pytest.importorskip("torch"), pytest.importorskip("embedrock.torch")
    np.save(tmp_path / "vectors.npy", WEIGHTS)

    def layer() -> Any:
        return ert.Embedding.from_pretrained(tmp_path / "vectors.npy", freeze=False, path=tmp_path / "tuned.rock")

    made = layer()
    step = ert.SGD(made, lr=1.0)
    made(torch.tensor([5])).sum().backward()
    step.step()
    made.table.commit()
    made.table.close()
    assert np.array_equal(layer().table.lookup([5, 6]), WEIGHTS[[5, 6]] - np.array([[1], [0]], np.float32))
