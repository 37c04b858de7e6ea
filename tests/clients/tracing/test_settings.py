"""Where spans go, by the variables that MLflow, W&B and OpenTelemetry already have."""

import pytest
from pydantic import ValidationError

from trackway.tracing import TracingSettings
from trackway.wire.trajectory import TraceBackend

MLFLOW, WEAVE, OTLP = TraceBackend.MLFLOW, TraceBackend.WEAVE, TraceBackend.OTLP


@pytest.mark.parametrize(
    ("environment", "usable", "default"),
    [
        ({}, [], ()),
        ({"MLFLOW_TRACKING_URI": "http://m:5000"}, [MLFLOW], (MLFLOW,)),
        ({"MLFLOW_TRACKING_URI": ""}, [], ()),
        ({"WANDB_API_KEY": "k"}, [WEAVE], ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, [OTLP], (OTLP,)),
        ({"MLFLOW_TRACKING_URI": "http://m", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, [MLFLOW, OTLP], (MLFLOW,)),
    ],
)
def test_the_usual_variables_switch_backends_on_and_a_wandb_key_alone_does_not(
    environment: dict[str, str], usable: list[TraceBackend], default: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = TracingSettings()
    assert (settings.usable, settings.default_backends) == (usable, default)


def test_backends_behind_a_collector_need_its_address_and_nothing_of_their_own() -> None:
    settings = TracingSettings.model_validate({"collected": ["weave"], "otlp_endpoint": "http://c/v1/traces"})
    assert settings.usable == [WEAVE, OTLP]
    assert settings.sent_to([MLFLOW, WEAVE, OTLP]) == (MLFLOW, OTLP)
    assert settings.kept_by([OTLP]) == {OTLP, WEAVE}
    assert (settings.readers(OTLP), TracingSettings().readers(OTLP), settings.readers(MLFLOW)) == (
        (WEAVE,),
        (OTLP,),
        (MLFLOW,),
    )
    missing = TracingSettings.model_validate({"collected": ["weave"], "weave_api_key": "k"}).missing(WEAVE)
    assert missing == "trace backend weave needs a receiver: set OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "http://c:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/own"}, "http://c/own"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/x"}, "http://b/x"),
    ],
)
def test_the_collectors_address_follows_opentelemetrys_rule(
    environment: dict[str, str], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert TracingSettings().otlp_endpoint == endpoint


def test_otlp_headers_and_the_wandb_project_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=abc%20d,team=rl")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setenv("WANDB_PROJECT", "gsm8k")
    monkeypatch.setenv("WF_TRACE_SERVER_URL", "https://weave.example")
    settings = TracingSettings()
    assert settings.otlp_headers == {"x-key": "abc d", "team": "rl"}
    assert (settings.weave_project, settings.weave_url) == ("team/gsm8k", "https://weave.example")


def test_what_is_given_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://environment")
    assert TracingSettings(mlflow_uri="http://given").mlflow_uri == "http://given"


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [(MLFLOW, "MLFLOW_TRACKING_URI"), (WEAVE, "WANDB_API_KEY"), (OTLP, "OTEL_EXPORTER_OTLP_ENDPOINT")],
)
def test_a_backend_without_its_key_says_which_variable_to_set(backend: TraceBackend, remedy: str) -> None:
    missing = TracingSettings().missing(backend)
    assert missing is not None and f"set {remedy}" in missing


@pytest.mark.parametrize("project", ["gsm8k", "a/b/c"])
def test_a_weave_project_is_entity_and_project(project: str) -> None:
    with pytest.raises(ValidationError, match="entity/project"):
        TracingSettings(weave_project=project)


def test_the_key_shows_neither_in_print_nor_in_dumps() -> None:
    settings = TracingSettings.model_validate({"weave_api_key": "topsecret"})
    assert "topsecret" not in f"{settings!r}{settings}{settings.model_dump_json()}"
