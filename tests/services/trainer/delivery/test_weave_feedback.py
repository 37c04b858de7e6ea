"""Feedback for Weave as its trace server receives it, over a real socket."""

import base64
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from fastapi import FastAPI, Request, Response
from pydantic import SecretStr

from trackway.trainer.delivery import weave_feedback
from trackway.trainer.delivery.assessment import Assessment
from trackway.trainer.delivery.jobs import Later
from trackway.trainer.delivery.weave_feedback import WeaveFeedback, weave_summary
from trackway.wire.trainer import BackendSummary


class TraceServer:
    """The one route of Weave's trace server that feedback needs."""

    def __init__(self, status: int = 200) -> None:
        self.requests: list[tuple[str, list[dict]]] = []
        self._status = status

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/traces/feedback/batch/create")
        async def create(request: Request) -> Response:
            self.requests.append((request.headers["authorization"], (await request.json())["batch"]))
            return Response('{"res": []}', self._status, media_type="application/json")

        return app


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tracking"


def feedback(folder: Path, url: str) -> WeaveFeedback:
    return WeaveFeedback(folder, f"{url}/traces/", "me/gsm8k", SecretStr("key"))


def send(folder: Path, url: str, assessments: Sequence[Assessment] = ()) -> BackendSummary:
    weave = feedback(folder, url)
    weave.queue.push(assessments)
    try:
        while weave.advance():
            pass
    finally:
        weave.close()
    return weave.summary()


STEP = [
    Assessment("t" * 32, "a" * 16, {"reward": 1.0, "advantage": -0.5, "fate": "used"}),
    Assessment("u" * 32, "b" * 16, {"fate": "dropped_failed"}),
]


def test_a_step_is_one_request_that_names_each_call_by_its_span(serving, folder: Path):
    server = TraceServer()
    with serving(server.app()) as url:
        summary = send(folder, url, STEP)

    [(authorization, batch)] = server.requests
    assert authorization == "Basic " + base64.b64encode(b"api:key").decode()
    first = f"weave:///me/gsm8k/call/{'a' * 16}"
    assert batch == [
        {"project_id": "me/gsm8k", "weave_ref": first, "feedback_type": "reward", "payload": {"value": 1.0}},
        {"project_id": "me/gsm8k", "weave_ref": first, "feedback_type": "advantage", "payload": {"value": -0.5}},
        {"project_id": "me/gsm8k", "weave_ref": first, "feedback_type": "fate", "payload": {"value": "used"}},
        {
            "project_id": "me/gsm8k",
            "weave_ref": f"weave:///me/gsm8k/call/{'b' * 16}",
            "feedback_type": "fate",
            "payload": {"value": "dropped_failed"},
        },
    ]
    assert (summary.waiting, summary.lost) == (False, 0)


def test_a_long_step_is_sent_in_parts(serving, folder: Path, monkeypatch):
    monkeypatch.setattr(weave_feedback, "ITEMS_PER_CALL", 3)
    server = TraceServer()
    with serving(server.app()) as url:
        send(folder, url, STEP)

    assert [len(batch) for _, batch in server.requests] == [3, 1]


@pytest.mark.parametrize("status", [400, 500])
def test_a_refusal_is_counted_told_and_not_sent_again(serving, folder: Path, status: int):
    server = TraceServer(status)
    with serving(server.app()) as url:
        summary = send(folder, url, STEP)

    assert (len(server.requests), summary.feedback_waiting, summary.feedback_lost) == (1, 0, 4)
    assert summary.lost_because.startswith(f"Weave refused 4 values for me/gsm8k: HTTP {status}: ")


@pytest.mark.parametrize("status", [401, 429, 503])
def test_what_weave_does_not_take_now_waits_on_disk_for_another_process(serving, folder: Path, status: int):
    with serving(TraceServer(status).app()) as url, pytest.raises(Later, match=f"HTTP {status}"):
        send(folder, url, STEP)
    waiting = weave_summary(folder)
    server = TraceServer()
    with serving(server.app()) as url:
        summary = send(folder, url)

    assert (waiting.feedback_waiting, waiting.feedback_lost, f"HTTP {status}" in waiting.waits_for) == (4, 0, True)
    assert ([len(batch) for _, batch in server.requests], summary.waiting, summary.lost) == ([4], False, 0)


def test_a_server_that_cannot_be_reached_is_tried_again(serving, folder: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Later, match="cannot be reached"):
        send(folder, f"http://127.0.0.1:{port}", STEP)
    server = TraceServer()
    with serving(server.app(), port) as url:
        summary = send(folder, url)

    assert (len(server.requests), summary.waiting, summary.lost) == (1, False, 0)
