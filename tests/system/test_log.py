"""`tell`: shown where nobody has set up logging, and as logging was set up elsewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
        ("", "logging.basicConfig(format='root %(message)s')", ["embedrock: one", "root two"]),  # not twice
        ("", "logging.getLogger('embedrock').setLevel('WARNING')", ["embedrock: one"]),
        ("sys.stderr = None", "", []),
    ],
)  # fmt: skip
def test_a_line_is_shown_as_logging_was_set_up(first: str, then: str, said: list[str]):
    program = PROGRAM.format(first=first, then=then)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == said
