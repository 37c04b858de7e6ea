"""Environments of other projects: one episode for one trajectory, over a connection of its own.

OpenEnv (github.com/huggingface/OpenEnv) has reset, step and state over `/ws`. An environment with one kind of action is
one tool, whose arguments are the action. One whose actions are MCP calls has MCP's tools. The connection is the
episode: the server closes its environment when this process goes away.

NeMo-Gym's resources servers (github.com/NVIDIA-NeMo/Gym) have `/seed_session`, a route for each tool, and `/verify`.
The row's `env_kwargs` are a row of NeMo-Gym, whose tools are offered. It sends the same requests as `simple_agent`. The
session is a cookie, so a call that fails cannot be repeated on another connection.
"""

import asyncio
import contextlib
import json
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import quote

import aiohttp
from pydantic import JsonValue, TypeAdapter, ValidationError

from trackway.agent.settings import EnvironmentSettings
from trackway.agent.toolbox import CallFailed
from trackway.clients import Deadline
from trackway.system.waits import Backoff
from trackway.tracing import inject
from trackway.wire.agent import EnvFailure, EnvMessage, EnvObservation, EnvSchema, EnvTool, GymReward, Sample
from trackway.wire.chat import FunctionSchema, Message, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Reward, Turn

_BACKOFF = Backoff(first_s=0.1, longest_s=2.0)
_MESSAGE_CHARS = 1_000


@dataclass(frozen=True)
class Step:
    """The answer to one tool call."""

    text: str
    reward: float = 0.0
    done: bool = False


class Environment(ABC):
    """One episode. Methods raise TrackwayError, which ends the trajectory, or CallFailed, which the model reads."""

    def __init__(self, name: str, settings: EnvironmentSettings, sample: Sample, episode_id: str) -> None:
        self.name = name
        self.settings = settings
        self.sample = sample
        self.episode_id = episode_id
        """The trajectory's id."""
        self.tools: list[ToolSchema] = []
        """Tools that the model may call, once the episode has begun."""
        self.done = False
        """True if a step has ended the episode."""
        self._http: aiohttp.ClientSession | None = None

    @abstractmethod
    async def begin(self) -> str:
        """Begin the episode. Returns what the model reads first, if anything. UNAVAILABLE is tried again."""

    @abstractmethod
    async def step(self, tool: str, arguments: dict[str, JsonValue]) -> Step:
        """The answer to one call."""

    async def score(self, turns: Sequence[Turn]) -> Reward:
        """The reward of the episode: the sum over its steps, each at the turn that made it."""
        by_turn = [math.fsum(call.reward for call in turn.calls) for turn in turns]
        return Reward(score=math.fsum(by_turn), turn_scores=by_turn)

    async def state(self) -> dict[str, JsonValue]:
        """Facts about the episode from the environment, for its trace."""
        return {}

    async def open(self, deadline: Deadline) -> str:
        """`begin`, again while the environment is full or cannot be reached, for at most `open_timeout_s`."""
        failures = 0
        while True:
            try:
                with self.within(deadline, "to begin an episode"):
                    async with asyncio.timeout(deadline.remaining):
                        return await self.begin()
            except TrackwayError as error:
                failures += 1
                pause_s = _BACKOFF.pause_s(failures)
                if not error.retryable or pause_s >= deadline.remaining:
                    raise
                await self.close()
                await asyncio.sleep(pause_s)

    async def answer(self, tool: str, arguments: dict[str, JsonValue], deadline: Deadline) -> Step:
        """Run `step` within its deadline. A missed deadline ends the episode, since the late answer would otherwise be
        read as the answer to the next call."""
        if self.done:
            return Step("The episode has ended; this call was not run.", done=True)
        with self.within(deadline, f"to answer {tool}"):
            async with asyncio.timeout(deadline.remaining):
                step = await self.step(tool, arguments)
        self.done = step.done
        return step

    async def close(self) -> None:
        """End the episode and its connection; to be called again when it was cancelled."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    @property
    def http(self) -> aiohttp.ClientSession:
        """The episode's connections, with its cookies, its trace and the configured headers."""
        if self._http is None:
            headers = {name: value.get_secret_value() for name, value in self.settings.headers.items()}
            inject(headers)
            self._http = aiohttp.ClientSession(
                headers=headers,
                cookie_jar=aiohttp.CookieJar(unsafe=True),  # also for a host that is an IP address
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._http

    async def body(self, answer: aiohttp.ClientResponse) -> bytes:
        """The body of an answer. UNAVAILABLE when it is too long."""
        body = b""
        async for part in answer.content.iter_any():
            body += part
            if len(body) > self.settings.max_reply_bytes:
                raise self.failed(f"at most {self.settings.max_reply_bytes} bytes (max_reply_bytes)", "more")
        return body

    @contextlib.contextmanager
    def within(self, deadline: Deadline, what: str) -> Iterator[None]:
        """Turns errors of the connection, a wrong answer and a passed deadline into UNAVAILABLE."""
        allowed_s = deadline.remaining
        try:
            yield
        except (aiohttp.ClientError, OSError, ValidationError) as error:
            got = "none" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            raise self.failed(f"an answer within {allowed_s:.0f} s {what}", got) from error

    def failed(self, expected: str, got: str) -> TrackwayError:
        """An error of the environment or of the connection to it."""
        message = f"{self.place}: expected {expected}, got {got[:_MESSAGE_CHARS]}"
        return TrackwayError(ErrorCode.UNAVAILABLE, f"{message}; see the environment's log")

    @property
    def place(self) -> str:
        """Its name and address, for messages."""
        return f"environment {self.name!r} at {self.settings.url}"


_HEARTBEAT_S = 20.0
"""Seconds between pings, so that a connection whose other side is gone ends."""
_CLOSE_S = 2.0
_TOOLS = TypeAdapter(list[EnvTool])
_OF_THE_CALL = {"VALIDATION_ERROR": ErrorCode.INVALID_REQUEST, "EXECUTION_ERROR": ErrorCode.TOOL_FAILED}
"""Errors after which the episode goes on. The others end it."""


class _Refused(Exception):
    def __init__(self, failure: EnvFailure) -> None:
        super().__init__(f"{failure.code}: {failure.message}")
        self.failure = failure


class OpenEnv(Environment):
    """An episode of an OpenEnv environment."""

    _socket: aiohttp.ClientWebSocketResponse | None = None
    _calls_mcp = False

    async def begin(self) -> str:
        """Connect and `reset` with the row's `env_kwargs`. INVALID_REQUEST when the environment refuses these."""
        url = self.settings.url.rstrip("/")
        async with self.http.get(f"{url}/schema", raise_for_status=True) as answer:
            action = EnvSchema.model_validate_json(await self.body(answer)).action
        self._socket = await self.http.ws_connect(
            f"{url}/ws".replace("http", "ws", 1),
            heartbeat=_HEARTBEAT_S,
            max_msg_size=self.settings.max_reply_bytes,
            timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),  # pyright: ignore[reportCallIssue]  a class of attrs
        )
        try:
            reply = await self._ask("reset", {"episode_id": self.episode_id, **self.sample.env_kwargs})
        except _Refused as refused:
            if refused.failure.code in _OF_THE_CALL:
                message = f"{self.place}: expected it to reset with the row's env_kwargs, got {refused}"
                raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from refused
            raise self.failed("it to reset", str(refused)) from refused
        self._calls_mcp = {"tool_name", "arguments"} <= _properties(action).keys()
        self.tools = await self._mcp_tools() if self._calls_mcp else [_action_tool(self.name, action)]
        return self._text(EnvObservation.model_validate(reply).observation)

    async def step(self, tool: str, arguments: dict[str, JsonValue]) -> Step:
        """One action. CallFailed when the environment refuses it, or fails at it."""
        action = {"type": "call_tool", "tool_name": tool, "arguments": arguments} if self._calls_mcp else arguments
        try:
            reply = EnvObservation.model_validate(await self._ask("step", action))
        except _Refused as refused:
            code = _OF_THE_CALL.get(refused.failure.code)
            if code is None:
                raise self.failed("it to step", str(refused)) from refused
            raise CallFailed(TrackwayError(code, str(refused))) from refused
        seen = reply.observation
        return Step(_mcp_text(seen) if self._calls_mcp else self._text(seen), reply.reward or 0.0, reply.done)

    async def state(self) -> dict[str, JsonValue]:
        """The environment's state."""
        try:
            return await self._ask("state")
        except _Refused as refused:
            raise self.failed("its state", str(refused)) from refused

    async def close(self) -> None:
        """Tell the environment, and disconnect."""
        try:
            if self._socket is not None:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with asyncio.timeout(_CLOSE_S):
                        await self._socket.send_json({"type": "close"})
                        await self._socket.close()
                self._socket = None
        finally:
            await super().close()

    async def _mcp_tools(self) -> list[ToolSchema]:
        try:
            reply = await self._ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        except _Refused as refused:
            raise self.failed("its tools", str(refused)) from refused
        result = reply.get("result")
        tools = _TOOLS.validate_python(result.get("tools") if isinstance(result, dict) else None)
        return [
            ToolSchema(
                function=FunctionSchema(
                    name=tool.name, description=tool.description or "", parameters=tool.input_schema
                )
            )
            for tool in tools
        ]

    async def _ask(self, kind: str, data: dict[str, JsonValue] | None = None) -> dict[str, JsonValue]:
        """The data of the answer. _Refused for an error, UNAVAILABLE when the connection ends."""
        if self._socket is None:
            raise self.failed(f"an answer to {kind}", "no connection")
        message: dict[str, JsonValue] = {"type": kind} if data is None else {"type": kind, "data": data}
        with contextlib.suppress(ConnectionError):  # a server that is full says so, and closes before it has read
            await self._socket.send_str(json.dumps(message))
        received = await self._socket.receive()
        if received.type is not aiohttp.WSMsgType.TEXT:
            ended = self._socket.exception() or f"the end of the connection (code {self._socket.close_code})"
            raise self.failed(f"an answer to {kind} of at most {self.settings.max_reply_bytes} bytes", str(ended))
        reply = EnvMessage.model_validate_json(received.data)
        if reply.type == "error":
            raise _Refused(EnvFailure.model_validate(reply.data))
        return reply.data

    def _text(self, observation: dict[str, JsonValue]) -> str:
        """Text for the model: the configured field, the only text, or all fields as JSON."""
        field = self.settings.observation_field
        shown: dict[str, JsonValue] = {
            name: value for name, value in observation.items() if name != "metadata" and value is not None
        }
        if field is not None:
            return _plain(shown.get(field, ""))
        return _plain(next(iter(shown.values())) if len(shown) == 1 else shown) if shown else ""


def _action_tool(name: str, action: dict[str, JsonValue]) -> ToolSchema:
    properties: JsonValue = {key: value for key, value in _properties(action).items() if key != "metadata"}
    parameters = {key: value for key, value in action.items() if key not in {"title", "description"}}
    function = FunctionSchema(
        name=re.sub("[^A-Za-z0-9_-]", "_", name),
        description=str(action.get("description", "")),
        parameters={**parameters, "properties": properties},
    )
    return ToolSchema(function=function)


def _properties(action: dict[str, JsonValue]) -> dict[str, JsonValue]:
    properties = action.get("properties")
    return properties if isinstance(properties, dict) else {}


def _mcp_text(observation: dict[str, JsonValue]) -> str:
    """The result of an MCP call, or its error."""
    error, result = observation.get("error"), observation.get("result")
    if isinstance(error, dict):
        return f"Error: {error.get('message', error)}"
    if not isinstance(result, dict):
        return _plain(result)
    if result.get("data") is not None:
        return _plain(result["data"])
    content = result.get("content")
    parts = (
        [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        if isinstance(content, list)
        else []
    )
    return "\n".join(map(_plain, parts)) or _plain(result)


def _plain(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


Json = dict[str, JsonValue]

_OF_A_PROXY = {HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
"""Statuses that do not come from the server's own code."""


class NemoGym(Environment):
    """A session of a resources server."""

    async def begin(self) -> str:
        """Seed the session with the row. INVALID_REQUEST when the server refuses it."""
        params = params_of(self.sample)
        await self._taken("seed_session", {**self.sample.env_kwargs, "responses_create_params": params})
        self.tools = tools_of(params)
        return ""

    async def step(self, tool: str, arguments: Json) -> Step:
        """The body of the answer, whatever its status, as NeMo-Gym's agents show it."""
        return Step((await self._post(tool, arguments))[1])

    async def score(self, turns: Sequence[Turn]) -> Reward:
        """The reward of `/verify`."""
        params = params_of(self.sample)
        response = response_of(self.episode_id, params, turns)
        body: Json = {**self.sample.env_kwargs, "responses_create_params": params, "response": response}
        verified = GymReward.model_validate_json(await self._taken("verify", body))
        return Reward(score=verified.reward, components=verified.reward_components)

    async def _taken(self, route: str, body: Json) -> str:
        status, text = await self._post(route, body)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise self.failed(f"200 from /{route}", f"{status}: {text}")
        if status != HTTPStatus.OK:
            message = f"{self.place}: expected /{route} to take the row's env_kwargs, got {status}: {text}"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        return text

    async def _post(self, route: str, body: Json) -> tuple[int, str]:
        """Status and text of the answer."""
        url = f"{self.settings.url.rstrip('/')}/{quote(route, safe='')}"
        async with self.http.post(url, json=body, allow_redirects=False) as answer:
            text = (await self.body(answer)).decode(errors="replace")
            if answer.status in _OF_A_PROXY:
                raise self.failed(f"an answer from /{route}", f"{answer.status}: {text}")
            return answer.status, text


def params_of(sample: Sample) -> Json:
    """`responses_create_params` of the row. The prompt is the input where the row gives none."""
    params = sample.env_kwargs.get("responses_create_params")
    prompt: JsonValue = [{"role": message.role, "content": message.content} for message in sample.prompt]
    return {"input": prompt, "tools": [], **(params if isinstance(params, dict) else {})}


def tools_of(params: Json) -> list[ToolSchema]:
    """The functions among a row's tools, in the format of chats."""
    tools = params.get("tools")
    functions = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return [
        ToolSchema(
            function=FunctionSchema.model_validate(
                {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
            )
        )
        for tool in functions
        if tool.get("type") == "function"
    ]


def response_of(episode_id: str, params: Json, turns: Sequence[Turn]) -> Json:
    """Turns of the model, as one response in the format of OpenAI's Responses."""
    output: list[JsonValue] = [
        item
        for turn in turns
        for place, message in enumerate(turn.messages)
        for item in _items(f"{turn.index}_{place}", message)
    ]
    return {
        "id": f"resp_{episode_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": "policy",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": params["tools"],
    }


def _items(place: str, message: Message) -> list[Json]:
    if message.role == "tool":
        observation: Json = {
            "type": "function_call_output",
            "id": f"fco_{place}",
            "call_id": message.tool_call_id or place,
            "output": message.content,
            "status": "completed",
        }
        return [observation]
    part: Json = {"type": "output_text", "text": message.content, "annotations": []}
    said: Json = {
        "type": "message",
        "id": f"msg_{place}",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    calls: list[Json] = [
        {
            "type": "function_call",
            "id": f"fc_{call.id}",
            "call_id": call.id,
            "name": call.function.name,
            "arguments": call.function.arguments,
            "status": "completed",
        }
        for call in message.tool_calls or []
    ]
    return [*([said] if message.content or not calls else []), *calls]
