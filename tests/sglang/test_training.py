"""Training under Ray on two replicas, each with a real SGLang of its own."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.small_runs import small_run
from tests.e2e.test_training import quiet, trajectories_of
from tests.sglang.sglang_runs import MARKS, SERVER_ARGUMENTS
from tests.vllm.vllm_runs import DEADLINE_S
from trackway.deploy.bundled import CPU_CONFIG
from trackway.deploy.config import serve_config
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.local.up import bring_up, take_down
from trackway.deploy.runs.session import RunSession
from trackway.run_config import compose
from trackway.trainer.data import make_tiny
from trackway.wire.trainer import RunState

pytestmark = MARKS
STEPS = 10


@pytest.fixture
def deployment(environment: Path, tmp_path: Path) -> Iterator[Deployment]:
    """The five services, the rollout service with two replicas on SGLang."""
    outputs = tmp_path / "outputs"
    settings = UpSettings(outputs=outputs, port=0, dashboard_port=0, ray_port=0, mlflow_port=0)
    settings.start_timeout_s = 2 * DEADLINE_S
    server = {"engine_python": str(environment / "bin/python"), "engine_args": SERVER_ARGUMENTS}
    engine = {"engine": "sglang", "device": "cpu", "engine_start_s": 2 * DEADLINE_S, **server}
    config = serve_config.with_options(serve_config.load(CPU_CONFIG), "rollout", engine, {"num_replicas": 2})
    running = bring_up(settings, lambda name, state: print(f"{name}: {state}", flush=True), config)
    make_tiny(outputs / "data", train_size=64, test_size=16, seed=0)
    yield running
    take_down(running)


def test_ten_steps_train_on_tokens_of_two_replicas_under_the_weights_of_each_step(deployment: Deployment) -> None:
    words = small_run(deployment.outputs, "on-sglang", STEPS, "trackway.trace_prompts_per_step=0")
    info = RunSession(deployment).start(compose(words, config_name="tiny_demo"), "on-sglang")
    info = RunSession(deployment).follow(info.run, quiet)
    metrics = httpx.get(f"{deployment.base_url}/rollout/replicas/metrics").raise_for_status().text

    made = [trajectory for trajectory in trajectories_of(info) if not trajectory.tags.validation]
    assert (info.state, info.step, len(made)) == (RunState.FINISHED, STEPS, STEPS * 16)
    assert [trajectory.error for trajectory in made if trajectory.error] == []
    versions = {(t.tags.step, span.version) for t in made for span in t.weight_versions}
    assert versions == {(step, step) for step in range(1, STEPS + 1)}
    rows = [json.loads(line) for line in (Path(info.folder) / "metrics.jsonl").read_text().splitlines()]
    differences = [row["data"]["training/rollout_logprob_diff_max"] for row in rows if row["step"] > 0]
    assert len(differences) == STEPS and max(differences) < 1e-4
    families = {family.name: family.samples for family in text_string_to_metric_families(metrics)}
    assert [sample.value > 0 for sample in families["trackway_engine_generated_tokens"]] == [True, True]
