"""``python -m embedrock.bench step`` is ``embedrock bench step``."""

from __future__ import annotations

from embedrock.bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
