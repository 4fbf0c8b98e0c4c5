"""`tell`: shown where nobody has set up logging, and as logging was set up elsewhere."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import pytest

import programs
from embedrock.system.log import _LAST_RESORT, tell

PROGRAM = """
import logging, sys
from embedrock.system.log import tell
{first}
tell("one")
{then}
tell("two")
"""


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ("", "", ["embedrock: one", "embedrock: two"]),
        ("logging.basicConfig(level='INFO', format='root %(name)s %(message)s')", "",
         ["root embedrock one", "root embedrock two"]),
        ("logging.basicConfig()", "", []),  # WARNING and above were asked for
        ("logging.getLogger('embedrock').setLevel('WARNING')", "", []),
        ("", "logging.basicConfig(level='INFO', format='root %(message)s')", ["embedrock: one", "root two"]),
        ("", "logging.basicConfig()", ["embedrock: one"]),  # the same as if it had come first
        ("", "logging.getLogger('embedrock').setLevel('WARNING')", ["embedrock: one"]),
        ("", "logging.getLogger('embedrock').addHandler(logging.NullHandler())", ["embedrock: one"]),
        ("logging.getLogger('embedrock').propagate = False", "", ["embedrock: one", "embedrock: two"]),
        ("logging.getLogger('embedrock').disabled = True", "", []),
        ("logging.root.setLevel('ERROR')", "", []),
        ("", "logging.disable(logging.INFO)", ["embedrock: one"]),
        ("import absl.logging as a; a.use_absl_handler(); a.set_verbosity(0); a.set_stderrthreshold('info'); "
         "a.get_absl_handler().setFormatter(logging.Formatter('absl %(message)s'))", "a.set_verbosity(-1)",
         ["WARNING: Logging before flag parsing goes to stderr.", "absl one"]),
        ("sys.stderr = None", "", []),
    ],
)  # fmt: skip
def test_a_line_is_shown_as_logging_was_set_up(first: str, then: str, said: list[str]):
    program = PROGRAM.format(first=first, then=then)
    done = programs.run(program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == said


def test_a_line_names_its_caller_and_is_a_record_like_any_other(caplog: pytest.LogCaptureFixture):
    tell("hidden", name="embedrock.advice")
    with caplog.at_level("INFO", "embedrock"):
        tell("100% shown", name="embedrock.advice")
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == ("embedrock.advice", "INFO", "100% shown")
    assert (record.filename, record.funcName) == (
        Path(__file__).name,
        test_a_line_names_its_caller_and_is_a_record_like_any_other.__name__,
    )


def test_the_level_of_our_logger_is_that_of_advice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    tell("shown", logging.WARNING, "embedrock.advice")
    monkeypatch.setattr(logging.getLogger("embedrock"), "level", logging.ERROR)
    logging.root.manager._clear_cache()  # pyright: ignore[reportAttributeAccessIssue]  # of levels
    tell("hidden", logging.WARNING, "embedrock.advice")
    assert capsys.readouterr().err == "embedrock: shown\n"


@pytest.mark.parametrize("kind", ["closed", "broken", "none"])
def test_a_stderr_that_takes_no_line_stops_no_program(monkeypatch: pytest.MonkeyPatch, kind: str):
    read, write = os.pipe()
    os.close(read)  # nobody reads
    with open(write, "wb", buffering=0) as stream:
        monkeypatch.setattr("sys.stderr", None if kind == "none" else io.TextIOWrapper(stream, write_through=True))
        if kind == "closed":
            stream.close()
        _LAST_RESORT.emit(logging.LogRecord("embedrock", logging.INFO, "", 0, "resumed", None, None))
