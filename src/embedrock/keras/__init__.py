"""Keras front end: `keras.layers.Embedding` and its bag with rows in a table, and optimizers that step them."""

from __future__ import annotations

import sys

from embedrock.errors import ForgottenGradientsError, WorkerLostError
from embedrock.frontend.references import HeldCommitsWarning
from embedrock.frontend.requirements import require
from embedrock.keras.callers import check_backend

require("embedrock.keras", "keras", {"keras": "3.5", "tensorflow": "2.17"})
check_backend()

from embedrock.keras.export import export
from embedrock.keras.layers.bag import EmbeddingBag
from embedrock.keras.layers.collection import EmbeddingCollection, fuse
from embedrock.keras.layers.embedding import Embedding
from embedrock.keras.layers.hashing import Hashing, hash_ids
from embedrock.keras.prefetch import prefetch
from embedrock.keras.saving.checkpoint import TableCheckpoint
from embedrock.keras.saving.loading import load_model, load_weights
from embedrock.keras.stats import TableStats
from embedrock.keras.training.optimizers import RowOptimizer, optimizer
from embedrock.keras.workers.cluster import distribute, worker_errors
from embedrock.storage.listeners import PlacementWarning

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "ForgottenGradientsError",
    "Hashing",
    "HeldCommitsWarning",
    "PlacementWarning",
    "RowOptimizer",
    "TableCheckpoint",
    "TableStats",
    "WorkerLostError",
    "distribute",
    "export",
    "fuse",
    "hash_ids",
    "load_model",
    "load_weights",
    "optimizer",
    "prefetch",
    "worker_errors",
]

# Files of the first release name the layers' old modules. Keras before 3.9 imports the layers by these names.
for _old, _kind in {"embedding": Embedding, "bag": EmbeddingBag, "group": EmbeddingCollection}.items():
    sys.modules[f"{__name__}.{_old}"] = sys.modules[_kind.__module__]

__dir__ = __all__.copy  # what dir() lists
