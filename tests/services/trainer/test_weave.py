"""Feedback for Weave as its trace server receives it, over a real socket."""

import base64
import socket
import time

import pytest
from fastapi import FastAPI, Request, Response
from pydantic import SecretStr

from trackway.trainer import weave
from trackway.trainer.background import Background
from trackway.trainer.feedback import Assessment
from trackway.trainer.weave import WeaveFeedback


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


def send(url: str, assessments: list[Assessment]) -> Background:
    background = Background("weave")
    feedback = WeaveFeedback(f"{url}/traces/", "me/gsm8k", SecretStr("key"), background, 0.0)
    feedback.submit(assessments)
    background.close(10)
    feedback.close()
    return background


STEP = [
    Assessment("t" * 32, "a" * 16, {"reward": 1.0, "advantage": -0.5, "fate": "used"}),
    Assessment("u" * 32, "b" * 16, {"fate": "dropped_failed"}),
]


def test_a_step_is_one_request_that_names_each_call_by_its_span(serving):
    server = TraceServer()
    with serving(server.app()) as url:
        background = send(url, STEP)

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
    assert (background.failed, background.dropped) == (0, 0)


def test_a_long_step_is_sent_in_parts(serving, monkeypatch):
    monkeypatch.setattr(weave, "ITEMS_PER_CALL", 3)
    server = TraceServer()
    with serving(server.app()) as url:
        send(url, STEP)

    assert [len(batch) for _, batch in server.requests] == [3, 1]


@pytest.mark.parametrize("status", [401, 500])
def test_a_refusal_is_counted_told_and_not_sent_again(serving, caplog, status: int):
    server = TraceServer(status)
    with serving(server.app()) as url:
        background = send(url, STEP)

    assert (len(server.requests), background.failed) == (1, 1)
    assert f"Weave refused 4 values for me/gsm8k: HTTP {status}" in caplog.text


def test_a_server_that_cannot_be_reached_is_tried_again(serving):
    server, background = TraceServer(), Background("weave")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    url = f"http://127.0.0.1:{port}/traces"
    feedback = WeaveFeedback(url, "me/gsm8k", SecretStr("key"), background, patience_s=30)
    feedback.submit(STEP)
    end = time.monotonic() + 10
    while not background.waiting and time.monotonic() < end:
        time.sleep(0.01)
    with serving(server.app(), port):
        background.close(20)
    feedback.close()

    assert (len(server.requests), background.failed) == (1, 0)
