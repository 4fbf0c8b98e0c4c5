"""Benchmarks a user can repeat: ``embedrock bench --help``, or ``python -m embedrock.bench --help``.

Every contender lives in a process of its own, one of them computes at a time, and rounds are interleaved
(A B C, A B C, ...), so that a busy moment of a shared machine falls on all of them alike.

To add one: a folder with its contenders and a `harness.bench.Bench`, and a row in `cli.BENCHES`. `harness` has the
runner, what targets measure, and the lines, tables and JSON that all benchmarks share.
"""
