"""What a span holds: capped, redacted, and never worth a rollout."""

import json
import math
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from trackway.tracing import Tracing, TracingSettings, add_event, tool_span, trajectory_span, truncate
from trackway.tracing.attributes import EVALUATION_SCORE
from trackway.tracing.span_handle import activated
from trackway.wire.chat import Message
from trackway.wire.trajectory import Tags

TAGS = Tags(experiment_name="e", step=1, sample_index=2, rollout_n=0)


class Recorded:
    """The spans of one trajectory, by name, once it has ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

    def __getitem__(self, name: str) -> ReadableSpan:
        return {span.name: span for span in self.exporter.get_finished_spans()}[name]


@contextmanager
def recording(redact: Callable[[str], str] | None = None, **settings: object) -> Iterator[Recorded]:
    recorded = Recorded()
    tracing = Tracing("agent", TracingSettings.model_validate(settings), recorded.exporter, redact)
    with activated(tracing), trajectory_span(TAGS, "t", "agent", [Message(role="user", content="pin 1234")], True):
        yield recorded
    tracing.shutdown(5)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


CIRCLE: dict[str, object] = {}
CIRCLE["self"] = CIRCLE


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Unprintable(), "[not shown: RuntimeError]"),
        (CIRCLE, "[not shown: ValueError]"),
        ({(1, 2): "x"}, "[not shown: TypeError]"),
        ({"a": 1.5, "b": [True, None]}, {"a": 1.5, "b": [True, None]}),
        ("\ud800 half a character", "[not shown: UnicodeEncodeError]"),
        (Message(role="user", content="#### 4"), {"role": "user", "content": "#### 4"}),
        ({"reward": math.nan, "text": "NaN"}, {"reward": "NaN", "text": "NaN"}),
        ([math.inf, -math.inf, "to Infinity"], ["Infinity", "-Infinity", "to Infinity"]),
    ],
)
def test_a_value_that_cannot_be_shown_says_so_and_raises_nothing(value: object, shown: object) -> None:
    with recording() as recorded, tool_span("t", {}, None) as span:
        span.outputs(value)
    assert json.loads(str((recorded["execute_tool t"].attributes or {})["agentic.outputs"])) == shown


def test_every_text_passes_the_redaction_before_it_is_cut() -> None:
    hide = "1234".__class__.replace
    with (
        recording(lambda text: hide(text, "1234", "****"), max_text_bytes=256) as recorded,
        pytest.raises(ValueError, match="1234"),
        tool_span("t", {"code": "1234", "nested": ["a 1234", 1234]}, None) as span,
    ):
        span.outputs({"text": "1234" * 100})
        add_event("retry", reason="the pin is 1234", attempt=1234)
        raise ValueError("wrong pin 1234")
    tool = recorded["execute_tool t"]
    assert json.loads(str((tool.attributes or {})["agentic.inputs"])) == {
        "code": "****",
        "nested": ["a ****", "****"],
    }
    outputs = json.loads(str((tool.attributes or {})["agentic.outputs"]))
    assert outputs == {"text": "*" * 256 + "[truncated 144 bytes]"}
    texts = [tool.status.description, *(value for event in tool.events for value in (event.attributes or {}).values())]
    assert not any("1234" in text for text in texts if isinstance(text, str))
    assert "1234" not in str((recorded["trajectory"].attributes or {})["agentic.inputs"])


@pytest.mark.parametrize("fails", [lambda text: str(1 / 0), lambda text: sys.exit(1)])
def test_a_redaction_that_fails_hides_the_text_instead_of_showing_it(fails: Callable[[str], str]) -> None:
    with recording(fails) as recorded, tool_span("t", {"code": "1234"}, None):
        pass
    assert json.loads(str((recorded["execute_tool t"].attributes or {})["agentic.inputs"])) == {
        "code": "[redaction failed]"
    }


def test_a_redaction_is_named_by_import_path() -> None:
    with recording(redact=None) as plain:
        pass
    tracing = Tracing("agent", TracingSettings(redact="builtins:ascii"), InMemorySpanExporter())
    assert tracing.redact is ascii
    assert "1234" in str((plain["trajectory"].attributes or {})["agentic.inputs"])


@pytest.mark.parametrize("path", ["nosuchmodule:f", "json:nosuchfunction", "json", "json:__name__", ""])
def test_a_redaction_that_is_not_there_is_an_error_at_once(path: str) -> None:
    with pytest.raises(ValueError, match=r"tracing\.redact: expected"):
        Tracing("agent", TracingSettings(redact=path))


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdef", 4, "abcd[truncated 2 bytes]"),
        ("aéé", 4, "aé[truncated 2 bytes]"),
        ("", 0, ""),
    ],
)
def test_a_cut_text_says_how_many_bytes_are_gone(text: str, limit: int, expected: str) -> None:
    assert truncate(text, limit) == expected


def test_a_number_that_is_not_finite_is_shown_by_its_name() -> None:
    with recording() as recorded, tool_span("t", {}, None) as span:
        span.set("grad_norm", math.nan)
        span.score(math.inf)
        span.event("clipped", norm=-math.inf)
    tool = recorded["execute_tool t"]
    shown = dict(tool.attributes or {})

    assert (shown["grad_norm"], shown[EVALUATION_SCORE]) == ("NaN", "Infinity")
    assert [dict(event.attributes or {}) for event in tool.events] == [{"norm": "-Infinity"}]


@pytest.mark.parametrize("character", ["a", "é", "\N{GRINNING FACE}"])
def test_texts_of_any_length_share_the_bytes_and_are_never_copied_whole(character: str) -> None:
    size = len(character.encode())
    long, longer = character * 2_000_000, character * 3_000_000
    with recording(max_text_bytes=1024) as spans:
        tracemalloc.start()
        try:
            with tool_span("t", {"a": long, "b": [longer, 1.5, math.nan], "c": "kept"}, None):
                pass
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    shown = json.loads(str(dict(spans["execute_tool t"].attributes or {})["agentic.inputs"]))
    share = 1024 // 4 // size  # "NaN" is a text too
    assert shown == {
        "a": f"{character * share}[truncated {(2_000_000 - share) * size} bytes]",
        "b": [f"{character * share}[truncated {(3_000_000 - share) * size} bytes]", 1.5, "NaN"],
        "c": "kept",
    }
    assert peak < 2_000_000
