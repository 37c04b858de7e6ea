"""Which replica a call goes to, as replicas come, leave, cannot be reached, or are not who they were."""

import logging
from collections import Counter

import pytest
from pydantic import SecretStr

from trackway.clients.direct import Address, DirectRoutes
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import Health, Ready, ReplicaInfo, ReplicaList

pytestmark = pytest.mark.anyio

BASE = "http://127.0.0.1:8000/tools"


class World:
    """The replicas as the service lists them, and who answers where."""

    def __init__(self, names: str, base_url: str = BASE, host: str = "127.0.0.1") -> None:
        self.now = 0.0
        self.host = host
        self.listed = list(names)
        self.answering = {self.url(name): name for name in names}
        self.refusal: ErrorCode | None = None
        self.looks = 0
        self.routes = DirectRoutes(base_url, self.list_replicas, self.name_at, 10.0, lambda: self.now)

    def url(self, name: str) -> str:
        return f"http://{self.host}:{1000 + ord(name)}"

    def address(self, name: str) -> Address:
        return Address(name, self.url(name), SecretStr(f"pass of {name}"))

    async def list_replicas(self) -> ReplicaList:
        self.looks += 1
        if self.refusal is not None:
            raise TrackwayError(self.refusal, "no")
        passes = {name: f"pass of {name}" for name in self.listed}
        return ReplicaList(replicas=[info(name, self.url(name)) for name in self.listed], passes=passes)

    async def name_at(self, address: Address) -> str:
        if address.url not in self.answering:
            raise TrackwayError(ErrorCode.UNAVAILABLE, f"nobody at {address.url}")
        return self.answering[address.url]

    async def met(self, session_id: str | None = None, replica: str | None = None) -> str | None:
        found = await self.routes.address(session_id, replica)
        return found and found.replica

    async def look_again(self) -> None:
        """Let the refresh interval pass, and the look beside the calls end."""
        self.now += 10.0
        await self.met()
        if self.routes._refreshing is not None:
            await self.routes._refreshing


def info(name: str, url: str | None, ready: bool = True) -> ReplicaInfo:
    health = Health(service="tools", replica=name, pid=1, python="3", executable="python")
    return ReplicaInfo(health=health, ready=Ready(ready=ready), url=url)


async def test_calls_without_a_session_go_to_each_replica_in_turn() -> None:
    world = World("abc")
    assert [await world.met() for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


async def test_a_session_stays_when_a_replica_comes_except_for_those_that_move_to_it() -> None:
    world = World("ab")
    before = {name: await world.met(name) for name in map(str, range(300))}
    assert Counter(before.values()).keys() == {"a", "b"}
    world.listed.append("c")
    world.answering[world.url("c")] = "c"
    await world.look_again()
    after = {name: await world.met(name) for name in before}
    moved = {name for name in before if after[name] != before[name]}
    assert {after[name] for name in moved} == {"c"}
    assert 60 <= len(moved) <= 140  # a third of 300


async def test_a_replica_is_called_with_its_own_pass_and_no_pass_is_shown() -> None:
    world = World("ab")
    found = await world.routes.address(None, "b")
    assert found == world.address("b") and found.token.get_secret_value() == "pass of b"
    assert "pass of" not in repr(found) + repr(await world.list_replicas())


async def test_an_instance_is_called_where_it_was_made_whatever_the_session_says_now() -> None:
    world = World("abc")
    assert [await world.met(f"session {number}", "b") for number in range(20)] == ["b"] * 20


async def test_a_leaving_replica_is_met_by_its_instances_only_and_until_it_fails() -> None:
    world = World("ab")
    await world.met()
    world.listed.remove("a")
    await world.look_again()
    assert {await world.met(str(number)) for number in range(20)} == {"b"}
    assert await world.met(replica="a") == "a"
    world.routes.failed(world.address("a"))
    assert await world.met(replica="a") is None


async def test_a_replica_that_failed_is_left_out_at_once_and_is_back_when_it_answers() -> None:
    world = World("ab")
    await world.met()
    del world.answering[world.url("a")]
    world.routes.failed(world.address("a"))
    assert {await world.met(str(number)) for number in range(20)} == {"b"}
    assert await world.met(replica="a") is None
    world.answering[world.url("a")] = "a"
    await world.look_again()
    assert await world.met(replica="a") == "a"


async def test_a_call_of_a_lost_replica_waits_for_one_look_and_finds_it_alive() -> None:
    world = World("ab")
    await world.met()
    world.routes.failed(world.address("a"))
    assert await world.met(replica="a") == "a"
    assert world.looks == 2


async def test_a_stranger_at_a_replicas_address_is_not_taken_for_it() -> None:
    world = World("ab")
    world.answering[world.url("a")] = "z"
    assert {await world.met() for _ in range(4)} == {"b"}


async def test_what_cannot_be_reached_is_said_once_and_the_proxy_taken_for_good(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World("ab")
    world.answering.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            await world.look_again()
    assert (world.routes.proxy_only, world.looks) == (True, 3)
    [said] = [record.getMessage() for record in caplog.records]
    assert world.url("a") in said and world.url("b") in said
    world.answering[world.url("a")] = "a"
    assert await world.met() is None


@pytest.mark.parametrize("code", [ErrorCode.NOT_FOUND, ErrorCode.UNAUTHORIZED, ErrorCode.FORBIDDEN])
async def test_a_service_that_lists_no_replicas_is_asked_once(code: ErrorCode) -> None:
    world = World("ab")
    world.refusal = code
    assert [await world.met(), await world.met(replica="a")] == [None, None]
    await world.look_again()
    assert (world.routes.proxy_only, world.looks) == (True, 1)


async def test_a_service_that_cannot_be_asked_now_keeps_the_replicas_it_had() -> None:
    world = World("ab")
    await world.met()
    world.refusal = ErrorCode.UNAVAILABLE
    await world.look_again()
    assert {await world.met() for _ in range(4)} == {"a", "b"}


async def test_replicas_without_an_address_of_their_own_are_given_up() -> None:
    world = World("")
    world.routes._list_replicas = lambda: listed(info("a", None))
    for _ in range(3):
        await world.look_again()
    assert world.routes.proxy_only


async def test_a_service_that_still_starts_is_not_given_up() -> None:
    world = World("a")
    world.routes._list_replicas = lambda: listed(info("a", world.url("a"), ready=False))
    for _ in range(5):
        await world.look_again()
    assert not world.routes.proxy_only


async def listed(*replicas: ReplicaInfo) -> ReplicaList:
    return ReplicaList(replicas=list(replicas))


@pytest.mark.parametrize(
    ("base_url", "host", "met"),
    [
        ("http://127.0.0.1:8000/tools", "127.0.0.1", "a"),
        ("http://localhost:8000/tools", "127.0.0.1", "a"),
        ("http://10.0.0.7:8000/tools", "10.0.0.8", "a"),
        ("http://127.0.0.1:8000/tools", "10.0.0.8", "a"),
        ("http://127.0.0.1:8000/tools", "[fd00::8]", "a"),
        ("http://tools.example:8000/tools", "[::1]", None),
        ("http://tools.example:8000/tools", "127.0.0.1", None),
        ("https://tools.example/tools", "10.0.0.8", None),
    ],
    ids=[
        "this machine",
        "by name",
        "a network",
        "another node's replica by this node's proxy",
        "likewise, IPv6",
        "another machine's loopback, IPv6",
        "another machine's loopback",
        "out of TLS",
    ],
)
async def test_no_pass_leaves_tls_and_no_foreign_loopback_is_called(base_url: str, host: str, met: str | None) -> None:
    assert await World("a", base_url, host).met() == met
