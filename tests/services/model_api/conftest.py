"""The tiny model's tokenizer."""

import pytest
from transformers import AutoTokenizer

from trackway.chat.tokenizer import ChatTokenizer
from trackway.deploy.bundled import TINY_MODEL


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    """The tiny model's tokenizer."""
    return ChatTokenizer(AutoTokenizer.from_pretrained(TINY_MODEL))
