"""The layers' arguments: what they mean for a table, and which ones are refused."""

from __future__ import annotations

import math
import operator
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Real
from typing import Any

import numpy as np

from embedrock.errors import ArgumentError, UnknownArgumentError, UnsupportedError, did_you_mean, not_one_of
from embedrock.frontend.references import tell_resumed
from embedrock.initializers import Initializer, Normal, TruncatedNormal, Uniform
from embedrock.optimizers import Rule
from embedrock.spec.eviction import Eviction
from embedrock.spec.spec import OPEN_IDS, check_count
from embedrock.system.interrupts import held_back
from embedrock.table import rule_changes
from embedrock.table.group import GIVEN, Group
from embedrock.table.opening import InitialValuesOf, make_rows
from embedrock.table.options import TableOptions, declared, index, table_options
from embedrock.table.rule_changes import RuleTaker, set_rule
from embedrock.table.table import Table, rows_of

WIRES = ("float32", "bfloat16")  # what float32 numbers are sent as between processes

_of_layers: weakref.WeakSet[Table] = weakref.WeakSet()  # tables of groups that a layer was made of by their name
_told: weakref.WeakSet[Group] = weakref.WeakSet()  # groups on disk that layers go on with, which was told


def refuse(layer: str, arguments: Iterable[str], refused: Mapping[str, str], known: Iterable[str] = ()) -> None:
    """Raise an error for the first of `arguments`, names that the layer does not take.

    Args:
        layer: its name, such as "ert.Embedding", for error messages.
        arguments: names that were given.
        refused: of names that users of the framework know, what to do instead.
        known: names that the layer takes.
    """
    for name in arguments:
        if name in refused:
            raise UnsupportedError(f"`{name}` of {layer}: {refused[name]}.")
        meant = did_you_mean(name, known)
        raise UnknownArgumentError(f"{layer} has no argument `{name}`: see help({layer}) for those it has.{meant}")


def open_table(
    layer: str,
    rows: int | Table | None,
    dim: int | None,
    padding_idx: int | None,
    options: Mapping[str, Any],
    first: InitialValuesOf | None,
    *,
    names: tuple[str, str],
    group: Group | None = None,
    is_loaded: bool = False,
) -> Table:
    """Return the table of a layer: a ready-made one, or one made from the layer's arguments.

    Args:
        layer: its name, such as "ert.Embedding", for error messages.
        rows: number of rows, None for open ids, or a ready-made table.
        dim: weights in a row; None with a ready-made table.
        padding_idx: id whose row starts as zeros in a table that is made here; None for no such row.
        options: `TableOptions`, by name.
        first: what draws first values where the options do not say it; not needed with a ready-made table.
        names: what the layer calls `rows` and `dim`.
        group: whose member the table is; None: it is alone.
        is_loaded: the layer comes from a file, which says what it shares.
    """
    rows_name, dim_name = names
    if isinstance(rows, Table):
        _refuse_options(layer, [dim_name] * (dim is not None) + ["group"] * (group is not None), options)
        return rows
    if dim is None:
        raise ArgumentError(f"`{dim_name}` of {layer} is missing: only a ready-made er.Table brings its own.")
    if rows is not None:
        check_count(f"`{rows_name}` of {layer}", index(rows), OPEN_IDS)
    check_count(f"`{dim_name}` of {layer}", index(dim))
    options = _keeping(options, padding_idx, rows)
    if group is None:
        table = make_table(rows, dim, options, first)
    else:
        table = _member(layer, group, rows, dim, options, first)
        _note_layer(layer, table, is_loaded)
    try:
        padding = resolve_padding(padding_idx, table.rows)
    except ArgumentError:
        table.close()  # the error may keep it, and it its path
        raise
    if padding is not None and not rows_of(table).tier.count:
        zero_rows(table, [padding])
    return table


def _keeping(options: Mapping[str, Any], padding_idx: int | None, rows: int | None) -> Mapping[str, Any]:
    """Return the options of a table whose row of zeros never leaves: no step uses it, and it would not come back so."""
    eviction = options.get("eviction")
    if padding_idx is None or not isinstance(eviction, Eviction):
        return options
    padding = resolve_padding(padding_idx, rows)
    return {**options, "eviction": replace(eviction, keep=np.append(eviction.kept(), np.int64(padding or 0)))}


def _refuse_options(layer: str, given: list[str], options: Mapping[str, Any]) -> None:
    known = declared(TableOptions).items()
    changed = [name for name, option in known if name in options and options[name] != option.default]
    for name in given + changed:
        raise ArgumentError(f"`{name}` of {layer} belongs to the table: pass it when you make the er.Table.")


def _member(
    layer: str, group: Group, rows: int | None, dim: int, options: Mapping[str, Any], first: InitialValuesOf | None
) -> Table:
    """Return the table of a group that has a layer's name, made if there is none."""
    if not isinstance(group, Group):
        raise ArgumentError(f"`group` of {layer} must be an er.Group: got {group!r}.")
    if (name := options["name"]) is None:
        raise ArgumentError(f"`name` of {layer} is missing: tables of a group are known by their names.")
    for option in ("path", "memory", "directory", "policy", "keep", "commit_every"):
        if options.get(option, declared(TableOptions)[option].default) != declared(TableOptions)[option].default:
            raise ArgumentError(
                f"`{option}` of {layer} does not go with `group`: its tables live where the group does, in its memory. "
                "Leave one of them out."
            )
    given = {option: options[option] for option in GIVEN}
    if given["on_nonfinite"] == declared(TableOptions)["on_nonfinite"].default:
        given["on_nonfinite"] = None  # as the group has it
    is_new = name not in group or any(table.name == name for table in group.open_tables())
    table = group.made(name, rows, dim, given, first)
    if not is_new and rows_of(table).tier.count and group not in _told:  # for all of its layers, once
        _told.add(group)
        tell_resumed(group.path, group.last_step, f" (commit {group.last_commit})")
    return table


def _note_layer(layer: str, table: Table, is_loaded: bool) -> None:
    """Note that a layer has a table of a group; raise `ArgumentError` if another one has it that it does not name."""
    if table in _of_layers and not is_loaded:
        raise ArgumentError(
            f"`name` of {layer} is {table.name!r}, and a layer has that table of the group already. Two models that "
            f"are made alike would train the same rows. To share them, give the layer the table, "
            f"{layer}(group[{table.name!r}]). For rows of its own, give it another name or er.Group(); to begin anew, "
            f"call group.drop({table.name!r}) before."
        )
    _of_layers.add(table)


def check_wire(layer: str, wire: str, are_shared_out: bool, dtype: str) -> None:
    """Raise `ArgumentError` unless rows of `dtype` can be sent between processes as `wire`."""
    if wire not in WIRES:
        raise not_one_of(f"`wire` of {layer}", wire, map(repr, WIRES))
    if wire == "float32":
        return
    if not are_shared_out:
        raise ArgumentError(
            f"`wire` of {layer} is of rows that are shared out: got wire={wire!r} and sharded=False, with which each "
            "process has all rows. Pass sharded=True, or leave wire= out."
        )
    if dtype != "float32":
        raise ArgumentError(
            f"`wire` of {layer} is of float32 rows: got wire={wire!r} and rows of {dtype}, which are sent in 16 bits "
            "as they are. Leave wire= out."
        )


def make_table(rows: int | None, dim: int, options: Mapping[str, Any], first: InitialValuesOf | None = None) -> Table:
    """Return a new table, or the one that there is at ``options["path"]``; of that, tell where it goes on.

    Args:
        rows, dim, options: arguments of `er.Table`.
        first: what draws first values where the options do not say it; None: what `er.Table` takes.
    """
    given = table_options(options)
    with held_back():  # or Ctrl-C may leave files open that no table has
        table = Table.over(*make_rows(rows, dim, given, first), given)
    if table.is_on_disk and rows_of(table).tier.count:
        tell_resumed(os.fspath(options["path"]), table.last_step, f" (commit {table.last_commit})")
    return table


def zero_rows(table: Table, ids: Sequence[int]) -> None:
    """Make rows zeros, in a table with no rows touched."""
    rows, rule = rows_of(table), table.rule
    with rows.table_lock.whole():
        if lags_behind(rule):  # where rows cannot be assigned
            set_rule(rows, None)
        table.assign(ids, np.zeros((len(ids), table.dim), np.float32))
        set_rule(rows, rule)


def resolve_padding(padding_idx: int | None, rows: int | None) -> int | None:
    """Return the id that `padding_idx` means: as in PyTorch, negative ones count from the end."""
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not hasattr(padding_idx, "__index__"):
        raise ArgumentError(f"`padding_idx` must be an int or None: got {padding_idx!r}.")
    padding_idx = operator.index(padding_idx)
    if rows is None:
        return padding_idx
    if not -rows <= padding_idx < rows:
        raise ArgumentError(f"`padding_idx` must lie in [{-rows}, {rows}): got {padding_idx}.")
    return padding_idx % rows


def is_number(value: object) -> bool:
    """Return whether a value is a real number: no bool, no NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and bool(value == value)


def lags_behind(rule: Rule | None) -> bool:
    """Return whether weights lag behind under a rule, so that they cannot be assigned: that of a dense optimizer."""
    history = None if rule is None else rule.history()
    return history is not None and history.moves_weights


TRUNCATED_STD = 0.87962566103423978  # of a normal distribution that was cut off at two standard deviations
OTHERS = (
    "What is no formula of each weight by itself is passed as an array: init=er.FromArray(array) of an er.Table, or "
    "from_pretrained(array) of the layer"
)


def scaled(distribution: str, variance: float) -> Initializer:
    """Return first values of mean 0 and some variance.

    Args:
        distribution: "uniform", "normal", or "truncated_normal", cut off at two standard deviations.
        variance: of the values.

    Example:
        >>> scaled("uniform", 3.0)
        Uniform(low=-3.0, high=3.0)
    """
    if distribution == "uniform":
        return Uniform(-math.sqrt(3 * variance), math.sqrt(3 * variance))
    if distribution == "normal":
        return Normal(0.0, math.sqrt(variance))
    return TruncatedNormal(0.0, math.sqrt(variance) / TRUNCATED_STD)


def needs_rows(argument: str, given: object) -> str:
    """Return what to say of an initializer whose numbers follow from the count of rows, where ids are open."""
    return (
        f"{argument} {given!r} follows from the number of rows, and open ids (None) have none. Pass its numbers: "
        "er.Uniform(low, high), er.Normal(std=0.05) or er.TruncatedNormal(std=0.05)."
    )


__all__ = ["RuleTaker", "bind_rule", "check_may_bind", "given_rule", "may_bind", "written"]


def written(rule: Rule) -> str:
    """Return what to write for a rule whose learning rate is the optimizer's.

    Example:
        >>> import embedrock as er
        >>> written(er.Adam(lr=0.5, dense=True))
        'er.Adam(dense=True)'
    """
    given = {field.name: getattr(rule, field.name) for field in fields(rule) if field.name != "lr"}  # pyright: ignore
    parts = [f"{name}={value!r}" for name, value in given.items() if value != getattr(type(rule), name)]
    return f"er.{type(rule).__name__}({', '.join(parts)})"


def given_rule(table: Table) -> Rule | None:
    """Return the rule that a table was given by its maker; None where it has none, or that of an optimizer."""
    return rows_of(table).given_rule


def bind_rule(table: Table, rule: Rule, taker: RuleTaker) -> None:
    """Let an optimizer's rule step the rows of a table. A snapshot has none that are stepped.

    Raises:
        ArgumentError: a rule that was chosen, or state of rows, would be lost.
    """
    if table.mode == "w":
        with (rows := rows_of(table)).table_lock.whole():
            rows.check()
            rule_changes.bind_rule(rows, rule, taker)


def check_may_bind(table: Table, rule: Rule, taker: RuleTaker) -> None:
    """Raise what `bind_rule` would raise."""
    if table.mode == "w" and not taker.resets_state:
        rule_changes.check_may_bind(rows_of(table), rule, taker)


def may_bind(table: Table, rule: Rule, taker: RuleTaker) -> bool:
    """Return whether `check_may_bind` raises nothing."""
    try:
        check_may_bind(table, rule, taker)
    except ArgumentError:
        return False
    return True
