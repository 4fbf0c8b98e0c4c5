"""`release`: commits that a state dict refers to are let go of, before its file is deleted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from embedrock.fronts.references import is_reference
from embedrock.torch.layers.row_state import HOLDER
from embedrock.torch.saving.relocation import references


def release(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Let the tables on disk of a model drop the commits that a state dict of it refers to.

    They are kept for it, whatever the tables' `keep`. Call this before you delete the last file with that state: from
    then on it can be loaded only as long as its commits are among the newest `keep`. Nothing happens to tables in RAM.

    Args:
        model: made as the one that was saved.
        state_dict: of the model, by ``torch.load`` of the file.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> model = torch.nn.Sequential(ert.Embedding(10**9, 4, path="users.rock"), torch.nn.Linear(4, 1))
        >>> state = model.state_dict()
        >>> model[0].table.commits()[-1]["name"]
        'state_dict-1'
        >>> ert.release(model, state)
        >>> model[0].table.commits()[-1]["name"]
    """
    for _, layer, state in references(model, state_dict):
        if is_reference(state) and state["uuid"] == layer.table.uuid:
            held = [commit for commit in layer.table.commits() if commit["commit"] == state["commit"]]
            for name in [commit["name"] for commit in held if str(commit["name"]).startswith(f"{HOLDER}-")]:
                layer.table.release(name)
