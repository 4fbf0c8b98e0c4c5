"""What programs read from a command line, and print with: counts and sizes, tables, progress."""
