"""What a table is, as frozen data: its sizes, dtypes, rule, initial values, admission and eviction."""
