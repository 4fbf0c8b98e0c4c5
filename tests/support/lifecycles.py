"""What lifecycles of rows know, in a form that does not depend on the parts that a table has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

NOTHING = np.empty(0, np.int64)
COUNTERS = ("ids", "counts", "segments", "sketch")


def whole_of(states: Sequence[Mapping[str, np.ndarray]]) -> dict[Any, Any]:
    """Return what is known of rows in lifecycles of all parts: of each id, and of each segment, in its order."""
    found: dict[Any, Any] = {}
    for state in states:
        for counter in ("now", "before"):
            own = {name: state.get(f"residents_{counter}_{name}", NOTHING) for name in COUNTERS}
            counts = zip(own["ids"].tolist(), own["counts"].tolist(), strict=True)
            found |= {(counter, "id", each): count for each, count in counts}
            if len(own["segments"]):
                lines = own["sketch"].reshape(len(own["segments"]), -1)
                kept = zip(own["segments"].tolist(), lines, strict=True)
                found |= {(counter, "segment", segment): line.tobytes() for segment, line in kept if line.any()}
        if len(state.get("residents_uses_segments", ())):
            names = ("segments", "count", "hand", "ids", "last", "marks")
            segments, counts, hands, *rows = (state[f"residents_uses_{name}"] for name in names)
            cuts = np.cumsum(counts)[:-1]
            each = zip(segments, counts, hands, *(np.split(one, cuts) for one in rows), strict=True)
            for segment, count, hand, *parts in each:
                if count:
                    found["uses", int(segment)] = (int(hand), *(part.tolist() for part in parts))
    return found
