"""Keras front end: `keras.layers.Embedding` and its bag with rows in a table, and optimizers that step them."""

from __future__ import annotations

from embedrock.keras.artefact import export
from embedrock.keras.bag import EmbeddingBag
from embedrock.keras.callbacks import TableCheckpoint
from embedrock.keras.cluster import WorkerLostError, distribute, worker_errors
from embedrock.keras.embedding import Embedding
from embedrock.keras.group import EmbeddingCollection, fuse
from embedrock.keras.loading import load_model
from embedrock.keras.lookahead import prefetch
from embedrock.keras.optimizers import RowOptimizer, optimizer
from embedrock.keras.pending import ForgottenGradientsError
from embedrock.keras.stats import TableStats

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "ForgottenGradientsError",
    "RowOptimizer",
    "TableCheckpoint",
    "TableStats",
    "WorkerLostError",
    "distribute",
    "export",
    "fuse",
    "load_model",
    "optimizer",
    "prefetch",
    "worker_errors",
]
