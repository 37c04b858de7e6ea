"""The table of docs/guides/engines.md that says what engines do differently, and how to see each row in an engine."""

import json
from collections.abc import Awaitable, Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.vllm.vllm_runs import BLOCK, MAX_LEN, PROMPT, VOCAB, Weights, tokenizer
from trackway.learner.weight_proof import tensor_digests
from trackway.rollout.engines.protocol import Capability, Engine
from trackway.rollout.engines.remote import sglang
from trackway.rollout.engines.remote.engine import RemoteEngine
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams, StructuredOutputs

Observer = Callable[[Engine, Weights], Awaitable[str]]

OBSERVERS: dict[str, Observer] = {}
_FREE = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
_GUIDE = Path(__file__).parents[4] / "docs/guides/engines.md"


def cells() -> dict[str, dict[str, str]]:
    """Read the guide's table: row, engine, cell."""
    section = _GUIDE.read_text().partition("## Side by side\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    engines = [name.strip("`") for name in rows[0][1:]]
    return {row: dict(zip(engines, said, strict=True)) for row, *said in rows[2:]}


def row(name: str) -> Callable[[Observer], Observer]:
    """Registers what sees this row."""

    def register(observer: Observer) -> Observer:
        OBSERVERS[name] = observer
        return observer

    return register


@row("`top_k` with `top_p`")
async def _both(engine: Engine, weights: Weights) -> str:
    params = _FREE.model_copy(update={"top_k": 20, "top_p": 0.9})
    expected = {
        "`top_p` of what `top_k` keeps": lambda logits: _nucleus(_likeliest(logits, 20), 0.9),
        "each of the whole distribution": lambda logits: torch.minimum(_likeliest(logits, 20), _nucleus(logits, 0.9)),
    }
    return await _sampled_as(engine, weights, params, expected)


@row("`top_p` alone")
async def _top_p(engine: Engine, weights: Weights) -> str:
    most = sglang._MOST_CANDIDATES
    expected = {
        "of all tokens": lambda logits: _nucleus(logits, 0.99),
        f"of the {most} likeliest tokens": lambda logits: torch.minimum(_likeliest(logits, 5), _nucleus(logits, 0.99)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang, "_MOST_CANDIDATES", 5)  # the model has fewer tokens than candidates
        return await _sampled_as(engine, weights, _FREE.model_copy(update={"top_p": 0.99}), expected)


@row("`temperature` between 0 and 0.01")
async def _cold(engine: Engine, weights: Weights) -> str:
    prompt = _undecided(weights)
    params = SamplingParams(temperature=0.001, max_tokens=1, ignore_eos=True)
    expected = {"as it is": lambda logits: logits / 0.001, "counts as 0.01": lambda logits: logits / 0.01}
    return await _sampled_as(engine, weights, params, expected, prompt, within=0.05)


@row("`temperature` above 2")
async def _hot(engine: Engine, weights: Weights) -> str:
    params = _FREE.model_copy(update={"temperature": 3.0})
    try:
        return await _sampled_as(engine, weights, params, {"as it is": lambda logits: logits / 3.0})
    except TrackwayError as error:
        assert error.code is ErrorCode.INVALID_REQUEST
        return "refused"


@row("`seed`")
async def _seed(engine: Engine, weights: Weights) -> str:
    first, second = [(await engine.generate(PROMPT, _FREE, name)).token_ids for name in "ab"]
    return "repeats the tokens" if first == second else "ignored by default"


@row("longest prompt and response")
async def _longest(engine: Engine, weights: Weights) -> str:
    prompt = [5] * (MAX_LEN - 8)
    free = MAX_LEN - len(prompt) - len((await engine.generate(prompt, _FREE, "a")).token_ids)
    return f"`max_position_embeddings` - {free}" if free else "`max_position_embeddings`"


@row("`response_format`")
async def _guided(engine: Engine, weights: Weights) -> str:
    if Capability.STRUCTURED_OUTPUTS not in engine.capabilities:
        return "refused"
    grammar = StructuredOutputs.model_validate({"json": {"enum": ["red", "blue"]}})
    params = SamplingParams(max_tokens=60, seed=1, structured_outputs=grammar)
    made = await engine.generate(PROMPT, params, "a")
    assert json.loads(str(tokenizer().decode(made.token_ids[:-1]))) in ("red", "blue")
    assert isinstance(engine, RemoteEngine)
    by_default = type(engine)(engine.settings.model_copy(update={"engine_tokenizer": False}))
    guides = Capability.STRUCTURED_OUTPUTS in by_default.capabilities
    return "guides" if guides else "guides with `engine_tokenizer: true`"


@row("`prompt_logprobs`")
async def _scored(engine: Engine, weights: Weights) -> str:
    if Capability.PROMPT_LOGPROBS not in engine.capabilities:
        return "refused"
    prompt = [*([17, 19] * BLOCK), *PROMPT]
    with torch.inference_mode():
        logprobs = weights.model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    best = logprobs.topk(3)
    params = SamplingParams(max_tokens=1, temperature=0.5, top_k=2, prompt_logprobs=3)
    for name in "ab":  # the second time its prefix is cached
        scores = (await engine.generate(prompt, params, name)).prompt_logprobs
        assert scores is not None
        expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert scores.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert scores.top_ids == best.indices.tolist()
        assert [value for row in scores.top_logprobs for value in row] == pytest.approx(
            best.values.flatten().tolist(), abs=1e-4
        )
    return "scores"


@row("reuse of a common prefix")
async def _reuse(engine: Engine, weights: Weights) -> str:
    prompt = [*([23, 29] * BLOCK), 31, 37, 41]
    before = engine.stats().reused_tokens
    await engine.generate(prompt, _FREE, "a")
    told = (await engine.generate([*prompt, 5], _FREE, "b")).cached_tokens
    reused = engine.stats().reused_tokens - before
    assert told == reused, f"expected the generation to tell of {reused} reused tokens, got {told}"
    return {len(prompt): "every token", 2 * BLOCK: "whole blocks"}[reused]


@row("pieces of a stream")
async def _pieces(engine: Engine, weights: Weights) -> str:
    sizes = [len(piece.token_ids) async for piece in engine.stream(PROMPT, _FREE, "a")]
    return "16 tokens" if max(sizes) >= 16 else "a token"


@row("proof of weights")
async def _proof(engine: Engine, weights: Weights) -> str:
    proof = weights.proof.model_copy(update={"digests": tensor_digests(weights.folder)})
    await engine.load_weights(weights.folder, engine.version + 1, proof)
    found = engine.judgement
    assert found is not None and found.tokens > 0
    if not found.tensors:
        changes = isinstance(engine, RemoteEngine) and engine.server_digests is not None
        return "changes of digests, probes" if changes else "probes"
    return "all digests, probes" if found.tensors == found.tensors_published else "digests of some tensors, probes"


async def _sampled_as(
    engine: Engine,
    weights: Weights,
    params: SamplingParams,
    expected: dict[str, Callable[[torch.Tensor], torch.Tensor]],
    prompt: Sequence[int] = PROMPT,
    within: float = 1e-4,
) -> str:
    """The name of the only distribution whose logprobs the sampled tokens have."""
    made = await engine.generate(prompt, params, "a")
    ids = torch.tensor([[*prompt, *made.token_ids]])
    with torch.inference_mode():
        logits = weights.model(ids).logits[0, len(prompt) - 1 : -1].float()
    found: dict[str, float] = {}
    for name, change in expected.items():
        logprobs = change(logits).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        found[name] = (logprobs - torch.tensor(made.logprobs)).abs().max().item()
    fitting = [name for name, off in found.items() if off < within]
    assert len(fitting) == 1, f"expected one of these within {within}, got {found}"
    return fitting[0]


def _likeliest(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    return logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, order = logits.sort(descending=True)
    outside = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) >= top_p
    return logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)


def _undecided(weights: Weights) -> list[int]:
    """The prompt of two tokens after which the two likeliest are nearest to each other."""
    prompts = torch.tensor([*product(range(32, VOCAB, 4), repeat=2)])
    with torch.inference_mode():
        best = weights.model(prompts).logits[:, -1].topk(2).values
    return prompts[(best[:, 0] - best[:, 1]).argmin()].tolist()
