"""`Group`: tables that share a budget, and are looked up and stepped together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from embedrock.batch.plan import make_plan
from embedrock.errors import ArgumentError, ClosedTableError, UnknownTableError, UnsupportedError
from embedrock.initializers import Initializer
from embedrock.machine.sizes import Size, format_bytes, parse_device_memory
from embedrock.process.callers import caller
from embedrock.rules import Rule
from embedrock.spec import Spec
from embedrock.table import batches, checks, named
from embedrock.table.batches import Feature, GroupPlan, MemberGradients, Reading
from embedrock.table.description import describe_spec
from embedrock.table.member import InGroup
from embedrock.table.opening import FirstValues, check_on_nonfinite, new_spec
from embedrock.table.rows import Rows
from embedrock.table.stepping import Due, step_all
from embedrock.table.table import Table, rows_of
from embedrock.tiers.pools import Pools
from embedrock.tiers.turn import Turn
from embedrock.wording import did_you_mean

GIVEN = ("dtype", "init", "seed", "rule", "on_nonfinite", "device_memory")  # arguments of `Group.table`, by name


class Group:
    """Tables that share a budget of RAM, and are looked up and stepped together.

    Each member is a `Table` like any other, with its own rows, dim, rule, first values and steps: its results are, to
    the bit, those of the same table alone. Members that are laid out alike (dim, dtype, rule) have their records in one
    place, so that a call for all of them costs hardly more than one for a single table with as many rows.

    Args:
        memory: the most RAM that all members may take together, in bytes, "512MiB" or "25%". None: all of it.
        on_nonfinite: of members that do not say it: what a step with NaN or Inf in its gradients does, "raise" or
            "skip".

    Example:
        >>> import embedrock as er
        >>> group = er.Group(memory="64MiB")
        >>> users = group.table("users", rows=10**9, dim=2, rule=er.SGD(lr=0.5), init=er.Zeros())
        >>> items = group.table("items", rows=10**6, dim=2, rule=er.SGD(lr=0.5), init=er.Zeros())
        >>> ones = np.ones((1, 2), np.float32)
        >>> group.update({"users": [7], "items": [7]}, {"users": ones, "items": 2 * ones})
        >>> group.lookup({"users": [7], "items": [7]})
        {'users': array([[-0.5, -0.5]], dtype=float32), 'items': array([[-1., -1.]], dtype=float32)}
    """

    def __init__(self, memory: Size | None = None, on_nonfinite: str = "raise") -> None:
        check_on_nonfinite(on_nonfinite)
        self.on_nonfinite, self.turn, self.pools = on_nonfinite, Turn(), Pools(memory, "the group")
        self._tables: dict[str, Table] = {}
        self._routes = batches.Routes()
        self._closed_at = ""

    # ---------------------------------------------------------------- members

    def table(
        self,
        name: str,
        rows: int | None,
        dim: int,
        *,
        rule: Rule | None = None,
        init: Initializer | None = None,
        seed: int | None = None,
        dtype: str = "float32",
        on_nonfinite: str | None = None,
        device_memory: Size | None = None,
    ) -> Table:
        """Return the member of that name: a new one, or the one that there is, if that is what is asked for.

        Args:
            name: of the member; for error messages, too.
            rows: number of rows; None: open ids, any int64.
            dim: weights in a row.
            rule, init, seed, dtype: see `Table`. None of a member that there is: whatever it has.
            on_nonfinite: None: what the group was given.
            device_memory: see `Table`.

        Raises:
            ArgumentError: a value that cannot work, or there is another table of that name.
            MemoryBudgetError: no row fits the group's `memory`.
        """
        given: dict[str, Any] = dict(zip(GIVEN, (dtype, init, seed, rule, on_nonfinite, device_memory), strict=True))
        return self.made(name, rows, dim, given)

    def made(
        self, name: str, rows: int | None, dim: int, given: Mapping[str, Any], first: FirstValues | None = None
    ) -> Table:
        """Return what `table` returns.

        Args:
            name, rows, dim: see `table`.
            given: its other arguments.
            first: what draws first values of a new member, where the arguments do not say it.
        """
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"`name` of a table in a group must be a string that is not empty: got {name!r}.")
        spec, asked = new_spec(rows, dim, given, first)
        options = {"on_nonfinite": given["on_nonfinite"], "device_memory": parse_device_memory(given["device_memory"])}
        with self.turn.whole():
            if self._closed_at:
                raise ClosedTableError(f"the group is closed{self._closed_at}. Make a new er.Group.")
            if name in self._tables:
                check_same(self._tables[name], spec, {**asked, **options})
            else:
                self._tables[name] = self._new(name, spec, options)
            return self._tables[name]

    def _new(self, name: str, spec: Spec, options: dict[str, Any]) -> Table:
        on_nonfinite = options["on_nonfinite"] or self.on_nonfinite
        check_on_nonfinite(on_nonfinite)
        home = InGroup(self, name)
        rows = Rows(home, on_nonfinite)
        rows.install(spec, home.empty_tier(spec))
        rows.given_rule = spec.rule
        return Table.over(rows, None, {**options, "name": name, "memory": None, "directory": "hashed"})

    def __getitem__(self, name: str) -> Table:
        table = self._tables.get(name)
        if table is None:
            known = f"it has {', '.join(map(repr, self._tables))}" if self._tables else "it is empty"
            raise UnknownTableError(f"the group has no table {name!r}: {known}.{did_you_mean(name, self._tables)}")
        return table

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._tables))

    def __len__(self) -> int:
        return len(self._tables)

    def drop(self, name: str) -> None:
        """Close a member and give its memory back. Layers that have it raise `ClosedTableError` from then on."""
        with self.turn.whole():
            self[name].close()

    def rename(self, name: str, new: str) -> None:
        """Give a member another name.

        Raises:
            ArgumentError: there is a table of that name.
        """
        if not isinstance(new, str) or not new or (new in self._tables and new != name):
            taken = f"the group has a table {new!r}" if new in self._tables else f"got {new!r}"
            raise ArgumentError(f"table {name!r} must get a name that is not empty, and that no other has: {taken}.")
        with self.turn.whole():
            table = self[name]
            home = rows_of(table).home
            assert isinstance(home, InGroup)  # members have no other
            self._tables = {new if each == name else each: table for each, table in self._tables.items()}
            home.rename(rows_of(table), new)
            table.name = new
            named.register(new, table)

    def forget(self, name: str) -> None:
        """Take a member that was closed off the list."""
        del self._tables[name]
        self._routes.clear()

    # ---------------------------------------------------------------- all members at once

    def lookup(self, ids: Mapping[str, npt.ArrayLike]) -> dict[str, np.ndarray]:
        """Return the weights of rows of some members: float32 of shape ``ids.shape + (dim,)``, by name.

        Args:
            ids: by name of the member: see `Table.lookup`.

        Raises:
            UnknownTableError: the group has no such member.
            IdError, IdTypeError: as for `Table.lookup`.
        """
        features = [Feature(self[name], of_table) for name, of_table in ids.items()]
        with self.turn.alone():
            return dict(zip(ids, batches.look_up(features), strict=True))

    def update(
        self, ids: Mapping[str, npt.ArrayLike], grads: Mapping[str, npt.ArrayLike], lr: float | None = None
    ) -> None:
        """Make one exact step of each of some members, by its own rule: of all of them or, if one is refused, of none.

        Args:
            ids: by name of the member: see `Table.update`.
            grads: by name, for each of `ids`: floats of shape ``ids.shape + (dim,)``.
            lr: learning rate of this step, for all; None: each rule's own.

        Raises:
            UnknownTableError: the group has no such member.
            ArgumentError: names in `ids` and `grads` differ.
            IdError, IdTypeError, GradientError, NonFiniteGradientError, MemoryBudgetError: as for `Table.update`.
        """
        if ids.keys() != grads.keys():
            raise ArgumentError(
                f"`grads` of the group must be for the tables in `ids`, {_names(ids)}: got {_names(grads)}."
            )
        batch = self.plan([Feature(self[name], of_table) for name, of_table in ids.items()])
        given = [_checked_grads(feature, grads[name]) for feature, name in zip(batch.features, ids, strict=True)]
        rules = {table: checks.rule_of_step(table.rule, lr, {}, table.subject) for table in batch.tables}
        summed = batches.sum_gradients(batches.unread(batch), given)
        asked = {feature.table: (feature, own) for feature, own in zip(batch.features, given, strict=True)}
        for table, own in summed:
            if not own.is_finite and table.on_nonfinite == "raise":
                feature, array = asked[table]
                error, ids_of_table = checks.nonfinite(own, table.subject), np.asarray(feature.ids)
                raise checks.nonfinite_in(error, make_plan(ids_of_table), array.reshape(*ids_of_table.shape, -1))
        step_all([Due(table, rules[table], own) for table, own in summed])

    def plan(self, features: Sequence[Feature]) -> GroupPlan:
        """Return what a batch of some members needs: see `Feature`.

        Raises:
            IdError, IdTypeError: as for `Table.lookup`.
        """
        with self.turn.lock:  # but not alone: the step before, which moves no record, may still be running
            return batches.plan(features, self._routes)

    def read(self, batch: GroupPlan, for_weights: bool = False, side_by_side: bool = False) -> Reading:
        """Return the rows and bags of a batch.

        Args:
            batch: its plan.
            for_weights: `weight_gradients` will be asked for.
            side_by_side: the only one of ``reading.arrays`` is (batch, features, dim), as rows (batch * features, dim),
                of a batch that `batches.may_be_side_by_side`.
        """
        with self.turn.alone():
            return batches.read(batch, for_weights, side_by_side)

    def sum(self, reading: Reading, grads: Sequence[np.ndarray | None]) -> list[MemberGradients]:
        """Return the gradients of each member in a batch, summed to one for each row.

        Features that share a table are one batch of it, in their order.

        Args:
            reading: of the batch.
            grads: for each feature, float32 of the shape of its output; None where none came: it touches no row.
        """
        return batches.sum_gradients(reading, grads)

    def sum_arrays(self, reading: Reading, grads: Sequence[np.ndarray]) -> list[MemberGradients]:
        """Return what `sum` returns, from the gradients of ``reading.arrays``: C-contiguous, of their shapes."""
        return batches.sum_arrays(reading, grads)

    def weight_gradients(self, reading: Reading, grads: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        """Return the gradients of positions' weights, float32 (n,), for each feature; None where it has none."""
        return batches.weight_gradients(reading, grads)

    # ---------------------------------------------------------------- the group

    def stats(self) -> dict[str, float]:
        """Return numbers about all members together."""
        with self.turn.alone():
            each = [table.stats() for table in self._tables.values()]
            return {
                "tables": len(each),
                "pools": len(self.pools),
                "rows_touched": sum(stats["rows_touched"] for stats in each),
                "bytes_used": self.pools.bytes_used,
                "budget_bytes": self.pools.budget_bytes,
            }

    def close(self) -> None:
        """Close all members, and give their memory back. Closing twice is allowed."""
        with self.turn.whole():
            for table in list(self._tables.values()):
                table.close()
            self._closed_at = self._closed_at or f", since {caller()}"

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        used, budget = format_bytes(self.pools.bytes_used), format_bytes(self.pools.budget_bytes)
        return f"Group({_names(self._tables)}: {used} of {budget})"

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "a group cannot be pickled or copied: rows may be larger than memory. Copy its tables, which gives tables "
            "alone, or save what state() of each returns."
        )


def check_same(table: Table, spec: Spec, asked: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` unless a member is what is asked for.

    Args:
        table: the member.
        spec: of the table that is asked for.
        asked: its arguments; None, but for `rows`, means whatever the member has.
    """
    has = {**describe_spec(table.spec), "on_nonfinite": table.on_nonfinite, "device_memory": table.device_memory}
    different = [key for key, value in asked.items() if value != has[key] and (value is not None or key == "rows")]
    if asked["init"] is not None and not different and spec.init.digest != table.spec.init.digest:
        different = ["init"]
    if different:
        got, own = (", ".join(f"{key}={values[key]!r}" for key in different) for values in (asked, has))
        raise ArgumentError(
            f"{table.subject} of the group is another one: asked for {got}, and it has {own}. Use its own arguments "
            f"(group[{table.name!r}] needs none), or another name."
        )


def _checked_grads(feature: Feature, grads: npt.ArrayLike) -> np.ndarray:
    table = feature.table
    return checks.floats("grads", grads, (*np.shape(feature.ids), table.dim), table.subject)


def _names(tables: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, tables)) or "none"
