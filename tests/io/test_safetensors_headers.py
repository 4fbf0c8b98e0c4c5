"""Headers of safetensors files, which nobody checked before: damaged, truncated, absurd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from embedrock.io.safetensors import StoredTensor, read_header
from slow import examples


class Refused(Exception):
    pass


def fail(expected: str, got: str, where: str = "") -> NoReturn:
    raise Refused(f"{where}: {expected}: {got}")


def read(path: Path) -> dict[str, StoredTensor]:
    return read_header(str(path), fail)


def write(path: Path, header: Any, data: int = 64) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


GOOD = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
BAD = {
    "no offsets": {"dtype": "F32", "shape": [4, 4]},
    "no shape": {"dtype": "F32", "data_offsets": [0, 64]},
    "three offsets": GOOD | {"data_offsets": [0, 1, 64]},
    "offsets as text": GOOD | {"data_offsets": ["0", "64"]},
    "offsets as fractions": GOOD | {"data_offsets": [0.0, 64.0]},
    "offsets as truth values": GOOD | {"data_offsets": [False, 64]},
    "negative offsets": GOOD | {"data_offsets": [-64, 0]},
    "offsets that fall": GOOD | {"data_offsets": [64, 0]},
    "beyond the file": GOOD | {"data_offsets": [1, 65]},
    "far beyond the file": GOOD | {"data_offsets": [2**62, 2**62 + 64]},
    "beyond 64 bits": GOOD | {"data_offsets": [2**80, 2**80 + 64]},
    "fewer bytes than the shape": GOOD | {"data_offsets": [0, 63]},
    "a huge shape": GOOD | {"shape": [2**62, 2**62]},
    "a shape beyond 64 bits": GOOD | {"shape": [2**64]},
    "a negative shape": GOOD | {"shape": [-4, -4]},
    "a fraction as a shape": GOOD | {"shape": [4.0, 4]},
    "a shape that is a number": GOOD | {"shape": 16},
    "a dtype that is a number": GOOD | {"dtype": 5},
    "a dtype that is a list": GOOD | {"dtype": []},
    "a list": [1, 2],
    "nothing": None,
    "text": "F32",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_entries(name: str, tmp_path: Path):
    with pytest.raises(Refused, match=r"^tensor 'bad': "):
        read(write(tmp_path / "a", {"good": GOOD, "bad": BAD[name]}))


@pytest.mark.parametrize("text", [b"[]", b"50", b"{ ", b"[" * 100_000, b"\xff\xfe", b'"a"', b"null", b"{}}"])
def test_headers_that_name_no_tensors(text: bytes, tmp_path: Path):
    with pytest.raises(Refused, match=r"^: a header"):
        read(write(tmp_path / "a", text))


@pytest.mark.parametrize("length", [0, 1, 10_000, 2**31, 2**63, 2**64 - 1])
def test_lengths_that_the_file_does_not_have(length: int, tmp_path: Path):
    path = write(tmp_path / "a", {"good": GOOD})
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(Refused, match="a safetensors file: a header of"):
        read(path)


def test_what_the_package_writes(tmp_path: Path):
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "c": torch.ones(3, 7).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "a", metadata={"format": "pt"})
    found, data = read(tmp_path / "a"), (tmp_path / "a").read_bytes()
    assert found.keys() == tensors.keys()  # not the metadata
    forms = {name: (each.dtype, each.shape, each.row_bytes) for name, each in found.items()}
    assert forms == {"a": ("F32", (2, 3), 12), "b": ("BF16", (5,), 2), "c": ("F8_E4M3", (3, 7), 7)}
    np.testing.assert_array_equal(np.frombuffer(data, "<f4", 6, found["a"].start), np.arange(6))


def test_a_dtype_of_tomorrow_is_named_and_not_checked(tmp_path: Path):
    found = read(write(tmp_path / "a", {"new": GOOD | {"dtype": "F4", "data_offsets": [0, 8]}, "good": GOOD}))
    assert (found["new"].dtype, found["good"].shape) == ("F4", (4, 4))


@settings(max_examples=examples(300))
@given(cut=st.integers(0, 300), at=st.integers(0, 299), byte=st.integers(0, 255))
def test_damaged_files_are_refused_or_lie_in_their_file(cut: int, at: int, byte: int, tmp_path_factory: Any):
    path = write(
        tmp_path_factory.getbasetemp() / "damaged", {"a": GOOD, "b": GOOD | {"dtype": "F16", "data_offsets": [0, 32]}}
    )
    data = bytearray(path.read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(data[: len(data) - cut % len(data)])
    try:
        found = read(path)
    except Refused:
        return
    for each in found.values():
        assert each.dtype not in ("F32", "F16") or each.start + each.shape[0] * each.row_bytes <= len(path.read_bytes())
