"""Layers as configs, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras

from embedrock.initializers import Initializer
from embedrock.keras.saving import loading
from embedrock.keras.saving.descriptions import (
    describe_group,
    describe_initializer,
    describe_rule_of_layer,
    describe_table,
    group_of,
    read_initializer_of,
    table_of,
)
from embedrock.keras.saving.row_files import rule_of
from embedrock.keras.saving.state import KEY
from embedrock.table.description import POLICIES, policies_of
from embedrock.table.options import LayerOptions, checked_every, declared
from embedrock.table.table import Table

# What a layer on a ready-made table leaves to it. The rule is the layer's.
OF_TABLE = {
    "input_dim",
    "output_dim",
    "embeddings_initializer",
    "group",
    "sharded",
    "wire",
    *declared(LayerOptions),
} - {"rule"}


def config_of(layer: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a layer as plain data. Of a model that is being saved, layers on one table say so."""
    table, config = layer.table, {**arguments, "rule": describe_rule_of_layer(arguments["rule"])}
    config["embeddings_regularizer"] = keras.regularizers.serialize(arguments["embeddings_regularizer"])
    config["embeddings_constraint"] = keras.constraints.serialize(arguments["embeddings_constraint"])
    if isinstance(config["input_dim"], Table):
        config = {name: value for name, value in config.items() if name not in OF_TABLE}
        config["table"] = describe_table(table, layer.label)
    else:
        drawn, path = config["embeddings_initializer"], config["path"]
        if config["input_dim"] != table.rows:  # it has grown, and its first values are those of before
            config["input_dim"], drawn = table.rows, table.spec.init
        if isinstance(drawn, Initializer):
            config["embeddings_initializer"] = {KEY: describe_initializer(drawn, layer.label)}
        elif drawn is not None:
            config["embeddings_initializer"] = keras.initializers.serialize(keras.initializers.get(drawn))
        config["path"] = None if path is None else os.path.abspath(path)
        config["commit_every"] = checked_every(config["commit_every"], "w")  # a timedelta is no plain data
        config |= {name: None if config[name] is None else config[name].describe() for name in POLICIES}
    group = config.pop("group", None)
    if group is not None and (group.is_on_disk or loading.shared_objects() is not None):
        config["group"] = describe_group(group)
    if loading.shared_objects() is not None or loading.copied_objects() is not None or loading.is_tied(layer):
        config["shared"] = id(table)
    return config


def layer_of(kind: Any, config: Mapping[str, Any]) -> Any:
    """Return a layer of what its `get_config` returned."""
    config, shared, label = dict(config), loading.shared_objects(), f"{config['name']!r}, erk.{kind.__name__}"
    key, described = (KEY, config.pop("shared", None)), config.pop("table", None)
    config["rule"] = rule_of(config["rule"])
    tables = loading.copied_objects() if shared is None else shared
    there = None if tables is None else tables.get(key)
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
        is_shared = False
        if (group := config.get("group")) is not None:
            config["group"], is_shared = group_of(group, config["name"], label)
        layer = kind(**{**config, **policies_of(config)})
        layer.shares_open_table |= is_shared
    if tables is not None:
        tables[key] = layer.table, layer.shares_open_table
    return layer
