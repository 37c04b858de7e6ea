"""Numbers of requests: true is not 1."""

import importlib
import pkgutil
import types
from collections.abc import Iterator
from typing import Annotated, Union, get_args, get_origin

import pytest
from pydantic import BeforeValidator, Strict, ValidationError

import trackway.wire as wire
from trackway.wire.agent import GroupRequest
from trackway.wire.base import WireRequest
from trackway.wire.openai import CompletionRequest
from trackway.wire.rollout import GenerateRequest, SamplingParams

for module in pkgutil.walk_packages(wire.__path__, "trackway.wire."):
    importlib.import_module(module.name)


def requests(base: type[WireRequest] = WireRequest) -> Iterator[type[WireRequest]]:
    """Trackway's request models. Other test modules, which run in the same process, define requests of their own."""
    for model in base.__subclasses__():
        if model.__module__.startswith("trackway."):
            yield model
        yield from requests(model)


def takes_true(annotation: object, guards: tuple[object, ...] = ()) -> bool:
    """Whether a number stands somewhere in it and nothing before it refuses true."""
    guarded = any(isinstance(guard, BeforeValidator | Strict) for guard in guards)
    if annotation in (int, float):
        return not guarded
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return takes_true(inner, tuple(metadata))
    before = guards if get_origin(annotation) in (Union, types.UnionType) else ()
    return any(takes_true(part, before) for part in get_args(annotation))


def name_of(model: type[WireRequest]) -> str:
    return model.__name__


@pytest.mark.parametrize("model", sorted(set(requests()), key=name_of), ids=name_of)
def test_no_number_of_a_request_can_be_true(model: type[WireRequest]) -> None:
    fields = model.model_fields.items()

    assert [name for name, field in fields if takes_true(field.annotation, tuple(field.metadata))] == []


@pytest.mark.parametrize(
    ("model", "body", "place"),
    [
        (SamplingParams, {"max_tokens": True}, ("max_tokens",)),
        (SamplingParams, {"temperature": True}, ("temperature",)),
        (SamplingParams, {"seed": False}, ("seed",)),
        (SamplingParams, {"stop_token_ids": [True]}, ("stop_token_ids", 0)),
        (GenerateRequest, {"token_ids": [1], "context_start": False}, ("context_start",)),
        (GenerateRequest, {"token_ids": [1, True]}, ("token_ids", 1)),
        (CompletionRequest, {"model": "m", "prompt": "a", "logprobs": False}, ("logprobs",)),
    ],
)
def test_true_and_false_are_no_numbers(model: type[WireRequest], body: dict, place: tuple) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)

    assert [error["loc"] for error in refused.value.errors()] == [place]


def test_a_prompt_of_truth_values_is_no_prompt() -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"model": "m", "prompt": [1, True]})


@pytest.mark.parametrize("name", ["step", "n", "min_weight_version"])
def test_a_group_counts_in_numbers(name: str) -> None:
    row = {"data_source": "d", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}
    body = {"run": "r", "experiment_name": "e", "step": 1, "sample": row}

    with pytest.raises(ValidationError, match="expected a number, got true"):
        GroupRequest.model_validate({**body, name: True})
    with pytest.raises(ValidationError, match=r"rollouts\.0\n  expected a number, got false"):
        GroupRequest.model_validate({**body, "rollouts": [False]})
    assert GroupRequest.model_validate({**body, name: 1.0}).step == 1
