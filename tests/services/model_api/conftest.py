"""The tiny model's tokenizer."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trackway.deploy.bundled import TINY_MODEL


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The tiny model's tokenizer."""
    return AutoTokenizer.from_pretrained(TINY_MODEL)
