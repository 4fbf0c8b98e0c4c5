"""`GraphCapture`: a training step that a CUDA graph replays, and the host's work beside each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedrock.device import device_errors as faults
from embedrock.device.copies import pinned_copy
from embedrock.device.dense import DenseGpuExecutor
from embedrock.device.device_errors import step_numbers
from embedrock.device.features import FeatureLayout
from embedrock.device.step_constants import count_all, draft_step
from embedrock.errors import EmbedrockError, NonFiniteGradientError, UnsupportedError
from embedrock.kernels import arguments
from embedrock.kernels.gpu.addresses import BatchTime
from embedrock.optimizers import Rule
from embedrock.system.interrupts import held_back

MOST_LOOKUPS = 32  # of a table in one captured step
MOST_NUMBERS = 1 + max(len(kind._fields) for kind in arguments.STEPS)  # a step's number, and the rule's constants


class CapturedNumbers:
    """Numbers in device memory that the host writes all at once. Each begins at a multiple of 16 bytes.

    Args:
        count: maximum number of numbers.
        device: of the memory.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._host = np.zeros((count, 2), np.int64)
        self._memory = torch.zeros(count, 2, dtype=torch.int64, device=device)
        self.taken = 0

    def take(self, count: int, dtype: torch.dtype = torch.int64) -> tuple[int, Sequence[Tensor]]:
        """Return the place of `count` more numbers, and each in device memory, (); of an integer, int32 is its half."""
        place, self.taken = self.taken, self.taken + count
        return place, self._memory.view(dtype)[place : self.taken, 0].unbind()

    def write(self, place: int, values: Sequence[float], dtype: type = np.int64) -> None:
        """Write numbers on the host from a place on, for the next upload."""
        self._host.view(dtype)[place : place + len(values), 0] = values

    def upload(self) -> None:
        """Copy the written numbers to the device, before all later launches. The host does not wait for the copy."""
        written = torch.from_numpy(self._host[: self.taken])
        self._memory[: self.taken].copy_(pinned_copy(written, self._memory.device), non_blocking=True)


class CapturedLookup(NamedTuple):
    """A lookup of a captured step.

    Attributes:
        executor: of the table.
        n: positions.
        trains: a step may follow.
        place: of the stamp, followed by the span and the hand; None: kernels need no stamp.
    """

    executor: DenseGpuExecutor
    n: int
    trains: bool
    place: int | None


class CapturedStep(NamedTuple):
    """A step of one table, or of several tables with the same step constants.

    Attributes:
        judged: index of the checked step that it belongs to.
        executors: of the tables, in order.
        place: of the step's number, followed by the rule's step constants.
        step: the step's number, int64 ().
        numbers: the rule's step constants, float32 () each.
    """

    judged: int
    executors: list[DenseGpuExecutor]
    place: int
    step: Tensor
    numbers: Any


class GraphCapture:
    """A training step captured in a CUDA graph: a warm-up, a recording, then replays.

    Kernels of such a step read its numbers from device memory. They include the numbers for `DeviceErrors` and
    rounding, and the rule's step constants. The host counts each replay, and writes the numbers before it.

    Args:
        step: makes the step.
        inputs: tensors that it reads, on the device.
        executors: of all tables that may take part, on one device.
        warmup: number of calls before the recording, by launches: kernels are compiled, and buffers exist.

    Attributes:
        is_recording: launches are being recorded, and the host counts nothing.
        skips: executors whose step is skipped if its gradients have NaN or Inf; the host waits for its replays.
    """

    def __init__(
        self, step: Callable[[], Any], inputs: list[Tensor], executors: Sequence[DenseGpuExecutor], warmup: int
    ) -> None:
        self.executors, self._device, self.is_recording = tuple(executors), executors[0].device, False
        self._step, self._inputs, self._left, self._stream = step, inputs, warmup, torch.cuda.Stream(self._device)
        self._layout = FeatureLayout(self.executors, [None] * len(self.executors))
        self._generations = list(map(_GENERATION, self._layout.locks))
        self._numbers = CapturedNumbers(len(executors) * (1 + MOST_NUMBERS + 3 * MOST_LOOKUPS), self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Any = None
        self._batches: list[CapturedLookup] = []
        self._judged: list[int] = []  # places of the numbers of steps
        self._judged_now = 0
        self._steps: dict[tuple[Any, ...], CapturedStep] = {}
        self._kept: list[Tensor] = []
        self.skips: list[DenseGpuExecutor] = []

    @property
    def is_recorded(self) -> bool:
        """True if the step can be replayed."""
        return self._graph is not None

    def run(self, inputs: list[Tensor], rules: Mapping[DenseGpuExecutor, Rule]) -> Any:
        """Make one step with the current rules, and return its result. Each replay writes the same tensors.

        Raises:
            UnsupportedError: the step cannot be captured. It is not made.
            NonFiniteGradientError, IdError, ArgumentError: of earlier steps. This step is not made.
            ClosedTableError: a table is closed.
        """
        if inputs:
            if not {self._device}.issuperset(map(_DEVICE, inputs)):
                inputs = [pinned_copy(tensor, self._device) for tensor in inputs]
            torch._foreach_copy_(self._inputs, inputs, non_blocking=True)
        if self._left:
            self._left -= 1
            return self._rehearse()
        if self._graph is None:
            self._record()
        self._replay(rules)
        return self._output

    # ------------------------------------------------------------ warm-up and recording

    def _rehearse(self) -> Any:
        """Make a step by launches."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._attached():
            made = self._step()
        current.wait_stream(self._stream)
        return made

    def _record(self) -> None:
        """Record a step without making it. A warm-up comes right before."""
        with torch.cuda.stream(self._stream), self._layout.working:
            for executor in self.executors:
                executor.expect_nothing()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as a loader that tickets memory, do not break a thread-local capture.
            with self._attached(), torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._set_recording(is_recording=True)
                try:
                    self._output = self._step()
                finally:
                    self._set_recording(is_recording=False)
        except EmbedrockError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"the step that ert.graphed was given cannot be captured in a CUDA graph: {error} No step of this "
                "batch was made. Within it, read no value of a tensor on the host (item(), if, print), make no tensor "
                "of host data, and give PyTorch's optimizers capturable=True. With a GradScaler, they need fused=True, "
                "too, and its step() takes each optimizer, not one of ert.optimizer. Or call it itself."
            ) from error
        self._graph = graph

    def _set_recording(self, is_recording: bool) -> None:
        self.is_recording = is_recording
        for executor in self.executors:
            executor.timeline.is_recorded = is_recording

    @contextmanager
    def _attached(self) -> Iterator[None]:
        self._numbers.taken = 0
        self._batches, self._judged, self._steps, self._kept, self.skips = [], [], {}, [], []
        for executor in self.executors:
            executor.timeline.capture(self)
        try:
            yield
        finally:
            for executor in self.executors:
                executor.timeline.capture(None)

    # ------------------------------------------------------------ for the tables

    def begin_batch(self, executor: DenseGpuExecutor, n: int, trains: bool) -> BatchTime:
        """Begin a batch of n positions; return its time."""
        if sum(batch.executor is executor for batch in self._batches) >= MOST_LOOKUPS:
            raise UnsupportedError(
                f"rows of {executor.rows.subject} are looked up more than {MOST_LOOKUPS} times in one captured step. "
                "Look ids up together."
            )
        place, numbers = self._numbers.take(3, torch.int32) if executor.cache.is_cache else (None, (0, 0, 0))
        batch = CapturedLookup(executor, n, trains, place)
        self._batches.append(batch)
        if not self.is_recording:
            executor.check()
            executor.begin()
            executor.expect_nothing()
            self._begin(batch)
            self._numbers.upload()
        stamp, span, hand = numbers
        return BatchTime(stamp, span, 1.0 / executor.cache.half_life(n), hand)

    def _begin(self, batch: CapturedLookup) -> None:
        if batch.place is None:
            batch.executor.clock.stamp += 1
        else:
            time = batch.executor.begin_batch(batch.n, batch.trains)
            self._numbers.write(batch.place, (time.stamp, time.span, time.hand))

    def judge(self) -> Tensor:
        """Return the number of the step that is about to be checked: int64 ()."""
        place, (number,) = self._numbers.take(1)
        self._judged.append(place)
        if not self.is_recording:
            self._judged_now = self._number_judged(place)
            self._numbers.upload()
        return number

    def begin_step(self, executor: DenseGpuExecutor, rule: Rule) -> tuple[Tensor, Any]:
        """Return the number of a table's step and its step constants. Tables with equal constants share them."""
        if any(executor in step.executors for step in self._steps.values()):
            raise UnsupportedError(
                f"rows of {executor.rows.subject} are stepped twice in one captured step. Call the optimizer's step() "
                "once in what is given to ert.graphed."
            )
        key = len(self._judged), rule, executor.rows.steps
        step = self._steps.get(key)
        if step is None:
            kind = type(rule.numbers(executor.rows.steps + 1))
            place, (number,) = self._numbers.take(1)
            _, numbers = self._numbers.take(len(kind._fields), torch.float32)
            step = self._steps[key] = CapturedStep(len(self._judged) - 1, [], place, number, kind(*numbers))
        step.executors.append(executor)
        if not self.is_recording:
            rows = executor.rows
            draft = draft_step(executor, rows, rule)
            self._write(step, *count_all([(rows, executor, draft)], self._judged_now)[0])
            self._numbers.upload()
        return step.step, step.numbers

    def keep(self, *tensors: Tensor) -> None:
        """Keep tensors that existed before the graph for as long as the graph."""
        self._kept += tensors

    # ------------------------------------------------------------ replays

    def suits(self, rules: Mapping[DenseGpuExecutor, Rule]) -> bool:
        """Return whether the graph is still valid: the same tables share constants, and no records have moved."""
        if list(map(_GENERATION, self._layout.locks)) != self._generations:
            return False
        counts = dict(zip(self.executors, map(_STEPS, self._layout.rows()), strict=True))
        for step in self._steps.values():
            own = [rules[executor] for executor in step.executors], [counts[executor] for executor in step.executors]
            if any(values.count(values[0]) < len(values) for values in own):
                return False
        return True

    def _replay(self, rules: Mapping[DenseGpuExecutor, Rule]) -> None:
        assert self._graph is not None  # it was recorded
        layout = self._layout
        with held_back(), layout.working:
            if layout.begin() is not None or layout.expects():
                for executor in self.executors:
                    executor.expect_nothing()
            rows = dict(zip(self.executors, layout.rows(), strict=True))
            for batch in self._batches:
                self._begin(batch)
            judged = [self._number_judged(place) for place in self._judged]
            for step in self._steps.values():
                first = step.executors[0]
                draft = draft_step(first, rows[first], rules[first])  # of all of them: see `suits`
                steps = [(rows[executor], executor, draft) for executor in step.executors]
                self._write(step, *count_all(steps, judged[step.judged])[0])
            self._numbers.upload()
            self._graph.replay()
            faults.ask([executor.faults for executor in self.executors])
            layout.begin_read()  # readers of the records wait for the replay
            for executor in self.skips:
                executor.faults.look()
                with suppress(NonFiniteGradientError):
                    executor.check()

    def _number_judged(self, place: int) -> int:
        number = next(step_numbers)
        self._numbers.write(place, (number,))
        return number

    def _write(self, step: CapturedStep, number: int, numbers: Any) -> None:
        """Write a counted step's number and the rule's step constants."""
        self._numbers.write(step.place, (number,))
        self._numbers.write(step.place + 1, numbers, np.float32)


_GENERATION, _STEPS, _DEVICE = attrgetter("generation"), attrgetter("steps"), attrgetter("device")
