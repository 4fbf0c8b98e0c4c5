"""Mutations of tables on disk: a table's files are taken apart as docs/format.md says, changed, and sealed again.

A *plain* mutation changes bytes as a broken disk would: no checksum is made right, so that nothing but errors or the
right rows may come of it. A *sealed* one changes what the files say and then makes every checksum right, as somebody
would who forges a table: anything may be read from it, but it must neither crash nor hang nor take the machine's RAM.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import embedrock as er
from embedrock.store.compaction import NO_AGE, compact
from embedrock.store.pieces import CompactionGoal
from on_system import on
from suites import FaultFS
from table_files import FOLDERS, store_of

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
PAGE, STEP = 4096, 0x9E3779B1
LARGE = 1 << 16  # bytes: of no file here, so that the making of a case takes no RAM that is counted as a table's
LOOKED_AT = np.arange(150)
INTEGERS = (
    0,
    1,
    -1,
    2,
    3,
    63,
    64,
    65,
    149,
    150,
    151,
    4096,
    *(2**k + d for k in (31, 32, 40, 53, 62, 63, 64) for d in (-1, 0, 1)),
)
VALUES = (*INTEGERS, *(-k for k in INTEGERS), 10**30, 10**400, 1e308, 1.5, -0.0, float("nan"), float("inf"))
DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
OTHERS = (None, True, False, "", "x" * 70, "0" * 32, "bits", "ids", "full", "base/../x", "\ud800", "\x00", [], {}, [[]])


class Image(NamedTuple):
    """A table or a group as files, and what its commits hold.

    Attributes:
        files: by path below the folder.
        rows: weights of `asked`, by commit and by the table's name.
        asked: ids, by the table's name.
    """

    name: str
    files: dict[str, bytes]
    rows: dict[int, dict[str, np.ndarray]]
    asked: dict[str, np.ndarray]


def names_in(opened: er.Table | er.Group) -> list[str]:
    """Return the names of the tables in what was opened: of a table alone, none."""
    return list(opened) if isinstance(opened, er.Group) else [""]


def table_in(opened: er.Table | er.Group, name: str) -> er.Table:
    """Return one of them."""
    return opened[name] if isinstance(opened, er.Group) else opened


def system_of(files: dict[str, bytes]) -> FaultFS:
    """Return a file system that has these files as the table /t."""
    system = FaultFS()
    names = {f"/t/{path}" for path in files}
    folders = {"/t", *(f"/t/{name}" for name in FOLDERS)}
    for name in names:
        parts = name.split("/")
        folders |= {"/".join(parts[:k]) for k in range(2, len(parts))}
    for folder in sorted(folders - names):
        with contextlib.suppress(OSError):  # a file lies in the place of a folder
            system.mkdir(folder)
    for path, data in files.items():
        with contextlib.suppress(OSError):
            system.write_file(f"/t/{path}", bytes(data))
    return system


def image_of(name: str, files: dict[str, bytes]) -> Image:
    """Return an image, after a look at what its commits hold."""
    rows = {}
    with on(system_of(files)).open("/t", mode="r", memory="1MiB") as opened:
        asked = {each: _asked(table_in(opened, each)) for each in names_in(opened)}
        commits = [commit["commit"] for commit in opened.commits()]
    for commit in commits:
        with on(system_of(files)).open("/t", mode="r", at=commit, memory="1MiB") as opened:
            rows[commit] = {each: table_in(opened, each).lookup(asked[each]) for each in names_in(opened)}
    return Image(name, files, rows, asked)


def _asked(table: er.Table) -> np.ndarray:
    return np.union1d(LOOKED_AT, table.export()[0]) if table.rows is None else np.arange(table.rows)


def _lived() -> dict[str, bytes]:
    """Return the files of a table with all that can lie in one: many logs, rows twice in a log, names, a history."""
    system, rng = FaultFS(), np.random.default_rng(0)
    with mock.patch("os.urandom", rng.bytes):  # or a seed would mean other bytes in the next process
        table = on(system).Table(
            None,
            3,
            rule=er.AdamW(lr=0.1, dense=True),
            init=er.Normal(),
            path="/t",
            keep=3,
            memory="12KiB",
        )
        for step in range(12):
            ids = rng.integers(0, 60, 12) - 5
            table.update(ids, rng.standard_normal((12, 3)).astype(np.float32))
            if step % 3 == 2:
                table.commit(step=step, name=f"step {step}" if step < 8 else None)
            if step == 5:
                table.compact()
            if step == 9:  # some chunks have the rows of logs that the next commits name still
                compact(store_of(table), None, lambda: False, CompactionGoal(20, NO_AGE))
        table.release("step 2")
        table.close()
    return {path.removeprefix("/t/"): data for path, data in system.files().items()}


def _come_and_gone() -> dict[str, bytes]:
    """Return the files of a table whose rows come and go: logs that name ids as gone, counts, and uses of rows."""
    system, rng = FaultFS(), np.random.default_rng(1)
    with mock.patch("os.urandom", rng.bytes):
        table = on(system).Table(
            None,
            3,
            rule=er.SGD(lr=0.1),
            init=er.Normal(),
            seed=3,
            path="/t",
            keep=3,
            memory="64KiB",
            admission=er.Admission(2, within=8, sketch=64),
            eviction=er.Eviction(max_rows=20, idle=9, keep=[3]),
        )
        for step in range(16):
            ids = rng.integers(0, 40, 12) - 5
            table.update(ids, rng.standard_normal((12, 3)).astype(np.float32))
            if step == 6:
                table.forget([1, 2, 3])
            if step % 3 == 2:
                table.commit(step=step)
            if step == 8:
                table.compact()
        table.commit()
        table.close()
    return {path.removeprefix("/t/"): data for path, data in system.files().items()}


def _group() -> dict[str, bytes]:
    """Return the files of a group of four tables, of which two share a pool: two came late."""
    system, rng = FaultFS(), np.random.default_rng(2)
    kinds: dict[str, Any] = {
        "a": {"rows": 150, "dim": 3, "rule": er.Adam(lr=0.1)},
        "b": {"rows": None, "dim": 2, "rule": er.AdamW(lr=0.1, dense=True)},
        "c": {"rows": 90, "dim": 3, "rule": er.Adam(lr=0.2)},
        "d": {"rows": 80, "dim": 3, "rule": er.SGD(lr=0.2), "eviction": er.Eviction(max_rows=20)},
    }
    with mock.patch("os.urandom", rng.bytes), on(system).Group(path="/t", keep=3, memory="1MiB") as group:
        for step in range(12):
            if step in (0, 4):
                for seed, name in enumerate(kinds if step else "ab"):
                    group.table(name, **kinds[name], init=er.Normal(), seed=seed)
            ids = {name: rng.integers(0, group[name].rows or 60, 12) for name in group}
            grads = {name: rng.standard_normal((12, group[name].dim)).astype(np.float32) for name in group}
            group.update(ids, grads)
            if step % 3 == 2:
                group.commit(step=step)
            if step == 6:
                group.compact()
            if step == 7:
                group["a"].forget([1, 2, 3])
                group["d"].forget([1, 2, 3])
        group.commit()
    return {path.removeprefix("/t/"): data for path, data in system.files().items()}


def _packed() -> dict[str, bytes]:
    """Return the files of a group of int8 and int4, which no step changes: filled twice, and forgotten rows."""
    system, rng = FaultFS(), np.random.default_rng(3)
    kinds = {"a": (150, "int8"), "b": (None, "int4"), "c": (90, "int8")}
    with mock.patch("os.urandom", rng.bytes), on(system).Group(path="/t", keep=3, memory="1MiB") as group:
        for seed, (name, (rows, dtype)) in enumerate(kinds.items()):
            group.table(name, rows, 35, dtype=dtype, init=er.Normal(), seed=seed)
        for step in range(3):
            for name, (rows, _) in kinds.items():
                source = er.Table(rows, 35, init=er.Normal(), seed=group[name].spec.seed)
                ids = rng.permutation(rows or 60)[:40]
                source.assign(ids, rng.standard_normal((40, 35)).astype(np.float32))
                group[name].load_state(source)
            group["a"].forget([1, 2, 3])
            group.commit(step=step)
            if step == 1:
                group.compact()
        group.commit()
    return {path.removeprefix("/t/"): data for path, data in system.files().items()}


@functools.cache
def packed_image() -> Image:
    return image_of("packed", _packed())


@functools.cache
def images() -> list[Image]:
    """Return the tables that are mutated: the golden ones, and one that has lived."""
    found = []
    for folder in sorted(GOLDEN.glob("version-*/*/")):
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        found.append(image_of(f"{folder.parent.name}/{folder.name}", files))
    made = {"lived": _lived, "come and gone": _come_and_gone, "group": _group}
    return [*found, *(image_of(name, files()) for name, files in made.items())]


# ---------------------------------------------------------------- what is changed


@dataclass
class Draft:
    """A table that is being changed.

    Attributes:
        rng: chooses.
        files: by path; `bodies` are the manifests among them whose JSON was changed.
        touched: files whose checksums are to be made right.
        notes: what was done.
    """

    rng: random.Random
    files: dict[str, bytearray]
    sealed: bool
    bodies: dict[str, Any] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def file(self, part: str = "") -> str:
        """Choose a file that has bytes."""
        paths = sorted(path for path, data in self.files.items() if path.startswith(part) and data) or ["LOCK"]
        path = self.rng.choice(paths)
        self.files.setdefault(path, bytearray(b"{}"))
        self.touched.add(path)
        return path

    def manifest(self) -> tuple[str, Any]:
        """Choose a manifest, the newest one mostly, and return its object."""
        paths = sorted(path for path in self.files if path.startswith("manifest/") and path.endswith(".json"))
        if not paths:
            return "", {}
        path = paths[-1] if self.rng.random() < 0.8 else self.rng.choice(paths)
        if path not in self.bodies:
            try:
                self.bodies[path] = json.loads(bytes(self.files[path][:-66]))
            except ValueError:
                return path, {}
        return path, self.bodies[path]

    def change_list(self) -> tuple[str, Any, int]:
        """Choose a list of changes. Return its path, its object, and where its ids begin."""
        path = self.rng.choice(sorted(path for path in self.files if path.startswith("changes/") and self.files[path]))
        line, _, _ = bytes(self.files[path]).partition(b"\n")
        body = self.bodies.setdefault(path, json.loads(line))
        self.touched.add(path)
        return path, body, len(line) + 66

    def value(self) -> Any:
        """Choose a value that somebody may not have thought of."""
        if self.rng.random() < 0.2:
            return self.rng.choice(OTHERS)
        return self.rng.choice(VALUES) if self.rng.random() < 0.8 else self.rng.randrange(-(2**64), 2**65)

    def near(self, value: Any) -> Any:
        """Return a value like another one, or any."""
        if type(value) is int and self.rng.random() < 0.5:
            return self.rng.choice(
                [value + 1, value - 1, value * 2, value // 2, -value, value ^ 1 << self.rng.randrange(64)]
            )
        return self.value()


Change = Callable[[Draft], str]


def _with_files(draft: Draft, body: Any) -> Any:
    """Return an object of a manifest that names files: it itself, or, of a group's, a pool or a member."""
    parts = [part for part in _parts(body) if part is not body]
    return draft.rng.choice(parts) if parts else body


def _parts(body: Any) -> list[Any]:
    lists = [body.get(key) for key in ("pools", "members")] if isinstance(body, dict) else []
    return [body, *(part for each in lists if isinstance(each, list) for part in each if isinstance(part, dict))]


def flip(draft: Draft) -> str:
    path = draft.file()
    data = draft.files[path]
    at = _place(draft, path)
    data[at] ^= 1 << draft.rng.randrange(8)
    return f"a bit of {path} at {at}"


def overwrite(draft: Draft) -> str:
    path = draft.file()
    data, at = draft.files[path], _place(draft, path)
    size = draft.rng.choice([1, 4, 8, 16, 64, 512, PAGE])
    fill = draft.rng.choice([bytes(size), b"\xff" * size, draft.rng.randbytes(size)])
    data[at : at + size] = fill[: len(data) - at]
    return f"{size} bytes of {path} at {at}"


def number(draft: Draft) -> str:
    path = draft.file()
    data, at = draft.files[path], _place(draft, path) // 4 * 4
    size, value = draft.rng.choice([4, 8]), draft.rng.choice(INTEGERS) * draft.rng.choice([1, -1])
    data[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")[: len(data) - at]
    return f"{path} at {at}: {value} in {size} bytes"


def resize(draft: Draft) -> str:
    path = draft.file()
    data = draft.files[path]
    size = draft.rng.choice(
        [0, 1, 66, PAGE - 1, PAGE, len(data) // 2, len(data) - 1, len(data) - 8, draft.rng.randrange(len(data))]
    )
    if draft.rng.random() < 0.5:
        data += draft.rng.choice([b"\0", bytes(8), bytes(PAGE), bytes(data[:PAGE])])
    else:
        del data[max(0, size) :]
    return f"{path} has {len(data)} bytes"


def splice(draft: Draft) -> str:
    target, source = draft.file(), draft.file()
    data, other = draft.files[target], bytes(draft.files[source])
    at, start = _place(draft, target), _place(draft, source)
    if draft.rng.random() < 0.5:
        start = min(at, len(other))
    size = draft.rng.choice([4, 8, 16, 20, 24, 48, 64, 512, PAGE, len(other)])
    piece = other[start : start + size]
    data[at : at + len(piece)] = piece
    return f"{size} bytes of {source} at {start} in {target} at {at}"


def swap(draft: Draft) -> str:
    path = draft.file()
    data, size = draft.files[path], draft.rng.choice([4, 8, 16, 20, 24, 44, 48, 64, 512])
    low, high = sorted(_place(draft, path) for _ in "ab")
    first, second = bytes(data[low : low + size]), bytes(data[high : high + size])
    if low + size <= high and len(first) == len(second):
        data[low : low + size], data[high : high + size] = second, first
    return f"{size} bytes of {path} at {low} and {high}"


def replace_file(draft: Draft) -> str:
    source, target = draft.file(), draft.file()
    draft.files[target] = bytearray(draft.files[source])
    draft.bodies.pop(target, None)
    return f"{source} in place of {target}"


def exchange_files(draft: Draft) -> str:
    source, target = draft.file(), draft.file()
    draft.files[target], draft.files[source] = draft.files[source], draft.files[target]
    for path in (source, target):
        draft.bodies.pop(path, None)
    return f"{source} and {target}"


def remove_file(draft: Draft) -> str:
    path = draft.file()
    del draft.files[path]
    draft.bodies.pop(path, None)
    return f"no {path}"


def stray(draft: Draft) -> str:
    manifests = (
        "manifest/0000000099.json",
        "manifest/.0000000009.tmp",
        "manifest/x.json",
        "manifest/0000000001.released",
    )
    names = (
        *manifests,
        "base/x",
        "base/x/y",
        "delta/x",
        "delta/0000000009-1.dlt",
        "changes",
        "changes/x",
        "changes/0000000009-0000000001-99f-00000000-1.ids",
        "history/\udcff",
        "manifest",
        "delta",
    )
    path = draft.rng.choice(names)
    draft.files[path] = bytearray(draft.rng.choice([b"", b"{}", bytes(draft.files[draft.file()])]))
    return f"a new {path}"


def lock_file(draft: Draft) -> str:
    told = (
        "[" * 4000,
        '{"pid": Infinity, "host": "x"}',
        '{"pid": 1e999, "host": []}',
        "\xff",
        '{"pid": ' + "9" * 5000 + "}",
    )
    draft.files["LOCK"] = bytearray(draft.rng.choice(told).encode("latin-1"))
    return "LOCK"


def edit(draft: Draft) -> str:
    """Change a node of a manifest."""
    path, node = draft.manifest()
    return f"{path} {_edit(draft, node)}"


def edit_list(draft: Draft) -> str:
    """Change what a list of changes says of itself."""
    path, body, _ = draft.change_list()
    return f"{path} {_edit(draft, body)}"


def count_of_list(draft: Draft) -> str:
    """Say another number of ids, or of bytes, of a table in a list, or give bytes of one to another."""
    path, body, _ = draft.change_list()
    entry, other = (draft.rng.choice(body["tables"]) for _ in "ab")
    how = draft.rng.randrange(4)
    if how == 0:
        entry[1] = draft.near(entry[1])
    elif how == 1:
        entry[2], other[2] = entry[2] + 1, other[2] - 1
    elif how == 2:
        body["tables"].append(["x" * draft.rng.randrange(3), draft.rng.choice([None, 0, 1, 2**40]), 0])
    else:
        body["renamed"].append([entry[0], other[0]])
    return f"{path}: {how}"


def ids_of_list(draft: Draft) -> str:
    """Change a width or differences of a list of changes."""
    path, _, start = draft.change_list()
    data = draft.files[path]
    at = draft.rng.randrange(start, len(data))
    size = draft.rng.choice([1, 1, 2, 4, 8, 16])
    fill = draft.rng.choice([bytes(size), b"\xff" * size, bytes([draft.rng.choice([1, 2, 4, 8, 3])]) * size])
    data[at : at + size] = fill[: len(data) - at]
    return f"{path}: {size} bytes at {at}"


def resize_list(draft: Draft) -> str:
    """Add bytes to the ids of a table, or take some, so that the lengths fit."""
    path, body, start = draft.change_list()
    size = draft.rng.choice([1, 2, 8, 1024, LARGE])
    if draft.rng.random() < 0.5:
        draft.files[path] += draft.rng.choice([bytes(size), b"\x01" * size, b"\x08" * size])
    else:
        del draft.files[path][max(start, len(draft.files[path]) - size) :]
    rest = sum(entry[2] for entry in body["tables"][:-1])
    last = body["tables"][-1]
    last[2] = max(0, len(draft.files[path]) - start - rest)
    last[1] = draft.rng.choice([last[1], last[2], last[2] - 1, last[2] // 2])
    return f"{path}: {last}"


def _edit(draft: Draft, node: Any) -> list[Any]:
    """Change a node of an object, and return the way to it."""
    trail: list[Any] = []
    while isinstance(node, dict | list) and node:
        key = draft.rng.choice(sorted(node) if isinstance(node, dict) else range(len(node)))
        trail.append(key)
        if isinstance(node[key], dict | list) and node[key] and draft.rng.random() < 0.85:
            node = node[key]
            continue
        how = draft.rng.random()
        if key == "dtype" and how < 0.5:
            node[key] = draft.rng.choice(DTYPES)
        elif how < 0.1:
            del node[key]
        elif how < 0.15:
            node[key] = node[draft.rng.choice(list(node))] if isinstance(node, dict) else draft.rng.choice(node)
        elif how < 0.2 and isinstance(node, dict):
            node[draft.rng.choice(["x", "dim", "count", "lo"])] = draft.value()
        else:
            node[key] = draft.near(node[key])
        break
    return trail


def arrange(draft: Draft) -> str:
    """Change which files a commit has."""
    path, body = draft.manifest()
    body = _with_files(draft, body)
    lists = [key for key in ("base", "delta", "history") if isinstance(body.get(key), list)]
    full = [key for key in lists if body[key]]
    if not full:
        return "nothing"
    key, other = draft.rng.choice(full), draft.rng.choice(lists)
    entries, how = body[key], draft.rng.choice(["double", "drop", "move", "turn", "borrow"])
    if how == "double":
        entries.append(dict(draft.rng.choice(entries)) if isinstance(entries[0], dict) else 0)
    elif how == "drop":
        entries.pop(draft.rng.randrange(len(entries)))
    elif how == "move":
        body[other].insert(0, entries.pop())
    elif how == "turn":
        entries.reverse()
    else:
        _, older = draft.manifest()
        body[key] = _with_files(draft, older).get(key, [])
    return f"{path} {key}: {how}"


def index_kind(draft: Draft) -> str:
    """Say another kind of index of a file, and make the file such a one."""
    path, entry = _entry(draft)
    kind = entry["index"] = draft.rng.choice(["full", "bits", "ids"])
    _, end = _records_end(draft, entry)
    size = {"full": 0, "bits": -(-(entry["hi"] - entry["lo"]) // 64) * 8, "ids": 8 * entry["count"]}[kind]
    size = min(size, LARGE)
    more = draft.rng.choice([bytes(size), b"\xff" * size, draft.rng.randbytes(size)])
    draft.files[path][end:] = (bytes(draft.files[path][end:]) + more)[:size]
    return f"{path}: {kind}"


def key_of_index(draft: Draft) -> str:
    """Change an id of an index, or a word of its bits."""
    path, entry = _entry(draft)
    _, end = _records_end(draft, entry)
    data, lo, hi = draft.files[path], entry["lo"], entry["hi"]
    at, other = (end + 8 * draft.rng.randrange((len(data) - end) // 8) for _ in "ab")
    keys = [lo - 1, lo, hi - 1, hi, -1, 2**62, 2**63 - 1, -(2**63), draft.rng.randrange(-(2**63), 2**63)]
    fits = struct.pack("<Q", draft.rng.choice(keys) % 2**64)
    data[at : at + 8] = data[other : other + 8] if draft.rng.random() < 0.4 else fits
    return f"{path} at {at}"


def word_of_record(draft: Draft) -> str:
    """Change a number in a record: its last word may be a step."""
    path, entry = _entry(draft)
    width, _ = _records_end(draft, entry)
    words = max(width // 4, 1)
    word = draft.rng.choice([*range(words), words - 1, words - 2, words - 3, words - 4]) % words
    at = PAGE + draft.rng.randrange(entry["count"]) * (width + 4) + 4 * word
    value = draft.rng.choice([*INTEGERS, 0x7F800000, 0x7FC00000, draft.rng.randrange(2**32)])
    if at <= len(draft.files[path]) - 4:
        draft.files[path][at : at + 4] = struct.pack("<I", value % 2**32)
    return f"{path} at {at}: {value}"


def history_list(draft: Draft) -> str:
    """Change what a history says of its arrays."""
    path = draft.rng.choice(sorted(path for path in draft.files if path.startswith("history/")) or [draft.file()])
    data = bytes(draft.files[path])
    (size,) = struct.unpack_from("<I", data, PAGE)
    listed = json.loads(data[PAGE + 4 : PAGE + 4 + size])
    array, how = draft.rng.choice(listed), draft.rng.randrange(6)
    if how == 0:
        array[2][draft.rng.randrange(len(array[2]))] = draft.near(array[2][0])
    elif how == 1:
        array[draft.rng.randrange(3)] = draft.value()
    elif how == 2:
        array[1] = draft.rng.choice(["<f4", "<f8", "<i8", "|O", "<U4"])
    elif how == 3:
        array[2] = draft.rng.choice([[0, 10**30], [2**40, 2**40], [0] * 40, [2**62, 2], [array[2][0]], [1, *array[2]]])
    elif how == 4:
        listed.append(list(array))
    else:
        listed.reverse()
    text = json.dumps(listed).encode()
    draft.files[path] = bytearray(data[:PAGE] + struct.pack("<I", len(text)) + text + data[PAGE + 4 + size :])
    draft.touched.add(path)
    return f"{path}: {how}"


PLAIN: tuple[Change, ...] = (
    *(flip, flip, overwrite, number, resize, splice, splice, swap, swap),
    *(replace_file, exchange_files, stray, lock_file),
)
SEALED: tuple[Change, ...] = (
    *(*PLAIN, remove_file, edit, edit, edit, edit, arrange),
    *(index_kind, key_of_index, key_of_index, word_of_record, word_of_record, history_list),
    *(edit_list, edit_list, count_of_list, ids_of_list, resize_list),
)
UNFIT = (TypeError, KeyError, ValueError, IndexError, OverflowError, StopIteration, struct.error, RecursionError)


def changed(draft: Draft, change: Change) -> str:
    """Make a change, or none where an earlier one left nothing of the kind."""
    try:
        return f"{change.__name__}: {change(draft)}"
    except UNFIT as error:
        return f"{change.__name__}: {type(error).__name__}"


def _place(draft: Draft, path: str) -> int:
    """Choose a place in a file: not often in the zeros of its header."""
    size, rng = len(draft.files[path]), draft.rng
    if size <= PAGE:
        return rng.randrange(max(size, 1))
    return rng.choice(
        [rng.randrange(48), rng.randrange(PAGE - 4, PAGE), *(rng.randrange(PAGE, size) for _ in range(8))]
    )


def _entry(draft: Draft) -> tuple[str, dict[str, Any]]:
    """Choose a run of a manifest, and return its path and entry. ValueError where the manifest has become none."""
    _, body = draft.manifest()
    lists = [part.get(key) for part in _parts(body) for key in ("base", "delta")]
    entries = [entry for part in lists if isinstance(part, list) for entry in part if isinstance(entry, dict)]
    if not entries:
        raise ValueError("no runs are left")
    entry = draft.rng.choice(entries)
    draft.files[entry["file"]]
    draft.touched.add(entry["file"])
    return entry["file"], entry


def _records_end(draft: Draft, entry: dict[str, Any]) -> tuple[int, int]:
    """Return the size of a record and where the index begins, as a manifest says."""
    parts = [part for body in draft.bodies.values() for part in _parts(body)]
    width = next(
        part["record_bytes"] for part in parts if entry in (*(part.get("base") or ()), *(part.get("delta") or ()))
    )
    end = PAGE + entry["count"] * (width + 4)
    if not (0 < width <= LARGE and PAGE <= end <= len(draft.files[entry["file"]]) + LARGE):
        raise ValueError("sizes that are made up")
    return width, end


# ---------------------------------------------------------------- checksums that fit


def seal(draft: Draft) -> None:
    """Make the checksums right of all that was changed: those of records, indexes, headers, histories and manifests."""
    keeps = {name: draft.rng.random() < 0.1 for name in ("size", "name", "salt", "width", "crc")}
    for path in sorted(draft.files):
        if not (path.startswith("manifest/") and path.endswith(".json")):
            continue
        if path not in draft.bodies and not draft.touched - {path}:
            line = bytes(draft.files[path][:-66])
        else:
            try:
                body = draft.bodies.get(path) or json.loads(bytes(draft.files[path][:-66]))
                _seal_entries(draft, body, keeps)
                line = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()  # as a reader would
            except (ValueError, RecursionError):
                line = bytes(draft.files[path][:-66])
        draft.files[path] = bytearray(_sealed(line))
    for path in sorted(path for path in draft.files if path.startswith("changes/")):
        with contextlib.suppress(*UNFIT):
            _seal_list(draft, path, keeps["crc"])


def _sealed(line: bytes) -> bytes:
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def _seal_list(draft: Draft, path: str, keeps_crc: bool) -> None:
    """Make a list of changes name its manifests as they are now, so that the chain holds."""
    line, _, rest = bytes(draft.files[path]).partition(b"\n")
    body, ids = draft.bodies.get(path) or json.loads(line), rest[65:]
    for key, commit in (("manifest", "commit"), ("parent", "since")):
        data = draft.files.get(f"manifest/{body[commit]:010d}.json")
        if data and draft.rng.random() < 0.9:
            body[key] = bytes(data[-65:-1]).decode()
    if not keeps_crc:
        body["crc"] = zlib.crc32(ids)
    draft.files[path] = bytearray(_sealed(json.dumps(body).encode()) + ids)


def _seal_entries(draft: Draft, body: Any, keeps: dict[str, bool]) -> None:
    for part, key in itertools.product(_parts(body), ("base", "delta", "history")):
        entries = part.get(key) if isinstance(part, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("file"), str) and entry["file"] in draft.files:
                with contextlib.suppress(TypeError, ValueError, KeyError, OverflowError, struct.error):
                    _seal_file(draft, body, entry, 0 if key == "history" else part["record_bytes"], keeps)


def _seal_file(draft: Draft, body: dict[str, Any], entry: dict[str, Any], width: int, keeps: dict[str, bool]) -> None:
    data = draft.files[entry["file"]]
    if len(data) >= PAGE and not keeps["name"]:
        data[20:24] = struct.pack("<I", zlib.crc32(entry["file"].encode("utf-8", "replace")))
        data[24:40] = bytes.fromhex(body["uuid"])
    if len(data) >= PAGE and not keeps["width"]:
        data[12:20] = struct.pack("<2I", width, width + 4)
    if len(data) >= PAGE:
        data[4092:4096] = struct.pack("<I", zlib.crc32(data[:4092]))
    if not keeps["size"]:
        entry["size"] = len(data)
    if "crc" in entry:
        entry["crc"] = zlib.crc32(data)
        return
    salt = struct.unpack_from("<I", data, 4092)[0] if struct.unpack_from("<I", data, 8)[0] == 2 else None
    if "salt" in entry and not keeps["salt"]:
        entry["salt"] = salt
    count = min(entry["count"], 10_000)
    end = PAGE + count * (width + 4)
    ids = _ids(entry, bytes(data[end:]), count)
    for place in range(count):
        start = PAGE + place * (width + 4)
        record = bytes(data[start : start + width])
        if len(record) < width:
            break
        mark = 0 if salt is None else (salt + place * STEP) % 2**32
        data[start + width : start + width + 4] = struct.pack(
            "<I", zlib.crc32(record, zlib.crc32(struct.pack("<q", ids[place] if place < len(ids) else 0))) ^ mark
        )
    if not keeps["crc"]:
        entry["index_crc"] = zlib.crc32(data[end:])


def _ids(entry: dict[str, Any], index: bytes, count: int) -> list[int]:
    """Return the ids of records as a reader would understand them."""
    if entry["index"] == "ids":
        return np.frombuffer(index[: len(index) // 8 * 8], "<i8").tolist()
    if entry["index"] == "bits":
        bits = np.flatnonzero(np.unpackbits(np.frombuffer(index, np.uint8), bitorder="little"))
        return [entry["lo"] + bit for bit in bits.tolist()[:count] if -(2**63) <= entry["lo"] + bit < 2**63]
    return [row for row in range(entry["lo"], entry["lo"] + count) if -(2**63) <= row < 2**63]


# ---------------------------------------------------------------- cases


class Case(NamedTuple):
    """A table that was changed.

    Attributes:
        seed: from which it is made again.
        image: what it was.
        files: what it is.
        sealed: its checksums are right.
        notes: what was changed.
    """

    seed: int
    image: Image
    files: dict[str, bytes]
    sealed: bool
    notes: list[str]


def case_of(seed: int, sealed: bool) -> Case:
    """Return the case of a number."""
    rng = random.Random(2 * seed + sealed)
    image = rng.choice([image for image in images() if sealed or not image.name.startswith("version-1")])
    image = packed_image() if seed % 11 == 5 else image  # not one of `images`: other seeds stay the cases that they are
    draft = Draft(rng, {path: bytearray(data) for path, data in image.files.items()}, sealed)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change = rng.choice(SEALED if sealed else PLAIN)
        draft.notes.append(changed(draft, change))
    if sealed:
        seal(draft)
    return Case(seed, image, {path: bytes(data) for path, data in draft.files.items()}, sealed, draft.notes)
