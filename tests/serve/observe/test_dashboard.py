"""docs/grafana-dashboard.json: every metric that it names exists, with the labels that it uses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from compile_and_serve.runtime.messages import EngineStats
from tests.serve.conftest import Server

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana-dashboard.json"


def expressions(panels: list[dict[str, Any]]) -> list[str]:
    return [target["expr"] for panel in panels for target in panel["targets"]]


async def test_every_metric_of_the_dashboard_exists(server: Server) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert (await server.complete()).status_code == 200
    metrics = server.app.state.context.metrics
    metrics.observe_step(EngineStats(graph_replays={"full": 1}, prompt_steps={"triton": 1}, step_tokens=1))
    families = list(text_string_to_metric_families(metrics.render().decode()))
    samples = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    described = {family.name for family in families}
    used: set[str] = set()
    for expression in expressions(dashboard["panels"]):
        names = re.findall(r"cas:\w+", expression)
        assert names, expression
        for name in names:
            assert name in samples or name in described, f"{name} in {expression}"
            used.add(name)
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            for label in labels.split(", "):
                known = [samples[name] for name in names if name in samples]
                assert all(label in one for one in known), (label, expression)
    [model] = [one for one in dashboard["templating"]["list"] if one["name"] == "model"]
    assert re.findall(r"cas:\w+", model["query"])[0] in samples
    assert len(used) >= 25
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
    assert len(set(places)) == len(places)
