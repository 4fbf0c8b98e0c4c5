"""Published tables that are not read: each is refused by name, before anything is made."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import embedrock as er

WEIGHT = torch.ones(64, 32)
CODES = torch.full((64, 32), 56, dtype=torch.uint8)
INT8, F8 = CODES.view(torch.int8), CODES.view(torch.float8_e4m3fn)
WORDS = torch.ones(64, 8, dtype=torch.uint32)  # 64 columns of 4 bits
GROUPS = torch.ones(64, 2)
INDEX = "model.safetensors.index.json"
UNREAD = {
    "a second scale, as in NVFP4": (
        {"weight": CODES, "weight_scale": F8, "weight_scale_2": torch.ones(1)},
        "'X.weight_scale_2', F32 (1,)",
    ),
    "scales in F8": ({"weight": F8, "weight_scale": F8}, "F8_E4M3 with 'X.weight_scale', F8_E4M3"),
    "GPTQ": ({"qweight": WORDS.view(torch.int32), "scales": GROUPS}, "a tensor 'X.qweight', I32 (64, 8)"),
    "an order of columns": ({"weight": INT8, "scales": GROUPS, "g_idx": torch.ones(3)}, "a tensor 'X.g_idx', F32 (3,)"),
    "LLM.int8": ({"weight": INT8, "SCB": torch.ones(64)}, "a tensor 'X.SCB', F32 (64,)"),
    "zero points": ({"weight": INT8, "scale": torch.ones(1), "zero_point": torch.ones(1)}, "'X.zero_point', F32 (1,)"),
    "a bias": ({"weight": WEIGHT, "bias": torch.ones(32)}, "a tensor 'X.bias', F32 (32,)"),
    "codes with offsets": (
        {"weight": INT8, "scales": GROUPS, "biases": GROUPS},
        "I8 with 'X.scales', F32 with 'X.biases', F32",
    ),
    "floats with a scale": ({"weight": WEIGHT, "scale": torch.ones(1)}, "F32 with 'X.scale', F32"),
    "F64": ({"weight": WEIGHT.double()}, "F64."),
    "U8": ({"weight": CODES}, "U8."),
    "4 bits without offsets": ({"weight": WORDS, "scales": GROUPS}, "U32 with 'X.scales', F32"),
    "offsets of another dtype": ({"weight": WORDS, "scales": GROUPS, "biases": GROUPS.half()}, "'X.biases', F16"),
    "offsets of other groups": ({"weight": WORDS, "scales": GROUPS, "biases": torch.ones(64, 1)}, "'X.biases', F32"),
    "groups of 3 bits": (
        {"weight": torch.ones(64, 12, dtype=torch.uint32), "scales": torch.ones(64, 4), "biases": torch.ones(64, 4)},
        "groups of 24 columns",
    ),
    "one dimension": ({"weight": torch.ones(3)}, "'X.weight', F32 (3,)"),
    "three dimensions": ({"weight": torch.ones(3, 4, 5)}, "'X.weight', F32 (3, 4, 5)"),
    "no rows": ({"weight": torch.ones(0, 5)}, "'X.weight', F32 (0, 5)"),
    "shards that differ": (
        {"0.weight": WEIGHT, "1.weight": WEIGHT.half()},
        "'X.0.weight', F32 (64, 32) and 'X.1.weight', F16 (64, 32)",
    ),
    "shards of other widths": ({"0.weight": WEIGHT, "1.weight": torch.ones(5, 31)}, "shards that differ"),
    "whole numbers as scales": ({"weight": INT8, "scale": torch.ones(1).int()}, "'X.scale', I32"),
    "scales of columns": ({"weight": INT8, "scale": torch.ones(32)}, "'X.scale', F32 (32,)"),
    "scales of three dimensions": ({"weight": INT8, "scale": torch.ones(64, 2, 3)}, "'X.scale', F32 (64, 2, 3)"),
    "no scales": ({"weight": INT8, "scale": torch.ones(0)}, "'X.scale', F32 (0,)"),
    "more scales than columns": ({"weight": INT8, "scale": torch.ones(64, 33)}, "'X.scale', F32 (64, 33)"),
    "blocks of columns that have two sizes": (
        {"weight": torch.ones(4, 160).char(), "scale": torch.ones(4, 2)},
        "2 scales for 160 columns, so that blocks may have [80, 128]",
    ),
    "blocks of rows that have no size": (
        {"weight": INT8, "scale": torch.ones(63, 1)},
        "63 scales for 64 rows, so that blocks may have []",
    ),
    "scales of other shards": (
        {"0.weight": INT8, "1.weight": INT8, "2.weight": INT8, "0.scale": torch.ones(1), "1.scale": torch.ones(1)},
        "2 shards of 'X.0.scale'",
    ),
    "a scale of a shard that is not there": (
        {"0.weight": INT8, "1.weight": INT8, "0.scale": torch.ones(1), "2.scale": torch.ones(1)},
        "2 shards of 'X.0.scale'",
    ),
}
TWICE = {
    "with and without a suffix": ["weight", ""],
    "sharded and not": ["weight", "shard_0.weight"],
    "two names of shards": ["shards.0.weight", "shard_0.weight"],
    "two names of a number": ["shard_0.weight", "shard_00.weight"],
    "two scales": ["scale", "weight_scale"],
}


def write(folder: Path, tensors: dict[str, torch.Tensor], file: str = "a.safetensors") -> None:
    save_file({f"X.{name}".rstrip("."): tensor.clone() for name, tensor in tensors.items()}, folder / file)


def refused(folder: Path, tensor: Any = "X", kind: type[er.EmbedrockError] = er.TableFileError) -> str:
    with pytest.raises(kind) as caught:
        er.FromSafetensors(folder, tensor)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize("name", UNREAD)
def test_forms_that_are_not_read(name: str, tmp_path: Path):
    tensors, got = UNREAD[name]
    write(tmp_path, tensors)
    text = refused(tmp_path, kind=er.UnsupportedError)
    assert text.startswith(f"the rows of table 'X' in {tmp_path} must have a form that is read as it is, F32, F16")
    assert got in text.split("scales and biases: got ")[1]


def test_tensors_beside_a_table_that_cannot_be_scales(tmp_path: Path):
    for weight in (WEIGHT, INT8):
        write(tmp_path, {"weight": weight, "norm": torch.ones(32)})
        assert er.FromSafetensors(tmp_path, "X").shape == (64, 32)


def test_a_dtype_that_the_format_does_not_have_yet(tmp_path: Path):
    header = json.dumps({"X.weight": {"dtype": "F4", "shape": [4, 8], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert "got 'X.weight', F4 (4, 8)." in refused(tmp_path, kind=er.UnsupportedError)


@pytest.mark.parametrize("said", [{"bits": 8}, {"bits": 4, "X": {"bits": 8}}])
def test_words_of_other_than_4_bits_by_the_configuration(said: dict[str, Any], tmp_path: Path):
    write(tmp_path, {"weight": WORDS, "scales": GROUPS, "biases": GROUPS})
    (tmp_path / "config.json").write_text(json.dumps({"quantization": said}))
    for place in (tmp_path, tmp_path / "a.safetensors"):
        assert "got codes of 8 bits, as config.json says." in refused(place, kind=er.UnsupportedError)
    for other in ({"bits": 4, "Y": {"bits": 8}, "X": {}}, {}, [], None):
        (tmp_path / "config.json").write_text(json.dumps({"quantization": other}))
        assert er.FromSafetensors(tmp_path, "X").shape == (64, 64)


@pytest.mark.parametrize("names", TWICE.values(), ids=TWICE)
def test_a_part_that_is_there_twice(names: list[str], tmp_path: Path):
    write(tmp_path, {"weight": INT8, **{name: INT8 * (k + 1) for k, name in enumerate(names)}})
    first, second = sorted(f"X.{name}".rstrip(".") for name in names)
    text = refused(tmp_path)
    assert "must have each part once: got " in text
    assert f"{first!r} in {tmp_path}" in text
    assert f"{second!r} in {tmp_path}" in text


def test_a_part_in_two_files(tmp_path: Path):
    for file in ("a", "b"):
        write(tmp_path, {"weight": WEIGHT}, f"{file}.safetensors")
    assert "b.safetensors. If one of the files is a copy, move it away, or pass the other one." in refused(tmp_path)
    assert er.FromSafetensors(tmp_path / "b.safetensors", "X").shape == (64, 32)


@pytest.mark.parametrize(("numbers", "missing"), [((0, 2), 1), ((1, 2), 0), ((0, 1, 2, 9**30), 3)])
def test_a_missing_shard(numbers: tuple[int, ...], missing: int, tmp_path: Path):
    write(tmp_path, {f"shard_{number}.weight": WEIGHT for number in numbers})
    expected = f"all shards of table 'X' in {tmp_path} must be there: {missing} is missing. Get the files again."
    assert refused(tmp_path) == expected


def test_a_last_shard_that_only_the_index_knows(tmp_path: Path):
    write(tmp_path, {"0.weight": WEIGHT})
    named = {"X.0.weight": "a.safetensors", "X.1.weight": "a.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": named}))
    assert "must have 'X.1.weight', which the index names: it is missing. Get its file." in refused(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**named, "X.1.weight": "b.safetensors"}}))
    assert f"must have all files that its index names: {tmp_path}/b.safetensors is missing. Get it." in refused(
        tmp_path
    )
    write(tmp_path, {"1.weight": WEIGHT}, "b.safetensors")
    assert er.FromSafetensors(tmp_path, "X").shape == (128, 32)


@pytest.mark.parametrize(
    "text", ["[1]", "{}", '{"weight_map": 3}', "[" * 100_000, "{", b"\xff", '{"weight_map": {"X.weight": "\\ud800"}}']
)
def test_a_damaged_index(text: str | bytes, tmp_path: Path):
    write(tmp_path, {"weight": WEIGHT})
    (tmp_path / INDEX).write_bytes(text.encode() if isinstance(text, str) else text)
    assert re.search(rf"{INDEX} must name the file of each tensor: got |its index names: ", refused(tmp_path))


def test_a_name_that_is_not_there(tmp_path: Path):
    save_file({"model.embed_tokens.weight": WEIGHT, "model.norm.weight": torch.ones(3)}, tmp_path / "a.safetensors")
    text = refused(tmp_path, "model.embed_token")
    assert text == (
        f"there is no table 'model.embed_token' in {tmp_path}: its files have model.embed_tokens. Name its tensor. "
        "Did you mean 'model.embed_tokens'?"
    )
    assert "its files have model.embed_tokens." in refused(tmp_path, "lm_head")
    assert "its files have no matrix." in refused(_made(tmp_path / "empty"))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_folder_that_is_not_there():
    text = refused(Path("deepseek-ai/DeepSeek-V4.1"))
    assert text.startswith("there is no folder /")
    assert "Pass the folder of a checkpoint, as huggingface_hub.snapshot_download(name) returns it." in text


@pytest.mark.parametrize("names", ["{}-of-12", "{:02}-of-12", "{:05}-of-00012", "model-{:05}-of-00012"])
@pytest.mark.parametrize("first", [0, 1])
def test_all_files_by_all_numbers(names: str, first: int, tmp_path: Path):
    for k in range(12):
        write(tmp_path, {f"{k}.weight": WEIGHT}, f"{names.format(k + first)}.safetensors")
    assert er.FromSafetensors(tmp_path, "X").shape == (12 * 64, 32)


def test_a_file_that_the_others_count(tmp_path: Path):
    write(tmp_path, {"weight": WEIGHT}, "model-00001-of-00002.safetensors")
    expected = f"{tmp_path} must have all its 2 files: model-00002-of-00002.safetensors is missing. Get it again."
    assert refused(tmp_path) == expected


@pytest.mark.parametrize("tensor", [5, None, b"X"])
def test_names_that_are_no_text(tensor: Any, tmp_path: Path):
    write(tmp_path, {"weight": WEIGHT})
    assert refused(tmp_path, tensor, er.ArgumentError) == f"`tensor` of FromSafetensors must be a name: got {tensor!r}."


@pytest.mark.parametrize("memory", [0, "lots", "auto", None, -1, True, "101%"])
def test_sizes_that_are_none(memory: Any, tmp_path: Path):
    write(tmp_path, {"weight": WEIGHT})
    with pytest.raises(er.ArgumentError, match=r"^`memory"):
        er.FromSafetensors(tmp_path, "X", memory)


def test_tables_of_another_shape(tmp_path: Path):
    write(tmp_path, {"weight": WEIGHT})
    init = er.FromSafetensors(tmp_path, "X")
    for shape in ((64, 31), (65, 32), (None, 32)):
        with pytest.raises(er.ArgumentError) as caught:
            er.Table(*shape, init=init)
        expected = f"table 'X' in {tmp_path} must have the table's shape ({shape[0]}, {shape[1]}): got (64, 32)."
        assert str(caught.value) == expected
