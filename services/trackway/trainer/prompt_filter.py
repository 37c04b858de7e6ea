"""`data.filter_overlong_prompts`: which rows' prompts fit, measured as the agent will template them."""

import asyncio
from collections.abc import Callable

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trackway.clients import ToolsClient
from trackway.trainer.config import RunConfig
from trackway.wire.agent import Sample
from trackway.wire.chat import ToolSchema

Fits = Callable[[Sample], bool]


async def prompt_filter(config: RunConfig, tools_url: str) -> Fits | None:
    """Whether a row fits, or None when overlong rows are kept. Raises TrackwayError without the tool server."""
    if not config.data.filter_overlong_prompts:
        return None
    schemas = await ToolsClient(tools_url).list()
    names = config.trackway.tools
    offered = [schema for schema in schemas if names is None or schema.function.name in names]
    tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, config.actor_rollout_ref.model.path)
    return fits_within(tokenizer, offered, config.data.max_prompt_length)


def fits_within(tokenizer: PreTrainedTokenizerBase, tools: list[ToolSchema], limit: int) -> Fits:
    """Whether a row's templated prompt, tool schemas included, has at most `limit` tokens."""
    schemas: list[dict | Callable] | None = [tool.model_dump() for tool in tools] or None

    def fits(sample: Sample) -> bool:
        messages = [message.model_dump(exclude_none=True) for message in sample.prompt]
        text = tokenizer.apply_chat_template(messages, tools=schemas, add_generation_prompt=True, tokenize=False)
        return len(tokenizer.encode(str(text), add_special_tokens=False)) <= limit

    return fits
