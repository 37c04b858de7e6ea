"""The promise: the spans of an agent's framework are drawn, counted once and found, in a run by all five services."""

from collections.abc import Callable, Collection

import pytest
from fastapi.testclient import TestClient
from mlflow import MlflowClient
from typer.testing import CliRunner

import trackway.traces as traces
from tests.e2e.test_external_agent import rows, running_agents
from tests.e2e.test_training import quiet, trajectories_of
from tests.services.agent.sessions.test_examples import installed
from tests.waiting import until
from trackway.console.app import create_app
from trackway.deploy.cli import app
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.session import RunSession
from trackway.traces import TraceTree
from trackway.traces.views import tool_calls
from trackway.wire.trainer import RunInfo, RunState

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

NAME = "framework"
TOOL = "execute_tool calculator"


def test_a_run_with_an_instrumented_agent(deployment: Deployment, started: Callable[..., RunInfo]) -> None:
    experiment = MlflowClient(tracking_uri=deployment.mlflow_uri).create_experiment(NAME)
    external = installed("pydantic_ai_traced.py")
    receiver = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": deployment.mlflow_uri,
        "OTEL_EXPORTER_OTLP_HEADERS": f"x-mlflow-experiment-id={experiment}",
    }
    with running_agents(deployment, external.model_copy(update={"environment": receiver}).model_dump(mode="json"), 1):
        info = RunSession(deployment).follow(started(NAME, 1, *rows(deployment)).run, quiet)
    made = {f"tr-{trajectory.trace_id}": trajectory for trajectory in trajectories_of(info) if trajectory.trace_id}
    assert (info.state, info.experiment_id, len(made)) == (RunState.FINISHED, experiment, 2 + 16 + 2)
    assert [trajectory.error for trajectory in made.values() if trajectory.error] == []

    trees = until(lambda: complete(deployment, experiment, made.keys()))
    generations = {name: len(tree.of_kind("chat")) for name, tree in trees.items()}
    assert generations == {name: len(trajectory.turns) for name, trajectory in made.items()}
    assert [chat for tree in trees.values() for chat in tree.of_frameworks("chat")] == []  # the same calls as ours
    with_tools = {name: called for name, tree in trees.items() if (called := tree.of_frameworks("execute_tool"))}
    assert with_tools and {tool.name for called in with_tools.values() for tool in called} == {TOOL}
    assert {name: tool_calls(trees[name]) for name in with_tools} == {n: len(own) for n, own in with_tools.items()}

    store = traces.MlflowStore(deployment.mlflow_uri, [experiment])
    assert {tree.trace_id for tree in store.trees(f"span.name = '{TOOL}'")} == with_tools.keys()
    name = next(iter(with_tools))
    drawn = CliRunner().invoke(app, ["traces", "show", name, "--mlflow-uri", deployment.mlflow_uri])
    assert drawn.exit_code == 0 and TOOL in drawn.output and "invoke_agent agent" in drawn.output
    client = TestClient(create_app(deployment.outputs))
    hits = client.get("/api/search", params={"run": NAME, "span": "execute_tool calc*", "limit": 100}).json()["hits"]
    addresses = [hit["address"] for hit in hits]
    tags = [made[name].tags for name in with_tools]
    assert {(at["step"], at["validation"], at["sample"], at["rollout"]) for at in addresses} == {
        (tag.step, tag.validation, str(tag.sample_index), tag.rollout_n) for tag in tags
    }


def complete(deployment: Deployment, experiment: str, names: Collection[str]) -> dict[str, TraceTree] | None:
    """The traces by id, once each has its reward and the framework's root, whose spans come last."""
    found = {tree.trace_id: tree for tree in traces.MlflowStore(deployment.mlflow_uri, [experiment]).trees()}
    trees = {name: tree for name, tree in found.items() if name in names}
    last = [{"reward", "invoke_agent"} <= {span.name.split()[0] for span in tree.spans()} for tree in trees.values()]
    return trees if len(trees) == len(names) and all(last) else None
