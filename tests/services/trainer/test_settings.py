"""What a run's own process is told: URLs in a file, tracing and its secrets through the environment."""

import pytest
from pydantic import SecretStr

from trackway.tracing import TracingSettings
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.settings import TrainerSettings, handed_over, taken_over


@pytest.mark.parametrize("key", ["secret", None])
def test_a_worker_has_the_services_tracing_and_not_another_from_its_environment(monkeypatch, key: str | None):
    given = TracingSettings.model_validate(
        {
            "mlflow_uri": None,
            "weave_api_key": key,
            "weave_url": "http://weave",
            "weave_project": "me/p",
            "otlp_endpoint": "http://otlp/v1/traces",
            "otlp_headers": {"authorization": "Bearer x"},
            "spool_dir": "/spool",
            "max_text_bytes": 300,
            "redact": "json:dumps",
        }
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other")
    monkeypatch.setenv("WANDB_API_KEY", "other")

    monkeypatch.setenv("TRACKWAY_TOKEN", "other")
    variables = handed_over(given, SecretStr("token") if key else None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert taken_over() == given
    assert variables["TRACKWAY_TOKEN"] == ("token" if key else "")
    assert "secret" not in variables["TRACKWAY_WORKER_TRACING"]


def test_a_worker_started_by_hand_takes_the_environment(monkeypatch):
    monkeypatch.delenv("TRACKWAY_WORKER_TRACING", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mine")

    assert taken_over().mlflow_uri == "http://mine"


def test_the_services_that_make_spans_are_known_by_name(tmp_path):
    urls = TrainerSettings(base_url="http://here", reward_url="http://there/r").service_urls()

    assert urls.traced == {
        "agent": "http://here/agent",
        "rollout": "http://here/rollout",
        "tools": "http://here/tools",
        "reward": "http://there/r",
    }


def test_urls_of_a_run_from_before_there_were_so_many_are_read():
    old = ServiceUrls.model_validate({"agent_url": "http://a", "tools_url": "http://t", "weights_url": "/w"})

    assert old.traced == {"agent": "http://a", "tools": "http://t"}
