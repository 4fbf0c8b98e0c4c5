"""`Ngrams`: ids of hashed n-grams, the same in NumPy, PyTorch and TensorFlow."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, fields
from typing import Any

import numpy as np

from embedrock import kernels
from embedrock.batch.wrong_ids import in_array
from embedrock.errors import ArgumentError, IdError, IdTypeError, check_choice
from embedrock.system import forks

MIXES = {"sum": operator.add, "xor": operator.xor}
MOST_TOKENS, MOST_ORDER, MOST_HEADS = 2**31, 16, 1024
LIMIT = 2**63  # of mixes and ids
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


@dataclass(frozen=True)
class Ngrams:
    """A function from tokens to ids of the n-grams that end at each token: rows of a memory table of a language model.

    Head h, of n-grams of order n, gives token t of a sequence x the id

        offsets[h] + mix(x[t] * m[h][0], x[t-1] * m[h][1], ..., x[t-n+1] * m[h][n-1]) mod moduli[h]

    with the multipliers m. ``docs/ngrams.md`` defines it to the bit, and has the arguments of published tables.

    Args:
        rows: rows of the table; None: the sum of `moduli`; without them **open ids**, for a table with ``rows=None``.
            No two n-grams share an open id if ``vocabulary ** max(orders)`` is below 2**62 / ids_per_token.
        vocabulary: number of tokens, which lie in ``[0, vocabulary)``.
        orders: lengths of the n-grams.
        heads: ids for each order. N-grams that share a row of one head seldom share another. None: 2; 1 of open ids.
        boundary: token that ends a document. N-grams that end after it see `pad` in its place and before. None: none.
        pad: token that stands for those before the first one.
        seed: draws the multipliers. It is not kept.
        mix: "sum" or "xor".
        multipliers: ``(max(orders),)``, one for each lag, or ``(ids_per_token, max(orders))``; None: drawn.
        moduli: one for each head, whose rows lie one behind another; or one number: heads share all rows. None: primes.
        token_map: a token to hash for each token, ``(vocabulary,)``, such as one for all that differ in case only.

    Raises:
        ArgumentError: an invalid value, or multipliers with which a mix may need more than 63 bits.

    Example:
        >>> import embedrock as er
        >>> grams = er.Ngrams(rows=1000, vocabulary=256, orders=(2, 3), heads=1)
        >>> grams.rows, grams.moduli, grams.ids_per_token
        (1000, (499, 491), 2)
        >>> grams.ids([9], history=[7, 8]).tolist() == grams.ids([7, 8, 9])[2:].tolist()
        True
    """

    rows: int | None
    vocabulary: int
    _: KW_ONLY
    orders: Sequence[int] = (2, 3)
    heads: int | None = None
    boundary: int | None = None
    pad: int = 0
    seed: InitVar[int] = 0
    mix: str = "sum"
    multipliers: Any = None
    moduli: Any = None
    token_map: Any = None

    def __post_init__(self, seed: int) -> None:
        check_choice("mix", self.mix, MIXES)
        self._check("vocabulary", 1, MOST_TOKENS)
        self._check("orders", 1, MOST_ORDER, (np.size(self.orders) or 1,))
        is_open = self.rows is None and self.moduli is None
        self.__dict__["heads"] = (1 if is_open else 2) if self.heads is None else self.heads
        self._check("heads", 1, MOST_HEADS // len(self.orders))
        self._check("pad", 0, self.vocabulary - 1)
        if self.boundary is not None:
            self._check("boundary", 0, self.vocabulary - 1)
        if self.token_map is not None:
            self._check("token_map", 0, MOST_TOKENS - 1, (self.vocabulary,))
        if not is_open:
            self._share_rows()
        if self.multipliers is None:
            self.__dict__["multipliers"] = self._drawn(_numbers("seed", seed, 0, 2**64 - 1))
        self._check("multipliers", 0, LIMIT - 1, (lags := max(self.orders),), (self.ids_per_token, lags))
        self._check_mixes()

    def _check(self, name: str, least: int, most: int, *shapes: tuple[int, ...]) -> None:
        self.__dict__[name] = _numbers(name, getattr(self, name), least, most, *shapes)

    def _share_rows(self) -> None:
        heads = self.ids_per_token
        if self.moduli is None:
            self._check("rows", 8 * heads * heads, LIMIT - 1)  # so that there are as many primes
            primes = filter(_is_prime, range((self.rows or 0) // heads, 1, -1))
            self.__dict__["moduli"] = tuple(itertools.islice(primes, heads))
        self._check("moduli", 1, LIMIT - 1, (), (heads,))
        moduli: Any = self.moduli
        used = sum(moduli) if isinstance(moduli, tuple) else moduli
        self.__dict__["rows"] = used if self.rows is None else self.rows
        self._check("rows", used, LIMIT - 1)

    def _drawn(self, seed: int) -> tuple[int, ...]:
        lags, tokens, step = max(self.orders), self._tokens, 1
        if self.moduli is None:  # the lowest bits of open ids are the number of the head
            step = 1 << (self.ids_per_token - 1).bit_length()
            if self.mix == "sum" and step * tokens**lags < LIMIT:  # the other bits: a number whose digits are tokens
                return tuple(step * tokens**lag for lag in range(lags))
        half = LIMIT // (4 * step * tokens * lags)
        return tuple(step * (2 * (_word(seed, lag) % half) + 1) for lag in range(lags))

    def _check_mixes(self) -> None:
        given = self.multipliers
        is_used = np.arange(max(self.orders)) < np.repeat(self.orders, self.heads or 1)[:, None]
        rows = tuple(map(tuple, np.where(is_used, np.array(given, np.int64), 0).tolist()))
        products = [[number * (self._tokens - 1) for number in row] for row in rows]
        most = max(sum(row) if self.mix == "sum" else 2 ** max(row).bit_length() - 1 for row in products)
        if most + (0 if self.moduli else self.ids_per_token) >= LIMIT:
            raise ArgumentError(
                f"`multipliers` of Ngrams must keep the {self.mix} of products below 2**63, with tokens up to "
                f"{self._tokens - 1}: got {given}. Pass smaller ones, or None for some that fit."
            )
        self.__dict__["multipliers"] = rows

    @property
    def ids_per_token(self) -> int:
        """Number of ids of a token: those of the first order, then those of the next."""
        return len(self.orders) * (self.heads or 1)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First id of each head: 0 if heads share their rows. The number of the head for open ids."""
        if isinstance(self.moduli, tuple):
            return (0, *itertools.accumulate(self.moduli[:-1]))
        return tuple(range(self.ids_per_token)) if self.moduli is None else (0,) * self.ids_per_token

    @property
    def _heads(self) -> list[tuple[tuple[int, ...], int, int]]:
        """Multipliers, modulus and offset of each head. The modulus of open ids is above every mix."""
        moduli = self.moduli if isinstance(self.moduli, tuple) else (self.moduli or LIMIT - 1,) * self.ids_per_token
        return list(zip(self.multipliers, moduli, self.offsets, strict=True))

    @forks.cached_property
    def _of_heads(self) -> list[np.ndarray]:
        """Multipliers, moduli and offsets of all heads, int64 (heads, lags) and (heads,) twice."""
        return [np.array(each, np.int64) for each in zip(*self._heads, strict=True)]

    @property
    def _tokens(self) -> int:
        return self.vocabulary if self.token_map is None else max(self.token_map) + 1

    @property
    def _pad(self) -> int:
        return self.pad if self.token_map is None else self.token_map[self.pad]

    @forks.cached_property
    def _map(self) -> np.ndarray:
        return np.array(self.token_map, np.int64)

    def describe(self) -> dict[str, Any]:
        """Return it as plain data, the arguments of an equal `Ngrams`."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __repr__(self) -> str:
        shown = {name: repr(value) for name, value in self.describe().items()}
        if self.token_map is not None:
            shown["token_map"] = f"<{self.vocabulary} tokens to {self._tokens}>"
        return f"Ngrams({', '.join(map('='.join, shown.items()))})"

    def ids(self, tokens: Any, history: Any = None) -> Any:
        """Return the ids of the n-grams that end at each token, int64 ``(..., positions, ids_per_token)``.

        Tensors of PyTorch and TensorFlow give tensors on their device, also in graphs. Nobody waits for them to check
        them. A token outside the vocabulary, or with one among those before it that n-grams have, **gets ids of -1**.
        Layers with a number of rows refuse them. A table of open ids takes -1 as an id like others.

        Args:
            tokens: integers ``(..., positions)``: an array, a list or a tensor.
            history: tokens before them, ``(..., k)``, of which the last ``max(orders) - 1`` count. So a part of a
                sequence gets the ids that it has in the whole.

        Raises:
            IdTypeError: no integers, or no axis of positions.
            IdError: a token of an array or list lies outside the vocabulary.
            ArgumentError: an array `history` has other sequences than `tokens`.

        Example:
            >>> grams = Ngrams(None, vocabulary=10)  # open ids: tokens are digits, and the lowest bit is the order's
            >>> (grams.ids([1, 2, 3]) // 2).tolist()
            [[1, 1], [12, 12], [23, 123]]
        """
        torch: Any = sys.modules.get("torch")  # whoever has a tensor has imported its library
        tf: Any = sys.modules.get("tensorflow")
        if isinstance(tokens, getattr(torch, "Tensor", ())):
            as_tensor = functools.partial(torch.as_tensor, device=tokens.device)
            return self._of_tensors(torch, tokens, history, as_tensor, torch.Tensor.long, torch.take)
        if isinstance(tokens, getattr(tf, "Tensor", ())):
            as_int64 = functools.partial(tf.cast, dtype=tf.int64)
            return self._of_tensors(tf, tokens, history, tf.convert_to_tensor, as_int64, tf.gather)
        return self._of_arrays(tokens, history)

    def _of_arrays(self, given: Any, history: Any) -> np.ndarray:
        tokens = self._checked("tokens", given)
        before = tokens[..., :0] if history is None else self._checked("history", history)
        if before.shape[:-1] != tokens.shape[:-1]:
            raise ArgumentError(
                f"`history` of Ngrams.ids must have the shape of `tokens`, {tokens.shape}, up to the last axis: got "
                f"shape {before.shape}."
            )
        past = np.full((*tokens.shape[:-1], max(self.orders) - 1), self.pad)
        seen = np.concatenate([past, before, tokens], -1)[..., before.shape[-1] :].astype(np.int64, order="C")
        mapped = seen if self.token_map is None else self._map[seen]
        boundary = -1 if self.boundary is None else self.boundary
        ids = np.empty((tokens.size, self.ids_per_token), np.int64)
        arguments = tokens.shape[-1], boundary, self._pad, *self._of_heads, self.mix == "sum", ids
        kernels.cpu.launch(kernels.cpu.ngrams.ngram_ids, seen.reshape(-1), mapped.reshape(-1), *arguments)
        return ids.reshape(*tokens.shape, self.ids_per_token)

    def _checked(self, name: str, given: Any) -> np.ndarray:
        array = _array(given)
        if array.size:  # an empty list has no integers to infer a type from
            _check_integers(name, array)
            if int(array.min()) < 0 or int(array.max()) >= self.vocabulary:
                place = int(np.argmax((array < 0) | (array > self.vocabulary - 1)))
                raise IdError(
                    f"`{name}` of Ngrams.ids must lie in [0, {self.vocabulary}): got {array.reshape(-1)[place]} "
                    f"{in_array(array.shape, name)(place)}. `vocabulary` counts all tokens, added ones too."
                )
        return array.astype(np.int64, copy=False)

    def _of_tensors(self, library: Any, tokens: Any, history: Any, *functions: Callable) -> Any:
        """Return ids by the operators that PyTorch and TensorFlow have in common, and three that differ."""
        as_tensor, as_int64, take = functions
        _check_integers("tokens", tokens)
        before = tokens[..., :0] if history is None else as_tensor(history)
        _check_integers("history", before)
        reach, where = max(self.orders) - 1, library.where
        before = before[..., -reach:] if reach else before[..., :0]
        skipped = library.shape(before)[-1] if before.shape[-1] is None else before.shape[-1]
        seen = library.concat([as_int64(before), as_int64(tokens)], -1)
        is_right = (seen >= 0) & (seen < self.vocabulary)
        seen, mapped = where(is_right, seen, -1), where(is_right, seen, 0)
        mapped = mapped if self.token_map is None else take(as_tensor(self._map), mapped)
        position, terms = library.cumsum(library.ones_like(seen), -1), [mapped]  # from 1
        is_inside = position > 0
        for lag in range(1, reach + 1):
            past = library.roll(seen, lag, -1)
            is_inside = is_inside & (position > lag) & (past != (-2 if self.boundary is None else self.boundary))
            is_right = is_right & ((position <= lag) | (past >= 0))
            terms.append(where(is_inside, library.roll(mapped, lag, -1), self._pad))
        mixes: dict[Any, Any] = {}  # heads with the same multipliers share them
        for row in self.multipliers:
            used = [term * number for term, number in zip(terms, row, strict=True) if number or term is mapped]
            mixes[row] = functools.reduce(MIXES[self.mix], used)
        ids = library.stack([mixes[row] % modulus + offset for row, modulus, offset in self._heads], -1)
        return where(is_right[..., None], ids, -1)[..., skipped:, :]


def _array(values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:  # lists of several lengths
        return np.asarray(None)


def _check_integers(name: str, tokens: Any) -> None:
    dtype = getattr(tokens.dtype, "name", str(tokens.dtype))
    if "int" not in dtype or not len(tokens.shape):
        raise IdTypeError(
            f"`{name}` of Ngrams.ids must be integers of shape (..., positions): got {dtype} of shape "
            f"{tuple(tokens.shape)}. Pass the numbers of a tokenizer, in sequences of one length. In a Keras model, a "
            "layer's `call` does it."
        )


def _numbers(name: str, values: Any, least: int, most: int, *shapes: tuple[int, ...]) -> Any:
    """Return whole numbers as an int, a tuple or a tuple of tuples; without `shapes`, one."""
    array, allowed = _array(values), shapes or ((),)
    is_shaped = array.shape in allowed and array.dtype.kind in "iu"
    if is_shaped and least <= array.min() <= array.max() <= most:
        numbers = array.tolist()
        return tuple(map(tuple, numbers)) if array.ndim > 1 else tuple(numbers) if array.ndim else numbers
    kinds = " or ".join(f"numbers of shape {shape}" if shape else "a number" for shape in allowed)
    got = f"{values!r:.80}" if is_shaped or not array.ndim else f"shape {array.shape}"
    raise ArgumentError(f"`{name}` of Ngrams must be {kinds}, whole and from {least} to {most}: got {got}.")


def _is_prime(number: int) -> bool:
    """Return whether a number is prime, by the test of Miller and Rabin. These bases are exact below 3 * 10**23."""
    if number <= _PRIMES[-1]:
        return number in _PRIMES
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    powers = ([pow(base, (number - 1) >> k, number) for k in range(1, twos + 1)] for base in _PRIMES)
    return number % 2 == 1 and all(row[-1] == 1 or number - 1 in row for row in powers)


def _word(seed: int, index: int) -> int:
    """Return a word of the generator SplitMix64 (Steele, Lea and Flood, 2014), below 2**64."""
    word = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)
