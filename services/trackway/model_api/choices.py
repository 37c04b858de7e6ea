"""Runs the choices of a request, each as its own generation, and sends the response, whole or streamed."""

import asyncio
import json
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterator, Sequence
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from fastapi import Request, Response
from pydantic import JsonValue, ValidationError

from trackway.chat.tokenizer import ChatTokenizer
from trackway.chat.tool_calls import ToolFormat
from trackway.model_api.response_builder import EventStream, Record, ResponseBuilder
from trackway.model_api.stream_decoder import NOTHING, Delta, Reader, WholeEnd, joined
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ChatRequest, ChatTool, SampledRequest
from trackway.wire.rollout import (
    GenerateReply,
    GenerateRequest,
    PromptLogprobs,
    SamplingParams,
    StructuredOutputs,
    TopLogprobs,
)
from trackway.wire.trajectory import WeightSpan, add_span, first_spans, settle_spans

FinishReason = Literal["stop", "length", "abort"]


class StreamedTokens(Protocol):
    """The next tokens of a stream. `finish_reason` is None except in the last, which may be empty."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def logprobs(self) -> list[float]: ...

    @property
    def top_logprobs(self) -> Sequence[TopLogprobs]:
        """The most likely tokens of each position. Empty unless asked for."""
        ...

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The scored prompt, if asked for; once in a stream."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights that generated these tokens, or the oldest that it can be."""
        ...

    @property
    def weight_versions(self) -> Sequence[WeightSpan]:
        """Spans of the last tokens up to here, which replace the versions told before."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None: ...


class Generates(Protocol):
    """Continues a prompt of token ids, whole or streamed. Raises TrackwayError."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """The whole continuation. Cancelling the call aborts it."""
        ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[StreamedTokens]:
        """Stream `generate` as the tokens come. Closing the iterator aborts the generation."""
        ...


_IGNORED = frozenset(
    {
        *("not", "if", "then", "else", "dependentSchemas", "dependentRequired"),
        *("uniqueItems", "contains", "minContains", "maxContains"),
        *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
    }
)
"""Keywords of JSON schemas that xgrammar drops, or does not honour everywhere. For a schema alone vLLM uses another
engine of grammars then, which has no structural tags."""
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("enum", "const", "default", "examples")


def grammar_of(request: SampledRequest, tool_format: ToolFormat) -> StructuredOutputs | None:
    """The grammar of a choice. Beside tools it begins with a call, or is JSON of the format.

    Raises INVALID_REQUEST for schemas beyond the bounds, or with keywords that such a grammar would drop.
    """
    try:
        grammar = request.structured_outputs
    except ValidationError as error:
        raise _beyond_bounds("response_format", error) from error
    if grammar is None or not isinstance(request, ChatRequest) or not request.offers_tools:
        return grammar
    answer: dict[str, JsonValue] = {"type": "object"} if grammar.json_schema is None else grammar.json_schema
    if dropped := sorted(_IGNORED.intersection(_keywords(answer))):
        message = (
            f"response_format: expected a JSON schema without {', '.join(dropped)} beside tools, whose grammar cannot "
            "hold them; leave them out of the schema, or send no tools"
        )
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message, param="response_format")
    calls: dict[str, JsonValue] = {
        "type": "tags_with_separator",
        "tags": [_call(tool, tool_format) for tool in request.tools],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not request.parallel_tool_calls,
    }
    either = {"type": "or", "elements": [calls, {"type": "json_schema", "json_schema": answer}]}
    try:
        return StructuredOutputs(structural_tag=json.dumps({"type": "structural_tag", "format": either}))
    except ValidationError as error:
        raise _beyond_bounds("tools", error, " (beside a JSON format, they guide the calls)") from error


def _beyond_bounds(param: str, error: ValidationError, why: str = "") -> TrackwayError:
    return TrackwayError(ErrorCode.INVALID_REQUEST, f"{param}: {error.errors()[0]['msg']}{why}", param=param)


def _call(tool: ChatTool, tool_format: ToolFormat) -> dict[str, JsonValue]:
    """A call of the tool in the model's format."""
    parameters = tool.function.get("parameters")
    schema = {"type": "object", **(parameters if isinstance(parameters, dict) else {})}
    return tool_format.grammar(tool.name, schema)


def _keywords(schema: JsonValue) -> Iterator[str]:
    """Every keyword of a JSON schema and of those within it. Names of properties are none."""
    pending: list[JsonValue] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            yield from part
            for keyword, value in part.items():
                if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
                    pending += value.values()
                elif keyword not in _VALUES:
                    pending.append(value)


T = TypeVar("T")

WATCH_AFTER_S = 0.1
"""Seconds before a client's connection is watched. A call that ends sooner needs no watching."""


@dataclass(frozen=True)
class Job:
    """One choice to generate."""

    index: int
    request: GenerateRequest
    reader: Reader


def jobs_of(
    name: str,
    prompts: Sequence[list[int]],
    request: SampledRequest,
    max_tokens: int,
    tokenizer: ChatTokenizer,
    model: str | None = None,
) -> list[Job]:
    """`n` choices per prompt of a policy, numbered consecutively; their request ids derive from the response's id."""
    greedy = request.top_p == 0  # no engine takes 0: it would keep no token
    params = SamplingParams(
        temperature=0.0 if greedy else request.temperature,
        top_p=1.0 if greedy else request.top_p,
        top_k=request.top_k,
        max_tokens=max_tokens,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        logprobs=request.most_likely,
        prompt_logprobs=request.prompt_logprobs,
        structured_outputs=grammar_of(request, tokenizer.tool_format),
        seed=request.seed,
    )
    requests = [
        GenerateRequest.model_construct(  # the ids are the tokenizer's, or were validated with the request
            request_id=name,
            model=model,
            token_ids=prompt,
            sampling_params=params,
            min_weight_version=request.min_weight_version,
        )
        for prompt in prompts
    ]
    if len(requests) * request.n == 1:
        return [Job(0, requests[0], Reader(tokenizer, request))]
    return [
        Job(
            index,
            requests[index // request.n].model_copy(  # the ids are shared
                update={
                    "request_id": f"{name}-{index}",
                    "sampling_params": params.model_copy(update=_of_choice(request, index % request.n)),
                }
            ),
            Reader(tokenizer, request),
        )
        for index in range(len(prompts) * request.n)
    ]


def _of_choice(request: SampledRequest, choice: int) -> dict[str, JsonValue]:
    """The sampling parameters of a prompt's choice that differ. The first one has the prompt scored."""
    seed: dict[str, JsonValue] = {"seed": None if request.seed is None else request.seed + choice}
    return seed if choice == 0 else {**seed, "prompt_logprobs": None}


async def wholes(generator: Generates, jobs: Sequence[Job]) -> list[Delta]:
    """Each choice as one delta; the first failure aborts all."""
    if len(jobs) == 1:
        return [await _whole(generator, jobs[0])]
    tasks = [asyncio.create_task(_whole(generator, job)) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _whole(generator: Generates, job: Job) -> Delta:
    if not job.reader.has_stops:
        reply = await generator.generate(job.request)
        choice = reply.choices[0]
        logprobs = choice.token_logprobs
        tops = choice.top_logprobs if job.request.sampling_params.logprobs else []
        reason = _not_cut(choice.finish_reason)
        delta = job.reader.read(choice.token_ids, logprobs, reason, tops, choice.weight_versions)
        return replace(delta, prompt_logprobs=reply.prompt_logprobs)
    # Only a stream can be stopped by its text.
    return joined([delta async for delta in _deltas(generator, job)])


async def _in_order_of_arrival(
    generator: Generates, jobs: Sequence[Job], keep_alive_s: float
) -> AsyncGenerator[tuple[int, Delta] | None]:
    """The deltas of all choices with their indexes, and None after each `keep_alive_s` seconds without one.

    Closing the iterator aborts the generations.

    Each choice has its own task: a span must be closed in the task that opened it.
    """
    arrived: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue()

    async def read(job: Job) -> None:
        try:
            async with aclosing(_deltas(generator, job)) as deltas:
                async for delta in deltas:
                    arrived.put_nowait((job.index, delta))
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(read(job)) for job in jobs]
    try:
        running = len(tasks)
        while running:
            try:
                async with asyncio.timeout(keep_alive_s):
                    item = await arrived.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, Exception):
                raise item
            running -= item[1].finish_reason is not None
            yield item
    finally:
        await _end(tasks)


async def _deltas(generator: Generates, job: Job) -> AsyncGenerator[Delta]:
    written, last = 0, None
    spans: list[WeightSpan] = []
    async with aclosing(generator.stream(job.request)) as pieces:
        async for piece in pieces:
            reason = _not_cut(piece.finish_reason)
            delta = job.reader.read(piece.token_ids, piece.logprobs, reason, piece.top_logprobs)
            add_span(spans, piece.version, written, written + len(piece.token_ids))
            settle_spans(spans, piece.weight_versions)
            kept, written = written + len(delta.token_ids), written + len(piece.token_ids)
            delta = replace(delta, spans=first_spans(spans, kept), prompt_logprobs=piece.prompt_logprobs)
            if delta.finish_reason is None:
                yield delta
                continue
            last = delta
            if piece.finish_reason is None:
                break  # a stop string, which the engine does not know
    if last is None:
        message = "expected a finish reason from the engine, got the end of its stream"
        raise TrackwayError(ErrorCode.ENGINE_FAILED, message)
    # The consumer stops after this delta, and the service has to finish its span first.
    yield last


def _not_cut(reason: FinishReason | None) -> WholeEnd | None:
    """OpenAI has no finish reason for an aborted generation, and clients would take it for complete."""
    if reason == "abort":
        message = "the generation was aborted (by /pause, /abort_requests or a shutdown of this replica); retry"
        raise TrackwayError(ErrorCode.UNAVAILABLE, message)
    return reason


async def while_connected(request: Request, work: Coroutine[Any, Any, T], context: Context | None = None) -> T:
    """The result of `work` in a task of its own, which is cancelled when the client disconnects.

    `context` is the task's, by default a copy of the current one.
    """
    current = asyncio.current_task()
    assert current is not None
    cancelled_before, left = current.cancelling(), False
    working, watching = asyncio.create_task(work, context=context), set[asyncio.Task[None]]()

    def watch() -> None:
        watching.add(asyncio.create_task(_disconnected()))

    async def _disconnected() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left = True
        working.cancel()

    timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, watch)
    try:
        return await working
    except BaseException:
        if left and current.cancelling() == cancelled_before:
            message = "the client disconnected before the response was complete"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from None
        raise
    finally:
        timer.cancel()
        await _end(watching)


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)


KEEP_ALIVE_S = 15.0
"""Seconds without an event after which a stream sends one that means nothing; proxies close idle connections at 60."""


def whole_or_stream(whole: Any) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that `respond` answers, for OpenAPI."""
    return {200: {"model": whole, "content": {"text/event-stream": {}}, "description": "whole, or chunks of a stream"}}


async def respond(
    request: Request,
    generator: Generates,
    builder: ResponseBuilder,
    jobs: Sequence[Job],
    *,
    stream: bool,
    record: Record | None = None,
    keep_alive_s: float = KEEP_ALIVE_S,
    context: Context | None = None,
) -> Response:
    """The response of `builder`. A client that disconnects aborts the generations, which run in `context`.

    An error before the first token, or before `keep_alive_s` have passed without one, sets the status of a stream.
    """
    if not stream:
        try:
            deltas = await while_connected(request, wholes(generator, jobs), context)
        except BaseException:
            if record is not None:
                record([NOTHING for _ in jobs])
            raise
        body = builder.whole(deltas)
        if record is not None:
            record(deltas)
        return Response(body, media_type="application/json")
    events = builder.events(_in_order_of_arrival(generator, jobs, keep_alive_s), record)
    return EventStream(await while_connected(request, _first(events), context), events, builder.failed)


async def respond_again(builder: ResponseBuilder, deltas: Sequence[Delta], *, stream: bool) -> Response:
    """The response from recorded choices, without a generation."""
    if not stream:
        return Response(builder.whole(deltas), media_type="application/json")
    events = builder.events(_replayed(deltas))
    return EventStream(await _first(events), events, builder.failed)


async def _replayed(deltas: Sequence[Delta]) -> AsyncGenerator[tuple[int, Delta] | None]:
    for item in enumerate(deltas):
        yield item


async def _first(events: AsyncGenerator[str]) -> str:
    return await anext(events)
