"""Row lifecycle: an `Admission` decides which rows get a record, an `Eviction` which rows lose it."""
