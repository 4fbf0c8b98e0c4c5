"""Reads of many pieces of files, without the GIL and without Python between two reads."""

from __future__ import annotations

from numba import types

from embedrock.kernels.cpu.runtime import kernel

# By name, so that the machine code can be kept on disk: an address (ctypes) would be one of this process.
_pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))


@kernel
def read_pieces(fds, offsets, sizes, out, starts, got, lo, hi):
    """Read `sizes[i]` bytes at `offsets[i]` of file `fds[i]` to `out[starts[i]:]`; `got[i]` is what pread returned."""
    address = out.ctypes.data
    for i in range(lo, hi):
        got[i] = _pread(fds[i], address + starts[i], sizes[i], offsets[i])
