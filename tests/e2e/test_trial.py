"""The promise: `try` and `evaluate` use the services that run already, those started here and attached ones."""

import json
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from trackway.clients.http_client import authorization, resolve_token
from trackway.console.trajectory import spans_page
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.cli import app
from trackway.deploy.deployment.record import Deployment
from trackway.evaluation.store import EvaluationStore
from trackway.trainer.run_state.folder import RunFolder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def trackway(*words: str) -> str:
    """Return the command's output. It runs in this process, whose imports are done."""
    ended = CliRunner().invoke(app, words, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def groups_answered(deployment: Deployment) -> float:
    """Groups that the agent service of the deployment has answered."""
    url = f"{deployment.base_url}/agent/replicas/metrics"
    metrics = httpx.get(url, headers=authorization(resolve_token()), timeout=30.0).raise_for_status().text
    counts = [line for line in metrics.splitlines() if line.startswith("trackway_requests_total") and "/groups" in line]
    return sum(float(line.split()[-1]) for line in counts)


@pytest.mark.parametrize("attached", [False, True], ids=["started here", "attached"])
def test_rows_are_tried_and_evaluated_on_the_running_services(
    attached: bool, deployment: Deployment, tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs" if attached else deployment.outputs
    if attached:
        trackway("attach", "--base-url", deployment.base_url, "--outputs", str(outputs))
    before = groups_answered(deployment)

    rows = deployment.outputs / "data" / "train.parquet"
    model = f"actor_rollout_ref.model.path={TINY_MODEL}"
    words = ["--row", "3", "--n", "2", "--config-name", "tiny_demo", "--outputs", str(outputs), "--json"]
    tried = json.loads(trackway("try", str(rows), model, *words))

    assert (tried["row"], len(tried["trajectories"]), len(tried["advantages"])) == (3, 2, 2)
    assert [trajectory["error"] for trajectory in tried["trajectories"]] == [None, None]
    assert all(trajectory["response_ids"] for trajectory in tried["trajectories"])
    assert groups_answered(deployment) == before + 1

    words = ["--data", str(rows), "--limit", "2", "--n", "2", "--config-name", "tiny_demo", "--outputs", str(outputs)]
    name = f"evaluated-{'attached' if attached else 'here'}"
    given = ["trackway.trace_validation_samples=1", f"trackway.mlflow_uri={deployment.mlflow_uri}"]
    document = json.loads(trackway("evaluate", "running", *given, *words, "--run", name, "--json"))

    assert (document["evaluation"]["summary"]["rollouts"], document["evaluation"]["summary"]["failed"]) == (4, 0)
    assert groups_answered(deployment) == before + 3
    rollouts = EvaluationStore(outputs / name).trajectories()
    traced = [found.trace_id for found in rollouts if found.trace_id]
    assert [bool(found.trace_id) for found in rollouts] == [True, True, False, False]
    verified = json.loads(trackway("traces", "verify", "--run", name, "--outputs", str(outputs), "--json"))
    assert (verified["traced"], verified["complete"]) == (2, 2), verified
    listed = json.loads(
        trackway("traces", "list", "--run", name, "--validate", "--mlflow-uri", deployment.mlflow_uri, "--json")
    )
    assert {found["trace_id"] for found in listed} == {f"tr-{trace_id}" for trace_id in traced}
    folder = RunFolder(outputs / name)
    names = [span.name for span in spans_page(folder, traced[0]).spans]
    assert names[0] == "trajectory" and {"turn 0", "chat policy"} <= {*names}, names
    linked = MlflowClient(deployment.mlflow_uri).search_traces(
        locations=[folder.info().experiment_id or ""], run_id=folder.info().run_id
    )
    scores = {f"tr-{found.trace_id}": [found.reward.score] for found in rollouts if found.trace_id and found.reward}
    assert {
        trace.info.trace_id: [found.feedback.value for found in trace.info.assessments if found.name == "reward"]
        for trace in linked
    } == scores
