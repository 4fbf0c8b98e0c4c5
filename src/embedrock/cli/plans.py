"""``embedrock plan``: a tier and a memory= for each table, with the resulting reads per step."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tomllib
import traceback
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er
from embedrock.cli import curves
from embedrock.cli.columns import IDS, TextColumn
from embedrock.cli.formats.files import text_of
from embedrock.cli.imports import OPEN
from embedrock.cli.terminal.arguments import add_command, count, folder, number, print_result, size
from embedrock.cli.terminal.tables import Field, format_facts, format_lines, format_number, format_whole
from embedrock.errors import ArgumentError, counted
from embedrock.io.vfs import OS_SYSTEM
from embedrock.optimizers import Rule
from embedrock.planner.demand import RULE_NAMES, ZIPF
from embedrock.planner.proposal import NoPlanError, Proposal
from embedrock.spec.spec import Spec
from embedrock.store.reading import tables_in
from embedrock.system.sizes import format_bytes

WANTED = IDS._replace(naming='call it as the table, or say column = "NAME" of the table')
NOTHING_FITS = 3  # exit status
BATCH_SIZE, RULE = 4096, "adam"
MORE = ("batch_size", "memory", "device_memory", "disk", "folder", "zipf", "workers", "steps", "alone")  # of a file
FIELDS = (
    Field(
        "table",
        lambda one: f"{one['name']}: {counted(len(one['members']), 'table')}" if one["members"] else one["name"],
    ),
    Field("tier", "tier"),
    Field("memory=", "memory", format_bytes),
    Field("RAM", "ram_bytes", format_bytes),
    Field("files", lambda one: one["disk_bytes"] or None, format_bytes),
    Field("rows a step", "rows_used", format_whole),
    Field("missed", "misses", format_whole),
    Field("read", "reads", format_whole),
)
NEAR_FIELDS = (
    Field("on the GPU", lambda one: one["near"] and OF_MODE[one["near"]["placement"]["mode"]]),
    Field("rows there", lambda one: one["near"] and one["near"]["placement"]["near_rows"], format_whole),
    Field("GPU memory", lambda one: one["near"] and one["near"]["placement"]["bytes"], format_bytes),
    Field("bus", lambda one: one["near"] and one["near"]["bus_bytes"], format_bytes),
)
OF_MODE = {"device": "all", "cached": "a cache", "host": "none"}


def add_parser(subparsers: Any) -> None:
    """Add the command to `subparsers`. Parsed arguments have ``run(arguments) -> exit status``."""
    text = "a tier and a memory= for each table, and the rows that a step reads then"
    more = f"{text[0].upper()}{text[1:]}. Exit status {NOTHING_FITS} where nothing keeps the limits."
    parser = add_command(subparsers, "plan", _run, text, more, json_text="")
    source = "a TOML file, a folder that has tables, or package.module:make_model"
    parser.add_argument("--tables", required=True, metavar="WHAT", help=source)
    log = "Parquet, Arrow, CSV or TSV with a column of ids for each table, called as it"
    parser.add_argument("--log", type=Path, nargs="+", metavar="FILE", help=log)
    zipf = f"exponent of the popularity of ids where there is no log (default: {ZIPF})"
    parser.add_argument("--zipf", type=number, metavar="X", help=zipf)
    parser.add_argument("--batch-size", type=count, metavar="N", help=f"samples (default: {BATCH_SIZE})")
    parser.add_argument("--memory", type=size, metavar="SIZE", help="RAM of the process (default: all that it may use)")
    near = "of a GPU, for rows of tables in RAM (default: none is told)"
    parser.add_argument("--device-memory", type=size, metavar="SIZE", help=near)
    parser.add_argument("--disk", type=size, metavar="SIZE", help="for files (default: no limit)")
    where = "of tables on disk, whose disk is probed (default: that of --tables, or the current one)"
    parser.add_argument("--folder", type=folder, metavar="FOLDER", help=where)
    parser.add_argument("--workers", type=count, metavar="N", help="that share each table by id (default: 1)")
    steps = "that tables have been trained for (default: long, each row that is missed is read)"
    parser.add_argument("--steps", type=count, metavar="N", help=steps)
    alone = "each table on disk has its own files and memory= (default: those that are laid out alike are a group)"
    parser.add_argument("--alone", action="store_true", default=None, help=alone)
    rule = f"of tables of a model that have none yet: {', '.join(RULE_NAMES)} (default: {RULE})"
    parser.add_argument("--rule", choices=RULE_NAMES, default=RULE, metavar="NAME", help=rule)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: Namespace) -> int:
    tables, options = _tables(arguments.tables, RULE_NAMES[arguments.rule]())
    given = {name: getattr(arguments, name) for name in MORE if getattr(arguments, name) is not None}
    options = {"batch_size": BATCH_SIZE, **options, **given}
    logs = {} if arguments.log is None else _logs(arguments.log, tables)
    try:
        found = er.plan_tables(tables, log=logs, **options)
    except NoPlanError as error:
        print(json.dumps({"error": str(error), "needed": error.needed}) if arguments.json else f"nothing fits: {error}")
        return NOTHING_FITS
    return print_result(arguments, found.to_json(), _text(found))


def _text(found: Proposal) -> str:
    info = found.to_json()
    fields = FIELDS if all(one.near is None for one in found.tables) else (*FIELDS, *NEAR_FIELDS)
    facts = {
        "a step": _bound(found),
        "RAM": f"{format_bytes(found.peak_bytes)} at most, Python and a batch included",
        "prefetch": f"depth={found.depth}" if found.depth else "of no use: nothing is read",
    }
    if found.reads:
        facts["half the reads"] = found.faster or "not by RAM: fewer or smaller rows, or smaller batches"
    if found.smaller:
        facts["smaller rows"] = "; ".join(map(str, found.smaller)) + ". Results change: try them"
    if found.workers > 1:
        sent = format_bytes(found.sent_bytes)
        facts["workers"] = f"{found.workers}, of which this is one; it sends others {sent} a step"
    return f"{format_lines(fields, info['tables'])}\n\n{format_facts(facts)}\n\n{found.code}"


def _bound(found: Proposal) -> str:
    if not found.reads:
        return "reads nothing from disk"
    reads = f"{format_number(found.reads)} reads"
    if found.bound_s is None:
        return f"{reads}; the disk could not be probed: pass --folder with one that can be written to"
    return f"at least {format_number(found.bound_s * 1e3)} ms: {reads} at {found.reads_per_s:,.0f} reads a second"


# ---------------------------------------------------------------- the tables


def _tables(text: str, rule: Rule) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tables by name, and the other arguments of `er.plan_tables` in the file."""
    if text.endswith(".toml"):
        return _of_file(Path(text))
    if os.path.isdir(text):
        return _of_folder(text), {"folder": text}
    module, colon, name = text.partition(":")
    if colon and all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        made = _of_model(text, module, name)
        return {name: spec if spec.rule else spec.with_rule(rule) for name, spec in made.items()}, {}
    raise ArgumentError(
        f"--tables must be a .toml file, a folder that has tables, or package.module:make_model: got {text!r}."
    )


def _of_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        options = tomllib.loads(text_of(path, "TOML"))
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"{str(path)!r} is no TOML: {error}.") from None
    tables = options.pop("tables", None)
    if not isinstance(tables, dict) or not tables:
        raise ArgumentError(f"{str(path)!r} must have tables, each as [tables.NAME] with rows and dim: got none.")
    for name in options:
        if name not in MORE:
            raise ArgumentError(f"{str(path)!r} has {name!r}: besides tables it may have {', '.join(MORE)}.")
    return tables, options


def _of_folder(path: str) -> dict[str, Spec]:
    tables = {}
    for name in tables_in(OS_SYSTEM, path):
        with er.open(os.path.join(path, name), mode="r") as table:
            tables[name.removesuffix(".rock")] = table.spec
    if not tables:
        raise ArgumentError(f"the folder {path!r} has no tables. Name the folder in which their folders are.")
    return tables


def _of_model(text: str, module: str, name: str) -> dict[str, Spec]:
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        made: Any = importlib.import_module(module)
        for part in name.split("."):
            made = getattr(made, part)
        made = made() if callable(made) and not hasattr(made, "modules") else made
    except Exception as error:
        last = traceback.format_exception_only(error)[-1].strip()
        raise ArgumentError(
            f"--tables {text}: looked for {name!r} in the module {module!r}, called it without arguments, and got "
            f"{last.rstrip('.')}. Name a function that takes no argument and returns the model."
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    tables = dict(_layers(made))
    if not tables:
        raise ArgumentError(f"--tables {text}: the model, {type(made).__name__}, has no layers of Embedrock's.")
    return tables


def _layers(model: Any) -> Iterator[tuple[str, Spec]]:
    """Yield the tables of a model of PyTorch or Keras, each by its first layer."""
    named = model.named_modules() if hasattr(model, "named_modules") else ((one.name, one) for one in model.layers)
    seen = set()
    for name, layer in named:
        table = getattr(layer, "table", None)
        if isinstance(table, er.Table) and table not in seen:
            seen.add(table)
            yield name or type(layer).__name__, table.spec


def _logs(files: list[Path], tables: Mapping[str, Any]) -> dict[str, Iterator[np.ndarray]]:
    logs = {}
    for name, described in tables.items():
        own = described if isinstance(described, Mapping) else {}
        rows = described.rows if isinstance(described, Spec) else own.get("rows")
        columns = [TextColumn(path, own.get("column", name), WANTED) for path in files]
        curves.ids_in(columns)
        if rows is not None and rows != OPEN:
            remedy = f'Make ids of them by er.hash_ids, or say rows = "{OPEN}" for the table'
            curves.refuse_strings(columns, rows, name, remedy)
        options = Namespace(batch_size=1 << 16, skip_nulls=True, rows=OPEN if rows is None else rows)
        logs[name] = curves.batches(columns, options)
    return logs
