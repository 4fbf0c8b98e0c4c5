"""Published tables in safetensors files, written by the package of that name, and their rows by PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

import embedrock as er

NAME = "model.layers.2.ngrams"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8}
SCALES = {**FLOATS, "F8_E8M0": torch.float8_e8m0fnu}


class Published(NamedTuple):
    """Tensors of a table by name, and its rows: float32 (rows, dim)."""

    tensors: dict[str, torch.Tensor]
    rows: np.ndarray

    def split(self, *cuts: int, form: str = "shard_{}.") -> Published:
        """Return the table with its weights, and all that have as many rows, in shards that end at `cuts`."""
        bounds, made = [0, *cuts, len(self.rows)], dict[str, torch.Tensor]()
        for name, tensor in self.tensors.items():
            kind = name.removeprefix(f"{NAME}.")
            if tensor.dim() != 2 or len(tensor) != len(self.rows):
                made[name] = tensor
                continue
            for number, (start, end) in enumerate(itertools.pairwise(bounds)):
                made[f"{NAME}.{form.format(number)}{kind}"] = tensor[start:end].clone()
        return Published(made, self.rows)

    def write(self, folder: Path, *, names: str = "model-{}-of-{}.safetensors", files: int = 1) -> Path:
        """Write the tensors to some files, in turns, and return the folder."""
        folder.mkdir(exist_ok=True)
        every = list(self.tensors.items())
        for k in range(files):
            save_file(dict(every[k::files]), folder / names.format(k + 1, files))
        return folder


def floats(dtype: str, rows: int, dim: int, seed: int = 0) -> Published:
    drawn = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, dim), np.float32))
    weight = drawn.to(FLOATS[dtype])
    return Published({f"{NAME}.weight": weight}, weight.float().numpy())


def codes(
    dtype: str, rows: int, dim: int, scales: tuple[int, ...] | None, scale: str = "F32", block: int = 0
) -> Published:
    """Return a table of 8-bit codes. `scales`: shape of the scales; `block`: rows and columns of one, if not equal."""
    draw = np.random.default_rng(rows * dim)
    stored = torch.from_numpy(draw.integers(0, 256, (rows, dim), np.uint8)).view(CODES[dtype])
    values = stored.float()
    if scales is None:
        return Published({f"{NAME}.weight": stored}, values.numpy())
    drawn = np.exp2(draw.integers(-9, 9, scales)) * (1 if scale == "F8_E8M0" else 1.25)
    factor = torch.from_numpy(np.asarray(drawn, np.float32)).to(SCALES[scale])
    spread = factor.float().reshape(*scales, *[1] * (2 - len(scales)))
    for axis, count in enumerate((rows, dim)):
        each = block or -(-count // spread.shape[axis])
        spread = spread.repeat_interleave(count if spread.shape[axis] == 1 else each, axis).narrow(axis, 0, count)
    tensors = {f"{NAME}.weight": stored, f"{NAME}.weight_scale": factor}
    return Published(tensors, (values * spread).numpy())


def halves(rows: int, dim: int, group: int, words: str = "BF16") -> Published:
    """Return a table of 4-bit codes in words of 32 bits, with a scale and an offset a group: MLX's form."""
    draw = np.random.default_rng(rows * dim)
    numbers = draw.integers(0, 16, (rows, dim // 8, 8)).astype(np.uint32)
    packed = (numbers << (4 * np.arange(8, dtype=np.uint32))).sum(2, dtype=np.uint32)
    scales, biases = (
        torch.from_numpy(draw.standard_normal((rows, dim // group), np.float32)).to(FLOATS[words]) for _ in range(2)
    )
    spread = [part.float().repeat_interleave(group, 1) for part in (scales, biases)]
    values = torch.from_numpy(numbers.reshape(rows, dim).astype(np.float32)) * spread[0] + spread[1]
    kinds = {"weight": torch.from_numpy(packed), "scales": scales, "biases": biases}
    return Published({f"{NAME}.{kind}": tensor for kind, tensor in kinds.items()}, values.numpy())


def base_of(folder: Path | str, memory: int | str = "1MiB", tensor: str = NAME) -> er.FromSafetensors:
    return er.FromSafetensors(str(folder), tensor, memory)


def written(table: Published, folder: Path, memory: int | str = "1MiB", **how: object) -> er.FromSafetensors:
    """Write a table, and return the initializer that reads it."""
    return base_of(table.write(folder, **how), memory)  # pyright: ignore[reportArgumentType]


def table_of(init: er.FromSafetensors | er.FromArray, **options: object) -> er.Table:
    """Return a table that starts as a published one, or as an array."""
    return er.Table(*init.shape, init=init, **{"dtype": "float32", **options})  # pyright: ignore[reportArgumentType]


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file(dict(tensors), path)
