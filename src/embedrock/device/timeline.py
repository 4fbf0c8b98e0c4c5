"""`Timeline`: in which order work on a GPU happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
        raise MemoryBudgetError(
            f"{what} needs more GPU memory than there is: {error} Nothing has changed. Pass a smaller device_memory=, "
            "which leaves more to the rest of the model, or use smaller batches."
        ) from error


def refuse_capture() -> None:
    """Raise `UnsupportedError` while the caller's stream is captured."""
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "lookups and steps of embedding rows cannot be captured in a CUDA graph: how many rows a batch needs, and "
            "what the host counts of it, differs each time. Capture the dense part of the model "
            "(torch.cuda.make_graphed_callables), and call the embedding layers and their optimizer outside of it."
        )


class Timeline:
    """The order of a table's work: on the caller's stream, and on one of our own that copies records ahead of time.

    Whatever is begun on one stream goes on after what was begun before on another: the host waits for none of them.
    Where "the GPU" is the CPU, under Triton's interpreter, there is nothing to order.

    Args:
        device: of the tensors.
        subject: the table, for error messages.
    """

    def __init__(self, device: torch.device, subject: str) -> None:
        self._device, self._is_cuda, self._subject = device, device.type == "cuda", subject
        self._copying = torch.cuda.Stream(device) if self._is_cuda else None
        self._stream: torch.cuda.Stream | None = None
        self._done = torch.cuda.Event() if self._is_cuda else None
        self._copied: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Let what comes on other streams wait for what was done on the caller's so far."""
        if self._done is not None:
            self._note(torch.cuda.current_stream(self._device), self._done)

    def _note(self, stream: torch.cuda.Stream, done: torch.cuda.Event) -> None:
        self._stream = stream
        done.record(stream)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Do work on the caller's stream, after all that was done on others.

        Raises:
            UnsupportedError: the stream is being captured.
            MemoryBudgetError: there is too little GPU memory for the work.
        """
        # Tensors made here may outlive an inference mode of the caller's.
        with enough_memory(f"a batch of {self._subject}"), torch.inference_mode(False):
            if self._done is None:
                yield
            else:
                yield from self._ordered(self._done)

    def _ordered(self, done: torch.cuda.Event) -> Iterator[None]:
        refuse_capture()
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            stream.wait_event(done)
        try:
            with torch.cuda.device(self._device):
                yield
        finally:
            self._note(stream, done)

    @contextmanager
    def aside(self, *tensors: Tensor) -> Iterator[None]:
        """Do copies, of which `tensors` tell, on a stream of our own, after what was done on the caller's."""
        if self._copying is None:
            yield
            return
        self._copying.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copying):
            yield
        for tensor in tensors:
            tensor.record_stream(self._copying)
        self._copied = torch.cuda.Event()
        self._copied.record(self._copying)

    def uses(self, *tensors: Tensor) -> None:
        """Keep the memory of tensors, which may have been made on another stream, until the caller's is done with it.

        Once is enough, before the last reference goes: what other streams did before, the caller's waits for.
        """
        if self._is_cuda:
            stream = torch.cuda.current_stream(self._device)
            for tensor in tensors:
                tensor.record_stream(stream)

    def wait_for_copies(self) -> None:
        """Let what comes on the caller's stream wait for the copies so far. The host goes on."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def finish(self) -> None:
        """Return once all work so far is done, of the table and of the caller's stream.

        Not of the device: another thread may be capturing a CUDA graph, which must not be waited for.
        """
        if self._done is None:
            return
        with cuda_runtime().beside_captures():
            if self._stream is not None:
                self._done.synchronize()
            if self._copied is not None:
                self._copied.synchronize()
            torch.cuda.current_stream(self._device).synchronize()
