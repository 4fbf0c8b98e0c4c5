"""`Vocabulary`: exact strings to dense ids and back, in RAM or on disk."""
