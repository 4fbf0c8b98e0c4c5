"""Layers as configs: their tables and first values as plain data, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.fronts.arguments import TableOptions
from embedrock.initializers import FromArray, FromBfloat16, Initializer, read_initializer
from embedrock.keras.saving import loading
from embedrock.keras.saving.row_files import rule_of
from embedrock.keras.saving.state import KEY
from embedrock.keras.workers.sharding import check_whole
from embedrock.rules import Rule, describe_rule
from embedrock.table.table import Table


def describe_initializer(init: Any, label: str) -> dict[str, Any]:
    """Return an initializer as plain data. An array must be a file's, whose name it is then."""
    if not loading.is_from_array(init):
        return init.describe()
    array: Any = init.array
    root: Any = array
    while not isinstance(root, np.memmap) and isinstance(root.base, np.ndarray):
        root = root.base
    while isinstance(root, np.memmap) and isinstance(root.base, np.memmap):
        root = root.base
    is_of_file = isinstance(root, np.memmap) and root.filename is not None and root.mode != "c"
    if not is_of_file or not array.flags.c_contiguous:
        raise UnsupportedError(
            f"{label} cannot be saved or copied: the first values of its rows come from an array in RAM, which no "
            'config can hold. Keep them in a file: np.save("x.npy", weights), and give np.load("x.npy", mmap_mode="r") '
            "instead."
        )
    first = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return {**init.describe(), "file": str(root.filename), "offset": int(root.offset + first)}


def read_initializer_of(description: Mapping[str, Any]) -> Any:
    """Return the initializer that `describe_initializer` described."""
    if description["name"] != FromArray.__name__:
        return read_initializer(dict(description))
    file, dtype, shape = description["file"], description["dtype"], tuple(description["shape"])
    try:
        array = np.memmap(file, dtype, "r", description["offset"], shape)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"first values of rows come from the file {file!r}, which must hold {dtype} {shape} from byte "
            f"{description['offset']} on: {error}. Put it back where it was."
        ) from error
    return FromBfloat16(array) if dtype == "bfloat16" else FromArray(array)


def describe_table(table: Table, label: str) -> dict[str, Any]:
    """Return a ready-made table as plain data."""
    check_whole(table, label, "described by a config, as the second layer on a table")
    spec = table.spec
    described = {
        "rows": spec.rows,
        "dim": spec.dim,
        "dtype": spec.dtype,
        "seed": int(spec.seed),
        "init": describe_initializer(spec.init, label),
        **table.options,
    }
    return {**described, "at": table.last_commit} if table.mode == "r" else described


def table_of(description: Mapping[str, Any], label: str) -> tuple[Table, bool]:
    """Return the table that `describe_table` described, and whether another model has it too."""
    options = {**description, "init": read_initializer_of(description["init"])}
    path, at = options.get("path"), options.pop("at", None)
    if path is None:
        return loading.made(options), False
    if at is not None:
        return loading.snapshot(loading.moved(path), at, options), False
    if loading.scope() is not None:
        return loading.open_for(path, options)
    loading.check_not_copied(path, label)
    return loading.made(options), False


def _describe_rule(rule: Rule | None) -> dict[str, Any] | None:
    """Return a rule as plain data, without a learning rate that it does not bring."""
    described = describe_rule(rule)
    if rule is not None and described is not None and not rule.brings_lr:
        del described["lr"]
    return described


OF_TABLE = {"input_dim", "output_dim", "embeddings_initializer", "sharded", *TableOptions._fields} - {
    "rule",
    "name",
    "dtype",
}


def config_of(layer: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a layer as plain data. Of a model that is being saved, layers on one table say so."""
    table, config = layer.table, {**arguments, "rule": _describe_rule(arguments["rule"])}
    if isinstance(config["input_dim"], Table):
        config = {name: value for name, value in config.items() if name not in OF_TABLE}
        config["table"] = describe_table(table, layer.label)
    else:
        drawn, path = config["embeddings_initializer"], config["path"]
        if isinstance(drawn, Initializer):
            config["embeddings_initializer"] = {KEY: describe_initializer(drawn, layer.label)}
        elif drawn is not None:
            config["embeddings_initializer"] = keras.initializers.serialize(keras.initializers.get(drawn))
        config["path"] = None if path is None else os.path.abspath(path)
    if loading.scope() is not None:
        config["shared"] = id(table)
    return config


def layer_of(kind: Any, config: Mapping[str, Any]) -> Any:
    """Return a layer of what its `get_config` returned."""
    config, shared, label = dict(config), loading.scope(), f"{config['name']!r}, erk.{kind.__name__}"
    key, described = (KEY, config.pop("shared", None)), config.pop("table", None)
    config["rule"] = rule_of(config["rule"])
    there = None if shared is None else shared.get(key)
    if there is None and described is not None:
        there = table_of(described, label)
    if there is not None:
        layer = kind(there[0], **{name: value for name, value in config.items() if name not in OF_TABLE})
        layer.shares_open_table = there[1]
    else:
        drawn = config["embeddings_initializer"]
        if isinstance(drawn, dict) and KEY in drawn:
            config["embeddings_initializer"] = read_initializer_of(drawn[KEY])
        if shared is None and config["path"] is not None:
            loading.check_not_copied(config["path"], label)
        layer = kind(**config)
    if shared is not None:
        shared[key] = layer.table, layer.shares_open_table
    return layer
