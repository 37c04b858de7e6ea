"""Feedback for Weave as its trace server receives it, over a real socket."""

import asyncio
import base64
import json
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from fastapi import FastAPI, Request, Response
from pydantic import SecretStr

from trackway.system.process import free_port
from trackway.trainer.delivery import weave_feedback
from trackway.trainer.delivery.feedback_queue import Assessment
from trackway.trainer.delivery.jobs import Later
from trackway.trainer.delivery.weave_feedback import WeaveFeedback, weave_summary
from trackway.wire.trainer import BackendSummary

pytestmark = pytest.mark.slow


class TraceServer:
    """The two routes of Weave's trace server that feedback needs; a row is kept as often as it is posted."""

    def __init__(self, status: int = 200, lost_answers: int = 0, gateway_status: int = 0) -> None:
        self.requests: list[tuple[str, list[dict]]] = []
        self.rows: list[dict] = []
        self.queries: list[list[str]] = []
        self.query_answer: str | None = None
        """Sent in place of what is kept."""
        self._status = status
        self._lost_answers = lost_answers
        """Posts that are kept and whose answer does not arrive."""
        self._gateway_status = gateway_status
        """What the client gets for such a post; without it, nothing until it gives up."""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/traces/feedback/batch/create")
        async def create(request: Request) -> Response:
            batch = (await request.json())["batch"]
            self.requests.append((request.headers["authorization"], batch))
            if self._status == 200:
                self.rows += batch
            if self._lost_answers:
                self._lost_answers -= 1
                while not self._gateway_status and not await request.is_disconnected():
                    await asyncio.sleep(0.02)
                return Response(status_code=self._gateway_status or 200)
            return Response('{"res": []}', self._status, media_type="application/json")

        @app.post("/traces/feedback/query")
        async def query(request: Request) -> Response:
            asked = await request.json()
            field, wanted = asked["query"]["$expr"]["$in"]
            assert (asked["project_id"], asked["fields"], field) == ("me/gsm8k", ["id"], {"$getField": "id"})
            ids = [literal["$literal"] for literal in wanted]
            self.queries.append(ids)
            kept = [{"id": row["id"]} for row in self.rows if row["id"] in ids]
            return Response(self.query_answer or json.dumps({"result": kept}), media_type="application/json")

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
    assert [row.pop("id") for row in batch] == [
        str(uuid.uuid5(uuid.NAMESPACE_URL, f"weave:///me/gsm8k/call/{call}/feedback/{name}"))
        for call, name in [("a" * 16, "reward"), ("a" * 16, "advantage"), ("a" * 16, "fate"), ("b" * 16, "fate")]
    ]
    assert server.queries == []
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
    port = free_port()
    with pytest.raises(Later, match="cannot be reached"):
        send(folder, f"http://127.0.0.1:{port}", STEP)
    server = TraceServer()
    with serving(server.app(), port) as url:
        summary = send(folder, url)

    assert (len(server.requests), summary.waiting, summary.lost) == (1, False, 0)


def names(rows: Sequence[dict]) -> list[tuple[str, str]]:
    """The call and the name of each value."""
    return [(row["weave_ref"].rpartition("/")[2][0], row["feedback_type"]) for row in rows]


ALL = [("a", "reward"), ("a", "advantage"), ("a", "fate"), ("b", "fate")]


@pytest.mark.parametrize("gateway_status", [0, 502, 504])
def test_a_step_whose_answer_is_lost_is_kept_once(serving, folder: Path, monkeypatch, gateway_status: int):
    monkeypatch.setattr(weave_feedback, "TIMEOUT_S", 1.0)
    server = TraceServer(lost_answers=1, gateway_status=gateway_status)
    with serving(server.app()) as url:
        with pytest.raises(Later):
            send(folder, url, STEP)
        waiting = weave_summary(folder)
        summary = send(folder, url)

    assert (waiting.feedback_waiting, waiting.feedback_lost) == (4, 0)
    assert (names(server.rows), len(server.queries), summary.waiting, summary.lost) == (ALL, 1, False, 0)


def test_a_retry_posts_only_the_values_that_are_missing(serving, folder: Path, monkeypatch):
    monkeypatch.setattr(weave_feedback, "TIMEOUT_S", 1.0)
    server = TraceServer(lost_answers=1)
    with serving(server.app()) as url:
        with pytest.raises(Later):
            send(folder, url, STEP)
        del server.rows[1:3]
        send(folder, url)

    assert names(server.requests[1][1]) == [("a", "advantage"), ("a", "fate")]
    assert sorted(names(server.rows)) == sorted(ALL)


def test_the_step_after_a_retry_is_one_request_again(serving, folder: Path, monkeypatch):
    monkeypatch.setattr(weave_feedback, "TIMEOUT_S", 1.0)
    server = TraceServer(lost_answers=1)
    with serving(server.app()) as url:
        with pytest.raises(Later):
            send(folder, url, STEP)
        send(folder, url, [Assessment("v" * 32, "c" * 16, {"fate": "used"})])

    assert (names(server.rows), len(server.requests), len(server.queries)) == ([*ALL, ("c", "fate")], 2, 1)


def test_a_process_that_dies_before_it_reads_the_answer_leaves_a_step_that_is_kept_once(
    serving, folder: Path, monkeypatch
):
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    server = TraceServer()
    with serving(server.app()) as url:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(weave_feedback.FeedbackQueue, "_settle", die)
            send(folder, url, STEP)
        summary = send(folder, url)

    assert (names(server.rows), summary.waiting, summary.lost) == (ALL, False, 0)


def test_a_retry_waits_while_the_query_has_no_valid_answer(serving, folder: Path, monkeypatch):
    monkeypatch.setattr(weave_feedback, "TIMEOUT_S", 1.0)
    server = TraceServer(lost_answers=1)
    with serving(server.app()) as url:
        with pytest.raises(Later):
            send(folder, url, STEP)
        server.query_answer = "<html>"
        with pytest.raises(Later, match="gave no valid answer"):
            send(folder, url)
        server.query_answer = None
        send(folder, url)

    assert names(server.rows) == ALL
