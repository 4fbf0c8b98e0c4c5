"""Trainings side by side: each in a process of its own, with what it has told. One is killed and started again."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context
from typing import Any

import embedrock as er
from embedrock.system.spans import trace_by

WARM_UP = 50  # steps whose time does not count: memory is new to them, and code is loaded
COLOURS = "#888", "#06c", "#d50"


class TrainingError(er.EmbedrockError):
    """A training has ended early, or did not go on as if nothing had happened."""


class Clock:
    """CPU time of this process: all of it, and that of work on rows, the phases of docs/see.md in all threads."""

    def __init__(self) -> None:
        self._rows, self._lock, self._thread = 0.0, threading.Lock(), threading.local()
        self._last = time.process_time(), self._rows
        trace_by(self.timed)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count what this thread does now as work on rows. A phase in another phase is counted once."""
        if hasattr(self._thread, "phase"):
            yield
            return
        self._thread.phase, started = phase, time.thread_time()
        try:
            yield
        finally:
            del self._thread.phase
            with self._lock:
                self._rows += time.thread_time() - started

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        before, self._last = self._last, (time.process_time(), self._rows)
        return {"seconds": self._last[0] - before[0], "on rows": self._last[1] - before[1]}


class Training:
    """A training in a process of its own, and what that has told.

    Its function takes the name, `arguments`, and a function that it calls with the numbers of each step: a dict of
    "step", "loss", and what a `Clock` says; sometimes also "bits" and "ram". The last dict has no "step".

    Attributes:
        name: of the training.
        reader: the connection that tells the numbers.
        steps: the numbers of each step, as first told.
        result: the numbers of the end; empty before.
        repeated: steps that were trained twice, because the process was killed after them.
    """

    def __init__(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        self.name, self._function, self._arguments = name, function, arguments
        self.steps, self.result, self.repeated = dict[int, dict[str, Any]](), dict[str, Any](), 0
        self.start()

    def start(self) -> None:
        """Start the process."""
        processes = get_context("spawn")
        self.reader, writer = processes.Pipe(duplex=False)
        arguments = self.name, *self._arguments, writer.send
        self._process = processes.Process(target=self._function, args=arguments, daemon=True)
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends this process, which kills that one
        self._process.start()
        signal.signal(signal.SIGINT, handler)
        writer.close()  # that process has the other one, so the reader comes to an end with it

    def kill(self) -> None:
        """Kill the process without a warning, by SIGKILL. If it has ended, nothing happens."""
        self._process.kill()
        self._process.join()

    def hear(self) -> dict[str, Any]:
        """Wait for the next numbers, and return them.

        Raises:
            TrainingError: the process has ended early. Or a step was trained twice, and had two losses.
        """
        try:
            numbers = self.reader.recv()
        except EOFError:
            self._process.join()
            raise TrainingError(
                f"the process of {self.name!r} has ended early, with exit code {self._process.exitcode}. A traceback "
                "is above. If there is none, the system has killed it, which it does where RAM is short."
            ) from None
        if "step" not in numbers:
            self.result = numbers
            return numbers
        known = self.steps.setdefault(numbers["step"], numbers)
        self.repeated += known is not numbers
        if known["loss"] != numbers["loss"]:
            raise TrainingError(
                f"step {numbers['step']} of {self.name!r} had the loss {known['loss']!r}, and {numbers['loss']!r} when "
                "it was trained again. Both should be equal to the last bit: this is a bug, please report it."
            )
        return numbers

    def curve(self) -> dict[int, float]:
        """Return the bits at each step that told them."""
        return {step: numbers["bits"] for step, numbers in self.steps.items() if "bits" in numbers}

    def cost(self) -> tuple[float, float, int]:
        """Return CPU seconds of a step, and of that on rows; and the peak RAM in bytes."""
        timed = [numbers for step, numbers in self.steps.items() if step > WARM_UP] or list(self.steps.values())
        seconds, on_rows = (sum(numbers[name] for numbers in timed) / len(timed) for name in ("seconds", "on rows"))
        return seconds, on_rows, max(numbers.get("ram", 0) for numbers in (*self.steps.values(), self.result))


def run_all(trainings: Sequence[Training], doomed: Training, kill_after: int) -> None:
    """Print what trainings tell, until they end. Kill one of them after a step, and start it again."""
    killed = False
    print("\n    step  bits per byte of held-out files", flush=True)
    try:
        while running := {each.reader: each for each in trainings if not each.result}:
            for reader in connection.wait(list(running)):
                training: Any = running[reader]  # pyright: ignore[reportArgumentType]
                numbers = training.hear()
                if "bits" in numbers:
                    print(f"{numbers['step']:8,}  {numbers['bits']:.3f}  {training.name}", flush=True)
                if training is doomed and not killed and numbers.get("step") == kill_after:
                    training.kill()
                    print(f"killed   {training.name}, after step {kill_after:,}", flush=True)
                    killed = True
                    training.start()
    finally:
        for training in trainings:
            training.kill()


def figure(trainings: Sequence[Training], title: str) -> str:
    """Return an SVG of the trainings' curves."""
    curves = {each.name: each.curve() for each in trainings}
    every = [bits for curve in curves.values() for bits in curve.values()]
    low, high, last = math.floor(2 * min(every)), math.ceil(2 * max(every)), max(map(max, curves.values()))

    def place(step: float, bits: float) -> str:
        return f"{60 + 560 * step / last:.1f} {320 - 290 * (2 * bits - low) / max(1, high - low):.1f}"

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 370" font-family="sans-serif" font-size="13">',
        f'<rect width="640" height="370" fill="white"/><text x="60" y="350">{title}</text>',
    ]
    for halves in range(low, high + 1):
        parts.append(f'<path d="M{place(0, halves / 2)}h560" stroke="#ddd"/>')
        parts.append(f'<text transform="translate({place(0, halves / 2)})" x="-30" y="4">{halves / 2}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        stroke = f'fill="none" stroke="{COLOURS[number]}" stroke-width="2"'
        parts.append(f'<path d="M{" ".join(place(*point) for point in curve.items())}" {stroke}/>')
        y, text = 30 + 20 * number, f"{name}: {curve[max(curve)]:.3f}"
        parts.append(f'<path d="M340 {y}h30" {stroke}/><text x="380" y="{y + 4}">{text}</text>')
    return "\n".join([*parts, "</svg>\n"])
