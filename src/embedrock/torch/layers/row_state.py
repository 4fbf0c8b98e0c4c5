"""Rows in `state_dict`: tensors of plain dtypes under ``<layer>.rows.``, which every saver of tensors can save.

A table in RAM has ``ids`` int64 (n,) and ``weight`` (n, dim) of the table's dtype. Each state column of its rule is
float32 (n, dim) or (n, 1). Rules that remember steps add ``history_*``. ``meta`` is uint8: the bytes of a JSON object
with all else. A table on disk has only ``meta``, a reference. Empty arrays are left out, because some savers take all
of them for one tensor. No tensor shares memory with the rows, or with another tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedrock.admission.lifecycle import PREFIX, RowLifecycle
from embedrock.admission.moving import moved
from embedrock.distributed.owners import Shard
from embedrock.errors import ArgumentError
from embedrock.frontend.references import is_reference, lasting_reference_to, reference_to_parts
from embedrock.initializers import Zeros
from embedrock.spec.description import policies_of, rule_of
from embedrock.spec.spec import STATE_BYTES, Spec
from embedrock.system.scopes import set_within
from embedrock.table import saved
from embedrock.table.table import Table, rows_of
from embedrock.torch.layers.arguments import DTYPES
from embedrock.torch.training.averages import RowAverage

ROWS = "rows."
META, IDS, WEIGHT, HISTORY = ROWS + "meta", ROWS + "ids", ROWS + "weight", ROWS + saved.HISTORY
LIFECYCLE = HISTORY + PREFIX
OF_PART = re.compile(r"part-(\d+)-of-(\d+)\.(.+)")
META_BYTES = 512  # minimal size: code that keeps tensors of equal shapes must not drop it by its length
AVERAGES = "averages"  # key of ids and weights of averages, beside a reference
HOLDER = "state_dict"  # holder of commits that state dicts refer to
PART = "part"  # key of the rank and the number of ranks, for rows in RAM that processes share
OLD = "_extra_state"  # key of a dict in earlier versions, without tensors


class RowKeys:
    """Keys of a layer's rows in its state dict, as attributes, by the last part of the key.

    Code such as `torch.distributed.checkpoint.state_dict` follows the keys through a model's attributes.
    """

    def __getattr__(self, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return ROWS + name


class _RowField(NamedTuple):
    """Field of every record."""

    key: str  # of the field's tensor
    start: int  # first byte of the field in a record
    width: int  # number of elements in a row
    dtype: torch.dtype

    def of(self, records: np.ndarray) -> np.ndarray:
        """Return the field's bytes in records uint8 (n, record_bytes), as a view."""
        return records[:, self.start : self.start + self.width * self.dtype.itemsize]


def row_tensors(table: Table) -> dict[str, Tensor]:
    """Return the entries of a table for a state dict. One on disk gives a reference to a retained commit."""
    if table.is_on_disk:
        return {META: _json_tensor(lasting_reference_to(table, HOLDER))}
    rows = rows_of(table)
    with rows.table_lock.alone():  # the state has views of rows
        rows.check()
        state = saved.state(rows)
        records = state.pop("records")
        tensors = {column.key: _bytes_as(column.of(records), column.dtype) for column in _columns(rows.spec)}
        arrays = {key: state.pop(key) for key in list(state) if isinstance(state[key], np.ndarray)}
        tensors |= {ROWS + key: torch.from_numpy(array.copy()) for key, array in arrays.items()}
    meta = _json_tensor({**state, "count": len(records)})
    return {META: meta, **{key: tensor for key, tensor in tensors.items() if tensor.numel()}}


def tensors_of_part(table: Table, shard: Shard) -> dict[str, Tensor]:
    """Return the entries of a state dict for one process's rows in RAM: if `are_apart`, under keys of their own."""
    tensors = row_tensors(table)
    tensors[META] = _json_tensor({**_meta(tensors[META], table.subject), PART: [shard.rank, shard.ranks]})
    return {key_of_part(key, *shard[:2]): tensor for key, tensor in tensors.items()} if are_apart() else tensors


def key_of_part(key: str, rank: int, ranks: int) -> str:
    """Return the key of an entry of one process's rows, where a state dict has those of all processes."""
    return f"{ROWS}part-{rank}-of-{ranks}.{key.removeprefix(ROWS)}"


def part_of(meta: Tensor) -> tuple[int, int] | None:
    """Return the rank and the number of ranks in a `rows.meta`; None: the state has all rows, or a reference."""
    found = _meta(meta, "a layer").get(PART)
    return None if found is None else (int(found[0]), int(found[1]))


def part_tensors(path: str, ranks: int) -> dict[str, Tensor]:
    """Return the entries of a shared table on disk for a state dict: a reference, equal on all processes."""
    return {META: _json_tensor(reference_to_parts(path, ranks))}


_are_apart: ContextVar[bool] = ContextVar("parts of rows have keys of their own", default=False)
are_apart = _are_apart.get  # whether state dicts may contain shards of rows


def apart() -> AbstractContextManager[None]:
    """Allow state dicts to contain only this process's shard of rows."""
    return set_within(_are_apart, True)


def own_part(states: Mapping[str, Any], prefix: str, shard: Shard | None, label: str) -> dict[str, Any]:
    """Return a state dict with this process's rows in place of all rows under a prefix. `label` names the layer.

    Raises:
        ArgumentError: some shards are missing.
    """
    start, rest, parts = prefix + ROWS, dict(states), dict[tuple[int, int], dict[str, Tensor]]()
    for key in states:
        match = OF_PART.fullmatch(key.removeprefix(start)) if key.startswith(start) else None
        if match:
            parts.setdefault((int(match[2]), int(match[1])), {})[ROWS + match[3]] = rest.pop(key)
    if not parts:
        meta = None if shard is None else rest.get(prefix + META)
        if meta is None or is_reference(_meta(meta, label)) or part_of(meta) is not None:
            return rest
        own = [key for key in states if key.startswith(start)]  # of all rows
        parts[1, 0] = {key.removeprefix(prefix): rest.pop(key) for key in own}
    ranks = min(parts)[0]
    if set(parts) != {(ranks, rank) for rank in range(ranks)}:
        got = ", ".join(f"{rank} of {of}" for of, rank in sorted(parts))
        raise ArgumentError(
            f"the state of {label} must have the rows of all {ranks} ranks that saved it: got those of {got}. Load "
            "it by torch.distributed.checkpoint with planner=embedrock.torch.dcp.LoadPlanner(), which brings all."
        )
    found = _joined([parts[ranks, rank] for rank in range(ranks)], shard, label)
    return rest | {prefix + name: tensor for name, tensor in found.items()}


def _joined(parts: Sequence[dict[str, Tensor]], shard: Shard | None, label: str) -> dict[str, Tensor]:
    """Return the tensors of the rows that belong to `shard`, out of all shards; None: of all rows."""
    metas = [_meta(one[META], "a layer") for one in parts]
    leading = max(range(len(parts)), key=lambda rank: metas[rank].get("steps", 0))  # a rank without rows makes no steps
    filled = [one for one in parts if IDS in one and len(one[IDS])]
    owned = [np.ones(len(one[IDS]), bool) if shard is None else shard.owns(one[IDS].numpy()) for one in filled]
    found = {name: tensor for name, tensor in parts[leading].items() if name.startswith(HISTORY)}  # equal in all shards
    if any(name.startswith(LIFECYCLE) for name in found):
        found = {name: tensor for name, tensor in found.items() if not name.startswith(LIFECYCLE)}
        found |= _lifecycle(parts, leading, shard, label)
    of_rows = {name for one in filled for name in one if not name.startswith(HISTORY)} - {META}
    for name in of_rows:
        picked = [(one[name], mask) for one, mask in zip(filled, owned, strict=True) if name in one]
        found[name] = torch.cat([tensor[torch.from_numpy(mask)] for tensor, mask in picked])
    meta = {**metas[leading], "count": int(sum(mask.sum() for mask in owned)), PART: shard and shard[:2]}
    found[META] = _json_tensor({key: value for key, value in meta.items() if key != PART or value})
    return {name: tensor for name, tensor in found.items() if tensor.numel()}


def _lifecycle(
    parts: Sequence[Mapping[str, Tensor]], leading: int, shard: Shard | None, label: str
) -> dict[str, Tensor]:
    """Return the tensors of the row lifecycle of a shard, out of those of all shards. `leading` has made the steps."""
    meta = _meta(parts[leading][META], label)
    spec = replace(_spec(meta, label), seed=meta["seed"], segments=meta.get("segments", 1), **policies_of(meta))
    sources = list[tuple[int, RowLifecycle]]()
    for rank in sorted(range(len(parts)), key=lambda rank: rank != leading):
        own = {name: tensor.numpy() for name, tensor in parts[rank].items() if name.startswith(LIFECYCLE)}
        lifecycle = RowLifecycle(spec, label)
        lifecycle.load({name.removeprefix(HISTORY): array for name, array in own.items()})
        sources.append((Shard(rank, len(parts), segments=spec.segments).first_segment, lifecycle))
    owner = Shard(0, 1) if shard is None else shard
    made = moved(spec, label, sources, owner._replace(segments=spec.segments).own_segments)
    return {HISTORY + name: torch.from_numpy(array) for name, array in made.state().items()}


def averaged_tensors(average: RowAverage, label: str) -> dict[str, Tensor]:
    """Return the entries of averages: of a table on disk, a reference and the averages that differ from its rows."""
    table = average.table
    tensors = row_tensors(table)
    meta = {**_meta(tensors[META], label), **({} if table.is_on_disk else {"rule": None})}
    ids = torch.from_numpy(average.ids()) if table.is_on_disk else tensors.get(IDS, torch.empty(0, dtype=torch.int64))
    if not len(ids):
        return {META: _json_tensor(meta)}
    weight = torch.from_numpy(average.of(ids.numpy())).to(DTYPES[table.spec.dtype])
    return {META: _json_tensor(meta), IDS: ids, WEIGHT: weight}


def weights_of(state: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return ids (n,) and float32 weights (n, dim) of a state from `take_rows`. A reference has those of averages."""
    if is_reference(state):
        return state.get(AVERAGES, (np.empty(0, np.int64), np.empty((0, 0), np.float32)))
    if "weight" in state:
        return np.arange(len(state["weight"])), np.asarray(state["weight"], np.float32)
    column = _RowField(WEIGHT, 0, state["dim"], DTYPES[state["dtype"]])
    return state["ids"], _bytes_as(column.of(state["records"][:]), column.dtype).float().numpy()


def row_meta(states: Mapping[str, Any], prefix: str, label: str) -> Mapping[str, Any] | None:
    """Return the description of the rows under a prefix in a state dict. It is a reference if it has "uuid".

    Raises:
        ArgumentError: the description is invalid. `label` names the layer.
    """
    if isinstance(states.get(prefix + OLD), Mapping):
        return states[prefix + OLD]
    return None if prefix + META not in states else _meta(states[prefix + META], label)


def take_rows(states: Mapping[str, Any], prefix: str, label: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Split a state dict: return the state of the rows under a prefix, or None, and all other entries.

    The state has the form of `Table.state`. Or it is a reference, or {"weight": tensor} from `nn.Embedding`.

    Raises:
        ArgumentError: the tensors do not match. `label` names the layer.
    """
    rest = dict(states)
    meta = row_meta(states, prefix, label)
    if isinstance(rest.get(prefix + OLD), Mapping):
        return {key: _array(value) for key, value in rest.pop(prefix + OLD).items()}, rest
    if meta is None:
        if parts := [key for key in rest if key.startswith(prefix + ROWS)]:
            raise ArgumentError(
                f"the state of {label} must have `{META}` beside {parts}, as it was saved: it does not. Code that "
                "keeps only tensors of shapes that it knows leaves it out. The tensors of a table belong together: "
                "load all whose keys have `rows.`, as they were saved."
            )
        weight = rest.pop(prefix + "weight", None)
        return None if weight is None else {"weight": weight}, rest
    del rest[prefix + META]
    if is_reference(meta):
        found = {key: rest.pop(prefix + key) for key in (IDS, WEIGHT) if prefix + key in rest}
        pair = {AVERAGES: (found[IDS].cpu().numpy(), found[WEIGHT].float().cpu().numpy())} if len(found) == 2 else {}
        return {**meta, **pair}, rest
    spec = _spec(meta, label)
    known = [IDS, *(column.key for column in _columns(spec))]
    known += [key.removeprefix(prefix) for key in rest if key.startswith(prefix + HISTORY)]
    return _state(meta, spec, {key: rest.pop(prefix + key) for key in known if prefix + key in rest}, label), rest


def _spec(meta: Mapping[str, Any], label: str) -> Spec:
    try:
        return Spec(meta["rows"], meta["dim"], meta["dtype"], rule_of(meta["rule"]), Zeros(), 0)
    except (KeyError, TypeError) as error:
        raise ArgumentError(
            f"`{META}` of the state of {label} must describe a table: got {meta} ({error!r})."
        ) from error


def _state(meta: Mapping[str, Any], spec: Spec, tensors: Mapping[str, Tensor], label: str) -> dict[str, Any]:
    count, columns = meta.get("count", 0), _columns(spec)
    parts = [_checked(tensors, column.key, (count, column.width), column.dtype, label) for column in columns]
    records = _LazyRecords((count, spec.record_bytes), columns, parts)
    ids = _checked(tensors, IDS, (count,), torch.int64, label).numpy()
    history = {key.removeprefix(ROWS): _array(tensors[key]) for key in tensors if key.startswith(HISTORY)}
    return {**meta, "ids": ids, "records": records, **history}


class _LazyRecords:
    """Records (n, record_bytes) assembled on access from tensors of their columns, so that they take no RAM."""

    dtype = np.dtype(np.uint8)

    def __init__(self, shape: tuple[int, int], columns: list[_RowField], tensors: list[Tensor]) -> None:
        self.shape, self._columns, self._tensors = shape, columns, tensors

    def __getitem__(self, part: slice) -> np.ndarray:
        records = np.zeros((len(range(*part.indices(self.shape[0]))), self.shape[1]), np.uint8)
        for column, tensor in zip(self._columns, self._tensors, strict=True):
            if len(records):
                column.of(records)[:] = tensor[part].view(torch.uint8).numpy()
        return records


def _columns(spec: Spec) -> list[_RowField]:
    if spec.codec is not None:
        return [_RowField(WEIGHT, 0, spec.weight_bytes, torch.uint8)]
    columns = [_RowField(WEIGHT, 0, spec.dim, DTYPES[spec.dtype])]
    start = spec.layout.state_start * STATE_BYTES
    for part in () if spec.rule is None else spec.rule.state():
        columns.append(_RowField(ROWS + part.name, start, part.per_row or spec.dim, torch.float32))
        start += columns[-1].width * STATE_BYTES
    return columns


def _checked(tensors: Mapping[str, Tensor], key: str, shape: tuple[int, ...], dtype: torch.dtype, label: str) -> Tensor:
    """Return a tensor on the CPU, contiguous, if it has the shape and dtype of `rows.meta`: else an error."""
    got = tensors.get(key)
    if got is None and 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if got is None or tuple(got.shape) != shape or got.dtype != dtype:
        what = "none" if got is None else f"{got.dtype} {tuple(got.shape)}"
        raise ArgumentError(
            f"`{key}` of the state of {label} must be {dtype} {shape}, as its `{META}` says: got {what}. The tensors "
            "of a table belong together: load all of them, as they were saved."
        )
    return got.detach().cpu().contiguous()


def _meta(tensor: Any, label: str) -> dict[str, Any]:
    try:
        meta = json.loads(bytes(tensor.detach().cpu().numpy()))
        if isinstance(meta, dict):
            return meta
    except (AttributeError, TypeError, ValueError):
        pass
    raise ArgumentError(
        f"`{META}` of the state of {label} must be uint8, the bytes of a JSON object, as it was saved: it is not. Code "
        "that averages or casts all tensors of a state dict spoils it. Average a training by ert.average(model), and "
        "two models by id: layer.table.assign(ids, (layer(ids) + other(ids)).detach() / 2). Cast none under `rows.`."
    )


def _json_tensor(content: Mapping[str, Any]) -> Tensor:
    text = json.dumps(content, default=lambda number: number.item()).encode()
    text = text.ljust(-(-len(text) // META_BYTES) * META_BYTES)
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())


def _bytes_as(part: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return a copy of bytes (n, bytes) as a tensor (n, elements)."""
    flat = torch.from_numpy(np.array(part, order="C").reshape(-1))
    return flat.view(dtype).reshape(len(part), part.shape[1] // dtype.itemsize)


def _array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value
