"""The promise: services that run elsewhere are shown, scaled and trained on by where they answer, and nothing is kept.

"Elsewhere" is the session's deployment, of which these tests know its addresses and tokens only.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.e2e.access_tokens import OPERATOR
from tests.e2e.small_runs import small_run
from tests.waiting import until
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.config import serve_config
from trackway.deploy.config.serve_config import Replicas
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment, load_running
from trackway.deploy.deployment.serve_api import ServeApi
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs import demo
from trackway.deploy.runs.prepare import placed, prepare
from trackway.deploy.runs.session import RunSession
from trackway.run_config import compose
from trackway.system.process import UserError
from trackway.wire.service import ServiceName
from trackway.wire.trainer import RunInfo, RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RAY_TOKEN = "RAY_AUTH_TOKEN"
MODEL = str(TINY_MODEL)


def trackway(*words: str) -> str:
    """What it prints, in an environment like that of the services' pods."""
    command = [sys.executable, "-m", "trackway.deploy.cli", *words]
    environment = {**os.environ, "TRACKWAY_AUTH__TOKENS_FILE": "/nowhere", "TRACKWAY_MODEL_PATH": MODEL}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def attached(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An outputs folder with the session's deployment attached, and Ray's token in the environment."""
    outputs = tmp_path_factory.mktemp("attached")
    places = ["--base-url", deployment.base_url, "--ray-url", deployment.dashboard_url]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(RAY_TOKEN, deployment.token)
        trackway("attach", *places, "--mlflow-uri", deployment.mlflow_uri, "--outputs", str(outputs))
        yield outputs


@pytest.fixture
def api(deployment: Deployment) -> ServeApi:
    return ServeApi(deployment.dashboard_url, deployment.token)


FIVE: tuple[str, ...] = get_args(ServiceName)
"""The services that are attached; a reward model is the reward service's alone."""


def pids(deployment: Deployment) -> dict[str, list[int]]:
    return {
        service.service: [replica.health.pid for replica in service.replicas]
        for service in serve_api.service_statuses(deployment)
        if service.service in FIVE
    }


def test_the_record_shows_the_services_and_holds_no_secret(deployment: Deployment, attached: Path) -> None:
    services = json.loads(trackway("status", "--outputs", str(attached), "--json"))
    states = {service["service"]: service["status"] for service in services}
    assert states == dict.fromkeys(FIVE, "RUNNING")
    found = {service["service"]: [replica["health"]["pid"] for replica in service["replicas"]] for service in services}
    assert found == pids(deployment)
    record = Deployment.path(attached)
    assert record.stat().st_mode & 0o777 == 0o600
    assert [secret for secret in (OPERATOR, deployment.token) if secret in record.read_text()] == []


def test_without_rays_address_the_replicas_are_shown_and_scale_says_what_it_needs(
    deployment: Deployment, attached: Path
) -> None:
    blind = load_running(attached).model_copy(update={"dashboard_url": ""})
    assert pids(blind) == pids(deployment)
    with pytest.raises(UserError, match=r"attached without --ray-url; .*k8s/base/serve.yaml"):
        serve_api.scale(blind, "rollout", 2)


def test_scale_changes_one_number_of_what_serve_has_and_restarts_nobody(attached: Path, api: ServeApi) -> None:
    there, shipped = load_running(attached), api.config()
    bounded = serve_config.with_replicas(shipped, "reward", Replicas(1, 2))
    api.deploy(bounded)  # by somebody else, after the record was written
    until(lambda: api.applications()["reward"].status == "RUNNING")
    before, ran = api.config(), pids(there)
    assert before == bounded and len(ran["reward"]) == 1

    up = serve_api.scale(there, "rollout", 2)
    scaled, during = api.config(), pids(there)
    down = serve_api.scale(there, "rollout", 1)

    assert (len(up), len(down), down[0].health.pid in during["rollout"]) == (2, 1, True)
    assert scaled == serve_config.with_replicas(before, "rollout", Replicas(2, 2))
    assert api.config() == before
    del ran["rollout"], during["rollout"]
    assert during == ran
    api.deploy(shipped)
    until(lambda: api.applications()["reward"].replicas == {"RUNNING": 1})


def test_another_clusters_token_is_refused_in_a_line(attached: Path, monkeypatch) -> None:
    monkeypatch.setenv(RAY_TOKEN, "0" * 64)
    with pytest.raises(UserError, match=r"refused the token .HTTP 40[13].; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"):
        serve_api.scale(load_running(attached), "rollout", 2)


def test_a_run_starts_there_with_paths_of_the_services_volume(deployment: Deployment, attached: Path) -> None:
    there = load_running(attached)
    words = small_run(deployment.outputs, "far", 1, "trainer.val_before_train=False")
    config = placed(compose(words, config_name="tiny_demo"), there)
    seen: list[RunInfo] = []

    info = RunSession(there).follow(RunSession(there).start(config).run, seen.append)

    assert (info.state, info.step, seen[-1]) == (RunState.FINISHED, 1, info)
    with pytest.raises(UserError, match=r"data.train_files: expected an absolute path on the services' volume"):
        placed(compose([*words, "data.train_files=train.parquet"], config_name="tiny_demo"), there)


def test_the_demo_runs_there_as_a_jobs_command(deployment: Deployment, attached: Path, tmp_path: Path) -> None:
    small = ["data.train_batch_size=4", "data.val_max_samples=8", "actor_rollout_ref.rollout.n=4"]
    small += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=2"]
    words = ["--outputs", str(attached), "--data-dir", str(tmp_path), "--wait", "60", "--seed", "7", "--json"]
    there = load_running(attached)
    session, settings = RunSession(there), UpSettings(outputs=attached)
    keys = demo.demo_words(7, "seed7", tmp_path, [*small, f"actor_rollout_ref.model.path={MODEL}"])
    demo.write_rows(7, tmp_path, small)
    subject = prepare(keys, None, "tiny_demo", settings)
    info = session.submit(subject, lambda info: None)  # by a pod that is evicted at once
    assert session.submit(subject, lambda info: None).uid == info.uid  # it is followed
    session.stop(info.run, lambda info: None)

    told = json.loads(trackway("demo", "--attached", *words, *small))

    counts = {name: told[name] for name in ("steps", "trajectories", "failed_trajectories")}
    assert counts == {"steps": 2, "trajectories": 8 + 32 + 8, "failed_trajectories": 0}
    assert (told["traced"], told["complete_traces"]) == (4 + 16 + 4, 24)
    assert json.loads((attached / "summary.json").read_text()) == told and (attached / "reward.png").exists()
    assert sorted(file.name for file in (tmp_path / "tiny-seed7").iterdir()) == ["test.parquet", "train.parquet"]

    newest = session.info("seed7")
    assert newest.uid == info.uid and demo.name_of(7, [newest]) == "seed7-2"  # it went on
