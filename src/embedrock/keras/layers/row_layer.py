"""`KerasRowLayer`: what `Embedding` and `EmbeddingBag` share."""

from __future__ import annotations

from typing import Any, NoReturn, Unpack

import keras
import numpy.typing as npt

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.fronts.arguments import check_wire, open_table, refuse
from embedrock.initializers import FromArray
from embedrock.keras.layers.attributes import LayerArgument
from embedrock.keras.layers.config import config_of, layer_of
from embedrock.keras.layers.initializers import drawn_by
from embedrock.keras.layers.options import KNOWN, REFUSED, REFUSED_METHODS, RowLayerOptions, shows, split_options
from embedrock.keras.saving import loading, state
from embedrock.keras.saving.tf_checkpoint import RowState
from embedrock.keras.training.guards import BEGIN_ANEW
from embedrock.keras.training.handle import TableHandle, handle_of
from embedrock.keras.training.regularization import BatchRegularizer, LookedUpIds, constraint_of, regularizer_of
from embedrock.keras.workers import shards
from embedrock.table.group import Group
from embedrock.table.options import LayerOptions, declared
from embedrock.table.table import Table, rows_of

TABLE_DTYPES = ("float32", "bfloat16", "float16")
SIZES = ("input_dim", "output_dim")
_NO_EMBEDDINGS = (
    "{} has no `embeddings`: its rows are not a variable. Read rows by layer.table.lookup(ids) or "
    "layer.table.export(), write them by layer.table.assign(ids, values), choose first values by "
    "embeddings_initializer, load weights by from_pretrained(weights), and share rows by making the other layer of "
    "layer.table."
)

UNIFORM = keras.initializers.RandomUniform(seed=0)  # that of Keras' Embedding, but that it draws no seed


class KerasRowLayer(keras.layers.Layer):
    """An embedding layer whose rows live in a `Table`, behind a handle.

    Args: those of `Embedding`.
    """

    @shows
    def __init__(
        self,
        input_dim: int | Table | None,
        output_dim: int | None = None,
        embeddings_initializer: Any = None,
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        *,
        group: Group | None = None,
        sharded: bool = False,
        wire: str = "float32",
        **options: Unpack[RowLayerOptions],
    ) -> None:
        kind = self.kind
        of_table, of_keras, others = split_options(options)
        refuse(kind, [name for name, value in others.items() if value is not None], REFUSED, known=KNOWN)
        keras.layers.Layer.__init__(self, **of_keras)  # that of keras.layers.Embedding makes a variable
        self.supports_jit, self.supports_masking = False, bool(mask_zero)  # XLA cannot call the host
        dim = input_dim.dim if isinstance(input_dim, Table) else output_dim
        self._config = {
            "input_dim": input_dim,
            "output_dim": output_dim,
            "embeddings_initializer": embeddings_initializer,
            "embeddings_regularizer": regularizer_of(embeddings_regularizer, kind),
            "embeddings_constraint": constraint_of(embeddings_constraint, kind, dim),
            "mask_zero": mask_zero,
            "group": group,
            "sharded": sharded,
            "wire": wire,
            **of_table,
        }
        # Where loops that reset models look: they go on to `embeddings`, which refuses them.
        self.__dict__["embeddings_initializer"] = self.embeddings_initializer
        self.shares_open_table = False  # with another model: which `layer_of` sets
        self._table = self._open(kind)
        if sharded:
            shards.note(self._table, wire)
        loading.remember(self._table)
        self._row_state = RowState(self)  # which tf.train.Checkpoint finds among the attributes
        self._handle: TableHandle | None = None
        self.looked_up = LookedUpIds()

    def _open(self, kind: str) -> Table:
        config = self._config
        options = {name: config[name] for name in declared(LayerOptions)}
        rows, dim = config["input_dim"], config["output_dim"]
        if config["sharded"]:
            shards.check_options(kind, rows, options)
        group = config["group"]
        if group is not None and config["sharded"]:
            raise UnsupportedError(f"`group` of {kind} does not go with `sharded`. Leave one of them out.")
        check_wire(kind, config["wire"], config["sharded"], self.variable_dtype)
        if isinstance(rows, Table):
            if config["embeddings_initializer"] is not None:
                options["init"] = config["embeddings_initializer"]  # which is refused, as all that is the table's
            # The rule is the layer's: it says that the rows do not follow the optimizer.
            options["rule"] = None
            return open_table(kind, rows, dim, None, options, None, names=SIZES, group=group)
        if self.variable_dtype not in TABLE_DTYPES:
            raise ArgumentError(
                f"`dtype` of {kind} must keep variables in one of {', '.join(TABLE_DTYPES)}: got {self.dtype_policy}. "
                'Give it dtype="float32": layers of Keras cast what they are given.'
            )
        drawn = drawn_by(config["embeddings_initializer"], options["seed"], rows, dim or 0)
        config["embeddings_initializer"] = drawn.initializer  # a name would draw a seed each time that it is described
        options |= {"init": drawn.init, "seed": drawn.seed, "dtype": self.variable_dtype, "name": self.name}
        if config["sharded"] and options["path"] is not None:
            options["path"] = shards.folder_of_shard(options["path"], f"{self.name!r}, {kind}")
        if options["path"] is not None and dim is not None and loading.shared_objects() is not None:
            options |= {"rows": rows, "dim": dim}
            table, self.shares_open_table = loading.open_for(options["path"], options, drawn.first)
            return table
        is_loaded = loading.shared_objects() is not None
        return open_table(kind, rows, dim, None, options, drawn.first, names=SIZES, group=group, is_loaded=is_loaded)

    # ------------------------------------------------------------ arguments

    embeddings_regularizer = LayerArgument(lambda layer, given: regularizer_of(given, layer.kind))
    embeddings_constraint = LayerArgument(lambda layer, given: constraint_of(given, layer.kind, layer.output_dim))
    mask_zero = LayerArgument(lambda layer, given: given)
    embeddings_initializer = LayerArgument(default=UNIFORM)
    rule, seed, memory, directory, on_nonfinite, group, sharded, wire = (LayerArgument() for _ in range(8))
    policy, keep, commit_every, device_memory, admission, eviction = (LayerArgument() for _ in range(6))

    # ------------------------------------------------------------ rows

    @property
    def table(self) -> Table:
        """The rows: `lookup`, `assign`, `commit`, `export` and more work on it."""
        return self._table

    def grow(self, input_dim: int | None, init: FromArray | None = None) -> None:
        """Get more rows, None for open ids: see `Table.grow`. Models go on as they are, and what they save has them.

        Of a layer that is `sharded`, all workers call it.

        Example:
            >>> import embedrock.keras as erk
            >>> layer = erk.Embedding(10, 4)
            >>> layer.grow(12)
            >>> layer.input_dim
            12
        """
        if self._handle is not None:
            self._handle.leave_gpu()
        self.table.grow(input_dim, init)

    def forget(self, ids: npt.ArrayLike) -> int:
        """Remove rows at once, and return how many there were: see `Table.forget`.

        Rows that a GPU plans come back first, and go there again at the next call. A step by gradients that wait there
        is an error then.

        Example:
            >>> import embedrock.keras as erk
            >>> layer = erk.Embedding(10, 4)
            >>> layer.table.assign([3], [[1.0, 1.0, 1.0, 1.0]])
            >>> layer.forget([3, 4])
            1
        """
        if self._handle is not None and not rows_of(self.table).may_forget:
            self._handle.leave_gpu()
        return self.table.forget(ids)

    @property
    def input_dim(self) -> int | None:
        """Number of rows, or None for open ids."""
        return self.table.rows

    @property
    def output_dim(self) -> int:
        """Weights in a row."""
        return self.table.dim

    @property
    def kind(self) -> str:
        """Its class, as users write it."""
        return f"erk.{type(self).__name__}"

    @property
    def label(self) -> str:
        """What error messages call the layer."""
        return f"{self.name!r}, {self.kind}({self.input_dim}, {self.output_dim})"

    @property
    def handle(self) -> TableHandle:
        """What stands for the rows in the model. It is there once the layer is built."""
        if self._handle is None:
            raise ArgumentError(f"{self.label} has no handle before it is built. Call it, or call build() first.")
        return self._handle

    @property
    def embeddings(self) -> NoReturn:
        """Refuse: the rows are no variable."""
        raise UnsupportedError(_NO_EMBEDDINGS.format(self.label))  # no AttributeError: `hasattr` would pass it over

    @embeddings.setter
    def embeddings(self, given: Any) -> NoReturn:
        raise UnsupportedError(_NO_EMBEDDINGS.format(self.label))

    def quantize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: see `REFUSED_METHODS`."""
        raise self._refused("quantize")

    def enable_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: see `REFUSED_METHODS`."""
        raise self._refused("enable_lora")

    def _refused(self, method: str) -> UnsupportedError:
        return UnsupportedError(f"{method} of {self.label}: {REFUSED_METHODS[method]}.")

    # ------------------------------------------------------------ Keras

    def build(self, input_shape: Any = None) -> None:
        """Make the handle, or take that of another layer on the table."""
        if self.built:
            return
        if self._handle is not None and self.table.steps:
            raise UnsupportedError(f"build of {self.label} once more would leave its rows as they are. {BEGIN_ANEW}")
        self._check_dtype()
        shards.check_strategy(self.table, self.label)
        handle = handle_of(self.table, self.label)
        handle.check_strategy()
        for name in ("rule", "embeddings_regularizer", "embeddings_constraint"):
            handle.bring(name, self._config[name])
        if (regularizer := handle.brought.get("embeddings_regularizer")) is not None:
            handle.variable.regularizer = BatchRegularizer(handle, regularizer)
        # Assigned, so that Keras counts it among the weights of each layer on the table.
        self._handle, self.rows = handle, handle.variable
        handle.share_trainable(self.trainable)
        state.refuse_get_weights(self)
        self.supports_masking |= self.mask_zero
        self.built = True

    def _check_dtype(self) -> None:
        kept = self.table.spec.dtype
        if not isinstance(self._config["input_dim"], Table) and self.variable_dtype != kept:
            raise ArgumentError(
                f"`dtype_policy` of {self.label} was set to keep variables in {self.variable_dtype}, after its table "
                f"was made, which keeps rows in {kept}. Give it to the layer, {self.kind}(..., dtype=...)."
            )

    def _clear_losses(self) -> None:
        """Forget what Keras forgets when a model is called."""
        super()._clear_losses()
        self.looked_up.ids.clear()

    @property
    def metrics(self) -> list[Any]:
        """The layer's metrics. `fit` asks for those of all layers when an epoch begins, before anything is trained."""
        state.check_callbacks(self)
        return super().metrics

    # ------------------------------------------------------------ saving

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer. Keras builds a subclassed model that it loads by running it with floats, ids or not."""
        if args and loading.shared_objects() is not None:
            args = keras.tree.map_structure(_as_ids, args[0]), *args[1:]
        return super().__call__(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments as plain data."""
        state.refuse_legacy_format(self)
        return {**keras.layers.Layer.get_config(self), **config_of(self, self._config)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Make a layer of what `get_config` returned."""
        return layer_of(cls, config)

    def save_own_variables(self, store: Any) -> None:
        """Store which rows of the table are meant; rows themselves never."""
        state.save_own_variables(self, store)

    def load_own_variables(self, store: Any) -> None:
        """Take a table on disk to the commit that was stored."""
        state.load_own_variables(self, store)

    def save_assets(self, dir_path: str) -> None:
        """Write the rows of a table in RAM."""
        state.save_assets(self, dir_path)

    def load_assets(self, dir_path: str | None) -> None:
        """Read the rows of a table in RAM."""
        state.load_assets(self, dir_path)


def _as_ids(given: Any) -> Any:
    return keras.ops.cast(given, "int64") if keras.backend.is_float_dtype(given.dtype) else given
