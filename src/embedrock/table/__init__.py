"""`Table`, which users call, over `Rows`; its files, saved states, options and prefetching."""
