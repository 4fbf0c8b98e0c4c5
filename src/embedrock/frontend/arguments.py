"""The layers' arguments: their meaning for a table, and the refused ones."""

from __future__ import annotations

import math
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Real
from typing import Any

import numpy as np

from embedrock.errors import ArgumentError, UnknownArgumentError, UnsupportedError, did_you_mean, not_one_of
from embedrock.frontend.references import tell_resumed
from embedrock.initializers import Initializer, Normal, TruncatedNormal, Uniform
from embedrock.optimizers import Rule
from embedrock.spec.eviction import Eviction
from embedrock.spec.frozen import FrozenRows
from embedrock.spec.spec import OPEN_IDS, check_count
from embedrock.system.interrupts import held_back
from embedrock.system.scopes import on_failure
from embedrock.table.changes import RuleTaker, check_may_bind, set_rule
from embedrock.table.group import GIVEN, Group
from embedrock.table.opening import InitialValuesOf, make_rows
from embedrock.table.options import TableOptions, declared, index, table_options
from embedrock.table.rows import TableState
from embedrock.table.table import Table, rows_of

ROWS_AT_ONCE = 65_536
WIRES = ("float32", "bfloat16")  # dtypes of float32 numbers on the wire between processes

_of_layers: weakref.WeakSet[Table] = weakref.WeakSet()  # tables of groups that some layer uses by their name
_logged: weakref.WeakSet[Group] = weakref.WeakSet()  # groups on disk that layers have resumed, already logged


def refuse(layer: str, arguments: Iterable[str], refused: Mapping[str, str], known: Iterable[str] = ()) -> None:
    """Raise an error for the first of `arguments` that the layer does not take.

    Args:
        layer: its name, such as "ert.Embedding", for error messages.
        arguments: names of the given arguments.
        refused: names that users of the framework know. Each value is a sentence on the alternative.
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
    owns: Callable[[Table, int], bool] = lambda table, row: True,
) -> Table:
    """Return the table of a layer: a ready-made one, or one made from the layer's arguments.

    Args:
        layer: its name, such as "ert.Embedding", for error messages.
        rows: number of rows, None for open ids, or a ready-made table.
        dim: weights in a row; None with a ready-made table.
        padding_idx: id whose row starts as zeros in a new table; None for no such row.
        options: `TableOptions`, by name.
        first: draws initial values if `options` has no initializer; not needed with a ready-made table.
        names: the layer's names for `rows` and `dim`.
        group: the group that gets the table as a member; None for a table alone.
        is_loaded: the layer comes from a file, which names shared tables.
        owns: returns whether this process has a row of the table.
    """
    rows_name, dim_name = names
    options = {**options, "frozen": FrozenRows.of(options.get("frozen"))}  # an array compares by elements
    if isinstance(rows, Table):
        known = declared(TableOptions).items()
        given = [dim_name] * (dim is not None) + ["group"] * (group is not None)
        for name in given + [name for name, option in known if name in options and options[name] != option.default]:
            raise ArgumentError(f"`{name}` of {layer} belongs to the table: pass it when you make the er.Table.")
        return rows
    if dim is None:
        raise ArgumentError(f"`{dim_name}` of {layer} is missing: only a ready-made er.Table brings its own.")
    if rows is not None:
        check_count(f"`{rows_name}` of {layer}", index(rows), OPEN_IDS)
    check_count(f"`{dim_name}` of {layer}", index(dim))
    eviction = options.get("eviction")
    if padding_idx is not None and isinstance(eviction, Eviction):  # a new row in its place would not be zeros
        padding = np.int64(resolve_padding(padding_idx, rows) or 0)
        options = {**options, "eviction": replace(eviction, keep=np.append(eviction.kept(), padding))}
    if group is None:
        table = make_table(rows, dim, options, first)
    else:
        table = _member(layer, group, rows, dim, options, first)
        _note_layer(layer, table, is_loaded)
    with on_failure(table.close):  # the error may keep the array, and the array its path
        padding = resolve_padding(padding_idx, table.rows)
    if padding is not None and not rows_of(table).tier.count and owns(table, padding):
        zero_rows(table, [padding])
    return table


def _member(
    layer: str, group: Group, rows: int | None, dim: int, options: Mapping[str, Any], first: InitialValuesOf | None
) -> Table:
    """Return the table of a group that has a layer's name. Create it if there is none."""
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
    if not is_new and rows_of(table).tier.count and group not in _logged:  # for all of its layers, once
        _logged.add(group)
        tell_resumed(group.path, group.last_step, f" (commit {group.last_commit})")
    return table


def _note_layer(layer: str, table: Table, is_loaded: bool) -> None:
    """Record that a layer uses a table of a group.

    Raises:
        ArgumentError: another layer uses the table already, and this layer does not come from a file.
    """
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


def check_no_codes(argument: str, dtype: str) -> None:
    """Raise `ArgumentError` if pretrained rows are 8-bit floats: `argument` lacks their scale."""
    if dtype.startswith("float8"):
        raise ArgumentError(
            f"{argument} must be floats of 16 bits or more: got {dtype}. Read them with their scale from their file: "
            "er.FromSafetensors(folder, tensor)."
        )


def make_table(rows: int | None, dim: int, options: Mapping[str, Any], first: InitialValuesOf | None = None) -> Table:
    """Open the table at ``options["path"]``, or create it. Log the step that a reopened table resumes from.

    Args:
        rows, dim, options: arguments of `er.Table`.
        first: draws initial values if `options` has no initializer; None: the default of `er.Table`.
    """
    given = table_options(options)
    with held_back():  # or Ctrl-C may leave open files without a table
        table = Table.over(*make_rows(rows, dim, given, first), given)
    if table.is_on_disk and rows_of(table).tier.count:
        tell_resumed(os.fspath(options["path"]), table.last_step, f" (commit {table.last_commit})")
    return table


def zero_rows(table: Table, ids: Sequence[int]) -> None:
    """Set rows to zeros in a table whose rows no step has touched."""
    rows, rule = rows_of(table), table.rule
    with rows.table_lock.whole():
        if lags_behind(rule):  # under a dense rule, rows cannot be assigned
            set_rule(rows, None)
        table.assign(ids, np.zeros((len(ids), table.dim), np.float32))
        set_rule(rows, rule)


def write_batches(table: Table, count: int) -> Iterator[slice]:
    """Cut `count` rows into slices of as many as a table on disk writes through its cache."""
    size = min(ROWS_AT_ONCE, max(1, int(table.stats().get("cache_slots", ROWS_AT_ONCE)) // 2))
    return (slice(start, start + size) for start in range(0, count, size))


def resolve_padding(padding_idx: int | None, rows: int | None) -> int | None:
    """Return the row's id for `padding_idx`. As in PyTorch, negative numbers count from the end."""
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
    """Return whether a rule leaves stale weights, which cannot be assigned: a dense rule."""
    history = None if rule is None else rule.history()
    return history is not None and history.moves_weights


TRUNCATED_STD = 0.87962566103423978  # standard deviation of a standard normal cut off at two deviations
OTHERS = (
    "What is no formula of each weight by itself is passed as an array: init=er.FromArray(array) of an er.Table, or "
    "from_pretrained(array) of the layer"
)


def scaled(distribution: str, variance: float) -> Initializer:
    """Return an initializer of mean 0 and the given variance.

    Args:
        distribution: "uniform", "normal", or "truncated_normal", cut off at two standard deviations.
        variance: variance of the values.

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
    """Return the error text for an initializer that needs the number of rows, for open ids."""
    return (
        f"{argument} {given!r} follows from the number of rows, and open ids (None) have none. Pass its numbers: "
        "er.Uniform(low, high), er.Normal(std=0.05) or er.TruncatedNormal(std=0.05)."
    )


def written(rule: Rule) -> str:
    """Return the source text of a rule whose learning rate is the optimizer's.

    Example:
        >>> import embedrock as er
        >>> written(er.Adam(lr=0.5, dense=True))
        'er.Adam(dense=True)'
    """
    given = {field.name: getattr(rule, field.name) for field in fields(rule) if field.name != "lr"}  # pyright: ignore
    parts = [f"{name}={value!r}" for name, value in given.items() if value != getattr(type(rule), name)]
    return f"er.{type(rule).__name__}({', '.join(parts)})"


def may_bind(rows: TableState, rule: Rule, taker: RuleTaker) -> bool:
    """Return whether `check_may_bind` raises nothing."""
    try:
        check_may_bind(rows, rule, taker)
    except ArgumentError:
        return False
    return True
