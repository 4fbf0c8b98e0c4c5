"""`Exchange`: lookups and gradients between ranks that share tables. All ranks succeed, or all fail."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from embedrock.batch.gradients import DefaultRowGradient, RowGradients, counted_in_units, largest_of, sum_of_units
from embedrock.distributed import stages
from embedrock.distributed.messages import WORD, Letter, Mail, MessageReader, as_sent, length, pack_all
from embedrock.distributed.owners import Shard, SharedPlan
from embedrock.distributed.stages import GradientBlock, RowSource
from embedrock.distributed.transport import Op, UnevenRanks
from embedrock.errors import OtherRankError
from embedrock.system.buffers import buffers

REFUSED = "refused "
HEAD = 4  # words: the mark of the operation, and one of these states
FITS, REFUSES, DIFFERS = 0, 1, 2  # of a message: present; refused; of an unexpected size

Result = TypeVar("Result")


# One rank's view of a table that ranks share: `embedrock.torch.training.sharing.SharedTable`.
ExchangeMember = Any
Brought = Mapping[int, tuple[ExchangeMember, Sequence[GradientBlock]]]  # by key: the gradients of a backward


class Operation(NamedTuple):
    """The operation that an exchange does.

    Attributes:
        mark: identifier of the operation, the same on all ranks.
        said: returns a description, which may differ between ranks: layers have the name of their place in a model.
    """

    mark: str
    said: Callable[[], str]


class MessageSizes(NamedTuple):
    """Message sizes in words, by rank, where both ends know them; a refusal then has the same size.

    Attributes:
        come: size of the message from each rank; None: unknown.
        go: size of the message to each rank.
    """

    come: list[int] | None
    go: list[int]


class IdRequest(NamedTuple):
    """Ids that all ranks sent to the owners, whose rows are to come back.

    Attributes:
        number: number of the request, the same on all ranks.
        members: the tables.
        plans: this rank's batch of each table.
        asked: by rank, the ids that it requests of each table.
        gradients: sizes of the messages that will return the gradients; None: unknown.
    """

    number: int
    members: Sequence[ExchangeMember]
    plans: Sequence[SharedPlan]
    asked: Sequence[Sequence[np.ndarray]]
    gradients: MessageSizes | None = None


class Exchange:
    """An exchange of rows and gradients between ranks that share tables.

    All ranks make the same calls, in the same order. Each message carries a mark of its operation, so ranks that are
    out of step detect it. If one rank refuses an operation, all refuse: each raises an error, and no rank has changed
    anything.

    Args:
        transport: carries the messages: `embedrock.torch.training.ranks.Ranks`.

    Attributes:
        uneven: announces operations before they run.
        expects: whether sizes of gradients are known because an earlier message announced them.
    """

    def __init__(self, transport: Any) -> None:
        self.transport, self.uneven = transport, UnevenRanks(self._say)
        self.expects, self._expected = True, None
        self._behind: OtherRankError | None = None
        self._lock, self._count, self._current = threading.RLock(), 0, _act("no message")
        transport.at = self._at

    # ---------------------------------------------------------------- lookups

    def rows(
        self, members: Sequence[ExchangeMember], plans: Sequence[SharedPlan], trains: bool = True
    ) -> list[np.ndarray]:
        """Return rows of sharded tables from their owners: float32 (unique, dim) of each table.

        Args:
            members: the tables.
            plans: the batch of each.
            trains: whether gradients follow. All ranks must pass the same value, else all raise.
        """
        act = self._look(members, trains)
        with self._lock:
            messages = self._swap(act, lambda: stages.ask([one.ids for one in plans], [one.split for one in plans]))
            asked = stages.asked_by_rank(messages, plans, self.transport.rank)
            return self._answer(act, IdRequest(self._count, members, plans, asked), None)

    def answer(self, ask: IdRequest, error: Exception | None = None) -> list[np.ndarray]:
        """Return the rows of a request that was sent ahead, as `rows` does. With an error, refuse it on all ranks."""
        mark, said = _looking_up(ask.members, trains=True)
        with self._lock:
            return self._answer(Operation(f"{mark} asked ahead {ask.number}", said), ask, error)

    def _answer(self, what: Operation, ask: IdRequest, error: Exception | None) -> list[np.ndarray]:
        own, splits = self.transport.rank, [plan.split for plan in ask.plans]
        sources, found = [RowSource.of(member.table, member.wire) for member in ask.members], list[np.ndarray]()
        come, go = [0] * len(ask.asked), [0] * len(ask.asked)
        for source, split, *asked in zip(sources, splits, *ask.asked, strict=True):
            for rank, count in enumerate(split.counts):
                if rank != own:  # rows of this rank need no message
                    come[rank] += source.words(count)
                    go[rank] += source.words(len(asked[rank]))

        def serve() -> list[Letter]:
            if error is not None:
                raise error
            for source, split in zip(sources, splits, strict=True):
                found.append(buffers.empty((split.bounds[-1], source.dim), np.float32))
            here = [rows[split.places[own]] for rows, split in zip(found, splits, strict=True)]
            letters, plans = stages.serve(ask.asked, sources, own, here)
            for member, plan, *asked in zip(ask.members, plans, *ask.asked, strict=True):
                member.served = plan, asked
            return letters

        served = self._swap(what, serve, MessageSizes(come, go))
        self._expected = ask.gradients if self.expects else None
        stages.receive({sender: one for sender, one in enumerate(served) if sender != own}, splits, sources, found)
        return found

    def refuse(self, members: Sequence[ExchangeMember], error: Exception, trains: bool = True) -> NoReturn:
        """Refuse a lookup on all ranks because of an error, and raise that: see `rows`."""
        act = self._look(members, trains)
        with self._lock:
            self._swap(act, lambda: _raise(error))
        raise error

    def _look(self, members: Sequence[ExchangeMember], trains: bool) -> Operation:
        act = _looking_up(members, trains)
        self.uneven.announce(lambda: _told("look", act, keys=[member.key for member in members], trains=trains))
        return act

    # ---------------------------------------------------------------- gradients

    def share(
        self, brought: Brought, find: Callable[[int], ExchangeMember | None]
    ) -> list[tuple[ExchangeMember, RowGradients, float]]:
        """Send gradients to the owners of their rows, which sum them.

        Return every table that any rank sent, the gradients of this rank's rows, and their square norm on all ranks.

        Args:
            brought: gradients by key of the table.
            find: finds a table by its key.
        """
        act = _act("gradients")
        self.uneven.announce(lambda: _told("share", act, waits=_waits_of(brought)))
        with self._lock:
            tables, folded = self._scattered(act, brought, find), list[tuple[ExchangeMember, RowGradients]]()

            def facts() -> list[float]:
                for key, (member, blocks) in tables.items():
                    if member is None:
                        own_ones = ", ".join(f"{one.label} [{key:x}]" for key, (one, _) in brought.items())
                        raise OtherRankError(
                            f"another rank brings gradients of a table [{key:x}] that this one does not have; its own "
                            f"are {own_ones}"
                        )
                    folded.append((member, member.fold(blocks)))
                squares = [grads.square_norm for _, grads in folded]
                away.extend(member.turned_away(grads) for member, grads in folded)
                largest = (0.0 if one is None else largest_of(one[1]) for one in away)
                return [*squares, *(member.table.steps for member, _ in folded), *largest]

            away, count = list[tuple[np.ndarray, np.ndarray] | None](), len(tables)
            theirs = self._gather(_act("gradients, sums"), facts, 3 * count)
            of_default = self._of_default(away, theirs[:, 2 * count :].max(axis=0).tolist())
        found = []
        for place, (member, grads) in enumerate(folded):
            _check_steps(member, theirs[:, count + place].tolist())
            summed = replace(grads, of_default=of_default[place]) if place in of_default else grads
            found.append((member, summed, member.placement.total(theirs[:, place])))
        return found

    def _of_default(
        self, away: Sequence[tuple[np.ndarray, np.ndarray] | None], largest: Sequence[float]
    ) -> dict[int, DefaultRowGradient]:
        """Return the gradients of default rows that ranks train together, by the index of the table.

        Args:
            away: ids and gradients of rows that this rank turns away, by table; None: there is no such default row.
            largest: largest size of these gradients on all ranks, by table; below 0: no rank turns rows away.
        """
        own = {place: one for place, one in enumerate(away) if one is not None}
        due = {place: values for place, (_, values) in own.items() if 0 <= largest[place] < math.inf}
        found = {place: DefaultRowGradient(ids, None) for place, (ids, _) in own.items()}
        if due:
            units = [counted_in_units(values, largest[place]) for place, values in due.items()]
            ends = np.cumsum([len(each) for each in units])
            act = _act("gradients, default rows")
            sums = self._gather(act, lambda: np.concatenate(units).tolist(), int(ends[-1])).sum(axis=0)
            for place, part in zip(due, np.split(sums, ends[:-1]), strict=True):
                found[place] = found[place]._replace(values=sum_of_units(part, largest[place]))
        return found

    def _scattered(self, act: Operation, brought: Brought, find: Callable[[int], ExchangeMember | None]) -> _Tables:
        """Send gradients to the owners of their rows; return those that all ranks sent to this one."""
        known, self._expected = self._expected, None
        own, ranks, blocks = self.transport.rank, self.transport.ranks, list[_Parts]()

        def letters() -> list[Letter]:
            for key, (member, of_table) in brought.items():
                blocks.extend((key, member, stages.bring(block, member.placement, member.wire)) for block in of_table)
            return [[] if to == own else _letter(blocks, to) for to in range(ranks)]

        messages, tables = self._swap(act, letters, known), _Tables()
        for sender in range(ranks):
            came = ((key, one, parts[own]) for key, one, parts in blocks)
            for key, member, block in came if sender == own else _read(messages[sender], find):
                _, by_rank = tables.setdefault(key, (member, [[] for _ in range(ranks)]))
                by_rank[sender].append(block)
        return _Tables(sorted(tables.items()))  # equally on all ranks

    # ---------------------------------------------------------------- all else

    def fall_behind(self, error: Exception) -> None:
        """Record that this rank skipped a step because of an error: the next exchange reports it to all ranks."""
        self._behind = OtherRankError(
            f"the last step was not made on this rank, by {type(error).__name__}: {error}, and the others may have "
            "made it. Load the last checkpoint on all ranks"
        )

    def tell(self, what: str, make: Callable[[], np.ndarray]) -> list[np.ndarray]:
        """Return each rank's array: one dimension, the same 8-byte dtype on all ranks.

        An error on one rank is an error on all.
        """
        made, act = list[np.ndarray](), _act(what)
        self.uneven.announce(lambda: _told("tell", act, what=what))

        def letters() -> list[Letter]:
            made.append(make())
            return [[*made] for _ in range(self.transport.ranks)]

        with self._lock:
            found = [message.copy().view(np.int64) for message in self._swap(act, letters)]
        found[self.transport.rank] = made[0]
        return [one.view(made[0].dtype) for one in found]

    def do(self, what: str, act: Callable[[], Result]) -> Result:
        """Call a function on all ranks. An error on one rank is raised on all."""
        done = list[Result]()

        def made() -> np.ndarray:
            done.append(act())
            return np.empty(0, np.int64)

        self.tell(what, made)
        return done[0]

    def numbers(self, what: str, number: float) -> np.ndarray:
        """Return each rank's number: float64 (ranks,)."""
        return np.concatenate(self.tell(what, lambda: np.array([number])))

    # ---------------------------------------------------------------- messages

    def _at(self) -> str:
        """Return the current activity of this rank, in words."""
        return f"{self._current.said()} (exchange {self._count})" if self._count else "the first message"

    def _swap(
        self, what: Operation, make: Callable[[], Sequence[Letter]], known: MessageSizes | None = None
    ) -> list[np.ndarray]:
        """Send each other rank its message; return the messages from all ranks, int32 (words,).

        Args:
            what: the operation.
            make: returns the messages.
            known: sizes that all ranks expect. If a rank's messages differ, it reports that, and all ranks repeat the
                exchange.
        """
        self._count += 1
        self._current = what
        behind, self._behind = self._behind, None
        letters, error = _tried(make) if behind is None else (None, behind)
        if known is not None:
            fits = letters is None or [*map(length, letters)] == known.go
            found = self._carry(what, letters if fits else None, FITS if fits else DIFFERS, error, known)
            if found is not None:
                return found
            self.expects = False
        found = self._carry(what, letters, FITS, error, MessageSizes(None, [0] * self.transport.ranks))
        assert found is not None
        return found

    def _carry(
        self,
        what: Operation,
        letters: Sequence[Letter] | None,
        state: int,
        error: Exception | None,
        sizes: MessageSizes,
    ) -> list[np.ndarray] | None:
        """Exchange messages once, and raise what a rank refuses; return None if a rank's sizes are unexpected."""
        mark = zlib.crc32(f"{self._count} {what.mark}".encode())
        head = np.array([mark, state if error is None else REFUSES], np.int64)
        try:
            ours, failed = _tried(lambda: self._packed(head, letters, sizes))
            if ours is None:  # no memory for the message, but for a refusal
                error, head[1] = failed, REFUSES
                ours = self._packed(head, None, sizes)
            theirs = self.transport.swap(ours, None if sizes.come is None else [HEAD + words for words in sizes.come])
        except MemoryError:
            self.transport.leave()  # otherwise the others would wait until their timeout
            raise
        heads = {(mark, state), *[tuple(one[:HEAD].view(np.int64).tolist()) for one in theirs if len(one)]}
        if error is not None or heads - {(mark, FITS), (mark, DIFFERS)}:
            self._tell(what, error)
        return None if (mark, DIFFERS) in heads else [message[HEAD:] for message in theirs]

    def _packed(self, head: np.ndarray, letters: Sequence[Letter] | None, sizes: MessageSizes) -> Mail:
        own, sent = self.transport.rank, [[np.zeros(words, WORD)] for words in sizes.go] if letters is None else letters
        return pack_all([[] if to == own else [head, *one] for to, one in enumerate(sent)], self.transport.room)

    def _gather(self, what: Operation, make: Callable[[], list[float]], count: int) -> np.ndarray:
        """Return the numbers of each rank: float64 (ranks, count)."""
        facts, error = _tried(make)
        theirs = self.transport.gather(np.array([error is not None, *(facts or [0.0] * count)], np.float64))
        if np.logical_or.reduce(theirs[:, 0]):
            self._tell(what, error)
        return theirs[:, 1:]

    def _tell(self, what: Operation, error: Exception | None) -> NoReturn:
        """Collect the state of all ranks, and raise the error of a rank. This rank's own error takes precedence."""
        said = (
            f"{REFUSED}{what.said()}: {error}" if error is not None else f"is at {what.said()} (exchange {self._count})"
        )
        states = self._say(said)
        raise _error_of(states) if error is None else error

    def _say(self, text: str) -> list[str]:
        own = self.transport.rank
        words = np.frombuffer(text.encode().ljust(-(-len(text.encode()) // 4) * 4), np.uint8)
        mail = pack_all([[] if to == own else [words] for to in range(self.transport.ranks)])
        said = [one.tobytes().decode().rstrip() for one in self.transport.swap(mail)]
        said[own] = text
        return said


def _act(said: str) -> Operation:
    return Operation(said, lambda: said)


def _told(do: str, act: Operation, **more: Any) -> Op:
    return {"do": do, "said": f"is at {act.said()}", "mark": f"{do} {act.mark}", **more}


def _raise(error: Exception) -> NoReturn:
    raise error


def _tried(make: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # the other ranks wait for a report of any error
        return None, error


def _error_of(said: Sequence[str]) -> OtherRankError:
    each = [f"rank {rank} {one.rstrip('.')}" for rank, one in enumerate(said)]
    if refusals := [text for text, one in zip(each, said, strict=True) if one.startswith(REFUSED)]:
        return OtherRankError(f"{'; '.join(refusals)}. So no other does it, and nothing has changed.")
    return OtherRankError(
        f"ranks that train together must do the same: got {'; '.join(each)}. Nothing has changed. All ranks must make "
        "the same tables, by the same seed= or torch.manual_seed, and look up and train the same ones in the same "
        "order, by empty ids if a batch has none. To evaluate on some ranks only, do so inside of ert.uneven."
    )


def _looking_up(members: Sequence[ExchangeMember], trains: bool) -> Operation:
    keys, what = [member.key for member in members], "a lookup" if trains else "a lookup for no gradient"

    def said() -> str:
        return f"{what} in {', '.join(f'{member.label} [{member.key:x}]' for member in members)}"

    return Operation(f"{keys}" if trains else f"~{keys}", said)


def _waits_of(brought: Brought) -> dict[str, float | None]:
    return {str(key): member.waits for key, (member, _) in brought.items()}


_Parts = tuple[int, ExchangeMember, list[GradientBlock]]  # a table's key, and a block in parts by rank
# By key: a table, None if this rank does not know it, and its blocks by rank.
_Tables = dict[int, tuple[ExchangeMember | None, list[list[GradientBlock]]]]


def _letter(blocks: Sequence[_Parts], rank: int) -> Letter:
    """Return the message to a rank: the number of its blocks; key, rows, words and time of each; the blocks."""
    head, letter = [len(blocks)], Letter()
    for key, member, parts in blocks:
        ids, values = parts[rank].ids, as_sent(parts[rank].values, member.wire)
        head += [key, len(ids), length([values]), parts[rank].time]
        letter += [ids, values]
    return [np.array(head, np.int64), *letter]


def _read(
    message: np.ndarray, find: Callable[[int], ExchangeMember | None]
) -> Iterator[tuple[int, ExchangeMember | None, GradientBlock]]:
    reader = MessageReader(message)
    heads = iter(reader.ints(4 * int(reader.ints(1)[0])).tolist())
    for key, count, words, time in zip(heads, heads, heads, heads, strict=True):
        ids, member, values = reader.ints(count), find(key), MessageReader(reader.words(words))
        dim, wire = (0, "float32") if member is None else (member.table.dim, member.wire)
        yield key, member, GradientBlock(ids, values.sent(count, dim, wire), None, time)


def _check_steps(member: ExchangeMember, steps: list[float]) -> None:
    holder = member.placement.holder if isinstance(member.placement, Shard) else None
    if holder is None and len(set(steps)) > 1:  # a rank without rows makes no steps, and counts from its start
        raise OtherRankError(
            f"{member.label} must have made the same steps on all ranks: got {[int(one) for one in steps]}, by rank. A "
            "step was refused on some of them, or not all call step(). Load the last checkpoint on all ranks."
        )
