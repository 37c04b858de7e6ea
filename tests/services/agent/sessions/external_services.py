"""The services of the agent's tests with an external agent, which reaches them at a port."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import uvicorn
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, open_services
from tests.waiting import async_until
from trackway.agent.settings import AgentSettings, ExternalSettings
from trackway.clients import shared_http
from trackway.system.ports import free_port

Serve = Callable[[ExternalSettings | None], AbstractAsyncContextManager[AgentServices]]


def serving_with(settings: AgentSettings, tokenizer: PreTrainedTokenizerFast) -> Serve:
    """Starts the services with an external agent."""

    @asynccontextmanager
    async def serve(external: ExternalSettings | None) -> AsyncIterator[AgentServices]:
        port = free_port()
        own = settings.model_copy(update={"agent_url": f"http://127.0.0.1:{port}", "external": external})
        async with open_services(own, tokenizer) as services:
            server = uvicorn.Server(uvicorn.Config(services.agent, port=port, log_level="warning", lifespan="off"))
            running = asyncio.create_task(server.serve())
            await async_until(lambda: server.started)
            try:
                yield services
            finally:
                server.should_exit = True
                await running
                await shared_http().aclose()

    return serve
