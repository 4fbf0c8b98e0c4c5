"""The models of `embedrock.demo.torch.models`, in Keras: matrix factorization, and two models of the NCF paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops
from keras.layers import Dense

import embedrock as er
import embedrock.keras as erk
from embedrock.demo.model_spec import EmbeddingSpec, PairSpec

MLP_SHRINKS = 3  # hidden layers, each half as wide as what it is given


def mf(p: Any, q: Any, dim: int) -> Any:
    """Return the inner product of user and item, and a bias that is read off each row: (n, dim) twice to (n, 1)."""
    return ops.sum(p * q, -1, keepdims=True) + Dense(1, name="user_bias")(p) + Dense(1, name="item_bias")(q)


def gmf(p: Any, q: Any, dim: int) -> Any:
    """Return a learned weighing of the product of user and item."""
    return Dense(1, name="score")(p * q)


def neumf(p: Any, q: Any, dim: int) -> Any:
    """Return `gmf` and a small MLP, weighed together, on the two halves of each row."""
    half = dim // 2
    user_mlp, item_mlp = p[:, half:], q[:, half:]
    deep = ops.concatenate([user_mlp, item_mlp], -1)
    for shrink in range(MLP_SHRINKS):
        deep = Dense(dim >> (shrink + 1), activation="silu")(deep)
    return Dense(1, name="score")(ops.concatenate([p[:, :half] * q[:, :half], deep], -1))


MODELS: dict[str, Callable[[Any, Any, int], Any]] = {"mf": mf, "gmf": gmf, "neumf": neumf}


def make_model(spec: PairSpec) -> Any:
    """Return a compiled model that turns ``{"users": (n,), "items": (n,)}`` into logits (n, 1).

    The layers of its two tables are called "user_rows" and "item_rows". As in PyTorch's demo, Adam leaves rows alone
    that a batch does not touch.
    """
    keras.utils.set_random_seed(spec.seed)  # of the dense weights
    users, items = (keras.Input((), dtype="int64", name=name) for name in ("users", "items"))
    names = "user_rows", "item_rows"
    group = spec.group()
    p, q = (_embedding(embedding, name, group) for embedding, name in zip(spec.embeddings, names, strict=True))
    model = keras.Model({"users": users, "items": items}, MODELS[spec.model](p(users), q(items), spec.dim))
    adam = keras.optimizers.Adam(spec.lr, epsilon=er.Adam.eps)
    model.compile(optimizer=erk.optimizer(adam), loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def _embedding(spec: EmbeddingSpec, name: str, group: er.Group) -> Any:
    options = {"seed": spec.seed, "rule": er.Adam(), "name": name, "group": group}
    return erk.Embedding(spec.rows, spec.dim, spec.first_values, **options)
