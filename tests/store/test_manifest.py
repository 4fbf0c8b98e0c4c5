"""Manifests: what is written is read again; anything else is refused with a message that says what is wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedrock.errors import CorruptTableError, NewerFormatError
from embedrock.io.vfs import OS_SYSTEM
from embedrock.store import manifest as manifests
from embedrock.store import publishing
from embedrock.store.manifest import HistoryFile, Manifest, StoreEntry, TableEntry
from embedrock.store.segments import SegmentEntry, run_bytes
from slow import examples
from suites import FaultFS
from table_files import pool_of

WHERE = "/t/manifest/0000000042.json"
WIDTH = 64
BEYOND = 2**63
REMEDIES = ("Restore the file", "Install a newer")


def entry(file: str, index: str, count: int, lo: int, hi: int) -> SegmentEntry:
    made = SegmentEntry(file, 0, count, index, lo, hi, 0 if index == "full" else 0x1234, salt=count)
    return replace(made, size=run_bytes(WIDTH, made))


FIELDS: dict[str, Any] = {
    "uuid": "0123456789abcdef" * 2,
    "commit": 42,
    "parent": 41,
    "step": -1000,
    "name": "größte [{Schöne}] 名",
    "time": "2026-11-21T04:51:33.123456Z",
    "spec": {"rows": None, "dim": 16, "rule": {"name": "Adam", "betas": [0.9, 0.999]}, "text": 'a "b" \\ [[[ }'},
    "record_bytes": WIDTH,
    "steps": 1234,
    "skipped_steps": 5,
    "count": 300,
    "base": (
        entry("base/0000000042-7/cffff.rows", "ids", 3, -BEYOND, 0),
        entry("base/0000000042-7/c0.rows", "full", 100, 0, 100),
        entry("base/0000000042-7/c100.rows", "bits", 99, 200, BEYOND),
    ),
    "delta": (entry("delta/0000000042-1.dlt", "ids", 50, -5, 7), entry("delta/0000000042-2.dlt", "ids", 99, 0, BEYOND)),
    "history": (HistoryFile("history/0000000042-9.his", 9999, 77, 1234),),
}


def made(**changes: Any) -> Manifest:
    """Return the manifest of a table alone, from the fields of its file."""
    of = FIELDS | changes
    pool = StoreEntry(of["uuid"], of["commit"], WIDTH, of["spec"].get("rows"), of["count"], of["base"], of["delta"])
    member = TableEntry("", 0, None, *(of[key] for key in ("spec", "steps", "skipped_steps", "count", "history")))
    common = {key: of[key] for key in ("uuid", "commit", "parent", "step", "name", "time")}
    return Manifest(**common, pools=(pool,), members=(member,))


MANIFEST = made()


def body() -> dict[str, Any]:
    return json.loads(MANIFEST.to_bytes().split(b"\n")[0])


def signed(line: bytes | dict[str, Any]) -> bytes:
    """Return the bytes of a manifest of that line, whose checksum fits."""
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def refused(data: bytes, expected: str | None = None) -> str:
    """Check that bytes are refused, and return the message."""
    with pytest.raises((CorruptTableError, NewerFormatError), match=expected) as caught:
        manifests.parse(data, WHERE)
    message = str(caught.value)
    assert message.startswith(f"{WHERE} is ")
    assert any(remedy in message for remedy in REMEDIES)
    assert len(message) < 700  # whatever it quotes
    message.encode()  # and can be printed
    return message


def test_a_manifest_is_read_as_it_was_written():
    assert manifests.parse(MANIFEST.to_bytes(), WHERE) == MANIFEST
    empty = made(base=(), delta=(), history=(), count=0, parent=None, step=None, name=None)
    assert manifests.parse(empty.to_bytes(), WHERE) == empty


def test_a_manifest_is_two_lines_of_plain_text():
    line, checksum, rest = MANIFEST.to_bytes().split(b"\n")
    assert (checksum, rest) == (hashlib.sha256(line).hexdigest().encode(), b"")
    assert line.isascii()
    plain = json.loads(line)
    assert list(plain) == sorted(plain)
    assert plain.pop("format") == 2
    expected = json.loads(json.dumps(FIELDS, default=asdict))
    for entry in (*expected["base"], *expected["delta"]):
        del entry["gone"], entry["folded"]  # there are none
    assert plain == expected


def test_a_log_may_name_ids_that_are_gone():
    last = FIELDS["delta"][-1]
    gone = replace(last, count=0, gone=2, size=4096 + 2 * 8, lo=5, hi=9)
    manifest = made(delta=(*FIELDS["delta"][:-1], gone), count=202)
    line = json.loads(manifest.to_bytes().split(b"\n")[0])
    assert line["format"] == 3
    assert line["delta"][-1]["gone"] == 2
    assert manifests.parse(manifest.to_bytes(), WHERE) == manifest
    for wrong in (0, -1, 5, 2.0, None, 2**40):  # of 4 ids
        refused(signed({**line, "delta": [*line["delta"][:-1], {**line["delta"][-1], "gone": wrong}]}))
    refused(signed({**line, "format": 2}), "an entry of `delta` with")
    for kind in ("base", "history"):
        refused(signed({**line, kind: [{**entry, "gone": 1} for entry in line[kind]]}), f"an entry of `{kind}` with")


def test_a_table_whose_rows_come_and_go_is_of_a_format_that_older_releases_refuse():
    for policy in ("admission", "eviction"):
        assert made(spec={policy: {}}).format == 3
    assert MANIFEST.format == 2


def test_a_manifest_of_format_1_has_no_salts():
    plain: dict[str, Any] = body() | {"format": 1}
    refused(signed(plain), "an entry of `base` with")
    for part in (*plain["base"], *plain["delta"]):
        del part["salt"]
    found = manifests.parse(signed(plain), WHERE)
    pool = pool_of(found)
    assert {part.salt for part in (*pool.base, *pool.delta)} == {None}
    assert replace(found, pools=()) == replace(MANIFEST, pools=())
    assert replace(pool, base=(), delta=()) == replace(pool_of(MANIFEST), base=(), delta=())
    assert manifests.parse(found.to_bytes(), WHERE) == found  # as the next commit writes it
    refused(signed(plain | {"format": 2}), "an entry of `base` with .*, salt")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_json_is_never_written(value: float):
    with pytest.raises(ValueError, match="JSON"):
        made(spec={"lr": value}).to_bytes()


def test_every_bit_that_flips_is_noticed():
    data = MANIFEST.to_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptTableError, match="SHA-256"):
            manifests.parse(bytes(flipped), WHERE)


def test_every_other_length_is_noticed():
    data = MANIFEST.to_bytes()
    for size in range(len(data)):
        refused(data[:size])
    for tail in (b"\0", b"\n", data, b"\n" + data):
        refused(data + tail)


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_refused(data: bytes, with_checksum: bool):
    refused(signed(data) if with_checksum else data)


WRONG = {
    "format": [0, -1, 1.0, True, None, "1", [1], 10**4000],
    "uuid": [None, 5, "", "0" * 31, "0" * 33, "G" * 32, "0" * 31 + "\n", "A" * 32, "٣" * 32],
    "commit": [None, -1, 10**10, 1.0, True, "42", 10**4000],
    "parent": [-1, 10**10, False, "41", 41.0],
    "step": [BEYOND, -BEYOND - 1, 1.5, True, "7", [], {}],
    "name": ["", "a\nb", "\0", "\x1b[31m", "x" * 101, 5, True, [], "\ud800", "\u202e"],
    "time": [
        None,
        "",
        5,
        "yesterday",
        "2026-11-21T04:51:33",
        "2026-11-21 04:51:33Z",
        "x" * 10**5,
        "2026-13-01T00:00:00Z",
    ],
    "spec": [None, [], 5, "Adam"],
    "record_bytes": [None, 0, -64, 2**30 + 1, 2**64, 64.0, True, 65],
    "steps": [None, -1, 2**62, BEYOND, 1.0, "0"],
    "skipped_steps": [None, -1, 2**62, BEYOND, 1.0, False],
    "count": [None, -1, 201, 352, BEYOND, True, 300.0],
    "base": [None, {}, 5, [5], [None], [[]], [{}]],
    "delta": [None, {}, "", [5], [None], [[]], [{}]],
    "history": [None, {}, 5, ["x"], [{}]],
}
WRONG_IN_ENTRY = {
    "file": [
        *(None, 5, [], "", "base", "base/", "/base/x", "base//x", "/etc/passwd", "../base/x", "base/../../x"),
        *("base/..", "base/.", "base/.x", "base/x/..", "base/x/y/z", "base/x\0", "base/x\n", "base/x y", "base\\x"),
        *("base/" + "x" * 65, "manifest/0000000042.json", "LOCK", "delta/1.dlt", "./base/x", "base/é", "BASE/x"),
        "base/0000000042-7/c100.rows",  # a file of another entry
    ],
    "size": [None, 0, -1, 4096, 2**64, 1.0, True, "4096"],
    "count": [None, 0, -1, 99, 101, 2**40, 2**62, 1.0, True],
    "index": [None, "", "zip", "FULL", 0, [], {}, "bits", "ids"],
    "lo": [None, -1, 1, 100, 101, -BEYOND - 1, BEYOND, 0.0, False, "0"],
    "hi": [None, 0, -1, 99, 101, 201, BEYOND + 1, 100.0, True],
    "index_crc": [None, -1, 2**32, 0.5, False],
    "salt": [-1, 2**32, 0.5, False, "0"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in WRONG for value in WRONG[key]])
def test_wrong_values_are_refused(key: str, value: Any):
    refused(signed(body() | {key: value}))


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in WRONG_IN_ENTRY for value in WRONG_IN_ENTRY[key]])
def test_wrong_values_of_entries_are_refused(key: str, value: Any):
    plain = body()
    plain["base"][1][key] = value
    refused(signed(plain))


@pytest.mark.parametrize("where", [(), ("base", 1), ("delta", 0), ("history", 0)])
def test_keys_are_those_of_the_format(where: tuple[Any, ...]):
    def changed(change: Any) -> bytes:
        plain = inner = body()
        for key in where:
            inner = inner[key]
        change(inner)
        return signed(plain)

    inner = body()
    for key in where:
        inner = inner[key]
    refused(changed(lambda inner: inner.update(extra=1)), "extra")
    for key in inner:
        refused(changed(lambda inner, key=key: inner.pop(key)), key)


@pytest.mark.parametrize("kind", ["full", "bits"])
def test_a_log_has_an_index_of_ids(kind: str):
    plain, changed = body(), entry("delta/1", kind, 64, 0, 64)
    plain["delta"][0] = publishing.fields_of(changed)
    refused(signed(plain), f"expected an index of ids of delta/1, as every log has, got '{kind}'")


def test_a_history_is_in_several_files_only_where_rows_come_and_go():
    plain = body()
    plain["history"].append(plain["history"][0] | {"file": "history/2.his"})
    refused(signed(plain), "expected at most 1 file of `history`, got 2")
    plain["format"] = 6
    refused(signed(plain), "expected at most 1 file of `history`, got 2")
    plain["spec"] = {**plain["spec"], "admission": {}}
    assert len(manifests.parse(signed(plain), "/t").history) == 2
    plain["history"] = [plain["history"][0] | {"file": f"history/{k}.his"} for k in range(65)]
    refused(signed(plain), "expected at most 64 files of `history`, got 65")


def test_files_must_lie_below_the_folder_of_their_kind():
    for kind, other in (("base", "delta"), ("delta", "base"), ("delta", "history"), ("history", "delta")):
        plain = body()
        plain[kind][0]["file"] = f"{other}/1"
        refused(signed(plain), f"a file of `{kind}` below {kind}/")


def test_ranges_may_not_overlap_or_run_backwards():
    def base(*ranges: tuple[int, int]) -> bytes:
        made = [publishing.fields_of(entry(f"base/{k}", "ids", 1, lo, hi)) for k, (lo, hi) in enumerate(ranges)]
        return signed(body() | {"base": made, "delta": [], "count": len(made)})

    assert manifests.parse(base((-BEYOND, 0), (0, 1), (1, BEYOND)), WHERE).count == 3
    for ranges in (((0, 10), (9, 20)), ((0, 10), (0, 10)), ((5, 6), (0, 3)), ((0, 100), (5, 6))):
        refused(base(*ranges), "to start at")
    refused(base((5, 5)), "lo < hi")
    refused(base((7, -7)), "lo < hi")


def test_more_records_than_ids_are_refused():
    plain = body()
    plain["base"][0] = publishing.fields_of(entry("base/1", "ids", 4, -3, 0))
    refused(signed(plain), "records for 3 ids")
    plain = body()
    plain["delta"][0] = publishing.fields_of(entry("delta/1", "ids", 50, -3, 0))  # later records win
    assert manifests.parse(signed(plain), WHERE).pools[0].delta[0].count == 50


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"5",
        b'"x"',
        b"{",
        b"}{",
        b'{"format": 1',
        b'{"format": 1, "format": 1}',
        b'{"format": NaN}',
        b'{"a": Infinity, "format": 1}',
        b'{"a": -Infinity, "format": 1}',
        b'{"a": 1e999, "format": 1}',
        b'{"a": ' + b"9" * 10000 + b"}",
        b'{"a": "\xc3\xa4"}',
        b"\xef\xbb\xbf{}",
        b"{}\n{}",
        b'"' + b"\\" * 99999,
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[{" * 50_000,
        b'"]]]]]]]]",' * 1000 + b"[" * 3000 + b"]" * 3000,
        b"]" * 9999 + b"[" * 9999,
        b"cos\nsystem\n(S'true'\ntR.",
    ],
)
def test_lines_that_are_no_manifest_are_refused(line: bytes):
    refused(signed(line))


@pytest.mark.parametrize(("old", "new"), [('"steps":', '"steps": 1, "steps":'), ('"lo":', '"lo": 0, "lo":')])
def test_a_key_that_is_there_twice_is_refused(old: str, new: str):
    line = MANIFEST.to_bytes().split(b"\n")[0].decode()
    refused(signed(line.replace(old, new, 1).encode()), "a key twice")


def test_deep_json_costs_no_memory():
    data = signed(b"[" * 10**5 + b"]" * 10**5)
    tracemalloc.start()
    refused(data, "levels")
    assert tracemalloc.get_traced_memory()[1] < 2 * 10**6
    tracemalloc.stop()


@pytest.mark.parametrize("value", [b"[]", b"{}", b"1", b'"ab"', b"[1,2]"])
def test_many_small_values_are_not_made(value: bytes):
    """Python has 20 bytes for each of theirs, and more."""
    data = signed(b'{"format":6,"x":[' + b",".join([value] * 10**6) + b"]}")
    tracemalloc.start()
    refused(data, "a value in 8 bytes, on average")
    assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
    tracemalloc.stop()


def test_a_spec_may_have_some_levels():
    for depth, fits in ((10, True), (10_000, False)):
        spec: Any = {}
        for _ in range(min(depth, 40)):
            spec = {"a": [spec]}
        data = made(spec=spec).to_bytes()
        if fits:
            assert manifests.parse(data, WHERE).members[0].spec == spec
        else:
            refused(data, "levels")


def test_chunks_that_have_logs_in_them_are_of_format_5():
    base = (replace(FIELDS["base"][0], folded=2), *FIELDS["base"][1:])
    manifest = made(base=base)
    plain = json.loads(manifest.to_bytes().split(b"\n")[0])
    assert (body()["format"], plain["format"]) == (2, 5)
    assert [chunk.get("folded") for chunk in plain["base"]] == [2, None, None]
    assert [chunk.folded for chunk in manifests.parse(signed(plain), WHERE).pools[0].base] == [2, 0, 0]
    assert base[0] == FIELDS["base"][0]  # they are one file
    refused(signed(plain | {"format": 3}), "an entry of `base` with")
    for value, expected in ((3, "up to 2, got 3"), (0, "a whole number in"), (-1, "a whole number in"), (1.0, "whole")):
        plain["base"][0]["folded"] = value
        refused(signed(plain), f"`folded` of .*{expected}")
    plain = json.loads(manifest.to_bytes().split(b"\n")[0])
    plain["delta"][0]["folded"] = 1
    refused(signed(plain), "an entry of `delta` with")


def test_a_newer_format_says_so():
    for version in (10, 10**6):
        with pytest.raises(NewerFormatError, match=f"format {version}: this release reads formats up to 9. Install"):
            manifests.parse(signed({"format": version, "shards": []}), WHERE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
NEAR = st.sampled_from([0, 1, -1, 42, 64, 100, 200, 2**31, 2**32, 2**40, 2**62, BEYOND, BEYOND - 1, -BEYOND, 2**64])


def parsed_or_refused(data: bytes) -> None:
    """Check that bytes are refused, or that they are a manifest that we could have written."""
    try:
        got = manifests.parse(data, WHERE)
    except (CorruptTableError, NewerFormatError):
        refused(data)
        return
    assert manifests.parse(got.to_bytes(), WHERE) == got


@settings(max_examples=examples(300))
@given(st.data(), JSON | NEAR)
def test_no_value_anywhere_breaks_the_parser(data: st.DataObject, value: Any):
    plain: Any = body()
    inner = plain
    while True:
        key = data.draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        if not isinstance(inner[key], dict | list) or not inner[key] or data.draw(st.booleans()):
            break
        inner = inner[key]
    inner[key] = value
    parsed_or_refused(signed(plain))


@given(st.integers(0), st.integers(0, 255), st.integers(0, 3))
def test_no_change_of_a_byte_breaks_the_parser(at: int, byte: int, deleted: int):
    line = bytearray(MANIFEST.to_bytes().split(b"\n")[0])
    at %= len(line)
    line[at : at + deleted] = bytes([byte])
    parsed_or_refused(signed(bytes(line)))


# -------------------------------------------------------------------- folders


def new_system(capacity: int | None = None) -> FaultFS:
    system = FaultFS(capacity)
    for folder in ("/t", "/t/manifest"):
        system.mkdir(folder)
    for folder in ("/", "/t"):
        system.fsync_folder(folder)
    return system


def test_commits_are_found_by_their_numbers():
    system = new_system()
    assert manifests.numbers(system, "/t") == []
    for number in (7, 42, 3, 10**10 - 1):
        manifests.publish(system, "/t", made(commit=number))
    for name in (".0000000099.tmp", "0000000098.json.tmp", "98.json", "00000000098.json", "0000000098.released", "x"):
        system.write_file(f"/t/manifest/{name}", b"")
    system.write_file("/t/manifest/٠٠٠٠٠٠٠٠٩٩.json", b"")
    assert manifests.numbers(system, "/t") == [3, 7, 42, 10**10 - 1]
    assert manifests.read(system, "/t", 42) == MANIFEST
    with pytest.raises(CorruptTableError, match=r"/t/manifest/0000000008.json is missing: there is no commit 8"):
        manifests.read(system, "/t", 8)


def test_a_folder_is_no_manifest(tmp_path: Path):
    (tmp_path / "manifest" / "0000000042.json").mkdir(parents=True)
    with pytest.raises(CorruptTableError, match=r"0000000042\.json is damaged: expected a file, got a folder"):
        manifests.read(OS_SYSTEM, str(tmp_path), 42)


def test_a_manifest_under_another_number_is_refused():
    system = new_system()
    system.write_file("/t/manifest/0000000043.json", MANIFEST.to_bytes())
    with pytest.raises(CorruptTableError, match="expected commit 43, got commit 42"):
        manifests.read(system, "/t", 43)


def test_a_huge_manifest_is_not_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publishing, "MAX_BYTES", 1000)
    system = new_system()
    system.write_file(WHERE, bytes(1001))
    with pytest.raises(CorruptTableError, match=re.escape(WHERE)):
        manifests.read(system, "/t", 42)
    assert not any(call.startswith("pread") for call in system.journal)
    with pytest.raises(CorruptTableError, match="at most 1000 bytes"):
        manifests.parse(MANIFEST.to_bytes(), WHERE)


def test_a_second_writer_is_noticed():
    system = new_system()
    manifests.publish(system, "/t", MANIFEST)
    with pytest.raises(FileExistsError):
        manifests.publish(system, "/t", made(step=5))
    assert manifests.read(system, "/t", 42) == MANIFEST
    assert system.listdir("/t/manifest") == ["0000000042.json"]


def test_what_cannot_be_read_is_not_published():
    system = new_system()
    with pytest.raises(CorruptTableError, match="`name`"):
        manifests.publish(system, "/t", made(name="a\nb"))
    assert system.listdir("/t/manifest") == []


def test_a_full_disk_can_be_freed():
    system = new_system(capacity=100)
    with pytest.raises(OSError, match="No space left") as caught:
        manifests.publish(system, "/t", MANIFEST)
    assert caught.value.errno == errno.ENOSPC
    assert manifests.numbers(system, "/t") == []
    system.mend()
    manifests.publish(system, "/t", MANIFEST)
    assert manifests.read(system, "/t", 42) == MANIFEST


def test_a_commit_is_there_whole_or_not_at_all():
    rng = np.random.default_rng(0)
    before = made(commit=41)
    system = new_system()
    manifests.publish(system, "/t", before)
    seen: set[int] = set()

    def crash(name: str, path: str) -> None:
        for clone in system.crash_clones(rng):
            found = manifests.numbers(clone, "/t")
            assert found in ([41], [41, 42]), (name, path, clone.kind)
            assert manifests.read(clone, "/t", found[-1]) == (MANIFEST if 42 in found else before)
            seen.add(found[-1])

    system.after = crash
    manifests.publish(system, "/t", MANIFEST)
    assert seen == {41, 42}
    for clone in system.crash_clones(rng):
        assert manifests.numbers(clone, "/t") == [41, 42]
