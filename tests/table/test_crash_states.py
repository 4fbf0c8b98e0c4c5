"""Recorded system calls of real tables, and every state that a loss of power may leave of them: no commit is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash_states import KINDS, explore_life, main, recorded_life
from embedrock.errors import EmbedrockError
from embedrock.io.vfs import File
from embedrock.store.publishing import FolderKind
from embedrock.store.record_store import CommitSnapshot
from recorded_calls import Recorder
from slow import slow

ACTS = 14
LIVES = 9  # of each kind, when there is time


def explore(seed: int, kind: str, states: int, tmp_path: Path) -> int:
    return explore_life(recorded_life(seed, kind, ACTS), states, tmp_path / "life")


FEW = "come and go", "group"  # what others have is in one of these, too


@pytest.mark.parametrize("kind", [*FEW, *slow(*(kind for kind in KINDS if kind not in FEW))])
def test_a_crash_loses_nothing(kind: str, tmp_path: Path):
    states = explore(0, kind, 50, tmp_path)
    print(f"crash states: {states:,}, bad: 0")
    assert states > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 1 + LIVES))
@pytest.mark.parametrize("kind", KINDS)
def test_no_crash_of_many_lives_loses_anything(kind: str, seed: int, tmp_path: Path):
    states = explore(seed, kind, 1100, tmp_path)
    print(f"crash states: {states:,}, bad: 0")
    assert states > 500


# ---------------------------------------------------------------- a checker that finds nothing proves nothing


def sync_no(end: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Leave out the sync of files whose path ends so."""
    sync = File.sync
    return lambda patch: patch.setattr(File, "sync", lambda self: None if self.path.endswith(end) else sync(self))


def sync_no_folder(end: str) -> Callable[[pytest.MonkeyPatch], None]:
    sync = Recorder.fsync_folder

    def left_out(self: Recorder, path: str) -> None:
        if not path.endswith(end):
            sync(self, path)

    return lambda patch: patch.setattr(Recorder, "fsync_folder", left_out)


def publish_first(patch: pytest.MonkeyPatch) -> None:
    """Sync the logs of a commit when its manifest is there."""
    late, sync, publish = list[File](), File.sync, FolderKind.publish

    def publish_then_sync(*args):
        publish(*args)
        while late:
            sync(late.pop())

    patch.setattr(File, "sync", lambda self: late.append(self) if self.path.endswith(".dlt") else sync(self))
    patch.setattr(FolderKind, "publish", publish_then_sync)


def lose_an_id(patch: pytest.MonkeyPatch) -> None:
    """Leave the first id out of each list of changes."""
    changed = CommitSnapshot.changed

    def lost(self: CommitSnapshot) -> Any:
        ids = changed(self)
        return ids if ids is None else ids[1:]

    patch.setattr(CommitSnapshot, "changed", lost)


PLANTED = {
    "no fdatasync of logs": sync_no(".dlt"),
    "no fdatasync of chunks": sync_no(".rows"),
    "no fdatasync of manifests": sync_no(".tmp"),
    "no fsync of the folder of logs": sync_no_folder("/delta"),
    "no fsync of the folder of manifests": sync_no_folder("/manifest"),
    "no fsync of the folder of bases": sync_no_folder("/base"),
    "manifests before their logs": publish_first,
    "lists of changes that lack an id": lose_an_id,
}


@pytest.mark.parametrize(
    "planted", ["no fdatasync of logs", *slow(*(name for name in PLANTED if name != "no fdatasync of logs"))]
)
def test_what_is_wrong_is_found(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        PLANTED[planted](patch)
        life = recorded_life(3, "adam", ACTS)
    with pytest.raises((AssertionError, EmbedrockError)) as found:
        explore_life(life, 400, tmp_path / "life")
    again = found.value.__notes__[-1].split()
    with pytest.raises(type(found.value)):  # by the command that was printed
        main(*again[-2:])
