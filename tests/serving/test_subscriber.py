"""`er.Subscriber`: what it shows, what it waits for, and its errors."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from test_crashes import publish

import embedrock as er
from carrier import COPY, SOURCE, Carrier, Run, differences
from on_system import on
from suites.faultfs import FaultFS


class Source:
    """A table that is published again and again."""

    def __init__(self, at: Path) -> None:
        self.folder, self.table = at / "served", er.Table(100, 4, path=at / "users.rock", rule=er.SGD(lr=1.0), seed=1)
        self.publish()

    def publish(self) -> int:
        self.table.update([3, 50], np.ones((2, 4)))
        self.table.commit()
        return er.publish(self.table, self.folder).number


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    made = Source(tmp_path)
    yield made
    made.table.close()


def test_a_step_stays_while_a_block_uses_it(source: Source):
    with er.Subscriber(source.folder) as served:
        with served.step() as before:
            rows = before["users"].lookup([3, 50])
            for number in (2, 3):
                assert source.publish() == number
                assert served.refresh()
                with served.step() as now:
                    assert now.number == number
                    assert not np.array_equal(now["users"].lookup([3, 50]), rows)
            assert np.array_equal(before["users"].lookup([3, 50]), rows)
        with pytest.raises(er.ClosedTableError):
            before["users"].lookup([3])
        assert served.lookup({"users": [3]})["users"].tolist() == source.table.lookup([3]).tolist()
        assert not served.refresh()


def test_follow(source: Source):
    with er.Subscriber(source.folder, "2MiB").follow(0.01) as served:
        number = source.publish()
        while served.number != number:
            time.sleep(0.01)
        assert served.error is None
        assert served.age is not None
        assert 0 <= served.age < 60
        assert served.follow(0.01) is served
        with pytest.raises(er.ArgumentError, match="`every` of follow must be seconds, more than 0: got 0"):
            served.follow(0)
    assert not [each for each in threading.enumerate() if each.name == "embedrock-follow"]


def test_an_error_in_the_background_is_told_once(source: Source, caplog: pytest.LogCaptureFixture):
    with er.Subscriber(source.folder, patience=0) as served:
        (source.folder / "manifest" / "0000000009.json").write_text("{")
        served.follow(0.01)
        while served.error is None:
            time.sleep(0.01)
        time.sleep(0.1)
        assert isinstance(served.error, er.CorruptTableError)
        assert served.lookup({"users": [3]})
    assert caplog.text.count("step 9 in") == 1


def test_a_folder_that_cannot_be_written(source: Source, tmp_path: Path):
    shutil.copytree(source.folder, tmp_path / "copy")
    paths = [tmp_path / "copy", *(tmp_path / "copy").rglob("*")]
    (tmp_path / "copy" / "LOCK").unlink()
    for path in paths:
        if path.exists():
            path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(map(str, (tmp_path / "copy").rglob("*")))
    with er.Subscriber(tmp_path / "copy") as served:
        assert served.lookup({"users": [3]})["users"].tolist() == source.table.lookup([3]).tolist()
    assert sorted(map(str, (tmp_path / "copy").rglob("*"))) == before
    for path in paths:
        if path.exists():
            path.chmod(0o755)


def test_what_has_not_arrived(source: Source, tmp_path: Path):
    served = er.Subscriber(tmp_path / "copy")
    assert (served.number, served.step_number, served.age, served.waiting) == (None, None, None, None)
    with pytest.raises(er.TableFileError, match="no whole step has arrived in"), served.step():
        pass
    shutil.copytree(source.folder, tmp_path / "copy")
    (file,) = (tmp_path / "copy" / "base").rglob("*.rows")
    size = file.stat().st_size
    os.truncate(file, size - 8)
    before = time.time()
    assert not served.refresh()
    waiting = served.waiting
    assert waiting is not None
    assert (waiting.number, before <= waiting.since <= time.time()) == (1, True)
    assert waiting.reason == f"{file} is damaged: expected {size} bytes, got {size - 8}."
    assert not served.refresh()
    assert served.waiting is not None
    assert served.waiting.since == waiting.since
    file.unlink()
    assert not served.refresh()
    with pytest.raises(er.TableFileError, match=r"It waits: .*\.rows is missing"), served.step():
        pass
    assert "step None" in repr(served)
    shutil.copytree(source.folder, tmp_path / "copy", dirs_exist_ok=True)
    assert served.refresh()
    assert served.waiting is None
    served.close()
    with pytest.raises(er.ClosedTableError, match=r"is closed\. Make a new one"):
        served.refresh()
    served.close()


def test_patience(source: Source, monkeypatch: pytest.MonkeyPatch):
    served, now = er.Subscriber(source.folder, patience="1min"), time.time()
    torn = source.folder / "manifest" / "0000000002.json"
    torn.write_text("{")
    assert not served.refresh()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    with pytest.raises(
        er.CorruptTableError, match=r"step 2 in .* is not whole since 6\d s: .*0002\.json is damaged: "
    ) as at:
        served.refresh()
    assert str(at.value).endswith("or remove it if it is not there any more. Step 1 is still shown.")
    torn.unlink()
    assert not served.refresh()
    assert served.waiting is None
    for wrong in (-1, "soon", True):
        with pytest.raises(er.ArgumentError, match="`patience` must be seconds, or a time"):
            er.Subscriber(source.folder, patience=wrong)
    served.close()


def test_a_folder_that_is_trained(source: Source):
    with pytest.raises(er.TableFileError, match="has tables that are trained, and no published rows"):
        er.Subscriber(str(source.table.path))


def test_a_newer_format(source: Source):
    served = er.Subscriber(source.folder)
    data = (source.folder / "manifest" / "0000000001.json").read_bytes()[:-66].replace(b'"format":8', b'"format":10')
    line = data + b"\n" + hashlib.sha256(data).hexdigest().encode() + b"\n"
    (source.folder / "manifest" / "0000000007.json").write_bytes(line)
    with pytest.raises(er.NewerFormatError, match="Install a newer embedrock"):
        served.refresh()
    assert served.number == 1
    served.close()


def carry(carrier: Carrier, files: Mapping[str, bytes], names: Iterable[str] | None = None) -> None:
    for name in files if names is None else names:
        carrier._put(name, files[name])


def test_two_publishers_of_two_chains():
    system = FaultFS()
    one, two = Run(system, 1), Run(system, 2, "/other")
    one.train(30)
    two.train(30)
    one.publish()
    first = two.publish(folder="/second")
    one.train(5)
    later = one.publish()
    carrier = Carrier(two.steps, np.random.default_rng(0))
    carry(carrier, first.files)
    served = on(carrier.system).Subscriber(COPY, memory="1MiB", patience=1e9)
    carry(carrier, later.files, later.needed)
    with pytest.raises(er.TableFileError, match="two publishers write to") as caught:
        served.refresh()
    assert first.chain in str(caught.value)
    assert later.chain in str(caught.value)
    assert served.number == first.number
    with served.step() as step:
        assert not differences(step, first)


def test_two_publishers_of_one_chain():
    system = FaultFS()
    run = Run(system, 1)
    run.train(60)
    run.publish()
    copy = {path: data for path, data in system.files().items() if path.startswith(SOURCE)}
    for folder in (
        "/second",
        *(f"/second/{name}" for name in ("manifest", "base", "delta", "history", "dense", "changes")),
    ):
        system.mkdir(folder)
    for path in copy:
        if path.startswith(f"{SOURCE}/base/") and not system.exists(f"/second/base/{path.split('/')[3]}"):
            system.mkdir(f"/second/base/{path.split('/')[3]}")
    for path, data in copy.items():
        system.write_file(path.replace(SOURCE, "/second"), data)
    steps = []
    for folder in (SOURCE, "/second", "/second"):
        run.train(5)
        steps.append(run.publish(folder=folder))
    assert len({step.chain for step in steps}) == 1
    carrier = Carrier(steps, np.random.default_rng(0))
    carry(carrier, steps[0].files)
    served = on(carrier.system).Subscriber(COPY, memory="1MiB", patience=1e9)
    assert served.number == 2
    carry(carrier, steps[2].files, steps[2].needed)
    with pytest.raises(er.TableFileError, match="two publishers write to"):
        served.refresh()
    assert served.number == 2


def test_a_disk_that_is_full():
    run = Run(FaultFS(), 8)
    run.train(60)
    first = run.publish()
    before = set(run.system.files())
    run.train(60)
    run.group.commit()
    run.system.capacity = sum(map(len, run.system.files().values())) + 5000
    with pytest.raises(OSError, match="No space left") as caught:
        publish(run, run.system)
    assert caught.value.errno == errno.ENOSPC
    assert {path for path in run.system.files() if path.startswith(SOURCE)} <= before
    with on(run.system).Subscriber(SOURCE, memory="1MiB", patience=0) as served:
        with served.step() as step:
            assert not differences(step, first)
        run.system.mend()
        last = run.publish()
        assert served.refresh()
        with served.step() as step:
            assert not differences(step, last)


@pytest.mark.parametrize("wrong", [0, float("nan"), float("inf"), "1s", True])
def test_times_that_are_none(source: Source, wrong: object):
    served = source.folder
    with er.Subscriber(served) as subscriber, pytest.raises(er.ArgumentError, match="`every` of follow must be"):
        subscriber.follow(wrong)  # pyright: ignore
    with pytest.raises(er.ArgumentError, match="`patience` must be seconds"):
        er.Subscriber(served, patience=float("nan"))


def test_changes_are_read_before_the_block_ends(source: Source):
    with er.Subscriber(source.folder) as served:
        with served.step() as step:
            changes = step["users"].changes(None)
        source.publish()
        assert served.refresh()
        with pytest.raises(er.ClosedTableError, match=r"commit 1 was closed meanwhile\. Read them before"):
            list(changes)
