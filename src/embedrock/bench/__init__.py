"""Benchmarks a user can repeat: ``embedrock bench --help``, or ``python -m embedrock.bench --help``.

Every contender lives in a process of its own, one of them computes at a time, and rounds are interleaved
(A B C, A B C, ...), so that a busy moment of a shared machine falls on all of them alike.
"""
