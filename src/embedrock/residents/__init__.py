"""Who has a record: rows come by an `Admission` and leave by an `Eviction`; `Residents` is what a step asks."""
