"""The part of the trace server that is ours: keys, projects, and OTLP's answer about rejected spans."""

from contextlib import AbstractContextManager

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pydantic import SecretStr

from trackway.tracing import SpanHandle, Tracing, TracingSettings, trajectory_span, turn_span
from trackway.tracing.span_handle import activated
from trackway.wire.trajectory import Tags

pytestmark = [pytest.mark.weave, pytest.mark.slow]

EMPTY = ExportTraceServiceRequest().SerializeToString()


def export(settings: TracingSettings, project: str | None, key: str | None, body: bytes = EMPTY) -> httpx.Response:
    headers = {"wandb-api-key": key, "project_id": project}
    known = {name: value for name, value in headers.items() if value is not None}
    return httpx.post(f"{settings.weave_url}/otel/v1/traces", content=body, headers=known, timeout=30)


def root() -> AbstractContextManager[SpanHandle]:
    tags = Tags(experiment_name="refused", step=1, sample_index=0, rollout_n=0)
    return trajectory_span(tags, "refused/1/0/0", "tool_agent", [], record=True)


@pytest.fixture
def key(weave_server: TracingSettings) -> str:
    assert weave_server.weave_api_key is not None
    return weave_server.weave_api_key.get_secret_value()


def test_spans_are_taken_with_the_key_and_a_project_only(weave_server: TracingSettings, key: str) -> None:
    assert export(weave_server, "team/project", key).status_code == 200
    assert export(weave_server, "team/project", None).status_code == 401
    assert export(weave_server, "team/project", "another").status_code == 401
    assert export(weave_server, None, key).status_code == 400
    assert export(weave_server, "project", key).status_code == 400
    assert export(weave_server, "team/project", key, body=b"no protobuf").status_code == 400


def test_calls_are_read_with_the_key_only(weave_server: TracingSettings, key: str) -> None:
    url, query = f"{weave_server.weave_url}/calls/stream_query", {"project_id": "team/project"}
    assert httpx.post(url, json=query, auth=("api", key)).status_code == 200
    assert httpx.post(url, json=query, auth=("api", "another")).status_code == 401


def test_a_wrong_key_refuses_the_spans_and_they_are_counted(weave_server: TracingSettings) -> None:
    tracing = Tracing("agent", weave_server.model_copy(update={"weave_api_key": SecretStr("another")}))
    with activated(tracing), root(), turn_span(0):
        pass
    assert tracing.shutdown(30)
    weave = tracing.stats().backends["weave"]
    assert (weave.exported, weave.refused) == (0, 2)


def test_a_span_whose_keys_form_no_tree_is_refused_and_counted_while_its_neighbours_are_taken(
    weave_server: TracingSettings,
) -> None:
    tracing = Tracing("agent", weave_server)
    with activated(tracing), root(), turn_span(0) as turn:
        turn.set("agentic.turn.index", 0)  # `agentic.turn` is a number already
    assert tracing.shutdown(30)
    weave = tracing.stats().backends["weave"]
    assert (weave.exported, weave.refused) == (1, 1)
