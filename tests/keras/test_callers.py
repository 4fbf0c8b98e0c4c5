"""What functions that are being called know: it is looked up, and not kept."""

from __future__ import annotations

import weakref

from embedrock.keras import callers


class Thing:
    """Something that goes with its last name."""


def test_a_variable_is_found_and_not_kept():
    thing = Thing()
    seen = weakref.ref(thing)
    assert callers.local(__name__, "test_a_variable_is_found_and_not_kept", "thing") is thing
    del thing
    assert seen() is None


def test_what_is_not_there_is_missing():
    assert callers.local(__name__, "test_what_is_not_there_is_missing", "thing") is callers.MISSING
    assert callers.local(__name__, "nobody", "thing") is callers.MISSING
