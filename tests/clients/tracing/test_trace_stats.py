"""What a trace weighs and what happened on its way, summed over processes."""

import asyncio

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from trackway.tracing import (
    TraceStats,
    Tracing,
    TracingSettings,
    add_incident,
    collect_trace_stats,
    current_trace_stats,
    set_outcome,
    tool_span,
    trajectory_span,
    turn_span,
)
from trackway.tracing.export.otlp import weight
from trackway.tracing.span_handle import activated
from trackway.wire.chat import Message
from trackway.wire.trajectory import Incident, Tags

TAGS = Tags(experiment_name="gsm8k", step=3, sample_index=17, rollout_n=2)


@pytest.mark.parametrize(
    ("sums", "receipt"),
    [
        (TraceStats(), ""),
        (TraceStats(120), "bytes=120"),
        (TraceStats(0, {Incident.RETRIED}), "incidents=retried"),
        (TraceStats(7, {Incident.TOOL_TIMEOUT, Incident.RETRIED}), "bytes=7,incidents=retried+tool_timeout"),
        (
            TraceStats(0, {Incident.RETRIED}, {(Incident.RETRIED, "tools"), (Incident.RETRIED, "judge.example")}),
            "incidents=retried,called=retried@judge.example+retried@tools",
        ),
    ],
)
def test_a_receipt_carries_the_sums_to_the_caller(sums: TraceStats, receipt: str) -> None:
    assert sums.receipt() == receipt
    caller = TraceStats(1000, {Incident.WEIGHTS_BEHIND})
    caller.add_receipt(receipt)
    assert caller == TraceStats(1000 + sums.bytes, {Incident.WEIGHTS_BEHIND, *sums.incidents}, sums.called)


@pytest.mark.parametrize(
    "receipt",
    [
        "bytes=-5",
        "bytes=x",
        "nonsense",
        "incidents=nosuch+",
        "=,=",
        "bytes=²",
        "called=nosuch@tools+retried@+retried@a b",
    ],
)
def test_a_receipt_that_is_not_understood_changes_nothing(receipt: str) -> None:
    caller = TraceStats(10)
    caller.add_receipt(receipt)
    assert caller == TraceStats(10)


@pytest.mark.anyio
async def test_work_in_tasks_counts_for_the_ledger_that_was_open_when_they_began() -> None:
    async def one(incident: Incident) -> None:
        add_incident(incident)

    with collect_trace_stats() as first:
        await asyncio.gather(one(Incident.RETRIED), one(Incident.TOOL_FAILED))
    with collect_trace_stats() as second:
        pass
    assert (first.incidents, second.incidents) == ({Incident.RETRIED, Incident.TOOL_FAILED}, set())
    assert current_trace_stats() is None


def test_the_services_that_were_called_are_kept_by_incident() -> None:
    with collect_trace_stats() as stats:
        add_incident(Incident.RETRIED, called="tools")
        add_incident(Incident.RETRIED, called="rollout")
        add_incident(Incident.REPLICA_LOST, called="reward")
        add_incident(Incident.PROMPT_CUT)
    assert stats.incident_services == {Incident.REPLICA_LOST: ["reward"], Incident.RETRIED: ["rollout", "tools"]}


def test_the_weight_of_a_span_is_about_its_size_in_otlp() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("agent", TracingSettings(), exporter)
    messages = [Message(role="user", content="Wie viele Äpfel? " * 40)]
    with activated(tracing), trajectory_span(TAGS, "r/3/17/2", "tool_agent", messages, True) as root:
        for index in range(3):
            with turn_span(index), tool_span("calculator", {"expression": "1+1" * 50}, f"call_{index}") as tool:
                tool.outputs({"text": "2" * 300})
                add_incident(Incident.RETRIED, url="http://127.0.0.1:8000/tools", attempt=1, error="ConnectError()")
        set_outcome(root)
    tracing.shutdown(5)
    spans = exporter.get_finished_spans()
    real = len(encode_spans(spans).SerializeToString())
    assert sum(map(weight, spans)) == root.trace_stats.bytes
    assert 0.9 < root.trace_stats.bytes / real < 1.1


@pytest.mark.parametrize(
    ("incidents", "failure", "outcome"),
    [
        ([], None, "ok"),
        ([Incident.RETRIED], None, "retried"),
        ([Incident.REPLICA_LOST, Incident.RETRIED], None, "replica_lost"),
        ([Incident.TOOL_TIMEOUT, Incident.TOOL_FAILED], None, "tool_timeout"),
        ([Incident.RETRIED], "error:unavailable", "error:unavailable"),
        ([], "aborted", "aborted"),
    ],
)
def test_the_outcome_is_how_it_failed_or_the_gravest_thing_it_survived(
    incidents: list[Incident], failure: str | None, outcome: str
) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("agent", TracingSettings(), exporter)
    with activated(tracing), trajectory_span(TAGS, "t", "agent", [], True) as root:
        for incident in incidents:
            add_incident(incident)
        set_outcome(root, failure)
    tracing.shutdown(5)
    [span] = exporter.get_finished_spans()
    attributes = span.attributes or {}
    assert attributes["agentic.tag.outcome"] == outcome
    assert attributes.get("agentic.tag.incidents") == (",".join(sorted(incidents)) or None)
    assert [event.name for event in span.events] == incidents
