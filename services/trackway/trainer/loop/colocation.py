"""Rollout engines on the learner's GPUs: they sleep while it trains and wake up before the next rollouts.

    sleep -> the learner is built, publish -> weights wake and its first ones load -> KV cache wakes
    rollouts are in -> sleep -> update, publish -> weights wake and the new ones load -> KV cache wakes -> next rollouts

Going to sleep aborts requests in flight. The run has already collected its rollouts, so none of them are its own.
Where rollouts run ahead of the learner, its own are still in flight: these keep their tokens, and go on after the
wake-up under the new weights (verl's `colocate_async`).

A replica cannot start asleep: if one starts while the learner trains, it takes its share of the GPU. There are as many
replicas as shared GPUs, so this happens only when a replica replaces a dead one. If it finds no memory, Serve restarts
it until it does. Otherwise it sleeps from the next step on. If the learner runs out of memory, its process is restarted
from the last checkpoint.
"""

import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from trackway.clients import CallPolicy, Deadline, RolloutClient
from trackway.learner.gpu_memory import gib
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SleepReplies

logger = logging.getLogger("trackway.trainer")

_CHECK_S = 60.0
_CLOSE_S = 60.0
_ATTEMPTS = 20
_KEY = "actor_rollout_ref.rollout.free_cache_engine"


@dataclass(frozen=True)
class Sharing:
    """How engines give their GPU memory to the learner, if they do."""

    wanted: bool | None = None
    """None: when every engine supports it."""
    staged: bool = True
    """Wakes the weights first, and the KV cache once the new weights are loaded."""
    timeout_s: float = 600.0
    """Deadline for each call to sleep or wake up."""
    runs_ahead: bool = False
    """True if rollouts of later steps are in flight when the learner computes."""


class Engines:
    """The replicas of a rollout service whose engines can sleep. Methods raise TrackwayError."""

    def __init__(self, client: RolloutClient, sharing: Sharing) -> None:
        self._client, self._sharing = client, sharing
        self._awake = True

    async def sleep(self) -> None:
        """Return when every engine has released its GPU memory."""
        self._awake = False
        mode = "retract" if self._sharing.runs_ahead else "abort"
        await self._call("go to sleep", self._client.sleep(mode, self._deadline()))

    async def wake_up(self, version: int) -> None:
        """Return when every engine is awake with the weights `version`. Engines that are awake only load them."""
        deadline = self._deadline()
        if self._sharing.staged:
            await self._call("wake up", self._client.wake_up(["weights"], version, deadline))
            await self._call("wake up", self._client.wake_up(["kv_cache"], deadline=deadline))
        else:
            await self._call("wake up", self._client.wake_up((), version, deadline))
        self._awake = True

    async def close(self) -> None:
        """Wake up all engines that sleep. A failure is only logged."""
        if self._awake:
            return
        try:
            await self._client.wake_up(deadline=Deadline.after(_CLOSE_S))
            self._awake = True
        except TrackwayError as error:
            logger.warning("rollout engines stay asleep until the next run, or POST /replicas/wake_up: %s", error)

    def _deadline(self) -> Deadline:
        return Deadline.after(self._sharing.timeout_s)

    async def _call(self, what: str, call: Awaitable[SleepReplies]) -> None:
        try:
            await call
        except TrackwayError as error:
            message = f"expected every rollout engine to {what} within {self._sharing.timeout_s:.0f} s, got: {error}"
            raise TrackwayError(error.code, f"{message}; see `trackway status`, then resume the run") from error


async def open_engines(sharing: Sharing, url: str | None) -> Engines | None:
    """The engines of the rollout service, or None when they keep their memory.

    Raises:
        TrackwayError: INVALID_REQUEST when they must sleep and cannot; UNAVAILABLE when the service does not answer.
    """
    if sharing.wanted is False or (url is None and not sharing.wanted):
        return None
    if url is None:
        raise _cannot("no URL of the rollout service")
    policy = CallPolicy(read_s=sharing.timeout_s, total_s=sharing.timeout_s, attempts=_ATTEMPTS)
    client = RolloutClient(url, policy=policy)
    try:
        replicas = (await client.sleeping(Deadline.after(_CHECK_S))).replicas
    except TrackwayError as error:
        if error.code is not ErrorCode.INVALID_REQUEST:  # a server without that route
            raise
        replicas = []
    always_awake = [replica.replica for replica in replicas if not replica.can_sleep]
    if replicas and not always_awake:
        return Engines(client, sharing)
    if sharing.wanted:
        raise _cannot(f"{', '.join(always_awake)} that cannot" if replicas else f"none at {url}")
    return None


def require_room(taken: Sequence[int], free: Sequence[int]) -> None:
    """Raise TrackwayError unless each GPU has the memory that engines take as they wake up, in bytes.

    An engine that finds too little may end, and would not wake up at a later try either.
    """
    short = [index for index, (wanted, left) in enumerate(zip(taken, free, strict=False)) if left < wanted]
    if not short:
        return
    index = short[0]
    message = (
        f"expected {gib(taken[index])} free on the GPU of rank {index} for the engines that wake up, got "
        f"{gib(free[index])}; set actor.fsdp_config.param_offload and optimizer_offload and "
        "ref.fsdp_config.param_offload, or lower rollout.gpu_memory_utilization, then resume the run"
    )
    raise TrackwayError(ErrorCode.INVALID_REQUEST, message)


def _cannot(got: str) -> TrackwayError:
    message = f"{_KEY}=true: expected rollout replicas that can sleep, got {got}"
    remedy = (
        "set enable_sleep: true on the rollout service, or leave the key out, as for vLLM on a CPU, which ignores sleep"
    )
    return TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; {remedy}")
