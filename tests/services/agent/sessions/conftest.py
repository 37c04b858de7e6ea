"""Fixtures of the tests of sessions."""

import pytest
from transformers import PreTrainedTokenizerFast

from tests.services.agent.sessions.external_services import Serve, serving_with
from trackway.agent.settings import AgentSettings


@pytest.fixture
def serving(settings: AgentSettings, tokenizer: PreTrainedTokenizerFast) -> Serve:
    """Starts the services with an external agent, which reaches them at a port."""
    return serving_with(settings, tokenizer)
