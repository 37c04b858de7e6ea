"""The attribute table of a trajectory's spans, as a backend receives it."""

import asyncio
import json
import random

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from trackway.tracing import (
    Tracing,
    TracingSettings,
    add_event,
    chat_span,
    extracted,
    inject,
    reward_span,
    rollout_trace_attr,
    rollout_trace_op,
    set_outcome,
    tool_span,
    trajectory_span,
    truncate,
    turn_span,
)
from trackway.tracing.span_handle import activated
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams, StructuredOutputs
from trackway.wire.trajectory import Tags, WeightSpan

TAGS = Tags(experiment_name="gsm8k", step=3, sample_index=17, rollout_n=2)


class Recorder:
    """A tracing whose spans can be looked at."""

    def __init__(self, **settings: object) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing("agent", TracingSettings.model_validate(settings), self.exporter)

    def spans(self) -> dict[str, ReadableSpan]:
        self.tracing.flush(5)
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def recorder():
    recorder = Recorder()
    with activated(recorder.tracing):
        yield recorder
    recorder.tracing.shutdown()


def root(record: bool = True, tags: Tags = TAGS):
    return trajectory_span(tags, "run/3/17/2", "tool_agent", [Message(role="user", content="2+2?")], record)


def test_the_root_carries_each_fact_once(recorder: Recorder) -> None:
    with root():
        pass
    attributes = recorder.spans()["trajectory"].attributes or {}
    expected = {
        "agentic.tag.experiment_name": "gsm8k",
        "agentic.tag.step": 3,
        "agentic.tag.sample_index": 17,
        "agentic.tag.rollout_n": 2,
        "agentic.tag.validate": False,
        "agentic.title": "s3/i17/n2",
        "agentic.group": "gsm8k/3/17",
        "agentic.kind": "trajectory",
        "agentic.trajectory": "run/3/17/2",
        "gen_ai.agent.name": "tool_agent",
        "agentic.service": "agent",
    }
    assert {key: attributes.get(key) for key in expected} == expected
    assert json.loads(str(attributes["agentic.inputs"])) == {"messages": [{"role": "user", "content": "2+2?"}]}


def test_the_root_is_a_true_root_linked_to_its_caller(recorder: Recorder) -> None:
    with root() as caller, root(tags=TAGS.model_copy(update={"rollout_n": 3})) as inner:
        assert inner.trace_id != caller.trace_id
    recorder.tracing.flush(5)
    [linked] = [span for span in recorder.exporter.get_finished_spans() if span.links]
    assert linked.parent is None
    assert format(linked.links[0].context.trace_id, "032x") == caller.trace_id


def test_spans_of_four_kinds_join_the_tree_over_headers(recorder: Recorder) -> None:
    headers: dict[str, str] = {}
    with root() as trajectory, turn_span(0):
        inject(headers)
    with extracted(headers), chat_span("tiny", SamplingParams(temperature=0.5)) as chat:
        chat.usage(40, 9)
        chat.weight_versions([WeightSpan(version=4, start=0, end=9)])
    with extracted(headers), tool_span("calculator", {"expression": "2+2"}, "call_0") as tool:
        tool.outputs({"text": "4"})
    with extracted(headers), reward_span("gsm8k") as reward:
        reward.score(1.0)
    spans = recorder.spans()
    turn = spans["turn 0"].get_span_context().span_id
    parents = {name: span.parent.span_id for name, span in spans.items() if span.parent}
    assert {format(span.get_span_context().trace_id, "032x") for span in spans.values()} == {trajectory.trace_id}
    assert parents["chat tiny"] == parents["execute_tool calculator"] == parents["reward"] == turn
    assert (spans["chat tiny"].attributes or {})["agentic.weight_version"] == "4"
    assert "gen_ai.output.type" not in (spans["chat tiny"].attributes or {})
    assert (spans["execute_tool calculator"].attributes or {})["agentic.inputs"] == '{"expression": "2+2"}'


def test_the_span_of_a_guided_generation_says_so(recorder: Recorder) -> None:
    guided = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))
    with root(), chat_span("tiny", guided):
        pass
    assert (recorder.spans()["chat tiny"].attributes or {})["gen_ai.output.type"] == "json"


def test_nothing_is_recorded_below_an_unsampled_root_in_any_process(recorder: Recorder) -> None:
    headers: dict[str, str] = {}
    with root(record=False) as trajectory, turn_span(0) as turn:
        inject(headers)
        assert (trajectory.recording, trajectory.trace_id, turn.recording) == (False, None, False)
    with extracted(headers), tool_span("calculator", {}, None):
        pass
    assert recorder.spans() == {}


def test_an_exception_marks_the_span_and_passes_on(recorder: Recorder) -> None:
    with pytest.raises(TrackwayError), root(), tool_span("calculator", {}, None):
        raise TrackwayError(ErrorCode.TOOL_FAILED, "it broke")
    spans = recorder.spans()
    for name in ("execute_tool calculator", "trajectory"):
        assert spans[name].status.status_code.name == "ERROR"
        assert (spans[name].attributes or {})["error.type"] == "tool_failed"


def test_events_and_the_outcome_tag_are_kept(recorder: Recorder) -> None:
    with root() as trajectory:
        add_event("instance_lost", tool="calculator")
        set_outcome(trajectory)
    span = recorder.spans()["trajectory"]
    assert [event.name for event in span.events] == ["instance_lost"]
    assert (span.attributes or {})["agentic.tag.outcome"] == "ok"


def test_a_long_text_is_cut_with_a_marker_that_counts_bytes() -> None:
    assert truncate("abcdef", 6) == "abcdef"
    assert truncate("abcdef", 4) == "abcd[truncated 2 bytes]"
    assert truncate("aéé", 4) == "aé[truncated 2 bytes]"


def test_a_long_text_leaves_the_keys_and_numbers_beside_it_readable() -> None:
    recorder = Recorder(max_text_bytes=256)
    with activated(recorder.tracing), root() as span:
        span.outputs({"reward": 1.0, "response_text": "x" * 1000, "stop_reason": "answered"})
    outputs = json.loads(str((recorder.spans()["trajectory"].attributes or {})["agentic.outputs"]))
    assert outputs == {"reward": 1.0, "response_text": "x" * 128 + "[truncated 872 bytes]", "stop_reason": "answered"}


def test_seeding_python_does_not_repeat_span_ids(recorder: Recorder) -> None:
    identities = set()
    for _ in range(2):
        random.seed(42)
        with root() as span:
            identities.add(span.trace_id)
    assert len(identities) == 2


def test_verls_decorator_traces_sync_and_async_calls_in_the_open_trajectory(recorder: Recorder) -> None:
    class Loop:
        @rollout_trace_op
        async def run(self, a: int, b: int = 2) -> int:
            return a + self.add(a, b)

        @rollout_trace_op
        def add(self, a: int, b: int) -> int:
            return a + b

    with rollout_trace_attr(sample_index=1, step=2, rollout_n=0):
        assert asyncio.run(Loop().run(5)) == 12
    spans = recorder.spans()
    run = next(span for name, span in spans.items() if name.endswith("Loop.run"))
    add = next(span for name, span in spans.items() if name.endswith("Loop.add"))
    assert (run.attributes or {})["agentic.inputs"] == '{"a": 5, "b": 2}'
    assert (run.attributes or {})["agentic.outputs"] == "12"
    assert add.parent is not None and add.parent.span_id == run.get_span_context().span_id


def test_verls_decorator_is_silent_inside_trace_false_and_speaks_after_it(recorder: Recorder) -> None:
    @rollout_trace_op
    def add(a: int) -> int:
        return a

    with pytest.raises(ValueError, match="by hand"), rollout_trace_attr(trace=False):
        add(1)
        raise ValueError("by hand")
    assert recorder.spans() == {}
    with rollout_trace_attr(step=1):
        add(2)
    assert len(recorder.spans()) == 2


def test_everything_works_untraced_when_nothing_is_active() -> None:
    with root() as span, turn_span(0), tool_span("t", {}, None) as tool:
        tool.outputs({"text": "4"})
        add_event("retry")
    assert (span.recording, span.trace_id) == (False, None)


def test_counts_say_what_was_exported_and_what_was_lost() -> None:
    recorder = Recorder()
    with activated(recorder.tracing), root(), turn_span(0):
        pass
    recorder.tracing.flush(5)
    stats = recorder.tracing.stats()
    assert (stats.ended, stats.dropped, stats.lost) == (2, 0, 0)
