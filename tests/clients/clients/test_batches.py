"""Calls that are made together go together; what a batch does not answer is requested alone."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.clients import CallPolicy, Deadline, RolloutClient
from trackway.clients.batches import MAX_BATCH_SIZE
from trackway.system.waits import Waits, noted_in
from trackway.tracing import Tracing, TracingSettings, collect_trace_stats, trajectory_span
from trackway.tracing.span_handle import activated
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import (
    ChoiceLogprobs,
    GenerateChoice,
    GenerateReply,
    GenerateRequest,
    TokenLogprob,
    Usage,
)
from trackway.wire.service import MAX_BATCH, BatchRequest, BatchResult
from trackway.wire.trajectory import Incident, Tags

pytestmark = [pytest.mark.anyio, ENDS_SOON]


class Batch(BatchRequest[GenerateRequest]):
    """Of generations."""


class Result(BatchResult[GenerateReply]):
    """Of a generation."""


FAST = CallPolicy(attempts=3, backoff_s=0.001, max_backoff_s=0.002)
SINGLE, BATCH = "/inference/v1/generate", "/generate_batch"


def reply(request: GenerateRequest) -> GenerateReply:
    """The prompt's first token again."""
    [token, *_] = request.token_ids
    choice = GenerateChoice(
        finish_reason="stop",
        token_ids=[token],
        logprobs=ChoiceLogprobs(content=[TokenLogprob(token_id=token, logprob=-0.5)]),
        weight_versions=[],
    )
    usage = Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)
    return GenerateReply(request_id=request.request_id or "", model="m", created=0, usage=usage, choices=[choice])


def answered(batch: Batch) -> list[Result]:
    """In the reverse order."""
    entries = [*enumerate(batch.entries)]
    return [
        Result(index=index, reply=reply(entry.request), receipt=f"bytes={10 + index}")
        for index, entry in reversed(entries)
    ]


class Lines(httpx.AsyncByteStream):
    """The results as lines, then a broken connection if asked; counts closed streams that had not ended."""

    def __init__(self, server: "Server", results: list[Result], then: Callable[[], Awaitable[None]]) -> None:
        self._server, self._results, self._then, self._ended = server, results, then, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for result in self._results:
            yield result.model_dump_json().encode() + b"\n"
        await self._then()
        self._ended = True

    async def aclose(self) -> None:
        self._server.cut += not self._ended


async def nothing() -> None:
    """The answer has ended."""


async def broken() -> None:
    raise httpx.ReadError("the connection broke")


async def silence() -> None:
    await asyncio.Event().wait()


class Server:
    """Answers single generations and batches, and keeps their paths and bodies."""

    def __init__(
        self,
        results: Callable[[Batch], list[Result]] = answered,
        then: Callable[[], Awaitable[None]] = nothing,
        status: int = 200,
    ) -> None:
        self.requests: list[tuple[str, dict]] = []
        self.headers: list[httpx.Headers] = []
        self.cut = 0
        self._results, self._then, self._status = results, then, status

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append((request.url.path, body))
        self.headers.append(request.headers)
        if request.url.path == SINGLE:
            return httpx.Response(200, text=reply(GenerateRequest.model_validate(body)).model_dump_json())
        if self._status != 200:
            return httpx.Response(self._status, text="Not Found")
        return httpx.Response(200, stream=Lines(self, self._results(Batch.model_validate(body)), self._then))

    def client(self) -> RolloutClient:
        http = httpx.AsyncClient(transport=httpx.MockTransport(self))
        return RolloutClient("http://s", http, FAST, batches=True)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


async def generate(client: RolloutClient, token: int, session: str | None = "group", tokens: int = 1) -> int:
    """The generated token."""
    request = GenerateRequest.model_construct(request_id=f"r{token}", token_ids=[token] * tokens)
    return (await client.generate(request, session_id=session)).choices[0].token_ids[0]


async def test_generations_of_a_session_at_the_same_moment_are_one_request() -> None:
    server = Server()
    client = server.client()
    tokens = await asyncio.gather(*(generate(client, token, f"group {token % 2}") for token in range(8)))
    later = await generate(client, 8, "group 0")
    assert (tokens, later) == ([*range(8)], 8)
    assert server.paths == [BATCH, BATCH, SINGLE]
    together = [[entry["request"]["request_id"] for entry in body["entries"]] for _, body in server.requests[:2]]
    assert together == [["r0", "r2", "r4", "r6"], ["r1", "r3", "r5", "r7"]]
    assert [headers["x-session-id"] for headers in server.headers] == ["group 0", "group 1", "group 0"]
    assert ["idempotency-key" in headers for headers in server.headers] == [False, False, True]


async def test_the_waits_of_all_calls_in_a_batch_say_why_they_are_asked_again() -> None:
    server = Server(then=broken, results=lambda batch: [])
    client, waits = server.client(), Waits()

    async def waiting_generate(token: int) -> str:
        with waits(f"rollout {token}", "the rollout service") as waiting, noted_in([waiting]):
            await generate(client, token)
            return waiting.wait().progress

    assert (
        await asyncio.gather(*(waiting_generate(token) for token in range(2)))
        == ["asked again after: ReadError: the connection broke"] * 2
    )


async def test_generations_without_a_session_are_requested_alone() -> None:
    server = Server()
    client = server.client()
    assert await asyncio.gather(*(generate(client, token, None) for token in range(2))) == [0, 1]
    assert server.paths == [SINGLE] * 2


async def test_a_batch_has_a_bound_in_generations_and_in_tokens() -> None:
    server = Server()
    client = server.client()
    await asyncio.gather(*(generate(client, token, "many") for token in range(MAX_BATCH + 2)))
    half, large = MAX_BATCH_SIZE // 2, MAX_BATCH_SIZE + 1
    sizes = [half, half, half - 1, 2, large]
    await asyncio.gather(*(generate(client, token, "long", size) for token, size in enumerate(sizes)))
    assert [len(body["entries"]) for path, body in server.requests if path == BATCH] == [MAX_BATCH, 2, 2, 2]
    assert [len(body["token_ids"]) for path, body in server.requests if path == SINGLE] == [large]


async def test_what_a_broken_batch_did_not_answer_is_requested_alone() -> None:
    server = Server(lambda batch: answered(batch)[:2], broken)
    client = server.client()
    with collect_trace_stats() as stats:
        tokens = await asyncio.gather(*(generate(client, token) for token in range(4)))
    assert tokens == [0, 1, 2, 3]
    assert sorted(body["request_id"] for path, body in server.requests if path == SINGLE) == ["r0", "r1"]
    assert (stats.incidents, stats.bytes) == ({Incident.REPLICA_LOST}, 12 + 13)


async def test_an_answer_that_ends_early_is_completed_without_an_incident() -> None:
    server = Server(lambda batch: answered(batch)[:1])
    client = server.client()
    with collect_trace_stats() as stats:
        assert await asyncio.gather(*(generate(client, token) for token in range(2))) == [0, 1]
    assert (server.paths, stats.incidents) == ([BATCH, SINGLE], set())


def failing(code: ErrorCode) -> Callable[[Batch], list[Result]]:
    """The first entry fails."""

    def results(batch: Batch) -> list[Result]:
        error = TrackwayError(code, "why").to_reply().error
        return [*answered(batch)[:-1], Result(index=0, error=error)]

    return results


async def test_an_error_that_may_pass_is_an_incident_and_the_generation_is_requested_again() -> None:
    server = Server(failing(ErrorCode.WEIGHTS_BEHIND))
    client = server.client()
    with collect_trace_stats() as stats:
        assert await asyncio.gather(*(generate(client, token) for token in range(3))) == [0, 1, 2]
    assert (server.paths, stats.incidents) == ([BATCH, SINGLE], {Incident.WEIGHTS_BEHIND})


async def test_another_error_is_that_of_its_own_generation() -> None:
    server = Server(failing(ErrorCode.ENGINE_FAILED))
    client = server.client()
    first, second = await asyncio.gather(*(generate(client, token) for token in range(2)), return_exceptions=True)
    assert isinstance(first, TrackwayError) and first.code is ErrorCode.ENGINE_FAILED
    assert (second, server.paths) == (1, [BATCH])


async def test_a_server_without_batches_is_asked_once() -> None:
    server = Server(status=404)
    client = server.client()
    with collect_trace_stats() as stats:
        for _ in range(2):
            assert await asyncio.gather(*(generate(client, token) for token in range(2))) == [0, 1]
    assert (server.paths, stats.incidents) == ([BATCH, *[SINGLE] * 4], set())


async def test_a_full_service_is_asked_again_with_batches() -> None:
    server = Server(status=503)
    client = server.client()
    with collect_trace_stats() as stats:
        for _ in range(2):
            assert await asyncio.gather(*(generate(client, token) for token in range(2))) == [0, 1]
    assert server.paths == [BATCH, SINGLE, SINGLE] * 2
    assert stats.incidents == {Incident.REPLICA_LOST}


async def test_a_caller_that_gives_up_leaves_the_others_their_answers() -> None:
    released = asyncio.Event()
    results: list[Result] = []

    def late(batch: Batch) -> list[Result]:
        results.extend(answered(batch))
        return []

    async def release() -> None:
        await released.wait()

    server = Server(late, release)
    client = server.client()
    callers = [asyncio.create_task(generate(client, token)) for token in range(2)]
    await async_until(lambda: results)
    callers[0].cancel()
    released.set()
    ended = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError)
    assert (ended[1], server.paths) == (1, [BATCH, SINGLE])


async def test_the_request_is_closed_when_all_callers_have_given_up() -> None:
    server = Server(lambda batch: [], silence)
    client = server.client()
    callers = [asyncio.create_task(generate(client, token)) for token in range(2)]
    await async_until(lambda: server.requests)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    await async_until(lambda: server.cut)
    assert server.paths == [BATCH]


async def test_each_generation_ends_at_its_own_deadline() -> None:
    server = Server(lambda batch: answered(batch)[:1], silence)
    client = server.client()
    request = GenerateRequest(token_ids=[5], request_id="slow")
    slow = client.generate(request, session_id="group", deadline=Deadline.after(0.05))
    fast = generate(client, 6)
    ended = await asyncio.gather(slow, fast, return_exceptions=True)
    assert isinstance(ended[0], TrackwayError) and ended[0].code is ErrorCode.DEADLINE_EXCEEDED
    assert (ended[1], server.paths) == (6, [BATCH])


async def test_each_generation_has_its_own_trace_and_receipt() -> None:
    server, exporter = Server(), InMemorySpanExporter()
    client, tracing = server.client(), Tracing("agent", TracingSettings(), exporter=exporter)

    async def traced(rollout_n: int) -> tuple[str | None, int]:
        tags = Tags(experiment_name="e", step=1, sample_index=2, rollout_n=rollout_n)
        with activated(tracing), trajectory_span(tags, f"t{rollout_n}", "agent", [], record=True) as span:
            await generate(client, rollout_n)
            return span.trace_id, span.trace_stats.bytes

    try:
        traces = await asyncio.gather(traced(0), traced(1))
    finally:
        tracing.shutdown()
    [(_, body)] = server.requests
    carried = [entry["trace"]["traceparent"].split("-")[1] for entry in body["entries"]]
    assert carried == [trace_id for trace_id, _ in traces] and carried[0] != carried[1]
    assert "traceparent" not in server.headers[0]
    assert [size for _, size in traces] == [10, 11]
