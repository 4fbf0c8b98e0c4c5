"""`freeze`: a copy of a model with plain embedding layers, for tools that take only PyTorch's own layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from embedrock.batch.ids import check_ids
from embedrock.errors import ArgumentError, MemoryBudgetError, UnsupportedError, did_you_mean, listed
from embedrock.system.ram import available_bytes
from embedrock.table.missing import FIRST, Missing, check_reads
from embedrock.table.table import rows_of
from embedrock.torch.layers.bag import EmbeddingBag
from embedrock.torch.layers.embedding import Embedding, is_jagged, jagged_like
from embedrock.torch.layers.row_layer import HOOKS, RowLayer
from embedrock.torch.training.handle import Handle

BATCH_ROWS = 65_536
# The handle, `missing`, `max_norm` and `norm_type` identify tied layers, which share one copy.
Weights = dict[tuple[Handle, Missing | None, float | None, float], nn.Parameter]
Ids = Mapping[Any, npt.ArrayLike]  # by layer, or by name of a layer
_NO_ROWS = np.empty((0, 1), np.float32)


class KnownRows(nn.Module):
    """Rows of some ids in a plain layer, with a map from ids to positions. Other ids get the last row.

    Args:
        ids: int64 (n,), ascending.
        rows: an `nn.Embedding` or `nn.EmbeddingBag` of n + 1 rows.

    Attributes:
        ids: the argument, as a buffer.
        rows: the argument.
    """

    ids: Tensor

    def __init__(self, ids: Tensor, rows: nn.Module) -> None:
        super().__init__()
        self.register_buffer("ids", ids)
        self.rows = rows

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002  # PyTorch's argument name
        return self.rows(self.places(input), *args, **kwargs)

    def places(self, ids: Tensor) -> Tensor:
        """Return the positions of the rows of ids: int64. Unknown ids have position n."""
        if is_jagged(ids):
            return jagged_like(ids, self.places(ids.contiguous().values()))
        wanted = ids.to(torch.int64)
        search = _count_below if torch.onnx.is_in_onnx_export() else torch.searchsorted
        at = search(self.ids, wanted).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[at] == wanted, at, len(self.ids))


def _count_below(ids: Tensor, wanted: Tensor) -> Tensor:
    """Return the number of known ids below each wanted id: int64. `torch.searchsorted` is faster; ONNX lacks it."""
    found = torch.zeros_like(wanted)
    for bit in reversed(range(len(ids).bit_length())):
        more = found + (1 << bit)
        is_below = ids[more.clamp(max=len(ids)) - 1] < wanted
        found = torch.where(is_below & (more <= len(ids)), more, found)
    return found


def freeze(model: nn.Module, ids: Ids | None = None, missing: Any = None) -> nn.Module:
    """Return a copy of a model with plain `nn.Embedding`s and `nn.EmbeddingBag`s that hold the current rows.

    The copy needs no Embedrock: `torch.export`, ONNX and AOTInductor take it. The state dicts of the layers are those
    of PyTorch's layers. The rows of the copy do not train. The copy takes RAM for all rows of each table, or for the
    rows of `ids`. For `ert.average(model)`, the copy has averages in place of weights and rows.

    Args:
        model: with embedding layers.
        ids: the ids to keep, by layer or by name in the model: integers of any shape. Such a layer becomes a
            `KnownRows`. Other ids get the row of `missing` there. Layers without an entry keep all rows.
        missing: the row of ids without one: "first", "zeros", "shared" or a row, see `Embedding`. None: that of each
            layer. With "first", ids that a `KnownRows` does not keep get the default row of the layer's admission, or
            else zeros.

    Raises:
        ArgumentError: `ids` has a key that is no layer of the model, is empty, or is missing for open ids.
        UnsupportedError: a layer overrides `forward`, or has ``missing="raise"``.
        IdError, IdTypeError: ids lie outside the table, or are not integers.
        MemoryBudgetError: the rows do not fit this machine's memory.

    Example:
        >>> import embedrock.torch as ert
        >>> model = nn.Sequential(ert.Embedding(1000, 4), nn.Linear(4, 1))
        >>> frozen = ert.freeze(model)
        >>> frozen
        Sequential(
          (0): Embedding(1000, 4)
          (1): Linear(in_features=4, out_features=1, bias=True)
        )
        >>> nn.Embedding(1000, 4).load_state_dict(frozen[0].state_dict())
        <All keys matched successfully>
        >>> ert.freeze(ert.Embedding(10**9, 4), {"": [3, 14]})(torch.tensor([14, 15]))[1]
        tensor([0., 0., 0., 0.])
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, RowLayer)}
    if not isinstance(ids, Mapping | None):
        raise ArgumentError(
            f"`ids` of ert.freeze must be a dict from layers to the ids of each: got {type(ids).__name__}. For "
            "example: ert.freeze(model, {layer: layer.table.export()[0]})."
        )
    wanted, given = _by_layer(layers, ids or {}), Missing.of(missing, "ert.freeze")
    for layer in layers.values():
        if type(layer).forward not in (Embedding.forward, EmbeddingBag.forward):
            raise UnsupportedError(
                f"{layer.handle.label} cannot be frozen: {type(layer).__name__}.forward is not that of PyTorch's "
                "layers, which take its place. Do what it does in a module that has an ert.Embedding or "
                "ert.EmbeddingBag."
            )
    _check_memory(layers, wanted)
    weights: Weights = {}
    choices = {layer: _missing(layer, given) for layer in layers.values()}
    memo: dict[int, Any] = {id(own): _plain(own, wanted.get(own), missing, weights) for own, missing in choices.items()}
    for module in model.modules():
        if isinstance(module, swa_utils.AveragedModel):  # the average follows a model, and a frozen model cannot change
            memo[id(module)] = copy.deepcopy(module.module, memo)
    return copy.deepcopy(model, memo) if memo else copy.deepcopy(model)


def _by_layer(layers: Mapping[str, RowLayer], ids: Ids) -> dict[RowLayer, np.ndarray]:
    found = {}
    for key, values in ids.items():
        layer = layers.get(key) if isinstance(key, str) else key
        if layer is None or not any(layer is known for known in layers.values()):
            known = f"embedding layers of the model ({listed(layers)})"
            raise ArgumentError(f"`ids` of ert.freeze must name {known}: got {key!r}.{did_you_mean(key, layers)}")
        array = np.unique(check_ids(np.asarray(values), layer.num_embeddings, layer.handle.label))
        if not len(array):
            raise ArgumentError(f"`ids` of ert.freeze for {layer.handle.label} must not be empty.")
        if layer.padding_idx is not None:
            array = np.union1d(array, [layer.padding_idx])
        found[layer] = array
    for layer in layers.values():
        if layer.num_embeddings is None and layer not in found:
            raise ArgumentError(
                f"{layer.handle.label} has open ids: pass those whose rows are wanted, "
                "ert.freeze(model, {layer: ids}). Those that were stepped are layer.table.export()[0]."
            )
    return found


def _check_memory(layers: Mapping[str, RowLayer], wanted: Mapping[RowLayer, np.ndarray]) -> None:
    needed = 0
    for layer in {layer.handle: layer for layer in layers.values()}.values():
        rows = len(wanted[layer]) if layer in wanted else layer.num_embeddings or 0
        needed += rows * layer.embedding_dim * layer.dtype.itemsize
    if needed > (available := available_bytes()):
        raise MemoryBudgetError(
            f"all rows of this model take {needed:,} bytes of RAM, and {available:,} are available. Pass the ids whose "
            "rows are wanted, ert.freeze(model, {layer: ids}). Those that were stepped are layer.table.export()[0]."
        )


def _missing(layer: RowLayer, given: Missing | None) -> Missing | None:
    """Return the choice for a layer's rows that are not there."""
    choice = layer.missing if given is None else given
    if choice is None:
        choice = rows_of(layer.table).missing
    if choice is not None and choice.choice == "raise":
        raise UnsupportedError(
            f"{layer.handle.label} cannot be frozen with missing='raise': plain layers raise no errors of rows. Choose "
            "a value: ert.freeze(model, missing='zeros')."
        )
    check_reads(choice, layer.handle.label, is_elsewhere=layer.handle.average is not None)
    rows_of(layer.table).row_instead(choice or FIRST)  # an error
    return choice and choice._replace(padding=layer.padding_idx)


def _plain(layer: RowLayer, ids: np.ndarray | None, missing: Missing | None, weights: Weights) -> nn.Module:
    if ids is None:
        key = layer.handle, missing, layer.max_norm, layer.norm_type
        if key not in weights:
            weights[key] = _weight(layer, np.arange(layer.num_embeddings or 0), missing)
        made = _layer(layer, weights[key], layer.padding_idx)
    else:
        padding = None if layer.padding_idx is None else int(np.searchsorted(ids, layer.padding_idx))
        rows = rows_of(layer.table)
        row = rows.row_instead(missing or Missing("zeros" if rows.shared is None else "shared"))  # of other ids
        known = torch.from_numpy(ids).to(layer.handle.device)
        made = KnownRows(known, _layer(layer, _weight(layer, ids, missing, row[None]), padding))
    for name in HOOKS:
        setattr(made, name, copy.copy(getattr(layer, name)))
    return made.train(layer.training)


def _layer(layer: RowLayer, weight: nn.Parameter, padding_idx: int | None) -> nn.Module:
    more: dict[str, Any] = {"padding_idx": padding_idx, "scale_grad_by_freq": layer.scale_grad_by_freq}
    if isinstance(layer, EmbeddingBag):
        more |= {"mode": layer.mode, "include_last_offset": layer.include_last_offset}
    kind = nn.EmbeddingBag if isinstance(layer, EmbeddingBag) else nn.Embedding
    rows, dim = weight.shape
    made = kind(rows, dim, _weight=weight.detach(), **more)
    made.weight = weight
    return made


def _weight(layer: RowLayer, ids: np.ndarray, missing: Missing | None, spare: np.ndarray = _NO_ROWS) -> nn.Parameter:
    """Return the rows of ids, as a lookup returns them, followed by the rows in `spare`."""
    weight = torch.zeros(len(ids) + len(spare), layer.embedding_dim, dtype=layer.dtype, device="cpu")
    for start in range(0, len(ids), BATCH_ROWS):
        rows = torch.from_numpy(layer.handle.rows(ids[start : start + BATCH_ROWS], missing))
        if layer.max_norm is not None:
            trained = torch.from_numpy(np.flatnonzero(layer.table.spec.are_trained(ids[start : start + BATCH_ROWS])))
            rows = torch.embedding_renorm_(rows, trained, layer.max_norm, layer.norm_type)
        weight[start : start + len(rows)] = rows.to(layer.dtype)
    weight[len(ids) :] = torch.from_numpy(spare).to(layer.dtype)
    return nn.Parameter(weight.to(layer.handle.device), requires_grad=False)
