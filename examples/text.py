"""Train a byte-level language model on Python's own sources: alone, with a memory on disk, and on `nn.Embedding`.

    python examples/text.py                   three trainings, side by side
    python examples/text.py --svg bits.svg    draws how they learn
    python examples/text.py --open            the memory has rows only for n-grams that were seen twice

The memory is a table of 8 million rows. The last 3, 4, 5 and 6 bytes name a row each (`er.Ngrams`), and a gate decides
how much of these rows the model takes. All three train on the same batches. Each is a process of its own with one
thread. The one with its memory on disk is killed half-way, and goes on from its last checkpoint.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import sysconfig
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # few cores: threads that wait by spinning make a step 10x longer

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import embedrock as er
import embedrock.torch as ert
from common import DataError, cache_folder, count, facts, make_parser, mib, reports, run
from embedrock.system.ram import peak_rss_bytes
from recommender import resume, use_threads
from side_by_side import WARM_UP, Clock, Training, figure, run_all

CONTEXT, SEQUENCES = 128, 8  # bytes that the model sees at once; sequences in a batch
LAYERS, DIM, HEADS = 3, 96, 4
ORDERS, WIDTH = (3, 4, 5, 6), 32  # bytes of the n-grams that name rows; columns of the rows
MEMORY_BLOCK = 1  # which the rows come before
RATE, ROW_RATE = 4e-3, 0.05  # learning rates
AHEAD = 4  # batches whose rows are read ahead
HELD_OUT, SCORED = 20, 512  # one file in so many is held out; sequences of these that are scored
REPORTS = 6  # times that they are; rows on disk have a checkpoint then
ALONE, MEMORY, PLAIN = "alone", "memory", "nn.Embedding"


# ---------------------------------------------------------------- the text


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of the standard library's sources: of files to train on, and of those held out.

    Raises:
        DataError: it has no sources here.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    if len(paths) < HELD_OUT:
        raise DataError(
            f"{root}: expected the sources of Python's standard library; got {len(paths)} files. Install them, or take "
            "a Python that has them."
        )
    order = np.random.default_rng(0).permutation(len(paths))
    files = [np.frombuffer(b"\0" + paths[at].read_bytes(), np.uint8) for at in order]
    held_out = files[::HELD_OUT]
    del files[::HELD_OUT]
    return np.concatenate(files), np.concatenate(held_out)


class Batch(NamedTuple):
    """Sequences of bytes.

    Attributes:
        inputs, targets: int64 (n, CONTEXT); a target is the byte that follows.
        ids: int64 (n, CONTEXT, len(ORDERS)), the rows of the n-grams that end at each input.
    """

    inputs: Tensor
    targets: Tensor
    ids: Tensor


def batch_at(text: np.ndarray, starts: np.ndarray, grams: er.Ngrams) -> Batch:
    """Return the sequences that start at these bytes of the text."""
    tokens = torch.from_numpy(text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64))
    return Batch(tokens[:, :-1], tokens[:, 1:], grams.ids(tokens[:, :-1]))


def batch_of(step: int, text: np.ndarray, grams: er.Ngrams, seed: int) -> Batch:
    """Return the batch of a step, which follows from nothing but its number and the seed."""
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - CONTEXT, SEQUENCES)
    return batch_at(text, starts, grams)


# ---------------------------------------------------------------- the model


class Block(nn.Module):
    """A transformer's block: attention, then a network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.query_key_value, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)
        for layer in (self.out, self.down):  # each block begins as the identity
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, t, DIM) to the same shape."""
        heads = self.query_key_value(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(attended)
        return x + self.down(functional.relu(self.up(self.norm_2(x))).square())


class Memory(nn.Module):
    """Rows of the n-grams that end at a byte. A gate adds them to the residual stream as far as they fit it."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        width = len(ORDERS) * WIDTH
        self.key, self.value = nn.Linear(width, DIM, bias=False), nn.Linear(width, DIM, bias=False)
        self.norm_x, self.norm_key = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Map (n, t, DIM) to the same shape; `ids` is (n, t, orders)."""
        rows = self.table(ids).flatten(-2)
        fit = (self.norm_x(x) * self.norm_key(self.key(rows))).sum(-1, keepdim=True) / DIM**0.5
        gate = torch.sigmoid(fit.abs().clamp_min(1e-6).sqrt() * fit.sign())
        return x + gate * self.value(rows)


class Transformer(nn.Module):
    """A transformer that predicts the next byte, with a memory or without."""

    def __init__(self, table: nn.Module | None) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, 256, bias=False)
        self.memory = None if table is None else Memory(table)

    def forward(self, inputs: Tensor, ids: Tensor) -> Tensor:
        """Return logits (n, t, 256) of the bytes that follow."""
        x = self.byte(inputs) + self.position.weight[: inputs.shape[1]]
        for number, block in enumerate(self.blocks):
            if number == MEMORY_BLOCK and self.memory is not None:
                x = self.memory(x, ids)
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Batch, reduction: str = "mean") -> Tensor:
        """Return the cross-entropy of the targets, in nats."""
        logits = self(batch.inputs, batch.ids)
        return functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction=reduction)


def make_grams(name: str, options: Namespace) -> er.Ngrams:
    """Return what gives n-grams their ids. Several share a row, but with ``--open`` each has an id of its own."""
    rows = None if options.open and name == MEMORY else options.rows
    return er.Ngrams(rows=rows, vocabulary=256, orders=ORDERS, heads=1, seed=options.seed)


def make_model(name: str, rows: int | None, options: Namespace, folder: Path) -> tuple[Transformer, Any, list[Any]]:
    """Return a model, its layer of rows and its optimizers. All begin with the same weights, and rows of zeros."""
    dense: Any = partial(torch.optim.AdamW, lr=RATE, betas=(0.9, 0.95), weight_decay=0)
    table: Any = None
    if name == MEMORY:
        policy = er.Admission(min_count=2) if options.open else None
        place: Any = {"path": folder / "memory.rock", "memory": options.memory}
        table = ert.Embedding(rows, WIDTH, init=er.Zeros(), admission=policy, **place)
    elif name == PLAIN:
        table = nn.Embedding(options.rows, WIDTH, sparse=True)
        nn.init.zeros_(table.weight)
    torch.manual_seed(options.seed)
    model = Transformer(table)
    if name == MEMORY:
        return model, table, [ert.optimizer(model, partial(ert.RowwiseAdagrad, lr=ROW_RATE), dense)]
    if name == PLAIN:
        others = [weight for weight in model.parameters() if weight is not table.weight]
        return model, table, [dense(others), torch.optim.SparseAdam([table.weight], lr=ROW_RATE)]
    return model, None, [dense(model.parameters())]


# ---------------------------------------------------------------- a training


def train(name: str, options: Namespace, folder: Path, tell: Callable[[dict[str, Any]], Any]) -> None:
    """Train from the last checkpoint on, if there is one.

    Args:
        name: ALONE, MEMORY or PLAIN.
        options: of all trainings.
        folder: of the table of MEMORY, and its checkpoints.
        tell: takes the numbers of each step, and at the end those of the training.
    """
    use_threads(options.threads)
    text, held_out = read_text()
    grams = make_grams(name, options)
    model, table, optimizers = make_model(name, grams.rows, options, folder)
    schedules = [LambdaLR(each, lambda done: rate(done, options.steps)) for each in optimizers]
    states = [*optimizers, *schedules]
    first = resume(model, states, folder) if name == MEMORY else 0
    batches: Iterable[Batch] = (batch_of(step, text, grams, options.seed) for step in range(first, options.steps))
    if name == MEMORY:
        batches = ert.prefetch(batches, {table: lambda batch: batch.ids}, depth=AHEAD)
    clock, measured = Clock(), reports(first, options.steps, REPORTS)
    for step, batch in enumerate(batches, first + 1):
        numbers = {"step": step, "loss": train_step(model, states, batch, clock), **clock.lap()}
        if step in measured:
            numbers |= {"bits": bits_per_byte(model, held_out, grams), "ram": peak_rss_bytes()}
            clock.lap()
        tell(numbers)
        if name == MEMORY and step in measured:
            ert.save(model, folder / "checkpoints", step, states)
    tell({"ram": peak_rss_bytes(), **sizes(table)})


def rate(done: int, steps: int) -> float:
    """Return the share of the learning rates after some steps: a warm-up, then a plateau, then a decay."""
    return min((done + 1) / 50, 1, max((steps - done) / (0.4 * steps), 0.05))


def train_step(model: Transformer, states: Iterable[Any], batch: Batch, clock: Clock) -> float:
    """Train on a batch; return its loss of before."""
    loss = model.loss(batch)
    loss.backward()
    for state in states:  # optimizers, then their schedules
        with clock.timed("step") if isinstance(state, torch.optim.SparseAdam) else nullcontext():
            state.step()
    model.zero_grad()
    return loss.item()


@torch.no_grad()
def bits_per_byte(model: Transformer, held_out: np.ndarray, grams: er.Ngrams) -> float:
    """Return what the model needs for a byte of the held-out files."""
    starts = np.random.default_rng(0).permutation((len(held_out) - 1) // CONTEXT)[:SCORED] * CONTEXT
    model.eval()
    losses = [model.loss(batch_at(held_out, part, grams), "sum").item() for part in np.array_split(starts, 16)]
    model.train()
    return sum(losses) / (len(starts) * CONTEXT * math.log(2))


def sizes(table: Any) -> dict[str, int]:
    """Return how many rows are kept, and the bytes of their files. Close a table on disk."""
    if table is None:
        return {}
    if isinstance(table, nn.Embedding):
        return {"rows": table.num_embeddings}
    rows, folder = table.table.stats()["rows_touched"], Path(table.table.path)
    table.table.close()
    return {"rows": rows, "files": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())}


# ---------------------------------------------------------------- all of them


def summary(trainings: Sequence[Training], repeated: int) -> str:
    """Return what the trainings have reached, and what that took."""
    lines = ["", f"{'':12}  bits per byte   peak RAM  CPU ms a step  on rows  rows kept      files"]
    for each in trainings:
        curve, (seconds, on_rows, ram) = each.curve(), each.cost()
        line = f"{each.name:12}  {curve[max(curve)]:13.3f}  {ram / 2**30:5.2f} GiB  {1000 * seconds:13.1f}"
        if "rows" in each.result:
            line += f"  {on_rows / seconds:7.1%}  {each.result['rows']:9,}  {mib(each.result.get('files', 0)):>9}"
        lines.append(line)
    notes = {
        "CPU": f"without the first {WARM_UP} steps; on rows: all work of tables, and of nn.Embedding its optimizer",
        "killed": f"{repeated} steps of the memory were trained twice, with the same losses to the last bit",
        "scale": "gains shrink as models grow: one for nanochat went from 0.7180 to 0.7037 bits per byte",
    }
    return "\n".join([*lines, "", facts(notes)])


def main(words: list[str]) -> None:
    """Train as the words of the command line say."""
    parser = make_parser(__doc__)
    parser.set_defaults(threads=1)
    for name, default, text in (
        ("steps", 1200, "batches"),
        ("rows", 8_000_000, "rows of the memory"),
        ("memory", "64MiB", "RAM of the table on disk"),
    ):
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=text)
    parser.add_argument("--open", action="store_true", help="on disk, give rows only to n-grams that were seen twice")
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="leave `nn.Embedding` out")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw a figure")
    options = parser.parse_args(words)
    if options.svg and not options.svg.absolute().parent.is_dir():
        parser.error(f"argument --svg: must be a file in a folder that exists: got {str(options.svg)!r}")
    megabytes, held_out = (len(part) / 1e6 for part in read_text())
    source = f"sources of Python {platform.python_version()}'s standard library"
    weights = sum(each.numel() for each in Transformer(None).parameters())
    batches = f"{options.steps:,} batches of {SEQUENCES * CONTEXT:,} bytes"
    print(f"text     {source}: {megabytes:.1f} MB to train on, {held_out:.1f} MB held out")
    print(f"model    {weights:,} weights, {LAYERS} layers of {DIM}; {batches}")
    names = (ALONE, MEMORY, PLAIN)[: 2 + options.compare]
    with tempfile.TemporaryDirectory(prefix="text-", dir=cache_folder()) as folder:
        trainings = [Training(name, train, options, Path(folder)) for name in names]
        run_all(trainings, trainings[1], kill_after=options.steps // 2 + options.steps // 12)
    print(summary(trainings, trainings[1].repeated))
    if options.svg:
        options.svg.write_text(figure(trainings, f"Bits per byte of held-out files, by steps (to {options.steps:,})"))
        print(facts({"figure": str(options.svg)}))


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
