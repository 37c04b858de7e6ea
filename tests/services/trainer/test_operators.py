"""Starting, stopping and resuming a run is an operator's; looking at runs is not."""

import httpx
import pytest

from trackway.trainer.app import create_app
from trackway.trainer.settings import TrainerSettings

pytestmark = pytest.mark.anyio

AGENT, OPERATOR = "agent-0123456789abcdef", "operator-0123456789abcdef"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/runs", 200),
        ("GET", "/runs/r", 404),
        ("GET", "/runs/r/metrics", 404),
        ("POST", "/runs", 422),
        ("POST", "/runs/r/stop", 404),
        ("POST", "/runs/r/resume", 404),
    ],
)
async def test_an_agents_token_only_looks(method: str, path: str, status: int, tmp_path, running) -> None:
    tokens = {"agents": {"secret": AGENT}, "ops": {"secret": OPERATOR, "scopes": ["admin"]}}
    settings = TrainerSettings.model_validate({"outputs_dir": str(tmp_path), "auth": {"tokens": tokens}})

    async def asked(client: httpx.AsyncClient, token: str) -> int:
        return (await client.request(method, path, headers={"authorization": f"Bearer {token}"})).status_code

    async with running(create_app(settings)) as client:
        found = [await asked(client, AGENT), await asked(client, OPERATOR)]
    assert found == [status if method == "GET" else 403, status]
