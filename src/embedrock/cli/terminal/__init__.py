"""Input and output of command lines: counts and sizes, tables, progress."""
