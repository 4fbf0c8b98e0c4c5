"""`DevicePlannedExecutor`: base of the executors that plan on the GPU, also together with other tables."""

from __future__ import annotations

from embedrock.device.copies import uploaded
from embedrock.device.executor import GpuExecutor, drawn_by
from embedrock.kernels.gpu.rows import InitialRecord

COPIED_ROWS, COPIED_BYTES = 1 << 20, 64 << 20  # at most at a time, between GPU memory and unpinned RAM


class DevicePlannedExecutor(GpuExecutor):
    """Executor that plans on the GPU, and draws initial values there."""

    plans = True

    def _draw_on_device(self) -> None:
        drawn = drawn_by(self.spec.init)
        assert drawn is not None  # else the host plans, and draws
        self.first = InitialRecord(drawn, uploaded(self.spec.first_state, self.device))

    def _check_open(self) -> None:
        rows = self._rows_of()
        rows.table_lock.settle_steps()
        rows.tier  # noqa: B018  # it is open

    @property
    def _rows_at_a_time(self) -> int:
        return max(1, min(COPIED_ROWS, COPIED_BYTES // self.spec.record_bytes))
