"""verl's reward model: a generative model that a scoring function asks over OpenAI's routes."""

import asyncio
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, HttpUrl

from trackway.serving.threads import in_thread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REWARD_MODEL = "reward_model"
"""Application and route prefix of the service that serves the model beside the reward service."""


class RewardModelSettings(BaseModel):
    """The model that `custom_reward_function` asks."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    path: str
    """Folder or Hub id of its tokenizer, which is loaded when a function that takes it is first called."""
    base_url: HttpUrl | None = None
    """URL of an OpenAI API without `/v1`, over http; null is the service `reward_model` below this service's
    `base_url`."""


class RewardModelAccess:
    """The arguments that verl adds to the call of a scoring function."""

    def __init__(self, settings: RewardModelSettings, services_url: str) -> None:
        url = str(settings.base_url or f"{services_url.rstrip('/')}/{REWARD_MODEL}")
        self.router_address = url.partition("://")[2].rstrip("/")
        """Host, port and path: verl's functions ask `http://{reward_router_address}/v1/chat/completions`."""
        self._path = settings.path
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._loading = asyncio.Lock()

    async def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer, loaded once. ImportError without transformers; OSError without its files."""
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await in_thread(self._load)
        return self._tokenizer

    def _load(self) -> "PreTrainedTokenizerBase":
        from transformers import AutoTokenizer  # a reward service that needs no tokenizer has no transformers

        return AutoTokenizer.from_pretrained(self._path)
