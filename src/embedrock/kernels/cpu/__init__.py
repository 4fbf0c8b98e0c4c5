"""Kernels for the CPU, compiled by Numba at first use and cached on disk."""

from embedrock.kernels.cpu import addresses as addresses
from embedrock.kernels.cpu import aio as aio
from embedrock.kernels.cpu import cache as cache
from embedrock.kernels.cpu import codec as codec
from embedrock.kernels.cpu import directory as directory
from embedrock.kernels.cpu import extents as extents
from embedrock.kernels.cpu import generator as generator
from embedrock.kernels.cpu import mapped as mapped
from embedrock.kernels.cpu import ngrams as ngrams
from embedrock.kernels.cpu import plan as plan
from embedrock.kernels.cpu import pooling as pooling
from embedrock.kernels.cpu import pread as pread
from embedrock.kernels.cpu import residents as residents
from embedrock.kernels.cpu import rows as rows
from embedrock.kernels.cpu import rules as rules
from embedrock.kernels.cpu import runtime as runtime
from embedrock.kernels.cpu import storage as storage
from embedrock.kernels.cpu import strings as strings
from embedrock.kernels.cpu import threads as threads
from embedrock.kernels.cpu import vocabulary as vocabulary
from embedrock.kernels.cpu.runtime import launch as launch
