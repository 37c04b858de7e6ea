"""Other models that the agent calls: any server with OpenAI's chat completions, and teachers.

A teacher scores the tokens that the student wrote, for on-policy distillation. It is a policy of the rollout service,
or a rollout service of its own that the agent service's `teachers` name.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import NamedTuple

import httpx
from pydantic import Field, JsonValue, RootModel, SecretStr

from trackway.agent.settings import AgentSettings
from trackway.chat.tool_calls import Parsed, with_arguments
from trackway.clients import CallPolicy, Deadline, RolloutClient, ServiceClient
from trackway.clients.http_client import WholeResponse
from trackway.clients.retry import ForeignServerError, error_of
from trackway.tracing import extracted
from trackway.wire.agent import Teacher
from trackway.wire.base import WireReply
from trackway.wire.chat import ChatModelSettings, FunctionCall, Message, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import GenerateRequest, PromptLogprobs, SamplingParams
from trackway.wire.trajectory import TeacherScores, Trajectory, require_trainable

_SHOWN_CHARS = 300
_CODES = {401: ErrorCode.UNAUTHORIZED, 403: ErrorCode.FORBIDDEN, 404: ErrorCode.MODEL_NOT_FOUND}


class ChatAnswer(NamedTuple):
    """The model's message, why it ended, and the server's token counts."""

    parsed: Parsed
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class ChatModel(ServiceClient):
    """The model of a server. Errors name the server, and what to do about the key, the model or the request."""

    remedy = "correct the URL, or start the server"

    def __init__(self, settings: ChatModelSettings, policy: CallPolicy | None = None) -> None:
        self._variable, self.model, self._sends_seed = settings.api_key_env, settings.model, settings.sends_seed
        key = os.environ.get(self._variable, "") if self._variable else ""
        if self._variable and not key:
            message = f"expected the API key in the variable {self._variable}, got none; export it"
            raise TrackwayError(ErrorCode.UNAUTHORIZED, message)
        super().__init__(settings.base_url, policy=policy, token=SecretStr(key))

    async def models(self) -> list[str]:
        """The names of the models that the server lists. Raises TrackwayError."""
        return [card.id for card in (await self.call("GET", "/models", reply=_Models)).data]

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], params: SamplingParams, deadline: Deadline
    ) -> ChatAnswer:
        """The model's next message. A full server (429) is asked again until the deadline. Raises TrackwayError."""
        body: dict[str, JsonValue] = {
            "model": self.model,
            "messages": [_sent(message) for message in messages],
            "temperature": params.temperature,
            "max_completion_tokens": params.max_tokens,
        }
        if tools:
            body["tools"] = [tool.model_dump(mode="json") for tool in tools]
        unset: dict[str, JsonValue] = {"top_p": 1.0, "top_k": -1, "seed": None}
        if not (self._sends_seed and params.temperature > 0):  # a greedy answer has no seed
            del unset["seed"]
        body |= {name: value for name, usual in unset.items() if (value := getattr(params, name)) != usual}
        reply = await self.call(
            "POST",
            "/chat/completions",
            reply=_Completion,
            body=RootModel[dict[str, JsonValue]](body),
            deadline=deadline,
        )
        choice = reply.choices[0]
        calls = [with_arguments(call.name, call.arguments, call.arguments) for call in choice.message.functions]
        parsed = Parsed(choice.message.content or "", calls)
        return ChatAnswer(parsed, choice.finish_reason, reply.usage.prompt_tokens, reply.usage.completion_tokens)

    def error_of(self, response: WholeResponse) -> Exception:
        """The error for a non-2xx answer, without the text of a refused key, which may quote it."""
        error = error_of(response)
        if isinstance(error, ForeignServerError) or (isinstance(error, TrackwayError) and error.retryable):
            return error
        status = response.status_code
        code = _CODES.get(status, ErrorCode.INVALID_REQUEST)
        if status in (401, 403):
            variable = f", got the one in {self._variable}" if self._variable else ", got none"
            wanted, remedy = f"an accepted API key{variable}", "name the variable that has it with --api-key-env"
        else:
            wanted = f"an answer of model {self.model!r}, got {response.text[:_SHOWN_CHARS]!r}"
            remedy = "correct --model or the URL" if status == 404 else "correct the sampling parameters or the rows"
        return TrackwayError(code, f"{self.base_url}: expected {wanted} (HTTP {status}); {remedy}")


def _sent(message: Message) -> dict[str, JsonValue]:
    """The message in the server's format. Servers refuse a call whose arguments are not a JSON object."""
    sent = message.model_dump(mode="json", exclude_none=True, exclude={"name"})
    for call in sent.get("tool_calls", ()):
        if with_arguments("", call["function"]["arguments"], "").error is not None:
            call["function"]["arguments"] = "{}"
    return sent


class _Model(WireReply):
    id: str


class _Models(WireReply):
    data: list[_Model]


class _Call(WireReply):
    function: FunctionCall


class _Answer(WireReply):
    content: str | None = None
    tool_calls: list[_Call] | None = None

    @property
    def functions(self) -> list[FunctionCall]:
        return [call.function for call in self.tool_calls or ()]


class _AnswerChoice(WireReply):
    message: _Answer
    finish_reason: str


class _Usage(WireReply):
    prompt_tokens: int
    completion_tokens: int


class _Completion(WireReply):
    choices: list[_AnswerChoice] = Field(min_length=1)
    usage: _Usage


class Teachers:
    """Asks teachers for the logprobs of trajectories."""

    def __init__(self, settings: AgentSettings, rollout: RolloutClient, http: httpx.AsyncClient | None = None) -> None:
        self._rollout = rollout
        no_token = SecretStr("")  # the deployment's own is for no other host
        self._own = {
            name: RolloutClient(url, http, settings.rollout_policy, no_token, batches=http is None)
            for name, url in settings.teachers.items()
        }

    async def scores(
        self, teacher: Teacher, rows: Sequence[Trajectory], group: str, deadline: Deadline
    ) -> list[TeacherScores]:
        """The scores of each row of a trajectory, from one pass of the teacher over it. Raises TrackwayError."""
        client, policy = self._own.get(teacher.model), None
        if client is None:
            client, policy = self._rollout, teacher.model
        params = SamplingParams(max_tokens=1, prompt_logprobs=teacher.top_k)
        requests = [
            GenerateRequest(
                request_id=f"{row.id}/teacher+{place}",
                model=policy,
                token_ids=row.prompt_ids + row.response_ids,
                sampling_params=params,
            )
            for place, row in enumerate(rows)
        ]
        earlier = deadline.earlier(client.policy.total_s)
        with extracted({}):  # a pass over the tokens is no generation of the trajectory, so it has no span of its own
            replies = await asyncio.gather(*(client.generate(request, group, earlier) for request in requests))
        return [_of_row(teacher, row, reply.prompt_logprobs) for row, reply in zip(rows, replies, strict=True)]


def mean_kl(rows: Sequence[Trajectory], scores: Sequence[TeacherScores]) -> float:
    """Mean of log p - log q of student p and teacher q over the student's tokens, the reverse KL's estimate k1."""
    written = [
        logprob
        for row in rows
        for logprob, is_own in zip(row.response_logprobs, row.response_mask, strict=True)
        if is_own
    ]
    taught = [logprob for score in scores for logprob in score.logprobs]
    return sum(ours - theirs for ours, theirs in zip(written, taught, strict=True)) / max(1, len(written))


def _of_row(teacher: Teacher, row: Trajectory, scored: PromptLogprobs | None) -> TeacherScores:
    expected = len(row.prompt_ids) + len(row.response_ids) - 1
    if scored is None or len(scored.logprobs) != expected:
        got = "none" if scored is None else str(len(scored.logprobs))
        message = f"expected {expected} logprobs of teacher {teacher.name!r}, got {got}; look at its service's log"
        raise TrackwayError(ErrorCode.UNAVAILABLE, message)
    first = len(row.prompt_ids) - 1
    places = [first + place for place, is_own in enumerate(row.response_mask) if is_own]
    require_trainable(f"the logprobs of teacher {teacher.name!r}", [scored.logprobs[place] for place in places])
    return TeacherScores(
        teacher=teacher.name,
        logprobs=[scored.logprobs[place] for place in places],
        top_ids=[scored.top_ids[place] for place in places] if teacher.top_k else [],
        top_logprobs=[scored.top_logprobs[place] for place in places] if teacher.top_k else [],
    )
