"""What a call costs its caller: our client, through Ray Serve's proxy and straight to the replicas."""

import asyncio
import time

from trackway.clients import CallPolicy, ToolsClient, run
from trackway.wire.tools import ExecuteRequest

CALLS, IN_FLIGHT = 1500, 32


def caller_cpu(url: str) -> str:
    """A line with the microseconds of CPU of a call, both ways."""
    proxy, direct = (
        run(_spent(ToolsClient(url, policy=CallPolicy(max_in_flight=IN_FLIGHT), direct=way))) for way in (False, True)
    )
    return (
        f"the caller's CPU, our client, {IN_FLIGHT} calls at once: proxy {proxy:.0f} us, direct {direct:.0f} us a call"
    )


async def _spent(client: ToolsClient) -> float:
    made = [await client.create("echo", f"session {number}") for number in range(IN_FLIGHT)]
    request = ExecuteRequest(arguments={"text": "hello"}, tool_call_id="call_1")

    async def line(number: int) -> None:
        for _ in range(CALLS // IN_FLIGHT):
            await client.execute(made[number].instance_id, request, f"session {number}")

    started = time.process_time()
    await asyncio.gather(*map(line, range(IN_FLIGHT)))
    return (time.process_time() - started) / CALLS * 1e6
