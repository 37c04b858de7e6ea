"""The load of `tools.py`, in a process of its own: POSTs as our client sends them, one by one on each connection.

    python benchmarks/tools_load.py '{"urls": ["http://127.0.0.1:80/x"], "body": "{}", "connections": 32, "seconds": 3}'

prints how many were answered 200, how many otherwise, and the latencies' percentiles, as JSON. The clock starts when
every connection has had its first answer: a busy uvloop takes in only one new connection at each turn of its loop.
"""

import asyncio
import json
import os
import sys
import time
import uuid
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import uvloop

MAX_REQUESTS = 200_000


@dataclass
class Load:
    """What to send, and what came of it."""

    urls: list[str]
    body: str
    connections: int
    seconds: float
    headers: dict[str, str] = field(default_factory=dict)
    traced: bool = False
    good: int = 0
    bad: int = 0
    first_bad: str = ""
    latencies: list[float] = field(default_factory=list)
    end: float = 0.0
    waiting: list["Connection"] = field(default_factory=list)

    def request(self, host: str, path: str, session: str) -> bytes:
        headers = {
            "host": host,
            "accept": "*/*",
            "accept-encoding": "gzip, deflate",
            "user-agent": "python-httpx/0.28.1",
            "content-type": "application/json",
            "x-session-id": session,
            "idempotency-key": uuid.uuid4().hex,
            "x-request-timeout": "60",
            **self.headers,
        }
        if self.traced:
            headers["traceparent"] = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"
        headers["content-length"] = str(len(self.body.encode()))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {path} HTTP/1.1\r\n{lines}\r\n{self.body}".encode()

    def note(self, status: bytes, answer: bytes, seconds: float) -> None:
        if self.end:
            self.latencies.append(seconds)
        if status == b"200":
            self.good += 1
        else:
            self.bad += 1
            self.first_bad = self.first_bad or answer[-400:].decode(errors="replace")

    @property
    def over(self) -> bool:
        return time.perf_counter() >= self.end or self.good + self.bad >= MAX_REQUESTS

    def next(self, connection: "Connection") -> None:
        """All together after the first answer of each."""
        if self.end:
            connection.send()
            return
        self.waiting.append(connection)
        if len(self.waiting) == self.connections:
            self.end = time.perf_counter() + self.seconds
            for waiting in self.waiting:
                waiting.send()


class Connection(asyncio.Protocol):
    """Sends the next request when the answer to the last one is complete."""

    def __init__(self, load: Load, number: int) -> None:
        url = urlsplit(load.urls[number % len(load.urls)])
        self.address = (url.hostname or "", url.port or 80)
        self.ended = asyncio.get_running_loop().create_future()
        self._load, self._host, self._path = load, url.netloc, url.path
        self._session = f"bench/{number}"
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._post()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        _, _, length = head.lower().partition(b"content-length:")
        if not length or len(body) < int(length.split(b"\r\n", 1)[0]):
            return
        self._load.note(head.split(b" ", 2)[1], self._received, time.perf_counter() - self._sent)
        self._received = b""
        self._load.next(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def send(self) -> None:
        if self._load.over:
            self._transport.close()
        else:
            self._post()

    def _post(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._load.request(self._host, self._path, self._session))


async def run(load: Load) -> None:
    loop = asyncio.get_running_loop()
    made = [Connection(load, number) for number in range(load.connections)]
    for connection in made:
        await loop.create_connection(lambda connection=connection: connection, *connection.address)
    await asyncio.wait([connection.ended for connection in made], timeout=load.seconds + 30)


def percentile(latencies: list[float], share: float) -> float:
    return 1000 * latencies[min(len(latencies) - 1, int(share * len(latencies)))] if latencies else float("nan")


def main() -> None:
    """One load, given as JSON."""
    load = Load(**json.loads(sys.argv[1]))
    uvloop.run(run(load))
    load.latencies.sort()
    shown = {"good": load.good, "bad": load.bad, "first_bad": load.first_bad}
    print(json.dumps({**shown, "p50_ms": percentile(load.latencies, 0.5), "p99_ms": percentile(load.latencies, 0.99)}))


if __name__ == "__main__":
    main()
