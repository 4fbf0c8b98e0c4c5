"""`Table`, its rows, its files, its options."""
