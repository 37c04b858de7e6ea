"""The way to a service's replicas past Ray Serve's proxy, which costs many times a small call's own work.

`GET /replicas` names each replica's own address. An address is used once the replica has answered there under its own
name; so no call waits for one that cannot be reached from here, and none meets a stranger. Calls of an instance go to
the replica in its id, calls of a session all to the same one, others in turn. What has no address goes by the proxy.

No token goes to such an address, as another process may have it by then; a pass does, which opens that replica alone.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import ip_address
from itertools import count
from urllib.parse import urlsplit

from pydantic import SecretStr

from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import ReplicaList

logger = logging.getLogger("trackway.clients")


PROBE_S = 2.0
"""Longest wait for a replica to answer under its address for the first time."""
MAX_REPLICAS = 1024
"""Addresses that are kept, those of leaving replicas included."""
_VAIN_LOOKS = 3


@dataclass(frozen=True)
class Address:
    """Where one replica answers by itself."""

    replica: str
    url: str
    token: SecretStr
    """The replica's pass; empty when the service has no tokens."""


ListReplicas = Callable[[], Awaitable[ReplicaList]]
NameAt = Callable[[Address], Awaitable[str]]


class DirectRoutes:
    """The addresses of one service's replicas.

    list_replicas: asks the service for them; TrackwayError when it cannot be asked.
    name_at: the name of the replica that answers there; TrackwayError when none does.
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
        self._looked_at: float | None = None
        self._looking: asyncio.Task[None] | None = None
        self._looked = False
        self._vain_looks = 0
        self.given_up = False
        """Nothing can be reached from here, or there is nothing to reach; the proxy is taken for good."""

    async def address(self, session_id: str | None, replica: str | None) -> Address | None:
        """Where to send a call; None for the proxy. `replica` is the one that made the instance of the call."""
        if self.given_up:
            return None
        await self._look_if_due(waiting=replica is not None and replica not in self._known)
        if replica is not None:
            # A leaving replica is no longer listed, but answers until its instances are released.
            return self._known.get(replica)
        if session_id is not None:
            return max(self._ring, key=lambda one: _weight(session_id, one.replica), default=None)
        return self._ring[next(self._turn) % len(self._ring)] if self._ring else None

    def failed(self, address: Address) -> None:
        """Leave it out from now on; the service is asked again."""
        if self._known.get(address.replica) == address:
            del self._known[address.replica]
            self._ring = [one for one in self._ring if one != address]
            self._looked_at = None

    async def _look_if_due(self, waiting: bool) -> None:
        """Look again from time to time, beside the calls; they wait only for the first look and for a lost replica."""
        now = self._clock()
        if self._looking is None and (self._looked_at is None or now - self._looked_at >= self._refresh_s):
            self._looked_at = now
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None and (waiting or not self._looked):
            await asyncio.shield(self._looking)

    async def _look(self) -> None:
        try:
            await self._take(await self._list_replicas())
        except TrackwayError as error:
            # A process without Serve has no such route.
            self.given_up = error.code in (ErrorCode.NOT_FOUND, ErrorCode.UNAUTHORIZED, ErrorCode.FORBIDDEN)
        finally:
            self._looked = True
            self._looking = None

    async def _take(self, listed: ReplicaList) -> None:
        ready = {one.health.replica: one.url for one in listed.replicas if one.ready.ready}
        passes = {name: SecretStr(listed.passes.get(name, "")) for name in ready}
        offered = [Address(name, url, passes[name]) for name, url in ready.items() if url][:MAX_REPLICAS]
        answers = await asyncio.gather(*map(self._answers, offered))
        found = {one.replica: one for one, there in zip(offered, answers, strict=True) if there}
        leaving = {name: one for name, one in self._known.items() if name not in found}
        self._ring = [found[name] for name in sorted(found)]
        self._known = dict([*found.items(), *leaving.items()][:MAX_REPLICAS])
        self._vain_looks = 0 if self._known or not ready else self._vain_looks + 1
        if self._vain_looks == _VAIN_LOOKS:
            self._give_up(offered)

    def _give_up(self, offered: list[Address]) -> None:
        self.given_up = True
        if offered:
            there = ", ".join(one.url for one in offered)
            logger.warning("%s: its replicas cannot be reached at %s; all calls take the proxy", self._base_url, there)

    async def _answers(self, address: Address) -> bool:
        if self._known.get(address.replica) == address:
            return True
        if not self._may_use(address.url):
            return False
        try:
            async with asyncio.timeout(PROBE_S):
                return await self._name_at(address) == address.replica
        except (TrackwayError, TimeoutError):
            return False

    def _may_use(self, url: str) -> bool:
        """No pass leaves TLS, and nobody else's loopback address is taken for the replica's."""
        base, own = urlsplit(self._base_url), urlsplit(url)
        if base.scheme == "https" and own.scheme != "https":
            return False
        return not _is_loopback(own.hostname) or _is_loopback(base.hostname)


def _weight(session_id: str, replica: str) -> bytes:
    """Rendezvous hashing: each session ranks the replicas, so that one more or less moves only its own share."""
    return blake2b(f"{replica} {session_id}".encode(), digest_size=8).digest()


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False
