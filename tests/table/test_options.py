"""The one declaration of a table's options: what callers and `help` see of it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import embedrock as er
from embedrock.table.options import LayerOptions, OpenArguments, StorageOptions, TableOptions, declared, defaults

IN_ORDER = "rule init seed dtype path memory directory on_nonfinite name policy keep commit_every lock mode missing"
IN_ORDER += " device_memory admission eviction frozen segments"


def test_options_come_in_the_order_of_their_documentation():
    assert " ".join(declared(TableOptions)) == IN_ORDER
    documented = [line.split(":")[0].strip() for line in (er.Table.__doc__ or "").splitlines() if ": " in line]
    assert [name for name in documented if name in declared(TableOptions)] == IN_ORDER.split()


@pytest.mark.parametrize("kind", [StorageOptions, LayerOptions, OpenArguments])
def test_every_subset_has_the_defaults_of_a_table(kind: Any):
    assert defaults(kind).items() <= defaults(TableOptions).items()


@pytest.mark.parametrize(("function", "kind", "own"), [(er.Table, TableOptions, 2), (er.open, OpenArguments, 4)])
def test_help_names_all_options_with_their_defaults(function: Any, kind: Any, own: int):
    shown = list(inspect.signature(function).parameters.values())
    assert {each.name: each.default for each in shown[own:]} == defaults(kind)
    assert {each.kind for each in shown[own:]} == {inspect.Parameter.KEYWORD_ONLY}
    assert {each.annotation for each in shown if each.name == "memory"} == {"int | float | str | None"}


def test_options_make_another_table_like_it():
    table = er.Table(100, 4, memory="1MiB", directory="hashed", on_nonfinite="skip", device_memory="2MiB")
    assert er.Table(100, 4, **table.options).options == table.options


def test_open_refuses_what_it_does_not_take(tmp_path: Any):
    unknown: dict[str, Any] = {"depth": 5}
    with pytest.raises(TypeError, match=r"er\.open has no argument 'depth'"):
        er.open(tmp_path, **unknown)
