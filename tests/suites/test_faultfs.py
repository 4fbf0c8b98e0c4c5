"""The file system that fails and crashes: it must be as pessimistic as it says, or the tests on it prove nothing."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from embedrock.io.vfs import OS_SYSTEM, System, create, open_file
from suites import FaultFS
from suites.faultfs import applies

CLONES = 300  # rounds of clones: enough that every outcome of a few coins occurs


@pytest.fixture
def system():
    system = FaultFS()
    system.mkdir("/t")
    system.fsync_folder("/")
    return system


def outcomes(system):
    """Return what may be found after a crash now: sets of (path, content)."""
    rng, found = np.random.default_rng(0), set()
    for _ in range(CLONES):
        found |= {frozenset(clone.files().items()) for clone in system.crash_clones(rng)}
    return found


def contents(system, path):
    """Return what that file may hold then; None where it may be missing."""
    return {dict(files).get(path) for files in outcomes(system)}


def test_no_call_reaches_the_real_system():
    calls = {name for name in vars(System) if name[0] != "_"}
    assert calls <= vars(FaultFS).keys()


class TestCrashes:
    def test_data_and_name_survive_apart(self, system):
        file = create(system, "/t/a")
        file.append(b"abc")
        assert {None, b"", b"abc"} <= contents(system, "/t/a")
        file.sync()
        assert contents(system, "/t/a") == {None, b"abc"}
        system.fsync_folder("/t")
        assert contents(system, "/t/a") == {b"abc"}

    def test_a_synced_name_of_unsynced_data(self, system):
        file = create(system, "/t/a")
        file.append(b"abc")
        system.fsync_folder("/t")
        found = contents(system, "/t/a")
        assert None not in found
        assert {b"", b"a", b"ab", b"abc", b"\0\0\0"} <= found

    def test_any_block_may_be_lost(self, system):
        file = create(system, "/t/a")
        file.append(b"x" * 1024)
        file.sync()
        system.fsync_folder("/t")
        file.append(b"y" * 1024)
        found = contents(system, "/t/a")
        assert {data and data[:1024] for data in found} == {b"x" * 1024}
        assert {b"", b"y" * 1024, bytes(512) + b"y" * 512, b"y" * 512} <= {data and data[1024:] for data in found}

    def test_files_are_reordered(self, system):
        first, second = create(system, "/t/a"), create(system, "/t/b")
        system.fsync_folder("/t")
        first.append(b"1")
        second.append(b"2")
        pairs = {(dict(files)["/t/a"], dict(files)["/t/b"]) for files in outcomes(system)}
        assert {(b"", b""), (b"1", b""), (b"", b"2"), (b"1", b"2")} <= pairs

    def test_links_and_removals_need_a_sync_of_the_folder(self, system):
        file = create(system, "/t/tmp")
        file.append(b"abc")
        file.sync()
        system.fsync_folder("/t")
        system.link("/t/tmp", "/t/a")
        system.unlink("/t/tmp")
        names = {frozenset(dict(files)) for files in outcomes(system)}
        assert names == {frozenset(), frozenset({"/t/tmp"}), frozenset({"/t/a"}), frozenset({"/t/a", "/t/tmp"})}
        system.fsync_folder("/t")
        assert outcomes(system) == {frozenset({("/t/a", b"abc")})}

    def test_changes_of_one_name_keep_their_order(self, system):
        create(system, "/t/a").close()
        system.unlink("/t/a")
        system.mkdir("/t/a")
        rng = np.random.default_rng(0)
        for _ in range(CLONES):
            for clone in system.crash_clones(rng):
                if clone.exists("/t/a") and "/t/a" not in clone.files():
                    assert clone.listdir("/t/a") == []

    def test_a_folder_takes_what_is_in_it_along(self, system):
        system.mkdir("/t/sub")
        file = create(system, "/t/sub/a")
        file.append(b"abc")
        file.sync()
        system.fsync_folder("/t/sub")
        assert contents(system, "/t/sub/a") == {None, b"abc"}
        system.fsync_folder("/t")
        assert contents(system, "/t/sub/a") == {b"abc"}

    def test_a_failed_sync_loses_data_for_good(self, system):
        file = create(system, "/t/a")
        system.fsync_folder("/t")
        file.append(b"abc")
        system.fail(system.ops, errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            system.fdatasync(file.fd)
        assert file.read(0, 3) == b"abc"
        file.append(b"def")
        system.fdatasync(file.fd)
        found = contents(system, "/t/a")
        assert {data and data[3:] for data in found} == {b"def"}
        assert {b"abcdef", b"\0\0\0def"} <= found

    def test_a_clone_is_a_file_system_of_its_own(self, system):
        file = create(system, "/t/a")
        file.append(b"abc")
        lock = system.lock("/t/LOCK", "me")
        kinds = []
        for clone in system.crash_clones(np.random.default_rng(0)):
            kinds.append(clone.kind)
            clone.close(clone.lock("/t/LOCK", "another"))
            clone.write_file("/t/a", b"changed")
            assert clone.ops == 2
            assert {data for path, data in clone.files().items() if path == "/t/a"} == {b"changed"}
        assert len(set(kinds)) == len(kinds) >= 8
        assert system.files()["/t/a"] == b"abc"
        system.close(lock)

    def test_the_same_numbers_give_the_same_clones(self, system):
        file = create(system, "/t/a")
        file.append(np.arange(5000, dtype=np.int64).data)
        first, second = ([c.files() for c in system.crash_clones(np.random.default_rng(7))] for _ in range(2))
        assert first == second

    def test_a_removed_file_can_be_read_while_it_is_open(self, system):
        file = create(system, "/t/a")
        file.append(b"abc")
        system.unlink("/t/a")
        assert file.read(0, 3) == b"abc"
        assert not system.exists("/t/a")


class TestFaults:
    def test_calls_are_counted_and_journalled(self, system):
        before = system.ops
        file = create(system, "/t/a")
        file.append(b"abc")
        system.exists("/t/b")
        file.close()
        assert system.journal[before:] == ["create /t/a", "pwrite /t/a", "exists /t/b", "close /t/a"]
        assert system.ops == before + 4

    def test_the_nth_call_fails_before_it_does_anything_or_after(self, system):
        for late in (False, True):
            system.fail(system.ops, errno.EIO, late)
            with pytest.raises(OSError, match="Input/output error: '/t/d'"):
                system.mkdir("/t/d")
            assert system.exists("/t/d") is late

    def test_a_fault_that_a_call_cannot_have_is_left_out(self, system):
        assert applies(errno.ENOSPC, "pwrite /t/a")
        assert not applies(errno.ENOSPC, "pread /t/a")
        assert applies("short", "pread /t/a")
        assert not applies("short", "link /t/a")
        assert applies(errno.EIO, "listdir /t")
        system.fail(system.ops, errno.ENOSPC)
        assert system.listdir("/t") == []

    def test_a_lock_that_failed_is_not_held(self, system):
        system.fail(system.ops, errno.EIO, late=True)
        with pytest.raises(OSError, match="Input/output error"):
            system.lock("/t/LOCK", "me")
        system.close(system.lock("/t/LOCK", "me"))

    def test_capacity(self, system):
        system.capacity = 1000
        file = create(system, "/t/a")
        assert system.pwrite(file.fd, memoryview(bytes(600)), 0) == 600
        assert system.free_bytes("/t") == 400
        assert system.pwrite(file.fd, memoryview(bytes(600)), 600) == 400
        assert system.pwrite(file.fd, memoryview(bytes(600)), 0) == 600
        with pytest.raises(OSError, match="No space left on device"):
            system.pwrite(file.fd, memoryview(b"x"), 1000)
        system.mend()
        assert system.pwrite(file.fd, memoryview(b"x"), 1000) == 1

    def test_hooks(self, system):
        seen = []
        system.before = lambda name, path: seen.append(("before", name, path))
        system.after = lambda name, path: seen.append(("after", name, path))
        create(system, "/t/a")
        system.exists("/t/a")
        assert seen[:3] == [("before", "create", "/t/a"), ("after", "create", "/t/a"), ("before", "close", "/t/a")]
        assert seen[3:] == [("before", "exists", "/t/a")]

    def test_a_closed_descriptor_is_noticed(self, system):
        file = create(system, "/t/a")
        fd = file.fd
        assert system.open_files() == ["/t/a"]
        file.close()
        assert system.open_files() == []
        for call in (lambda: system.pread(fd, 1, 0), lambda: system.close(fd), lambda: system.fdatasync(fd)):
            with pytest.raises(OSError, match="Bad file descriptor"):
                call()


class TestErrors:
    """Those of a real file system, so that what is written for one runs on the other."""

    @pytest.mark.parametrize(
        ("code", "call"),
        [
            (errno.ENOENT, lambda s, at: open_file(s, f"{at}/nothing")),
            (errno.ENOENT, lambda s, at: create(s, f"{at}/nothing/a")),
            (errno.ENOENT, lambda s, at: s.unlink(f"{at}/nothing")),
            (errno.ENOENT, lambda s, at: s.link(f"{at}/nothing", f"{at}/x")),
            (errno.ENOENT, lambda s, at: s.listdir(f"{at}/nothing")),
            (errno.ENOENT, lambda s, at: s.mkdir(f"{at}/nothing/a")),
            (errno.ENOENT, lambda s, at: s.rmdir(f"{at}/nothing")),
            (errno.ENOENT, lambda s, at: s.fsync_folder(f"{at}/nothing")),
            (errno.EEXIST, lambda s, at: create(s, f"{at}/file")),
            (errno.EEXIST, lambda s, at: s.mkdir(f"{at}/folder")),
            (errno.EEXIST, lambda s, at: s.mkdir(f"{at}/file")),
            (errno.EEXIST, lambda s, at: s.link(f"{at}/file", f"{at}/folder")),
            (errno.ENOTDIR, lambda s, at: s.listdir(f"{at}/file")),
            (errno.ENOTDIR, lambda s, at: open_file(s, f"{at}/file/a")),
            (errno.ENOTDIR, lambda s, at: s.fsync_folder(f"{at}/file")),
            (errno.ENOTDIR, lambda s, at: s.rmdir(f"{at}/file")),
            (errno.EISDIR, lambda s, at: s.unlink(f"{at}/folder")),
            (errno.ENOTEMPTY, lambda s, at: s.rmdir(f"{at}/full")),
        ],
    )
    def test_as_the_real_ones(self, place, code, call):
        system, folder = place
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            call(system, folder)
        assert caught.value.errno == code

    def test_exists(self, place):
        system, folder = place
        names = ("", "/file", "/folder", "/nothing", "/file/a", "/nothing/a", "/full/a")
        assert [system.exists(folder + name) for name in names] == [True, True, True, False, False, False, True]

    @pytest.fixture(params=["os", "memory"])
    def place(self, request, tmp_path):
        system, folder = (OS_SYSTEM, str(tmp_path)) if request.param == "os" else (FaultFS(), "/t")
        if request.param == "memory":
            system.mkdir(folder)
        for name in ("folder", "full"):
            system.mkdir(f"{folder}/{name}")
        for name in ("file", "full/a"):
            create(system, f"{folder}/{name}").close()
        return system, folder
