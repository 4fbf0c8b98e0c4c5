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
from embedrock.spec.codecs import CODECS
from embedrock.store import manifest as manifests
from embedrock.store import segments as runs
from format_reader import read_group, read_history, read_manifest, read_table, weights_in
from golden.make import (
    COME_AND_GO,
    FORGOTTEN,
    FORGOTTEN_IN_GROUP,
    FROZEN,
    GOLDEN,
    HERE,
    IN_PIECES,
    VERSIONS,
    digests,
    in_memory,
)

NEWEST = {"adam": 4, "sgd": 3, "open": 4}
COMMITS = [(name, newest - back) for name, newest in NEWEST.items() for back in (0, 1)]
every_version = pytest.mark.parametrize("version", VERSIONS)


def after(name: str, commit: int) -> er.Table:
    """Return a golden table as of a commit, in RAM."""
    changes = len(GOLDEN[name].after)
    return in_memory(GOLDEN[name], changes - (NEWEST[name] - commit))


def records_of(table: er.Table) -> dict[int, bytes]:
    state = table.state()
    return dict(zip(state["ids"].tolist(), map(bytes, state["records"]), strict=True))


@every_version
@pytest.mark.parametrize(("name", "commit"), COMMITS)
def test_a_table_is_the_same_bytes_as_in_ram(name: str, commit: int, version: int):
    table = after(name, commit)
    manifest, records = read_table(VERSIONS[version] / name, commit)
    assert records == records_of(table)
    assert (manifest["steps"], manifest["record_bytes"]) == (table.steps, table.spec.record_bytes)
    expected = {key[8:]: array for key, array in table.state().items() if key.startswith("history_")}
    history = read_history(VERSIONS[version] / name, manifest)
    assert history.keys() == expected.keys()
    for key, array in history.items():
        np.testing.assert_array_equal(array, expected[key])


@every_version
@pytest.mark.parametrize(("name", "commit"), COMMITS)
def test_golden_tables_open(name: str, commit: int, version: int):
    expected = after(name, commit)
    with er.open(VERSIONS[version] / name, mode="r", at=commit) as table:
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


@every_version
@pytest.mark.parametrize("name", GOLDEN)
def test_training_goes_on_from_a_golden_table(name: str, version: int, tmp_path: Path):
    shutil.copytree(VERSIONS[version] / name, tmp_path / name)
    expected = after(name, NEWEST[name])
    with er.open(tmp_path / name) as table:
        for changed in (table, expected):
            GOLDEN[name].before[0](changed)
            GOLDEN[name].after[-1](changed)
        assert table.commit() == NEWEST[name] + 1
    _, records = read_table(tmp_path / name)
    assert records == records_of(expected)


@every_version
def test_golden_tables_stay_as_they_are(version: int):
    folder = VERSIONS[version]
    assert digests(folder) == json.loads((folder / "digests.json").read_text())
    assert {path.suffix for path in folder.rglob("*.*") if path.is_file()} >= {".rows", ".dlt", ".his", ".json"}
    manifests = [read_manifest(folder / name) for name in GOLDEN]
    assert {entry["index"] for manifest in manifests for entry in manifest["base"]} == {"full", "bits", "ids"}
    assert {manifest["format"] for manifest in manifests} == {version}


def test_each_version_has_golden_tables():
    assert list(VERSIONS) == list(range(1, runs.FORMAT + 1))
    assert (runs.FORMAT, runs.GOING, manifests.GROUP_FORMAT, manifests.FOLDED_FORMAT) == (2, 3, 4, 5)


@pytest.mark.parametrize("commit", [4, 5])
def test_a_table_some_of_whose_chunks_have_logs_in_them(commit: int, tmp_path: Path):
    shutil.copytree(HERE / "version-5" / "pieces", tmp_path / "pieces")
    expected = in_memory(IN_PIECES, commit - 2)
    manifest, records = read_table(tmp_path / "pieces", commit)
    assert manifest["format"] == (5 if commit == 5 else 2)
    assert [entry["folded"] for entry in manifest["base"] if "folded" in entry] == ([1, 1] if commit == 5 else [])
    assert records == records_of(expected)
    with er.open(tmp_path / "pieces", mode="r", at=commit) as table:
        for got, wanted in zip(sorted_rows(table), sorted_rows(expected), strict=True):
            np.testing.assert_array_equal(got, wanted)
    with er.open(tmp_path / "pieces") as table:
        table.rollback(commit)
        IN_PIECES.after[0](table)
        IN_PIECES.after[0](expected)
        table.commit()
    assert read_table(tmp_path / "pieces")[1] == records_of(expected)


def test_a_table_with_rows_that_were_forgotten(tmp_path: Path):
    shutil.copytree(HERE / "version-7" / "forgotten", tmp_path / "t")
    manifest = read_manifest(tmp_path / "t")
    assert (manifest["format"], manifest["origin"], len(manifest["forgotten"])) == (7, 1, 2)
    for commit, ids in FORGOTTEN.items():
        assert sorted(read_table(tmp_path / "t", commit)[1]) == ids
        with er.open(tmp_path / "t", mode="r", at=commit) as table:
            assert sorted(table.export()[0].tolist()) == ids
    with er.open(tmp_path / "t") as table:
        assert sorted(table.export()[0].tolist()) == FORGOTTEN[6]
        table.commit()
    assert read_manifest(tmp_path / "t")["origin"] is None
    assert sorted(read_table(tmp_path / "t")[1]) == FORGOTTEN[6]


def test_a_group_with_rows_that_were_forgotten(tmp_path: Path):
    shutil.copytree(HERE / "group-7", tmp_path / "g")
    for commit, members in FORGOTTEN_IN_GROUP.items():
        told = read_group(tmp_path / "g", commit)
        assert {name: sorted(rows) for name, (_, rows) in told.items()} == members
        with er.open(tmp_path / "g", mode="r", at=commit, kind=er.Group) as group:
            assert {name: group[name].export()[0].tolist() for name in group} == members
    with er.open(tmp_path / "g", keep=9, kind=er.Group) as group:
        group.rollback(1)
        assert {name: group[name].export()[0].tolist() for name in group} == FORGOTTEN_IN_GROUP[1]
        group["users"].forget([3])  # who was "people" in between
        group.commit()
        with er.open(tmp_path / "g", mode="r", at=4, kind=er.Group) as reader:
            assert reader["people"].export()[0].tolist() == [9]


@pytest.mark.parametrize("back", [0, 1, 2])
def test_a_table_with_frozen_rows(back: int, tmp_path: Path):
    folder, changes = tmp_path / "frozen", len(FROZEN.after) - back
    shutil.copytree(HERE / "version-9" / "frozen", folder)
    expected, commit = in_memory(FROZEN, changes), int(read_manifest(folder)["commit"]) - back
    manifest, records = read_table(folder, commit)
    assert (manifest["format"], manifest["spec"]["frozen"]) == (9, {"ranges": [[5, 6], [7, 2**63 - 1]]})
    assert records == records_of(expected)
    with er.open(folder) as table:
        table.rollback(commit)
        for each in (table, expected):
            FROZEN.before[0](each)
        table.commit()
    assert read_table(folder)[1] == records_of(expected)


@pytest.mark.parametrize("version", [3, 6])
@pytest.mark.parametrize("back", [0, 1, 2, 3])
def test_a_table_whose_rows_come_and_go(back: int, version: int, tmp_path: Path):
    folder, changes = tmp_path / "come-and-go", len(COME_AND_GO.after) - back
    shutil.copytree(HERE / f"version-{version}" / "come-and-go", folder)
    expected, commit = in_memory(COME_AND_GO, changes), int(read_manifest(folder)["commit"]) - back
    manifest, records = read_table(folder, commit)
    has_changes = version == 6 and back in (1, 3)
    assert (manifest["format"], len(manifest["history"])) == ((6, 2) if has_changes else (3, 1))
    assert any(entry.get("gone") for entry in manifest["delta"]) == (changes > 1)  # records of the base, too
    assert records == records_of(expected)
    history = read_history(folder, manifest)
    # The release that made the table skipped rows after an eviction, so its hand is elsewhere.
    expected.load_state(expected.state() | {"history_residents_uses_hand": history["residents_uses_hand"]})
    state = expected.state()
    assert {name[8:]: array.tolist() for name, array in state.items() if name.startswith("history_")} == {
        name: array.tolist() for name, array in history.items()
    }
    np.testing.assert_array_equal(history["residents_shared"][:2], expected.lookup([99])[0])  # as the page says
    with er.open(folder) as table:
        table.rollback(commit)
        for each in (table, expected):
            COME_AND_GO.after[1](each)
            each.update([99], np.ones((1, 2), np.float32))
        table.commit()
        np.testing.assert_array_equal(table.lookup([99, 98]), expected.lookup([99, 98]))
    assert read_table(folder)[1] == records_of(expected)


def marked(folder: Path) -> list[bool]:
    """Return which files of the newest commit's records are marked with their places."""
    manifest = read_manifest(folder)
    return [entry["salt"] is not None for entry in (*manifest["base"], *manifest["delta"])]


def test_a_table_of_version_1_goes_on_in_version_2(tmp_path: Path):
    folder, expected, change = tmp_path / "adam", after("adam", NEWEST["adam"]), GOLDEN["adam"].after[-1]
    shutil.copytree(VERSIONS[1] / "adam", folder)
    with er.open(folder) as table:
        for changed in (table, expected):
            change(changed)
        table.commit()
        manifest, records = read_table(folder)
        assert (manifest["format"], marked(folder)) == (2, [False, False, False, True])
        assert records == records_of(expected)
        assert table.verify().problems == []
        table.compact()
        assert marked(folder) == [True]
        table.rollback(NEWEST["adam"])
        assert marked(folder) == [False, False, False]
        assert table.verify().problems == []
    assert read_table(folder)[1] == records_of(after("adam", NEWEST["adam"]))


def test_the_reader_needs_no_line_of_ours():
    source = (HERE.parent / "support" / "format_reader.py").read_text()
    assert "embedrock" not in {name for node in ast.walk(ast.parse(source)) for name in imported(node)}


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [str(node.module).split(".")[0]]
    return [alias.name.split(".")[0] for alias in node.names] if isinstance(node, ast.Import) else []


@every_version
@pytest.mark.parametrize("pattern", ["manifest/*.json", "base/*/*.rows", "delta/*.dlt", "history/*.his"])
def test_the_reader_notices_damage(pattern: str, version: int, tmp_path: Path):
    shutil.copytree(VERSIONS[version] / "adam", tmp_path / "adam")
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


@pytest.mark.parametrize("dtype", CODECS)
@pytest.mark.parametrize("dim", [1, 31, 32, 33, 64])
def test_records_that_are_only_read(dtype: str, dim: int, tmp_path: Path):
    source, ids = er.Table(90, dim, seed=2), np.arange(0, 90, 4)
    source.assign(ids, np.random.default_rng(dim).standard_normal((len(ids), dim)).astype(np.float32))
    with er.Table(90, dim, dtype=dtype, seed=2, path=tmp_path / "t") as table:
        table.load_state(source)
        table.commit()
        expected = table.lookup(ids)
    manifest, records = read_table(tmp_path / "t")
    assert (manifest["format"], manifest["spec"]["dtype"], manifest["spec"]["rule"]) == (2, dtype, None)
    assert sorted(records) == ids.tolist()
    for row, weights in zip(ids.tolist(), expected, strict=True):
        np.testing.assert_array_equal(weights_in(records[row], dim, dtype), weights)
