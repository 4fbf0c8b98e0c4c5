"""``bench disk | commit``: tables on disk."""
