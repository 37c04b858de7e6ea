"""The classes that an agent loop of verl's imports (verl/experimental/agent_loop), with verl's names and fields.

A loop sees its `server_manager`, tokenizer and configuration as in verl. verl.py runs it. Images, videos and audio
are not supported.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, Field

from trackway.chat.tokenizer import ids_after_answer
from trackway.chat.tool_calls import ToolFormat
from trackway.chat.tool_formats import tool_format
from trackway.serving.user_code import Declared
from trackway.wire.chat import FunctionCall

Loop = TypeVar("Loop", bound=type)
Messages = Sequence[Mapping[str, Any]]


class TokenOutput(BaseModel):
    """One generation of `server_manager.generate`."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    """`completed`."""
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class AgentLoopMetrics(BaseModel):
    """Seconds by activity."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """Result of `run`: a trajectory."""

    prompt_ids: list[int]
    response_ids: list[int]
    """Tokens of the model and of observations."""
    response_mask: list[int]
    """1 for a token of the model, 0 for any other."""
    response_logprobs: list[float] | None = None
    """Not read: the engine's are taken."""
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    """The loop's own score; then the reward service is not asked."""
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None


class LLMServerClient(Protocol):
    """The model."""

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **options: Any
    ) -> TokenOutput: ...


class Config(dict[str, Any]):
    """A mapping whose keys are attributes too, as OmegaConf's. AttributeError lists the keys that there are."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"expected one of the keys {', '.join(self)}, got {name!r}; others are not known here")
        return self[name]


class DictConfigWrap(NamedTuple):
    """A configuration as the constructor gets it."""

    config: Config


class ToolParser:
    """verl's parser of tool calls (tool_parser.py) over the format of that name. Malformed calls are dropped."""

    def __init__(self, tokenizer: Any, tool_format: ToolFormat) -> None:
        self.tokenizer = tokenizer
        self._format = tool_format

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        """The parser of `multi_turn.format`. TrackwayError for an unknown name."""
        return cls(tokenizer, tool_format(name))

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """The text outside the calls, and the calls."""
        text = await asyncio.to_thread(self.tokenizer.decode, [*responses_ids])
        functions = [tool.function if hasattr(tool, "function") else tool["function"] for tool in tools or ()]
        known = [function if isinstance(function, Mapping) else function.model_dump() for function in functions]
        parsed = self._format.parse(str(text), {function["name"]: function.get("parameters") for function in known})
        return parsed.content, [
            FunctionCall(name=call.name, arguments=call.raw) for call in parsed.calls if call.error is None
        ]


class MergeResult(NamedTuple):
    """Tokens after a merge, and how many the merge appended."""

    token_ids: list[int]
    appended_token_count: int


class AgentLoopBase(ABC):
    """Base of verl's agent loops. An instance runs one trajectory."""

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: LLMServerClient,
        tokenizer: Any,
        processor: Any,
        dataset_cls: type | None = None,
        data_config: DictConfigWrap | None = None,
        hf_model_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config.config if data_config else Config()
        self.apply_chat_template_kwargs = self.data_config.get("apply_chat_template_kwargs", {})
        self.loop = asyncio.get_running_loop()

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """One trajectory. `kwargs` are the columns of the row."""

    async def apply_chat_template(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> list[int]:
        """Ids of the conversation with the generation prompt (verl 0.7)."""
        return await self._initial(messages, tools)

    async def ct_build_initial_tokens(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **media: Any
    ) -> list[int]:
        """Ids of the conversation with the generation prompt. A longer prompt loses its first tokens."""
        _text_only(media)
        return (await self._initial(messages, tools))[-self.rollout_config.prompt_length :]

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: Sequence[int],
        assistant_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        assistant_logprobs: Sequence[float] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Append a generation, unchanged."""
        appended = [*assistant_token_ids]
        logprobs = None if response_logprobs is None else [*response_logprobs, *(assistant_logprobs or [])]
        merged = MergeResult([*runtime_token_ids, *appended], len(appended))
        return merged, [*response_mask, *[1] * len(appended)], logprobs

    async def ct_merge_non_assistant_msg(
        self,
        previous_messages: Messages,
        updated_messages: Messages,
        runtime_token_ids: Sequence[int],
        response_mask: Sequence[int],
        response_logprobs: Sequence[float] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Append the messages after `previous_messages`, and the next generation prompt."""
        appended = await self._continuation(updated_messages[len(previous_messages) :], runtime_token_ids)
        logprobs = None if response_logprobs is None else [*response_logprobs, *[0.0] * len(appended)]
        merged = MergeResult([*runtime_token_ids, *appended], len(appended))
        return merged, [*response_mask, *[0] * len(appended)], logprobs

    async def process_multi_modal_info(self, messages: Messages) -> dict[str, Any]:
        """No media. ValueError when a message has some."""
        if any(not isinstance(message.get("content"), str | None) for message in messages):
            raise ValueError(
                "expected messages of text, got content in parts; images, videos and audio are not supported"
            )
        return {}

    process_vision_info = process_multi_modal_info

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        _text_only({"multi_modal_data": has_multi_modal})

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return {}

    async def _initial(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        return await asyncio.to_thread(lambda: self._encode(self._render(messages, tools)))

    async def _continuation(self, messages: Messages, written: Sequence[int]) -> list[int]:
        """Ids after a generation: the end of its turn unless `written` ends with it, messages, generation prompt."""
        ids = await asyncio.to_thread(ids_after_answer, messages, self._render, self._encode)
        ends = bool(written) and written[-1] == ids[0] and ids[0] in self.tokenizer.added_tokens_decoder
        return ids[1:] if ends else ids

    def _render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None) -> str:
        conversation, options = [dict(message) for message in messages], self.apply_chat_template_kwargs
        rendered = self.tokenizer.apply_chat_template(
            conversation, tools=tools or None, add_generation_prompt=True, tokenize=False, **options
        )
        return str(rendered)

    def _encode(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text, add_special_tokens=False)]


_registered = Declared[tuple[str, type]]()


def register(agent_name: str) -> Callable[[Loop], Loop]:
    """Class decorator: register the loop under this `agent_name`."""

    def add(loop: Loop) -> Loop:
        _registered.add(loop, (agent_name, loop))
        return loop

    return add


def registered(modules: Sequence[str]) -> list[tuple[str, type]]:
    """The names and classes of the loops that these imported modules, or modules below them, register."""
    return _registered.within(modules)


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the block's duration in seconds to `timing_raw[name]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


def _text_only(media: Mapping[str, Any]) -> None:
    if any(media.values()):
        raise ValueError("expected text only; images, videos and audio are not supported")
