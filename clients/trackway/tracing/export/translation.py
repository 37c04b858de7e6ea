"""Translate a span's own facts into the attributes that each backend reads.

MLflow reads `mlflow.*`, and would store `gen_ai.*` messages a second time. Weave's calls read `weave.span.kind`,
`wandb.*` and `mlflow.spanInputs/Outputs`. Every other receiver gets the GenAI semantic conventions, release v0.1.0
(https://github.com/open-telemetry/semantic-conventions-genai), with `openinference.span.kind` for Arize Phoenix.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.util.types import AttributeValue
from pydantic import JsonValue

from trackway.tracing import attributes as names
from trackway.tracing.attributes import SpanKind
from trackway.tracing.context import OF_EVERY_SPAN
from trackway.tracing.conventions import objects_in
from trackway.tracing.export.chat_markdown import escaped
from trackway.wire.trajectory import TraceBackend

Attributes = dict[str, AttributeValue]

_KINDS: dict[SpanKind, tuple[str, str, str | None]] = {
    SpanKind.TRAJECTORY: ("AGENT", "agent", "invoke_agent"),
    SpanKind.TURN: ("CHAIN", "chain", None),
    SpanKind.CHAT: ("CHAT_MODEL", "llm", "chat"),
    SpanKind.TOOL: ("TOOL", "tool", "execute_tool"),
    SpanKind.REWARD: ("EVALUATOR", "evaluator", None),
    SpanKind.OPERATION: ("CHAIN", "chain", None),
    SpanKind.TRAIN_STEP: ("WORKFLOW", "chain", None),
    SpanKind.OPTIMIZER_STEP: ("TASK", "chain", None),
}
"""MLflow's span type, the kind of Weave and OpenInference, the GenAI operation."""

_GEN_AI_ALONE = (
    names.PROVIDER,
    names.TOOL_DEFINITIONS,
    names.SEED,
    names.RESPONSE_ID,
    names.STREAM,
    names.STOP_SEQUENCES,
    names.FIRST_CHUNK,
)
"""Attributes that MLflow and Weave's calls do not read, left out to save bytes."""


def translated(span: ReadableSpan, readers: Sequence[TraceBackend]) -> ReadableSpan:
    """The span as these backends read it."""
    own = dict(span.attributes or {})
    kind = SpanKind(str(own.pop(names.KIND, SpanKind.OPERATION)))
    resource = span.resource
    if tuple(readers) == (TraceBackend.OTLP,):  # MLflow makes tags of a resource, which each service would overwrite
        resource = _resource(str(own.pop(names.SERVICE, "")), str(own.pop(names.PROCESS, 0)))
    attributes: Attributes = {}
    for reader in readers:
        attributes |= _TRANSLATIONS[reader](own, kind)
    is_agent = kind is SpanKind.TRAJECTORY and TraceBackend.OTLP in readers
    events = list(span.events)
    if is_agent and names.EVALUATION_SCORE in attributes:
        result = {name: attributes.pop(name) for name in (names.EVALUATION_NAME, names.EVALUATION_SCORE)}
        events.append(Event(names.EVALUATION_RESULT, result, span.end_time))
    return ReadableSpan(
        name=f"invoke_agent {own.get(names.AGENT_NAME)}" if is_agent else span.name,
        context=span.context,
        parent=span.parent,
        resource=resource,
        attributes=attributes,
        events=events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


@lru_cache(maxsize=64)
def _resource(service: str, process: str) -> Resource:
    """The service and process of a batch's spans, sent once."""
    return Resource({"service.namespace": "trackway", "service.name": service, "process.pid": int(process)})


def _renamed(
    own: Attributes,
    kind: SpanKind,
    new_names: Mapping[str, str],
    tag_prefix: str,
    tag_value: Callable[[AttributeValue], AttributeValue] = lambda value: value,
) -> Attributes:
    attributes: Attributes = {}
    for key, value in own.items():
        if key.startswith(names.TAG):
            attributes[tag_prefix + key.removeprefix(names.TAG)] = tag_value(value)
        elif key not in _GEN_AI_ALONE and (kind is SpanKind.TRAJECTORY or key not in OF_EVERY_SPAN):
            attributes[new_names.get(key, key)] = value
    return attributes


_FOR_MLFLOW = {
    names.INPUTS: names.MLFLOW_INPUTS,
    names.OUTPUTS: names.MLFLOW_OUTPUTS,
    names.TITLE: names.MLFLOW_TRACE_NAME,
    names.GROUP: names.SESSION_ID,
}
_FOR_WEAVE = {
    names.INPUTS: names.MLFLOW_INPUTS,
    names.OUTPUTS: names.MLFLOW_OUTPUTS,
    names.TITLE: names.WEAVE_DISPLAY_NAME,
    names.GROUP: names.CONVERSATION_ID,
    names.WANDB_RUN: names.WANDB_RUN_ID,
}


_MESSAGES, _TEXTS = '{"messages": ', f'{{"{names.TEXTS}": '
"""A generation has exact texts, which MLflow does not draw as a conversation."""


def _mlflow(own: Attributes, kind: SpanKind) -> Attributes:
    attributes = _renamed(own, kind, _FOR_MLFLOW, names.MLFLOW_TAG, str)
    attributes[names.MLFLOW_SPAN_TYPE] = _KINDS[kind][0]
    if kind is SpanKind.CHAT:
        attributes[names.MLFLOW_COST] = "{}"
    for key in {names.MLFLOW_INPUTS, names.MLFLOW_OUTPUTS} & attributes.keys():
        if kind is SpanKind.CHAT:
            attributes[key] = str(attributes[key]).replace(_MESSAGES, _TEXTS, 1)
        elif kind is SpanKind.TRAJECTORY:
            attributes[key] = _escaped(str(attributes[key]))
    return attributes


def _escaped(text: str) -> str:
    """Return the JSON of inputs or outputs with messages that MLflow shows line by line."""
    value = _object(text)
    for message in (messages := objects_in(value.get("messages"))):
        if isinstance(content := message.get("content"), str):
            message["content"] = escaped(content)
    return _json(value) if messages else text


def _weave(own: Attributes, kind: SpanKind) -> Attributes:
    attributes = _renamed(own, kind, _FOR_WEAVE, names.WEAVE_ATTRIBUTE)
    _, attributes[names.WEAVE_KIND], operation = _KINDS[kind]
    if operation is not None:
        attributes[names.OPERATION] = operation
    if kind is SpanKind.CHAT:
        attributes[names.PROVIDER] = own.get(names.PROVIDER, names.PROVIDER_NAME)
    step = own.get(f"{names.TAG}step", own.get(names.TAG + names.TRAIN_STEP))
    if names.WANDB_RUN in own and isinstance(step, int):
        attributes[names.WANDB_RUN_STEP] = step
    is_trainers = kind in (SpanKind.TRAIN_STEP, SpanKind.OPTIMIZER_STEP)
    for key, value in own.items():
        measured = is_trainers and isinstance(value, int | float) and key != names.PROCESS
        if key == names.WEIGHT_VERSION or (measured and not key.startswith(names.TAG)):
            attributes[names.WEAVE_ATTRIBUTE + key.removeprefix("agentic.")] = value
    return attributes


def _gen_ai(own: Attributes, kind: SpanKind) -> Attributes:
    attributes = dict(own)
    _, openinference, operation = _KINDS[kind]
    if names.TRAJECTORY_ID in attributes:
        attributes[names.CONVERSATION_ID] = attributes.pop(names.TRAJECTORY_ID)
    if operation is None:  # Phoenix reads the others' kind from their operation
        attributes[names.OPENINFERENCE_KIND] = openinference.upper()
    else:
        attributes[names.OPERATION] = operation
    if kind is SpanKind.TOOL:
        attributes[names.TOOL_TYPE] = "function"
        for key, name in ((names.INPUTS, names.TOOL_ARGUMENTS), (names.OUTPUTS, names.TOOL_RESULT)):
            if key in attributes:
                attributes[name] = attributes.pop(key)
    if kind is SpanKind.TRAJECTORY or kind is SpanKind.CHAT:
        attributes.setdefault(names.PROVIDER, names.PROVIDER_NAME)
        _messages(attributes, kind)
    if kind is SpanKind.CHAT:
        attributes[names.RESPONSE_MODEL] = own[names.MODEL]
        attributes.setdefault(names.TOP_P, 1.0)
    if tools := objects_in(_loaded(own.get(names.TOOL_DEFINITIONS))):
        flat = [{"type": "function", **tool["function"]} for tool in tools if isinstance(tool.get("function"), dict)]
        attributes[names.TOOL_DEFINITIONS] = _json(flat)
    return attributes


def _messages(attributes: Attributes, kind: SpanKind) -> None:
    """Put the messages of inputs and outputs under their GenAI names, and the reward as an evaluation."""
    inputs, outputs = _object(attributes.get(names.INPUTS)), _object(attributes.get(names.OUTPUTS))
    asked, answered = objects_in(inputs.pop("messages", None)), objects_in(outputs.pop("messages", None))
    given = [_message(message, kind) for message in asked]
    instructions = [part for message in given if message["role"] == "system" for part in message["parts"]]
    reasons = attributes.get(names.FINISH_REASONS)
    reason = str(reasons[0]) if isinstance(reasons, Sequence) and reasons else "stop"
    made = {
        names.SYSTEM_INSTRUCTIONS: instructions,
        names.INPUT_MESSAGES: [message for message in given if message["role"] != "system"],
        names.OUTPUT_MESSAGES: [_message(message, kind) | _ending(message, reason) for message in answered],
    }
    attributes |= {name: _json(value) for name, value in made.items() if value}
    if isinstance(reward := outputs.pop("reward", None), int | float | str):
        attributes |= {names.EVALUATION_NAME: "reward", names.EVALUATION_SCORE: reward}
    for key, rest, messages in ((names.INPUTS, inputs, asked), (names.OUTPUTS, outputs, answered)):
        if rest:
            attributes[key] = _json(rest)
        elif messages:
            attributes.pop(key, None)


def _ending(message: Mapping[str, Any], reason: str) -> dict[str, str]:
    """The finish reason of an output message: deprecated, and Phoenix 20 drops messages without it."""
    return {"finish_reason": "tool_call" if message.get("tool_calls") else reason}


def _message(message: Mapping[str, Any], kind: SpanKind) -> dict[str, Any]:
    """The message in parts. A generation's text is exact, so its reasoning stays in it."""
    role, content = str(message.get("role")), message.get("content") or ""
    if role == "tool":
        part = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return {"role": role, "parts": [part]}
    text, reasoning = content if isinstance(content, str) else _json(content), ""
    if role == "assistant" and kind is SpanKind.TRAJECTORY:
        reasoning, _, text = text.rpartition("</think>")
    texts = (("reasoning", reasoning.removeprefix("<think>")), ("text", text))
    parts = [{"type": part, "content": value} for part, value in texts if value]
    return {"role": role, "parts": [*parts, *map(_call, objects_in(message.get("tool_calls")))]}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    named = function if isinstance(function, dict) else {}
    arguments = _loaded(named.get("arguments"))
    part = {"type": "tool_call", "id": call.get("id"), "name": str(named.get("name"))}
    return part | {"arguments": named.get("arguments") if arguments is None else arguments}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _loaded(text: object) -> JsonValue:
    """The JSON value of a text, or None for anything else."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _object(text: object) -> dict[str, JsonValue]:
    """The JSON object of a text. Empty for anything else."""
    value = _loaded(text)
    return value if isinstance(value, dict) else {}


_TRANSLATIONS: dict[TraceBackend, Callable[[Attributes, SpanKind], Attributes]] = {
    TraceBackend.MLFLOW: _mlflow,
    TraceBackend.WEAVE: _weave,
    TraceBackend.OTLP: _gen_ai,
}
