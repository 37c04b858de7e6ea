"""The services of the agent's tests with an external agent, which reaches them at a port."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, open_services
from tests.serving import served
from trackway.agent.settings import AgentSettings, ExternalSettings
from trackway.clients import shared_http
from trackway.system.process import free_port

Serve = Callable[[ExternalSettings | None], AbstractAsyncContextManager[AgentServices]]


def serving_with(settings: AgentSettings, tokenizer: PreTrainedTokenizerFast) -> Serve:
    """Starts the services with an external agent."""

    @asynccontextmanager
    async def serve(external: ExternalSettings | None) -> AsyncIterator[AgentServices]:
        port = free_port()
        own = settings.model_copy(update={"agent_url": f"http://127.0.0.1:{port}", "external": external})
        async with open_services(own, tokenizer) as services:
            async with served(services.agent, port, lifespan="off"):
                yield services
            await shared_http().aclose()

    return serve
