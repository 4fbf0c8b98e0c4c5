"""`RowAverage`: the average of a table's rows over training steps, stored for changed rows only."""

from __future__ import annotations

import copy
import weakref
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from embedrock.batch.plan import make_plan
from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.frontend.arguments import is_number, lags_behind
from embedrock.initializers import Zeros
from embedrock.table.missing import Missing
from embedrock.table.table import Table, rows_of
from embedrock.torch.training.backward import BackwardPass
from embedrock.torch.training.cpu_executor import CpuExecutor
from embedrock.torch.training.executor import Gradients
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.parameters import dense_parameters, handles


class _RowsBefore(NamedTuple):
    ids: np.ndarray  # int64 (n,)
    rows: np.ndarray  # float32 (n, dim), before a step


class RowAverage:
    """Running average of rows: an update sets ``average = keep * average + (1 - keep) * row``.

    The distance of an unchanged row from its average shrinks by the same factor for all rows. So only the distance at
    the row's last change is stored, with the number of that update. The cost of an update grows with the rows stepped
    since the previous update. The average of any row is known at any time.

    Args:
        handle: handle of the rows. It notifies this object of each step.
        decay: factor of the average in an update, for an exponential average; None: all updates have equal weights.

    Raises:
        UnsupportedError: rows change without a step.
    """

    def __init__(self, handle: Handle, decay: float | None) -> None:
        table = handle.table
        self.table, self.decay, self.updates = table, decay, 0
        self._label = handle.label
        self._check_steps_tell(handle.max_norm)
        # Distances of averages from rows. The last column holds the bits of an int32: the update of that distance.
        # Open ids, because the table may grow.
        self._distances = Table(None, table.dim + 1, init=Zeros(), seed=0)
        self._follow_from_here()
        handle.followers = handle.followers or weakref.WeakSet()
        handle.followers.add(self)

    def note(self, grads: Gradients) -> None:
        """Record the rows before a step by these gradients."""
        self._check_version()
        self._check_steps_tell()
        ids = grads.row_ids()
        self._noted.append(_RowsBefore(ids, self.table.lookup(ids)))
        if sum(len(old.ids) for old in self._noted) > len(self._old.ids):  # else their number grows with the steps
            self._old_rows()
        self._latest = rows_of(self.table).version.of_rows + 1  # version after the step, which may be refused

    def _follow_from_here(self) -> None:
        """Take the current rows as the last update, and record changes from here."""
        self._old = _RowsBefore(np.empty(0, np.int64), np.empty((0, self.table.dim), np.float32))  # ascending ids
        self._noted: list[_RowsBefore] = []  # rows recorded since then
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
        self._check_version()
        old = self._old_rows()
        averages = self._at(old.ids, old.rows)
        self.updates += 1
        if len(old.ids):
            rows = self.table.lookup(old.ids).astype(np.float64)
            self._store(old.ids, (averages - rows) * self._kept(self.updates - 1))
        self._follow_from_here()

    def _old_rows(self) -> _RowsBefore:
        """Return the rows changed since the last update, with their values then. Ids are unique and ascending."""
        if self._noted:
            parts = [self._old, *self._noted]
            ids, first = np.unique(np.concatenate([part.ids for part in parts]), return_index=True)
            self._old, self._noted = _RowsBefore(ids, np.concatenate([part.rows for part in parts])[first]), []
        return self._old

    def _kept(self, since: int | np.ndarray) -> np.ndarray:
        """Return the current share of a distance stored at an update. Before all updates, the first update copies the
        rows.
        """
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
        if len(old.ids):  # the last update does not include later steps
            place = np.minimum(np.searchsorted(old.ids, plan.ids), len(old.ids) - 1)
            changed = old.ids[place] == plan.ids
            rows[changed] = old.rows[place[changed]]
        averages = self._at(plan.ids, rows).astype(np.float32)
        return averages[plan.inverse].reshape(*plan.shape, self.table.dim)

    def load(self, ids: np.ndarray, averages: np.ndarray) -> None:
        """Replace all averages, after `updates`, by those of some rows. Other averages equal their rows."""
        self._follow_from_here()
        self._distances = Table(None, self.table.dim + 1, init=Zeros(), seed=0)
        self._store(ids, averages.astype(np.float64) - self.table.lookup(ids))


class AveragedHandle(Handle):
    """Handle of layers with averages as rows. It never trains."""

    average: RowAverage

    @staticmethod
    def of(handle: Handle, decay: float | None) -> AveragedHandle:
        handle.check_whole("averaged")
        average, made = RowAverage(handle, decay), AveragedHandle(handle.table)
        made.average, made.label = average, f"the average of {handle.label}"
        made.pending.executor = made._host = CpuExecutor(handle.table, rows=lambda plan: average.of(plan.ids))
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

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickled")

    def _refuse(self, done: str) -> NoReturn:
        raise UnsupportedError(
            f"{self.label} cannot be {done}: it follows the rows of a model. Save averaged.state_dict(), and make "
            "another one by ert.average(model)."
        )


class AveragedModel(nn.Module):
    """Model of averages, made by `average`. Call it as the model.

    Attributes:
        module: the model with averages in place of weights and rows. Rows of the module do not train.
            ``module.state_dict()`` has the averages of stepped rows. It can be loaded into a model with rows in RAM.
        n_averaged: number of updates.
    """

    n_averaged: Tensor

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        super().__init__()
        if decay is not None and not (is_number(decay) and 0 <= decay <= 1):
            raise ArgumentError(f"`decay` of ert.average must be a number from 0 to 1, or None: got {decay!r}.")
        averaged = {handle: AveragedHandle.of(handle, decay) for handle in handles(model)}
        memo: dict[int, Any] = {id(handle): mine for handle, mine in averaged.items()}
        memo |= {id(handle.table): handle.table for handle in averaged}  # their rows are not copied
        self.module = copy.deepcopy(model, memo).requires_grad_(False)
        self._averages = [mine.average for mine in averaged.values()]
        self._average_dense = (
            swa_utils.get_swa_multi_avg_fn() if decay is None else swa_utils.get_ema_multi_avg_fn(decay)
        )
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device="cpu"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the current weights and rows of the model to the averages. Call it after each step.

        The cost grows with the dense weights, and with the rows stepped since the last update.

        Raises:
            UnsupportedError: rows changed without an optimizer's step.
        """
        for average in self._averages:
            average.update()
        mine = [parameter.detach() for parameter in dense_parameters(self.module)]
        theirs = [t.detach().to(m.device) for m, t in zip(mine, dense_parameters(model), strict=True)]
        if self.n_averaged == 0:
            for averaged, parameter in zip(mine, theirs, strict=True):
                averaged.copy_(parameter)
        elif mine:
            self._average_dense(mine, theirs, self.n_averaged)
        for averaged, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            averaged.copy_(buffer)
        self.n_averaged += 1

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for average in self._averages:  # before their rows are loaded
            average.updates = int(self.n_averaged)


def average(model: nn.Module, decay: float | None = 0.999) -> AveragedModel:
    """Return a model with averages over training of dense weights and rows. PyTorch's own average cannot reach rows.

    The averages are those of `torch.optim.swa_utils.AveragedModel` over all weights of all rows. The cost of an update
    grows with the rows stepped since the previous update. RAM is needed for all rows ever stepped.

    Args:
        model: model with embedding layers. Only Embedrock's optimizers may step their rows.
        decay: factor of an exponential average (EMA) at each update; None: all updates count the same (SWA).

    Raises:
        ArgumentError: `decay` is not a number from 0 to 1.
        UnsupportedError: rows change without a step: with ``dense=True``, ``max_norm``, an eviction or the default row
            of an admission.

    Example:
        >>> import embedrock.torch as ert
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
