"""The head of a response and the body's first part leave in one write."""

import asyncio
from typing import cast

import httpx
import pytest
from starlette.responses import PlainTextResponse

from tests.serving import served
from trackway.serving.limits import JoinedWrites, bounded_protocol
from trackway.serving.settings import ConnectionSettings

pytestmark = pytest.mark.anyio

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Written:
    """A transport that notes each write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def writelines(self, parts: list[bytes]) -> None:
        self.writes.append(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def joined() -> tuple[JoinedWrites, Written]:
    written = Written()
    return JoinedWrites(cast("asyncio.Transport", written)), written


async def test_a_head_leaves_with_the_part_behind_it_and_later_parts_alone() -> None:
    transport, written = joined()

    for data in (HEAD, b"first", b"second", HEAD, b"third"):
        transport.write(data)

    assert written.writes == [HEAD + b"first", b"second", HEAD + b"third"]


async def test_a_head_without_a_body_leaves_in_the_next_iteration() -> None:
    transport, written = joined()

    transport.write(HEAD)
    assert written.writes == []
    await asyncio.sleep(0)

    assert written.writes == [HEAD]


async def test_a_head_leaves_before_its_connection_is_closed() -> None:
    transport, written = joined()

    transport.write(HEAD)
    transport.close()
    await asyncio.sleep(0)

    assert (written.writes, written.closed) == ([HEAD], True)


async def test_a_service_writes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[JoinedWrites, list[bytes]] = {}  # servers of other threads write as well
    write = JoinedWrites.write

    def noted(self: JoinedWrites, data: bytes) -> None:
        sent.setdefault(self, []).append(data)
        write(self, data)

    monkeypatch.setattr(JoinedWrites, "write", noted)
    app = PlainTextResponse("the body of this test")
    async with (
        served(app, http=bounded_protocol(ConnectionSettings()), lifespan="off") as url,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        assert (await client.get(url)).text == "the body of this test"

    [(head, body)] = [writes for writes in sent.values() if b"the body of this test" in writes]
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and body == b"the body of this test"
