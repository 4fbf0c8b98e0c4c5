"""``published``: rows of published tables, read in place by `er.FromSafetensors`, beside mappings of the same files.

The tables are made here, in the forms that people publish. Before each turn, their files leave the page cache. Each
turn has new random ids. Mappings copy the bytes of rows; ours decodes them, too.

Hits and the time to start are those of a sparse table of 51 GB, whose bytes cost no read of the disk. Its ids are those
of n-grams of the standard library's sources, 8 of order 2 and 8 of order 3 for each token. A memory cgroup limits the
page cache to what our cache may take. Hits are unique rows of 512 tokens, or pages without a major fault.
"""

from __future__ import annotations

import gc
import mmap
import random
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from operator import itemgetter, truediv
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import numpy as np

from benchmarks import cgroups
from benchmarks.benchmark import Benchmark, Option, Task
from benchmarks.disk import forget_pages, resident_bytes, scratch_folder
from benchmarks.options import DiskOptions
from benchmarks.processes import Child
from benchmarks.progress import say
from benchmarks.report import Report, format_line, medians
from benchmarks.targets import Target, beside, each, ratio
from embedrock.cli.terminal.arguments import count, size
from embedrock.cli.terminal.tables import Field, format_lines, format_number, format_whole
from embedrock.initializers.published import PublishedTable
from embedrock.io.safetensors import DTYPES, header_of
from embedrock.system import platform

NAME = "model.layers.2.memory"
FORMS: dict[str, dict[str, tuple[str, int]]] = {  # dtype and columns of each tensor of a shard
    "bf16": {"weight": ("BF16", 160)},
    "f8": {"weight": ("F8_E4M3", 160)},  # and one scale
    "f8-e8m0": {"weight": ("F8_E4M3", 256), "weight_scale_inv": ("F8_E8M0", 8)},
    "4-bit": {"weight": ("U32", 20), "scales": ("BF16", 5), "biases": ("BF16", 5)},
}
NUMBERS = {"F8_E4M3": (0, 120), "F8_E8M0": (112, 128), "BF16": (40, 60), "U32": (0, 256)}  # bytes, of no NaN
COUNTS, FEW, MANY, CALLS = (16, 512, 16_384), 16, 16_384, 50
TOKENS, TOKEN_S = 100, 0.005  # the second: a token's other work, a sleep
LARGE_BYTES, LARGE_SHARDS = 51_200_000_000, 48
HEADS, VOCABULARY, CHUNK = 8, 32_768, 512
MEMORY, SPARE_BYTES = 64 << 20, 36 << 20  # for hits; what such a process holds beside pages of files

Lines = list[dict[str, Any]]


class Opened(NamedTuple):
    """A table, by the names of `er.Table`: `lookup` of ids that ascend."""

    rows: int
    lookup: Callable[[np.ndarray], np.ndarray]


def write_table(folder: Path, form: str, nbytes: int, shards: int = 8, sparse: bool = False) -> None:
    """Write a table of about `nbytes`. All bytes of a sparse one are 0."""
    folder.mkdir()
    row_bytes = sum(np.dtype(DTYPES[dtype]).itemsize * columns for dtype, columns in FORMS[form].values())
    for shard in range(shards):
        parts, rows, draw = FORMS[form].items(), nbytes // row_bytes // shards, np.random.default_rng(shard)
        tensors = {f"{NAME}.shard_{shard}.{part}": (dtype, (rows, columns)) for part, (dtype, columns) in parts}
        if form == "f8" and shard == 0:
            tensors[f"{NAME}.weight_scale"] = ("BF16", (1, 1))
        with (folder / f"model-{shard:05}.safetensors").open("wb") as file:
            file.write(header_of(tensors))
            for dtype, shape in tensors.values():
                left = np.dtype(DTYPES[dtype]).itemsize * int(np.prod(shape))
                block = b"" if sparse else draw.integers(*NUMBERS[dtype], min(left, 1 << 22), np.uint8).tobytes()
                while left and block:
                    left -= file.write(block[:left])
                file.truncate(file.seek(left, 1))


def tokens_of_sources(most: int) -> np.ndarray:
    """Return tokens of the standard library's sources: its most frequent words, and the bytes of all others."""
    files, words = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")), list[bytes]()
    random.Random(0).shuffle(files)
    for file in files:
        if len(words) < most and "site-packages" not in file.parts:
            words += [b"\0", *re.findall(rb" ?\w+|\s+|[^\w\s]+", file.read_bytes())]
    frequent = {word: [256 + k] for k, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 256))}
    return np.array(list(chain.from_iterable(frequent.get(word, word) for word in words))[:most], np.int64)


def ngram_ids(tokens: np.ndarray, rows: int) -> np.ndarray:
    """Return the unique ids of the n-grams of orders 2 and 3 that end at each token but the first two."""
    own, multipliers = rows // (2 * HEADS), np.random.default_rng(0).integers(1 << 40, 1 << 46, 3) | 1
    one, two, three = (tokens[2 - lag : len(tokens) - lag] * multipliers[lag] for lag in range(3))
    mixes = [one ^ two] * HEADS + [one ^ two ^ three] * HEADS
    return np.unique([mix % (own - head) + own * head for head, mix in enumerate(mixes)])


def hits_of(stream: Path, rows: int, look: Callable[[np.ndarray], Any]) -> float:
    """Read rows by `look`, which returns all hits and misses so far; return the share of hits in the second half."""
    tokens, told = np.load(stream), [(0, 0)]
    for first in range(2, len(tokens), CHUNK):
        told.append(look(ngram_ids(tokens[first - 2 : first + CHUNK], rows)))
    hits, misses = np.subtract(told[-1], told[len(told) // 2])
    return float(hits / (hits + misses))


# ---------------------------------------------------------------- contenders, each in a process of its own


class Contender:
    """Reads rows of a table that is opened anew for each turn."""

    def opened(self, folder: Path) -> Opened:
        raise NotImplementedError

    def cold(self, folder: Path, many: int, seed: int) -> dict[str, float]:
        """Read random rows; return microseconds of a row."""
        table, draw = self.opened(folder), np.random.default_rng(seed)
        table.lookup(np.unique(draw.integers(0, table.rows, FEW)))  # opens files
        ids = np.unique(draw.integers(0, table.rows, many))
        cpu, start = time.process_time(), time.perf_counter()
        table.lookup(ids)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        del table
        gc.collect()  # pages that are mapped would stay in the page cache
        return {"us": seconds / len(ids) * 1e6, "cpu_us": cpu / len(ids) * 1e6}


class Mapped(Contender):
    """Threads that copy rows out of mappings, each those of a part of the ids. One thread: `np.memmap` as it is."""

    def __init__(self, threads: int) -> None:
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)

    def opened(self, folder: Path) -> Opened:
        table, parts = PublishedTable.find(str(folder), NAME), list[list[np.ndarray]]()
        for extents, _ in table.parts:
            if len(extents.shards) == len(table.weight.shards):  # else one scale, which is in RAM
                places = zip(extents.shards, np.diff(extents.firsts).tolist(), strict=True)
                parts.append([np.memmap(at.path, np.uint8, "r", at.start, (n, extents.nbytes)) for at, n in places])
        for mapped in chain.from_iterable(parts if self._threads > 1 else ()):
            cast("mmap.mmap", mapped.base).madvise(mmap.MADV_RANDOM)
        return Opened(table.rows, partial(self._read, parts, table.weight.firsts))

    def _read(self, parts: list[list[np.ndarray]], firsts: np.ndarray, ids: np.ndarray) -> np.ndarray:
        out = np.empty((len(ids), sum(shards[0].shape[1] for shards in parts)), np.uint8)

        def copy(piece: slice) -> None:
            own, column = ids[piece], 0
            bounds = np.searchsorted(own, firsts).tolist()
            for shards in parts:
                for k, (lo, hi) in enumerate(pairwise(bounds)):
                    if lo < hi:
                        rows = shards[k][own[lo:hi] - firsts[k]]
                        out[piece][lo:hi, column : column + rows.shape[1]] = rows
                column += shards[0].shape[1]

        step = max(FEW, -(-len(ids) // self._threads))
        list(self._pool.map(copy, [slice(at, at + step) for at in range(0, len(ids), step)]))
        return out


class Ours(Contender):
    """`er.Table` whose first values are those of `er.FromSafetensors`."""

    def __init__(self, memory: int | str) -> None:
        from embedrock import FromSafetensors, Table

        self._memory, self._base, self._make = memory, FromSafetensors, Table

    def opened(self, folder: Path) -> Any:
        base = self._base(str(folder), NAME, self._memory)
        return self._make(*base.shape, init=base, dtype=base.dtype)

    def start(self, folder: Path) -> float:
        """Open a table and read few rows; return the seconds."""
        start = time.perf_counter()
        table = self.opened(folder)
        table.lookup(np.linspace(0, table.rows - 1, FEW).astype(np.int64))
        return time.perf_counter() - start

    def warm(self, folder: Path, seed: int) -> dict[str, float]:
        """Look up rows that are in the cache; return microseconds of processors for a row."""
        table, times = self.opened(folder), list[float]()
        ids = np.random.default_rng(seed).integers(0, table.rows, MANY)
        for _ in range(CALLS):
            start = time.process_time()
            table.lookup(ids)
            times.append((time.process_time() - start) / MANY * 1e6)
        return {"warm_us": median(times)}

    def decode(self, folder: Path, seed: int) -> dict[str, float]:
        """Look up the rows of tokens; return the milliseconds that a token waits for them."""
        table, found = self.opened(folder), dict[str, float]()
        ahead, alone = np.random.default_rng((seed, TOKENS)).integers(0, table.rows, (2, TOKENS, FEW))  # as no other
        for name, tokens, depth in (("wait_ms", ahead, 1), ("without_prefetch_ms", alone, 0), ("in_ram_ms", alone, 0)):
            waits, start = list[float](), time.perf_counter()
            for ids in table.prefetch(tokens, depth):
                table.lookup(ids)
                waits.append((time.perf_counter() - start) * 1e3)
                time.sleep(TOKEN_S)
                start = time.perf_counter()
            found[name] = median(waits)
        return found

    def hits(self, folder: Path, stream: Path) -> dict[str, float]:
        """Return the share of rows that are in the cache, and its bytes."""
        table = self.opened(folder)

        def look(ids: np.ndarray) -> tuple[float, float]:
            table.lookup(ids)
            return table.stats()["base_hits"], table.stats()["base_misses"]

        return {"hits": hits_of(stream, table.rows, look), "ram_bytes": table.stats()["base_bytes_used"]}


class PageCache:
    """Maps one shard at a time: page tables of all would take more than the pages. No page is read ahead."""

    def hits(self, folder: Path, stream: Path) -> dict[str, float]:
        """Return the share of pages that are in RAM, and the bytes of all that are."""
        (shards, firsts, _, nbytes), told = PublishedTable.find(str(folder), NAME).weight, np.zeros(2)
        usage = partial(platform.resource.getrusage, platform.resource.RUSAGE_SELF)

        def look(ids: np.ndarray) -> np.ndarray:
            for shard, own in zip(shards, np.split(ids, np.searchsorted(ids, firsts[1:-1])), strict=True):
                places = shard.start + (own % firsts[1])[:, None] * nbytes + [0, nbytes - 1]
                pages, mapped = np.unique(places // mmap.PAGESIZE), np.memmap(shard.path, np.uint8, "r")
                cast("mmap.mmap", mapped.base).madvise(mmap.MADV_RANDOM)
                before = usage().ru_majflt
                mapped[pages * mmap.PAGESIZE].sum()
                told[:] += np.array([len(pages), 0]) + (usage().ru_majflt - before) * np.array([-1, 1])
            return told.copy()

        hits = hits_of(stream, int(firsts[-1]), look)
        return {"hits": hits, "ram_bytes": resident_bytes(sorted(folder.iterdir()))}


# ---------------------------------------------------------------- the benchmark

CONTENDERS: dict[str, tuple[Any, Any, Sequence[int]]] = {  # with the numbers of rows of a turn
    "ours": (Ours, 256 << 20, COUNTS),
    "ours, map": (Ours, "map", COUNTS),
    "32 threads": (Mapped, 32, COUNTS),
    "np.memmap": (Mapped, 1, COUNTS[1:2]),
}


def _line(name: str, turns: Lines) -> dict[str, Any]:
    return {"name": name, **medians(turns), **{f"least_{key}": min(turn[key] for turn in turns) for key in turns[0]}}


def cold(folder: Path, form: str, children: Mapping[str, Child], rounds: int) -> Lines:
    """Read rows of which no page is in RAM: an untimed turn of each contender, and then `rounds`."""
    files, lines = sorted(folder.iterdir()), Lines()
    seeds = iter(range(1 << 30))  # what one has read may stay in a cache below the system's
    for many in COUNTS:
        say(f"{form}: {many:,} cold rows")
        turns: dict[str, Lines] = {side: [] for side, (*_, counts) in CONTENDERS.items() if many in counts}
        for number in range(rounds + 1):
            for side, own in turns.items():
                forget_pages(files)
                resident = resident_bytes(files)
                found = children[side].call("cold", folder, many, next(seeds))
                own += [{**found, "resident_bytes": resident}] if number else []
        for side, own in turns.items():
            line = _line(f"{form}, {many:,} rows, {side}", own)
            lines.append({**line, "rows_per_s": 1e6 / line["us"], "best_rows_per_s": 1e6 / line["least_us"]})
    return lines


def warm(folder: Path, form: str, ours: Child, rounds: int) -> Lines:
    """Look up rows in the cache, and those of tokens that are decoded."""
    say(f"{form}: warm rows, and tokens")
    lines = [_line(f"{form}, {MANY:,} warm rows", [ours.call("warm", folder, seed) for seed in range(rounds)])]
    forget_pages(sorted(folder.iterdir()))
    return [*lines, _line(f"{form}, {FEW} rows a token", [ours.call("decode", folder, seed) for seed in range(rounds)])]


def large(folder: Path, tokens: int, options: DiskOptions) -> Lines:
    """Open a large table, and compare hits of its cache with those of the page cache."""
    say("start, and hits")
    stream, table, turns, found = folder / "tokens.npy", folder / "large", Lines(), dict[str, Any]()
    np.save(stream, tokens_of_sources(tokens))
    write_table(table, "f8", LARGE_BYTES, LARGE_SHARDS, sparse=True)
    for _ in range(options.rounds):
        with options.child(Ours, MEMORY) as child:
            turns.append({key: child.call("start", table) for key in ("first_in_a_process_s", "start_s")})
    with options.child(Ours, MEMORY) as child:
        found["hits, ours"] = child.call("hits", table, stream)
    forget_pages(sorted(table.iterdir()))
    if reason := cgroups.why_not():
        print(f"no hits of the page cache: no memory cgroup can be made ({reason})")
    else:
        with replace(options, limit=MEMORY + SPARE_BYTES).child(PageCache) as child:
            found["hits, page cache"] = child.call("hits", table, stream)
    return [_line("start", turns), *({"name": name, **told} for name, told in found.items())]


def _targets() -> list[Target]:
    tables = [f"{form}, {many:,} rows" for form in ("bf16", "f8-e8m0", "4-bit") for many in COUNTS]
    pairs = {name: (f"{name}, ours", f"{name}, 32 threads") for name in tables}
    rate, cpu = "{}: rows/s over those of 32 threads".format, "{}: CPU over that of 32 threads".format
    return [
        *(Target(rate(name), beside(*pair, "rows_per_s", truediv), 1.0) for name, pair in pairs.items()),
        *(ratio(cpu(name), *pair, "cpu_us", 1 / 3) for name, pair in pairs.items() if name.startswith("bf16")),
        Target("hits over those of the page cache", beside("hits, ours", "hits, page cache", "hits", truediv), 1.7),
        Target("{name}: CPU of a row", each(itemgetter("warm_us"), "warm_us"), 0.2, "us", at_most=True),
        Target("{name}: wait", each(itemgetter("wait_ms"), "wait_ms"), 0.1, "ms", at_most=True),
        Target("first rows of 51 GB", each(itemgetter("start_s"), "start_s"), 1.0, "s", at_most=True),
    ]


_COLD = (
    Field("", "name"),
    Field("rows/s", "rows_per_s", format_whole),
    Field("best", "best_rows_per_s", format_whole),
    Field("us CPU a row", "cpu_us", format_number),
    Field("least", "least_cpu_us", format_number),
    Field("bytes in RAM before", "resident_bytes", format_whole),
)


def measure(task: Task) -> Report:
    """Measure all rows, print them, and return the outcome."""
    options, nbytes, lines = task.options, task.arguments.size, Lines()
    with scratch_folder(options.folder, 5 * nbytes) as folder, ExitStack() as held:
        children = {side: held.enter_context(options.child(make, how)) for side, (make, how, _) in CONTENDERS.items()}
        for form in FORMS:
            write_table(folder / form, form, nbytes)
            lines += cold(folder / form, form, children, options.rounds)
            lines += warm(folder / form, form, children["ours"], options.rounds)
        lines += large(folder, task.arguments.tokens, options)
    report = Report(lines)
    print(format_lines(_COLD, [line for line in lines if "rows_per_s" in line]))
    print("\n".join(format_line(line) for line in lines if "rows_per_s" not in line))
    report.compare_with(_targets())
    return report


PUBLISHED = Benchmark(
    "published",
    "rows of a published table, read in place",
    arguments=("rounds", "threads", "timeout_s", "folder"),
    measure=measure,
    options=DiskOptions(rounds=5, limit=0),
    own=(
        Option("--size", "size", size, 1 << 30, "bytes of each published table"),
        Option("--tokens", "tokens", count, 200_000, "tokens whose n-grams are looked up for hits"),
    ),
)
