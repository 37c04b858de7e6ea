"""Work for a client ends with its connection."""

import asyncio

import pytest
from fastapi import Request
from starlette.types import Message

from tests.waiting import async_until
from trackway.model_api import choices
from trackway.model_api.choices import while_connected
from trackway.wire.errors import TrackwayError

pytestmark = pytest.mark.anyio


@pytest.fixture
def watched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "WATCH_AFTER_S", 0.0)


class Client:
    """A client that leaves when `left` is set; `looks` counts who waits for that."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.looks = 0

    @property
    def request(self) -> Request:
        return Request({"type": "http"}, self._receive)

    async def _receive(self) -> Message:
        self.looks += 1
        await self.left.wait()
        return {"type": "http.disconnect"}


async def lasting(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")


async def test_work_that_ends_at_once_needs_no_look_at_the_connection() -> None:
    client = Client()
    assert await while_connected(client.request, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ZeroDivisionError):
        await while_connected(client.request, _failing())
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(choices.WATCH_AFTER_S, later.set)  # behind those of the calls
    await asyncio.wait_for(later.wait(), 60)
    assert client.looks == 0


async def _failing() -> None:
    raise ZeroDivisionError


@pytest.mark.usefixtures("watched_at_once")
async def test_work_is_cancelled_when_its_client_leaves() -> None:
    client, ended = Client(), list[str]()
    before = asyncio.all_tasks()
    client.left.set()
    with pytest.raises(TrackwayError, match="the client disconnected before the response was complete"):
        await asyncio.wait_for(while_connected(client.request, lasting(ended)), 60)
    assert (ended, client.looks, asyncio.all_tasks()) == (["cancelled"], 1, before)


@pytest.mark.usefixtures("watched_at_once")
async def test_a_deadline_of_the_caller_cancels_work_and_is_not_taken_for_a_client_that_left() -> None:
    client, ended = Client(), list[str]()
    before = asyncio.all_tasks()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await while_connected(client.request, lasting(ended))
    assert (ended, client.looks, asyncio.all_tasks()) == (["cancelled"], 1, before)


@pytest.mark.usefixtures("watched_at_once")
async def test_an_answer_behind_a_look_leaves_no_task() -> None:
    client = Client()
    before = asyncio.all_tasks()

    async def seen() -> str:
        await async_until(lambda: client.looks)
        return "done"

    assert await asyncio.wait_for(while_connected(client.request, seen()), 60) == "done"
    assert (client.looks, asyncio.all_tasks()) == (1, before)
