"""Run the example that the options name: ``make demo ARGS="..."``.

    make demo                            recommender.py: planted clicks, 22 million rows on disk
    make demo ARGS="--ranks 2"           the same in two processes
    make demo ARGS="--data FILE"         own_log.py: a log of yours, beside `nn.Embedding`
    make demo ARGS="--stream"            stream.py: items that are born and die; also with --data FILE
    make demo ARGS="--text"              text.py: a language model with a memory on disk, beside `nn.Embedding`
    make demo-keras                      recommender_keras.py: planted clicks, by Keras' `fit`

Add --help to read the options of each.
"""

from __future__ import annotations

import sys
from importlib import import_module

from common import run

PROGRAMS = {"--stream": "stream", "--text": "text", "--keras": "recommender_keras", "--data": "own_log"}


def main(words: list[str]) -> None:
    """Run one of the examples."""
    options = {word.partition("=")[0] for word in words}
    name = next((program for option, program in PROGRAMS.items() if option in options), "recommender")
    if options & {"-h", "--help"}:
        print(__doc__)
    import_module(name).main([word for word in words if word not in ("--stream", "--text", "--keras")])


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
