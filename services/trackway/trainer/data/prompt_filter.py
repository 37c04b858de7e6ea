"""`data.filter_overlong_prompts`: drops rows whose prompt is too long, as templated by the agent."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from pydantic import JsonValue
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trackway.chat.tokenizer import template_message
from trackway.clients import ToolsClient
from trackway.run_config import RunConfig
from trackway.trainer.data.dataset import WITHOUT_TOOLS
from trackway.trainer.data.row_files import counted
from trackway.wire.agent import Sample
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError

_BATCH_SIZE = 512

logger = logging.getLogger("trackway.trainer")


class PromptFilter:
    """Drops the rows whose templated prompt has more than `limit` tokens, and logs their number.

    `template_kwargs` are variables of the chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[ToolSchema],
        limit: int,
        default_agent: str,
        template_kwargs: Mapping[str, JsonValue] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = {tool.function.name: tool.model_dump(mode="json") for tool in tools}
        self._limit = limit
        self._default_agent = default_agent
        self._template_kwargs: dict[str, Any] = dict(template_kwargs or {})

    def __call__(self, rows: Sequence[Sample], name: str) -> list[Sample]:
        """The rows within the limit. Raises TrackwayError when none is, or when the template rejects a prompt."""
        lengths = list(counted(self.lengths(rows, name), f"{name}: prompts measured", len(rows)))
        kept = [row for row, length in zip(rows, lengths, strict=True) if length <= self._limit]
        if not kept:
            raise TrackwayError(ErrorCode.INVALID_REQUEST, self.none_fits(lengths, name))
        bound = f"data.max_prompt_length={self._limit}"
        dropped = len(rows) - len(kept)
        logger.info("%s: dropped %d of %d rows longer than %s", name, dropped, len(rows), bound)
        return kept

    def none_fits(self, lengths: Sequence[int], name: str) -> str:
        """The error message when every prompt is longer than the limit."""
        return (
            f"{name}: expected prompts of at most data.max_prompt_length={self._limit} tokens, tool schemas included, "
            f"got none in {len(lengths)} rows, the shortest has {min(lengths)}; raise the limit, or set "
            "data.filter_overlong_prompts=false"
        )

    def lengths(self, rows: Sequence[Sample], name: str) -> Iterator[int]:
        """The number of tokens of each row's prompt. Raises TrackwayError when the template rejects a prompt."""
        for start in range(0, len(rows), _BATCH_SIZE):
            texts = [self._render(row, name) for row in rows[start : start + _BATCH_SIZE]]
            encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
            yield from (len(ids) for ids in encoded["input_ids"])

    def _render(self, row: Sample, name: str) -> str:
        try:
            messages = [template_message(message) for message in row.prompt]
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=self._offered(row),  # pyright: ignore[reportArgumentType]  invariance of list in transformers
                add_generation_prompt=True,
                tokenize=False,
                **self._template_kwargs,
            )
        except (TemplateError, TypeError, ValueError) as error:
            message = (
                f"{name}: the chat template rejects the prompt of the row with index {row.index}: {error}; correct it"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from error
        return str(text)

    def _offered(self, row: Sample) -> list[dict[str, Any]] | None:
        """The tool schemas that the row's agent shows the model. A custom agent is assumed to show all."""
        if (row.agent_name or self._default_agent) == WITHOUT_TOOLS:
            return None
        selection = row.extra_info.get("tool_selection")
        chosen = self._tools.keys() & selection if isinstance(selection, list) else self._tools.keys()
        return [tool for name, tool in self._tools.items() if name in chosen] or None


async def prompt_filter(config: RunConfig, tools_url: str) -> PromptFilter | None:
    """The filter for overlong rows, or None when they are kept. Raises TrackwayError without the tool server."""
    if not config.data.filter_overlong_prompts:
        return None
    schemas = await ToolsClient(tools_url).list()
    names = config.trackway.tools
    offered = [schema for schema in schemas if names is None or schema.function.name in names]
    tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, config.actor_rollout_ref.model.path)
    data = config.data
    return PromptFilter(
        tokenizer, offered, data.max_prompt_length, config.default_agent, data.apply_chat_template_kwargs
    )
