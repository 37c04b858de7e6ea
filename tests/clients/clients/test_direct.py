"""Which replica a call goes to, as replicas come, leave, cannot be reached, or are not who they were."""

import logging
from collections import Counter

import httpx
import pytest
from pydantic import SecretStr

from trackway.clients.direct import Address, DirectRoutes
from trackway.system.waits import Waits, noted_in
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import REPLICA, SESSION_ID, Health, Ready, ReplicaInfo, ReplicaList

pytestmark = pytest.mark.anyio

BASE = "http://127.0.0.1:8000/tools"


class ReplicaDirectory:
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
        found = await self.routes.addresses(session_id, replica)
        return found[0].replica if found else None

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
    directory = ReplicaDirectory("abc")
    assert [await directory.met() for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


async def test_a_session_stays_when_a_replica_comes_except_for_those_that_move_to_it() -> None:
    directory = ReplicaDirectory("ab")
    before = {name: await directory.met(name) for name in map(str, range(300))}
    assert Counter(before.values()).keys() == {"a", "b"}
    directory.listed.append("c")
    directory.answering[directory.url("c")] = "c"
    await directory.look_again()
    after = {name: await directory.met(name) for name in before}
    moved = {name for name in before if after[name] != before[name]}
    assert {after[name] for name in moved} == {"c"}
    assert 60 <= len(moved) <= 140  # a third of 300


async def test_a_replica_is_called_with_its_own_pass_and_no_pass_is_shown() -> None:
    directory = ReplicaDirectory("ab")
    [found] = await directory.routes.addresses(None, "b")
    assert found == directory.address("b") and found.token.get_secret_value() == "pass of b"
    assert "pass of" not in repr(found) + repr(await directory.list_replicas())


async def test_an_instance_is_called_where_it_was_made_whatever_the_session_says_now() -> None:
    directory = ReplicaDirectory("abc")
    assert [await directory.met(f"session {number}", "b") for number in range(20)] == ["b"] * 20


async def test_a_leaving_replica_is_met_by_its_instances_only_and_until_it_fails() -> None:
    directory = ReplicaDirectory("ab")
    await directory.met()
    directory.listed.remove("a")
    await directory.look_again()
    assert {await directory.met(str(number)) for number in range(20)} == {"b"}
    assert await directory.met(replica="a") == "a"
    directory.routes.failed(directory.address("a"))
    assert await directory.met(replica="a") is None


async def test_a_replica_that_failed_is_left_out_at_once_and_is_back_when_it_answers() -> None:
    directory = ReplicaDirectory("ab")
    await directory.met()
    del directory.answering[directory.url("a")]
    directory.routes.failed(directory.address("a"))
    assert {await directory.met(str(number)) for number in range(20)} == {"b"}
    assert await directory.met(replica="a") is None
    directory.answering[directory.url("a")] = "a"
    await directory.look_again()
    assert await directory.met(replica="a") == "a"


async def test_a_call_of_a_lost_replica_waits_for_one_look_and_finds_it_alive() -> None:
    directory = ReplicaDirectory("ab")
    await directory.met()
    directory.routes.failed(directory.address("a"))
    assert await directory.met(replica="a") == "a"
    assert directory.looks == 2


async def test_a_stranger_at_a_replicas_address_is_not_taken_for_it() -> None:
    directory = ReplicaDirectory("ab")
    directory.answering[directory.url("a")] = "z"
    assert {await directory.met() for _ in range(4)} == {"b"}


async def test_what_cannot_be_reached_is_said_once_and_the_proxy_taken_for_good(
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = ReplicaDirectory("ab")
    directory.answering.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            await directory.look_again()
    assert (directory.routes.proxy_only, directory.looks) == (True, 3)
    [said] = [record.getMessage() for record in caplog.records]
    assert directory.url("a") in said and directory.url("b") in said
    directory.answering[directory.url("a")] = "a"
    assert await directory.met() is None


@pytest.mark.parametrize("code", [ErrorCode.NOT_FOUND, ErrorCode.UNAUTHORIZED, ErrorCode.FORBIDDEN])
async def test_a_service_that_lists_no_replicas_is_asked_once(code: ErrorCode) -> None:
    directory = ReplicaDirectory("ab")
    directory.refusal = code
    assert [await directory.met(), await directory.met(replica="a")] == [None, None]
    await directory.look_again()
    assert (directory.routes.proxy_only, directory.looks) == (True, 1)


async def test_a_service_that_cannot_be_asked_now_keeps_the_replicas_it_had() -> None:
    directory = ReplicaDirectory("ab")
    await directory.met()
    directory.refusal = ErrorCode.UNAVAILABLE
    await directory.look_again()
    assert {await directory.met() for _ in range(4)} == {"a", "b"}


async def test_replicas_without_an_address_of_their_own_are_given_up() -> None:
    directory = ReplicaDirectory("")
    directory.routes._list_replicas = lambda: listed(info("a", None))
    for _ in range(3):
        await directory.look_again()
    assert directory.routes.proxy_only


async def test_a_service_that_still_starts_is_not_given_up() -> None:
    directory = ReplicaDirectory("a")
    directory.routes._list_replicas = lambda: listed(info("a", directory.url("a"), ready=False))
    for _ in range(5):
        await directory.look_again()
    assert not directory.routes.proxy_only


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
    assert await ReplicaDirectory("a", base_url, host).met() == met


def answer(status: int, replica: str, **headers: str) -> httpx.Response:
    request = httpx.Request("POST", f"http://{replica}/generate")
    return httpx.Response(status, headers={REPLICA: replica, **headers}, request=request)


class Calls:
    """Requests of one client: what each replica answers or raises, and which were asked."""

    def __init__(self, directory: ReplicaDirectory, **by_replica: httpx.Response | Exception) -> None:
        self.asked: list[str] = []
        self._directory, self._by_replica = directory, by_replica

    async def send(self, base_url: str, headers: dict[str, str]) -> httpx.Response:
        name = next((name for name in self._by_replica if self._directory.url(name) == base_url), "proxy")
        self.asked.append(name)
        result = self._by_replica.get(name) or answer(200, name)
        if isinstance(result, Exception):
            raise result
        return result

    async def made(self, session: str, broken: list[str] | None = None) -> int:
        headers = {SESSION_ID: session}
        return (
            await self._directory.routes.exchange(self.send, headers, None, [] if broken is None else broken)
        ).status_code


async def order(directory: ReplicaDirectory, session: str) -> list[str]:
    return [address.replica for address in await directory.routes.addresses(session, None)]


async def test_a_groups_own_order_of_the_replicas_stays_when_one_comes_and_one_goes() -> None:
    directory = ReplicaDirectory("abc")
    groups = [f"demo/{step}/{index}" for step in range(10) for index in range(30)]
    before = {group: await order(directory, group) for group in groups}
    assert Counter(found[0] for found in before.values()).keys() == {"a", "b", "c"}
    directory.listed.remove("a")
    directory.listed.append("d")
    directory.answering[directory.url("d")] = "d"
    await directory.look_again()
    after = {group: await order(directory, group) for group in groups}
    for group in groups:
        assert [name for name in after[group] if name != "d"] == [name for name in before[group] if name != "a"]
    moved = [group for group in groups if after[group][0] != before[group][0]]
    assert all(before[group][0] == "a" or after[group][0] == "d" for group in moved)
    assert 130 <= len(moved) <= 200  # a third loses its replica, and a third of the rest finds a new one


async def test_a_wait_names_the_replica_that_was_asked_last() -> None:
    directory, waits = ReplicaDirectory("abc"), Waits()
    first, second, _ = await order(directory, "s")
    calls = Calls(directory, **{first: answer(429, first), second: answer(200, second)})
    with waits("rollout 1/7/0", "the rollout service") as waiting:
        assert waiting.wait().progress == ""
        with noted_in([waiting]):
            await calls.made("s")
        assert waiting.wait().progress == f"replica {second}"


async def test_a_full_replica_passes_a_session_on_in_its_own_order_and_this_is_counted() -> None:
    directory = ReplicaDirectory("abc")
    first, second, third = await order(directory, "group")
    full = answer(429, first)
    full.is_closed = False  # as before the body of a stream is read
    calls = Calls(directory, **{first: full, second: answer(200, second), third: answer(200, third)})
    assert (await calls.made("group"), calls.asked, directory.routes.spilled) == (200, [first, second], 1)
    assert full.is_closed  # its connection is free again
    assert (await order(directory, "group"))[0] == first  # it stays the session's own


async def test_a_chosen_replica_comes_first_and_the_rest_keeps_the_sessions_order() -> None:
    directory = ReplicaDirectory("abc")
    first, second, third = await order(directory, "group")
    addresses = await directory.routes.addresses("group", None, third)
    assert [address.replica for address in addresses] == [third, first, second]
    addresses = await directory.routes.addresses("group", None, "gone")
    assert [address.replica for address in addresses] == [first, second, third]
    calls = Calls(directory, **{third: answer(429, third), first: answer(200, first)})
    response = await directory.routes.exchange(calls.send, {SESSION_ID: "group"}, None, [], third)
    assert (response.status_code, calls.asked, directory.routes.spilled) == (200, [third, first], 1)


async def test_when_all_replicas_are_full_each_is_asked_once_and_the_caller_backs_off() -> None:
    directory = ReplicaDirectory("abc")
    calls = Calls(directory, **{name: answer(429, name) for name in "abc"})
    asked = await order(directory, "group")
    assert (await calls.made("group"), calls.asked, directory.routes.spilled) == (429, asked, 2)


async def test_a_call_that_broke_off_goes_to_the_same_replica_once_more_and_then_elsewhere() -> None:
    directory = ReplicaDirectory("ab")
    first, second = await order(directory, "group")
    calls = Calls(directory, **{first: httpx.ReadError("cut"), second: answer(200, second)})
    broken: list[str] = []
    for _ in range(2):
        with pytest.raises(httpx.ReadError):
            await calls.made("group", broken)
    assert (await calls.made("group", broken), calls.asked) == (200, [first, first, second])


async def test_a_call_that_broke_off_at_a_dead_replica_goes_elsewhere_at_once() -> None:
    directory = ReplicaDirectory("ab")
    first, second = await order(directory, "group")
    calls = Calls(directory, **{first: httpx.ReadError("cut"), second: answer(200, second)})
    del directory.answering[directory.url(first)]
    broken: list[str] = []
    with pytest.raises(httpx.ReadError):
        await calls.made("group", broken)
    assert (await calls.made("group", broken), calls.asked) == (200, [first, second])


async def test_what_was_never_sent_goes_through_the_proxy_at_once() -> None:
    directory = ReplicaDirectory("ab")
    first, _ = await order(directory, "group")
    calls = Calls(directory, **{first: httpx.ConnectError("refused")})
    assert (await calls.made("group"), calls.asked) == (200, [first, "proxy"])


async def test_a_replica_that_says_it_is_leaving_gets_no_new_sessions_but_its_instances_calls() -> None:
    directory = ReplicaDirectory("ab")
    first, second = await order(directory, "group")
    calls = Calls(directory, **{first: answer(200, first, connection="close"), second: answer(200, second)})
    assert [await calls.made("group") for _ in range(3)] == [200] * 3
    assert calls.asked == [first, second, second]
    assert await directory.met(replica=first) == first


async def test_a_replica_that_is_not_ready_is_looked_at_again_after_a_second() -> None:
    directory = ReplicaDirectory("ab")
    first, second = await order(directory, "group")
    calls = Calls(directory, **{first: answer(503, first), second: answer(200, second)})
    directory.routes._list_replicas = lambda: listed(
        info(first, directory.url(first), ready=False), info(second, directory.url(second))
    )
    assert (await calls.made("group"), directory.routes._refreshed_at) == (503, 0.0)
    directory.now = 1.0
    assert await calls.made("group") == 503
    await directory.met()
    assert directory.routes._refreshing is not None
    await directory.routes._refreshing
    assert await order(directory, "group") == [second]


async def test_replicas_that_all_pause_are_called_directly_again_a_second_after_they_resume() -> None:
    directory = ReplicaDirectory("a")
    await directory.met()
    list_ready, directory.routes._list_replicas = (
        directory.routes._list_replicas,
        lambda: listed(info("a", directory.url("a"), ready=False)),
    )
    await directory.look_again()
    assert await directory.met("group") is None
    directory.routes._list_replicas = list_ready
    directory.now += 1.0
    await directory.met("group")
    assert directory.routes._refreshing is not None
    await directory.routes._refreshing
    assert await directory.met("group") == "a"
