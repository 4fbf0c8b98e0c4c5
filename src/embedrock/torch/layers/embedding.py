"""`Embedding`: `torch.nn.Embedding` with its rows in a table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from embedrock.batch.wrong_ids import Place, in_array, in_jagged
from embedrock.errors import IdError, IdTypeError, UnsupportedError
from embedrock.system.spans import span
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
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.lookup import FeatureRequest, Lookup, LookupState, check_ids
from embedrock.torch.training.sharing import ShardingOptions

Method = TypeVar("Method", bound=Callable[..., Any])


def on_plain_tensors(forward: Method) -> Method:
    """Let a layer's method see real tensors only, wherever it is called.

    In a graph of `torch.compile` the layer's `in_graph` stands for it, and a transform of `torch.func` takes the rows
    as constants: neither could see the rows change.
    """

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _check_not_exported(self)
            return self.in_graph(*args, **kwargs)
        if _functorch.peek_interpreter_stack() is None:
            return forward(self, *args, **kwargs)
        _check_frozen(self.handle)
        label = _label(self.handle)
        plain = [_plain(value, label) for value in args]
        named = {name: _plain(value, label) for name, value in kwargs.items()}
        with torch._C._DisableFuncTorch():  # the rows are constants
            return forward(self, *plain, **named)

    return call  # pyright: ignore[reportReturnType]


def are_plain() -> bool:
    """Return whether tensors are what they seem: no graph is being made, and no transform of `torch.func` runs."""
    return not torch.compiler.is_compiling() and _functorch.peek_interpreter_stack() is None


# PyTorch before 2.7 has no such function.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: not torch.compiler.is_dynamo_compiling())


def _check_not_exported(layer: Any) -> None:
    if _is_exporting():
        raise UnsupportedError(
            f"{layer.label} cannot be exported (torch.export, torch.onnx): its rows are in a table, not in the model. "
            "Export ert.freeze(model), which has plain layers; torch.compile takes the model as it is."
        )


def _check_frozen(handle: Any) -> None:
    if handle.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"rows of {_label(handle)} cannot train inside of torch.func's transforms (vmap, grad, jacrev, ...). Look "
            "them up outside, `rows = layer(ids)`, and pass the rows to the function; or freeze them by "
            "requires_grad_(False)."
        )


def _label(handle: Any) -> str:
    """Return what errors call the layer; functional_call may have put a tensor in the place of its handle."""
    return getattr(handle, "label", "an embedding layer")


def _plain(value: Any, label: str) -> Any:
    """Return the tensor inside of a transform's tensor."""
    while isinstance(value, Tensor) and _functorch.is_functorch_wrapped_tensor(value):
        if _functorch.is_batchedtensor(value):
            raise UnsupportedError(
                f"{label} cannot be looked up for ids that vmap goes over. Layers take ids of any shape: look them up "
                "outside, `rows = layer(ids)`, and let vmap go over the rows."
            )
        value = _functorch.get_unwrapped(value)
    return value


def is_jagged(ids: Any) -> bool:
    """Return whether ids are a nested tensor (n, j) with layout `torch.jagged`."""
    return isinstance(ids, Tensor) and ids.is_nested and ids.layout is torch.jagged and ids.dim() == 2


def flat_ids(ids: Tensor) -> Tensor:
    """Return the values of a jagged tensor; others as they are."""
    return ids.contiguous().values() if is_jagged(ids) else ids


def place_in(ids: Tensor) -> Place:
    """Return what says where one of the ids of a tensor is."""
    return in_jagged(offsets_of(ids.contiguous()).cpu().numpy()) if is_jagged(ids) else in_array(ids.shape)


def jagged_like(ids: Tensor, rows: Tensor) -> Tensor:
    """Return rows, one for each id of a jagged tensor, as a jagged tensor like it: (n, j, dim)."""
    return torch.nested.nested_tensor_from_jagged(rows, offsets_of(ids))


def offsets_of(ids: Any) -> Tensor:
    """Return where the parts of jagged ids start, and where the last ends: int64 (n + 1,)."""
    return ids.offsets()


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
