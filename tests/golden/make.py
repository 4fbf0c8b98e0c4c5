"""Makes the golden tables: `python tests/golden/make.py [FOLDER]`. They are never made again, only added to.

A release that cannot open them, or reads other bytes, has broken the format. Those in `version-N` were written in
version N of it, and each change of it adds a folder.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import embedrock as er
from embedrock.store.compaction import NO_AGE, compact
from embedrock.store.pieces import CompactionGoal
from embedrock.store.segments import FORMAT
from small_pieces import cut_small
from table_files import store_of

HERE = Path(__file__).resolve().parent
VERSIONS = {version: HERE / f"version-{version}" for version in (1, 2)}
LOWEST, HIGHEST = -(2**63), 2**63 - 1
Change = Callable[[er.Table], object]


class Golden(NamedTuple):
    """A golden table.

    Attributes:
        arguments: of `Table`.
        before: steps that end up in the base.
        after: steps that end up in logs, a commit each.
    """

    arguments: dict[str, Any]
    before: list[Change]
    after: list[Change]


def step(ids: Any, **changes: Any) -> Change:
    """Return a step of rows whose gradients follow from their ids."""

    def take(table: er.Table) -> None:
        rows = np.array(ids, np.int64)
        grads = np.sin((rows % 1000)[:, None] + np.arange(table.dim)).astype(np.float32)
        table.update(rows, grads, **changes)

    return take


GOLDEN = {
    "adam": Golden(
        {"rows": 150, "dim": 3, "rule": er.Adam(lr=0.01, dense=True), "init": er.Normal(std=0.1), "seed": 7},
        [step(range(0, 150, 6)), step([3, 3, 149, 0])],
        [step([1, 2, 3]), step([3, 6], lr=0.5)],
    ),
    "sgd": Golden(
        {"rows": 70, "dim": 2, "rule": er.SGD(lr=0.5), "init": er.Zeros(), "seed": 0},
        [step(range(70))],
        [step([0, 69])],
    ),
    "open": Golden(
        {
            "rows": None,
            "dim": 2,
            "dtype": "bfloat16",
            "rule": er.RowwiseAdagrad(lr=0.1),
            "init": er.Uniform(),
            "seed": 5,
        },
        [step([LOWEST, -1, 0, 10**12, HIGHEST])],
        [step([HIGHEST, 5]), step([LOWEST, 10**12])],
    ),
}


IN_PIECES = Golden(  # of version 5
    {"rows": 150, "dim": 2, "rule": er.SGD(lr=0.5), "init": er.Zeros(), "seed": 0},
    [step(range(150))],
    [step([0, 20, 149]), step([1, 20, 21, 100, 149]), step([2, 20, 149])],
)


COME_AND_GO = Golden(  # of versions 3 and 6
    {
        "rows": None,
        "dim": 2,
        "rule": er.Adam(lr=0.01),
        "init": er.Uniform(),
        "seed": 3,
        "admission": er.Admission(2, within=8, default="shared"),
        "eviction": er.Eviction(max_rows=5, by="recency", keep=[5]),
    },
    [step([1, 2, 5, LOWEST]), step([1, 2, 3, 5, LOWEST])],
    [step([6, 7, 3]), step([6, 7, HIGHEST]), lambda table: table.forget([7]), step([8])],
)


FROZEN = Golden(  # of version 9
    {
        "rows": None,
        "dim": 2,
        "rule": er.AdamW(lr=0.1),
        "init": er.Uniform(),
        "seed": 3,
        "frozen": [5, range(7, HIGHEST)],
    },
    [step([1, 2, 5, 7, LOWEST])],
    [step([1, 5, 6, HIGHEST]), lambda table: table.assign([5], np.ones((1, 2))), step([5, 2])],
)


def make(folder: Path, golden: Golden) -> None:
    """Write a golden table, and what it holds as of each commit."""
    table = er.Table(path=folder, **golden.arguments)
    for change in golden.before:
        change(table)
    table.commit()
    table.compact()
    for number, change in enumerate(golden.after):
        change(table)
        table.commit(step=number, name=f"golden {number}")
    table.close()


def make_in_pieces(folder: Path) -> None:
    """Write a golden table some of whose chunks have logs in them that its last commit names."""
    with cut_small():
        table = er.Table(path=folder, **IN_PIECES.arguments)
        for change in IN_PIECES.before:
            change(table)
        table.commit()
        table.compact()
        for number, change in enumerate(IN_PIECES.after):
            change(table)
            if number == len(IN_PIECES.after) - 1:
                compact(store_of(table), None, lambda: False, CompactionGoal(4, NO_AGE))
            table.commit(step=number, name=f"golden {number}")
        table.close()


def make_forgotten(folder: Path) -> None:
    """Write a golden table whose commits have rows in their files that were forgotten; the last is a rollback."""
    with er.Table(None, 2, rule=er.SGD(lr=0.5), init=er.Zeros(), seed=0, path=folder, keep=9) as table:
        step([1, 2, 3, LOWEST, HIGHEST])(table)
        table.commit(name="before")
        table.forget([2, LOWEST, 77])
        table.commit()
        step([2, 4])(table)
        table.commit()
        table.forget([3])
        table.commit()
        step([5])(table)
        table.commit()
        table.rollback(1)


FORGOTTEN = {1: [1, HIGHEST], 2: [1, HIGHEST], 3: [1, 2, 4, HIGHEST], 4: [1, 2, 4, HIGHEST], 5: [1, 2, 4, 5, HIGHEST]}
FORGOTTEN[6] = FORGOTTEN[1]  # ids that each commit shows


def make_forgotten_in_group(folder: Path) -> None:
    """Write a golden group with members that forgot rows before and after they got other names."""
    with er.Group(path=folder, keep=9) as group:
        for seed, (name, rows) in enumerate({"users": 50, "items": 50, "words": None}.items()):
            group.table(name, rows, 2, rule=er.SGD(lr=0.5), init=er.Zeros(), seed=seed)
            step([1, 2, 3])(group[name])
        group.commit()
        group["users"].forget([1])
        group.rename("users", "people")
        group.rename("items", "users")
        group.commit()
        group["people"].forget([2])
        group["users"].forget([3])
        group["words"].forget([1, 2])
        group.commit()
        step([9])(group["people"])
        group.commit()


FORGOTTEN_IN_GROUP = {  # ids that each commit shows
    1: {"users": [3], "items": [1, 2], "words": [3]},
    2: {"people": [3], "users": [1, 2], "words": [3]},
    3: {"people": [3], "users": [1, 2], "words": [3]},
    4: {"people": [3, 9], "users": [1, 2], "words": [3]},
}


def in_memory(golden: Golden, commits: int) -> er.Table:
    """Return the same table in RAM, as of its last commits but some."""
    table = er.Table(**golden.arguments)
    for change in (*golden.before, *golden.after[:commits]):
        change(table)
    return table


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of all files of the golden tables."""
    files = sorted(path for name in GOLDEN for path in (folder / name).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


if __name__ == "__main__":
    if not (HERE / "version-9" / "frozen").exists():
        (HERE / "version-9").mkdir(exist_ok=True)
        make(HERE / "version-9" / "frozen", FROZEN)
        (HERE / "version-9" / "frozen" / "LOCK").unlink()
    if not (HERE / "version-7" / "forgotten").exists():
        (HERE / "version-7").mkdir(exist_ok=True)
        make_forgotten(HERE / "version-7" / "forgotten")
        (HERE / "version-7" / "forgotten" / "LOCK").unlink()
    if not (HERE / "group-7").exists():
        make_forgotten_in_group(HERE / "group-7")
        (HERE / "group-7" / "LOCK").unlink()
    if not (HERE / "version-6" / "come-and-go").exists():  # version 3 has all counts in each commit
        (HERE / "version-6").mkdir(exist_ok=True)
        make(HERE / "version-6" / "come-and-go", COME_AND_GO)
        (HERE / "version-6" / "come-and-go" / "LOCK").unlink()
    if not (HERE / "version-5" / "pieces").exists():
        (HERE / "version-5").mkdir(exist_ok=True)
        make_in_pieces(HERE / "version-5" / "pieces")
        (HERE / "version-5" / "pieces" / "LOCK").unlink()
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else VERSIONS[FORMAT]
    target.mkdir(exist_ok=True)
    for name, golden in GOLDEN.items():
        if not (target / name).exists():
            make(target / name, golden)
            (target / name / "LOCK").unlink()
    (target / "digests.json").write_text(json.dumps(digests(target), indent=1) + "\n")
