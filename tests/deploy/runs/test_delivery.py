"""What a command waits for after its run, and when it ends the wait."""

import time
from pathlib import Path

import pytest
from rich.console import Console

from trackway.deploy.commands import run_output
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs import session, shown
from trackway.deploy.runs.losses import Unsent
from trackway.deploy.runs.session import RunSession
from trackway.deploy.terminal.progress import DeliveryBar
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import BackendSummary, RunInfo, RunState, TraceSummary

HERE = Deployment(
    base_url="http://127.0.0.1:1",
    dashboard_url="",
    mlflow_uri="",
    outputs=Path("outputs"),
    serve_config={"applications": [{"name": "agent"}]},
)


def waiting(feedback: int = 0, rows: int = 0) -> RunInfo:
    mlflow = BackendSummary(backend="mlflow", feedback_waiting=feedback, rows_waiting=rows)
    return RunInfo(run="r", state=RunState.FINISHED, tracking=[mlflow], traces=TraceSummary(spans_waiting=7))


class Services:
    """A trainer that gives these states of a run in turn, and services with these numbers of waiting spans."""

    def __init__(self, infos: list[RunInfo], spans: list[int]) -> None:
        self._infos, self._spans = infos, spans

    async def run(self, name: str) -> RunInfo:
        info = self._infos.pop(0) if len(self._infos) > 1 else self._infos[0]
        if info.message:
            raise TrackwayError(ErrorCode.UNAVAILABLE, info.message)
        return info

    def spans_waiting(self, deployment: Deployment) -> int:
        return self._spans.pop(0) if len(self._spans) > 1 else self._spans[0]


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch):
    """Makes the services; a wait without progress ends after 0.2 s."""
    monkeypatch.setattr(session, "_POLL_S", 0.01)
    monkeypatch.setattr(session, "STALLED_S", 0.2)

    def scripted(infos: list[RunInfo], spans: list[int]) -> None:
        services = Services(infos, spans)
        monkeypatch.setattr(session, "TrainerClient", lambda url: services)
        monkeypatch.setattr(session, "spans_waiting", services.spans_waiting)

    return scripted


def test_the_wait_ends_when_backends_have_everything(after):
    after([waiting(4, 2), waiting(4), waiting(1), waiting()], [9, 5, 0])
    seen: list[Unsent] = []

    info = RunSession(HERE).deliver(waiting(), seen.append)

    assert seen == [Unsent(9, 4, 2), Unsent(5, 4, 0), Unsent(0, 1, 0), Unsent()]
    assert info.traces is not None and info.traces.spans_waiting == 0


def test_the_end_of_a_run_that_a_backend_lacks_is_unsent():
    lacking = BackendSummary(backend="mlflow", end_waiting=True)

    assert Unsent.of(RunInfo(run="r", state=RunState.FINISHED, tracking=[lacking])) == Unsent(rows=1)


def test_a_wait_without_progress_ends_with_what_is_left(after):
    after([waiting(4)], [3])
    began = time.monotonic()

    info = RunSession(HERE).deliver(waiting(), lambda unsent: None)

    assert 0.2 <= time.monotonic() - began < 10
    assert Unsent.of(info) == Unsent(3, 4, 0)


def test_spans_of_attached_services_are_not_waited_for(after):
    after([waiting()], [3])
    seen: list[Unsent] = []

    RunSession(HERE.model_copy(update={"attached": True})).deliver(waiting(), seen.append)

    assert seen == [Unsent()]


def test_a_trainer_that_is_gone_ends_the_wait(after):
    gone = RunInfo(run="r", state=RunState.FINISHED, message="connection refused")
    after([gone], [3])

    assert RunSession(HERE).deliver(waiting(2), lambda unsent: None) == waiting(2)


def test_ctrl_c_says_what_is_left_and_how_to_send_it(after, monkeypatch: pytest.MonkeyPatch):
    after([waiting(4, 1)], [1200])
    monkeypatch.setattr(DeliveryBar, "show", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    console = Console(record=True, width=200)
    monkeypatch.setattr(shown, "stderr", console)

    shown.delivered(RunSession(HERE, own=True), waiting(4, 1), quiet=True)

    assert console.export_text() == (
        "not sent: 1,200 spans, 4 values of feedback, 1 row of metrics; kept on disk; to send it: "
        "trackway up --outputs outputs\n"
    )


@pytest.mark.parametrize(
    ("info", "told"),
    [
        (RunInfo(run="r", state=RunState.STOPPED), "checkpoint saved"),
        (RunInfo(run="r", state=RunState.STOPPING), "run r is stopping"),
        (RunInfo(run="r", state=RunState.RUNNING), "run r is running"),
        (
            RunInfo(run="r", state=RunState.RUNNING, message="connection refused"),
            "the state of run r is unknown: connection refused",
        ),
    ],
    ids=["once", "twice", "twice at once", "without a trainer"],
)
def test_after_ctrl_c_a_checkpoint_is_named_only_once_there_is_one(
    monkeypatch: pytest.MonkeyPatch, info: RunInfo, told: str
):
    monkeypatch.setattr(session, "TrainerClient", lambda url: Services([info], [0]))
    console = Console(record=True, width=200)
    monkeypatch.setattr(run_output, "stderr", console)

    run_output.report_interrupted(RunSession(HERE), "r")

    assert console.export_text() == f"{told}; to resume: trackway train --resume r --outputs outputs\n"
