"""Code in the docs runs: ```python blocks of the pages, and the examples in docstrings.

The blocks of a page share one namespace and run in order, in an empty folder. A block that cannot run says
why on its first line: ```python no-run: needs 64 GiB of RAM. The files and links that pages name exist.
"""

from __future__ import annotations

import doctest
import importlib
import re
import tomllib
from pathlib import Path

import pytest

import embedrock
from pages import blocks_of, run_blocks, run_page

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "CHANGELOG.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
WIDTH = 120
ELSEWHERE = {
    "trainers.md": "tests/pytorch/test_trainers.py",
    "transformers.md": "tests/pytorch/test_pretrained_models.py",
}
OPTIONAL = {"torch", "tqdm", "keras", "tensorflow", "jax", "orbax"}


@EVERY_PAGE
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if page.name in ELSEWHERE:
        pytest.skip(f"{ELSEWHERE[page.name]} runs it: what it imports takes seconds")
    monkeypatch.chdir(tmp_path)
    run_page(page)


TREE_PATH = re.compile(r"\b(?:src|tests|docs|tools)/[\w./*-]*[\w*]|\bexamples/\w+\.py")
PACKAGE_PATH = re.compile(r"`((?:[\w*]+/)+[\w*]+\.py)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```[ \t]*$", re.MULTILINE | re.DOTALL)


def missing_paths(text: str) -> list[str]:
    """Return the paths that a page names and that are not there: from the repository's root, or the package's."""
    roots = REPOSITORY, REPOSITORY / "src" / "embedrock"
    named = {*TREE_PATH.findall(text), *PACKAGE_PATH.findall(text)}
    return sorted(path for path in named if not any(any(root.glob(path)) for root in roots))


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    return {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in HEADING.findall(CODE.sub("", text))
    }


def broken_links(text: str, page: Path) -> list[str]:
    """Return the links of a page, within the repository, that lead nowhere."""
    broken = []
    for path, anchor in LINK.findall(CODE.sub("", text)):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target.read_text())):
            broken.append(f"{path}#{anchor}")
    return broken


def wide_lines(text: str) -> list[str]:
    """Return the lines that do not fit, outside of tables and code."""
    return [line for line in CODE.sub("", text).splitlines() if len(line) > WIDTH and not line.startswith("|")]


@EVERY_PAGE
def test_page_names_what_is_there(page: Path):
    text = page.read_text()
    assert missing_paths(text) == []
    assert broken_links(text, page) == []


@EVERY_PAGE
def test_page_is_wrapped(page: Path):
    assert wide_lines(page.read_text()) == []


def test_readme_begins_with_the_two_commands_of_a_checkout():
    readme = (REPOSITORY / "README.md").read_text()
    first = readme.split("```bash\n", 1)[1].split("```")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


def rooms_of(tree: str) -> list[str]:
    """Return the packages and modules of a drawn tree, as paths from its root."""
    above: list[str] = []
    rooms = []
    for line in tree.splitlines():
        name = line.split()[0]
        above[(len(line) - len(line.lstrip())) // 2 - 1 :] = [name]
        rooms.append("".join(above))
    return rooms


def test_the_design_draws_the_tree():
    design = (REPOSITORY / "docs" / "design.md").read_text()
    drawn = re.search(r"^```\nsrc/embedrock/\n(.*?)^```$", design, re.MULTILINE | re.DOTALL)
    assert drawn
    package = REPOSITORY / "src" / "embedrock"
    rooms = [f"{file.parent.relative_to(package)}/" for file in package.glob("*/**/__init__.py")]
    modules = [file.name for file in package.glob("*.py") if file.name != "__init__.py"]
    assert sorted(rooms_of(drawn[1])) == sorted([*rooms, *modules])


def test_the_design_has_the_floors_of_the_contract():
    contract = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    floors = "\n".join(f" {layer}" for layer in contract["layers"])
    assert f"```\n{floors}\n```" in (REPOSITORY / "docs" / "design.md").read_text()


def test_what_is_missing_and_what_is_wide_is_found():
    there = "src/embedrock/spec/spec.py, tests/*.py, `optimizers/adam.py`"
    gone = "docs/nothing.md, tests/no/, `optimizers/adamm.py`"
    text = f"# A page\n{there}, {gone}.\n"
    assert missing_paths(text) == ["docs/nothing.md", "optimizers/adamm.py", "tests/no"]
    links = "[a](#a-page) [b](#b) [c](README.md#install) [d](https://d.d) [e](README.md#e) [f](f.md)"
    page = REPOSITORY / "CONTRIBUTING.md"
    assert broken_links(f"{text}{links}", page) == ["#a-page", "#b", "README.md#e", "f.md#"]
    wide = "x" * (WIDTH + 1)
    assert wide_lines(f"{wide}\n| {wide} |\n```\n{wide}\n```\n") == [wide]


VAGUE = re.compile(r'"""(?:Have|Tell)s?\b')


def test_docstrings_begin_with_what_a_function_does():
    found = [f"{path}: {text}" for path in sources() for text in VAGUE.findall(path.read_text())]
    assert found == []
    assert VAGUE.search('def f():\n    """Have it done."""')


def sources() -> list[Path]:
    return sorted((REPOSITORY / "src").rglob("*.py"))


def modules() -> dict[str, Path]:
    """Return every module of the package but the programs (`__main__`), by name and without importing them."""
    folder = Path(embedrock.__file__).parent
    names = {".".join(path.relative_to(folder.parent).with_suffix("").parts): path for path in folder.rglob("*.py")}
    return {name.removesuffix(".__init__"): names[name] for name in sorted(names) if not name.endswith(".__main__")}


def test_every_module_can_be_imported():
    for name in modules():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert error.name in OPTIONAL, name  # noqa: PT017  # few are not installed


@pytest.mark.parametrize("name", [name for name, path in modules().items() if ">>>" in path.read_text()])
def test_docstring_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{name} needs {error.name}")
    failed = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed
    assert failed == 0, f"{failed} examples of {name} failed; they are printed above"


PAGE = """\
Text.
```python
a = 1
```
```bash
exit 1
```
```python no-run: a reason
a = 1 / 0
```
```python
b = a + 1
```
"""


def test_blocks_run_in_order_in_one_namespace():
    blocks = blocks_of(PAGE)
    assert [block.line for block in blocks] == [3, 9, 12]
    assert [block.no_run for block in blocks] == [None, "a reason", None]
    assert run_blocks(blocks, "page.md")["b"] == 2


def test_a_wrong_block_fails_at_its_line():
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks(blocks_of(PAGE.replace(" no-run: a reason", "")), "page.md")
    last = caught.traceback[-1]
    assert (Path(last.path).name, last.lineno + 1) == ("page.md", 9)


@pytest.mark.parametrize("info", ["no-run", "no-run:", "norun: reason", "title=x"])
def test_a_block_that_does_not_run_needs_a_reason(info: str):
    with pytest.raises(AssertionError, match="no-run: <reason>"):
        blocks_of(f"```python {info}\n```\n")
