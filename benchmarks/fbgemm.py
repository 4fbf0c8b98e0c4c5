"""FBGEMM's CPU table-batched embedding, as it is installed, and without a stall of its machine code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.implementations import FIRST_VALUES, LEARNING_RATE, Unavailable

MAPS = Path("/proc/self/maps")
# Instructions between registers 0 and 1, and of the number at r8 + r10: in SSE's form, and of the same length in AVX's.
SCALAR = {
    "f30f10c8": "c5f210c8",  # movss: register to register
    "f30f58c1": "c5fa58c1",  # addss
    "f30f5ec1": "c5fa5ec1",  # divss
    "f30f51c0": "c5fa51c0",  # sqrtss
    "f3430f100c10": "c4817a100c10",  # movss: load
    "f3430f110410": "c4817a110410",  # movss: store
}


def fbgemm_tables(rows: Sequence[int], dim: int, pooling: str) -> Any:
    """Return FBGEMM's CPU table-batched embedding with rowwise Adagrad; its optimizer runs inside backward."""
    training, common, configs = import_fbgemm()
    place = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
    tables = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(count, dim, *place) for count in rows],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=common.PoolingMode[pooling],
        learning_rate=LEARNING_RATE,
    )
    tables.init_embedding_weights_uniform(-FIRST_VALUES, FIRST_VALUES)
    return tables


def import_fbgemm() -> tuple[Any, Any, Any]:
    """Return FBGEMM's modules of table-batched embeddings: training, common and configurations."""
    try:
        training = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        return training, common, import_module("fbgemm_gpu.split_embedding_configs")
    except (ImportError, OSError, RuntimeError) as error:  # the last two: built for another torch
        raise Unavailable(f"fbgemm_gpu does not import: {error}. pip install 'embedrock[bench]'") from error


class GeneratedCode:
    """The code that FBGEMM generated in this process for the rule of a row.

    Its rowwise Adagrad has scalar SSE instructions between AVX's, each of which stalls a CPU since Ice Lake for about
    60 cycles: a step of 26 tables took 16 ms, and 3 ms with AVX's form of the same instructions. The bits are the same.
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, bytes, bytes]] = []
        self._mended = False

    def find(self) -> None:
        """Find the instructions in what was generated so far.

        Raises:
            Unavailable: there are none.
        """
        self.mend(False)
        regions = [line.split() for line in MAPS.read_text().splitlines()] if MAPS.exists() else []
        for bounds in (region[0] for region in regions if region[1] == "rwxp" and len(region) == 5):
            start, end = (int(text, 16) for text in bounds.split("-"))
            code = ctypes.string_at(start, end - start)
            for sse, avx in ((bytes.fromhex(sse), bytes.fromhex(avx)) for sse, avx in SCALAR.items()):
                at = code.find(sse)
                while at >= 0:
                    self._places.append((start + at, sse, avx))
                    at = code.find(sse, at + 1)
        if not self._places:
            raise Unavailable("this build of FBGEMM generates no scalar SSE instructions, or none were found")

    def mend(self, wanted: bool) -> None:
        """Have instructions in AVX's form, or as FBGEMM generated them."""
        if wanted != self._mended:
            for address, sse, avx in self._places:
                ctypes.memmove(address, avx if wanted else sse, len(sse))
            self._mended = wanted


GENERATED = GeneratedCode()
