"""``embedrock vocabulary build | info | verify``: vocabularies on disk, made of columns of files."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import embedrock as er
from embedrock.cli.formats import fail
from embedrock.cli.formats._pyarrow import import_pyarrow
from embedrock.cli.tables import DAMAGED
from embedrock.errors import CorruptTableError, IdTypeError
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.arguments import count, place, size
from embedrock.terminal.progress import progress
from embedrock.terminal.tables import format_count, format_facts, format_number
from embedrock.wording import did_you_mean

BATCH_ROWS = 1 << 20
COMMIT_ROWS = 1 << 24  # between commits
MEMORY = "1GiB"
KINDS = {".parquet": "parquet", ".pq": "parquet", ".arrow": "feather", ".feather": "feather", ".ipc": "feather"}


def add_parsers(subparsers: Any) -> None:
    """Add the command to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    text = "make a vocabulary of a column of strings, or look at one"
    parser = subparsers.add_parser("vocabulary", help=text, description=text[0].upper() + text[1:] + ".")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_build(verbs)
    info = _add(verbs, "info", _info, "how many strings it has, and what they take")
    verify = _add(verbs, "verify", _verify, "read all of its files; exit status 3 where one is damaged")
    for one in (info, verify):
        one.add_argument("path", type=place, metavar="FOLDER", help="of the vocabulary")


def _add(verbs: Any, name: str, run: Any, text: str) -> ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _add_build(verbs: Any) -> None:
    text = "add the strings of a column, in order; the same command goes on with what was cut off"
    parser = _add(verbs, "build", _build, text)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Parquet or Arrow (Feather)")
    parser.add_argument("--column", required=True, metavar="NAME", help="of strings, or of bytes")
    parser.add_argument("--path", required=True, type=place, metavar="FOLDER", help="made where there is none")
    parser.add_argument("--skip-nulls", action="store_true", help="leave out what is missing (default: an error)")
    parser.add_argument("--memory", type=size, default=MEMORY, metavar="SIZE", help=f"RAM (default: {MEMORY})")
    parser.add_argument("--commit-every", type=count, default=COMMIT_ROWS, metavar="N", help="rows (default: 16.8M)")


# ---------------------------------------------------------------- making


def _build(arguments: Namespace) -> int:
    began, sources = time.perf_counter(), [_Column(path, arguments.column) for path in arguments.files]
    rows = sum(source.rows for source in sources)
    with er.Vocabulary(arguments.path, memory=arguments.memory) as vocabulary:
        before = len(vocabulary)
        try:
            with progress("strings", rows, 0) as advance:
                _add_all(vocabulary, sources, arguments, advance)
        finally:
            vocabulary.commit()  # also after Ctrl-C: what is there is not read again in vain
        vocabulary.compact()
        told = {
            "path": vocabulary.path,
            "rows": rows,
            "strings": len(vocabulary),
            "new": len(vocabulary) - before,
            "disk_bytes": int(vocabulary.stats()["disk_bytes"]),
            "seconds": time.perf_counter() - began,
        }
    text = (
        f"{told['path']}: {format_count(told['strings'], 'string')}, {told['new']:,} of them new, from "
        f"{format_count(rows, 'row')} in {format_number(told['seconds'])} s"
    )
    return _tell(arguments, told, text)


def _add_all(vocabulary: er.Vocabulary, sources: Sequence[_Column], arguments: Namespace, advance: Any) -> None:
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


class _Column:
    """A column of strings of a file.

    Attributes:
        rows: in the file.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self._name = path, name
        if path.suffix.lower() not in KINDS:
            fail(path, f"a file called {', '.join('*' + end for end in KINDS)}", repr(path.suffix), "Rename it.")
        self._arrow = import_pyarrow("Parquet and Arrow", "dataset")
        if not path.exists():
            raise FileNotFoundError(2, "there is no such file", str(path))
        try:
            self._data = self._arrow.dataset.dataset(str(path), format=KINDS[path.suffix.lower()])
            self._check_column(self._data.schema)
            self.rows = self._data.count_rows()
        except self._arrow.ArrowException as error:
            fail(path, "a Parquet or Arrow file", str(error).splitlines()[0], "Check that it is the right file.")

    def _check_column(self, schema: Any) -> None:
        types, kinds = self._arrow.types, {field.name: field.type for field in schema}
        kind = kinds.get(self._name)
        if kind is not None and types.is_dictionary(kind):
            kind = kind.value_type
        tests = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "fixed_size_binary")
        if kind is None or not any(
            getattr(types, f"is_{test}")(kind) for test in tests if hasattr(types, f"is_{test}")
        ):
            listed = ", ".join(f"{name} ({kinds[name]})" for name in kinds)
            hint = did_you_mean(self._name, (name for name in kinds if name != self._name))
            fail(self.path, f"a column {self._name!r} of strings", listed, f"Name it: --column NAME.{hint}")

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Go through the column in order: the number of a row, and the strings from there on."""
        start = 0
        scanned = self._data.to_batches(
            columns=[self._name], batch_size=BATCH_ROWS, batch_readahead=2, fragment_readahead=1
        )
        for batch in scanned:
            if batch.num_rows:
                yield start, batch.column(0)
            start += batch.num_rows

    def checked(self, column: Any, start: int) -> Any:
        """Return strings, if none is missing."""
        if column.null_count:
            row = start + column.is_null().to_numpy(zero_copy_only=False).argmax()
            fail(self.path, f"a string in column {self._name!r}", "null", "Fix it, or pass --skip-nulls.", f"row {row}")
        return column


# ---------------------------------------------------------------- looking


def _info(arguments: Namespace) -> int:
    with er.Vocabulary(arguments.path, mode="r") as vocabulary:
        stats = vocabulary.stats()
        told = {"path": vocabulary.path, **{name: int(stats[name]) for name in ("strings", "files", "disk_bytes")}}
        told["first"] = [
            vocabulary.strings(k, bytes).item().decode(errors="replace") for k in range(min(3, len(vocabulary)))
        ]
    facts = {
        "strings": f"{told['strings']:,}",
        "files": f"{told['files']}",
        "on disk": format_bytes(told["disk_bytes"]),
        "the first": ", ".join(repr(text[:40]) for text in told["first"]) or "none",
    }
    return _tell(arguments, told, format_facts(facts))


def _verify(arguments: Namespace) -> int:
    with er.Vocabulary(arguments.path, mode="r") as vocabulary:
        problem = ""
        try:
            vocabulary.verify()
        except CorruptTableError as error:
            problem = str(error)
        told = {"path": vocabulary.path, "strings": len(vocabulary), "problem": problem or None}
        text = problem or f"{vocabulary.path}: {format_count(len(vocabulary), 'string')}, all of them whole"
    return _tell(arguments, told, text) or (DAMAGED if problem else 0)


def _tell(arguments: Namespace, told: dict[str, Any], text: str) -> int:
    print(json.dumps(told) if arguments.json else text)
    return 0
