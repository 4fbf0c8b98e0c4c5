"""What programs print with, and read from a command line: counts, sizes, tables, progress."""
