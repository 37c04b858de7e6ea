"""OpenAI's routes."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from pydantic import JsonValue

from trackway.rollout.openai.chat import ChatResponseBuilder
from trackway.rollout.openai.choices import as_they_come, jobs_of, while_connected, wholes
from trackway.rollout.openai.completions import CompletionResponseBuilder
from trackway.rollout.openai.errors import OpenAIRoute
from trackway.rollout.openai.prompts import chat_prompt, completion_prompts, tokenizer_of
from trackway.rollout.openai.responses import ResponseBuilder
from trackway.rollout.openai.sse import EventStream
from trackway.rollout.service import RolloutService
from trackway.rollout.tokenizer import Tokenizer, TokenText
from trackway.wire.openai.replies import ChatCompletion, Completion
from trackway.wire.openai.requests import ChatRequest, CompletionRequest, SampledRequest
from trackway.wire.rollout import ModelCard

PROMPT: dict[str, JsonValue] = {"model": "policy", "prompt": "Two and two are", "max_tokens": 16}
CONVERSATION: dict[str, JsonValue] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "What are two and two?"}],
    "max_completion_tokens": 64,
}


def openai_routes(service: RolloutService, text: TokenText) -> APIRouter:
    """`/v1/completions`, `/v1/chat/completions` and `/v1/models/{id}`, compatible with OpenAI's clients."""
    router = APIRouter(tags=["openai"], route_class=OpenAIRoute)

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """The served model; 404 for any other name."""
        return service.served(model)

    @router.post("/v1/completions", response_model=None, responses=_either(Completion))
    async def completions(body: Annotated[CompletionRequest, Body(examples=[PROMPT])], request: Request) -> Response:
        """Continue prompts, given as text or token ids."""
        card = service.served(body.model)
        tokenizer = await tokenizer_of(text)
        prompts = await completion_prompts(tokenizer, body, card.max_model_len - 1)
        answer = CompletionResponseBuilder(body, tokenizer, prompts)
        return await _answer(service, request, body, answer, body.max_tokens, tokenizer)

    @router.post("/v1/chat/completions", response_model=None, responses=_either(ChatCompletion))
    async def chat(body: Annotated[ChatRequest, Body(examples=[CONVERSATION])], request: Request) -> Response:
        """The next message of a conversation, rendered by the model's chat template."""
        card = service.served(body.model)
        tokenizer = await tokenizer_of(text)
        prompt = await chat_prompt(tokenizer, body, card.max_model_len - 1)
        left = max(1, card.max_model_len - len(prompt))
        max_tokens = body.max_completion_tokens or body.max_tokens or left
        return await _answer(
            service, request, body, ChatResponseBuilder(body, tokenizer, prompt), max_tokens, tokenizer
        )

    return router


async def _answer(
    service: RolloutService,
    request: Request,
    body: SampledRequest,
    answer: ResponseBuilder,
    max_tokens: int,
    tokenizer: Tokenizer,
) -> Response:
    jobs = jobs_of(answer.id, answer.prompts, body, max_tokens, tokenizer)
    if not body.stream:
        deltas = await while_connected(request, wholes(service, jobs))
        return Response(answer.whole(deltas).sent(), media_type="application/json")
    events = answer.events(as_they_come(service, jobs))
    return EventStream(await while_connected(request, _first(events)), events)


async def _first(events: Any) -> str:
    return await anext(events)


def _either(whole: Any) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": whole, "content": {"text/event-stream": {}}, "description": "whole, or chunks of a stream"}}
