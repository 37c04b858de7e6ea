"""The messages of spans against the JSON schemas of the GenAI semantic conventions.

GENAI_CONVENTIONS is a checkout of https://github.com/open-telemetry/semantic-conventions-genai at v0.1.0, as CI has it.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from opentelemetry.sdk.trace import ReadableSpan

from tests.clients.tracing.export.example_spans import example_spans
from trackway.tracing.export.translation import translated
from trackway.wire.tracing import TraceBackend

CHECKOUT = os.environ.get("GENAI_CONVENTIONS")
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="GENAI_CONVENTIONS is not set")

SCHEMAS = {
    "gen_ai.input.messages": "gen-ai-input-messages.json",
    "gen_ai.output.messages": "gen-ai-output-messages.json",
    "gen_ai.system_instructions": "gen-ai-system-instructions.json",
    "gen_ai.tool.definitions": "gen-ai-tool-definitions.json",
}


def schema(name: str) -> dict[str, Any]:
    return json.loads(next(Path(CHECKOUT or "").rglob(name)).read_text())


def parts_of(value: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for item in value:
        yield from item.get("parts", [item])


def faults(span: ReadableSpan) -> list[str]:
    """Violations of a schema. A part must fit the definition of its own type, not only the generic one."""
    attributes: Mapping[str, object] = translated(span, [TraceBackend.OTLP]).attributes or {}
    found: list[str] = []
    for name in SCHEMAS.keys() & attributes.keys():
        whole, value = schema(SCHEMAS[name]), json.loads(str(attributes[name]))
        by_type = {
            kind["properties"]["type"]["const"]: {"$defs": whole["$defs"], "$ref": f"#/$defs/{title}"}
            for title, kind in whole["$defs"].items()
            if "const" in kind.get("properties", {}).get("type", {})
        }
        checks = [(whole, value), *((by_type[part["type"]], part) for part in parts_of(value))]
        for its, part in checks:
            found += [f"{name}: {error.message}" for error in Draft202012Validator(its).iter_errors(part)]
    return found


def test_the_schemas_find_nothing_to_complain_about() -> None:
    spans = example_spans()
    written = {name for span in spans.values() for name in translated(span, [TraceBackend.OTLP]).attributes or {}}
    assert SCHEMAS.keys() <= written
    assert [fault for span in spans.values() for fault in faults(span)] == []
