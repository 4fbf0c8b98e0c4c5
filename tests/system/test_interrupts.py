"""Ctrl-C waits until what it must not interrupt is whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from embedrock.system.interrupts import held_back

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


def test_ctrl_c_waits_for_the_outermost_and_the_handler_comes_back():
    before, reached = signal.getsignal(signal.SIGINT), []

    def hold() -> None:
        with held_back():
            with held_back():
                signal.raise_signal(signal.SIGINT)
                reached.append("inner")
            reached.append("outer")
        reached.append("end")

    with pytest.raises(KeyboardInterrupt):
        hold()
    assert reached == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_holds_nothing_back():
    inside, end = threading.Event(), threading.Event()

    def hold() -> None:
        with held_back():
            inside.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    end.set()
    thread.join()
