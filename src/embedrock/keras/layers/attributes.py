"""Arguments of a layer as its attributes: what is set there after the layer was made counts, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embedrock.errors import ArgumentError

Checked = Callable[[Any, Any], Any]


class LayerArgument:
    """An argument of a layer, which may be read, and set for as long as that changes what the layer does.

    Args:
        checked: returns what a layer keeps of a value, given both, or raises an error: the value may be set until the
            layer is built. None: the layer's table was made with it.
        default: what is shown where it was left out.
    """

    def __init__(self, checked: Checked | None = None, default: Any = None) -> None:
        self._checked, self._default = checked, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        """Return what the layer was given, or the default."""
        if layer is None:
            return self
        given = layer._config[self._name]
        return self._default if given is None else given

    def __set__(self, layer: Any, value: Any) -> None:
        """Give an unbuilt layer another value.

        Raises:
            ArgumentError: it would change nothing.
        """
        given = f"{layer.kind}(..., {self._name}=...)"
        if self._checked is None:
            raise ArgumentError(
                f"`{self._name}` of {layer.label} cannot be set: its table was made with it. Give it to the layer, "
                f"{given}."
            )
        if layer.built:
            raise ArgumentError(
                f"`{self._name}` of {layer.label} cannot be set once the layer is built: what was made of it before "
                f"would go on without. Set it before the layer is called, or give it to a new one, {given}."
            )
        layer._config[self._name] = self._checked(layer, value)
