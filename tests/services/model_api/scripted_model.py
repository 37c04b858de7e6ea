"""Tokens that a test chose, as a model that continues any prompt."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from trackway.model_api.choices import FinishReason
from trackway.wire.rollout import (
    ChoiceLogprobs,
    GenerateChoice,
    GenerateReply,
    GenerateRequest,
    PromptLogprobs,
    TokenLogprob,
    TopLogprobs,
    Usage,
)
from trackway.wire.trajectory import WeightSpan


@dataclass(frozen=True)
class Tokens:
    """The next tokens of a stream."""

    token_ids: list[int]
    logprobs: list[float]
    version: int
    finish_reason: FinishReason | None = None
    top_logprobs: Sequence[TopLogprobs] = ()
    weight_versions: Sequence[WeightSpan] = ()
    prompt_logprobs: PromptLogprobs | None = None


class ScriptedModel:
    """Says `says` token by token, the k-th with logprob -(k + 1) / 8 and weights of version 5."""

    def __init__(self, says: Sequence[int]) -> None:
        self.says = list(says)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        content = [TokenLogprob(token_id=token, logprob=-(place + 1) / 8) for place, token in enumerate(self.says)]
        choice = GenerateChoice(
            finish_reason="stop",
            token_ids=self.says,
            logprobs=ChoiceLogprobs(content=content),
            weight_versions=[WeightSpan(version=5, start=0, end=len(self.says))],
        )
        usage = Usage(prompt_tokens=1, completion_tokens=len(self.says), total_tokens=1 + len(self.says))
        return GenerateReply(request_id="r", model="tiny", created=0, usage=usage, choices=[choice])

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Tokens]:
        self.requests.append(request)
        for place, token in enumerate(self.says):
            yield Tokens([token], [-(place + 1) / 8], 5)
        yield Tokens([], [], 5, "stop")
