"""The own spans of an agent's framework in the trace of its rollout."""

import pytest
from fastapi import FastAPI, Request, Response
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.services.agent.sessions.external_services import Serve
from tests.services.agent.sessions.test_examples import LIMITS, installed
from tests.services.agent.sessions.test_session import ANSWER
from tests.serving import served_in_thread

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.timeout(900)]


def receiver(spans: list[Span]) -> FastAPI:
    """An OTLP receiver that keeps what it gets."""
    app = FastAPI()

    @app.post("/v1/traces")
    async def traces(request: Request) -> Response:
        got = ExportTraceServiceRequest.FromString(await request.body())
        spans.extend(span for part in got.resource_spans for scope in part.scope_spans for span in scope.spans)
        return Response()

    return app


async def test_spans_of_pydantic_ai_are_below_the_sessions_root(serving: Serve) -> None:
    spans: list[Span] = []
    with served_in_thread(receiver(spans)) as url:
        external = installed("pydantic_ai_traced.py")
        external.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = url
        async with serving(external) as services:
            traced = await services.say(ANSWER, agent_name="external", limits=LIMITS, trace=True)
            services.model.begin_again()
            untraced = await services.say(ANSWER, agent_name="external", limits=LIMITS)

    assert (traced.error, untraced.error) == (None, None)
    assert {span.trace_id.hex() for span in spans} == {traced.trace_id}
    [agent] = [span for span in spans if span.parent_span_id.hex() == traced.span_id]
    [chat] = [span for span in spans if span.parent_span_id == agent.span_id]
    assert (agent.name, chat.name, len(spans)) == ("invoke_agent agent", "chat policy", 2)
