"""The shared part of engines behind HTTP: `RemoteEngine` is an `Engine` except for the backend's own calls.

A backend is a subclass with the abstract methods of `RemoteEngine` and its `capabilities`. Pauses, weight updates,
sleep and wake-up, and admission are in `control.py`.

A server that the rollout services of several runs share, each with its own weight store and adapters.

A name on the server begins with a digest of the store, so that `/v1/models` shows how many runs use it. Nobody loads
whole weights, pauses the server or releases its memory. Its weights keep the version `default`, which every answer
confirms.
"""

import asyncio
import contextlib
import hashlib
import math
import shutil
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, nullcontext
from http import HTTPStatus
from pathlib import Path

import torch

from trackway.rollout.engines.admission import ModelFacts, paused
from trackway.rollout.engines.protocol import (
    Capability,
    Collector,
    EngineStats,
    FinishReason,
    Generation,
    MemoryPart,
    PauseMode,
    Piece,
    Swapping,
)
from trackway.rollout.engines.remote.control import Call, Calls, ServerControl, TokenChunk, runs, until_stop
from trackway.rollout.engines.remote.digests import Checksums, ServerDigests
from trackway.rollout.engines.remote.server import EngineHttp, Json, SideProcess
from trackway.rollout.engines.weight_folder import check_finite, is_adapter, read_adapter, tensors, write_merged
from trackway.rollout.engines.weight_proof import HeldDigests, Judgement
from trackway.rollout.settings import DEFAULT_MAX_LEN, RolloutSettings
from trackway.system import free_port
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import EngineLoad, SamplingParams
from trackway.wire.trajectory import WeightSpan, add_span
from trackway.wire.weights import WeightProof

_HEALTH_S = 0.25


def check_server(settings: RolloutSettings) -> None:
    """Raises INVALID_REQUEST for settings with neither a running server nor an interpreter to start one with."""
    if settings.engine_url is None and settings.engine_python is None:
        message = f"expected engine_python or engine_url for engine={settings.engine}, got neither; set one of them"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)


def prepared(
    settings: RolloutSettings, command: Callable[[int], Sequence[str]], environment: Callable[[Path], Mapping[str, str]]
) -> tuple[SideProcess, EngineHttp]:
    """A server process that is not started yet, and its client.

    `command` takes the server's port, and `environment` a folder for the server alone.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = Path(tempfile.gettempdir()) / f"trackway-{settings.engine}-{settings.replica}.log"
    folder = Path(tempfile.mkdtemp(prefix=f"trackway-{settings.engine}-"))
    process = SideProcess(command(port), environment(folder), settings.engine_log or log, url, folder)
    return process, EngineHttp(url, process.settle)


async def healthy(http: EngineHttp) -> bool:
    """True once the server responds. Raises TrackwayError before."""
    await http.get("/health", timeout_s=5.0)
    return True


async def found(http: EngineHttp, within_s: float) -> None:
    """Wait for a running server to respond. Raises UNAVAILABLE."""
    try:
        async with asyncio.timeout(within_s):
            while not await _answers(http):
                await asyncio.sleep(_HEALTH_S)
    except TimeoutError:
        message = f"expected a server at {http.base_url}, got no healthy one; start it, or fix engine_url"
        raise TrackwayError(ErrorCode.UNAVAILABLE, message) from None


async def _answers(http: EngineHttp) -> bool:
    try:
        return await healthy(http)
    except TrackwayError:
        return False


UNTOUCHED = "default"
"""vLLM's and SGLang's version of weights that no client has loaded."""
KEPT = 2
"""Adapters that a replica keeps there: the one that serves, and the one that is being verified. Requests that run keep
theirs."""
_PREFIX = "trackway-shared"


class SharedAdapters:
    """The adapters of one replica on a server that other runs use too."""

    def __init__(self, settings: RolloutSettings) -> None:
        store = settings.weights_url or settings.replica
        self._run = f"{_PREFIX}-{hashlib.sha256(store.encode()).hexdigest()[:8]}"
        self._replica = uuid.uuid4().hex[:8]
        self._most = settings.max_loras

    def name(self, version: str) -> str:
        """Return a name for an adapter that no other replica uses."""
        return f"{self._run}-{self._replica}-{version}"

    async def admit(self, http: EngineHttp) -> None:
        """Raises CONFLICT while as many other runs as the server has places for have adapters on it."""
        others = {name.rsplit("-", 2)[0] for name in await shared_adapters(http)} - {self._run}
        if len(others) >= self._most:
            raise TrackwayError(
                ErrorCode.CONFLICT,
                f"expected at most {self._most} runs on {http.base_url} (max_loras), got {len(others)} others; wait "
                "until one ends, or raise max_loras and the server's --max-loras (SGLang: --max-loras-per-batch)",
            )


async def shared_adapters(http: EngineHttp) -> list[str]:
    """Names of the adapters of services that share the server."""
    cards = (await http.get("/v1/models")).get("data") or []
    return [card["id"] for card in cards if str(card["id"]).startswith(f"{_PREFIX}-")]


async def require_alone(http: EngineHttp) -> None:
    """Raises CONFLICT if runs share the server: whole weights and pauses of another service would reach them."""
    if adapters := await shared_adapters(http):
        raise TrackwayError(
            ErrorCode.CONFLICT,
            f"expected {http.base_url} for this service alone, got {len(adapters)} adapters of runs that share it; "
            "give this service a server of its own, or set engine_shared=true and max_lora_rank for an adapter run",
        )


def require_untouched(http: EngineHttp, version: object) -> None:
    """Raises CONFLICT unless the server's whole weights are those that it started with."""
    if version not in (None, UNTOUCHED):
        raise TrackwayError(
            ErrorCode.CONFLICT,
            f"expected {http.base_url} with the weights that it started with, got version {version!r} of a service "
            "that does not share it; restart the server, and set engine_shared=true for every service that uses it",
        )


def whole_weights(folder: object) -> TrackwayError:
    """The error for weights that would replace the base of all runs."""
    return TrackwayError(
        ErrorCode.WEIGHTS_CORRUPT,
        f"expected an adapter for a server that runs share, got whole weights in {folder}; set "
        "actor_rollout_ref.model.lora_rank and lora.merge=false, or give the run a server of its own",
    )


_GOODBYE_S = 2.0
_CHECKSUMS_S = 60.0
_SLOWEST_CHECKSUM = 2e8
"""Bytes a second; a rank hashes 1 to 2 GB on an idle machine."""


class RemoteEngine(ABC):
    """An `Engine` over a server's HTTP API. The server is a child process, or runs already."""

    version_route: str
    """Route that names the weights."""
    unload_route: str
    """Route that unloads an adapter."""
    checksum_route: str
    """Route that digests the server's parameters."""
    loses_weights_asleep = True
    answers_frozen = False

    def __init__(self, settings: RolloutSettings) -> None:
        self.settings = settings
        self.shared = settings.engine_shared
        self.facts = ModelFacts.read(settings.model_path, settings.max_position_embeddings)
        self.max_len = self._longest(settings.max_model_len or min(self.facts.max_positions, DEFAULT_MAX_LEN))
        self.calls = Calls(settings, self.facts, self.max_len)
        self.control = ServerControl(self, self.calls, settings.model_path, self.dtype, self.max_len)
        check_server(settings)
        lacking = set() if settings.enable_sleep else {Capability.SLEEP}
        lacking |= set() if self.guides else {Capability.STRUCTURED_OUTPUTS}
        self.capabilities = frozenset(Capability) - lacking
        """The server's optional features."""
        self._process: SideProcess | None = None
        self._client: EngineHttp | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.adapters = SharedAdapters(settings)
        self.loaded: list[str] = []
        """Names of this engine's adapters on the server, the newest last."""
        self.adapter: str | None = None
        """The one that new requests get, or None for the whole weights alone."""
        self.whole_folder: Path | None = None
        """Folder of the whole weights on the server, or None if unknown."""
        self._merged: tempfile.TemporaryDirectory[str] | None = None
        """Base weights with adapters in them, for a server that takes no adapters."""
        self.server_digests: ServerDigests | None = None
        """None if the server's digests say nothing."""

    @property
    def version(self) -> int:
        """Weight version of the next token."""
        return self.control.serving.version

    @property
    def judgement(self) -> Judgement | None:
        """The verdict on the current weights, or None for the base weights."""
        return self.control.judgement

    @property
    def paused(self) -> bool:
        """Return whether new requests are refused."""
        return self.control.paused

    @property
    def asleep(self) -> frozenset[MemoryPart]:
        """Parts of the memory that are released."""
        return frozenset(self.control.asleep)

    @property
    def dtype(self) -> str:
        """The type of weights and activations. Such a server needs a GPU, where `auto` is bfloat16."""
        if self.settings.dtype != "auto":
            return self.settings.dtype
        return "float32" if self.settings.device == "cpu" else "bfloat16"

    @property
    def http(self) -> EngineHttp:
        """The HTTP client. UNAVAILABLE before the start and after the stop."""
        if self._client is None:
            message = "expected a started engine, got one that is starting or has stopped; retry later"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message)
        return self._client

    async def start(self) -> None:
        """Start the server or connect to a running one, and serve the base weights."""
        if self.settings.engine_url is not None:
            self._client = EngineHttp(self.settings.engine_url)
            await found(self._client, self.settings.engine_start_s)
            if not self.shared:
                await require_alone(self._client)
        else:
            await self._launch()
        await self._prepare()

    async def stop(self) -> None:
        """Abort requests in flight, and stop the server if this engine started it."""
        self.control.paused = True
        self.calls.end_all(0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self.calls.drained()
                await asyncio.gather(*self._tasks)
        if self._process is not None:
            await self._process.stop()
        elif self._client is not None:
            with contextlib.suppress(TimeoutError, TrackwayError):
                async with asyncio.timeout(_GOODBYE_S):
                    if self.calls.sent:  # their callers do not read on
                        await self.cut(self.calls.sent)
                    for name in [*self.loaded]:
                        await self._unload(name)
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        if self._merged is not None:
            self._merged.cleanup()

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> Generation:
        """Continue a prompt. See `Engine.generate`."""
        collector = Collector()
        async with aclosing(self._call(token_ids, params, request_id, streamed=False)) as pieces:
            async for piece in pieces:
                collector.add(piece)
        return collector.generation()

    def stream(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> AsyncGenerator[Piece]:
        """Like `generate`, in pieces. See `Engine.stream`."""
        return self._call(token_ids, params, request_id, streamed=True)

    async def _call(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, *, streamed: bool
    ) -> AsyncGenerator[Piece]:
        self._usable()
        call = self.calls.admit(token_ids, params, request_id, streamed=streamed)
        ended = False
        try:
            with contextlib.suppress(TimeoutError):  # aborted, and the server sent nothing more
                await call.within(self.control.admits.wait)
                self._usable()
                call.sent, call.held = True, self.control.held
                async with aclosing(self._tokens(call)) as tokens, aclosing(self._pieces(call, tokens)) as pieces:
                    async for piece in pieces:
                        ended = piece.finish_reason is not None
                        yield piece
            if not ended:
                yield Piece([], [], self.version, "abort")
        except TrackwayError as error:
            if params.structured_outputs is not None and error.code is ErrorCode.INVALID_REQUEST:
                raise self._unguided(error) from error
            raise
        finally:
            self.calls.close(call)
            if call.sent and not ended:
                self._let_go(call)

    async def abort(self, request_id: str) -> int:
        """Abort the requests with this id. They return their tokens so far."""
        calls = self.calls.of(request_id)
        await self.control.cut_short(calls)
        return len(calls)

    async def pause(self, mode: PauseMode) -> None:
        """Refuse new requests and finish, abort or freeze those in flight."""
        await self.control.pause(mode)

    async def resume(self) -> None:
        """Accept requests again and continue frozen ones."""
        await self.control.resume()

    async def load_weights(
        self, folder: Path, version: int, proof: WeightProof, swapping: Swapping = nullcontext
    ) -> None:
        """Load weights, all or nothing. See `Engine.load_weights`. While the KV cache sleeps, the proof is deferred."""
        if is_adapter(folder):
            folder = await asyncio.to_thread(self._checked_adapter, folder, version)
        elif self.shared:
            raise whole_weights(folder)
        await asyncio.to_thread(check_finite, folder)
        async with swapping():
            await self.control.load_weights(folder, version, proof)

    def _unguided(self, refusal: TrackwayError) -> TrackwayError:
        """The error for a guided request that the server refused, most likely for its schema."""
        message = (
            f"response_format: expected JSON schemas that {self.settings.engine} can guide by, got its refusal: "
            f"{refusal.message}; correct what it names; a server without its tokenizer guides nothing"
        )
        return TrackwayError(ErrorCode.INVALID_REQUEST, message, param="response_format")

    @property
    def guides(self) -> bool:
        """Return whether the server takes grammars. If this engine starts it, the model needs a tokenizer."""
        return self.settings.engine_url is not None or _has_tokenizer(self.settings.model_path)

    def _longest(self, wanted: int) -> int:
        """Return how much of a context length the server gives to a prompt and its response."""
        return wanted

    @property
    def takes_adapters(self) -> bool:
        """Return whether the server loads adapters by its own routes."""
        return self.settings.max_lora_rank > 0

    def untouched(self, version: object) -> None:
        """Raises CONFLICT if the server is shared and its whole weights have been replaced. Nothing is served then."""
        if not self.shared:
            return
        try:
            require_untouched(self.http, version)
        except TrackwayError as error:
            self.control.broken = error.message
            raise

    def _checked_adapter(self, folder: Path, version: int) -> Path:
        """The adapter's folder, or one of whole weights for a server that takes no adapters. Raises WEIGHTS_CORRUPT."""
        base, most = self.settings.model_path, self.settings.max_lora_rank
        rank = read_adapter(folder, base).rank
        if not self.takes_adapters:
            self._merged = self._merged or tempfile.TemporaryDirectory(prefix="trackway-merged-")
            for old in Path(self._merged.name).iterdir():
                if old != self.control.serving.folder:  # to which the server may return
                    shutil.rmtree(old)
            merged = Path(self._merged.name) / f"{version}-{uuid.uuid4().hex[:8]}"
            return write_merged(folder, base, merged, getattr(torch, self.dtype))
        if rank > most:
            message = f"expected an adapter of at most rank {most} in {folder}, got {rank}; raise max_lora_rank"
            raise TrackwayError(ErrorCode.WEIGHTS_CORRUPT, message)
        return folder

    async def sleep(self, parts: Sequence[MemoryPart]) -> None:
        """Release memory. See `Engine.sleep`."""
        await self.control.sleep(parts)

    async def wake_up(self, parts: Sequence[MemoryPart]) -> None:
        """Allocate memory. See `Engine.wake_up`."""
        await self.control.wake_up(parts)

    def stuck_for(self) -> float:
        """Seconds since the last token while requests wait for one. Infinite when the server is lost."""
        if self.control.broken is not None or (self._process is not None and not self._process.alive):
            return math.inf
        if self.control.frozen or self.control.changing:
            return 0.0
        return self.calls.still_for(self.control.runs_since)

    def stats(self) -> EngineStats:
        """Counted here, since servers do not report their steps."""
        calls = self.calls
        running = calls.running()
        return EngineStats(running, len(calls) - running, 0, calls.generated, calls.prefilled, calls.reused)

    @abstractmethod
    async def load(self) -> EngineLoad:
        """The server's requests and KV cache. Raises TrackwayError when it does not answer."""

    async def _pieces(self, call: Call, tokens: AsyncGenerator[TokenChunk]) -> AsyncGenerator[Piece]:
        """The server's tokens that may be returned: none of rejected weights, none after a stop.

        Which weights generated them is known at the end: a server's events come late and in portions.
        """
        version, count = self.control.version_of(call.held), 0
        while True:
            try:
                got = await call.within(lambda: anext(tokens))
            except StopAsyncIteration:
                message = (
                    "expected a finish_reason, got the end of the response; check that the URL is an inference server's"
                )
                raise TrackwayError(ErrorCode.ENGINE_FAILED, message) from None
            call.moved = time.monotonic()
            for name, start, end in runs(got.names):
                await self.control.accepted(name)
                if call.only not in (None, name):
                    yield self._last(call, version, "abort", got.all_names[:count])
                    return
                self.control.version_of(name)
                piece, stopped = until_stop(call, got, start, end, version)
                count += len(piece.token_ids)
                self.calls.generated += len(piece.token_ids)
                yield piece
                if stopped:
                    if got.finish_reason is None:  # the server continues generating
                        self._let_go(call)
                    yield self._last(call, version, "stop", got.all_names[:count])
                    return
            if got.finish_reason is not None:
                yield self._last(call, version, got.finish_reason, got.all_names)
                return

    def _last(self, call: Call, version: int, reason: FinishReason, names: Sequence[str]) -> Piece:
        """The last piece, with the names of all tokens if they are known. `version` can have computed the first KV."""
        spans: list[WeightSpan] = []
        for name, start, end in runs(names):
            its = self.control.version_of(name)
            add_span(spans, its, start, end, version if version != its else None)
        return Piece([], [], version, reason, weight_versions=spans, cached_tokens=call.reused)

    def _usable(self) -> None:
        if self.control.paused:
            raise paused()
        if self.control.broken is not None:
            raise TrackwayError(ErrorCode.UNAVAILABLE, self.control.broken)
        if self._process is not None:
            self._process.check()

    async def _launch(self) -> None:
        self._process, self._client = prepared(
            self.settings, lambda port: [*self._command(port), *self.settings.engine_args], self._environment
        )
        await self._process.start(lambda: healthy(self.http), self.settings.engine_start_s)

    def _let_go(self, call: Call) -> None:
        """Abort the request on the server in the background, ignoring failures."""
        self.in_background(self.cut([call]))

    async def load_adapter(self, folder: Path, name: str) -> None:
        """Load an adapter under a name of its own, and let new requests have it."""
        adapter = f"{name}-{uuid.uuid4().hex[:8]}"
        if self.shared:
            self.untouched(await self.version_there())
            await self.adapters.admit(self.http)
            adapter = self.adapters.name(name)
        await self._send_adapter({"lora_name": adapter, "lora_path": str(folder)})
        self.loaded.append(adapter)
        self.adapter = adapter

    @abstractmethod
    async def _send_adapter(self, body: Json) -> None:
        """Have the server load an adapter."""

    async def version_there(self) -> object:
        """The name of the server's weights."""
        return (await self.http.get(self.version_route)).get("weight_version")

    def unload_old_adapters(self) -> None:
        """Do so in the background. vLLM forgets the name, SGLang answers when no request runs with one."""
        for name in self.loaded[: -(KEPT if self.shared else self.settings.max_loras)]:
            self.in_background(self._unload(name))

    async def _unload(self, name: str) -> None:
        await self.http.post(self.unload_route, {"lora_name": name}, idempotent=True)
        if name in self.loaded:
            self.loaded.remove(name)

    def in_background(self, work: Coroutine[object, object, object]) -> None:
        """Do this without waiting for it, ignoring failures."""

        async def done() -> None:
            with contextlib.suppress(TrackwayError):
                await work

        task = asyncio.create_task(done())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @abstractmethod
    def _command(self, port: int) -> list[str]:
        """Command of the server process, the interpreter first. `engine_args` are appended."""

    @abstractmethod
    def _environment(self, folder: Path) -> dict[str, str]:
        """Variables of the server process, which `folder` is for."""

    @abstractmethod
    async def _prepare(self) -> None:
        """After the start: make the base weights version 0, and thaw."""

    @abstractmethod
    def _tokens(self, call: Call) -> AsyncGenerator[TokenChunk]:
        """Send `call.token_ids`. The tokens as they come. May set `call.reused`."""

    @abstractmethod
    async def freeze(self) -> None:
        """Pause and keep the KV cache. Idempotent."""

    @abstractmethod
    async def thaw(self) -> None:
        """Continue. Idempotent."""

    @abstractmethod
    async def swap(self, folder: Path, name: str) -> None:
        """While frozen: load the weights as `name`; no new request reuses old KV."""

    @abstractmethod
    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs at temperature 1 of tokens 1..n-1 under the loaded weights."""

    async def digests(self, folder: Path, before: Path) -> HeldDigests | None:
        """Compares the server's parameters with the folder's tensors. None if it has no digests."""
        if self.server_digests is None or is_adapter(folder):
            return None
        return await asyncio.to_thread(self.server_digests.compare, folder, await self.checksums(), before)

    async def base_checksums(self) -> Checksums:
        """Digests after the start. Empty unless they are wanted, and the base weights can be read here."""
        base = self.control.serving.folder
        wanted = self.settings.weight_digests and any(base.glob("*.safetensors"))
        return await self.checksums() if wanted else {}

    async def checksums(self) -> Checksums:
        """The server's digests, which it makes while it generates nothing. Empty from one without that route."""
        size = sum(tensor.end - tensor.start for tensor in tensors(self.settings.model_path).values())
        try:
            reply = await self.http.post(
                self.checksum_route,
                {"action": "checksum"},
                timeout_s=_CHECKSUMS_S + size / _SLOWEST_CHECKSUM,
                idempotent=True,
            )
        except TrackwayError as error:
            if error.detail.get("status") != HTTPStatus.NOT_FOUND:
                raise
            return {}
        return self._by_rank(reply)

    @abstractmethod
    def _by_rank(self, reply: Json) -> Checksums:
        """The digests in a reply of `checksum_route`."""

    @abstractmethod
    async def cut(self, calls: Sequence[Call]) -> None:
        """Abort these requests (by `call.rid`)."""

    @abstractmethod
    async def give_back(self, part: MemoryPart) -> None:
        """Release memory; needs SLEEP."""

    @abstractmethod
    async def take_again(self, part: MemoryPart) -> None:
        """Allocate memory; needs SLEEP."""


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))
