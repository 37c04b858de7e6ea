"""Calls to every replica of a service at once; a request through Ray Serve's proxy reaches only one of them.

`/replicas/metrics`: the `/metrics` of every replica of a service, as one text for Prometheus.

A scrape through Ray Serve's proxy reaches a different replica each time. Here the label `replica` names the replica of
each sample.
"""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple, Protocol, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayActorError, RayTaskError

from trackway.clients import Deadline
from trackway.serving import ServiceRouter, needs_admin
from trackway.serving.auth import presented
from trackway.wire.errors import ErrorBody, ErrorCode, TrackwayError
from trackway.wire.rollout import EngineLoad, EngineLoads, MemoryPart, SleepMode, SleepReplies, SleepReply
from trackway.wire.service import REQUEST_TIMEOUT, ReplicaInfo, ReplicaList, ServiceName

T = TypeVar("T")

ASK_REPLICAS_S = 10.0
"""Longest wait for every replica's answer."""
STEER_REPLICAS_S = 300.0
"""Longest wait until every replica sleeps or is awake, for a request without a deadline."""
_MARGIN_S = 1.0
"""Margin between the deadlines of the replicas, of the wait for them, and of the caller, so that the caller still gets
the names of late replicas."""
_ASK_AGAIN_S = 1.0


class Refusal(BaseModel):
    """The error of a replica that refused a request."""

    replica: str
    error: ErrorBody


class ReplicaPass(NamedTuple):
    """The pass that one replica accepts instead of a token, or None when it has no direct port."""

    replica: str
    opens: str | None


class Broadcast(Protocol):
    """Calls a method of every running replica. An answer may be the exception that the call raised."""

    def __call__(self, method: str, *args: object, within_s: float) -> Awaitable[Sequence[object]]: ...


def to_replicas_of(service: ServiceName) -> Broadcast:
    """A broadcast from within a replica to all replicas of its service. It raises TimeoutError."""

    async def broadcast(method: str, *args: object, within_s: float) -> Sequence[object]:
        handle = serve.get_deployment_handle(service, app_name=serve.get_replica_context().app_name)
        answers = handle.broadcast(method, *args)
        return await answers.results_async(timeout_s=max(0.0, within_s), return_exceptions=True)

    return broadcast


def to_each_replica_of(service: ServiceName) -> Broadcast:
    """Do `to_replicas_of`, with a TimeoutError as the answer of a late replica."""

    async def broadcast(method: str, *args: object, within_s: float) -> Sequence[object]:
        end = time.monotonic() + within_s
        handle = serve.get_deployment_handle(service, app_name=serve.get_replica_context().app_name)
        asked = handle.broadcast(method, *args)
        async with asyncio.timeout(within_s):
            # Ray's public method, `results_async`, returns all answers or none.
            calls = await asked._fetch_replica_results_async()
        answers = (asyncio.wait_for(call.get_async(), max(0.0, end - time.monotonic())) for call in calls)
        return await asyncio.gather(*answers, return_exceptions=True)

    return broadcast


def replicas_route(service: ServiceName, broadcast: Broadcast) -> ServiceRouter:
    """The route `/replicas`, which describes every replica."""
    router = ServiceRouter(tags=["service"])

    @router.get("/replicas", response_model=ReplicaList)
    async def replicas(request: Request) -> ReplicaList:
        """Every running replica of this service."""
        token = presented(request)
        described = await ask(ReplicaInfo, "describe")
        passes = [] if token is None else await ask(ReplicaPass, "admit", token)
        return ReplicaList(
            replicas=sorted(described, key=lambda replica: replica.health.replica),
            passes={replica_pass.replica: replica_pass.opens for replica_pass in passes if replica_pass.opens},
        )

    async def ask(reply: type[T], method: str, *args: bytes) -> list[T]:
        try:
            answers = await broadcast(method, *args, within_s=ASK_REPLICAS_S)
        except TimeoutError as error:
            message = f"not every {service} replica answered within {ASK_REPLICAS_S:.0f} s; ask again"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error
        for answer in answers:
            if isinstance(answer, BaseException):
                message = f"a {service} replica did not answer ({_how_lost(answer)}); ask again"
                raise TrackwayError(ErrorCode.UNAVAILABLE, message) from answer
        return [answer for answer in answers if isinstance(answer, reply)]

    return router


def load_route(broadcast: Broadcast) -> ServiceRouter:
    """The route `/replicas/load` of the rollout service."""
    router = ServiceRouter(tags=["rollout"])

    @router.get("/replicas/load")
    async def load(caller: Annotated[str, Query(max_length=64)] = "") -> EngineLoads:
        """`/load` of every replica. Those that do not answer are left out."""
        try:
            answers = await broadcast("load", caller, within_s=ASK_REPLICAS_S)
        except TimeoutError as error:
            message = f"not every rollout replica answered within {ASK_REPLICAS_S:.0f} s; ask again"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error
        return EngineLoads(replicas=[answer for answer in answers if isinstance(answer, EngineLoad)])

    return router


def sleep_routes(broadcast: Broadcast) -> ServiceRouter:
    """The rollout service's sleep and wake-up for all replicas at once. The error names the replicas that failed."""
    router = ServiceRouter(prefix="/replicas", tags=["control"])
    operator = [Depends(needs_admin)]

    @router.get("/is_sleeping")
    async def is_sleeping(request: Request) -> SleepReplies:
        """Return which replicas can release memory, and what they have released."""
        return await _steer(broadcast, request, "GET", "/is_sleeping")

    @router.post("/sleep", dependencies=operator)
    async def sleep(
        request: Request, mode: SleepMode = "wait", tags: Annotated[list[MemoryPart] | None, Query()] = None
    ) -> SleepReplies:
        """`/sleep` of every replica."""
        return await _steer(broadcast, request, "POST", f"/sleep?{request.url.query}")

    @router.post("/wake_up", dependencies=operator)
    async def wake_up(
        request: Request,
        tags: Annotated[list[MemoryPart] | None, Query()] = None,
        min_weight_version: Annotated[int, Query(ge=0)] = 0,
    ) -> SleepReplies:
        """`/wake_up` of every replica."""
        return await _steer(broadcast, request, "POST", f"/wake_up?{request.url.query}")

    return router


async def _steer(broadcast: Broadcast, request: Request, method: str, path: str) -> SleepReplies:
    deadline = Deadline.after(float(request.headers.get(REQUEST_TIMEOUT, STEER_REPLICAS_S)))
    allowed_s = deadline.remaining
    try:
        answers = await broadcast("steer", method, path, allowed_s - 2 * _MARGIN_S, within_s=allowed_s - _MARGIN_S)
    except TimeoutError as error:
        message = f"{method} {path}: not every rollout replica answered in time; `trackway status` says which are ready"
        raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error
    left = deadline.remaining
    # A retry with so little time left would time out and hide the reason.
    return agreed(f"{method} {path}", answers, _ASK_AGAIN_S if left > 4 * _MARGIN_S else left)


def agreed(what: str, answers: Sequence[object], ask_again_s: float = _ASK_AGAIN_S) -> SleepReplies:
    """The answers of all replicas. Raises the gravest refusal, with every replica's reason."""
    refusals = [refusal for answer in answers if (refusal := _refusal(answer))]
    if not refusals:
        replies = [answer for answer in answers if isinstance(answer, SleepReply)]
        return SleepReplies(replicas=sorted(replies, key=lambda reply: reply.replica))
    reasons = "; ".join(sorted(f"{refusal.replica}: {refusal.error.message}" for refusal in refusals))
    message = f"{what} failed on {len(refusals)} of {len(answers)} rollout replicas: {reasons}"
    gravest = min(refusals, key=lambda refusal: refusal.error.retryable).error
    again = {"retry_after_s": max(0.0, ask_again_s)} if gravest.retryable else {}
    raise TrackwayError(gravest.code, message, **again)


def _refusal(answer: object) -> Refusal | None:
    """The refusal in an answer, or None. A lost replica counts as a refusal with Ray's error."""
    if not isinstance(answer, BaseException):
        return answer if isinstance(answer, Refusal) else None
    error = ErrorBody(code=ErrorCode.UNAVAILABLE, message=_how_lost(answer), retryable=True)
    return Refusal(replica="lost", error=error)


def _how_lost(answer: BaseException) -> str:
    """The reason why a replica was lost or late. Any other exception of a replica is a bug and is raised."""
    error = answer.cause if isinstance(answer, RayTaskError) else answer
    if not isinstance(error, RayActorError | TimeoutError | asyncio.CancelledError):
        raise error from (None if error is answer else answer)  # `answer` has the replica's traceback
    return f"{type(error).__name__}: {error}"


ASK_METRICS_S = 5.0
"""Longest wait for a replica's answer; half of Prometheus' scrape timeout."""
TEXT = "text/plain; version=0.0.4"


class ReplicaMetrics(NamedTuple):
    """The metrics of one replica."""

    replica: str
    text: str


def metrics_route(ask_each: Broadcast) -> APIRouter:
    """The route for Prometheus. A replica that does not answer in time is omitted and counted."""
    router = APIRouter(tags=["service"])

    @router.get("/replicas/metrics", response_class=PlainTextResponse)
    async def replicas_metrics() -> PlainTextResponse:
        """Metrics of every replica in Prometheus' text format, with the label `replica`."""
        try:
            answers = await ask_each("exposition", within_s=ASK_METRICS_S)
        except TimeoutError as error:
            message = f"Ray Serve did not name this service's replicas within {ASK_METRICS_S:.0f} s; ask again"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error
        shown = {metrics.replica: metrics.text for metrics in answers if isinstance(metrics, ReplicaMetrics)}
        return PlainTextResponse(merged(shown, asked=len(answers)), media_type=TEXT)

    return router


def merged(texts: Mapping[str, str], asked: int) -> str:
    """The texts of all replicas (name -> text) merged into one, with each metric described once."""
    families: dict[str, Metric] = {}
    for replica, text in sorted(texts.items()):
        for metric in text_string_to_metric_families(text):
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                family.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
    counts = [
        GaugeMetricFamily("trackway_replicas_asked", "Running replicas of this service", asked),
        GaugeMetricFamily("trackway_replicas_answered", "Replicas whose metrics are included", len(texts)),
    ]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families([*families.values(), *counts]))
    return generate_latest(registry).decode()


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._families
