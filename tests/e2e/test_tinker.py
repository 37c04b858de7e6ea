"""The promise: a training loop of anyone's own joins by a base URL. Tinker's SDK is unmodified."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.access_tokens import OPERATOR
from trackway.deploy.deployment.record import Deployment
from trackway.wire.trainer import RunInfo, RunList, RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def run_of(deployment: Deployment, session: str) -> RunInfo:
    answer = httpx.get(f"{deployment.url('trainer')}/runs", headers={"authorization": f"Bearer {OPERATOR}"})
    return next(info for info in RunList.model_validate_json(answer.content).runs if info.run == session)


def test_the_sdk_trains_and_samples_while_the_service_is_killed(deployment: Deployment) -> None:
    url = deployment.url("trainer")
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
    info = run_of(deployment, session)
    assert (info.state, info.step) == (RunState.FINISHED, 1)


@pytest.mark.extended  # 80 s; the test before it goes the same way
def test_ten_steps_of_the_example_raise_the_reward(deployment: Deployment, tmp_path: Path) -> None:
    environment = {**os.environ, "TRACKWAY_BASE_URL": deployment.base_url, "TRACKWAY_TOKEN": OPERATOR, "STEPS": "10"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples/tinker/rl_loop.py")]
    output = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True, timeout=300)
    accuracies = [float(found) for found in re.findall(r"accuracy ([0-9.]+)", output)]
    assert len(accuracies) == 12 and accuracies[-1] > accuracies[0] + 0.2, output
