"""The run in MLflow, on a real server that is slow, loses answers, or is away; and what other processes send later."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.services.trainer.mlflow_proxy import Proxy
from tests.waiting import until
from trackway.run_config import RunConfig, compose
from trackway.system.process import free_port
from trackway.system.waits import Backoff
from trackway.tracing import TracingSettings
from trackway.trainer.app import create_app
from trackway.trainer.delivery import (
    FileSink,
    Leftovers,
    MlflowRun,
    Tracking,
    jobs,
    mlflow_api,
    mlflow_run,
    open_tracking,
    with_tracking,
)
from trackway.trainer.delivery.feedback_queue import Assessment
from trackway.trainer.delivery.jobs import Later, only_sender
from trackway.trainer.delivery.leftovers import left_by
from trackway.trainer.delivery.mlflow_run import MlflowState, write_state
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.settings import TrainerSettings
from trackway.trainer.undelivered import sentences
from trackway.wire.service import OwnCode
from trackway.wire.trainer import BackendSummary, MetricsRow, RunState

pytestmark = pytest.mark.slow

SCORE = "critic/score/mean"
ENDED = {"FINISHED": RunState.FINISHED, "FAILED": RunState.FAILED}


@pytest.fixture
def config() -> RunConfig:
    return compose([f"trainer.project_name=project-{uuid.uuid4().hex}", "trainer.experiment_name=run"])


@pytest.fixture
def folder(tmp_path: Path, config: RunConfig) -> RunFolder:
    """Of a run that trains."""
    folder = RunFolder(tmp_path / "outputs" / "run")
    folder.create(config, ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="/w"))
    folder.move(RunState.RUNNING)
    return folder


@pytest.fixture
def client(mlflow_server: str) -> MlflowClient:
    return MlflowClient(mlflow_server)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "BACKOFF", Backoff(0.05, 0.2))
    monkeypatch.setattr(jobs, "CLOSING_RETRY_S", 0.5)


def row(step: int, **values: float) -> MetricsRow:
    return MetricsRow(step=step, timestamp=1_700_000_000_000 + step, data=values or {SCORE: step / 2})


def log(folder: RunFolder, tracking: Tracking, *rows: MetricsRow) -> None:
    for row in rows:
        for sink in [FileSink(folder), *tracking.backends]:
            sink.log(row)


def end(folder: RunFolder, tracking: Tracking, status: str, deadline_s: float = 30.0) -> list[BackendSummary]:
    """As a run's process ends."""
    summaries = tracking.close(status, deadline_s)
    folder.move(ENDED[status], tracking=summaries)
    return summaries


def send_leftovers(folder: RunFolder, uri: str) -> None:
    """As a later service does."""
    for left in left_by(folder, folder.info(), TracingSettings(mlflow_uri=uri)):
        while left.advance():
            pass
        left.close()


def runs_of(client: MlflowClient, config: RunConfig) -> list:
    experiment = client.get_experiment_by_name(config.trainer.project_name)
    return [] if experiment is None else list(client.search_runs([experiment.experiment_id]))


def history(client: MlflowClient, run_id: str, name: str = SCORE) -> list[tuple[int, float, int]]:
    return [(metric.step, metric.value, metric.timestamp) for metric in client.get_metric_history(run_id, name)]


def the_run(client: MlflowClient, config: RunConfig):
    [run] = runs_of(client, config)
    return run


def feedback_of(client: MlflowClient, trace_id: str | None) -> dict[str, object]:
    stored = client.get_trace(f"tr-{trace_id}").info.assessments or []
    return {assessment.name: assessment.feedback.value for assessment in stored if assessment.feedback}


def test_without_a_uri_mlflow_is_off_and_says_so(folder: RunFolder, config: RunConfig, caplog):
    caplog.set_level("INFO", "trackway.trainer")

    assert open_tracking(folder, config, None).run is None
    assert "MLflow is off: set trackway.mlflow_uri" in caplog.text


def test_a_run_is_recorded_with_its_params_metrics_and_end(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str
):
    tracking = open_tracking(folder, config, mlflow_server)
    assert tracking.run is not None
    ids = tracking.run.experiment_id, tracking.run.run_id
    log(folder, tracking, row(3, **{"val-core/openai/gsm8k/acc/mean@1": 0.5, "val-core/größe(b)/acc": 0.25}))
    [summary] = end(folder, tracking, "FINISHED")

    run = the_run(client, config)
    assert (run.info.experiment_id, run.info.run_id) == ids
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["trainer.experiment_name"] == "run" and len(run.data.params) > 100
    assert history(client, run.info.run_id, "val-core/openai/gsm8k/acc/mean_at_1") == [(3, 0.5, 1_700_000_000_003)]
    assert history(client, run.info.run_id, "val-core/größe_b_/acc") == [(3, 0.25, 1_700_000_000_003)]
    assert (summary.waiting, summary.lost, sentences(summary)) == (False, 0, [])


def test_mlflow_keeps_metrics_that_are_not_finite_and_those_beside_them(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str
):
    tracking = open_tracking(folder, config, mlflow_server)
    log(folder, tracking, row(1, nan=math.nan, up=math.inf, down=-math.inf, lr=1e6))
    end(folder, tracking, "FINISHED")

    run_id = the_run(client, config).info.run_id
    stored = {name: history(client, run_id, name)[0][1] for name in ("nan", "up", "down", "lr")}
    assert math.isnan(stored.pop("nan"))
    assert stored == {"up": sys.float_info.max, "down": -sys.float_info.max, "lr": 1e6}


def test_a_run_whose_making_got_no_answer_is_found_again_and_made_once(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str, serving, monkeypatch
):
    monkeypatch.setattr(mlflow_api, "CREATE_TIMEOUT_S", 3.0)
    proxy = Proxy(mlflow_server, unanswered=["runs/create"])
    with serving(proxy.app()) as uri:
        tracking = open_tracking(folder, config, uri)
        log(folder, tracking, row(0), row(1))
        [summary] = end(folder, tracking, "FINISHED")

    run = the_run(client, config)
    assert (run.info.status, [step for step, *_ in history(client, run.info.run_id)]) == ("FINISHED", [0, 1])
    assert (summary.waiting, summary.lost, proxy.count("runs/create")) == (False, 0, 1)


def traces(services, count: int) -> list[Assessment]:
    """Trajectories that are traced now, with what is recorded of each."""
    made = [services.trajectory(1, n) for n in range(count)]
    values = {"reward": 1.0, "fate": "used"}
    return [Assessment(trajectory.trace_id or "", trajectory.span_id or "", values) for trajectory in made]


def test_what_was_not_sent_while_mlflow_was_away_is_sent_by_a_later_service(
    folder: RunFolder,
    config: RunConfig,
    client: MlflowClient,
    mlflow_server: str,
    serving,
    traced_services,
):
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    tracking = open_tracking(folder, config, uri)
    assert tracking.run is not None
    log(folder, tracking, *(row(step) for step in range(6)))
    elsewhere = client.create_experiment(f"traces-{uuid.uuid4().hex}")
    services = traced_services(mlflow_server, elsewhere)
    made = traces(services, 3)
    services.close()
    tracking.run.queue.push([Assessment(trajectory.trace_id, trajectory.span_id, {}, link=True) for trajectory in made])
    tracking.run.queue.push(made)
    [left] = end(folder, tracking, "FINISHED", 5.0)

    assert (left.rows_waiting, left.feedback_waiting, left.end_waiting, left.lost) == (6, 9, True, 0)
    assert sentences(left) == [
        f"6 rows of metrics and 9 values of feedback and the run's final status not yet in MLflow (MLflow at {uri} "
        "cannot be reached: [Errno 111] Connection refused): kept on disk and sent later"
    ]
    with serving(Proxy(mlflow_server).app(), port):
        leftovers = Leftovers(folder.path.parent, TracingSettings(mlflow_uri=uri))
        leftovers.offer([folder.info()])
        until(lambda: not with_tracking(folder.info(), folder).tracking[0].waiting)
        leftovers.stop()

    run, info = the_run(client, config), with_tracking(folder.info(), folder)
    assert (info.run_id, info.experiment_id) == (run.info.run_id, run.info.experiment_id)
    assert (run.info.status, len(run.data.params) > 100) == ("FINISHED", True)
    assert history(client, run.info.run_id) == [(step, step / 2, 1_700_000_000_000 + step) for step in range(6)]
    assert [feedback_of(client, trajectory.trace_id) for trajectory in made] == [{"reward": 1.0, "fate": "used"}] * 3
    linked = client.search_traces(locations=[elsewhere, run.info.experiment_id], run_id=run.info.run_id)
    assert {trace.info.trace_id for trace in linked} == {f"tr-{trajectory.trace_id}" for trajectory in made}


def test_a_link_that_is_all_that_was_left_is_sent_by_a_later_service(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str, traced_services
):
    tracking = open_tracking(folder, config, mlflow_server)
    assert tracking.run is not None and tracking.run.experiment_id is not None
    services = traced_services(mlflow_server, tracking.run.experiment_id)  # without the run's header
    [trajectory] = traces(services, 1)
    services.close()
    end(folder, tracking, "FINISHED")
    tracking.run.queue.push([Assessment(trajectory.trace_id, trajectory.span_id, {}, link=True)])

    assert with_tracking(folder.info(), folder).tracking[0].feedback_waiting == 1
    send_leftovers(folder, mlflow_server)

    run = the_run(client, config)
    linked = client.search_traces(locations=[run.info.experiment_id], run_id=run.info.run_id)
    assert [trace.info.trace_id for trace in linked] == [f"tr-{trajectory.trace_id}"]


def test_the_end_of_a_run_does_not_wait_for_the_feedback_of_a_slow_mlflow(
    folder: RunFolder,
    config: RunConfig,
    client: MlflowClient,
    mlflow_server: str,
    serving,
    traced_services,
    monkeypatch,
):
    monkeypatch.setattr(mlflow_run, "TURN_S", 0.5)
    proxy = Proxy(mlflow_server, feedback_delay_s=1.0)
    services = traced_services(mlflow_server, client.create_experiment(f"traces-{uuid.uuid4().hex}"))
    made = traces(services, 10)
    services.close()
    with serving(proxy.app()) as uri:
        tracking = open_tracking(folder, config, uri)
        assert tracking.run is not None
        tracking.run.queue.push(made)
        log(folder, tracking, row(1))
        until(lambda: proxy.count("assessments") > 0)
        [left] = end(folder, tracking, "FINISHED", 5.0)

        run = the_run(client, config)
        assert (run.info.status, [step for step, *_ in history(client, run.info.run_id)]) == ("FINISHED", [1])
        assert (left.end_waiting, left.rows_waiting, left.lost) == (False, 0, 0)
        assert 0 < left.feedback_waiting < 20
        proxy.feedback_delay_s = 0.0
        until(lambda: is_sent(folder, uri))

    assert [feedback_of(client, trajectory.trace_id) for trajectory in made] == [{"reward": 1.0, "fate": "used"}] * 10


def is_sent(folder: RunFolder, uri: str) -> bool:
    """Send what is left, unless the run's own thread is still in its last request."""
    try:
        send_leftovers(folder, uri)
    except Later:
        return False
    return True


KILLED = """
import os, signal, sys
from pathlib import Path
from trackway.trainer.delivery.feedback_queue import Assessment
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.delivery import FileSink, open_tracking
from trackway.wire.trainer import MetricsRow
folder = RunFolder(Path(sys.argv[1]))
tracking = open_tracking(folder, folder.config(), sys.argv[2])
for step in range(3):
    for sink in [FileSink(folder), *tracking.backends]:
        sink.log(MetricsRow(step=step, timestamp=step + 1, data={"critic/score/mean": step / 2}))
tracking.run.queue.push([Assessment(sys.argv[3], "", {"reward": 1.0})])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_sent_by_a_later_one_and_its_run_is_closed(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str, serving, traced_services
):
    services = traced_services(mlflow_server, client.create_experiment(f"traces-{uuid.uuid4().hex}"))
    [made] = traces(services, 1)
    services.close()
    proxy = Proxy(mlflow_server, held=["runs/log-batch"])  # its params and metrics have not arrived when it dies
    with serving(proxy.app()) as uri:
        command = [sys.executable, "-c", KILLED, str(folder.path), uri, made.trace_id]
        assert subprocess.run(command, env=os.environ, check=False, timeout=60).returncode == -signal.SIGKILL
        proxy.released.set()
    folder.move(RunState.FAILED, "the learner died")
    send_leftovers(folder, mlflow_server)

    run = the_run(client, config)
    assert (run.info.status, len(run.data.params) > 100) == ("FAILED", True)
    assert history(client, run.info.run_id) == [(0, 0.0, 1), (1, 0.5, 2), (2, 1.0, 3)]
    assert feedback_of(client, made.trace_id) == {"reward": 1.0}
    assert abs(run.info.end_time - (folder.path / "state.json").stat().st_mtime * 1000) < 1000


def test_rows_that_were_sent_without_an_answer_are_kept_once(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str, serving, monkeypatch
):
    monkeypatch.setattr(mlflow_api, "TIMEOUT_S", 2.0)
    proxy = Proxy(mlflow_server)
    with serving(proxy.app()) as uri:
        tracking = open_tracking(folder, config, uri)
        until(lambda: proxy.count("runs/log-batch") >= 2)  # its params
        proxy.unanswered.append("runs/log-batch")
        log(folder, tracking, row(0))
        until(lambda: not proxy.unanswered and not any(summary.waiting for summary in tracking.summaries()))
        end(folder, tracking, "FINISHED")

    assert history(client, the_run(client, config).info.run_id) == [(0, 0.0, 1_700_000_000_000)]


def test_a_resumed_run_goes_on_in_the_same_mlflow_run_and_sends_the_steps_that_it_does_again(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str
):
    first = open_tracking(folder, config, mlflow_server)
    log(folder, first, row(0), row(1), row(2))
    first.close("KILLED", 30.0)
    assert the_run(client, config).info.status == "KILLED"

    folder.rewind(row(1))
    again = open_tracking(folder, config, mlflow_server)
    again.catch_up(folder.rows())
    until(lambda: the_run(client, config).info.status == "RUNNING")
    log(folder, again, row(2, **{SCORE: 7.0}), row(3))
    end(folder, again, "FINISHED")

    run = the_run(client, config)
    assert run.info.status == "FINISHED"
    assert sorted((step, value) for step, value, _ in history(client, run.info.run_id)) == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
        (2, 7.0),
        (3, 1.5),
    ]


def test_the_versions_of_own_code_are_tags_and_those_of_a_resumed_run_replace_them(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str
):
    def code_of_the_run() -> dict[str, str]:
        tags = the_run(client, config).data.tags
        return {name: tags[name] for name in sorted(tags) if name.startswith("trackway.code")}

    folder.update(code={"agent": OwnCode(digest="a1", commit="c0ffee+changes"), "tools": OwnCode(digest="b1")})
    first = open_tracking(folder, config, mlflow_server)
    log(folder, first, row(0))
    first.close("KILLED", 30.0)
    assert code_of_the_run() == {
        "trackway.code.agent": "a1",
        "trackway.code.agent.commit": "c0ffee+changes",
        "trackway.code.tools": "b1",
    }

    folder.update(code={"agent": OwnCode(digest="a2"), "tools": OwnCode(digest="b1")})
    again = open_tracking(folder, config, mlflow_server)
    end(folder, again, "FINISHED")
    assert code_of_the_run() == {
        "trackway.code.agent": "a2",
        "trackway.code.agent.commit": "",
        "trackway.code.tools": "b1",
    }


def test_the_policy_of_a_run_beside_others_is_a_tag(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str
):
    alone = open_tracking(folder, config, mlflow_server)
    log(folder, alone, row(0))
    alone.close("KILLED", 30.0)
    assert "trackway.policy" not in the_run(client, config).data.tags

    folder.update(policy="second")
    beside = open_tracking(folder, config, mlflow_server)
    end(folder, beside, "FINISHED")
    assert the_run(client, config).data.tags["trackway.policy"] == "second"


def test_a_metric_that_mlflow_refuses_is_counted_and_the_others_arrive(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str
):
    tracking = open_tracking(folder, config, mlflow_server)
    log(folder, tracking, row(1, **{"val-core/../acc": 0.5, SCORE: 0.5}), row(2))
    [summary] = end(folder, tracking, "FINISHED")

    [said] = sentences(summary)
    assert [step for step, *_ in history(client, the_run(client, config).info.run_id)] == [1, 2]
    assert (summary.metrics_lost, summary.waiting) == (1, False)
    assert said.startswith("1 value of metrics lost for MLflow: MLflow answered HTTP 400: ")


def test_a_run_that_was_deleted_in_mlflow_is_left_deleted(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str
):
    tracking = open_tracking(folder, config, mlflow_server)
    log(folder, tracking, row(0))
    until(lambda: bool(history(client, the_run(client, config).info.run_id)))
    client.delete_run(the_run(client, config).info.run_id)
    log(folder, tracking, row(1))
    [summary] = end(folder, tracking, "FINISHED")

    assert (summary.waiting, summary.lost) == (False, 0)
    assert runs_of(client, config) == []


def test_another_database_behind_the_address_gets_the_run_from_its_start(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str
):
    (folder.path / "tracking").mkdir()
    elsewhere = MlflowState(run_id=uuid.uuid4().hex, experiment_id="1", has_params=True, step=5)
    write_state(folder, elsewhere)
    tracking = open_tracking(folder, config, mlflow_server)
    log(folder, tracking, row(0), row(6))
    end(folder, tracking, "FINISHED")

    run = the_run(client, config)
    assert [step for step, *_ in history(client, run.info.run_id)] == [0, 6]
    assert len(run.data.params) > 100


def test_two_processes_do_not_send_the_same_at_once(folder: RunFolder, config: RunConfig, mlflow_server: str, serving):
    proxy = Proxy(mlflow_server)
    (folder.path / "tracking").mkdir()
    with serving(proxy.app()) as uri:
        run = MlflowRun(folder, config, uri)
        with only_sender(folder.path / "tracking" / "mlflow.lock"), pytest.raises(Later, match="another process"):
            run.advance()
        assert proxy.calls == []
        assert run.advance()
        run.close()


def test_a_server_that_refuses_the_login_loses_nothing(folder: RunFolder, config: RunConfig, serving):
    from fastapi import FastAPI, HTTPException

    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    def refuse(path: str) -> None:
        raise HTTPException(401, "who is there?")

    with serving(app) as uri:
        tracking = open_tracking(folder, config, uri)
        log(folder, tracking, row(0))
        [summary] = end(folder, tracking, "FINISHED", 5.0)

    assert (summary.rows_waiting, summary.lost) == (1, 0)
    assert "HTTP 401" in summary.waits_for


@pytest.mark.anyio
async def test_a_service_sends_what_a_run_left_and_says_what_waits_until_then(
    folder: RunFolder, config: RunConfig, client: MlflowClient, mlflow_server: str, running, monkeypatch
):
    monkeypatch.setattr("trackway.trainer.app.LEFTOVERS_S", 0.05)
    tracking = open_tracking(folder, config, "http://127.0.0.1:9")
    log(folder, tracking, row(0), row(1))
    end(folder, tracking, "FINISHED", 5.0)
    outputs, weights = str(folder.path.parent), str(folder.path / "weights")

    async def told(uri: str, until_sent: bool) -> dict:
        tracing = TracingSettings(mlflow_uri=uri)
        settings = TrainerSettings(outputs_dir=outputs, weights_url=weights, tracing=tracing)
        async with asyncio.timeout(30), running(create_app(settings)) as http:
            while True:
                info = (await http.get("/runs/run")).json()
                if not until_sent or (info["run_id"] and not info["tracking"][0]["end_waiting"]):
                    return info
                await asyncio.sleep(0.02)

    before = await told("http://127.0.0.1:9", until_sent=False)
    after = await told(mlflow_server, until_sent=True)

    assert [(backend["backend"], backend["rows_waiting"]) for backend in before["tracking"]] == [("mlflow", 2)]
    assert (before["run_id"], after["run_id"]) == (None, the_run(client, config).info.run_id)
    assert the_run(client, config).info.status == "FINISHED"


@pytest.fixture
def traced_run(folder: RunFolder, config: RunConfig, mlflow_server: str) -> Iterator[tuple[str, str, str]]:
    """URI, experiment and run of a run that is open."""
    tracking = open_tracking(folder, config, mlflow_server)
    assert tracking.run is not None and tracking.run.experiment_id and tracking.run.run_id
    yield mlflow_server, tracking.run.experiment_id, tracking.run.run_id
    tracking.close("FINISHED", 30.0)


def test_traces_of_several_processes_belong_to_the_run_by_the_header_alone(
    traced_run: tuple[str, str, str], client: MlflowClient, traced_services
):
    uri, experiment, run_id = traced_run
    services = traced_services(uri, experiment, run_id)
    made = [services.trajectory(step, n) for step in (1, 2) for n in range(60)]  # more roots than one link call takes
    services.close()

    linked = client.search_traces(locations=[experiment], run_id=run_id, max_results=200)

    assert {trace.info.trace_id for trace in linked} == {f"tr-{trajectory.trace_id}" for trajectory in made}
    [tree] = [trace for trace in linked if trace.info.trace_id == f"tr-{made[0].trace_id}"]
    assert sorted((span.name, str(span.get_attribute("agentic.service"))) for span in tree.data.spans) == [
        ("chat tiny", "rollout"),
        ("execute_tool calculator", "tools"),
        ("trajectory", "agent"),
        ("turn 0", "agent"),
    ]


def test_traces_in_an_experiment_of_their_own_still_belong_to_the_run(
    traced_run: tuple[str, str, str], client: MlflowClient, traced_services
):
    uri, experiment, run_id = traced_run
    other_experiment = client.create_experiment(f"traces-{uuid.uuid4().hex}")
    services = traced_services(uri, other_experiment, run_id)
    made = services.trajectory(1, 0)
    services.close()

    linked = client.search_traces(locations=[experiment, other_experiment], run_id=run_id)

    assert [(trace.info.trace_id, trace.info.experiment_id) for trace in linked] == [
        (f"tr-{made.trace_id}", other_experiment)
    ]
