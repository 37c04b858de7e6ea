"""Request metrics by number."""

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trackway.serving.metrics import RequestMetrics, ServiceMetrics
from trackway.tracing import Tracing, TracingSettings

pytestmark = pytest.mark.anyio


async def test_requests_are_counted_and_timed_by_route() -> None:
    metrics = ServiceMetrics("counter", Tracing("counter", TracingSettings()))
    during: list[str] = []

    async def take(request: Request) -> Response:
        during.extend(metrics.text().decode().splitlines())
        if request.path_params["name"] == "broken":
            raise RuntimeError("broken")
        return Response(status_code=201)

    app = RequestMetrics(Starlette(routes=[Route("/a/{name}", take, methods=["POST", "BREW"])]), metrics)
    # Starlette's own 500 is sent before the error comes through.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for method, path in [
            ("POST", "/a/1"),
            ("POST", "/a/2"),
            ("BREW", "/a/1"),
            ("POST", "/a/broken"),
            ("GET", "/b"),
        ]:
            await client.request(method, path)
    lines = metrics.text().decode().splitlines()

    assert "trackway_in_flight 1.0" in during
    assert {
        "trackway_in_flight 0.0",
        'trackway_requests_total{method="POST",route="/a/{name}",status="201"} 2.0',
        'trackway_requests_total{method="other",route="/a/{name}",status="201"} 1.0',
        'trackway_requests_total{method="POST",route="/a/{name}",status="500"} 1.0',
        'trackway_requests_total{method="GET",route="unmatched",status="404"} 1.0',
        'trackway_request_seconds_bucket{le="+Inf",route="/a/{name}"} 4.0',
        'trackway_request_seconds_bucket{le="300.0",route="/a/{name}"} 4.0',
        'trackway_request_seconds_count{route="unmatched"} 1.0',
        'target_info{service_name="counter"} 1.0',
    } <= set(lines)
    bounds = [line.split('le="')[1].split('"')[0] for line in lines if 'seconds_bucket{le="' in line and "unma" in line]
    assert bounds[:3] == ["0.001", "0.0025", "0.005"] and bounds[-2:] == ["300.0", "+Inf"]
    assert [line for line in lines if "_created" in line or "otel_" in line] == []
