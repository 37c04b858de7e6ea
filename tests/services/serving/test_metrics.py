"""Request metrics by number."""

from prometheus_client import CollectorRegistry, generate_latest

from trackway.serving.metrics import RequestCounts


def test_requests_are_counted_and_their_seconds_summed_by_route() -> None:
    counts, registry = RequestCounts(), CollectorRegistry()
    registry.register(counts)
    counts.in_flight = 3
    for seconds in (0.001, 0.002, 400.0):
        counts.ended("/a", "POST", "200", seconds)
    counts.ended("/b", "GET", "404", 0.5)
    lines = generate_latest(registry).decode().splitlines()
    assert {
        "trackway_in_flight 3.0",
        'trackway_requests_total{method="POST",route="/a",status="200"} 3.0',
        'trackway_requests_total{method="GET",route="/b",status="404"} 1.0',
        'trackway_request_seconds_bucket{le="0.001",route="/a"} 1.0',
        'trackway_request_seconds_bucket{le="0.0025",route="/a"} 2.0',
        'trackway_request_seconds_bucket{le="300.0",route="/a"} 2.0',
        'trackway_request_seconds_bucket{le="+Inf",route="/a"} 3.0',
        'trackway_request_seconds_count{route="/a"} 3.0',
        'trackway_request_seconds_sum{route="/a"} 400.003',
        'trackway_request_seconds_count{route="/b"} 1.0',
    } <= set(lines)
