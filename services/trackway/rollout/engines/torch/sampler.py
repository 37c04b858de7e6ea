"""Samples tokens, with their logprobs under the sampling distribution.

One uniform number per row inverts the cumulative distribution, so a row's token depends only on its own generator and
not on the batch. The order is temperature, top_k, top_p (Holtzman et al. 2019), as in Hugging Face and vLLM.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trackway.rollout.engines.protocol import top_logprobs
from trackway.wire.rollout import SamplingParams, TopLogprobs

_BLOCK = 64
SMALLEST_TEMPERATURE = 1e-6
"""Smaller ones, by which logits would overflow, count as this. The likeliest token has all the probability there."""


class SampledTokens(NamedTuple):
    """One token and its logprob per row."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    """Empty for a row that does not ask for them."""


def uniforms(seed: int | None) -> Iterator[float]:
    """An endless stream of uniform numbers in [0, 1). Without a seed it differs each time."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed % 2**63)
    while True:
        yield from torch.rand(_BLOCK, generator=generator).tolist()


def sample(logits: Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]) -> SampledTokens:
    """Sample one token per row of `logits` [rows, vocab] (float32) with the row's uniform number.

    Temperature 0 takes the most likely token, with its logprob at temperature 1 and without top_k or top_p.
    """
    greedy = [row.temperature == 0 for row in params]
    logprobs = torch.log_softmax(_scaled(logits, params), -1)
    tokens = _invert(logprobs, uniform)
    if any(greedy):
        tokens = logits.argmax(-1).where(_column(greedy, logits)[:, 0], tokens)
    sampled, values = tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    return SampledTokens(sampled, values, _tops(logprobs, params, sampled, values))


def _tops(
    logprobs: Tensor, params: Sequence[SamplingParams], tokens: Sequence[int], values: Sequence[float]
) -> list[TopLogprobs]:
    """The most likely tokens of each row that asks for them."""
    tops: list[TopLogprobs] = [[] for _ in params]
    asking = [index for index, row in enumerate(params) if row.logprobs]
    if asking:
        most = min(max(params[index].logprobs for index in asking), logprobs.shape[-1])
        best = logprobs[asking].topk(most)
        for index, ids, found in zip(asking, best.indices.tolist(), best.values.tolist(), strict=True):
            candidates = zip(ids, found, strict=True)
            tops[index] = top_logprobs(candidates, tokens[index], values[index], params[index].logprobs)
    return tops


def _scaled(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    if any(row.temperature not in (0, 1) for row in params):
        logits = logits / _column([_divisor(row.temperature) for row in params], logits)
    cut = [index for index, row in enumerate(params) if row.temperature > 0 and (row.top_k > 0 or row.top_p < 1)]
    if not cut:
        return logits
    kept = _nucleus(logits[cut], [params[index] for index in cut])
    return logits.index_copy(0, torch.tensor(cut, device=logits.device), kept)


def _divisor(temperature: float) -> float:
    return 1.0 if temperature == 0 else max(temperature, SMALLEST_TEMPERATURE)


def _nucleus(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sets all logits to -inf except the top_k largest, then all beyond the smallest set that reaches top_p."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    top_k = _column([row.top_k if row.top_k > 0 else vocab for row in params], logits)
    ordered = ordered.masked_fill(torch.arange(vocab, device=logits.device) >= top_k, float("-inf"))
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    outside = before >= _column([row.top_p for row in params], logits)
    outside[:, 0] = False
    return logits.scatter(-1, order, ordered.masked_fill(outside, float("-inf")))


def _invert(logprobs: Tensor, uniform: Sequence[float]) -> Tensor:
    cdf = logprobs.exp().cumsum(-1)
    total = cdf[:, -1:]
    # Strictly below the total: rounding could otherwise pick a last token of probability 0.
    point = (_column(uniform, cdf) * total).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cdf, point, right=True)[:, 0].clamp(max=cdf.shape[-1] - 1)


def _column(values: Sequence[float] | Sequence[bool], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device)[:, None]
