"""Train a byte-level language model with a memory on disk: 8 million rows of n-grams behind 64 MiB of RAM.

    python examples/language_model.py

The last 3, 4, 5 and 6 bytes name a row each (`er.Ngrams`), and a gate decides how much of these rows the model takes.
A small transformer trains on Python's own sources, with the memory and without. The process with the memory is killed
half-way (SIGKILL), and another one goes on from the checkpoint. Steps that it repeats must have the same losses, to the
last bit. Each loss is that of a batch before the model trains on it. For your own text, replace `TEXT`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sysconfig
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert

CONTEXT, SEQUENCES, DIM, WIDTH = 128, 8, 96, 32  # bytes of a sequence; of a batch; columns of the model, and of a row
PATHS = [path for path in Path(sysconfig.get_path("stdlib")).rglob("*.py") if "site-packages" not in path.parts]
TEXT = np.frombuffer(b"\0".join(path.read_bytes() for path in sorted(PATHS)), np.uint8)
GRAMS = er.Ngrams(rows=8_000_000, vocabulary=256, orders=(3, 4, 5, 6), heads=1, seed=0)


def batch_of(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs and the bytes that follow, (SEQUENCES, CONTEXT) each, and the rows of the inputs' n-grams."""
    starts = np.random.default_rng(step).integers(0, len(TEXT) - CONTEXT, SEQUENCES)
    tokens = torch.from_numpy(TEXT[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:], GRAMS.ids(tokens[:, :-1])


class Model(nn.Module):
    """A transformer that returns its loss for the next bytes. Its first layer gets rows of a memory, if it has one."""

    def __init__(self, memory: ert.Embedding | None) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 256))
        self.memory, width = memory, GRAMS.ids_per_token * WIDTH
        self.norm, self.key, self.value = nn.RMSNorm(DIM), nn.Linear(width, DIM), nn.Linear(width, DIM)

    def forward(self, inputs: Tensor, targets: Tensor, ids: Tensor) -> Tensor:
        x = self.byte(inputs) + self.position.weight
        if self.memory is not None:
            rows = self.memory(ids).flatten(-2)
            fit = (self.norm(x) * self.key(rows)).sum(-1, keepdim=True)
            x = x + torch.sigmoid(fit / DIM**0.5) * self.value(rows)
        x = self.layers(x, nn.Transformer.generate_square_subsequent_mask(CONTEXT), is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def train(name: str, steps: int, folder: Path) -> None:
    """Train from the last checkpoint on. Note the bits that each batch needs, and save now and then."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    place = {"path": folder / "memory.rock", "memory": "64MiB"}
    memory = ert.Embedding(GRAMS.rows, WIDTH, init=er.Zeros(), seed=0, **place) if name == "memory" else None
    model = Model(memory)
    states = [torch.optim.AdamW(ert.dense_parameters(model), lr=4e-3)]
    states += [torch.optim.lr_scheduler.OneCycleLR(states[0], 4e-3, steps)]
    states += [ert.RowwiseAdagrad(memory.parameters(), lr=0.05)] if memory else []
    first = 0
    with suppress(ert.NoCheckpointError):
        first = ert.load(model, folder / name, states)
    batches, bits = map(batch_of, range(first, steps)), list[float]()
    if memory:  # read the rows of the next batches while the model computes
        batches = ert.prefetch(batches, {memory: lambda batch: batch[2]}, depth=4)
    for step, batch in enumerate(batches, first + 1):
        loss = model(*batch)
        loss.backward()
        for state in states:
            state.step()
        model.zero_grad()
        bits.append(loss.item() / np.log(2))
        with (folder / f"{name}.log").open("a") as log:
            log.write(f"{step} {bits[-1]:.17g}\n")
        if step % (steps // 5) == 0:
            ert.save(model, folder / name, step, states)
            print(f"step {step:,}: {np.mean(bits[-50:]):.3f} bits per byte, {name}", flush=True)


def main(steps: int, folder: Path) -> None:
    """Train with the memory, kill that, go on with it while the same model trains without, and compare."""
    (log := folder / "memory.log").touch()
    process = partial(multiprocessing.get_context("spawn").Process, target=train, args=("memory", steps, folder))
    (killed := process()).start()
    while killed.is_alive() and log.read_text().count("\n") <= steps * 0.55:
        killed.join(0.05)
    killed.kill()
    killed.join()
    print("killed   the training with the memory, and started again", flush=True)
    (again := process()).start()
    train("alone", steps, folder)
    again.join()
    lines = log.read_text().splitlines()
    if again.exitcode or len(set(lines)) != steps:
        raise SystemExit("the training has failed, or a repeated step had another loss")
    print(f"resumed  {len(lines) - steps} steps were trained twice, with the same losses to the last bit")
    table = er.open(folder / "memory.rock", mode="r")
    print(f"memory   {len(table):,} of {GRAMS.rows:,} rows trained; {table.stats()['disk_bytes'] / 1e6:.0f} MB on disk")
    bits = [np.loadtxt(folder / f"{name}.log")[-50:, 1].mean() for name in ("alone", "memory")]
    print(f"bits     a byte needs {bits[0]:.3f} alone and {bits[1]:.3f} with the memory: {bits[0] - bits[1]:.3f} less")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help=f"batches of {SEQUENCES * CONTEXT:,} bytes")
    with tempfile.TemporaryDirectory() as scratch:
        main(parser.parse_args().steps, Path(scratch))
