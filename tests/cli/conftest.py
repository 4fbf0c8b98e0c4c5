"""One parser of the command line for all tests: to make it anew for each command takes longer than most of them."""

from __future__ import annotations

from functools import cache

import pytest

from embedrock.cli import main as command
from embedrock.cli.terminal.arguments import Parser
from embedrock.table.numbers import runtime_folder

_make = command._parser


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
