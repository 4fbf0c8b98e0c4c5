"""The saved form of a table in RAM: a header, the rule's history, and batches of (ids, records)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from embedrock.admission.lifecycle import PREFIX, RowLifecycle
from embedrock.batch.ids import check_ids
from embedrock.batch.plan import make_plan
from embedrock.errors import ArgumentError, UnsupportedError, counted
from embedrock.initializers import FromSafetensors, Given
from embedrock.optimizers import Rule, describe_rule
from embedrock.spec.description import POLICIES, describe_spec, policies_of, rule_of
from embedrock.spec.frozen import FrozenRows
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend
from embedrock.storage.records import encode, wrong_last_steps
from embedrock.storage.table_lock import together
from embedrock.store.segments import damaged
from embedrock.system.interrupts import held_back
from embedrock.table.changes import (
    check_may_freeze,
    cut_values,
    first_scale,
    has_more,
    lost_state,
    outside,
    set_rule,
)
from embedrock.table.reading import EXPORT_BATCH_ROWS as EXPORT_ROWS
from embedrock.table.reading import weights_of
from embedrock.table.rows import NOBODY, TableState

STATE_FORMAT = 1
KEYS = ("format", "rows", "dim", "dtype", "seed", "init", "rule", "steps", "skipped_steps", "ids", "records")
WHOLE_NUMBERS = {"steps", "skipped_steps", "seed", "count"}
HISTORY = "history_"
LOADED_BYTES = 8 << 20  # of records, at a time
DIGEST = "init_digest"  # of initial values from an array
GROWING = "to table.load_state, ert.load_state_dict, ert.load, erk.load_weights or erk.TableCheckpoint"
OPTIONAL = {DIGEST, "segments", *POLICIES}


class SavedState(NamedTuple):
    """The input of `load`.

    Attributes:
        header: description of the table, its steps, and `count`, the number of rows with records.
        history: arrays of the rule's history, by name.
        batches: ids int64 (n,) and records uint8 (n, record_bytes), which may be views.
        ascends: ids ascend, across batches, too.
    """

    header: dict[str, Any]
    history: dict[str, np.ndarray]
    batches: Iterable[tuple[np.ndarray, np.ndarray]]
    ascends: bool = False


def save(rows: TableState, batch_rows: int) -> SavedState:
    """Return the saved form of a table in RAM, in batches of `batch_rows`. Caller holds the table lock while using it.

    Raises:
        UnsupportedError: the table is on disk.
    """
    rows.check_open()
    rows.location.check_in_ram("save", rows.name)
    return saved_of(rows, batch_rows)


def saved_of(rows: TableState, batch_rows: int) -> SavedState:
    """Return the saved form of a table, in RAM or on disk. Caller holds the table lock while using it."""
    return SavedState(
        {**_header(rows), "count": rows.tier.count}, remembered(rows), rows.tier.record_batches(batch_rows)
    )


def remembered(rows: TableState) -> dict[str, np.ndarray]:
    """Return the state of a table outside of its records, by name: step history and row lifecycle."""
    history, lifecycle = {} if rows.history is None else rows.history.state(), rows.location.lifecycle_of(rows)
    return {**history, **({} if lifecycle is None else lifecycle.state())}


def load(rows: TableState, saved: SavedState, refuse_repeated: Callable[[np.ndarray], Exception]) -> None:
    """Replace rows, optimizer state, steps and seed by a result of `save`. Under another rule, only the weights are
    loaded.

    A table without a rule gets the saved one. A table with more rows than the state keeps them.

    Args:
        rows: the caller holds their table lock.
        saved: a state that `check_header` accepted.
        refuse_repeated: called with the ids of a batch that repeats earlier ids; returns the error to raise.
    """
    header, wanted, frozen = saved.header, rows.spec.rule, _frozen(rows, saved.header)
    spec = replace(rows.spec, rule=rule_of(header["rule"]), seed=int(header["seed"]))
    spec = replace(spec, frozen=frozen if spec.frozen is None else spec.frozen)  # as of a table that is opened again
    steps = int(header["steps"])
    history = None if spec.rule is None else spec.rule.history()
    if history is not None:
        history.load({name: a for name, a in saved.history.items() if not name.startswith(PREFIX)}, steps)
    check_may_freeze(rows.subject, spec, frozen, history)
    lifecycle = _lifecycle(rows, spec, saved)

    def fill(tier: Backend) -> None:
        tier.history = history
        tier.check_room(header["count"])
        if saved.ascends:
            tier.paste_ascending(checked(_ascends()), header["count"])
            return
        for ids, records in checked(lambda ids: len(make_plan(ids).ids) == len(ids) and not tier.holds(ids).any()):
            tier.bulk_insert(ids, records)

    def checked(are_new: Callable[[np.ndarray], bool]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for ids, records in saved.batches:
            check_ids(ids, header["rows"], rows.subject)
            if not are_new(ids):
                raise refuse_repeated(ids)
            if wrong_last_steps(spec, records, np.arange(len(ids)), steps).size:
                raise ArgumentError(
                    f"`records` of a state for {rows.subject} must have been last stepped in one of its steps, 1 to "
                    f"{steps}: got some of another. The state is damaged: load another one."
                )
            yield ids, records

    tier = rows.location.idle_pools().replaced(rows.tier, spec, fill, rows.subject)
    if lifecycle is not None:
        check_members(lifecycle, tier, rows.subject)
    rows.install(spec, tier, history, steps, int(header["skipped_steps"]), lifecycle=lifecycle)
    if wanted is None:
        rows.given_rule, rows.is_rule_bound = None, False
        return
    if lost := lost_state(rows, wanted):
        what = f"only the weights of a state for {rows.subject} are taken, which steps by {wanted}"
        warnings.warn(f"{what}: {spec.rule} {lost.replace('would be lost', 'is left out')}.", stacklevel=2)
    set_rule(rows, wanted)


def _frozen(rows: TableState, header: dict[str, Any]) -> FrozenRows | None:
    """Return the frozen rows in the header of a state."""
    try:
        return policies_of({"frozen": header.get("frozen")})["frozen"]
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"a state for {rows.subject} is damaged, load another one: {error}") from error


def _lifecycle(rows: TableState, spec: Spec, saved: SavedState) -> RowLifecycle | None:
    made, arrays = RowLifecycle.of(spec, rows.subject), {k: a for k, a in saved.history.items() if k.startswith(PREFIX)}
    if made is not None and arrays:  # without eviction in the state, its rows get that of the table
        made.load(arrays)
    return made


def _ascends() -> Callable[[np.ndarray], bool]:
    """Return a function that checks whether the ids of consecutive batches ascend."""
    last: list[int] = []

    def ascends(ids: np.ndarray) -> bool:
        before, last[:] = list(last), [int(each) for each in ids[-1:]] or last
        return bool((ids[1:] > ids[:-1]).all()) and not (before and len(ids) and ids[0] <= before[0])

    return ascends


def check_members(lifecycle: RowLifecycle, tier: Backend, subject: str) -> None:
    """Raise `ArgumentError` unless the saved eviction state lists exactly the rows that have records."""
    usage = lifecycle.usage
    if usage is None:
        return
    if not usage.count:
        usage.adopt(np.concatenate([NOBODY, *tier.id_batches(max(1, tier.count))]), lifecycle.steps)
    if usage.count != tier.count or not all(usage.are_known(ids).all() for ids in tier.id_batches(EXPORT_ROWS)):
        raise ArgumentError(
            f"who has a record in a state for {subject} must be whose records it has: got others. The state is "
            "damaged: load another one."
        )


def check_header(
    header: dict[str, Any], rows: TableState, batches: Iterable[np.ndarray] = (), grow: bool = False
) -> None:
    """Raise `ArgumentError` unless a header agrees with the table; with `grow`, the table may have more rows.

    `batches` are ids of saved records, which an error counts.
    """
    expected = _header(rows)
    _check_keys(header, [key for key in expected if key not in OPTIONAL], rows)
    for key in WHOLE_NUMBERS & header.keys():
        _check_number(key, header[key], rows)
    if grow and has_more(rows.spec, header["rows"]):
        expected["rows"] = header["rows"]
        first = cut_values(rows.spec.init, header["rows"])
        expected |= {"init": repr(first), DIGEST: first.digest}
    for key in ("format", "rows", "dim", "dtype", "init"):
        if header[key] != expected[key]:
            more = _remedy(rows, header["rows"], batches) if key == "rows" else ""
            if key == "init" and "From" not in f"{header[key]} {expected[key]}":
                more = f", here er.{header['init']}."  # a name such as "xavier_uniform" has numbers of its rows
            raise ArgumentError(
                f"a state for {rows.subject} must have {key} {expected[key]!r}: got {header[key]!r}. "
                f"Make the table with the arguments it was saved with{more or '.'}"
            )
    counted_by, own = header.get("admission"), expected.get("admission")
    if counted_by is not None and counted_by != own:
        raise ArgumentError(
            f"a state for {rows.subject} must have counts of its admission, {own}: got those of {counted_by}. Make the "
            "table with the admission it was saved with."
        )
    had, segments = header.get("segments", 1), rows.spec.segments
    comes_and_goes = header.get("admission") is not None or header.get("eviction") is not None
    if had != segments and rows.spec.has_residents and comes_and_goes:
        raise ArgumentError(
            f"a state for {rows.subject} must be of rows that come and go in {counted(segments, 'segment')}: got "
            f"{had}. Make the table with segments={had}, as it was saved. Layers with sharded= make tables with "
            "segments, and all others have one."
        )
    digest = header.get(DIGEST, expected[DIGEST])  # older headers have none
    if digest != expected[DIGEST]:
        raise ArgumentError(
            f"a state for {rows.subject} must have first values {expected['init']} of digest {expected[DIGEST]}: got "
            f"those of digest {digest}, other rows. Make the table with the rows it was saved with."
        )


def _remedy(rows: TableState, saved: int | None, batches: Iterable[np.ndarray]) -> str:
    """Return the remedy for a table with another number of rows than were saved."""
    spec = rows.spec
    if has_more(spec, saved):
        is_published = isinstance(spec.init, FromSafetensors)
        return "" if is_published else f". Pass grow=True for new rows of first values, {GROWING}."
    lost = counted(sum(int(np.count_nonzero(outside(ids, spec.rows))) for ids in batches), "row")
    grow = "" if isinstance(spec.init, Given) else f", or first call grow({saved})"
    return f"{grow}. {lost} with records would not fit: shrink({spec.rows}) cuts them off once the state is loaded."


def _check_number(key: str, value: Any, rows: TableState) -> None:
    low, below = (-(2**63), 2**64) if key == "seed" else (0, 2**62)
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not low <= value < below:
        raise ArgumentError(
            f"`{key}` of a state for {rows.subject} must be a whole number in [{low}, {below}): got {value!r:.80}. "
            "The state is damaged: load another one."
        )


def _check_keys(header: dict[str, Any], keys: Iterable[str], rows: TableState) -> None:
    missing = [key for key in keys if key not in header]
    if missing:
        raise ArgumentError(f"a state for {rows.subject} must have {', '.join(keys)}: {', '.join(missing)} missing.")


def _header(rows: TableState) -> dict[str, Any]:
    spec = rows.spec
    return {
        "format": STATE_FORMAT,
        **describe_spec(spec),
        "init": repr(spec.init),
        DIGEST: spec.init.digest,
        "rule": describe_rule(spec.rule),
        "steps": rows.steps,
        "skipped_steps": rows.skipped_steps,
    }


# -------------------------------------------------------------------- states


def snapshot(rows: TableState) -> dict[str, Any]:
    """Return a table as one flat dict of values that do not change: see `Table.state`."""
    values = state(rows).items()
    return {
        key: each.copy() if isinstance(each, np.ndarray) and each.base is not None else each for key, each in values
    }


def state(rows: TableState, verb: str = "state") -> dict[str, Any]:
    """Return the result of `snapshot`, where possible as views of rows; `verb` names the caller in errors."""
    rows.check_open()
    rows.location.check_in_ram(verb, rows.name)
    ids, records = rows.tier.snapshot()
    arrays = {f"{HISTORY}{name}": array for name, array in remembered(rows).items()}
    return {**_header(rows), "ids": ids, "records": records, **arrays}


def load_state(rows: TableState, state: dict[str, Any] | TableState, grow: bool = False) -> None:
    """Load a result of `state`, or the rows of another table: see `Table.load_state`. Takes the table locks."""
    if not isinstance(state, TableState):
        if not isinstance(state, Mapping):
            raise ArgumentError(
                f"a state for {rows.subject} must be a dict, as state() returns it, or a table: got "
                f'{type(state).__name__}. Of a table on disk: er.open(path, mode="r").'
            )
        with rows.table_lock.whole():
            rows.check()
            _load_dict(rows, state, grow)
    while isinstance(state, TableState) and state is not rows:
        with rows.table_lock.whole():
            rows.check_commit()
            rows.location.wait_for_quiet()
        with held_back(), together([rows.table_lock, state.table_lock]):
            if rows.location.is_idle:  # or it would have to release its lock while holding the other one
                return _load_rows(rows, state, grow)


def _load_rows(rows: TableState, source: TableState, grow: bool) -> None:
    for each in (rows, source):
        each.table_lock.wait_for_step()
        each.check()
    is_packed = rows.spec.codec is not None and source.spec.codec is None
    of_source = _packed(rows, source) if is_packed else saved_of(source, _loaded_rows(source.spec.record_bytes))
    _check_state(rows, of_source.header, source.tier.id_batches(EXPORT_ROWS), grow)
    load(rows, of_source, lambda ids: _repeated(rows, ids))


def _packed(rows: TableState, source: TableState) -> SavedState:
    """Return the weights of a table of floats, as records of one of int8 or int4."""
    if source.default_row() is not None or first_scale(source) != 1.0:
        raise UnsupportedError(
            f"{rows.subject}, of {rows.spec.dtype}, must have the first values of {source.subject}: got rows of "
            "another value, by admission= or by a rule with dense=True. Write all rows to a file (embedrock export "
            "--all), import it, and take that table."
        )
    header = _header(source) | {"dtype": rows.spec.dtype, "rule": None, "steps": 0, "skipped_steps": 0}
    header = {key: value for key, value in header.items() if key not in POLICIES}
    batches = (
        (ids, encode(rows.spec, ids, weights_of(source, ids), source.subject))
        for ids in source.tier.ascending_ids(_loaded_rows(4 * source.spec.dim))
    )
    return SavedState({**header, "count": source.tier.count}, {}, batches, ascends=True)


def _load_dict(rows: TableState, state: dict[str, Any], grow: bool) -> None:
    rows.check_commit()
    _check_keys(state, KEYS, rows)
    rule = _check_state(rows, state, map(np.asarray, [state["ids"]]), grow)
    ids, records = _arrays(rows, state, replace(rows.spec, rule=rule).record_bytes)
    history = {key.removeprefix(HISTORY): value for key, value in state.items() if key.startswith(HISTORY)}
    size = _loaded_rows(records.shape[1])
    batches = ((ids[start : start + size], records[start : start + size]) for start in range(0, len(ids), size))
    load(rows, SavedState({**state, "count": len(ids)}, history, batches), lambda _: _repeated(rows, ids))


def _check_state(rows: TableState, header: dict[str, Any], batches: Iterable[np.ndarray], grow: bool) -> Rule | None:
    """Raise `ArgumentError` unless a header agrees with the table, and its rule is allowed; return the rule."""
    check_header(header, rows, batches, grow)
    wanted, rule = rows.spec.rule, rule_of(header["rule"])
    if rule is not None and wanted is not None and not wanted.same_layout(rule):
        raise ArgumentError(
            f"a state for {rows.subject} must be that of its rule {wanted}: got one of {rule}. "
            "Call set_rule(None, reset_state=True) first to take the state's rule."
        )
    return rule


def _loaded_rows(record_bytes: int) -> int:
    return max(1, LOADED_BYTES // record_bytes)


def _arrays(rows: TableState, state: dict[str, Any], record_bytes: int) -> tuple[np.ndarray, Any]:
    """Return ids, and the source of records to slice: an array, or an object that makes parts of one."""
    ids = check_ids(np.asarray(state["ids"]), rows.spec.rows, rows.subject)
    records, expected = state["records"], (len(ids), record_bytes)
    records = records if hasattr(records, "shape") else np.asarray(records)
    if records.dtype != np.uint8 or records.shape != expected:
        raise ArgumentError(
            f"`records` of a state for {rows.subject} must be uint8 {expected}: got {records.dtype} {records.shape}."
        )
    if ids.ndim != 1:
        raise _repeated(rows, ids)
    return ids, records


def _repeated(rows: TableState, ids: np.ndarray) -> ArgumentError:
    return ArgumentError(f"`ids` of a state for {rows.subject} must be 1-D and not repeat: got shape {ids.shape}.")


# -------------------------------------------------------------------- weights


def export(rows: TableState, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that have records, ids ascending and weights: see `Table.export`."""
    count = rows.tier.count
    ids, weights = np.empty(count, np.int64), np.empty((count, rows.spec.dim), np.float32)
    done = 0
    for part in rows.tier.id_batches(size):
        end = done + len(part)
        if end <= count:
            ids[done:end], weights[done:end] = part, weights_of(rows, part)
        done = end
    if done != count:  # only a commit of a group states the count of a table
        raise damaged(f"the pool of {rows.subject}", f"{counted(count, 'row')} of it", done)
    order = np.argsort(ids)
    return ids[order], weights[order]


def export_batches(rows: TableState, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Iterate over the rows that have records: see `Table.export_batches`. Takes the table lock for each batch."""
    with rows.table_lock.alone():
        rows.check()
        batches, version = rows.tier.id_batches(size), rows.version.now
    for ids in batches:
        with rows.table_lock.alone():
            rows.check()
            if version != rows.version.now:
                raise ArgumentError(f"{rows.subject} was changed while it was being exported. Export it again.")
            weights = weights_of(rows, ids)
        yield ids, weights
