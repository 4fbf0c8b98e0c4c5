"""`RowAverage`: the average of a table's rows over training steps, stored for changed rows only."""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any, NamedTuple, NoReturn

import numpy as np
from torch import nn
from torch.optim import swa_utils

from embedrock.batch.plan import make_plan
from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.frontend.arguments import is_number, lags_behind, write_batches
from embedrock.initializers import Zeros
from embedrock.optimizers import Rule
from embedrock.table.missing import Missing
from embedrock.table.table import Table, rows_of
from embedrock.torch.training.backward import BackwardPass
from embedrock.torch.training.cpu_executor import CpuExecutor
from embedrock.torch.training.executor import Gradients
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.handle_value import Factors
from embedrock.torch.training.parameters import handles

ROUNDING = 1e-6  # of the sum of the factors in an update


class _RowsBefore(NamedTuple):
    ids: np.ndarray  # int64 (n,)
    rows: np.ndarray  # float32 (n, dim), before a step


class RowAverage:
    """Running average of rows: an update sets ``average = keep * average + (1 - keep) * row``.

    The distance of an unchanged row from its average shrinks by the same factor for all rows. So only the distance at
    the row's last change is stored, with the logarithm of the product of all factors until then. The cost of an update
    grows with the rows stepped since the previous update. The average of any row is known at any time.

    Args:
        handle: handle of the rows. It notifies this object of each step.

    Attributes:
        is_copy: the averages are the rows as they are until the next step.
        changes: number of changes of the averages.

    Raises:
        UnsupportedError: rows change without a step.
    """

    def __init__(self, handle: Handle) -> None:
        self.table, self.handle, self.changes = handle.table, handle, 0
        self._log_kept = 0.0  # logarithm of the product of all `keep`
        self.check_rule(self.table.rule)
        self._loaded: tuple[np.ndarray, np.ndarray] | None = None  # ids and averages
        self._clear()
        handle.followers = handle.followers or weakref.WeakSet()
        handle.followers.add(self)

    def note(self, grads: Gradients) -> None:
        """Record the rows before a step by these gradients."""
        self.handle.check_shows_rows("stepped")
        self.check_rule(self.table.rule)
        if self._is_lost():
            return  # an error at its next use, and none in steps of a model that goes on without it
        self.settle()
        ids = grads.row_ids()
        self._noted.append(_RowsBefore(ids, self.table.lookup(ids)))
        if sum(len(old.ids) for old in self._noted) > len(self._old.ids):  # else their number grows with the steps
            self._old_rows()
        self._latest = rows_of(self.table).version.of_rows + 1  # version after the step, which may be refused

    def refuse_in_model(self, done: str) -> NoReturn:
        """Raise the error of an action while the model shows the averages."""
        raise UnsupportedError(
            f"rows of {self.handle.label} cannot be {done}: the layer shows their averages, as in the validation of "
            "Lightning's WeightAveraging. Swap the model and its average back before, or load a state dict into the "
            "model. After an interrupted validation, callback._swap_models(model) of Lightning swaps."
        )

    def _is_lost(self) -> bool:
        """Return whether something else than a step changed the rows, and no averages were loaded since."""
        return self._loaded is None and rows_of(self.table).version.of_rows > self._latest

    def _follow_from_here(self) -> None:
        """Take the current rows as the last update, and record changes from here."""
        self._old = _RowsBefore(np.empty(0, np.int64), np.empty((0, self.table.dim), np.float32))  # ascending ids
        self._noted: list[_RowsBefore] = []  # rows recorded since then
        self._latest = rows_of(self.table).version.of_rows

    def check_rule(self, rule: Rule | None) -> None:
        """Raise `UnsupportedError` if rows with a rule change without a step."""
        spec, max_norm = self.table.spec, self.handle.max_norm
        if lags_behind(rule):
            what = f"{rule}"
        elif max_norm is not None:
            what = f"{max_norm=}"
        elif spec.eviction is not None:
            what = f"{spec.eviction}"
        elif spec.admission is not None and spec.admission.default == "shared":
            what = f"{spec.admission}"
        else:
            return
        raise UnsupportedError(
            f"rows of {self.handle.label} cannot be averaged: with {what} they change without a step that says so. "
            "Leave that out, or the average."
        )

    def settle(self) -> None:
        """Take over loaded averages. Copy the rows if the averages are a copy. Check that only steps changed rows."""
        if self._loaded is not None:
            (ids, averages), self._loaded = self._loaded, None
            self._clear()
            self._store(ids, averages.astype(np.float64) - self.table.lookup(ids))
        if self._is_lost():
            raise UnsupportedError(
                f"rows of {self.handle.label} were changed by something else than an optimizer's step (assign, "
                "load_state_dict, rollback, table.update), so that their average is not known. Make it anew: "
                "ert.average(model)."
            )
        if self.is_copy and self.handle.shown is not self:
            self._clear()

    def _clear(self) -> None:
        """Set all averages to the rows."""
        self._follow_from_here()
        # Distances of averages from rows. The last two columns are the logarithm at the time of the distance, as a
        # float32 and its rest. Open ids, because the table may grow.
        self._distances = Table(None, self.table.dim + 2, init=Zeros(), seed=0)
        self.is_copy, self.changes = False, self.changes + 1

    def update(self, keep: float) -> None:
        """Set averages to ``keep * average + (1 - keep) * row``."""
        self.settle()
        old = self._old_rows()
        averages = self._at(old.ids, old.rows)
        self._log_kept += math.log(keep)
        if len(old.ids):
            self._store(old.ids, (averages - self.table.lookup(old.ids).astype(np.float64)) * keep)
        self._follow_from_here()
        self.changes += 1

    def become_rows(self) -> None:
        """Overwrite the rows with their averages. The optimizer state of rows stays."""
        ids = self.ids()
        for part in write_batches(self.table, len(ids)):
            self.table.assign(ids[part], self._values(ids[part]))
        self._clear()

    def _old_rows(self) -> _RowsBefore:
        """Return the rows changed since the last update, with their values then. Ids are unique and ascending."""
        if self._noted:
            parts = [self._old, *self._noted]
            ids, first = np.unique(np.concatenate([part.ids for part in parts]), return_index=True)
            self._old, self._noted = _RowsBefore(ids, np.concatenate([part.rows for part in parts])[first]), []
        return self._old

    def _store(self, ids: np.ndarray, distances: np.ndarray) -> None:
        records = np.empty((len(ids), self.table.dim + 2), np.float32)
        records[:, :-2], records[:, -2] = distances, self._log_kept
        records[:, -1] = self._log_kept - records[:, -2].astype(np.float64)
        self._distances.assign(ids, records)

    def _at(self, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the averages, float64, of rows that have not changed since the last update."""
        records = self._distances.lookup(ids)
        kept = np.exp(self._log_kept - records[:, -2:].sum(1, np.float64, keepdims=True))
        return rows + kept * records[:, :-2]

    def ids(self) -> np.ndarray:
        """Return the ids of rows that may differ from their averages, int64 (n,), ascending."""
        self.settle()
        return np.union1d(self._distances.export()[0], self._old_rows().ids)

    def of(self, ids: np.ndarray, in_model: bool = False) -> np.ndarray:
        """Return the averages of rows: float32 ``ids.shape + (dim,)``. `in_model`: the model shows them."""
        if in_model is not (self.handle.shown is self):
            self.refuse_in_model("read in the average's place")
        self.settle()
        return self._values(np.asarray(ids, np.int64))

    def _values(self, ids: np.ndarray) -> np.ndarray:
        plan = make_plan(ids)
        rows, old = self.table.lookup(plan.ids), self._old_rows()
        if len(old.ids):  # the last update does not include later steps
            place = np.minimum(np.searchsorted(old.ids, plan.ids), len(old.ids) - 1)
            changed = old.ids[place] == plan.ids
            rows[changed] = old.rows[place[changed]]
        averages = self._at(plan.ids, rows).astype(np.float32)
        return averages[plan.inverse].reshape(*plan.shape, self.table.dim)

    def executor(self, in_model: bool = False) -> CpuExecutor:
        """Return an executor of the averages. `in_model`: the model shows them."""
        return CpuExecutor(self.table, rows=lambda plan: self.of(plan.ids, in_model))

    def load(self, ids: np.ndarray, averages: np.ndarray) -> None:
        """Replace all averages by those of some rows. Other averages equal their rows, which may be loaded later."""
        self._loaded = ids, averages


class AveragedHandle(Handle):
    """Handle of layers with averages as rows. It never trains."""

    average: RowAverage

    @staticmethod
    def of(handle: Handle) -> AveragedHandle:
        """Make the handle of the averages of a handle's rows."""
        handle.check_whole("averaged")
        handle.check_shows_rows("averaged")
        average, made = RowAverage(handle), AveragedHandle(handle.table)
        made.average, made.label = average, f"the average of {handle.label}"
        made.pending.executor = made._host = average.executor()
        made.requires_grad_(False)
        made.is_watched = True  # so that `receive` refuses at once
        made.move(handle.device)
        return made

    @property
    def rows_on(self) -> None:
        """None: the CPU computes averages."""

    def executor(self) -> CpuExecutor:
        return self._host

    def rows(self, ids: np.ndarray, missing: Missing | None = None) -> np.ndarray:
        self.check_untouched()
        return self.average.of(ids)

    def receive(self, grads: Gradients, node: Any, run: BackwardPass) -> NoReturn:
        """Refuse to train: a step would change the averaged rows."""
        raise UnsupportedError(
            f"{self.label} cannot train: it follows the rows of a model. Freeze it by requires_grad_(False); or load "
            "averaged.module.state_dict() into a model of its own, and train that."
        )

    def factors(self) -> Factors:
        average = self.average
        average.settle()
        return average.handle.own_factors() if average.is_copy else {(average, average.changes): 1.0}

    def write(self, factors: Factors) -> None:
        """Update the average, or make it a copy of the rows or of itself."""
        average, rows = self.average, self.average.handle.own_factors()
        keep = factors.get((average, average.changes), 0.0)
        is_average = abs(sum(factors.values()) - 1.0) < ROUNDING and 0.0 <= keep <= 1.0
        if not is_average or not factors.keys() <= {(average, average.changes), *rows}:
            self.refuse_write()
        if keep in (0.0, 1.0):
            average.is_copy = keep == 0.0
        else:
            average.update(keep)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickled")

    def _refuse(self, done: str) -> NoReturn:
        raise UnsupportedError(
            f"{self.label} cannot be {done}: it follows the rows of a model. Save averaged.state_dict(), and make "
            "another one by ert.average(model)."
        )


def _averaged_copies(memo: dict[int, Any]) -> None:
    """Make handles of averages of a model's rows, if PyTorch's `AveragedModel` is copying the model."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not swa_utils.AveragedModel.__init__.__code__:
        frame = frame.f_back
    if frame is not None:
        followed = [handle for handle in handles(frame.f_locals["model"]) if handle.average is None]
        memo |= {id(handle): AveragedHandle.of(handle) for handle in followed}
        memo |= {id(handle.table): handle.table for handle in followed}  # the rows are not copied


Handle.before_copy = staticmethod(_averaged_copies)


class AveragedModel(swa_utils.AveragedModel):
    """Model of averages, made by `average`. Call it as the model.

    Attributes:
        module: the model with averages in place of weights and rows. It does not train. A model like the first can load
            ``module.state_dict()``, which has the averages of stepped rows.
        n_averaged: number of updates.

    Args:
        model, decay: as for `average`.

    Example:
        >>> import embedrock.torch as ert
        >>> model = ert.Embedding(10, 4)
        >>> averaged = ert.average(model, decay=0.99)
        >>> averaged.update_parameters(model)
        >>> int(averaged.n_averaged)
        1
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        if decay is not None and not (is_number(decay) and 0 <= decay <= 1):
            raise ArgumentError(f"`decay` of ert.average must be a number from 0 to 1, or None: got {decay!r}.")
        super().__init__(model, multi_avg_fn=None if decay is None else swa_utils.get_ema_multi_avg_fn(decay))
        self.module.requires_grad_(False)


def average(model: nn.Module, decay: float | None = 0.999) -> AveragedModel:
    """Return a model with averages over training of dense weights and rows, as PyTorch's `AveragedModel`.

    Call its `update_parameters(model)` after each step. The cost of an update grows with the rows stepped since the
    previous update. RAM is needed for all rows stepped since the average was made.

    Args:
        model: model with embedding layers. Only Embedrock's optimizers may step their rows.
        decay: factor of an exponential average (EMA) at each update; None: all updates count the same (SWA).

    Raises:
        ArgumentError: `decay` is not a number from 0 to 1.
        UnsupportedError: rows change without a step: with ``dense=True``, ``max_norm``, an eviction or the default row
            of an admission.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> model = nn.Sequential(ert.Embedding(10**9, 4), nn.Linear(4, 1))
        >>> optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=1e-3)
        >>> averaged = ert.average(model, decay=0.99)
        >>> for ids in torch.arange(6).reshape(3, 2):
        ...     model(ids).sum().backward()
        ...     optimizer.step(); optimizer.zero_grad()
        ...     averaged.update_parameters(model)
        >>> averaged(torch.tensor([3])).shape
        torch.Size([1, 1])
    """
    return AveragedModel(model, decay)
