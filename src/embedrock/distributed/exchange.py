"""`Exchange`: lookups and gradients between ranks that share tables. All ranks succeed, or all fail."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from embedrock.batch.gradients import RowGradients
from embedrock.distributed import stages
from embedrock.distributed.messages import WORD, Letter, Mail, MessageReader, as_sent, length, pack_all
from embedrock.distributed.owners import Shard, SharedPlan
from embedrock.distributed.stages import GradientBlock, RowSource
from embedrock.distributed.transport import UnevenRanks
from embedrock.errors import OtherRankError

REFUSED = "refused "
HEAD = 4  # words: the mark of the operation, and one of these states
FITS, REFUSES, DIFFERS = 0, 1, 2  # of a message: present; refused; of an unexpected size

Result = TypeVar("Result")


# One rank's view of a table that ranks share: `embedrock.torch.training.sharing.SharedTable`.
ExchangeMember = Any
Brought = Mapping[int, tuple[ExchangeMember, Sequence[GradientBlock]]]  # by key: the gradients of a backward


class ExchangeVerdict(NamedTuple):
    """A table's gradients after an exchange, as all ranks know them.

    Attributes:
        grads: gradients of this rank's rows.
        square_norm: square norm over all rows on all ranks, in float64.
    """

    grads: RowGradients
    square_norm: float


class Operation(NamedTuple):
    """The operation that an exchange does.

    Attributes:
        said: description, which may differ between ranks: layers have the name of their place in a model.
        mark: identifier of the operation, the same on all ranks.
    """

    said: str
    mark: str


class MessageSizes(NamedTuple):
    """Message sizes in words, by rank, where both ends know them; a refusal then has the same size.

    Attributes:
        come: size of the message from each rank; None: unknown.
        go: size of the message to each rank.
    """

    come: Sequence[int] | None
    go: Sequence[int]


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

    @staticmethod
    def of(
        number: int,
        members: Sequence[ExchangeMember],
        plans: Sequence[SharedPlan],
        messages: Sequence[np.ndarray],
        gradients: MessageSizes | None = None,
    ) -> IdRequest:
        """Read the messages of all ranks. A rank sends itself nothing."""
        rank = members[0].placement.rank
        asked = [stages.asked(one, len(members)) if len(one) else [] for one in messages]
        asked[rank] = [plan.ids[plan.split.places[rank]] for plan in plans]
        return IdRequest(number, members, plans, asked, gradients)


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
        self._count, self._lock = 0, threading.RLock()

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
        act = _looking_up(members, trains)
        self._announce("look", act, keys=[member.key for member in members], trains=trains)
        with self._lock:
            messages = self._swap(act, lambda: stages.ask([plan.ids for plan in plans], [plan.split for plan in plans]))
            return self._answer(act, IdRequest.of(self._count, members, plans, messages), None)

    def answer(self, ask: IdRequest, error: Exception | None = None) -> list[np.ndarray]:
        """Return the rows of a request that was sent ahead, as `rows` does. With an error, refuse it on all ranks."""
        what = _looking_up(ask.members)
        with self._lock:
            return self._answer(Operation(what.said, f"{what.mark} asked ahead {ask.number}"), ask, error)

    def _answer(self, what: Operation, ask: IdRequest, error: Exception | None) -> list[np.ndarray]:
        sources, own = [RowSource(member.table, member.wire) for member in ask.members], self.transport.rank
        splits = [plan.split for plan in ask.plans]
        come = [
            stages.served_words(counts, sources) for counts in zip(*(split.counts for split in splits), strict=True)
        ]
        go = [stages.served_words([len(ids) for ids in one], sources) for one in ask.asked]
        come[own] = go[own] = 0  # rows of this rank need no message
        found = list[np.ndarray]()

        def serve() -> list[Letter]:
            if error is not None:
                raise error
            found[:] = stages.rows_here(ask.asked[own], own, splits, sources)
            return [[] if to == own else stages.serve(one, sources) for to, one in enumerate(ask.asked)]

        served = self._swap(what, serve, MessageSizes(come, go))
        self._expected = ask.gradients if self.expects else None
        stages.receive({sender: one for sender, one in enumerate(served) if sender != own}, splits, sources, found)
        return found

    def refuse(self, members: Sequence[ExchangeMember], error: Exception, trains: bool = True) -> NoReturn:
        """Refuse a lookup on all ranks because of an error, and raise that: see `rows`."""
        act = _looking_up(members, trains)
        self._announce("look", act, keys=[member.key for member in members], trains=trains)

        def make() -> list[Letter]:
            raise error

        with self._lock:
            self._swap(act, make)
        raise error

    # ---------------------------------------------------------------- gradients

    def share(
        self, brought: Brought, find: Callable[[int], ExchangeMember | None]
    ) -> list[tuple[ExchangeMember, ExchangeVerdict]]:
        """Send gradients to the owners of their rows; return the summed gradients of every table that any rank sent.

        Args:
            brought: gradients by key of the table.
            find: finds a table by its key.
        """
        waits = {str(key): member.waits for key, (member, _) in brought.items()}
        self._announce("share", _act("gradients"), waits=waits)
        with self._lock:
            known, self._expected = self._expected, None
            own, ranks, blocks = self.transport.rank, self.transport.ranks, list[_Sent]()

            def letters() -> list[Letter]:
                blocks[:] = _split_up(brought, own)
                return [[] if to == own else _letter(blocks, to) for to in range(ranks)]

            messages = self._swap(_act("gradients"), letters, known)
            tables: _Tables = {}
            for sender, message in enumerate(messages):
                if sender != own:
                    _read(message, find, sender, ranks, tables)
                    continue
                for key, member, parts in blocks:
                    _, by_rank = tables.setdefault(key, (member, [[] for _ in range(ranks)]))
                    by_rank[own].append(parts[own])
            tables = dict(sorted(tables.items()))  # equally on all ranks
            folded: list[tuple[ExchangeMember, RowGradients]] = []

            def facts() -> np.ndarray:
                for key, (member, blocks) in tables.items():
                    if member is None:
                        own_ones = ", ".join(f"{one.label} [{key:x}]" for key, (one, _) in brought.items())
                        raise OtherRankError(
                            f"another rank brings gradients of a table [{key:x}] that this one does not have; its own "
                            f"are {own_ones}"
                        )
                    folded.append((member, member.fold(blocks)))
                return np.array([[grads.square_norm, member.table.steps] for member, grads in folded], np.float64)

            theirs = self._gather(_act("gradients, sums"), facts, (len(tables), 2))
        verdicts = []
        for place, (member, grads) in enumerate(folded):
            _check_steps(member, theirs[:, place, 1])
            verdicts.append((member, ExchangeVerdict(grads, member.placement.total(theirs[:, place, 0]))))
        return verdicts

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
        made: list[np.ndarray] = []
        self._announce("tell", _act(what), what=what)

        def letters() -> list[Letter]:
            made.append(make())
            return [[*made] for _ in range(self.transport.ranks)]

        with self._lock:
            messages = self._swap(_act(what), letters)
        found = [message.copy().view(made[0].dtype) for message in messages]
        found[self.transport.rank] = made[0]
        return found

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

    def _announce(self, do: str, act: Operation, **more: Any) -> None:
        self.uneven.announce({"do": do, "said": f"is at {act.said}", "mark": f"{do} {act.mark}", **more})

    def _swap(
        self, what: Operation, make: Callable[[], Sequence[Letter]], known: MessageSizes | None = None
    ) -> list[np.ndarray]:
        """Send each rank its message; return the messages from all ranks, int32 (words,).

        Args:
            what: the operation.
            make: returns the messages.
            known: sizes that all ranks expect. If a rank's messages differ, it reports that, and all ranks repeat the
                exchange.
        """
        self._count += 1
        self.transport.at = f"{what.said} (exchange {self._count})"
        behind, self._behind = self._behind, None
        letters, error = _tried(make) if behind is None else (None, behind)
        if known is not None:
            fits = letters is None or [length(letter) for letter in letters] == list(known.go)
            found = self._carry(what, letters if fits else None, FITS if fits else DIFFERS, error, known)
            if found is not None:
                return found
            self.expects = False
        found = self._carry(what, letters, FITS, error)
        assert found is not None
        return found

    def _carry(
        self,
        what: Operation,
        letters: Sequence[Letter] | None,
        state: int,
        error: Exception | None,
        known: MessageSizes | None = None,
    ) -> list[np.ndarray] | None:
        """Exchange messages once, and raise what a rank refuses; return None if a rank's sizes are unexpected."""
        sizes, own = known or MessageSizes(None, [0] * self.transport.ranks), self.transport.rank
        mark = zlib.crc32(f"{self._count} {what.mark}".encode())
        head = np.array([mark, state if error is None else REFUSES], np.int64)

        def pack(sent: Sequence[Letter] | None) -> Mail:
            each = [[np.zeros(words, WORD)] for words in sizes.go] if sent is None else sent
            return pack_all([[] if to == own else [head, *letter] for to, letter in enumerate(each)], room)

        room = self.transport.room
        try:
            ours, failed = _tried(lambda: pack(letters))
            if ours is None:  # no memory for the message, but for a refusal
                error, head[1] = failed, REFUSES
                ours = pack(None)
            theirs = self.transport.swap(ours, None if sizes.come is None else [HEAD + words for words in sizes.come])
        except MemoryError:
            self.transport.leave()  # otherwise the others would wait until their timeout
            raise
        heads = [one[:HEAD].view(np.int64).tolist() for rank, one in enumerate(theirs) if rank != own]
        if error is not None or any(found != mark or told == REFUSES for found, told in heads):
            self._tell(what, error)
        if state == DIFFERS or any(told == DIFFERS for _, told in heads):
            return None
        return [message[HEAD:] for message in theirs]

    def _gather(self, what: Operation, make: Callable[[], np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """Return the array of each rank: float64 (ranks, *shape)."""
        facts, error = _tried(make)
        ours = np.zeros(math.prod(shape) + 1)
        if facts is not None:
            ours[:-1] = facts.reshape(-1)
        ours[-1] = error is not None
        theirs = self.transport.gather(ours)
        if np.logical_or.reduce(theirs[:, -1]):
            self._tell(what, error)
        return theirs[:, :-1].reshape(-1, *shape)

    def _tell(self, what: Operation, error: Exception | None) -> NoReturn:
        """Collect the state of all ranks, and raise the error of a rank. This rank's own error takes precedence."""
        said = f"is at {what.said} (exchange {self._count})" if error is None else f"{REFUSED}{what.said}: {error}"
        states = self._say(said)
        raise _error_of(states) if error is None else error

    def _say(self, text: str) -> list[str]:
        words = np.frombuffer(text.encode().ljust(-(-len(text.encode()) // 4) * 4), np.uint8)
        letters = [[] if to == self.transport.rank else [words] for to in range(self.transport.ranks)]
        said = [one.tobytes().decode().rstrip() for one in self.transport.swap(pack_all(letters))]
        said[self.transport.rank] = text
        return said


def _act(said: str) -> Operation:
    return Operation(said, said)


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


def _looking_up(members: Sequence[ExchangeMember], trains: bool = True) -> Operation:
    labels, keys = ", ".join(f"{member.label} [{member.key:x}]" for member in members), [one.key for one in members]
    return (
        Operation(f"a lookup in {labels}", str(keys))
        if trains
        else Operation(f"a lookup for no gradient in {labels}", f"~{keys}")
    )


_Sent = tuple[int, ExchangeMember, list[GradientBlock]]  # a block of a table with a key, in parts by rank
# By key: a table, None if this rank does not know it, and its blocks by rank.
_Tables = dict[int, tuple[ExchangeMember | None, list[list[GradientBlock]]]]


def _split_up(brought: Brought, own: int) -> list[_Sent]:
    found = list[_Sent]()
    for key, (member, blocks) in brought.items():
        for block in blocks:
            parts = stages.bring(block, member.placement)
            parts[own] = parts[own].as_received(member.wire)
            found.append((key, member, parts))
    return found


def _letter(blocks: Sequence[_Sent], rank: int) -> Letter:
    """Return the message to a rank: the number of its blocks; key, rows and words of each; the blocks."""
    head, letter = [len(blocks)], list[np.ndarray]()
    for key, member, parts in blocks:
        ids, values = parts[rank].ids, as_sent(parts[rank].values, member.wire)
        head += [key, len(ids), length([values])]
        letter += [ids, values]
    return [np.array(head, np.int64), *letter]


def _read(
    message: np.ndarray, find: Callable[[int], ExchangeMember | None], sender: int, ranks: int, tables: _Tables
) -> None:
    """Add the blocks in a message to those of their tables."""
    reader = MessageReader(message)
    heads = reader.ints(3 * int(reader.ints(1)[0])).reshape(-1, 3).tolist()
    for key, count, words in heads:
        ids, values = reader.ints(count), reader.part(words)
        member, blocks = tables.setdefault(key, (find(key), [[] for _ in range(ranks)]))
        if member is not None:
            blocks[sender].append(GradientBlock(ids, values.sent(count, member.table.dim, member.wire)))


def _check_steps(member: ExchangeMember, steps: np.ndarray) -> None:
    holder = member.placement.holder if isinstance(member.placement, Shard) else None
    if holder is None and len(set(steps.tolist())) > 1:  # a rank without rows makes no steps, and counts from its start
        raise OtherRankError(
            f"{member.label} must have made the same steps on all ranks: got {steps.astype(int).tolist()}, by rank. A "
            "step was refused on some of them, or not all call step(). Load the last checkpoint on all ranks."
        )
