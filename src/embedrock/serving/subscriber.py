"""`Subscriber`: shows the newest whole step of a published folder, while its files arrive in any order."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from embedrock.errors import (
    ArgumentError,
    ClosedTableError,
    CorruptTableError,
    EmbedrockError,
    NewerFormatError,
    TableFileError,
)
from embedrock.initializers import Initializer
from embedrock.io.vfs import open_file
from embedrock.serving import dense as dense_files
from embedrock.spec.description import read_spec, without_place
from embedrock.store.manifest import PUBLISHED, Manifest, TableEntry
from embedrock.store.publishing import age_of, sha_of
from embedrock.store.segments import REMEDY
from embedrock.store.table_folder import TableFolder
from embedrock.store.verify import check_seals
from embedrock.system.log import tell
from embedrock.system.scopes import ClosedAtEnd, on_failure
from embedrock.system.sizes import Size, to_seconds
from embedrock.table.group import NO_OPTIONS, Group, asked, group_of
from embedrock.table.table import Table

SHA_LINE = 66  # bytes at the end of a manifest
PATIENCE = "10min"


class Waiting(NamedTuple):
    """A newer step that is not whole yet.

    Attributes:
        number: of the step.
        since: time of the first try to show it, in seconds since 1970.
        reason: what is missing, short or damaged, with the name of the file.
    """

    number: int
    since: float
    reason: str


class ServedStep:
    """A whole step that was published: rows of all tables, and dense weights.

    Attributes:
        number: of the published step.
        chain: of this step and those it follows from. Numbers of another chain mean other rows.
        step: training step.
        time: when it was published, ISO 8601, UTC.
        dense: arrays by name, read only.
    """

    def __init__(self, group: Group, manifest: Manifest, dense: Mapping[str, np.ndarray]) -> None:
        self.number, self.step, self.time, self.dense = manifest.commit, manifest.step, manifest.time, dense
        self.chain = manifest.published.chain
        self._group, self.manifest, self.users = group, manifest, 0

    def __getitem__(self, name: str) -> Table:
        return self._group[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __repr__(self) -> str:
        return f"ServedStep({self.number}, training step {self.step}: {', '.join(self)})"

    def lookup(self, ids: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the weights of rows of some tables by name. See `Group.lookup`.

        Args:
            ids: by name of the table.
        """
        return self._group.lookup(ids)

    @property
    def table_folder(self) -> TableFolder:
        assert self._group.storage is not None  # it was opened from a folder
        return self._group.storage.table_folder

    def close(self, others: Sequence[ServedStep]) -> None:
        """Close its files, except those that other steps use."""
        stores = [store for step in others for store in step.table_folder.stores]
        for store in self.table_folder.stores:
            store.close(stores)
        self._group.close()


class Subscriber(ClosedAtEnd):
    """The newest whole step of a published folder, for lookups.

    The folder may be one that `er.publish` writes, or a copy of it, whose files arrive in any order. A step is shown
    once all of its files are there and every checksum fits. Until then the step before stays. Files in the folder may
    be replaced as a whole, but must not be rewritten in place. The folder is only read.

    Args:
        folder: the folder. It may be missing, until the first step arrives.
        memory: "map": rows are read from the page cache, of which all processes share one copy. Else RAM for a cache of
            rows, as of `er.Table`, which is empty after each step.
        patience: time that a step may wait for its files, before `refresh` raises an error.
        options: further options of `er.open`, such as `missing`. `init` is the `er.FromSafetensors` that tables were
            trained over, if it is in another folder here.

    Attributes:
        waiting: a newer step that is not whole yet. None: there is none.
        error: the last error of `follow`. None: its last try had none.

    Example:
        >>> import tempfile, embedrock as er
        >>> at = tempfile.mkdtemp()
        >>> with er.Table(rows=100, dim=2, path=at + "/users.rock", init=er.Constant(0.5)) as table:
        ...     number = table.commit(step=1), er.publish(table, at + "/served").number
        >>> with er.Subscriber(at + "/served") as served:
        ...     served.step_number, served.lookup({"users": [7]})["users"].tolist()
        (1, [[0.5, 0.5]])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        memory: Size | None = "map",
        *,
        patience: float | str = PATIENCE,
        **options: Any,
    ) -> None:
        self._given, self._opening = asked(folder, "r", None, {"memory": memory, **options})
        self._patience, self._system = to_seconds(patience, "`patience`"), self._opening.system
        self._folder = self._opening.path
        # Manifests to skip. A number stands for other bytes after the folder was made anew.
        self._seen = set[tuple[int, bytes]]()
        self._shown: ServedStep | None = None
        self._alive = list[ServedStep]()  # shown, or in use
        self._lock, self._refreshing = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends, self._is_closed = threading.Event(), False
        self.waiting: Waiting | None = None
        self.error: Exception | None = None
        self.refresh()

    # ---------------------------------------------------------------- reading

    @contextlib.contextmanager
    def step(self) -> Iterator[ServedStep]:
        """Context manager that has the step shown now. It stays the same until the block ends.

        Raises:
            TableFileError: no whole step has arrived yet.
        """
        with self._lock:
            self._check_open()
            shown = self._shown
            if shown is not None:
                shown.users += 1
        if shown is None:
            waits = f" It waits: {self.waiting.reason}" if self.waiting else ""
            raise TableFileError(f"no whole step has arrived in {self._folder!r} yet.{waits}")
        try:
            yield shown
        finally:
            with self._lock:
                shown.users -= 1
            self._close_unused()

    def lookup(self, ids: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the weights of rows of some tables by name, all of one step: float32 of shape ids.shape + (dim,).

        Args:
            ids: by name of the table.

        Raises:
            TableFileError: no whole step has arrived yet.
        """
        with self.step() as step:
            return step.lookup(ids)

    @property
    def number(self) -> int | None:
        """Number of the step shown, None before the first."""
        return None if self._shown is None else self._shown.number

    @property
    def step_number(self) -> int | None:
        """Training step of the step shown."""
        return None if self._shown is None else self._shown.step

    @property
    def age(self) -> float | None:
        """Seconds since the step shown was published."""
        return None if self._shown is None else age_of(self._shown.time)

    # ---------------------------------------------------------------- newer steps

    def refresh(self) -> bool:
        """Show the newest whole step. Return whether it is another one. Lookups go on meanwhile.

        Raises:
            CorruptTableError: a newer step has waited for a file longer than `patience`.
            TableFileError: two publishers write to the folder.
            NewerFormatError: a newer release has published there.
        """
        with self._refreshing:
            self._check_open()
            if not self._system.exists(f"{self._folder}/{PUBLISHED.inside}"):
                return False
            waits, made = list[tuple[int, str]](), None
            for manifest in self._newest_first(waits):
                with _noted(manifest.commit, waits):
                    made = self._staged(manifest)
                    break
            if made is not None:
                self._show(made)
                waits, self.waiting = [one for one in waits if one[0] > made.number], None
            self._wait_for(waits)
            return made is not None

    def _newest_first(self, waits: list[tuple[int, str]]) -> Iterator[Manifest]:
        """Iterate over the manifests of newer steps, the newest first. Torn ones are added to `waits`."""
        found, shown, numbers = list[Manifest](), self._shown, PUBLISHED.numbers(self._system, self._folder)
        self._seen = {one for one in self._seen if one[0] in numbers}
        for number in reversed(numbers):
            manifest = None
            with _noted(number, waits if shown is None or number > shown.number else []):  # an old one comes once more
                manifest = self._unseen(number)
            if manifest is None:
                continue
            if not manifest.published.chain:
                raise TableFileError(
                    f"{self._folder!r} has tables that are trained, and no published rows. Read them by "
                    f'er.open({self._folder!r}, mode="r"), or publish them: er.publish(group, folder)'
                )
            elif not manifest.members:  # nothing was published yet
                self._skip(manifest)
            elif shown is None:
                yield manifest  # the first step is shown soon: the next call looks at all others
            else:
                found.append(manifest)
        if shown is not None and found:
            self._check_publishers([*found, shown.manifest])
            for manifest in sorted(found, key=_age_of, reverse=True):
                if _age_of(manifest) > _age_of(shown.manifest):
                    yield manifest
                else:
                    self._skip(manifest)

    def _unseen(self, number: int) -> Manifest | None:
        with contextlib.closing(open_file(self._system, PUBLISHED.path_of(self._folder, number))) as file:
            end = file.read(max(0, file.size - SHA_LINE), min(file.size, SHA_LINE))
        return None if (number, end) in self._seen else PUBLISHED.read(self._system, self._folder, number)

    def _skip(self, manifest: Manifest) -> None:
        self._seen.add((manifest.commit, f"\n{sha_of(manifest.to_bytes())}\n".encode()))

    def _check_publishers(self, manifests: Sequence[Manifest]) -> None:
        """Raise `TableFileError` if two publishers write to the folder."""
        newest, known = max(manifests, key=_age_of), dict[tuple[str, int | None], Manifest]()
        known |= {(one.published.chain, one.commit): one for one in manifests}
        for one in manifests:
            before, same = known.get((one.published.chain, one.parent)), known[one.published.chain, one.commit]
            other = newest if one.published.chain != newest.published.chain and one.time > _age_of(newest)[0] else None
            if before is not None and one.published.previous not in (None, sha_of(before.to_bytes())):
                other = before
            if other is not None or same != one:
                pair = (f"step {it.commit} of chain {it.published.chain}, of {it.time}" for it in (one, other or same))
                raise TableFileError(
                    f"two publishers write to {self._folder!r}: {', and '.join(pair)}, do not follow from each other. "
                    "Publish to a folder of its own from each, and remove the manifests of one of them here"
                )

    def _staged(self, manifest: Manifest) -> ServedStep:
        """Open a step, and check every file that was not seen before.

        Raises:
            CorruptTableError: a file is missing, short or damaged.
        """
        inits = {member.name: self._base_of(member) for member in manifest.members}
        for member in manifest.members:  # before files are opened
            read_spec(member.spec, inits[member.name], PUBLISHED.path_of(self._folder, manifest.commit))
        before = None if self._shown is None else self._shown.table_folder
        opened = TableFolder(self._system, self._folder, manifest, None, before)
        with on_failure(lambda: opened.close(before)):
            # Checksums last: they take longest. A file that another try has checked may have been replaced since.
            entry = manifest.published.dense
            dense = {} if entry is None else dense_files.read(self._system, self._folder, entry)
            known = {id(one.file) for store in before.stores for one in store.runs.values()} if before else set[int]()
            for segment in (one for store in opened.stores for one in store.runs.values()):
                if id(segment.file) not in known:
                    check_seals(segment)
        group = group_of(opened, self._opening, self._given)
        for name in [each for each, init in inits.items() if init is not None]:
            group._opened(name, NO_OPTIONS, inits[name])
        return ServedStep(group, manifest, dense)

    def _base_of(self, member: TableEntry) -> Initializer | None:
        """Return the published table that the caller gave, if the rows of a member start as those."""
        init = self._given["init"]
        is_same = init is not None and without_place(init.describe()) == without_place(member.spec.get("init"))
        return init if is_same else None

    def _show(self, made: ServedStep) -> None:
        before = self._shown
        with self._lock:
            self._shown = made
            self._alive.append(made)
        self._skip(made.manifest)
        if before is not None and before.chain != made.chain:
            tell(
                f"{self._folder}: step {made.number} begins a new chain, {made.chain}: it does not follow from step "
                f"{before.number} of chain {before.chain}",
                logging.WARNING,
            )
        self._close_unused()

    def _close_unused(self) -> None:
        with self._lock:
            unused = [step for step in self._alive if step is not self._shown and not step.users]
            self._alive = alive = [step for step in self._alive if step not in unused]
        for step in unused:
            step.close(alive)

    def _wait_for(self, waits: list[tuple[int, str]]) -> None:
        """Register the newest step that is not whole. If it waits for too long, raise `CorruptTableError`."""
        if not waits:
            self.waiting = None
            return
        number, reason = max(waits)
        now, before = time.time(), self.waiting
        since = now if before is None else min(before.since, now)  # newer steps may go on failing
        self.waiting = Waiting(number, since, reason)
        if now - since >= self._patience:
            raise CorruptTableError(
                f"step {number} in {self._folder!r} is not whole since {now - since:.0f} s: {reason} Carry this file "
                "again from the folder that er.publish writes, or remove it if it is not there any more. Step "
                f"{self.number} is still shown."
            )

    # ---------------------------------------------------------------- in the background

    def follow(self, every: float = 1.0) -> Self:
        """Call `refresh` again and again in the background, until `close`. Return this subscriber.

        Errors are logged, and the last one is in `error`. The step shown stays.

        Args:
            every: seconds between two calls.

        Raises:
            ArgumentError: `every` is no number above 0.
        """
        self._check_open()
        if not isinstance(every, int | float) or isinstance(every, bool) or not 0 < every <= threading.TIMEOUT_MAX:
            raise ArgumentError(f"`every` of follow must be seconds, more than 0: got {every!r}.")
        if self._thread is None or not self._thread.is_alive():  # as in a forked process
            self._thread = threading.Thread(target=self._follow, args=(every,), name="embedrock-follow", daemon=True)
            self._thread.start()
        return self

    def _follow(self, every: float) -> None:
        told = None
        while not self._ends.wait(every):
            try:
                self.refresh()
                self.error = told = None
            except ClosedTableError:
                return
            except Exception as error:
                self.error = error
                if type(error) is not told:  # once, and not each second
                    tell(f"{self._folder}: {error}", logging.ERROR)
                told = type(error)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedTableError(f"the subscriber of {self._folder!r} is closed. Make a new one: er.Subscriber(...).")

    def close(self) -> None:
        """Stop following, and close the files of steps that no block uses. A second call does nothing."""
        self._ends.set()
        with self._refreshing:
            self._is_closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            self._shown = None
        self._close_unused()

    def __repr__(self) -> str:
        return f"Subscriber({self._folder!r}: step {self.number}{', waiting' * (self.waiting is not None)})"


def _age_of(manifest: Manifest) -> tuple[str, int]:
    """Return the key by which manifests are ordered, the oldest first: a chain that began later is newer."""
    return manifest.published.began, manifest.commit


@contextlib.contextmanager
def _noted(number: int, waits: list[tuple[int, str]]) -> Iterator[None]:
    """Context manager that adds an error of a step's files to `waits`."""
    try:
        yield
    except NewerFormatError:
        raise
    except (EmbedrockError, OSError) as error:
        waits.append((number, str(error).replace(REMEDY, "").strip()))
