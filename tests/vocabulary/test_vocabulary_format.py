"""A vocabulary's files are what docs/format.md says: a golden one, a reader that knows only that page, and forgers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import CorruptTableError, EmbedrockError, NewerFormatError
from embedrock.io.vfs import OS_SYSTEM
from embedrock.store import publishing
from embedrock.vocabulary import blocks, files, runs
from golden.make_vocabulary import FOLDER, WITH_SHAPES, WITH_STEPS, WORDS
from vocabulary_reader import read_vocabulary


@pytest.mark.parametrize("folder", [FOLDER, WITH_SHAPES], ids=["1", "3"])
def test_the_golden_one_is_read(folder: Path):
    manifest, strings = read_vocabulary(folder)
    assert [string.decode() for string in strings] == WORDS
    assert len(manifest["runs"]) == 2
    with er.Vocabulary(folder, "1KiB", mode="r") as vocabulary:
        assert vocabulary.lookup(WORDS).tolist() == list(range(len(WORDS)))
    with er.Vocabulary(folder, mode="r") as vocabulary:
        assert vocabulary.lookup([*WORDS, "", "word", "xx"]).tolist() == [*range(len(WORDS)), 0, -1, -1]
        assert vocabulary.strings(np.arange(len(WORDS))).tolist() == WORDS
        vocabulary.verify()


def test_the_golden_one_goes_on(tmp_path: Path):
    shutil.copytree(FOLDER, tmp_path / "v")
    with er.Vocabulary(tmp_path / "v") as vocabulary:
        assert vocabulary.add([*WORDS, "new"]).tolist() == list(range(len(WORDS) + 1))
        assert vocabulary.commit() == 2
    assert [string.decode() for string in read_vocabulary(tmp_path / "v")[1]] == [*WORDS, "new"]


def test_what_is_written_is_read_by_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocks, "PIECE_PAGES", 2)
    monkeypatch.setattr(runs, "LOOKED_UP_PAGES", 2)
    words = [f"{'long ' * (k % 7) * 50}{k}" for k in range(400)]
    with er.Vocabulary(tmp_path / "v", memory="64KiB") as vocabulary:
        for k in range(0, 400, 50):
            vocabulary.add(words[k : k + 50])
            vocabulary.commit()
        vocabulary.compact()
    assert [string.decode() for string in read_vocabulary(tmp_path / "v")[1]] == words


def forged(folder: Path, change: Callable[[dict[str, Any]], object], commit: int = 1) -> None:
    """Change a manifest, with a checksum that fits."""
    path = folder / "vocabulary" / f"{commit:010d}.json"
    body = json.loads(path.read_bytes().split(b"\n")[0])
    change(body)
    path.write_bytes(publishing.to_bytes(body))


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "count": lambda body: body.update(count=body["count"] + 1),
    "salt": lambda body: body.update(salt=[1]),
    "no salt": lambda body: body.update(salt=["a", 1]),
    "key": lambda body: body.update(more=1),
    "uuid": lambda body: body.update(uuid="0" * 32),
    "commit": lambda body: body.update(commit=2),
    "order": lambda body: body.update(runs=body["runs"][::-1]),
    "file": lambda body: body["runs"][0].update(file="runs/../../x"),
    "size": lambda body: body["runs"][0].update(size=4096),
    "pages": lambda body: body["runs"][1].update(string_pages=body["runs"][1]["string_pages"] - 1),
    "hash pages": lambda body: body["runs"][1].update(
        string_pages=body["runs"][1]["string_pages"] - 1, hash_pages=body["runs"][1]["hash_pages"] + 1
    ),
    "blocks": lambda body: body["runs"][1].update(hash_blocks=body["runs"][1]["hash_blocks"] - 1),
    "many blocks": lambda body: body["runs"][1].update(hash_blocks=2**38),
    "strings": lambda body: (
        body["runs"][1].update(count=body["runs"][1]["count"] - 1),
        body.update(count=body["count"] - 1),
    ),
    "first": lambda body: body["runs"][1].update(first=0),
    "twice": lambda body: body.update(runs=[*body["runs"], {**body["runs"][0], "first": body["count"]}]),
}


SHAPES: dict[str, dict[str, object]] = {
    "few symbols": {"symbols": f"{'0' * 62}80"},
    "no symbols": {"symbols": "0" * 63},
    "short": {"longest": 8191},
    "few bytes": {"text_bytes": 9000},
    "longer than all": {"longest": 9000, "text_bytes": 8999},
    "too many bytes": {"text_bytes": 2**60},
}


@pytest.mark.parametrize("name", [*FORGERIES, *SHAPES])
def test_a_forged_manifest(name: str, tmp_path: Path):
    shutil.copytree(WITH_SHAPES if name in SHAPES else FOLDER, tmp_path / "v")
    forged(tmp_path / "v", FORGERIES.get(name) or (lambda body: body["runs"][0].update(SHAPES[name])))
    with (
        pytest.raises(CorruptTableError, match=r"is damaged: expected") as error,
        er.Vocabulary(tmp_path / "v", mode="r", memory="1KiB") as vocabulary,
    ):
        vocabulary.verify()
    assert str(tmp_path / "v") in str(error.value)
    if name in SHAPES:  # which are needed where strings are packed into RAM
        with (
            pytest.raises(CorruptTableError, match=r"is damaged: expected"),
            er.Vocabulary(tmp_path / "v", mode="r") as vocabulary,
        ):
            vocabulary.lookup(WORDS)


def test_another_salt_is_noticed_where_all_is_read(tmp_path: Path):
    shutil.copytree(FOLDER, tmp_path / "v")
    forged(tmp_path / "v", lambda body: body.update(salt=[1, 2]))
    with er.Vocabulary(tmp_path / "v", mode="r") as vocabulary, pytest.raises(CorruptTableError):
        vocabulary.verify()


def test_a_newer_format(tmp_path: Path):
    shutil.copytree(FOLDER, tmp_path / "v")
    forged(tmp_path / "v", lambda body: body.update(format=4))
    with pytest.raises(NewerFormatError, match="is of format 4: this release reads formats up to 3"):
        er.Vocabulary(tmp_path / "v")


def test_the_golden_one_with_steps_is_read(tmp_path: Path):
    manifest, strings = read_vocabulary(WITH_STEPS)
    assert [string.decode() for string in strings] == WORDS[:11]
    assert (manifest["format"], manifest["steps"]) == (2, [[0, 1], [10, 6], [20, 11]])
    for step, count in manifest["steps"]:
        with er.Vocabulary(WITH_STEPS, mode="r", step=step) as vocabulary:
            assert vocabulary.lookup(WORDS[:12]).tolist() == [*range(count), *[-1] * (12 - count)]
            assert vocabulary.strings(np.arange(len(vocabulary))).tolist() == WORDS[:count]
    for steps in ([], [[0, 1], [0, 2]], [[0, 2], [1, 1]], [[0, 12]], [[0, -1]], [[0]], [["a", 1]], [[2**63, 1]]):
        shutil.copytree(WITH_STEPS, tmp_path / "v", dirs_exist_ok=True)
        forged(tmp_path / "v", lambda body, steps=steps: body.update(steps=steps), 3)
        with pytest.raises(CorruptTableError, match="is damaged: expected `steps` that ascend, each with up to 11"):
            er.Vocabulary(tmp_path / "v")


@pytest.mark.parametrize("seed", range(3))
def test_forged_pages_break_nothing(seed: int, tmp_path: Path):
    """Pages changed at random, with seals that fit: an error, or strings and ids that are wrong, and nothing else."""
    rng, folder = np.random.default_rng(seed), tmp_path / "v"
    shutil.copytree(FOLDER, folder)
    manifest, _ = read_vocabulary(FOLDER)
    for k in range(60):
        entry = manifest["runs"][k % 2]
        path = folder / entry["file"]
        good = path.read_bytes()
        stored = np.frombuffer(good, np.uint8)[4096:].reshape(-1, 4096).copy()
        page = int(rng.integers(0, len(stored)))
        words = stored[page, :4092].view("<u4")
        for _ in range(int(rng.integers(1, 4))):
            place = rng.integers(0, (8, 1023)[int(rng.integers(0, 2))])
            words[place] = rng.choice([0, 1, 2**31, 2**32 - 1, int(words[place]) + 1, rng.integers(0, 2**32)]) % 2**32
        stored[page] = sealed(stored[page, :4092], page, entry["salt"])
        path.write_bytes(good[:4096] + stored.tobytes())
        for memory in ("1KiB", "1GiB"):
            try:
                with er.Vocabulary(folder, memory, mode="r") as vocabulary:
                    ids = vocabulary.lookup(WORDS)
                    assert ids.max() < len(vocabulary)
                    vocabulary.strings(np.arange(len(WORDS)), bytes)
                    vocabulary.verify()
            except EmbedrockError as error:
                assert str(folder) in str(error)  # noqa: PT017
        path.write_bytes(good)


def sealed(payload: np.ndarray, number: int, salt: int) -> np.ndarray:
    import reference

    out = np.empty((1, 4096), np.uint8)
    reference.storage.seal(payload[None], np.zeros(1, np.int64), np.array([number]), out)
    reference.storage.stamp(out, salt, number)
    return out[0]


def test_strangers_in_the_folder_stay_and_orphans_go(tmp_path: Path):
    folder = tmp_path / "v"
    shutil.copytree(FOLDER, folder)
    uuid = read_vocabulary(FOLDER)[0]["uuid"]
    own, strange = folder / "runs" / f"0000000009-{uuid[:8]}-1.voc", folder / "runs" / "0000000009-00000000-1.voc"
    for path in (own, strange, folder / "runs" / "notes.txt", folder / "vocabulary" / ".0000000002.tmp"):
        path.write_bytes(b"torn")
    er.Vocabulary(folder, mode="r").close()
    assert own.exists()  # a reader changes nothing
    er.Vocabulary(folder).close()
    left = {path.name for path in (folder / "runs").iterdir()}
    assert own.name not in left
    assert {strange.name, "notes.txt"} < left
    assert [path.name for path in (folder / "vocabulary").iterdir()] == ["0000000001.json"]


def test_a_damaged_newest_commit_is_told(tmp_path: Path):
    shutil.copytree(FOLDER, tmp_path / "v")
    (tmp_path / "v" / "vocabulary" / "0000000001.json").write_bytes(b"{}")
    for mode in ("r", "w"):
        with pytest.raises(CorruptTableError, match=r"0000000001\.json is damaged"):
            er.Vocabulary(tmp_path / "v", mode=mode)


def test_a_run_that_is_missing(tmp_path: Path):
    shutil.copytree(FOLDER, tmp_path / "v")
    next((tmp_path / "v" / "runs").iterdir()).unlink()
    with pytest.raises(CorruptTableError, match=r"\.voc is missing: the commit needs its"):
        er.Vocabulary(tmp_path / "v")


def test_constants():
    assert (runs.MOST_KEY, blocks.PAGE_BYTES) == (2**63 - 1, 4092)
    assert files.holds_vocabulary(OS_SYSTEM, str(FOLDER))
