"""What one request costs a service in a process of its own."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.attacks.service_process import ServiceProcess

ANSWER_S = 60.0
HEALTH_S = 10.0
"""Longest wait for one answer of `/health`, on however busy a machine."""
_BETWEEN_S = 0.05
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Cost:
    """CPU time is measured beside wall time, since other tests share the cores."""

    status: int
    answer: bytes
    cpu_s: float
    memory_mib: float
    """Most memory beyond what the process had before."""
    health_cpu_s: float
    """The most CPU time that the service spent on other things while one `/health` waited for its answer."""
    health_s: float
    """The longest wait for one `/health`, on however busy a machine."""


class Meter:
    """Posts to a service and measures its process."""

    def __init__(self, service: ServiceProcess) -> None:
        self._port = service.port
        self._pid = service.process.pid
        self._process = psutil.Process(service.process.pid)

    def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Cost:
        """What the body costs."""
        return self.measured(lambda: self._exchange(path, body, headers or {}))

    def measured(self, exchange: Callable[[], tuple[int, bytes]]) -> Cost:
        """Measure an exchange, which returns the status and body of the answer."""
        before, cpu_before = self._memory("VmRSS"), self._cpu_s()
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
        with self._asking_for_health() as waits:
            status, answer = exchange()
        cpu_s = self._cpu_s() - cpu_before
        memory_mib = (self._memory("VmHWM") - before) / _MIB
        return Cost(status, answer, cpu_s, memory_mib, max(cpu for cpu, _ in waits), max(wait for _, wait in waits))

    def _exchange(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)) as connection:
            connection.request("POST", path, body, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()

    @contextmanager
    def _asking_for_health(self) -> Iterator[list[tuple[float, float]]]:
        """CPU seconds of the service and seconds during each `/health` until the block ends; one at least."""
        waits: list[tuple[float, float]] = []
        over = threading.Event()

        def ask() -> None:
            while not over.is_set() or not waits:
                began, cpu_before = time.monotonic(), self._cpu_s()
                with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=HEALTH_S)) as connection:
                    connection.request("GET", "/health")
                    connection.getresponse().read()
                seconds = time.monotonic() - began
                # What it did beside waiting for a core.
                waits.append((min(self._cpu_s() - cpu_before, seconds), seconds))
                over.wait(_BETWEEN_S)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield waits
        finally:
            over.set()
            asking.join()

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def _memory(self, which: str) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))
