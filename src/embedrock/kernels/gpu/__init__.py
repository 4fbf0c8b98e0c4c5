"""GPU kernels, compiled by Triton at first use. They take addresses of records in GPU memory or in pinned RAM."""

from embedrock.kernels.gpu import cache, codec, gate, generator, plan, pooling, rows, rules, runtime, sums

__all__ = ["cache", "codec", "gate", "generator", "plan", "pooling", "rows", "rules", "runtime", "sums"]
