"""The wait for spans before services stop: a replica takes those it has not encoded along, and leaves those on disk."""

import asyncio
import time

from trackway.clients import CallPolicy, ServiceClient, run
from trackway.deploy.deployment.progress import Report
from trackway.deploy.deployment.record import Deployment
from trackway.wire.errors import TrackwayError
from trackway.wire.health import ReplicaList

STALLED_S = 30.0
"""The wait ends after so long without a delivered span. A request to a backend may take as long."""
LONGEST_S = 120.0
_POLL_S = 0.3
_ASK = CallPolicy.question(5.0)


def deliver_spans(deployment: Deployment, report: Report) -> int:
    """Wait until every replica's spans are delivered, while any are. The number that are left."""
    began = since = time.monotonic()
    fewest = left = spans_waiting(deployment)
    if not left:
        return 0
    while left and time.monotonic() < min(since + STALLED_S, began + LONGEST_S):
        report("spans", f"sending {left}")
        time.sleep(_POLL_S)
        left = spans_waiting(deployment)
        if left < fewest:
            fewest, since = left, time.monotonic()
    report("spans", "left on disk" if left else "sent")
    return left


def spans_waiting(deployment: Deployment) -> int:
    """The spans that the replicas still have to deliver. A service that does not answer counts as 0."""

    async def ask() -> int:
        return sum(await asyncio.gather(*(_waiting(deployment.url(name)) for name in deployment.services)))

    return run(ask())


async def _waiting(url: str) -> int:
    try:
        listed = await ServiceClient(url, policy=_ASK).call("GET", "/replicas", reply=ReplicaList)
    except TrackwayError:
        return 0
    return sum(replica.health.spans.waiting for replica in listed.replicas)
