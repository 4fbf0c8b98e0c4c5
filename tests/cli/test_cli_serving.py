"""``embedrock publish`` and ``embedrock follow``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.cli.main import DONE, FAILED, main


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    with er.Table(9, 2, path="users.rock", init=er.Zeros()) as made:
        made.assign([1, 4], np.ones((2, 2), np.float32))
        made.commit(step=7)
    return "users.rock"


@pytest.mark.parametrize("dtype", [None, "float16", "int8", "int4"])
def test_a_table_is_published_and_shown(table: str, dtype: str | None, capsys: pytest.CaptureFixture[str]):
    words = ["--dtype", dtype] if dtype else []
    assert main(["publish", table, "served", *words]) == DONE
    assert "served: step 1, all rows: 2 written, 0 deleted" in capsys.readouterr().out
    assert main(["publish", table, "served", *words]) == DONE
    assert "nothing new since step 1" in capsys.readouterr().out
    assert main(["follow", "served", "--json"]) == DONE
    shown = json.loads(capsys.readouterr().out)
    assert (shown["number"], shown["step"], shown["waiting"]) == (1, 7, None)
    with er.Subscriber("served") as served:
        np.testing.assert_array_equal(served.lookup({"users": [1, 2, 4]})["users"], [[1, 1], [0, 0], [1, 1]])


def test_a_step_that_waits_is_shown_with_its_file(table: str, capsys: pytest.CaptureFixture[str]):
    main(["publish", table, "served"])
    lost = next(Path("served/base").rglob("*.rows"))
    lost.unlink()
    capsys.readouterr()
    assert main(["follow", "served"]) == DONE
    out = capsys.readouterr().out
    assert "served: nothing yet; waits for step 1: " in out
    assert lost.name in out


def test_a_patience_that_is_no_time(table: str, capsys: pytest.CaptureFixture[str]):
    assert main(["follow", "served", "--patience", "soon"]) == FAILED
    assert "`patience` must be seconds, or a time such as \"5min\": got 'soon'." in capsys.readouterr().err
