"""Open or make a table: its location, in RAM or in a folder, and its rows there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from embedrock.admission.lifecycle import RowLifecycle
from embedrock.errors import ArgumentError, UnsupportedError, check_choice, with_article
from embedrock.initializers import Initializer, Normal
from embedrock.io.vfs import SYSTEM
from embedrock.optimizers import Rule
from embedrock.spec.admission import Admission
from embedrock.spec.description import POLICIES, check_same, describe_spec
from embedrock.spec.eviction import Eviction
from embedrock.spec.frozen import FrozenRows
from embedrock.spec.spec import Spec
from embedrock.storage.base_cache import BaseCache
from embedrock.storage.ram_backend import DIRECTORIES
from embedrock.storage.record_pools import RamOfTable
from embedrock.storage.table_lock import TableLock
from embedrock.store.table_folder import TableFolder
from embedrock.system.interrupts import held_back
from embedrock.system.scopes import on_failure
from embedrock.table.changes import change_policies, set_rule
from embedrock.table.opened import open_alone
from embedrock.table.options import OpenOptions, index, refuse_options_of_files
from embedrock.table.rows import RamLocation, TableState
from embedrock.table.storage import StorageManager, open_or_make, spec_of

ON_NONFINITE = ("raise", "skip")


class InitialValuesOf(NamedTuple):
    """The default init and seed of a new table.

    An existing table keeps its own. Arguments that were not given are not compared with it.
    """

    init: Initializer
    seed: int


def make_rows(
    rows: int | None, dim: int, options: Mapping[str, Any], first: InitialValuesOf | None = None
) -> tuple[TableState, StorageManager | None]:
    """Return the rows of a table, new or as of the last commit, and the manager of its files.

    Args:
        rows: number of rows, None for open ids.
        options: all of `TableOptions`.
        first: defaults for a new table without init or seed; None: `Normal`, and a seed of its own.
    """
    check_choice("directory", options["directory"], DIRECTORIES)
    check_on_nonfinite(options["on_nonfinite"])
    spec, asked = new_spec(rows, dim, options, first)
    asked.pop("segments", None)  # as the existing table has them
    if options["path"] is None:
        return _in_ram(spec, options), None
    # The rule and the policies may change.
    opening, given = opening_of(options), {**asked, "rule": None, **dict.fromkeys(POLICIES)}
    table_folder = open_alone(opening.path, lambda: open_or_make(opening, spec))
    return rows_of_last_commit(table_folder, opening, options, spec.init if given["init"] is not None else None, given)


def new_spec(
    rows: int | None, dim: int, options: Mapping[str, Any], first: InitialValuesOf | None = None
) -> tuple[Spec, dict[str, Any]]:
    """Return the spec of a new table; and the request as plain data, None for arguments not given. See `make_rows`."""
    check_rule(options["rule"])
    _check_kind("init", options["init"], Initializer, "er.Normal(std=0.01)", "Names are for layers of a framework.")
    left_out = {name: None for name in InitialValuesOf._fields if options[name] is None}
    if first is None:  # drawn as by `np.random.default_rng`, to fit an int64
        first = InitialValuesOf(Normal(), int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> 1))
    drawn = {**options, **{name: getattr(first, name) for name in left_out}}
    policies = check_policies(options)
    own = index(rows), index(dim), drawn["dtype"], drawn["rule"], drawn["init"], index(drawn["seed"])
    segments = options.get("segments", 1)
    spec = Spec(*own, **policies).for_ranks if segments is None else Spec(*own, **policies, segments=segments)
    BaseCache.of(spec.init)  # too little `memory` is an error before anything is made
    return spec, describe_spec(spec) | left_out


def check_on_nonfinite(choice: Any) -> None:
    """Raise `ArgumentError` for an unknown choice."""
    check_choice("on_nonfinite", choice, ON_NONFINITE)


def _in_ram(spec: Spec, options: Mapping[str, Any]) -> TableState:
    subject = f"table {options['name']!r}" if options["name"] else "the table"
    refuse_options_of_files(options, subject)
    location = RamLocation(RamOfTable(options["memory"], options["directory"]), True, TableLock(), subject)
    rows = TableState(location, options["on_nonfinite"])
    rows.install(spec, location.pools.part(spec, subject), lifecycle=RowLifecycle.of(spec, subject))
    rows.given_rule = spec.rule
    return rows


def opening_of(options: Mapping[str, Any], at: int | None = None) -> OpenOptions:
    """Return how to open files, from checked options."""
    own = {name: options[name] for name in OpenOptions._fields if name in options}
    own |= {name: index(options[name]) for name in ("keep", "commit_every")}
    own |= {"path": options["path"], "at": index(at), "system": SYSTEM.get()}
    return OpenOptions(**own).checked()


def rows_of_last_commit(
    table_folder: TableFolder,
    opening: OpenOptions,
    options: Mapping[str, Any],
    init: Initializer | None,
    given: Mapping[str, Any] | None,
) -> tuple[TableState, StorageManager]:
    """Return the rows of a table alone, as of the opened commit, and the manager of its files.

    Args:
        opening: how it was opened.
        options: of the table, with the rule that it is stepped by from now on, if there is one.
        init: initial values from an array.
        given: arguments that the table must agree with.
    """
    storage, rule = StorageManager(table_folder, opening), options["rule"]
    with on_failure(storage.lose):
        spec = spec_of(table_folder.manifest.members[0], table_folder.manifest, opening.path, init)
        if given is not None:
            check_same(dict(given), describe_spec(spec), opening.path)
        storage.resume()
        rows = storage.open_member("", init, None, options["on_nonfinite"])
        if rule is not None and storage.writes:
            had = rows.spec.rule
            if had is not None and not rule.same_layout(had):
                check_same(describe_spec(rows.spec.with_rule(rule)), describe_spec(rows.spec), opening.path)
            with held_back():
                set_rule(rows, rule)
            rows.given_rule = rule
        policies = check_policies(options)
        if options.get("segments", 1) is None:
            check_segments(rows, bool(policies["admission"] or policies["eviction"]))
        change_policies(rows, policies, storage.writes)
        if storage.writes:
            rows.tell()
    return rows, storage


def check_segments(rows: TableState, has_policies: bool = False) -> None:
    """Raise `UnsupportedError` if ranks are to share a table whose rows come and go, and it was not made for that.

    `has_policies`: it gets an admission or an eviction.
    """
    if rows.spec.segments == 1 and (has_policies or rows.spec.has_residents):
        raise UnsupportedError(
            f"rows of {rows.subject} cannot come and go (admission= or eviction=) where processes share them "
            "(sharded=): the table was made with segments=1, and each process must decide for whole segments of its "
            "ids. Nothing has changed. Leave the policies out, or make a new table: a layer with sharded= and the "
            "policies chooses segments, and er.Table(..., segments=None) does."
        )


def check_rule(rule: Any) -> None:
    """Raise `ArgumentError` unless it is a rule or None."""
    _check_kind("rule", rule, Rule, "er.Adam()")


def check_policies(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policies in a table's options.

    Raises:
        ArgumentError: one is of another type.
    """
    given = {name: options.get(name) for name in POLICIES}
    given["frozen"] = FrozenRows.of(given["frozen"])
    _check_kind("admission", given["admission"], Admission, "er.Admission(min_count=2)")
    _check_kind("eviction", given["eviction"], Eviction, "er.Eviction(max_rows=10**6)")
    return given


def _check_kind(name: str, value: object, kind: type, example: str, of_names: str = "") -> None:
    if value is not None and not isinstance(value, kind):
        hint = f"Pass an instance: {example}." if isinstance(value, type) else f"For example {example}."
        hint = f"{hint} {of_names}" if of_names and isinstance(value, str) else hint
        raise ArgumentError(f"`{name}` must be {with_article(kind.__name__)} or None: got {value!r}. {hint}")
