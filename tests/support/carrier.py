"""`Run`: a trainer that publishes, in RAM. `Carrier`: carries files of published folders as badly as copiers may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import embedrock as er
from embedrock.serving.publisher import PublishOptions, publish_commits
from embedrock.serving.sources import opened_commit
from embedrock.store.manifest import PUBLISHED
from on_system import on
from suites.faultfs import FaultFS

SOURCE, COPY = "/served", "/copy"


@dataclass
class PublishedStep:
    """What a subscriber must show of a step, and the files of the folder once it was published."""

    number: int
    chain: str
    rows: dict[str, tuple[np.ndarray, np.ndarray]]
    dense: dict[str, np.ndarray]
    files: dict[str, bytes]
    needed: frozenset[str]


class Run:
    """A trainer of three tables, which publishes in a file system in RAM.

    Attributes:
        steps: what it published.
    """

    def __init__(self, system: FaultFS, seed: int, path: str = "/run") -> None:
        self.system, self.path, self.rng = system, path, np.random.default_rng(seed)
        self.group = on(system).Group(path=path, memory="4MiB")
        self.group.table("users", 300, 4, rule=er.Adam(lr=0.1), seed=1)
        self.group.table("items", 200, 4, rule=er.Adam(lr=0.1), seed=2)
        self.group.table("words", None, 3, rule=er.SGD(lr=0.1), seed=3)
        self.steps = list[PublishedStep]()
        self.dense = {"weight": np.zeros(5, np.float32)}

    def train(self, count: int, is_dense: bool = True) -> None:
        ids = {"users": self.rng.integers(0, 300, count), "items": self.rng.integers(0, 200, count)}
        ids["words"] = self.rng.integers(-40, 40, count) * 2**50
        self.group.update(ids, {name: self.rng.normal(size=(count, self.group[name].dim)) for name in ids})
        if is_dense:
            self.dense = {"weight": self.rng.normal(size=5).astype(np.float32)}

    def forget(self, count: int) -> None:
        for name in self.group:
            self.group[name].forget(self.group[name].export()[0][:count])

    def publish(self, keep_hours: float = 6.0, folder: str = SOURCE) -> PublishedStep:
        self.group.commit()
        options = PublishOptions(dense=self.dense, keep_hours=keep_hours, system=self.system)
        with opened_commit(self.path, None, self.system) as commit:
            made = publish_commits([(commit, {name: name for name in self.group})], folder, options)
        self.steps.append(self.step(made.number, folder))
        return self.steps[-1]

    def step(self, number: int, folder: str = SOURCE) -> PublishedStep:
        manifest = PUBLISHED.read(self.system, folder, number)
        start = f"{folder}/"
        files = {path[len(start) :]: data for path, data in self.system.files().items() if path.startswith(start)}
        rows = {name: self.group[name].export() for name in self.group}
        needed = frozenset((*manifest.files, PUBLISHED.path_of("", number)[1:]))
        assert needed <= files.keys()
        return PublishedStep(number, manifest.published.chain, rows, dict(self.dense), files, needed)


def differences(step: Any, expected: PublishedStep) -> list[str]:
    """Return in what a `ServedStep` differs from what was published."""
    found = [] if set(step) == set(expected.rows) else ["names"]
    for name, (ids, rows) in expected.rows.items():
        got_ids, got = step[name].export()
        found += [] if np.array_equal(got_ids, ids) and np.array_equal(got, rows) else [name]
    is_dense_same = step.dense.keys() == expected.dense.keys() and all(
        np.array_equal(step.dense[name], array) for name, array in expected.dense.items()
    )
    return found + ["dense"] * (not is_dense_same)


def _with_hole(data: bytes, rng: np.random.Generator) -> bytes:
    """Return a file whose space was taken first, and of which some part has not arrived."""
    head = 4096 if len(data) > 4096 and rng.random() < 0.5 else 0  # of a file of records
    first, end = sorted(rng.integers(head, len(data) + 1, size=2).tolist())
    return data[:first] + bytes(end - first) + data[end:]


class Carrier:
    """A copier between two folders, of which the second is in a file system of its own.

    Args:
        steps: published steps, the oldest first. The folder has the files of one of them.
        rng: draws what happens.
    """

    def __init__(self, steps: list[PublishedStep], rng: np.random.Generator) -> None:
        self.steps, self.rng, self.system = steps, rng, FaultFS()
        self.at, self.made = 0, set[str]()
        self.system.mkdir(COPY)

    def _draw(self, items: Any) -> Any:
        items = sorted(items)
        return items[int(self.rng.integers(len(items)))]

    def _put(self, name: str, data: bytes | None) -> None:
        parts = name.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            if folder not in self.made:
                self.system.mkdir(f"{COPY}/{folder}")
                self.made.add(folder)
        self.system.write_file(f"{COPY}/{name}", data)

    def files(self) -> dict[str, bytes]:
        return {path[len(COPY) + 1 :]: data for path, data in self.system.files().items()}

    def act(self) -> str:  # noqa: C901  # a list of cases
        """Do one thing that a copier or the publisher may do; return its name."""
        kind = self.rng.choice(
            ["publish", "whole", "whole", "whole", "step", "holes", "half", "zeros", "again", "delete", "stale"]
        )
        source, there = self.steps[self.at].files, self.files()
        missing = {name for name in source if there.get(name) != source[name]}
        if kind == "publish":
            self.at = min(self.at + 1, len(self.steps) - 1)
        elif kind in ("step", "holes"):  # all files of the newest step, in any order
            names = self.rng.permutation(sorted(self.steps[self.at].needed & missing)).tolist()
            for name in names:
                self._put(name, source[name])
            if kind == "holes" and names:
                self._put(names[0], _with_hole(source[names[0]], self.rng))
        elif kind == "whole" and missing:
            name = self._draw(missing)
            self._put(name, source[name])
        elif kind == "half" and missing:  # so it is, too, where the disk is full
            name = self._draw(missing)
            self._put(name, source[name][: int(self.rng.integers(len(source[name]) + 1))])
        elif kind == "zeros" and missing:
            name = self._draw(missing)
            self._put(name, _with_hole(source[name], self.rng))
        elif kind == "again":
            name = self._draw(source)
            self._put(name, source[name][: int(self.rng.integers(len(source[name]) + 1))])
            if self.rng.random() < 0.8:
                self._put(name, source[name])
        elif kind == "delete":
            for name in [name for name in there if name not in source]:
                if self.rng.random() < 0.5:
                    self._put(name, None)
        elif kind == "stale":  # a list of files that is not the newest
            old = self.steps[int(self.rng.integers(self.at + 1))].files
            name = self._draw(old)
            self._put(name, old[name])
        return str(kind)

    def finish(self) -> None:
        """Deliver all files of the last step's folder."""
        self.at, source = len(self.steps) - 1, self.steps[-1].files
        deletes = self.rng.random() < 0.5
        for name in [name for name in self.files() if deletes and name not in source]:
            self._put(name, None)
        for name in self.rng.permutation(sorted(source)).tolist():
            self._put(name, source[name])

    def damage(self) -> str:
        """Change one byte of a file that the last step needs; return the file's name."""
        name = self._draw(self.steps[-1].needed)
        data = bytearray(self.steps[-1].files[name])
        data[int(self.rng.integers(len(data)))] ^= 1 << int(self.rng.integers(8))
        self._put(name, bytes(data))
        return name
