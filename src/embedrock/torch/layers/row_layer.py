"""`RowLayer`: base of `Embedding` and `EmbeddingBag`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn, Self, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from embedrock.batch.ids import check_range
from embedrock.batch.wrong_ids import Place
from embedrock.distributed.commits import is_part_of
from embedrock.errors import ArgumentError, GradientError, IdError, UnsupportedError
from embedrock.frontend.arguments import ROWS_AT_ONCE, lags_behind, resolve_padding, write_batches, zero_rows
from embedrock.frontend.growing import begin_padding, growing, grows
from embedrock.frontend.references import ReferenceRemedies, check_state, go_to, is_kept, is_reference
from embedrock.initializers import FromArray
from embedrock.system.notebook import PublicNames
from embedrock.system.scopes import on_failure
from embedrock.table import saved
from embedrock.table.changes import has_more
from embedrock.table.missing import Missing
from embedrock.table.options import shows
from embedrock.table.table import Table, rows_of
from embedrock.torch.layers import operators, row_state
from embedrock.torch.layers.arguments import (
    DTYPES,
    PretrainedOptions,
    RowOptions,
    check_norm,
    check_positions,
    first_values,
    pretrained_table,
    table_of,
)
from embedrock.torch.training.generation import generation
from embedrock.torch.training.handle import Handle, handle_of
from embedrock.torch.training.lookup import LayerLayout, check_ids, needs_gradient
from embedrock.torch.training.sharing import ShardingOptions

DEFAULTS = {"norm_type": 2.0, "scale_grad_by_freq": False, "include_last_offset": False, "dtype": torch.float32}
HOOKS = (  # hooks that change the output of a call
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
REPLACED = (
    "the handle was replaced by another tensor. nn.DataParallel, torch.func.functional_call, parametrizations and "
    "inductor's freezing=True cannot reach the rows of an embedding layer: leave that out, and call the module itself."
)
REMEDIES = ReferenceRemedies(
    moved="Make the layer with path=, the place where that table is now, or pass relocate={old path: new path} to "
    "ert.load.",
    dropped="Save by ert.save, which keeps its commits, or make the layer with a larger keep=.",
)


class RowLayer(PublicNames, nn.Module):
    """Embedding layer with rows in a `Table`, behind a handle.

    Layers on one table share its handle, as tied layers share a parameter.

    The arguments are those of `Embedding`.
    """

    _kind: ClassVar[str]  # name of the class in error messages
    shown: ClassVar[tuple[str, ...]]  # arguments in the order in which PyTorch's layer prints them
    rows: ClassVar[row_state.RowKeys] = row_state.RowKeys()
    handle: Handle
    __call__: Callable[..., Tensor]
    _unlisted = "*_graph *_input *_over *_rows called joined_by label looked_up name_in_* outside rows shaped shown"
    _known_layout: LayerLayout | None = None
    _missing: Missing | None = None
    _number: Tensor  # graphs identify the layer by it

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
        check_norm(max_norm, norm_type)  # before the table opens: an error would keep its folder open
        check_positions(self._kind, scale_grad_by_freq, options)
        table = table_of(self._kind, num_embeddings, embedding_dim, padding_idx, options)
        super().__init__()
        self._table, self.padding_idx = table, padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq = max_norm, norm_type, scale_grad_by_freq
        self.dtype, self._path, terms = DTYPES[table.spec.value_dtype], "", ShardingOptions.of(options)
        if "dtype" not in options and self.dtype == torch.float32:
            self.dtype = torch.get_default_dtype()  # dtype of outputs, which go into layers of the default dtype
        self.handle = handle_of(table)
        self._number = operators.number_of(self)
        self.name_in_errors()
        self._claim_max_norm()
        self.missing = options.get("missing")
        if not terms.are_default:  # further layers on a shared table need not repeat the options
            self.handle.share_by(terms)
        if isinstance(self.handle, Handle):  # under FakeTensorMode it is a FakeTensor
            self.handle.name_for_others()

    @classmethod
    def _of_weights(
        cls, weights: Any, tensor: str | None, freeze: bool, dtype: Any, options: PretrainedOptions, **given: Any
    ) -> Self:
        """Make a layer with `weights` as initial rows. `given` are PyTorch's arguments of the layer."""
        check_positions(cls._kind, given["scale_grad_by_freq"], options)
        table = pretrained_table(cls._kind, weights, tensor, dtype, options)
        make: Any = cls  # arguments differ between layers
        layer = make(table, None, **given)
        layer.dtype, layer.missing = DTYPES[table.spec.value_dtype], options.get("missing")
        layer.handle.share_by(ShardingOptions.of(options))
        layer.requires_grad_(not freeze)
        return layer

    def name_in_errors(self, path: str | None = None) -> None:
        """Name the layer in error messages by its path in a model; None: by the known path."""
        self._path = path = self._path if path is None else path
        self.handle.label = f"{path!r}, {self.label}" if path else self.label
        rows_of(self.table).name_by(self.handle.label)

    @property
    def label(self) -> str:
        """Name of the layer in error messages if its path in a model is not known."""
        name = f", name={self.table.name!r}" if self.table.name else ""
        return f"{type(self).__name__}({self.num_embeddings}, {self.embedding_dim}{name})"

    def name_in_model(self, path: str) -> None:
        """Name the layer in error messages by its path in a model. "" is the model itself."""
        if path and self.handle.average is None:  # an averaged handle has a label of its own
            self.name_in_errors(path.removesuffix("."))

    def _claim_max_norm(self) -> None:
        if self.max_norm is None:
            return
        before, self.handle.max_norm = self.handle.max_norm, self.max_norm
        with on_failure(lambda: setattr(self.handle, "max_norm", before)):  # the layer was not made
            self.handle.check_rule(self.table.rule)

    @property
    def table(self) -> Table:
        """Table of the rows, with `lookup`, `assign`, `export` and more."""
        return self._table

    def take_over(self, table: Table) -> None:
        """Replace the layer's table by another one of the same kind. The handle stays."""
        self._table = table
        self.handle.stand_for(table)

    def grow(self, num_embeddings: int | None, init: FromArray | None = None) -> None:
        """Add rows: see `Table.grow`. Optimizers go on, and pending gradients stay.

        Rows on a GPU are written back first. The next use copies them to the GPU again.

        Args:
            num_embeddings: number of rows afterwards; None for open ids.
            init: as for `Table.grow`.

        Raises:
            ArgumentError, MemoryBudgetError: as for `Table.grow`.
            UnsupportedError: gradients are pending on a GPU.

        Example:
            >>> import embedrock.torch as ert
            >>> layer = ert.Embedding(10, 4)
            >>> layer.grow(12)
            >>> layer.num_embeddings, tuple(layer(torch.tensor([11])).shape)
            (12, (1, 4))
        """
        self.handle.leave_side()
        self.table.grow(num_embeddings, init)
        self.name_in_errors()

    def shrink(self, num_embeddings: int) -> int:
        """Delete rows from the end, with their state. Return the number that had records: see `Table.shrink`.

        Args:
            num_embeddings: number of rows afterwards.

        Raises:
            ArgumentError: as for `Table.shrink`; or `padding_idx` would be deleted. Set it to None first.
            UnsupportedError: gradients are pending on a GPU.

        Example:
            >>> import embedrock.torch as ert
            >>> layer = ert.Embedding(10, 4)
            >>> layer.shrink(8), layer.num_embeddings
            (0, 8)
        """
        if isinstance(num_embeddings, int) and 0 < num_embeddings <= (self.padding_idx or 0):
            raise ArgumentError(
                f"`padding_idx` of {self.handle.label} must be a row that stays, below {num_embeddings}: got "
                f"{self.padding_idx}. Set layer.padding_idx = None first, or another one."
            )
        self.handle.leave_side()
        count = self.table.shrink(num_embeddings)
        self.name_in_errors()
        return count

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, *, grow: bool = False
    ) -> Any:
        """Load a state dict; with `grow`, also one of fewer rows: see `embedrock.torch.load_state_dict`."""
        with growing([self], grow):
            return super().load_state_dict(state_dict, strict, assign)

    def reset_parameters(self) -> None:
        """Set all rows to new initial values, with a seed of PyTorch's generator. Drop their optimizer state and steps.

        `torch.nn.Embedding` does the same, but the optimizer state of rows is with the rows. The optimizer goes on. All
        layers on one table are reset together. Pending gradients are dropped.

        Raises:
            UnsupportedError: the rows are averages.

        Example:
            >>> import embedrock.torch as ert
            >>> layer = ert.Embedding(10, 4)
            >>> layer.table.assign([3], torch.ones(1, 4))
            >>> layer.reset_parameters()
            >>> len(layer.table.export()[0])
            0
        """
        if self.handle.average is not None:
            raise UnsupportedError(
                f"{self.handle.label} cannot be reset: it follows the rows of a model. Reset that, and make another "
                "one by ert.average(model)."
            )
        self.handle.forget()
        self.handle.leave_side()
        spec, seed = self.table.spec, first_values(None).seed
        own = {"dtype": spec.dtype, "rule": spec.rule, "init": spec.init, **spec.policies}
        first = Table(spec.rows, spec.dim, seed=seed, **own)
        if self.padding_idx is not None:
            zero_rows(first, [self.padding_idx])
        self.table.load_state(first)
        self.handle.changed()

    def forget(self, ids: npt.ArrayLike) -> int:
        """Delete rows at once. Return the number of deleted rows: see `Table.forget`.

        Rows with a GPU planner are written back first. The next use copies them to the GPU again.

        Args:
            ids: integers of any shape.

        Raises:
            ArgumentError: a batch without its step has some of the rows.
            UnsupportedError: gradients are pending on a GPU with a planner.

        Example:
            >>> import embedrock.torch as ert
            >>> layer = ert.Embedding(10, 4)
            >>> layer.table.assign([3], torch.ones(1, 4))
            >>> layer.forget([3, 4])
            1
        """
        if (executor := self.table.executor) is not None and not executor.may_forget():
            self.handle.leave_side()
        return self.table.forget(ids)

    @property
    def num_embeddings(self) -> int | None:
        """Number of rows; None for open ids."""
        return self.table.rows

    @property
    def embedding_dim(self) -> int:
        """Number of weights in a row."""
        return self.table.dim

    def extra_repr(self) -> str:
        """Return the arguments that are not PyTorch's defaults, and the place of the rows."""
        names = [name for name in (*self.shown, "dtype") if getattr(self, name) != DEFAULTS.get(name)]
        parts = [str(self.num_embeddings), str(self.embedding_dim), *(f"{n}={getattr(self, n)!r}" for n in names)]
        named = [] if self.table.name is None else [f"name={self.table.name!r}"]
        named += [] if self.missing is None else [f"missing={self.missing!r}"]
        return f"{', '.join([*parts, *named])}; {rows_of(self.table)}"

    # ------------------------------------------------------------ forward

    def _own_handle(self) -> Any:
        """Return ``self.handle``, without the microsecond that `nn.Module` takes for it."""
        handle = self._parameters.get("handle")
        return self.handle if handle is None else handle

    def __prepare_scriptable__(self) -> NoReturn:  # torch.jit.script calls this
        raise UnsupportedError(
            f"{self.handle.label} cannot be compiled by torch.jit.script: its rows are not in the model. Script "
            "ert.freeze(model), which has plain layers."
        )

    def joined_by(self) -> Any:
        """Return a key that layers share if one call can look them up together; None: no layer joins this one."""
        handle = self._own_handle()
        if not isinstance(handle, Handle) or self.scale_grad_by_freq or handle.max_norm is not None:
            return None  # a lookup that shrinks rows keeps its place before or after others of the table
        joins = handle.executor().joins
        return joins if self.missing is None or joins is None else (joins, self.missing)

    @property
    def missing(self) -> Any:
        """Values of rows that are not there: see `Embedding`. It can be set at any time."""
        return self._missing

    @missing.setter
    def missing(self, given: Any) -> None:
        choice = Missing.of(given, self.handle.label)
        if choice is not None:
            rows_of(self._table).row_instead(choice)  # an error
            if choice and self.max_norm is not None:
                raise UnsupportedError(
                    f"`missing` of {self.handle.label} does not go with max_norm, as a lookup makes the rows that it "
                    "shrinks. Leave one of them out."
                )
        self._missing = choice

    def _layout(self) -> LayerLayout:
        """Return what the layer's lookups have in common."""
        known = self._known_layout
        if known is not None and known.is_current(self._parameters):
            return known
        now = generation.now
        if not isinstance(self._own_handle(), Handle):
            raise UnsupportedError(REPLACED)
        known = LayerLayout(now, (self,))
        self.__dict__["_known_layout"] = known  # an attribute that is set otherwise begins a generation
        return known

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known_layout": None}  # a copy has a handle of its own

    def _shrink(self, ids: np.ndarray, max_norm: float) -> None:
        """Shrink rows with a larger norm in the table, as `torch.embedding_renorm_` does."""
        plan = self._table.plan(ids)
        rows = torch.from_numpy(self._table.read_rows(plan))
        norms = torch.linalg.vector_norm(rows, self.norm_type, dim=1)
        over = (norms > max_norm) & torch.from_numpy(self._table.spec.are_trained(plan.ids))
        if over.any():
            factors = max_norm / (norms[over].double() + 1e-7)
            self._table.assign(plan.ids[over.numpy()], (rows[over] * factors.float()[:, None]).numpy())

    # ------------------------------------------------------------ graphs of torch.compile

    def _by_operator(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        last_is_end: bool | None = None,
        time: Any = None,
    ) -> Tensor:
        """Return the output of a lookup by an operator: see `operators.lookup`."""
        if not isinstance(ids, Tensor):
            check_ids(ids, self.handle.label)
        trains = self.handle.requires_grad and torch.is_grad_enabled(), needs_gradient(weights)
        own = self._number, operators.new_call(), self.embedding_dim, self.dtype
        times = None if time is None else torch.as_tensor(time, dtype=torch.float64)
        return operators.lookup(self.handle, ids, offsets, weights, last_is_end, *own, *trains, times)[0]

    def enter_graph(self, handle: Tensor, trains: bool) -> LayerLayout:
        """Check what `forward` checks at each run of a graph, in whose making the rows trained or not."""
        layout = self._layout()
        if handle.data_ptr() != layout.handles[0].data_ptr():
            raise UnsupportedError(REPLACED)
        with torch.set_grad_enabled(trains):
            layout.trained((self,))
        return layout

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._number = operators.number_of(self)  # a copy is a layer of its own

    def _outside(self, error: IdError, ids: Tensor, place: Place) -> IdError:
        """Return the error of a lookup, with the position of the id in the layer's input.

        The error stays as it is if it belongs to an earlier batch, as on a GPU.
        """
        try:
            check_range(ids.cpu().numpy(), self.num_embeddings, self.table.subject, place)
        except IdError as placed:
            return placed
        return error

    # ------------------------------------------------------------ uses of a parameter named weight

    def _no_weight(self) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__} has no attribute 'weight': its rows are not a parameter. "
            "For more rows, call layer.grow(n), as model.resize_token_embeddings(n) of transformers does. "
            "For all rows at once, as a head or a softmax needs them, call layer(torch.arange(n)), which is "
            "differentiable. Read rows by layer.table.lookup(ids) or layer.table.export(), write them by "
            "layer.table.assign(ids, values), choose first values by init='xavier_uniform' or init=er.Uniform(-0.1, "
            "0.1), load weights by from_pretrained(weights) or load_state_dict, and share rows by making the other "
            "layer of layer.table."
        )

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            self._no_weight()
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self._no_weight()
        if name == "padding_idx":
            value = resolve_padding(value, self.table.rows)
        super().__setattr__(name, value)
        if name != "training":  # lookups ask for that each time
            generation.advance()

    # ------------------------------------------------------------ moving and saving

    @contextmanager
    def _handle_aside(self) -> Iterator[Handle]:
        """Hide the handle from methods of `nn.Module` that would treat it as weights."""
        handle = self._parameters.pop("handle")
        assert isinstance(handle, Handle)
        try:
            yield handle
        finally:
            self._parameters["handle"] = handle

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowLayer:
        """Move the outputs, not the rows: outputs get the device and dtype that `fn` would give a weight."""
        with self._handle_aside() as handle:
            super()._apply(fn, recurse)
            moved = fn(torch.zeros((), dtype=self.dtype, device=handle.device))
            if moved.device.type == "cpu" and moved.is_shared():
                raise UnsupportedError(
                    f"the rows of {handle.label} cannot be shared between processes (share_memory). "
                    "Train in one process; DataLoader workers need no rows."
                )
            handle.move(moved.device)
        self.dtype = moved.dtype
        return self

    def _load_rows(self, state: dict[str, Any]) -> None:
        """Load rows in the form that `take_rows` returns. A table on disk goes to the commit of a reference."""
        if self.handle.average is not None:
            self.handle.average.load(*row_state.weights_of(state))
            return
        self.handle.changed()
        self.handle.shown = None
        if (shard := self.handle.shard) is not None and shard.is_elsewhere:
            return
        self._check_part(state)
        check_state(self._table, state, self.handle.label, REMEDIES)
        if "weight" in state:
            self._check_weight(state["weight"])
            self.write_rows(np.arange(len(state["weight"])), state["weight"])
        elif is_reference(state):
            go_to(self._table, state)
            self.name_in_errors()  # the table may have had fewer rows then
            ids, averages = row_state.weights_of(state)
            self.write_rows(ids, torch.from_numpy(averages))
        else:
            self._table.load_state(state, grow=grows())
            begin_padding(self, state["rows"])

    def check_rows(self, states: Mapping[str, Any], prefix: str) -> None:
        """Raise an error if the rows in a state dict have another shape than the layer's. It sees no shards."""
        if self.handle.average is None and {prefix + row_state.META, prefix + "weight"} & states.keys():
            state = row_state.take_rows(states, prefix, self.handle.label)[0] or {}
            if "weight" in state:
                self._check_weight(state["weight"])
            elif "ids" in state:
                saved.check_header(state, rows_of(self._table), [state["ids"]], grows())

    def _check_part(self, state: dict[str, Any]) -> None:
        part, shard = state.pop(row_state.PART, None), self.handle.shard
        if part is not None and (shard is None or list(part) != [shard.rank, shard.ranks]):
            own = "this process has all rows" if shard is None else f"this is rank {shard.rank} of {shard.ranks}"
            raise ArgumentError(
                f"the state of {self.handle.label} has the rows of rank {part[0]} of {part[1]} only, and {own}. Load "
                "the checkpoint by ert.load on all ranks, which takes each row from the part that has it."
            )

    def write_rows(self, ids: np.ndarray, weights: Tensor) -> None:
        """Assign rows of this process, with weights (n, dim) for ids (n,), in batches."""
        for part in write_batches(self._table, len(ids)):
            own = slice(None) if (shard := self.handle.shard) is None else shard.owns(ids[part])
            rows = weights[part].detach().to("cpu", torch.float32).numpy()
            self._table.assign(ids[part][own], rows[own])

    def _check_weight(self, weight: Tensor) -> None:
        """Raise an error if a weight cannot be imported, before any row changes."""
        expected, layer = (self._table.rows, self._table.dim), f"ert.{type(self).__name__}"
        is_part = weight.ndim == 2 and weight.shape[1] == self._table.dim and has_more(self._table.spec, len(weight))
        if tuple(weight.shape) != expected and not (grows() and is_part):
            raise ArgumentError(
                f"`weight` for {layer} must have shape {expected}: got {tuple(weight.shape)}.{self._remedy(weight)}"
            )
        if lags_behind(self._table.rule):
            raise UnsupportedError(
                f"`weight` for {layer} cannot be loaded under {self._table.rule}, where rows lag behind. Load the "
                "checkpoint before you make the optimizer."
            )
        stored = DTYPES[self._table.spec.value_dtype]
        for start in range(0, len(weight), ROWS_AT_ONCE):
            rows = weight[start : start + ROWS_AT_ONCE].detach().to("cpu", torch.float32)
            finite = rows.to(stored).isfinite().all(dim=1)
            if not finite.all():
                raise GradientError(
                    f"`weight` for {layer} must be finite as {self._table.spec.dtype}: got NaN, Inf or a value too "
                    f"large in row {start + int((~finite).nonzero()[0])}. Nothing was loaded."
                )

    def _remedy(self, weight: Tensor) -> str:
        if weight.ndim != 2 or weight.shape[1] != self._table.dim:
            return ""
        n, own = len(weight), self._table.rows
        if own is not None and own < n:
            return f" First call layer.grow({n}), for that many rows; or leave {n - own} out, by weight[:{own}]."
        return (
            f" For the first {n} rows, with all others as they are, call layer.load_state_dict(state, grow=True), or "
            "ert.load_state_dict(model, state, grow=True)."
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.name_in_model(prefix)
        self.handle.check_untouched()
        if self.handle.state_dicts.is_saved_first(destination, prefix):
            average = self.handle.average
            self.handle.check_shows_rows("saved")
            tensors = self._own_tensors() if average is None else row_state.averaged_tensors(average, self.handle.label)
            self.handle.state_dicts.watch(tensors.values())
            destination.update({prefix + key: tensor for key, tensor in tensors.items()})
        with self._handle_aside():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _own_tensors(self) -> dict[str, Tensor]:
        shard, path = self.handle.shard, self.handle.terms.path
        if shard is None:
            # A sharded table may have one shard: more processes may load the checkpoint.
            is_one_part = path is not None and is_kept() and is_part_of(path, str(self._table.path))
            return row_state.part_tensors(str(path), 1) if is_one_part else row_state.row_tensors(self._table)
        if path is None:
            if not (is_kept() or row_state.are_apart()):
                self.handle.check_whole("put in a state dict")
            return row_state.tensors_of_part(self._table, shard)
        return row_state.part_tensors(path, shard.ranks)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self.name_in_model(prefix)
        whole = row_state.own_part(state_dict, prefix, self.handle.shard, self.handle.label)
        state, rest = row_state.take_rows(whole, prefix, self.handle.label)
        if state is not None:
            self._load_rows(state)
            self.handle.state_dicts.found_in(missing_keys)
        elif strict:
            self.handle.state_dicts.missed_in(missing_keys, prefix + row_state.META)
        with self._handle_aside():
            found = missing_keys, unexpected_keys, error_msgs
            super()._load_from_state_dict(rest, prefix, local_metadata, strict, *found)
