"""Requests drawn at random, valid and hostile, against all five services as they call each other.

`make test-chaos` sends 20,000, by default those of seed 0: `make test-chaos SEED=7 CASES=1000`. No answer is a 5xx,
except to the caller's own deadline. A request costs at most 2 s of CPU, 100 MB of memory beyond its body and 64 kB of
an answer to a mistake, and `/health` answers within 2 s meanwhile.
"""

import json
import os
import random
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPException, HTTPResponse
from typing import Any

import psutil
import pytest

from tests.attacks.costs import Cost, Meter
from tests.attacks.fuzz_requests import FuzzRequest, Operation, operations, request
from tests.attacks.service_process import ServiceProcess, service_process
from trackway.deploy.bundled import TINY_MODEL

SEED = int(os.environ.get("SEED") or 0)
CASES = int(os.environ.get("CASES") or 20_000)
SERVICES = ("rollout", "tools", "reward", "agent", "trainer")
CPU_S, MEMORY_MIB, ANSWER_BYTES, HEALTH_S = 2.0, 100.0, 65_536, 2.0
GROWTH_MIB = 100.0
"""Most memory that a service holds after all requests beyond what it held after its first ones."""
WARM_UP = 20
ANSWER_S = 30.0
"""Longest wait for an answer to begin."""
STREAM_S = 2.0
"""Seconds for which the body of an answer is read: a stream may be endless."""
MODEL = str(TINY_MODEL)

MCP = [
    {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}},
    },
    {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}},
    {
        "jsonrpc": "2.0",
        "id": 3,
        "method": "tools/call",
        "params": {"name": "calculator", "arguments": {"expression": "1"}},
    },
]
FURTHER: dict[str, dict[str, Any]] = {"tools": {"/mcp": MCP}}
"""Bodies of routes that the OpenAPI document does not name."""
SAMPLE = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"ground_truth": "2"},
}
OPENING: dict[str, tuple[str, dict[str, Any]]] = {
    "rollout": ("/v1/completions", {"model": "policy", "prompt": "1+1?", "max_tokens": 1}),  # loads the tokenizer
    "agent": ("/sessions", {"sample": SAMPLE}),
    "tools": ("/instances", {"tool": "calc_gsm8k_reward", "create_kwargs": {"ground_truth": "2"}}),
}
"""Requests that open what the ids in paths name, or what the service loads once."""
REOPENED = 20
"""Cases after which it is opened again."""
IDS = ("session_id", "api_key", "instance_id", "run")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServiceProcess]]:
    """The services, each of which calls the others."""
    folder = tmp_path_factory.mktemp("fuzzed")
    own = {"rollout": {"model_path": MODEL, "device": "cpu"}, "agent": {"model_path": MODEL}}
    own["trainer"] = {"outputs_dir": str(folder / "outputs"), "weights_url": str(folder / "weights")}
    own["tools"] = {"mcp_session_idle_s": "5"}
    urls = {"direct": "false"}
    with ExitStack() as stack:
        started: dict[str, ServiceProcess] = {}
        for service in SERVICES:
            started[service] = stack.enter_context(service_process(service, folder, {**urls, **own.get(service, {})}))
            urls[f"{service}_url"] = f"http://127.0.0.1:{started[service].port}"
        yield started


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("service", SERVICES)
def test_random_requests_cost_little_and_none_fails(services: dict[str, ServiceProcess], service: str) -> None:
    assert Fuzz(service, services[service]).run(CASES // len(SERVICES)) == []


class Fuzz:
    """Sends requests to a service, one after the other, and notes what is wrong with the answers."""

    def __init__(self, service: str, process: ServiceProcess) -> None:
        self._service, self._process = service, process
        self._meter = Meter(process)
        document = process.http.get("/openapi.json").json()
        self._operations: list[Operation] = operations(document, FURTHER.get(service, {}))
        self._known: dict[str, deque[str]] = {name: deque(maxlen=8) for name in IDS}
        self._recent: deque[str] = deque(maxlen=3)

    def run(self, cases: int) -> list[str]:
        """The faults that so many requests found, a text each."""
        faults: list[str] = []
        statuses: Counter[int] = Counter()
        most: dict[str, tuple[float, str]] = {}
        began, before = time.monotonic(), 0
        for number in range(cases):
            if number == min(WARM_UP, cases - 1):
                before = self._held()
            if number % REOPENED == 0:
                self._open()
            case = request(self._operations, self._known, random.Random(f"{SEED} {self._service} {number}"))
            cost = self._meter.measured(lambda case=case: self._exchange(case))
            statuses[cost.status] += 1
            for name, value in figures(cost, case).items():
                most[name] = max(most.get(name, (0.0, "")), (value, f"{number} {case}"[:200]))
            self._learn(cost.status, cost.answer)
            if wrong := faults_of(cost, case):
                faults.append(f"{number}: {', '.join(wrong)}; {case}; {cost.answer[:300]!r}; before: {[*self._recent]}")
                print(faults[-1], flush=True)
            self._recent.append(f"{number} {case}"[:200])
            if self._process.process.poll() is not None:
                return [*faults, f"the service ended: {self._process.log.read_text()[-2000:]}"]
            self._undo(case)
        growth = (self._held() - before) / 2**20
        if growth > GROWTH_MIB:
            faults.append(f"expected at most {GROWTH_MIB} MiB of growth, got {growth:.0f}")
        seconds = time.monotonic() - began
        print(
            f"{self._service}, seed {SEED}: {cases} cases in {seconds:.0f} s, growth {growth:.0f} MiB, {statuses}",
            flush=True,
        )
        for name, (value, case) in most.items():
            print(f"  most {name}: {value:.2f}, by {case}")
        return faults

    def _exchange(self, case: FuzzRequest) -> tuple[int, bytes]:
        """Status and body; 0 when the connection was closed without an answer."""
        with closing(socket.create_connection(("127.0.0.1", self._process.port), timeout=ANSWER_S)) as connection:
            try:
                for piece in case.pieces:
                    connection.sendall(piece)
                if not case.whole:
                    connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # answered before all was sent
            try:
                answer = HTTPResponse(connection)
                answer.begin()
            except (HTTPException, ConnectionError):
                return 0, b""
            connection.settimeout(STREAM_S)
            body, end = bytearray(), time.monotonic() + STREAM_S
            try:
                while time.monotonic() < end and (part := answer.read1(65_536)):
                    body += part
            except (HTTPException, ConnectionError, TimeoutError):
                pass
            return answer.status, bytes(body)

    def _open(self) -> None:
        if self._service in OPENING:
            path, body = OPENING[self._service]
            opened = self._process.http.post(path, json=body)
            self._learn(opened.status_code, opened.content)

    def _learn(self, status: int, body: bytes) -> None:
        """Keep the ids of an answer for later requests."""
        if not 200 <= status < 300:
            return
        try:
            answer = json.loads(body)
        except ValueError:
            return
        for name in IDS:
            if isinstance(answer, dict) and isinstance(value := answer.get(name), str) and value.isascii():
                self._known[name].append(value)

    def _undo(self, case: FuzzRequest) -> None:
        """Let a rollout service that was paused or put to sleep go on."""
        if self._service == "rollout" and any(word in case.pieces[0][:200] for word in (b"/pause", b"/sleep")):
            self._process.http.post("/wake_up")
            self._process.http.post("/resume")

    def _held(self) -> int:
        return psutil.Process(self._process.process.pid).memory_info().rss


def figures(cost: Cost, case: FuzzRequest) -> dict[str, float]:
    """The costs that have a bound."""
    return {
        "CPU s": cost.cpu_s,
        "MiB": cost.memory_mib - case.body_bytes / 2**20,
        "bytes of an error": float(len(cost.answer)) if cost.status >= 400 else 0.0,
        "CPU s of /health": cost.health_cpu_s,
        "s of /health": cost.health_s,
    }


def faults_of(cost: Cost, case: FuzzRequest) -> list[str]:
    """The bounds that a request broke."""
    found = figures(cost, case)
    faults: list[str] = []
    if cost.status >= 500 and not is_deadline(cost):
        faults.append(f"status {cost.status}")
    if cost.status == 0 and case.whole:
        faults.append("no answer")
    bounds = {"CPU s": CPU_S, "MiB": MEMORY_MIB, "bytes of an error": ANSWER_BYTES, "CPU s of /health": HEALTH_S}
    return faults + [f"{found[name]:.1f} {name}" for name, bound in bounds.items() if found[name] > bound]


def is_deadline(cost: Cost) -> bool:
    """Whether the caller's own time limit ended the request."""
    return cost.status == 504 and b"expected an answer within the caller's" in cost.answer
