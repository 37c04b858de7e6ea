"""Which answers are kept for a repeated key, and for whom; the same where a request needs no task of its own."""

import asyncio

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.waiting import async_until
from trackway.serving.middleware import UNBROKEN, Idempotency

pytestmark = pytest.mark.anyio


async def test_only_so_many_answers_are_kept_the_newest_ones() -> None:
    runs = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal runs
        runs += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % runs})

    transport = httpx.ASGITransport(app=Idempotency(app, max_entries=2))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        keys = ["a", "b", "c", "d", "d", "c", "a"]
        answers = [(await client.post("/", headers={"idempotency-key": key})).text for key in keys]
    assert answers == ["1", "2", "3", "4", "4", "3", "5"]


async def test_answers_are_kept_up_to_so_many_bytes_in_all_and_the_newest_of_any_size() -> None:
    runs = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal runs
        runs += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % runs + b"x" * 10_000})

    transport = httpx.ASGITransport(app=Idempotency(app, max_bytes=20_000))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        keys = ["a", "b", "b", "c", "c", "a"]
        answers = [(await client.post("/", headers={"idempotency-key": key})).text[0] for key in keys]
    assert answers == ["1", "2", "2", "3", "3", "4"]


async def counted(keyed: Idempotency, *posts: tuple[str, str]) -> list[str]:
    """The answers to posts of (path, key), one after another."""
    transport = httpx.ASGITransport(app=keyed)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        return [(await client.post(path, headers={"idempotency-key": key})).text for path, key in posts]


async def test_an_answer_is_forgotten_once_it_is_older_than_its_time_and_no_sooner() -> None:
    now = 1000.0
    app = Gated()
    app.gate.set()
    keyed = Idempotency(app, ttl_s=600.0, clock=lambda: now)

    assert await counted(keyed, ("/", "a"), ("/", "a")) == ["1", "1"]
    now = 1600.0
    assert await counted(keyed, ("/", "a"), ("/", "b")) == ["1", "2"]
    now = 1600.5
    assert await counted(keyed, ("/", "a"), ("/", "b"), ("/", "a")) == ["3", "2", "3"]


async def test_a_key_is_another_one_under_another_path() -> None:
    app = Gated()
    app.gate.set()

    assert await counted(Idempotency(app), ("/a", "k"), ("/b", "k"), ("/a", "k"), ("/b", "k")) == ["1", "2", "1", "2"]


async def test_a_request_without_a_key_or_that_is_no_post_runs_each_time() -> None:
    app = Gated()
    app.gate.set()
    transport = httpx.ASGITransport(app=Idempotency(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        answers = [await client.get("/", headers={"idempotency-key": "a"}) for _ in range(2)]
        answers += [await client.post("/") for _ in range(2)]
    assert [answer.text for answer in answers] == ["1", "2", "3", "4"]


async def test_without_settings_32768_answers_of_128_mib_are_kept_for_ten_minutes() -> None:
    keyed = Idempotency(Gated())

    assert (keyed.max_entries, keyed.max_bytes, keyed.ttl_s) == (32_768, 134_217_728, 600.0)


@pytest.mark.parametrize(("max_bytes", "third"), [(2 * (2048 + 1), "1"), (2 * (2048 + 1) - 1, "3")])
async def test_an_answer_counts_with_its_body_and_2048_bytes(max_bytes: int, third: str) -> None:
    app = Gated()
    app.gate.set()

    answers = await counted(Idempotency(app, max_bytes=max_bytes), ("/", "a"), ("/", "b"), ("/", "a"))

    assert answers == ["1", "2", third]


async def test_the_work_gets_the_whole_body_once_and_no_disconnect() -> None:
    bodies: list[object] = []
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        bodies.append(await receive())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive(), 0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Message) -> None:
        sent.append(message)

    parts: list[Message] = [
        {"type": "http.request", "body": b"ab", "more_body": True},
        {"type": "http.request", "body": b"c"},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return parts.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"idempotency-key", b"a")]}
    await Idempotency(app)(scope, receive, send)

    assert bodies == [{"type": "http.request", "body": b"abc", "more_body": False}]
    assert [message["type"] for message in sent] == ["http.response.start"]


@pytest.mark.parametrize(("status", "runs"), [(200, 1), (422, 1), (500, 1), (504, 1), (409, 2), (429, 2), (503, 2)])
async def test_what_may_have_had_its_effect_never_runs_twice(status: int, runs: int) -> None:
    ran = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal ran
        ran += 1
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    transport = httpx.ASGITransport(app=Idempotency(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        answers = [(await client.post("/", headers={"idempotency-key": "a"})).status_code for _ in range(2)]
    assert (answers, ran) == ([status, status], runs)


def unbroken(app: ASGIApp) -> ASGIApp:
    """As the replicas' own ports serve it."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, UNBROKEN: True}, receive, send)

    return marked


class Gated:
    """Answers 200 with the number of its run when the gate opens, or fails as the first run is told to."""

    def __init__(self, fault: BaseException | None = None) -> None:
        self.runs = 0
        self.gate = asyncio.Event()
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.runs += 1
        run, fault, self._fault = self.runs, self._fault, None
        await self.gate.wait()
        if fault is not None:
            raise fault
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % run})


async def together(app: Gated, way: str) -> list[object]:
    """Three posts of one key of which two join the first; what each of them got."""
    keyed = Idempotency(app)
    transport = httpx.ASGITransport(app=unbroken(keyed) if way == "unbroken" else keyed)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        posts = [asyncio.create_task(client.post("/", headers={"idempotency-key": "a"})) for _ in range(3)]
        await async_until(lambda: app.runs)
        app.gate.set()
        got = await asyncio.wait_for(asyncio.gather(*posts, return_exceptions=True), 60)
        late = await client.post("/", headers={"idempotency-key": "a"})
    return [*(reply.text if isinstance(reply, httpx.Response) else str(reply) for reply in got), late.text]


@pytest.mark.parametrize("way", ["a task", "unbroken"])
async def test_a_call_that_comes_while_the_first_runs_joins_it(way: str) -> None:
    app = Gated()
    assert await together(app, way) == ["1", "1", "1", "1"]
    assert app.runs == 1


@pytest.mark.parametrize(("way", "is_own_task"), [("a task", True), ("unbroken", False)])
async def test_only_a_request_that_can_be_cancelled_is_worked_on_in_a_task_of_its_own(
    way: str, is_own_task: bool
) -> None:
    worked_on: list[asyncio.Task[object] | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        worked_on.append(asyncio.current_task())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    keyed = Idempotency(app)
    transport = httpx.ASGITransport(app=unbroken(keyed) if way == "unbroken" else keyed)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        await client.post("/", headers={"idempotency-key": "a"})
    assert [task is not asyncio.current_task() for task in worked_on] == [is_own_task]


@pytest.mark.parametrize("way", ["a task", "unbroken"])
async def test_a_fault_reaches_everyone_who_waits_and_is_not_kept(way: str) -> None:
    app = Gated(ValueError("a fault"))
    assert await together(app, way) == ["a fault", "a fault", "a fault", "2"]
    assert app.runs == 2
