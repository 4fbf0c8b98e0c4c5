"""Rows of published tables: every form and every way in which people cut them into files, bit for bit."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import embedrock as er
from published_files import (
    CODES,
    FLOATS,
    NAME,
    SCALES,
    Published,
    base_of,
    codes,
    floats,
    halves,
    table_of,
    written,
)

ROWS, DIM = 300, 160


def forms() -> list[tuple[str, Published]]:
    """Return published tables of every form."""
    made = [(dtype, floats(dtype, ROWS, DIM)) for dtype in FLOATS]
    made += [(f"{dtype} without a scale", codes(dtype, ROWS, DIM, None)) for dtype in CODES]
    for name, shape in {
        "one": (1,),
        "none-dimensional": (),
        "1 x 1": (1, 1),
        "rows": (ROWS, 1),
        "row": (ROWS,),
    }.items():
        made += [(f"{dtype}, {name}", codes(dtype, ROWS, DIM, shape, "BF16")) for dtype in CODES]
    made += [(f"F8_E4M3, {scale} of 32", codes("F8_E4M3", ROWS, DIM, (ROWS, 5), scale)) for scale in SCALES]
    made += [(f"I8, {scale} of 32", codes("I8", ROWS, DIM, (ROWS, 5), scale)) for scale in SCALES]
    made += [("blocks", codes("F8_E4M3", 384, 256, (3, 2), "F32"))]
    made += [("blocks with rests", codes("F8_E5M2", 1001, 301, (8, 3), "F32", block=128))]
    made += [(f"4 bits, {words}, {group}", halves(ROWS, 192, group, words)) for words in FLOATS for group in (32, 64)]
    return made


FORMS = dict(forms())
EVERY_FORM = pytest.mark.parametrize("name", FORMS)
MEMORIES = pytest.mark.parametrize("memory", ["1MiB", "map", 1800])


def check_rows(table: er.Table, rows: np.ndarray) -> None:
    """Fail unless a table reads as `rows`, in any order, with repeats, and one by one."""
    draw = np.random.default_rng(len(rows))
    for ids in (
        np.arange(len(rows)),
        draw.integers(0, len(rows), 700),
        np.array([len(rows) - 1, 0, len(rows) - 1]),
        draw.integers(0, len(rows), (3, 5)),
        np.empty(0, np.int64),
        *draw.permutation(len(rows))[:20, None],
    ):
        np.testing.assert_array_equal(table.lookup(ids), rows[ids], strict=True)


@EVERY_FORM
@MEMORIES
def test_rows_of_every_form(name: str, memory: str | int, tmp_path: Path):
    published = FORMS[name]
    init = written(published, tmp_path, memory)
    assert init.shape == published.rows.shape
    check_rows(table_of(init), published.rows)


@EVERY_FORM
def test_a_table_of_its_own_dtype_rounds_to_nearest(name: str, tmp_path: Path):
    published = FORMS[name]
    init = written(published, tmp_path)
    native = getattr(torch, init.dtype)
    expected = torch.from_numpy(published.rows).to(native).float().numpy()
    np.testing.assert_array_equal(table_of(init, dtype=init.dtype).lookup(np.arange(init.shape[0])), expected)
    assert init.dtype == {"F32": "float32", "F16": "float16"}.get(name, "bfloat16")


@pytest.mark.parametrize("form", ["shard_{}.", "shards.{}.", "shard.{}.", "{}.", "shard{}."])
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("has_index", [False, True])
def test_shards_by_all_names(form: str, files: int, has_index: bool, tmp_path: Path):
    published = codes("F8_E4M3", ROWS, 64, (ROWS, 2), "F8_E8M0").split(7, 8, 200, form=form)
    published.tensors["another.weight"] = torch.zeros(3, 3)
    published.write(tmp_path, files=files)
    if has_index:
        every = list(published.tensors)
        where = {name: f"model-{k % files + 1}-of-{files}.safetensors" for k, name in enumerate(every)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        (tmp_path / "other.safetensors").write_bytes(b"not one of the files")
    check_rows(table_of(base_of(tmp_path)), published.rows)


def test_shards_follow_each_other_by_number(tmp_path: Path):
    published = floats("BF16", 24, 8).split(*range(2, 24, 2))  # 12 of them: as text, 10 comes before 2
    check_rows(table_of(written(published, tmp_path, files=5)), published.rows)


@pytest.mark.parametrize("files", [1, 2])
def test_one_scale_for_all_shards_and_one_for_each(files: int, tmp_path: Path):
    of_all = codes("F8_E4M3", ROWS, DIM, (1,), "BF16").split(100, 200)
    check_rows(table_of(written(of_all, tmp_path / "all", files=files)), of_all.rows)
    parts = [codes("I8", 100 + k, DIM, (1,), "F32") for k in range(3)]
    tensors = {}
    for k, part in enumerate(parts):
        tensors[f"{NAME}.shard_{k}.weight"] = part.tensors[f"{NAME}.weight"]
        tensors[f"{NAME}.shard_{k}.scale"] = part.tensors[f"{NAME}.weight_scale"] * (k + 1)
    rows = np.concatenate([part.rows * (k + 1) for k, part in enumerate(parts)])
    of_each = Published(tensors, rows)
    check_rows(table_of(written(of_each, tmp_path / "each", files=files)), rows)


def test_unsharded_scales_of_rows_beside_sharded_weights(tmp_path: Path):
    published = codes("F8_E4M3", ROWS, DIM, (ROWS,), "F32").split(123)  # one-dimensional: not cut
    assert [*published.tensors] == [f"{NAME}.shard_0.weight", f"{NAME}.shard_1.weight", f"{NAME}.weight_scale"]
    check_rows(table_of(written(published, tmp_path)), published.rows)


@pytest.mark.parametrize("kind", ["weight_scale", "weight_scale_inv", "scale", "scales"])
def test_names_of_scales(kind: str, tmp_path: Path):
    weight, scale = codes("F8_E4M3", 20, 16, (20, 1)).tensors.values()
    rows = codes("F8_E4M3", 20, 16, (20, 1)).rows
    check_rows(table_of(written(Published({f"{NAME}.weight": weight, f"{NAME}.{kind}": scale}, rows), tmp_path)), rows)


def test_a_tensor_without_a_suffix_and_names_with_one(tmp_path: Path):
    rows = floats("F16", 9, 4).rows
    for tensors in ({NAME: torch.from_numpy(rows).half()}, {f"{NAME}.weight": torch.from_numpy(rows).half()}):
        folder = Published(tensors, rows).write(tmp_path)
        for name in (NAME, f"{NAME}.weight"):
            check_rows(table_of(base_of(folder, tensor=name)), rows)


def test_one_file_of_many_tables(tmp_path: Path):
    published = [floats("F32", 20 + k, 5 + k, seed=k) for k in range(26)]
    tensors = {f"table_{k}.weight": each.tensors[f"{NAME}.weight"] for k, each in enumerate(published)}
    Published(tensors, published[0].rows).write(tmp_path, names="all.safetensors")
    file = tmp_path / "all.safetensors"
    for k, each in enumerate(published):
        check_rows(table_of(base_of(file, tensor=f"table_{k}")), each.rows)


@pytest.mark.parametrize("dim", [1, 3, 7, 16, 33, 1000, 4099])
@MEMORIES
def test_rows_of_any_width(dim: int, memory: str | int, tmp_path: Path):
    """Also rows of less than 32 bytes, which are mapped, and rows that cross blocks of 4096 bytes."""
    memory = 40_000 if memory == 1800 else memory
    for dtype in ("F32", "BF16"):
        published = floats(dtype, 130, dim).split(1, 2, 61)
        check_rows(table_of(written(published, tmp_path / dtype, memory, files=2)), published.rows)
    published = codes("I8", 130, dim, (130,), "F16")
    check_rows(table_of(written(published, tmp_path / "I8", memory)), published.rows)


@MEMORIES
def test_one_id_seventy_thousand_times(memory: str | int, tmp_path: Path):
    published = codes("F8_E4M3", 50, 8, (50, 1))
    table = table_of(written(published, tmp_path, memory))
    ids = np.full(70_000, 31)
    ids[40_000:] = np.arange(30_000) % 50
    np.testing.assert_array_equal(table.lookup(ids), published.rows[ids])
    np.testing.assert_array_equal(table.lookup(ids), published.rows[ids])


def test_a_cache_of_two_rows(tmp_path: Path):
    published = floats("F32", 40, 64)
    least = next(size for size in range(100, 4000, 10) if _serves(written(published, tmp_path, size)))
    table = table_of(base_of(tmp_path, least))
    check_rows(table, published.rows)
    assert table.stats()["base_bytes_used"] <= least


def _serves(init: er.FromSafetensors) -> bool:
    try:
        table_of(init).lookup([0])
    except er.ArgumentError as error:
        assert "must hold two rows of 256 bytes, and their index" in str(error)  # noqa: PT017
        return False
    return True


@MEMORIES
def test_two_threads_at_once(memory: str | int, tmp_path: Path):
    published, errors = codes("F8_E4M3", 3000, 64, (3000, 2), "F8_E8M0"), list[BaseException]()
    init = written(published.split(1000, 1001), tmp_path, memory)
    table = table_of(init)

    def read(seed: int) -> None:
        draw = np.random.default_rng(seed)
        try:
            for _ in range(30):
                ids = draw.integers(0, 3000, draw.integers(1, 900))
                np.testing.assert_array_equal(table.lookup(ids), published.rows[ids])
                table.bring(ids).release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors
