"""Hooks of mkdocs.yml: README as the home page, and pages of the API that show names as users write them.

A line such as `::: er.Table` in a page of `docs/api/` shows a public name. Every `er.Table` in code type, on any page
and in docstrings, is then a link to it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "er": "embedrock",
    "ert": "embedrock.torch",
    "erk": "embedrock.keras",
    "ej": "embedrock.jax",
    "ejo": "embedrock.jax.orbax",
}
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

SHOWN = re.compile(r"^::: (\w+)\.(\w+)\n((?: {4}.*\n)*)", re.MULTILINE)
MEMBERS = re.compile(r"members: \[([^]]*)\]", re.DOTALL)
LINK = re.compile(r"(?<!!)\[((?:[^][]|\[[^]]*\])*)\]\(([^)#:]+)(#[^)]*)?\)")
CODE = re.compile(r"(^```.*?^```[ \t]*$|^#[^\n]*$|\[[^]\n]*\]\([^)\n]*\))", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(?<!`)`((?:er|ert|erk|ej|ejo)\.[\w.]+)(\([^`]*\))?`(?!`)")
TITLE = r'(<h\d id="embedrock[\w.]*\.(\w+)\.(\w+)"[^>]*>.*?<span class="doc doc-object-name[^>]*>)\3<'
METHOD = re.compile(TITLE, re.DOTALL)


def shown_names(folder: Path = ROOT / "docs" / "api") -> dict[str, Path]:
    """Return the public names that pages of the API show, `er.Table` and `er.Table.lookup`, each with its page."""
    shown = {}
    for page in sorted(folder.glob("*.md")):
        for package, name, options in SHOWN.findall(page.read_text()):
            members = MEMBERS.search(options)
            listed = re.findall(r"\w+", members[1]) if members else []
            shown |= dict.fromkeys([f"{package}.{name}", *(f"{package}.{name}.{member}" for member in listed)], page)
    return shown


def made_by_others(folder: Path = ROOT / "docs" / "api") -> set[str]:
    """Return the public classes that users do not construct: their pages show no signature."""
    shown = (entry for page in folder.glob("*.md") for entry in SHOWN.findall(page.read_text()))
    return {f"{package}.{name}" for package, name, options in shown if "merge_init_into_class: false" in options}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie in the repository's root."""
    from mkdocs.structure.files import File

    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page with links of the site instead of the repository's, and with links at public names."""
    source = next((source for source, name in OUTSIDE.items() if name == page.file.src_uri), None)
    if source == "README.md":
        page.meta["hide"] = ["navigation"]
    if (name := page.file.src_uri).startswith("api/"):  # search shows entries before guides
        page.meta["search"] = {"boost": 8 if name == "api/tables.md" else 4}
    folder = ROOT if source else (ROOT / "docs" / page.file.src_uri).parent
    text = LINK.sub(lambda link: _link(link, folder, page.file.src_uri), markdown)
    text = re.sub(r'((?:src|srcset)="|!\[[^]]*\]\()docs/', r"\1", text) if source else text
    text = re.sub(r"^```python no-run: .*", "```python", text, flags=re.MULTILINE)
    shown = shown_names()
    parts = CODE.split(text)
    parts[::2] = [NAME.sub(lambda name: _named(name, shown), part) for part in parts[::2]]
    return SHOWN.sub(_directive, "".join(parts))


def _link(link: re.Match[str], folder: Path, page: str) -> str:
    text, path, anchor = link[1], link[2], link[3] or ""
    target = (folder / path).resolve()
    if target.is_relative_to(ROOT / "docs"):
        name = target.relative_to(ROOT / "docs").as_posix()
    else:
        name = OUTSIDE.get(target.relative_to(ROOT).as_posix(), "")
    return f"[{text}]({'../' * page.count('/')}{name}{anchor})" if name else text  # other files are not of the site


def _named(name: re.Match[str], shown: dict[str, Path]) -> str:
    package, _, rest = name[1].partition(".")
    return f"[{name[0]}][{PACKAGES[package]}.{rest}]" if name[1] in shown else name[0]


def _directive(shown: re.Match[str]) -> str:
    package, name, options = shown.groups()
    options = options or "    options:\n"
    if "members: [" in options:
        options += "      inherited_members: true\n"
    return f"::: {PACKAGES[package]}.{name}\n{options}      heading: {package}.{name}\n      toc_label: {name}\n"


def on_page_content(html: str, **_: Any) -> str:
    """Return a page whose headings of methods have the class, too: what people search for."""
    return METHOD.sub(r"\1\2.\3<", html)


class Parameters(griffe.Extension):
    """Gives functions and classes the parameters that `help` shows, without an import of any framework."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the parameters where `shows`, `rule` or `RowOptimizer` do so at run time."""
        shown = shown_names()
        for found in list(_walk(pkg)):
            if found.docstring:
                text = found.docstring.value.replace("\nExample:\n", "\nExamples:\n")
                text = PAGE.sub(r"[\1](../\1.md)", NAME.sub(lambda name: _named(name, shown), text))
                found.docstring.value = SEVERAL.sub(_one_each, text)
            if isinstance(found, griffe.Function):
                _show_options(found)
                for each in found.parameters:
                    if isinstance(each.default, griffe.ExprName) and each.default.name.isupper():  # a constant
                        with contextlib.suppress(KeyError):  # one inside of a function
                            each.default = _resolved(each.default, found).value
            elif isinstance(found, griffe.Class):
                _show_fields(found)


PAGE = re.compile(r"(?:``)?docs/([\w/-]+)\.md(?:``)?")
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+)(:.*(?:\n\1 +.*)*)", re.MULTILINE)
KEYWORD, EITHER = griffe.ParameterKind.keyword_only, griffe.ParameterKind.positional_or_keyword


def _one_each(entry: re.Match[str]) -> str:
    """Return an entry for several parameters or errors, "IdError, IdTypeError: ...", as one for each."""
    return "\n".join(f"{entry[1]}{name}{entry[3]}" for name in entry[2].split(", "))


def _walk(found: griffe.Object) -> Iterator[griffe.Object]:
    for member in found.members.values():
        if isinstance(member, griffe.Object):
            yield member
            yield from _walk(member)


def _resolved(name: Any, within: griffe.Object) -> Any:
    found = within.modules_collection[name.canonical_path]
    return found.final_target if isinstance(found, griffe.Alias) else found


def _show_options(function: griffe.Function) -> None:
    """Replace ``**options`` of a function by the options that `shows` names."""
    shows: list[Any] = [each.value for each in function.decorators if each.callable_path.endswith(".shows")]
    if not shows:
        return
    kind, *left_out = shows[0].arguments
    options = []
    for name, attribute in _resolved(kind, function).all_members.items():
        if name in {str(each).strip("'\"") for each in left_out} or not attribute.is_attribute:
            continue
        hint, option = attribute.annotation.slice.elements  # Annotated[hint, TableOption(place, default, ...)]
        place, default = option.arguments[:2]
        options.append((int(str(place)), griffe.Parameter(name, annotation=hint, kind=KEYWORD, default=default)))
    *named, others = function.parameters
    more = [] if f"Unpack[{kind}]" == str(others.annotation) else [others]
    own = [option for _, option in sorted(options, key=lambda each: each[0])]
    function.parameters = griffe.Parameters(*named, *own, *more)


def _fields(kind: Any) -> list[griffe.Parameter]:
    return [
        griffe.Parameter(name, annotation=field.annotation, kind=EITHER, default=field.value)
        for name, field in kind.members.items()
        if field.is_attribute and field.annotation and not name.isupper()
    ]


def _show_fields(kind: griffe.Class) -> None:
    """Give rules, and the optimizers of rows by them, the hyperparameters as parameters."""
    parameters = []
    if any(each.callable_path.endswith("._rule.rule") for each in kind.decorators):
        parameters = _fields(kind)
    elif "rule" in kind.keywords:
        lr, *others = _fields(_resolved(kind.keywords["rule"], kind))
        for each in others:
            each.kind = KEYWORD
        base = _resolved(kind.bases[0], kind).members["__init__"]
        own = {each.name: each for each in base.parameters}
        parameters = [own["layers"], lr, *others, own["clip_value"], own["reset_state"]]
    if parameters:
        self = griffe.Parameter("self", kind=EITHER)
        kind.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(self, *parameters)))
