"""Protocol of an agent loop with an environment: one episode for one trajectory, over a connection of its own."""

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp
from pydantic import JsonValue, ValidationError

from trackway.agent.settings import EnvironmentSettings
from trackway.clients import Deadline
from trackway.system.backoff import Backoff
from trackway.tracing import inject
from trackway.wire.agent import Sample
from trackway.wire.chat import ToolSchema
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
        """`step` within its deadline, which also ends the episode: a late answer would be taken for that of the next
        call."""
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
