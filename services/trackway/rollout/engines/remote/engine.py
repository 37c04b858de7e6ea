"""What engines behind HTTP share: `RemoteEngine` is an `Engine` but for what one server says in its own words.

A backend is a subclass with

    capabilities                       what the server can do
    _command(port), _environment()     of the side process, its interpreter first (engine_args are appended here)
    _healthy()                         whether the server answers
    _prepare()                         once it does: make the base weights version 0, run
    _tokens(call)                      send `call.token_ids`, yield `Tokens` as they come; may set `call.reused`
    _cut(calls)                        abort these requests (by `call.rid`)
    _freeze(), _thaw()                 stop stepping and keep the KV cache; step again. Both idempotent
    _swap(folder, name)                while frozen: load the weights, call them `name`, let no new request reuse old KV
    _score(token_ids)                  logprobs at temperature 1 of tokens 1..n-1, computed by the weights held now
    _give_back(part), _take_again(part)   memory, with SLEEP
    loses_weights_asleep               whether weights that slept must be loaded anew
    answers_frozen                     whether a request that is cut while frozen is answered at once

and `self.http`, `self.settings`, `self.facts`, `self.max_len`, `self.dtype`, `self.name` (of the weights that serve)
and `self.held` (of those that the server holds now, on trial or not) to do it with.

How weights change, sleep and wake is in `remote_weights.py`, who is let in is in `remote_calls.py`.
"""

import asyncio
import contextlib
import math
import tempfile
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

from trackway.rollout.engines.admission import asleep, paused
from trackway.rollout.engines.generation_builder import Collector
from trackway.rollout.engines.protocol import EngineStats, Generation, PauseMode, Piece
from trackway.rollout.engines.remote.http import EngineHttp
from trackway.rollout.engines.remote.model_info import ModelFacts
from trackway.rollout.engines.remote.pieces import runs, until_stop
from trackway.rollout.engines.remote.requests import Call, Calls, Tokens
from trackway.rollout.engines.remote.server_process import SideProcess, free_port
from trackway.rollout.engines.remote.weights import RemoteWeights
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams

_DEFAULT_MAX_LEN = 4096
_CUT_GRACE_S = 5.0
_HEALTH_S = 0.25
_GOODBYE_S = 2.0


class RemoteEngine(RemoteWeights):
    """An `Engine` that asks a server over HTTP; a process of its own, or one that runs already."""

    answers_frozen = False

    def __init__(self, settings: RolloutSettings) -> None:
        self.facts = ModelFacts.read(settings.model_path)
        self.max_len = settings.max_model_len or min(self.facts.max_positions, _DEFAULT_MAX_LEN)
        super().__init__(settings, Calls(settings, self.facts, self.max_len))
        if settings.engine_url is None and settings.engine_python is None:
            message = f"expected engine_python or engine_url for engine={settings.engine}, got neither; set one of them"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        self._process: SideProcess | None = None
        self._client: EngineHttp | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def http(self) -> EngineHttp:
        """Calls to the server; UNAVAILABLE before the start and after the stop."""
        if self._client is None:
            message = "expected a started engine, got one that is starting or has stopped; ask again"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message)
        return self._client

    async def start(self) -> None:
        """Start the server, or find the one that runs already, and make it serve the base weights."""
        if self.settings.engine_url is not None:
            self._client = EngineHttp(self.settings.engine_url)
            await self._find()
        else:
            await self._launch()
        await self._prepare()

    async def stop(self) -> None:
        """Cut what is in flight and end the server if it is ours."""
        self._paused = True
        self.calls.end_all(0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self.calls.drained()
                await asyncio.gather(*self._tasks)
        if self._process is not None:
            await self._process.stop()
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> Generation:
        """Continue a prompt; see `Engine.generate`."""
        made = Collector()
        async with aclosing(self._call(token_ids, params, request_id, streamed=False)) as pieces:
            async for piece in pieces:
                made.add(piece)
        return made.generation()

    def stream(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> AsyncGenerator[Piece]:
        """As `generate`, in pieces; see `Engine.stream`."""
        return self._call(token_ids, params, request_id, streamed=True)

    async def _call(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, *, streamed: bool
    ) -> AsyncGenerator[Piece]:
        self._usable()
        call = self.calls.admit(token_ids, params, request_id, streamed=streamed)
        ended = False
        try:
            with contextlib.suppress(TimeoutError):  # it was cut, and the server said no more
                await call.within(self._admits.wait())
                self._usable()
                call.sent = True
                async with aclosing(self._tokens(call)) as tokens, aclosing(self._pieces(call, tokens)) as pieces:
                    async for piece in pieces:
                        ended = piece.finish_reason is not None
                        yield piece
            if not ended:
                yield Piece([], [], self.version, "abort")
        finally:
            self.calls.close(call)
            if call.sent and not ended:
                self._let_go(call)

    async def abort(self, request_id: str) -> int:
        """Cut the requests of this id; they return what they have."""
        calls = self.calls.of(request_id)
        await self._cut_short(calls)
        return len(calls)

    async def pause(self, mode: PauseMode) -> None:
        """Refuse new requests and finish, cut or freeze those in flight."""
        self._paused = True
        async with self._control:
            self._kept = mode == "keep"
            await self._set_frozen(self._kept)
        if mode == "abort":
            await self._cut_short(self.calls.of(None))
        if mode != "keep":
            await self.calls.drained()

    async def resume(self) -> None:
        """Take requests again and go on with the frozen ones."""
        async with self._control:
            if self._asleep:
                raise asleep(self._asleep)
            self._kept = False
            await self._set_frozen(False)
            self._paused = False

    def stuck_for(self) -> float:
        """Seconds since a token came although requests wait for some; for ever when the server is lost."""
        if self._broken is not None or (self._process is not None and not self._process.alive):
            return math.inf
        if self._frozen or self._control.locked():
            return 0.0
        return self.calls.still_for(self._runs_since)

    def stats(self) -> EngineStats:
        """Counted here: a server does not tell its steps."""
        calls = self.calls
        running = calls.running()
        return EngineStats(running, len(calls) - running, 0, calls.generated, calls.prefilled, calls.reused)

    async def _pieces(self, call: Call, tokens: AsyncGenerator[Tokens]) -> AsyncGenerator[Piece]:
        """What the server says, as far as it may be shown: no token of weights that failed, none after a stop."""
        version = self.version
        while True:
            try:
                got = await call.within(anext(tokens))
            except StopAsyncIteration:
                message = "expected a finish_reason, got the end of the answer; is this the server it should be?"
                raise TrackwayError(ErrorCode.ENGINE_FAILED, message) from None
            call.moved = time.monotonic()
            for name, start, end in runs(got.names):
                if self._trial is not None and name == self._trial.new.name:
                    await self._trial.over.wait()
                if call.only not in (None, name):
                    yield Piece([], [], version, "abort")
                    return
                version = self._version_of(name)
                piece, stopped = until_stop(call, got, start, end, version)
                self.calls.generated += len(piece.token_ids)
                yield piece
                if stopped:
                    if got.finish_reason is None:  # the server goes on
                        self._let_go(call)
                    yield Piece([], [], version, "stop")
                    return
            if got.finish_reason is not None:
                yield Piece([], [], version, got.finish_reason)
                return

    def _version_of(self, name: str) -> int:
        version = self._names.version(name)
        if version is None:
            message = (
                f"expected weights that were loaded here, got {name!r}; let nobody else update or restart the server"
            )
            self._broken = message
            raise TrackwayError(ErrorCode.UNAVAILABLE, message)
        return version

    async def _cut_short(self, calls: Sequence[Call]) -> None:
        """Cut these: the server says what it has at once, or they end without its word when it is frozen or slow."""
        for call in calls:
            answers = call.sent and (self.answers_frozen or not self._frozen)
            call.end_within(_CUT_GRACE_S if answers else 0.0)
        sent = [call for call in calls if call.sent]
        if sent:
            await self._cut(sent)

    def _usable(self) -> None:
        if self._paused:
            raise paused()
        if self._broken is not None:
            raise TrackwayError(ErrorCode.UNAVAILABLE, self._broken)
        if self._process is not None:
            self._process.check()

    async def _launch(self) -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        log = Path(tempfile.gettempdir()) / f"trackway-{self.settings.engine}-{self.settings.replica}.log"
        command = [*self._command(port), *self.settings.engine_args]
        self._process = SideProcess(command, self._environment(), self.settings.engine_log or log, url)
        self._client = EngineHttp(url, self._process.settle)
        await self._process.start(self._healthy, self.settings.engine_start_s)

    async def _find(self) -> None:
        try:
            async with asyncio.timeout(self.settings.engine_start_s):
                while not await self._answers():
                    await asyncio.sleep(_HEALTH_S)
        except TimeoutError:
            message = (
                f"expected a server at {self.settings.engine_url}, got no healthy one; start it, or mend engine_url"
            )
            raise TrackwayError(ErrorCode.UNAVAILABLE, message) from None

    async def _answers(self) -> bool:
        try:
            return await self._healthy()
        except TrackwayError:
            return False

    def _let_go(self, call: Call) -> None:
        """Tell the server in the background that nobody wants this one any more; a failure is nobody's."""

        async def tell() -> None:
            with contextlib.suppress(TrackwayError):
                await self._cut([call])

        task = asyncio.create_task(tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @abstractmethod
    def _command(self, port: int) -> list[str]: ...

    @abstractmethod
    def _environment(self) -> dict[str, str]: ...

    @abstractmethod
    async def _healthy(self) -> bool: ...

    @abstractmethod
    async def _prepare(self) -> None: ...

    @abstractmethod
    def _tokens(self, call: Call) -> AsyncGenerator[Tokens]: ...
