"""The policies of a replica: the service's default one, and others by name, which are loaded when they are asked for.

A policy has an engine, a watcher and a line of versions of its own, so that its weights, proofs and prefix cache are
apart from the others'. The default one follows the root of the weight store and is always loaded; `base` is the model
without anyone's weights. Idle ones leave, least recently used first, when another needs the place.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trackway.clients.weights import WeightStore
from trackway.rollout.engines import lacking_memory
from trackway.rollout.engines.protocol import Piece
from trackway.rollout.service import RolloutService
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import (
    BASE_POLICY,
    Architecture,
    EngineLoad,
    GenerateReply,
    GenerateRequest,
    ModelCard,
    ModelList,
    PolicyInfo,
    PolicyLimits,
    PolicyList,
)
from trackway.wire.service import Ready
from trackway.wire.weights import policy_url

_SHOWN = 20


CALLER_S = 30.0
"""Time for which a caller of `load` counts."""
MAX_CALLERS = 1024


@dataclass(eq=False)
class _Loaded:
    """A policy in memory. It stays there while it has users."""

    service: RolloutService
    start: asyncio.Task[None]
    users: int = 0
    used: float = field(default_factory=time.monotonic)


class Policies(Collector):
    """Generates with the policy that a request names. Every method raises TrackwayError.

    `opened` creates the service of a policy's settings, not started.
    """

    def __init__(
        self,
        default: RolloutService,
        settings: RolloutSettings,
        store: WeightStore | None,
        opened: Callable[[RolloutSettings], RolloutService],
    ) -> None:
        self.default, self._settings, self._store, self._opened = default, settings, store, opened
        self._loaded: dict[str, _Loaded] = {}
        self._places = asyncio.Lock()
        """Held to choose what leaves and what is loaded."""
        self._evictions = 0
        self._callers: dict[str, float] = {}
        """When each caller of `load` asked last."""

    async def start(self) -> None:
        """Load the default policy."""
        await self.default.start()

    async def stop(self) -> None:
        """Unload all policies."""
        for name in [*self._loaded]:
            await self._unload(name)
        await self.default.stop()

    async def ready(self) -> Ready:
        """Return the state of the default policy, or that an engine of another one needs a restart."""
        for loaded in self._loaded.values():
            if (state := await loaded.service.ready()).broken:
                return state
        return await self.default.ready()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Continue a prompt with the policy that the request names, or the default one."""
        async with self.serving(request.model) as service:
            return await service.generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """Stream `generate`; closing the iterator aborts the generation."""
        async with self.serving(request.model) as service, aclosing(service.stream(request)) as pieces:
            async for piece in pieces:
                yield piece

    @asynccontextmanager
    async def serving(self, name: str | None) -> AsyncIterator[RolloutService]:
        """The service of a policy, loaded and kept until the end of the context.

        Raises MODEL_NOT_FOUND for a policy without weights, UNAVAILABLE when it has no place or takes too long to load.
        """
        if (other := self._other(name)) is None:
            yield self.default
            return
        loaded = await self._place(other)
        loaded.users += 1
        try:
            await self._until_started(other, loaded)
            yield loaded.service
        finally:
            loaded.users -= 1
            loaded.used = time.monotonic()

    def held(self, name: str | None) -> RolloutService:
        """The service of a policy that is loaded. Raises MODEL_NOT_FOUND for any other."""
        if (other := self._other(name)) is None:
            return self.default
        if (loaded := self._loaded.get(other)) is None:
            names = ", ".join([self._settings.model_name, *self._loaded])
            raise _unknown(f"expected a policy that this replica has loaded ({names}), got {other!r}; use it first")
        return loaded.service

    async def card(self, name: str | None) -> ModelCard:
        """The model card of a policy, loaded or not. Raises MODEL_NOT_FOUND."""
        default = self.default.served(None)
        if (other := self._other(name)) is None:
            return default
        if other not in self._loaded:
            await self._require_weights(other)
        return default.model_copy(update={"id": other})

    async def models(self) -> ModelList:
        """The cards of the default policy and of the published ones."""
        default = self.default.served(None)
        names = await self._published()
        return ModelList(data=[default, *(default.model_copy(update={"id": name}) for name in names)])

    async def policies(self) -> PolicyList:
        """Every policy that can be asked for, and what this replica has loaded of it."""
        return PolicyList(policies=[self._info(name) for name in await self._names()], limits=self._limits())

    async def load(self, caller: str) -> EngineLoad:
        """The load of the default policy's engine, and the number of named callers that have asked lately."""
        load, now = await self.default.load(), time.monotonic()
        self._callers = {name: asked for name, asked in self._callers.items() if now - asked < CALLER_S}
        if caller and (caller in self._callers or len(self._callers) < MAX_CALLERS):
            self._callers[caller] = now
        return load.model_copy(update={"callers": max(1, len(self._callers))})

    def collect(self) -> Iterator[Metric]:
        """Version and requests of each loaded policy except the default one; at most `max_policies` labels."""
        version = GaugeMetricFamily("trackway_policy_weight_version", "Version by loaded policy", labels=["policy"])
        running = GaugeMetricFamily("trackway_policy_requests", "Requests by loaded policy", labels=["policy"])
        for name, loaded in [*self._loaded.items()]:
            if loaded.start.done():
                version.add_metric([name], loaded.service.weights().version)
            running.add_metric([name], loaded.users)
        yield from (version, running)
        yield CounterMetricFamily("trackway_policy_evictions", "Policies unloaded for others", self._evictions)

    def _other(self, name: str | None) -> str | None:
        """The name, or None for the default policy."""
        return None if name == self._settings.model_name else name

    async def _place(self, name: str) -> _Loaded:
        """The policy's place, where it is loaded or being loaded."""
        if (loaded := self._loaded.get(name)) is not None and not loaded.service.is_dropped:
            return loaded
        async with self._places:
            if (loaded := self._loaded.get(name)) is not None:
                if loaded.users or not loaded.service.is_dropped:
                    return loaded
                await self._unload(name)
            await self._require_weights(name)
            await self._make_room(name)
            service = self._opened(self._settings_of(name))
            loaded = _Loaded(service, asyncio.create_task(self._start(name, service), name=f"policy {name}"))
            self._loaded[name] = loaded
            return loaded

    async def _start(self, name: str, service: RolloutService) -> None:
        try:
            await service.start()
        except BaseException:
            self._loaded.pop(name, None)
            await service.stop()
            raise

    async def _until_started(self, name: str, loaded: _Loaded) -> None:
        within_s = self._settings.engine_start_s
        try:
            await asyncio.wait_for(asyncio.shield(loaded.start), within_s)
        except TimeoutError:
            message = f"expected policy {name!r} to be loaded within {within_s:.0f} s, got none; retry later"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message) from None

    async def _make_room(self, name: str) -> None:
        """Unload idle policies until another has a place. Raises UNAVAILABLE when the others are in use."""
        if (limits := self._limits()).max_policies == 1:
            message = f"expected a service for several policies, got {limits.bound} for {name!r}; {limits.remedy}"
            raise _unknown(message)
        while lacking := self._lacking(name):
            idle = {held: loaded for held, loaded in self._loaded.items() if not loaded.users}
            if not idle:
                in_use = ", ".join([self._settings.model_name, *self._loaded])
                message = f"expected a place for policy {name!r}, got {in_use} in use and {lacking}; retry later"
                raise TrackwayError(ErrorCode.UNAVAILABLE, message)
            await self._unload(min(idle, key=lambda held: idle[held].used))
            self._evictions += 1

    def _limits(self) -> PolicyLimits:
        own, model = self._settings, self._settings.model_path / "config.json"
        most, bound, remedy = own.max_policies, f"max_policies={own.max_policies}", "raise max_policies"
        if own.engine in ("vllm", "sglang") and not own.engine_shared:
            most, bound = 1, f"engine={own.engine} without engine_shared"
            remedy = "set engine_shared=true and max_lora_rank, for runs that publish adapters"
        return PolicyLimits(
            max_policies=most,
            bound=bound,
            remedy=remedy,
            max_adapters=own.max_loras if own.engine_shared else None,
            max_lora_rank=own.max_lora_rank or None,
            architecture=Architecture.parsed(model.read_text()) if model.is_file() else None,
        )

    def _lacking(self, name: str) -> str:
        """Return why another policy cannot be loaded: no place, or too little memory. Empty if it can."""
        limits = self._limits()
        if len(self._loaded) + 1 >= limits.max_policies:
            return limits.bound
        adapters = sum(held != BASE_POLICY for held in self._loaded) + (self.default.weights().version > 0)
        if name != BASE_POLICY and limits.max_adapters is not None and adapters >= limits.max_adapters:
            return f"max_loras={limits.max_adapters}"
        return lacking_memory(self._settings)

    async def _unload(self, name: str) -> None:
        loaded = self._loaded.pop(name)
        loaded.start.cancel()
        await asyncio.wait([loaded.start])
        if not loaded.start.cancelled() and loaded.start.exception() is None:
            await loaded.service.stop()

    async def _require_weights(self, name: str) -> None:
        if name == BASE_POLICY:
            return
        if name not in await self._published():
            names = ", ".join((await self._names())[:_SHOWN])
            raise _unknown(f"model: expected a policy that is served here ({names}), got {name!r}; see /policies")

    async def _names(self) -> list[str]:
        return [self._settings.model_name, BASE_POLICY, *await self._published()]

    async def _published(self) -> list[str]:
        return [] if self._store is None else await asyncio.to_thread(self._store.policies)

    def _info(self, name: str) -> PolicyInfo:
        if self._other(name) is None:
            return PolicyInfo(name=name, is_default=True, loaded=True, version=self.default.weights().version)
        loaded = self._loaded.get(name)
        if loaded is None or not loaded.start.done():
            return PolicyInfo(name=name)
        version = loaded.service.weights().version
        return PolicyInfo(name=name, loaded=True, version=version, requests=loaded.users)

    def _settings_of(self, name: str) -> RolloutSettings:
        own, url, cache = self._settings, self._settings.weights_url, self._settings.weights_cache
        changes = {
            "model_name": name,
            "weights_url": None if name == BASE_POLICY or url is None else policy_url(url, name),
            "weights_cache": None if cache is None else cache / name,
        }
        return own.model_copy(update=changes)


def _unknown(message: str) -> TrackwayError:
    return TrackwayError(ErrorCode.MODEL_NOT_FOUND, message, param="model")
