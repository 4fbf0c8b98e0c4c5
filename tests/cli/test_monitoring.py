"""The Grafana dashboard and the alert rules of `docs/monitoring/`: of numbers that are written, and valid.

`promtool` is in Debian's package prometheus. `grafana_foundation_sdk` is Grafana's own reader of dashboards.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import embedrock as er
from embedrock.cli.histories import now
from embedrock.cli.watching import write_metrics
from embedrock.table import numbers
from embedrock.table.numbers import StatsFile

REPOSITORY = Path(__file__).resolve().parents[2]
DASHBOARD = REPOSITORY / "docs/monitoring/embedrock-dashboard.json"
ALERTS = REPOSITORY / "docs/monitoring/embedrock-alerts.yml"
DATASOURCE = {"type": "object", "required": ["type", "uid"], "additionalProperties": {"type": "string"}}
TARGET = {
    "type": "object",
    "required": ["refId", "expr", "datasource"],
    "properties": {"refId": {"pattern": "^[A-Z]$"}, "expr": {"type": "string"}, "datasource": DATASOURCE},
}
PLACE = {
    "x": {"minimum": 0, "maximum": 23},
    "y": {"minimum": 0},
    "w": {"minimum": 1, "maximum": 24},
    "h": {"minimum": 1},
}
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos", "datasource", "targets", "fieldConfig", "options"],
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": ["timeseries", "stat"]},
        "gridPos": {"type": "object", "required": list(PLACE), "properties": PLACE, "additionalProperties": False},
        "datasource": DATASOURCE,
        "targets": {"type": "array", "minItems": 1, "items": TARGET},
        "fieldConfig": {"type": "object", "required": ["defaults", "overrides"]},
    },
}
VARIABLE = {
    "type": "object",
    "required": ["name", "type", "query"],
    "properties": {
        "type": {"enum": ["datasource", "query"]},
        "refresh": {"enum": [0, 1, 2]},
        "hide": {"enum": [0, 1, 2]},
    },
}
# What Grafana documents of a dashboard, https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/
SCHEMA = {
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "panels", "templating", "time"],
    "properties": {
        "uid": {"type": "string", "maxLength": 40},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "refresh": {"type": "string", "pattern": "^[0-9]+[smhd]$"},
        "graphTooltip": {"enum": [0, 1, 2]},
        "time": {"type": "object", "required": ["from", "to"]},
        "templating": {"type": "object", "properties": {"list": {"type": "array", "items": VARIABLE}}},
        "panels": {"type": "array", "minItems": 1, "items": PANEL},
    },
}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names in a file for Prometheus, of a table on disk that ended and one in RAM that trains."""
    folder = tmp_path_factory.mktemp("metrics")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_RUNTIME_DIR", str(folder))
        recorder = numbers._Recorder(1e6)
        try:
            disk = er.Table(10**6, 4, rule=er.SGD(), path=folder / "t.rock", memory="1MiB")
            ram = er.Table(100, 4, rule=er.SGD())
            for k in range(3):
                for table in (disk, ram):
                    table.update([k], table.lookup([k]) + 1)
                recorder._timed += 1.0
                recorder.sample()
            disk.commit()
            disk.close()
            recorder.sample()
        finally:
            recorder.stop()
    paths = [folder / "t.rock.stats", *(folder / "embedrock").glob("*.stats")]
    write_metrics([line for path in paths if (line := now(StatsFile.read(path)))], folder / "x.prom")
    return set(re.findall(r"^(\w+)\{", (folder / "x.prom").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", [DASHBOARD, ALERTS], ids=lambda path: path.name)
def test_every_name_is_one_that_is_written(path: Path, written: set[str]):
    named = set(re.findall(r"\bembedrock_\w+", path.read_text()))
    assert len(named) > 5
    assert named - written == set()


def test_the_dashboard_is_what_grafana_documents(dashboard: dict[str, Any]):
    jsonschema.validate(dashboard, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**dashboard, "panels": [{**dashboard["panels"][0], "type": "graph"}]}, SCHEMA)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken = np.zeros((64, 24), int)
    for place in (panel["gridPos"] for panel in dashboard["panels"]):
        taken[place["y"] : place["y"] + place["h"], place["x"] : place["x"] + place["w"]] += 1
    assert taken.max() == 1  # no panel lies on another
    variables = {one["name"] for one in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__all"} == variables


def lost(given: Any, read: Any) -> list[str]:
    """Return the parts of a JSON that another one has not, or differently."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [f"{key}.{one}" for key, value in given.items() for one in lost(value, read.get(key))]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [one for pair in zip(given, read, strict=True) for one in lost(*pair)]
    return [] if given == read else [f"{given!r} became {read!r}"]


def test_grafana_reads_all_of_the_dashboard(dashboard: dict[str, Any]):
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    plugins.register_default_plugins()

    def lost_by_grafana(given: dict[str, Any]) -> list[str]:
        return lost(given, json.loads(JSONEncoder().encode(models.Dashboard.from_json(given))))

    assert lost_by_grafana(dashboard) == []
    assert lost_by_grafana({**dashboard, "tittle": ""}) == ["tittle.'' became None"]


def promtool(*arguments: object) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool: apt-get install prometheus")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_alerts_fire_when_they_should(tmp_path: Path):
    assert "SUCCESS: 7 rules found" in promtool("check", "rules", ALERTS)
    cases = (Path(__file__).parent / "embedrock-alerts-test.yml").read_text()
    names = set(re.findall(r"alert: (\w+)", ALERTS.read_text()))
    assert names == set(re.findall(r"alertname: (\w+)", cases))
    (tmp_path / "cases.yml").write_text(cases.replace("{alerts}", str(ALERTS)))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "cases.yml")


def test_prometheus_parses_the_queries_of_the_dashboard(dashboard: dict[str, Any], tmp_path: Path):
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [{"record": f"q{k}", "expr": re.sub(r"\$\w+", ".*", query)} for k, query in enumerate(queries)]
    (tmp_path / "q.yml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))  # JSON is YAML
    assert f"{len(queries)} rules found" in promtool("check", "rules", tmp_path / "q.yml")
