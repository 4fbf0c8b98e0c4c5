"""`KerasRowLayer`: the common base of `Embedding` and `EmbeddingBag`."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any, NoReturn, Unpack

import keras
import numpy.typing as npt
import tensorflow as tf

from embedrock.errors import ArgumentError, IdTypeError, UnsupportedError, counted
from embedrock.frontend.arguments import check_wire, open_table, refuse
from embedrock.initializers import FromArray
from embedrock.keras.layers.arguments import (
    KNOWN,
    OF_KERAS,
    REFUSED,
    REFUSED_METHODS,
    TABLE_DTYPES,
    RowLayerOptions,
    RowOptions,
    drawn_by,
    pretrained_options,
)
from embedrock.keras.saving import descriptions, loading, state
from embedrock.keras.training.handle import TableHandle, handle_of
from embedrock.keras.training.lookup import check_id_dtype, checked_column, whole_seconds
from embedrock.keras.training.regularization import batch_regularizer, constraint_of, regularizer_of
from embedrock.keras.training.requests import LookupRequest
from embedrock.keras.training.variable import BEGIN_ANEW
from embedrock.keras.workers import shards
from embedrock.system.notebook import PublicNames
from embedrock.table.missing import Missing
from embedrock.table.options import LayerOptions, declared, defaults, shows
from embedrock.table.table import Table, rows_of

ARRAYS = ("numpy", "pandas", "polars", "pyarrow")  # packages whose ids are not tensors yet
SIZES = ("input_dim", "output_dim")
UNIFORM = keras.initializers.RandomUniform(seed=0)  # that of Keras' Embedding, without drawing a seed


class UndeclaredIdsError(IdTypeError, NotImplementedError):
    """An input of a model that is declared to be floats or strings.

    A `keras.Sequential` without an Input declares a float input, and rounds ids to floats. It does not if the layer
    raises `NotImplementedError` on shape inference: then ids arrive unchanged.
    """


class LayerArgument:
    """An argument of a layer as an attribute. It can be set for as long as that changes the layer.

    Args:
        checked: returns the value that a layer keeps, given layer and value, or raises an error. The value may be set
            until the layer is built. None: the layer's table was made with the value.
        default: the attribute's value if the argument was left out.
    """

    def __init__(self, checked: Callable[[Any, Any], Any] | None = None, default: Any = None) -> None:
        self._checked, self._default = checked, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
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


class KerasRowLayer(PublicNames, keras.layers.Layer):
    """An embedding layer whose rows live in a `Table`, behind a handle. It makes one request per input.

    Inputs are one tensor, or a list, tuple or dict of several. A call has two halves, `ask_all` and `answer_all`, so
    that layers can be looked up together.

    Args: those of `Embedding`.
    """

    @shows(RowOptions)
    def __init__(
        self,
        input_dim: int | Table | None,
        output_dim: int | None = None,
        embeddings_initializer: Any = None,
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        **options: Unpack[RowLayerOptions],
    ) -> None:
        kind = self.kind
        others: dict[str, Any] = {**options}
        of_keras = {name: others.pop(name) for name in OF_KERAS if name in others}
        of_table = {name: others.pop(name, default) for name, default in defaults(RowOptions).items()}
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
            **of_table,
            "missing": None,  # until the table is there
        }
        # Loops that reset models look here, and then at `embeddings`, which raises an error.
        self.__dict__["embeddings_initializer"] = self.embeddings_initializer
        self.shares_open_table = False  # with another model; set by `layer_of`
        self._table = self._open(kind)
        self.missing = of_table["missing"]
        if of_table["sharded"]:
            shards.note(self._table, of_table["wire"])
        loading.tables_of_layers.add(self._table)
        self._row_state = state.RowState(self)  # tf.train.Checkpoint finds it among the attributes
        self._handle: TableHandle | None = None
        # The ids looked up since the model was called: tensors of any shape. Keras would replace a list that it tracks.
        self.__dict__["looked_up"] = []

    def _open(self, kind: str) -> Table:
        config = self._config
        options = {name: config[name] for name in declared(LayerOptions)}
        rows, dim = config["input_dim"], config["output_dim"]
        if config["sharded"]:
            shards.check_options(kind, rows, options)
            options["segments"] = None  # as workers need them, if rows come and go
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
        # The initializer is kept, as a name would draw a new seed at each use.
        config["embeddings_initializer"], drawn, first = drawn_by(
            config["embeddings_initializer"], options["seed"], rows, dim or 0
        )
        options |= {**drawn, "dtype": self.variable_dtype, "name": self.name}
        if config["sharded"] and options["path"] is not None:
            options["path"] = shards.folder_of_shard(options["path"], f"{self.name!r}, {kind}")
        is_loaded = loading.shared_objects() is not None
        if is_loaded and options["path"] is not None and dim is not None:
            table, self.shares_open_table = loading.open_for({**options, "rows": rows, "dim": dim}, first)
            return table
        return open_table(kind, rows, dim, None, options, first, names=SIZES, group=group, is_loaded=is_loaded)

    # ------------------------------------------------------------ arguments

    _unlisted = "answer* ask* kind label looked_up mask_of shares_open_table wire"
    embeddings_regularizer = LayerArgument(lambda layer, given: regularizer_of(given, layer.kind))
    embeddings_constraint = LayerArgument(lambda layer, given: constraint_of(given, layer.kind, layer.output_dim))
    mask_zero = LayerArgument(lambda layer, given: given)
    embeddings_initializer = LayerArgument(default=UNIFORM)
    rule, seed, memory, directory, on_nonfinite, group, sharded, wire = (LayerArgument() for _ in range(8))
    policy, keep, commit_every, device_memory, admission, eviction, frozen = (LayerArgument() for _ in range(7))

    @property
    def missing(self) -> Any:
        """Values of rows that are not there: see `Embedding`. It can be set at any time."""
        return self._config["missing"]

    @missing.setter
    def missing(self, given: Any) -> None:
        choice = Missing.of(given, self.label)
        if choice is not None:
            rows_of(self.table).row_instead(choice)  # an error
        self._config["missing"] = choice and choice._replace(padding=0 if self.mask_zero else None)

    @classmethod
    @shows(RowOptions, "seed")  # the rows start as the weights
    def from_pretrained(
        cls, weights: Any, trainable: bool = True, *, tensor: str | None = None, dtype: Any = None, **options: Any
    ) -> Any:
        """Make a layer whose rows start as those of `weights`. Rows are read when needed, without a copy.

        (A bfloat16 tensor is copied, because NumPy has no such dtype.)

        Args:
            weights: (rows, dim) float32, bfloat16 or float16: an array, a tensor, or a `np.memmap` of any size, which
                stays on disk. Or `er.FromSafetensors`. Or the path of a ``.npy`` file, which is mapped; of a
                ``.safetensors`` file or a folder of them, which is read in place; or of a table on disk, whose rows of
                the last commit are copied to RAM. They must not change while the layer is used.
            trainable: whether rows are trained, as in any layer of Keras (PyTorch's layers freeze them). The table
                keeps trained rows; `weights` never change.
            tensor: name of the tensor, if safetensors files have several matrices.
            dtype: dtype of the layer, as in Keras, and so of its table; None: that of `weights`.
            options: rule, path, memory, directory, on_nonfinite, policy, keep, commit_every, device_memory: as for the
                layer. The layer's other arguments work too (mask_zero, mode, name).

        Raises:
            ArgumentError: `weights` have another shape, dtype, type or file format.
            MemoryBudgetError: the rows of a table do not fit in free RAM.
            TableFileError: a file is damaged, or has no such tensor.

        Example:
            >>> import numpy as np, embedrock.keras as erk
            >>> erk.Embedding.from_pretrained(np.eye(3, dtype="float32"))(np.array([[2]])).numpy()
            array([[[0., 0., 1.]]], dtype=float32)
        """
        rule = options.pop("rule", None)  # the layer's own
        table, more = pretrained_options(f"erk.{cls.__name__}", weights, tensor, dtype, options)
        make: Any = cls  # the class of a concrete layer
        return make(table, trainable=trainable, rule=rule, **more)

    # ------------------------------------------------------------ rows

    @property
    def table(self) -> Table:
        """The table of the rows, with `lookup`, `assign`, `commit`, `export` and more."""
        return self._table

    def grow(self, input_dim: int | None, init: FromArray | None = None) -> None:
        """Add rows, or open the ids with None: see `Table.grow`. Models continue, and their files have the rows.

        Of a `sharded` layer, all workers must call it.

        Args:
            input_dim, init: as for `Table.grow`.

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

    def shrink(self, input_dim: int) -> int:
        """Delete rows from the end, with their state. Return the number that had records: see `Table.shrink`.

        Args:
            input_dim: number of rows that stay.

        Example:
            >>> import embedrock.keras as erk
            >>> layer = erk.Embedding(10, 4)
            >>> layer.shrink(8), layer.input_dim
            (0, 8)
        """
        if self._handle is not None:
            self._handle.leave_gpu()
        return self.table.shrink(input_dim)

    def forget(self, ids: npt.ArrayLike) -> int:
        """Remove rows at once, and return the number of removed rows: see `Table.forget`.

        Rows on a GPU are written back first, and are copied there again at the next call. A later step by gradients
        that wait on the GPU is an error.

        Args:
            ids: integers of any shape.

        Example:
            >>> import embedrock.keras as erk
            >>> layer = erk.Embedding(10, 4)
            >>> layer.table.assign([3], [[1.0, 1.0, 1.0, 1.0]])
            >>> layer.forget([3, 4])
            1
        """
        executor = self.table.executor
        if self._handle is not None and executor is not None and not executor.may_forget():
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

    def _no_embeddings(self, *given: Any) -> NoReturn:
        raise UnsupportedError(  # no AttributeError: `hasattr` would skip it
            f"{self.label} has no `embeddings`: its rows are not a variable. Read rows by layer.table.lookup(ids) or "
            "layer.table.export(), write them by layer.table.assign(ids, values), choose first values by "
            "embeddings_initializer, load weights by from_pretrained(weights), and share rows by making the other "
            "layer of layer.table."
        )

    embeddings = property(_no_embeddings, _no_embeddings, doc="Raise an error: the rows are no variable.")

    def _refuse(self, method: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{method} of {self.label}: {REFUSED_METHODS[method]}.")

    quantize: Any = partialmethod(_refuse, "quantize")
    enable_lora: Any = partialmethod(_refuse, "enable_lora")

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
            handle.variable.regularizer = batch_regularizer(handle, regularizer)
        # Assigned, so that Keras counts it among the weights of each layer on the table.
        self._handle, self.rows = handle, handle.variable
        handle.share_trainable(self.trainable)
        handle.variable.numpy = partial(state.rows_in_weights, weakref.ref(self))
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
        self.looked_up.clear()

    @property
    def metrics(self) -> list[Any]:
        """The layer's metrics. `fit` reads those of all layers when an epoch begins, before any training."""
        state.check_callbacks(self)
        return super().metrics

    # ------------------------------------------------------------ saving

    def get_config(self) -> dict[str, Any]:
        state.refuse_legacy_format(self)
        return {**keras.layers.Layer.get_config(self), **descriptions.config_of(self, self._config)}

    from_config = classmethod(descriptions.layer_of)
    save_own_variables = state.save_own_variables  # pyright: ignore[reportAssignmentType]
    load_own_variables = state.load_own_variables  # pyright: ignore[reportAssignmentType]
    save_assets, load_assets = state.save_assets, state.load_assets

    # ------------------------------------------------------------ lookups

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Return the masks of the inputs with ``mask_zero=True``; None otherwise."""
        return keras.tree.map_structure(self.mask_of, inputs) if self.mask_zero else None

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the layer on ids as they are. Keras would convert ids beside missing ones to float32.

        Keras builds a loaded subclassed model by running it on floats, even for ids.

        Raises:
            IdTypeError: an array, or a column of pandas, polars or Arrow, does not hold integers.
        """
        are_words = isinstance(inputs, list | tuple) and isinstance([*keras.tree.flatten(inputs), 0][0], str | bytes)
        if are_words or type(inputs).__module__.partition(".")[0] in ARRAYS:
            inputs = checked_column(inputs, self.label)
        if loading.shared_objects() is not None:
            inputs = keras.tree.map_structure(_as_ids, inputs)
        if kwargs.get("time") is not None:
            kwargs["time"] = whole_seconds(kwargs["time"], self.label)
        return super().__call__(inputs, *args, **kwargs)

    @abstractmethod
    def ask(self, ids: Any, weights: Any) -> LookupRequest:
        """Return the request for one input."""

    @abstractmethod
    def answer(self, ids: Any, request: LookupRequest, found: tf.Tensor) -> Any:
        """Return the output for one input, from the values that the lookup found."""

    @abstractmethod
    def mask_of(self, ids: Any) -> Any:
        """Return the mask of the output for one input, where there is more than padding; None if there is none."""

    @abstractmethod
    def answer_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Return the shape of the output for an input of a shape."""

    def answer_ragged_rank(self, ids: keras.KerasTensor) -> int | None:
        """Return the number of ragged dimensions of the output: 0 for a dense one, None if it is unknown."""
        return ragged_rank(ids)

    def ask_all(self, inputs: Any, weights: Any = None) -> list[LookupRequest]:
        """Return the requests for all inputs."""
        parts = keras.tree.flatten(inputs)
        if not parts:
            raise ArgumentError(f"inputs of {self.label} must be a tensor of ids, or several: got {inputs!r}.")
        factors = [None] * len(parts) if weights is None else keras.tree.flatten(weights)
        if len(factors) != len(parts):
            raise ArgumentError(
                f"`weights` of {self.label} must have the structure of the ids, {counted(len(parts), 'tensor')}: got "
                f"{len(factors)}."
            )
        own = weakref.ref(self)
        requests = [self.ask(part, factor)._replace(layer=own) for part, factor in zip(parts, factors, strict=True)]
        if self.handle.variable.regularizer is not None:
            self.looked_up.extend(request.ids for request in requests)
        return requests

    def answer_all(self, inputs: Any, requests: list[LookupRequest], found: list[tf.Tensor]) -> Any:
        """Return the outputs in the structure of the inputs."""
        parts = zip(keras.tree.flatten(inputs), requests, found, strict=True)
        return keras.tree.pack_sequence_as(inputs, [self.answer(*part) for part in parts])

    def compute_output_shape(self, input_shape: Any) -> Any:
        return keras.tree.map_shape_structure(self.answer_shape, input_shape)

    def compute_output_spec(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return keras.tree.map_structure(self._output_spec, inputs)

    def _output_spec(self, ids: Any) -> keras.KerasTensor:
        try:
            check_id_dtype(ids.dtype, self.label)
        except IdTypeError as error:
            raise UndeclaredIdsError(str(error)) from None
        rank = self.answer_ragged_rank(ids)
        # Keras' tensors of an unknown ragged rank are ragged, with none.
        more = {} if rank == 0 else {"ragged": True, "ragged_rank": rank}
        return keras.KerasTensor(self.answer_shape(tuple(ids.shape)), dtype=self.compute_dtype, **more)


def _as_ids(given: Any) -> Any:
    return keras.ops.cast(given, "int64") if keras.backend.is_float_dtype(given.dtype) else given


def ragged_rank(ids: Any) -> int | None:
    """Return the number of ragged dimensions of a tensor or `keras.KerasTensor`; None if it is unknown."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.ragged_rank
    return ids.ragged_rank if getattr(ids, "ragged", False) else 0
