"""`Embedding`: `torch.nn.Embedding` with its rows in a table."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from embedrock.batch.wrong_ids import Place, in_array, in_jagged
from embedrock.errors import IdError, IdTypeError, UnsupportedError
from embedrock.initializers import FromSafetensors
from embedrock.system.spans import span
from embedrock.table.options import shows
from embedrock.torch.layers.arguments import PretrainedOptions
from embedrock.torch.layers.features import BagInput
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
    needs_gradient,
)

Method = TypeVar("Method", bound=Callable[..., Any])


def on_plain_tensors(forward: Method) -> Method:
    """Return a layer's method that sees only real tensors, wherever it is called.

    In a graph of `torch.compile`, the layer's `in_graph` replaces the method. A transform of `torch.func` takes the
    rows as constants. Neither could see the rows change.
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
        with torch._C._DisableFuncTorch():  # the transform sees rows as constants
            return forward(self, *plain, **named)

    return call  # pyright: ignore[reportReturnType]


def are_plain() -> bool:
    """Return whether tensors are plain: no graph is being made, and no transform of `torch.func` runs."""
    return not torch.compiler.is_compiling() and _functorch.peek_interpreter_stack() is None


# PyTorch before 2.7 lacks this function.
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
    """Return the layer's name in errors. `functional_call` may have put a tensor in place of the handle."""
    return getattr(handle, "label", "an embedding layer")


def _plain(value: Any, label: str) -> Any:
    while isinstance(value, Tensor) and _functorch.is_functorch_wrapped_tensor(value):
        if _functorch.is_batchedtensor(value):
            raise UnsupportedError(
                f"{label} cannot be looked up for ids that vmap goes over. Layers take ids of any shape: look them up "
                "outside, `rows = layer(ids)`, and let vmap go over the rows."
            )
        if value.is_floating_point() and needs_gradient(value):
            raise UnsupportedError(
                f"{label} takes weights of positions as constants inside of torch.func's transforms (grad, jvp, "
                "jacrev, ...), so that their derivatives would be 0. Differentiate them by torch.autograd.grad outside "
                "of transforms, or pass weights.detach() as constants."
            )
        value = _functorch.get_unwrapped(value)
    return value


def is_jagged(ids: Any) -> bool:
    """Return whether ids are a nested tensor (n, j) with layout `torch.jagged`."""
    return isinstance(ids, Tensor) and ids.is_nested and ids.layout is torch.jagged and ids.dim() == 2


def flat_ids(ids: Tensor) -> Tensor:
    """Return the values of a jagged tensor. Other tensors stay as they are."""
    return ids.contiguous().values() if is_jagged(ids) else ids


def place_in(ids: Tensor) -> Place:
    """Return a function that describes the position of one of the ids of a tensor."""
    return in_jagged(offsets_of(ids.contiguous()).cpu().numpy()) if is_jagged(ids) else in_array(ids.shape)


def jagged_like(ids: Tensor, rows: Tensor) -> Tensor:
    """Return rows of the ids of a jagged tensor as a jagged tensor of the same layout: (n, j, dim)."""
    return torch.nested.nested_tensor_from_jagged(rows, offsets_of(ids).to(rows.device))


def offsets_of(ids: Any) -> Tensor:
    """Return the bounds of the parts of jagged ids: int64 (n + 1,)."""
    return ids.offsets()


class Embedding(RowLayer):
    """`torch.nn.Embedding` with rows in a table of any size, stepped by Embedrock's optimizers.

    The layer works as `torch.nn.Embedding`, except that its rows are not a parameter. Instead of ``weight`` it has a
    proxy parameter: the scalar ``handle`` (see `Handle`). Optimizers such as ``ert.Adam(model)`` step the rows.

    Args:
        num_embeddings: number of rows; None for open ids (any int64); or a ready-made `er.Table`. A ready-made table
            replaces all arguments that `nn.Embedding` does not have.
        embedding_dim: weights in a row.
        padding_idx: id of the padding row, which starts as zeros and gets no gradient. Negative values count from the
            end.
        max_norm: upper bound of a row's norm. A lookup shrinks longer rows to it, in the table. (Not with
            `dense=True`.)
        norm_type: the p of the norm.
        scale_grad_by_freq: divide the gradient of a row by the number of times its id occurs in the call.
        path: folder of a table on disk. An existing table is resumed, with a line of the logger "embedrock". A missing
            folder is created. None: rows in RAM.
        memory: most RAM that the rows may take, in bytes or as "2GiB"; None: the machine's RAM.
        init: initial values, by default ``er.Normal(0, 1)`` as in PyTorch. One of Embedrock's initializers, or a name
            such as "xavier_uniform", "kaiming_normal" or "zeros". Or a function of `torch.nn.init`, also with
            arguments: ``functools.partial(torch.nn.init.normal_, std=0.02)``. Fan-in and fan-out are those of a weight
            of shape (num_embeddings, embedding_dim), as in PyTorch.
        seed: seed of the initial values. None: each layer that makes its table draws one number of PyTorch's CPU
            generator, which `torch.manual_seed` sets. The seed is saved with the rows, as in ``state_dict()``. An
            existing table at `path` keeps its seed.
        dtype: dtype of rows and outputs: torch.float32, torch.bfloat16 or torch.float16.
        name: name of the table, for error messages and for pickling by reference. Two tables may have one name. State
            dicts and checkpoints identify a table by its path in the model, or by its folder.
        sharded: owners of the rows when several processes of torch.distributed train together. True: each process owns
            rows by a hash of their ids. A ProcessGroup: its ranks own the rows that way. "rank 0": that rank has all
            rows. False: each process has all rows, and the copies stay equal. See docs/shards.md.
        reshard: action if the number of shards at `path` is not the number of ranks: "error" or "auto". "auto" reshards
            the rows first. All ranks must then see the same disk.
        wire: dtype in messages of sharded float32 rows and their gradients. "float32" is exact, "bfloat16" rounds to
            the nearest number of 16 bits. See docs/shards.md.
        missing: values of rows that are not there, in a layer that is frozen or in `eval()`: "first", their initial
            values; "zeros"; "shared", the default row of the admission; "raise", an `IdError`; or a row
            (embedding_dim,). None: that of the table. The padding row is always there. It can be set at any time.
        positions: several processes get the bits of one process with all batches as one batch. Gradients are sent for
            each position, and summed in that order. False: each rank sums gradients before it sends them, which sends
            less. See docs/shards.md.
        group: `er.Group` that the table is a member of, under its `name`. Its members share one budget of memory, and
            are looked up in one call. None: a table by itself.
        device_memory: GPU memory for rows, in bytes or as "8GiB" or "50%"; None: what is free.
        rule: optimizer of the rows, such as ``er.Adam()``; None: that of the first optimizer that steps them.
        directory: index of rows in RAM: "direct", "hashed" or "auto".
        on_nonfinite: action on gradients with NaN or Inf: "raise" or "skip".
        policy: eviction from the RAM of a table on disk: "lfu" or "lru".
        keep: number of commits to keep on disk.
        admission, eviction: which ids get a row, and which rows leave: `er.Admission`, `er.Eviction`.
        frozen: ids and ranges of rows that do not train.
        commit_every: as in `er.Table`. It commits rows only. `ert.save` also saves dense weights.

    Raises:
        ArgumentError: an argument has a value that cannot work.
        UnsupportedError, UnknownArgumentError: this layer does not have the argument.

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

    _kind = "ert.Embedding"
    shown = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")

    @classmethod
    @shows(PretrainedOptions)
    def from_pretrained(
        cls,
        embeddings: Tensor | np.ndarray | FromSafetensors | str | os.PathLike[str],
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        *,
        tensor: str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[PretrainedOptions],
    ) -> Embedding:
        """Make a layer with `embeddings` as initial rows. They are never copied, except from a table.

        Args:
            embeddings: 2-D tensor, array or `np.memmap` (rows, dim), of any size, or `er.FromSafetensors`. Or the path
                of a ``.npy`` file, which is mapped; of a ``.safetensors`` file or a folder of them, which is read in
                place; or of a table on disk, whose rows of the last commit are copied to RAM. They must not change
                afterwards.
            freeze: rows do not train.
            padding_idx, max_norm, norm_type, scale_grad_by_freq: as for the layer. The row of `padding_idx` is not
                zeroed.
            tensor: name of the tensor, if safetensors files have several matrices.
            dtype: dtype of rows and outputs; by default that of `embeddings`.
            options: path, memory, policy, keep, commit_every, seed, name, rule, directory, on_nonfinite, missing,
                device_memory: as for the layer. The table on disk at `path` stores stepped rows. To open it
                again, pass `embeddings` again.

        Raises:
            ArgumentError: `embeddings` have another shape, dtype, type or file format.
            MemoryBudgetError: the rows of a table do not fit in free RAM.
            TableFileError: a file is damaged, or has no such tensor.

        Example:
            >>> import torch, embedrock.torch as ert
            >>> layer = ert.Embedding.from_pretrained(torch.eye(3))
            >>> layer(torch.tensor([2]))
            tensor([[0., 0., 1.]])
        """
        given = {"max_norm": max_norm, "norm_type": norm_type, "scale_grad_by_freq": scale_grad_by_freq}
        return cls._of_weights(embeddings, tensor, freeze, dtype, options, padding_idx=padding_idx, **given)

    @on_plain_tensors
    def forward(self, input: Tensor, time: Any = None) -> Tensor:  # noqa: A002  # nn.Embedding's name
        """Return the rows of ids.

        Args:
            input: int32 or int64 of any shape, on any device; repeats are allowed. Or a nested tensor (n, j) of these
                with layout `torch.jagged`.
            time: times of the batch's events, for ``er.Eviction(idle="30d")``: see `Table.update`. They count in the
                step of its gradients. A lookup without a gradient does not use them.

        Returns:
            ``input.shape + (embedding_dim,)``, of the layer's dtype, on the handle's device.

        Raises:
            IdError: an id is outside the table.
            IdTypeError: ids are not int32 or int64.
            ForgottenGradientsError: no optimizer applied earlier gradients of the rows.
            UnsupportedError: unsupported training in several processes, tracing, or replicas.
        """
        if type(input) is not Tensor and is_jagged(input):  # a nested tensor is of a subclass
            ids = input.contiguous()
            try:
                return jagged_like(ids, self(ids.values(), time))
            except IdError as error:
                raise self.outside(error, ids) from None
        layout = self._layout()
        trained = layout.trained((self,))
        if not trained:
            return self._read(layout, input)
        return looked_up(self._planned_lookup(layout, trained, input, time))[0]

    def in_graph(self, input: Tensor, time: Any = None) -> Tensor:  # noqa: A002
        """Do the work of `forward` by an operator, for a graph of `torch.compile`."""
        if is_jagged(input):
            ids = input.contiguous()
            return jagged_like(ids, self.in_graph(ids.values(), time))
        return self._by_operator(input, time=time)

    def looked_up(
        self, layout: LayerLayout, trained: list[Handle], ids: Tensor, time: Any, *of_bags: Any
    ) -> tuple[Tensor, LookupState | None]:
        """Return the output of an operator, and its lookup if that trains."""
        if not trained:
            return self._read(layout, ids), None
        lookup = self._planned_lookup(layout, trained, ids, time)
        return lookup.read(for_weights=False)[0], lookup

    def _planned_lookup(self, layout: LayerLayout, trained: list[Handle], ids: Tensor, time: Any = None) -> LookupState:
        try:
            newest = layout.newest_event(time, trained)
            if layout.features is not None:
                arrays = layout.plain((ids,)) or [self.host_input(ids).ids]
                if self.max_norm is not None:  # then the CPU reads the rows: see `Handle.executor`
                    self._shrink(arrays[0], self.max_norm)
                return HostLookup(layout, trained, arrays).at(newest)
            plain = layout.ids_on_device((ids,)) or [self.gpu_input(ids)[0]]
            return DeviceLookupState(layout, trained, plain).at(newest)
        except Exception as error:  # of all processes that share the rows
            layout.handles[0].refuse(error, bool(trained))

    def _read(self, layout: LayerLayout, ids: Tensor) -> Tensor:
        """Return rows that do not train, if possible without a plan."""
        executor = layout.executor
        if self.max_norm is not None or executor is None or executor.rows is not None:
            return self._planned_lookup(layout, [], ids).read(for_weights=False)[0]
        with span("read"):
            array, *_ = layout.plain((ids,)) or self.host_input(ids)
            missing = layout.missing and layout.missing._replace(padding=self.padding_idx)
            rows = torch.from_numpy(self._table.lookup(array, missing=missing))
        return rows if layout.are_as_read else rows.to(layout.handles[0].device, self.dtype)

    # ------------------------------------------------------------ as a feature of a collection

    @staticmethod
    def feature_input(value: Any) -> Any:
        """Return the input of the methods below, from the value of a feature in a dict."""
        if isinstance(value, tuple):
            raise IdTypeError(
                "ids with offsets are for bags, whose rows are pooled. For rows one by one pass a nested tensor: "
                "torch.nested.nested_tensor_from_jagged(ids, torch.cat([offsets, offsets.new_tensor([len(ids)])]))."
            )
        return value

    @staticmethod
    def keyed_input(part: BagInput, has_end: bool) -> Any:
        """Return the input of the methods below, from a part of a `KeyedJaggedTensor`."""
        assert part.offsets is not None
        return torch.nested.nested_tensor_from_jagged(part.ids, part.offsets.to(part.ids.device))

    @staticmethod
    def called(layer: Any, ids: Tensor, **time: Any) -> Tensor:
        """Return the output of a layer of this kind, which may be PyTorch's."""
        return layer(ids, **time)

    @staticmethod
    def shaped(output: Tensor, ids: Tensor) -> Tensor:
        """Return the output of a joint lookup in the shape of the layer's output."""
        return jagged_like(ids.contiguous(), output) if is_jagged(ids) else output

    def host_input(self, ids: Tensor) -> HostInput:
        """Return the input of a lookup on the CPU together with other layers."""
        return HostInput(host_ids(flat_ids(ids), self.handle.label))

    def gpu_input(self, ids: Tensor) -> tuple[Tensor, None, None]:
        """Return the ids, the bags and the weights of a lookup on a GPU together with other layers."""
        return check_ids(ids if type(ids) is Tensor else flat_ids(ids), self._own_handle().label), None, None

    def outside(self, error: IdError, value: Tensor) -> IdError:
        """Return the error of a lookup, with the position of the id in the layer's input."""
        return self._outside(error, flat_ids(value), place_in(value))
