"""The programs a user types: ``embedrock demo`` and ``embedrock bench``."""
