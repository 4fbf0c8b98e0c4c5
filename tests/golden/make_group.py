"""Makes the golden group: `python tests/golden/make_group.py [FOLDER]`. It is never made again: see `make.py`.

Its members are the golden tables, and one more of the layout of one of them; another one was dropped.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er

GROUP = Path(__file__).resolve().parent / "group-4"
MEMBERS: dict[str, dict[str, Any]] = {
    "adam": {"rows": 150, "dim": 3, "rule": er.Adam(lr=0.01, dense=True), "init": er.Normal(std=0.1), "seed": 7},
    "gone": {"rows": 70, "dim": 2, "rule": er.SGD(lr=0.5), "init": er.Zeros(), "seed": 0},
    "sgd": {"rows": 10**9, "dim": 2, "rule": er.SGD(lr=0.5), "init": er.Zeros(), "seed": 0},
    "more": {"rows": 70, "dim": 2, "rule": er.SGD(lr=0.1), "init": er.Constant(0.5), "seed": 1},
    "open": {
        "rows": None,
        "dim": 2,
        "dtype": "bfloat16",
        "rule": er.RowwiseAdagrad(lr=0.1),
        "init": er.Uniform(),
        "seed": 5,
    },
}
IDS = np.arange(0, 60, 3)


def step(tables: dict[str, er.Table], number: int) -> None:
    """Step rows of all tables by gradients that follow from their ids."""
    for name, table in tables.items():
        ids = IDS + number
        if table.rows is None:
            ids = np.append(ids, [-(2**63), 2**63 - 1])
        elif table.rows > 1000:
            ids = np.append(ids, [10**8 + number, 10**9 - 1])
        table.update(ids, np.sin((ids % 1000)[:, None] + np.arange(table.dim) + len(name)).astype(np.float32))


def make(folder: Path) -> None:
    """Write the golden group."""
    with er.Group(path=folder, memory="1MiB", keep=9) as group:
        tables = {name: group.table(name, **given) for name, given in MEMBERS.items()}
        step(tables, 0)
        group.commit()
        group.compact()
        group.drop("gone")
        del tables["gone"]
        for number in (1, 2):
            step(tables, number)
            group.commit(step=number)
    (folder / "LOCK").unlink()


def in_memory(steps: int) -> dict[str, er.Table]:
    """Return the members in RAM, after so many steps."""
    tables = {name: er.Table(**given) for name, given in MEMBERS.items()}
    for number in range(steps):
        step(tables, number)
    del tables["gone"]
    return tables


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of all files of the golden group."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "digests.json")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else GROUP
    if not target.exists():
        make(target)
        target.with_name(target.name + "-digests.json").write_text(json.dumps(digests(target), indent=1) + "\n")
