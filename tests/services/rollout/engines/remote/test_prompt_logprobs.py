"""Prompt logprobs of vLLM and SGLang are converted to arrays with k columns."""

import math

import pytest

from trackway.rollout.engines.remote.control import Call, TokenChunk, until_stop
from trackway.rollout.engines.remote.vllm import _scores
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import PromptLogprobs, SamplingParams


def entry(**found: tuple[int, float]) -> dict[str, dict[str, float]]:
    return {name[1:]: {"rank": rank, "logprob": logprob} for name, (rank, logprob) in found.items()}


def test_vllms_objects_become_rows_without_a_prompt_token_that_is_less_likely() -> None:
    among = entry(_8=(2, -1.0), _5=(1, -0.5))
    beyond = entry(_9=(40, -7.0), _6=(1, -0.25), _4=(2, -2.0))
    found = _scores({"prompt_logprobs": [None, among, beyond]}, [7, 8, 9], 2)
    assert found == PromptLogprobs(
        logprobs=[-1.0, -7.0], top_ids=[[5, 8], [6, 4]], top_logprobs=[[-0.5, -1.0], [-0.25, -2.0]]
    )


def test_vllms_prompt_tokens_alone_have_empty_rows() -> None:
    found = _scores({"prompt_logprobs": [None, entry(_8=(3, -1.5))]}, [7, 8], 0)
    assert found == PromptLogprobs(logprobs=[-1.5], top_ids=[[]], top_logprobs=[[]])
    assert _scores({"prompt_logprobs": None}, [7], 2) == PromptLogprobs(logprobs=[], top_ids=[], top_logprobs=[])


def test_vllms_value_for_no_number_is_none_of_them() -> None:
    [logprob] = _scores({"prompt_logprobs": [None, entry(_8=(1, -9999.0))]}, [7, 8], 0).logprobs
    assert math.isnan(logprob)


def test_a_piece_of_the_first_token_has_the_scores_which_must_be_finite() -> None:
    call = Call("r", [7, 8], SamplingParams(), frozenset(), 4)
    scores = PromptLogprobs(logprobs=[-1.0], top_ids=[[]], top_logprobs=[[]])
    chunk = TokenChunk([5, 6], [-0.5, -0.5], ["a", "b"], prompt_logprobs=scores)
    assert [until_stop(call, chunk, start, start + 1, 1)[0].prompt_logprobs for start in (0, 1)] == [scores, None]
    scores.logprobs = [math.nan]
    with pytest.raises(TrackwayError, match="expected finite logprobs") as raised:
        until_stop(call, chunk, 0, 1, 1)
    assert raised.value.code is ErrorCode.ENGINE_FAILED
