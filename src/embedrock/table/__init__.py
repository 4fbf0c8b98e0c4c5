"""`Table`, which users call, over `TableState`; its files, saved states, options and prefetching."""
