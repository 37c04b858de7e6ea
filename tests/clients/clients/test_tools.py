"""What the tool server's client adds to a call."""

import httpx
import pytest

from trackway.clients import CallPolicy, ToolsClient
from trackway.wire.tools import OneShotRequest

pytestmark = pytest.mark.anyio


async def test_a_one_shot_that_is_retried_goes_to_the_replica_that_knows_its_key() -> None:
    seen: list[tuple[str, str]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.headers["x-session-id"], request.headers["idempotency-key"]))
        if len(seen) == 1:
            raise httpx.ReadError("the answer was lost")
        return httpx.Response(200, json={"text": "7", "instance_reward": 0.0})

    http = httpx.AsyncClient(transport=httpx.MockTransport(handler))
    client = ToolsClient("http://tools", http, CallPolicy(attempts=3, backoff_s=0.001, max_backoff_s=0.002))
    for _ in range(2):
        assert (await client.one_shot("calculator", OneShotRequest(arguments={"expression": "3+4"}))).text == "7"
    assert seen[0] == seen[1]
    assert len({session for session, _ in seen}) == len({key for _, key in seen}) == 2  # and others go elsewhere
