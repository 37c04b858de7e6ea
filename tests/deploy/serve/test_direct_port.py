"""Replicas' own ports, and our client that takes them instead of the proxy; everything over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from tests.waiting import async_until
from trackway.clients import CallPolicy, ToolsClient, close_shared_http
from trackway.deploy.autoscaling import DIRECT_REQUESTS, all_requests
from trackway.deploy.serve.direct_port import DirectPort
from trackway.tools.app import create_app
from trackway.tools.settings import ToolsSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import IDEMPOTENCY_KEY, Health, Ready, ReplicaInfo, ReplicaList
from trackway.wire.tools import ExecuteRequest, OneShotRequest

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.usefixtures("collector")]

OK = ExecuteRequest(arguments={"mode": "ok"})
KEYED = {"content-type": "application/json", IDEMPOTENCY_KEY: "one"}
SUM = OneShotRequest(arguments={"expression": "1+1"})


class Service:
    """Replicas with ports of their own, and a proxy in front that knows nothing of instances."""

    def __init__(self) -> None:
        self.ports: dict[str, DirectPort] = {}
        self.apps: dict[str, FastAPI] = {}
        self.by_proxy: list[tuple[str, str]] = []
        self.keys: list[str] = []
        self.client = ToolsClient("", policy=CallPolicy(backoff_s=0.01, max_backoff_s=0.02), direct=True)
        self._running: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = {}

    async def start(self, name: str, drain_s: float = 0.0) -> None:
        settings = ToolsSettings(
            tools=["calculator"], extra_tools=["tests.services.tools.faulty_tool:FaultyTool"], replica=name
        )
        app = self.apps[name] = create_app(settings)
        self.ports[name] = DirectPort(app, "127.0.0.1", app.state.instances.__len__, drain_s)
        await self._run(name, app)

    async def _run(self, name: str, app: FastAPI) -> None:
        """In a task of its own, as servers run an app's lifespan."""
        started, to_stop = asyncio.Event(), asyncio.Event()

        async def live() -> None:
            async with app.router.lifespan_context(app):
                started.set()
                await to_stop.wait()

        self._running[name] = to_stop, asyncio.create_task(live())
        await started.wait()

    async def stop(self, name: str) -> None:
        self.ports.pop(name, None)  # it is listed no more
        to_stop, living = self._running.pop(name)
        to_stop.set()
        await living
        self.apps.pop(name, None)

    async def close(self) -> None:
        await asyncio.gather(*map(self.stop, list(self._running)))

    async def open(self, *names: str) -> None:
        for name in names:
            await self.start(name)
        proxy = FastAPI()
        proxy.add_api_route("/replicas", self._listed)
        proxy.mount("/", self._forward)
        front = DirectPort(proxy, "127.0.0.1", int, 0.0)
        await self._run("proxy", proxy)
        self.client = ToolsClient(front.url, policy=self.client.policy, direct=True)

    async def _listed(self) -> ReplicaList:
        return ReplicaList(replicas=[replica(name, port.url) for name, port in self.ports.items()])

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.by_proxy.append((scope["method"], scope["path"]))
        self.keys += [value.decode() for name, value in scope["headers"] if name == IDEMPOTENCY_KEY.encode()]
        await next(iter(self.apps.values()))(scope, receive, send)


def replica(name: str, url: str) -> ReplicaInfo:
    health = Health(service="tools", replica=name, pid=1, python="3", executable="python")
    return ReplicaInfo(health=health, ready=Ready(ready=True), url=url)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    yield service
    await close_shared_http()
    await service.close()


async def test_calls_go_past_the_proxy_and_an_instance_stays_with_its_replica(service: Service) -> None:
    await service.open("aaaa", "bbbb")
    client = service.client
    made = [await client.create("faulty", f"session {number}") for number in range(12)]
    assert {instance.instance_id[:4] for instance in made} == {"aaaa", "bbbb"}
    for count in (1, 2):
        # No session: the id is enough.
        texts = [(await client.execute(instance.instance_id, OK)).text for instance in made]
        assert texts == [f"ok {count}"] * 12
    assert (await client.one_shot("calculator", SUM)).text == "2"
    for instance in made:
        await client.release(instance.instance_id)
    assert service.by_proxy == []


async def test_a_lost_replicas_instances_are_lost_and_nothing_else(service: Service) -> None:
    await service.open("aaaa", "bbbb")
    client = service.client
    made = {(await client.create("faulty", f"s{number}")).instance_id for number in range(12)}
    await service.stop("bbbb")
    for instance in made:
        if instance.startswith("aaaa"):
            assert (await client.execute(instance, OK)).text == "ok 1"
        else:
            with pytest.raises(TrackwayError) as error:
                await client.execute(instance, OK)
            assert error.value.code is ErrorCode.INSTANCE_LOST
    assert [(await client.one_shot("calculator", SUM)).text for _ in range(6)] == ["2"] * 6


async def test_a_replica_that_stops_answers_until_its_instances_are_released(service: Service) -> None:
    await service.open("aaaa")
    await service.start("bbbb", drain_s=30.0)
    client, port = service.client, service.ports["bbbb"]
    made = [(await client.create("faulty", f"s{number}")).instance_id for number in range(12)]
    mine = [instance_id for instance_id in made if instance_id.startswith("bbbb")]
    stopping = asyncio.create_task(service.stop("bbbb"))
    for instance_id in mine:
        assert (await client.execute(instance_id, OK)).text == "ok 1"
    assert port.url == service.apps["bbbb"].state.direct_url != "" and not stopping.done()
    for instance_id in mine:
        await client.release(instance_id)
    await asyncio.wait_for(stopping, 60)
    assert (port.url, service.by_proxy) == ("", [])


async def test_calls_that_never_end_lose_none_when_a_replica_stops_though_each_is_sent_once(service: Service) -> None:
    await service.open("aaaa")
    await service.start("bbbb", drain_s=30.0)
    answered, texts, enough = 0, set[str](), asyncio.Event()
    async with httpx.AsyncClient(trust_env=False) as http:  # the replica closes this process's shared client
        client = ToolsClient(service.client.base_url, http, CallPolicy(attempts=1), direct=True)

        async def line() -> None:
            nonlocal answered
            while not enough.is_set():
                texts.add((await client.one_shot("calculator", SUM)).text)
                answered += 1

        lines = [asyncio.create_task(line()) for _ in range(4)]
        await async_until(lambda: answered >= 8)
        await asyncio.wait_for(service.stop("bbbb"), 60)
        before = answered
        await async_until(lambda: answered >= before + 8)
        enough.set()
        await asyncio.gather(*lines)
    assert texts == {"2"}


async def test_a_stopping_replica_finishes_what_it_has_begun_and_counts_it(service: Service) -> None:
    await service.open("aaaa")
    port, client = service.ports["aaaa"], service.client
    made = await client.create("faulty")
    tool = asyncio.create_task(client.execute(made.instance_id, ExecuteRequest(arguments={"mode": "long"})))
    gate = gate_of(service.apps["aaaa"])
    gate.clear()
    await async_until(lambda: port.in_flight == 1)
    stopping = asyncio.create_task(service.stop("aaaa"))
    await until_refused(port.url)
    gate.set()
    assert (await tool).text.startswith("x")
    await stopping
    assert port.in_flight == 0


def gate_of(app: FastAPI) -> asyncio.Event:
    [instance] = app.state.instances.everything()
    return instance.tool.gate


async def until_refused(url: str) -> None:
    address = httpx.URL(url)
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection(address.host, address.port)
            except OSError:
                return
            writer.close()


async def test_a_key_that_comes_twice_at_once_runs_once_at_the_port_too(service: Service) -> None:
    await service.open("aaaa")
    made = await service.client.create("faulty")
    gate = gate_of(service.apps["aaaa"])
    gate.clear()
    url = f"{service.ports['aaaa'].url}/instances/{made.instance_id}/execute"
    async with httpx.AsyncClient(trust_env=False) as http:
        sent = [asyncio.create_task(http.post(url, content=OK.model_dump_json(), headers=KEYED)) for _ in range(2)]
        await async_until(lambda: service.ports["aaaa"].in_flight == 2)
        gate.set()
        assert {(await call).json()["text"] for call in sent} == {"ok 1"}
    assert (await service.client.execute(made.instance_id, OK)).text == "ok 2"


async def test_a_ports_load_is_what_it_had_on_average_since_it_was_last_asked(service: Service) -> None:
    await service.open("aaaa")
    port, client = service.ports["aaaa"], service.client
    made = await client.create("faulty")
    gate = gate_of(service.apps["aaaa"])
    gate.clear()
    await async_until(lambda: port.load() == 0.0)  # a look may still have met the creation
    await async_until(lambda: port._looks >= 1)
    calls = [asyncio.create_task(client.execute(made.instance_id, OK)) for _ in range(3)]
    await async_until(lambda: port.in_flight == 3 and port._looks >= 4)
    assert 0.0 < port.load() < 3.0
    await async_until(lambda: port.load() == 3.0)
    gate.set()
    await asyncio.gather(*calls)
    await async_until(lambda: port.load() == 0.0)


async def test_without_a_reachable_replica_everything_goes_through_the_proxy(service: Service) -> None:
    await service.open("aaaa")
    service.ports["aaaa"].url = "http://127.0.0.1:9"
    made = await service.client.create("faulty", "s")
    assert (await service.client.execute(made.instance_id, OK, "s")).text == "ok 1"
    assert service.by_proxy == [("POST", "/instances"), ("POST", f"/instances/{made.instance_id}/execute")]


@asynccontextmanager
async def breaking(name: str) -> AsyncIterator[tuple[str, list[str]]]:
    """A replica that says its name and hangs up on every POST; its URL, and the keys of what it was sent."""
    keys: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /health"):
            body = replica(name, "").health.model_dump_json()
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
        keys.extend(line.partition(": ")[2] for line in head.splitlines() if line.lower().startswith(IDEMPOTENCY_KEY))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", keys


async def test_a_call_that_broke_off_is_sent_again_under_its_key_by_another_way(service: Service) -> None:
    await service.open("aaaa")
    async with breaking("bbbb") as (url, keys):
        service.ports = {"bbbb": SimpleNamespace(url=url)}  # pyright: ignore[reportAttributeAccessIssue]
        assert (await service.client.one_shot("calculator", SUM)).text == "2"
    assert len(keys) >= 1 and set(keys) == set(service.keys)
    assert service.by_proxy == [("POST", "/tools/calculator/execute")]


@pytest.mark.parametrize(
    ("metrics", "wanted"), [(None, 1.5), ({}, 1.5), ({DIRECT_REQUESTS: {"a": 4.0, "b": 1.0}}, 4.0)]
)
def test_autoscaling_counts_both_kinds_of_requests(metrics: dict | None, wanted: float) -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 2.0)
    load = SimpleNamespace(aggregated_metrics=metrics, total_num_requests=3.0, config=config, target_num_replicas=1)
    assert all_requests(load) == (wanted, {})  # pyright: ignore[reportArgumentType]


async def test_a_replica_with_a_fixed_port_starts_once_the_port_is_free(service: Service):
    with socket.create_server(("127.0.0.1", 0)) as earlier:
        app = FastAPI()
        port = DirectPort(app, "127.0.0.1", int, 0.0, port=(number := earlier.getsockname()[1]))
        starting = asyncio.create_task(service._run("next", app))
        await asyncio.sleep(0)  # its first attempt
        assert port.url == "" and not starting.done()
    await starting
    assert port.url == f"http://127.0.0.1:{number}"
