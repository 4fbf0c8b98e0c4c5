"""Comparisons with PyTorch, Keras, FBGEMM, TorchRec and NumPy that a user can repeat: ``python -m benchmarks --help``.

Each implementation lives in a process of its own. One of them computes at a time, and their rounds are interleaved
(A B C, A B C, ...), so a busy moment of a shared machine falls on all of them alike.

To add a benchmark: a file with its implementations and a `Benchmark`, and its row in `benchmarks.__main__.BENCHMARKS`.
"""
