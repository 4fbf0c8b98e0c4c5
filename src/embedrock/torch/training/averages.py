"""`RowAverage`: the average of a table's rows over steps of training, kept for the rows that changed."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.plan import Plan, make_plan
from embedrock.errors import UnsupportedError
from embedrock.fronts.arguments import lags_behind
from embedrock.initializers import Zeros
from embedrock.table.table import Table, rows_of
from embedrock.torch.training.backward import BackwardPass
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.host_side import CpuExecutor
from embedrock.torch.training.side import Gradients


class _RowsBefore(NamedTuple):
    """Rows as they were before a step: int64 (n,) and float32 (n, dim)."""

    ids: np.ndarray
    rows: np.ndarray


class RowAverage:
    """An average that is updated now and then, as ``average = keep * average + (1 - keep) * row``.

    A row that does not change comes nearer to its average by the same factor as all others: only how far an average
    was from its row when that changed last, and when that was, is stored. So an update costs what the rows do that
    were stepped since the one before, and the average of any row is known at any time.

    Args:
        handle: of the rows, whose steps it is told of.
        decay: what an update keeps of the average, of an exponential one; None: equal weights of all updates.

    Raises:
        UnsupportedError: rows that change without a step.
    """

    def __init__(self, handle: Handle, decay: float | None) -> None:
        table = handle.table
        self.table, self.decay, self.updates = table, decay, 0
        self._label = handle.label
        self._check_steps_tell(handle.max_norm)
        # How far averages were from rows, and in the last column the bits of an int32: the update when that was. Its
        # ids are open, as the table may get more rows.
        self._distances = Table(None, table.dim + 1, init=Zeros(), seed=0)
        self._follow_from_here()
        handle.followers.add(self)

    def note(self, grads: Gradients) -> None:
        """Take note of rows before a step by these gradients."""
        self._check_version()
        self._check_steps_tell()
        ids = grads.row_ids()
        self._noted.append(_RowsBefore(ids, self.table.lookup(ids)))
        if sum(len(old.ids) for old in self._noted) > len(self._old.ids):  # or they would be as many as the steps
            self._old_rows()
        self._latest = rows_of(self.table).version.of_rows + 1  # of the step; it may be refused

    def _follow_from_here(self) -> None:
        """Let the average be what it was told of the rows as they are now."""
        self._old = _RowsBefore(np.empty(0, np.int64), np.empty((0, self.table.dim), np.float32))  # ids ascending
        self._noted: list[_RowsBefore] = []  # since then
        self._latest = rows_of(self.table).version.of_rows

    def _check_steps_tell(self, max_norm: float | None = None) -> None:
        spec = self.table.spec
        if lags_behind(spec.rule):
            what = f"{spec.rule}"
        elif max_norm is not None:
            what = f"{max_norm=}"
        elif spec.eviction is not None:
            what = f"{spec.eviction}"
        elif spec.admission is not None and spec.admission.default == "shared":
            what = f"{spec.admission}"
        else:
            return
        raise UnsupportedError(
            f"rows of {self._label} cannot be averaged: with {what} they change without a step that says so."
        )

    def _check_version(self) -> None:
        if rows_of(self.table).version.of_rows > self._latest:
            raise UnsupportedError(
                f"rows of {self._label} were changed by something else than an optimizer's step (assign, "
                "load_state_dict, rollback, table.update), so that their average is not known. Make it anew: "
                "ert.average(model)."
            )

    def update(self) -> None:
        """Take the rows as they are now into the average."""
        self._check_version()
        old = self._old_rows()
        averages = self._at(old.ids, old.rows)
        self.updates += 1
        if len(old.ids):
            rows = self.table.lookup(old.ids).astype(np.float64)
            self._store(old.ids, (averages - rows) * self._kept(self.updates - 1))
        self._follow_from_here()

    def _old_rows(self) -> _RowsBefore:
        """Return the rows that changed since the last update, each once, as they were then: ids ascending."""
        if self._noted:
            parts = [self._old, *self._noted]
            ids, first = np.unique(np.concatenate([part.ids for part in parts]), return_index=True)
            self._old, self._noted = _RowsBefore(ids, np.concatenate([part.rows for part in parts])[first]), []
        return self._old

    def _kept(self, since: int | np.ndarray) -> np.ndarray:
        """Return which part of a distance after an update is left now. After none, the first update takes the rows."""
        since = np.asarray(since)
        later = since / max(self.updates, 1) if self.decay is None else np.float64(self.decay) ** (self.updates - since)
        return np.where(since == 0, float(self.updates == 0), later)

    def _store(self, ids: np.ndarray, distances: np.ndarray) -> None:
        records = np.empty((len(ids), self.table.dim + 1), np.float32)
        records[:, :-1] = distances
        records[:, -1:].view(np.int32)[:] = self.updates
        self._distances.assign(ids, records)

    def _at(self, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the averages, float64, of rows that have not changed since the last update."""
        records = self._distances.lookup(ids)
        kept = self._kept(records[:, -1:].view(np.int32).astype(np.int64))
        return rows + kept * records[:, :-1]

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Return the averages of rows: float32 ``ids.shape + (dim,)``."""
        self._check_version()
        plan = make_plan(np.asarray(ids, np.int64))
        rows, old = self.table.lookup(plan.ids), self._old_rows()
        if len(old.ids):  # steps since the last update do not count yet
            place = np.minimum(np.searchsorted(old.ids, plan.ids), len(old.ids) - 1)
            changed = old.ids[place] == plan.ids
            rows[changed] = old.rows[place[changed]]
        averages = self._at(plan.ids, rows).astype(np.float32)
        return averages[plan.inverse].reshape(*plan.shape, self.table.dim)

    def load(self, ids: np.ndarray, averages: np.ndarray) -> None:
        """Replace all averages by those of some rows, after `updates`; the others are equal to their rows."""
        self._follow_from_here()
        self._distances = Table(None, self.table.dim + 1, init=Zeros(), seed=0)
        self._store(ids, averages.astype(np.float64) - self.table.lookup(ids))


class _AveragedExecutor(CpuExecutor):
    """Rows that are averages, for lookups: a `Executor` that never steps."""

    def __init__(self, average: RowAverage) -> None:
        super().__init__(average.table)
        self._average = average

    def lookup(self, ids: Tensor) -> Tensor:
        """Return averages: float32 ``ids.shape + (dim,)``."""
        return self.read(self.plan(ids, trains=False))

    def read(self, plan: Plan) -> Tensor:
        """Return the average of each position: float32 ``plan.shape + (dim,)``."""
        return torch.from_numpy(self.read_rows(plan)[plan.inverse].reshape(*plan.shape, self.table.dim))

    def read_rows(self, plan: Plan) -> np.ndarray:
        """Return each average once: float32 (unique, dim)."""
        return self._average.of(plan.ids)


class AveragedHandle(Handle):
    """The handle of layers whose rows are averages. It never trains.

    Attributes:
        average: of the rows.
    """

    average: RowAverage

    @staticmethod
    def of(handle: Handle, decay: float | None) -> AveragedHandle:
        """Average the rows of a handle from now on."""
        handle.check_whole("averaged")
        average, made = RowAverage(handle, decay), AveragedHandle(handle.table)
        made.average, made.label = average, f"the average of {handle.label}"
        made.pending.executor = made._host = _AveragedExecutor(average)
        made.requires_grad_(False)
        made.move(handle.device)
        return made

    @property
    def rows_on(self) -> None:
        """None: averages are made by the CPU."""

    def executor(self) -> CpuExecutor:
        """Return where lookups find averages."""
        return self._host

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return averages: float32 ``ids.shape + (dim,)``. Raises what `Handle.rows` raises."""
        self.check_untouched()
        return self.average.of(ids)

    def receive(self, grads: Gradients, node: Any, run: BackwardPass | None = None) -> NoReturn:
        """Refuse to train: a step would move the rows that are averaged."""
        raise UnsupportedError(
            f"{self.label} cannot train: it follows the rows of a model. Freeze it by requires_grad_(False); or load "
            "averaged.module.state_dict() into a model of its own, and train that."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickled")

    def _refuse(self, done: str) -> NoReturn:
        raise UnsupportedError(
            f"{self.label} cannot be {done}: it follows the rows of a model. Save averaged.state_dict(), and make "
            "another one by ert.average(model)."
        )
