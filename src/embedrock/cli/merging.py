"""``embedrock export --merge``: writes a published table again, with the rows of the table that was trained over it.

All files of its folder are copied, then the trained rows are written into the copies. The same command continues.
"""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er
from embedrock.cli.exports import encoded
from embedrock.cli.formats.base import FLOATS, PART, Output, PartFile, Region, fail, part_of, publish, rows_at_once
from embedrock.cli.imports import RESTART, Journal
from embedrock.cli.places import opened, place_of
from embedrock.cli.terminal.tables import format_count, progress
from embedrock.initializers import FromSafetensors, published
from embedrock.io.vfs import explained_if_full, full_disk

Copies = dict[Path, Path]  # files of the published folder, and their copies


def run_merge(arguments: Namespace) -> dict[str, Any]:
    """Merge, and return a summary. The folder gets its name when it is complete."""
    path, place = Path(arguments.file).absolute(), place_of(arguments.table)
    part = part_of(path)
    if path.exists():
        fail(path, "a folder that is not there yet", "one that is", "Move it away, or choose another name.")
    with opened(arguments.table, mode="r", at=arguments.at, memory=arguments.memory) as table:
        base, rows = _base_of(table), int(table.stats()["rows_touched"])
        if not rows:
            fail(Path(arguments.table), "rows that were stepped or assigned", "none", "Train it first.")
        job = {"table": [table.uuid, place.member], "commit": table.last_commit, "base": base.describe()}
        journal = Journal(path.with_name(f"{path.name}{PART}.json"), job)
        if arguments.restart or journal.load() is None:
            if part.exists() and not arguments.restart:
                fail(part, "no such folder", "one that this command did not begin", RESTART)
            shutil.rmtree(part, ignore_errors=True)
            journal.save({"rows": 0})
        copies = _copies(
            Path(base.folder), part, {os.path.realpath(each) for each in (part, journal.path, place.folder)}
        )
        with explained_if_full(lambda: _full_disk(path, copies)):
            _copy(copies)
            _overwrite(table, base, copies, rows)
        found = {"table": str(table.path), "commit": table.last_commit, "files": [str(publish(part, path))]}
        journal.path.unlink()
        about = {"rows": rows, "continued_at": 0, "dim": table.dim, "dtype": base.dtype, "all": False}
        return found | {"format": "safetensors"} | about


def _base_of(table: er.Table) -> FromSafetensors:
    init = table.spec.init
    if not isinstance(init, FromSafetensors):
        got, remedy = f"init={init}", "Leave --merge out, and name a file: its rows can be exported."
        fail(Path(str(table.path)), "a table over a published one, init=er.FromSafetensors(...)", got, remedy)
    if init.table.weight.dtype not in published.FLOATS:
        remedy = "Export the trained rows by themselves: embedrock export TABLE delta.safetensors --dtype bfloat16."
        expected = f"weights of {', '.join(published.FLOATS)}, to write rows among them"
        fail(Path(init.folder), expected, f"{init.table}", remedy)
    return init


def _copies(folder: Path, target: Path, others: set[str]) -> Copies:
    """Return the files of a published folder but `others`, or of one file, to be copied. Make their folders."""
    target.mkdir(exist_ok=True)
    if folder.is_file():
        return {folder: target / folder.name}
    found = list[tuple[str, str]]()

    def ignore(within: str, names: list[str]) -> list[str]:
        return [name for name in names if name[0] == "." or os.path.realpath(os.path.join(within, name)) in others]

    shutil.copytree(folder, target, ignore=ignore, copy_function=lambda *pair: found.append(pair), dirs_exist_ok=True)
    return {Path(source): Path(copy) for source, copy in found}


def _copy(copies: Copies) -> None:
    """Copy files that were not yet. A copy gets its name when it is durable."""
    with progress("copy", len(copies), 0, " files") as advance:
        for source, target in copies.items():
            if not target.exists():
                shutil.copyfile(source, part_of(target))
                with closing(PartFile(part_of(target))) as copy:
                    copy.sync()
                publish(part_of(target), target)
            advance(1)


def _overwrite(table: er.Table, base: FromSafetensors, copies: Copies, rows: int) -> None:
    """Write the rows that have records into the copies, which may have some of them from an earlier run."""
    weight, dtype = base.table.weight, base.dtype
    output = Output(Path(base.folder), rows, table.dim, True, dtype=dtype)
    with ExitStack() as files, progress("merge", rows, 0) as advance:
        regions = [Region(copies[Path(one.path)], b"", one.start, FLOATS[dtype], one.shape) for one in weight.shards]
        files.callback(lambda: [region.close() for region in regions])
        for ids, values in table.export_batches(rows_at_once(table.dim)):
            order = np.argsort(ids)
            ids, words = ids[order], encoded(ids[order], values[order], output)
            shards = np.searchsorted(weight.firsts, ids, "right") - 1
            ends = np.flatnonzero((np.diff(ids) != 1) | (np.diff(shards) != 0)) + 1
            for start, end in zip([0, *ends], [*ends, len(ids)], strict=True):
                shard = shards[start]
                regions[shard].write(int(ids[start] - weight.firsts[shard]), words[start:end])
            advance(len(ids))
        for region in regions:
            region.sync()


def _full_disk(path: Path, copies: Copies) -> OSError:
    """Return the error of a full disk. The copies stay: the next run continues with them."""
    lacking = sum(source.stat().st_size for source, target in copies.items() if not target.exists())
    what = f"{format_count(len(copies), 'file')} of a published table could not be copied"
    remedy = "Free some space and run the same command again: it continues. No folder has this name until it is whole."
    return full_disk(str(path), what, lacking, remedy)
