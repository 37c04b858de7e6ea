"""The replicas of a service, with Ray Serve or alone."""

from trackway.clients.base import ServiceClient
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import Health, Ready, ReplicaInfo, ReplicaList
from trackway.wire.rollout import WeightsReply


async def replicas_of(client: ServiceClient) -> ReplicaList:
    """Every replica of the client's service. Raises TrackwayError when it does not answer."""
    try:
        return await client.call("GET", "/replicas", reply=ReplicaList)
    except TrackwayError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
    health = await client.call("GET", "/health", reply=Health)  # a service alone, without Ray Serve
    try:
        ready = await client.call("GET", "/ready", reply=Ready)
    except TrackwayError as error:
        ready = Ready(ready=False, reason=error.message)
    held = health.service == "rollout" and ready.ready
    weights = await client.call("GET", "/weights", reply=WeightsReply) if held else None
    return ReplicaList(replicas=[ReplicaInfo(health=health, ready=ready, weights=weights)])
