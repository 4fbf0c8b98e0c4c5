"""Checkpoints by Orbax: rows and dense weights are of one step, whatever happens between saves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from saved_training import KINDS, NAMES, TABLES, Training, batch, manager_in

import embedrock as er
import embedrock.jax as ej
import embedrock.jax.orbax as ejo
from embedrock.storage.commit import StorageCommit
from same_tables import check_same
from slow import slow

STEPS = 14
Made = Callable[[str], Training]


@pytest.fixture(scope="module")
def never_saved(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(tmp_path_factory.mktemp("never_saved"), "RAM")
    training.train(STEPS)
    return training


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """Return a function that makes a training whose tables are closed at the end."""
    trainings = list[Training]()

    def make(kind: str) -> Training:
        trainings.append(Training(tmp_path, kind))
        return trainings[-1]

    yield make
    for each in trainings:
        each.close()


def check_equal(training: Training, other: Training) -> None:
    assert training.step == other.step
    for name in NAMES:
        check_same(training.tables.by_name[name], other.tables.by_name[name])
    for array, expected in zip(*(jax.tree.leaves(each.dense) for each in (training, other)), strict=True):
        np.testing.assert_array_equal(array, expected)


def names_of(table: er.Table) -> list[str]:
    return [commit["name"] for commit in table.commits() if commit["name"] is not None]


def files_of(folder: Path) -> list[str]:
    """Return the names of the commits of whole steps."""
    return sorted(file.stem for file in folder.glob("*/rows/orbax-*.json") if file.parent.parent.name.isdecimal())


# ---------------------------------------------------------------- save, restore and go on


@pytest.mark.parametrize(("kind", "is_async"), [*((kind, True) for kind in KINDS), ("mixed", False)])
def test_a_resumed_training_ends_at_the_bits_of_one_that_never_stopped(
    kind: str, is_async: bool, made: Made, tmp_path: Path, never_saved: Training
) -> None:
    options = {"enable_async_checkpointing": is_async}
    with manager_in(tmp_path / "steps", **options) as manager:
        training = made(kind)
        training.train(8, manager)
        training.close()
    with manager_in(tmp_path / "steps", **options) as manager:
        training = made(kind)
        training.restore(manager)
        assert training.step == 6
        training.train(STEPS, manager, every=5)
    check_equal(training, never_saved)


@pytest.mark.parametrize("kind", ["RAM", "group", *slow("disk", "mixed")])
def test_an_older_step_is_restored_twice_and_gone_on_from(
    kind: str, made: Made, tmp_path: Path, never_saved: Training
) -> None:
    training = made(kind)
    with manager_in(tmp_path / "steps", max_to_keep=None) as manager:
        training.train(11, manager)
        for _ in range(2):
            training.restore(manager, 3)
            training.train(8)
        training.restore(manager, 9)
        training.restore(manager, 3)
        for step in (6, 9):
            manager.delete(step)
        training.train(STEPS, manager, every=4)
        assert manager.all_steps() == [0, 3, 4, 8, 12]
    check_equal(training, never_saved)


@pytest.mark.parametrize(("kind", "depth"), [("RAM", 3), ("mixed", 0), ("mixed", 3), *slow(("group", 3), ("disk", 3))])
def test_batches_read_ahead_of_a_restore_have_the_rows_of_its_step(
    kind: str, depth: int, made: Made, tmp_path: Path, never_saved: Training
) -> None:
    training = made(kind)
    with manager_in(tmp_path / "steps") as manager:
        training.train(4, manager)
        order = [*range(4, 9), *range(3, STEPS)]
        for number, (fetched, (_, target)) in enumerate(ej.prefetch(map(batch, order), training.tables, depth), 1):
            training.make(fetched, target)
            if number == 5:
                training.restore(manager)
    check_equal(training, never_saved)


def test_rows_in_ram_are_restored_to_disk(made: Made, tmp_path: Path, never_saved: Training) -> None:
    with manager_in(tmp_path / "steps") as manager:
        made("RAM").train(8, manager)
        manager.wait_until_finished()
        training = made("disk")
        training.restore(manager)
        training.train(STEPS, manager, every=5)
        training.restore(manager)  # of references now
        training.train(STEPS)
    check_equal(training, never_saved)


def test_rules_keep_their_learning_rates(tmp_path: Path) -> None:
    for path in (None, tmp_path / "t"):
        table = er.Table(rows=9, dim=2, rule=er.Adam(lr=0.5), path=path)
        table.update([3], np.ones((1, 2)))
        with manager_in(tmp_path / f"steps of {path is None}") as manager:
            manager.save(1, args=ejo.TablesSave(ej.Tables(table)))
            manager.wait_until_finished()
            table.update([3], np.ones((1, 2)))
            table.set_rule(er.Adam(lr=0.25))
            manager.restore(1, args=ejo.TablesRestore(ej.Tables(table)))
        assert (table.rule, table.steps) == (er.Adam(lr=0.25), 1)
        table.close()


# ---------------------------------------------------------------- the moment of a save


def test_rows_are_those_of_the_moment_of_save_and_the_step_exists_when_they_are_durable(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, write = threading.Event(), StorageCommit._write_and_publish
    training = made("mixed")
    with manager_in(tmp_path / "steps") as manager:
        monkeypatch.setattr(StorageCommit, "_write_and_publish", lambda self: (may_end.wait(), write(self)))
        digest = training.digest
        training.save(manager)
        training.train(3)
        time.sleep(0.2)  # Orbax has ended what it writes itself
        is_there = (tmp_path / "steps" / "0").exists()
        may_end.set()
        manager.wait_until_finished()
        assert not is_there
        assert (tmp_path / "steps" / "0").exists()
        assert training.digest != digest
        training.restore(manager)
    assert training.digest == digest


def test_a_step_waits_for_the_commits_that_another_handler_began(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, write = threading.Event(), StorageCommit._write_and_publish
    monkeypatch.setattr(StorageCommit, "_write_and_publish", lambda self: (may_end.wait(), write(self)))
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("rows", ejo.TablesRestore, ejo.TablesHandler())
    registry.add("rows", ejo.TablesSave, ejo.TablesHandler())
    with ocp.CheckpointManager(tmp_path / "steps", handler_registry=registry) as manager:
        manager.save(0, args=ocp.args.Composite(rows=ejo.TablesSave(made("disk").tables)))
        time.sleep(0.2)
        is_there = (tmp_path / "steps" / "0").exists()
        may_end.set()
    assert not is_there
    assert (tmp_path / "steps" / "0").exists()


def test_a_step_whose_commit_fails_does_not_exist(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: StorageCommit) -> None:
        self.error = OSError(28, "No space left on device")
        self._give_back()

    training = made("disk")
    manager = manager_in(tmp_path / "steps")
    training.train(3, manager)
    manager.wait_until_finished()
    with monkeypatch.context() as patch:
        patch.setattr(StorageCommit, "_write_and_publish", fail)
        training.save(manager)
        with pytest.raises(OSError, match="No space left"):
            manager.wait_until_finished()
    manager.close()
    with manager_in(tmp_path / "steps") as manager:
        assert manager.all_steps() == [0]
        digest = training.digest
        training.save(manager)
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 3]
        training.restore(manager)
    assert training.digest == digest


# ---------------------------------------------------------------- commits


def test_commits_of_dropped_steps_are_released_at_the_next_save(made: Made, tmp_path: Path) -> None:
    training, (kept, other) = made("group"), (tmp_path / "steps", tmp_path / "other")
    user = training.tables.by_name["user"]
    user.commit(name="mine")
    with manager_in(other, max_to_keep=1) as manager:
        training.save(manager)
    of_other = files_of(other)
    (kept / "a folder").mkdir(parents=True)
    (kept / "a file").touch()
    with manager_in(kept) as manager:
        for step in range(1, 7):
            training.train(step)
            training.save(manager)
            manager.wait_until_finished()
            held = [*files_of(kept), *of_other, "mine"]
            assert set(held) <= set(names_of(user))
            assert len(names_of(user)) - len(held) == (step > 2)  # Orbax drops a step after the save of a new one
        training.restore(manager, 5)


def test_the_commit_of_a_save_that_was_killed_is_released(made: Made, tmp_path: Path) -> None:
    training, steps = made("disk"), tmp_path / "steps"
    user = training.tables.by_name["user"]
    with manager_in(steps) as manager:
        training.train(4, manager)
    for unfinished in ("3.orbax-checkpoint-tmp/rows.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp/rows"):
        (steps / unfinished).mkdir(parents=True)
        ejo.TablesHandler().save(steps / unfinished, ejo.TablesSave(training.tables))
        ejo.TablesHandler().finalize(steps / unfinished)
    orphans = set(names_of(user)) - set(files_of(steps))
    assert len(orphans) == 1  # the second one released the first
    with manager_in(steps) as manager:
        training.save(manager)
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4]
    assert orphans.isdisjoint(names_of(user))
    assert set(files_of(steps)) < set(names_of(user))  # step 0 was dropped after the save


def test_a_save_keeps_the_commit_of_another_one_that_has_not_ended(made: Made, tmp_path: Path) -> None:
    """A notebook makes its manager anew while the old one still writes dense weights."""
    training, steps = made("disk"), tmp_path / "steps"
    user = training.tables.by_name["user"]
    for step in (1, 2):
        training.train(step)
        unfinished = steps / f"{step}.orbax-checkpoint-tmp" / "rows"
        unfinished.mkdir(parents=True)
        ejo.TablesHandler().save(unfinished, ejo.TablesSave(training.tables))
        user.commit()  # waits for the one before
    for step in (1, 2):
        ejo.TablesHandler().finalize(steps / f"{step}.orbax-checkpoint-tmp" / "rows")
        (steps / f"{step}.orbax-checkpoint-tmp").rename(steps / str(step))
    assert set(files_of(steps)) <= set(names_of(user))
    ejo.TablesHandler().restore(steps / "1" / "rows", ejo.TablesRestore(training.tables))
    assert user.steps == 1


def test_a_folder_in_the_place_of_a_moved_one_releases_none_of_its_commits(made: Made, tmp_path: Path) -> None:
    training, steps, moved = made("disk"), tmp_path / "steps", tmp_path / "moved"
    with manager_in(steps) as manager:
        training.train(4, manager)
    steps.rename(moved)
    with manager_in(steps, max_to_keep=1) as manager:
        for step in (5, 6, 7):
            training.train(step)
            training.save(manager)
    assert len(files_of(moved)) == 2
    with manager_in(moved) as manager:
        for step in (0, 3):
            training.restore(manager, step)


def test_two_items_may_have_tables_of_one_group(made: Made, tmp_path: Path) -> None:
    tables = made("group").tables.by_name
    items = {name: ej.Tables({name: tables[name]}) for name in NAMES[:2]}
    with manager_in(tmp_path / "steps") as manager:
        for step in range(4):
            manager.save(step, args=ocp.args.Composite(**{k: ejo.TablesSave(each) for k, each in items.items()}))
            tables["user"].update([3], np.ones((1, 4)))
        for step in (2, 3):
            manager.wait_until_finished()
            manager.restore(step, args=ocp.args.Composite(**{k: ejo.TablesRestore(each) for k, each in items.items()}))
            assert tables["user"].steps == step


def test_tables_that_are_only_read_may_be_beside_others(tmp_path: Path) -> None:
    with er.Table(rows=9, dim=2, rule=er.SGD(lr=1.0), path=tmp_path / "words") as words:
        words.update([3], np.ones((1, 2)))
        words.commit(name="published")
    with er.open(tmp_path / "words", mode="r") as words, manager_in(tmp_path / "steps") as manager:
        tables = ej.Tables({"words": words, "item": er.Table(rows=9, dim=2, rule=er.SGD(lr=1.0))})
        manager.save(0, args=ejo.TablesSave(tables))
        manager.wait_until_finished()
        tables.by_name["item"].update([3], np.ones((1, 2)))
        manager.restore(0, args=ejo.TablesRestore(tables))
        assert (words.steps, tables.by_name["item"].steps) == (1, 0)
        with er.open(tmp_path / "words") as writer:
            writer.update([3], np.ones((1, 2)))
            writer.commit()
        words.refresh()
        tables.by_name["item"].update([3], np.ones((1, 2)))
        with pytest.raises(er.ReadOnlyTableError, match="words"):
            manager.restore(0, args=ejo.TablesRestore(tables))
        assert (words.steps, tables.by_name["item"].steps) == (2, 1)  # neither has changed


def test_no_table_changes_beside_a_closed_one(tmp_path: Path) -> None:
    item, user = (er.Table(rows=9, dim=2, rule=er.SGD(lr=1.0)) for _ in "iu")
    tables = ej.Tables({"item": item, "user": user})
    with manager_in(tmp_path / "steps") as manager:
        manager.save(0, args=ejo.TablesSave(tables))
        manager.wait_until_finished()
        item.update([3], np.ones((1, 2)))
        user.close()
        with pytest.raises(er.ClosedTableError, match="table 'user' is closed"):
            manager.restore(0, args=ejo.TablesRestore(tables))
    assert item.steps == 1


# ---------------------------------------------------------------- errors


def test_a_moved_table_is_restored_and_another_one_is_refused(made: Made, tmp_path: Path) -> None:
    training = made("disk")
    with manager_in(tmp_path / "steps") as manager:
        training.save(manager)
        manager.wait_until_finished()
        digest = training.digest
        training.train(2)
        training.close()
        (tmp_path / "user").rename(tmp_path / "people")
        other = made("disk")
        before = other.digest
        with pytest.raises(
            er.ArgumentError,
            match=r"the state of user must be that of its own table, at .*user', uuid \w+: got a reference to commit 1 "
            r"of the table that was at .*user', uuid \w+\. Make the table with path=, the place where that table is",
        ):
            other.restore(manager)
        assert other.digest == before
        other.close()
        shutil.rmtree(tmp_path / "user")
        (tmp_path / "people").rename(tmp_path / "user")
        (tmp_path / "moved").mkdir()
        for name in NAMES:
            (tmp_path / name).rename(tmp_path / "moved" / name)
        moved = Training(tmp_path / "moved", "disk")
        moved.restore(manager)
        assert moved.digest == digest
        moved.close()


def test_tables_that_were_not_saved_are_refused(made: Made, tmp_path: Path) -> None:
    training, table = made("RAM"), er.Table(rows=9, dim=2)
    dense = ocp.args.Composite(rows=ejo.TablesSave(training.tables), dense=ocp.args.StandardSave({"w": np.ones(2)}))
    with manager_in(tmp_path / "steps") as manager:
        manager.save(0, args=dense)
    with manager_in(tmp_path / "steps") as manager:
        for item, tables, message in (
            ("rows", table, "must be named as they were, item, shop, user: got one table"),
            ("rows", {"user": table}, "must be named as they were, item, shop, user: got user"),
            ("dense", table, "must be named as they were, no table: got one table"),
        ):
            with pytest.raises(er.ArgumentError, match=message):
                manager.restore(0, args=ocp.args.Composite(**{item: ejo.TablesRestore(ej.Tables(tables))}))


def test_all_tables_are_checked_before_the_first_one_changes(made: Made, tmp_path: Path) -> None:
    training = made("mixed")
    with manager_in(tmp_path / "steps") as manager:
        training.save(manager)
        manager.wait_until_finished()
        training.train(2)
        before = training.digest
        others = {"shop": er.Table(rows=61, dim=4), "item": er.Table(dim=4, seed=7, **TABLES["item"])}
        for name, message in (
            ("shop", "must have rows 61: got 60"),
            (
                "item",
                r"the state of item must have rows, because its table is in RAM: .*\. Make the table with path=, the "
                r"place where that table is now; or take its rows into RAM, by table\.load_state\(er\.open\(path, "
                r"mode='r', at=1\)\['item'\]\)\.",
            ),
        ):
            tables = {**training.tables.by_name, name: others[name]}
            with pytest.raises(er.ArgumentError, match=message):
                manager.restore(0, args=ocp.args.Composite(rows=ejo.TablesRestore(ej.Tables(tables))))
            assert (training.digest, others[name].steps) == (before, 0)
        with er.open(tmp_path / "group", mode="r", at=1, kind=er.Group) as group:
            others["item"].load_state(group["item"])
        group = training.tables.by_name
        swapped = {"user": group["item"], "item": group["user"], "shop": group["shop"]}
        with pytest.raises(
            er.ArgumentError,
            match=r"table '(\w+)' of a group: the table has table '(\w+)' of a group. Make the table with",
        ):
            manager.restore(0, args=ocp.args.Composite(rows=ejo.TablesRestore(ej.Tables(swapped))))
        assert training.digest == before


def test_a_commit_that_was_dropped_is_refused(made: Made, tmp_path: Path) -> None:
    training = made("disk")
    user = training.tables.by_name["user"]
    with manager_in(tmp_path / "steps") as manager:
        training.save(manager)
        manager.wait_until_finished()
        user.release(names_of(user)[0])
        for step in range(1, 9):
            training.train(step)
            user.commit()
        with pytest.raises(
            er.ArgumentError, match=r"is no longer kept: .*\. Restore another step of manager\.all_steps"
        ):
            training.restore(manager)


def test_folders_elsewhere_are_refused() -> None:
    with pytest.raises(er.ArgumentError, match="the folder of a checkpoint with tables must be a folder on a disk"):
        ejo.TablesHandler().save("gs://bucket/0/rows", ejo.TablesSave(ej.Tables(er.Table(rows=9, dim=2))))


# ---------------------------------------------------------------- kills


class Program:
    """The program of `saved_training`, whose processes are killed."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("saved_training.py"))]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, kill_after: tuple[int, float] | None = None, **arguments: Any) -> list[str]:
        """Run the training, or kill it some seconds after a number of saves. Return its lines."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        number, lines = int(self._line().removeprefix("pid ")), [self._line()]
        while not lines[-1].startswith("exit"):
            if kill_after is not None and len(lines) == kill_after[0]:
                time.sleep(kill_after[1])
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(number, signal.SIGKILL)
            lines.append(self._line())
        return lines


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    program = Program()
    yield program
    with program.process:
        program.process.communicate()


@pytest.mark.parametrize(
    ("kind", "kills", "steps"),
    [("mixed", 2, 15), *slow(("RAM", 10, 40), ("disk", 20, 40), ("group", 20, 40), ("mixed", 20, 40))],
)
def test_a_killed_training_ends_at_the_bits_of_an_undisturbed_one(
    kind: str, kills: int, steps: int, program: Program, tmp_path: Path
) -> None:
    whole = Training(tmp_path, "RAM")
    whole.train(steps)
    rng, folder, killed, resumed = np.random.default_rng(0), tmp_path / "killed", 0, 0
    while killed < kills:
        folder.mkdir(exist_ok=True)
        when = int(rng.integers(1, 3)), rng.random() * 0.2
        lines = program.run(when, folder=str(folder), kind=kind, steps=steps, every=3)
        resumed += "saved 0" not in lines
        killed += lines[-1] == "exit -9"
        if lines[-1] != "exit -9":
            assert lines[-2:] == [whole.digest, "exit 0"]
            shutil.rmtree(folder)  # begin anew
    folder.mkdir(exist_ok=True)
    lines = program.run(folder=str(folder), kind=kind, steps=steps, every=3)
    assert lines[-2:] == [whole.digest, "exit 0"]
    assert resumed + ("saved 0" not in lines)
    if kind != "RAM":
        training = Training(folder, kind)
        names, held = names_of(training.tables.by_name["user"]), files_of(folder / "checkpoints")
        training.close()
        assert set(held) <= set(names)
        assert len(names) <= len(held) + 1


@pytest.mark.parametrize("argument", [ejo.TablesSave, ejo.TablesRestore])
def test_arguments_take_what_jax_trains(argument: Any):
    table = er.Table(rows=9, dim=2)
    with pytest.raises(er.ArgumentError) as error:
        argument(table)
    assert str(error.value) == f"`tables` of {argument.__name__} must be an ej.Tables: got {table!r}."
