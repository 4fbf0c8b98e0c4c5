"""`embedrock forget`: rows leave a table, and the files that no kept commit needs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er
from embedrock.cli.formats._layout import as_id
from embedrock.cli.formats._packed import text_of
from embedrock.cli.formats.npy import npy_array
from embedrock.cli.places import opened

PART_IDS = 1 << 16  # forgotten at a time


def run_forget(arguments: Namespace) -> dict[str, Any]:
    """Forget the rows of a file of ids, commit that, and compact; return what was done.

    Raises:
        ArgumentError: a line of the file is no id.
    """
    ids = np.unique(read_ids(arguments.ids))
    with opened(arguments.table, memory=arguments.memory, keep=arguments.keep) as table:
        forgotten = sum(table.forget(ids[start : start + PART_IDS]) for start in range(0, len(ids), PART_IDS))
        commit = table.commit(step=table.last_step)
        commit = max(commit, table.compact())
        older = [one for one in table.commits() if one["commit"] < commit]
    return {
        "table": str(arguments.table),
        "ids": len(ids),
        "forgotten": forgotten,
        "commit": commit,
        "kept_commits": [{"commit": one["commit"], "name": one["name"]} for one in older],
    }


def read_ids(path: str) -> np.ndarray:
    """Return the ids of a file, int64 (n,): a .npy file, or text with one id in each line.

    Raises:
        ArgumentError: a line is no id.
    """
    if path.endswith(".npy"):
        npy_array(Path(path))  # says what is wrong with the file
        return np.asarray(np.load(path, allow_pickle=False)).reshape(-1)
    ids = list[int]()
    for number, line in enumerate(text_of(Path(path), "ids, one in each line").split("\n"), 1):
        text = line.strip()
        if not text:
            continue
        try:
            ids.append(as_id(text))
        except ValueError as error:
            raise er.ArgumentError(
                f"line {number} of {path} must be an id, a whole number: got {text[:80]!r}."
            ) from error
    try:
        return np.array(ids, np.int64)
    except OverflowError as error:
        raise er.ArgumentError(f"ids in {path} must be int64: got one beyond that.") from error
