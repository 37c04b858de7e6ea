"""A server that the rollout services of several runs share, each with its own weight store and adapters.

A name on the server begins with a digest of the store, so that `/v1/models` shows how many runs use it. Nobody loads
whole weights, pauses the server or releases its memory. Its weights keep the version `default`, which every answer
confirms.
"""

import hashlib
import uuid

from trackway.rollout.engines.remote.http import EngineHttp
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError

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
