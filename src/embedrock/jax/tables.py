"""`Tables`: fetches rows for a jitted step, and steps them by its gradients. `Batch`: the rows, inside of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from embedrock.errors import ArgumentError
from embedrock.frontend.row_fetcher import FetchedRows, RowFetcher
from embedrock.system.notebook import PublicNames
from embedrock.table.group import Group
from embedrock.table.table import Table

Tree = Any  # a pytree of JAX


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """The rows of a batch: a pytree, as an argument of a jitted step.

    Attributes:
        rows: for each table, float32 (size, dim): each row of the batch once, then zeros.
        positions: for each array of ids, int32 of its shape: the row of each id.
        fetched: the batch on the host. None inside of a step.
    """

    rows: Tree
    positions: Tree
    fetched: FetchedRows | None = None

    def lookup(self, *path: Any) -> Tree:
        """Return the vectors of ids, float32 ``ids.shape + (dim,)``.

        Args:
            path: key of a table, and keys of its ids, such as ``"item", "history"``. None: of all, as ids were given.

        Raises:
            ArgumentError: the batch has no such ids.
        """
        rows, positions = self.rows, self.positions
        for key in path:
            known = range(len(positions)) if isinstance(positions, tuple | list) else positions
            if hasattr(positions, "dtype") or key not in known:
                shapes = jax.tree.map(jnp.shape, self.positions)
                raise ArgumentError(f"`lookup` must name ids of the batch, {shapes}: got {key!r} of {path}.")
            rows = rows if hasattr(rows, "dtype") else rows[key]
            positions = positions[key]
        return jax.tree.map(lambda own, at: jax.tree.map(lambda each: _taken(own, each), at), rows, positions)

    def with_rows(self, rows: Tree) -> Batch:
        """Return the batch with other values of its rows: those by which a loss is differentiated.

        Args:
            rows: values in the tree and shapes of `rows`.
        """
        return Batch(rows, self.positions)

    def __repr__(self) -> str:
        rows, positions = jax.tree.map(lambda own: getattr(own, "shape", own), (self.rows, self.positions))
        return f"Batch(rows={rows}, positions={positions})"


# Not register_dataclass: its `drop_fields` fails in JAX 0.6 and 0.7.
_keys = [jax.tree_util.GetAttrKey(name) for name in ("rows", "positions")]
jax.tree_util.register_pytree_with_keys(
    Batch, lambda own: ([(key, getattr(own, key.name)) for key in _keys], None), lambda _, parts: Batch(*parts)
)


def _taken(rows: jax.Array, positions: jax.Array) -> jax.Array:
    own: Any = jax.typeof(positions).sharding  # names axes of meshes with explicit ones, as jax.make_mesh makes them
    out: Any = {"out_sharding": NamedSharding(own.mesh, PartitionSpec(*own.spec, None))} if any(own.spec) else {}
    return jnp.asarray(rows).at[positions].get(mode="promise_in_bounds", **out)


@jax.tree_util.register_static
@dataclass(frozen=True, init=False)
class Embed:
    """Embedding layer that names ids of a batch, for models of Flax, Equinox or others. It has no parameters.

    Args:
        path: as for `Batch.lookup`.

    Example:
        >>> import embedrock as er, embedrock.jax as ej
        >>> batch = ej.Tables({"item": er.Table(rows=10**9, dim=4)}).fetch({"item": [7, 3, 7]})
        >>> ej.Embed("item")(batch).shape
        (3, 4)
    """

    path: tuple[Any, ...]

    def __init__(self, *path: Any) -> None:
        object.__setattr__(self, "path", path)

    def __call__(self, batch: Batch) -> Tree:
        return batch.lookup(*self.path)


def all_finite(*trees: Tree) -> jax.Array:
    """Return whether no number of any tree is NaN or Inf, as a scalar bool.

    Args:
        trees: pytrees, such as the loss, gradients of dense weights and gradients of rows.

    Example:
        >>> bool(all_finite({"w": jnp.ones(3)}, jnp.array([1.0, jnp.nan])))
        False
    """
    floats = [own for own in jax.tree.leaves(trees) if jnp.issubdtype(getattr(own, "dtype", type(own)), jnp.inexact)]
    return jnp.all(jnp.array([jnp.isfinite(own).all() for own in floats], bool))


def where(finite: Any, new: Tree, old: Tree) -> Tree:
    """Return one of two trees of equal structure. Leaves that are no arrays stay.

    Args:
        finite: a scalar bool, such as `all_finite` returns.
        new, old: the trees: `new` if `finite`, else `old`.

    Example:
        >>> where(False, {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})["w"].tolist()
        [0.0, 0.0]
    """
    return jax.tree.map(lambda one, other: one if one is other else jnp.where(finite, one, other), new, old)


class Tables(PublicNames):
    """Tables whose rows are arguments of jitted steps.

    `fetch` reads the rows of a batch. The step returns their gradients, and `apply` steps the rows by them.

    Args:
        tables: an `er.Table`, an `er.Group`, or a pytree of tables, such as a dict by name.
        sharding: of positions over devices, along the first axis of ids. Rows are on all of its devices. None: a batch
            has NumPy arrays, which a jitted step puts on its device.

    Raises:
        ArgumentError: a leaf is no table, a table occurs twice, or `sharding` is no NamedSharding.

    Example:
        >>> import embedrock as er, embedrock.jax as ej
        >>> tables = ej.Tables(er.Table(rows=10**9, dim=2, rule=er.SGD(lr=0.5), init=er.Zeros()))
        >>> batch = tables.fetch(np.array([7, 3, 7]))
        >>> step = jax.jit(jax.grad(lambda rows, batch: batch.with_rows(rows).lookup().sum()))
        >>> grads = step(batch.rows, batch)
        >>> tables.apply(batch, grads, ej.all_finite(grads))
        >>> tables.fetch(np.array([3, 7])).lookup().tolist()
        [[-0.5, -0.5], [-1.0, -1.0]]
    """

    by_name: dict[str, Table]
    _unlisted = "fetcher plan read"

    def __init__(self, tables: Tree, sharding: NamedSharding | None = None) -> None:
        tree = jax.tree.map(lambda own: {name: own[name] for name in own} if isinstance(own, Group) else own, tables)
        paths, self._tree = tree_flatten_with_path(tree, is_leaf=lambda own: own is None)
        self.by_name = {keystr(path, simple=True, separator="/"): table for path, table in paths}
        for name, table in self.by_name.items():
            if not isinstance(table, Table):
                raise ArgumentError(
                    f"`tables` of ej.Tables must be er.Table, or a tree of them: got {table!r}{' as ' * bool(name)}"
                    f"{name}. Pass, for example, {{'item': er.Table(rows=10**6, dim=32)}}."
                )
            if sum(own is table for _, own in paths) > 1:
                raise ArgumentError(
                    f"`tables` of ej.Tables must have each table once: got {table!r} twice, as {name}. Name it once. "
                    "Fetch several arrays of its ids by a dict in their place, {'clicked': ids, 'shown': other_ids}."
                )
        if len(self.by_name) < len(paths):
            keys = [keystr(path) for path, _ in paths]
            raise ArgumentError(f"`tables` of ej.Tables must have different names: got {', '.join(keys)}. Rename one.")
        if not isinstance(sharding, NamedSharding | None):
            remedy = "jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names[0]))"
            raise ArgumentError(f"`sharding` must be a NamedSharding of a mesh: got {sharding!r}. Pass {remedy}.")
        self._shardings = None if sharding is None else (NamedSharding(sharding.mesh, PartitionSpec()), sharding)
        self.fetcher = RowFetcher(self.by_name)

    def fetch(self, ids: Tree, missing: Any = None) -> Batch:
        """Return the rows of a batch, as arguments of a jitted step. It changes no row.

        Arrays of ids keep one shape for all batches: each new shape compiles a step anew. Pad with an id that is
        `frozen`, or whose vectors count nothing.

        Args:
            ids: integers of any shape for each table, as NumPy arrays. In the place of an array, a dict or tuple of
                arrays has several features of a table.
            missing: values of rows that are not there: see `Table.lookup`. Such a batch is only read.

        Raises:
            IdError, IdTypeError: as for `Table.lookup`.
            ArgumentError: `ids` have another structure than the tables.
        """
        return self.read(self.plan(ids, missing))

    def plan(self, ids: Tree, missing: Any = None) -> Batch:
        """Return a batch on the host, whose rows are not read yet.

        Args:
            ids, missing: as for `fetch`.
        """
        flat = [jax.tree.flatten(own, is_leaf=lambda x: isinstance(x, list | None)) for own in self._split("ids", ids)]
        fetched = self.fetcher.plan([own for own, _ in flat], missing)
        each = zip(self.fetcher.positions(fetched), flat, strict=True)
        return Batch(None, self._tree.unflatten([tree.unflatten(at) for at, (_, tree) in each]), fetched)

    def read(self, batch: Batch) -> Batch:
        """Return a planned batch with its rows, as arguments of a step.

        Args:
            batch: of `plan`.
        """
        fetched: Any = batch.fetched
        # JAX may use the arrays as they are, and refers to them until it has copied them.
        rows, positions = self._tree.unflatten(self.fetcher.read(fetched)), batch.positions
        if self._shardings is not None or jax.default_backend() != "cpu":  # a CPU takes eight times as long so
            rows, positions = jax.device_put((rows, positions), self._shardings)
        return Batch(rows, positions, fetched)

    def apply(
        self, batch: Batch, grads: Tree, finite: Any, *, by_position: bool = False, lr: Any = None, time: Any = None
    ) -> None:
        """Make one step of all tables by their rules, or of none.

        Args:
            batch: of `fetch`.
            grads: gradients of `batch.rows`. None in the place of an array: the table is not stepped.
            finite: whether all gradients of the step are finite, those of dense weights included: see `all_finite`.
            by_position: `grads` are gradients of ``batch.lookup()`` instead, one for each id. The table sums them in a
                fixed order.
            lr: learning rate, or a function of the number of steps that returns it, as a schedule of optax; or a tree
                of these, one of each table. None: each rule's own.
            time: of the events: see `Table.update`.

        Raises:
            NonFiniteGradientError: not `finite`, and a table has ``on_nonfinite="raise"``. With "skip", it is counted.
            ArgumentError: the batch is not of `fetch`, or was applied already.
            OutdatedBatchError: rows have changed since they were fetched. Fetch them again.
            GradientError: gradients of a wrong shape or dtype.
        """
        if (fetched := getattr(batch, "fetched", None)) is None or batch.rows is None:
            raise ArgumentError(
                f"`batch` of apply must be what fetch returned: got {batch!r}, without its ids. What comes out of a "
                "jitted function, or is a copy, has none. Keep the one that went in: batch = tables.fetch(ids)."
            )
        if (flag := np.asarray(finite)).shape or flag.dtype.kind != "b":  # a loss of NaN is true
            raise ArgumentError(
                f"`finite` of apply must be one bool: got {finite!r}. Pass ej.all_finite(loss, grads, row_grads)."
            )
        given = [jax.tree.leaves(own) for own in self._split("grads", grads)]
        if by_position:  # by name: leaves alone may be in another order
            pairs = zip(self._split("grads", grads), self._split("batch", batch.positions), strict=True)
            due = self._tree.unflatten([None if own is None else at for own, at in pairs])
            self._split("grads", grads, jax.tree.structure(due))
        rates = [lr] * len(given) if lr is None or jax.tree_util.all_leaves([lr]) else self._split("lr", lr)
        self.fetcher.step(fetched, jax.tree.leaves(batch.rows), given, bool(flag), by_position, rates, time)

    def _split(self, argument: str, given: Tree, tree: Any = None) -> list[Any]:
        """Return the part of each table of an argument, or of each place of `tree`."""
        try:
            return (tree or self._tree).flatten_up_to(given)
        except (TypeError, ValueError) as error:
            names = ", ".join(self.by_name) or "one table"
            raise ArgumentError(f"`{argument}` must have the tree of the tables, {names}: {error!s:.400}") from error

    def stats(self) -> dict[str, float]:
        """Return statistics: bytes moved, the padded size of each table, and compilations of a step by their cause.

        Each new shape of ids compiles a step once, `compilations_by_shape`, the first one included. So does a grown
        size, `compilations_by_size`. Further compilations have other causes, such as a dense weight of another dtype.
        """
        return self.fetcher.stats()
