"""Whatever a model can hold, its JSON says, and its own reader takes back: NaN and the infinities too."""

import functools
import importlib
import json
import math
import pkgutil
import types
from collections.abc import Collection, Iterator
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel, JsonValue, SecretStr, ValidationError
from typing_extensions import TypeAliasType, is_typeddict

import trackway.wire
import trackway.wire.tinker
from trackway.deploy.runs.demo import Summary
from trackway.deploy.terminal.progress import print_json
from trackway.run_config import RunConfig
from trackway.run_config.compose import leaves
from trackway.serving.routes import error_response
from trackway.trainer.loop.schedule import Progress
from trackway.trainer.run_state.folder import Beat
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.base import WireRequest
from trackway.wire.chat import ChatModelSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ChatTool, ClassifyRequest, CompletionRequest
from trackway.wire.reward import ScoreRequest
from trackway.wire.rollout import GenerateReply, GenerateRequest, SamplingParams, StructuredOutputs
from trackway.wire.service import BatchRequest, BatchResult
from trackway.wire.sessions import FinishedSession
from trackway.wire.tinker import LoadWeightsRequest
from trackway.wire.trainer import MetricsRow, RunInfo, RunState
from trackway.wire.trajectory import Reward, Trajectory

NUMBERS = [math.nan, math.inf, -math.inf]
ABOUT_THE_NUMBER = {"finite_number", "greater_than", "greater_than_equal", "less_than", "less_than_equal"}
TINKER_IDS = {
    "session_id": "s",
    "model_id": "s:train:0",
    "sampling_session_id": "s:sample:0",
    "request_id": "s:train:0:1",
    "tinker_path": "tinker://s:train:0/weights/w",
    "model_path": "tinker://s:train:0/weights/w",
}
SPECIAL: dict[type[BaseModel], dict[str, object]] = {
    ChatModelSettings: {"base_url": "https://host/v1"},
    ChatTool: {"function": {"name": "calculator"}},
    ClassifyRequest: {"input": "text"},
    FinishedSession: {"session_id": f"s-abcd-{0:032x}"},
    StructuredOutputs: {"json_object": True},
    **{
        model: {
            name: TINKER_IDS.get(name, "tinker://s:train:0/weights/w" if model is LoadWeightsRequest else "name")
            for name in model.model_fields
            if name in TINKER_IDS or name == "path"
        }
        for model in vars(trackway.wire.tinker).values()
        if isinstance(model, type) and issubclass(model, WireRequest) and model.__module__ == "trackway.wire.tinker"
    },
}
"""What is not free to choose, by model."""


def wire_models() -> Iterator[type[BaseModel]]:
    for module in pkgutil.walk_packages(trackway.wire.__path__, "trackway.wire."):
        for value in vars(importlib.import_module(module.name)).values():
            own = isinstance(value, type) and issubclass(value, BaseModel) and value.__module__ == module.name
            if own and not value.__pydantic_generic_metadata__["parameters"]:
                yield value


BATCHES = [BatchRequest[GenerateRequest], BatchResult[GenerateReply], BatchRequest[ScoreRequest], BatchResult[Reward]]
MODELS = [*wire_models(), *BATCHES, Progress, Beat, ServiceUrls, Summary]


def value_for(annotation: Any, number: float, around: tuple[type[BaseModel], ...] = ()) -> object:
    """A value of the type in which every float is this one; a list of a model `around` it is empty."""
    if isinstance(annotation, TypeAliasType):
        return "text" if annotation is JsonValue else value_for(annotation.__value__, number, around)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return value_for(arguments[0], number, around)
    if origin in (Union, types.UnionType):
        return value_for(
            max(arguments, key=lambda kind: "float" in str(kind) or kind is not type(None)), number, around
        )
    if origin is Literal:
        return arguments[0]
    if origin in (list, tuple):
        return [value_for(kind, number, around) for kind in arguments if kind is not Ellipsis and kind not in around]
    if origin is dict:
        return {value_for(arguments[0], number): value_for(arguments[1], number, around)}
    if is_typeddict(annotation):
        kinds = get_type_hints(annotation)
        return {name: value_for(kinds[name], number, around) for name in annotation.__required_keys__}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return fields_of(annotation, number, around)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return next(iter(annotation))
    return {float: number, int: 1, bool: True, str: "text", SecretStr: "text", datetime: "2026-01-01T00:00:00Z"}.get(
        annotation
    )


def fields_of(model: type[BaseModel], number: float, around: tuple[type[BaseModel], ...] = ()) -> dict[str, object]:
    """Every field that holds a float at any depth, and those that must be given."""
    if model is Trajectory:
        one_token = {"response_ids": [1], "response_mask": [1], "response_logprobs": [number]}
        return one_token | fields_with_floats(model, number, one_token.keys(), around)
    return SPECIAL.get(model, {}) | fields_with_floats(model, number, SPECIAL.get(model, {}).keys(), around)


def fields_with_floats(
    model: type[BaseModel], number: float, given: Collection[str], around: tuple[type[BaseModel], ...]
) -> dict[str, object]:
    around = (*around, model)
    return {
        field.alias or name: value_for(field.annotation, number, around)
        for name, field in model.model_fields.items()
        if name not in given and (field.is_required() or "nan" in repr(value_for(field.annotation, math.nan, around)))
    }


def strictly(text: str | bytes) -> Any:
    """The parsed JSON; bare NaN is none."""

    def refuse(constant: str) -> object:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_what_a_model_holds_is_what_its_reader_gets_or_the_model_refuses_to_hold_it(
    model: type[BaseModel], number: float
):
    try:
        held = model.model_validate(fields_of(model, number))
    except ValidationError as error:
        assert not math.isfinite(number)
        assert {problem["type"] for problem in error.errors()} <= ABOUT_THE_NUMBER
        return
    text = held.model_dump_json()

    assert strictly(text) is not None
    assert repr(model.model_validate_json(text)) == repr(held)  # NaN is not equal to itself


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize(
    "key", [key for key, value in leaves(RunConfig().model_dump()).items() if type(value) is float]
)
def test_a_value_of_the_configuration_is_kept_or_refused(key: str, number: float):
    tree: dict[str, Any] = {}
    *sections, name = key.split(".")
    functools.reduce(lambda section, part: section.setdefault(part, {}), sections, tree)[name] = number
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        assert key.rpartition(".")[2] in str(error)
        return

    assert repr(RunConfig.model_validate_json(config.model_dump_json())) == repr(config)


def test_the_models_with_floats_are_among_them():
    with_floats = {model.__name__ for model in MODELS if "nan" in repr(fields_of(model, math.nan))}

    assert {
        "RunInfo",
        "MetricsRow",
        "Trajectory",
        "Reward",
        "ToolResult",
        "Probe",
        "WeightProof",
        "Summary",
        "Progress",
    } <= with_floats


def test_metrics_that_are_not_finite_are_read_back():
    assert math.isnan(MetricsRow.model_validate_json('{"step": 1, "data": {"x": NaN}}').data["x"])


@pytest.mark.parametrize("body", [{"temperature": "NaN"}, {"temperature": math.inf}, {"temperature": math.nan}])
@pytest.mark.parametrize("model", [SamplingParams, CompletionRequest])
def test_a_request_cannot_ask_for_what_is_no_number(model: type[BaseModel], body: dict[str, object]):
    with pytest.raises(ValidationError, match="temperature"):
        model.model_validate({**fields_of(model, 1.0), **body})


def test_machine_output_of_the_command_is_json_that_every_parser_reads(capsys: pytest.CaptureFixture[str]):
    info = RunInfo(run="run", state=RunState.RUNNING, metrics={"actor/grad_norm": math.nan})

    print_json(info)
    of_a_model = strictly(capsys.readouterr().out)
    print_json({"worst": math.inf, "runs": [info.model_dump(mode="json")], "folder": Path("outputs")})
    of_a_mapping = strictly(capsys.readouterr().out)

    assert of_a_model["metrics"] == {"actor/grad_norm": "NaN"}
    assert (of_a_mapping["worst"], of_a_mapping["folder"]) == ("Infinity", "outputs")
    assert of_a_mapping["runs"][0]["metrics"] == {"actor/grad_norm": "NaN"}


def test_an_error_that_names_a_number_which_is_none_is_answered_as_itself():
    answer = error_response(TrackwayError(ErrorCode.CONFLICT, "expected a finite score", score=math.nan))

    assert strictly(bytes(answer.body))["error"]["detail"] == {"score": "NaN"}
