"""`er.publish`: what is written, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.distributed.commits import make_parts
from embedrock.io.vfs import OS_SYSTEM
from embedrock.serving.publisher import PublishOptions, publish_last
from embedrock.serving.sources import SourceTable
from embedrock.store import published_folder
from embedrock.store.manifest import PUBLISHED
from embedrock.store.published_folder import PublishedFolder


def table(path: Path, rows: int | None = 100, **options: object) -> er.Table:
    made = er.Table(rows, 4, path=path, rule=er.SGD(lr=1.0), seed=1, memory="2MiB", **options)  # pyright: ignore
    made.update(np.arange(20), np.ones((20, 4)))
    made.commit(step=1)
    return made


def shown(folder: Path, name: str = "users") -> tuple[np.ndarray, np.ndarray]:
    with er.Subscriber(folder, memory="2MiB", patience=0) as served, served.step() as step:
        return step[name].export()


def assert_shown(folder: Path, source: er.Table, name: str = "users") -> None:
    for got, expected in zip(shown(folder, name), source.export(), strict=True):
        assert np.array_equal(got, expected)


def test_rows_without_a_record_have_their_first_values(tmp_path: Path):
    users = table(tmp_path / "users.rock")
    er.publish(users, tmp_path / "served")
    with er.Subscriber(tmp_path / "served") as served, served.step() as step:
        assert np.array_equal(step["users"].lookup(np.arange(100)), users.lookup(np.arange(100)))
        assert step["users"].rule is None
    users.close()


def test_a_step_writes_what_changed(tmp_path: Path):
    users = table(tmp_path / "users.rock")
    users.update(np.arange(100), np.ones((100, 4)))
    users.commit(step=2)
    assert er.publish(users, tmp_path / "served") == er.Published(1, 2, 100, 0, is_base=True)
    users.update([3, 5], np.ones((2, 4)))
    users.commit(step=3)
    assert er.publish(users, tmp_path / "served") == er.Published(2, 3, 2, 0, is_base=False)
    assert er.publish(users, tmp_path / "served") == er.Published(2, 3, 0, 0, is_base=False, is_new=False)
    assert_shown(tmp_path / "served", users)
    users.close()


def test_16_bits(tmp_path: Path):
    users = table(tmp_path / "users.rock")
    er.publish(users, tmp_path / "served", dtype="bfloat16")
    ids, rows = shown(tmp_path / "served")
    assert np.array_equal(ids, np.arange(20))
    assert (np.abs(rows - users.lookup(ids)) <= np.abs(rows) * 2**-8).all()
    made = er.publish(users, tmp_path / "served", dtype="float16")
    assert made.is_base
    users.close()


@pytest.mark.parametrize("memory", ["map", "2MiB"])
@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.01), ("int4", 0.2)])
def test_codecs(tmp_path: Path, dtype: str, error: float, memory: str):
    users = table(tmp_path / "users.rock")
    er.publish(users, tmp_path / "served", dtype=dtype)
    with er.Subscriber(tmp_path / "served", memory) as served:
        for number in range(3):
            with served.step() as step:
                rows = users.lookup(range(100))
                assert np.abs(step["users"].lookup(range(100)) - rows).max() < error * np.abs(rows).max()
                assert step["users"].spec.dtype == dtype
            users.update([number, 50], np.ones((2, 4)))
            users.commit()
            assert er.publish(users, tmp_path / "served", dtype=dtype).rows == 2
            assert served.refresh()
    users.close()


def test_rows_that_are_not_finite(tmp_path: Path):
    users = table(tmp_path / "users.rock")
    users.assign([3], np.full((1, 4), 1e30))
    users.commit()
    with pytest.raises(er.GradientError, match=r"rows of table 'users' must be finite as float16: .* first ids \[3\]"):
        er.publish(users, tmp_path / "served", dtype="float16")
    assert er.Subscriber(tmp_path / "served").number is None
    er.publish(users, tmp_path / "served")
    assert_shown(tmp_path / "served", users)
    users.close()


def test_uncommitted_rows_are_not_published(tmp_path: Path):
    users = table(tmp_path / "users.rock")
    before = users.export()
    users.update([3], np.ones((1, 4)))
    er.publish(users, tmp_path / "served")
    assert np.array_equal(shown(tmp_path / "served")[1], before[1])
    users.rollback(1)
    users.close()


def test_a_forgotten_row_leaves_all_files_at_once(tmp_path: Path):
    users = table(tmp_path / "users.rock")
    users.assign([7], [[1.25, 2.5, 5.0, 1e-20]])
    users.commit()
    er.publish(users, tmp_path / "served")
    secret = np.array([1.25, 2.5, 5.0, 1e-20], np.float32).tobytes()
    assert any(secret in file.read_bytes() for file in (tmp_path / "served").rglob("*") if file.is_file())
    users.forget([7])
    users.commit()
    assert er.publish(users, tmp_path / "served").gone == 1
    assert not any(secret in file.read_bytes() for file in (tmp_path / "served").rglob("*") if file.is_file())
    assert_shown(tmp_path / "served", users)
    users.close()


SECRET = np.frombuffer(b"SECRET!!SECRET!!", np.float32)


def files_with_secret(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and b"SECRET!!" in file.read_bytes()]


def with_secret(path: Path) -> er.Table:
    made = table(path, None)
    made.assign([77], SECRET[None])
    made.commit(step=2)
    return made


@pytest.mark.parametrize("call", ["_purge", "_collect"])
def test_a_publisher_that_is_killed_before_old_files_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str):
    served, users = tmp_path / "served", with_secret(tmp_path / "users.rock")
    er.publish(users, served)
    assert files_with_secret(served)
    users.forget([77])
    users.commit(step=3)

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PublishedFolder, call, killed)
        with pytest.raises(KeyboardInterrupt):
            er.publish(users, served)
    assert files_with_secret(served)
    assert not er.publish(users, served).is_new
    assert not files_with_secret(served)
    assert_shown(served, users)
    users.close()


def test_forgotten_rows_leave_also_if_the_clock_has_gone_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    served, users = tmp_path / "served", with_secret(tmp_path / "users.rock")
    with monkeypatch.context() as patch:
        patch.setattr("embedrock.store.publishing.now", lambda: "2999-01-01T00:00:00.0Z")
        er.publish(users, served)
    users.forget([77])
    users.commit(step=3)
    er.publish(users, served)
    assert not files_with_secret(served)
    users.close()


def test_a_row_is_forgotten_under_another_name(tmp_path: Path):
    group = er.Group(path=tmp_path / "model.rock", memory="2MiB")
    users = group.table("users", None, 4, rule=er.SGD(lr=1.0))
    users.assign([7, 77], np.stack([np.ones(4, np.float32), SECRET]))
    group.commit()
    er.publish(group, tmp_path / "served")
    assert files_with_secret(tmp_path / "served")
    users.forget([77])
    group.rename("users", "people")
    group.commit()
    er.publish(group, tmp_path / "served")
    assert not files_with_secret(tmp_path / "served")
    group.close()


def test_logs_are_compacted_once_they_outweigh_the_base(tmp_path: Path):
    users = table(tmp_path / "users.rock", rows=5000)
    users.update(np.arange(5000), np.ones((5000, 4)))
    users.commit()
    logs = []
    for number in range(12):
        er.publish(users, tmp_path / "served")
        (pool,) = PUBLISHED.read(OS_SYSTEM, str(tmp_path / "served"), number + 1).pools
        logs.append(len(pool.delta))
        users.update(np.arange(number, 1500), np.ones((1500 - number, 4)))
        users.commit()
    assert max(logs) > 2
    assert logs.count(0) >= 2
    er.publish(users, tmp_path / "served")
    assert_shown(tmp_path / "served", users)
    users.close()


def test_what_does_not_follow_begins_a_new_chain(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def chain() -> str:
        return PublishedFolder.newest_of(OS_SYSTEM, str(tmp_path / "served")).published.chain

    users, chains = table(tmp_path / "users.rock"), []
    er.publish(users, tmp_path / "served")
    served = er.Subscriber(tmp_path / "served", memory="2MiB")
    chains.append(chain())
    users.update([3], np.ones((1, 4)))
    users.commit()
    er.publish(users, tmp_path / "served")
    chains.append(chain())
    users.close()
    (tmp_path / "other").mkdir()
    with er.Table(
        100,
        4,
        path=tmp_path / "other/users.rock",
        rule=er.SGD(lr=1.0),
    ) as other:
        other.update([50], np.ones((1, 4)))
        other.commit()
        assert er.publish(other, tmp_path / "served").is_base
        chains.append(chain())
        assert served.refresh()
        assert served.lookup({"users": [50]})["users"].tolist() == other.lookup([50]).tolist()
    assert chains[0] == chains[1] != chains[2]
    assert f"step 3 begins a new chain, {chains[2]}: it does not follow from step 1 of chain {chains[0]}" in caplog.text
    served.close()


def test_a_rolled_back_table_goes_on(tmp_path: Path):
    users = table(tmp_path / "users.rock", keep=9)
    er.publish(users, tmp_path / "served")
    users.update([3], np.ones((1, 4)))
    users.commit()
    er.publish(users, tmp_path / "served")
    users.rollback(1)
    made = er.publish(users, tmp_path / "served")
    assert (made.number, made.is_base) == (3, False)
    assert_shown(tmp_path / "served", users)
    users.close()


def test_a_group_that_gets_another_table(tmp_path: Path):
    group = er.Group(path=tmp_path / "model.rock", memory="2MiB")
    for name in ("users", "items"):
        group.table(name, 50, 4, rule=er.SGD(lr=1.0)).update([1, 2], np.ones((2, 4)))
        group.commit()
        er.publish(group, tmp_path / "served")
        with er.Subscriber(tmp_path / "served", memory="2MiB") as served, served.step() as step:
            assert list(step) == list(group)
            for each in group:
                assert np.array_equal(step[each].export()[1], group[each].export()[1])
    er.publish(group["items"], tmp_path / "items")
    with er.Subscriber(tmp_path / "items", memory="2MiB") as served, served.step() as step:
        assert list(step) == ["items"]
    group.close()


def test_changes_of_a_subscriber(tmp_path: Path):
    users = table(tmp_path / "users.rock")
    er.publish(users, tmp_path / "served")
    served = er.Subscriber(tmp_path / "served", memory="2MiB")
    shown = served.number
    for number in (3, 4):
        users.update([number], np.ones((1, 4)))
        users.commit()
        er.publish(users, tmp_path / "served")
    assert served.refresh()
    with served.step() as step:
        changed = [ids.tolist() for ids, _, _ in step["users"].changes(shown)]
    assert changed == [[3, 4]]
    served.close()
    users.close()


MOVED = {
    "Adam": {"rule": er.Adam(lr=0.1, dense=True)},
    "AdamW": {"rule": er.AdamW(lr=0.1, weight_decay=0.1, dense=True)},
    "array": {"init": er.FromArray(np.arange(400, dtype=np.float32).reshape(100, 4))},
    "array, Adam": {"rule": er.Adam(lr=0.1, dense=True), "init": er.FromArray(np.ones((100, 4), np.float32))},
    "shared": {"admission": er.Admission(2, default="shared")},
    "zeros": {"admission": er.Admission(2, default="zeros")},
    "array, zeros": {
        "admission": er.Admission(2, default="zeros"),
        "init": er.FromArray(np.ones((100, 4), np.float32)),
    },
}


@pytest.mark.parametrize("options", MOVED.values(), ids=MOVED)
@pytest.mark.parametrize("in_group", [False, True])
def test_rows_that_have_no_record_and_move(tmp_path: Path, options: dict[str, Any], in_group: bool):
    options = {"rule": er.SGD(lr=0.1), "seed": 1, **options}
    group = er.Group(path=tmp_path / "model.rock", memory="2MiB") if in_group else None
    path = {"path": tmp_path / "users.rock", "memory": "2MiB"}
    users = er.Table(100, 4, **path, **options) if group is None else group.table("users", 100, 4, **options)
    rng, served = np.random.default_rng(0), None
    for number in range(4):
        ids = rng.choice(100, 10, replace=False)
        users.update(ids, rng.normal(size=(10, 4)))
        users.update(ids[:5], rng.normal(size=(5, 4)))
        if number == 2:
            users.forget(users.export()[0][:2])
        users.commit()
        er.publish(group or users, tmp_path / "served")
        served = served or er.Subscriber(tmp_path / "served", memory="2MiB", patience=0)
        assert served.refresh() or not number
        assert np.array_equal(served.lookup({"users": range(100)})["users"], users.lookup(range(100)))
    assert served is not None
    served.close()
    (group or users).close()


def test_a_publisher_waits_for_the_folder_before_it_takes_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened, served = PublishedFolder.open_or_make, tmp_path / "served"
    with table(tmp_path / "users.rock") as users:
        er.publish(users, served)

        def trained_meanwhile(*args: Any) -> PublishedFolder:
            monkeypatch.undo()
            users.update([3], np.ones((1, 4)))
            users.commit(step=3)
            er.publish(users, served)  # another publisher
            return opened(*args)

        users.update([2], np.ones((1, 4)))
        users.commit(step=2)
        monkeypatch.setattr(PublishedFolder, "open_or_make", trained_meanwhile)
        assert not er.publish(users, served).is_new
    with er.Subscriber(served) as subscriber:
        assert (subscriber.number, subscriber.step_number) == (2, 3)


@pytest.mark.parametrize("in_group", [False, True])
def test_a_commit_that_is_dropped_while_its_rows_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_group: bool
):
    options: Any = {"rule": er.Momentum(lr=0.1, dense=True), "seed": 1}
    group = er.Group(path=tmp_path / "model.rock", memory="2MiB", keep=1) if in_group else None
    path: Any = {"path": tmp_path / "users.rock", "memory": "2MiB", "keep": 1}
    users = er.Table(100, 4, **path, **options) if group is None else group.table("users", 100, 4, **options)

    def train(step: int) -> None:
        users.update([step], np.ones((1, 4)))
        users.commit(step=step)

    of, left = SourceTable.of, [7, 8]

    def of_dropped(*args: Any) -> SourceTable:
        if left:
            train(left.pop(0))
        return of(*args)

    train(1)
    monkeypatch.setattr(SourceTable, "of", of_dropped)
    er.publish(group or users, tmp_path / "served")
    with er.Subscriber(tmp_path / "served") as served:
        assert served.step_number == 8
        assert np.array_equal(served.lookup({"users": range(100)})["users"], users.lookup(range(100)))
    (group or users).close()


def test_forgotten_rows_leave_after_a_copy_was_put_back(tmp_path: Path):
    path, served = tmp_path / "users.rock", tmp_path / "served"
    secret = np.full((1, 4), 123.456, np.float32)
    table(path).close()
    with er.open(path) as users:
        users.assign([7], secret)
        users.commit()
        er.publish(users, served)
    shutil.copytree(path, tmp_path / "copy")
    with er.open(path) as users:
        users.update([1], np.ones((1, 4)))
        users.commit()
        users.commit()
        er.publish(users, served)
    shutil.rmtree(path)
    (tmp_path / "copy").rename(path)
    with er.open(path) as users:
        users.forget([7])
        users.commit()
        er.publish(users, served)
    assert not any(secret.tobytes() in file.read_bytes() for file in served.rglob("*.*"))


def test_files_that_no_step_needs_are_found_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(published_folder, "TIDY_STEPS", 4)
    served = tmp_path / "served"
    with table(tmp_path / "users.rock") as users:
        er.publish(users, served)
        (first,) = (served / "base").rglob("*.rows")
        for number in range(2, 6):
            users.update([number], np.ones((1, 4)))
            users.commit()
            er.publish(users, served, dtype="int8")
            (served / "manifest" / "0000000001.json").unlink(missing_ok=True)  # and its publisher was killed
            assert first.exists() == (number < 5)


# ---------------------------------------------------------------- what is refused


def test_first_values_that_the_files_do_not_have(tmp_path: Path):
    with table(tmp_path / "users.rock", init=er.FromArray(np.ones((100, 4), np.float32))):
        with pytest.raises(er.TableFileError, match="come from an array of shape"):
            publish_last(str(tmp_path / "users.rock"), str(tmp_path / "served"), PublishOptions())
        assert not (tmp_path / "served").exists()


def test_open_ids_whose_first_values_move(tmp_path: Path):
    with er.Table(None, 4, path=tmp_path / "t.rock", rule=er.AdamW(lr=0.1, weight_decay=0.1, dense=True)) as words:
        words.update([1], np.ones((1, 4)))
        words.commit()
        with pytest.raises(er.UnsupportedError, match="training changes rows that have no record, and with open ids"):
            er.publish(words, tmp_path / "served")


def test_a_table_in_ram(tmp_path: Path):
    with pytest.raises(er.UnsupportedError, match="lives in RAM and has no commits"):
        er.publish(er.Table(10, 4), tmp_path / "served")


def test_arguments(tmp_path: Path):
    users = table(tmp_path / "users.rock")
    with pytest.raises(er.ArgumentError, match=r"`keep_hours` of publish must be a number of at least 0: got -1\."):
        er.publish(users, tmp_path / "served", keep_hours=-1)
    with pytest.raises(er.ArgumentError, match=r"`dtype` must be one of .*int8"):
        er.publish(users, tmp_path / "served", dtype="int9")
    for step in (1.5, True, 2**63):
        with pytest.raises(er.ArgumentError, match="`step` of a commit must be a whole number of 64 bits"):
            er.publish(users, tmp_path / "served", step=step)  # pyright: ignore
    assert not (tmp_path / "served").exists()
    users.close()


def test_parts_with_rows_of_each_other(tmp_path: Path):
    layout = make_parts(str(tmp_path / "users.rock"), 2)
    for part in layout.parts:
        table(Path(part)).close()
    users = er.open(tmp_path / "users.rock", mode="r")
    with pytest.raises(er.CorruptTableError, match=r"shard-0-of-2 has rows that another part of the table must have"):
        er.publish(users, tmp_path / "served")
    assert er.Subscriber(tmp_path / "served").number is None
    users.close()


def test_a_table_without_a_commit(tmp_path: Path):
    with (
        er.Table(10, 4, path=tmp_path / "t.rock") as empty,
        pytest.raises(er.ArgumentError, match="no commit to publish"),
    ):
        er.publish(empty, tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_a_folder_with_something_else(tmp_path: Path):
    users = table(tmp_path / "users.rock")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "mine.txt").write_text("mine")
    with pytest.raises(er.TableFileError, match=r"of a new published folder must be empty, and has 'mine\.txt'"):
        er.publish(users, tmp_path / "served")
    er.Group(path=tmp_path / "model.rock").close()
    with pytest.raises(er.TableFileError, match="Publish its rows in a folder of their own"):
        er.publish(users, tmp_path / "model.rock")
    with pytest.raises(er.TableFileError, match="Publish its rows in a folder of their own"):
        er.publish(users, tmp_path / "users.rock")
    users.close()


def test_a_published_folder_is_not_trained(tmp_path: Path):
    users = table(tmp_path / "users.rock")
    er.publish(users, tmp_path / "served")
    with pytest.raises(er.ReadOnlyTableError, match=r"only er.publish changes them. .*er.Subscriber\('"):
        er.open(tmp_path / "served")
    with er.open(tmp_path / "served", mode="r", kind=er.Group) as group:
        assert np.array_equal(group["users"].export()[1], users.export()[1])
    users.close()


def test_two_publishers_at_once(tmp_path: Path):
    users = table(tmp_path / "users.rock")
    er.publish(users, tmp_path / "served")
    folder = PublishedFolder.open_or_make(OS_SYSTEM, str(tmp_path / "served"))
    with pytest.raises(er.TableLockedError):
        er.publish(users, tmp_path / "served")
    folder.close()
    users.close()


def test_dense_weights(tmp_path: Path):
    users = table(tmp_path / "users.rock")
    bits = np.array([0x3F80, 0xC000], np.uint16)
    given = {"b": np.float64(2.5), "a": np.arange(6).reshape(2, 3), "h": er.Bfloat16(bits), "e": np.empty((0, 3), bool)}
    er.publish(users, tmp_path / "served", dense=given)
    with er.Subscriber(tmp_path / "served") as served, served.step() as step:
        assert step.dense["b"] == 2.5
        assert step.dense["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert step.dense["h"].tolist() == [1.0, -2.0]
        assert step.dense["e"].shape == (0, 3)
    (file,) = (tmp_path / "served" / "dense").iterdir()
    with er.open(tmp_path / "served", mode="r") as group:
        assert not group.verify().problems
        data = file.read_bytes()
        file.write_bytes(data[:-1] + b"x")
        (problem,) = group.verify().problems
        assert f"{file} is damaged: expected bytes with SHA-256" in problem
        file.write_bytes(data)
    with pytest.importorskip("safetensors").safe_open(file, framework="pt") as known:
        assert known.get_tensor("a").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert known.get_tensor("h").tolist() == [1.0, -2.0]
    er.publish(users, tmp_path / "served", dense=given)
    assert len(list((tmp_path / "served" / "dense").iterdir())) == 1
    with pytest.raises(er.ArgumentError, match="`dense` must have arrays of numbers: got object for 'x'"):
        er.publish(users, tmp_path / "served", dense={"x": np.array([None])})
    for names in ("__metadata__", 1):
        with pytest.raises(er.ArgumentError, match="`dense` must have arrays by name, and none named '__metadata__'"):
            er.publish(users, tmp_path / "served", dense={names: np.ones(1)})  # pyright: ignore
    users.close()


def test_a_layer_is_no_table(tmp_path: Path):
    source: Any = [1]
    with pytest.raises(er.ArgumentError, match=r"must be a table or a group, as layer\.table is: got \[1\]"):
        er.publish(source, tmp_path / "served")
    assert not (tmp_path / "served").exists()
