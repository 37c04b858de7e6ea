"""What tests against the fake of SGLang ask and expect."""

import asyncio
from typing import Any

from tests.services.rollout.engines.remote.sglang import sglang_fake as fakes
from tests.services.rollout.engines.remote.sglang.sglang_fake import Fake
from tests.waiting import async_until
from trackway.rollout.engines.protocol import Generation
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.wire.rollout import SamplingParams
from trackway.wire.weights import Probe, WeightProof

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


def answer(seed: int, count: int, prompt: list[int] = PROMPT) -> list[int]:
    """What the fake's model says with these weights."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(fakes.next_token(seed, sequence))
    return sequence[len(prompt) :]


def proof(seed: int) -> WeightProof:
    """What a publisher of these weights says."""
    tokens = [3, 4, 5, 6]
    logprobs = [fakes.logprob(seed, token) for token in tokens[1:]]
    return WeightProof(probes=[Probe(token_ids=tokens, positions=[1, 2, 3], logprobs=logprobs)])


def params(count: int, **more: Any) -> SamplingParams:
    """For so many tokens."""
    return SamplingParams(max_tokens=count, **more)


async def in_flight(engine: SglangEngine, fake: Fake, request_id: str = "long") -> "asyncio.Task[Generation]":
    """A long request that has got some tokens."""
    before = len(fake.requests)
    task = asyncio.create_task(engine.generate(PROMPT, LONG, request_id))
    await async_until(lambda: len(fake.requests) > before and len(fake.requests[-1].output) >= 5)
    return task


def sent(fake: Fake, path: str) -> list[dict[str, Any]]:
    """Bodies of the calls of a route."""
    return [body for called, body in fake.calls if called == path]
