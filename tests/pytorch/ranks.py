"""Processes of torch.distributed that tests give functions to run: started once, they run many."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

IMPORTED = ["__main__", "pytest", "torch.distributed.checkpoint", "torch.nn.parallel", "embedrock.torch", "numba"]


def new_processes() -> Any:
    """Return the context of processes that are forked from one that has imported, and used nothing yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class Ranks:
    """Processes of one gloo group.

    Attributes:
        are_well: all have answered until now, and can go on with each other.

    Args:
        count: how many.
        timeout: of the group, in seconds.
    """

    def __init__(self, count: int, timeout: float = 30) -> None:
        self.are_well = True
        self.count, self._folder = count, tempfile.TemporaryDirectory()
        context = new_processes()
        self._pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            args = theirs, rank, count, os.path.join(self._folder.name, "store"), timeout
            process = context.Process(target=_work, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Let each rank call a function of a module with its rank, and more arguments."""
        for pipe in self._pipes:
            pipe.send((function, args))

    def results(self) -> list[Any]:
        """Return what each rank returned; what one raised that way too, and None of one that is gone."""
        results = [_received(pipe) for pipe in self._pipes]
        self.are_well = not any(result is None or isinstance(result, TimeoutError) for result in results)
        return results

    def result_of(self, rank: int) -> Any:
        """Return what one rank returned or raised, as `results` does."""
        return _received(self._pipes[rank])

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what each rank returns. What one raises is raised here."""
        self.start(function, *args)
        results = self.results()
        for result in results:
            if isinstance(result, Failure):
                raise AssertionError(result.text)
        return results

    def close(self) -> None:
        """End all of them."""
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            pipe.close()
            process.join(10)
            process.kill()
        self._folder.cleanup()


class Failure:
    """What a rank raised.

    Attributes:
        kind: the name of the error's class.
        said: its message.
        text: all of it.
    """

    def __init__(self, error: BaseException) -> None:
        self.kind, self.said = type(error).__name__, str(error)
        self.text = "".join(traceback.format_exception(error))


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv() if pipe.poll(60) else TimeoutError()
    except EOFError:
        return None


def _work(pipe: Any, rank: int, count: int, store: str, timeout: float) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=wait)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            result = function(rank, *args)
        except Exception as error:
            result = Failure(error)
        pipe.send(result)
    os._exit(0)  # a group of which a rank is gone may abort as it is destroyed
