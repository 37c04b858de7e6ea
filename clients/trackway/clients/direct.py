"""Direct routes to a service's replicas without Ray Serve's proxy, which costs many times the work of a small call.

`GET /replicas` lists each replica's address. An address is used only after the replica has answered there under its
own name, so no call waits for an unreachable address or reaches another process. Calls of an instance go to the replica
in its id, generations to the replica that `TrajectoryRouting` chooses for their trajectory, other calls of a session to
the same replica each time, and all others round-robin. A full replica (429) passes a call on to the next one in its
session's order. Replicas without an address are called through the proxy.

A call that breaks off is repeated under its idempotency key at the same replica if that still answers, which finishes
the work that it has begun. A second break, or no answer, sends it elsewhere.

The token is never sent to such an address, because another process may have taken it over. A pass, which is valid for
that replica only, is sent instead.

The rollout replica of a trajectory depends on the prefixes that the replicas hold and the trajectories that live there.
A group starts where its prompt is, a trajectory stays on its replica, and replicas share the trajectories evenly. Where
these disagree, the constants say how many prompt tokens an engine may compute again for a better balance. They were
chosen by `benchmarks/routing.py`, which runs `TrajectoryRouting` with simulated replicas. Counting a trajectory from
the moment of its choice keeps a new replica from getting all of them at once.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from ipaddress import ip_address
from itertools import count
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr

from trackway.clients.http_client import WholeResponse, authorization
from trackway.clients.retry import unsent
from trackway.system.waits import note_replica
from trackway.tracing import add_event
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import REPLICA, SESSION_ID, ReplicaList

logger = logging.getLogger("trackway.clients")


PROBE_S = 2.0
"""Longest wait for a replica to answer under its address for the first time."""
MAX_REPLICAS = 1024
"""Most addresses that are kept, including stopping replicas."""
_MAX_FAILED_REFRESHES = 3
_MAX_BREAKS = 2
"""Attempts of one call that may break off at a replica that still answers."""
_HURRY_S = 1.0
"""Time between refreshes for replicas that say they are leaving or not ready."""
_NO_SUCH_LIST = (ErrorCode.NOT_FOUND, ErrorCode.UNAUTHORIZED, ErrorCode.FORBIDDEN, ErrorCode.INVALID_REQUEST)
"""Errors of a service without `/replicas`. The last one comes from another program, such as a plain vLLM."""


@dataclass(frozen=True)
class Address:
    """The direct address of one replica."""

    replica: str
    url: str
    token: SecretStr
    """The replica's pass. Empty when the service has no tokens."""


ListReplicas = Callable[[], Awaitable[ReplicaList]]
NameAt = Callable[[Address], Awaitable[str]]
Headers = dict[str, str]
R = TypeVar("R", httpx.Response, WholeResponse)
Send = Callable[[str, Headers], Awaitable[R]]
"""Sends a request to a base URL with these headers. Returns the answer with any status."""


class DirectRoutes:
    """The direct addresses of one service's replicas.

    list_replicas: lists the service's replicas; raises TrackwayError when the service does not answer.
    name_at: the name of the replica at an address; raises TrackwayError when none answers.
    """

    def __init__(
        self,
        base_url: str,
        list_replicas: ListReplicas,
        name_at: NameAt,
        refresh_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base_url = base_url
        self._list_replicas = list_replicas
        self._name_at = name_at
        self._refresh_s = refresh_s
        self._clock = clock
        self._known: dict[str, Address] = {}
        self._ring: list[Address] = []
        self._turn = count()
        self._refreshed_at: float | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed = False
        self._failed_refreshes = 0
        self.proxy_only = False
        """True if all further calls use the proxy, because no replica can be reached directly."""
        self.spilled = 0
        """Calls that a full replica passed on to the next one, since the start."""

    async def exchange(
        self, send: Send[R], headers: Headers, holder: str | None, broken: list[str], replica: str | None = None
    ) -> R:
        """Send one request to a replica, or to the proxy when no replica can be reached.

        Args:
            send: sends it.
            headers: with the caller's own token; `x-session-id` chooses the replica.
            holder: the only replica that can answer, because it created the call's instance.
            broken: replicas at which earlier attempts of this call broke off. This attempt may add one.
            replica: the first to ask, if it is listed.

        Raises:
            httpx.TransportError: the request may have been sent, and no answer came.
        """
        full: R | None = None
        for address in await self.addresses(headers.get(SESSION_ID), holder, replica):
            if broken.count(address.replica) >= _MAX_BREAKS:
                continue
            if full is not None:
                self.spilled += 1
                add_event("replica_full", url=str(full.url))
                await full.aclose()
            note_replica(address.replica)
            try:
                response = await send(address.url, _with_pass(headers, address))
            except httpx.TransportError as error:
                if unsent(error):
                    self.failed(address)
                    full = None
                    break
                await self._suspect(address, broken)
                raise
            if response.status_code == 429:
                full = response
                continue
            if response.headers.get(REPLICA) != address.replica:
                await response.aclose()
                self.failed(address)
                raise httpx.RemoteProtocolError(f"{address.url} is no longer replica {address.replica}")
            self._heed(address, response)
            return response
        return await send(self._base_url, headers) if full is None else full

    async def addresses(self, session_id: str | None, holder: str | None, replica: str | None = None) -> list[Address]:
        """The addresses for a call, best first. Empty for the proxy.

        `holder` is the replica of the call's instance. `replica` comes first if it is listed.
        """
        if self.proxy_only:
            return []
        await self._refresh_if_due(waiting=holder is not None and holder not in self._known)
        if holder is not None:
            # A stopping replica is no longer listed, but answers until its instances are released.
            return [self._known[holder]] if holder in self._known else []
        if session_id is not None:
            return sorted(
                self._ring,
                key=lambda address: (address.replica == replica, _weight(session_id, address.replica)),
                reverse=True,
            )
        turn = next(self._turn) % max(1, len(self._ring))
        return self._ring[turn:] + self._ring[:turn]

    def failed(self, address: Address) -> None:
        """Stop using the address. The next call refreshes the list of replicas."""
        if self._known.get(address.replica) == address:
            del self._known[address.replica]
            self._ring = [known for known in self._ring if known != address]
            self._refreshed_at = None

    async def _suspect(self, address: Address, broken: list[str]) -> None:
        """A request broke off at this address: stop using it if that happened before, or if no replica answers."""
        broken.append(address.replica)
        if broken.count(address.replica) >= _MAX_BREAKS or not await self._is_there(address):
            self.failed(address)

    def _heed(self, address: Address, response: httpx.Response | WholeResponse) -> None:
        """Take a replica that is leaving out of the order, and look soon whether one that is not ready still counts."""
        leaving = response.headers.get("connection") == "close"
        if leaving:
            self._ring = [known for known in self._ring if known != address]
        hurry = leaving or response.status_code == 503
        if hurry and self._refreshed_at is not None and self._clock() - self._refreshed_at >= _HURRY_S:
            self._refreshed_at = None

    async def _refresh_if_due(self, waiting: bool) -> None:
        """Refresh the list periodically in the background. Calls wait only for the first refresh or a lost replica."""
        now = self._clock()
        all_paused = bool(self._known) and not self._ring
        interval_s = _HURRY_S if all_paused else self._refresh_s
        if self._refreshing is None and (self._refreshed_at is None or now - self._refreshed_at >= interval_s):
            self._refreshed_at = now
            self._refreshing = asyncio.create_task(self._refresh())
        if self._refreshing is not None and (waiting or not self._refreshed):
            await asyncio.shield(self._refreshing)

    async def _refresh(self) -> None:
        try:
            await self._take(await self._list_replicas())
        except TrackwayError as error:
            # A service without Ray Serve has no such route.
            self.proxy_only = error.code in _NO_SUCH_LIST
        finally:
            self._refreshed = True
            self._refreshing = None

    async def _take(self, listed: ReplicaList) -> None:
        ready = {replica.health.replica: replica.url for replica in listed.replicas if replica.ready.ready}
        passes = {name: SecretStr(listed.passes.get(name, "")) for name in ready}
        offered = [Address(name, url, passes[name]) for name, url in ready.items() if url][:MAX_REPLICAS]
        answers = await asyncio.gather(*map(self._answers, offered))
        reached = {address.replica: address for address, there in zip(offered, answers, strict=True) if there}
        leaving = {name: address for name, address in self._known.items() if name not in reached}
        self._ring = [reached[name] for name in sorted(reached)]
        self._known = dict([*reached.items(), *leaving.items()][:MAX_REPLICAS])
        self._failed_refreshes = 0 if self._known or not ready else self._failed_refreshes + 1
        if self._failed_refreshes == _MAX_FAILED_REFRESHES:
            self._give_up(offered)

    def _give_up(self, offered: list[Address]) -> None:
        self.proxy_only = True
        if offered:
            there = ", ".join(address.url for address in offered)
            logger.warning(
                "%s: replicas cannot be reached directly at %s; all calls use the proxy", self._base_url, there
            )

    async def _answers(self, address: Address) -> bool:
        if self._known.get(address.replica) == address:
            return True
        return self._may_use(address.url) and await self._is_there(address)

    async def _is_there(self, address: Address) -> bool:
        """Return whether the replica answers at its address under its own name."""
        try:
            async with asyncio.timeout(PROBE_S):
                return await self._name_at(address) == address.replica
        except (TrackwayError, TimeoutError):
            return False

    def _may_use(self, url: str) -> bool:
        """Return whether the address is safe: never a pass over plain HTTP, and no loopback address of another host."""
        base, target = urlsplit(self._base_url), urlsplit(url)
        if base.scheme == "https" and target.scheme != "https":
            return False
        return not _is_loopback(target.hostname) or _is_loopback(base.hostname)


def _with_pass(headers: Headers, address: Address) -> Headers:
    without_token = {name: value for name, value in headers.items() if name != "authorization"}
    return without_token | authorization(address.token)


def _weight(session_id: str, replica: str) -> bytes:
    """Rendezvous hashing: each session ranks the replicas, so adding or removing one moves only its share."""
    return blake2b(f"{replica} {session_id}".encode(), digest_size=8).digest()


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False


START_TOKENS = 25.0
"""Prompt tokens that a new trajectory may cost for one trajectory fewer on its replica."""
MOVE_TOKENS = 375.0
"""Prompt tokens that a move may cost for one trajectory fewer on the replica."""
MOVE_MARGIN = 1.25
"""A trajectory moves to replicas with less than its own one's trajectories divided by this."""
MAX_GROUPS = 4096
MAX_TRAJECTORIES = 65_536
"""Most groups and trajectories that are remembered. The least recently used ones are forgotten first."""


@dataclass
class _Group:
    prompt_tokens: int
    """Length of the prompt that its trajectories share, taken from the shortest prompt so far."""
    replicas: set[str] = field(default_factory=set[str])
    """Replicas that computed them."""


class TrajectoryRouting:
    """Chooses a replica for each turn of each trajectory of one client. Pure: no I/O, no clock, no randomness."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[str, str] = OrderedDict()
        self._trajectories: Counter[str] = Counter()
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self.moved = 0
        """Turns on another replica than the trajectory's turn before, since the start."""

    def place(self, trajectory: str, group: str, prompt_tokens: int, replicas: Sequence[str]) -> str:
        """Return the replica of a trajectory's next turn, on which it counts until it moves or is released.

        Args:
            trajectory: its id.
            group: id of its group, whose trajectories begin with the same prompt.
            prompt_tokens: length of the turn's prompt, earlier turns included.
            replicas: at least one. Of equally good replicas the earlier one is chosen.
        """
        shared = self._groups.setdefault(group, _Group(prompt_tokens))
        self._groups.move_to_end(group)
        shared.prompt_tokens = min(shared.prompt_tokens, prompt_tokens)
        current = self._replicas.get(trajectory)
        self.release(trajectory)
        stays = current in replicas

        def cost(replica: str) -> float:
            living = self._trajectories[replica]
            if replica == current:
                return living
            missing = prompt_tokens - (shared.prompt_tokens if replica in shared.replicas else 0)
            return living * MOVE_MARGIN + missing / MOVE_TOKENS if stays else living + missing / START_TOKENS

        best = min(replicas, key=cost)
        self.moved += current not in (None, best)
        shared.replicas.add(best)
        self._replicas[trajectory] = best
        self._trajectories[best] += 1
        self._bound()
        return best

    def release(self, trajectory: str) -> None:
        """Count a trajectory no longer: it has ended. An unknown one is ignored."""
        current = self._replicas.pop(trajectory, None)
        if current is not None:
            self._trajectories[current] -= 1
            if not self._trajectories[current]:
                del self._trajectories[current]

    def _bound(self) -> None:
        while len(self._replicas) > MAX_TRAJECTORIES:
            self.release(next(iter(self._replicas)))
        while len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
