"""Who has a record: rows come by an `Admission` and leave by an `Eviction`; `RowLifecycle` is what a step asks."""
