"""A `Spec` as plain data, as in a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from embedrock.errors import CorruptTableError, TableFileError, UnsupportedError, not_one_of
from embedrock.initializers import INITIALIZERS, FromArray, FromSafetensors, Given, Initializer
from embedrock.optimizers import RULES, Rule, describe_rule
from embedrock.spec.admission import Admission
from embedrock.spec.eviction import Eviction
from embedrock.spec.frozen import FrozenRows
from embedrock.spec.spec import Spec

POLICIES = ("admission", "eviction", "frozen")  # only in descriptions of tables that have them
OPEN = ("seed", "init", "rule", *POLICIES)  # arguments that an existing table may provide


def describe_spec(spec: Spec) -> dict[str, Any]:
    """Return a description in JSON's own types."""
    policies = {name: _plain(policy.describe()) for name, policy in spec.policies.items() if policy}
    return {
        **policies,
        **({} if spec.segments == 1 else {"segments": spec.segments}),
        "rows": spec.rows,
        "dim": spec.dim,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "init": _plain(spec.init.describe()),
        "rule": None if spec.rule is None else _plain(describe_rule(spec.rule)),
    }


def read_spec(description: dict[str, Any], init: Initializer | None, where: str) -> Spec:
    """Return the `Spec` of a description by `describe_spec`.

    Args:
        description: from a manifest.
        init: the caller's; needed if the saved one is an array, and otherwise compared with the saved one.
        where: the table's path, for error messages.

    Raises:
        CorruptTableError: it describes no table.
        TableFileError: `init` is needed, or differs from the table's.
    """
    try:
        rule = rule_of(description["rule"])
        rows, dim, dtype, seed = (description[key] for key in ("rows", "dim", "dtype", "seed"))
        first = _initializer(description["init"], init, where)
        segments = description.get("segments", 1)
        return Spec(rows, dim, dtype, rule, first, seed, **policies_of(description), segments=segments)
    except TableFileError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, UnsupportedError) as error:
        raise CorruptTableError(
            f"the manifest of {where} must describe a table: got {str(description)[:200]} ({error!r})."
        ) from error


def _initializer(saved: dict[str, Any], given: Initializer | None, where: str) -> Initializer:
    if given is not None and without_place(given.describe()) != without_place(saved):
        got = given.describe() if isinstance(given, FromSafetensors) else given
        raise TableFileError(f"`init` of {where} must be that of the table, {saved}: got {got}. Leave it out.")
    if given is None and saved.get("name") == FromArray.__name__:
        again = "FromBfloat16(bits)" if saved.get("dtype") == "bfloat16" else "FromArray(array)"
        raise TableFileError(
            f"first values of {where} come from an array of shape {saved.get('shape')}, which is not in its files. "
            f"Pass it again: init=er.{again}."
        )
    return given or read_initializer(saved, where)


def without_place(value: Any) -> Any:
    """Return a value of a description, without the place of an initializer's rows: other places may have them, too."""
    is_given = isinstance(value, dict) and "digest" in value
    return {key: each for key, each in value.items() if key not in FromSafetensors.PLACE} if is_given else value


def check_same(expected: dict[str, Any], got: dict[str, Any], where: str) -> None:
    """Raise `TableFileError` unless the table at `where` agrees with the request.

    Args:
        expected: the request; None for a seed, an initializer, a rule or a policy means the table's own.
        got: description of the table.
    """
    said = {key: value for key, value in expected.items() if key not in OPEN or value is not None}
    different = [key for key, value in said.items() if without_place(value) != without_place(got.get(key))]
    if different:
        raise TableFileError(
            f"{where} holds another table: {', '.join(different)} differ. Asked for {as_arguments(expected)}; it holds "
            f"{as_arguments(got)}. Use its own arguments (er.open(path) needs none), or another path."
            f"{_how_to_grow(expected['rows'], got['rows'])}"
        )


def _how_to_grow(rows: Any, had: int | None) -> str:
    can_grow = had is not None and (rows is None or rows > had)
    return f" A table gets more rows by er.open(path) and table.grow({rows})." if can_grow else ""


def as_arguments(description: dict[str, Any]) -> str:
    """Return values with their names, as in a call."""
    return ", ".join(f"{key}={value!r}" for key, value in description.items())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def policies_of(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policies in a description by `describe_spec`, by name; None for none."""
    kinds = {"admission": Admission, "eviction": Eviction, "frozen": FrozenRows}
    return {name: kind(**description[name]) if description.get(name) else None for name, kind in kinds.items()}


def rule_of(description: dict[str, Any] | None) -> Rule | None:
    """Return the rule of a description by `describe_rule`, also from JSON, which has no tuples."""
    if description is None:
        return None
    return _made({k: tuple(v) if isinstance(v, list) else v for k, v in description.items()}, RULES, "a saved rule")


def read_initializer(description: dict[str, Any], where: str) -> Initializer:
    """Return the initializer of an `Initializer.describe` description, of the table at `where`.

    Raises:
        ArgumentError: it cannot be made from plain data (`FromArray`), or its kind is unknown.
        TableFileError: files that it reads are gone, or are others.
    """
    if description.get("name") == FromSafetensors.__name__:
        return FromSafetensors.found(description, where)
    kinds = [kind for kind in INITIALIZERS if not issubclass(kind, Given)]
    return _made(description, kinds, "a saved initializer")


def _made(description: Mapping[str, Any], kinds: Iterable[type[Any]], what: str) -> Any:
    by_name = {kind.__name__: kind for kind in kinds}
    if description.get("name") not in by_name:
        raise not_one_of(what, description.get("name"), by_name)
    return by_name[description["name"]](**{key: value for key, value in description.items() if key != "name"})
