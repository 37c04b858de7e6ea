"""The routes of model APIs: OpenAI's and Anthropic's, and vLLM's `/classify` for a classifier."""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Body, FastAPI, Request, Response
from pydantic import JsonValue

from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.anthropic import AnthropicRoute, MessagesResponseBuilder, chat_of_messages
from trackway.model_api.choices import jobs_of, respond, whole_or_stream
from trackway.model_api.openai.completions import ChatResponseBuilder, CompletionResponseBuilder, OpenAIRoute
from trackway.model_api.openai.responses import ResponsesBuilder, chat_of_response
from trackway.model_api.prompts import chat_prompt, completion_prompts, conversation_ids, input_ids, most_tokens
from trackway.model_api.response_builder import ResponseBuilder
from trackway.rollout.classifiers import Classifier, ClassifierInfo, open_classifier
from trackway.rollout.metrics import classifier_gauges
from trackway.rollout.policies import Policies
from trackway.rollout.service import TokenText, required_card
from trackway.rollout.settings import RolloutSettings
from trackway.serving import service_app
from trackway.tracing import Tracing
from trackway.wire.anthropic import CountTokensReply, CountTokensRequest, MessagesReply, MessagesRequest
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import (
    ChatCompletion,
    ChatRequest,
    Classification,
    ClassifyReply,
    ClassifyRequest,
    Completion,
    CompletionRequest,
)
from trackway.wire.responses import ResponsesReply, ResponsesRequest
from trackway.wire.rollout import ModelCard, ModelList, Usage, WeightsReply, check_prompt_logprobs
from trackway.wire.service import Ready

PROMPT: dict[str, JsonValue] = {"model": "policy", "prompt": "Two and two are", "max_tokens": 16}
CONVERSATION: dict[str, JsonValue] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "What are two and two?"}],
    "max_completion_tokens": 64,
}
INPUT: dict[str, JsonValue] = {"model": "policy", "input": "What are two and two?", "max_output_tokens": 64}

MESSAGES_ALONE: dict[str, JsonValue] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "What are two and two?"}],
}
MESSAGES: dict[str, JsonValue] = {**MESSAGES_ALONE, "max_tokens": 64}

BuilderOf = Callable[[ChatTokenizer, list[int]], ResponseBuilder]
"""The builder of the response to a prompt."""


def model_routes(policies: Policies, text: TokenText) -> list[APIRouter]:
    """The routes under `/v1`, compatible with OpenAI's and Anthropic's clients."""
    router = APIRouter(tags=["openai"], route_class=OpenAIRoute)

    async def converse(request: Request, chat: ChatRequest, builder_of: BuilderOf) -> Response:
        card = await policies.card(chat.model)
        tokenizer = await text.required()
        prompt = await chat_prompt(tokenizer, chat, card.max_model_len - 1)
        builder = builder_of(tokenizer, prompt)
        max_tokens = most_tokens(chat, card.max_model_len - len(prompt))
        jobs = jobs_of(builder.id, [prompt], chat, max_tokens, tokenizer, card.id)
        return await respond(request, policies, builder, jobs, stream=chat.stream)

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """A policy that a request can name. 404 for any other name."""
        return await policies.card(model)

    @router.post("/v1/completions", response_model=None, responses=whole_or_stream(Completion))
    async def completions(body: Annotated[CompletionRequest, Body(examples=[PROMPT])], request: Request) -> Response:
        """Continue prompts, given as text or token ids."""
        card = await policies.card(body.model)
        tokenizer = await text.required()
        prompts = await completion_prompts(tokenizer, body, card.max_model_len - 1)
        if body.prompt_logprobs is not None:
            check_prompt_logprobs(prompts, body.prompt_logprobs)
        builder = CompletionResponseBuilder(body, tokenizer, prompts)
        jobs = jobs_of(builder.id, prompts, body, body.max_tokens, tokenizer, card.id)
        return await respond(request, policies, builder, jobs, stream=body.stream)

    @router.post("/v1/chat/completions", response_model=None, responses=whole_or_stream(ChatCompletion))
    async def chat(body: Annotated[ChatRequest, Body(examples=[CONVERSATION])], request: Request) -> Response:
        """The next message of a conversation, rendered by the model's chat template."""
        return await converse(request, body, lambda tokenizer, prompt: ChatResponseBuilder(body, tokenizer, prompt))

    @router.post("/v1/responses", response_model=None, responses=whole_or_stream(ResponsesReply))
    async def responses(body: Annotated[ResponsesRequest, Body(examples=[INPUT])], request: Request) -> Response:
        """The next response of a conversation, which the client sends in full: no response is stored."""
        if body.previous_response_id is not None:
            message = (
                f"previous_response_id: expected nothing, got {body.previous_response_id!r}: this service stores no "
                "response; send the whole input, or use a session of the agent service"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="previous_response_id")
        chat = chat_of_response(body)
        return await converse(request, chat, lambda tokenizer, prompt: ResponsesBuilder(body, chat, tokenizer, prompt))

    anthropic = APIRouter(tags=["anthropic"], route_class=AnthropicRoute)

    @anthropic.post("/v1/messages", response_model=None, responses=whole_or_stream(MessagesReply))
    async def messages(body: Annotated[MessagesRequest, Body(examples=[MESSAGES])], request: Request) -> Response:
        """The next message of a conversation, for Anthropic's clients."""
        chat = chat_of_messages(body)
        return await converse(request, chat, lambda *made: MessagesResponseBuilder(body, chat, *made))

    @anthropic.post("/v1/messages/count_tokens")
    async def count_tokens(body: Annotated[CountTokensRequest, Body(examples=[MESSAGES_ALONE])]) -> CountTokensReply:
        """The number of tokens of a conversation."""
        chat = chat_of_messages(body)
        card = await policies.card(chat.model)
        prompt = await chat_prompt(await text.required(), chat, card.max_model_len - 1)
        return CountTokensReply(input_tokens=len(prompt))

    return [router, anthropic]


CLASSIFIED: dict[str, JsonValue] = {
    "model": "reward-model",
    "messages": [
        {"role": "user", "content": "What are two and two?"},
        {"role": "assistant", "content": "Four."},
    ],
    "use_activation": False,
}


def classifier_app(
    settings: RolloutSettings, tracing: Tracing | None = None, classifier: Classifier | None = None
) -> FastAPI:
    """The service of the settings' classifier, or of the given one."""
    classifier = classifier or open_classifier(settings)
    service = ClassifierService(classifier, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await service.start()
            yield
        finally:
            await classifier.stop()

    return service_app(
        "rollout",
        settings,
        routers=[classify_routes(service)],
        lifespan=lifespan,
        ready=service.ready,
        tracing=tracing,
        gauges=classifier_gauges(classifier),
    )


class ClassifierService:
    """A replica: a classifier, its tokenizer and its names."""

    def __init__(self, classifier: Classifier, settings: RolloutSettings) -> None:
        self._classifier, self._settings = classifier, settings
        self._info = ClassifierInfo.read(settings.model_path)
        self._text = TokenText(settings.model_path)
        self._created = int(time.time())
        self._started = False

    async def start(self) -> None:
        """Start the classifier."""
        await self._classifier.start()
        self._started = True

    async def ready(self) -> Ready:
        """Return whether the replica is ready. `broken` when only a restart can help."""
        stuck = self._classifier.stuck_for()
        if stuck > self._settings.stuck_s:
            reason = f"the classifier has made no progress on its work for {stuck:.0f} s"
            return Ready(ready=False, broken=True, reason=reason)
        return Ready(ready=self._started, reason="" if self._started else "the classifier is starting")

    def served(self, name: str | None) -> ModelCard:
        """The served model, by its name or None. Raises MODEL_NOT_FOUND for any other name."""
        longest = self._classifier.max_len
        card = ModelCard(id=self._settings.model_name, created=self._created, max_model_len=longest)
        return required_card(card, name)

    def weights(self) -> WeightsReply:
        """Version 0, which stays."""
        settings = self._settings
        return WeightsReply(version=0, latest=0, model=settings.model_name, replica=settings.replica)

    async def classify(self, request: ClassifyRequest) -> ClassifyReply:
        """The scores of a request's inputs, or of its conversation. Raises DEADLINE_EXCEEDED beyond the limit."""
        longest, limit = self.served(request.model).max_model_len, self._settings.classify_timeout_s
        try:
            async with asyncio.timeout(limit):
                tokenizer = await self._text.required()
                if request.messages is not None:
                    inputs = [await conversation_ids(tokenizer, request, longest)]
                else:
                    inputs = await input_ids(tokenizer, request, longest)
                logits = await self._logits(inputs)
        except TimeoutError as error:
            message = f"expected scores within {limit:g} s (classify_timeout_s), got none; raise it, or add replicas"
            raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error
        tokens = sum(map(len, inputs))
        raw = self._info.is_regression or request.use_activation is False
        return ClassifyReply(
            id=f"classify-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._settings.model_name,
            data=[
                Classification(index=index, label=self._info.label, probs=[_score(logit, raw=raw)], num_classes=1)
                for index, logit in enumerate(logits)
            ],
            usage=Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens),
        )

    async def _logits(self, inputs: list[list[int]]) -> list[float]:
        """Return the logit of each input. One error fails all."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._classifier.classify(ids)) for ids in inputs]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]


def classify_routes(service: ClassifierService) -> APIRouter:
    """The routes, with vLLM's names."""
    router = APIRouter(tags=["openai"], route_class=OpenAIRoute)

    @router.post("/classify")
    async def classify(body: Annotated[ClassifyRequest, Body(examples=[CLASSIFIED])]) -> ClassifyReply:
        """The scores of texts, token ids or a conversation; raw with `use_activation=false`."""
        return await service.classify(body)

    @router.get("/v1/models")
    async def models() -> ModelList:
        """The served model."""
        return ModelList(data=[service.served(None)])

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """The served model. 404 for any other name."""
        return service.served(model)

    @router.get("/weights")
    async def weights() -> WeightsReply:
        """The replica's weights, which stay as they are."""
        return service.weights()

    return router


def _score(logit: float, *, raw: bool) -> float:
    if raw:
        return logit
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
