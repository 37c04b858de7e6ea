"""Services that run elsewhere: asked, remembered without a secret, refused in a line, forgotten; over real sockets."""

import json
import os
from pathlib import Path

import psutil
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from typer.testing import CliRunner

from trackway.clients.http_client import TOKEN
from trackway.deploy.cli import app
from trackway.deploy.commands.traces import store_uri
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.attach import attach, wait_for
from trackway.deploy.deployment.processes import ProcessRecord
from trackway.deploy.deployment.record import Deployment, NothingRuns, find_running, load_running, unanswered
from trackway.deploy.deployment.serve_api import ServeApi, ray_token, service_statuses
from trackway.deploy.local import preflight
from trackway.deploy.local.settings import UpSettings
from trackway.serving.middleware import CatchAllErrors
from trackway.system.process import UserError
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import Ready

pytestmark = pytest.mark.slow  # five real services

SERVICES = ["rollout", "agent", "tools", "reward", "trainer"]
START_S = 60.0
"""Longest wait for services of this process, which build their routes at the first request."""
CLOSED = "http://127.0.0.1:1"


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


def quiet(name: str, state: str) -> None:
    """Nobody looks."""


def record(outputs: Path, base_url: str = CLOSED, **given: object) -> Deployment:
    fields = {"base_url": base_url, "dashboard_url": "", "mlflow_uri": "", "outputs": outputs, "attached": True}
    made = Deployment.model_validate({**fields, **given})
    made.save()
    return made


def process(started: float) -> ProcessRecord:
    return ProcessRecord(name="ray", pid=os.getpid(), started=started, log=Path("ray.log"))


def test_a_record_of_what_answers_is_enough_for_the_other_commands(elsewhere, outputs: Path) -> None:
    written = attach(elsewhere.url + "/", [], None, "http://mlflow:5000", outputs, START_S, quiet)

    assert load_running(outputs) == written
    assert (written.base_url, written.services) == (elsewhere.url, SERVICES)
    assert store_uri(outputs) == "http://mlflow:5000"
    assert Deployment.path(outputs).stat().st_mode & 0o777 == 0o600
    assert os.environ[TOKEN] not in Deployment.path(outputs).read_text()


def test_each_service_may_have_an_address_of_its_own(elsewhere, outputs: Path) -> None:
    own = [f"{name}={elsewhere.url}/{name}" for name in SERVICES]
    written = attach(None, own, None, None, outputs, START_S, quiet)

    assert load_running(outputs) == written
    assert written.url("tools") == f"{elsewhere.url}/tools"
    assert written.address == ", ".join(f"{name} {elsewhere.url}/{name}" for name in SERVICES)


def test_addresses_come_from_the_services_own_variables(elsewhere, outputs: Path, monkeypatch) -> None:
    for name in SERVICES[1:]:
        monkeypatch.setenv(f"TRACKWAY_{name.upper()}_URL", f"{elsewhere.url}/{name}")
    rollout = f"rollout={elsewhere.url}/rollout"
    written = attach(None, [rollout], None, None, outputs, START_S, quiet)

    assert {name: written.url(name) for name in SERVICES} == {name: f"{elsewhere.url}/{name}" for name in SERVICES}
    monkeypatch.setenv("TRACKWAY_TOOLS_URL", CLOSED)
    assert attach(elsewhere.url, [], None, None, outputs, START_S, quiet).url("tools") == f"{elsewhere.url}/tools"


def test_an_address_of_one_service_goes_before_the_common_one(elsewhere, outputs: Path) -> None:
    elsewhere.away = {"tools"}
    with pytest.raises(UserError, match=rf"at {elsewhere.url}, tools {CLOSED} to answer /health, got no answer from t"):
        attach(elsewhere.url, [f"tools={CLOSED}"], None, None, outputs, 0.0, quiet)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--base-url, or an address of rollout, agent, tools, reward, trainer, got none; give --service-url roll"),
        (["tools=http://a", "agent=http://a"], "--base-url, or an address of rollout, reward, trainer, got none"),
        (["tool=http://a"], "--service-url: expected SERVICE=ADDRESS with one of rollout, .*, got 'tool=http://a'"),
        (["tools"], "--service-url: expected an address like http://127.0.0.1:8000, got ''"),
    ],
)
def test_an_address_that_is_missing_is_named(given: list[str], message: str, outputs: Path) -> None:
    with pytest.raises(UserError, match=message):
        attach(None, given, None, None, outputs, 0.0, quiet)


def test_a_service_without_ray_is_its_own_replica(elsewhere, outputs: Path) -> None:
    there = attach(elsewhere.url, [], None, None, outputs, START_S, quiet)
    elsewhere.away = {"reward/ready", "rollout"}
    statuses = {status.service: status for status in service_statuses(there)}

    assert {name: status.status for name, status in statuses.items()} == {
        **dict.fromkeys(SERVICES, "RUNNING"),
        "rollout": "UNAVAILABLE",
    }
    [tools], [reward] = statuses["tools"].replicas, statuses["reward"].replicas
    assert (tools.health.service, tools.ready) == ("tools", Ready(ready=True))
    assert not reward.ready.ready and "503" in reward.ready.reason


def test_who_does_not_answer_is_named_and_nothing_is_written(elsewhere, outputs: Path) -> None:
    elsewhere.away = {"rollout", "trainer"}
    reasons = r"rollout \(HTTP 503: no rollout here\); trainer \(HTTP 503: no trainer here\)"
    with pytest.raises(
        UserError, match=f"{elsewhere.url} to answer /health, got no answer from {reasons}; check the services"
    ):
        attach(elsewhere.url, [], None, None, outputs, 0.0, quiet)
    assert Deployment.load(outputs) is None


async def defect(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("no vocabulary")


async def stranger(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("welcome")(scope, receive, send)


@pytest.mark.parametrize(
    ("app", "reason"),
    [
        (
            CatchAllErrors(defect),
            "ValueError: no vocabulary; this is a bug; see the traceback in the service's log",
        ),
        (stranger, "the server at {url}/rollout is not a Trackway service"),
    ],
    ids=["a service of ours that fails", "somebody else's"],
)
def test_a_service_that_fails_is_not_taken_for_a_stranger(
    app: ASGIApp, reason: str, elsewhere, outputs: Path, monkeypatch
) -> None:
    monkeypatch.setitem(elsewhere._apps, "rollout", app)
    assert unanswered(record(outputs, elsewhere.url)) == {"rollout": reason.format(url=elsewhere.url)}


def test_services_that_come_later_are_waited_for(elsewhere, outputs: Path) -> None:
    elsewhere.away = {"rollout"}
    seen: list[tuple[str, str]] = []

    def come(name: str, state: str) -> None:
        seen.append((name, state))
        if (name, state) == ("trainer", "ready"):
            elsewhere.away = set()

    attach(elsewhere.url, [], None, None, outputs, 60.0, come)
    ready = [name for name, state in seen if state == "ready"]
    assert ready[:5] == [*SERVICES[1:], "rollout"] and Deployment.load(outputs) is not None


def test_a_service_may_answer_and_not_be_ready(elsewhere, outputs: Path) -> None:
    there = attach(elsewhere.url, [], None, None, outputs, START_S, quiet)
    elsewhere.away = {"rollout/ready"}
    with pytest.raises(UserError, match=r"to answer /ready, got no answer from rollout \(HTTP 503: no rollout/ready"):
        wait_for(there, 0.0, quiet, "/ready", Ready)


def test_a_refused_token_is_told_at_once(elsewhere, outputs: Path, monkeypatch) -> None:
    monkeypatch.setenv(TOKEN, "another-0123456789abcdef")
    with pytest.raises(TrackwayError, match=f"set the token in {TOKEN}") as refused:
        attach(elsewhere.url, [], None, None, outputs, 600.0, quiet)
    assert refused.value.code is ErrorCode.UNAUTHORIZED
    record(outputs, elsewhere.url)
    with pytest.raises(TrackwayError, match=f"set the token in {TOKEN}"):
        find_running(outputs)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8000", "ftp://here", "http://", "http://here/?a=b", "http://me:secret@here", "http://a:b"]
)
def test_an_address_of_another_kind_is_refused(address: str, outputs: Path) -> None:
    with pytest.raises(UserError, match="--base-url: expected") as refused:
        attach(address, [], None, None, outputs, 0.0, quiet)
    assert "secret" not in str(refused.value)


def test_a_password_in_mlflows_address_is_not_kept(outputs: Path) -> None:
    with pytest.raises(UserError, match=r"--mlflow-uri: expected no user or password .*MLFLOW_TRACKING_USERNAME"):
        attach(CLOSED, [], None, "https://me:secret@mlflow", outputs, 0.0, quiet)
    assert not outputs.exists()


def test_ray_must_be_where_it_is_said_to_be(elsewhere, outputs: Path) -> None:
    with pytest.raises(UserError, match=rf"Ray's REST API at {elsewhere.url}/api/serve/applications/: HTTP 503"):
        attach(elsewhere.url, [], elsewhere.url, None, outputs, 0.0, quiet)
    with pytest.raises(UserError, match=r"no answer from Ray's REST API at http://127.0.0.1:1/"):
        attach(elsewhere.url, [], CLOSED, None, outputs, 0.0, quiet)
    with pytest.raises(UserError, match=r"expected Ray Serve's applications at .*; is this Ray's dashboard"):
        ServeApi(f"{elsewhere.url}/reward/health?", "").config()


def test_what_runs_on_this_machine_is_not_overwritten(elsewhere, outputs: Path) -> None:
    began = psutil.Process().create_time()
    record(outputs, attached=False, processes=[process(began)])
    with pytest.raises(
        UserError, match=r"are running on this machine, at http://127.0.0.1:1; .*--outputs.*`trackway down`"
    ):
        attach(elsewhere.url, [], None, None, outputs, 0.0, quiet)
    record(outputs, attached=False, processes=[process(began - 100)])  # another process with this pid, long ago
    assert attach(elsewhere.url, [], None, None, outputs, START_S, quiet).attached


def test_services_that_answer_no_more_are_an_error_that_says_so(outputs: Path) -> None:
    record(outputs)
    with pytest.raises(NothingRuns, match=r"attached to services at http://127.0.0.1:1, and none answers: rollout,"):
        load_running(outputs)
    assert find_running(outputs) is None


def test_one_service_that_answers_is_enough_to_be_asked_for_the_others(elsewhere, outputs: Path) -> None:
    elsewhere.away = set(SERVICES[1:])
    there = record(outputs, elsewhere.url)
    assert load_running(outputs) == there
    shown = {service.service: (service.status, service.message) for service in serve_api.service_statuses(there)}
    assert shown["agent"][0] == "UNAVAILABLE" and "HTTP 503: no agent here" in shown["agent"][1]


def test_commands_for_this_machine_leave_attached_services_alone(elsewhere, outputs: Path) -> None:
    record(outputs, elsewhere.url, mlflow_uri="http://mlflow:5000")
    with pytest.raises(UserError, match=r"is attached to services at .*; detach with `trackway down`"):
        preflight.check(UpSettings(outputs=outputs))
    for words, remedy in ((["demo"], "add --attached to run the demo there"), (["ui"], "open http://mlflow:5000")):
        failed = CliRunner().invoke(app, [*words, "--outputs", str(outputs)])
        assert isinstance(failed.exception, UserError) and remedy in str(failed.exception)
    assert outputs.exists()


def test_down_forgets_them_and_they_run_on(elsewhere, outputs: Path) -> None:
    record(outputs, elsewhere.url)
    told = CliRunner().invoke(app, ["down", "--outputs", str(outputs)])
    assert told.stdout == f"detached from the services at {elsewhere.url}; they keep running\n"
    assert Deployment.load(outputs) is None
    words = ["attach", "--base-url", elsewhere.url, "--outputs", str(outputs), "--json"]
    assert json.loads(CliRunner().invoke(app, words).stdout)["base_url"] == elsewhere.url


def test_rays_token_is_found_where_ray_looks(tmp_path: Path, monkeypatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = [ray_token()]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of the home\n")
    found.append(ray_token())
    (tmp_path / "mounted").write_text("of the file\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "mounted"))
    found.append(ray_token())
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the variable")
    found.append(ray_token())
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert [*found, ray_token()] == ["", "of the home", "of the file", "of the variable", ""]

    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"RAY_AUTH_TOKEN_PATH: expected a file with Ray's token, got .*/gone"):
        ray_token()
