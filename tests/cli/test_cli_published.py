"""Rows trained over a published table: their delta in a file and back, the shards again, shards in their place."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import embedrock as er
from disks import BALLAST, fill, memory_disk
from embedrock.cli import exports, imports, merging
from embedrock.cli.exports import encoded
from embedrock.cli.formats import base as formats
from embedrock.cli.formats.base import FileError, Output
from embedrock.cli.main import FAILED, main
from slow import examples

torch = pytest.importorskip("torch", reason="it has bfloat16 and 8-bit floats")
packed = pytest.importorskip("safetensors.torch", reason="the package reads and writes the files here")

Run = Callable[..., dict[str, Any]]
Refused = Callable[..., str]
NAME = "layers.1.engram.embed"
SHARDS, DIM = (9, 1, 14), 6
ROWS = sum(SHARDS)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
IDS = np.array([23, 0, 9, 8, 10, 22, 5])  # of each shard, its first and last row, and rows side by side


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(formats, "MAX_BATCH_ROWS", 3)


def publish(folder: str = "model", dtype: str = "bfloat16") -> Any:
    """Publish a table in shards, as others do; return its rows."""
    rows = (torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0)) * 0.02).to(DTYPES[dtype])
    os.makedirs(f"{folder}/extra")
    weight_map = {}
    for number, part in enumerate(rows.split(SHARDS)):
        file, name = f"model-{number + 1:05}-of-00003.safetensors", f"{NAME}.shard_{number}.weight"
        packed.save_file(
            {name: part.clone(), f"layers.{number}.norm": torch.ones(3)}, f"{folder}/{file}", {"format": "pt"}
        )
        weight_map[name] = file
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    Path(folder, "config.json").write_text("{}")
    Path(folder, "extra/tokens.txt").write_text("a b c")
    Path(folder, ".git").mkdir()
    Path(folder, ".git/objects").write_text("not of the model")
    return rows


def base(folder: str = "model") -> er.FromSafetensors:
    return er.FromSafetensors(folder, NAME)


def train(path: str = "delta.rock", dtype: str = "bfloat16", folder: str = "model") -> np.ndarray:
    """Train rows `IDS` of a table over a published one; return all of its rows."""
    with er.Table(ROWS, DIM, path=path, dtype=dtype, init=base(folder), rule=er.Adagrad(lr=0.1), seed=1) as table:
        for step in range(3):
            table.update(IDS, np.random.default_rng(step).standard_normal((len(IDS), DIM)))
        table.commit(step=3)
        return table.lookup(np.arange(ROWS))


def lookup(path: str) -> np.ndarray:
    with er.open(path, mode="r") as table:
        return table.lookup(np.arange(table.rows or 0))


def merged(folder: str) -> Any:
    """Return the rows of a published table as its users read them."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return torch.cat([packed.load_file(file)[f"{NAME}.shard_{k}.weight"] for k, file in enumerate(files)])


def contents(folder: str) -> dict[str, bytes]:
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class StoppedError(Exception):
    """Ends a command in the middle."""


@contextmanager
def stopped_at(owner: Any, name: str, call: int) -> Iterator[None]:
    """End the command inside, in place of the call of `owner.name` with this number."""
    calls, original = iter(range(call)), getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise StoppedError
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, called)
        with pytest.raises(StoppedError):
            yield


# ---------------------------------------------------------------- deltas


def test_a_delta_is_the_same_rows_in_another_table(run: Run):
    published = publish()
    rows = train()
    told = run("export", "delta.rock", "delta.safetensors", "--dtype", "bfloat16")
    assert (told["rows"], told["dim"], told["dtype"], told["all"]) == (len(IDS), DIM, "bfloat16", False)
    found = packed.load_file("delta.safetensors")
    assert found.keys() == {"ids", "weights"}
    assert (found["weights"].dtype, sorted(found["ids"].tolist())) == (torch.bfloat16, sorted(IDS))
    np.testing.assert_array_equal(found["weights"].float(), rows[found["ids"]])
    with packed.safe_open("delta.safetensors", "pt") as file:
        assert file.metadata() == {
            "base": NAME, "base_digest": base().digest, "base_rows": f"{ROWS}", "base_dim": f"{DIM}"
        }  # fmt: skip
    er.Table(ROWS, DIM, path="other.rock", dtype="bfloat16", init=base()).close()
    run("import", "delta.safetensors", "other.rock", "--into")
    np.testing.assert_array_equal(lookup("other.rock"), rows)
    others = np.setdiff1d(np.arange(ROWS), IDS)
    np.testing.assert_array_equal(rows[others], published.float()[others])
    assert (rows[IDS] != published.float().numpy()[IDS]).any()


def test_a_file_without_a_base_names_none(run: Run):
    with er.Table(4, 2, path="t.rock") as table:
        table.assign([1], np.ones((1, 2)))
        table.commit()
    run("export", "t.rock", "a.safetensors")
    with packed.safe_open("a.safetensors", "pt") as file:
        assert file.metadata() is None
        assert file.get_tensor("weights").dtype == torch.float32


FLOAT32 = st.floats(width=32, min_value=-60000, max_value=60000)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=FLOAT32))
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_rounded_as_by_pytorch(dtype: str, values: np.ndarray):
    words = encoded(np.arange(len(values)), values, Output(Path("a"), len(values), values.shape[1], True, dtype=dtype))
    wanted = torch.from_numpy(values).to(DTYPES[dtype])
    np.testing.assert_array_equal(words.view(np.uint8), wanted.view(torch.uint8).numpy())


@pytest.mark.parametrize(("dtype", "most"), [("float16", 65504.0), ("bfloat16", 3.3895314e38)])
def test_a_number_that_is_too_large_is_refused(dtype: str, most: float):
    output = Output(Path("a"), 2, 2, True, dtype=dtype)
    values = np.array([[1, -most], [np.inf, 1]], np.float32)
    assert len(encoded(np.array([7, 8]), values, output)) == 2  # Inf is one before, too
    values[0, 1] = np.nextafter(np.float32(-most * 1.002), np.float32(-np.inf)) if dtype == "bfloat16" else -65520
    with pytest.raises(FileError, match=rf"row with id 7: expected numbers that {dtype} can have; got -.*float32\."):
        encoded(np.array([7, 8]), values, output)


@pytest.mark.parametrize(("name", "dtype"), [(f, d) for f in ("npy", "npz", "raw", "safetensors") for d in DTYPES])
def test_files_of_a_dtype_are_read_again(run: Run, refused: Refused, name: str, dtype: str):
    with er.Table(9, DIM, path="t.rock") as table:
        values = np.random.default_rng(0).standard_normal((9, DIM)).astype(np.float32)
        table.assign(np.arange(9), values)
        table.commit()
    command = ["export", "t.rock", f"a.{name}", "--dtype", dtype]
    if (name, dtype) in (("npy", "bfloat16"), ("npz", "bfloat16")):
        assert f"expected a format that has bfloat16: raw, safetensors; got {name}." in refused(*command)
        return
    run(*command)
    assert abs(os.path.getsize(f"a.{name}") - 9 * DIM * (4 if dtype == "float32" else 2)) < 600
    raw = ("--dim", DIM, "--dtype", dtype) if name == "raw" else ()
    run("import", f"a.{name}", "again.rock", *raw)
    wanted = torch.from_numpy(values).to(DTYPES[dtype]).float()
    np.testing.assert_array_equal(lookup("again.rock"), wanted)


def test_a_dtype_that_the_target_cannot_have(refused: Refused):
    publish()
    train()
    told = refused("export", "delta.rock", "a.csv", "--dtype", "bfloat16")
    assert "expected a format that has bfloat16: raw, safetensors; got csv. Choose one of these, or leave" in told
    told = refused("export", "delta.rock", "a.parquet", "--dtype", "float16")
    assert "expected a format that has float16: npy, npz, raw, safetensors; got parquet." in told
    told = refused("export", "delta.rock", "a.safetensors", "--dtype", "int8")
    assert "expected the name of a table's folder, as --dtype is int8; got the name of a file." in told
    assert "or pass --dtype bfloat16 for a file of 16 bits" in told
    told = refused("export", "delta.rock", "copy.rock", "--dtype", "bfloat16")
    assert "expected one of .npy (npy)" in told
    assert sorted(os.listdir()) == ["delta.rock", "model"]


@pytest.mark.parametrize("call", range(4))
def test_an_export_of_16_bits_continues(run: Run, monkeypatch: pytest.MonkeyPatch, call: int):
    publish()
    train()
    run("export", "delta.rock", "whole.safetensors", "--dtype", "bfloat16")
    monkeypatch.setattr(exports, "SYNC_BYTES", 1)
    with stopped_at(*((exports, "encoded", call) if call < 3 else (formats.os, "rename", 0))):
        main(["export", "delta.rock", "a.safetensors", "--dtype", "bfloat16"])
    assert run("export", "delta.rock", "a.safetensors", "--dtype", "bfloat16")["continued_at"] == min(
        3 * call, len(IDS)
    )
    assert Path("a.safetensors").read_bytes() == Path("whole.safetensors").read_bytes()


def test_an_export_continues_only_in_the_same_dtype(refused: Refused, monkeypatch: pytest.MonkeyPatch):
    publish()
    train()
    with stopped_at(exports, "encoded", 1):
        main(["export", "delta.rock", "a.safetensors", "--dtype", "bfloat16"])
    told = refused("export", "delta.rock", "a.safetensors", "--dtype", "float16")
    assert "to continue the earlier run, with dtype='bfloat16'; got dtype='float16'. Begin anew: --restart." in told


# ---------------------------------------------------------------- the shards again


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_shards_have_the_rows_of_the_table(run: Run, dtype: str):
    published = publish(dtype=dtype)
    before = contents("model")
    rows = train(dtype=dtype)
    told = run("export", "delta.rock", "merged", "--merge")
    assert (told["rows"], told["files"], told["dtype"]) == (len(IDS), [str(Path("merged").absolute())], dtype)
    found = merged("merged")
    assert (found.dtype, found.shape) == (DTYPES[dtype], published.shape)
    np.testing.assert_array_equal(found.float(), rows)
    after = contents("merged")
    assert after.keys() == {name for name in before if not name.startswith(".git")}
    for name in after:
        assert len(after[name]) == len(before[name])
        assert name.endswith(".safetensors") or after[name] == before[name]
    assert contents("model") == before
    assert sorted(os.listdir()) == ["delta.rock", "merged", "model"]
    with er.Table(ROWS, DIM, dtype=dtype, init=base("merged")) as table:
        np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), rows)


def test_what_lies_in_the_folder_of_the_base(run: Run):
    publish()
    os.mkdir("model/extra/delta.rock")
    Path("model/extra/delta.rock/readme.md").write_text("of the model")
    before = {name for name in contents("model") if not name.startswith(".git")}
    train("model/delta.rock")
    run("export", "model/delta.rock", "model/../model/merged", "--merge")  # no journal, and no table
    assert contents("model/merged").keys() == before


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.sets(st.integers(0, ROWS - 1), min_size=1), data=st.data())
def test_any_rows_are_merged(tmp_path_factory: pytest.TempPathFactory, ids: set[int], data: st.DataObject):
    folder = str(tmp_path_factory.mktemp("any"))
    wanted = publish(f"{folder}/model")
    values = data.draw(hnp.arrays(np.float32, (len(ids), DIM), elements=FLOAT32))
    with er.Table(ROWS, DIM, path=f"{folder}/t.rock", dtype="bfloat16", init=base(f"{folder}/model")) as table:
        table.assign(list(ids), values)
        table.commit()
    assert main(["export", f"{folder}/t.rock", f"{folder}/merged", "--merge"]) == 0
    wanted[list(ids)] = torch.from_numpy(values).to(torch.bfloat16)
    np.testing.assert_array_equal(merged(f"{folder}/merged").view(torch.int16), wanted.view(torch.int16))


STOPS = [(merging.shutil, "copyfile", k) for k in range(6)]
STOPS += [(merging, "publish", 4), (merging, "encoded", 0), (merging, "encoded", 2), (merging, "publish", 6)]


@pytest.mark.parametrize(("owner", "name", "call"), STOPS, ids=lambda part: str(part).split("/")[-1])
def test_a_merge_continues(run: Run, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int):
    publish()
    rows = train()
    with stopped_at(owner, name, call):
        main(["export", "delta.rock", "merged", "--merge"])
    assert not Path("merged").exists()
    kept = contents("merged.part")
    with monkeypatch.context() as patch:
        copies = list[Any]()
        copy = shutil.copyfile
        patch.setattr(merging.shutil, "copyfile", lambda *paths: [copies.append(paths), copy(*paths)])
        run("export", "delta.rock", "merged", "--merge")
    assert len(copies) == 6 - len([name for name in kept if not name.endswith(".part")])
    np.testing.assert_array_equal(merged("merged").float(), rows)
    assert sorted(os.listdir()) == ["delta.rock", "merged", "model"]
    assert not [name for name in contents("merged") if name.endswith(".part")]


def test_a_merge_continues_only_the_same(run: Run, refused: Refused, monkeypatch: pytest.MonkeyPatch):
    publish()
    train()
    with stopped_at(merging, "encoded", 1):
        main(["export", "delta.rock", "merged", "--merge"])
    with er.open("delta.rock") as table:
        table.assign([3], np.ones((1, DIM)))
        table.forget(IDS)
        table.commit()
        rows = table.lookup(np.arange(ROWS))
    told = refused("export", "delta.rock", "merged", "--merge")
    assert "expected to continue the earlier run, with commit=1; got commit=2. Begin anew: --restart." in told
    run("export", "delta.rock", "merged", "--merge", "--restart")
    np.testing.assert_array_equal(merged("merged").float(), rows)
    Path("mine.part").mkdir()
    Path("mine.part/a").write_text("mine")
    told = refused("export", "delta.rock", "mine", "--merge")
    assert "mine.part: expected no such folder; got one that this command did not begin" in told
    assert Path("mine.part/a").read_text() == "mine"


def test_a_merge_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    publish()
    Path("model/large.bin").write_bytes(os.urandom(3 << 20))
    rows = train()
    with memory_disk(tmp_path / "disk", 8 << 20) as disk:
        fill(disk, but=1 << 20)
        command = ["export", "delta.rock", str(disk / "merged"), "--merge"]
        assert main(command) == FAILED
        told = capsys.readouterr().err
        assert "7 files of a published table could not be copied: " in told
        assert "more are needed" in told
        assert "Free some space and run the same command again: it continues." in told
        assert not (disk / "merged").exists()
        (disk / BALLAST).unlink()
        assert main(command) == 0
        np.testing.assert_array_equal(merged(str(disk / "merged")).float(), rows)
        assert contents(str(disk / "merged"))["large.bin"] == Path("model/large.bin").read_bytes()


@pytest.mark.parametrize("option", ["--all", "--dtype=bfloat16", "--format=npy", "--words="])
def test_a_merge_has_no_options_of_files(capsys: pytest.CaptureFixture[str], option: str):
    with er.Table(4, 2, path="t.rock") as table:
        table.commit()
    with pytest.raises(SystemExit) as ended:
        main(["export", "t.rock", "merged", "--merge", option])
    assert ended.value.code == 2
    assert f"leave {option.partition('=')[0]} out" in capsys.readouterr().err


def test_what_cannot_be_merged(refused: Refused):
    publish()
    train()
    assert "expected a folder that is not there yet" in refused("export", "delta.rock", "model", "--merge")
    er.Table(ROWS, DIM, path="new.rock", init=base()).commit()
    told = refused("export", "new.rock", "merged", "--merge")
    assert "new.rock: expected rows that were stepped or assigned; got none." in told
    with er.Table(4, 2, path="t.rock", init=er.Zeros()) as table:
        table.commit()
    told = refused("export", "t.rock", "merged", "--merge")
    assert "expected a table over a published one, init=er.FromSafetensors(...); got init=Zeros()." in told
    codes = torch.randn(4, 8).to(torch.float8_e4m3fn)
    packed.save_file({"e.weight": codes, "e.scale": torch.ones(1)}, "f8.safetensors")
    with er.Table(4, 8, path="f8.rock", init=er.FromSafetensors("f8.safetensors", "e"), dtype="bfloat16") as table:
        table.assign([1], np.ones((1, 8)))
        table.commit()
    told = refused("export", "f8.rock", "merged", "--merge")
    assert "expected weights of F32, F16, BF16, to write rows among them; got 4 rows of 8, F8_E4M3, F32 scale" in told
    assert "Export the trained rows by themselves: embedrock export TABLE delta.safetensors --dtype bfloat16." in told
    assert not Path("merged").exists()
    assert not list(Path().glob("*.part*"))


def test_a_merge_of_one_file_with_the_table_and_the_target_beside_it(run: Run):
    os.mkdir("model")
    packed.save_file({"e": torch.zeros(4, 2)}, "model/e.safetensors")
    for number, folder in enumerate(("model/e.safetensors", "model")):
        path = f"model/t{number}.rock"
        with er.Table(4, 2, path=path, init=er.FromSafetensors(folder, "e")) as table:
            table.assign([2], np.ones((1, 2)))
            table.commit()
        run("export", path, f"model/merged{number}", "--merge")
        found = packed.load_file(f"model/merged{number}/e.safetensors")["e"]
        assert found.tolist() == [[0, 0], [0, 0], [1, 1], [0, 0]]
        assert not Path(f"model/merged{number}/t{number}.rock").exists()
        shutil.rmtree(path)
        shutil.rmtree(f"model/merged{number}")


# ---------------------------------------------------------------- shards in their place


def test_shards_are_imported_one_after_another(run: Run, refused: Refused):
    wanted = publish().float()
    files, first = sorted(Path("model").glob("*.safetensors")), np.cumsum([0, *SHARDS])
    run("import", files[0], "t.rock", "--rows", ROWS)
    told = refused("import", files[2], "t.rock", "--into", "--first-row", int(first[2]) + 1)
    assert f"expected at most {ROWS} rows, as the table has; got 14 from row 11 on." in told
    for file, row in zip(files[1:], first[1:], strict=False):
        assert run("import", file, "t.rock", "--into", "--first-row", row)["rows"] > 0
    np.testing.assert_array_equal(lookup("t.rock"), wanted)
    run("import", files[2], "alone.rock", "--first-row", 10)
    np.testing.assert_array_equal(lookup("alone.rock"), np.concatenate([np.zeros((10, DIM)), wanted[10:]]))
    run("import", files[0], "zero.rock", "--first-row", 0)
    np.testing.assert_array_equal(lookup("zero.rock"), wanted[:9])


@pytest.mark.parametrize("call", [1, 3])
def test_an_import_of_a_shard_continues(run: Run, refused: Refused, monkeypatch: pytest.MonkeyPatch, call: int):
    wanted, file = publish().float()[10:], "model/model-00003-of-00003.safetensors"
    with stopped_at(imports, "_assign_batch", call):
        main(["import", file, "t.rock", "--first-row", "10", "--rows", "30", "--commit-every", "3"])
    told = refused("import", file, "t.rock", "--rows", 30)
    assert "to continue the earlier run, with first_row=10; got first_row=None. Begin anew: --restart." in told
    told = run("import", file, "t.rock", "--first-row", 10, "--rows", 30)
    assert told["continued_at"] == 3 * call
    np.testing.assert_array_equal(lookup("t.rock")[10:24], wanted)
    assert not lookup("t.rock")[24:].any()


def test_rows_with_ids_have_no_first_row(refused: Refused, run: Run):
    np.savez("a.npz", vectors=np.ones((2, 2), np.float32), ids=np.arange(2))
    told = refused("import", "a.npz", "t.rock", "--first-row", 7)
    assert "expected rows without ids, as --first-row is given; got ids. Leave --first-row out." in told
    run("import", "a.npz", "t.rock", "--first-row", 7, "--ids", "row-number")
    assert lookup("t.rock")[:, 0].tolist() == [0] * 7 + [1, 1]
    Path("a.txt").write_text("a 1 2\nb 3 4\n")
    told = refused("import", "a.txt", "w.rock", "--first-row", 7)
    assert "got words, whose ids are those of a vocabulary" in told
    assert sorted(os.listdir()) == ["a.npz", "a.txt", "t.rock"]


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz"])
def test_ids_of_another_file(run: Run, refused: Refused, name: str):
    values, ids = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float32), np.array([7, 3, 10**12, -4, 0])
    packed.save_file({"w": torch.from_numpy(values)}, name) if name == "a.safetensors" else np.savez(name, w=values)
    np.save("own.npy", ids)
    run("import", name, "t.rock", "--ids", "own.npy")
    with er.open("t.rock", mode="r") as table:
        np.testing.assert_array_equal(table.lookup(ids), values)
    np.save("short.npy", ids[:4])
    assert "short.npy: expected 5 whole numbers as ids" in refused("import", name, "u.rock", "--ids", "short.npy")
    assert "No such file or directory" in refused("import", name, "u.rock", "--ids", "missing.npy")


# ---------------------------------------------------------------- 8-bit floats

CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALES = {
    "none": None,
    "one": ("weight_scale", torch.tensor([0.5])),
    "one bf16": ("weight_scale", torch.tensor(0.25).to(torch.bfloat16)),
    "a row": ("scale", torch.rand(12, 1) + 0.5),
    "blocks": ("weight_scale_inv", torch.rand(3, 2) + 0.5),
}


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("scales", SCALES)
def test_8_bit_floats_are_read_with_their_scales(run: Run, codes: str, scales: str):
    weight, scale = torch.randn(12, 8).to(CODES[codes]), SCALES[scales]
    tensors = {
        "m.e.weight": weight,
        "m.e.norm": torch.ones(8),
        **({} if scale is None else {f"m.e.{scale[0]}": scale[1]}),
    }
    packed.save_file(tensors, "a.safetensors")
    told = run("import", "a.safetensors", "t.rock")
    assert (told["rows"], told["dim"]) == (12, 8)
    wanted = weight.float()
    if scale is not None:
        factor = scale[1].float().reshape(-1, scale[1].shape[-1] if scale[1].ndim == 2 else 1)
        wanted *= factor.repeat_interleave(12 // len(factor), 0).repeat_interleave(8 // factor.shape[1], 1)
    np.testing.assert_array_equal(lookup("t.rock"), wanted)
    np.save("own.npy", np.arange(12)[::-1] * 5)
    run("import", "a.safetensors", "ids.rock", "--ids", "own.npy")
    with er.open("ids.rock", mode="r") as table:
        np.testing.assert_array_equal(table.lookup(np.arange(12)[::-1] * 5), wanted)


def test_an_import_of_8_bit_floats_continues(run: Run, monkeypatch: pytest.MonkeyPatch):
    weight = torch.randn(12, 8).to(torch.float8_e4m3fn)
    packed.save_file({"e.weight": weight, "e.scale": torch.tensor([0.5])}, "a.safetensors")
    with stopped_at(imports, "_assign_batch", 2):
        main(["import", "a.safetensors", "t.rock", "--commit-every", "3"])
    assert run("import", "a.safetensors", "t.rock")["continued_at"] == 6
    np.testing.assert_array_equal(lookup("t.rock"), weight.float() * 0.5)


def test_8_bit_floats_without_their_scales_are_refused(run: Run, refused: Refused):
    weight = torch.randn(4, 8).to(torch.float8_e4m3fn)
    packed.save_file({"e.shard_0.weight": weight, "e.weight_scale": torch.ones(1)}, "a.safetensors")
    told = refused("import", "a.safetensors", "t.rock")
    assert (
        "a.safetensors, e.shard_0.weight: expected scales that are named as the tensor is; got e.weight_scale." in told
    )
    assert "er.FromSafetensors(folder, name), which finds scales that shards share." in told
    packed.save_file({"e.shard_1.weight": weight}, "b.safetensors")
    assert "got none, in a file of a shard." in refused("import", "b.safetensors", "t.rock")
    packed.save_file({"a.weight": weight, "b.weight": weight.clone(), "a.scale": torch.ones(4, 1)}, "c.safetensors")
    told = refused("import", "c.safetensors", "t.rock")
    assert "got a.weight F8_E4M3 (4, 8), b.weight F8_E4M3 (4, 8). Name one: --vectors NAME." in told
    run("import", "c.safetensors", "t.rock", "--vectors", "a.weight")
    np.testing.assert_array_equal(lookup("t.rock"), weight.float())
    packed.save_file({"ids": weight[:, 0].contiguous(), "w": torch.ones(4, 2)}, "d.safetensors")
    assert "expected 4 whole numbers as ids" in refused("import", "d.safetensors", "u.rock")
