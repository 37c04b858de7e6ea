"""What a server answers, or does not, in our words."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.waiting import async_until
from trackway.rollout.engines.remote.server import EngineHttp
from trackway.system import free_port
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = pytest.mark.anyio


CUT = b"<cut>"


class RawServer:
    """Answers each request by the next of the byte strings; b"" resets the connection, CUT at an end does after it."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                body = await reader.readexactly(int(size[0].split(b":")[1])) if size else b""
                self.requests.append(head.split(b"\r\n")[0] + b" " + body)
                answer = self.answers.pop(0) if self.answers else None
                if answer is None:
                    await reader.read()
                elif not answer:
                    return
                writer.write((answer or b"").removesuffix(CUT))
                await writer.drain()
                if answer and answer.endswith(CUT):
                    await asyncio.sleep(0.1)
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()
            writer.transport.abort()


def answer(status: int, body: str, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


@asynccontextmanager
async def calling(server: RawServer) -> AsyncIterator[EngineHttp]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    http = EngineHttp(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/")
    try:
        yield http
    finally:
        await http.close()
        listening.close()


async def test_body_and_parameters_go_out_and_the_json_comes_back() -> None:
    server = RawServer(answer(200, '{"a": 1}'))
    async with calling(server) as http:
        assert await http.post("/x", {"b": [2]}, params={"tags": ["weights", "kv"]}) == {"a": 1}
    assert server.requests == [b'POST /x?tags=weights&tags=kv HTTP/1.1 {"b":[2]}']


@pytest.mark.parametrize("body", ["", "Cache flushed.", "[1]"])
async def test_an_answer_that_is_no_object_comes_back_as_text(body: str) -> None:
    async with calling(RawServer(answer(200, body))) as http:
        assert await http.get("/x") == {"text": body}


@pytest.mark.parametrize(
    ("status", "body", "code", "message"),
    [
        (400, '{"error": {"message": "too long"}}', ErrorCode.INVALID_REQUEST, "400: too long"),
        (404, '{"detail": "Not Found"}', ErrorCode.INVALID_REQUEST, "404: Not Found"),
        (422, '{"detail": [{"loc": ["x"]}]}', ErrorCode.INVALID_REQUEST, r"422: \[\{'loc': \['x'\]\}\]"),
        (400, '{"success": false, "message": "no such folder"}', ErrorCode.INVALID_REQUEST, "400: no such folder"),
        (429, '{"error": "slow down"}', ErrorCode.OVERLOADED, "429: slow down"),
        (500, "Internal Server Error", ErrorCode.ENGINE_FAILED, "500: Internal Server Error"),
        (503, '{"message": "starting"}', ErrorCode.UNAVAILABLE, "503: starting"),
    ],
)
async def test_an_error_answer_has_our_code_and_the_servers_words(
    status: int, body: str, code: ErrorCode, message: str
) -> None:
    async with calling(RawServer(answer(status, body))) as http:
        with pytest.raises(TrackwayError, match=message) as raised:
            await http.post("/x", {})
    assert (raised.value.code, raised.value.detail) == (code, {"status": status})


async def test_an_idempotent_call_is_asked_again_on_a_fresh_connection_after_a_reset() -> None:
    server = RawServer(answer(200, "{}"), b"", answer(200, '{"a": 2}'))
    async with calling(server) as http:
        await http.post("/x", {})
        assert await http.post("/x", {"again": 1}, idempotent=True) == {"a": 2}
    assert server.connections == 2
    assert server.requests[1] == server.requests[2]


async def test_a_call_that_is_not_idempotent_is_sent_once() -> None:
    server = RawServer(b"", answer(200, "{}"))
    async with calling(server) as http:
        with pytest.raises(TrackwayError, match="the connection broke") as raised:
            await http.post("/x", {})
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert len(server.requests) == 1


async def test_an_idempotent_call_is_sent_at_most_twice() -> None:
    server = RawServer(b"", b"", answer(200, "{}"))
    async with calling(server) as http:
        with pytest.raises(TrackwayError, match="the connection broke"):
            await http.post("/x", {}, idempotent=True)
    assert len(server.requests) == 2


async def test_a_get_survives_a_reset() -> None:
    async with calling(RawServer(b"", answer(200, '{"a": 2}'))) as http:
        assert await http.get("/x") == {"a": 2}


async def test_a_server_that_does_not_answer_is_unavailable_after_the_bound_and_sees_the_connection_close() -> None:
    server = RawServer()
    async with calling(server) as http:
        with pytest.raises(TrackwayError, match=r"within 0\.1 s, got none") as raised:
            await http.post("/x", {}, timeout_s=0.1, idempotent=True)
        await asyncio.wait_for(server.closed.wait(), 60)
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert len(server.requests) == 1


async def test_a_refused_connection_asks_whether_the_server_died() -> None:
    async def died() -> None:
        raise TrackwayError(ErrorCode.UNAVAILABLE, "its log's end")

    http = EngineHttp(f"http://127.0.0.1:{free_port()}", died)
    with pytest.raises(TrackwayError, match="its log's end"):
        await http.get("/x")
    with pytest.raises(TrackwayError, match="its log's end"):
        await anext(http.events("/x", {}))
    await http.close()


async def test_events_are_read_until_done() -> None:
    body = 'data: {"a": 1}\n\n: comment\ndata:{"a": 2}\n\ndata: [DONE]\n\ndata: {"a": 3}\n\n'
    async with calling(RawServer(answer(200, body, "text/event-stream"))) as http:
        assert [event async for event in http.events("/x", {})] == [{"a": 1}, {"a": 2}]


async def test_events_that_are_no_json_are_the_engines_failure() -> None:
    async with calling(RawServer(answer(200, "data: <html>\n\n", "text/event-stream"))) as http:
        with pytest.raises(TrackwayError, match="expected JSON events, got '<html>'") as raised:
            await anext(http.events("/x", {}))
    assert raised.value.code is ErrorCode.ENGINE_FAILED


async def test_a_stream_that_is_refused_raises() -> None:
    async with calling(RawServer(answer(400, '{"message": "no"}'))) as http:
        with pytest.raises(TrackwayError, match="400: no"):
            await anext(http.events("/x", {}))


async def test_a_stream_that_breaks_is_unavailable_after_the_events_that_came() -> None:
    short = answer(200, 'data: {"a": 1}\n\n').replace(b"content-length: 16", b"content-length: 99")
    async with calling(RawServer(short + CUT)) as http:
        events = http.events("/x", {})
        assert await anext(events) == {"a": 1}
        with pytest.raises(TrackwayError, match="the connection broke") as raised:
            await anext(events)
    assert raised.value.code is ErrorCode.UNAVAILABLE


async def test_closing_the_events_closes_the_connection() -> None:
    head = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n\r\n"
    server = RawServer(head + b'data: {"a": 1}\n\n')
    async with calling(server) as http:
        events = http.events("/x", {})
        assert await anext(events) == {"a": 1}
        await events.aclose()
        await asyncio.wait_for(server.closed.wait(), 60)


async def test_six_hundred_calls_are_in_flight_at_once() -> None:
    server = RawServer()
    async with calling(server) as http:
        calls = [asyncio.create_task(http.post("/x", {}, timeout_s=30)) for _ in range(600)]
        await async_until(lambda: len(server.requests) >= 600)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
