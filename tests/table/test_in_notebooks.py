"""What notebooks show: names that `dir` lists, and tables of facts in HTML."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er

INTERNAL = {
    "subject",
    "storage",
    "table_lock",
    "executor",
    "over",
    "members",
    "pools",
    "in_graph",
    "looked_up",
    "fetcher",
}


class Cells(HTMLParser):
    """Text of an HTML table: its caption, and its lines of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.caption, self.lines, self._at = "", list[list[str]](), ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._at = tag
        if tag == "tr":
            self.lines.append([])

    def handle_data(self, data: str) -> None:
        if self._at == "caption":
            self.caption += data
        else:
            self.lines[-1].append(data)


def check_listed(shown: object, *expected: str) -> None:
    names = dir(shown)
    assert INTERNAL.isdisjoint(names)
    assert {*expected} <= {*names}


def test_dir_has_the_public_names(tmp_path: Path):
    assert {*dir(er)} == {*er.__all__, "__version__"}
    with er.Table(rows=10, dim=2, path=tmp_path / "t") as table, er.Vocabulary() as words, er.Group() as group:
        check_listed(table, "lookup", "update", "commit", "stats", "path")
        check_listed(group, "lookup", "table", "rename", "memory")
        check_listed(words, "add", "lookup", "strings", "path")
        assert [name for name in dir(table) if name.startswith("_") and not name.startswith("__")] == []


def test_a_table_is_shown_with_its_facts(tmp_path: Path):
    table = er.Table(10**9, 4, path=tmp_path / "a<b>", rule=er.SGD(lr=0.5), init=er.Zeros(), name="<users>")
    table.update([7], np.ones((1, 4)))
    table.commit(step=1000)
    shown = Cells(table._repr_html_())
    facts = dict(shown.lines)
    assert shown.caption == "Table <users>"
    assert (facts["rows"], facts["steps"]) == ("1,000,000,000", "1")
    assert facts["dim, dtype, rule"] == f"4, float32, {er.SGD(lr=0.5)}"
    assert facts["now"].startswith(f"1 row touched, on disk at {str(tmp_path / 'a<b>')!r} behind a cache in RAM, ")
    assert facts["now"].endswith(" of files, last commit 1 (step 1,000)")
    assert "<b>" not in table._repr_html_()
    with er.open(tmp_path / "a<b>", mode="r") as reader:
        assert "read only" in dict(Cells(reader._repr_html_()).lines)["now"]
    table.close()
    assert table._repr_html_().endswith("closed)")
    assert "&lt;users&gt;" in table._repr_html_()
    assert Cells(er.Table(None, 2)._repr_html_()).lines[0] == ["rows", "open ids"]


def test_a_group_is_shown_with_its_first_members(tmp_path: Path):
    with er.Group(path=tmp_path / "g", memory="1MiB") as group:
        for number in range(33):
            group.table(f"t{number}", 10 + number, 2, rule=er.Adam(lr=0.5))
        group.commit()
        shown = Cells(group._repr_html_())
        assert shown.caption.startswith(f"Group on disk at {str(tmp_path / 'g')!r}: ")
        assert shown.caption.endswith(" of files, last commit 1")
        assert shown.lines[0] == ["name", "rows", "rows touched", "dim", "dtype", "rule", "steps"]
        assert shown.lines[3] == ["t2", "12", "0", "2", "float32", str(er.Adam(lr=0.5)), "0"]
        assert (len(shown.lines), shown.lines[-1]) == (32, ["and 3 more"])
    assert group._repr_html_().startswith("Group(")


def test_kind_must_be_what_the_folder_holds(tmp_path: Path):
    er.Group(path=tmp_path / "g").close()
    er.Table(5, 2, path=tmp_path / "t").close()
    for path, kind, held in (("g", er.Table, "Group"), ("t", er.Group, "Table"), ("t", "x", "Table")):
        got = getattr(kind, "__name__", kind)
        with pytest.raises(er.TableFileError) as caught:
            er.open(tmp_path / path, kind=kind)  # pyright: ignore[reportCallIssue, reportArgumentType]
        expected = f"`kind` must be er.{held}, as the folder holds one, or None: got {got!r}. Pass kind=er.{held}: "
        assert expected in str(caught.value)
    er.open(tmp_path / "g", kind=er.Group).close()  # nothing is left open
    er.open(tmp_path / "t", kind=er.Table).close()
