"""Trainers that own the loop: those that would save rows that processes share, by one process, are told before."""

from __future__ import annotations

import sys
from typing import Any

from embedrock.errors import UnsupportedError


def check_trainers(label: str) -> None:
    """Look, once, at who calls: raise an error where a trainer is going to save rows of which processes have parts.

    Args:
        label: what error messages call the layer.

    Raises:
        UnsupportedError: it will. All processes come to know it in the same lookup, before anything is sent.
    """
    kinds = [kind for kind in map(_kind_in, ("lightning.pytorch", "pytorch_lightning")) if kind is not None]
    huggingface = _kind_in("transformers.trainer")
    frame = sys._getframe(1) if kinds or huggingface is not None else None
    while frame is not None:
        caller: Any = frame.f_locals.get("self")
        saves = remedy = ""
        if huggingface is not None and isinstance(caller, huggingface):
            saves, remedy = _of_huggingface(caller, huggingface), "transformers.TrainingArguments(save_strategy='no')"
        elif isinstance(caller, tuple(kinds)):
            saves, remedy = _of_lightning(caller), "lightning.Trainer(enable_checkpointing=False)"
        if saves:
            raise UnsupportedError(
                f"{saves} would save the rows of {label} by one process, which has only a part of them (sharded=). "
                f"Give {remedy}, and call ert.save(model, folder, step=...) on all ranks, from a callback or a hook: "
                "docs/trainers.md has both. Nothing was trained."
            )
        frame = frame.f_back


def _kind_in(module: str) -> Any:
    return getattr(sys.modules.get(module), "Trainer", None)


def _of_huggingface(trainer: Any, kind: Any) -> str:
    strategy = getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)
    is_own = type(trainer)._save_checkpoint is kind._save_checkpoint  # or the user saves otherwise
    return f"transformers.Trainer with save_strategy={strategy!r}" if is_own and strategy != "no" else ""


def _of_lightning(trainer: Any) -> str:
    saving = [each for each in trainer.checkpoint_callbacks if getattr(each, "save_top_k", 0) or _keeps_last(each)]
    return f"Lightning's {type(saving[0]).__name__}" if saving else ""


def _keeps_last(callback: Any) -> bool:
    return bool(getattr(callback, "save_last", False))
