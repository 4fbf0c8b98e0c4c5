"""Where the tables of a demo on a source are, and how training goes on after the program was killed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from embedrock.bench.harness.workload import Workload
from embedrock.demo.data.planted import ZIPF
from embedrock.demo.model_spec import Feature, ModelSpec
from embedrock.demo.options import SourceOptions
from embedrock.demo.training import DEPTH
from embedrock.errors import EmbedrockError
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import format_facts

TIMES_SMALLER = 10  # the tables' RAM, if it was not chosen, than the rows trained
LEAST_BATCHES = DEPTH + 3  # whose rows have to fit the RAM of the tables
SLOT_BYTES = 64  # of a row in RAM, beside its record: of the directory
SPARE = 4 / 3  # of RAM over that of rows: an index of logs may take 3/16 of it
TABLE_BYTES = 1 << 17  # of RAM of the tables, beside all that

S = TypeVar("S", bound=ModelSpec)


class OtherTrainingError(EmbedrockError, ValueError):
    """A folder that has the files of a training with other options."""


class TooLittleMemoryError(EmbedrockError, ValueError):
    """RAM that is not enough for the batches of a training."""


@dataclass(frozen=True)
class TrainingFolder:
    """A folder with tables and the checkpoints of a training.

    Attributes:
        folder: of all of it.
        memory: the most RAM that the tables may take together, bytes; None: Embedrock's own choice.
        trained: bytes of the records of the rows that the training touches, about; None: nobody knows.
        is_kept: the user chose the folder, so that it stays when the training is done.
    """

    folder: Path
    memory: int | None
    trained: int | None
    is_kept: bool

    @classmethod
    def of(cls, spec: ModelSpec, options: SourceOptions) -> TrainingFolder:
        """Return where a training of a model with these options has its files.

        Raises:
            TooLittleMemoryError: the options' `memory` cannot hold the rows of a few batches.
        """
        folder, is_kept = options.path or default_folder(options.FOLDER), options.path is not None
        if any(feature.rows is None for feature in spec.features):
            return cls(folder, options.memory, None, is_kept)
        rows = [_rows(feature, options) for feature in spec.features]
        trained = int(sum(touched for touched, _ in rows) * spec.record_bytes)
        slots = sum(min(touched, LEAST_BATCHES * of_batch) for touched, of_batch in rows)
        least = TABLE_BYTES + int(slots * SPARE * (spec.record_bytes + SLOT_BYTES))
        memory = options.memory or max(trained // TIMES_SMALLER, least)
        if memory < least:
            raise TooLittleMemoryError(
                f"--memory must hold the rows of {LEAST_BATCHES} batches, about {format_bytes(least)}: "
                f"got {format_bytes(memory)}. Pass more, or a smaller --batch-size or --dim."
            )
        return cls(folder, memory, trained, is_kept)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def describe(self) -> str:
        """Return two lines about the folder and the RAM."""
        memory = self.memory
        ram = f"{format_bytes(memory)} of RAM for the tables" if memory else "half of the RAM for the tables together"
        if memory and self.trained is not None:
            times = f"{format_bytes(self.trained)}, {self.trained / memory:.1f} times as much"
            ram += f": the rows that are trained take about {times}"
        return format_facts({"on disk": f"in {self.folder}\nwith {ram}"})

    def placed(self, spec: S) -> S:
        """Return the spec of the same model with its tables in this folder."""
        return replace(spec, folder=self.folder, memory=self.memory)

    def claim(self, options: SourceOptions) -> None:
        """Make the folder, or find in it a training with the same options.

        Raises:
            OtherTrainingError: the options of the training there are others.
        """
        file, wanted = self.folder / "options.json", options.same
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
    def claimed(self, options: SourceOptions) -> Iterator[TrainingFolder]:
        """Hold the folder for a training with these options; print that, and at the end what became of it."""
        print(f"\n{self.describe()}")
        self.claim(options)
        try:
            yield self
        except (Exception, KeyboardInterrupt):
            print(f"\n{self.stop()}")
            raise
        print(self.finish())

    def stop(self) -> str:
        """Remove a folder that nobody chose and to which nothing was saved; return one line about it."""
        if self.is_kept or self.checkpoints.exists():
            return format_facts(
                {"files": f"the same command goes on from the last checkpoint; they stay in {self.folder}"}
            )
        shutil.rmtree(self.folder, ignore_errors=True)  # what went wrong is to be told, not this
        return format_facts({"files": "removed, as nothing was saved yet"})

    def finish(self) -> str:
        """Remove the folder unless the user chose it; return one line about it."""
        size = format_bytes(sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()))
        if self.is_kept:
            text = f"{size}; the same command with more --steps goes on; they stay in {self.folder}"
        else:
            text = f"{size}, removed now; --path FOLDER keeps them"
            shutil.rmtree(self.folder)
        return format_facts({"files": text})


def default_folder(name: str) -> Path:
    """Return the folder of a demo without ``--path``: on disk, where /tmp may be in RAM, and found again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embedrock" / name


def _rows(feature: Feature, options: SourceOptions) -> tuple[float, float]:
    """Return how many rows of a table a training touches, and how many a batch, about."""
    asked = feature.bag or 1
    touched, of_batch = (
        Workload(feature.rows or 0, batch=lookups, features=asked, zipf=ZIPF).expected_misses(0)
        for lookups in (options.batches * options.batch_size, options.batch_size)
    )
    return touched, of_batch
