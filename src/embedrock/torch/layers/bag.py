"""`EmbeddingBag`: `torch.nn.EmbeddingBag` with its rows in a table."""

from __future__ import annotations

import os
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.wrong_ids import in_bags
from embedrock.errors import ArgumentError, IdError, UnsupportedError, not_one_of
from embedrock.initializers import FromSafetensors
from embedrock.table.options import shows
from embedrock.table.table import Table
from embedrock.torch.layers.arguments import PretrainedOptions, RowOptions
from embedrock.torch.layers.embedding import is_jagged, offsets_of, on_plain_tensors, place_in
from embedrock.torch.layers.features import BagInput, check_bounds
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.lookup import (
    DeviceLookupState,
    HostInput,
    HostLookup,
    LayerLayout,
    LookupState,
    check_ids,
    host_ids,
    looked_up,
)

MODES = ("sum", "mean", "max")


class EmbeddingBag(RowLayer):
    """`torch.nn.EmbeddingBag` with rows in a table, stepped by Embedrock's optimizers.

    Args:
        num_embeddings, embedding_dim, max_norm, norm_type, scale_grad_by_freq: as in `Embedding`.
        mode: "sum", "mean" or "max" of the rows of a bag.
        include_last_offset: `offsets` has one more entry: the end of the last bag.
        padding_idx: id of the padding row, which starts as zeros, gets no gradient and counts in no bag.
        path, memory, policy, keep, commit_every, init, seed, dtype, name, sharded, reshard, wire: as in `Embedding`.
        positions, rule, directory, on_nonfinite, device_memory, admission, eviction, frozen, group: as in `Embedding`.
        missing: as in `Embedding`. A row that is not there counts in its bag, with that value.

    Raises:
        ArgumentError: an argument has a value that cannot work.
        UnsupportedError, UnknownArgumentError: this layer does not have the argument.

    Example:
        >>> import torch, embedrock as er, embedrock.torch as ert
        >>> bag = ert.EmbeddingBag(100, 2, mode="sum", init=er.Constant(0.5))
        >>> bag(torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 2])).tolist()
        [[1.0, 1.0], [1.5, 1.5]]
    """

    _kind = "ert.EmbeddingBag"
    shown = ("max_norm", "norm_type", "scale_grad_by_freq", "mode", "include_last_offset", "padding_idx")

    @shows(RowOptions)
    def __init__(
        self,
        num_embeddings: int | Table | None,
        embedding_dim: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **options: Unpack[RowOptions],
    ) -> None:
        if mode not in MODES:
            raise not_one_of("`mode` of ert.EmbeddingBag", mode, MODES)
        if mode == "max" and scale_grad_by_freq:
            raise ArgumentError("`scale_grad_by_freq` has no meaning in mode 'max', as in PyTorch. Leave it out.")
        super().__init__(num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, **options)
        self.mode, self.include_last_offset = mode, include_last_offset

    @classmethod
    @shows(PretrainedOptions)
    def from_pretrained(
        cls,
        embeddings: Tensor | np.ndarray | FromSafetensors | str | os.PathLike[str],
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        tensor: str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[PretrainedOptions],
    ) -> EmbeddingBag:
        """Make a layer with `embeddings` as initial rows.

        Args:
            mode, include_last_offset: as for the layer.
            embeddings, freeze, max_norm, norm_type, scale_grad_by_freq, padding_idx, tensor, dtype, options: as in
                `Embedding.from_pretrained`.
        """
        given = {"max_norm": max_norm, "norm_type": norm_type, "scale_grad_by_freq": scale_grad_by_freq, "mode": mode}
        given |= {"include_last_offset": include_last_offset, "padding_idx": padding_idx}
        return cls._of_weights(embeddings, tensor, freeze, dtype, options, **given)

    @on_plain_tensors
    def forward(
        self,
        input: Tensor,  # noqa: A002  # nn.EmbeddingBag's name
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        time: Any = None,
    ) -> Tensor:
        """Return the pooled rows of each bag of ids.

        Args:
            input: int32 or int64, on any device: (bags, n), or (n,) with `offsets`. Repeats are allowed. Or a nested
                tensor (bags, j) of these with layout `torch.jagged`.
            offsets: int32 or int64 (bags,): start of each bag in `input`. The first is 0.
            per_sample_weights: floats of the shape of `input`, for mode "sum". Each row is multiplied by its weight.
            time: as in `Embedding.forward`.

        Returns:
            (bags, embedding_dim), of the layer's dtype, on the handle's device. Empty bags are zeros.

        Raises:
            ArgumentError: shapes or offsets do not match. Further errors are those of `Embedding.forward`.
        """
        layout = self._layout()
        value = BagInput(input, offsets, per_sample_weights)
        try:
            return looked_up(self._planned_lookup(layout, layout.trained((self,)), value, time))[0]
        except IdError as error:
            raise self.outside(error, value) from None

    def in_graph(
        self,
        input: Tensor,  # noqa: A002
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        time: Any = None,
    ) -> Tensor:
        """Do the work of `forward` by an operator, for a graph of `torch.compile`."""
        if is_jagged(input) and offsets is None and per_sample_weights is None:
            ids, bounds = input.contiguous(), offsets_of(input.contiguous())
            return self.in_graph(ids.values(), bounds if self.include_last_offset else bounds[:-1], time=time)
        return self._by_operator(input, offsets, per_sample_weights, self.include_last_offset, time)

    def looked_up(
        self, layout: LayerLayout, trained: list[Handle], ids: Tensor, time: Any, *of_bags: Any
    ) -> tuple[Tensor, LookupState]:
        offsets, weights, weights_train = of_bags
        value = BagInput(ids, offsets, weights)
        try:
            lookup = self._planned_lookup(layout, trained, value, time)
            return lookup.read(weights_train)[0], lookup
        except IdError as error:
            raise self.outside(error, value) from None

    def _planned_lookup(self, layout: LayerLayout, trained: list[Handle], value: BagInput, time: Any) -> LookupState:
        ids, offsets, weights, _ = value
        try:
            newest = layout.newest_event(time, trained)
            if layout.features is None:
                if offsets is None and getattr(ids, "ndim", 0) == 1:  # no samples, as in a collection
                    self._flat(ids, None, self.handle)  # an error
                ids, bags, weights = self.gpu_input(value)
                return DeviceLookupState(layout, trained, [ids], [bags], (weights,)).at(newest)
            arrays = layout.plain((ids,)) if offsets is None else None
            if arrays is not None and arrays[0].ndim == 2:
                array, bounds, factors = arrays[0], None, self._flat_weights(ids, weights, arrays[0].size)
            else:
                array, bounds, factors = self._flat_input(ids, offsets, weights)
            if self.max_norm is not None:  # then the CPU reads the rows: see `Handle.executor`
                self._shrink(array, self.max_norm)
            lookup = HostLookup(layout, trained, [array], False, [bounds], () if factors is None else [factors])
            return lookup.at(newest)
        except Exception as error:  # of all processes that share the rows
            layout.handles[0].refuse(error, bool(trained))

    # ------------------------------------------------------------ as a feature of a collection

    @staticmethod
    def feature_input(value: Any) -> Any:
        if isinstance(value, tuple) and len(value) not in (2, 3):
            raise ArgumentError(f"a tuple must be (ids, offsets) or (ids, offsets, weights): got {len(value)} parts.")
        return BagInput(*value) if isinstance(value, tuple) else value

    @staticmethod
    def keyed_input(part: BagInput, has_end: bool) -> BagInput:
        assert part.offsets is not None
        return part if has_end else part._replace(offsets=part.offsets[:-1])

    @staticmethod
    def called(layer: Any, value: Any, **time: Any) -> Tensor:
        return layer(*BagInput.of(value).arguments, **time)

    @staticmethod
    def shaped(output: Tensor, value: Any) -> Tensor:
        return output

    def host_input(self, value: Any) -> HostInput:
        ids, offsets, weights, host = BagInput.of(value)
        if host is not None:
            return HostInput(*host, self._flat_weights(ids, weights, host[0].size))
        if offsets is None and getattr(ids, "ndim", 0) in (1, 2) and not is_jagged(ids):  # bags of one size
            array = host_ids(ids, self.handle.label)
            return HostInput(array, None, self._flat_weights(ids, weights, array.size))
        return self._flat_input(ids, offsets, weights)

    def _flat_input(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> HostInput:
        flat, cuts = self._flat(ids, offsets, self.handle)
        return HostInput(flat.cpu().numpy(), cuts.cpu().numpy(), self._flat_weights(ids, weights, len(flat)))

    def gpu_input(self, value: Any) -> tuple[Tensor, Any, Tensor | None]:
        handle, (ids, offsets, weights) = self.handle, BagInput.of(value).arguments
        if not isinstance(ids, Tensor):
            check_ids(ids, handle.label)  # an error
        if ids.ndim == 2 and ids.shape[1] and offsets is None and not is_jagged(ids):
            flat, starts = check_ids(ids, handle.label), None
        elif offsets is not None and self._has_starts_there(ids, offsets, handle):
            flat, starts = check_ids(ids, handle.label), check_ids(offsets, f"the offsets of {handle.label}")
        else:
            flat, bounds = self._flat(ids, offsets, handle)
            starts = bounds[:-1]
        weights = self._flat_weights(ids, weights, flat.numel())
        executor: Any = handle.pending.executor
        return flat, executor.bags(flat, self.mode, starts, weights), weights

    def outside(self, error: IdError, value: Any) -> IdError:
        ids, offsets, _ = BagInput.of(value).arguments
        flat, _ = self._flat(ids, offsets, self.handle)
        if offsets is None:  # each row, or each part of a jagged tensor, is a bag
            return self._outside(error, flat, place_in(ids))
        return self._outside(error, flat, in_bags(np.append(offsets.cpu().numpy()[1:], len(ids)), ids.shape))

    def _flat(self, ids: Tensor, offsets: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor]:
        """Return the ids of all bags (n,) on their device, and the bounds of the bags: int64 (bags + 1,)."""
        if is_jagged(ids) and offsets is None:
            ids = ids.contiguous()
            return check_ids(ids.values(), handle.label), offsets_of(ids)
        flat = check_ids(ids, handle.label)
        if flat.ndim == 2:
            if offsets is not None:
                raise ArgumentError("`offsets` go with a 1-D input: each row of a 2-D input is a bag. Leave them out.")
            return flat.reshape(-1), torch.arange(len(flat) + 1, device=flat.device) * flat.shape[1]
        if flat.ndim != 1 or offsets is None or offsets.dim() != 1:
            got = "no offsets" if offsets is None else f"offsets of shape {tuple(offsets.shape)}"
            raise ArgumentError(
                f"`input` must be 2-D, or 1-D with 1-D `offsets`: got an input of shape {tuple(flat.shape)} and {got}."
            )
        if self._has_starts_there(ids, offsets, handle):
            end = torch.full((1,), len(flat), dtype=torch.int64, device=offsets.device)
            return flat, torch.cat([check_ids(offsets, f"the offsets of {handle.label}").long(), end])
        # The host waits for offsets on a GPU, because they decide how many ids are in bags.
        starts = host_ids(offsets, f"the offsets of {handle.label}").astype(np.int64)
        bounds = starts if self.include_last_offset else np.append(starts, len(flat))
        check_bounds(bounds, len(flat), starts)
        return flat[: bounds[-1]], torch.from_numpy(bounds)

    def _has_starts_there(self, ids: Tensor, offsets: Tensor, handle: Handle) -> bool:
        """Return whether offsets stay on the GPU, which checks them against ids (n,)."""
        are_there = offsets.device.type != "cpu" and handle.rows_on is not None
        return are_there and not self.include_last_offset and ids.ndim == offsets.ndim == 1

    def _flat_weights(self, ids: Tensor, weights: Tensor | None, count: int) -> Tensor | None:
        if weights is None:
            return None
        if self.mode != "sum":
            raise UnsupportedError(
                f"`per_sample_weights` go with mode='sum' only, as in PyTorch: got mode={self.mode!r}."
            )
        if is_jagged(ids):
            raise UnsupportedError("`per_sample_weights` do not go with a jagged input: pass its values and offsets.")
        if weights.shape != ids.shape or weights.dtype != self.dtype:
            raise ArgumentError(
                f"`per_sample_weights` must be {self.dtype} and have the input's shape {tuple(ids.shape)}: "
                f"got {weights.dtype}, {tuple(weights.shape)}."
            )
        return weights.resolve_neg().reshape(-1)[:count]
