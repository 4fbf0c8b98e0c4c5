"""The cache of compiled kernels for other processes: in the user's cache folder, keyed by a digest of the sources.

Numba's own cache checks only whether the file of a function has changed. So functions inlined from other files stay in
old versions. The cache lies beside the sources, so every clone compiles anew. Two processes that compile at once may
give two kernels one file. Here the digest covers all kernel files, and a writer holds a lock.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from embedrock.system import platform

SOURCES = Path(__file__).resolve().parents[1]
PREFIX = "kernels-"
UNUSED_DAYS = 60  # after this time code of other versions is removed


@functools.cache
def digest_of_sources() -> str:
    """Return a digest that changes with any kernel file, and with the compiler."""
    digest = hashlib.sha256(f"{numba.__version__} {sys.version_info[:2]}".encode())
    for file in sorted([*SOURCES.glob("*.py"), *SOURCES.glob("cpu/*.py")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def user_cache_folder() -> Path:
    """Return the folder for reproducible files: NUMBA_CACHE_DIR, or the system's cache folder."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(named)
    return platform.user_cache_folder() / "embedrock"


@functools.cache
def code_folder() -> Path:
    """Return the folder of these sources' machine code, created if it does not exist.

    Raises:
        OSError: neither the user's cache folder nor the package's own can be written to.
    """
    try:
        return _made(user_cache_folder())
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return _made(SOURCES / "__pycache__")


def _made(parent: Path) -> Path:
    folder = parent / (PREFIX + digest_of_sources()[:16])
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unused(parent)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written to")
    with contextlib.suppress(OSError):  # owned by another user
        os.utime(folder)
    return folder


def _remove_unused(parent: Path) -> None:
    for folder in parent.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > UNUSED_DAYS * 86_400:
                shutil.rmtree(folder)


class _Locator(_CacheLocator):
    """The location of Numba's code cache, and the stamp that makes code stale."""

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        self._py_file, self._py_func = py_file, py_func

    def get_cache_path(self) -> str:
        return str(code_folder())

    def get_source_stamp(self) -> str:
        return digest_of_sources()

    def get_disambiguator(self) -> str:
        return f"{self._py_func.__code__.co_firstlineno}-{Path(self._py_file).parent.name}"

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> Self:
        return cls(py_func, py_file)


class _CompiledKernel(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012  # as Numba's own


class KernelCache(FunctionCache):
    """The code of one kernel.

    Raises:
        OSError: there is no folder to keep it in.
    """

    _impl_class = _CompiledKernel

    def _save_overload(self, sig: Any, data: Any) -> None:
        with _alone(Path(self.cache_path)):
            super()._save_overload(sig, data)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock among processes: two that read the index at once would choose one file for two kernels.

    Without locks (some network file systems), or if the lock is another user's, it continues without.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)  # somebody may have cleaned the cache meanwhile
            file = held.enter_context(open(folder / "LOCK", "w"))
            platform.lock(file.fileno(), wait=True)
        yield
