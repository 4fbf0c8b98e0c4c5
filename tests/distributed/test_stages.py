"""Who has which rows, and the stages of an exchange, between ranks that are functions here."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import embedrock as er
from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import make_plan
from embedrock.distributed import stages
from embedrock.distributed.messages import Letter, MessageReader, as_sent, pack_all
from embedrock.distributed.owners import Shard, Split, owners
from embedrock.distributed.stages import GradientBlock
from embedrock.distributed.transport import addressed, taken
from reference.codec import decode, encode_nearest

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=30).map(lambda ids: np.array(ids, np.int64))
RANKS = st.integers(1, 5)


def swapped(messages: list[list[Letter]]) -> list[list[np.ndarray]]:
    """Carry messages between ranks: to each what each has for it, by what all get of all."""
    everything = np.concatenate([addressed(parts) for parts in messages])
    return [taken(everything, rank, len(messages)) for rank in range(len(messages))]


@given(IDS, RANKS, RANKS)
def test_owners_are_ranges_of_hashes_so_those_of_other_numbers_of_ranks_are_neighbours(
    ids: np.ndarray, one: int, other: int
) -> None:
    first, second = owners(ids, one), owners(ids, other)
    assert ((first >= 0) & (first < one)).all()
    low, high = first * other // one, -(-(first + 1) * other // one)
    assert ((low <= second) & (second < high)).all()


@given(IDS, st.integers(1, 600), st.sampled_from([256, 1024, 4096]))
def test_a_rank_owns_whole_segments(ids: np.ndarray, ranks: int, segments: int) -> None:
    shards = [Shard(rank, ranks, segments=segments) for rank in range(ranks)]
    own = np.array([shard.own_segments for shard in shards])
    assert (own.sum(axis=0) == 1).all()
    of = owners(ids, segments)
    np.testing.assert_array_equal(shards[0].owners(ids), own.argmax(axis=0)[of])
    for shard in shards[:: max(1, ranks // 5)]:
        np.testing.assert_array_equal(shard.owns(ids), shard.own_segments[of])
        if shard.own_segments.any():
            assert shard.first_segment == np.flatnonzero(shard.own_segments)[0]
        assert shard.split(ids).counts[shard.rank] == shard.owns(ids).sum()


def test_owners_share_out_strided_ids_evenly() -> None:
    for stride in (1, 3, 1000, 2**20):
        counts = np.bincount(owners(np.arange(40_000) * stride, 4), minlength=4)
        assert counts.min() > 9_000, stride


@given(IDS, RANKS, st.booleans())
def test_the_parts_of_a_split_go_back_to_their_places(ids: np.ndarray, ranks: int, is_central: bool) -> None:
    shard = Shard(0, ranks, holder=ranks - 1 if is_central else None)
    split = shard.split(ids)
    parts = [ids[places] for places in split.places]
    assert len(parts) == ranks
    for rank, part in enumerate(parts):
        assert shard._replace(rank=rank).owns(part).all()
    back = np.zeros_like(ids)
    for places, part in zip(split.places, parts, strict=True):
        back[places] = part
    np.testing.assert_array_equal(back, ids)


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=4), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_lookups_through_owners_find_what_one_table_has(wanted: list[tuple[Any, Any]], dtype: str) -> None:
    ranks = len(wanted)
    tables = [er.Table(rows=None, dim=dim, dtype=dtype, seed=dim) for dim in (3, 2)]
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    splits = [[shard.split(ids) for ids in both] for shard, both in zip(shards, wanted, strict=True)]
    messages = swapped([stages.ask(both, its) for both, its in zip(wanted, splits, strict=True)])
    asked = [[stages.asked(message, 2) for message in of_rank] for of_rank in messages]
    for shard, of_rank in zip(shards, asked, strict=True):
        for both in of_rank:
            assert all(shard.owns(ids).all() for ids in both)
    sources = [stages.RowSource.of(table) for table in tables]
    served = [served_by(rank, asked[rank], its, sources) for rank, its in enumerate(splits)]
    carried = swapped([letters for letters, _ in served])
    for rank, (both, its, (_, found)) in enumerate(zip(wanted, splits, served, strict=True)):
        stages.receive({k: one for k, one in enumerate(carried[rank]) if k != rank}, its, sources, found)
        for ids, rows, table in zip(both, found, tables, strict=True):
            np.testing.assert_array_equal(rows, table.lookup(ids))


def served_by(
    rank: int, asked: list[list[np.ndarray]], splits: list[Split], sources: list[stages.RowSource]
) -> tuple[list[Letter], list[np.ndarray]]:
    """Return what a rank sends to each, with rows, and memory for what it asks for, with its own rows."""
    own = [np.empty((len(ids), source.dim), np.float32) for ids, source in zip(asked[rank], sources, strict=True)]
    letters, _ = stages.serve([*asked, [ids[:0] for ids in asked[0]]], sources, rank, own)  # one more asks for nothing
    packed = pack_all(letters)
    found = [np.empty((split.bounds[-1], one.dim), np.float32) for split, one in zip(splits, sources, strict=True)]
    for rows, split, here in zip(found, splits, own, strict=True):
        rows[split.places[rank]] = here
    return [[packed.flat[start:end]] for start, end in itertools.pairwise(packed.bounds[:-1])], found


@given(st.lists(IDS, min_size=1, max_size=4), st.integers(0, 2**32 - 1), RANKS)
def test_owners_fold_blocks_as_one_process_adds_them_one_after_the_other(
    batches: list[np.ndarray], seed: int, ranks: int
) -> None:
    draw = np.random.default_rng(seed)
    ids = [batch % 8 for batch in batches]  # which meet
    blocks = [_block(part, draw.normal(size=(len(part), 3)).astype(np.float32)) for part in ids]
    alone = RowGradients.sum(make_plan(blocks[0].ids), blocks[0].values)
    for block in blocks[1:]:
        alone = alone.merge(RowGradients.sum(make_plan(block.ids), block.values))
    rows = dict(zip(alone.plan.ids.tolist(), alone.values, strict=True))
    shard, seen = Shard(0, ranks), 0
    parts = [stages.bring(block, shard) for block in blocks]
    for rank in range(ranks):
        folded = stages.fold([part[rank] for part in parts])
        for row, values in zip(folded.plan.ids.tolist(), folded.values, strict=True):
            np.testing.assert_array_equal(values, rows[row])
        seen += len(folded.plan.ids)
    assert seen == len(rows)


def _block(ids: np.ndarray, values: np.ndarray) -> GradientBlock:
    summed = RowGradients.sum(make_plan(ids), values)
    return GradientBlock(summed.plan.ids, summed.values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_16_bits_travel_in_16_bits_and_come_as_they_were(dtype: str) -> None:
    table = er.Table(rows=9, dim=3, dtype=dtype, seed=1)
    rows = table.lookup(np.arange(9))
    message = pack_all([[as_sent(rows, dtype), np.array([7], np.int64)]]).flat
    assert message.nbytes == 56 + 8  # 9 x 3 x 2 bytes, filled up to words
    reader = MessageReader(message)
    np.testing.assert_array_equal(reader.sent(9, 3, dtype), rows)
    assert reader.ints(1).tolist() == [7]
    assert reader.is_at_end


def test_numbers_are_rounded_to_the_nearest_bfloat16() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000).astype(np.uint32)
    ties = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7F800001, 0, 1 << 31])
    numbers = np.concatenate([bits, ties.astype(np.uint32)]).view(np.float32).reshape(-1, 1)
    sent = MessageReader(pack_all([[as_sent(numbers, "bfloat16")]]).flat).sent(len(numbers), 1, "bfloat16")
    np.testing.assert_array_equal(sent, decode(encode_nearest(numbers, np.uint16)))
    np.testing.assert_array_equal(np.signbit(sent[~np.isnan(sent)]), np.signbit(numbers[~np.isnan(numbers)]))
