"""One parser of the command line for all tests, as a new one takes longer than most of them; and what runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from embedrock.cli import main as command
from embedrock.cli.terminal.arguments import Parser
from embedrock.table.numbers import runtime_folder

_make = command._parser
Run = Callable[..., dict[str, Any]]
Refused = Callable[..., str]


@cache
def parser_of(runtime: str) -> Parser:
    """Return the parser where tables in RAM keep their numbers in this folder, which is a default."""
    del runtime
    made = _make()
    assert isinstance(made, Parser)
    return made


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "_parser", lambda: parser_of(str(runtime_folder())))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with --json that must succeed, and return what it tells."""

    def runs(*arguments: object, status: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert command.main([*map(str, arguments), "--json"]) == status, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return runs


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must fail, and return the one line that it tells."""

    def runs(*arguments: object) -> str:
        capsys.readouterr()
        assert command.main(list(map(str, arguments))) == command.FAILED
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("embedrock: error: ")
        assert told.err.count("\n") == 1
        return told.err

    return runs
