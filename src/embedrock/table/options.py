"""The options of a table: the one place where they are declared, with their types and defaults.

`Unpack` of the classes here gives callers names and types to complete. `shows` gives `help` the defaults.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from inspect import formatannotation
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, get_type_hints

from embedrock.errors import ArgumentError, UnknownArgumentError, check_choice, did_you_mean
from embedrock.initializers import Initializer
from embedrock.io.vfs import System
from embedrock.optimizers import Rule
from embedrock.spec.admission import Admission
from embedrock.spec.eviction import Eviction
from embedrock.storage.cache import POLICIES
from embedrock.system.paths import local_path
from embedrock.system.sizes import MAP, Size, duration, parse_bytes, parse_device_memory, parse_seconds
from embedrock.table.missing import Missing

MODES = ("w", "r")
F = TypeVar("F", bound=Callable[..., Any])


class TableOption(NamedTuple):
    """Properties of an option besides its name and type.

    Attributes:
        place: its order in signatures and messages.
        default: its default value.
        of_files: only for tables on disk; a table in RAM refuses it.
    """

    place: int
    default: Any
    of_files: bool = False


class StorageOptions(TypedDict, total=False):
    """Options of every way to make a table: `er.Table`, `er.open`, and layers."""

    memory: Annotated[int | float | str | None, TableOption(6, None)]
    on_nonfinite: Annotated[str, TableOption(8, "raise")]
    policy: Annotated[str, TableOption(10, "lfu", of_files=True)]
    keep: Annotated[int, TableOption(11, 2, of_files=True)]
    commit_every: Annotated[int | str | timedelta | None, TableOption(11, None, of_files=True)]
    device_memory: Annotated[int | float | str | None, TableOption(15, None)]


class LayerOptions(StorageOptions, total=False):
    """Options that layers of all front ends take by these names."""

    rule: Annotated[Rule | None, TableOption(1, None)]
    seed: Annotated[int | None, TableOption(3, None)]
    path: Annotated[str | os.PathLike[str] | None, TableOption(5, None)]
    directory: Annotated[str, TableOption(7, "auto")]
    admission: Annotated[Admission | None, TableOption(18, None)]
    eviction: Annotated[Eviction | None, TableOption(19, None)]
    frozen: Annotated[Any, TableOption(19, None)]


class OpenArguments(StorageOptions, total=False):
    """Options of `er.open`, besides path, mode and commit."""

    init: Annotated[Initializer | None, TableOption(2, None)]
    name: Annotated[str | None, TableOption(9, None)]
    missing: Annotated[Any, TableOption(14, None, of_files=True)]
    lock: Annotated[bool, TableOption(12, True, of_files=True)]


class TableOptions(LayerOptions, OpenArguments, total=False):
    """Options of `er.Table`, besides rows and dim."""

    dtype: Annotated[str, TableOption(4, "float32")]
    mode: Annotated[str, TableOption(13, "w", of_files=True)]
    segments: Annotated[int | None, TableOption(20, 1)]


@functools.cache
def declared(kind: Any) -> Mapping[str, TableOption]:
    """Return the options of one of these classes, by name and in order."""
    hints = get_type_hints(kind, include_extras=True)
    found = {name: hint.__metadata__[0] for name, hint in hints.items()}
    return dict(sorted(found.items(), key=lambda item: item[1].place))


def defaults(kind: Any) -> dict[str, Any]:
    """Return the default of every option of one of these classes."""
    return {name: option.default for name, option in declared(kind).items()}


def filled(kind: Any, given: Mapping[str, Any], refuse: Callable[[list[str]], None]) -> dict[str, Any]:
    """Return all options of one of these classes: given ones, and defaults.

    Args:
        given: options by name.
        refuse: called with unknown names, if there are any; it raises.
    """
    unknown = [name for name in given if name not in declared(kind)]
    if unknown:
        refuse(unknown)
    return {**defaults(kind), **given}


def table_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a table: given ones, and defaults.

    Raises:
        UnknownArgumentError: `er.Table` has no such option.
    """
    options = filled(TableOptions, given, refuse_unknown)
    missing = Missing.of(options["missing"])  # an array compares with defaults by elements
    return {**options, "device_memory": parse_device_memory(options["device_memory"]), "missing": missing}


def refuse_unknown(
    unknown: list[str], subject: str = "Table", first: Sequence[str] = ("rows", "dim"), kind: Any = TableOptions
) -> None:
    """Raise `UnknownArgumentError` for names that `er.Table`, or another function, does not take."""
    names = [*first, *declared(kind)]
    raise UnknownArgumentError(
        f"{subject} has no argument {unknown[0]!r}: it takes {', '.join(names[:-1])} and {names[-1]}."
        f"{did_you_mean(unknown[0], names)}"
    )


def refuse_options_of_files(options: Mapping[str, Any], subject: str) -> None:
    """Raise `ArgumentError` if a table in RAM gets options of tables on disk."""
    known = declared(TableOptions).items()
    given = [f"{name}={options[name]!r}" for name, own in known if own.of_files and options[name] != own.default]
    if given:
        raise ArgumentError(
            f"{subject} has no `path`, and lives in RAM without the options of tables on disk: got {', '.join(given)}. "
            "Pass path= as well to keep its rows on disk, or leave these out."
        )


def shows(kind: Any, *left_out: str) -> Callable[[F], F]:
    """Give a function with ``**options: Unpack[kind]`` a signature with all names, types and defaults.

    If its ``**options`` are of another type, it takes more than these, and they stay. It does not take `left_out`.
    """

    def shown(function: F) -> F:
        own = inspect.signature(function)
        *named, others = own.parameters.values()
        more = [] if others.annotation == f"Unpack[{kind.__name__}]" else [others]
        types = {name: formatannotation(hint) for name, hint in get_type_hints(kind).items()}
        hints = {name: re.sub(r"embedrock[\w.]*\.", "", text) for name, text in types.items()}
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=hints[name])
            for name, option in declared(kind).items()
            if name not in left_out
        ]
        function.__signature__ = own.replace(parameters=[*named, *options, *more])
        return function

    return shown


class OpenOptions(NamedTuple):
    """How to open the files of a table.

    Attributes:
        memory: budget of RAM, None for a share of half of the machine's.
        policy: of eviction from the cache.
        keep: commits to retain.
        commit_every: steps, or a duration as text, between automatic commits; None: no automatic commits.
        lock: refuse to write if the file system has no locks.
        mode: "w" or "r".
        at: number of a commit, for a reader; None: the last one.
        name: of the table, for error messages.
        missing: values of rows that are not there, for a reader: as given, an array as a list.
    """

    path: str
    memory: Size | None
    policy: str
    keep: int
    commit_every: int | str | None
    lock: bool
    mode: str
    at: int | None
    system: System
    name: str | None
    missing: Any = None

    def checked(self) -> OpenOptions:
        """Return the options with an absolute path.

        Raises:
            ArgumentError: an invalid value.
            UnsupportedError: this platform has no tables on disk.
        """
        check_choice("mode", self.mode, MODES)
        if self.at is not None and self.mode != "r":
            raise ArgumentError(
                f'`at` ({self.at!r}) goes with mode="r": a writer works on the last commit. '
                f"Call rollback({self.at!r}) to go on from an earlier one."
            )
        missing = Missing.of(self.missing)
        if missing is not None and self.mode != "r":
            raise ArgumentError(
                f'`missing` ({missing}) goes with mode="r": what a writer reads is trained, from its initial value on. '
                "Give it to a lookup, table.lookup(ids, missing=...), or to layers that are frozen or in eval()."
            )
        for name, value in (("keep", self.keep), ("at", self.at)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < (name == "keep")
            ):
                raise ArgumentError(
                    f"`{name}` must be a whole number of at least {int(name == 'keep')}: got {value!r}."
                )
        check_choice("policy", self.policy, POLICIES)
        every = checked_every(self.commit_every, self.mode)
        if self.memory == MAP and self.mode != "r":
            parse_bytes(MAP)  # raises
        path = os.path.abspath(local_path(self.path))
        self.system.check_usable(f"table {self.name or path!r}")
        return self._replace(path=path, commit_every=every, missing=missing and missing.given)


def checked_every(every: Any, mode: str) -> int | str | None:
    """Return `commit_every` as steps, or as text.

    Raises:
        ArgumentError: it is neither steps nor a duration, or the table is only read.
    """
    if every is None:
        return None
    text = duration(every)
    is_steps = isinstance(every, int) and not isinstance(every, bool) and every > 0
    if not is_steps and not (isinstance(text, str) and parse_seconds(text)):
        raise ArgumentError(
            f'`commit_every` must be steps, at least 1, or a time such as "30s" or "5min": got {every!r}.'
        )
    if mode == "r":
        raise ArgumentError(
            f'`commit_every` ({every!r}) goes with mode="w": a snapshot has nothing to commit. Leave it out.'
        )
    return text


def index(value: Any) -> Any:
    """Return whole numbers of any type as int, and other values as they are, for later checks."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value
