"""Draws samples from the rollout service. A sample that was lost with the service is drawn again from its record."""

import asyncio
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from math import nan
from typing import Any, NamedTuple

from trackway.clients import CallPolicy, Deadline, RolloutClient
from trackway.tracing import extracted
from trackway.trainer.calls.protobuf import schema
from trackway.trainer.calls.results import Result
from trackway.trainer.tinker.samples_log import SampleRecord
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import Completion, CompletionChoice, CompletionRequest
from trackway.wire.rollout import PromptLogprobs
from trackway.wire.tinker import SampleRequest
from trackway.wire.trajectory import TraceTarget

MAX_DRAWS = 256
"""Most samples that are drawn at once. Others are refused with 429, which the SDK waits for."""
MAX_KEPT, MAX_KEPT_BYTES = 4096, 256 * 2**20
"""Drawn samples in memory, and their bytes. A sample beyond is drawn again when it is asked for."""
DRAW_S = 900.0
"""Longest time for a sample."""
CALL_POLICY = CallPolicy(read_s=DRAW_S, total_s=DRAW_S, outage_s=DRAW_S, max_in_flight=MAX_DRAWS)
_SEED_BITS = 53
_HOLE = 0, -99999.0
"""Token id and logprob of an empty place among the most likely tokens."""
_STOP, _LENGTH = 0, 1
"""Values of the schema's StopReason."""


class Weights(NamedTuple):
    """The weights to sample from."""

    policy: str
    version: int
    """Oldest version that may answer."""
    max_len: int
    """Longest sequence in tokens."""


class Draws:
    """The samples in progress, and the newest drawn ones. `weights_of` finds the weights of a sampling session.

    `target` is the destination of their spans.
    """

    def __init__(
        self,
        rollout: RolloutClient,
        weights_of: Callable[[str], Awaitable[Weights]],
        target: TraceTarget,
    ) -> None:
        self._rollout, self._weights_of, self._target = rollout, weights_of, target
        self._tasks: OrderedDict[str, asyncio.Task[Result]] = OrderedDict()
        self._kept_bytes = 0

    def require_room(self) -> None:
        """Raise OVERLOADED when as many samples are drawn as may be."""
        running = sum(not task.done() for task in self._tasks.values())
        if running >= MAX_DRAWS:
            message = f"expected at most {MAX_DRAWS} samples in progress, got one more; retry when some have ended"
            raise TrackwayError(ErrorCode.OVERLOADED, message, retry_after_s=1)

    def begin(self, record: SampleRecord) -> asyncio.Task[Result]:
        """Return the task that draws a sample, started unless it runs or its result is kept."""
        task = self._tasks.get(record.id)
        if task is None:
            task = self._tasks[record.id] = asyncio.create_task(self._drawn(record), name=f"sample {record.id}")
            task.add_done_callback(self._keep)
        return task

    def samplers(self) -> set[str]:
        """Return the sampling sessions of the samples in progress."""
        return {id.rpartition(":")[0] for id, task in self._tasks.items() if not task.done()}

    def known(self, id: str) -> asyncio.Task[Result] | None:
        """Return the task of a sample that runs or is kept."""
        return self._tasks.get(id)

    def cancel(self, id: str) -> None:
        """Abort a sample. Its result is an error from then on."""
        task = self._tasks.get(id)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Abort all samples."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _keep(self, task: asyncio.Task[Result]) -> None:
        if not task.cancelled():
            self._kept_bytes += len(task.result().body)
        for id, kept in [*self._tasks.items()]:
            if self._kept_bytes <= MAX_KEPT_BYTES and len(self._tasks) <= MAX_KEPT:
                return
            if kept.done():
                del self._tasks[id]
                self._kept_bytes -= 0 if kept.cancelled() else len(kept.result().body)

    async def _drawn(self, record: SampleRecord) -> Result:
        try:
            with extracted({"traceparent": record.traceparent}, self._target):
                return Result("protobuf", await self._draw(record))
        except TrackwayError as error:
            category = "user" if error.status < 500 and not error.retryable else "server"
            return Result.of_error(error.message, category)

    async def _draw(self, record: SampleRecord) -> bytes:
        weights = await self._weights_of(record.id)
        request = completion_of(record, weights)
        reply = await self._rollout.call(
            "POST",
            "/v1/completions",
            reply=Completion,
            body=request,
            session_id=record.id,
            deadline=Deadline.after(DRAW_S),
        )
        return sample_response(record.request, reply.choices)


def drawn_seed() -> int:
    """Return a seed for a request without one."""
    return secrets.randbits(_SEED_BITS)


def check_sample(request: SampleRequest) -> None:
    """Raise INVALID_REQUEST for a prompt or prompt logprobs that no engine can give."""
    length = sum(len(chunk.tokens) for chunk in request.prompt.chunks)
    if length == 0:
        message = "prompt: expected at least one token, got none; begin with the model's first token"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and last < length):
        message = f"prompt_logprobs_last_n: expected 1 to {length - 1} with prompt_logprobs, got {last}"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; leave it out for all")


def completion_of(record: SampleRecord, weights: Weights) -> CompletionRequest:
    """Return the rollout service's request for a sample."""
    request, params = record.request, record.request.sampling_params
    prompt = request.prompt.token_ids
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
    scores_prompt = request.prompt_logprobs or request.topk_prompt_logprobs
    return CompletionRequest(
        model=weights.policy,
        min_weight_version=weights.version,
        prompt=prompt,
        n=request.num_samples,
        seed=record.seed,
        max_tokens=params.max_tokens or max(1, weights.max_len - len(prompt)),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        stop=[stop for stop in stops if isinstance(stop, str)],
        stop_token_ids=[stop for stop in stops if isinstance(stop, int)],
        ignore_eos=params.stop == [],
        logprobs=request.topk_sample_logprobs,
        prompt_logprobs=request.topk_prompt_logprobs if scores_prompt else None,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )


def sample_response(request: SampleRequest, choices: list[CompletionChoice]) -> bytes:
    """Encode the sequences of a request as Tinker's SampleResponse."""
    response = schema().SampleResponse()
    for choice in choices:
        assert choice.logprobs is not None and choice.token_ids is not None
        sequence = response.sequences.add()
        sequence.stop_reason = _STOP if choice.finish_reason == "stop" else _LENGTH
        sequence.tokens = array("i", choice.token_ids).tobytes()
        sequence.logprobs = array("f", choice.logprobs.token_logprobs).tobytes()
        if request.topk_sample_logprobs:
            rows = [
                [(int(name.removeprefix("token_id:")), logprob) for name, logprob in row.items()]
                for row in choice.logprobs.top_logprobs
            ]
            _fill(sequence.topk_sampled_logprobs, rows, request.topk_sample_logprobs)
    scored = choices[0].prompt_logprobs
    if scored is not None:
        unscored = _unscored(request, scored)
        if request.prompt_logprobs:
            response.prompt_logprobs = array("f", [nan] * unscored + scored.logprobs[unscored - 1 :]).tobytes()
        if request.topk_prompt_logprobs:
            pairs = [list(zip(*row, strict=True)) for row in zip(scored.top_ids, scored.top_logprobs, strict=True)]
            rows = [*([] for _ in range(unscored)), *pairs[unscored - 1 :]]
            _fill(response.topk_prompt_logprobs, rows, request.topk_prompt_logprobs)
    return response.SerializeToString()


def _unscored(request: SampleRequest, scored: PromptLogprobs) -> int:
    """Return how many tokens at the start of the prompt get no logprob. The first one never does."""
    last = request.prompt_logprobs_last_n
    return 1 if last is None else len(scored.logprobs) + 1 - last


def _fill(topk: Any, rows: list[list[tuple[int, float]]], k: int) -> None:
    """Fill a TopkLogprobs message with k places for each row."""
    places = [[*row[:k], *[_HOLE] * (k - len(row))] for row in rows]
    topk.k, topk.length = k, len(rows)
    topk.token_ids = array("i", (token for row in places for token, _ in row)).tobytes()
    topk.logprobs = array("f", (logprob for row in places for _, logprob in row)).tobytes()
