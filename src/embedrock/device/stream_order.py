"""`StreamOrder`: the order of work on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from embedrock.device.cuda_runtime import cuda_runtime
from embedrock.errors import MemoryBudgetError, UnsupportedError


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Raise `MemoryBudgetError` where a device has too little memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _too_little(what, error) from error


def _too_little(what: str, error: BaseException) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"{what} needs more GPU memory than there is: {error} Nothing has changed. Pass a smaller device_memory=, "
        "which leaves more to the rest of the model, or use smaller batches."
    )


_turns = itertools.count(1)


def check_capture(timelines: Sequence[StreamOrder]) -> None:
    """Raise `UnsupportedError` if a capture of the caller's stream is not one `GraphCapture` of all the tables."""
    captured, is_capturing = timelines[0].captured, torch.cuda.is_current_stream_capturing()
    is_recording = timelines[0].is_recorded
    if is_capturing and not (is_recording and all(timeline.captured is captured for timeline in timelines)):
        raise UnsupportedError(
            "lookups and steps of embedding rows cannot be captured in a CUDA graph by torch.cuda.graph: the host "
            "counts beside each replay. Let ert.graphed(step, optimizer) do so, of optimizers that have all embedding "
            "layers that the step uses; or capture the dense part of the model (torch.cuda.make_graphed_callables)."
        )
    if is_recording and not is_capturing:
        raise UnsupportedError(
            f"rows of {timelines[0].subject} cannot be used while another thread captures a step of them "
            "(ert.graphed). Use them before, or after it."
        )


def wait_for_caller(device: torch.device) -> None:
    """Wait until all earlier work of the caller's stream is done. On the CPU, it is done already."""
    if device.type == "cuda":
        with cuda_runtime().beside_captures():
            torch.cuda.current_stream(device).synchronize()


class StreamOrder:
    """Order of a table's work on the caller's stream, and on a separate stream for prefetching copies.

    Work on one stream starts after the earlier work on others, and the host does not wait for it.

    On the CPU, under Triton's interpreter, there is nothing to order.

    Args:
        device: of the tensors.
        subject: the table, for error messages.

    Attributes:
        captured: the `GraphCapture` that is in warm-up or recording now; None: none.
        is_recorded: launches are being recorded, and the host counts at replays instead.
        turn: number of the last change of the caller's stream; 0 in all captures. Kept memory is of one turn.
        copied: event after the copies that the caller's stream has not waited for; None without any.
    """

    def __init__(self, device: torch.device, subject: str) -> None:
        self.device, self.is_cuda, self.subject = device, device.type == "cuda", subject
        self._copying = torch.cuda.Stream(device) if self.is_cuda else None
        self._stream: torch.cuda.Stream | None = None  # of the last work
        self.turn = next(_turns)
        self.copied: torch.cuda.Event | None = None
        self.captured: Any = None
        self.is_recorded = False

    def capture(self, captured: Any) -> None:
        """Begin a warm-up or a recording of a `GraphCapture`; None: end it."""
        self.captured, self.turn = captured, next(_turns) if captured is None else 0

    def keep(self, *tensors: Tensor) -> None:
        """Keep cached tensors for as long as a CUDA graph uses them, if one is being recorded."""
        if self.captured is not None:
            self.captured.keep(*tensors)

    def begin(self) -> None:
        """Order later work on other streams after the caller's stream."""
        if self.is_cuda:
            self.take_over(torch.cuda.current_stream(self.device))

    def ordered(self) -> InStreamOrder:
        """Return a context for work on the caller's stream, after earlier work on others.

        Raises:
            UnsupportedError: the stream is being captured.
            MemoryBudgetError: there is too little GPU memory for the work.
        """
        return InStreamOrder((self,), None)

    def take_over(self, stream: torch.cuda.Stream) -> None:
        """Order the caller's stream after the stream of the last work, if they differ."""
        if stream != self._stream:
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream = stream
            if self.captured is None:
                self.turn = next(_turns)

    @contextmanager
    def aside(self, *tensors: Tensor) -> Iterator[None]:
        """Do work with `tensors` on the separate stream, after earlier work on the caller's."""
        if self._copying is None:
            yield
            return
        self._copying.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._copying):
                yield
        finally:  # part of the work may be under way
            for tensor in tensors:
                tensor.record_stream(self._copying)
            self.copied = torch.cuda.Event()
            self.copied.record(self._copying)

    def uses(self, *tensors: Tensor) -> None:
        """Keep the memory of tensors from other streams until the caller's stream is done with it.

        One call suffices, before the last reference goes: the caller's stream waits for earlier work of other streams.
        """
        if self.is_cuda:
            stream = torch.cuda.current_stream(self.device)
            for tensor in tensors:
                tensor.record_stream(stream)

    def wait_for_copies(self) -> None:
        """Order later work on the caller's stream after the copies so far. The host does not wait."""
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
            self.copied = None  # other streams wait for this one

    def finish(self) -> None:
        """Wait until all work so far of the table and of the caller's stream is done.

        It does not wait for the whole device, as another thread may be capturing a CUDA graph.
        """
        if not self.is_cuda:
            return
        with cuda_runtime().beside_captures():
            if self._stream is not None:
                self._stream.synchronize()
            if self.copied is not None:
                self.copied.synchronize()
        wait_for_caller(self.device)


class InStreamOrder:
    """Context for work on the caller's stream in the order of some tables, with their locks: see `StreamOrder.ordered`.

    It is reentrant, and threads may share it if it has a lock. A step of a table enters five of these contexts. A
    generator would take three times as long.

    Args:
        timelines: of the tables, all on one device; at least one.
        lock: of a table, or those of several `together`; None: no lock.
    """

    __slots__ = ("_lock", "_timelines", "_undo")

    def __init__(self, timelines: Sequence[StreamOrder], lock: AbstractContextManager[Any] | None) -> None:
        self._timelines, self._lock = timelines, lock
        self._undo: list[ExitStack | None] = []  # one for each time it is entered

    def __enter__(self) -> None:
        lock, first = self._lock, self._timelines[0]
        if lock is not None:
            lock.__enter__()
        self._undo.append(None)
        try:
            if first.is_cuda or torch.is_inference_mode_enabled():
                self._undo[-1] = _undone_later(first)
            if first.is_cuda:
                check_capture(self._timelines)
                stream = torch.cuda.current_stream(first.device)
                for timeline in self._timelines:
                    timeline.take_over(stream)
        except BaseException as error:
            self.__exit__(None, error, None)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        undo = self._undo.pop()
        if undo is not None:
            undo.close()
        if self._lock is not None:
            self._lock.__exit__(None, None, None)
        if error is not None and isinstance(error, torch.OutOfMemoryError):
            raise _too_little(f"a batch of {self._timelines[0].subject}", error) from error


def _undone_later(first: StreamOrder) -> ExitStack | None:
    """Leave inference mode and other devices; return the undo. Tensors of inference mode would not outlive it."""
    is_elsewhere = first.is_cuda and torch.cuda.current_device() != first.device.index
    is_inference = torch.is_inference_mode_enabled()
    if not (is_elsewhere or is_inference):
        return None
    undo = ExitStack()
    if is_inference:
        undo.enter_context(torch.inference_mode(False))
    if is_elsewhere:
        undo.enter_context(torch.cuda.device(first.device))
    return undo
