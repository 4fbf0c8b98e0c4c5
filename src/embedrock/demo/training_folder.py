"""Where the tables of the demo on planted clicks are, and how training goes on after the program was killed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from embedrock.bench.harness.workload import Workload
from embedrock.demo.data.planted import ZIPF
from embedrock.demo.model_spec import ModelSpec
from embedrock.demo.options import ClickOptions
from embedrock.errors import EmbedrockError
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import format_facts

TIMES_SMALLER = 10  # the tables' RAM, if it was not chosen, than the rows trained
LEAST_BATCHES = 8  # whose rows fit into the RAM of a table, if it was not chosen
STATE = 3  # columns of a record for each column of a row: weights and Adam's two states
# What must be the same for a training to go on. `steps` and `memory` may change.
SAME = ("keras", "model", "users", "items", "dim", "batch_size", "lr", "seed")


class OtherTrainingError(EmbedrockError, ValueError):
    """A folder that has the files of a training with other options."""


@dataclass(frozen=True)
class TrainingFolder:
    """A folder with two tables and the checkpoints of a training.

    Attributes:
        folder: of all of it.
        budgets: the most RAM that the users' and the items' table may take, bytes.
        trained: bytes of the records of the rows that the training touches, about.
        is_kept: the user chose the folder, so that it stays when the training is done.
    """

    folder: Path
    budgets: tuple[int, int]
    trained: int
    is_kept: bool

    @classmethod
    def of(cls, options: ClickOptions) -> TrainingFolder:
        """Return where a training with these options has its files."""
        lookups = options.steps * options.batch_size
        touched = [Workload(rows, batch=lookups, features=1, zipf=ZIPF).expected_misses(0) for rows in _rows(options)]
        record_bytes = options.dim * STATE * 4
        trained = int(sum(touched) * record_bytes)
        memory = options.memory or max(trained // TIMES_SMALLER, _least_memory(options.batch_size, record_bytes))
        users = int(memory * touched[0] / sum(touched))
        least = memory // 4  # a small table needs room for its batches too
        users = min(max(users, least), memory - least)
        folder = options.path or default_folder()
        return cls(folder, (users, memory - users), trained, options.path is not None)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def describe(self) -> str:
        """Return two lines about the folder and the RAM."""
        memory = sum(self.budgets)
        trained = f"{format_bytes(self.trained)}, {self.trained / memory:.1f} times as much"
        ram = f"with {format_bytes(memory)} of RAM for the tables: the rows that are trained take about {trained}"
        return format_facts({"on disk": f"in {self.folder}\n{ram}"})

    def placed(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec of the same model with its tables in this folder."""
        return replace(spec, folder=self.folder, budgets=self.budgets)

    def claim(self, options: ClickOptions) -> None:
        """Make the folder, or find in it a training with the same options.

        Raises:
            OtherTrainingError: the options of the training there are others.
        """
        file = self.folder / "options.json"
        wanted = {name: getattr(options, name) for name in SAME}
        with suppress(FileNotFoundError):
            found = json.loads(file.read_text())
            if found == wanted:
                return
            others = ", ".join(f"{name}={value}" for name, value in found.items() if wanted.get(name) != value)
            raise OtherTrainingError(
                f"{str(self.folder)!r} has the files of a demo with other options ({others}). Choose those again to go "
                "on with it, pass another --path, or remove that folder."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(wanted))

    @contextmanager
    def claimed(self, options: ClickOptions) -> Iterator[TrainingFolder]:
        """Hold the folder for a training with these options; print that, and at the end what became of it."""
        print(f"\n{self.describe()}")
        self.claim(options)
        try:
            yield self
        except KeyboardInterrupt:
            text = f"the same command goes on from the last checkpoint; they stay in {self.folder}"
            print("\n" + format_facts({"files": text}))
            raise
        print(self.finish())

    def finish(self) -> str:
        """Remove the folder unless the user chose it; return one line about it."""
        size = format_bytes(sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()))
        if self.is_kept:
            text = f"{size}; the same command with more --steps goes on; they stay in {self.folder}"
        else:
            text = f"{size}, removed now; --path FOLDER keeps them"
            shutil.rmtree(self.folder)
        return format_facts({"files": text})


def default_folder() -> Path:
    """Return the folder of a demo without ``--path``: on disk, where /tmp may be in RAM, and found again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embedrock" / "demo"


def _rows(options: ClickOptions) -> tuple[int, int]:
    return options.users, options.items


def _least_memory(batch_size: int, record_bytes: int) -> int:
    return 2 * LEAST_BATCHES * batch_size * (record_bytes + 64) + (1 << 20)
