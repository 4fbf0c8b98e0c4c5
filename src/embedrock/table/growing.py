"""`Growing`: a table that gets more rows, or open ids, and forgets some."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from embedrock.batch.ids import check_ids
from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.initializers import FromArray, Initializer
from embedrock.spec import OPEN_IDS, Spec, check_count
from embedrock.table.facts import Facts, whole
from embedrock.table.opening import index
from embedrock.table.rows import Rows
from embedrock.wording import counted


class Growing(Facts):
    """A table that gets more rows, and forgets some."""

    @whole
    def forget(self, ids: npt.ArrayLike) -> int:
        """Remove rows at once, with all that is known of their ids; return how many of them had records.

        They have their first values again, and their state begins anew when they are stepped. On disk that is durable
        with the next commit, and final: no earlier commit shows them from then on, nor brings them back. Once those
        are dropped, and `compact` was called, no byte of the rows is in any file. What a sketch has counted, it keeps.

        Args:
            ids: integers of any shape; repeats are allowed.

        Raises:
            IdError, IdTypeError: as for `lookup`.
            ArgumentError: a batch that was read, and is not stepped yet, has some of them.
            UnsupportedError: the rows are on a GPU, which plans its batches itself. Layers have a `forget` that brings
                them back.
            ReadOnlyTableError: the table was opened with ``mode="r"``.

        Example:
            >>> import embedrock as er
            >>> import numpy as np
            >>> table = er.Table(rows=None, dim=2, rule=er.SGD(lr=1.0), init=er.Zeros())
            >>> table.update([7, 8], np.ones((2, 2), np.float32))
            >>> table.forget([7, 9]), table.export()[0].tolist()
            (1, [8])
        """
        return forget(self._rows, check_ids(ids, self.rows, self.subject))

    @whole
    def grow(self, rows: int | None, init: FromArray | None = None) -> None:
        """Become a table of more rows, or of open ids: the one that had been made so, and was trained the same.

        Rows keep their weights and state, and new ones have the first values that the table's seed, its init and their
        ids say; nothing is drawn for them, and no record is made. So an `init` whose numbers were computed from the
        count of rows stays as it was. Rows that a rule with ``dense=True`` moves without a gradient (`AdamW`, `Ftrl`)
        have moved with the others.

        On disk it is durable with the next commit. Commits from before open with the rows that there were, and
        `rollback` goes back to them. It costs what the rows in RAM do, at most; no file is written anew.

        Args:
            rows: how many there are to be; None: ids become open, any int64. As many as there are change nothing.
            init: where first values come from an array: one of the new shape, that begins with the rows of the old one.

        Raises:
            ArgumentError: fewer rows than there are, or `init` does not go with it.
            MemoryBudgetError: what finds the rows does not fit `memory`.
            UnsupportedError: the rows are on a GPU. Layers have a `grow` that brings them back.
            ReadOnlyTableError: the table was opened with ``mode="r"``.

        Example:
            >>> import embedrock as er
            >>> table = er.Table(rows=3, dim=2, init=er.Constant(0.5))
            >>> table.grow(10**9)
            >>> table.lookup([999_999_999])
            array([[0.5, 0.5]], dtype=float32)
        """
        grow(self._rows, index(rows), init)


def forget(rows: Rows, ids: np.ndarray) -> int:
    """Remove rows at once: see `Growing.forget`."""
    rows.check()
    rows.check_commit()
    if not rows.may_forget:
        raise UnsupportedError(
            f"{rows.subject} cannot forget rows while they are used {rows.side!r}: the host does not know which of "
            "them a batch has that is not stepped yet. Call forget(ids) of a layer, which brings them back to the CPU "
            "first, and to the GPU again at its next call."
        )
    count = rows.forget(np.unique(ids))
    rows.tell()
    return count


def grow(rows: Rows, count: int | None, init: Initializer | None) -> None:
    """Grow to `count` rows, None for open ids: see `Growing.grow`."""
    rows.check_commit()
    if rows.side is not None:
        raise UnsupportedError(
            f"{rows.subject} cannot grow while its rows are used {rows.side!r}. Call grow({count}) of a layer, which "
            "brings them back to the CPU first, and to the GPU again at its next call."
        )
    rows.home.be_quiet(rows)  # others may have had the table meanwhile
    if count == rows.spec.rows and init is None:
        return
    rows.grow(grown_spec(rows.spec, count, init, rows.subject))


def grown_spec(spec: Spec, count: int | None, init: Initializer | None, subject: str) -> Spec:
    """Return the description of a table with more rows, None for open ids.

    Raises:
        ArgumentError: it has them already, or its first values do not reach so far.
    """
    had = spec.rows
    if count is not None:
        check_count("`rows`", count, OPEN_IDS)
    if had is None or (count is not None and count < had):
        has = "takes any int64 as an id" if had is None else f"has {had}"
        raise ArgumentError(
            f"`rows` of {subject} can only grow: got {count}, and it {has}. For fewer, make a new table, and write the "
            "rows that are to stay by assign(ids, values)."
        )
    return replace(spec, rows=count, init=_first_values(spec.init, had, count, init, subject))


def _first_values(own: Initializer, had: int, count: int | None, init: Initializer | None, subject: str) -> Initializer:
    if not isinstance(own, FromArray):
        if init is not None:
            raise ArgumentError(f"`init` of {subject} stays {own} when it grows: got {init}. Leave it out.")
        return own
    if isinstance(init, FromArray) and type(init) is type(own) and len(init.array) == count:
        first = type(init)(init.array[:had])
        if first.describe() == own.describe() and first.digest == own.digest:
            return init
    rows, got = "any id" if count is None else counted(count, "row"), "no other one" if init is None else init
    raise ArgumentError(
        f"first values of {subject} come from an array of {counted(had, 'row')}: got {got} for {rows}. Pass "
        f"init=er.{type(own).__name__}(array) with an array of {count or 'so many'} rows, of which the first {had} are "
        "those of the old one."
    )
