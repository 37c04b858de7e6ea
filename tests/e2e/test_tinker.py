"""The promise: a training loop of anyone's own joins by a base URL. Tinker's SDK is unmodified."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from mlflow import MlflowClient
from safetensors.torch import load_file

from tests.e2e.access_tokens import OPERATOR
from tests.waiting import until
from trackway.console.app import create_app
from trackway.deploy.deployment.record import Deployment
from trackway.traces.mlflow_store import MlflowStore
from trackway.traces.store import Steps, TraceFilter, TraceKind
from trackway.trainer.calls.results import weights_file
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trainer import RunInfo, RunList, RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def run_of(deployment: Deployment, session: str) -> RunInfo:
    answer = httpx.get(f"{deployment.url('trainer')}/runs", headers={"authorization": f"Bearer {OPERATOR}"})
    return next(info for info in RunList.model_validate_json(answer.content).runs if info.run == session)


def test_the_sdk_trains_and_samples_while_the_service_is_killed(deployment: Deployment) -> None:
    url = deployment.tinker_url
    command = [sys.executable, "-W", "ignore", "-m", "tests.e2e.tinker_calls", url, f"tml-{OPERATOR}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as program:
        assert program.stdin is not None and program.stdout is not None
        assert program.stdout.readline() == "drawn\n"
        os.kill(httpx.get(f"{url}/health").json()["pid"], signal.SIGKILL)
        output, _ = program.communicate("\n", timeout=300)
    got = json.loads(output)
    session = got["session"]
    (first, again), (scores, named, base) = got["drawn"], got["scores"]
    before, after, copied = got["losses"]
    assert got["paths"] == [
        f"tinker://{session}:train:0/weights/first",
        f"tinker://{session}:train:0/sampler_weights/p",
    ]
    assert [[len(logprobs) for logprobs in output] for output in got["logprobs"]] == [[3, 3], [3]]
    assert got["logprobs"][0][0] != got["logprobs"][1][0] and got["metrics"]["grad_norm"] > 0
    assert after != before and copied == pytest.approx(after, abs=1e-6)
    assert again == first != [[], []]
    assert scores[0] is None and scores[1:] == pytest.approx(named[1:], abs=1e-6) and scores[1:] != base[1:]
    until(lambda: run_of(deployment, session).state is RunState.FINISHED)
    assert run_of(deployment, session).step == 1


def looped(url: str, interfere: Callable[[str], None]) -> dict[str, Any]:
    """Return the results of the loop of `tinker_loop`. `interfere` is called at each of its places."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.e2e.tinker_loop", url, f"tml-{OPERATOR}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as program:
        assert program.stdin is not None and program.stdout is not None
        try:
            for line in program.stdout:
                if line.startswith("{"):
                    return json.loads(line)
                interfere(line.strip())
                program.stdin.write("\n")
                program.stdin.flush()
        finally:
            program.kill()
    raise AssertionError("expected the loop to end with JSON, got no such line")


SPANS = {"sample", "forward_backward", "optim_step", "save_weights_for_sampler"}


def session_of(saved: str) -> str:
    return saved.removeprefix("tinker://").partition(":")[0]


def spans_of(deployment: Deployment, saved: str, step: int) -> set[str]:
    """Names of the spans that MLflow has of a step's traces."""
    wanted = TraceFilter(TraceKind.STEP, {"experiment_name": session_of(saved)}, Steps(step, step))
    trees = MlflowStore.open(deployment.mlflow_uri, None).search(wanted)
    return {span.name for tree in trees for span in tree.spans()}


def require_shown(deployment: Deployment, session: str) -> None:
    """Look at step 2 of `tinker_loop` in the console, and at the run's traces in MLflow."""
    with TestClient(create_app(deployment.outputs)) as console:

        def get(path: str, **parameters: str | int) -> dict[str, Any]:
            return console.get(f"/api/{path}", params={"run": session, **parameters}).raise_for_status().json()

        step = get("step", step=2)
        assert Counter(step["sample_index"]).most_common() == [
            (sample, 4) for sample in dict.fromkeys(step["sample_index"])
        ]
        assert {*step["advantage"]} <= {1.0, -1.0} and step["traced"] == [True] * 8
        sampled = get("trajectory", step=2, sample=step["sample_index"][0], rollout=1)
        trace, span = sampled["trace_id"], sampled["span_id"]
        names = [
            (found["name"].partition(" ")[0], found["depth"]) for found in get("spans", trace=trace, span=span)["spans"]
        ]
        assert names == [("sample", 0), *[("chat", 1)] * 4]
    info = RunFolder(deployment.outputs / session).info()
    assert 0 < info.metrics["timing_s/update_actor"] < info.metrics["timing_s/step"]
    client = MlflowClient(deployment.mlflow_uri)

    def linked() -> set[str]:
        traces = client.search_traces(locations=[info.experiment_id or ""], run_id=info.run_id)
        return {trace.info.trace_id for trace in traces}

    until(lambda: len(linked()) == 3 and f"tr-{trace}" in linked(), state=linked)


def test_a_loop_with_kills_ends_in_the_weights_of_the_loop_without(deployment: Deployment) -> None:
    url, killed = deployment.tinker_url, list[str]()
    calm = looped(url, lambda place: None)
    until(lambda: spans_of(deployment, calm["saved"], 2) >= SPANS, state=lambda: spans_of(deployment, calm["saved"], 2))
    require_shown(deployment, session_of(calm["saved"]))
    ended = {folder.parent for folder in deployment.outputs.glob("tinker-*/calls")}

    def kill_worker() -> None:
        [session] = {folder.parent for folder in deployment.outputs.glob("tinker-*/calls")} - ended
        owner = until(lambda: json.loads((session / "worker.json").read_text()), ignored=OSError)
        os.kill(owner["pid"], signal.SIGKILL)

    def kill_service() -> None:
        os.kill(httpx.get(f"{url}/health").json()["pid"], signal.SIGKILL)

    schedule = {
        "0 computing": [kill_worker],
        "1 sampling": [kill_service],
        "1 stepping": [kill_worker],
        "2 publishing": [kill_worker],
        "2 computing": [kill_worker, kill_service],
    }

    def interfere(place: str) -> None:
        for kill in schedule.get(place, []):
            kill()
            killed.append(place)

    troubled = looped(url, interfere)

    weights = [load_file(weights_file(deployment.outputs, got["saved"])) for got in (calm, troubled)]
    assert len(killed) == 6
    assert troubled["drawn"] == calm["drawn"] and troubled["outputs"] == calm["outputs"]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


@pytest.mark.extended  # 80 s; the test before it goes the same way
def test_ten_steps_of_the_example_raise_the_reward(deployment: Deployment, tmp_path: Path) -> None:
    environment = {**os.environ, "TRACKWAY_BASE_URL": deployment.base_url, "TINKER_BASE_URL": deployment.tinker_url}
    environment |= {"TRACKWAY_TOKEN": OPERATOR, "STEPS": "10"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples/tinker/rl_loop.py")]
    output = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True, timeout=300)
    accuracies = [float(found) for found in re.findall(r"accuracy ([0-9.]+)", output)]
    assert len(accuracies) == 12 and accuracies[-1] > accuracies[0] + 0.2, output
