"""Ctrl-C while kernels are loaded for the first time waits until they are whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Ctrl-C comes in the middle of the first import of Numba, where it left that half imported for good.
IMPORT = """
import importlib.abc, signal, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "numba.core.codegen":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
def is_whole():
    return "embedrock.kernels.cpu" in sys.modules
"""
# And when the machine code of a kernel is loaded, or the kernel is compiled.
CODE = """
import signal
from embedrock.kernels.cpu.machine_code import KernelCache
load, begun, ended = KernelCache.load_overload, [], []
def interrupt(cache, *args):
    begun.append(cache)
    signal.raise_signal(signal.SIGINT)
    code = load(cache, *args)
    ended.append(cache)
    return code
KernelCache.load_overload = interrupt
def is_whole():
    KernelCache.load_overload = load
    return begun == ended
"""
LOOKUP = """
import embedrock as er
table = er.Table(50, 2, init=er.Zeros())
try:
    table.lookup([1])
except KeyboardInterrupt:
    print("interrupted", is_whole())
print(table.lookup([1]).tolist())
"""


@pytest.mark.parametrize("moment", [IMPORT, CODE], ids=["import", "code"])
def test_ctrl_c_waits_until_kernels_are_loaded(moment: str):
    result = subprocess.run([sys.executable, "-c", moment + LOOKUP], capture_output=True, text=True, timeout=300)
    assert result.stdout == "interrupted True\n[[0.0, 0.0]]\n", result.stdout + result.stderr
