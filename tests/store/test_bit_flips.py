"""Damage of every kind to every file of a table: no wrong value is ever returned, and the message names the file."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import embedrock as er
from embedrock.store import folder as folders
from embedrock.store.manifest import Manifest, StoreEntry
from embedrock.store.table_folder import TableFolder
from on_system import on
from slow import examples, slow
from suites import FaultFS
from table_files import FOLDERS, newest_pool, pool_of

ROWS, DIM = 12, 4
IDS = np.arange(ROWS)
CORRUPT = (er.CorruptTableError, er.NewerFormatError)
REFUSED = (*CORRUPT, er.TableFileError, er.MemoryBudgetError)
# Of a header page, whose every bit is under one checksum, the fast tests try one bit in so many.
SAMPLED = 197


@dataclass(frozen=True)
class Image:
    """The files of a table, and what it holds.

    Attributes:
        files: by path.
        manifest: the last commit, and `pool` its entry of the records.
        weights: (ROWS, DIM), of all rows, those without a record too.
        name: of the newest file of each kind: "manifest", "base", "old delta", "delta", "history".
    """

    files: dict[str, bytes]
    manifest: Manifest
    pool: StoreEntry
    weights: np.ndarray
    name: dict[str, str]

    def system(self, **changes: bytes | None) -> FaultFS:
        """Return a file system with these files, some of which were changed: by kind, None for missing."""
        system = FaultFS()
        for folder in ("/t", *(f"/t/{name}" for name in FOLDERS)):
            system.mkdir(folder)
        for folder in {path.rpartition("/")[0] for path in self.files if path.startswith("/t/base/")}:
            system.mkdir(folder)
        for path, data in self.files.items():
            system.write_file(path, data)
        for kind, data in changes.items():
            system.write_file(self.name[kind], data)
        return system


def make_image(seed: int = 0) -> Image:
    system = FaultFS()
    table = on(system).Table(ROWS, DIM, rule=er.Adam(dense=True), init=er.Normal(), seed=seed, path="/t")
    grads = np.linspace(-1, 1, ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    table.update(IDS[::2], grads[::2])
    table.commit()
    table.compact()
    for ids in ([0, 3], [5, 3]):
        table.update(ids, grads[ids])
        table.commit()
    weights = table.lookup(IDS)
    table.close()
    manifest = folders.newest(system, "/t")
    pool = pool_of(manifest)
    files = {path: data for path, data in system.files().items() if path != "/t/LOCK"}
    names = {
        "manifest": f"/t/manifest/{manifest.commit:010d}.json",
        "base": f"/t/{pool.base[0].file}",
        "old_delta": f"/t/{pool.delta[0].file}",
        "delta": f"/t/{pool.delta[1].file}",
        "history": f"/t/{manifest.history[0].file}",
    }
    return Image(files, manifest, pool, weights, names)


@pytest.fixture(scope="module")
def image() -> Image:
    return make_image()


KINDS = ("manifest", "base", "old_delta", "delta", "history")


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def open_table(system: FaultFS) -> er.Table:
    return on(system).open("/t", mode="r")


def rows_of(table: er.Table) -> tuple[np.ndarray, str]:
    """Return the weights of all rows, NaN for those that are refused, and the last message."""
    weights, message = np.full((ROWS, DIM), np.nan, np.float32), ""
    for row in range(ROWS):
        try:
            weights[row] = table.lookup([row])
        except CORRUPT as error:
            message = str(error)
    return weights, message


def check(image: Image, kind: str, data: bytes | None) -> str:
    """Check that a table with one file changed returns right values or errors that name the file, and return those."""
    system = image.system(**{kind: data})
    try:
        table = open_table(system)
    except CORRUPT as error:
        message = str(error)
    else:
        with table:
            message = check_rows(image, table)
            verdict = table.verify()
            assert image.name[kind] in "".join(verdict.problems)
            assert verdict.newest_good in (None, image.manifest.commit - 1)
    assert not message or image.name[kind] in message
    return message


def check_rows(image: Image, table: er.Table) -> str:
    """Check that rows are right or refused, and return the last message."""
    weights, message = rows_of(table)
    refused = np.isnan(weights)
    np.testing.assert_array_equal(weights[~refused], image.weights[~refused])
    assert not refused.any() or f"ids {np.flatnonzero(refused.any(axis=1))[-1]}" in message
    return message


# -------------------------------------------------------------------- every bit, where files are checked


def bits_of(image: Image, kind: str, every: bool) -> Iterator[int]:
    """Go through the bits of a file; of its header page, only some unless `every`."""
    data = image.files[image.name[kind]]
    for bit in range(8 * len(data)):
        if every or kind in ("manifest", "history") or bit >= 8 * 4096 or bit < 8 * 40 or bit % SAMPLED == 0:
            yield bit


def bad_rows(system: FaultFS, ids: np.ndarray) -> set[int]:
    """Return the rows whose records are refused; raises where the table is."""
    (store,) = TableFolder(system, "/t", folders.newest(system, "/t"), None).stores
    found = store.located(ids)
    bad = set[int]()
    records = np.empty((len(found.ids), store.content.record_bytes), np.uint8)
    try:
        store.read(found, records, np.arange(len(found.ids)))
    except er.CorruptTableError as error:
        named = str(error).rpartition("ids ")[2].split(".")[0]
        bad = {int(row) for row in named.split(",")}
    store.close()
    return bad


def owner_of(image: Image, kind: str, bit: int) -> int | None:
    """Return the row whose stored record a bit belongs to; None for header and index."""
    entries = image.pool.base[0], *image.pool.delta
    entry = next(entry for entry in entries if image.name[kind] == f"/t/{entry.file}")
    record, width = bit // 8 - 4096, image.pool.record_bytes + 4
    if not 0 <= record < entry.count * width:
        return None
    return {"base": IDS[::2].tolist(), "old_delta": [0, 3], "delta": [3, 5]}[kind][record // width]


@pytest.mark.parametrize(
    ("every", "kind"),
    [
        (False, "old_delta"),
        *slow((False, "base"), (False, "delta"), *((True, kind) for kind in ("base", "old_delta", "delta"))),
    ],
)
def test_every_bit_of_a_run(image: Image, kind: str, every: bool):
    path, stale = image.name[kind], {"base": {0}, "old_delta": {3}, "delta": set[int]()}[kind]
    system, seen = image.system(), set[int]()
    for bit in bits_of(image, kind, every):
        system.write_file(path, flipped(image.files[path], bit))
        row = owner_of(image, kind, bit)
        if row is None:
            with pytest.raises(CORRUPT, match=path):
                bad_rows(system, IDS)
        else:
            # A record that a newer one replaces is never read: that is the harmless case, which `verify` reports.
            assert bad_rows(system, IDS) == ({row} - stale), bit
            seen.add(row)
    assert len(seen) == {"base": ROWS // 2, "old_delta": 2, "delta": 2}[kind]


def test_every_bit_of_a_manifest(image: Image):
    path, system = image.name["manifest"], image.system()
    for bit in bits_of(image, "manifest", True):
        system.write_file(path, flipped(image.files[path], bit))
        with pytest.raises(CORRUPT, match=path):
            folders.newest(system, "/t")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_bit_of_a_history(image: Image, every: bool):
    path, part = image.name["history"], image.manifest.history[0]
    data = image.files[path]
    assert (part.size, part.crc) == (len(data), zlib.crc32(data))
    for bit in range(0, 8 * len(data), 1 if every else 13):
        assert zlib.crc32(flipped(data, bit)) != part.crc


# -------------------------------------------------------------------- samples, through the whole table


@pytest.mark.parametrize("kind", KINDS)
def test_flips_through_a_whole_table(image: Image, kind: str):
    rng, size = np.random.default_rng(len(kind)), 8 * len(image.files[image.name[kind]])
    start = 8 * 4096 if kind in ("base", "old_delta", "delta") else 0
    for bit in [5, 8 * 60, *rng.integers(start, size, 12).tolist(), size - 1]:
        assert check(image, kind, flipped(image.files[image.name[kind]], bit)) or kind in ("base", "old_delta")


@pytest.mark.parametrize("kind", KINDS)
def test_other_lengths(image: Image, kind: str):
    data = image.files[image.name[kind]]
    for size in sorted({0, 1, 66, 4095, 4096, 4100, len(data) // 2, len(data) - 1} & set(range(len(data)))):
        assert check(image, kind, data[:size])
    for tail in (b"\0", bytes(4096), data):
        assert check(image, kind, data + tail)
    if kind != "manifest":  # without its last one, a table is that of the commit before
        assert "missing" in check(image, kind, None) or kind == "history"


@pytest.mark.parametrize("kind", ["base", "old_delta", "delta", "history"])
def test_files_of_another_table(image: Image, kind: str):
    other = make_image(seed=1)
    data = other.files[other.name[kind]]
    assert len(data) == len(image.files[image.name[kind]])
    assert check(image, kind, data)


@pytest.mark.parametrize("kind", ["base", "old_delta", "delta"])
def test_zeros_in_place_of_a_block(image: Image, kind: str):
    data = image.files[image.name[kind]]
    for start in range(0, len(data), 512):
        changed = data[:start] + bytes(len(data[start : start + 512])) + data[start + 512 :]
        assert changed == data or check(image, kind, changed)


def test_a_log_in_the_place_of_another():
    system = FaultFS()
    table = on(system).Table(ROWS, DIM, rule=er.SGD(lr=1.0), path="/t", keep=9)
    for _ in range(3):
        table.update(IDS, np.ones((ROWS, DIM), np.float32))
        table.commit()
    table.close()
    old, _, new = [f"/t/{entry.file}" for entry in newest_pool(system, "/t").delta]
    assert len(system.files()[old]) == len(system.files()[new])
    system.write_file(new, system.files()[old])
    with pytest.raises(er.CorruptTableError, match=f"{new} is damaged: expected the file that was written under"):
        open_table(system)


def test_records_that_change_places(image: Image):
    data, width = image.files[image.name["base"]], image.pool.record_bytes + 4
    first, second = (data[4096 + k * width :][:width] for k in (2, 3))
    swapped = data[: 4096 + 2 * width] + second + first + data[4096 + 4 * width :]
    assert check(image, "base", swapped)
    with open_table(image.system(base=swapped)) as table, pytest.raises(er.CorruptTableError, match=r" ids 4, 6\."):
        table.lookup(IDS)


def test_this_file_would_notice_a_wrong_value(image: Image):
    data, width = bytearray(image.files[image.name["base"]]), image.pool.record_bytes + 4
    record = slice(4096 + 5 * width, 4096 + 6 * width - 4)
    data[record.start + 1] ^= 1
    mark = (zlib.crc32(data[:4092]) + 5 * 0x9E3779B1) % 2**32
    data[record.stop : record.stop + 4] = struct.pack("<I", zlib.crc32(struct.pack("<q", 10) + data[record]) ^ mark)
    with pytest.raises(AssertionError):
        check(image, "base", bytes(data))


# -------------------------------------------------------------------- manifests made up, with checksums that fit


def signed(body: dict[str, Any]) -> bytes:
    line = json.dumps(body).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def refused(image: Image, change: Any, **files: bytes) -> str:
    """Check that a table whose manifest was changed is refused, and return the message."""
    body = json.loads(image.files[image.name["manifest"]].split(b"\n")[0])
    change(body)
    system = image.system(manifest=signed(body), **files)
    system.write_file("/secret", b"x" * 9999)
    with pytest.raises(REFUSED) as caught, open_table(system) as table:
        table.lookup(IDS)
    assert "/t" in str(caught.value)
    assert not any("secret" in call for call in system.journal)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("base", "file", "../secret"),
        ("base", "file", "/secret"),
        ("base", "file", "base/../../secret"),
        ("delta", "file", "delta/none"),
        ("base", "count", 2**39),
        ("base", "size", 2**62),
        ("base", "hi", 2**63),
        ("base", "lo", -(2**63)),
        ("base", "index", "full"),
        ("base", "index", "ids"),
        ("base", "index_crc", 0),
        ("delta", "count", 1),
        ("delta", "hi", 4),
        ("delta", "lo", 4),
        ("history", "size", 2**40),
        ("history", "crc", 0),
        ("history", "file", "history/none"),
    ],
)
def test_entries_made_up(image: Image, kind: str, key: str, value: Any):
    assert refused(image, lambda body: body[kind][-1].update({key: value}))


@pytest.mark.parametrize(("count", "text"), [(5, r"`count` in \[6, 10\]"), (9, None), (7, None)])
def test_a_count_that_is_not_that_of_the_files(image: Image, count: int, text: str | None):
    # Who goes through all rows has made room for so many. How many there are is known then only.
    body = json.loads(image.files[image.name["manifest"]].split(b"\n")[0])
    system = image.system(manifest=signed(body | {"count": count}))
    if text is not None:
        with pytest.raises(er.CorruptTableError, match=text):
            open_table(system)
        return
    with open_table(system) as table:
        for export in (table.export, lambda: next(iter(table.export_batches(4)))):
            with pytest.raises(er.CorruptTableError, match=f"expected `count` 8, as its files say, got {count}"):
                export()
        np.testing.assert_array_equal(table.lookup(IDS), image.weights)


def with_last_step(image: Image, value: int) -> FaultFS:
    """Return the table with another last step in its newest record, of id 5; seals and all else fit."""
    data, width = bytearray(image.files[image.name["delta"]]), image.pool.record_bytes
    place, spec = 4096 + 0 * (width + 4), er.Adam(dense=True).state_width(DIM)
    ids = np.frombuffer(bytes(data[-16:]), np.int64).tolist()
    at = place + 4 * (DIM + spec - 1)
    assert 0 < int.from_bytes(data[at : at + 4], "little") <= 3
    data[at : at + 4] = struct.pack("<i", value)
    seal = zlib.crc32(struct.pack("<q", ids[0]) + data[place : place + width]) ^ zlib.crc32(data[:4092])
    data[place + width : place + width + 4] = struct.pack("<I", seal)
    return image.system(delta=bytes(data))


@pytest.mark.parametrize("value", [-1, 4, 2**31 - 1, -(2**31)])
def test_records_of_steps_that_were_never_made(image: Image, value: int):
    for ask in (lambda table: table.lookup(IDS), er.Table.export, lambda table: next(iter(table.prefetch([IDS])))):
        expected = r"last stepped in one of its steps, 1 to 3, got 1 of another, ids [35]"
        with open_table(with_last_step(image, value)) as table, pytest.raises(er.CorruptTableError, match=expected):
            ask(table)
    with open_table(with_last_step(image, 3)) as table:  # else it would be taken
        table.lookup(IDS)


def test_a_commit_that_lacks_the_history_of_its_rule(image: Image):
    def none(body: dict[str, Any]) -> None:
        body["history"] = []

    def of_no_rule(body: dict[str, Any]) -> None:
        body["spec"]["rule"] |= {"dense": False}
        body["spec"]["dim"] = 4

    assert "expected one `history` after 3 steps of Adam(" in refused(image, none)
    assert "damaged" in refused(image, of_no_rule)


@pytest.mark.parametrize(
    "told", ["", "[" * 4000, '{"pid": Infinity, "host": 1}', '{"pid": 1e999}', '{"pid": []}', "\0"]
)
def test_a_lock_that_says_anything(told: str, tmp_path: Path):
    (tmp_path / "LOCK").write_text(told)
    assert folders._holder(str(tmp_path / "LOCK")) == "an unknown process"


def test_verification_knows_what_each_commit_says_of_a_file(image: Image):
    body = json.loads(image.files[image.name["manifest"]].split(b"\n")[0])
    body["base"][0]["index_crc"] ^= 1
    system = image.system(manifest=signed(body))
    with on(system).open("/t", mode="r", at=image.manifest.commit - 1) as table:
        found = table.verify()
    assert len(found.problems) == 1
    assert "of the index" in found.problems[0]
    assert found.newest_good == image.manifest.commit - 1


def test_entries_that_fit_themselves_but_not_their_file(image: Image):
    def huge(body: dict[str, Any]) -> None:
        body["base"][0] |= {"count": 2**39, "index": "full", "lo": 0, "hi": 2**39}
        body["base"][0]["size"] = 4096 + 2**39 * (body["record_bytes"] + 4)
        body["count"] = 2**39

    def wide(body: dict[str, Any]) -> None:
        body["base"][0] |= {"hi": 2**50, "size": 4096 + ROWS // 2 * (body["record_bytes"] + 4) + 2**47}

    def twice(body: dict[str, Any]) -> None:
        body["base"] += [body["base"][0] | {"lo": ROWS, "hi": 2 * ROWS}]
        body["count"] *= 2

    assert "bytes, got" in refused(image, huge)
    assert "bytes, got" in refused(image, wide)
    assert "each file once" in refused(image, twice)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rows", value) for value in (0, -1, 2**63, 1.5, "12", [], True)),
        *(("dim", value) for value in (0, 2**62, None, "1", 1.0)),
        *(("dtype", value) for value in ("float64", None, [], "object")),
        *(("seed", value) for value in (2**64, None, "0", 0.5)),
        *(("init", value) for value in (None, {}, {"name": "system"}, {"name": "Normal", "std": -1}, "Normal", 5)),
        *(("rule", value) for value in ({}, {"name": "Rule"}, {"name": "Adam", "lr": "x"}, "Adam", {"name": ["Adam"]})),
    ],
)
def test_descriptions_made_up(image: Image, key: str, value: Any):
    assert refused(image, lambda body: body["spec"].update({key: value}))


OTHERS = [("rows", ROWS - 1), ("rows", 5), ("dim", 3), ("dim", 4000), ("rule", None), ("dtype", "float16")]


@pytest.mark.parametrize(("key", "value"), OTHERS)
def test_descriptions_of_other_files(image: Image, key: str, value: Any):
    body = json.loads(image.files[image.name["manifest"]].split(b"\n")[0])
    body["spec"][key] = value
    with pytest.raises(er.CorruptTableError, match="/t"):
        open_table(image.system(manifest=signed(body)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(60))
@given(st.sampled_from(["rows", "dim", "dtype", "seed", "init", "rule"]), st.data())
def test_descriptions_of_any_kind(image: Image, key: str, data: st.DataObject):
    body = json.loads(image.files[image.name["manifest"]].split(b"\n")[0])
    spec = body["spec"]
    if isinstance(spec[key], dict) and data.draw(st.booleans()):
        spec[key][data.draw(st.sampled_from([*spec[key], "other"]))] = data.draw(JSON)
    else:
        spec[key] = data.draw(JSON)
    with contextlib.suppress(*REFUSED):
        open_table(image.system(manifest=signed(body))).close()


def history(data: bytes) -> Any:
    """Return what puts other bytes into the history, with a checksum that fits."""

    def change(body: dict[str, Any]) -> None:
        body["history"][0] |= {"size": len(data), "crc": zlib.crc32(data)}

    return change


def test_histories_made_up(image: Image):
    page = image.files[image.name["history"]][:4096]
    held = io.BytesIO()
    np.save(held, np.zeros(3))
    array = held.getvalue()
    for content in (b"", b"PK", b"x" * 100, array, npz(table=np.zeros(3)), npz(other=np.zeros(3)), npz(), huge_npz()):
        for data in (page + content, content):
            refused(image, history(data), history=data)


def npz(**arrays: np.ndarray) -> bytes:
    held = io.BytesIO()
    np.savez(held, allow_pickle=True, **arrays)
    return held.getvalue()


def huge_npz() -> bytes:
    """Return an array that says that it has 2**40 rows."""
    made = npz(table=np.zeros((1234567, 0), np.float32))
    return made.replace(b"(1234567, 0)", b"(9999999, 9)")


def test_a_pickle_is_never_loaded(image: Image):
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("a pickle was loaded",)

    made = np.empty(1, object)
    made[0] = Bomb()
    data = image.files[image.name["history"]][:4096] + npz(table=made, log_fade=made)
    refused(image, history(data), history=data)
