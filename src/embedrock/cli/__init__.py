"""The command ``embedrock``: it looks after tables on disk, and imports and exports their rows."""
