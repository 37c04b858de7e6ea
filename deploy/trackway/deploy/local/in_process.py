"""The services that a trajectory needs, in this process: no Ray, no port, no weight store; they start in seconds."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from trackway.agent.app import create_app as create_agent
from trackway.agent.settings import AgentSettings
from trackway.clients import AgentClient, RewardClient
from trackway.clients.token import authorization, resolve_token
from trackway.deploy.config import serve_config
from trackway.reward.app import create_app as create_reward
from trackway.reward.settings import RewardSettings
from trackway.rollout.app import create_app as create_rollout
from trackway.rollout.settings import RolloutSettings
from trackway.system.user_error import UserError
from trackway.tools.app import create_app as create_tools
from trackway.tools.settings import ToolsSettings
from trackway.wire.health import Ready

_POLL_S = 0.1


@asynccontextmanager
async def services_here(config: dict[str, Any], model: Path | None, start_s: float) -> AsyncIterator[AgentClient]:
    """A client of the agent service. All services have the settings of the Serve config and this model.

    None for the agent's `chat_model`, which needs no rollout service.

    Errors of the services' own start are raised. UserError when the model is not loaded after `start_s` seconds.
    """
    args = {service: serve_config.args_of(config, service) for service in ("rollout", "agent", "tools", "reward")}
    apps = {
        "tools": create_tools(ToolsSettings(**args["tools"])),
        "reward": create_reward(RewardSettings(**args["reward"])),
    }
    if model is not None:
        rollout = {**args["rollout"], "model_path": model, "weights_url": None}
        apps["rollout"] = create_rollout(RolloutSettings(**rollout))
    async with AsyncExitStack() as stack:
        # The agent's requests reach the apps without a port.
        mounts = {f"http://{name}": httpx.ASGITransport(app) for name, app in apps.items()}
        http = await stack.enter_async_context(httpx.AsyncClient(mounts=mounts, trust_env=False))
        urls = {f"{name}_url": f"http://{name}" for name in apps}
        agent = create_agent(AgentSettings(**{**args["agent"], "model_path": str(model or ""), **urls}), http)
        for app in (*apps.values(), agent):
            await stack.enter_async_context(app.router.lifespan_context(app))
        if model is not None:
            await _until_ready(http, start_s)
        transport = httpx.ASGITransport(agent)
        yield AgentClient(
            "http://agent", await stack.enter_async_context(httpx.AsyncClient(transport=transport, trust_env=False))
        )


@asynccontextmanager
async def reward_here(config: dict[str, Any]) -> AsyncIterator[RewardClient]:
    """A client of a reward service with the settings of the Serve config, which starts no model."""
    app = create_reward(RewardSettings(**serve_config.args_of(config, "reward")))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), trust_env=False) as http,
    ):
        yield RewardClient("http://reward", http)


async def _until_ready(http: httpx.AsyncClient, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while not (ready := await _ready(http)).ready:
        if ready.broken or time.monotonic() > deadline:
            raise UserError(f"the model: expected to be ready within {start_s:.0f} s, got: {ready.reason}")
        await asyncio.sleep(_POLL_S)


async def _ready(http: httpx.AsyncClient) -> Ready:
    """Whether the rollout service has loaded the model. The other services are ready once they have started."""
    answer = await http.get("http://rollout/ready", headers=authorization(resolve_token()))
    return Ready.model_validate_json(answer.content)
