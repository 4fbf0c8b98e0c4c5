"""Model files and checkpoints: the parts of tables in them, saving and loading."""
