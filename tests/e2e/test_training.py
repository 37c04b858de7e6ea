"""The promise: five services train an agent over HTTP, and every traced trajectory is one whole trace of the run."""

import json
import os
import signal
import subprocess
import sys
from math import comb, fsum
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from mlflow import MlflowClient
from mlflow.entities import Trace

import trackway.traces as traces
from tests.console.browser import Browser
from tests.console.conftest import Serve
from tests.console.conftest import browser as browser
from tests.console.conftest import chromium as chromium
from tests.console.conftest import serve as serve
from tests.console.walk import walk
from tests.e2e.access_tokens import OPERATOR
from tests.e2e.small_runs import small_run
from tests.services.trainer.run_state.atif_documents import read_back
from tests.waiting import until
from trackway.clients import TrainerClient, run
from trackway.console.app import create_app
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.demo import gaps_on_one_machine
from trackway.deploy.runs.session import RunSession
from trackway.evaluation.summary import summary
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.trainer import RunInfo, RunState
from trackway.wire.trajectory import Trajectory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def quiet(info: RunInfo) -> None:
    """A run's progress, unseen."""


def trajectories_of(info: RunInfo) -> list[Trajectory]:
    files = sorted((Path(info.folder) / "trajectories").glob("*.parquet"))
    return [trajectory for file in files for trajectory in read_trajectories(file)]


def step_of(deployment: Deployment, name: str) -> int:
    [info] = [run for run in runs(deployment) if run.run == name]
    assert info.state not in (RunState.FAILED, RunState.STOPPED), info.message
    return info.step


def runs(deployment: Deployment) -> list[RunInfo]:
    return run(TrainerClient(f"{deployment.base_url}/trainer").runs())


@pytest.fixture(scope="module")
def whole_run(deployment: Deployment, started) -> RunInfo:
    """A finished run of two steps, all of whose training trajectories are traced."""
    return RunSession(deployment).follow(started("whole", 2, "trackway.save_token_values=true").run, quiet)


def test_a_run_leaves_a_whole_trace_for_each_traced_trajectory(deployment: Deployment, whole_run: RunInfo) -> None:
    info = whole_run
    made = trajectories_of(info)
    assert_learner_values(deployment, info, made)
    traced = {f"tr-{trajectory.trace_id}": trajectory for trajectory in made if trajectory.trace_id}
    assert (info.state, len(made), len(traced)) == (RunState.FINISHED, 8 + 32 + 8, 2 + 32 + 2)
    assert [trajectory.error for trajectory in made if trajectory.error] == []
    assert info.experiment_id and info.run_id
    experiment = info.experiment_id

    rows = [json.loads(line) for line in (Path(info.folder) / "metrics.jsonl").read_text().splitlines()]
    differences = [row["data"]["training/rollout_logprob_diff_max"] for row in rows if row["step"] > 0]
    assert len(differences) == 2 and max(differences) < 1e-4  # sampler and trainer agree on every sampled token

    found = until(lambda: whole(deployment, experiment, traced))
    assert found.keys() == traced.keys()

    first = {
        name for name, trajectory in traced.items() if trajectory.tags.step == 1 and not trajectory.tags.validation
    }
    by_tag = traces.MlflowStore(deployment.mlflow_uri, [experiment]).trees("tags.step = '1'")
    client = MlflowClient(tracking_uri=deployment.mlflow_uri)
    by_run = {trace.info.trace_id: trace for trace in of_the_run(client, info)}
    assert {tree.trace_id for tree in by_tag} == first and len(first) == 16
    steps = {by_run[name].info.tags["mlflow.traceName"]: by_run[name] for name in by_run.keys() - traced.keys()}
    assert sorted(steps) == ["train step 0", "train step 1", "train step 2"] and traced.keys() <= by_run.keys()

    spans = {span.name: span for span in steps["train step 1"].data.spans}
    assert {link.trace_id for link in spans["optimizer_step 0"].links} == first
    asked = {link.span_id for name in first for span in by_run[name].data.spans for link in span.links or []}
    assert asked == {spans["rollout"].span_id}  # each trajectory leads back to the step that asked for it


def test_an_evaluation_of_its_stored_rollouts_is_a_plain_computation_of_them(whole_run: RunInfo) -> None:
    """Scores as the file has them, 4 rollouts of 4 rows a step, without any code of the product."""
    passed: dict[int, list[bool]] = {}
    for file in sorted((Path(whole_run.folder) / "trajectories").glob("step_*.parquet")):
        for record in pq.read_table(file, columns=["sample_index", "score"]).to_pylist():
            passed.setdefault(record["sample_index"], []).append(record["score"] > 0)
    counts = [(len(rollouts), sum(rollouts)) for rollouts in passed.values()]
    n = max(size for size, _ in counts)
    assert sum(size for size, _ in counts) == 32 and 0 < sum(correct for _, correct in counts) < 32

    made = [trajectory for trajectory in trajectories_of(whole_run) if not trajectory.tags.validation]
    found = summary(made)

    assert [*found.pass_at] == sorted({1, 2, 4, n})
    for k in found.pass_at:
        reached = [(size, correct) for size, correct in counts if size >= k]
        at_least_one = [1 - comb(size - correct, k) / comb(size, k) for size, correct in reached]
        all_of_them = [comb(correct, k) / comb(size, k) for size, correct in reached]
        with_replacement = [1 - (1 - correct / size) ** k for size, correct in reached]
        assert found.pass_at[k].value == fsum(at_least_one) / len(reached)
        assert found.pass_all[k].value == fsum(all_of_them) / len(reached)
        assert found.best_at[k].value == pytest.approx(fsum(with_replacement) / len(reached), abs=1e-12)


def test_harbor_accepts_every_trajectory_of_a_run_and_their_tokens_read_back(
    whole_run: RunInfo, tmp_path: Path
) -> None:
    assert read_back(RunFolder(Path(whole_run.folder)), tmp_path) == 8 + 32 + 8


def assert_learner_values(deployment: Deployment, info: RunInfo, made: list[Trajectory]) -> None:
    """The console has the learner's values of each token that it trained, and of no other."""
    client = TestClient(create_app(deployment.outputs, services={}))
    trained = [trajectory.tags for trajectory in made if not trajectory.tags.validation]
    for tags in trained:
        place = {"run": info.run, "step": tags.step, "sample": tags.sample_index, "rollout": tags.rollout_n}
        page = client.get("/api/tokens", params=place).json()
        learner, is_trained = page["learner"], [bool(mask) for mask in page["mask"]]
        assert (learner["status"], learner["kept"], len(page["pieces"])) == ("used", is_trained, page["total"])
        for name in ("logprobs", "entropies", "advantages"):
            assert [value is not None for value in learner[name]] == is_trained
        pairs = zip(page["logprobs"], learner["logprobs"], strict=True)
        assert all(abs(sampler - value) < 1e-4 for sampler, value in pairs if value is not None)
    assert len(trained) == 32


@pytest.mark.program("chromium")
def test_a_browser_goes_through_every_page_of_the_console_on_a_run(
    deployment: Deployment, whole_run: RunInfo, serve: Serve, browser: Browser
) -> None:
    tags = [trajectory.tags for trajectory in trajectories_of(whole_run) if not trajectory.tags.validation]
    services = {service: deployment.url(service) for service in deployment.services}
    url = serve(deployment.outputs, services=services)
    browser.open(f"{url}#/")
    browser.evaluate(f"sessionStorage.setItem('trackway-token', {OPERATOR!r})")

    said = walk(browser, url, whole_run.run, tags[0], tags[-1])

    assert "Nothing failed" in said["failures"] and "all ready" in said["system"]
    assert said["compare"].startswith("2 trajectories") and "A prompt" in said["try"]


def of_the_run(client: MlflowClient, info: RunInfo) -> list[Trace]:
    """The traces that MLflow lists on the run's page."""
    return list(client.search_traces(locations=[str(info.experiment_id)], run_id=info.run_id, max_results=100))


def whole(deployment: Deployment, experiment: str, traced: dict[str, Trajectory]) -> dict[str, Trajectory] | None:
    """The traced trajectories once each has a complete tree."""
    found = {tree.trace_id: tree for tree in traces.MlflowStore(deployment.mlflow_uri, [experiment]).trees()}
    for name, trajectory in traced.items():
        if name not in found or gaps_on_one_machine(found[name], trajectory):
            return None
    return {name: traced[name] for name in found if name in traced}


def test_scaling_rollout_during_a_run_fails_no_request_and_both_replicas_hold_the_newest_weights(
    deployment: Deployment, started
) -> None:
    name = started("scaled", 8).run
    until(lambda: step_of(deployment, name) >= 1)
    during = serve_api.scale(deployment, "rollout", 2)
    info = RunSession(deployment).follow(name, quiet)
    after = until(lambda: current(deployment))
    back = serve_api.scale(deployment, "rollout", 1)
    assert (len(during), len(after), len(back)) == (2, 2, 1)
    assert (info.state, [trajectory.error for trajectory in trajectories_of(info) if trajectory.error]) == (
        RunState.FINISHED,
        [],
    )


def current(deployment: Deployment) -> list[int]:
    """The rollout replicas' weight versions once they all hold the newest."""
    rollout = next(service for service in serve_api.service_statuses(deployment) if service.service == "rollout")
    weights = [replica.weights for replica in rollout.replicas if replica.weights]
    return [state.version for state in weights] if all(state.version == state.latest for state in weights) else []


def test_a_killed_rollout_replica_costs_no_trajectory(deployment: Deployment, started) -> None:
    name = started("killed", 4).run
    until(lambda: step_of(deployment, name) >= 1)
    rollout = next(service for service in serve_api.service_statuses(deployment) if service.service == "rollout")
    [replica] = rollout.replicas
    os.kill(replica.health.pid, signal.SIGKILL)
    info = RunSession(deployment).follow(name, quiet)
    assert (info.state, info.restarts) == (RunState.FINISHED, 0)
    assert [trajectory.error for trajectory in trajectories_of(info) if trajectory.error] == []
    assert next(iter(serve_api.service_statuses(deployment))).replicas[0].health.pid != replica.health.pid


@pytest.mark.extended
def test_ctrl_c_saves_a_checkpoint_from_which_the_run_goes_on(deployment: Deployment) -> None:
    words = small_run(deployment.outputs, "interrupted", 15)
    command = [sys.executable, "-m", "trackway.deploy.cli", "train", "--config-name", "tiny_demo"]
    command += ["--outputs", str(deployment.outputs), *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until(lambda: any(run.run == "interrupted" and run.step >= 1 for run in runs(deployment)))
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=180)
    assert process.returncode == 130 and "trackway train --resume interrupted" in shown.replace("\n", " ")
    [stopped] = [run for run in runs(deployment) if run.run == "interrupted"]
    RunSession(deployment).resume("interrupted")
    info = RunSession(deployment).follow("interrupted", quiet)
    rows = [json.loads(line) for line in (Path(info.folder) / "metrics.jsonl").read_text().splitlines()]
    assert (stopped.state, info.state) == (RunState.STOPPED, RunState.FINISHED)
    assert 1 <= stopped.step < 15 and [row["step"] for row in rows] == list(range(16))


def test_the_command_line_shows_the_running_services(deployment: Deployment) -> None:
    def trackway(*words: str) -> str:
        command = [sys.executable, "-m", "trackway.deploy.cli", *words, "--outputs", str(deployment.outputs)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    services = json.loads(trackway("status", "--json"))
    assert {service["service"]: service["status"] for service in services} == dict.fromkeys(
        deployment.services, "RUNNING"
    )
    assert json.loads(trackway("traces", "list", "--step", "99", "--json")) == []
