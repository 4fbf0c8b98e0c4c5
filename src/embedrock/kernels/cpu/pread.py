"""Many reads of file ranges at once, by threads that need neither the GIL nor Python between two reads.

A *desk* is the work queue of readers. It has a job for each waiting caller, with a counter from which readers take the
next piece. Callers read along. Python threads with one call per read were rejected. If another thread keeps the GIL
busy, each hand-over costs up to 5 ms.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from embedrock.kernels.cpu.runtime import kernel

# By name, so that the machine code can be kept on disk: an address (ctypes) is valid in this process only.
pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
_sem_init = types.ExternalFunction("sem_init", types.int32(types.uintp, types.int32, types.uint32))
_sem_post = types.ExternalFunction("sem_post", types.int32(types.uintp))
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.uintp))

JOBS = 16
# Words of a desk: a row for each job, in cache lines of its own, then one with the semaphore of idle readers.
_NEXT, _END, _FDS, _OFFSETS, _SIZES, _OUT, _STARTS, _GOT, _DONE, _SEMAPHORE, WORDS = 0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32
# Numbers of pieces, and the end, start at ``generation << _GENERATION``. So a late reader with a number of an earlier
# generation of the same job takes nothing of this one. That is enough for 2**31 generations of each job.
_GENERATION = 32
_INDEX = (1 << _GENERATION) - 1


def _word_at(builder: Any, args: Any) -> Any:
    address = builder.add(args[0], builder.mul(args[1], ir.Constant(ir.IntType(64), 8)))
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def _load(typingctx: Any, address: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_word_at(builder, args))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _store(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _word_at(builder, args))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _atomic(operation: str) -> Any:
    @intrinsic
    def change(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.atomic_rmw(operation, _word_at(builder, args), args[2], "seq_cst")

        return types.int64(types.int64, types.int64, types.int64), generate

    return change


# Change an int64 of an array by the array's address, atomically, and return the old value. Both order memory.
_add, _exchange = _atomic("add"), _atomic("xchg")


@kernel()
def read_pieces(fds, offsets, sizes, out, starts, got, lo, hi):
    """Read `sizes[i]` bytes at `offsets[i]` of file `fds[i]` to `out[starts[i]:]`; `got[i]` is the result of pread."""
    address = out.ctypes.data
    for i in range(lo, hi):
        got[i] = pread(fds[i], address + starts[i], sizes[i], offsets[i])


@kernel()
def set_up(desk):
    """Prepare a desk, int64 (JOBS + 1, WORDS). Return whether the system has the semaphores."""
    address = desk.ctypes.data
    for job in range(JOBS + 1):
        desk[job, _NEXT] = desk[job, _END] = 0
        if _sem_init(address + (job * WORDS + _SEMAPHORE) * 8, 0, 0) != 0:
            return False
    return True


@kernel()
def _read_one(job):
    """Make one read of a job, and return whether one was left."""
    taken = _add(job, _NEXT, 1)
    end = _load(job, _END)  # after `taken`, or an old number could match a new end
    if taken >= end or taken >> _GENERATION != end >> _GENERATION:
        return False
    i, count = taken & _INDEX, end & _INDEX
    memory = _load(job, _OUT) + _load(_load(job, _STARTS), i)
    done = pread(_load(_load(job, _FDS), i), memory, _load(_load(job, _SIZES), i), _load(_load(job, _OFFSETS), i))
    _store(_load(job, _GOT), i, done)
    if _add(job, _DONE, 1) == count - 1:
        _sem_post(job + _SEMAPHORE * 8)
    return True


@kernel()
def serve(desk):
    """Read for others, forever. Jobs get a read in turn: a short one does not wait for a long one."""
    first = desk.ctypes.data
    waiting = first + (JOBS * WORDS + _SEMAPHORE) * 8
    found = True
    while True:
        if not found:
            _sem_wait(waiting)
        found = False
        for number in range(JOBS):
            job = first + number * WORDS * 8
            if _load(job, _NEXT) < _load(job, _END):
                found |= _read_one(job)


@kernel()
def read_together(desk, number, fds, offsets, sizes, out, starts, got, readers):
    """Read all pieces as `read_pieces` does, with up to `readers` of the desk's readers.

    Caller owns job `number` until the call returns.
    """
    count, first = len(fds), desk.ctypes.data
    job = first + number * WORDS * 8
    waiting = first + (JOBS * WORDS + _SEMAPHORE) * 8
    generation = ((_load(job, _END) >> _GENERATION) + 1) << _GENERATION
    _store(job, _END, generation + count)
    _store(job, _FDS, fds.ctypes.data)
    _store(job, _OFFSETS, offsets.ctypes.data)
    _store(job, _SIZES, sizes.ctypes.data)
    _store(job, _OUT, out.ctypes.data)
    _store(job, _STARTS, starts.ctypes.data)
    _store(job, _GOT, got.ctypes.data)
    _store(job, _DONE, 0)
    _exchange(job, _NEXT, generation)  # from here on others take pieces: all other words are written
    for _ in range(min(readers, count - 1)):
        _sem_post(waiting)
    while _read_one(job):
        pass
    while _sem_wait(job + _SEMAPHORE * 8) != 0:  # interrupted by a signal
        pass
