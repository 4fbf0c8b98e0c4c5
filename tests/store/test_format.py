"""The file format is what docs/format.md says: golden tables, and a reader in plain NumPy that knows only that page."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from format_reader import read_history, read_manifest, read_table
from golden.make import GOLDEN, HERE, digests, in_memory

NEWEST = {"adam": 4, "sgd": 3, "open": 4}
COMMITS = [(name, newest - back) for name, newest in NEWEST.items() for back in (0, 1)]


def after(name: str, commit: int) -> er.Table:
    """Return a golden table as of a commit, in RAM."""
    changes = len(GOLDEN[name].after)
    return in_memory(GOLDEN[name], changes - (NEWEST[name] - commit))


def records_of(table: er.Table) -> dict[int, bytes]:
    state = table.state()
    return dict(zip(state["ids"].tolist(), map(bytes, state["records"]), strict=True))


@pytest.mark.parametrize(("name", "commit"), COMMITS)
def test_a_table_is_the_same_bytes_as_in_ram(name: str, commit: int):
    table = after(name, commit)
    manifest, records = read_table(HERE / name, commit)
    assert records == records_of(table)
    assert (manifest["steps"], manifest["record_bytes"]) == (table.steps, table.spec.record_bytes)
    expected = {key[8:]: array for key, array in table.state().items() if key.startswith("history_")}
    history = read_history(HERE / name, manifest)
    assert history.keys() == expected.keys()
    for key, array in history.items():
        np.testing.assert_array_equal(array, expected[key])


@pytest.mark.parametrize(("name", "commit"), COMMITS)
def test_golden_tables_open(name: str, commit: int):
    expected = after(name, commit)
    with er.open(HERE / name, mode="r", at=commit) as table:
        assert (table.last_commit, table.steps) == (commit, expected.steps)
        assert (table.rows, table.dim, table.rule) == (expected.rows, expected.dim, expected.rule)
        for got, wanted in zip(sorted_rows(table), sorted_rows(expected), strict=True):
            np.testing.assert_array_equal(got, wanted)
        asked = [0, 5, 11, 69]
        np.testing.assert_array_equal(table.lookup(asked), expected.lookup(asked))
        assert table.verify().problems == []


def sorted_rows(table: er.Table) -> tuple[np.ndarray, np.ndarray]:
    ids, rows = table.export()
    order = np.argsort(ids)
    return ids[order], rows[order]


@pytest.mark.parametrize("name", GOLDEN)
def test_training_goes_on_from_a_golden_table(name: str, tmp_path: Path):
    shutil.copytree(HERE / name, tmp_path / name)
    expected = after(name, NEWEST[name])
    with er.open(tmp_path / name) as table:
        for changed in (table, expected):
            GOLDEN[name].before[0](changed)
            GOLDEN[name].after[-1](changed)
        assert table.commit() == NEWEST[name] + 1
    _, records = read_table(tmp_path / name)
    assert records == records_of(expected)


def test_golden_tables_stay_as_they_are():
    assert digests(HERE) == json.loads((HERE / "digests.json").read_text())
    assert {path.suffix for path in HERE.rglob("*.*") if path.is_file()} >= {".rows", ".dlt", ".his", ".json"}
    kinds = {entry["index"] for name in GOLDEN for entry in read_manifest(HERE / name)["base"]}
    assert kinds == {"full", "bits", "ids"}


def test_the_reader_needs_no_line_of_ours():
    source = (HERE.parent / "support" / "format_reader.py").read_text()
    assert "embedrock" not in {name for node in ast.walk(ast.parse(source)) for name in imported(node)}


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [str(node.module).split(".")[0]]
    return [alias.name.split(".")[0] for alias in node.names] if isinstance(node, ast.Import) else []


@pytest.mark.parametrize("pattern", ["manifest/*.json", "base/*/*.rows", "delta/*.dlt", "history/*.his"])
def test_the_reader_notices_damage(pattern: str, tmp_path: Path):
    shutil.copytree(HERE / "adam", tmp_path / "adam")
    path = max((tmp_path / "adam").glob(pattern))
    data = path.read_bytes()
    for at in (0, 10, 300, len(data) // 2, len(data) - 70, len(data) - 20, len(data) - 5):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(AssertionError):
            everything(tmp_path / "adam")
    path.write_bytes(data)
    everything(tmp_path / "adam")


def everything(folder: Path) -> Any:
    manifest, records = read_table(folder)
    return records, read_history(folder, manifest)
