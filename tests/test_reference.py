"""The API pages have every public name, and docstrings say of each what a reader needs."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from docs_site import PACKAGES, made_by_others, shown_names

# Gaps that are known, "ert.Embedding: no example". A new one is an error, and so is one that is gone.
LACKING: set[str] = set()
# Names that are only for Embedrock's own modules, although they have no underscore.
INTERNAL = {
    "er.Table": {"executor", "group", "is_open_here", "over", "read_parts", "side", "storage", "subject", "table_lock"},
    "er.Group": {"is_open_here", "made", "members", "pools", "storage", "subject", "table_lock"},
    "er.Vocabulary": {"is_open_here"},
    "er.Subscriber": set(),
}
ORBAX = "TablesSave", "TablesRestore"


def public() -> dict[str, Any]:
    """Return every public object by its name, "er.Table", also those that users of one front end get from another."""
    found = {}
    for alias, package in PACKAGES.items():
        module = pytest.importorskip(package)
        names = getattr(module, "__all__", ORBAX)
        found |= {f"{alias}.{name}": getattr(module, name) for name in names}
    return found


def members(name: str, kind: Any) -> dict[str, Any]:
    """Return the members of a class that API pages show, by name."""
    own = (full.rpartition(".")[2] for full in shown_names() if full.startswith(f"{name}."))
    return {f"{name}.{member}": inspect.getattr_static(kind, member) for member in own}


@functools.cache
def named_in(doc: str) -> set[str]:
    """Return the parameters that a docstring explains."""
    found = set[str]()
    for body in re.findall(r"^Args:\n((?:(?: .*)?\n)*)", f"{doc}\n", re.MULTILINE):
        for names in re.findall(r"^ {4}((?:\w+,\s+)*\w+):", body, re.MULTILINE):
            found |= set(re.split(r",\s+", names))
    return found


def raises(function: Any) -> bool:
    """Return whether a function raises errors itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


def lacks(name: str, what: Any) -> Iterator[str]:
    """Yield what the docstring of a public object or member lacks."""
    plain = getattr(what, "__func__", what)
    call = plain.fget if isinstance(plain, property) else getattr(plain, "func", plain)
    doc, is_member = inspect.cleandoc(call.__doc__ or ""), name.count(".") == 2
    if not re.match(r"[^\n].*?[.:](\s|$)", doc, re.DOTALL):
        yield f"{name}: no sentence first"
    if inspect.isclass(call) and (issubclass(call, BaseException) or name in made_by_others() or hasattr(call, "_fields")):
        return
    if not isinstance(plain, property) and callable(call):
        signature = inspect.signature(call)
        explained = named_in(doc) | named_in(inspect.cleandoc(call.__init__.__doc__ or "") if inspect.isclass(call) else "")
        for parameter in signature.parameters.values():
            by_reference = parameter.kind is parameter.KEYWORD_ONLY and "options" in explained
            if parameter.name not in explained and parameter.name not in ("self", "cls") and not by_reference:
                yield f"{name}: no line for {parameter.name}"
        if " at 0x" in str(signature):
            yield f"{name}: an address in its signature"
    if inspect.isfunction(inspect.unwrap(call)) and raises(call) and "Raises:" not in doc:
        yield f"{name}: no Raises"
    if not is_member and not inspect.isabstract(call) and ">>>" not in doc:
        yield f"{name}: no example"


def test_every_public_name_is_explained():
    found, shown = public(), shown_names()
    on_pages = {id(what) for name, what in found.items() if name in shown}
    assert {name for name, what in found.items() if id(what) not in on_pages} == set(), "not on a page of docs/api"
    gaps = {gap for name, what in found.items() if name in shown for gap in lacks(name, what)}
    gaps |= {
        gap
        for name, kind in found.items()
        if name in shown and inspect.isclass(kind)
        for member, what in members(name, kind).items()
        for gap in lacks(member, what)
    }
    assert sorted(gaps ^ LACKING) == []
