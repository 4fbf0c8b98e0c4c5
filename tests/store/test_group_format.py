"""The format of groups is what docs/format.md says: a golden group, and a reader in plain NumPy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.errors import CorruptTableError
from embedrock.store import manifest as manifests
from embedrock.store import publishing
from format_reader import read_group, read_history, read_manifest
from golden.make_group import GROUP, digests, in_memory, step
from on_system import on
from suites import FaultFS


def records_of(table: er.Table) -> dict[int, bytes]:
    state = table.state()
    return dict(zip(state["ids"].tolist(), map(bytes, state["records"]), strict=True))


@pytest.mark.parametrize("back", [0, 1])
def test_the_golden_group_is_the_same_bytes_as_in_ram(back: int) -> None:
    newest = read_manifest(GROUP)["commit"]
    found, expected = read_group(GROUP, newest - back), in_memory(3 - back)
    assert list(found) == list(expected)
    for name, table in expected.items():
        member, records = found[name]
        assert records == records_of(table)
        assert (member["steps"], member["record_bytes"]) == (table.steps, table.spec.record_bytes)
        history = {key[8:]: array for key, array in table.state().items() if key.startswith("history_")}
        for key, array in read_history(GROUP, member).items():
            np.testing.assert_array_equal(array, history.pop(key))
        assert not history


def test_the_golden_group_opens_and_goes_on(tmp_path: Path) -> None:
    shutil.copytree(GROUP, tmp_path / "g")
    expected = in_memory(3)
    with er.open(tmp_path / "g", kind=er.Group) as group:
        assert not group.verify().problems
        for tables in ({name: group[name] for name in group}, expected):
            step(tables, 3)
        group.commit()
        group.compact()
    for name, (_, records) in read_group(tmp_path / "g").items():
        assert records == records_of(expected[name])


def test_the_golden_group_stays_as_it_is() -> None:
    assert digests(GROUP) == json.loads(GROUP.with_name("group-4-digests.json").read_text())
    manifest = read_manifest(GROUP)
    assert (manifest["format"], manifest["pools"][1]["parts"], manifest["pools"][1]["dropped"]) == (4, 3, [0])


def bad(change: Any) -> str:
    """Return why a manifest of the golden group is refused that was changed."""
    body = read_manifest(GROUP)
    change(body)
    with pytest.raises(CorruptTableError) as caught:
        manifests.parse(publishing.to_bytes(body), "m.json")
    return str(caught.value)


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("each name of a member once", lambda body: body["members"][1].update(name="adam")),
        ("each part of a pool once", lambda body: body["members"][2].update(part=1)),
        ("the pool of 'adam' below 3", lambda body: body["members"][0].update(pool=3)),
        ("the part of 'sgd' below 3", lambda body: body["members"][1].update(part=3)),
        ("not to be dropped", lambda body: body["members"][1].update(part=0)),
        ("the part of 'open' below None", lambda body: body["members"][3].update(part=0)),
        ("numbers that ascend, below 3", lambda body: body["pools"][1].update(dropped=[3])),
        ("numbers that ascend, below 3", lambda body: body["pools"][1].update(dropped=[0, 0])),
        ("as its files say", lambda body: body["members"][1].update(count=10**6)),
        ("keys of ", lambda body: body["pools"][1]["delta"][0].update(lo=-5)),
        ("each file once", lambda body: body["pools"][0].update(delta=2 * body["pools"][0]["delta"])),
        ("an entry of `members` with", lambda body: body["members"][0].update(more=1)),
        ("an entry of `pools` with", lambda body: body["pools"][0].pop("parts")),
        ("`name` of an entry of `members`", lambda body: body["members"][0].update(name="")),
    ],
)
def test_what_cannot_be_true_is_refused(said: str, change: Any) -> None:
    assert said in bad(change)


def test_a_member_of_another_layout_than_its_pool_is_refused() -> None:
    system = FaultFS()
    with on(system).Group(path="/g", memory="1MiB") as group:
        group.table("a", 10, 4, rule=er.SGD())
        group.commit()
    body = json.loads(system.files()["/g/manifest/0000000001.json"].split(b"\n")[0])
    body["members"][0]["spec"]["dim"] = 5
    system.write_file("/g/manifest/0000000001.json", publishing.to_bytes(body))
    with pytest.raises(CorruptTableError, match="expected records of 32 bytes, as 'a' has, got 16"):
        on(system).open("/g")
