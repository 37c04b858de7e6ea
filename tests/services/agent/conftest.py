"""Fixtures of the agent's tests; what they are made of is in agent_services.py."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, open_services
from tests.services.agent.scripted_model import CHATML, QWEN, byte_tokenizer
from tests.serving import served
from trackway.agent.settings import AgentSettings
from trackway.chat.tokens import ChatTokens
from trackway.clients import AgentClient, CallPolicy, shared_http


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(CHATML)


@pytest.fixture(scope="session")
def qwen_tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(QWEN)


@pytest.fixture
def tokens(tokenizer: PreTrainedTokenizerFast) -> ChatTokens:
    return ChatTokens(tokenizer)


@pytest.fixture(scope="session")
def model_path(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(model_path: Path) -> AgentSettings:
    quick = CallPolicy(attempts=2, backoff_s=0.01, max_backoff_s=0.01, total_s=20.0)
    return AgentSettings(
        model_path=str(model_path),
        rollout_url="http://rollout",
        tools_url="http://tools",
        reward_url="http://reward",
        rollout_policy=quick,
        tools_policy=quick,
        reward_policy=quick,
        release_timeout_s=2.0,
    )


@pytest.fixture
async def services(
    anyio_backend: str, settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> AsyncIterator[AgentServices]:
    async with open_services(settings, tokenizer) as opened:
        yield opened


@pytest.fixture
async def agent(services: AgentServices) -> AsyncIterator[AgentClient]:
    """A client of the agent app behind a real socket."""
    async with served(services.agent, lifespan="off") as url:
        yield AgentClient(url)
        await shared_http().aclose()
