"""``python -m embedrock.bench step`` is ``embedrock bench step``."""

from embedrock.bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
