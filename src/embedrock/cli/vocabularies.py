"""``embedrock vocabulary build | info | verify``: vocabularies on disk, built from columns of files."""

from __future__ import annotations

import os
import shutil
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er
from embedrock.cli.columns import STRINGS, TextColumn
from embedrock.cli.formats.base import FileError, fail
from embedrock.cli.imports import close_uncommitted
from embedrock.cli.tables import DAMAGED
from embedrock.cli.terminal.arguments import add_command, count, place, print_result, size
from embedrock.cli.terminal.tables import format_count, format_facts, format_number, progress
from embedrock.errors import CorruptTableError, IdTypeError
from embedrock.system.sizes import format_bytes

COMMIT_ROWS = 1 << 24  # between commits
MEMORY = "1GiB"


def add_parsers(subparsers: Any) -> None:
    """Add the command."""
    text = "make a vocabulary of a column of strings, or look at one"
    parser = subparsers.add_parser("vocabulary", help=text, description=text[0].upper() + text[1:] + ".")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_build(verbs)
    info = add_command(verbs, "info", _info, "how many strings it has, and what they take")
    verify = add_command(verbs, "verify", _verify, "read all of its files; exit status 3 where one is damaged")
    for one in (info, verify):
        one.add_argument("path", type=place, metavar="FOLDER", help="of the vocabulary")


def _add_build(verbs: Any) -> None:
    text = "add the strings of a column, in order; the same command goes on with what was cut off"
    parser = add_command(verbs, "build", _build, text)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Parquet, Arrow, CSV, TSV, or .txt")
    text = "of strings, or of bytes; 0 of a .txt, which has one in each line"
    parser.add_argument("--column", required=True, metavar="NAME", help=text)
    parser.add_argument("--path", required=True, type=place, metavar="FOLDER", help="made where there is none")
    parser.add_argument("--skip-nulls", action="store_true", help="leave out what is missing (default: an error)")
    parser.add_argument("--memory", type=size, default=MEMORY, metavar="SIZE", help=f"RAM (default: {MEMORY})")
    parser.add_argument("--commit-every", type=count, default=COMMIT_ROWS, metavar="N", help="rows (default: 16.8M)")


# ---------------------------------------------------------------- building


def _build(arguments: Namespace) -> int:
    began, sources = time.perf_counter(), [TextColumn(path, arguments.column, STRINGS) for path in arguments.files]
    rows, is_new = sum(source.rows for source in sources), not os.path.exists(arguments.path)
    with er.Vocabulary(arguments.path, memory=arguments.memory) as vocabulary:
        before = len(vocabulary)
        try:
            with progress("strings", rows, 0) as advance:
                _add_all(vocabulary, sources, arguments, advance)
        except FileError:
            with er.Vocabulary(arguments.path, mode="r") as committed:
                is_useless = is_new and not len(committed)  # it would block other ids
            if is_useless:
                close_uncommitted(vocabulary)
                shutil.rmtree(arguments.path)
            raise
        finally:
            if vocabulary.is_open_here:
                vocabulary.commit()  # also after Ctrl-C: strings in it need not be read again
        vocabulary.compact()
        info = {
            "path": vocabulary.path,
            "rows": rows,
            "strings": len(vocabulary),
            "new": len(vocabulary) - before,
            "disk_bytes": int(vocabulary.stats()["disk_bytes"]),
            "seconds": time.perf_counter() - began,
        }
    text = (
        f"{info['path']}: {format_count(info['strings'], 'string')}, {info['new']:,} of them new, from "
        f"{format_count(rows, 'row')} in {format_number(info['seconds'])} s"
    )
    return print_result(arguments, info, text)


def _add_all(vocabulary: er.Vocabulary, sources: Sequence[TextColumn], arguments: Namespace, advance: Any) -> None:
    waiting = 0
    for source in sources:
        for start, column in source.batches():
            kept = column.drop_null() if arguments.skip_nulls else source.checked(column, start)
            try:
                vocabulary.add(kept)
            except IdTypeError as error:
                fail(source.path, "strings", str(error), "Fix the file.")
            waiting += len(column)
            if waiting >= arguments.commit_every:
                vocabulary.commit()
                waiting = 0
            advance(len(column), f"{len(vocabulary):,} strings")


# ---------------------------------------------------------------- read-only commands


def _info(arguments: Namespace) -> int:
    with er.Vocabulary(arguments.path, mode="r") as vocabulary:
        stats, first = vocabulary.stats(), vocabulary.strings(np.arange(min(3, len(vocabulary))), bytes).tolist()
        info = {"path": vocabulary.path, **{name: int(stats[name]) for name in ("strings", "files", "disk_bytes")}}
        info["first"] = [one.decode(errors="replace") for one in first]
    facts = {
        "strings": f"{info['strings']:,}",
        "files": f"{info['files']}",
        "on disk": format_bytes(info["disk_bytes"]),
        "the first": ", ".join(repr(text[:40]) for text in info["first"]) or "none",
    }
    return print_result(arguments, info, format_facts(facts))


def _verify(arguments: Namespace) -> int:
    with er.Vocabulary(arguments.path, mode="r") as vocabulary:
        problem = ""
        try:
            vocabulary.verify()
        except CorruptTableError as error:
            problem = str(error)
        info = {"path": vocabulary.path, "strings": len(vocabulary), "problem": problem or None}
        text = problem or f"{vocabulary.path}: {format_count(len(vocabulary), 'string')}, all of them whole"
    return print_result(arguments, info, text) or (DAMAGED if problem else 0)
