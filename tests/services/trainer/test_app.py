import subprocess
import sys

import pytest
from pydantic import SecretStr

from tests.services.trainer.real_runs import standing_by
from trackway.run_config import RunConfig, compose
from trackway.tracing import Tracing, TracingSettings
from trackway.trainer.app import create_app
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.settings import TrainerSettings
from trackway.wire.trainer import MetricsRow, RunState

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TRACE = "actor_rollout_ref.rollout.trace"
MODEL = "actor_rollout_ref.model.path"


@pytest.fixture
def settings(tmp_path) -> TrainerSettings:
    return TrainerSettings(outputs_dir=str(tmp_path / "outputs"), weights_url=str(tmp_path / "weights"))


@pytest.fixture
def stopped_run(settings: TrainerSettings, tmp_path) -> RunFolder:
    """A run on disk that ended after two steps."""
    folder = RunFolder(tmp_path / "outputs" / "old")
    folder.create(RunConfig(), settings.service_urls())
    for state in (RunState.STOPPING, RunState.STOPPED):
        folder.move(state)
    for step in (1, 2):
        folder.append_row(MetricsRow(step=step, data={"critic/score/mean": step / 2}))
    return folder


def test_the_service_starts_without_torch() -> None:
    code = "import sys, trackway.trainer.app; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("standby", [True, False])
async def test_a_process_waits_for_the_first_run_where_it_is_asked_for(running, settings: TrainerSettings, standby):
    async with running(create_app(settings.model_copy(update={"standby": standby}))):
        assert len(standing_by()) == standby
    assert standing_by() == []


async def test_runs_of_an_earlier_service_are_listed(running, settings, stopped_run):
    async with running(create_app(settings)) as client:
        listed = (await client.get("/runs")).json()["runs"]
        run = (await client.get("/runs/old")).json()

    assert [(run["run"], run["state"]) for run in listed] == [("old", "stopped")]
    assert run["folder"] == str(stopped_run.path)


@pytest.mark.parametrize("follow", ["false", "true"])
async def test_metrics_are_one_row_per_line_and_end_with_the_run(running, settings, stopped_run, follow: str):
    async with running(create_app(settings)) as client:
        answer = await client.get(f"/runs/old/metrics?follow={follow}")

    assert answer.headers["content-type"] == "application/x-ndjson"
    rows = [MetricsRow.model_validate_json(line) for line in answer.text.splitlines()]
    assert [(row.step, row.data["critic/score/mean"]) for row in rows] == [(1, 0.5), (2, 1.0)]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/runs/no"), ("GET", "/runs/no/metrics"), ("POST", "/runs/no/stop")]
)
async def test_an_unknown_run_is_not_found_and_the_known_are_named(running, settings, stopped_run, method, path):
    async with running(create_app(settings)) as client:
        answer = await client.request(method, path)

    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "no run 'no'; the runs are: old"


async def test_a_run_without_model_or_rows_is_refused(running, settings):
    async with running(create_app(settings)) as client:
        answer = await client.post("/runs", json={"config": {}})

    assert answer.status_code == 422
    message = "expected a value for actor_rollout_ref.model.path and data.train_files, got none"
    assert answer.json()["error"]["message"].startswith(message)


async def test_an_unknown_key_is_refused_by_name(running, settings):
    async with running(create_app(settings)) as client:
        answer = await client.post("/runs", json={"config": {"trainer": {"total_epoch": 3}}})

    assert answer.status_code == 422
    assert answer.json()["error"]["detail"]["nearest"][0] == "trainer.total_epochs"


async def test_a_name_that_is_no_folder_name_is_refused(running, settings):
    config = {
        "actor_rollout_ref": {"model": {"path": "m"}},
        "data": {"train_files": "t"},
        "trainer": {"experiment_name": "../x"},
    }
    async with running(create_app(settings)) as client:
        answer = await client.post("/runs", json={"config": config})

    assert answer.status_code == 422
    assert "expected a run name of letters, digits" in answer.json()["error"]["message"]


async def test_only_an_active_run_can_be_stopped(running, settings, stopped_run):
    async with running(create_app(settings)) as client:
        answer = await client.post("/runs/old/stop")

    assert answer.status_code == 409
    assert answer.json()["error"]["message"] == "expected an active run to stop, got run 'old', which is stopped"


@pytest.mark.parametrize(("options", "code"), [("size=1m", "disk_full"), ("ro", "not_writable")])
async def test_a_disk_that_takes_no_state_hides_no_run_and_is_the_answer_to_a_stop_and_a_resume(
    running, small_disk, fill, remount, options: str, code: str
):
    settings = TrainerSettings(outputs_dir=str(small_disk / "outputs"), weights_url=str(small_disk / "weights"))
    folder = RunFolder(small_disk / "outputs" / "dead")
    folder.create(RunConfig(), settings.service_urls())
    folder.disown()
    (small_disk / "outputs" / ".runs.lock").touch()
    fill(small_disk)
    remount(small_disk, options)

    async with running(create_app(settings)) as client:
        [listed] = (await client.get("/runs")).json()["runs"]
        answers = [await client.post(f"/runs/dead/{verb}") for verb in ("stop", "resume")]

    assert (listed["run"], listed["state"]) == ("dead", "starting")
    assert f" bytes free on the disk at {small_disk}; " in listed["message"]
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [(507, code)] * 2


async def test_a_taken_name_is_a_conflict(running, settings, stopped_run):
    config = {"actor_rollout_ref": {"model": {"path": "m"}}, "data": {"train_files": "t"}}
    async with running(create_app(settings)) as client:
        answer = await client.post("/runs", json={"config": config, "run": "old"})

    assert answer.status_code == 409
    assert "run 'old' exists; resume it" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/runs", "/runs/old/resume"])
@pytest.mark.usefixtures("shared_http")
async def test_a_backend_that_a_service_cannot_send_to_is_refused_before_anything_starts(
    running, tmp_path, serving, agent, path: str
):
    nothing = TracingSettings.model_validate({"mlflow_uri": None, "weave_api_key": None, "otlp_endpoint": None})
    everything = nothing.model_copy(update={"weave_api_key": SecretStr("key")})
    agent.tracing = Tracing("agent", nothing)
    config = compose([f"{TRACE}.backend=weave", f"{TRACE}.project_name=me/p", "data.train_files=t", f"{MODEL}=m"])
    body = {"config": config.model_dump(mode="json"), "run": "new"} if path == "/runs" else {}
    with serving(agent.app()) as url:
        settings = TrainerSettings(
            outputs_dir=str(tmp_path / "outputs"),
            weights_url=str(tmp_path / "weights"),
            base_url="http://127.0.0.1:9",
            agent_url=url,
            tracing=everything,
        )
        old = RunFolder(tmp_path / "outputs" / "old")
        old.create(config, settings.service_urls())
        for state in (RunState.STOPPING, RunState.STOPPED):
            old.move(state)
        async with running(create_app(settings)) as client:
            answer = await client.post(path, json=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")
    assert answer.json()["error"]["message"] == (
        "trace backend weave needs W&B's API key: set WANDB_API_KEY in the environment of the agent service, "
        "and restart it"
    )
    assert (old.info().state, (tmp_path / "outputs" / "new").exists()) == (RunState.STOPPED, False)
