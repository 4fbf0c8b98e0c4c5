"""Code that messages name: every function, method, argument and command in it exists, and takes what it is given."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.cli.main import _parser

SOURCE = Path(er.__file__).parent
OURS = {"er": er, "table": er.Table, "layer.table": er.Table, "group": er.Group, "vocabulary": er.Vocabulary, "np": np}
FRAMEWORKS = {
    "ert": "embedrock.torch",
    "erk": "embedrock.keras",
    "torch": "torch",
    "keras": "keras",
    "tf": "tensorflow",
}
CALL = re.compile(
    r"(?<![\w.'\"])(layer\.table|er|ert|erk|table|group|vocabulary|np|torch|keras|tf)\.([a-zA-Z_][\w.]*)\("
)
COMMAND = re.compile(r"`embedrock ((?:[a-z]+)(?: [^`]*)?)`")
WORDS = re.compile(r"\b(old|new|another) (path|one)\b")  # that stand for a value


@functools.cache
def messages() -> list[tuple[str, str]]:
    return list(_messages())


def _messages() -> Iterator[tuple[str, str]]:
    """Go through the texts in the sources, but for docstrings; what is filled in is X."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
        }
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if id(node) in docs | parts:
                continue
            where = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                values = [value.value if isinstance(value, ast.Constant) else "X" for value in node.values]
                yield where, "".join(map(str, values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield where, node.value


def balanced(text: str, start: int) -> str | None:
    """Return the code from `start` up to the bracket that closes its first one; None if there is none."""
    depth = 0
    try:
        for token in tokenize.generate_tokens(StringIO(text[start:]).readline):
            depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
            if token.string == ")" and not depth:
                return text[start : start + token.end[1]] if token.end[0] == 1 else None
    except (tokenize.TokenError, SyntaxError, IndentationError):
        pass
    return None


@functools.cache
def calls() -> list[tuple[str, str]]:
    found = []
    for where, text in messages():
        for match in CALL.finditer(text):
            code = balanced(text, match.start())
            if code is not None:
                found.append((where, code))
    return found


def test_there_are_many():
    assert len(calls()) > 150


@pytest.mark.parametrize("front", ["ours", *FRAMEWORKS])
def test_calls(front: str):
    """A call of ours takes the arguments that it is given by name, and as many as it is given without."""
    if front != "ours":
        pytest.importorskip(FRAMEWORKS[front])
    wrong, space = [], dict(OURS)
    if front != "ours":
        space = {front: importlib.import_module(FRAMEWORKS[front])}
    for where, code in calls():
        match = CALL.match(code)
        assert match is not None
        if match[1] not in space:
            continue
        if match[2].startswith("X"):  # the name is filled in
            continue
        try:
            call = ast.parse(WORDS.sub("value", code), mode="eval").body
        except SyntaxError:
            wrong.append(f"{where}: {code}: no code")
            continue
        while isinstance(call, ast.Call | ast.Attribute | ast.Subscript) and not _is_root(call, match):
            call = call.func if isinstance(call, ast.Call) else call.value  # of a chain of calls, the first
        thing: Any = space[match[1]]
        try:
            for name in match[2].split("."):
                thing = getattr(thing, name)
        except AttributeError as error:
            wrong.append(f"{where}: {code}: {error}")
            continue
        assert isinstance(call, ast.Call)
        wrong += [f"{where}: {code}: {told}" for told in _misfits(call, thing, isinstance(space[match[1]], type))]
    assert not wrong, "\n".join(wrong)


def _is_root(call: ast.expr, match: re.Match[str]) -> bool:
    return isinstance(call, ast.Call) and ast.unparse(call.func) == f"{match[1]}.{match[2]}"


def _misfits(call: ast.Call, thing: Any, is_method: bool) -> list[str]:
    """Return what does not fit, as a text or none."""
    placeholders = any(isinstance(each, ast.Constant) and each.value is ... for each in call.args)
    is_open = placeholders or any(isinstance(each, ast.Starred) for each in call.args)
    try:
        signature = inspect.signature(thing)
        given = [None] * (len(call.args) + is_method)
        options = {word.arg: None for word in call.keywords if word.arg}
        if is_open or not call.args:
            signature.bind_partial(**options)
        else:
            signature.bind_partial(*given, **options)
    except ValueError:  # of C
        return []
    except TypeError as error:
        return [str(error)]
    return []


def commands() -> list[tuple[str, str]]:
    return [(where, match[1]) for where, text in messages() for match in COMMAND.finditer(text)]


def test_commands():
    """A command has the name and the options that messages give it."""
    parser = _parser()
    (sub,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    wrong = []
    for where, command in commands():
        name, *rest = command.split()
        if name not in sub.choices:
            wrong.append(f"{where}: {command}: no such command")
            continue
        known = {option for action in sub.choices[name]._actions for option in action.option_strings}
        wrong += [f"{where}: {command}: {word}" for word in rest if word.startswith("--") and word not in known]
    assert len(commands()) > 5
    assert not wrong, "\n".join(wrong)
