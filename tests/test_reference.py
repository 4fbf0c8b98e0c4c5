"""The API pages have every public name, and docstrings say of each what a reader needs."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from docs_site import PACKAGES, ROOT, made_by_others, shown_names
from embedrock.storage.online_curve import FACTORS
from pages import keys_of

# Names that are only for Embedrock's own modules, although they have no underscore.
INTERNAL = {"is_open_here", "storage", "subject", "table_lock"}
INTERNAL |= {"check_step", "executor", "over", "read_parts", "read_rows", "side"}
INTERNAL |= {"made", "members", "open_tables", "pools"}
BROWSERS = "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"
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
def named_in(doc: str, section: str = "Args") -> set[str]:
    """Return the parameters, or other names, that a section of a docstring explains."""
    found = set[str]()
    for body in re.findall(rf"^{section}:\n((?:(?: .*)?\n)*)", f"{doc}\n", re.MULTILINE):
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
    call: Any = plain.fget if isinstance(plain, property) else getattr(plain, "func", plain)
    doc, is_member = inspect.cleandoc(call.__doc__ or ""), name.count(".") == 2
    if not re.search(r"[.:](\s|$)", doc.partition("\n\n")[0]):
        yield f"{name}: no sentence first"
    is_class = inspect.isclass(call)
    if is_class and (issubclass(call, BaseException) or name in made_by_others() or hasattr(call, "_fields")):
        return
    if not isinstance(plain, property) and callable(call):
        signature = inspect.signature(call)
        explained = named_in(doc)
        by_other = "which documents" in doc  # "Optimizer of rows by `er.Adam`, which documents ..."
        for parameter in [] if by_other else signature.parameters.values():
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
    assert {name for name in shown if name.count(".") == 1} - found.keys() == set(), "on a page, and not public"
    explained = {name: what for name, what in found.items() if name in shown}
    for name, kind in [each for each in explained.items() if inspect.isclass(each[1])]:
        explained |= members(name, kind)
    gaps = [gap for name, what in explained.items() for gap in lacks(name, what)]
    assert gaps == []


@pytest.mark.parametrize("kind", [er.Table, er.Group, er.Vocabulary, er.Subscriber])
def test_pages_show_every_public_member(tmp_path: Path, kind: type):
    given = {er.Table: {"rows": 1, "dim": 1}, er.Subscriber: {"folder": tmp_path}}
    with kind(**given.get(kind, {})) as made:
        own = {name for name in dir(made) if not name.startswith("_")} - INTERNAL
    shown = {full.rpartition(".")[2] for full in shown_names() if full.startswith(f"er.{kind.__name__}.")}
    assert own == shown | named_in(inspect.cleandoc(kind.__doc__ or ""), "Attributes")


def test_gaps_are_found():
    def wrong(given: int, of_no_use: int = 0) -> None:
        """wrong

        Args:
            given: a number.
        """
        raise ValueError(given)

    name = "er.wrong"
    words = "no sentence first", "no line for of_no_use", "no Raises", "no example"
    assert list(lacks(name, wrong)) == [f"{name}: {gap}" for gap in words]


def test_the_page_of_errors_has_each_with_its_builtin():
    page = next(path for name, path in shown_names().items() if name == "er.IdError").read_text()
    listed = dict(re.findall(r"^\| `(\w+\.\w+)` \| `?(\w+)", page, re.MULTILINE))
    found = {id(what): what for what in public().values() if inspect.isclass(what) and issubclass(what, BaseException)}
    known = public()
    assert {id(known[name]) for name in listed} | {id(er.EmbedrockError)} == found.keys()
    for name, builtin in listed.items():
        if issubclass(known[name], er.EmbedrockError):
            assert issubclass(known[name], getattr(builtins, builtin)), name


def test_the_page_of_stats_has_their_keys(tmp_path: Path):
    every, disk = keys_of("Every table"), keys_of("Every table", "On disk")
    later = {key for key in disk if key.startswith("missed_")}
    disk -= {*later, "parts"}

    def trained(**options: Any) -> set[str]:
        with er.Table(rows=1000, dim=4, rule=er.SGD(), **options) as table:
            table.update(range(9), np.ones((9, 4)))
            if table.is_on_disk:
                table.commit()
            return set(table.stats())

    rows = keys_of("Dynamic rows")
    assert trained() == trained(directory="hashed") == every
    assert trained(path=tmp_path / "a.rock") == disk
    assert trained(eviction=er.Eviction(max_rows=50)) == every | rows - {"pending", "sketch_error", "gradients_shared"}
    assert trained(admission=er.Admission(2)) == every | rows - {"gradients_shared"}
    assert trained(admission=er.Admission(2, default="shared"), path=tmp_path / "b.rock") == disk | rows
    with er.open(tmp_path / "a.rock", mode="r", memory="map") as reader:
        assert set(reader.stats()) == disk
    assert later == {f"missed_x{factor:g}" for factor in FACTORS} | {"missed_new"}

    with er.Group() as group:
        group.table("a", rows=9, dim=4)
        in_ram = keys_of("Groups") | {"rows_touched", "bytes_used", "budget_bytes"}
        assert set(group.stats()) == in_ram
    with er.Group(path=tmp_path / "g.rock") as group:
        group.table("a", rows=9, dim=4)
        assert set(group.stats()) == in_ram | disk - every
    assert set(er.Vocabulary().stats()) == keys_of("Vocabularies")


def test_the_page_of_stats_has_those_of_jax():
    ej = pytest.importorskip("embedrock.jax")
    tables = ej.Tables({"NAME": er.Table(rows=9, dim=4)})
    assert set(tables.stats()) == keys_of("ej.Tables") - {"size"}


def build(folder: Path) -> str:
    """Build the site, and return what was printed."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def in_browser(page: str) -> tuple[str, list[str]]:
    """Return a page after its scripts have run, and what they wrote to the console."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    words += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000"]
    done = subprocess.run([browser, *words, page], capture_output=True, text=True, timeout=120)
    return done.stdout, re.findall(r".*CONSOLE.*", done.stderr)


@pytest.mark.slow
def test_the_site(tmp_path: Path):
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    assert "WARNING" not in build(site)
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert {"Table.lookup", "er.Table", "er.CommitError"} <= {entry["title"] for entry in index}
    sources = re.compile(r"<(?:script|link|img|source)[^>]*(?:src|href|srcset)=\"?(https?:[^\"> ]*)")
    for page in site.rglob("*.html"):
        fetched = sources.findall(page.read_text())
        assert fetched == [], page
        assert " at 0x" not in page.read_text(), page
    for page, text in (
        ("index.html", "Embedding tables of any size"),
        ("api/tables.html", 'id="embedrock.Table.commit"'),
        ("disk.html", 'href="api/tables.html#embedrock.open"'),
        ("index.html?q=Table.lookup", 'href="file://[^"]*#embedrock.Table.lookup"'),
    ):
        seen, console = in_browser(f"{site.as_uri()}/{page}")
        assert re.search(text, seen), page
        assert console == []
    (tmp_path / "wrong.html").write_text("<script>console.warn('wrong')</script>")
    assert len(in_browser((tmp_path / "wrong.html").as_uri())[1]) == 1
