"""Attaching a table's rows to a GPU: choosing an executor and its share of GPU memory."""

from __future__ import annotations

import gc
import sys
import warnings

import torch

from embedrock.device.dense import DenseGpuExecutor
from embedrock.device.device_errors import in_use
from embedrock.device.executor import GpuExecutor, drawn_by, form_of
from embedrock.device.hashed import HashedGpuExecutor
from embedrock.device.host_planned import HostPlannedExecutor
from embedrock.device.mirror import DeviceMirror
from embedrock.device.pinned import PinningError, PinningWarning
from embedrock.device.stream_order import StreamOrder, enough_memory
from embedrock.errors import UnsupportedError
from embedrock.kernels.gpu.runtime import is_interpreted
from embedrock.spec.spec import Spec
from embedrock.storage import device_layout as device_placing
from embedrock.storage.backend import Backend
from embedrock.storage.device_layout import DeviceDemand, DeviceLayout, need_of, open_bytes, slot_bytes
from embedrock.storage.listeners import PlacementWarning
from embedrock.storage.ram_backend import RamBackend
from embedrock.storage.record_pools import RecordRange
from embedrock.system.ram import available_bytes, memory_limit
from embedrock.system.sizes import format_bytes, parse_bytes
from embedrock.table.group import device_memory_of
from embedrock.table.missing import check_reads
from embedrock.table.rows import TableState
from embedrock.table.table import Table, rows_of

LEAST_CAPABILITY = (7, 0)  # the lowest that Triton compiles for
MAX_ROWS = 2**31 - 1  # the most that a GPU can plan: device slots are int32


def side_of(table: Table, device: torch.device) -> GpuExecutor | None:
    """Return the executor of a table on a device, creating it if needed; None where the CPU has to use the rows.

    The CPU uses them if the system refuses to pin RAM. A warning reports that.

    A GPU must be given with its index.

    Raises:
        UnsupportedError: the device lacks features that the kernels need, rows of another table are on another GPU, or
            a stream is being captured.
        MemoryBudgetError: the device has too little memory.
    """
    _check_only_gpu(table, device)
    _check_capability(device)
    rows = rows_of(table)
    check_reads(rows.missing, table.subject, is_elsewhere=True)
    with rows.table_lock.alone(beside_executors=True):  # two executors would lose the first one's gradients
        executor = rows.executor
        if isinstance(executor, GpuExecutor) and executor.is_used_on(device):
            return executor
        rows.leave_side()
        try:
            what = f"{table.subject}, to keep its rows on {device},"
            with StreamOrder(device, table.subject).ordered(), enough_memory(what):
                made = _made(table, device)
        except PinningError as error:
            told = f"rows of {table.subject} are read and stepped by the CPU, and copied: {error}"
            warnings.warn(told, PinningWarning, stacklevel=4)
            return None
        made.timeline.begin()
        rows.attach(made)
        return made


def _made(table: Table, device: torch.device) -> GpuExecutor:
    """Create an executor: one whose slots are ids, one with a hash index on the device, or one that the host plans."""
    given, rows, spec = device_memory_of(table), rows_of(table), table.spec
    budget = _budget(table, given, device)
    chosen = _dense_layout(spec, budget)
    backend = None if chosen is None else _laid_out(rows, "direct")
    if chosen is not None and backend is not None:
        if chosen.mode == "device":
            _warn_of_little_ram(table)
        if chosen.mode == "host" and given and table.device_memory is None:
            _warn(
                f"{table.subject} gets none of device_memory={given!r} of its group, as other tables and what tells "
                "where rows are take all of it: its rows stay in RAM, where the GPU reads and steps them. Make all "
                "tables of a group before the first of them is used, or raise it.",
                stacklevel=6,
            )
        return DenseGpuExecutor(rows, backend, device, chosen)
    budget = 0 if given is None else budget
    backend = None if _is_planned_by_host(spec) else _laid_out(rows, "hashed")
    # The GPU gives new ids the slots after the last one. It never reuses slots of deleted rows.
    if backend is not None and backend.count == backend.used_slots:
        executor = HashedGpuExecutor(rows, backend, device, budget)
    else:
        pool = _pool_of(table)
        for mirror in _mirrors(table):  # of other members
            if mirror.backend is pool and mirror.device == device:
                return HostPlannedExecutor(rows, mirror)
        budget, most = _budget_of_pool(table, budget, device), _most_rows(table)
        with rows.table_lock.lock:
            executor = HostPlannedExecutor(rows, DeviceMirror(pool, device, form_of(spec), budget, most))
    if given and not executor.cache.placement.near_rows:
        _warn_of_no_room(table, given)
    return executor


def _dense_layout(spec: Spec, budget: int) -> DeviceLayout | None:
    """Return the layout of a table whose slots are ids; None where they cannot be."""
    if not _has_slots_of_ids(spec):
        return None
    chosen = device_placing.choose(spec, budget)
    # RAM for all rows is pinned at once.
    return chosen if chosen.mode == "device" or (spec.table_bytes or 0) <= available_bytes() else None


def _has_slots_of_ids(spec: Spec) -> bool:
    return spec.rows is not None and spec.rows <= MAX_ROWS and not _is_planned_by_host(spec)


def _is_planned_by_host(spec: Spec) -> bool:
    """Return whether the host has to plan a table's batches, wherever its slot index is."""
    return drawn_by(spec.init) is None or spec.has_residents or bool(spec.frozen)


def _laid_out(rows: TableState, index: str) -> RamBackend | None:
    """Lay a table out in RAM with a kind of index, if possible, and return its backend; else None."""
    with rows.table_lock.alone():
        rows.check()
        return rows.lay_out_in_ram(index)


def _budget_of_pool(table: Table, budget: int, device: torch.device) -> int:
    """Return the GPU memory for host-planned rows; for a pool, the sum of its members' own sizes."""
    if table.group is None or table.group.device_memory is not None:
        return budget
    pool = _pool_of(table)
    given = [each.device_memory for each in table.group.open_tables() if _pool_of(each) is pool]
    return sum(_bytes_of(size, device) for size in given if size is not None)


def _most_rows(table: Table) -> int:
    """Return the maximum number of rows in a table's backend, which may be a pool."""
    backend = rows_of(table).tier
    specs = [part.spec for part in backend.pool.parts.values()] if isinstance(backend, RecordRange) else [table.spec]
    return sum(map(_limit, specs))


def _limit(spec: Spec) -> int:
    most = None if spec.eviction is None else spec.eviction.most_rows(spec.record_bytes)
    return min((rows for rows in (spec.rows, most) if rows is not None), default=sys.maxsize)


def _mirrors(table: Table) -> list[DeviceMirror]:
    """Return the device mirrors of all pools of a table's group, without repeats."""
    executors = [] if table.group is None else [each.executor for each in table.group.open_tables()]
    hosted = [one for one in executors if isinstance(one, HostPlannedExecutor) and one.is_current]
    return list(dict.fromkeys(executor.mirror for executor in hosted))


def _pool_of(table: Table) -> Backend:
    """Return the backend that holds the records: for a member, its pool's."""
    return rows_of(table).tier.pool


def _warn_of_no_room(table: Table, given: int | str) -> None:
    least = device_placing.memory_for(table.spec, 1, _pool_of(table).used_slots if table.is_on_disk else 1)
    whose = "" if table.device_memory is not None else " of its group, or what other pools leave of it,"
    _warn(
        f"device_memory={given!r} of {table.subject}{whose} has room for no row: its rows stay in RAM, where the GPU "
        f"reads and steps them. {format_bytes(least)} are needed for one, with what tells where rows are."
    )


def _warn(text: str, stacklevel: int = 7) -> None:
    warnings.warn(text, PlacementWarning, stacklevel=stacklevel)


def _budget(table: Table, given: int | str | None, device: torch.device) -> int:
    if given is None:
        return _free_bytes(device) // device_placing.FREE_SHARE
    whole = _bytes_of(given, device)
    return whole if table.device_memory is not None or not whole else _share(table, whole)


def _share(table: Table, budget: int) -> int:
    """Return a member's share of its group's GPU memory, after the members that have their own size."""
    if table.is_on_disk:
        return _share_of_pool(table, budget)
    others = {each: _taker(each) for each in table.group.open_tables() if each is not table}
    taken = {
        taker: _taken(each.executor)
        for each, taker in others.items()
        if isinstance(each.executor, GpuExecutor) and each.executor.is_current
    }
    known = {_taker(table), *taken}
    waiting = {taker: each for each, taker in others.items() if each.device_memory is None and taker not in known}
    needs = _need(table), [_need(each) for each in waiting.values()]
    return device_placing.share(*needs, budget - sum(taken.values()))


def _taken(executor: GpuExecutor) -> int:
    """Return the bytes of GPU memory that a member in RAM takes, or may take, with others of its pool."""
    if isinstance(executor, HashedGpuExecutor):
        return executor.budget
    if isinstance(executor, HostPlannedExecutor):
        return executor.mirror.cache.placement.near_rows * slot_bytes(executor.spec)
    return executor.cache.placement.bytes


def _taker(table: Table) -> Table | Backend:
    """Return the unit that shares GPU memory: the table itself or, where the host plans, its pool."""
    return _pool_of(table) if _is_planned_by_host(table.spec) else table


def _need(table: Table) -> DeviceDemand:
    spec = table.spec
    if _has_slots_of_ids(spec):
        return need_of(spec)
    if _is_planned_by_host(spec):
        return DeviceDemand(0, _most_rows(table) * slot_bytes(spec))
    return DeviceDemand(0, (spec.rows or sys.maxsize) * open_bytes(spec))


def _share_of_pool(table: Table, budget: int) -> int:
    """Return the share of GPU memory of a pool on disk, after the pools that have theirs."""
    mirrors, own = _mirrors(table), _pool_of(table)
    budget -= sum(mirror.cache.placement.bytes for mirror in mirrors)
    have = {id(backend) for backend in (own, *(mirror.backend for mirror in mirrors))}
    others = [backend for backend in table.group.pools.tiers if id(backend) not in have]
    needs = [need_of(backend.spec, backend.used_slots) for backend in (own, *others)]
    return device_placing.share(needs[0], needs[1:], budget)


def _warn_of_little_ram(table: Table) -> None:
    needed, there = table.spec.table_bytes or 0, available_bytes()
    if needed > there:
        _warn(
            f"{table.subject} fits the GPU's memory, but not the RAM that is free: {format_bytes(needed)} needed to "
            f"save or read all of its rows, {format_bytes(there)} free. Training goes on; saving it will be refused "
            "once more rows are in use than RAM has room for."
        )


def _bytes_of(size: int | str, device: torch.device) -> int:
    """Return a size in bytes. A percentage refers to the GPU's total memory."""
    if not isinstance(size, str):
        return size
    if device.type != "cuda":
        return parse_bytes(size, "device_memory", memory_limit)
    return parse_bytes(size, "device_memory", lambda: torch.cuda.get_device_properties(device).total_memory)


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return memory_limit()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # PyTorch's free cache
    return torch.cuda.mem_get_info(device)[0] + kept


def _check_only_gpu(table: Table, device: torch.device) -> None:
    if _elsewhere(table, device):
        gc.collect()  # frees models that nothing references any more
    for rows, other in _elsewhere(table, device):
        raise UnsupportedError(
            f"rows of {table.subject} cannot be used on {device}: those of {rows.subject} are on {other}, "
            "and a process uses rows on one GPU. Put all embedding layers of a process on one GPU, and start a "
            "process for each (torchrun; docs/shards.md), or leave these layers on the CPU."
        )


def _elsewhere(table: Table, device: torch.device) -> list[tuple[TableState, torch.device]]:
    """Return the rows of other tables that are on another GPU, each with its device."""
    executors = ((rows, rows.executor) for rows in in_use() if rows is not rows_of(table))
    devices = [(rows, executor.device) for rows, executor in executors if isinstance(executor, GpuExecutor)]
    return [(rows, other) for rows, other in devices if other.type == "cuda" and other != device]


def _check_capability(device: torch.device) -> None:
    if device.type == "cpu":
        return check_interpreter()
    has = torch.cuda.get_device_capability(device)
    if has < LEAST_CAPABILITY:
        need = ".".join(map(str, LEAST_CAPABILITY))
        raise UnsupportedError(
            f"{device} has compute capability {has[0]}.{has[1]}, and kernels of embedding rows need {need}. "
            "Leave the embedding layers on the CPU."
        )


def check_interpreter() -> None:
    """Raise `UnsupportedError` unless Triton interprets kernels on CPU tensors."""
    if not is_interpreted():
        raise UnsupportedError(
            "kernels for GPUs run on CPU tensors in Triton's interpreter only. Set TRITON_INTERPRET=1 before Python "
            "starts, or place the rows on a GPU."
        )
