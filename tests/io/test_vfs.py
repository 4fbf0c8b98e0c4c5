"""Files that only grow, on the real system and on one that fails."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from embedrock import kernels
from embedrock.errors import ArgumentError, CorruptTableError
from embedrock.io import readers, vfs
from embedrock.io.readers import LinuxReader, Readers, ThreadReader
from embedrock.io.vfs import (
    BLOCK,
    NO_SPACE,
    OS_SYSTEM,
    System,
    create,
    open_file,
    read_whole,
    write_whole,
)
from embedrock.system.arena import returned
from suites import FaultFS

pytestmark = pytest.mark.usefixtures("small_heap")


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def aligned(size):
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


@pytest.fixture(params=["os", "memory"])
def place(request, tmp_path):
    """A system and a folder in it."""
    if request.param == "os":
        return OS_SYSTEM, str(tmp_path)
    system = FaultFS()
    system.mkdir("/t")
    return system, "/t"


@pytest.fixture(params=["by Linux", "by threads"])
def reads(request, monkeypatch):
    """Make so many reads at once from now on, in either way."""

    def start(count):
        made = Readers()
        made._threads, made._linux = ThreadReader(count), LinuxReader(max(count, 1))
        if request.param == "by threads":
            made._linux.works = False
        elif not made._linux.works or made._linux._context() is None:
            pytest.skip("no asynchronous reads here")
        monkeypatch.setattr(readers, "READERS", made)
        return made

    return start


def open_descriptors():
    """Return those of temporary files: what other threads have, as sockets and pipes, comes and goes."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(tempfile.gettempdir()):
                found.add(number)
    return found


class TestFile:
    def test_append_and_read(self, place):
        system, folder = place
        file = create(system, f"{folder}/a")
        assert [file.append(data) for data in (b"", b"abc", bytearray(b"defg"), memoryview(b"hi"))] == [0, 0, 3, 7]
        assert (file.size, file.read(0, 9), file.read(2, 3), file.read(9, 0)) == (9, b"abcdefghi", b"cde", b"")
        file.sync()
        file.close()
        file.close()
        again = open_file(system, f"{folder}/a")
        assert (again.size, again.read(0, 9)) == (9, b"abcdefghi")
        again.close()

    def test_create_refuses_an_existing_file(self, place):
        system, folder = place
        create(system, f"{folder}/a").close()
        with pytest.raises(FileExistsError):
            create(system, f"{folder}/a")

    def test_truncated(self, place):
        system, folder = place
        file = create(system, f"{folder}/a")
        file.append(b"abc")
        with pytest.raises(CorruptTableError, match=r"a is truncated: 5 bytes were expected at 1, and 2 are there\. "):
            file.read(1, 5)

    def test_a_missing_file(self, place):
        system, folder = place
        with pytest.raises(FileNotFoundError, match="nothing"):
            open_file(system, f"{folder}/nothing")

    def test_is_closed_when_nobody_has_it(self, place):
        system, folder = place
        if system is OS_SYSTEM:
            before = open_descriptors()
            create(system, f"{folder}/a")
            gc.collect()
            assert open_descriptors() == before
        else:
            create(system, f"{folder}/a")
            gc.collect()
            assert system.journal[-1] == f"close {folder}/a"

    def test_direct_reads(self, tmp_path):
        data, path = random_bytes(3 * BLOCK + 77), f"{tmp_path}/a"
        with open(path, "wb") as target:
            target.write(data.tobytes())
        file = open_file(OS_SYSTEM, path, direct=True)
        for offset, size in ((0, len(data)), (1, 5), (BLOCK - 1, 2), (3 * BLOCK, 77), (5, 2 * BLOCK), (7, 0)):
            assert file.read(offset, size) == data[offset : offset + size].tobytes()
        with pytest.raises(CorruptTableError, match="78 bytes were expected at 12288, and 77 are there"):
            file.read(3 * BLOCK, 78)
        file.close()

    def test_a_large_file_is_read_directly(self, place, monkeypatch):
        monkeypatch.setattr(vfs, "DIRECT_BYTES", 5 * BLOCK)
        system, folder = place
        file, data = create(system, f"{folder}/a"), random_bytes(9 * BLOCK + 5)
        file.append(data[:BLOCK].data)
        first = file.fd
        file.append(data[BLOCK : 6 * BLOCK].data)
        assert file.fd != first
        file.append(data[6 * BLOCK :].data)
        file.sync()
        out = aligned(10 * BLOCK)
        fds, starts = np.array([first, file.fd]), np.array([0, BLOCK])
        system.read_many(fds, starts, np.array([BLOCK, 9 * BLOCK]), out, starts)
        np.testing.assert_array_equal(out[: len(data)], data)
        assert file.read(0, len(data)) == data.tobytes()
        file.close()


class DirectWrites:
    """Descriptors that were opened for direct writes, as some file system has them.

    Attributes:
        kind: "real", as the one where the test runs; "taken"; "short", where writes end early; "no open" and
            "no write", where they are refused; "none", on a system without.
        fault: number of an error, raised by direct writes.
        written: bytes that went by them.
    """

    KINDS = ("real", "taken", "short", "no open", "no write", "none")

    def __init__(self, patch: pytest.MonkeyPatch, kind: str) -> None:
        self.kind, self.fault, self.written = kind, 0, 0
        self._fds: set[int] = set()
        self._open, self._pwrite, self._close = os.open, os.pwrite, os.close
        patch.setattr(vfs, "DIRECT_WRITE_BYTES", BLOCK)
        patch.setattr(vfs, "BOUNCE_BYTES", 2 * BLOCK)
        patch.setattr(vfs, "DIRECT_BYTES", 7 * BLOCK)
        if kind == "none":
            patch.setattr(vfs, "O_DIRECT", 0)
        elif kind != "real":
            for name in ("open", "pwrite", "close"):
                patch.setattr(os, name, getattr(self, name))

    def open(self, path: str, flags: int, *args: Any) -> int:
        if not vfs.O_DIRECT or not flags & vfs.O_DIRECT or not flags & os.O_WRONLY:
            return self._open(path, flags, *args)
        if self.kind == "no open":
            raise OSError(errno.EINVAL, "no direct writes here", path)
        fd = self._open(path, flags & ~vfs.O_DIRECT, *args)
        self._fds.add(fd)
        return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if fd not in self._fds:
            return self._pwrite(fd, data, offset)
        if self.kind == "no write" or self.fault:
            raise OSError(self.fault or errno.EINVAL, "no direct write")
        assert offset % BLOCK == 0
        assert len(data) % BLOCK == 0
        assert np.frombuffer(data, np.uint8).ctypes.data % BLOCK == 0
        size = len(data) if self.kind == "taken" else max(1, len(data) * 2 // 3)
        self.written += size
        return self._pwrite(fd, data[:size], offset)

    def close(self, fd: int) -> None:
        self._fds.discard(fd)
        self._close(fd)


def unaligned(data):
    memory = returned(len(data) + 1, np.uint8, "a test")[1:]
    memory[:] = np.frombuffer(data, np.uint8)
    return memory.data


def on_blocks(data):
    memory = returned(len(data), np.uint8, "a test")
    memory[:] = np.frombuffer(data, np.uint8)
    return memory.data


def read_all(system, file):
    """Read all of a file by `read_many`."""
    size = -(-file.size // BLOCK) * BLOCK
    out, starts = returned(size + BLOCK, np.uint8, "a test"), np.arange(0, size, BLOCK)
    system.read_many(np.full(len(starts), file.fd), starts, np.full(len(starts), BLOCK), out, starts)
    assert not out[file.size : size].any()
    return out[: file.size].tobytes()


MEMORIES = {"aligned": on_blocks, "unaligned": unaligned, "bytes": bytes, "bytearray": bytearray, "view": memoryview}
PIECE_SIZES = st.integers(0, 6).map(lambda blocks: blocks * BLOCK) | st.integers(0, 6 * BLOCK)
PIECES = st.lists(st.tuples(PIECE_SIZES, st.sampled_from(sorted(MEMORIES)), st.booleans()), max_size=6)


class TestDirectWrites:
    """Large appends go past the page cache, where they can."""

    @pytest.fixture
    def direct(self, monkeypatch):
        if not vfs.O_DIRECT:
            pytest.skip("there are no direct writes on this system")
        return DirectWrites(monkeypatch, "taken")

    @pytest.mark.parametrize("kind", DirectWrites.KINDS)
    @given(pieces=PIECES)
    def test_a_file_has_what_was_appended(self, kind, pieces):
        before = open_descriptors()
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            DirectWrites(patch, kind)
            system, data = System(), random_bytes(sum(size for size, _, _ in pieces), len(pieces)).tobytes()
            file = create(system, f"{folder}/a")
            ends = list(accumulate(size for size, _, _ in pieces))
            for end, (size, memory, synced) in zip(ends, pieces, strict=True):
                assert file.append(MEMORIES[memory](data[end - size : end])) == end - size
                assert file.size == system.size(file.fd) == end
                if synced:
                    file.sync()
                assert file.read(0, end) == read_all(system, file) == data[:end]
            file.sync()
            assert file.read(0, len(data)) == read_all(system, file) == data
            file.close()
            with open(f"{folder}/a", "rb") as found:
                assert found.read() == data
        assert open_descriptors() == before

    def test_large_appends_are_direct(self, direct, tmp_path):
        file = create(System(), f"{tmp_path}/a")
        file.append(random_bytes(BLOCK - 1).data)
        assert direct.written == 0
        file.append(random_bytes(5 * BLOCK).data)  # one byte, whole blocks, and the rest
        assert direct.written == 4 * BLOCK
        file.append(on_blocks(bytes(3 * BLOCK + 5)))  # likewise, from memory that is aligned no more then
        assert direct.written == 7 * BLOCK

    def test_a_real_one_is_direct_where_the_file_system_takes_it(self, monkeypatch, tmp_path):
        DirectWrites(monkeypatch, "real")
        try:
            os.close(os.open(tmp_path / "b", os.O_WRONLY | os.O_CREAT | vfs.O_DIRECT))
        except OSError:
            pytest.skip("this file system takes no direct writes")
        system = System()
        file = create(system, f"{tmp_path}/a")
        file.append(bytes(3 * BLOCK))
        assert fcntl.fcntl(system._writers[file.fd], fcntl.F_GETFL) & vfs.O_DIRECT

    @pytest.mark.parametrize("other", [None, b"of another file"], ids=["moved", "replaced"])
    def test_the_right_file_is_written(self, direct, tmp_path, other):
        file, data = create(System(), f"{tmp_path}/a"), random_bytes(6 * BLOCK + 7).tobytes()
        file.append(data[:100])
        os.rename(tmp_path / "a", tmp_path / "b")
        if other is not None:
            (tmp_path / "a").write_bytes(other)
        before = open_descriptors()
        file.append(data[100 : 4 * BLOCK])
        assert open_descriptors() == before
        file.append(data[4 * BLOCK :])
        file.sync()
        assert file.read(0, len(data)) == (tmp_path / "b").read_bytes() == data
        assert direct.written == 0
        assert (tmp_path / "a").exists() == (other is not None)
        assert other is None or (tmp_path / "a").read_bytes() == other

    def test_refused_writes_go_another_way(self, direct, tmp_path):
        file, data = create(System(), f"{tmp_path}/a"), random_bytes(12 * BLOCK).tobytes()
        before = open_descriptors()
        file.append(data[: 3 * BLOCK])
        assert (direct.written, len(open_descriptors() - before)) == (3 * BLOCK, 1)
        direct.kind = "no write"
        file.append(data[3 * BLOCK : 6 * BLOCK])
        assert open_descriptors() == before
        direct.kind = "taken"  # nobody asks again
        file.append(data[6 * BLOCK :])
        file.sync()
        assert (direct.written, open_descriptors() >= before) == (3 * BLOCK, True)
        assert file.read(0, len(data)) == (tmp_path / "a").read_bytes() == data

    @pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
    @pytest.mark.parametrize("start", [0, 100, BLOCK])
    def test_errors_are_raised_and_change_nothing(self, direct, tmp_path, fault, start):
        file, data = create(System(), f"{tmp_path}/a"), random_bytes(6 * BLOCK).tobytes()
        file.append(data[:start])
        direct.fault = fault
        with pytest.raises(OSError, match=os.strerror(fault)) as caught:
            file.append(data[start:])
        assert (caught.value.errno, caught.value.filename, file.size) == (fault, f"{tmp_path}/a", start)
        assert ("are free" in str(caught.value)) == (fault in NO_SPACE)
        direct.fault = 0
        assert file.append(data[start:]) == start
        file.sync()
        assert direct.written
        assert file.read(0, len(data)) == (tmp_path / "a").read_bytes() == data

    def test_interrupted_writes_are_repeated(self, direct, tmp_path, monkeypatch):
        file, data, calls = create(System(), f"{tmp_path}/a"), random_bytes(5 * BLOCK).tobytes(), []
        through = os.pwrite

        def interrupted(fd, data, offset):
            calls.append(offset)
            if len(calls) % 2:
                raise InterruptedError(errno.EINTR, "a signal")
            return through(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", interrupted)
        file.append(data)
        assert direct.written == 5 * BLOCK
        assert file.read(0, len(data)) == data

    @pytest.mark.parametrize("closes", [True, False], ids=["closed", "left"])
    def test_both_descriptors_are_closed(self, direct, tmp_path, closes):
        gc.collect()
        before = open_descriptors()
        file = create(System(), f"{tmp_path}/a")
        file.append(bytes(6 * BLOCK))
        assert len(open_descriptors() - before) == 2
        file.append(bytes(6 * BLOCK))  # now it is read directly too
        assert len(open_descriptors() - before) == 3
        if closes:
            file.close()
        else:
            del file
            gc.collect()
        assert open_descriptors() == before

    def test_a_number_that_is_taken_anew_is_of_another_file(self, direct, tmp_path):
        system = System()
        first = create(system, f"{tmp_path}/a")
        first.append(bytes(2 * BLOCK))
        number = first.fd
        first.close()
        second = create(system, f"{tmp_path}/b")
        assert second.fd == number
        second.append(b"x" * (3 * BLOCK))
        assert (tmp_path / "a").read_bytes() == bytes(2 * BLOCK)
        assert (tmp_path / "b").read_bytes() == b"x" * (3 * BLOCK)

    def test_many_threads_write_at_once(self, direct, tmp_path):
        system, failed = System(), []

        def work(seed):
            data = random_bytes(64 * BLOCK, seed).tobytes()
            file = create(system, f"{tmp_path}/{seed}")
            for start in range(0, len(data), 4 * BLOCK):
                file.append(data[start : start + 4 * BLOCK])  # through memory of the thread
            if file.read(0, len(data)) != data:
                failed.append(seed)
            file.close()

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not failed

    def test_aligned_memory(self):
        assert returned(0, np.uint8, "a test").shape == (0,)
        for size in range(1, 10_001):
            memory = returned(size, np.uint8, "a test")
            assert (memory.shape, memory.dtype, memory.flags.writeable) == ((size,), np.uint8, True)
            assert memory.ctypes.data % BLOCK == 0
            assert memory.base is not None
            assert memory.ctypes.data + size <= memory.base.ctypes.data + memory.base.nbytes


class TestFaults:
    @pytest.fixture
    def system(self):
        system = FaultFS()
        system.mkdir("/t")
        return system

    def next_call(self, system, fault, name, late=False):
        """Make the next call of that name fail."""

        def before(call, _path):
            if call == name:
                system.before = None
                system.fail(system.ops, fault, late)

        system.before = before

    @pytest.mark.parametrize("fault", ["short", errno.EINTR])
    @pytest.mark.parametrize("call", ["pwrite", "pread", "fdatasync", "create", "open"])
    def test_short_and_interrupted_calls_are_repeated(self, system, call, fault):
        self.next_call(system, fault, call)
        file, data = create(system, "/t/a"), random_bytes(1000).tobytes()
        file.append(data)
        file.sync()
        assert file.read(0, 1000) == data
        assert read_whole(system, "/t/a", 1000) == data
        out = aligned(BLOCK)
        self.next_call(system, fault, call)
        system.read_many(np.array([file.fd]), np.array([0]), np.array([BLOCK]), out, np.array([0]))
        assert out.tobytes() == data + bytes(BLOCK - 1000)

    def test_a_failed_append_changes_nothing(self, system):
        file = create(system, "/t/a")
        file.append(b"abc")
        self.next_call(system, errno.EIO, "pwrite")
        with pytest.raises(OSError, match=r"Input/output error: '/t/a'") as caught:
            file.append(b"defg")
        assert (caught.value.errno, file.size) == (errno.EIO, 3)
        assert (file.append(b"xy"), file.read(0, 5)) == (3, b"abcxy")

    def test_a_full_disk_says_what_is_needed_and_free(self, system):
        file = create(system, "/t/a")
        file.append(b"abc")
        system.capacity = 1000
        expected = r"No space left on device: 2\.0 KiB \(2003 bytes\) more are needed, and 0 B \(0 bytes\) are free"
        with pytest.raises(OSError, match=expected) as caught:
            file.append(bytes(3000))
        assert (caught.value.errno, caught.value.filename, file.size) == (errno.ENOSPC, "/t/a", 3)
        system.mend()
        file.append(bytes(3000))

    def test_a_full_disk_of_unknown_size(self, system):
        file = create(system, "/t/a")
        system.fail(system.ops, errno.ENOSPC)
        system.fail(system.ops + 1, errno.EIO)
        with pytest.raises(OSError, match=r"3 B \(3 bytes\) more are needed\. Free some space"):
            file.append(b"abc")

    def test_sync_is_not_repeated_after_an_error(self, system):
        file = create(system, "/t/a")
        file.append(b"abc")
        self.next_call(system, errno.EIO, "fdatasync")
        for _ in range(3):
            with pytest.raises(OSError, match="Input/output error"):
                file.sync()
        assert sum(call.startswith("fdatasync") for call in system.journal) == 1

    def test_errors_of_reads_name_the_file(self, system):
        file = create(system, "/t/a")
        file.append(b"abc")
        self.next_call(system, errno.EIO, "pread")
        with pytest.raises(OSError, match=r"Input/output error: '/t/a'"):
            file.read(0, 3)

    def test_open_closes_what_it_cannot_use(self, system):
        create(system, "/t/a").close()
        self.next_call(system, errno.EIO, "size")
        with pytest.raises(OSError, match="Input/output error"):
            open_file(system, "/t/a")
        assert system.journal[-1] == "close /t/a"


class TestWholeFiles:
    def test_write_and_read(self, place):
        system, folder = place
        write_whole(system, f"{folder}/a", [b"abc"])
        write_whole(system, f"{folder}/.tmp", [b"defg"], link_to=f"{folder}/b")
        assert sorted(system.listdir(folder)) == ["a", "b"]
        assert read_whole(system, f"{folder}/a", 3) + read_whole(system, f"{folder}/b", 100) == b"abcdefg"

    def test_a_name_is_taken_once(self, place):
        system, folder = place
        write_whole(system, f"{folder}/.tmp", [b"first"], link_to=f"{folder}/a")
        with pytest.raises(FileExistsError):
            write_whole(system, f"{folder}/.tmp", [b"second"], link_to=f"{folder}/a")
        with pytest.raises(FileExistsError):
            write_whole(system, f"{folder}/a", [b"third"])
        assert system.listdir(folder) == ["a"]
        assert read_whole(system, f"{folder}/a", 10) == b"first"

    def test_what_an_older_attempt_left_is_replaced(self, place):
        system, folder = place
        create(system, f"{folder}/.tmp").close()
        write_whole(system, f"{folder}/.tmp", [b"abc"], link_to=f"{folder}/a")
        assert read_whole(system, f"{folder}/a", 10) == b"abc"

    def test_too_large(self, place):
        system, folder = place
        write_whole(system, f"{folder}/a", [b"abc"])
        with pytest.raises(CorruptTableError, match=r"a is too large: at most 2 bytes were expected, and it has 3\. "):
            read_whole(system, f"{folder}/a", 2)

    def test_all_or_nothing_whatever_fails_and_whenever_it_crashes(self):
        def write(system):
            write_whole(system, "/t/.tmp", [b"x" * 1300], link_to="/t/a")

        def check(system, acknowledged):
            for clone in system.crash_clones(np.random.default_rng(system.ops)):
                found = clone.files().get("/t/a")
                assert found == b"x" * 1300 or (found is None and not acknowledged), clone.kind

        def prepared():
            system = FaultFS()
            system.mkdir("/t")
            system.fsync_folder("/")
            return system

        whole = prepared()
        whole.after = lambda *_: check(whole, False)
        write(whole)
        check(whole, True)
        for op in range(2, whole.ops):
            for fault in (errno.EIO, errno.ENOSPC, errno.EINTR, "short"):
                system = prepared()
                system.fail(op, fault)
                try:
                    write(system)
                except OSError:
                    check(system, False)
                else:
                    check(system, True)
                    assert system.listdir("/t") in (["a"], [".tmp", "a"])


class TestReadMany:
    """The kernels, in every way that reads are made, against what the file holds."""

    @pytest.fixture
    def file(self, tmp_path):
        self.data = random_bytes(100 * BLOCK + 123)
        with open(f"{tmp_path}/a", "wb") as target:
            target.write(self.data.tobytes())
        file, self.other = (open_file(OS_SYSTEM, f"{tmp_path}/a", direct=direct) for direct in (True, False))
        yield file
        file.close()
        self.other.close()

    def read_and_check(self, file, seed):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(0, 60))
        offsets, sizes = rng.integers(0, 104, count) * BLOCK, rng.integers(1, 4, count) * BLOCK
        starts = np.append(0, np.cumsum(sizes)[:-1])[:count].astype(np.int64)
        out = aligned(int(sizes.sum()) + BLOCK)
        out[:] = 0xEE
        fds = rng.choice([file.fd, self.other.fd] if seed % 3 else [file.fd], count)  # past the page cache, and not
        OS_SYSTEM.read_many(fds, offsets, sizes, out, starts)
        padded = np.append(self.data, np.zeros(200 * BLOCK, np.uint8))
        for offset, size, start in zip(offsets, sizes, starts, strict=True):
            np.testing.assert_array_equal(out[start : start + size], padded[offset : offset + size])
        assert (out[int(sizes.sum()) :] == 0xEE).all()

    @pytest.mark.parametrize("count", [0, 1, 4, 24])
    def test_any_number_at_once(self, file, reads, count):
        reads(count)
        for seed in range(20):
            self.read_and_check(file, seed)

    def test_many_callers_at_once(self, file, reads):
        reads(8)
        errors = []

        def work(seed):
            try:
                for k in range(12):
                    self.read_and_check(file, 1000 * seed + k)
            except BaseException as error:
                errors.append(error)

        callers = [threading.Thread(target=work, args=(seed,)) for seed in range(kernels.cpu.pread.JOBS + 4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert not errors

    def test_errors_are_those_of_the_system(self, file, tmp_path, reads):
        reads(4)
        folder = OS_SYSTEM.open(str(tmp_path), os.O_RDONLY)
        fds, zeros = np.array([file.fd, folder, file.fd]), np.zeros(3, np.int64)
        with pytest.raises(IsADirectoryError, match=str(tmp_path)):
            OS_SYSTEM.read_many(fds, zeros, np.full(3, BLOCK), aligned(3 * BLOCK), np.arange(3) * BLOCK)
        OS_SYSTEM.close(folder)
        with pytest.raises(OSError, match="Bad file descriptor"):
            OS_SYSTEM.read_many(np.array([-1]), zeros[:1], np.array([BLOCK]), aligned(BLOCK), zeros[:1])

    def test_a_descriptor_that_was_closed(self, file, reads):
        # What Linux refuses is read by the caller, who is told why; what it took is not lost.
        reads(4)
        count, bad = 40, [7, 30]
        fds, at, got = np.full(count, file.fd), np.arange(count) * BLOCK, np.full(count, -77)
        fds[bad] = os.dup(file.fd)
        os.close(fds[bad[0]])
        out = aligned(count * BLOCK)
        readers.READERS.read((fds, at, np.full(count, BLOCK), out, at, got), {file.fd, int(fds[bad[0]])})
        assert np.flatnonzero(got < 0).tolist() == bad
        good = np.delete(np.arange(count), bad)
        blocks = out.reshape(count, BLOCK)
        np.testing.assert_array_equal(blocks[good], self.data[: count * BLOCK].reshape(count, BLOCK)[good])

    def test_a_file_system_that_waits_is_left_to_threads(self, file, monkeypatch):
        made, at = Readers(), np.arange(20) * BLOCK
        if not made._linux.works or made._linux._context() is None:
            pytest.skip("no asynchronous reads here")
        waits = [False] * (readers.DISAPPOINTMENTS - 1) + [True] + [False] * readers.DISAPPOINTMENTS
        answers, real = iter(waits), kernels.cpu.aio.read_together
        monkeypatch.setattr(kernels.cpu.aio, "read_together", lambda *args: real(*args) is None or next(answers))
        for works in [True] * len(waits) + [False]:
            assert made._linux.works == works
            out, got = aligned(20 * BLOCK), np.full(20, -77)
            made.read((np.full(20, file.fd), at, np.full(20, BLOCK), out, at, got), {file.fd})
            assert (got == BLOCK).all()
            np.testing.assert_array_equal(out, self.data[: 20 * BLOCK])

    def test_where_linux_forbids_it(self, file, monkeypatch):
        # As in containers: the system call is there, and refused.
        made = Readers()
        made._linux._calls = 10**6, 10**6, 10**6
        monkeypatch.setattr(readers, "READERS", made)
        made._linux.works = True
        for seed in range(5):
            self.read_and_check(file, seed)
        assert not made._linux.works

    def test_signals_while_reads_are_under_way(self, file, reads):
        reads(4)
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 3e-4)
        try:
            for seed in range(40):
                self.read_and_check(file, seed)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def test_goes_on_where_direct_reads_are_refused(self, file):
        # As on a file system that takes O_DIRECT at open and refuses to read: here because memory is not aligned.
        out, zero = np.zeros(2 * BLOCK, np.uint8)[1 : BLOCK + 1], np.zeros(1, np.int64)
        OS_SYSTEM.read_many(np.array([file.fd]), zero, np.array([BLOCK]), out, zero)
        np.testing.assert_array_equal(out, self.data[:BLOCK])

    def test_kernels_do_as_the_reference(self, file):
        rng = np.random.default_rng(0)
        offsets, sizes = rng.integers(0, 104, 20) * BLOCK, rng.integers(1, 4, 20) * BLOCK
        starts = np.append(0, np.cumsum(sizes)[:-1])
        fds = np.where(np.arange(20) % 7 == 3, -1, file.fd)
        results = []
        for backend in (reference, kernels.cpu):
            out, got = aligned(int(sizes.sum())), np.full(20, -77)
            for lo, hi in pairwise((0, 7, 7, 20)):
                backend.pread.read_pieces(fds, offsets, sizes, out, starts, got, lo, hi)
            results.append((out, got))
        np.testing.assert_array_equal(results[0][0], results[1][0])
        np.testing.assert_array_equal(results[0][1], results[1][1])
        assert (results[0][1] == -1).any()

    def test_turns_of_a_job_do_not_mix(self, file):
        # A reader that is late has a number of an earlier turn: it must neither read nor count.
        pread = kernels.cpu.pread
        desk = np.zeros((pread.JOBS + 1, pread.WORDS), np.int64)
        assert pread.set_up(desk)
        for count in (5, 300, 2):
            out, got, columns = aligned(count * BLOCK), np.full(count, -77), np.arange(count) * BLOCK
            args = np.full(count, file.fd), columns % (50 * BLOCK), np.full(count, BLOCK), out, columns, got
            pread.read_together(desk, 0, *args, 3)
            assert (got == BLOCK).all()
            assert not pread._read_one(desk.ctypes.data)
            assert not pread._read_one(desk.ctypes.data)


class TestThreads:
    def test_none_before_they_are_needed(self):
        program = "import threading; from embedrock.io import vfs, readers; assert threading.active_count() == 1"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=300)

    @pytest.mark.parametrize("text", ["", "0", "-1", "many", "1.5", "257"])
    def test_a_wrong_number(self, monkeypatch, text):
        monkeypatch.setenv("EMBEDROCK_IO_THREADS", text)
        with pytest.raises(ArgumentError, match=rf"EMBEDROCK_IO_THREADS must be .* 1 to 256: got '{text}'"):
            assert Readers()._linux

    def test_the_number_is_what_the_environment_says(self, monkeypatch):
        monkeypatch.setenv("EMBEDROCK_IO_THREADS", "3")
        assert Readers()._linux._at_once == readers._wanted() == 3

    def test_a_forked_child_reads_and_has_no_lock(self, tmp_path):
        program = f"""
import os, mmap, numpy as np
from embedrock.io.vfs import OS_SYSTEM, create, open_file
file = create(OS_SYSTEM, {str(tmp_path / "a")!r})
file.append(bytes(range(256)) * 256)
file.sync()
direct = open_file(OS_SYSTEM, file.path, direct=True)
lock = OS_SYSTEM.lock({str(tmp_path / "LOCK")!r}, "me")
def read():
    out, at = np.frombuffer(mmap.mmap(-1, 65536), np.uint8), np.arange(16) * 4096
    OS_SYSTEM.read_many(np.array([file.fd, direct.fd] * 8), at, np.full(16, 4096), out, at)
    assert out.tobytes() == bytes(range(256)) * 256
read()
ready, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    read()
    os.write(ready[1], b"x")
    os.read(go[0], 1)
    OS_SYSTEM.close(lock)
    os._exit(0)
os.read(ready[0], 1)
OS_SYSTEM.close(lock)
OS_SYSTEM.close(OS_SYSTEM.lock({str(tmp_path / "LOCK")!r}, "me again"))  # although the child lives
os.write(go[1], b"x")
assert os.waitpid(child, 0)[1] == 0
"""
        subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", program], check=True, timeout=300)

    def test_a_forked_child_has_memory_of_its_own_to_write_from(self):
        # Shared, it would have the bytes of whoever writes at the same time.
        program = """
import os
from embedrock.io.vfs import OS_SYSTEM
memory = OS_SYSTEM._bounce.take(1)
memory[0] = 1
child = os.fork()
if child == 0:
    OS_SYSTEM._bounce.take(1)[0] = 2
    os._exit(0)
os.waitpid(child, 0)
assert memory[0] == 1
"""
        subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", program], check=True, timeout=300)

    def test_a_file_that_grows_while_its_end_is_read(self, tmp_path, monkeypatch):
        # A direct read that ends within a block must not go on from there.
        file = create(OS_SYSTEM, f"{tmp_path}/a")
        file.append(bytes(BLOCK + 100))
        direct, real, out = open_file(OS_SYSTEM, file.path, direct=True), os.preadv, aligned(4 * BLOCK)

        def growing(*args):
            found = real(*args)
            if file.size < 4 * BLOCK:
                file.append(b"x" * (4 * BLOCK - file.size))
            return found

        monkeypatch.setattr(os, "preadv", growing)
        assert OS_SYSTEM._read_again(direct.fd, out.data, 0) == 4 * BLOCK
        assert out[BLOCK + 99] == 0
        assert (out[BLOCK + 100 :] == ord("x")).all()
        assert (direct.fd in OS_SYSTEM._direct) == bool(vfs.O_DIRECT)
        direct.close()
        file.close()


class TestLock:
    def test_one_holder(self, place):
        system, folder = place
        lock = system.lock(f"{folder}/LOCK", "a long text of the first")
        with pytest.raises(BlockingIOError):
            system.lock(f"{folder}/LOCK", "second")
        assert read_whole(system, f"{folder}/LOCK", 100) == b"a long text of the first"
        system.close(lock)
        system.close(system.lock(f"{folder}/LOCK", "third"))
        assert read_whole(system, f"{folder}/LOCK", 100).startswith(b"third")

    def test_between_processes(self, tmp_path):
        path = str(tmp_path / "LOCK")
        program = (
            f"from embedrock.io.vfs import OS_SYSTEM; OS_SYSTEM.lock({path!r}, 'other'); print('held', flush=True)"
        )
        command = [sys.executable, "-c", f"{program}; input()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(BlockingIOError):
                OS_SYSTEM.lock(path, "me")
            other.kill()
        OS_SYSTEM.close(OS_SYSTEM.lock(path, "me"))


class TestWriteBehind:
    @pytest.mark.parametrize("has_sync_file_range", [True, False])
    def test_dirty_pages_are_bounded(self, tmp_path, monkeypatch, has_sync_file_range):
        system = vfs.System()
        if not has_sync_file_range:
            monkeypatch.setattr(system, "_sync_file_range", None)
        monkeypatch.setattr(vfs, "WRITE_BEHIND_BYTES", 4 * BLOCK)
        monkeypatch.setattr(vfs, "DIRTY_BYTES", 16 * BLOCK)
        file, data = create(system, f"{tmp_path}/a"), random_bytes(100 * BLOCK)
        for start in range(0, len(data), 2 * BLOCK):
            file.append(data[start : start + 2 * BLOCK].data)
            system.behind(file.fd, start, file.size)
            tail = system._tails[file.fd]
            assert file.size - tail.started < 4 * BLOCK
            assert file.size - tail.done < 16 * BLOCK
        file.sync()
        system.drop(file.fd)
        assert file.read(0, len(data)) == data.tobytes()
        file.close()
        assert not system._tails

    def test_an_error_is_one_of_every_later_sync(self, tmp_path, monkeypatch):
        # The system tells of a failed write once: to whoever waits for the range, and not to the sync after it.
        system = vfs.System()

        def fail(*_args):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(system, "_sync_file_range", fail)
        file = create(system, f"{tmp_path}/a")
        file.append(bytes(vfs.WRITE_BEHIND_BYTES))
        with pytest.raises(OSError, match="Input/output error"):
            system.behind(file.fd, 0, file.size)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                system.fdatasync(file.fd)
        file.close()
