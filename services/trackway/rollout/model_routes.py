"""The routes of model APIs: OpenAI's."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from pydantic import JsonValue

from trackway.model_api.choices import jobs_of
from trackway.model_api.openai.chat import ChatResponseBuilder
from trackway.model_api.openai.completions import CompletionResponseBuilder
from trackway.model_api.openai.errors import OpenAIRoute
from trackway.model_api.prompts import chat_prompt, completion_prompts, most_tokens
from trackway.model_api.respond import respond
from trackway.model_api.tokenizer import Tokenizer
from trackway.rollout.service import RolloutService
from trackway.rollout.tokenizer import TokenText
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai.replies import ChatCompletion, Completion
from trackway.wire.openai.requests import ChatRequest, CompletionRequest
from trackway.wire.rollout import ModelCard

PROMPT: dict[str, JsonValue] = {"model": "policy", "prompt": "Two and two are", "max_tokens": 16}
CONVERSATION: dict[str, JsonValue] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "What are two and two?"}],
    "max_completion_tokens": 64,
}


def model_routes(service: RolloutService, text: TokenText) -> APIRouter:
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
        tokenizer = await _tokenizer(text)
        prompts = await completion_prompts(tokenizer, body, card.max_model_len - 1)
        builder = CompletionResponseBuilder(body, tokenizer, prompts)
        jobs = jobs_of(builder.id, prompts, body, body.max_tokens, tokenizer)
        return await respond(request, service, builder, jobs, stream=body.stream)

    @router.post("/v1/chat/completions", response_model=None, responses=_either(ChatCompletion))
    async def chat(body: Annotated[ChatRequest, Body(examples=[CONVERSATION])], request: Request) -> Response:
        """The next message of a conversation, rendered by the model's chat template."""
        card = service.served(body.model)
        tokenizer = await _tokenizer(text)
        prompt = await chat_prompt(tokenizer, body, card.max_model_len - 1)
        builder = ChatResponseBuilder(body, tokenizer, prompt)
        max_tokens = most_tokens(body, card.max_model_len - len(prompt))
        jobs = jobs_of(builder.id, [prompt], body, max_tokens, tokenizer)
        return await respond(request, service, builder, jobs, stream=body.stream)

    return router


async def _tokenizer(text: TokenText) -> Tokenizer:
    """The model's tokenizer; raises INTERNAL when its folder has none."""
    try:
        return await text.tokenizer()
    except Exception as error:
        # transformers raises OSError, ValueError, KeyError or ImportError for a folder it cannot use.
        message = f"expected a tokenizer in {text.model_path}, got {type(error).__name__}: {error}; "
        remedy = "add one, or send token ids to /inference/v1/generate"
        raise TrackwayError(ErrorCode.INTERNAL, message + remedy) from error


def _either(whole: Any) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": whole, "content": {"text/event-stream": {}}, "description": "whole, or chunks of a stream"}}
