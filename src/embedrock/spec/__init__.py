"""The description of a table as frozen data: sizes, dtypes, rule, initial values, admission and eviction."""
