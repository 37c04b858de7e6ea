"""What crosses a process: the trace, where it goes, and nothing else."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from trackway.tracing import Tracing, TracingSettings, extracted, inject, token2text, tool_span, trajectory_span
from trackway.tracing.context import carried, current_target
from trackway.tracing.span_handle import activated
from trackway.wire.trajectory import Tags, TraceBackend, TraceTarget

TAGS = Tags(experiment_name="e", step=1, sample_index=2, rollout_n=0)
TARGET = TraceTarget(
    backends=(TraceBackend.WEAVE, TraceBackend.MLFLOW),
    mlflow_experiment_id="7",
    mlflow_run_id="abc",
    weave_project="team/gsm8k",
    wandb_run_id="xyz",
    token2text=False,
)


@pytest.fixture
def tracing():
    tracing = Tracing("agent", TracingSettings(), InMemorySpanExporter())
    with activated(tracing):
        yield tracing
    tracing.shutdown(5)


def headers_inside(target: TraceTarget | None) -> dict[str, str]:
    headers: dict[str, str] = {}
    with trajectory_span(TAGS, "t", "agent", [], True, target):
        inject(headers)
    return headers


@pytest.mark.parametrize("target", [TARGET, TraceTarget(), TraceTarget(weave_project="a b/c,=;%")])
def test_the_target_reaches_the_next_process_unchanged(tracing: Tracing, target: TraceTarget) -> None:
    with extracted(headers_inside(target)):
        assert current_target() == target


def test_a_trace_may_continue_with_another_target(tracing: Tracing) -> None:
    with extracted({"traceparent": SAMPLED, "baggage": "agentic.trajectory=t"}, TARGET):
        inject(headers := dict[str, str]())
    with extracted(headers):
        assert (current_target(), carried(None)) == (TARGET, {"agentic.trajectory": "t"})
    assert headers["traceparent"] == SAMPLED


def test_a_trace_without_a_target_carries_its_trajectory_and_agent(tracing: Tracing) -> None:
    assert headers_inside(None)["baggage"] == "agentic.trajectory=t,gen_ai.agent.name=agent"


@pytest.mark.parametrize(
    ("own", "traces", "expected"), [(True, False, False), (False, True, True), (False, None, False)]
)
def test_the_trace_decides_about_texts_and_the_service_where_it_is_silent(
    own: bool, traces: bool | None, expected: bool
) -> None:
    tracing = Tracing("rollout", TracingSettings(token2text=own))
    with activated(tracing), extracted(headers_inside_of(tracing, TraceTarget(token2text=traces))):
        assert token2text() is expected


def headers_inside_of(tracing: Tracing, target: TraceTarget) -> dict[str, str]:
    with activated(tracing):
        return headers_inside(target)


@pytest.mark.parametrize(
    "baggage",
    [
        "agentic.target=nonsense",
        "agentic.target=%7B%22mlflow_run_id%22%3A%22a%5Cnb%22%7D",
        "agentic.target=%7B%22backends%22%3A%5B%22nosuch%22%5D%7D",
        "=",
        "a=b,,;",
    ],
)
def test_baggage_of_others_is_taken_for_no_target(tracing: Tracing, baggage: str) -> None:
    with extracted({"baggage": baggage}):
        assert current_target() == TraceTarget()


SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("traceparent", "recorded"),
    [(SAMPLED, True), (SAMPLED[:-2] + "00", False), (SAMPLED[:-2] + "02", False), ("junk", False), (None, False)],
)
def test_a_callers_sampled_trace_is_continued_and_nothing_else_is_recorded(
    tracing: Tracing, traceparent: str | None, recorded: bool
) -> None:
    headers = {} if traceparent is None else {"traceparent": traceparent}
    with extracted(headers), tool_span("calculator", {}, None) as span:
        assert span.recording is recorded
    if recorded:
        assert span.trace_id == "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("record", "traceparent", "trace"),
    [
        (None, SAMPLED, "the caller's"),
        (None, None, "none"),
        (None, SAMPLED[:-2] + "00", "none"),
        (True, SAMPLED, "its own"),
        (True, None, "its own"),
        (False, SAMPLED, "none"),
    ],
)
def test_a_trajectory_continues_its_callers_trace_unless_it_is_told_otherwise(
    tracing: Tracing, record: bool | None, traceparent: str | None, trace: str
) -> None:
    headers = {} if traceparent is None else {"traceparent": traceparent}
    with extracted(headers), trajectory_span(TAGS, "t", "agent", [], record) as root:
        pass
    seen = {None: "none", SAMPLED.split("-")[1]: "the caller's"}.get(root.trace_id, "its own")
    assert seen == trace
