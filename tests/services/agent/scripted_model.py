"""An engine that says what a script tells, and its tokenizer of one token per byte."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.services.rollout.idle_engine import IdleEngine
from trackway.rollout.engines.protocol import Capability, FinishReason, Piece
from trackway.wire.rollout import GenerateRequest, PromptLogprobs, SamplingParams

END = "<|im_end|>"

CHATML = """{%- if tools %}<|im_start|>system
Tools: {{ tools | map(attribute="function") | map(attribute="name") | join(", ") }}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN = """{%- if tools %}<|im_start|>system
You are Qwen.

<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}{%- for message in messages %}{%- if message.role == "tool" %}
{%- if loop.first or loop.previtem.role != "tool" %}
{{- "<|im_start|>user" }}{%- endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or loop.nextitem.role != "tool" %}
{{- "<|im_end|>\\n" }}{%- endif %}{%- elif message.role == "assistant" and loop.last %}
{{- "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n" + message.content + "<|im_end|>\\n" }}{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token per byte, ChatML's two special tokens, and the two ordinary ones around a tool call."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: place for place, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    core.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=template)


Words = str | Callable[[], Awaitable[str]]
"""What the model says in one turn, or something to wait for that gives it."""


class ScriptedModel(IdleEngine):
    """Stands for the model, which cannot be told what to say: an engine that answers each turn from a script."""

    capabilities = frozenset({Capability.TOP_LOGPROBS, Capability.STRUCTURED_OUTPUTS, Capability.PROMPT_LOGPROBS})
    max_len = 1 << 20
    version = 3

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.scripts: dict[int, list[Words]] = {}
        """Words by rollout_n, turn by turn."""
        self.requests: list[tuple[str, GenerateRequest]] = []
        """What came over the line, with the session."""
        self.finish_reason: FinishReason | None = None
        self.told: asyncio.Queue[None] | None = None
        """If set, each token waits for an item, and is a piece of its own."""
        self.aborted: list[str] = []
        """Requests whose stream was closed or cancelled before its end."""
        self._said: Counter[int] = Counter()

    def seen(self, rollout_n: int = 0) -> list[GenerateRequest]:
        """Requests of one rollout, in order."""
        return [request for _, request in self.requests if _rollout_n(str(request.request_id)) == rollout_n]

    def begin_again(self) -> None:
        """The next request of each rollout is the first turn of its script."""
        self._said.clear()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def stream(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> AsyncGenerator[Piece]:
        """The k-th token of turn t has logprob -(k + 1) / 8 and comes from weights 3 + t.

        Of a scored prompt the token at position p has logprob -p / 16, and is the most likely one with its next ids.
        """
        if params.prompt_logprobs is not None:
            yield Piece([0], [0.0], self.version, "length", prompt_logprobs=_scored(token_ids, params.prompt_logprobs))
            return
        rollout_n = _rollout_n(request_id)
        turn = self._said[rollout_n]
        self._said[rollout_n] += 1
        words = self.scripts[rollout_n][turn]
        said = self.encode(words if isinstance(words, str) else await words())
        ids = said[: params.max_tokens]
        ended = len(ids) == len(said) and ids[-1:] == self.encode(END)
        logprobs = [-(place + 1) / 8 for place in range(len(ids))]
        reason = self.finish_reason or ("stop" if ended else "length")
        tops = [[(token, logprob)] for token, logprob in zip(ids, logprobs, strict=True)] if params.logprobs else []
        if self.told is None:
            yield Piece(ids, logprobs, self.version + turn, reason, tops)
            return
        try:
            for place, token in enumerate(ids):
                await self.told.get()
                is_last = place == len(ids) - 1
                part = slice(place, place + 1)
                ended_with = reason if is_last else None
                yield Piece([token], logprobs[part], self.version + turn, ended_with, tops[part])
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(request_id)
            raise


def _scored(token_ids: Sequence[int], top: int) -> PromptLogprobs:
    logprobs = [-place / 16 for place in range(1, len(token_ids))]
    ids = [[token + more for more in range(top)] for token in token_ids[1:]]
    return PromptLogprobs(logprobs=logprobs, top_ids=ids, top_logprobs=[[value] * top for value in logprobs])


def _rollout_n(request_id: str) -> int:
    return int(request_id.rsplit("/", 2)[1])
