"""The load of `sessions.py`, in a process of its own: agents that call a model through a gateway, turn by turn.

    python benchmarks/sessions_load.py '{"gateway": "trackway", "url": "http://127.0.0.1:80", "pid": 1, "model": "m",
        "sessions": 1000, "at_once": 1000, "turns": 8, "answer_tokens": 79}'

opens the sessions, runs them, reads what the gateway recorded of each, and prints the gateway's CPU seconds of each of
the three, and the latencies of the calls. The calls of a session have a connection of their own. Questions and tool
results differ, so that no gateway answers from a cache. Every answer, and the number of recorded tokens, is checked.
"""

import asyncio
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

SYSTEM = "You solve problems about shops. " + "Think about each step, and call the calculator for each sum. " * 8
QUESTION = "Shop {0} has 12 boxes with 24 pens in each. It sells 5 pens an hour. " * 4
RESULT = "The calculator says {0} in turn {1}. " * 3
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
ANSWER_S = 600.0
SETTLED_S, SETTLING_S = 0.5, 60.0


class Connection:
    """HTTP/1.1 over one connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, method: str, path: str, body: object = None, key: str = "") -> Any:
        """The answer's JSON; exits when its status is not 2xx."""
        async with asyncio.timeout(ANSWER_S):
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, self._port)
            reader, writer = self._streams
            sent = b"" if body is None else json.dumps(body).encode()
            head = f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-length: {len(sent)}\r\n"
            head += "content-type: application/json\r\naccept: application/json\r\nuser-agent: OpenAI/Python 3.54.0\r\n"
            head += f"authorization: Bearer {key}\r\n" if key else ""
            writer.write(head.encode() + b"\r\n" + sent)
            status, *lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            fields = dict(line.split(b": ", 1) for line in lines if line)
            answer = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        if status.split()[1][:1] != b"2":
            raise SystemExit(f"{method} {path}: {status.decode()} {answer.decode(errors='replace')[:1000]}")
        return json.loads(answer) if answer else None

    def close(self) -> None:
        """Close it until the next request: servers close what is idle for five seconds."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@dataclass
class Session:
    """One agent."""

    number: int
    connection: Connection
    path: str = ""
    """Of its chat completions."""
    key: str = ""
    id: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)


class Gateway(ABC):
    """How a session of a gateway is opened and read."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.wanted = wanted

    @abstractmethod
    async def open(self, session: Session) -> None:
        """Open it, and note where its model is."""

    @abstractmethod
    async def read(self, session: Session) -> int:
        """End it, read its tokens, remove it; the number of the model's tokens that were recorded."""


class Trackway(Gateway):
    """Sessions of the agent service."""

    async def open(self, session: Session) -> None:
        sample = {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": QUESTION.format(session.number)}],
            "reward_model": {"ground_truth": "7"},
            "extra_info": {"index": session.number},
        }
        limits = {"max_prompt_length": 8192, "max_response_length": 16384, "timeout_s": 3600.0}
        body = {"sample": sample, "limits": limits, "trace": self.wanted["traced"]}
        access = await session.connection.request("POST", "/sessions", body)
        session.id, session.key = access["session_id"], access["api_key"]
        session.path = f"{urlsplit(access['base_url']).path}/chat/completions"

    async def read(self, session: Session) -> int:
        own = f"/sessions/{session.id}"
        await session.connection.request("POST", f"{own}/reward", {"score": 1.0})
        trajectory = await session.connection.request("POST", f"{own}/end")
        await session.connection.request("DELETE", own)
        return sum(trajectory["response_mask"])


class AgentLightning(Gateway):
    """Rollouts of agent-lightning's server."""

    async def open(self, session: Session) -> None:
        session.id = f"rollout-{session.number}"
        body = [{"input": {"data_id": str(session.number)}, "rollout_id": session.id}]
        await session.connection.request("POST", "/api/rollouts", body)
        session.path = f"/proxy/rollout/{session.id}/attempt/0/mode/train/openai/v1/chat/completions"

    async def read(self, session: Session) -> int:
        own = f"/api/rollouts/{session.id}"
        reward = {"event_type": "reward", "data": {"value": 1.0}}
        await session.connection.request("POST", f"{own}/attempt/0/events", reward)
        events = await session.connection.request("GET", f"{own}/events?format=triplet")
        await session.connection.request("DELETE", own)
        return sum(len(event["data"].get("response_token_ids", [])) for event in events)


class Rllm(Gateway):
    """Sessions of rllm-model-gateway."""

    async def open(self, session: Session) -> None:
        session.id = f"session-{session.number}"
        await session.connection.request("POST", "/sessions", {"session_id": session.id})
        session.path = f"/sessions/{session.id}/v1/chat/completions"

    async def read(self, session: Session) -> int:
        traces = await session.connection.request("GET", f"/sessions/{session.id}/traces")
        await session.connection.request("DELETE", f"/sessions/{session.id}")
        return sum(len(trace["completion_token_ids"]) for trace in traces)


GATEWAYS: dict[str, type[Gateway]] = {"trackway": Trackway, "agent-lightning": AgentLightning, "rllm": Rllm}


async def converse(session: Session, model: str, turns: int, seconds: list[float]) -> None:
    """The agent: asks, and sends the answer back with the result of its tool call, `turns` times."""
    session.messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION.format(session.number)},
    ]
    for turn in range(turns):
        body = {"model": model, "messages": session.messages, "tools": [TOOL]}
        started = time.perf_counter()
        answer = await session.connection.request("POST", session.path, body, session.key)
        seconds.append(time.perf_counter() - started)
        message = answer["choices"][0]["message"]
        [call] = message["tool_calls"]
        result = RESULT.format(session.number, turn)
        session.messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]


class Cpu:
    """CPU seconds of a process and its children."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def now(self) -> float:
        family = [self._process, *self._process.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in family)

    async def settled(self) -> float:
        """The seconds once nothing more is added, as by a store that writes behind the answers."""
        end, spent = time.monotonic() + SETTLING_S, self.now()
        while time.monotonic() < end:
            await asyncio.sleep(SETTLED_S)
            before, spent = spent, self.now()
            if spent - before < 0.02 * SETTLED_S:
                break
        return spent


async def each(sessions: list[Session], at_once: int, act: Callable[[Session], Awaitable[None]]) -> None:
    """`act` on every session, so many at once."""
    waiting = iter(sessions)

    async def work() -> None:
        for session in waiting:
            await act(session)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, len(sessions))):
            group.create_task(work())


async def measure(wanted: dict[str, Any]) -> dict[str, float]:
    """One load."""
    gateway, cpu = GATEWAYS[wanted["gateway"]](wanted), Cpu(wanted["pid"])
    sessions = [Session(number, Connection(wanted["url"])) for number in range(wanted["sessions"])]
    seconds: list[float] = []
    recorded: list[int] = []

    async def open_one(session: Session) -> None:
        await gateway.open(session)
        session.connection.close()

    async def call(session: Session) -> None:
        await converse(session, wanted["model"], wanted["turns"], seconds)
        session.connection.close()

    async def read(session: Session) -> None:
        recorded.append(await gateway.read(session))
        session.connection.close()

    marks = [await cpu.settled()]
    await each(sessions, 32, open_one)
    marks.append(await cpu.settled())
    started = time.perf_counter()
    await each(sessions, wanted["at_once"], call)
    wall_s = time.perf_counter() - started
    marks.append(await cpu.settled())
    await each(sessions, 32, read)
    marks.append(await cpu.settled())
    expected = wanted["turns"] * wanted["answer_tokens"]
    if wrong := [count for count in recorded if count != expected]:
        raise SystemExit(f"expected {expected} recorded tokens of each session, got {wrong[:3]} of {len(wrong)}")
    seconds.sort()
    calls = len(seconds)
    return {
        "call_ms": 1000 * (marks[2] - marks[1]) / calls,
        "session_ms": 1000 * (marks[1] - marks[0] + marks[3] - marks[2]) / len(sessions),
        "wall_ms": 1000 * wall_s / calls,
        "p50_ms": 1000 * seconds[calls // 2],
        "p99_ms": 1000 * seconds[int(0.99 * calls)],
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(measure(json.loads(sys.argv[1])))))
