"""Layers, tables, rules and initial values as plain data, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.initializers import FromArray, FromBfloat16, FromSafetensors, Initializer
from embedrock.keras.saving import loading
from embedrock.keras.saving.state import KEY
from embedrock.keras.workers.shards import check_whole
from embedrock.optimizers import Rule, describe_rule
from embedrock.spec.description import describe_spec, policies_of, read_initializer, rule_of
from embedrock.table.group import GIVEN, Group
from embedrock.table.opened import opened
from embedrock.table.opening import check_policies
from embedrock.table.options import LayerOptions, checked_every, declared
from embedrock.table.table import Table, rows_of

# Arguments that the table of a layer on a ready-made table decides. The rule is the layer's.
OF_TABLE = {
    *("input_dim", "output_dim", "embeddings_initializer", "group", "sharded", "wire"),
    *declared(LayerOptions),
} - {"rule"}
# Keys of a member table's description.
OF_MEMBER = ("name", "rows", "dim", *GIVEN)


def config_of(layer: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a layer as plain data. In a saved model, layers on one table have its number."""
    table, config = layer.table, {**arguments, "rule": describe_rule_of_layer(arguments["rule"])}
    config["missing"] = layer.missing and layer.missing.given
    config["embeddings_regularizer"] = keras.regularizers.serialize(arguments["embeddings_regularizer"])
    config["embeddings_constraint"] = keras.constraints.serialize(arguments["embeddings_constraint"])
    if isinstance(config["input_dim"], Table):
        config = {name: value for name, value in config.items() if name not in OF_TABLE}
        config["table"] = describe_table(table, layer.label)
    else:
        drawn, path = config["embeddings_initializer"], config["path"]
        if config["input_dim"] != table.rows:  # it has grown: the added rows' initializer is in the table's spec
            config["input_dim"], drawn = table.rows, table.spec.init
        if isinstance(drawn, Initializer):
            config["embeddings_initializer"] = {KEY: describe_initializer(drawn, layer.label)}
        elif drawn is not None:
            config["embeddings_initializer"] = keras.initializers.serialize(keras.initializers.get(drawn))
        config["path"] = None if path is None else os.path.abspath(path)
        config["commit_every"] = checked_every(config["commit_every"], "w")  # a timedelta is no plain data
        policies = check_policies(config).items()
        config |= {name: None if policy is None else policy.describe() for name, policy in policies}
    group = config.pop("group", None)
    if group is not None and (group.is_on_disk or loading.shared_objects() is not None):
        config["group"] = describe_group(group)
    if loading.shared_objects() is not None or loading.copied_objects() is not None or loading.is_tied(layer):
        config["shared"] = id(table)
    return config


def layer_of(kind: Any, config: Mapping[str, Any]) -> Any:
    """Make a layer from its `get_config`."""
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


def describe_initializer(init: Any, label: str) -> dict[str, Any]:
    """Return an initializer as plain data. An array must be a file's: its name is saved."""
    if not isinstance(init, FromArray):
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
    if description["name"] == FromSafetensors.__name__:
        folder, remedy = description["folder"], "erk.load_model(file, relocate={old path: new path})."
        now = {**description, "folder": loading.path_now(folder)}
        return FromSafetensors.found(now, "a layer", f"If they are in another folder, load the model by {remedy}")
    if description["name"] != FromArray.__name__:
        return read_initializer(dict(description), "a layer")
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
    described = {
        **describe_spec(table.spec),
        "init": describe_initializer(table.spec.init, label),
        "rule": describe_rule_of_layer(rows_of(table).given_rule),
        **table.options,
    }
    if table.group is not None:
        own = {name: described[name] for name in OF_MEMBER if name in described}
        return {**own, "group": describe_group(table.group)}
    return {**described, "at": table.last_commit} if table.mode == "r" else described


def table_of(description: Mapping[str, Any], label: str) -> tuple[Table, bool]:
    """Return the table that `describe_table` described, and whether another model shares it."""
    init, rule = read_initializer_of(description["init"]), rule_of(description.get("rule"))  # None in files of 0.1
    options = {**description, **policies_of(description), "init": init, "rule": rule}
    path, at = options.get("path"), options.pop("at", None)
    if (described := options.pop("group", None)) is not None:
        group, is_shared = group_of(described, options["name"], label)
        if group is not None:
            return group.table(**{name: options[name] for name in OF_MEMBER}), is_shared
    if at is not None:
        return loading.open_snapshot(loading.path_now(str(path)), at, options), False
    if path is not None and loading.shared_objects() is None:
        loading.check_not_copied(path, label)
    return loading.open_for(options)


def describe_group(group: Group) -> dict[str, Any]:
    """Return a group as plain data, for layers that share it."""
    described = {"shared": id(group), "memory": group.memory, "on_nonfinite": group.on_nonfinite}
    if group.storage is None:
        return {**described, "device_memory": group.device_memory}
    opening = group.storage.opening
    described |= {name: getattr(opening, name) for name in ("path", "policy", "keep", "commit_every")}
    return {**described, "at": group.last_commit, "missing": opening.missing} if group.mode == "r" else described


def group_of(description: Mapping[str, Any], name: str, label: str) -> tuple[Group | None, bool]:
    """Return the group that `describe_group` described, and whether another model shares it.

    A group on disk that is open in this process is reused. In RAM each loaded model has a new group. A copied layer has
    None: its table is alone. `name` is that of the requested table.
    """
    shared = loading.shared_objects()
    if "path" not in description:
        if shared is None:
            return None, False
        key = "embedrock group", description["shared"]
        if key not in shared:
            of_gpu = description.get("device_memory")  # absent in older files
            shared[key] = Group(description["memory"], description["on_nonfinite"], device_memory=of_gpu)
        return shared[key], False
    path, at = description["path"], description.get("at")
    if shared is None:
        loading.check_not_copied(path, label, name)
    options = {name: description[name] for name in ("memory", "on_nonfinite", "policy", "keep")}
    options["commit_every"] = description.get("commit_every")  # absent in older files
    if at is not None:
        snapshots = {} if shared is None else shared
        if (KEY, path, at) not in snapshots:
            options["missing"] = description.get("missing")
            snapshots[KEY, path, at] = loading.open_snapshot(loading.path_now(path), at, options)
        return snapshots[KEY, path, at], False
    if shared is not None:
        return loading.found_once(path, options, lambda now: Group(path=now, **options))
    return opened(path) or Group(path=path, **options), False


def describe_rule_of_layer(rule: Rule | None) -> dict[str, Any] | None:
    """Return a rule as plain data, without its learning rate if it brings none."""
    described = describe_rule(rule)
    if rule is not None and described is not None and not rule.brings_lr:
        del described["lr"]
    return described
