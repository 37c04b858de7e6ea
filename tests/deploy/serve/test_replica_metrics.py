"""One text for Prometheus from those of several replicas."""

from collections.abc import Sequence

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from trackway.deploy.serve.fan_out import ReplicaMetrics, merged, metrics_route
from trackway.serving import ServiceSettings, service_app
from trackway.wire.errors import ErrorBody

pytestmark = pytest.mark.anyio

SCRAPER = "scraper-0123456789abcdef"
FIRST = """# HELP calls_total Calls by tool
# TYPE calls_total counter
calls_total{tool="calculator"} 3.0
# HELP running Requests in the batch
# TYPE running gauge
running 2.0
# HELP seconds Seconds of a call
# TYPE seconds histogram
seconds_bucket{le="0.1"} 1.0
seconds_bucket{le="+Inf"} 2.0
seconds_count 2.0
seconds_sum 1.5
"""
SECOND = """# HELP calls_total Calls by tool
# TYPE calls_total counter
calls_total{tool="say \\"hi\\"\\n"} 1.0
# HELP running Requests in the batch
# TYPE running gauge
running 0.0
"""


def test_every_sample_says_whose_it_is_and_every_metric_is_described_once() -> None:
    assert (
        merged({"bbb": SECOND, "aaa": FIRST}, asked=3)
        == """# HELP calls_total Calls by tool
# TYPE calls_total counter
calls_total{replica="aaa",tool="calculator"} 3.0
calls_total{replica="bbb",tool="say \\"hi\\"\\n"} 1.0
# HELP running Requests in the batch
# TYPE running gauge
running{replica="aaa"} 2.0
running{replica="bbb"} 0.0
# HELP seconds Seconds of a call
# TYPE seconds histogram
seconds_bucket{le="0.1",replica="aaa"} 1.0
seconds_bucket{le="+Inf",replica="aaa"} 2.0
seconds_count{replica="aaa"} 2.0
seconds_sum{replica="aaa"} 1.5
# HELP trackway_replicas_asked Running replicas of this service
# TYPE trackway_replicas_asked gauge
trackway_replicas_asked 3.0
# HELP trackway_replicas_answered Replicas whose metrics are included
# TYPE trackway_replicas_answered gauge
trackway_replicas_answered 2.0
"""
    )


async def asked(settings: ServiceSettings, answers: Sequence[object] | None, token: str = "") -> httpx.Response:
    async def each(method: str, *args: object, within_s: float) -> Sequence[object]:
        assert (method, args) == ("exposition", ())
        if answers is None:
            raise TimeoutError
        return answers

    app = service_app("reward", settings, routers=[metrics_route(each)])
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        return await http.get("/replicas/metrics", headers=headers)


async def test_replicas_that_are_late_or_gone_are_left_out_and_counted() -> None:
    answer = await asked(ServiceSettings(), [TimeoutError(), ReplicaMetrics("aaa", FIRST), ConnectionError("gone")])

    found = {family.name: family.samples for family in text_string_to_metric_families(answer.text)}
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert [sample.labels for sample in found["running"]] == [{"replica": "aaa"}]
    counts = [found[f"trackway_replicas_{name}"][0].value for name in ("asked", "answered")]
    assert counts == [3.0, 1.0]


async def test_who_cannot_learn_the_replicas_in_time_is_told_to_ask_again() -> None:
    answer = await asked(ServiceSettings(), None)

    body = ErrorBody.model_validate(answer.json()["error"])
    assert (answer.status_code, body.code, body.retryable) == (503, "unavailable", True)
    assert body.message == "Ray Serve did not name this service's replicas within 5 s; ask again"


async def test_the_metrics_of_all_replicas_want_a_token_as_those_of_one_do() -> None:
    settings = ServiceSettings.model_validate(
        {"auth": {"tokens": {"prometheus": {"secret": "scraper-0123456789abcdef"}}}}
    )

    statuses = [(await asked(settings, [], token)).status_code for token in ("", "wrong", "scraper-0123456789abcdef")]

    assert statuses == [401, 401, 200]
