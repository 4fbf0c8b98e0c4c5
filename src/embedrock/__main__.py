"""``python -m embedrock`` is the command ``embedrock``."""

from __future__ import annotations

from embedrock.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
