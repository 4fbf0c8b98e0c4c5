"""`er.Ngrams`: ids of n-grams, those of published tables, and of any part of a sequence."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import operator
import pickle
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import embedrock as er
from embedrock.batch import ngrams
from slow import examples

# ---------------------------------------------------------------- published tables
#
# Each is the published formula, written anew in whole numbers of Python, and compared with numbers that the published
# checkpoints have.


def primes_from(first: int, count: int) -> list[int]:
    sieve = np.ones(20_000, bool)  # of `first` and the numbers after it
    for factor in range(2, int((first + len(sieve)) ** 0.5) + 1):
        sieve[max(-first % factor, factor * factor - first) :: factor] = False
    return [first + int(k) for k in np.flatnonzero(sieve)[:count]]


DEEPSEEK_MULTIPLIERS = {  # of the tables of DeepSeek-V4.1-Flash, as those who read its checkpoint wrote them down
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}
DEEPSEEK_ROWS = {1: 384_006_168, 14: 384_016_682}
TOKENS, FOLDED, PAD = 129280, 99092, 2


def deepseek(layer: int, token_map: np.ndarray) -> er.Ngrams:
    """Return the value for a layer, by deepseek-ai/Engram, engram_demo_v1.py: multipliers drawn, primes in turn."""
    drawn = np.random.default_rng(10007 * layer).integers(0, (2**63 - 1) // FOLDED // 2, 4)
    primes = primes_from(16_000_000, 48)
    return er.Ngrams(
        rows=DEEPSEEK_ROWS[layer],
        vocabulary=TOKENS,
        orders=(2, 3, 4),
        heads=8,
        pad=PAD,
        mix="xor",
        multipliers=drawn * 2 + 1,
        moduli=primes[:24] if layer == 1 else primes[24:],
        token_map=token_map,
    )


@pytest.mark.parametrize("layer", DEEPSEEK_ROWS)
def test_tables_of_deepseek(layer: int):
    rng = np.random.default_rng(0)
    token_map = np.append(np.arange(FOLDED), rng.integers(0, FOLDED, TOKENS - FOLDED))
    grams = deepseek(layer, token_map)
    assert grams.multipliers[-1] == tuple(DEEPSEEK_MULTIPLIERS[layer])
    assert sum(grams.moduli) == grams.rows == DEEPSEEK_ROWS[layer]
    tokens = rng.integers(0, TOKENS, 9).tolist()
    for position, ids in enumerate(grams.ids(tokens).tolist()):
        expected, offset = [], 0
        for head in range(24):
            mixed = 0
            for lag in range(head // 8 + 2):
                token = tokens[position - lag] if lag <= position else PAD
                mixed ^= int(token_map[token]) * DEEPSEEK_MULTIPLIERS[layer][lag]
            expected.append(offset + mixed % grams.moduli[head])
            offset += grams.moduli[head]
        assert ids == expected


def test_the_table_of_qwen():
    """By vllm/models/qwen4_exp/nvidia/ngram_embedding.py, and the buffers of Qwen3.8-Flash-Next."""
    sizes, eos = primes_from(20_000_000, 16), 248044
    multipliers = [23703573157769, 20109073645365, 8052911324071]
    grams = er.Ngrams(
        320_001_536, 248320, heads=8, boundary=eos, pad=eos, mix="xor", multipliers=multipliers, moduli=sizes
    )
    assert (grams.offsets[-1], sum(sizes)) == (300_001_275, 320_001_446)
    tokens = [eos, 5, 6, eos, eos, 248319, 7, 8, eos, 9]
    position_in_document = [0, 0, 1, 2, 0, 0, 1, 2, 3, 0]  # a document has its end, and begins after the last one's
    for position, ids in enumerate(grams.ids(tokens).tolist()):
        at = [tokens[position - lag] if lag <= position_in_document[position] else eos for lag in range(3)]
        two = at[0] * multipliers[0] ^ at[1] * multipliers[1]
        three = two ^ at[2] * multipliers[2]
        remainders = [two % size for size in sizes[:8]] + [three % size for size in sizes[8:]]
        assert ids == [sum(sizes[:head]) + remainder for head, remainder in enumerate(remainders)]


def test_the_table_of_nanochat():
    """By nanochat/engram.py of karpathy/nanochat#854, with the salts of its port, KellerJordan/modded-nanogpt#366."""
    primes, rows = (1_000_003, 998_244_353, 911_382_323), 299_999_977
    salts = [1 + order * 97 + slot * 7919 for order in range(2) for slot in range(2)]
    multipliers = [
        [primes[0] + salt * 2_654_435_761, primes[1] + salt * 40_503, primes[2] + salt * 40_503] for salt in salts
    ]
    grams = er.Ngrams(None, 32768, heads=2, multipliers=multipliers, moduli=rows)
    assert (grams.rows, grams.offsets) == (rows, (0, 0, 0, 0))  # all slots share the rows
    tokens = [32767, 1, 32767, 32766, 5]
    for position, ids in enumerate(grams.ids(tokens).tolist()):
        x = [tokens[position - lag] if lag <= position else 0 for lag in range(3)]
        for head, (id_, salt) in enumerate(zip(ids, salts, strict=True)):
            mixed = x[0] * (1_000_003 + salt * 2_654_435_761) + x[1] * (998_244_353 + salt * 40_503)
            assert id_ == (mixed + (x[2] * (911_382_323 + salt * 40_503) if head > 1 else 0)) % rows


def test_the_tables_of_longcat():
    """A polynomial in the size of the vocabulary: arXiv 2601.21204. Its tables are apart, ours begin at the offsets."""
    size, eos = 131072, 2
    rows = [78 * size + 2 * table + 1 for table in range(12)]
    grams = er.Ngrams(
        None, size, orders=(2, 3, 4), heads=4, boundary=eos, moduli=rows,
        multipliers=[[pow(size, lag, row) for lag in range(4)] for row in rows],
    )  # fmt: skip
    tokens = [131071, 17, 9000, eos, 131071, 131070, 131069, 131068]
    history = [[0, 0, 0], [131071, 0, 0], [17, 131071, 0], [9000, 17, 131071], [0, 0, 0], [131071, 0, 0],
               [131070, 131071, 0], [131069, 131070, 131071]]  # fmt: skip
    for position, ids in enumerate(grams.ids(tokens).tolist()):
        for table, row in enumerate(rows):
            before = history[position][: table // 4 + 1]
            number = tokens[position] + sum(token * size ** (lag + 1) for lag, token in enumerate(before))
            assert ids[table] - sum(rows[:table]) == number % row


# ---------------------------------------------------------------- one's own


def test_what_docs_say_to_the_bit():
    grams = er.Ngrams(rows=300_000_000, vocabulary=32768)
    assert grams.multipliers[-1] == (41542191940025, 19974161405187, 17069632919063)
    assert grams.moduli == (74999959, 74999933, 74999917, 74999893)
    assert grams.ids([1, 2, 3]).tolist() == [
        [14649761, 104051016, 187913285, 276206706],
        [51623911, 87350901, 184336674, 292315351],
        [13598102, 145650719, 207569511, 265695831],
    ]
    assert (grams.rows, grams.ids_per_token, grams.heads) == (300_000_000, 4, 2)


def test_splitmix():
    """The first words of the generator's own program, of seed 1234567."""
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [ngrams._word(1234567, index) for index in range(3)] == words


@pytest.mark.parametrize("first", [0, 10**6, 2**31 - 500])
def test_primes(first: int):
    found = [number for number in range(first, first + 1000) if ngrams._is_prime(number)]
    assert found == [n for n in range(max(first, 2), first + 1000) if (n % np.arange(2, int(n**0.5) + 1)).all()]


def test_numbers_that_look_like_primes():
    strong = [2047, 1373653, 25326001, 3215031751, 3825123056546413051, 3474749660383]  # for the first bases
    assert not any(map(ngrams._is_prime, strong))
    assert all(map(ngrams._is_prime, [2**31 - 1, 2**61 - 1, 2**63 - 25]))


def test_every_number_of_heads_has_its_primes():
    primes = np.array([number for number in range(8 * ngrams.MOST_HEADS + 1) if ngrams._is_prime(number)])
    for heads in range(1, ngrams.MOST_HEADS + 1):
        assert (primes <= 8 * heads).sum() >= heads  # of the fewest rows that are not refused
    grams = er.Ngrams(8 * 31**2, 256, orders=(1,), heads=31)
    assert len(set(grams.moduli)) == 31
    assert 0 < 8 * 31**2 - sum(grams.moduli) < 31 * 100


@pytest.mark.parametrize(("tokens", "orders"), [(300, (2,)), (40, (1, 3)), (17, (1, 2, 4))])
def test_no_two_ngrams_share_an_open_id(tokens: int, orders: tuple[int, ...]):
    grams = er.Ngrams(None, tokens, orders=orders)
    for head, order in enumerate(orders):
        every = np.array(list(itertools.product(range(tokens), repeat=order)))
        ids = grams.ids(every)[:, -1, head]
        assert len(np.unique(ids)) == tokens**order
        assert (ids % 2 ** (len(orders) - 1).bit_length() == head).all()


def test_long_ngrams_of_open_ids():
    """Their digits do not fit: multipliers are drawn."""
    for mix in ("sum", "xor"):
        grams = er.Ngrams(None, 2**31, orders=(2, 3), heads=2, mix=mix, seed=5)
        every = np.array(list(itertools.product([0, 1, 2**30, 2**31 - 2, 2**31 - 1], repeat=3)))
        ids = grams.ids(every)[:, -1]
        assert ids.min() >= 0
        assert (ids % 4 == np.arange(4)).all()
        assert [len(np.unique(ids[:, head])) for head in range(4)] == [25, 25, 125, 125]
        assert grams != er.Ngrams(None, 2**31, orders=(2, 3), heads=2, mix=mix, seed=6)


@pytest.mark.parametrize("mix", ["sum", "xor"])
def test_rows_are_used_evenly(mix: str):
    grams = er.Ngrams(1000, 64, mix=mix)
    ids = grams.ids(np.array(list(itertools.product(range(64), repeat=3))))[:, -1]
    for head, (first, modulus) in enumerate(zip(grams.offsets, grams.moduli, strict=True)):
        ngrams_of = ids[:, head] if head > 1 else np.unique(ids[:, :2], axis=0)[:, head]
        counts = np.bincount(ngrams_of - first, minlength=modulus)
        assert len(counts) == modulus
        squares = ((counts - counts.mean()) ** 2 / counts.mean()).sum()  # of draws by chance: modulus, give or take
        assert squares < modulus + 5 * (2 * modulus) ** 0.5


# ---------------------------------------------------------------- any cut of any sequence


def by_hand(grams: er.Ngrams, tokens: list[int]) -> list[list[int]]:
    """Return the ids that the definition gives, in whole numbers of Python."""
    ids = []
    for position in range(len(tokens)):
        window = [tokens[position]]
        for lag in range(1, max(grams.orders)):
            before = tokens[: max(position - lag + 1, 0)][-1:]
            ended = grams.boundary is not None and grams.boundary in tokens[max(position - lag, 0) : position]
            window.append(grams.pad if ended or not before else before[0])
        if grams.token_map is not None:
            window = [grams.token_map[token] for token in window]
        mix = operator.add if grams.mix == "sum" else operator.xor
        row = []
        for head, numbers in enumerate(grams.multipliers):
            order = grams.orders[head // (grams.heads or 1)]
            mixed = functools.reduce(mix, map(operator.mul, window[:order], numbers[:order]))
            shared = isinstance(grams.moduli, int)
            modulus = grams.moduli if shared else grams.moduli[head] if grams.moduli else 2**63
            first = 0 if shared else sum(grams.moduli[:head]) if grams.moduli else head
            row.append(first + mixed % modulus)
        ids.append(row)
    return ids


values = st.builds(
    er.Ngrams,
    st.sampled_from([None, 1000, 10**6]),
    st.just(9),
    orders=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    heads=st.sampled_from([None, 1, 2]),
    boundary=st.sampled_from([None, 0, 3]),
    pad=st.sampled_from([0, 3, 8]),
    seed=st.integers(0, 2**64 - 1),
    mix=st.sampled_from(["sum", "xor"]),
    token_map=st.sampled_from([None, [0, 0, 1, 2, 2, 3, 40, 4, 5]]),
)


@settings(max_examples=examples(300))
@given(values, st.lists(st.integers(0, 8), max_size=12), st.data())
def test_any_cut_of_a_sequence(grams: er.Ngrams, tokens: list[int], data: st.DataObject):
    whole = grams.ids([tokens, tokens[::-1]])
    assert whole.shape == (2, len(tokens), grams.ids_per_token)
    assert whole.tolist() == [by_hand(grams, tokens), by_hand(grams, tokens[::-1])]
    cut = data.draw(st.integers(0, len(tokens)))
    first = data.draw(st.integers(0, max(cut - max(grams.orders) + 1, 0)))  # older history does not count
    part = grams.ids(tokens[cut:], tokens[first:cut])
    assert part.tolist() == whole[0, cut:].tolist()


def test_token_by_token():
    grams = er.Ngrams(None, 50, orders=(2, 4), boundary=3)
    tokens = np.random.default_rng(0).integers(0, 50, (3, 40), np.uint8)
    tokens[:, ::7] = 3
    steps = [grams.ids(tokens[:, k : k + 1], tokens[:, max(k - 3, 0) : k]) for k in range(40)]
    assert np.array_equal(np.concatenate(steps, 1), grams.ids(tokens))


# ---------------------------------------------------------------- a frozen value

MAPPED = er.Ngrams(1000, 5, orders=[2], boundary=1, token_map=np.array([0, 0, 1, 2, 2]))


@pytest.mark.parametrize("grams", [er.Ngrams(None, 50), er.Ngrams(10**6, 50, heads=3, mix="xor", seed=4), MAPPED,
                                   er.Ngrams(None, 50, moduli=97, multipliers=[1, 2, 3])])  # fmt: skip
def test_a_value(grams: er.Ngrams):
    data = json.loads(json.dumps(grams.describe()))
    for other in (pickle.loads(pickle.dumps(grams)), copy.deepcopy(grams), er.Ngrams(**data)):
        assert other == grams
        assert hash(other) == hash(grams)
        assert np.array_equal(other.ids([1, 2, 3]), grams.ids([1, 2, 3]))
    if grams.token_map is None:
        assert eval(repr(grams), {"Ngrams": er.Ngrams}) == grams
    with pytest.raises(AttributeError):
        grams.pad = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_long_map_is_not_shown():
    assert repr(MAPPED).endswith("token_map=<5 tokens to 3>)")


def test_a_table_of_open_ids_grows_with_the_text():
    grams = er.Ngrams(None, 256, orders=(2, 3))
    table = er.Table(None, 4, rule=er.SGD(lr=1.0), admission=er.Admission(2))
    for text in (b"the cat", b"the dog", b"a cat"):
        ids = grams.ids(np.frombuffer(text, np.uint8))
        table.update(ids, np.ones((*ids.shape, 4), np.float32))
    pairs = (id_ // 2 for id_ in table.export()[0].tolist() if id_ % 2 == 0)  # the lowest bit is the order's
    seen = {bytes([pair // 256, pair % 256]) for pair in pairs}
    assert seen == {b"\0t", b"th", b"he", b"e ", b" c", b"ca", b"at"}  # came twice


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary": 0}, r"`vocabulary` of Ngrams must be a number, whole and from 1 to 2147483648: got 0\."),
        ({"vocabulary": 2.5}, r"`vocabulary` of Ngrams .*: got 2\.5"),
        ({"vocabulary": True}, r"`vocabulary` of Ngrams .*: got True"),
        ({"rows": 127}, r"`rows` of Ngrams must be a number, whole and from 128 to .*: got 127"),
        ({"rows": 10**30}, r"`rows` of Ngrams must be .*: got 1000000"),
        ({"orders": ()}, r"`orders` of Ngrams must be numbers of shape \(1,\), .* from 1 to 16: got shape \(0,\)"),
        ({"orders": 3}, r"`orders` of Ngrams must be numbers of shape \(1,\), .*: got 3"),
        ({"orders": (2, 17)}, r"`orders` of Ngrams must be .* from 1 to 16: got \(2, 17\)"),
        ({"heads": 0}, r"`heads` of Ngrams must be a number, whole and from 1 to 512: got 0"),
        ({"pad": 50}, r"`pad` of Ngrams must be a number, whole and from 0 to 49: got 50"),
        ({"boundary": -1}, r"`boundary` of Ngrams must be a number, whole and from 0 to 49: got -1"),
        ({"seed": 2**64}, r"`seed` of Ngrams must be .* from 0 to 18446744073709551615: got 18446744073709551616"),
        ({"mix": "XOR"}, r"`mix` must be one of sum, xor: got 'XOR'\. Did you mean 'xor'\?"),
        ({"multipliers": [1, 2]}, r"`multipliers` of Ngrams must be numbers of shape \(3,\) or numbers of shape "
                                  r"\(4, 3\), whole and from 0 to .*: got shape \(2,\)"),
        ({"multipliers": [[1, 2], [1, 2, 3]]}, r"`multipliers` of Ngrams must be .*: got \[\[1, 2\], \[1, 2, 3\]\]"),
        ({"multipliers": [1, 2, -3]}, r"`multipliers` of Ngrams must be .*: got \[1, 2, -3\]"),
        ({"multipliers": [1, 2, 2**62]}, r"`multipliers` of Ngrams must keep the sum of products below 2\*\*63, with "
                                         r"tokens up to 49: got \(1, 2, 4611686018427387904\)\. Pass smaller ones"),
        ({"multipliers": [1, 2, 2**60], "mix": "xor"}, r"must keep the xor of products below 2\*\*63"),
        ({"moduli": [3, 5, 7]}, r"`moduli` of Ngrams must be a number or numbers of shape \(4,\), .* shape \(3,\)"),
        ({"moduli": [500] * 4}, r"`rows` of Ngrams must be a number, whole and from 2000 to .*: got 1000"),
        ({"token_map": [0] * 49}, r"`token_map` of Ngrams must be numbers of shape \(50,\), .*: got shape \(49,\)"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str):
    with pytest.raises(er.ArgumentError, match=message):
        er.Ngrams(**{"rows": 1000, "vocabulary": 50, **arguments})


@pytest.mark.parametrize("mix", ["sum", "xor"])
def test_the_largest_mix(mix: str):
    """The largest multiplier, with the largest token; one more is refused."""
    for rows, most in ((None, 2**63 - 2), (1000, 2**63 - 1)):
        if mix == "xor" and rows is None:
            most = 2**62 - 1  # a whole number of bits
        largest = most // 4
        grams = er.Ngrams(rows, 5, orders=(1,), heads=1, mix=mix, multipliers=[largest])
        expected = 4 * largest if rows is None else 4 * largest % grams.moduli[0]
        assert grams.ids([4]).tolist() == [[expected]]
        with pytest.raises(er.ArgumentError, match="`multipliers` of Ngrams"):
            er.Ngrams(rows, 5, orders=(1,), heads=1, mix=mix, multipliers=[2**61])


GRAMS = er.Ngrams(None, 50)
KIND = r"must be integers of shape \(\.\.\., positions\)"


@pytest.mark.parametrize(
    ("tokens", "history", "error", "message"),
    [
        ([[1, 2], [50, 3]], None, er.IdError, r"`tokens` of Ngrams\.ids must lie in \[0, 50\): got 50 at \[1, 0\] of "
                                              r"tokens of shape \(2, 2\)\. `vocabulary` counts all tokens"),
        ([3, -1], None, er.IdError, r"`tokens` of Ngrams.ids must lie in \[0, 50\): got -1 at \[1\]"),
        (np.array([2**64 - 1], np.uint64), None, er.IdError, "got 18446744073709551615 at"),
        ([3], [4, 77], er.IdError, r"`history` of Ngrams\.ids must lie in \[0, 50\): got 77 at \[1\] of history"),
        ([1.0], None, er.IdTypeError, rf"`tokens` of Ngrams\.ids {KIND}: got float64 of shape \(1,\)\. Pass the"),
        ([[1], [2, 3]], None, er.IdTypeError, rf"`tokens` of Ngrams\.ids {KIND}: got object of shape \(\)"),
        (3, None, er.IdTypeError, rf"{KIND}: got int64 of shape \(\)"),
        (["a"], None, er.IdTypeError, rf"{KIND}: got str"),
        ([3], ["a"], er.IdTypeError, rf"`history` of Ngrams\.ids {KIND}: got str"),
        ([[1], [2]], [1], er.ArgumentError, r"`history` of Ngrams\.ids must have the shape of `tokens`, \(2, 1\), up "
                                            r"to the last axis: got shape \(1,\)"),
    ],
)  # fmt: skip
def test_tokens_that_cannot_be(tokens: Any, history: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=re.compile(message)):
        GRAMS.ids(tokens, history)
