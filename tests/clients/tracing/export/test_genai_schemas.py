"""Exported spans against the GenAI semantic conventions: messages and tools by schema, attributes by name and type.

With GENAI_CONVENTIONS=FOLDER the originals of `genai_schemas.FILES` below that folder are asked too, as CI does with a
checkout, and compared with our statement of them. With GENAI_SPANS=FOLDER the bodies of OTLP requests are checked too.
"""

import gzip
import json
import os
import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.clients.tracing.export.example_spans import example_spans
from tests.clients.tracing.export.genai_schemas import FILES, FUNCTION, PARTS, SCHEMAS, Schema
from trackway.tracing import attributes as names
from trackway.tracing.export.translation import translated
from trackway.wire.trajectory import TraceBackend

Attributes = Mapping[str, Any]
"""Attributes after OTLP encoding and decoding."""

ORIGINALS = os.environ.get("GENAI_CONVENTIONS")
RECORDED = os.environ.get("GENAI_SPANS")

TYPES: Mapping[str, type] = {
    **dict.fromkeys(SCHEMAS, str),
    **{
        f"gen_ai.{name}": str
        for name in (
            "agent.name",
            "conversation.id",
            "evaluation.name",
            "operation.name",
            "output.type",
            "provider.name",
            "request.model",
            "response.id",
            "response.model",
            "tool.call.id",
            "tool.name",
            "tool.type",
        )
    },
    "gen_ai.conversation.compacted": bool,
    "gen_ai.evaluation.score.value": float,
    "gen_ai.request.max_tokens": int,
    "gen_ai.request.seed": int,
    "gen_ai.request.stop_sequences": list,
    "gen_ai.request.stream": bool,
    "gen_ai.request.temperature": float,
    "gen_ai.request.top_k": int,
    "gen_ai.request.top_p": float,
    "gen_ai.response.finish_reasons": list,
    "gen_ai.response.time_to_first_chunk": float,
    "gen_ai.usage.cache_read.input_tokens": int,
    "gen_ai.usage.input_tokens": int,
    "gen_ai.usage.output_tokens": int,
}
"""Type by attribute: its client-inference.md at commit ac48b1f9df15fdf281b96cccf15eb707e1fc1868, and
model/gen-ai/registry.yaml at 002c8a6ea1c8a42b14a4527db83b3cabcded610a."""

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "invoke_agent": ("gen_ai.agent.name", "gen_ai.conversation.id", "gen_ai.provider.name"),
    "chat": ("gen_ai.provider.name", "gen_ai.request.model"),
    "execute_tool": ("gen_ai.tool.name",),
}
"""Attributes of a span by its operation. Its name is the operation and the first or last of them."""


def exported() -> Iterator[tuple[str, Attributes]]:
    """The name and attributes of each span and of its events, as they leave for a GenAI receiver."""
    yield from read(encode_spans([translated(span, [TraceBackend.OTLP]) for span in example_spans().values()]))
    for path in sorted(Path(RECORDED).iterdir()) if RECORDED else ():
        body = path.read_bytes()
        yield from read(ExportTraceServiceRequest.FromString(gzip.decompress(body) if path.suffix == ".gz" else body))


def read(request: ExportTraceServiceRequest) -> Iterator[tuple[str, Attributes]]:
    for scope in (scope for part in request.resource_spans for scope in part.scope_spans):
        for item in (item for span in scope.spans for item in (span, *span.events)):
            yield item.name, {pair.key: plain(pair.value) for pair in item.attributes}


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def original(attribute: str) -> Schema:
    return json.loads(next(Path(ORIGINALS or "").rglob(FILES[attribute])).read_text())


def faults(attributes: Attributes, schemas: Mapping[str, Schema]) -> list[str]:
    return [
        f"{name}: {error.message}"
        for name in schemas.keys() & attributes.keys()
        for error in Draft202012Validator(schemas[name]).iter_errors(json.loads(attributes[name]))
    ]


def test_messages_tools_calls_and_results_fit_the_schemas() -> None:
    found: list[str] = []
    seen: set[str] = set()
    for _, attributes in exported():
        found += faults(attributes, SCHEMAS)
        functions = json.loads(attributes.get("gen_ai.tool.definitions", "[]"))
        found += [error.message for tool in functions for error in Draft202012Validator(FUNCTION).iter_errors(tool)]
        seen |= SCHEMAS.keys() & attributes.keys()
    assert (found, seen) == ([], {*SCHEMAS})


def test_attributes_have_the_conventions_names_and_types() -> None:
    spans = [*exported()]
    ours = {value for value in vars(names).values() if isinstance(value, str) and value.startswith("gen_ai.")}
    assert ours - TYPES.keys() == {"gen_ai.evaluation.result"}  # an event's name
    assert [
        (name, key, value)
        for name, attributes in spans
        for key, value in attributes.items()
        if key.startswith("gen_ai.") and type(value) is not TYPES.get(key)
    ] == []


def test_a_span_is_named_by_its_operation_and_has_what_the_operation_requires() -> None:
    operations = {(name, attributes.get("gen_ai.operation.name")): attributes for name, attributes in exported()}
    for (name, operation), attributes in operations.items():
        if operation is not None:
            required = REQUIRED[operation]
            assert attributes.keys() >= {*required}
            assert name in {f"{operation} {attributes[key]}" for key in required}
    assert {operation for _, operation in operations} == {None, *REQUIRED}


@pytest.mark.skipif(ORIGINALS is None, reason="GENAI_CONVENTIONS is not set")
def test_the_original_schemas_find_nothing_to_complain_about() -> None:
    schemas = {attribute: original(attribute) for attribute in FILES}
    assert [fault for _, attributes in exported() for fault in faults(attributes, schemas)] == []


@pytest.mark.skipif(ORIGINALS is None, reason="GENAI_CONVENTIONS is not set")
@pytest.mark.parametrize("attribute", FILES)
def test_our_statement_refuses_what_the_original_refuses_and_nothing_else(attribute: str) -> None:
    theirs, ours = Draft202012Validator(original(attribute)), Draft202012Validator(SCHEMAS[attribute])
    verdicts = [(value, theirs.is_valid(value), ours.is_valid(value)) for value in mutants(example(attribute))]
    assert [value for value, accepted, ours_accepts in verdicts if accepted is not ours_accepts] == []
    refused = sum(not accepted for _, accepted, _ in verdicts)
    print(f"{attribute}: {len(verdicts)} values, {refused} refused by both")
    assert 0 < refused < len(verdicts)


def example(attribute: str) -> list[dict[str, Any]]:
    """A value that has every kind of part, or of tool."""
    parts = [{key: filler(schema) for key, schema in part["properties"].items()} for part in PARTS]
    if attribute == "gen_ai.system_instructions":
        return parts[:2]
    if attribute == "gen_ai.tool.definitions":
        tool = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}}
        return [tool, {"type": "web_search", "name": "search", "max_uses": 5}]
    message = {"role": "assistant", "name": "solver", "parts": parts}
    return [message | ({"finish_reason": "stop"} if attribute == "gen_ai.output.messages" else {})]


def filler(schema: Schema) -> object:
    return schema.get("const", {"type": "other"} if "properties" in schema else "text")


VALUES = (None, True, 0, 1.5, "", "text", "generic", "other", [], {}, ["text"], {"type": "text"}, {"type": 3})


def mutants(value: list[dict[str, Any]]) -> Iterator[Any]:
    """The value with each one place changed, and with two to four random places changed."""
    yield from (value, *VALUES)
    yield from (changed for path in places(value) for changed in changes(value, path))
    choice = random.Random(0)
    for _ in range(1000):
        mutant: Any = value
        for _ in range(choice.randint(2, 4)):
            mutant = choice.choice([*changes(mutant, choice.choice([*places(mutant)]))]) if [*places(mutant)] else value
        yield mutant


def places(value: object, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, item in items:
        yield (*above, key)
        yield from places(item, (*above, key))


def changes(value: Any, path: tuple[Any, ...]) -> Iterator[Any]:
    """Copies of the value without the item at the path, and with another one in its place."""
    for replacement in (..., *VALUES):
        copy = deepcopy(value)
        around = copy
        for key in path[:-1]:
            around = around[key]
        if replacement is ...:
            del around[path[-1]]
        else:
            around[path[-1]] = replacement
        yield copy
