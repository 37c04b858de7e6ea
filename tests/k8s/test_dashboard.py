"""The Grafana dashboard asks for nothing that the services do not show: every metric and every label, by name."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from benchmarks.sim_engine import SIM
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from trackway.agent.app import create_app as agent_app
from trackway.agent.settings import AgentSettings
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.serve.fan_out import merged
from trackway.reward.app import create_app as reward_app
from trackway.reward.settings import RewardSettings
from trackway.rollout.app import create_app as rollout_app
from trackway.rollout.settings import RolloutSettings
from trackway.run_config import RunConfig
from trackway.tools.app import create_app as tools_app
from trackway.tools.settings import ToolsSettings
from trackway.trainer.app import create_app as trainer_app
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.settings import TrainerSettings

pytestmark = pytest.mark.anyio

MONITORING = Path(__file__).parents[2] / "k8s" / "monitoring"
CHECKPOINT = TINY_MODEL
SERVICES = ("rollout", "agent", "tools", "reward", "trainer")
STEP = {
    "critic/rewards/mean": 0.5,
    "critic/score/mean": 0.5,
    "response_length/mean": 20.0,
    "timing_s/step": 2.0,
    "perf/throughput": 100.0,
    "training/rollout_failure/failed_trajectories": 1.0,
    "val-core/openai/gsm8k/acc/mean@1": 0.25,
}


@pytest.fixture
async def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """What Prometheus has after a scrape of all services that each did some work: labels by name of a sample."""
    monkeypatch.setenv("TRACKWAY_TRACING__OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("TRACKWAY_TRACING__SPOOL_DIR", str(tmp_path / "spool"))
    async with AsyncExitStack() as stack:
        clients = {name: await client(stack, app) for name, app in apps(tmp_path).items()}
        await work(clients)
        texts = {name: (await http.get("/metrics")).text for name, http in clients.items()}
    labels: dict[str, set[str]] = {}
    for text in texts.values():
        for family in text_string_to_metric_families(merged({"abcd": text}, asked=1)):
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels, {"service", "job", "instance"})
    return labels


def apps(folder: Path) -> dict[str, FastAPI]:
    run = RunFolder(folder / "outputs" / "run")
    settings = TrainerSettings(outputs_dir=str(run.path.parent), weights_url=str(folder / "weights"))
    run.create(RunConfig(), settings.service_urls())
    run.update(metrics=STEP)
    nobody = "http://127.0.0.1:9"
    return {
        "rollout": rollout_app(RolloutSettings(engine=SIM)),
        "agent": agent_app(AgentSettings(model_path=str(CHECKPOINT), base_url=nobody)),
        "tools": tools_app(ToolsSettings()),
        "reward": reward_app(RewardSettings()),
        "trainer": trainer_app(settings),
    }


async def client(stack: AsyncExitStack, app: FastAPI) -> httpx.AsyncClient:
    await stack.enter_async_context(app.router.lifespan_context(app))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
    return await stack.enter_async_context(http)


async def work(clients: Mapping[str, httpx.AsyncClient]) -> None:
    """One request of each kind, since a counter has no labels before it counts."""
    asked = {"token_ids": [11, 12], "sampling_params": {"max_tokens": 2}}
    (await clients["rollout"].post("/generate", json=asked)).raise_for_status()
    call = {"arguments": {"expression": "1 + 1"}}
    (await clients["tools"].post("/tools/calculator/execute", json=call)).raise_for_status()
    score = {"data_source": "openai/gsm8k", "solution_str": "#### 72", "ground_truth": "72"}
    (await clients["reward"].post("/score", json=score)).raise_for_status()
    sample = {"data_source": "d", "agent_name": "single_turn_agent", "prompt": [{"role": "user", "content": "1 + 1"}]}
    sample |= {"reward_model": {"ground_truth": "2"}}
    group = {"run": "r", "experiment_name": "e", "step": 1, "sample": sample, "n": 1}
    (await clients["agent"].post("/trajectories", json={**group, "limits": {"timeout_s": 0.5}})).raise_for_status()


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads((MONITORING / "grafana-dashboard.json").read_text())


def expressions(dashboard: Mapping[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


class Asked(NamedTuple):
    """What an expression names: metrics with the labels that select among them, and labels to group by."""

    selected: list[tuple[str, set[str]]]
    grouped: set[str]


def asked_by(expression: str) -> Asked:
    """The names in a PromQL expression, without its functions and its strings."""
    bare = re.sub(r'"(\\.|[^"\\])*"', '""', expression)
    grouped = chain.from_iterable(names.split(",") for names in re.findall(r"\bby \(([^)]*)\)", bare))
    rest = re.sub(r"\bby \([^)]*\)|\[[^]]*\]", " ", bare)
    found = re.findall(r"([A-Za-z_:][\w:]*)\s*(?:\{([^}]*)\})?(?!\w*\s*\()", re.sub(r"\b\w+\s*\(", "(", rest))
    selected = [(name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", chosen))) for name, chosen in found]
    return Asked(selected, {name.strip() for name in grouped})


def missing(expressions: list[str], shown: Mapping[str, set[str]]) -> Iterator[str]:
    """What the expressions name and no service shows."""
    for expression in expressions:
        asked = asked_by(expression)
        for name, labels in asked.selected:
            if name not in shown:
                yield f"metric {name}"
            yield from (f"label {label} of {name}" for label in (labels | asked.grouped) - shown.get(name, labels))


async def test_every_metric_and_label_of_the_dashboard_is_shown_by_a_service(dashboard, shown):
    asked = expressions(dashboard)

    assert (len(asked) > 30, list(missing(asked, shown))) == (True, [])


def test_a_renamed_metric_and_a_renamed_label_are_missed():
    shown = {"calls_total": {"tool", "replica"}, "seconds_bucket": {"le", "tool"}}
    good = 'histogram_quantile(0.9, sum by (le, tool) (rate(seconds_bucket{tool=~"a.*"}[5m])))'
    also = "max(calls_total)"
    wrong = ['sum by (kind) (rate(calls_total{replica="b", name!="x"}[$__rate_interval]))', "max(call_total) - 1"]

    assert list(missing([good, also], shown)) == []
    assert sorted(missing(wrong, shown)) == [
        "label kind of calls_total",
        "label name of calls_total",
        "metric call_total",
    ]


def test_panels_have_ids_of_their_own_and_take_the_data_source_that_is_chosen(dashboard):
    panels = dashboard["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]

    assert len({panel["id"] for panel in panels}) == len(panels) == len(set(places))
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "run"]
    assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {"${datasource}"}
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_both_ways_to_prometheus_scrape_every_service_with_the_token():
    own = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    [trackway] = [job for job in own["scrape_configs"] if job["job_name"] == "trackway"]
    by_label = {
        targets["labels"]["service"]: targets["labels"]["__metrics_path__"] for targets in trackway["static_configs"]
    }
    operators = list(yaml.safe_load_all((MONITORING / "prometheus-operator.yaml").read_text()))
    specs = [manifest["spec"] for manifest in operators if "authorization" in manifest["spec"]]
    by_operator = {spec["staticConfigs"][0]["labels"]["service"]: spec["metricsPath"] for spec in specs}

    assert by_label == by_operator == {name: f"/{name}/replicas/metrics" for name in SERVICES}
    assert {spec["staticConfigs"][0]["targets"][0] for spec in specs} == {"trackway-serve-svc.trackway.svc:8000"}
    assert trackway["authorization"]["credentials_file"].endswith("/trackway-tokens/client-token")
    assert {(s["authorization"]["credentials"]["name"], s["authorization"]["credentials"]["key"]) for s in specs} == {
        ("trackway-tokens", "client-token")
    }
