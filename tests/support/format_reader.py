"""A reader of tables on disk, written from docs/format.md alone: no line of Embedrock takes part.

python tests/format_reader.py users.rock
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def read_manifest(folder: Path, commit: int | None = None) -> dict[str, Any]:
    """Return a commit, the newest one by default."""
    newest = max((folder / "manifest").glob("[0-9]*.json")).name
    name = newest if commit is None else f"{commit:010d}.json"
    line, *rest = (folder / "manifest" / name).read_bytes().split(b"\n")
    assert rest == [hashlib.sha256(line).hexdigest().encode(), b""], f"{name} is damaged"
    manifest = json.loads(line)
    assert manifest["format"] in (1, 2, 3, 4, 5, 6, 7, 9), f"{name} is of format {manifest['format']}"
    return manifest


def read_run(
    folder: Path, entry: dict[str, Any], manifest: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ids int64 (count,) and records uint8 (count, record_bytes) of a base chunk or log, and ids gone."""
    data, width = (folder / entry["file"]).read_bytes(), manifest["record_bytes"]
    assert len(data) == entry["size"], f"{entry['file']} has {len(data)} bytes"
    salt = check_header(data, width, entry["file"], manifest)
    assert salt == entry.get("salt"), f"{entry['file']} is another file of that name"
    end = 4096 + entry["count"] * (width + 4)
    stored = np.frombuffer(data[4096:end], np.uint8).reshape(entry["count"], width + 4)
    index, (lo, hi) = data[end:], (entry["lo"], entry["hi"])
    assert zlib.crc32(index) == entry["index_crc"], f"the index of {entry['file']} is damaged"
    index, gone = index[: len(index) - 8 * entry.get("gone", 0)], index[len(index) - 8 * entry.get("gone", 0) :]
    ids = np.frombuffer(index, "<i8")
    if entry["index"] == "full":
        ids = np.array(range(lo, hi), np.int64)
    elif entry["index"] == "bits":
        ids = lo + np.flatnonzero(np.unpackbits(np.frombuffer(index, np.uint8), bitorder="little"))
    assert len(ids) == entry["count"] == np.count_nonzero((lo <= ids) & (ids <= hi - 1))
    for place, (row, record) in enumerate(zip(ids.tolist(), stored, strict=True)):
        mark = 0 if salt is None else (salt + place * 0x9E3779B1) % 2**32
        seal = zlib.crc32(struct.pack("<q", row) + record[:-4].tobytes()) ^ mark
        assert struct.pack("<I", seal) == record[-4:].tobytes(), f"row {row} in {entry['file']} is damaged"
    return ids, stored[:, :-4], np.frombuffer(gone, "<i8")


def weights_in(record: bytes, dim: int, dtype: str) -> np.ndarray:
    """Return the weights in a record of int8 or int4: float32 (dim,)."""
    if dtype == "int8":
        (scale,) = np.frombuffer(record, "<f4", 1, -(-dim // 4) * 4)
        return np.frombuffer(record, "i1", dim) * scale
    packed = np.frombuffer(record, "u1", -(-dim // 2))
    codes, groups = np.stack([packed % 16, packed // 16], 1).reshape(-1)[:dim], -(-dim // 32)
    words = np.frombuffer(record, "<u2", 2 * groups, -(-len(packed) // 2) * 2).astype("<u4") << 16
    scales, offsets = np.repeat(words.view("<f4").reshape(2, groups), 32, axis=1)[:, :dim]
    return codes.astype("<f4") * scales + offsets


def check_header(data: bytes, width: int, name: str, manifest: dict[str, Any]) -> int | None:
    """Check the first page of a file, and return its salt; files of version 1 have none."""
    (version,), nonce = struct.unpack("<I", data[8:12]), data[40:48]
    assert version in (1, 2), f"{name} is of version {version}"
    numbers = struct.pack("<4I", version, width, width + 4, zlib.crc32(name.encode()))
    page = b"EMBROCK1" + numbers + bytes.fromhex(manifest["uuid"]) + (nonce if version == 2 else b"")
    page = page.ljust(4092, b"\0")
    assert data[:4096] == page + struct.pack("<I", zlib.crc32(page)), "the header is not that of this table"
    return zlib.crc32(page) if version == 2 else None


def read_table(folder: Path, commit: int | None = None) -> tuple[dict[str, Any], dict[int, bytes]]:
    """Return a commit, and the record of each row that has one, and was not forgotten since."""
    manifest = read_manifest(folder, commit)
    records = read_records(folder, manifest)
    assert len(records) == manifest["count"]
    return manifest, without_forgotten(records, read_forgotten(folder, manifest).get("", []))


def without_forgotten(records: dict[int, bytes], ids: Iterable[int]) -> dict[int, bytes]:
    """Return the records of other ids."""
    return {row: record for row, record in records.items() if row not in set(ids)}


def read_forgotten(folder: Path, manifest: dict[str, Any]) -> dict[str, set[int]]:
    """Return the ids that were forgotten after the content of a commit was made, by the table's name in it."""
    newest, origin = read_manifest(folder), manifest.get("origin")
    origin = manifest["commit"] if origin is None else origin
    arrays = [read_arrays(folder, part, newest) for part in newest.get("forgotten", [])]
    told = [(*json.loads(key), part, array) for part in arrays for key, array in part.items()]
    renamed = [(old, new, *at.tolist()) for kind, old, new, *_, at in (one for one in told if one[0] == "renamed")]
    found: dict[str, set[int]] = {}
    for _, name, part, ids in (one for one in told if one[0] == "ids"):
        commits = part[json.dumps(["commits", name])]
        for row, commit in zip(ids.tolist(), commits.tolist(), strict=True):
            if commit > origin:
                for was in names_before(name, origin, commit, renamed):
                    found.setdefault(was, set()).add(row)
    return found


def names_before(name: str, origin: int, commit: int, renamed: list[tuple[Any, ...]]) -> set[str]:
    """Return the names that a table may have had in a commit, which was called so before a later one."""
    names, end, is_sure = {name}, commit, True
    for old, new, at, *back in reversed(renamed):
        if not origin < at < commit or at > end:
            continue
        if back and back[0] >= origin:
            end = back[0]  # a rollback took away what came between
        else:
            is_sure = is_sure and not back
            names = names if new not in names else {old} if is_sure else names | {old}
    return names


def read_records(folder: Path, manifest: dict[str, Any]) -> dict[int, bytes]:
    """Return the record of each id, or key, that has one in a base and its logs."""
    records: dict[int, bytes] = {}
    for entry in manifest["base"]:
        ids, stored, _ = read_run(folder, entry, manifest)
        records |= zip(ids.tolist(), map(bytes, stored), strict=True)
    for number, entry in enumerate(manifest["delta"]):
        ids, stored, gone = read_run(folder, entry, manifest)
        chunks = [chunk for chunk in manifest["base"] if number < chunk.get("folded", 0)]
        told = [*zip(ids.tolist(), stored, strict=True), *((row, None) for row in gone.tolist())]
        for row, record in told:
            if any(chunk["lo"] <= row < chunk["hi"] for chunk in chunks):
                continue
            if record is None:
                records.pop(row, None)
            else:
                records[row] = bytes(record)
    return records


def read_group(folder: Path, commit: int | None = None) -> dict[str, tuple[dict[str, Any], dict[int, bytes]]]:
    """Return what a commit says of each table of a group, by name, and the record of each row that has one."""
    manifest, tables = read_manifest(folder, commit), {}
    pools = [{**pool, "uuid": manifest["uuid"]} for pool in manifest["pools"]]
    records, forgotten = [read_records(folder, pool) for pool in pools], read_forgotten(folder, manifest)
    for member in manifest["members"]:
        first = None if member["part"] is None else member["part"] << 44
        own = {
            key - (first or 0): record
            for key, record in records[member["pool"]].items()
            if first is None or first <= key < first + (1 << 44)
        }
        assert len(own) == member["count"]
        own = without_forgotten(own, forgotten.get(member["name"], []))
        record_bytes = pools[member["pool"]]["record_bytes"]
        tables[member["name"]] = {**member, "uuid": manifest["uuid"], "record_bytes": record_bytes}, own
    return tables


def read_history(folder: Path, manifest: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays that the rule remembers, or who has a record; none for most rules."""
    arrays: dict[str, np.ndarray] = {}
    for part in manifest["history"]:
        arrays = after_changes(arrays, read_arrays(folder, part, manifest))
    return arrays


def after_changes(before: dict[str, np.ndarray], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays of a history with what a later file of it says."""
    for part in ("residents_now_", "residents_before_", "residents_uses_"):
        own = {name.removeprefix(part): array for name, array in arrays.items() if name.startswith(part)}
        had = {name.removeprefix(part): array for name, array in before.items() if name.startswith(part)}
        if not own:
            continue
        if "changed_counts" in own:
            counts = dict(zip(had["ids"].tolist(), had["counts"].tolist(), strict=True))
            counts |= zip(own["changed_ids"].tolist(), own["changed_counts"].tolist(), strict=True)
            found = sorted((row, count) for row, count in counts.items() if count)
            own = {"ids": np.array([row for row, _ in found]), "counts": np.array([count for _, count in found])}
        elif "changed_at" in own:
            (count,) = own.pop("count").tolist()
            at = own.pop("changed_at")
            for name in ("ids", "last", "marks"):
                places = np.resize(had[name], count)
                places[at] = own.pop(f"changed_{name}")
                own[name] = places
        elif "changed_lines" in own:
            lines = had["sketch"].reshape(-1, 8).copy()
            lines[own["changed_lines"]] = own["changed_sketch"].reshape(-1, 8)
            own = {"sketch": lines.reshape(-1)}
        before = {name: array for name, array in before.items() if not name.startswith(part)}
        arrays = {name: array for name, array in arrays.items() if not name.startswith(part)}
        before |= {part + name: array for name, array in own.items()}
    return before | arrays


def read_arrays(folder: Path, part: dict[str, Any], manifest: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of one file of a history."""
    arrays: dict[str, np.ndarray] = {}
    data = (folder / part["file"]).read_bytes()
    assert (len(data), zlib.crc32(data)) == (part["size"], part["crc"]), f"{part['file']} is damaged"
    check_header(data, 0, part["file"], manifest)
    (size,) = struct.unpack("<I", data[4096:4100])
    at = 4100 + size
    for name, dtype, shape in json.loads(data[4100:at]):
        arrays[name] = np.frombuffer(data, dtype, int(np.prod(shape)), at).reshape(shape)
        at += arrays[name].nbytes
    assert at == len(data)
    return arrays


if __name__ == "__main__":
    described, rows = read_table(Path(sys.argv[1]))
    print(f"commit {described['commit']}: {len(rows)} rows of {described['record_bytes']} bytes, {described['spec']}")
