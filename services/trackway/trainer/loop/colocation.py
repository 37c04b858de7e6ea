"""Rollout engines on the learner's GPUs: asleep while it trains, awake again before anything is generated.

    rollouts are in -> sleep -> update, publish -> weights wake and the new ones load -> KV cache wakes -> next rollouts

Everybody in flight at that time is cut: the run has its rollouts, so it is nobody of its own. A replica that is started
meanwhile is awake, cannot start asleep, and takes its share of a GPU from the learner. Nothing waits for that: the
replicas of shared GPUs are as many as the GPUs, so it can only be one that replaces a dead one, which either finds no
room and is started again by Serve until there is, or sleeps from the next step on. A learner that runs out of memory by
it dies, and is started again from its last checkpoint.
"""

import asyncio
import gc
import logging
from collections.abc import Awaitable
from dataclasses import dataclass

import torch

from trackway.clients import CallPolicy, Deadline, RolloutClient
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SleepReplies

logger = logging.getLogger("trackway.trainer")

_ASK_S = 60.0
_GOODBYE_S = 60.0
_ATTEMPTS = 20
_KEY = "actor_rollout_ref.rollout.free_cache_engine"


@dataclass(frozen=True)
class Sharing:
    """Whether engines leave their GPUs to the learner, and how."""

    wanted: bool | None = None
    """None: if they can."""
    staged: bool = True
    """Weights wake first, and the KV cache once the new ones are loaded."""
    timeout_s: float = 600.0
    """Longest sleep or wake-up."""


class Engines:
    """Every replica of a rollout service that can sleep. Methods raise TrackwayError."""

    def __init__(self, client: RolloutClient, sharing: Sharing) -> None:
        self._client, self._sharing = client, sharing
        self._awake = True

    async def sleep(self) -> None:
        """Return when every engine has given its memory back."""
        self._awake = False
        await self._told("go to sleep", self._client.sleep("abort", self._deadline()))

    async def wake_up(self, version: int) -> None:
        """Return when every engine has its memory again and the weights of this version; awake ones only load."""
        deadline = self._deadline()
        await asyncio.to_thread(_give_back_cached_memory)
        if self._sharing.staged:
            await self._told("wake up", self._client.wake_up(["weights"], version, deadline))
            await self._told("wake up", self._client.wake_up(["kv_cache"], deadline=deadline))
        else:
            await self._told("wake up", self._client.wake_up((), version, deadline))
        self._awake = True

    async def close(self) -> None:
        """Leave none asleep, as far as that can be done: a failure is only logged."""
        if self._awake:
            return
        await asyncio.to_thread(_give_back_cached_memory)
        try:
            await self._client.wake_up(deadline=Deadline.after(_GOODBYE_S))
            self._awake = True
        except TrackwayError as error:
            logger.warning("rollout engines stay asleep until the next run, or POST /replicas/wake_up: %s", error)

    def _deadline(self) -> Deadline:
        return Deadline.after(self._sharing.timeout_s)

    async def _told(self, what: str, telling: Awaitable[SleepReplies]) -> None:
        try:
            await telling
        except TrackwayError as error:
            message = f"expected every rollout engine to {what} within {self._sharing.timeout_s:.0f} s, got: {error}"
            raise TrackwayError(error.code, f"{message}; see `trackway status`, then resume the run") from error


async def open_engines(sharing: Sharing, url: str | None) -> Engines | None:
    """The engines of the rollout service, or None when they keep their memory.

    Raises:
        TrackwayError: INVALID_REQUEST when they must sleep and cannot; `unavailable` when they cannot be asked.
    """
    if sharing.wanted is False or (url is None and not sharing.wanted):
        return None
    if url is None:
        raise _cannot("no URL of the rollout service")
    policy = CallPolicy(read_s=sharing.timeout_s, total_s=sharing.timeout_s, attempts=_ATTEMPTS)
    client = RolloutClient(url, policy=policy)
    try:
        replicas = (await client.sleeping(Deadline.after(_ASK_S))).replicas
    except TrackwayError as error:
        if error.code is not ErrorCode.INVALID_REQUEST:  # which is a server that knows no such route
            raise
        replicas = []
    awake_for_ever = [one.replica for one in replicas if not one.can_sleep]
    if replicas and not awake_for_ever:
        return Engines(client, sharing)
    if sharing.wanted:
        raise _cannot(f"{', '.join(awake_for_ever)} that cannot" if replicas else f"none at {url}")
    return None


def _cannot(got: str) -> TrackwayError:
    message = f"{_KEY}=true: expected rollout replicas that can sleep, got {got}"
    remedy = "deploy engine vllm or sglang with enable_sleep: true, or leave the key out"
    return TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; {remedy}")


def _give_back_cached_memory() -> None:
    """What the learner freed stays in PyTorch's cache, where no engine can have it."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
