"""`GroupPair`: tables of a group and tables alone that are treated alike, and must stay the same, byte by byte."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.batch import pooling
from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import make_plan
from embedrock.batch.pooling import Bags
from embedrock.table import batches
from embedrock.table.stepping import StepRequest, step_all
from embedrock.table.table import rows_of
from on_system import on
from same_tables import RULES, check_same
from suites import FaultFS
from support import features as features_of
from support.bags import bags_of, pooled
from support.features import BatchFeature

MOST = 6  # members at a time
ROWS = 60
MODES = ("sum", "mean", "max")


class GroupPair:
    """A group, and for each of its members the same table alone.

    Args:
        seed: of all that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self.rng, self.draw = np.random.default_rng(seed), random.Random(seed)
        self.group, self.alone = self.new_group(), dict[str, er.Table]()
        self._made, self.layouts = 0, features_of.Layouts()  # of batches that recur
        # Few kinds of records, so that members share pools.
        self._kinds = [(self.draw.choice(RULES), self.draw.choice(("float32", "bfloat16", "float16"))) for _ in "ab"]
        self._kinds.append((self._kinds[0][0], "float32"))
        for _ in range(3):
            self.add()

    def new_group(self) -> er.Group:
        """Return a group without members."""
        return er.Group()

    # ---------------------------------------------------------------- members

    def add(self) -> None:
        """Make a member."""
        if len(self.alone) < MOST:
            (rule, dtype), name = self.draw.choice(self._kinds), f"t{self._made}"
            init = self.draw.choice((er.Normal(std=0.1), er.Uniform(-1, 1)))
            what: dict[str, Any] = {"rule": rule, "dtype": dtype, "init": init, "seed": self.draw.randrange(2**63)}
            what |= {"rows": self.draw.choice((ROWS, 2 * ROWS, None)), "dim": self.draw.choice((3, 3, 4))}
            what["on_nonfinite"] = self.draw.choice(("raise", "skip"))
            self.group.table(name, **what)
            self.alone[name] = er.Table(**what)
            self._made += 1

    def drop(self) -> None:
        if len(self.alone) > 2:
            name = self.one()
            self.group.drop(name)
            del self.alone[name]
            assert name not in self.group

    def rename(self) -> None:
        name, new = self.one(), f"r{self._made}"
        self._made += 1
        self.group.rename(name, new)
        self.alone = {new if each == name else each: table for each, table in self.alone.items()}

    def one(self) -> str:
        return self.draw.choice(sorted(self.alone))

    def some(self) -> list[str]:
        return [name for name in self.alone if self.draw.random() < 0.7] or [self.one()]

    def both(self, name: str) -> tuple[er.Table, er.Table]:
        return self.group[name], self.alone[name]

    def ids(self, most: int = 20) -> np.ndarray:
        return self.rng.integers(0, ROWS, self.draw.randint(0, most))

    def grads(self, ids: np.ndarray, name: str) -> np.ndarray:
        return self.rng.standard_normal((*ids.shape, self.alone[name].dim)).astype(np.float32)

    # ---------------------------------------------------------------- all members at once

    def update(self) -> None:
        ids = {name: self.ids() for name in self.some()}
        grads = {name: self.grads(own, name) for name, own in ids.items()}
        lr = self.draw.choice((None, 0.03))
        self.group.update(ids, grads, lr)
        for name, own in ids.items():
            self.alone[name].update(own, grads[name], lr)

    def lookup(self) -> None:
        ids = {name: self.ids().reshape(1, -1) for name in self.some()}
        for name, got in self.group.lookup(ids).items():
            np.testing.assert_array_equal(got, self.alone[name].lookup(ids[name]))

    def train(self) -> None:
        """Read features, some of which share a table, some of them in bags, and step their tables."""
        names = [self.one() for _ in range(self.draw.randint(1, 6))]
        kinds = {name: self.draw.choice(("rows", "bags")) for name in names}
        modes = {name: self.draw.choice((("sum", "mean"), ("max",))) for name in names}
        padding = {name: self.draw.choice((None, 3)) for name in names}
        features = [self._feature(name, kinds[name], modes[name], padding[name]) for name in names]
        batch = features_of.plan(features, self.layouts)
        between = self.draw.choice(
            (None, None, GroupPair.update, GroupPair.add, GroupPair.grow, GroupPair.set_rule, GroupPair.load)
        )
        if between is not None:
            between(self)
        reading = batches.read_planned(batch, for_weights=True)
        grads = [self.rng.standard_normal(out.shape).astype(np.float32) for out in reading.outputs]
        weighed, due = batches.weight_gradients(reading, grads), []
        for table, summed in features_of.sum_gradients(reading, grads):
            name = str(table.name)
            own = [k for k, each in enumerate(names) if each == name]
            expected = self._summed(name, [features[k] for k in own], [grads[k] for k in own])
            self._compare([features[k] for k in own], [reading.outputs[k] for k in own], expected.outputs)
            for got, wanted in zip([weighed[k] for k in own], expected.weighed, strict=True):
                np.testing.assert_array_equal(got, wanted)
            np.testing.assert_array_equal(summed.plan.ids, expected.grads.plan.ids)
            np.testing.assert_array_equal(summed.values, expected.grads.values)
            assert summed.square_norm == expected.grads.square_norm
            due.append((name, summed, expected.grads))
        scale = self.draw.choice((1.0, 1.0, 0.5))
        due = [part for part in due if self.draw.random() < 0.9]  # the others are frozen
        step_all([self._due(self.group[name], grads.scaled(scale)) for name, grads, _ in due])
        for name, _, grads in due:
            step_all([self._due(self.alone[name], grads.scaled(scale))])

    @staticmethod
    def _due(table: er.Table, grads: RowGradients) -> StepRequest:
        assert table.rule is not None
        return StepRequest((rows_of(table),), table.rule, grads)

    def _feature(self, name: str, kind: str, modes: tuple[str, ...], padding: int | None) -> BatchFeature:
        ids, table = self.ids(), self.group[name]
        if kind == "rows":
            return BatchFeature(table, ids, padding=padding)
        offsets = np.sort(self.rng.integers(0, len(ids) + 1, self.draw.randint(0, 6)))
        offsets = np.concatenate([[0], offsets, [len(ids)]]).astype(np.int64)
        mode = self.draw.choice(modes)
        has_weights = mode == "sum" and self.draw.random() < 0.5
        weights = self.rng.standard_normal(len(ids)).astype(np.float32) if has_weights else None
        return BatchFeature(table, ids, offsets, weights, mode, padding)

    def _summed(self, name: str, features: list[BatchFeature], grads: list[np.ndarray]) -> Any:
        """Return what the table alone makes of its features as one batch."""
        return summed_alone(self.alone[name], features, grads)

    @staticmethod
    def _compare(features: list[BatchFeature], got: list[np.ndarray], expected: list[np.ndarray]) -> None:
        for _, each, wanted in zip(features, got, expected, strict=True):
            np.testing.assert_array_equal(each, wanted)

    def nonfinite(self) -> None:
        ids = {name: np.arange(3) for name in self.some()}
        grads = {name: self.grads(own, name) for name, own in ids.items()}
        bad = self.draw.choice(sorted(ids))
        grads[bad][1, 0] = np.nan
        if self.group[bad].on_nonfinite == "raise":
            with pytest.raises(er.NonFiniteGradientError, match=f"table '{bad}'.*The first is nan at"):
                self.group.update(ids, grads)
            return
        self.group.update(ids, grads)
        for name, own in ids.items():
            self.alone[name].update(own, grads[name])

    # ---------------------------------------------------------------- one member

    def update_one(self) -> None:
        name, ids = self.one(), self.ids()
        grads = self.grads(ids, name)
        for table in self.both(name):
            table.update(ids, grads)

    def lookup_one(self) -> None:
        name, ids = self.one(), self.ids()
        got, expected = (table.lookup(ids) for table in self.both(name))
        np.testing.assert_array_equal(got, expected)

    def assign(self) -> None:
        name, ids = self.one(), np.unique(self.ids())
        values = self.rng.standard_normal((len(ids), self.alone[name].dim)).astype(np.float32)
        for table in self.both(name):
            if not rows_of(table).lags:
                table.assign(ids, values)

    def grow(self) -> None:
        name = self.one()
        rows = self.alone[name].rows
        if rows is not None:
            more = self.draw.choice((rows + 7, None))
            for table in self.both(name):
                table.grow(more)

    def set_rule(self) -> None:
        name, rule = self.one(), self.draw.choice(RULES)
        if self.alone[name].first_scale == 1.0:
            for table in self.both(name):
                table.set_rule(rule, reset_state=True)

    def load(self) -> None:
        """Load the state of a table alone, or a table's rows."""
        name = self.one()
        member, alone = self.both(name)
        which = self.draw.choice(("alone", "table", "twin", *["member"] * (not member.is_on_disk)))
        if which == "table":
            member.load_state(copy.deepcopy(alone))
        elif which == "twin":  # of the same pool
            twin = self.group.table("twin", alone.rows, alone.dim, dtype=alone.spec.dtype, init=alone.spec.init)
            twin.load_state(alone.state())
            member.load_state(twin)
            self.group.drop("twin")
        else:
            member.load_state((member if which == "member" else alone).state())

    def copied(self) -> None:
        made = copy.deepcopy(self.group[self.one()])
        assert made.group is None

    # ---------------------------------------------------------------- the whole

    def check(self) -> None:
        assert sorted(self.group) == sorted(self.alone)
        for name, alone in self.alone.items():
            check_same(self.group[name], alone)
            assert self.group[name].stats()["skipped_steps"] == alone.stats()["skipped_steps"]
        touched = sum(table.stats()["rows_touched"] for table in self.alone.values())
        assert self.group.stats()["rows_touched"] == touched


class SummedAlone:
    """What a table alone makes of features that share it, as one batch of its ids."""

    def __init__(self) -> None:
        self.outputs: list[np.ndarray] = []
        self.weighed: list[np.ndarray | None] = []
        self.grads: RowGradients


def summed_alone(table: er.Table, features: list[BatchFeature], grads: list[np.ndarray]) -> SummedAlone:
    """Return what a table alone makes of features, all of rows or all of bags."""
    made = SummedAlone()
    ids = np.concatenate([np.asarray(feature.ids) for feature in features])
    padding = features[0].padding
    if features[0].mode is None:
        plan = table.plan(ids)
        rows = table.read(plan)
        made.outputs = np.split(rows, np.cumsum([len(np.asarray(f.ids)) for f in features])[:-1])
        summed = table.sum(plan, np.concatenate(grads))
        made.grads = summed if padding is None else summed.kept(summed.plan.ids != padding)
        made.weighed = [None] * len(features)
        return made
    found, kept_ids = [], []
    for feature, own in zip(features, grads, strict=True):
        assert feature.offsets is not None
        of_feature, weights = np.asarray(feature.ids), feature.weights
        kept = of_feature != padding if padding is not None else np.ones(len(of_feature), bool)
        plan, left = make_plan(of_feature[kept]), None if weights is None else weights[kept]
        bags = bags_of(np.append(0, np.cumsum(kept))[feature.offsets], str(feature.mode))
        rows = table.read_rows(plan)
        out, trace = pooled(plan, rows, left, bags)
        made.outputs.append(out)
        weighed = np.zeros(len(of_feature), np.float32)
        weighed[kept] = pooling.weight_grads(plan, pooling.places_of([own]), rows, bags)
        made.weighed.append(None if weights is None else weighed)
        found.append(_of_positions(bags, left, trace, own))
        kept_ids.append(of_feature[kept])
    made.grads = RowGradients.sum(make_plan(np.concatenate(kept_ids)), np.concatenate(found))
    return made


def _of_positions(bags: Bags, weights: np.ndarray | None, trace: np.ndarray, grads: np.ndarray) -> np.ndarray:
    """Return the gradient of each position of bags: float32 (n, dim)."""
    of_bag = bags.of_positions
    if bags.mode == "max":
        positions = np.arange(len(of_bag), dtype=np.int32)
        return np.where(trace[of_bag] == positions[:, None], grads[of_bag], np.float32(0))
    factors = np.ones(len(of_bag), np.float32) if weights is None else weights
    return (factors * trace[of_bag] if len(trace) else factors)[:, None] * grads[of_bag]


EVENTS: tuple[Callable[[GroupPair], None], ...] = (
    *(GroupPair.update, GroupPair.lookup, GroupPair.train) * 4,
    *(GroupPair.update_one, GroupPair.lookup_one) * 2,
    GroupPair.add,
    GroupPair.drop,
    GroupPair.rename,
    GroupPair.nonfinite,
    GroupPair.assign,
    GroupPair.grow,
    GroupPair.set_rule,
    GroupPair.load,
    GroupPair.copied,
)


class DiskGroupPair(GroupPair):
    """A group on disk, whose caches hold a part of the rows, and the same tables alone in RAM."""

    def new_group(self) -> er.Group:
        self.system, self.saved = FaultFS(), dict[int, dict[str, er.Table]]()
        self.memory = self.draw.choice((20_000, 40_000, "1MiB", None))
        self.policy = self.draw.choice(("lfu", "lru", "clock"))
        return self.opened()

    def opened(self) -> er.Group:
        how: dict[str, Any] = {"memory": self.memory, "policy": self.policy, "keep": 3}
        return on(self.system).Group(path="/m", **how)

    def commit(self) -> None:
        """Make all changes durable, in the background or at once."""
        number = self.group.commit(step=len(self.saved), wait=self.draw.random() < 0.5)
        self.saved[number] = copy.deepcopy(self.alone)

    def commit_by_one(self) -> None:
        """Commit by a member, which is a commit of all."""
        self.saved[self.group[self.one()].commit()] = copy.deepcopy(self.alone)

    def reopen(self) -> None:
        """Open the group again, as of its last commit."""
        if self.draw.random() < 0.5:
            self.commit()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", er.UncommittedWarning)
            self.group.close()
        self.group = self.opened()
        self.go_back(self.group.last_commit)

    def go_back(self, number: int) -> None:
        """Take the tables alone to what they were at a commit."""
        self.alone = copy.deepcopy(self.saved.get(number, {}))
        kept = {name: (table.on_nonfinite, table.rule) for name, table in self.alone.items()}
        for name, (on_nonfinite, _) in kept.items():
            rows_of(self.group[name]).on_nonfinite = on_nonfinite  # which files do not say
        while len(self.alone) < 2:
            self.add()

    def kept(self) -> list[int]:
        """Return the commits that there are, once none is under way, which drops others."""
        assert self.group.storage is not None
        self.group.storage.end_commit()
        return [one["commit"] for one in self.group.commits() if one["commit"] in self.saved]

    def rollback(self) -> None:
        if numbers := self.kept():
            number = self.draw.choice(numbers)
            made = self.group.rollback(number)
            self.saved[made] = self.saved[number]
            self.go_back(number)

    def compact(self) -> None:
        before = self.group.uncommitted
        made = self.group.compact()
        if made not in self.saved and made - 1 in self.saved:
            self.saved[made] = self.saved[made - 1]
        assert self.group.uncommitted == before

    def close_one(self) -> None:
        """Close a member, and open it again."""
        name = self.one()
        on_nonfinite = self.group[name].on_nonfinite
        self.group[name].close()
        rows_of(self.group[name]).on_nonfinite = on_nonfinite

    def prefetch(self) -> None:
        batches = [{name: self.ids(8) for name in self.some()} for _ in range(3)]
        for ids in self.group.prefetch(batches, depth=1):
            grads = {name: self.grads(own, name) for name, own in ids.items()}
            self.group.update(ids, grads)
            for name, own in ids.items():
                self.alone[name].update(own, grads[name])

    def verify(self) -> None:
        assert not self.group.verify().problems

    def read(self) -> None:
        """Open a commit beside the writer."""
        if numbers := self.kept():
            number = self.draw.choice(numbers)
            with on(self.system).open("/m", mode="r", at=number) as snapshot:
                assert sorted(snapshot) == sorted(self.saved[number])
                for name, expected in self.saved[number].items():
                    check_same(snapshot[name], expected)


DISK_EVENTS: tuple[Callable[[Any], None], ...] = (
    *(event for event in EVENTS if event is not GroupPair.copied),
    *(DiskGroupPair.commit, DiskGroupPair.prefetch) * 3,
    DiskGroupPair.commit_by_one,
    DiskGroupPair.reopen,
    DiskGroupPair.rollback,
    DiskGroupPair.compact,
    DiskGroupPair.close_one,
    DiskGroupPair.verify,
    DiskGroupPair.read,
)


def play(seed: int, events: int, kind: type[GroupPair] = GroupPair) -> None:
    """Do so many things to a pair."""
    pair, done = kind(seed), list[str]()
    choices = DISK_EVENTS if kind is DiskGroupPair else EVENTS
    try:
        for _ in range(events):
            event = pair.draw.choice(choices)
            done.append(event.__name__)
            event(pair)
            if pair.draw.random() < 0.3:
                pair.check()
        pair.check()
    except BaseException as error:
        error.add_note(f"seed {seed}, after {done}")
        raise
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", er.UncommittedWarning)
            pair.group.close()
