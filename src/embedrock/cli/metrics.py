"""`Metrics`: numbers of tables as a text file of Prometheus, by prometheus_client, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embedrock.errors import RequirementError

LABELS = ("table", "pid")
PREFIX = "embedrock_"


class Metrics:
    """Writes what ``embedrock top`` shows, a gauge for each number, labelled by table and process.

    Raises:
        RequirementError: prometheus_client is not installed.
    """

    def __init__(self) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise RequirementError(
                f"--prometheus needs prometheus_client, which does not import: {error}. "
                'pip install "embedrock[metrics]"'
            ) from error
        self._client: Any = prometheus_client

    def write(self, lines: Sequence[dict[str, Any]], path: Path) -> None:
        """Replace a file, in one step, by one with the numbers of all tables.

        Args:
            lines: of tables, as ``embedrock top --json`` prints them.
            path: of the file.
        """
        registry = self._client.CollectorRegistry()
        gauges: dict[str, Any] = {}
        for line in lines:
            for name, number in _numbers(line).items():
                if name not in gauges:
                    text = f"{name} of a table, as `embedrock top` shows it"
                    gauges[name] = self._client.Gauge(PREFIX + name, text, LABELS, registry=registry)
                gauges[name].labels(line["table"], line["pid"]).set(number)
        self._client.write_to_textfile(str(path), registry)


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    own = {name: value for name, value in line.items() if isinstance(value, int | float) and name not in LABELS}
    return {**own, **{f"share_{name}": share for name, share in line["shares"].items()}}
