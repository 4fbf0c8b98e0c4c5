"""The ```python blocks of a page: which run, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
FRAMEWORKS = (
    "torch|keras|jax|optax|flax|equinox|orbax|lightning|accelerate|transformers|huggingface_hub|safetensors"
    "|faiss|usearch"
)
USES = re.compile(rf"^\s*(?:import|from) (?:embedrock\.)?({FRAMEWORKS})\b", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One ```python block: its source, the line where that starts, why it does not run (None: it does)."""

    source: str
    line: int
    no_run: str | None


def parse_block(match: re.Match[str], text: str) -> Block:
    info = match[1].strip()
    line = text.count("\n", 0, match.start(2)) + 1
    if not info:
        return Block(match[2], line, None)
    reason = re.fullmatch(r"no-run: (\S.*)", info)
    assert reason, f"line {line - 1}: expected ```python or ```python no-run: <reason>, got ```python {info}"
    return Block(match[2], line, reason[1])


def blocks_of(text: str) -> list[Block]:
    return [parse_block(match, text) for match in FENCE.finditer(text)]


def run_blocks(blocks: list[Block], page: str) -> dict[str, Any]:
    """Execute the blocks in one namespace and return it; tracebacks name the page and its line."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        if block.no_run is None:
            for framework in USES.findall(block.source):
                pytest.importorskip(framework)
            exec(compile("\n" * (block.line - 1) + block.source, page, "exec"), namespace)
    return namespace


def keys_of(*sections: str) -> set[str]:
    """Return the keys that sections of the page on `stats()` list."""
    page = (Path(__file__).parents[2] / "docs" / "api" / "statistics.md").read_text()
    by_title = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    heads = re.findall(r"^\| (`.*?) \|", "".join(by_title[title] for title in sections), re.MULTILINE)
    return {key for head in heads for key in re.findall(r"`([^`]+)`", head)}


def run_page(page: Path) -> None:
    """Run a page in the current folder."""
    run_blocks(blocks_of(page.read_text()), str(page))
