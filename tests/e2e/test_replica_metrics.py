"""Prometheus sees every replica of a service behind the one proxy."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.access_tokens import OPERATOR
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_one_scrape_shows_every_replica(deployment: Deployment) -> None:
    replicas = {replica.health.replica for replica in serve_api.scale(deployment, "reward", 2)}
    url = f"{deployment.base_url}/reward/replicas/metrics"
    stranger = httpx.get(url)
    answer = httpx.get(url, headers={"authorization": f"Bearer {OPERATOR}"}).raise_for_status()
    serve_api.scale(deployment, "reward", 1)

    found = {family.name: family.samples for family in text_string_to_metric_families(answer.text)}
    assert stranger.status_code == 401
    assert {sample.labels["replica"] for sample in found["trackway_in_flight"]} == replicas
    assert [found[f"trackway_replicas_{name}"][0].value for name in ("asked", "answered")] == [2.0, 2.0]
