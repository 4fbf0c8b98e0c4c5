"""PyTorch front end: `torch.nn`'s embedding layers, and optimizers for their rows."""

from __future__ import annotations

from embedrock.frontend.requirements import require

require("embedrock.torch", "torch", {"torch": "2.5"})

from embedrock.errors import ForgottenGradientsError
from embedrock.frontend.references import HeldCommitsWarning
from embedrock.storage.listeners import PlacementWarning
from embedrock.torch import resizing as _resizing  # noqa: F401  # makes transformers resize our layers
from embedrock.torch.freezing import freeze
from embedrock.torch.fusing import fuse
from embedrock.torch.graphs import GraphedStep, graphed
from embedrock.torch.layers.bag import EmbeddingBag
from embedrock.torch.layers.collection import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from embedrock.torch.layers.embedding import Embedding
from embedrock.torch.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Momentum,
    RMSprop,
    RowOptimizer,
    RowwiseAdagrad,
    RowwiseRMSprop,
)
from embedrock.torch.prefetch import prefetch
from embedrock.torch.saving.checkpoint import NoCheckpointError, load, load_state_dict, release, save
from embedrock.torch.saving.publishing import Publisher, publish
from embedrock.torch.stats import log_stats
from embedrock.torch.training.averages import AveragedModel, average
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.parameters import dense_parameters, handles, num_parameters, place
from embedrock.torch.training.unapplied import UntrainedWarning
from embedrock.torch.uneven import uneven
from embedrock.torch.whole import ModelOptimizer, optimizer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AveragedModel",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "ForgottenGradientsError",
    "Ftrl",
    "GraphedStep",
    "Handle",
    "HeldCommitsWarning",
    "ModelOptimizer",
    "Momentum",
    "NoCheckpointError",
    "PlacementWarning",
    "PoolingType",
    "Publisher",
    "RMSprop",
    "RowOptimizer",
    "RowwiseAdagrad",
    "RowwiseRMSprop",
    "UntrainedWarning",
    "average",
    "dense_parameters",
    "freeze",
    "fuse",
    "graphed",
    "handles",
    "load",
    "load_state_dict",
    "log_stats",
    "num_parameters",
    "optimizer",
    "place",
    "prefetch",
    "publish",
    "release",
    "save",
    "uneven",
]

__dir__ = __all__.copy  # what dir() lists
