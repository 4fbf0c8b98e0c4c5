"""`embedrock forget`: deletes rows of a table, and the files that no kept commit needs."""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er
from embedrock.cli.formats.arrays import BROKEN_NPY, as_id, npy_array
from embedrock.cli.formats.base import fail
from embedrock.cli.formats.files import check_kind, text_of
from embedrock.cli.places import folders_of, opened, place_of

PART_IDS = 1 << 16  # rows deleted at a time


def run_forget(arguments: Namespace) -> dict[str, Any]:
    """Delete the rows of a file of ids or strings, commit, and compact; return a summary.

    Raises:
        ArgumentError: a line of the file is no id.
    """
    place, (ids, unknown) = place_of(arguments.table), read_wanted(arguments)
    parts = folders_of(place.folder)
    results = [_forget_in(arguments.table if parts == [place.folder] else part, ids, arguments) for part in parts]
    return {
        "table": str(arguments.table),
        "ids": len(ids),
        "unknown": unknown,
        "forgotten": sum(one["forgotten"] for one in results),
        "commit": max(one["commit"] for one in results),
        "kept_commits": [one for each in results for one in each["kept_commits"]],
        "remove": [each["remove"] for each in results if each["kept_commits"]],
    }


def _forget_in(text: str, ids: np.ndarray, arguments: Namespace) -> dict[str, Any]:
    """Delete rows of a table alone, of one of a group, or of one shard."""
    with opened(text, memory=arguments.memory, keep=arguments.keep) as table:
        forgotten = sum(table.forget(ids[start : start + PART_IDS]) for start in range(0, len(ids), PART_IDS))
        commit = table.commit(step=table.last_step)
        commit = max(commit, table.compact())
        older = [one for one in table.commits() if one["commit"] < commit]
    folder = place_of(text).folder
    kept = []  # commits whose files still have deleted rows, but do not show them
    for one in older:
        with er.open(folder, mode="r", at=one["commit"], memory=arguments.memory) as found:
            if found.stats().get("rows_withheld"):
                kept.append({"commit": one["commit"], "name": one["name"]})
    drops = [f"--drop={one['name']}" for one in kept if one["name"]]
    remove = shlex.join(["embedrock", "compact", folder, "--keep", "1", *drops])
    return {"forgotten": forgotten, "commit": commit, "kept_commits": kept, "remove": remove}


def read_wanted(arguments: Namespace) -> tuple[np.ndarray, int]:
    """Return the ids to delete, int64 (n,), each once, and the number of strings that the vocabulary lacks."""
    if arguments.vocabulary is None and not arguments.hash:
        return np.unique(read_ids(arguments.ids)), 0
    strings = read_strings(arguments.ids)
    if arguments.hash:
        return np.unique(er.hash_ids(strings)), 0
    with er.Vocabulary(arguments.vocabulary, mode="r") as words:
        ids = words.lookup(np.unique(strings))
    return np.sort(ids[ids >= 0]), int(np.count_nonzero(ids < 0))


def read_strings(path: str) -> np.ndarray:
    """Return the strings of a file: a .npy file, or text with one string per line."""
    if path.endswith(".npy"):
        expected = "a .npy file of strings"
        check_kind(Path(path), expected, (".npy",))
        try:
            return np.load(path, allow_pickle=False).reshape(-1)
        except (EOFError, *BROKEN_NPY) as error:  # also object arrays, which only pickle can read
            fail(Path(path), expected, f"{error}", "Write it by numpy.save(path, np.array(strings, np.str_)).")
    lines = _lines(path, "strings, one in each line")
    return np.array([line.removesuffix("\r") for line in lines if line.strip()], np.str_)


def _lines(path: str, expected: str) -> list[str]:
    """Return the lines of a text; an empty file, as of a nightly job without deletions, has none."""
    return text_of(Path(path), expected).split("\n") if Path(path).stat().st_size else []


def read_ids(path: str) -> np.ndarray:
    """Return the ids of a file, int64 (n,): a .npy file, or text with one id per line.

    Raises:
        ArgumentError: a line is no id.
    """
    if path.endswith(".npy"):
        npy_array(Path(path))  # reports the error of the file
        return np.asarray(np.load(path, allow_pickle=False)).reshape(-1)
    ids = list[int]()
    for number, line in enumerate(_lines(path, "ids, one in each line"), 1):
        text = line.strip()
        if not text:
            continue
        try:
            ids.append(as_id(text))
        except ValueError as error:
            raise er.ArgumentError(
                f"line {number} of {path} must be an id, a whole number: got {text[:80]!r}."
            ) from error
    return np.array(ids, np.int64)
