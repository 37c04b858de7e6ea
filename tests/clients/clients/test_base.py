"""How a service is called: retries, deadlines, keys, errors."""

from collections.abc import AsyncIterator, Callable
from dataclasses import FrozenInstanceError

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel, JsonValue

from tests.time_limits import ENDS_SOON
from trackway.clients import CallPolicy, Deadline, RewardClient, RolloutClient, ServiceClient
from trackway.system.waits import Waits, noted_in
from trackway.tracing import Tracing, TracingSettings, collect_trace_stats, trajectory_span
from trackway.tracing.span_handle import activated
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Incident, Tags, TraceTarget

pytestmark = pytest.mark.anyio

TAGS = Tags(experiment_name="e", step=1, sample_index=2, rollout_n=3)
FAST = CallPolicy(attempts=3, backoff_s=0.001, max_backoff_s=0.002)


class Answer(BaseModel):
    value: int


def client_of(handler: Callable[[httpx.Request], httpx.Response], policy: CallPolicy = FAST) -> ServiceClient:
    return ServiceClient("http://s/x", httpx.AsyncClient(transport=httpx.MockTransport(handler)), policy)


def error_answer(code: ErrorCode, **detail: JsonValue) -> httpx.Response:
    error = TrackwayError(code, "why", **(detail or {"have": 1}))
    return httpx.Response(error.status, json=error.to_reply().model_dump(mode="json"))


def test_a_question_is_asked_within_its_seconds() -> None:
    assert CallPolicy.question(30.0, attempts=2) == CallPolicy(connect_s=5.0, read_s=30.0, total_s=30.0, attempts=2)
    assert CallPolicy.question(1.0) == CallPolicy(connect_s=1.0, read_s=1.0, total_s=1.0, attempts=1)


class Script:
    """Answers one after the other and keeps the requests."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


OK = httpx.Response(200, json={"value": 7})


@pytest.fixture
def at_1000(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monotonic clock stands at 1000."""
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)


@pytest.mark.usefixtures("at_1000")
@pytest.mark.parametrize(
    ("at", "remaining", "expired"),
    [(1060.0, 60.0, False), (1001.0, 1.0, False), (1000.5, 0.5, False), (1000.0, 0.0, True), (999.0, 0.0, True)],
)
def test_a_deadline_tells_the_seconds_that_are_left(at: float, remaining: float, expired: bool) -> None:
    assert (Deadline(at).remaining, Deadline(at).expired) == (remaining, expired)


@pytest.mark.usefixtures("at_1000")
def test_a_deadline_lies_the_seconds_given_from_now() -> None:
    assert Deadline.after(60.0) == Deadline(1060.0)


@pytest.mark.usefixtures("at_1000")
@pytest.mark.parametrize(("seconds", "at"), [(20.0, 1020.0), (60.0, 1060.0), (90.0, 1060.0)])
def test_a_deadline_may_be_made_earlier_but_not_later(seconds: float, at: float) -> None:
    assert Deadline(1060.0).earlier(seconds) == Deadline(at)


def test_a_deadline_cannot_be_moved() -> None:
    with pytest.raises(FrozenInstanceError):
        Deadline(1060.0).at = 2000.0  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_services_error_is_raised_again_with_its_code_and_detail() -> None:
    script = Script(error_answer(ErrorCode.INSTANCE_LOST))
    with pytest.raises(TrackwayError, match="why") as caught:
        await client_of(script).call("POST", "/y", reply=Answer)
    assert (caught.value.code, caught.value.detail) == (ErrorCode.INSTANCE_LOST, {"have": 1})
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("server disconnected"),
        httpx.Response(500, text="Internal Server Error"),
        httpx.Response(404, text="Path '/x/y' not found. Ping http://.../-/routes for available routes."),
        error_answer(ErrorCode.WEIGHTS_BEHIND),
        error_answer(ErrorCode.REQUEST_INCOMPLETE),
    ],
    ids=[
        "refused",
        "disconnected",
        "a 500 that Ray Serve made",
        "its 404 before it knows its routes",
        "a retryable error",
        "a request that came in part",
    ],
)
async def test_a_failure_that_asking_again_can_mend_is_retried_under_the_same_key(failure) -> None:
    script = Script(failure, OK)
    answer = await client_of(script).call("POST", "/y", reply=Answer)
    keys = {request.headers["idempotency-key"] for request in script.requests}
    assert (answer.value, len(script.requests), len(keys)) == (7, 2, 1)


async def test_each_call_has_its_own_key() -> None:
    script = Script(OK, OK)
    client = client_of(script)
    await client.call("POST", "/y", reply=Answer)
    await client.call("POST", "/y", reply=Answer)
    assert len({request.headers["idempotency-key"] for request in script.requests}) == 2


async def test_a_service_that_stays_down_is_unavailable_after_the_last_try() -> None:
    script = Script(*[httpx.ConnectError("refused")] * 3)
    with pytest.raises(TrackwayError, match=r"POST http://s/x/y: no answer after 3 attempts") as caught:
        await client_of(script).call("POST", "/y", reply=Answer)
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_a_service_that_comes_back_within_the_outage_of_the_policy_answers_the_call() -> None:
    script = Script(*[httpx.ConnectError("refused")] * 20, OK)
    policy = CallPolicy(attempts=1, backoff_s=0.001, max_backoff_s=0.002, outage_s=60.0)
    answer = await client_of(script, policy).call("POST", "/y", reply=Answer)
    assert (answer.value, len(script.requests)) == (7, 21)


async def test_the_address_of_all_services_is_refused_at_once() -> None:
    no_route = httpx.Response(404, text="Path '/scorers' not found. Ping http://s/-/routes")
    script = Script(*[no_route] * 6)
    http = httpx.AsyncClient(transport=httpx.MockTransport(script))

    expected = (
        "expected the address of a service, got http://s:8000, the root of Ray Serve's proxy; give http://s:8000/"
    )
    with pytest.raises(TrackwayError) as called:
        await RewardClient("http://s:8000/", http, FAST).scorers()
    assert (called.value.message, called.value.retryable) == (f"{expected}reward", False)
    with pytest.raises(TrackwayError) as streamed:
        async with RolloutClient("http://s:8000", http, FAST).stream("POST", "/y"):
            pass
    assert (streamed.value.message, streamed.value.retryable) == (f"{expected}rollout", False)
    assert len(script.requests) == 2
    with pytest.raises(TrackwayError, match="no answer after 3 attempts"):  # a proxy that starts
        await RewardClient("http://s:8000/reward", http, FAST).scorers()


@pytest.mark.parametrize(
    "answer", [httpx.Response(404, text="default backend - 404"), error_answer(ErrorCode.NOT_FOUND)]
)
async def test_any_other_404_is_not_retried(answer: httpx.Response) -> None:
    script = Script(answer, OK)
    with pytest.raises(TrackwayError):
        await client_of(script).call("POST", "/y", reply=Answer)
    assert len(script.requests) == 1


async def test_an_internal_error_of_ours_is_not_retried() -> None:
    script = Script(error_answer(ErrorCode.INTERNAL), OK)
    with pytest.raises(TrackwayError):
        await client_of(script).call("POST", "/y", reply=Answer)
    assert len(script.requests) == 1


@ENDS_SOON
async def test_retries_end_at_the_deadline() -> None:
    policy = CallPolicy(attempts=1000, backoff_s=10.0, max_backoff_s=10.0)
    client = client_of(Script(*[httpx.ConnectError("refused")] * 1000), policy)
    with pytest.raises(TrackwayError) as caught:
        await client.call("POST", "/y", reply=Answer, deadline=Deadline.after(0.05))
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    "refusal",
    [
        error_answer(ErrorCode.OVERLOADED),
        error_answer(ErrorCode.PAUSED, retry_after_s=0.001),
        httpx.Response(429, text="too many requests", headers={"retry-after": "0"}),
        httpx.Response(503, text="no replica free", headers={"retry-after": "0"}),
    ],
    ids=["full", "paused for a known time", "somebody else's 429", "somebody else's 503 with Retry-After"],
)
async def test_a_service_that_puts_a_call_off_is_asked_again_beyond_the_tries_for_failures(refusal) -> None:
    script = Script(*[refusal] * 20, OK)
    answer = await client_of(script).call("POST", "/y", reply=Answer)
    assert (answer.value, len(script.requests)) == (7, 21)


async def test_refusals_leave_the_tries_for_failures_as_they_were() -> None:
    full, broken = error_answer(ErrorCode.OVERLOADED), httpx.ConnectError("refused")
    script = Script(broken, full, full, broken, full, full, broken, OK)
    with pytest.raises(TrackwayError) as caught:
        await client_of(script).call("POST", "/y", reply=Answer)
    assert (caught.value.code, len(script.requests)) == (ErrorCode.UNAVAILABLE, 7)


@pytest.mark.parametrize(
    "refusal",
    [error_answer(ErrorCode.OVERLOADED, retry_after_s=60), httpx.Response(429, headers={"retry-after": "60"})],
)
async def test_a_refusal_for_longer_than_the_deadline_is_the_answer_at_once(refusal: httpx.Response) -> None:
    script = Script(refusal)
    with pytest.raises(TrackwayError) as caught:
        await client_of(script).call("POST", "/y", reply=Answer, deadline=Deadline.after(50))
    assert caught.value.code is ErrorCode.OVERLOADED


async def test_a_call_that_is_put_off_for_long_tells_ever_less_often() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("agent", TracingSettings(), exporter)
    script = Script(*[error_answer(ErrorCode.OVERLOADED)] * 20, OK)
    with activated(tracing), trajectory_span(TAGS, "t", "a", [], record=True):
        await client_of(script).call("POST", "/y", reply=Answer)
    tracing.flush(5)
    events = exporter.get_finished_spans()[0].events
    assert [(event.attributes or {})["attempt"] for event in events] == [1, 2, 4, 8, 16]


async def test_deadline_session_and_trace_travel_as_headers() -> None:
    script = Script(OK)
    tracing = Tracing("agent", TracingSettings(), InMemorySpanExporter())
    deadline = Deadline.after(60)
    with (
        activated(tracing),
        trajectory_span(TAGS, "t", "a", [], record=True, target=TraceTarget(mlflow_experiment_id="9")) as root,
    ):
        await client_of(script).call("POST", "/y", reply=Answer, session_id="s", deadline=deadline)
    [request] = script.requests
    assert request.headers["x-session-id"] == "s"
    assert 59.0 < float(request.headers["x-request-timeout"]) <= 60.0
    assert request.headers["traceparent"].split("-")[1] == root.trace_id
    target = "agentic.target=%7B%22mlflow_experiment_id%22%3A%229%22%7D"
    assert request.headers["baggage"] == f"{target},agentic.trajectory=t,gen_ai.agent.name=a"


@pytest.mark.parametrize(
    ("failure", "incident", "reason"),
    [
        (httpx.ConnectError("refused"), Incident.REPLICA_LOST, "ConnectError: refused"),
        (httpx.RemoteProtocolError("disconnected"), Incident.REPLICA_LOST, "RemoteProtocolError: disconnected"),
        (httpx.Response(500, text="Internal Server Error"), Incident.REPLICA_LOST, "HTTP 500: Internal Server Error"),
        (httpx.Response(404, text="try /-/routes"), Incident.REPLICA_LOST, "HTTP 404: try /-/routes"),
        (httpx.Response(503, text="no replica"), Incident.REPLICA_LOST, "HTTP 503: no replica"),
        (httpx.Response(408, text="took too long"), Incident.RETRIED, "HTTP 408: took too long"),
        (httpx.ReadTimeout("silence"), Incident.RETRIED, "ReadTimeout: silence"),
        (httpx.PoolTimeout("no connection free"), Incident.RETRIED, "PoolTimeout: no connection free"),
        (error_answer(ErrorCode.OVERLOADED), Incident.RETRIED, "overloaded: why"),
        (error_answer(ErrorCode.PAUSED), Incident.RETRIED, "paused: why"),
        (error_answer(ErrorCode.WEIGHTS_BEHIND), Incident.WEIGHTS_BEHIND, "weights_behind: why"),
    ],
)
async def test_a_retry_is_an_incident_that_says_why_on_the_span_that_waited(
    failure: httpx.Response | Exception, incident: Incident, reason: str
) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("agent", TracingSettings(), exporter)
    with activated(tracing), trajectory_span(TAGS, "t", "a", [], record=True) as root:
        await client_of(Script(failure, OK)).call("POST", "/y", reply=Answer)
    tracing.flush(5)
    [event] = exporter.get_finished_spans()[0].events
    assert (event.name, root.trace_stats.incidents) == (incident.value, {incident})
    assert root.trace_stats.called == {(incident, "s")}  # the host, as it is no service of ours
    assert event.attributes == {"url": "http://s/x/y", "attempt": 1, "reason": reason}


@pytest.mark.parametrize(
    ("failure", "problem"),
    [
        (error_answer(ErrorCode.WEIGHTS_BEHIND), "weights_behind: why"),  # no replica has loaded the version
        (error_answer(ErrorCode.OVERLOADED, retry_after_s=0.001), "overloaded: why"),  # its queue is full
        (error_answer(ErrorCode.PAUSED), "paused: why"),
        (httpx.ConnectError("refused"), "ConnectError: refused"),  # a dead service
        (httpx.Response(503, text="no replica"), "HTTP 503: no replica"),  # a dead replica behind Serve
    ],
)
async def test_the_wait_of_a_call_says_why_it_is_asked_again(failure: httpx.Response | Exception, problem: str) -> None:
    waits, seen = Waits(), list[str]()
    answers = [failure, OK]

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(waits.current()[0].progress)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with waits("rollout 1/7/0", "the rollout service, turn 0") as waiting, noted_in([waiting]):
        await client_of(handler).call("POST", "/generate", reply=Answer)

    assert seen == ["", f"asked again after: {problem}"]


async def test_each_further_try_is_an_event_and_the_last_failure_is_the_error() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("agent", TracingSettings(), exporter)
    script = Script(httpx.ConnectError("refused"), error_answer(ErrorCode.PAUSED), error_answer(ErrorCode.PAUSED))
    with activated(tracing), trajectory_span(TAGS, "t", "a", [], record=True), pytest.raises(TrackwayError):
        await client_of(script).call("POST", "/y", reply=Answer)
    tracing.flush(5)
    assert [event.name for event in exporter.get_finished_spans()[0].events] == ["replica_lost", "retried"]


async def test_a_failure_that_is_not_sent_again_is_no_incident() -> None:
    with collect_trace_stats() as sums, pytest.raises(TrackwayError):
        await client_of(Script(error_answer(ErrorCode.INTERNAL))).call("POST", "/y", reply=Answer)
    assert sums.incidents == set()


async def test_the_receipts_of_all_answers_are_added_errors_included() -> None:
    refused = error_answer(ErrorCode.WEIGHTS_BEHIND)
    refused.headers["x-trackway-trace"] = "bytes=100,incidents=weights_behind"
    answered = httpx.Response(200, json={"value": 7}, headers={"x-trackway-trace": "bytes=23,incidents=tool_timeout"})
    with collect_trace_stats() as sums:
        await client_of(Script(refused, answered)).call("POST", "/y", reply=Answer)
    assert (sums.bytes, sums.incidents) == (123, {Incident.WEIGHTS_BEHIND, Incident.TOOL_TIMEOUT})


async def test_a_receipt_of_somebody_else_is_nothing_to_fail_on() -> None:
    odd = httpx.Response(200, json={"value": 7}, headers={"x-trackway-trace": "bytes=many,incidents=flood,,=;"})
    with collect_trace_stats() as sums:
        answer = await client_of(Script(odd)).call("POST", "/y", reply=Answer)
    assert (answer.value, sums.bytes, sums.incidents) == (7, 0, set())


async def test_an_answer_of_another_shape_names_the_model() -> None:
    with pytest.raises(TrackwayError, match="not a valid Answer"):
        await client_of(Script(httpx.Response(200, json={"other": 1}))).call("GET", "/y", reply=Answer)


async def test_a_streamed_line_ends_at_a_line_feed_and_at_nothing_else_that_json_may_have() -> None:
    lines = ['{"text": "a\x85b\u2028c\u2029d"}', "", '{"text": "e"}', "the end"]
    body = "\n".join(lines).encode()

    async def in_pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 5):
            yield body[start : start + 5]

    client = client_of(lambda request: httpx.Response(200, content=in_pieces()))

    async with client.stream("GET", "/lines") as stream:
        assert [line async for line in stream] == lines
