"""The routes of model APIs: OpenAI's and Anthropic's."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from pydantic import JsonValue

from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.anthropic import message_input
from trackway.model_api.anthropic.messages import AnthropicRoute, MessagesResponseBuilder
from trackway.model_api.choices import jobs_of
from trackway.model_api.openai import response_input
from trackway.model_api.openai.completions import ChatResponseBuilder, CompletionResponseBuilder
from trackway.model_api.openai.errors import OpenAIRoute
from trackway.model_api.openai.responses import ResponsesBuilder
from trackway.model_api.prompts import chat_prompt, completion_prompts, most_tokens
from trackway.model_api.respond import respond
from trackway.model_api.response_builder import ResponseBuilder
from trackway.rollout.policies import Policies
from trackway.rollout.tokenizer import TokenText
from trackway.wire.anthropic import CountTokensReply, CountTokensRequest, MessagesReply, MessagesRequest
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai.replies import ChatCompletion, Completion
from trackway.wire.openai.requests import ChatRequest, CompletionRequest
from trackway.wire.openai.response_replies import ResponsesReply
from trackway.wire.openai.response_requests import ResponsesRequest
from trackway.wire.rollout import ModelCard, check_prompt_logprobs

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

    @router.post("/v1/completions", response_model=None, responses=_either(Completion))
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

    @router.post("/v1/chat/completions", response_model=None, responses=_either(ChatCompletion))
    async def chat(body: Annotated[ChatRequest, Body(examples=[CONVERSATION])], request: Request) -> Response:
        """The next message of a conversation, rendered by the model's chat template."""
        return await converse(request, body, lambda tokenizer, prompt: ChatResponseBuilder(body, tokenizer, prompt))

    @router.post("/v1/responses", response_model=None, responses=_either(ResponsesReply))
    async def responses(body: Annotated[ResponsesRequest, Body(examples=[INPUT])], request: Request) -> Response:
        """The next response of a conversation, which the client sends in full: no response is stored."""
        if body.previous_response_id is not None:
            message = (
                f"previous_response_id: expected nothing, got {body.previous_response_id!r}: this service stores no "
                "response; send the whole input, or use a session of the agent service"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="previous_response_id")
        chat = response_input.chat_of(body)
        return await converse(request, chat, lambda tokenizer, prompt: ResponsesBuilder(body, chat, tokenizer, prompt))

    anthropic = APIRouter(tags=["anthropic"], route_class=AnthropicRoute)

    @anthropic.post("/v1/messages", response_model=None, responses=_either(MessagesReply))
    async def messages(body: Annotated[MessagesRequest, Body(examples=[MESSAGES])], request: Request) -> Response:
        """The next message of a conversation, for Anthropic's clients."""
        chat = message_input.chat_of(body)
        return await converse(request, chat, lambda *made: MessagesResponseBuilder(body, chat, *made))

    @anthropic.post("/v1/messages/count_tokens")
    async def count_tokens(body: Annotated[CountTokensRequest, Body(examples=[MESSAGES_ALONE])]) -> CountTokensReply:
        """The number of tokens of a conversation."""
        chat = message_input.chat_of(body)
        card = await policies.card(chat.model)
        prompt = await chat_prompt(await text.required(), chat, card.max_model_len - 1)
        return CountTokensReply(input_tokens=len(prompt))

    return [router, anthropic]


def _either(whole: Any) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": whole, "content": {"text/event-stream": {}}, "description": "whole, or chunks of a stream"}}
