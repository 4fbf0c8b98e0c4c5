"""`Embedding`: `torch.nn.Embedding` with its rows in a table."""

from __future__ import annotations

from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from embedrock.errors import IdError, IdTypeError
from embedrock.process.spans import span
from embedrock.table.options import shows
from embedrock.table.table import Table
from embedrock.torch.layers import operators
from embedrock.torch.layers.arguments import (
    DTYPES,
    PretrainedOptions,
    RowOptions,
    check_norm,
    check_positions,
    pretrained_table,
    table_of,
)
from embedrock.torch.layers.row_layer import RowLayer
from embedrock.torch.layers.transforms import flat_ids, is_jagged, jagged_like, on_plain_tensors, place_in
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.joint_lookup import FeatureRequest
from embedrock.torch.training.lookup import Lookup, LookupState, check_ids
from embedrock.torch.training.sharing import ShardingOptions


class Embedding(RowLayer):
    """`torch.nn.Embedding` whose rows live in a table of any size, and are stepped by Embedrock's optimizers.

    It does what `torch.nn.Embedding` does, except that its rows are not a parameter: instead of ``weight`` it has
    a scalar ``handle`` (see `Handle`), and the rows are stepped by ``ert.Adam(model)`` and the like.

    Args:
        num_embeddings: number of rows; None for open ids (any int64); or a ready-made `er.Table`, which brings
            all that is not an argument of `nn.Embedding`.
        embedding_dim: weights in a row.
        padding_idx: id whose row starts as zeros and gets no gradient; negative ones count from the end.
        max_norm: rows whose norm exceeds it are shrunk to it, in the table, when they are looked up. (Not with
            `dense=True`.)
        norm_type: the p of that norm.
        scale_grad_by_freq: divide the gradient of a row by how often its id occurs in the call.
        path: folder of a table on disk, made where there is none; one that is there is resumed, which a line of the
            logger "embedrock" says. None: rows in RAM.
        memory: the most RAM that the rows may take, in bytes or as "2GiB"; None: the machine's.
        init: first values, by default ``er.Normal(0, 1)`` as in PyTorch: one of Embedrock's initializers; a name such
            as "xavier_uniform", "kaiming_normal" or "zeros"; a function of `torch.nn.init`; or one with arguments,
            ``functools.partial(torch.nn.init.normal_, std=0.02)``. Its numbers are those of a weight of shape
            (num_embeddings, embedding_dim), as PyTorch computes them.
        seed: of the first values. None: one number of PyTorch's generator on the CPU, which `torch.manual_seed` sets,
            is drawn (of every layer that makes its table and was given none). It is kept with the rows, as in
            ``state_dict()``; a table that is there at `path` keeps its own.
        dtype: of rows and outputs: torch.float32, torch.bfloat16 or torch.float16.
        name: of the table, for error messages and for pickling by reference. What tells tables apart is their place in
            the model, in state dicts and checkpoints, and their folders: two may have one name.
        sharded: who has the rows where several processes of torch.distributed train together: True, each those that
            it owns by a hash of their ids; "rank 0", that one has all; a ProcessGroup, its ranks share them out;
            False, each has all of them, and copies stay equal. See docs/shards.md.
        reshard: what to do where the table at `path` has another number of parts than there are ranks: "error", or
            "auto", its rows are shared out anew first, for which all ranks must see the same disk.
        wire: what float32 rows that are shared out, and their gradients, are sent as: "float32", exactly, or
            "bfloat16", rounded to the nearest number of 16 bits. See docs/shards.md.
        positions: several processes train rows to the bits of one that has the batches of all as one batch: gradients
            are sent for each position, and summed in that order. Else those of each rank are summed before they are
            sent, which sends less. See docs/shards.md.
        policy, keep, rule, directory, on_nonfinite, device_memory: as in `er.Table`.
        commit_every: as in `er.Table`: commits rows by itself, and no dense weights, which `ert.save` has as well.

    Raises:
        ArgumentError: an argument has a value that cannot work.
        UnsupportedError, UnknownArgumentError: an argument that this layer does not have.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> model = torch.nn.Sequential(ert.Embedding(10**9, 4), torch.nn.Linear(4, 1))
        >>> rows = ert.Adam(model, lr=1e-3)
        >>> dense = torch.optim.Adam(ert.dense_parameters(model), lr=1e-3)
        >>> model(torch.tensor([3, 14, 159_265_358])).sum().backward()
        >>> rows.step(); dense.step()
        >>> int(model[0].table.stats()["rows_touched"])
        3
    """

    shown = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")

    @shows(RowOptions)
    def __init__(
        self,
        num_embeddings: int | Table | None,
        embedding_dim: int | None = None,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        **options: Unpack[RowOptions],
    ) -> None:
        check_norm(max_norm, norm_type)  # before a table is opened, whose path an error would keep
        check_positions("ert.Embedding", scale_grad_by_freq, options)
        table = table_of("ert.Embedding", num_embeddings, embedding_dim, padding_idx, options)
        super().__init__(table, padding_idx, max_norm, norm_type, scale_grad_by_freq, options)

    @classmethod
    @shows(PretrainedOptions)
    def from_pretrained(
        cls,
        embeddings: Tensor | np.ndarray,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        *,
        dtype: torch.dtype | None = None,
        **options: Unpack[PretrainedOptions],
    ) -> Embedding:
        """Make a layer whose rows start as those of `embeddings`, which is never copied.

        Args:
            embeddings: 2-D tensor, array or `np.memmap` (rows, dim), of any size. It must not change afterwards.
            freeze: the rows do not train.
            padding_idx, max_norm, norm_type, scale_grad_by_freq: as for the layer. The row of `padding_idx` is
                not zeroed.
            dtype: of rows and outputs; by default that of `embeddings`.
            options: path, memory, policy, keep, commit_every, seed, name, rule, directory, on_nonfinite,
                device_memory: as for the layer. The table on disk at `path` gets the rows that are stepped;
                `embeddings` are needed again to open it.

        Example:
            >>> import torch, embedrock.torch as ert
            >>> layer = ert.Embedding.from_pretrained(torch.eye(3))
            >>> layer(torch.tensor([2]))
            tensor([[0., 0., 1.]])
        """
        check_positions("ert.Embedding", scale_grad_by_freq, options)
        table = pretrained_table("ert.Embedding", embeddings, dtype, options)
        layer = cls(table, None, padding_idx, max_norm, norm_type, scale_grad_by_freq)
        layer.dtype = DTYPES[table.spec.dtype]
        layer.handle.share_by(ShardingOptions.of(options))
        layer.requires_grad_(not freeze)
        return layer

    @on_plain_tensors
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Embedding's name
        """Return the rows of ids.

        Args:
            input: int32 or int64 of any shape, on any device; repeats are allowed. Or a nested tensor (n, j) of these
                with layout `torch.jagged`.

        Returns:
            ``input.shape + (embedding_dim,)``, of the layer's dtype, on the handle's device.

        Raises:
            IdError: an id lies outside the table.
            IdTypeError: ids are not int32 or int64.
            ForgottenGradientsError: earlier gradients of the rows were applied by no optimizer.
            UnsupportedError: training in several processes, tracing, replicas.
        """
        if is_jagged(input):
            ids = input.contiguous()
            try:
                return jagged_like(ids, self(ids.values()))
            except IdError as error:
                raise self.outside(error, ids) from None
        handle = self._usable_handle()
        if self._trains(handle):
            return Lookup.of(handle, self.reading(handle, input))
        return self.rows_for_no_gradient(handle, input)

    def in_graph(self, input: Tensor) -> Tensor:  # noqa: A002
        """Do what `forward` does by an operator, for a graph of `torch.compile`."""
        if is_jagged(input):
            ids = input.contiguous()
            return jagged_like(ids, self.in_graph(ids.values()))
        own = self._number, operators.new_call(), self.embedding_dim, self.dtype
        return operators.lookup(self.handle, input, *own, self._may_train())[0]

    def reading(self, handle: Handle, ids: Tensor) -> LookupState:
        """Plan a lookup of rows that train."""
        executor = handle.executor()
        return LookupState(
            handle, executor, self._planned(executor, self._checked(handle, ids, True), True), self._options()
        )

    def _checked(self, handle: Handle, ids: Tensor, trains: bool) -> Tensor:
        try:
            return check_ids(ids, handle.label)
        except IdTypeError as error:
            handle.refuse(error, trains)

    def asked(self, ids: Tensor) -> FeatureRequest:
        """Return what the layer asks of a lookup together with others: the rows of dense ids."""
        handle = self._usable_handle()
        feature = handle.pending.executor.feature(check_ids(ids, handle.label), self.padding_idx)
        return FeatureRequest(handle, feature, None, self.dtype, self._trains(handle))

    def outside(self, error: IdError, ids: Tensor) -> IdError:
        """Return the error of a lookup of ids, dense or jagged, with the place of the id in them."""
        return self._outside(error, flat_ids(ids), place_in(ids))

    def rows_for_no_gradient(self, handle: Handle, ids: Tensor) -> Tensor:
        """Look rows up that gradients do not come back to."""
        executor, ids = handle.executor(), self._checked(handle, ids, False)
        if self.max_norm is None:
            with span("read"):
                return executor.lookup(ids).to(handle.device, self.dtype)
        return executor.read(self._planned(executor, ids, trains=False)).to(handle.device, self.dtype)
