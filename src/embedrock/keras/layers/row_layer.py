"""`KerasRowLayer`: the common base of `Embedding` and `EmbeddingBag`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar, Unpack

import keras
import numpy.typing as npt
import tensorflow as tf
from keras import initializers

from embedrock.errors import ArgumentError, UnsupportedError, did_you_mean
from embedrock.frontend.arguments import OTHERS, check_wire, needs_rows, open_table, refuse, scaled
from embedrock.initializers import Constant, FromArray, Initializer, Normal, TruncatedNormal, Uniform, Zeros
from embedrock.keras.saving import loading, state
from embedrock.keras.saving.descriptions import (
    describe_group,
    describe_initializer,
    describe_rule_of_layer,
    describe_table,
    group_of,
    read_initializer_of,
    table_of,
)
from embedrock.keras.saving.row_files import rule_of
from embedrock.keras.saving.state import KEY
from embedrock.keras.saving.tf_checkpoint import RowState
from embedrock.keras.training.guards import BEGIN_ANEW
from embedrock.keras.training.handle import TableHandle, handle_of
from embedrock.keras.training.regularization import BatchRegularizer, LookedUpIds, constraint_of, regularizer_of
from embedrock.keras.workers import shards
from embedrock.keras.workers.cluster import WorkerGroup
from embedrock.spec.description import POLICIES, policies_of
from embedrock.table.group import Group
from embedrock.table.opening import InitialValuesOf
from embedrock.table.options import LayerOptions, checked_every, declared, defaults
from embedrock.table.options import shows as shows_options
from embedrock.table.table import Table, rows_of

DEFAULT = "uniform"  # as in `keras.layers.Embedding`
KINDS = ("uniform", "normal")
NAMES = (
    *("zeros", "ones", "truncated_normal"),
    *(f"{name}_{kind}" for name in ("random", "glorot", "he", "lecun") for kind in KINDS),
)
OTHER_NAMES = (("xavier", "glorot"), ("kaiming", "he"))  # PyTorch's, and Keras' of the same
ALIASES = {f"{theirs}_{kind}": f"{ours}_{kind}" for theirs, ours in OTHER_NAMES for kind in KINDS}


class Drawn(NamedTuple):
    """The initializer and seed of a layer's rows.

    Attributes:
        initializer: the given one, of Keras' or of Embedrock's.
        init: the same, as a table's initializer.
        seed: the seed given to the layer, or to its initializer.
        first: initializer and seed of a new table if these were not given (None).
    """

    initializer: Any
    init: Initializer | None
    seed: int | None
    first: InitialValuesOf


def drawn_by(given: Any, seed: int | None, rows: int | None, dim: int) -> Drawn:
    """Return the initializer and seed of a layer's rows.

    Without a seed, Keras draws one for the initializer, once for each layer. So a model's other layers start as they do
    beside `keras.layers.Embedding`. All workers take the first worker's seed.

    Args:
        given: a name, a config or an instance of Keras', or one of Embedrock's; None: `DEFAULT`.
        seed: the layer's seed. The initializer's seed wins over 0, the seed of layers in files of 0.1.
        rows: rows of the table, None for open ids.
        dim: weights in a row of the table.

    Raises:
        UnsupportedError: an initializer that cannot draw each row by itself.
    """
    made = given if isinstance(given, Initializer) else _keras_initializer(DEFAULT if given is None else given)
    init = made if isinstance(made, Initializer) else _translated(made, given, rows, dim)
    brought = getattr(made, "_init_seed", None)
    if isinstance(brought, int) and not seed:
        seed = brought
    # An instance drew its seed when it was made. All layers that share the instance would share that seed.
    first = InitialValuesOf(init, _drawn_seed(None if made is given else made) if seed is None else seed)
    return Drawn(None if given is None else made, None if given is None else init, seed, first)


def _drawn_seed(made: Any) -> int:
    """Return the seed that Keras drew for its initializer; without one, draw a seed as Keras does."""
    drawn = getattr(made, "seed", None)
    own: Any = drawn if isinstance(drawn, int) else initializers.RandomUniform().seed
    return WorkerGroup(tf.distribute.get_strategy()).first(own)


def _keras_initializer(given: Any) -> Any:
    try:
        return initializers.get(ALIASES.get(given, given) if isinstance(given, str) else given)
    except KeyError as error:  # "constant", or a config that lacks an argument
        raise ArgumentError(
            f"`embeddings_initializer` {given!r} lacks its {error}. Pass an instance: keras.initializers.Constant(0.1)."
        ) from error
    except (ValueError, TypeError) as error:
        near = did_you_mean(given, [*NAMES, *ALIASES]) if isinstance(given, str) else ""
        raise ArgumentError(
            f"`embeddings_initializer` must be one of Keras' or of Embedrock's, such as er.Uniform(-0.05, 0.05): got "
            f"{given!r}.{near}"
        ) from error


def _translated(made: Any, given: Any, rows: int | None, dim: int) -> Initializer:
    if type(made) in vars(initializers).values():  # a user's class draws as it likes, whatever its base
        match made:
            case initializers.Zeros():
                return Zeros()
            case initializers.Ones():
                return Constant(1.0)
            case initializers.Constant():
                return Constant(made.value)
            case initializers.RandomUniform():
                return Uniform(made.minval, made.maxval)
            case initializers.RandomNormal():
                return Normal(made.mean, made.stddev)
            case initializers.TruncatedNormal():
                return TruncatedNormal(made.mean, made.stddev)
            case initializers.VarianceScaling():
                return _scaled(made, given, rows, dim)
    raise UnsupportedError(
        f"`embeddings_initializer` must draw each row by itself: got {given!r}. Use {', '.join(NAMES)}, or one of "
        f"Embedrock's: er.Normal(std=0.05). {OTHERS}."
    )


def _scaled(made: Any, given: Any, rows: int | None, dim: int) -> Initializer:
    """Return an initializer scaled by Keras' fans of a weight (rows, dim): (fan_in, fan_out)."""
    if rows is None and made.mode != "fan_out":
        raise ArgumentError(needs_rows("`embeddings_initializer`", given))
    fans = {"fan_in": rows or 0, "fan_out": dim, "fan_avg": ((rows or 0) + dim) / 2}
    distribution = "normal" if made.distribution == "untruncated_normal" else made.distribution
    return scaled(distribution, made.scale / max(1.0, fans[made.mode]))


# Arguments that the table of a layer on a ready-made table decides. The rule is the layer's.
OF_TABLE = {
    "input_dim",
    "output_dim",
    "embeddings_initializer",
    "group",
    "sharded",
    "wire",
    *declared(LayerOptions),
} - {"rule"}


def config_of(layer: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a layer as plain data. In a saved model, layers on one table have its number."""
    table, config = layer.table, {**arguments, "rule": describe_rule_of_layer(arguments["rule"])}
    config["embeddings_regularizer"] = keras.regularizers.serialize(arguments["embeddings_regularizer"])
    config["embeddings_constraint"] = keras.constraints.serialize(arguments["embeddings_constraint"])
    if isinstance(config["input_dim"], Table):
        config = {name: value for name, value in config.items() if name not in OF_TABLE}
        config["table"] = describe_table(table, layer.label)
    else:
        drawn, path = config["embeddings_initializer"], config["path"]
        if config["input_dim"] != table.rows:  # it has grown: the added rows' initializer is in the table's spec
            config["input_dim"], drawn = table.rows, table.spec.init
        if isinstance(drawn, Initializer):
            config["embeddings_initializer"] = {KEY: describe_initializer(drawn, layer.label)}
        elif drawn is not None:
            config["embeddings_initializer"] = keras.initializers.serialize(keras.initializers.get(drawn))
        config["path"] = None if path is None else os.path.abspath(path)
        config["commit_every"] = checked_every(config["commit_every"], "w")  # a timedelta is no plain data
        config |= {name: None if config[name] is None else config[name].describe() for name in POLICIES}
    group = config.pop("group", None)
    if group is not None and (group.is_on_disk or loading.shared_objects() is not None):
        config["group"] = describe_group(group)
    if loading.shared_objects() is not None or loading.copied_objects() is not None or loading.is_tied(layer):
        config["shared"] = id(table)
    return config


def layer_of(kind: Any, config: Mapping[str, Any]) -> Any:
    """Make a layer from its `get_config`."""
    config, shared, label = dict(config), loading.shared_objects(), f"{config['name']!r}, erk.{kind.__name__}"
    key, described = (KEY, config.pop("shared", None)), config.pop("table", None)
    config["rule"] = rule_of(config["rule"])
    tables = loading.copied_objects() if shared is None else shared
    there = None if tables is None else tables.get(key)
    if there is None and described is not None:
        there = table_of(described, label)
    if there is not None:
        layer = kind(there[0], **{name: value for name, value in config.items() if name not in OF_TABLE})
        layer.shares_open_table = there[1]
    else:
        drawn = config["embeddings_initializer"]
        if isinstance(drawn, dict) and KEY in drawn:
            config["embeddings_initializer"] = read_initializer_of(drawn[KEY])
        if shared is None and config["path"] is not None:
            loading.check_not_copied(config["path"], label)
        is_shared = False
        if (group := config.get("group")) is not None:
            config["group"], is_shared = group_of(group, config["name"], label)
        layer = kind(**{**config, **policies_of(config)})
        layer.shares_open_table |= is_shared
    if tables is not None:
        tables[key] = layer.table, layer.shares_open_table
    return layer


Checked = Callable[[Any, Any], Any]


class LayerArgument:
    """An argument of a layer as an attribute. It can be set for as long as that changes the layer.

    Args:
        checked: returns the value that a layer keeps, given layer and value, or raises an error. The value may be set
            until the layer is built. None: the layer's table was made with the value.
        default: the attribute's value if the argument was left out.
    """

    def __init__(self, checked: Checked | None = None, default: Any = None) -> None:
        self._checked, self._default = checked, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        """Return the layer's argument, or the default."""
        if layer is None:
            return self
        given = layer._config[self._name]
        return self._default if given is None else given

    def __set__(self, layer: Any, value: Any) -> None:
        """Set the argument of an unbuilt layer.

        Raises:
            ArgumentError: the new value would change nothing.
        """
        given = f"{layer.kind}(..., {self._name}=...)"
        if self._checked is None:
            raise ArgumentError(
                f"`{self._name}` of {layer.label} cannot be set: its table was made with it. Give it to the layer, "
                f"{given}."
            )
        if layer.built:
            raise ArgumentError(
                f"`{self._name}` of {layer.label} cannot be set once the layer is built: what was made of it before "
                f"would go on without. Set it before the layer is called, or give it to a new one, {given}."
            )
        layer._config[self._name] = self._checked(layer, value)


F = TypeVar("F", bound=Callable[..., Any])

REFUSED = {
    "weights": "use from_pretrained(weights), which copies nothing",
    "lora_rank": "rows are trained themselves. Leave it out",
    "lora_alpha": "rows are trained themselves. Leave it out",
    "quantization_config": 'use dtype="bfloat16" for rows of half the size',
    "input_length": "it is not needed. Leave it out",
    **dict.fromkeys(("input_shape", "batch_shape", "batch_input_shape", "batch_size"), "use keras.Input"),
}
# Of keras.layers.Embedding.
REFUSED_METHODS = {
    "quantize": 'use dtype="bfloat16" for rows of half the size',
    "enable_lora": "rows are trained themselves, and a step touches only those of its batch",
}


class RowLayerOptions(LayerOptions, total=False):
    """Options of `Embedding` and `EmbeddingBag`: those of a table, and those of all layers of Keras."""

    name: str | None
    trainable: bool
    dtype: Any
    autocast: bool
    activity_regularizer: Any


OF_KERAS = RowLayerOptions.__annotations__.keys() - LayerOptions.__annotations__.keys()
# Keras' own options, in their order.
OWN = (
    *("input_dim", "output_dim", "embeddings_initializer", "embeddings_regularizer", "embeddings_constraint"),
    *("mask_zero", "mode", "group", "sharded", "wire"),
)
KNOWN = (*OWN, *declared(LayerOptions), *OF_KERAS)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return three parts of the options: the table's, with defaults; the given ones of Keras; and the unknown ones."""
    known = declared(LayerOptions)
    of_table = {**defaults(LayerOptions), **{name: value for name, value in options.items() if name in known}}
    of_keras = {name: value for name, value in options.items() if name in OF_KERAS}
    return of_table, of_keras, {name: value for name, value in options.items() if name not in {*known, *OF_KERAS}}


def shows(function: F) -> F:
    """Add the table's options to the signature of a layer's constructor, which also takes other arguments."""
    others = [p for p in inspect.signature(function).parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    shown: Any = shows_options(LayerOptions)(function)
    signature = inspect.signature(shown)
    shown.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *others])
    return shown


def shows_but(*left_out: str) -> Callable[[F], F]:
    """Return a decorator like `shows`, without some of the options."""

    def shown(function: F) -> F:
        made: Any = shows(function)
        signature = inspect.signature(made)
        kept = [each for name, each in signature.parameters.items() if name not in left_out]
        made.__signature__ = signature.replace(parameters=kept)
        return made

    return shown


TABLE_DTYPES = ("float32", "bfloat16", "float16")
SIZES = ("input_dim", "output_dim")
_NO_EMBEDDINGS = (
    "{} has no `embeddings`: its rows are not a variable. Read rows by layer.table.lookup(ids) or "
    "layer.table.export(), write them by layer.table.assign(ids, values), choose first values by "
    "embeddings_initializer, load weights by from_pretrained(weights), and share rows by making the other layer of "
    "layer.table."
)

UNIFORM = keras.initializers.RandomUniform(seed=0)  # that of Keras' Embedding, without drawing a seed


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
        keras.layers.Layer.__init__(self, **of_keras)  # the constructor of keras.layers.Embedding makes a variable
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
        # Loops that reset models look here, and then at `embeddings`, which raises an error.
        self.__dict__["embeddings_initializer"] = self.embeddings_initializer
        self.shares_open_table = False  # with another model; set by `layer_of`
        self._table = self._open(kind)
        if sharded:
            shards.note(self._table, wire)
        loading.remember(self._table)
        self._row_state = RowState(self)  # tf.train.Checkpoint finds it among the attributes
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
                options["init"] = config["embeddings_initializer"]  # an error, like all arguments of the table
            # The rule belongs to the layer: with one, the rows do not follow the optimizer.
            options["rule"] = None
            return open_table(kind, rows, dim, None, options, None, names=SIZES, group=group)
        if self.variable_dtype not in TABLE_DTYPES:
            raise ArgumentError(
                f"`dtype` of {kind} must keep variables in one of {', '.join(TABLE_DTYPES)}: got {self.dtype_policy}. "
                'Give it dtype="float32": layers of Keras cast what they are given.'
            )
        drawn = drawn_by(config["embeddings_initializer"], options["seed"], rows, dim or 0)
        config["embeddings_initializer"] = drawn.initializer  # a name would draw a new seed at each use
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
        """The table of the rows, with `lookup`, `assign`, `commit`, `export` and more."""
        return self._table

    def grow(self, input_dim: int | None, init: FromArray | None = None) -> None:
        """Add rows, or open the ids with None: see `Table.grow`. Models continue, and their files have the rows.

        Of a `sharded` layer, all workers must call it.

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
        """Remove rows at once, and return the number of removed rows: see `Table.forget`.

        Rows on a GPU are written back first, and are copied there again at the next call. A later step by gradients
        that wait on the GPU is an error.

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
        """The name of the layer's class, as users write it."""
        return f"erk.{type(self).__name__}"

    @property
    def label(self) -> str:
        """The name of the layer in error messages."""
        return f"{self.name!r}, {self.kind}({self.input_dim}, {self.output_dim})"

    @property
    def handle(self) -> TableHandle:
        """The proxy of the rows in the model. It exists once the layer is built."""
        if self._handle is None:
            raise ArgumentError(f"{self.label} has no handle before it is built. Call it, or call build() first.")
        return self._handle

    @property
    def embeddings(self) -> NoReturn:
        """Raise an error: the rows are no variable."""
        raise UnsupportedError(_NO_EMBEDDINGS.format(self.label))  # no AttributeError: `hasattr` would skip it

    @embeddings.setter
    def embeddings(self, given: Any) -> NoReturn:
        raise UnsupportedError(_NO_EMBEDDINGS.format(self.label))

    def quantize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: see `REFUSED_METHODS`."""
        raise self._refused("quantize")

    def enable_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: see `REFUSED_METHODS`."""
        raise self._refused("enable_lora")

    def _refused(self, method: str) -> UnsupportedError:
        return UnsupportedError(f"{method} of {self.label}: {REFUSED_METHODS[method]}.")

    # ------------------------------------------------------------ Keras

    def build(self, input_shape: Any = None) -> None:
        """Make the handle, or share the handle of another layer on the table."""
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
        """Clear the looked-up ids when Keras clears a model's losses."""
        super()._clear_losses()
        self.looked_up.ids.clear()

    @property
    def metrics(self) -> list[Any]:
        """The layer's metrics. `fit` reads those of all layers when an epoch begins, before any training."""
        state.check_callbacks(self)
        return super().metrics

    # ------------------------------------------------------------ saving

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer. Keras builds a loaded subclassed model by running it on floats, even for ids."""
        if args and loading.shared_objects() is not None:
            args = keras.tree.map_structure(_as_ids, args[0]), *args[1:]
        return super().__call__(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        state.refuse_legacy_format(self)
        return {**keras.layers.Layer.get_config(self), **config_of(self, self._config)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return layer_of(cls, config)

    def save_own_variables(self, store: Any) -> None:
        """Store the reference to a table on disk. Rows are never stored here."""
        state.save_own_variables(self, store)

    def load_own_variables(self, store: Any) -> None:
        """Roll a table on disk back to the stored commit."""
        state.load_own_variables(self, store)

    def save_assets(self, dir_path: str) -> None:
        """Write the rows of a table in RAM."""
        state.save_assets(self, dir_path)

    def load_assets(self, dir_path: str | None) -> None:
        """Read the rows of a table in RAM."""
        state.load_assets(self, dir_path)


def _as_ids(given: Any) -> Any:
    return keras.ops.cast(given, "int64") if keras.backend.is_float_dtype(given.dtype) else given
