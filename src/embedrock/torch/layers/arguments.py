"""PyTorch's arguments of the layers, and the tables that they open: alone, of pretrained rows, or a shard of them."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from embedrock.distributed import commits
from embedrock.distributed.commits import KEEP, layout_of, part_to_open
from embedrock.distributed.exchange import Exchange
from embedrock.distributed.owners import Shard
from embedrock.distributed.resharding import Resharding, reshard
from embedrock.errors import ArgumentError, UnsupportedError, check_choice, not_one_of
from embedrock.frontend.arguments import (
    check_no_codes,
    check_wire,
    is_number,
    make_table,
    open_table,
    refuse,
)
from embedrock.frontend.pretrained import weights_of
from embedrock.initializers import FromArray, FromBfloat16, Given, Initializer, Normal
from embedrock.system.log import caller_level, tell
from embedrock.system.paths import local_path
from embedrock.system.sizes import duration
from embedrock.table.group import Group
from embedrock.table.opening import InitialValuesOf
from embedrock.table.options import LayerOptions, TableOption, TableOptions, declared, filled
from embedrock.table.table import Table
from embedrock.torch.layers.initializers import initializer_of
from embedrock.torch.training.ranks import are_there_groups, group_of
from embedrock.torch.training.sharing import RankGroup, Sharded, check_sharded, holder_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SIZES = ("num_embeddings", "embedding_dim")

REFUSED = {
    "sparse": "rows are always stepped sparsely. Leave it out",
    "device": "lookups are delivered where the handle is: call .to(device) on the layer or the model",
    "_weight": "pass init= for first values, or use from_pretrained(weights)",
    "_freeze": "call requires_grad_(False) on the layer",
}
# arguments of layers, not of tables
OWN = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "include_last_offset", "num_embeddings")
OF_LAYERS = {"sharded", "reshard", "wire", "positions", "missing"}  # not of tables
PRETRAINED_REFUSED = {**REFUSED, "init": "the weights are the first values. Leave it out"}


class PretrainedOptions(LayerOptions, total=False):
    """Options for the table of a layer with pretrained rows, without dtype."""

    name: Annotated[str | None, TableOption(9, None)]
    sharded: Annotated[Sharded, TableOption(17, False)]
    reshard: Annotated[str, TableOption(20, "error")]
    wire: Annotated[str, TableOption(21, "float32")]
    positions: Annotated[bool, TableOption(22, False)]
    missing: Annotated[Any, TableOption(23, None)]


class RowOptions(PretrainedOptions, total=False):
    """Options for a layer's table, without rows and dim."""

    init: Annotated[Initializer | str | Callable[..., Any] | None, TableOption(2, None)]
    dtype: Annotated[torch.dtype, TableOption(4, torch.float32)]
    group: Annotated[Group | None, TableOption(16, None)]


def _dtype_name(layer: str, dtype: torch.dtype) -> str:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype not in NAMES:
        raise ArgumentError(
            f"`dtype` of {layer} must be one of {', '.join(map(str, NAMES))}, which rows are stored in: got {dtype}. "
            f"For outputs of it, leave dtype= out and call layer.to({dtype}); rows stay torch.float32."
        )
    if dtype not in NAMES:
        raise not_one_of(f"`dtype` of {layer}", dtype, map(str, NAMES))
    return NAMES[dtype]


def first_values(seed: int | None) -> InitialValuesOf:
    """Return the default initial values of a layer, with `seed` or a seed from PyTorch's CPU generator.

    A layer without a seed draws exactly one number, whether the table is new or already exists. So later draws, such as
    the weights of other layers, do not depend on it.
    """
    if seed is None:
        with no_dispatch():  # in a FakeTensorMode, tensors are fake and tables are real
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    return InitialValuesOf(Normal(), seed)


def check_norm(max_norm: float | None, norm_type: float) -> None:
    """Raise `ArgumentError` unless `max_norm` is None or a number >= 0, and `norm_type` a number."""
    if max_norm is not None and not (is_number(max_norm) and max_norm >= 0):
        raise ArgumentError(f"`max_norm` must be a number >= 0, or None: got {max_norm!r}.")
    if not is_number(norm_type):
        raise ArgumentError(f"`norm_type` must be a number, the p of the norm: got {norm_type!r}.")


def _path_here(layer: str, sharded: Sharded, path: Any, how: str) -> Any:
    """Return the folder of this process's shard of a table on disk; None for a table in RAM, or without a shard here.

    `how` decides what happens if the number of shards is not the number of processes: see `Embedding`.
    """
    check_sharded(layer, sharded)
    if path is None:
        return None
    group, path = group_of(sharded), local_path(path, f"`path` of {layer}")
    if sharded is False:
        if group is not None:
            raise UnsupportedError(
                f"`path` of {layer} cannot be the place of one table that {group.size()} processes each have all rows "
                "of. Pass sharded=True, and each has those that it owns, in a folder of its own inside of that; or "
                "sharded='rank 0', and that rank has all."
            )
        return path
    if isinstance(sharded, str):
        return path if group is None or holder_of(sharded) == group.rank() else None
    if group is None and layout_of(path) is None and not _is_launched(layer):
        return path
    check_choice("reshard", how, ("error", "auto"))
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    found = layout_of(path)
    if how == "auto" and group is not None:
        _share_out_anew(path, RankGroup.of(group).exchange)
    elif how == "auto" and found is not None and found.ranks != 1:
        _tell_anew(path, found.ranks, reshard(path, 1).after)
    return part_to_open(path, rank, ranks, f"{layer}(..., path=...)")


def check_positions(layer: str, scale_grad_by_freq: bool, options: PretrainedOptions) -> None:
    """Raise an error if a layer should sum gradients by position, and cannot."""
    positions, wire = options.get("positions", False), options.get("wire", "float32")
    if not isinstance(positions, bool):
        raise ArgumentError(f"`positions` of {layer} must be True or False: got {positions!r}.")
    if positions and wire != "float32":
        raise ArgumentError(
            f"`positions` of {layer} are for the bits of one process, which rows lose that are sent in 16 bits: got "
            f"positions=True and wire={wire!r}. Leave one of them out."
        )
    if positions and scale_grad_by_freq:
        raise UnsupportedError(
            f"`scale_grad_by_freq` of {layer} does not go with positions=True: a rank knows how often an id occurs in "
            "its own batch, not in that of all ranks. Leave one of them out."
        )


def _check_commit_every(layer: str, sharded: Sharded, every: Any) -> None:
    if isinstance(duration(every), str) and sharded is not False and group_of(sharded) is not None:
        raise ArgumentError(
            f"`commit_every` of {layer} must be steps where several processes share a table, as their clocks differ: "
            f"got {every!r}. Pass steps, commit_every=1000 say: all of them commit after the same one."
        )


def _check_group(layer: str, group: Any, sharded: Sharded, positions: bool) -> None:
    if group is not None and positions:
        raise UnsupportedError(
            f"`group` of {layer} does not go with positions=True: a group sums the gradients of its tables in one go, "
            "where they arise. Leave one of them out."
        )
    if group is not None and sharded is not False:
        raise UnsupportedError(
            f"`group` of {layer} does not go with sharded={sharded!r}: a group reads its tables in one go, in one "
            "process. Leave group= out: what all tables send goes in one message already, with ert.prefetch."
        )


def _owns(sharded: Sharded, table: Table, row_id: int) -> bool:
    """Return whether this process may have a row, as far as it knows its rank."""
    group = None if sharded is False else group_of(sharded)
    if group is None:
        return True
    shard = Shard(group.rank(), group.size(), holder_of(sharded), table.spec.segments)
    return bool(shard.owns(np.array([row_id]))[0])


def _segments(sharded: Sharded) -> int | None:
    """Return the option `segments` of a new table: ranks that share it need them if its rows come and go."""
    return 1 if sharded is False else None


def _is_launched(layer: str) -> bool:
    """Return False. Raise an error if torchrun started several processes, but there is no process group yet."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ArgumentError(
            f"{layer} with path= and sharded= must be made when this process knows its rank: call "
            "torch.distributed.init_process_group() before, or, under Lightning, make it in configure_model."
        )
    return False


def table_of(
    layer: str, rows: int | Table | None, dim: int | None, padding_idx: int | None, options: RowOptions
) -> Table:
    """Return the table of a layer: a ready-made one, or a new one from the layer's arguments."""
    known = (*OWN, *declared(RowOptions))
    given = filled(RowOptions, options, lambda unknown: refuse(layer, unknown, REFUSED, known))
    group, sharded, _ = given.pop("group"), given.pop("sharded"), given.pop("missing")
    dtype = rows.spec.value_dtype if isinstance(rows, Table) else _dtype_name(layer, given["dtype"])
    check_sharded(layer, sharded)
    _check_commit_every(layer, sharded, given["commit_every"])
    check_wire(layer, given.pop("wire"), sharded is not False, dtype)
    of_group = group if group is not None or not isinstance(rows, Table) else rows.group
    _check_group(layer, of_group, sharded, given.pop("positions"))
    reshard = given.pop("reshard")
    stored = {**given, "dtype": _dtype_name(layer, given["dtype"])}
    if not isinstance(rows, Table):
        stored["init"] = initializer_of(layer, given["init"], rows, dim)
        stored["segments"] = _segments(sharded)
    first, owns = None if isinstance(rows, Table) else first_values(stored["seed"]), partial(_owns, sharded)

    def make(own: dict[str, Any]) -> Table:
        return open_table(layer, rows, dim, padding_idx, {**stored, **own}, first, names=SIZES, group=group, owns=owns)

    made = _opened(layer, make, sharded, reshard, stored)
    if sharded is not False and not are_there_groups():
        warnings.warn(
            f"sharded={sharded!r} of {layer}: there is no process group yet, and without one this process has all "
            "rows. Call torch.distributed.init_process_group() before the layer is made, in processes that torchrun "
            "starts; or leave sharded= out.",
            stacklevel=caller_level(),
        )
    return made


def _opened(
    layer: str, make: Callable[[dict[str, Any]], Table], sharded: Sharded, reshard: str, options: Mapping[str, Any]
) -> Table:
    """Return the table that `make` opens, with options that replace the user's.

    All shards of a table open the same commit, and keep enough commits.
    """
    path, keep = options.get("path"), options.get("keep", KEEP)
    own = {"path": _path_here(layer, sharded, path, reshard)}
    is_in_parts = path is not None and sharded is not False and not isinstance(sharded, str)
    ranks = group_of(sharded) if is_in_parts else None
    if ranks is None:
        return make(own)
    kept = {"keep": KEEP} if isinstance(keep, int) and keep < KEEP else {}
    return _open_together(lambda: make({**own, **kept}), local_path(path, f"`path` of {layer}"), ranks)


def pretrained_table(
    layer: str, weights: Any, tensor: str | None, dtype: torch.dtype | None, options: PretrainedOptions
) -> Table:
    """Return a table that reads its rows from `weights` when they are needed: see `Embedding.from_pretrained`."""
    known = (declared(TableOptions).keys() - PRETRAINED_REFUSED.keys()) | OF_LAYERS
    sharded = options.get("sharded", False)
    refuse(layer, [name for name in options if name not in known], PRETRAINED_REFUSED, known=[*OWN, *known])
    weights = weights_of(weights, tensor, f"`embeddings` of {layer}")
    init = weights if isinstance(weights, Given) else _given(layer, weights)
    if dtype is None and init.dtype not in DTYPES:
        raise ArgumentError(
            f"`embeddings` of {layer} are {init.dtype}, which a table cannot hold. Pass dtype=torch.float32 to "
            "have rows converted when they are read."
        )
    rows, dim = init.shape
    made_of = {"init": init, "dtype": init.dtype if dtype is None else _dtype_name(layer, dtype)}
    made_of["segments"] = _segments(sharded)
    check_wire(layer, options.get("wire", "float32"), sharded is not False, made_of["dtype"])
    _check_commit_every(layer, sharded, options.get("commit_every"))
    of_table = {name: value for name, value in options.items() if name not in OF_LAYERS}
    first = first_values(options.get("seed"))

    def make(own: dict[str, Any]) -> Table:
        return make_table(rows, dim, {**of_table, **made_of, **own}, first)

    return _opened(layer, make, sharded, options.get("reshard", "error"), options)


def _given(layer: str, weights: Tensor | np.ndarray) -> Given:
    """Return the initializer that reads the rows of a tensor or array, which is not copied."""
    if getattr(weights, "ndim", None) != 2:
        got = f"shape {tuple(weights.shape)}" if hasattr(weights, "shape") else type(weights).__name__
        raise ArgumentError(f"`embeddings` of {layer} must be a 2-D tensor or array (rows, dim): got {got}.")
    if isinstance(weights, Tensor):
        weights = weights.detach().cpu().resolve_neg()
    if (name := str(weights.dtype).removeprefix("torch.")).startswith(("int", "uint", "bool", "complex")):
        raise ArgumentError(f"`embeddings` of {layer} must be floats: got {name}. Convert them: embeddings.float().")
    check_no_codes(f"`embeddings` of {layer}", name)
    if isinstance(weights, Tensor) and weights.dtype == torch.bfloat16:
        return FromBfloat16(weights.view(torch.int16).numpy())
    return FromArray(weights.numpy() if isinstance(weights, Tensor) else weights)


# ---------------------------------------------------------------- shards on disk


def _share_out_anew(path: str, exchange: Exchange) -> None:
    """Reshard a table over the current ranks. Each rank makes its own shard."""
    rank, ranks = exchange.transport.rank, exchange.transport.ranks
    found = layout_of(path)
    parts = exchange.numbers(f"how many parts {path!r} has", 0 if found is None else found.ranks).astype(int)
    if set(parts.tolist()) <= {0, ranks}:
        return
    if found is None or len(set(parts.tolist())) > 1:
        raise ArgumentError(
            f'reshard="auto" needs all parts of a table on a disk that all ranks see: {path!r} has {parts.tolist()} '
            "parts, as each rank sees it. Bring them together, and share the rows out by `embedrock reshard`."
        )
    work = Resharding(found, ranks)
    with contextlib.ExitStack() as held:
        for what, act in (
            ("begin", lambda: held.enter_context(work.locked()) if rank == 0 else None),
            ("the commits", work.begin),
            ("the room", lambda: work.check() if rank == 0 else None),
        ):
            exchange.do(f"reshard {path!r}, {what}", act)
        with work.undone_on_full_disk([rank]):
            exchange.do(f"reshard {path!r}, {ranks} parts", lambda: work.make(rank))
        exchange.do(f"reshard {path!r}, the end", lambda: work.publish() if rank == 0 else None)
    if rank == 0:
        _tell_anew(path, found.ranks, ranks)


def _tell_anew(path: str, before: int, after: int) -> None:
    tell(f"{path} was shared out anew: {before} parts before, {after} now")


def _open_together(make: Callable[[], Table], path: str, group: dist.ProcessGroup) -> Table:
    """Open this rank's shard of a table at the newest commit that all shards have. Later commits are incomplete."""
    exchange, what = RankGroup.of(group).exchange, f"the commits of {path!r}"
    table = exchange.do(f"opening {path!r}", make)
    own = commits.marks_of(str(table.path))
    of_all = exchange.tell(what, lambda: np.array([commits.known_as(mark) for mark in own], np.int64))
    common, ahead = commits.since(own, commits.agreed(path, [part.tolist() for part in of_all]))
    commits.check_ahead(path, exchange.numbers(f"{what}, later ones", ahead).astype(int).tolist())
    if ahead:
        table.rollback(common.numbers[0])
        at = "" if common.step is None else f", of step {common.step}"
        tell(
            f"{table.path} goes back to commit {common.numbers[0]}{at}, the newest that all {len(of_all)} parts have: "
            "a later one was cut short"
        )
    return table
