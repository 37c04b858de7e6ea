"""A process's tracing must not depend on the variables of whoever runs the tests."""

import pytest

from trackway.tracing.span_handle import install

_READ = (
    "MLFLOW_TRACKING_URI",
    "WANDB_API_KEY",
    "WANDB_BASE_URL",
    "WANDB_ENTITY",
    "WANDB_PROJECT",
    "WF_TRACE_SERVER_URL",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
)


@pytest.fixture(autouse=True)
def no_backend_from_outside(monkeypatch: pytest.MonkeyPatch):
    for name in _READ:
        monkeypatch.delenv(name, raising=False)
    yield
    install(None)
